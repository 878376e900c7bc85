"""How fast a task's models are retrained, and whether the fast way gives the plain way's losses.

    python -m bench.retrain_speed --task cifar10 --protocol scratch --alpha 0.1 0.5 --data-dir DIR --out FOLDER

Retrains go the way of any run: as units, through the job layer, into a (temporary) store, with every query's loss.
Beside it stands the plain way: one training after another by torch's own kernels, a copy of its model, the task's usual
pass over the queries, nothing kept. Both train on the same subsets with the same seeds, so that their losses differ by
rounding alone; how much replicates of a subset differ says how little that is. Everything is warmed up; medians of
--repeats.
"""

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.arguments import (
    Parser,
    add_plan_arguments,
    add_task_arguments,
    at_least,
    check_device,
    check_out,
    run_cli,
)
from bench.metrics import spearman_per_column
from bench.records import command_line, provenance, try_write, write_json
from bench.tables import number, table
from retrain.errors import UsageError
from retrain.store import Store

WARM_UP_RETRAINS = 32
FEWEST_SUBSETS = 10  # or else a correlation across them says nothing


def by_units(task: Any, plan: Any, device: str) -> tuple[np.ndarray, float]:
    """(replicates, subsets, queries) of losses as any run makes them, and the seconds of it all."""
    from retrain.jobs import run_units
    from retrain.units import retrain_units

    with tempfile.TemporaryDirectory(prefix="retrain-speed-") as folder:
        store, units = Store(folder), retrain_units(task, plan, device)
        start = time.perf_counter()
        report = run_units(units, store)
        seconds = time.perf_counter() - start
        if report.failed:
            raise RuntimeError(next(iter(report.failed.values())))
        losses = [store.read(unit.kind, unit.config).arrays["losses"] for unit in units]  # type: ignore[union-attr]
    return np.stack(losses).reshape(plan.replicates, plan.num_subsets, -1), seconds


def one_by_one(task: Any, plan: Any, device: str) -> tuple[np.ndarray, float]:
    """(subsets, queries) of the first replicate the plain way, whatever the task does better; and the seconds."""
    from retrain.seeds import retrain_seeds
    from retrain.task import Task
    from retrain.train import one_thread
    from retrain.units import choose_device, retrain_units

    units = retrain_units(task, plan, device)[: plan.num_subsets]
    where, attributed, rows = choose_device(device), plan.attributed(task), []
    start = time.perf_counter()
    for unit, kept in zip(units, plan.masks(task), strict=True):
        init_seed, order_seed = retrain_seeds(unit.config)
        seeds = {"init_seed": init_seed, "order_seed": order_seed}
        with one_thread(where):
            rows.append(Task.retrained_losses(task, attributed[kept], device=where, **seeds).numpy())
    return np.stack(rows), time.perf_counter() - start


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Mean over queries of Spearman's correlation across subsets; both are (subsets, queries)."""
    return float(np.nanmean(spearman_per_column(first.astype(np.float64), second.astype(np.float64))))


def timed_both_ways(task: Any, plan: Any, device: str, repeats: int) -> dict[str, Any]:
    from retrain.units import task_from, task_specification

    task = task_from(task_specification(task))  # the one that units find in this process
    warm_up = replace(plan, num_subsets=min(WARM_UP_RETRAINS, plan.num_subsets), replicates=1, stream="tune")
    by_units(task, warm_up, device)
    fast = [by_units(task, plan, device) for _ in range(repeats)]
    usual = task.plain()
    one_by_one(usual, warm_up, device)
    plain = [one_by_one(usual, plan, device) for _ in range(repeats)]
    losses, (first, second) = fast[0][0], fast[0][0][:2]
    num_retrains = losses.shape[0] * losses.shape[1]
    return {
        "protocol": task.protocol,
        "alpha": plan.alpha,
        "alpha_attribution": plan.alpha_attribution,
        "seed": plan.seed,
        "num_kept": int(plan.masks(task)[0].sum()),
        "num_retrains": num_retrains,
        "num_queries": losses.shape[2],
        "seconds": [seconds for _, seconds in fast],
        "plain_seconds": [seconds for _, seconds in plain],
        "a_second": num_retrains / statistics.median(seconds for _, seconds in fast),
        "plain_a_second": losses.shape[1] / statistics.median(seconds for _, seconds in plain),
        "mean_loss": float(losses.mean()),
        "num_not_finite": int((~np.isfinite(losses)).sum()),
        "same_again": all(np.array_equal(losses, again, equal_nan=True) for again, _ in fast),
        "difference_from_plain": float(np.abs(first - plain[0][0]).mean()),
        "difference_of_replicates": float(np.abs(first - second).mean()),
        "correlation_with_plain": correlation(first, plain[0][0]),
        "correlation_of_replicates": correlation(first, second),
    }


def retrain_table(rows: list[dict[str, Any]], description: str, device: str) -> str:
    several = len({row.get("seed") for row in rows}) > 1
    head = ["seed"] if several else []
    head += ["alpha", "examples", "retrains/s", "plain/s", "same bits again", "|difference| from plain",
             "of replicates", "correlation with plain", "of replicates"]  # fmt: skip
    lines = [
        [
            *([str(row["seed"])] if several else []),
            f"{row['alpha']:g}",
            f"{row['num_kept']:,}",
            number(row["a_second"], 1),
            number(row["plain_a_second"], 1),
            "yes" if row["same_again"] else "no",
            number(row["difference_from_plain"], 5),
            number(row["difference_of_replicates"], 5),
            number(row["correlation_with_plain"], 4),
            number(row["correlation_of_replicates"], 4),
        ]
        for row in rows
    ]
    first = rows[0]
    title = f"{description}, protocol {first['protocol']}: {first['num_retrains']} retrains with the losses of "
    title += f"{first['num_queries']:,} queries, {device}; median of {len(first['seconds'])}"
    legend = (
        "plain: one by one with torch's own kernels; |difference|: of losses, mean; correlation: across subsets, mean "
        "over queries;\nof replicates: the same of two trainings on a subset, for comparison"
    )
    return f"{title}\n\n{table(head, lines)}\n{legend}"


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.retrain_speed", description=__doc__.split("\n")[0])
    add_task_arguments(parser)
    add_plan_arguments(parser, FEWEST_SUBSETS)
    parser.add_argument("--repeats", type=at_least(1), default=3, help="timings, whose median counts (default: 3)")
    parser.add_argument("--out", help="folder for retrain_speed.json (default: nothing is written)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    command = command_line("bench.retrain_speed", argv)
    return run_cli(parser.prog, lambda: time_retrains(arguments, command, parser.prog), "nothing was written")


def time_retrains(arguments: argparse.Namespace, command: str, prog: str) -> int:
    from bench.experiment import task_and_plans
    from retrain.units import choose_device, describe_device, retrain_units

    check_device(arguments.device)
    if arguments.replicates not in (None, 2) or arguments.replicated_subsets is not None:
        raise UsageError("every subset is retrained twice here; leave out --replicates and --replicated-subsets")
    if arguments.out:
        check_out(arguments.out)
    (task, asked), device = task_and_plans(arguments), describe_device(choose_device(arguments.device))
    plans = [replace(plan, replicates=2, replicated_subsets=None) for plan in asked]
    for plan in plans:
        retrain_units(task, plan, arguments.device)  # one that cannot be drawn is refused before the first is timed
    rows = []
    for plan in plans:
        rows.append(timed_both_ways(task, plan, arguments.device, arguments.repeats))
        print(f"alpha {plan.alpha:g}: {rows[-1]['a_second']:.1f} retrains a second", file=sys.stderr)
    print(retrain_table(rows, task.description, device))
    if arguments.out:
        known = {"command": command, "description": task.description, "task": task.config, "rows": rows}
        path = Path(arguments.out) / "retrain_speed.json"
        if unwritten := try_write(lambda: write_json(path, {**known, **provenance(device)}), path):
            print(f"{prog}: {unwritten}", file=sys.stderr)
            return 1
        print(f"\nrecord: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
