"""How does a method's LDS depend on its settings, and on what is spent on it?

    python -m bench.sweep --task digits --alpha 0.1                          # the paper's grid of BIF settings
    python -m bench.sweep --alpha 0.1 --grid gamma=1e3,1e4 n_beta=100,1000   # any other
    python -m bench.sweep --alpha 0.1 --budget [--budget-methods bif]        # LDS against draws and seconds

A sweep scores every cell on the `tune` queries, keeps the loss traces, survives cells that diverge (their LDS is null),
and measures the best cell once on the `report` queries: choosing and reporting never see the same queries. A budget
curve cuts one run's stored loss traces after more and more draws, without sampling again; TRAK is scored anew for each
projection and ensemble size. Each cell is cached by itself, so an interrupted sweep goes on where it was.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import logging
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import lds, metrics
from bench.metrics import MINIMUM_SUBSETS
from bench.record import code_commit, code_fingerprint, versions, why_unwritten, without_nan
from bench.tables import number, setting_text, table
from retrain.command import (
    Parser,
    add_cluster_arguments,
    add_task_arguments,
    at_least,
    build_task,
    check_device,
    check_out,
    cluster_options,
    default_cluster,
    fraction,
    options_of,
    share,
)
from retrain.errors import UsageError
from retrain.progress import bar, close_bars
from retrain.safe_files import write_whole
from retrain.store import Store, StoreError, canonical_json
from retrain.subsets import SCHEMES

# The paper's grid (app:hparam-sweep).
PAPER_GRID = ("burn_in=0,100", "n_beta=100,300,1000,3000", "gamma=1000,3000,10000,30000,100000")
GRID_EXAMPLES = {"ekfac": "damping=1e-8,1e-4,1e-2", "trak": "projection=128,512"}
NUM_BUDGET_POINTS = 8
TRAK_PROJECTIONS = (128, 256, 512)
TRAK_CHECKPOINTS = (1, 2, 4)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.sweep", description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add_task_arguments(parser)
    add("--method", default="bif", help="the method whose settings are swept (default: bif)")
    add("--grid", nargs="+", metavar="OPTION=V1,V2", help="settings to cross (default: the paper's, of BIF)")
    add("--budget", action="store_true", help="budget curves of BIF and TRAK instead of a sweep")
    add("--budget-methods", nargs="+", choices=("bif", "trak"), default=["bif", "trak"], help="(default: bif trak)")
    add("--budget-split", choices=("report", "all"), default="report", help="queries of a budget (default: report)")
    add("--alpha", type=fraction, required=True, help="alpha_retrain")
    add("--alpha-attribution", type=share, help="share of the training set attributed (default: the task's)")
    add("--subsets", type=at_least(MINIMUM_SUBSETS), default=100, help="retrained subsets (default: 100)")
    add("--scheme", choices=SCHEMES, default="fixed", help="subsets of fixed size, or independent draws")
    add("--seed", type=at_least(0), default=1, help="the experiment's seed (default: 1)")
    add("--replicates", type=at_least(1), help="retrains per subset (default: the task's)")
    add("--queries", type=at_least(1), help="only the first so many queries of each split")
    add("--out", default="", help="where the result goes (default: runs/sweep or runs/budget)")
    add_cluster_arguments(parser)
    parser.set_defaults(cluster=None, force=False)
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
        grid[option] = [getattr(load_method(method, **{option: value}), option) for value in values.split(",")]
    return grid


class Bench:
    """One task, seed and alpha with its ground truth: what both kinds of run score against."""

    def __init__(self, arguments: argparse.Namespace):
        from bench.runner import ground_truth
        from retrain.train import choose_device, describe_device

        self.arguments, self.task, self.store = arguments, build_task(arguments), Store(arguments.cache)
        self.alpha_attribution = arguments.alpha_attribution or self.task.default_alpha_attribution
        arguments.cluster = arguments.cluster or default_cluster(arguments.device)
        shape = argparse.Namespace(**{**vars(arguments), "alpha": [arguments.alpha]})
        (self.plan,) = lds.plans_of(shape, self.task, arguments.seed, self.alpha_attribution)
        self.device = describe_device(choose_device(arguments.device))
        self.truth = ground_truth(self.task, self.plan, self.store, arguments.device, **cluster_options(arguments))
        if len(self.truth.subsets) < self.plan.num_subsets:
            raise UsageError("the ground truth is not complete; run the same command without --collect")

    def method(self, name: str, **options: Any) -> Any:
        """With the task's own settings, then --set, then these."""
        from baselines.method import load_method

        chosen = {**self.task.method_settings.get(name, {}), **options_of(name, self.arguments.set), **options}
        return load_method(name, **chosen)

    def scorer(self, method: Any, split: str) -> Any:
        from bench.runner import Question, Scorer

        question = Question(
            task=self.task,
            seed=self.arguments.seed,
            alpha_attribution=self.alpha_attribution,
            split=split,  # type: ignore[arg-type]
            max_queries=self.arguments.queries,
        )
        return Scorer(question, method, self.store, self.arguments.device)

    def losses(self, scorer: Any) -> np.ndarray:
        """(subsets, queries) of the scorer's question."""
        return self.truth.mean()[:, scorer.question.query_indices()]

    def describe(self, split: str) -> dict[str, Any]:
        num_queries = len(self.task.query_indices(split))
        return {
            "split": split,
            "num_queries": min(num_queries, self.arguments.queries or num_queries),
            "task": self.task.name,
            "protocol": self.task.protocol,
            "alpha": self.arguments.alpha,
            "alpha_attribution": self.alpha_attribution,
            "seed": self.arguments.seed,
            "num_subsets": self.plan.num_subsets,
            "replicates": self.plan.replicates,
            "device": self.device,
        }


def score_of(result: metrics.LDS) -> dict[str, float]:
    return {"lds": result.lds, "ci_low": result.ci_low, "ci_high": result.ci_high}


# ---- a grid of settings ----


def sweep(bench: Bench, method: str, grid: dict[str, list[Any]]) -> dict[str, Any]:
    """Every cell on `tune`; the best by raw LDS, and the best by normalised, once more on `report`."""
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    cells = [
        score_cell(bench, method, chosen, "tune")
        for chosen in bar(combinations, desc="cells", unit="cell", delay=2, leave=False)
    ]
    best = {}
    for name in ("lds", "lds_normalised"):
        defined = [cell for cell in cells if cell.get(name) is not None]
        if defined:
            chosen = max(defined, key=lambda cell: cell[name])
            reported = score_cell(bench, method, {option: chosen[option] for option in grid}, "report")
            best[name] = {key: value for key, value in reported.items() if key != "traces"} | {"tune": chosen[name]}
    return {**bench.describe("tune"), "method": method, "axes": grid, "cells": cells, "best_on_report": best}


def score_cell(bench: Bench, name: str, options: dict[str, Any], split: str) -> dict[str, Any]:
    """One cell: LDS raw and normalised, seconds, loss traces; null and a reason where the method fails."""
    scorer = bench.scorer(bench.method(name, **options), split)
    cell: dict[str, Any] = dict(options)
    try:
        (prediction,) = scorer.predictions([bench.plan])
    except FloatingPointError as error:
        traces = getattr(error, "mean_losses", None)
        return cell | {
            "lds": None,
            "lds_normalised": None,
            "reason": str(error),
            "traces": [] if traces is None else traces.tolist(),
        }
    losses = bench.losses(scorer)
    cell |= score_of(metrics.linear_datamodelling_score(losses, prediction.raw))
    if math.isnan(cell["lds"]):
        cell["reason"] = f"undefined for every query: {lds.why_undefined(losses, prediction.raw)}"
    if prediction.normalised is not None:
        cell["lds_normalised"] = metrics.linear_datamodelling_score(losses, prediction.normalised).lds
    cell["seconds"] = prediction.record["fit_seconds"] + prediction.record["score_seconds"]
    cell |= {key: value for key, value in prediction.record["diagnostics"].items() if key in ("rhat", "ess")}
    entry = bench.store.read("scores", scorer.config())
    cell["traces"] = entry.arrays["mean_loss_trace"].tolist() if entry and "mean_loss_trace" in entry.arrays else []
    return without_nan(cell)


# ---- what is spent ----


def budget(bench: Bench) -> dict[str, Any]:
    made = {"bif": bif_curves, "trak": trak_curves}
    curves = [curve for name in bench.arguments.budget_methods for curve in made[name](bench)]
    return {**bench.describe(bench.arguments.budget_split), "curves": curves}


def bif_curves(bench: Bench) -> list[dict[str, Any]]:
    """Raw and normalised LDS after more and more draws of one run's stored traces."""
    import torch

    from baselines.bif.covariance import covariance

    method = bench.method("bif", keep_traces=True)
    scorer = bench.scorer(method, bench.arguments.budget_split)
    scorer.predictions([bench.plan])
    entry = bench.store.read("scores", scorer.config())
    if entry is None or "loss_traces" not in entry.arrays:  # cached before traces were asked for, or damaged since
        scorer.predictions([bench.plan], force=True)
        entry = bench.store.read("scores", scorer.config())
        assert entry is not None
    traces = torch.from_numpy(np.array(entry.arrays["loss_traces"]))  # (chains, draws, n + q)
    num_train = len(scorer.question.attributed_indices())
    losses, masks = bench.losses(scorer), torch.from_numpy(bench.truth.masks).float()
    curves: list[dict[str, Any]] = [
        {"method": "bif", "axis": "draws", "normalised": flag, "options": method.config, "points": []}
        for flag in (False, True)
    ]
    num_chains, num_draws = traces.shape[:2]
    lengths = np.unique(np.geomspace(min(4, num_draws), num_draws, NUM_BUDGET_POINTS).round().astype(int))
    for length in lengths.tolist():
        part = traces[:, :length]
        cross, _, scale = covariance(part[..., num_train:], part[..., :num_train], method.centring)
        for curve, scores in zip(curves, (-cross, -cross / scale.clamp(min=1e-30)), strict=True):
            result = metrics.linear_datamodelling_score(losses, (masks @ scores.T).numpy())
            share = (method.burn_in + length) / (method.burn_in + num_draws)
            point = {"value": num_chains * length, "seconds": entry.record["score_seconds"] * share}
            curve["points"].append(point | score_of(result))
    return curves


def trak_curves(bench: Bench) -> list[dict[str, Any]]:
    """LDS against the projection's size with one checkpoint, and against checkpoints at the task's projection."""
    curves = []
    usual = bench.method("trak").projection
    for axis, values in (("projection", sorted({*TRAK_PROJECTIONS, usual})), ("checkpoints", TRAK_CHECKPOINTS)):
        points = []
        for value in values:
            if axis == "projection" and value >= len(bench.task.train_data):
                continue  # the kernel would have no inverse
            cell = score_cell(bench, "trak", {axis: value}, bench.arguments.budget_split)
            points.append({"value": value} | {key: cell[key] for key in ("seconds", "lds", "ci_low", "ci_high")})
        curves.append({"method": "trak", "axis": axis, "normalised": False, "points": points})
    return curves


# ---- the command ----


def show_sweep(result: dict[str, Any]) -> str:
    options = list(result["axes"])
    header = [*options, "LDS", "normalised", "R-hat", "ESS", "seconds"]
    ordered = sorted(result["cells"], key=lambda cell: -(cell["lds"] if cell["lds"] is not None else -math.inf))
    rows = [
        [
            *(setting_text(cell[option]) for option in options),
            number(cell["lds"]) if cell["lds"] is not None else "NaN",
            number(cell.get("lds_normalised")),
            number(cell.get("rhat")),
            number(cell.get("ess"), 0),
            number(cell.get("seconds"), 1),
        ]
        for cell in ordered
    ]
    lines = [table(header, rows, left=len(options)), ""]
    for name, best in result["best_on_report"].items():
        chosen = ", ".join(f"{option} {setting_text(best[option])}" for option in options)
        value = best["lds"] if name == "lds" else best["lds_normalised"]
        kind = "raw" if name == "lds" else "train-normalised"
        lines.append(f"best {kind} on tune: {chosen} ({best['tune']:.3f}); on report: {value:.3f}")
    return "\n".join(lines)


def show_budget(result: dict[str, Any]) -> str:
    rows = [
        [
            curve["method"],
            "train-normalised" if curve["normalised"] else "raw",
            f"{point['value']} {curve['axis']}",
            number(point["seconds"], 1),
            number(point["lds"]),
            f"[{number(point['ci_low'])}, {number(point['ci_high'])}]",
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
    started = time.perf_counter()
    try:
        check_device(arguments.device)
        grid = {} if arguments.budget else read_grid(arguments.grid, arguments.method)
        out = Path(arguments.out or ("runs/budget" if arguments.budget else "runs/sweep"))
        check_out(str(out))
        bench = Bench(arguments)
        lds.note_what_is_too_many(arguments, bench.task)
        result = budget(bench) if arguments.budget else sweep(bench, arguments.method, grid)
    except (UsageError, StoreError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        close_bars()
        print(f"{parser.prog}: interrupted; finished cells are kept, and the same command goes on", file=sys.stderr)
        return 130
    result = without_nan(json.loads(json.dumps(result, default=dataclasses.asdict)))
    identity = {
        key: value for key, value in result.items() if key not in ("cells", "curves", "best_on_report", "device")
    }
    run_id = hashlib.sha256(canonical_json({**identity, "task_config": bench.task.config}).encode()).hexdigest()[:12]
    record = {
        **result,
        "run_id": run_id,
        "command": shlex.join(["python", "-m", "bench.sweep", *argv]),
        "description": bench.task.description,
        "versions": versions(),
        "commit": code_commit(),
        "code": code_fingerprint(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.perf_counter() - started, 1),
    }
    path = out / ("budget.json" if arguments.budget else "sweep.json")
    unwritten = why_unwritten(lambda: write_whole(path, json.dumps(record) + "\n"), path)
    print(show_budget(result) if arguments.budget else show_sweep(result))
    print(f"\nrun {run_id} in {record['seconds']:.0f} s" + ("" if unwritten else f"; record: {path}"))
    problems = [f"{unwritten}; the same command writes it, from {arguments.cache}"] if unwritten else []
    cells = result.get("cells", [])
    if cells and all(cell["lds"] is None for cell in cells):
        problems.append(f"no cell has an LDS; the first: {cells[0]['reason']}")
    for problem in problems:
        print(f"{parser.prog}: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
