"""From words to values: the Experiment that a command line asks for, and how it is to run."""

import argparse
from typing import Any

from bench.experiment import Execution, Experiment, read_experiment
from retrain.command import check_device, cluster_options, task_words
from retrain.errors import UsageError


def experiment_of(arguments: argparse.Namespace) -> Experiment:
    """The Experiment that a command line asks for: its file's, changed by the options beside it."""
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
        "replicated_subsets", "initialisation", "queries", "query_split", "reference", "checkpoints",
    ):  # fmt: skip
        value = getattr(arguments, field, None)
        if value is not None:
            given[field] = value
    return given


def execution_of(arguments: argparse.Namespace) -> Execution:
    check_device(arguments.device)
    names = ("keep_scores", "force", "rescore")
    chosen = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    jobs = cluster_options(arguments) if hasattr(arguments, "cluster") else {}
    for name in ("force", "rescore"):
        if jobs.get("collect") and chosen.get(name):
            raise UsageError(f"--{name} makes things again and --collect starts nothing; leave one of them out")
    return Execution(device=arguments.device, cache=arguments.cache, jobs=jobs, **chosen)
