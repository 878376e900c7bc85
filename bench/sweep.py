"""How does a method's LDS depend on its settings, and on what is spent on it?

    python -m bench.sweep --task digits --alpha 0.1                          # the paper's grid of BIF settings
    python -m bench.sweep --alpha 0.1 --grid gamma=1e3,1e4 n_beta=100,1000   # any other
    python -m bench.sweep --alpha 0.1 --budget                               # LDS against draws and seconds
    python -m bench.sweep --alpha 0.1 --budget --budget-methods bif long=bif@draws=2500 trak@ridge=0

A sweep scores every cell on the `tune` queries and on subsets of their own, keeps the loss traces, survives cells that
diverge (their LDS is null), and measures the best cell once on the `report` queries and subsets: choosing and reporting
never see the same. A budget curve cuts one run's stored loss traces after more and more draws, without sampling again;
TRAK is scored anew for each projection and ensemble size.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import metrics
from bench.arguments import add_settings_argument
from bench.metrics import MINIMUM_SUBSETS
from bench.prediction import subset_sums
from bench.records import command_line, keep_earlier, provenance, try_write, without_nan, write_json
from bench.tables import in_place_of, interval, number, setting_text, table
from retrain.command import (
    RUNS,
    Parser,
    add_cluster_arguments,
    add_plan_arguments,
    add_task_arguments,
    at_least,
    check_out,
    guarded,
    one_of_each,
)
from retrain.errors import UsageError
from retrain.progress import bar
from retrain.store import canonical_json

# The paper's grid (app:hparam-sweep).
PAPER_GRID = ("burn_in=0,100", "n_beta=100,300,1000,3000", "gamma=1000,3000,10000,30000,100000")
GRID_EXAMPLES = {"ekfac": "damping=1e-8,1e-4,1e-2", "trak": "projection=128,512"}
BUDGET_METHODS = ("bif", "trak")
TRAK_PROJECTIONS = (128, 512, 2048, 8192)
TRAK_CHECKPOINTS = (1, 2, 4)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.sweep", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add_task_arguments(parser)
    add("--method", help="the method whose settings are swept (default: bif)")
    add("--grid", nargs="+", metavar="OPTION=V1,V2", help="settings to cross (default: the paper's, of BIF)")
    add_settings_argument(parser)
    add("--budget", action="store_true", help="budget curves of BIF and TRAK instead of a sweep")
    words = "whose curves: bif, trak, trak@ridge=0, long=bif@draws=2500 ... (default: bif trak)"
    add("--budget-methods", nargs="+", metavar="VARIANT", help=words)
    add("--budget-split", choices=("report", "all"), help="queries of a budget (default: report)")
    add_plan_arguments(parser, MINIMUM_SUBSETS)
    add("--queries", type=at_least(1), help="only the first so many queries of each split")
    add("--out", default="", help=f"where the result goes (default: {RUNS}/sweep or {RUNS}/budget)")
    add("--dry-run", action="store_true", help="say what would be computed, and compute nothing")
    add_cluster_arguments(parser)
    return parser


def read_grid(texts: Sequence[str] | None, method: str) -> dict[str, list[Any]]:
    """Option -> values, checked against the method's own options; the paper's grid where none is given."""
    from baselines.method import load_method

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


# ---- a grid of settings ----


def crossed(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def on(experiment: Any, split: str) -> Any:
    """Its tune queries and subsets, or those it reports."""
    return dataclasses.replace(experiment, query_split=split, stream=split)


def dry_sweep(experiment: Any, execution: Any, name: str, grid: dict[str, list[Any]]) -> str:
    from bench.cells import Cells
    from bench.dry_run import settings_line, truth_of

    combinations = crossed(grid)
    wanted = [(name, chosen) for chosen in combinations]
    tuning = Cells(on(experiment, "tune"), execution, wanted, retrain=False)
    settings = settings_line(tuning, name, [tuning.method(name, **chosen) for chosen in combinations])
    reporting = truth_of(Cells(on(experiment, "report"), execution, retrain=False))
    return "\n".join(
        [
            *truth_of(tuning),
            settings,
            *reporting[1:],
            "  the best by raw and by normalised LDS are scored once more, on report queries",
        ]
    )


def sweep(experiment: Any, execution: Any, name: str, grid: dict[str, list[Any]]) -> tuple[dict[str, Any], Any]:
    """Every cell on `tune`; the best by raw LDS, and the best by normalised, once more on `report`."""
    from bench.cells import Cells

    combinations = crossed(grid)
    wanted = [(name, chosen) for chosen in combinations]
    tuning = Cells(on(experiment, "tune"), execution, wanted)
    methods = [tuning.method(name, **chosen) for chosen in combinations]
    tuning.prepare(methods)
    ready = [tuning.ready(method) for method in methods]  # which says nothing about how long the others take
    cells = []
    with bar(total=len(methods), initial=sum(ready), desc="cells", unit="cell", delay=2, leave=False) as shown:
        for method, chosen, was_ready in zip(methods, combinations, ready, strict=True):
            cells.append(tuning.score(method, chosen))
            shown.update(not was_ready)
    best = {}
    for kind in ("lds", "lds_normalised"):
        defined = [cell for cell in cells if cell.get(kind) is not None]
        if defined:
            chosen = max(defined, key=lambda cell: cell[kind])
            reporting = Cells(on(experiment, "report"), execution)
            options = {option: chosen[option] for option in grid}
            reported = reporting.score(reporting.method(name, **options), options)
            best[kind] = {key: value for key, value in reported.items() if key != "traces"} | {"tune": chosen[kind]}
    described = {"method": name, "options": tuning.method(name).config, "axes": grid}
    return {**tuning.describe(), **described, "cells": cells, "best_on_report": best}, tuning


# ---- what is spent ----


def budgeted_variants(words: Sequence[str]) -> dict[str, Any]:
    """Label -> spelling."""
    wanted: dict[str, Any] = {}
    for word in dict.fromkeys(words):
        label, spelling = budgeted(word)
        if label in wanted:
            raise UsageError(f'two variants are called "{label}": give one a label of its own, LABEL=METHOD@...')
        wanted[label] = spelling
    return wanted


def budget(experiment: Any, execution: Any, wanted: Mapping[str, Any], split: str) -> tuple[dict[str, Any], Any]:
    """Curves of these variants, by label; one that fails costs its own alone."""
    from bench.cells import Cells

    experiment = dataclasses.replace(experiment, query_split=split)
    cells = Cells(experiment, execution, [(spelling.name, spelling.options) for spelling in wanted.values()])
    made = {"bif": bif_curves, "trak": trak_curves}
    curves: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for label, spelling in wanted.items():
        for variant in cells.variants(spelling.name, spelling.options):
            kinds = {"raw": (False,), "normalised": (True,)}.get(variant.rows, (False, True))
            try:
                found = made[spelling.name](cells, variant.method, kinds)
            except (RuntimeError, FloatingPointError) as error:
                failed[label] = str(error).splitlines()[0]
                continue
            curves += [{"method": spelling.name, "label": label, **curve} for curve in found if curve["points"]]
    return {**cells.describe(), "curves": curves, "failed": failed}, cells


def dry_budget(experiment: Any, execution: Any, wanted: Mapping[str, Any], split: str) -> str:
    from bench.cells import Cells
    from bench.dry_run import is_trained, settings_line, truth_of

    experiment = dataclasses.replace(experiment, query_split=split)
    spelled = [(spelling.name, spelling.options) for spelling in wanted.values()]
    cells = Cells(experiment, execution, spelled, retrain=False)
    lines = truth_of(cells)
    for label, spelling in wanted.items():
        methods: list[Any] = [one.method for one in cells.variants(spelling.name, spelling.options)]
        if spelling.name == "bif":  # every shorter run is the beginning of the longest
            asked = [dataclasses.replace(method, keep_traces=True) for method in methods]
        else:  # how many projections there are depends on the model, once there is one
            known = is_trained(cells.session, cells.seed)
            asked = [
                dataclasses.replace(method, **{axis: value})
                for method in methods
                for axis, values in trak_axes(trak_projections(cells, method) if known else TRAK_PROJECTIONS).items()
                for value in values
            ]
        lines.append(settings_line(cells, label, list(dict.fromkeys(asked))))
    return "\n".join(lines)


def budgeted(word: str) -> tuple[str, Any]:
    """A variant's label and its spelling."""
    from baselines.method import available_methods
    from bench.methods import parse_method_spec

    spelling = parse_method_spec(word)
    if spelling.name not in BUDGET_METHODS:
        raise UsageError(f'--budget-methods has "{word}"; expected variants of {" or ".join(BUDGET_METHODS)}')
    if spelling.label.lower() in available_methods() and spelling.label != spelling.name:
        raise UsageError(f'"{word}": the label "{spelling.label}" is a method\'s name; give it another')
    return spelling.label or word, spelling


def score_of(result: metrics.LDS) -> dict[str, float]:
    return {"lds": result.lds, "ci_low": result.ci_low, "ci_high": result.ci_high}


def round_lengths(num_chains: int, num_draws: int) -> list[int]:
    """Draws a chain that make 1, 2 or 5 times a power of ten in all, or nearly, and the whole run."""
    totals = [digit * 10**power for power in range(1, 9) for digit in (1, 2, 5)]
    lengths = {round(total / num_chains) for total in totals}
    return sorted({length for length in lengths if 4 <= length < num_draws} | {num_draws})


def bif_curves(cells: Any, method: Any, kinds: Sequence[bool]) -> list[dict[str, Any]]:
    """LDS after more and more draws of one run's stored traces, raw (False) or train-normalised (True)."""
    import torch

    from baselines.bif.covariance import covariance

    method = dataclasses.replace(method, keep_traces=True)
    scorer = cells.scorer(method)
    cells.predictions(scorer)
    entry = cells.store.read("scores", scorer.config)
    if entry is None or "loss_traces" not in entry.arrays:  # damaged since
        scorer.forget(cells.plans)
        cells.predictions(scorer)
        entry = cells.store.read("scores", scorer.config)
        assert entry is not None
    traces = torch.from_numpy(np.array(entry.arrays["loss_traces"]))  # (chains, draws, n + q)
    num_train = len(scorer.question.attributed_indices())
    losses, masks = cells.losses(scorer), cells.truths[0].masks
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


def trak_curves(cells: Any, method: Any, kinds: Sequence[bool]) -> list[dict[str, Any]]:
    """LDS against the projection's size at the variant's checkpoints, and against checkpoints at its projection."""
    curves = []
    for axis, values in trak_axes(trak_projections(cells, method)).items():
        steps = bar(values, desc=f"trak: {axis}", unit="setting", delay=2, leave=False)
        scored = [cells.score(dataclasses.replace(method, **{axis: value}), {axis: value}) for value in steps]
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


def trak_projections(cells: Any, method: Any) -> list[int]:
    """Those that TRAK takes as they are: no more than there are parameters, and without a ridge than examples."""
    limit = sum(parameter.numel() for parameter in cells.scorer(method).base[0].parameters() if parameter.requires_grad)
    if not method.fit_config["ridged"]:
        limit = min(limit, len(cells.task.train_data) - 1)
    return sorted(value for value in {*TRAK_PROJECTIONS, method.projection} if value <= limit)


# ---- the command ----


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


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    command = command_line("bench.sweep", argv)
    kept = "finished cells are kept, and the same command goes on"
    return guarded(parser.prog, lambda: explore(arguments, command, parser.prog), kept, arguments.traceback)


def refuse_what_would_be_ignored(arguments: argparse.Namespace) -> None:
    others = ("--method", "--grid") if arguments.budget else ("--budget-methods", "--budget-split")
    for option in others:
        if getattr(arguments, option[2:].replace("-", "_")) is not None:
            raise UsageError(f"{option} goes {'without' if arguments.budget else 'with'} --budget")


def explore(arguments: argparse.Namespace, command: str, prog: str) -> int:
    from bench.translate import execution_of, experiment_of

    started = time.perf_counter()
    refuse_what_would_be_ignored(arguments)
    method = arguments.method or "bif"
    if "@" in method:
        raise UsageError(f'--method has the variant "{method}"; give the method, and fix an option by --set')
    grid = {} if arguments.budget else read_grid(arguments.grid, method)
    out = Path(arguments.out or f"{RUNS}/{'budget' if arguments.budget else 'sweep'}")
    one_of_each(arguments, "alpha", "alpha_attribution", "seeds")
    experiment, execution = experiment_of(arguments), execution_of(arguments)
    if arguments.budget:
        wanted = budgeted_variants(arguments.budget_methods or BUDGET_METHODS)
        if arguments.dry_run:
            print(dry_budget(experiment, execution, wanted, arguments.budget_split or "report"))
            return 0
        check_out(str(out))
        result, cells = budget(experiment, execution, wanted, arguments.budget_split or "report")
    else:
        if both := sorted(in_place_of(grid) & set(experiment.options.get(method, {}))):
            what = "swept and set" if both[0] in grid else f"set, and {', '.join(grid)} swept in its place"
            raise UsageError(f"{both[0]} is {what}; leave out --set {method}.{both[0]}, or change the grid")
        if arguments.dry_run:
            print(dry_sweep(experiment, execution, method, grid))
            return 0
        check_out(str(out))
        result, cells = sweep(experiment, execution, method, grid)
    for note in cells.session.notes:
        print(note, file=sys.stderr)
    result = without_nan(json.loads(json.dumps(result, default=dataclasses.asdict)))
    run_id = hashlib.sha256(canonical_json(result, "result").encode()).hexdigest()[:12]
    record = {
        **result,
        "run_id": run_id,
        "command": command,
        "description": cells.task.description,
        **provenance(cells.session.device()),
        "seconds": round(time.perf_counter() - started, 1),
    }
    path = out / ("budget.json" if arguments.budget else "sweep.json")
    unwritten = try_write(lambda: keep_earlier(path, run_id), path)
    unwritten = unwritten or try_write(lambda: write_json(path, record, indent=None), path)
    print(show_budget(result) if arguments.budget else show_sweep(result))
    print(f"\nrun {run_id} in {record['seconds']:.0f} s" + ("" if unwritten else f"; record: {path}"))
    problems = [f"{unwritten}; the same command writes it, from {arguments.cache}"] if unwritten else []
    problems += [f"no curve of {label}: {reason}" for label, reason in result.get("failed", {}).items()]
    for curve in result.get("curves", []):
        for point in (point for point in curve["points"] if point["lds"] is None and not curve["normalised"]):
            reason = point.get("reason", "undefined for every query")
            print(f"no LDS of {curve['label']} at {curve['axis']} {point['value']}: {reason}", file=sys.stderr)
    found = result.get("cells", [])
    for cell in (cell for cell in found if cell["lds"] is None):
        settings = ", ".join(f"{option} {setting_text(cell[option])}" for option in grid)
        print(f"no LDS at {settings}: {cell['reason']}", file=sys.stderr)
    if found and all(cell["lds"] is None for cell in found):
        problems.append(f"no cell has an LDS; the first: {found[0]['reason']}")
    for problem in problems:
        print(f"{prog}: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
