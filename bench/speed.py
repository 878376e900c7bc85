"""Time methods against each other on one question, in one process: seconds, memory, and BIF's share of the hardware.

    python -m bench.speed --task cifar10 --data-dir DIR --methods bif ekfac --query-split all --set bif.draws=100

Every method is warmed up on a small version of the same question (libraries load, kernels are chosen), then timed by
the suite's one clock: fit and score apart, the device synchronised. Nothing comes from the cache but the checkpoint.
For BIF the table adds the time a draw takes, and how that compares with the arithmetic floor: the floating-point
operations of one forward pass over all examples and of its minibatch gradients (three forward passes each), at the
speed of a large matrix product on this machine, measured in the same run.
"""

import argparse
import json
import logging
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.lds import build_methods, question_of
from bench.record import code_commit, code_fingerprint, versions, why_unwritten, without_nan
from bench.tables import bytes_text, number, table
from retrain.command import Parser, add_task_arguments, at_least, build_task, check_device, check_out, share
from retrain.errors import UsageError, error_line
from retrain.safe_files import write_whole
from retrain.store import Store, StoreError

WARM_UP_QUERIES = 64  # and as many attributed examples
DEFAULT_METHODS = ("bif", "ekfac", "trak", "gradsim")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.speed", description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add_task_arguments(parser)
    add("--methods", nargs="+", default=list(DEFAULT_METHODS), help="files of baselines/, or package.module:Class")
    add("--alpha-attribution", type=share, help="share of the training set attributed (default: the task's)")
    add("--queries", type=at_least(1), help="only the first so many queries of the split")
    add("--query-split", choices=("tune", "report", "all"), default="report", help="which queries (default: report)")
    add("--seed", type=at_least(0), default=1, help="seed of the checkpoint and the methods (default: 1)")
    add("--repeats", type=at_least(1), default=1, help="timed runs a method; the median counts (default: 1)")
    add("--out", help="folder for speed.json (default: nothing is written)")
    return parser


def small_version(problem: Any) -> Any:
    """The same question about a few examples. TRAK and EK-FAC still fit on what they are given, so it is cut too."""
    few = min(4 * WARM_UP_QUERIES, len(problem.train))
    return replace(
        problem,
        train=problem.train.select(range(few)),
        attributed_indices=np.arange(min(WARM_UP_QUERIES, few)),
        queries=problem.queries.select(range(min(WARM_UP_QUERIES, len(problem.queries)))),
        scratch=problem.scratch / "warm-up",
    )


def time_method(method: Any, problem: Any, repeats: int) -> dict[str, Any]:
    """The row of the run whose total is the median."""
    from baselines.bif.method import BIF
    from bench.runner import measure

    warm_up = small_version(problem)
    warm_up.scratch.mkdir(parents=True, exist_ok=True)
    measure(replace(method, draws=2, burn_in=0) if isinstance(method, BIF) else method, warm_up)
    rows = []
    for repeat in range(repeats):
        scratch = problem.scratch / f"{method.name}-{repeat}"
        scratch.mkdir()
        attribution, cost = measure(method, replace(problem, scratch=scratch))
        shutil.rmtree(scratch, ignore_errors=True)
        total = cost["fit_seconds"] + cost["score_seconds"]
        rows.append({"method": method.name, "seconds": total, **cost, "diagnostics": attribution.diagnostics})
        del attribution
    rows.sort(key=lambda row: row["seconds"])
    return {**rows[len(rows) // 2], "all_seconds": [row["seconds"] for row in rows], "options": method.config}


def operations_per_example(problem: Any) -> float:
    """Floating-point operations of one example's forward pass, counted on the plain model."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    inputs = problem.queries.inputs[:2].to(problem.device)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        problem.model(inputs)
    return counter.get_total_flops() / len(inputs)


def add_floor(row: dict[str, Any], method: Any, problem: Any, peak: float) -> None:
    """What BIF's draws would take at the measured peak, and the share of it that they reach."""
    examples = len(problem.attributed_indices) + len(problem.queries)
    minibatch = min(method.minibatch, len(problem.train))
    gradients = 2 if method.gradient == "difference" else 1  # at the chain, and at the checkpoint
    per_draw = operations_per_example(problem) * (examples + 3 * gradients * method.thinning * minibatch)
    draws = method.chains * (method.burn_in + method.draws)
    row["num_draws"] = draws
    row["seconds_per_draw"] = row["score_seconds"] / draws
    row["floor_seconds"] = per_draw * draws / peak
    row["share_of_peak"] = row["floor_seconds"] / row["score_seconds"]


def show(rows: list[dict[str, Any]], question: Any, peak: dict[str, Any]) -> str:
    reference = next((row["seconds"] for row in rows if row["method"] == "bif"), None)
    lines = [
        f"{question.task.description}: {rows[0]['num_train']:,} training examples x {rows[0]['num_queries']:,} "
        f"queries, {peak['device']}; peak {peak['flops'] / 1e9:,.0f} GFLOP/s "
        f"({peak['dtype']} products of {peak['size']})",
        "",
        table(
            ["method", "fit s", "score s", "total s", "x bif", "memory", "ms/draw", "floor s", "of peak"],
            [
                [
                    row["method"],
                    number(row["fit_seconds"], 2),
                    number(row["score_seconds"], 2),
                    number(row["seconds"], 2),
                    number(row["seconds"] / reference if reference else None, 2),
                    bytes_text(row["peak_memory_bytes"]),
                    number(1000 * row["seconds_per_draw"] if "seconds_per_draw" in row else None, 2),
                    number(row.get("floor_seconds"), 2),
                    f"{100 * row['share_of_peak']:.0f} %" if "share_of_peak" in row else "",
                ]
                for row in rows
            ],
        ),
    ]
    return "\n".join(lines)


def run(arguments: argparse.Namespace, task: Any, methods: list[Any], store: Store) -> tuple[list[dict], Any, dict]:
    from baselines.bif.method import BIF
    from bench.runner import base_model, problem_of
    from bench.scaling_point import matmul_peak

    question = question_of(
        arguments, task, arguments.seed, arguments.alpha_attribution or task.default_alpha_attribution
    )
    with store.scratch() as scratch:
        model, _ = base_model(task, arguments.seed, store, arguments.device)
        problem = problem_of(question, model, store, arguments.device, scratch)
        peak = matmul_peak(problem.device)
        rows = []
        for method in methods:
            if reason := method.skip(task):
                print(f"skipped {method.name}: {reason}", file=sys.stderr)
                continue
            row = time_method(method, problem, arguments.repeats)
            row |= {"num_train": len(problem.attributed_indices), "num_queries": len(problem.queries)}
            if isinstance(method, BIF) and not method.control_variate:
                add_floor(row, method, problem, peak["flops"])
            rows.append(row)
    if not rows:
        raise UsageError("every method was skipped; there is nothing to time")
    return rows, question, peak


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        check_device(arguments.device)
        if arguments.out:
            check_out(arguments.out)
        task = build_task(arguments)
        methods = build_methods(arguments, task)
        rows, question, peak = run(arguments, task, methods, Store(arguments.cache))
    except (UsageError, StoreError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted; nothing was written", file=sys.stderr)
        return 130
    except (RuntimeError, FloatingPointError) as error:
        print(f"{parser.prog}: {error_line(error)}", file=sys.stderr)
        return 1
    print(show(rows, question, peak))
    if arguments.out:
        record = {
            "command": shlex.join(["python", "-m", "bench.speed", *argv]),
            "description": task.description,
            "question": question.config(),
            "rows": rows,
            "peak": peak,
            "versions": versions(),
            "commit": code_commit(),
            "code": code_fingerprint(),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        path = Path(arguments.out) / "speed.json"
        if unwritten := why_unwritten(
            lambda: write_whole(path, json.dumps(without_nan(record), indent=1) + "\n"), path
        ):
            print(f"{parser.prog}: {unwritten}", file=sys.stderr)
            return 1
        print(f"\nrecord: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
