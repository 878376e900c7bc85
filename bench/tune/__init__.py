"""Methods at many settings against one ground truth: `python -m bench.tune`, and its `sweep` and `budget` (sweep.py).

A cell is one setting, scored for every alpha; a cell that diverges is a cell without LDS, with its reason and its loss
traces. Each is cached by itself, so an interrupted command goes on where it was.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import bench.metrics as metrics
import bench.schema as schema
from baselines.method import Method
from bench.experiment import Execution, Experiment
from bench.ground_truth import GroundTruth
from bench.methods import MethodSpec, variants_of
from bench.records import without_nan
from bench.rows import undefined_reason
from bench.runner import Session
from bench.scoring import ONCE, MethodFailedError, Prediction, Scorer
from retrain.errors import UsageError
from retrain.jobs import run_units
from retrain.reference import FULL, SUBSET
from retrain.units import groups_of


class SettingsGrid:
    """An experiment of one seed and share with its ground truth; its methods play no part."""

    def __init__(self, experiment: Experiment, execution: Execution):
        self.session = Session(replace(experiment, methods=("random",), options={}), execution)
        self.options, self.settings, self.execution = experiment.options, experiment.settings, execution
        self.reference = experiment.reference
        self.task, self.store = self.session.task, self.session.store
        (self.block,) = self.session.blocks
        self.seed, self.alpha_attribution = self.block
        self.plans = self.session.plans(*self.block)
        self.failed: dict[str, str] = {}  # key of scores -> why there are none
        self.truths: list[GroundTruth] = []

    def retrain(self) -> None:
        found = self.session.retrain()
        self.truths = [found[self.seed, self.alpha_attribution, plan.alpha] for plan in self.plans]
        if any(len(truth.subsets) < plan.num_subsets for truth, plan in zip(self.truths, self.plans, strict=True)):
            raise UsageError("the ground truth is not complete; run the same command without --collect")

    def refuse_skipped(self, methods: Iterable[Method]) -> None:
        """Before anything is retrained."""
        for method in methods:
            if reason := method.skip(self.task):
                raise UsageError(f"{method.name} cannot run on {self.task.name}: {reason}")

    def method(self, name: str, /, **options: Any) -> Method:
        """With the task's own settings, then the experiment's, then these; of two, those chosen for raw scores."""
        return variants_of(MethodSpec(name, options, label=name), self.task, self.options, self.settings)[0].method

    def scorer(self, method: Method) -> Scorer:
        question = self.session.question(*self.block).of(method, self.plans[0], self.reference)
        if question.reference is not None and question.reference.kind == SUBSET and len(self.plans) > 1:
            raise UsageError(f"--reference {SUBSET} has models of their own at every alpha; take one --alpha at a time")
        if method.extra_retrains()[0] and not method.extra_retrains()[1] and len(self.plans) > 1:
            raise UsageError(f"{method.name} retrains at the alpha that is asked for; take one --alpha at a time")
        return Scorer(question, method, self.store, self.execution.device, self.execution.keep_scores)

    def losses(self, scorer: Scorer, position: int = 0) -> np.ndarray:
        """(subsets, queries) of the scorer's question, at the alpha of that position."""
        return self.truths[position].mean()[:, scorer.question.query_indices()]

    def within(self, position: int = 0) -> metrics.GroupCounts | None:
        """What the subsets of an alpha hold of each group, on a task that has groups."""
        groups = groups_of(self.task, self.plans[position].attributed(self.task))
        return None if groups is None else metrics.GroupCounts.of(self.truths[position].masks, groups)

    def prepare(self, methods: Sequence[Method]) -> None:
        """All of these settings at once where several jobs were asked for; else each is made when its turn comes."""
        jobs = self.execution.scoring_jobs()
        if jobs.get("cluster", "inline") == "inline" or jobs.get("jobs") == 1:
            return
        scorers = [self.scorer(method) for method in methods]
        units = [unit for scorer in scorers if not why_diverged(scorer) for unit in scorer.missing(self.plans)]
        if units:
            name = f"{self.task.name} settings"
            report = run_units(units, self.store, name=name, progress=self.execution.progress, **{**ONCE, **jobs})
            self.failed |= report.failed

    def predictions(self, scorer: Scorer) -> list[Prediction]:
        """One a plan. What ran away once is not tried again: it would, and in the same words."""
        try:
            if reason := why_diverged(scorer) or self.failed.get(self.store.key("scores", scorer.config)):
                raise MethodFailedError(reason)
            return scorer.make(self.plans, progress=False, traceback=self.execution.jobs.get("traceback", False))
        except (RuntimeError, FloatingPointError) as error:
            raise MethodFailedError(why_diverged(scorer) or str(error)) from error

    def score(self, method: Method, swept: dict[str, Any]) -> dict[str, Any]:
        """LDS raw and normalised (the mean over alphas), seconds, loss traces; a reason where the method fails."""
        scorer, cell = self.scorer(method), dict(swept)
        try:
            predictions = self.predictions(scorer)
        except MethodFailedError as error:
            nothing = {"lds": None, "lds_normalised": None}
            return {**cell, **nothing, "reason": str(error).splitlines()[0], "traces": traces_of(scorer)}
        found: dict[str, list[metrics.LDS]] = {"": [], "_normalised": []}
        for position, prediction in enumerate(predictions):
            losses = self.losses(scorer, position)
            for kind, values in (("", prediction.raw), ("_normalised", prediction.normalised)):
                if values is not None:
                    found[kind].append(metrics.linear_datamodelling_score(losses, values))
            if math.isnan(found[""][-1].lds):
                cell["reason"] = f"undefined for every query: {undefined_reason(losses, prediction.raw)}"
        for name, (kind, scores) in itertools.product(("lds", "ci_low", "ci_high"), found.items()):
            cell[name + kind] = float(np.mean([getattr(one, name) for one in scores])) if scores else None
        return without_nan({**cell, **cost_of(predictions[0].record), "traces": traces_of(scorer)})

    def describe(self) -> dict[str, Any]:
        experiment = self.session.experiment
        question = self.session.question(*self.block)
        return {
            "split": experiment.query_split,
            "stream": experiment.stream,
            "num_queries": len(question.query_indices()),
            "task": self.task.name,
            "protocol": self.task.protocol,
            "alpha": self.plans[0].alpha if len(self.plans) == 1 else [plan.alpha for plan in self.plans],
            "alpha_attribution": self.alpha_attribution,
            "seed": self.seed,
            "num_subsets": self.plans[0].num_subsets,
            "replicates": self.plans[0].replicates,
            "replicated_subsets": self.plans[0].replicated_subsets,
            **({"scheme": experiment.scheme} if experiment.scheme != "fixed" else {}),
            **({"reference": self.reference} if self.reference != FULL else {}),
            "task_config": self.task.config,
        }


def cost_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """A cell's seconds, and what the method says of its chains."""
    told = {key: value for key, value in record["diagnostics"].items() if key in ("rhat", "ess", "mixing")}
    return {"seconds": record["fit_seconds"] + record["score_seconds"], **told}


def traces_of(scorer: Scorer) -> list[list[float]]:
    """(chains, draws): the mean training loss of every chain, of diverged ones too; empty without chains."""
    entry = scorer.store.read("scores", scorer.config)
    if entry is not None and "mean_loss_trace" in entry.arrays:
        traces = entry.arrays["mean_loss_trace"]
    elif (diverged := scorer.divergence()) is not None:
        traces = diverged[1]
    else:
        return []
    # What ran away further could not be read back.
    return np.asarray(traces, dtype=np.float64).clip(-schema.LARGEST_NUMBER, schema.LARGEST_NUMBER).tolist()


def why_diverged(scorer: Scorer) -> str:
    """What an attempt at these scores that ran away said; empty where none did."""
    diverged = scorer.divergence()
    return "" if diverged is None else diverged[0]


@dataclass(frozen=True)
class Outcome:
    """What a command has to show and to keep."""

    grid: SettingsGrid
    result: dict[str, Any]
    path: Path  # of the record
    text: str  # the table
    remarks: Sequence[str] = ()  # what has no number, and why
    problems: Sequence[str] = ()  # what went wrong
    tuned: tuple[Path, dict[str, Any]] | None = None  # the settings that were chosen, in a file of their own
