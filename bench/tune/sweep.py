"""How does a method's LDS depend on its settings, and on what is spent on it?

    python -m bench.tune sweep --task digits --alpha 0.1                          # the paper's grid of BIF settings
    python -m bench.tune sweep --alpha 0.1 --grid gamma=1e3,1e4 n_beta=100,1000   # any other
    python -m bench.tune budget --alpha 0.1                                       # LDS against draws and seconds
    python -m bench.tune budget --alpha 0.1 --methods bif long=bif@draws=2500 trak@ridge=0

A sweep scores every cell on the `tune` queries and on subsets of their own, keeps the loss traces, survives cells that
diverge (their LDS is null), and measures the best cell once on the `report` queries and subsets: choosing and reporting
never see the same. A budget curve cuts one run's stored loss traces after more and more draws, without sampling again;
TRAK is scored anew for each projection and ensemble size.
"""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bench.metrics as metrics
from baselines.bif.covariance import covariance
from baselines.method import load_method
from bench.arguments import check_out, one_of_each
from bench.experiment import execution_of, experiment_of
from bench.methods import build_variants, check_named
from bench.prediction import subset_sums
from bench.records import without_nan
from bench.tables import in_place_of, interval, number, setting_text, table
from bench.tune import Outcome, SettingsGrid
from retrain.errors import UsageError
from retrain.progress import bar

# The paper's grid (app:hparam-sweep).
PAPER_GRID = ("burn_in=0,100", "n_beta=100,300,1000,3000", "gamma=1000,3000,10000,30000,100000")
BUDGET_METHODS = ("bif", "trak")
TRAK_PROJECTIONS = (128, 512, 2048, 8192)
TRAK_CHECKPOINTS = (1, 2, 4)


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
        SettingsGrid(dataclasses.replace(experiment, query_split=split, stream=split), execution)
        for split in ("tune", "report")
    )
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    methods = [tuning.method(name, **chosen) for chosen in combinations]
    check_named({name, methods[0].name}, tuning.task.name, experiment.options)
    tuning.refuse_skipped(methods[:1])
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
    path = Path(arguments.out) / "sweep.json"
    return Outcome(tuning, result, path, show_sweep(result), remarks=remarks, problems=problems)


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
    grid.refuse_skipped(variant.method for variant in variants)
    check_out(arguments.out)
    grid.retrain()
    curves: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for variant in variants:
        name, kinds = variant.method.name, {"raw": (False,), "normalised": (True,)}.get(variant.rows, (False, True))
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
    path = Path(arguments.out) / "budget.json"
    return Outcome(grid, result, path, show_budget(result), remarks=remarks, problems=problems)


def score_of(result: metrics.LDS) -> dict[str, float]:
    return {"lds": result.lds, "ci_low": result.ci_low, "ci_high": result.ci_high}


def round_lengths(num_chains: int, num_draws: int) -> list[int]:
    """Draws a chain that make 1, 2 or 5 times a power of ten in all, or nearly, and the whole run."""
    totals = [digit * 10**power for power in range(1, 9) for digit in (1, 2, 5)]
    lengths = {round(total / num_chains) for total in totals}
    return sorted({length for length in lengths if 4 <= length < num_draws} | {num_draws})


def bif_curves(grid: Any, method: Any, kinds: Sequence[bool]) -> list[dict[str, Any]]:
    """LDS after more and more draws of one run's stored traces, raw (False) or train-normalised (True)."""
    method = dataclasses.replace(method, keep_traces=True)
    scorer = grid.scorer(method)
    grid.predictions(scorer)
    entry = grid.store.read("scores", scorer.config)
    if entry is None or "loss_traces" not in entry.arrays:  # pruned or damaged since
        scorer.forget(grid.plans)
        return bif_curves(grid, method, kinds)
    traces = torch.from_numpy(np.array(entry.arrays["loss_traces"]))  # (chains, draws, n + q)
    num_train = len(scorer.question.attributed_indices())
    losses, masks = grid.losses(scorer), grid.truths[0].masks
    curves: list[dict[str, Any]] = [
        {"axis": "draws", "normalised": kind, "options": method.config, "points": []} for kind in kinds
    ]
    num_chains, num_draws = traces.shape[:2]
    for length in bar(round_lengths(num_chains, num_draws), desc="draws", unit="length", delay=2, leave=False):
        part = traces[:, :length]
        cross, _, scale = covariance(part[..., num_train:], part[..., :num_train], method.centring)
        share = (method.burn_in + length) / (method.burn_in + num_draws)
        seconds = entry.record["fit_seconds"] + entry.record["score_seconds"] * share  # a pilot is paid for once
        spent = {"value": num_chains * length, "seconds": seconds}
        for curve in curves:
            scores = -cross / scale.clamp(min=1e-30) if curve["normalised"] else -cross
            result = metrics.linear_datamodelling_score(losses, subset_sums(masks, scores.numpy()))
            curve["points"].append(spent | score_of(result))
    return curves


def trak_curves(grid: Any, method: Any, kinds: Sequence[bool]) -> list[dict[str, Any]]:
    """LDS against the projection's size at the variant's checkpoints, and against checkpoints at its projection."""
    curves = []
    for axis, values in {"projection": trak_projections(grid, method), "checkpoints": TRAK_CHECKPOINTS}.items():
        steps = bar(values, desc=f"trak: {axis}", unit="setting", delay=2, leave=False)
        scored = [grid.score(dataclasses.replace(method, **{axis: value}), {axis: value}) for value in steps]
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


# ---- tables ----


def show_sweep(result: dict[str, Any]) -> str:
    options = list(result["axes"])
    chains = any(cell.get("rhat") is not None for cell in result["cells"])
    header = [*options, "LDS", "95 % interval", "normalised", *(["R-hat", "ESS"] if chains else []), "seconds"]
    ordered = sorted(result["cells"], key=lambda cell: -(cell["lds"] if cell["lds"] is not None else -math.inf))
    rows = [
        [
            *(setting_text(cell[option]) for option in options),
            number(cell["lds"]) if cell["lds"] is not None else "NaN",
            interval(cell["ci_low"], cell["ci_high"]) if cell.get("ci_low") is not None else "-",
            number(cell.get("lds_normalised")),
            *([number(cell.get("rhat")), number(cell.get("ess"), 0)] if chains else []),
            number(cell.get("seconds"), 1),
        ]
        for cell in ordered
    ]
    lines = [
        f"{result['method']} on {result['task']}, protocol {result['protocol']}, alpha {result['alpha']:g} of "
        f"{result['alpha_attribution']:g}, seed {result['seed']}: {result['num_subsets']} subsets, "
        f"{result['num_queries']} {result['split']} queries",
        "",
        table(header, rows, left=len(options)),
        "",
    ]
    for name, best in result["best_on_report"].items():
        chosen = ", ".join(f"{option} {setting_text(best[option])}" for option in options)
        value = best["lds"] if name == "lds" else best["lds_normalised"]
        kind = "raw" if name == "lds" else "train-normalised"
        lines.append(f"best {kind} on tune: {chosen} ({best['tune']:.3f}); on report: {number(value)}")
    return "\n".join(lines)


def show_budget(result: dict[str, Any]) -> str:
    rows = [
        [
            curve["label"],
            "train-normalised" if curve["normalised"] else "raw",
            f"{point['value']} {curve['axis']}",
            number(point["seconds"], 1),
            number(point["lds"]),
            interval(point["ci_low"], point["ci_high"]),
        ]
        for curve in result["curves"]
        for point in curve["points"]
    ]
    return table(["method", "scores", "budget", "seconds", "LDS", "95 % interval"], rows, left=2)
