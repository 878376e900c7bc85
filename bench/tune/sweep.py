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
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from baselines.bif.covariance import covariance
from baselines.method import available_methods, load_method
from bench import metrics
from bench.arguments import add_settings_argument, check_out, one_of_each
from bench.dry_run import is_trained
from bench.experiment import Execution, Experiment, execution_of, experiment_of
from bench.methods import MethodSpec, parse_method_spec
from bench.prediction import subset_sums
from bench.records import without_nan
from bench.tables import in_place_of, interval, number, setting_text, table
from bench.tune.grid import Outcome, SettingsGrid
from retrain.errors import UsageError
from retrain.progress import bar

# The paper's grid (app:hparam-sweep).
PAPER_GRID = ("burn_in=0,100", "n_beta=100,300,1000,3000", "gamma=1000,3000,10000,30000,100000")
GRID_EXAMPLES = {"ekfac": "damping=1e-8,1e-4,1e-2", "trak": "projection=128,512"}
BUDGET_METHODS = ("bif", "trak")
TRAK_PROJECTIONS = (128, 512, 2048, 8192)
TRAK_CHECKPOINTS = (1, 2, 4)


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--method", default="bif", help="the method whose settings are swept (default: bif)")
    add("--grid", nargs="+", metavar="OPTION=V1,V2", help="settings to cross (default: the paper's, of BIF)")
    add_settings_argument(parser)


def add_budget_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    words = "whose curves: bif, trak, trak@ridge=0, long=bif@draws=2500 ... (default: bif trak)"
    add("--methods", nargs="+", metavar="METHOD", default=BUDGET_METHODS, help=words)
    add("--query-split", choices=("report", "all"), default="report", help="which queries (default: report)")
    add_settings_argument(parser)


# ---- a grid of settings ----


def read_grid(texts: Sequence[str] | None, method: str) -> dict[str, list[Any]]:
    """Option -> values, checked against the method's own options; the paper's grid where none is given."""
    if texts is None:
        options = {option.name for option in dataclasses.fields(load_method(method))}
        if not options >= {text.partition("=")[0] for text in PAPER_GRID}:
            example = GRID_EXAMPLES.get(method, "OPTION=V1,V2")
            raise UsageError(f"--grid is needed for {method}, for example --grid {example}")
    grid: dict[str, list[Any]] = {}
    for text in texts or PAPER_GRID:
        option, equals, values = text.partition("=")
        if not equals or not values:
            raise UsageError(f'--grid takes OPTION=V1,V2, for example --grid gamma=1e3,1e4, not "{text}"')
        if option in grid:
            raise UsageError(f"--grid has {option} twice; write all of its values as one {option}=V1,V2")
        found = [getattr(load_method(method, **{option: value}), option) for value in values.split(",")]
        grid[option] = list(dict.fromkeys(found))
    return grid


def on(experiment: Experiment, split: str) -> Experiment:
    """Its tune queries and subsets, or those it reports."""
    return dataclasses.replace(experiment, query_split=split, stream=split)


def sweep(
    experiment: Experiment, execution: Execution, name: str, grid: dict[str, list[Any]], dry_run: bool = False
) -> tuple[dict[str, Any], SettingsGrid] | None:
    """Every cell on `tune`; the best by raw LDS, and the best by normalised, once more on `report`."""
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    wanted = [(name, chosen) for chosen in combinations]
    tuning = SettingsGrid(on(experiment, "tune"), execution, wanted, retrain=not dry_run)
    methods = [tuning.method(name, **chosen) for chosen in combinations]
    if dry_run:
        reporting = SettingsGrid(on(experiment, "report"), execution, retrain=False).dry_truth()
        last = "  the best by raw and by normalised LDS are scored once more, on report queries"
        print("\n".join([*tuning.dry_truth(), tuning.dry_settings(name, methods), *reporting[1:], last]))
        return None
    tuning.prepare(methods)
    ready = [tuning.ready(method) for method in methods]  # which says nothing about how long the others take
    cells = []
    with bar(total=len(methods), initial=sum(ready), desc="cells", unit="cell", delay=2, leave=False) as shown:
        for method, chosen, was_ready in zip(methods, combinations, ready, strict=True):
            cells.append(tuning.score(method, chosen))
            shown.update(not was_ready)
    best = {}
    for kind in ("lds", "lds_normalised"):
        if defined := [cell for cell in cells if cell.get(kind) is not None]:
            chosen = max(defined, key=lambda cell: cell[kind])
            reporting_grid = SettingsGrid(on(experiment, "report"), execution)
            options = {option: chosen[option] for option in grid}
            reported = reporting_grid.score(reporting_grid.method(name, **options), options)
            best[kind] = {key: value for key, value in reported.items() if key != "traces"} | {"tune": chosen[kind]}
    described = {"method": name, "options": tuning.method(name).config, "axes": grid}
    return {**tuning.describe(), **described, "cells": cells, "best_on_report": best}, tuning


def run_sweep(arguments: argparse.Namespace) -> Outcome | None:
    method = arguments.method
    if "@" in method:
        raise UsageError(f'--method has the variant "{method}"; give the method, and fix an option by --set')
    grid = read_grid(arguments.grid, method)
    one_of_each(arguments, "alpha", "alpha_attribution", "seeds")
    experiment = experiment_of(arguments)
    if both := sorted(in_place_of(grid) & set(experiment.options.get(method, {}))):
        what = "swept and set" if both[0] in grid else f"set, and {', '.join(grid)} swept in its place"
        raise UsageError(f"{both[0]} is {what}; leave out --set {method}.{both[0]}, or change the grid")
    if not arguments.dry_run:
        check_out(arguments.out)
    made = sweep(experiment, execution_of(arguments), method, grid, arguments.dry_run)
    if made is None:
        return None
    result = plain(made[0])
    lost = [cell for cell in result["cells"] if cell["lds"] is None]
    remarks = []
    for cell in lost:
        settings = ", ".join(f"{option} {setting_text(cell[option])}" for option in grid)
        remarks.append(f"no LDS at {settings}: {cell['reason']}")
    none_left = len(lost) == len(result["cells"])
    problems = [f"no cell has an LDS; the first: {lost[0]['reason']}"] if none_left else []
    path = Path(arguments.out) / "sweep.json"
    return Outcome(made[1], result, path, show_sweep(result), remarks=remarks, problems=problems)


def plain(result: dict[str, Any]) -> dict[str, Any]:
    return without_nan(json.loads(json.dumps(result, default=dataclasses.asdict)))


# ---- what is spent ----


def budget_specs(words: Sequence[str]) -> dict[str, MethodSpec]:
    """By label."""
    wanted: dict[str, MethodSpec] = {}
    for word in dict.fromkeys(words):
        spec = parse_method_spec(word)
        label = spec.label or word
        if spec.name not in BUDGET_METHODS:
            raise UsageError(f'--methods has "{word}"; expected variants of {" or ".join(BUDGET_METHODS)}')
        if label.lower() in available_methods() and label != spec.name:
            raise UsageError(f'"{word}": the label "{label}" is a method\'s name; give it another')
        if label in wanted:
            raise UsageError(f'two variants are called "{label}": give one a label of its own, LABEL=METHOD@...')
        wanted[label] = spec
    return wanted


def run_budget(arguments: argparse.Namespace) -> Outcome | None:
    """Curves by label; a variant that fails costs its own alone."""
    one_of_each(arguments, "alpha", "alpha_attribution", "seeds")
    wanted = budget_specs(arguments.methods)
    arguments.methods = None
    experiment, execution = experiment_of(arguments), execution_of(arguments)
    asked = [(spec.name, spec.options) for spec in wanted.values()]
    if not arguments.dry_run:
        check_out(arguments.out)
    grid = SettingsGrid(experiment, execution, asked, retrain=not arguments.dry_run)
    if arguments.dry_run:
        print(dry_budget(grid, wanted))
        return None
    made = {"bif": bif_curves, "trak": trak_curves}
    curves: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for label, spec in wanted.items():
        for variant in grid.variants(spec.name, spec.options):
            kinds = {"raw": (False,), "normalised": (True,)}.get(variant.rows, (False, True))
            try:
                found = made[spec.name](grid, variant.method, kinds)
            except (RuntimeError, FloatingPointError) as error:
                failed[label] = str(error).splitlines()[0]
                continue
            curves += [{"method": spec.name, "label": label, **curve} for curve in found if curve["points"]]
    result = plain({**grid.describe(), "curves": curves, "failed": failed})
    remarks = []
    for curve in (curve for curve in result["curves"] if not curve["normalised"]):
        for point in (point for point in curve["points"] if point["lds"] is None):
            reason = point.get("reason", "undefined for every query")
            remarks.append(f"no LDS of {curve['label']} at {curve['axis']} {point['value']}: {reason}")
    problems = [f"no curve of {label}: {reason}" for label, reason in failed.items()]
    path = Path(arguments.out) / "budget.json"
    return Outcome(grid, result, path, show_budget(result), remarks=remarks, problems=problems)


def dry_budget(grid: SettingsGrid, wanted: Mapping[str, MethodSpec]) -> str:
    lines = grid.dry_truth()
    for label, spec in wanted.items():
        methods: list[Any] = [one.method for one in grid.variants(spec.name, spec.options)]
        if spec.name == "bif":  # every shorter run is the beginning of the longest
            asked = [dataclasses.replace(method, keep_traces=True) for method in methods]
        else:  # how many projections there are depends on the model, once there is one
            known = is_trained(grid.session, grid.seed)
            asked = [
                dataclasses.replace(method, **{axis: value})
                for method in methods
                for axis, values in trak_axes(trak_projections(grid, method) if known else TRAK_PROJECTIONS).items()
                for value in values
            ]
        lines.append(grid.dry_settings(label, list(dict.fromkeys(asked))))
    return "\n".join(lines)


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
    if entry is None or "loss_traces" not in entry.arrays:  # damaged since
        scorer.forget(grid.plans)
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
    for axis, values in trak_axes(trak_projections(grid, method)).items():
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


def trak_axes(projections: Sequence[int]) -> dict[str, Sequence[int]]:
    return {"projection": projections, "checkpoints": TRAK_CHECKPOINTS}


def trak_projections(grid: Any, method: Any) -> list[int]:
    """Those that TRAK takes as they are: no more than there are parameters, and without a ridge than examples."""
    limit = sum(parameter.numel() for parameter in grid.scorer(method).base[0].parameters() if parameter.requires_grad)
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
