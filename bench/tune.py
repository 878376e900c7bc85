"""Choose every method's settings by one rule, on queries and on subsets that are never reported.

    python -m bench.tune --task digits                                # every method that declares a grid
    python -m bench.tune --task cifar10 --alpha 0.1 0.5 --methods ekfac trak bif --tries 20
    python -m bench.lds --task digits --alpha 0.1 --settings tuned    # what was chosen is used
    python -m bench.tune sweep --task digits --alpha 0.1              # the paper's grid of BIF settings
    python -m bench.tune sweep --alpha 0.1 --grid gamma=1e3,1e4 n_beta=100,1000   # any other
    python -m bench.tune budget --alpha 0.1 --methods bif long=bif@draws=2500 trak@ridge=0  # LDS against what is spent

Each method's file declares a small grid of what matters (`Method.grid`). Every method gets the same number of settings
(`--tries`), its defaults first and the rest in an order that a seed decides. Where a decimal number of the best was
varied, all else equal, and nothing beyond it was tried, ten times or a tenth of it is tried as well, up to four
settings; whole numbers (draws, checkpoints) are budgets and are not followed. What
`--set METHOD.OPTION=VALUE` gives is kept and not tuned. A setting's LDS is the mean over the alphas and seeds asked
for, on the `tune` queries and on subsets of a stream of their own. On a task with groups it is LDS within groups, and
one alpha is tuned at a time, at the models and subsets that `--reference` and `--scheme` ask for. The best by raw LDS
and the best by normalised LDS are chosen separately; settings within 0.01 of the best that a paired 95 % interval
cannot tell from it count as ties, and the cheapest of them is taken, or the best of those that take within a tenth of
its seconds. The record keeps the whole grid.

A sweep scores every cell on the `tune` queries and on subsets of their own, keeps the loss traces, survives cells that
diverge (their LDS is null), and measures the best cell once on the `report` queries and subsets. A budget curve cuts
one run's stored loss traces after more and more draws, without sampling again; TRAK is scored anew for each projection
and ensemble size. Each setting is cached by itself, so an interrupted command goes on where it was.
"""

import argparse
import contextlib
import itertools
import math
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bench.metrics as metrics
import bench.schema as schema
from baselines.bif.covariance import covariance
from baselines.method import Method, available_methods, load_method
from bench.arguments import (
    RUNS,
    Parser,
    add_cluster_arguments,
    add_plan_arguments,
    add_settings_argument,
    add_task_arguments,
    at_least,
    check_out,
    one_of_each,
    report,
    run_cli,
)
from bench.experiment import Execution, Experiment, execution_of, experiment_of
from bench.ground_truth import GroundTruth
from bench.methods import TUNED_FORMAT, MethodSpec, build_variants, check_named, tuned_file, variants_of
from bench.metrics import MINIMUM_SUBSETS
from bench.metrics.intervals import mean_of_defined
from bench.prediction import subset_sums
from bench.publish import compare
from bench.records import command_line, digest_of, provenance, replace_record, without_nan
from bench.rows import all_cores, undefined_reason
from bench.runner import Session
from bench.scoring import ONCE, MethodFailedError, Prediction, Scorer
from bench.tables import SCORE_KINDS, in_place_of, interval, number, setting_text, table
from retrain.errors import UsageError
from retrain.jobs import run_units
from retrain.progress import bar
from retrain.reference import FULL, REFERENCES, SUBSET
from retrain.units import groups_of

TRIES = 12
FURTHER = 4  # settings beyond the grid
EDGE_FACTOR = 10.0
TIE = 0.01  # of LDS: what is behind by more is no tie, however little the tuning queries decide
SAME_SECONDS = 1.1  # what a clock cannot tell apart
CHOSEN_BY = ("raw", "normalised")
TUNED_FIELDS = ("task", "protocol", "alphas", "alpha_attribution", "seeds", "run_id", "commit", "code", "device")
# The paper's grid (app:hparam-sweep).
PAPER_GRID = ("burn_in=0,100", "n_beta=100,300,1000,3000", "gamma=1000,3000,10000,30000,100000")
BUDGET_METHODS = ("bif", "trak")
TRAK_PROJECTIONS = (128, 512, 2048, 8192)
TRAK_CHECKPOINTS = (1, 2, 4)


# ---- one setting against the ground truth ----


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
        units = [unit for scorer in scorers if not scorer.divergence()[0] for unit in scorer.missing(self.plans)]
        if units:
            jobs = {"name": f"{self.task.name} settings", "progress": self.execution.progress, **ONCE, **jobs}
            self.failed |= run_units(units, self.store, **jobs).failed

    def predictions(self, scorer: Scorer) -> list[Prediction]:
        """One a plan. What ran away once is not tried again: it would, and in the same words."""
        try:
            if reason := scorer.divergence()[0] or self.failed.get(self.store.key("scores", scorer.config)):
                raise MethodFailedError(reason)
            return scorer.make(self.plans, progress=False, traceback=self.execution.jobs.get("traceback", False))
        except (RuntimeError, FloatingPointError) as error:
            raise MethodFailedError(scorer.divergence()[0] or str(error)) from error

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
        experiment, plan = self.session.experiment, self.plans[0]
        return {
            "split": experiment.query_split,
            "stream": experiment.stream,
            "num_queries": len(self.session.question(*self.block).query_indices()),
            "task": self.task.name,
            "protocol": self.task.protocol,
            "alpha": plan.alpha if len(self.plans) == 1 else [plan.alpha for plan in self.plans],
            "alpha_attribution": self.alpha_attribution,
            "seed": self.seed,
            **{name: getattr(plan, name) for name in ("num_subsets", "replicates", "replicated_subsets")},
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
    entry, traces = scorer.store.read("scores", scorer.config), scorer.divergence()[1]
    if entry is not None and "mean_loss_trace" in entry.arrays:
        traces = entry.arrays["mean_loss_trace"]
    # What ran away further could not be read back.
    return np.asarray(traces, dtype=np.float64).clip(-schema.LARGEST_NUMBER, schema.LARGEST_NUMBER).tolist()


@dataclass(frozen=True)
class Outcome:
    """What a command has to show and to keep."""

    grid: SettingsGrid
    result: dict[str, Any]
    name: str  # of the record
    text: str  # the table
    remarks: Sequence[str] = ()  # what has no number, and why
    problems: Sequence[str] = ()  # what went wrong
    tuned: tuple[Path, dict[str, Any]] | None = None  # the settings that were chosen, in a file of their own


# ---- which settings are tried ----


def settings_to_try(method: Any, seed: int, fixed: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """The defaults, then the crossed grid in an order that the seed decides; options in `fixed` stay as they are."""
    grids = [method.grid] if isinstance(method.grid, Mapping) else list(method.grid)
    crossed = [dict(zip(grid, values, strict=True)) for grid in grids for values in itertools.product(*grid.values())]
    order = np.random.default_rng([7, seed]).permutation(len(crossed))
    seen: list[dict[str, Any]] = [{}]
    yield {}
    for place in order:
        options = {name: value for name, value in crossed[place].items() if name not in fixed}
        changed = {name: value for name, value in options.items() if getattr(method, name) != value}
        if changed not in seen:
            seen.append(changed)
            yield options


def beyond(method: Any, best: Mapping[str, Any], tried: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The neighbours of the best setting along every number, where nothing that far out was tried, all else equal."""

    def whole(options: Mapping[str, Any]) -> dict[str, Any]:
        return {name: options.get(name, getattr(method, name)) for name in names}

    names = sorted({name for options in tried for name in options})
    here = whole(best)
    for name in names:
        value = here[name]
        if not isinstance(value, float) or not value > 0:
            continue  # whole numbers are budgets (draws, projections), 0 leaves the choice to the method
        others = [other for other in map(whole, tried) if {**other, name: value} == here]
        values = [other[name] for other in others if other[name] != value]
        if not values:
            continue  # it was never varied
        if value > max(values):
            yield {**best, name: value * EDGE_FACTOR}
        elif value < min(v for v in values if v > 0):
            yield {**best, name: value / EDGE_FACTOR}


@dataclass
class Tried:
    """One setting, with what it came to in every block (seed, alpha)."""

    options: dict[str, Any]
    seconds: float = math.nan
    reason: str = ""
    predictions: dict[str, list[np.ndarray]] = field(default_factory=lambda: {kind: [] for kind in CHOSEN_BY})
    lds: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(CHOSEN_BY))
    diagnostics: dict[str, Any] = field(default_factory=dict)


def try_settings(blocks: Sequence[Any], name: str, options: dict[str, Any]) -> Tried:
    """Scores one setting on every block's tune queries and subsets."""
    tried = Tried(options, seconds=0.0)
    values: dict[str, list[float]] = {kind: [] for kind in CHOSEN_BY}
    for grid in blocks:
        try:
            scorer = grid.scorer(grid.method(name, **options))
            predictions = grid.predictions(scorer)
        except (RuntimeError, FloatingPointError, UsageError) as error:
            tried.reason = str(error).splitlines()[0]
            tried.lds = dict.fromkeys(CHOSEN_BY)
            return tried
        tried.diagnostics = cost_of(predictions[0].record)
        tried.seconds += tried.diagnostics.pop("seconds")
        for position, prediction in enumerate(predictions):
            losses, within = grid.losses(scorer, position), grid.within(position)
            for kind, made in (("raw", prediction.raw), ("normalised", prediction.normalised)):
                if made is not None:
                    tried.predictions[kind].append(made)
                    ranked = (losses, made)
                    if within is not None:
                        ranked = (within.take_out(losses, np.float32), within.take_out(made))
                    values[kind].append(mean_of_defined(metrics.spearman_per_column(*ranked)))
    tried.lds = {kind: float(np.mean(found)) if found else None for kind, found in values.items()}
    return tried


# ---- the choice ----


def best_first(tried: Sequence[Tried], kind: str) -> list[Tried]:
    """Those that have an LDS; of equal ones, in the order that they were tried."""
    defined = [(lds, one) for one in tried if (lds := one.lds[kind]) is not None and math.isfinite(lds)]
    return [one for _, one in sorted(defined, key=lambda pair: -pair[0])]


Truth = tuple[np.ndarray, metrics.GroupCounts | None]  # losses of a block, and its groups' counts


def choose(tried: Sequence[Tried], truths: Sequence[Truth], kind: str) -> dict[str, Any] | None:
    """The cheapest of those near the best that cannot be told from it; None where no setting has a score."""
    ranked = best_first(tried, kind)
    if not ranked:
        return None
    best, *others = ranked
    others = [one for one in others if (best.lds[kind] or 0.0) - (one.lds[kind] or 0.0) <= TIE]
    behind = clearly_behind(others, best, truths, kind)
    ties = [best, *(one for one, is_behind in zip(others, behind, strict=True) if not is_behind)]
    least = min(one.seconds for one in ties)
    chosen = max((one for one in ties if one.seconds <= SAME_SECONDS * least), key=lambda one: one.lds[kind] or 0.0)
    return {
        "options": chosen.options,
        "lds": chosen.lds[kind],
        "seconds": chosen.seconds,
        "best": {"options": best.options, "lds": best.lds[kind], "seconds": best.seconds},
        "num_ties": len(ties),
        "num_tried": len(tried),
    }


def clearly_behind(others: Sequence[Tried], best: Tried, truths: Sequence[Truth], kind: str) -> list[bool]:
    """Whether the best is ahead of each by `bench.publish.compare`, its blocks taken as independent."""
    if not others:
        return []
    questions = [
        (losses, ahead, behind, within)
        for one in others
        for (losses, within), ahead, behind in zip(truths, best.predictions[kind], one.predictions[kind], strict=True)
    ]
    with all_cores(sum(losses.size for losses, *_ in questions)) as each:
        pairs = each(lambda asked: metrics.paired_difference(*asked[:3], within=asked[3]), questions)
        gaps = [compare.Estimate(pair.difference, pair.ci_low, pair.ci_high) for pair in pairs]
    each = [gaps[k : k + len(truths)] for k in range(0, len(gaps), len(truths))]
    return [compare.is_ahead(compare.mean_of_independent(blocks), negligible=0.0) for blocks in each]


def tune_method(blocks: Sequence[Any], name: str, tries: int) -> dict[str, Any]:
    """The grid as far as `tries` go, what lies beyond its edge, and what was chosen."""
    truths = [
        (grid.losses(grid.scorer(grid.method("random")), position), grid.within(position))
        for grid in blocks
        for position in range(len(grid.plans))
    ]
    method, fixed = blocks[0].method(name), blocks[0].options.get(name, {})
    wanted = list(settings_to_try(method, blocks[0].seed, in_place_of(fixed)))
    for grid in blocks:
        grid.prepare([grid.method(name, **options) for options in wanted[:tries]])
    shown = bar(wanted[:tries], desc=name, unit="setting", delay=2, leave=False)
    tried = [try_settings(blocks, name, options) for options in shown]
    num_in_grid = len(tried)
    while len(tried) < num_in_grid + FURTHER:
        settings = [one.options for one in tried]
        best = [ranked[0] for kind in CHOSEN_BY if (ranked := best_first(tried, kind))]
        edge = next((options for one in best for options in beyond(method, one.options, settings)), None)
        if edge is None:
            break
        tried.append(try_settings(blocks, name, edge))
    return {
        "grid": [
            {"options": one.options, **{f"lds_{kind}": one.lds[kind] for kind in CHOSEN_BY}, "seconds": one.seconds}
            | one.diagnostics
            | ({"reason": one.reason} if one.reason else {})
            for one in tried
        ],
        "chosen": {kind: choose(tried, truths, kind) for kind in CHOSEN_BY},
        "seconds": sum(one.seconds for one in tried),
        "num_settings": len(wanted),
        "num_beyond": len(tried) - num_in_grid,
        "fixed": {option: getattr(method, option) for option in fixed},
    }


# ---- what is asked ----


def tunable_methods() -> list[str]:
    found = []
    for name in available_methods():
        with contextlib.suppress(UsageError):  # an extra that is not installed
            found += [name] if load_method(name).grid else []
    return found


def show_choice(found: Mapping[str, Any]) -> str:
    rows = []
    for name, one in found.items():
        for kind, chosen in one["chosen"].items():
            if chosen is not None:
                options = ",".join(f"{k}={setting_text(v)}" for k, v in chosen["options"].items()) or "defaults"
                default = one["grid"][0][f"lds_{kind}"]
                found_lds = [number(value) for value in (chosen["lds"], chosen["best"]["lds"], default)]
                ties = f"{chosen['num_ties']} of {chosen['num_tried']}"
                rows.append([name, kind, options, *found_lds, ties, number(chosen["seconds"], 1)])
    header = ["method", "by", "chosen", "LDS", "best", "defaults", "ties", "seconds"]
    return table(header, rows, left=3) if rows else "nothing was chosen: no setting has a score"


def tune(arguments: argparse.Namespace) -> Outcome:
    names = arguments.methods or tunable_methods()
    arguments.methods, arguments.alpha = None, arguments.alpha or [0.1]
    out = Path(arguments.out)
    if variants := [name for name in names if "@" in name]:
        raise UsageError(f'"{variants[0]}" is a variant, and its settings are what is chosen; fix one of them by --set')
    asked = replace(experiment_of(arguments), query_split="tune", stream="tune", settings="default")
    execution, task = execution_of(arguments), asked.build_task()
    by_alpha = task.groups() is not None or asked.reference != FULL
    if by_alpha and len(asked.alpha) > 1:
        raise UsageError("what is best depends on alpha here, so it is chosen for one --alpha at a time")
    check_there_is_a_choice(names, asked)
    check_out(arguments.out)
    grids = [SettingsGrid(replace(asked, seeds=(seed,)), execution) for seed in asked.seeds]
    found, remarks = {}, []
    for grid in grids:
        grid.retrain()
    for name in names:
        if reason := grids[0].method(name).skip(task):
            remarks.append(f"skipped {name}: {reason}")
        else:
            found[name] = tune_method(grids, name, arguments.tries)
    told = {"seeds": list(asked.seeds), "alphas": list(asked.alpha), "tries": arguments.tries, "further": FURTHER}
    measure = "lds" if task.groups() is None else "lds_within_groups"
    tuned = {  # what was chosen, for whoever uses it, beside the whole record
        "format": TUNED_FORMAT,
        **dict.fromkeys(TUNED_FIELDS),
        **({"reference": asked.reference, "scheme": asked.scheme, "chosen_by": measure} if by_alpha else {}),
        "rule": str(__doc__).split("\n\n")[2].replace("\n", " "),
        "methods": without_nan({name: one["chosen"] for name, one in found.items() if all(one["chosen"].values())}),
    }
    path = out / (tuned_file(task, asked.reference, asked.alpha[0]) if by_alpha else tuned_file(task))
    result = without_nan({**grids[0].describe(), **told, "methods": found})
    return Outcome(grids[0], result, "tune.json", show_choice(found), remarks, tuned=(path, tuned))


def check_there_is_a_choice(names: Sequence[str], asked: Experiment) -> None:
    """Before anything is retrained: every method has a grid, of which --set leaves something to choose."""
    known = set(names)
    for name in names:
        fixed = asked.options.get(name, {})
        method = load_method(name, **fixed)
        known.add(method.name)
        if not method.grid:
            raise UsageError(f"{name} declares no grid; there is nothing to choose")
        if len(list(settings_to_try(method, 0, in_place_of(fixed)))) == 1:
            raise UsageError(
                f"--set fixes all that {name} would be tuned in ({', '.join(fixed)}); leave some of it out"
            )
    check_named(known, str(asked.task), asked.options)


# ---- a grid of settings ----


def read_grid(texts: Sequence[str] | None, method: str) -> dict[str, list[Any]]:
    """Option -> values, checked against the method's own options; the paper's grid of BIF where none is given."""
    if texts is None and method != "bif":
        raise UsageError(f"--grid OPTION=V1,V2 is needed for {method}; tda-bench list methods {method} has its options")
    grid: dict[str, list[Any]] = {}
    for text in texts or PAPER_GRID:
        option, _, values = text.partition("=")
        if not values or option in grid:
            raise UsageError(f'--grid takes each OPTION=V1,V2 once, for example --grid gamma=1e3,1e4, not "{text}"')
        found = [getattr(load_method(method, **{option: value}), option) for value in values.split(",")]
        grid[option] = list(dict.fromkeys(found))
    return grid


def run_sweep(arguments: argparse.Namespace) -> Outcome:
    """Every cell on `tune`; the best by raw LDS, and the best by normalised, once more on `report`."""
    one_of_each(arguments, "alpha", "alpha_attribution", "seeds")
    asked, arguments.methods = arguments.methods or ["bif"], None
    name = asked[0]
    if len(asked) > 1 or "@" in name:
        raise UsageError(f'--methods takes one method here, not "{" ".join(asked)}"; fix its options by --set')
    axes = read_grid(arguments.grid, name)
    experiment, execution = experiment_of(arguments), execution_of(arguments)
    if both := sorted(in_place_of(axes) & set(experiment.options.get(name, {}))):
        raise UsageError(f"{both[0]} is swept (--grid) and set; leave out --set {name}.{both[0]}, or change the grid")
    check_out(arguments.out)
    tuning, reporting = (
        SettingsGrid(replace(experiment, query_split=split, stream=split), execution) for split in ("tune", "report")
    )
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    methods = [tuning.method(name, **chosen) for chosen in combinations]
    check_named({name, methods[0].name}, tuning.task.name, experiment.options)
    if reason := methods[0].skip(tuning.task):  # before anything is retrained
        raise UsageError(f"{name} cannot run on {tuning.task.name}: {reason}")
    tuning.retrain()
    tuning.prepare(methods)
    shown = bar(methods, desc="cells", unit="cell", delay=2, leave=False)
    cells = [tuning.score(method, chosen) for method, chosen in zip(shown, combinations, strict=True)]
    best = {}
    for kind in ("lds", "lds_normalised"):
        if defined := [cell for cell in cells if cell.get(kind) is not None]:
            if not reporting.truths:
                reporting.retrain()
            chosen = max(defined, key=lambda cell: cell[kind])
            options = {option: chosen[option] for option in axes}
            reported = reporting.score(reporting.method(name, **options), options)
            best[kind] = {key: value for key, value in reported.items() if key != "traces"} | {"tune": chosen[kind]}
    described = {"method": name, "options": tuning.method(name).config, "axes": axes}
    result = without_nan({**tuning.describe(), **described, "cells": cells, "best_on_report": best})
    remarks = []
    for cell in (cell for cell in cells if cell["lds"] is None):
        settings = ", ".join(f"{option} {setting_text(cell[option])}" for option in axes)
        remarks.append(f"no LDS at {settings}: {cell['reason']}")
    problems = ["no cell has an LDS"] if len(remarks) == len(cells) else []
    return Outcome(tuning, result, "sweep.json", show_sweep(result), remarks, problems)


# ---- what is spent ----


def run_budget(arguments: argparse.Namespace) -> Outcome:
    """Curves by label; a variant that fails costs its own alone."""
    one_of_each(arguments, "alpha", "alpha_attribution", "seeds")
    arguments.methods = arguments.methods or BUDGET_METHODS
    experiment, execution = experiment_of(arguments), execution_of(arguments)
    grid = SettingsGrid(experiment, execution)
    variants = build_variants(experiment.methods, grid.task, experiment.options, experiment.settings)
    if others := [one.label for one in variants if one.method.name not in BUDGET_METHODS]:
        raise UsageError(f'--methods has "{others[0]}"; expected variants of {" or ".join(BUDGET_METHODS)}')
    if refused := [one for one in variants if one.method.skip(grid.task)]:  # before anything is retrained
        reason = refused[0].method.skip(grid.task)
        raise UsageError(f"{refused[0].label} cannot run on {grid.task.name}: {reason}")
    check_out(arguments.out)
    grid.retrain()
    curves: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for variant in variants:
        name, kinds = variant.method.name, SCORE_KINDS[variant.rows]
        try:
            found = (bif_curves if name == "bif" else trak_curves)(grid, variant.method, kinds)
        except (RuntimeError, FloatingPointError) as error:
            failed[variant.label] = str(error).splitlines()[0]
            continue
        curves += [{"method": name, "label": variant.label, **curve} for curve in found if curve["points"]]
    result = without_nan({**grid.describe(), "curves": curves, "failed": failed})
    remarks = []
    for curve in (curve for curve in result["curves"] if not curve["normalised"]):
        for point in (point for point in curve["points"] if point["lds"] is None):
            reason = point.get("reason", "undefined for every query")
            remarks.append(f"no LDS of {curve['label']} at {curve['axis']} {point['value']}: {reason}")
    problems = [f"no curve of {label}: {reason}" for label, reason in failed.items()]
    return Outcome(grid, result, "budget.json", show_budget(result), remarks, problems)


def bif_curves(grid: Any, method: Any, kinds: Sequence[bool]) -> list[dict[str, Any]]:
    """LDS after more and more draws of one run's stored traces, raw (False) or train-normalised (True)."""
    method = replace(method, keep_traces=True)
    scorer = grid.scorer(method)
    grid.predictions(scorer)
    entry = grid.store.read("scores", scorer.config)
    assert entry is not None
    traces = torch.from_numpy(np.array(entry.arrays["loss_traces"]))  # (chains, draws, n + q)
    num_train = len(scorer.question.attributed_indices())
    losses, masks = grid.losses(scorer), grid.truths[0].masks
    curves: list[dict[str, Any]] = [
        {"axis": "draws", "normalised": kind, "options": method.config, "points": []} for kind in kinds
    ]
    num_chains, num_draws = traces.shape[:2]
    # Draws a chain that make 1, 2 or 5 times a power of ten in all, or nearly, and the whole run.
    lengths = {round(digit * 10**power / num_chains) for power in range(1, 9) for digit in (1, 2, 5)}
    lengths = {length for length in lengths if 4 <= length < num_draws} | {num_draws}
    for length in bar(sorted(lengths), desc="draws", unit="length", delay=2, leave=False):
        part = traces[:, :length]
        cross, _, scale = covariance(part[..., num_train:], part[..., :num_train], method.centring)
        share = (method.burn_in + length) / (method.burn_in + num_draws)
        seconds = entry.record["fit_seconds"] + entry.record["score_seconds"] * share  # a pilot is paid for once
        spent = {"value": num_chains * length, "seconds": seconds}
        for curve in curves:
            scores = -cross / scale.clamp(min=1e-30) if curve["normalised"] else -cross
            result = metrics.linear_datamodelling_score(losses, subset_sums(masks, scores.numpy()))
            curve["points"].append(spent | {name: getattr(result, name) for name in ("lds", "ci_low", "ci_high")})
    return curves


def trak_curves(grid: Any, method: Any, kinds: Sequence[bool]) -> list[dict[str, Any]]:
    """LDS against the projection's size at the variant's checkpoints, and against checkpoints at its projection."""
    curves = []
    for axis, values in {"projection": trak_projections(grid, method), "checkpoints": TRAK_CHECKPOINTS}.items():
        steps = bar(values, desc=f"trak: {axis}", unit="setting", delay=2, leave=False)
        scored = [grid.score(replace(method, **{axis: value}), {axis: value}) for value in steps]
        for kind in kinds:
            points = [
                {"value": cell[axis], "seconds": cell.get("seconds")}
                | {name: cell.get(f"{name}_normalised" if kind else name) for name in ("lds", "ci_low", "ci_high")}
                | ({"reason": cell["reason"]} if "reason" in cell else {})
                for cell in scored
            ]
            curves.append({"axis": axis, "normalised": kind, "options": method.config, "points": points})
    return curves


def trak_projections(grid: Any, method: Any) -> list[int]:
    """Those that TRAK takes as they are: no more than there are parameters, and without a ridge than examples."""
    limit = sum(parameter.numel() for parameter in grid.scorer(method).model.parameters() if parameter.requires_grad)
    if not method.fit_config["ridged"]:
        limit = min(limit, len(grid.task.train_data) - 1)
    return sorted(value for value in {*TRAK_PROJECTIONS, method.projection} if value <= limit)


def show_sweep(result: dict[str, Any]) -> str:
    options = list(result["axes"])
    chains = any(cell.get("rhat") is not None for cell in result["cells"])
    header = [*options, "LDS", "95 % interval", "normalised", *(["R-hat", "ESS"] if chains else []), "seconds"]
    ordered = sorted(result["cells"], key=lambda cell: -(cell["lds"] if cell["lds"] is not None else -math.inf))
    rows = []
    for cell in ordered:
        lds = number(cell["lds"]) if cell["lds"] is not None else "NaN"
        ends = interval(cell["ci_low"], cell["ci_high"]) if cell.get("ci_low") is not None else "-"
        mixing = [number(cell.get("rhat")), number(cell.get("ess"), 0)] if chains else []
        measured = [lds, ends, number(cell.get("lds_normalised")), *mixing, number(cell.get("seconds"), 1)]
        rows.append([*(setting_text(cell[option]) for option in options), *measured])
    lines = [
        f"{result['method']} on {result['task']}, protocol {result['protocol']}, alpha {result['alpha']:g} of "
        f"{result['alpha_attribution']:g}, seed {result['seed']}: {result['num_subsets']} subsets, "
        f"{result['num_queries']} {result['split']} queries\n",
        table(header, rows, left=len(options)) + "\n",
    ]
    for name, best in result["best_on_report"].items():
        chosen = ", ".join(f"{option} {setting_text(best[option])}" for option in options)
        value = best["lds"] if name == "lds" else best["lds_normalised"]
        kind = "raw" if name == "lds" else "train-normalised"
        lines.append(f"best {kind} on tune: {chosen} ({best['tune']:.3f}); on report: {number(value)}")
    return "\n".join(lines)


def show_budget(result: dict[str, Any]) -> str:
    rows = []
    for curve in result["curves"]:
        kind = "train-normalised" if curve["normalised"] else "raw"
        for point in curve["points"]:
            lds = [number(point["lds"]), interval(point["ci_low"], point["ci_high"])]
            spent = [f"{point['value']} {curve['axis']}", number(point["seconds"], 1)]
            rows.append([curve["label"], kind, *spent, *lds])
    return table(["method", "scores", "budget", "seconds", "LDS", "95 % interval"], rows, left=2)


# ---- the commands ----

# Command -> what it says of itself, its work, and what --methods are there.
COMMANDS = {
    "": (str(__doc__).split("\n")[0], tune, "whose settings are chosen (default: every method that declares a grid)"),
    "sweep": (
        "LDS against a grid of one method's settings.",
        run_sweep,
        "the one whose settings are swept (default: bif)",
    ),
    "budget": (
        "LDS against what is spent: draws, projections, seconds.",
        run_budget,
        "whose curves: bif, trak, trak@ridge=0, long=bif@draws=2500 ... (default: bif trak)",
    ),
}


def make_parser(command: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=f"python -m bench.tune {command}".strip(),
        description=COMMANDS[command][0],
        listed=None if command else {name: words for name, (words, *_) in COMMANDS.items() if name},
    )
    add_task_arguments(parser)
    add = parser.add_argument
    add("--methods", nargs="+", metavar="METHOD", help=COMMANDS[command][2])
    if command:
        add_settings_argument(parser)
    else:
        add("--tries", type=at_least(1), default=TRIES, help="settings a method (default: %(default)s)")
    if command == "sweep":
        add("--grid", nargs="+", metavar="OPTION=V1,V2", help="settings to cross (default: the paper's, of BIF)")
    add_plan_arguments(parser, MINIMUM_SUBSETS, required=bool(command))
    add("--reference", choices=REFERENCES, help="models that methods look at (default: full)")
    add("--queries", type=at_least(1), help="only the first so many queries")
    add("--out", default=f"{RUNS}/{command or 'tune'}", help="where the record goes (default: %(default)s)")
    add_cluster_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    command = words[0] if words and words[0] in COMMANDS else ""
    parser = make_parser(command)
    arguments = parser.parse_args(words[1:] if command else words)
    line = command_line("bench.tune", words)
    kept = "finished settings are kept, and the same command goes on"
    return run_cli(parser.prog, lambda: work(arguments, command, line, parser.prog), kept, arguments.traceback)


def work(arguments: argparse.Namespace, command: str, line: str, prog: str) -> int:
    started = time.perf_counter()
    outcome = COMMANDS[command][1](arguments)
    grid, path = outcome.grid, Path(arguments.out) / outcome.name
    record = {
        **outcome.result,
        "run_id": digest_of(outcome.result),
        "command": line,
        "description": grid.task.description,
        **provenance(grid.session.device()),
        "seconds": round(time.perf_counter() - started, 1),
    }
    unwritten = replace_record(path, record)
    if outcome.tuned is not None and not unwritten:
        place, tuned = outcome.tuned
        unwritten = replace_record(place, tuned | {name: record[name] for name in TUNED_FIELDS})
    print(outcome.text)
    print(f"\nrun {record['run_id']} in {record['seconds']:.0f} s" + ("" if unwritten else f"; record: {path}"))
    if outcome.tuned is not None and not unwritten:
        words = f"tda-bench lds --task {arguments.task} --settings tuned ..."
        print(f"to use it: TDA_BENCH_TUNED={arguments.out} {words}")
    lost = [f"{unwritten}; the same command writes it, from {arguments.cache}"] if unwritten else []
    return report(prog, [*grid.session.notes, *outcome.remarks], [*lost, *outcome.problems])


if __name__ == "__main__":
    sys.exit(main())
