"""An Experiment is a value: what is asked, apart from how it runs (an Execution) and from what comes back.

    from bench import Experiment, run
    result = run(Experiment(task="digits", alpha=(0.1,), methods=("ekfac", "ekfac@damping=1e-4")))

It stands in every record, and is read from a file: TOML with the same names, or a `run.json`, which is the same run
again, settings included. bench/runner.py runs it.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np

from bench.arguments import DEFAULT_METHODS, SPLITS, check_device, cluster_options, task_words
from bench.methods import SETTINGS
from bench.schema import (
    AtLeastOne,
    AtLeastThree,
    Count,
    DescribedMethod,
    ExperimentRecord,
    Fraction,
    FractionOrAll,
    Seed,
)
from retrain.errors import UsageError
from retrain.outputs import LOSS, OUTPUTS
from retrain.reference import FULL, REFERENCES
from retrain.safe_files import SafeFileError, read_json, read_text, validate
from retrain.store import default_cache
from retrain.subsets import SCHEMES, STARTS, STREAMS
from retrain.task import Task
from retrain.tasks import load_task
from retrain.units import Plan, choose_device


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is asked. Every list makes one experiment more: seeds x shares x alphas, each with every method."""

    task: str = "digits"  # a file of retrain/tasks, a file of yours, or package.module:Class
    task_options: Mapping[str, Any] = field(default_factory=dict)  # of the task: what `--set TASK.OPTION=` sets
    # As bench/methods.py parses them, or as a record describes them (a mapping: name, label, options).
    methods: Sequence[str | Mapping[str, Any]] = DEFAULT_METHODS
    settings: str = "auto"  # tuned, library, paper or default; auto: tuned where the task has been tuned
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # method -> option -> value, of all variants
    alpha: Sequence[Fraction] = (0.1,)  # alpha_retrain: share of the attributed examples that each subset keeps
    alpha_attribution: Sequence[FractionOrAll] = ()  # share of the training set that is attributed; empty: the task's
    seeds: Sequence[Seed] = (1,)  # of the base model, the subsets and their retraining
    subsets: AtLeastThree = 100  # that models are retrained on, for each seed and alpha
    scheme: str = "fixed"  # each subset keeps the same number; or "bernoulli", "balanced" (of each class)
    stream: str = "report"  # which subsets: those that are reported, or those that settings are chosen on
    replicates: AtLeastOne | None = None  # retrains per subset, for the noise ceiling; None: the task's
    replicated_subsets: AtLeastThree | None = None  # only the first so many are replicated
    initialisation: str = "shared"  # or "fresh", "replayed": see retrain/subsets.py
    query_split: str = "report"  # or "tune", "all": every fifth query is kept for choosing settings
    queries: AtLeastOne | Sequence[Count] | None = None  # the first so many of the split, or these of the task's
    output: str = LOSS  # of the queries: or margin, probability: retrain/outputs.py
    reference: str = FULL  # models that methods look at: the base model, or attributed, subset: retrain/reference.py
    checkpoints: Sequence[AtLeastOne] = (1,)  # base models that each method's scores are averaged over, a row a number

    def __post_init__(self) -> None:
        for name in ("methods", "alpha", "alpha_attribution", "seeds", "checkpoints"):
            given = getattr(self, name)
            values = (given,) if isinstance(given, str | int | float | Mapping) else given
            plain = [one.item() if isinstance(one, np.generic) else one for one in values]
            object.__setattr__(self, name, tuple(plain if name == "methods" else dict.fromkeys(plain)))
        if isinstance(self.queries, Sequence):
            object.__setattr__(self, "queries", tuple(dict.fromkeys(self.queries)))
        for name, choices in (
            ("settings", SETTINGS), ("scheme", SCHEMES), ("stream", tuple(STREAMS)), ("query_split", SPLITS),
            ("initialisation", STARTS), ("reference", REFERENCES), ("output", OUTPUTS),
        ):  # fmt: skip
            if getattr(self, name) not in choices:
                raise UsageError(f'{name} is "{getattr(self, name)}"; available: {", ".join(choices)}')
        try:
            validate(self.to_json(), FIELDS, "experiment")
        except SafeFileError as error:
            raise UsageError(str(error)) from None
        if not self.methods or not self.alpha or not self.seeds:
            raise UsageError("an experiment needs at least one method, one alpha and one seed")

    def to_json(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def build_task(self) -> Task:
        return load_task(self.task, **self.task_options)

    def shares(self, task: Task) -> Sequence[float]:
        """Of the training set: how much is attributed."""
        return self.alpha_attribution or (task.default_alpha_attribution,)

    def plans(self, task: Task, seed: int, alpha_attribution: float) -> list[Plan]:
        """One an alpha."""
        names = ("scheme", "replicated_subsets", "initialisation", "stream")
        known = {name: getattr(self, name) for name in names} | {"num_subsets": self.subsets, "seed": seed}
        known |= {"alpha_attribution": alpha_attribution, "replicates": self.replicates or task.default_replicates}
        return [Plan(alpha=alpha, **known) for alpha in self.alpha]


# What msgspec checks of an Experiment: its fields as they are declared, and methods as a record describes them.
_TYPES = get_type_hints(Experiment, include_extras=True) | {"methods": Sequence[str | DescribedMethod]}
FIELDS = msgspec.defstruct("FIELDS", list(_TYPES.items()))


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How it runs: where, on what, and what is done again. None of it changes a number."""

    device: str = "auto"  # cpu, cuda, cuda:1; auto: a GPU where there is one
    cache: str = field(default_factory=default_cache)  # the folder of models, losses and scores
    jobs: Mapping[str, Any] = field(default_factory=dict)  # cluster, jobs, slurm, timeout_min, collect
    keep_scores: str = "auto"  # cache score matrices: always, never, or up to 1 GiB
    force: bool = False  # retrain and score again, whatever is cached
    rescore: bool = False  # score again, and keep the retrains
    progress: bool = True  # bars on stderr

    def job_options(self, name: str) -> dict[str, Any]:
        """Of a batch of jobs that is called so."""
        return {"name": name, "progress": self.progress, **self.jobs}

    def scoring_jobs(self) -> dict[str, Any]:
        """Methods run one at a time on a CPU unless --jobs says otherwise: beside each other they would slow down."""
        jobs = dict(self.jobs)
        if jobs.get("cluster") == "local" and jobs.get("jobs") is None and choose_device(self.device).type == "cpu":
            jobs["jobs"] = 1
        return jobs


def read_experiment(path: str | Path) -> Experiment:
    """From a TOML file with Experiment's names, or from a run.json, whose settings are taken as they were."""
    path = Path(path)
    if path.suffix == ".json":
        record = validate(read_json(path, follow_links=True), ExperimentRecord, path)
        content = record["experiment"]
        described = record.get("config", {}).get("methods")
        content = {**content, "methods": described} if isinstance(described, list) else content
    else:
        content = _toml(path)
    known = {f.name for f in fields(Experiment)}
    if unknown := sorted(set(content) - known):
        raise UsageError(
            f'{path} says "{unknown[0]}", which no experiment has; its names are {", ".join(sorted(known))}'
        )
    try:
        return Experiment(**content)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _toml(path: Path) -> dict[str, Any]:
    try:
        content = msgspec.toml.decode(read_text(path, follow_links=True))
        json.dumps(content, allow_nan=False)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{path} is no TOML: {error}") from None
    except (TypeError, ValueError) as error:  # dates, nan and inf
        raise UsageError(f"{path} holds what no experiment has: {error}") from None
    return content


def experiment_of(arguments: argparse.Namespace) -> Experiment:
    """The Experiment that a command line asks for: its file's, changed by the options beside it."""
    file = getattr(arguments, "experiment", None)
    kept = read_experiment(file).to_json() if file else {}
    given = asked_for(arguments, kept.get("task", "auto"))
    for name in ("task_options", "options") if given["task"] == kept.get("task") else ():
        given[name] = {**kept[name], **given[name]}
    if not {**kept, **given}.get("alpha"):
        raise UsageError(
            "--alpha is needed: the share of the attributed examples that each subset keeps, e.g. --alpha 0.1"
        )
    return Experiment(**{**kept, **given})


def asked_for(arguments: argparse.Namespace, task: str = "auto") -> dict[str, Any]:
    """The fields of an Experiment that the command line names; `task` is what it is where --task is not given."""
    asked, task_options, others = task_words(arguments, task)
    names = {f.name for f in fields(Experiment)} - {"task", "task_options", "options"}
    given = {name: value for name, value in vars(arguments).items() if name in names and value is not None}
    return {**given, "task": asked, "task_options": task_options, "options": others}


def execution_of(arguments: argparse.Namespace) -> Execution:
    check_device(arguments.device)
    names = ("keep_scores", "force", "rescore")
    chosen = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    jobs = cluster_options(arguments) if hasattr(arguments, "cluster") else {}
    for name in ("force", "rescore"):
        if jobs.get("collect") and chosen.get(name):
            raise UsageError(f"--{name} makes things again and --collect starts nothing; leave one of them out")
    return Execution(device=arguments.device, cache=arguments.cache, jobs=jobs, **chosen)
