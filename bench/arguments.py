"""From words to values: the arguments that commands about methods share, and the Experiment they ask for."""

import argparse
from collections.abc import Sequence
from typing import Any

from retrain.command import at_least, check_device, cluster_options, task_words
from retrain.errors import UsageError

SPLITS = ("tune", "report", "all")
DEFAULT_METHODS = ("bif", "ekfac", "trak", "gradsim", "random")


def add_method_arguments(parser: argparse.ArgumentParser, default: Sequence[str] = DEFAULT_METHODS) -> None:
    """Which methods, with which settings; bench/variants.py has the spelling."""
    add = parser.add_argument
    add(
        "--methods",
        nargs="+",
        metavar="[LABEL=]METHOD[@OPTION=VALUE,...]",
        help=f"files of baselines/, a file of yours, or package.module:Class (default: {' '.join(default)})",
    )
    add_settings_argument(parser)


def add_settings_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--settings",
        choices=("auto", "tuned", "library", "paper", "default"),
        help="whose settings methods get (default: tuned where the task has been tuned)",
    )


def add_query_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--queries", type=at_least(1), help="only the first so many queries of the split")
    parser.add_argument("--query-split", choices=SPLITS, help="which queries (default: report)")


# ---- from words to values ----


def experiment_of(arguments: argparse.Namespace) -> Any:
    """The Experiment that a command line asks for: its file's, changed by the options beside it."""
    from bench.experiment import Experiment, read_experiment

    if getattr(arguments, "experiment", None):
        kept = read_experiment(arguments.experiment).to_json()
        given = asked_for(arguments, kept["task"])
        for name in ("task_options", "options") if given["task"] == kept["task"] else ():
            given[name] = {**kept[name], **given[name]}
        return Experiment(**{**kept, **given})
    given = asked_for(arguments)
    if not given.get("alpha"):
        raise UsageError(
            "--alpha is needed: the share of the attributed examples that each subset keeps, e.g. --alpha 0.1"
        )
    return Experiment(**given)


def asked_for(arguments: argparse.Namespace, task: str = "auto") -> dict[str, Any]:
    """The fields of an Experiment that the command line names; `task` is what it is where --task is not given."""
    name, task_options, others = task_words(arguments, task)
    given: dict[str, Any] = {"task": name, "task_options": task_options, "options": others}
    for field in (
        "methods", "settings", "alpha", "alpha_attribution", "seeds", "subsets", "scheme", "replicates",
        "replicated_subsets", "initialisation", "queries", "query_split",
    ):  # fmt: skip
        value = getattr(arguments, field, None)
        if value is not None:
            given[field] = value
    return given


def execution_of(arguments: argparse.Namespace) -> Any:
    from bench.experiment import Execution

    check_device(arguments.device)
    names = ("keep_scores", "force", "rescore")
    chosen = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    jobs = cluster_options(arguments) if hasattr(arguments, "cluster") else {}
    return Execution(device=arguments.device, cache=arguments.cache, jobs=jobs, **chosen)
