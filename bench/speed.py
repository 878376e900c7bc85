"""Time methods against each other on one question, in one process: seconds, memory, and BIF's share of the hardware.

    python -m bench.speed --task cifar10 --data-dir DIR --methods bif ekfac --query-split all --set bif.draws=100

Every method is warmed up on a small version of the same question (libraries load, kernels are chosen), then timed by
the suite's one clock: fit and score apart, the device synchronised. Nothing comes from the cache but the checkpoint.
For BIF the table adds the time a draw takes, and how that compares with the arithmetic floor: the floating-point
operations of one forward pass over all examples and of its minibatch gradients (three forward passes each), at the
speed of a large matrix product on this machine, measured in the same run. `agrees` is how alike two methods rank the
training examples: the Spearman correlation of raw scores with those of the first method, mean over queries.
Interrupted, it keeps the methods that were timed, unless there is a record already, and names the others.
"""

import argparse
import contextlib
import itertools
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.arguments import add_method_arguments, add_query_arguments
from bench.metrics import spearman_per_column
from bench.record import command_line, provenance, why_unwritten, write_json
from bench.tables import bytes_text, number, table
from retrain.command import Parser, add_task_arguments, at_least, check_out, guarded, share
from retrain.errors import UsageError
from retrain.progress import close_bars, counting
from retrain.store import Store, UnwritableStoreError

COMPARED_QUERIES = 500  # the first so many tell how alike two methods are
TIMED_METHODS = ("bif", "ekfac", "trak", "gradsim")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.speed", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add_task_arguments(parser)
    add_method_arguments(parser, TIMED_METHODS)
    add("--alpha-attribution", nargs=1, type=share, help="share of the training set attributed (default: the task's)")
    add_query_arguments(parser)
    add("--seed", dest="seeds", nargs=1, type=at_least(0), help="of the checkpoint and the methods (default: 1)")
    add("--repeats", type=at_least(1), default=3, help="timed runs a method; the median counts (default: 3)")
    add("--out", help="folder for speed.json (default: nothing is written)")
    parser.set_defaults(alpha=[0.5])  # nothing is retrained
    return parser


def time_method(
    variant: Any, problem: Any, repeats: int, timed: Callable[[], None]
) -> tuple[dict[str, Any], np.ndarray]:
    """The row of the run whose total is the median; and the scores of some queries. `timed`: after each run."""
    from bench.measure import measure
    from bench.warm_up import warm_up

    method = variant.method
    warm_up(method, problem)
    timed()
    rows = []
    for repeat in range(repeats):
        scratch = problem.scratch / f"timed-{repeat}"
        scratch.mkdir()
        attribution, cost = measure(method, replace(problem, scratch=scratch, shared={}))
        shutil.rmtree(scratch, ignore_errors=True)
        total = cost["fit_seconds"] + cost["score_seconds"]
        rows.append({"method": method.name, "seconds": total, **cost, "diagnostics": attribution.diagnostics})
        scores = attribution.scores[:COMPARED_QUERIES].float().cpu().numpy()
        del attribution
        timed()
    rows.sort(key=lambda row: row["seconds"])
    known = {"label": variant.label, "settings": variant.settings, "options": method.config}
    return {**rows[len(rows) // 2], **known, "all_seconds": [row["seconds"] for row in rows]}, scores


def rank_agreement(first: np.ndarray, second: np.ndarray) -> float:
    """Mean over queries of the Spearman correlation over training examples."""
    return float(np.nanmean(spearman_per_column(first.T.astype(np.float64), second.T.astype(np.float64))))


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


def speed_table(rows: list[dict[str, Any]], question: Any, peak: dict[str, Any]) -> str:
    """Seconds over those of BIF, or without it of the first method; columns about draws where there are any."""
    reference = next((row for row in rows if row["method"] == "bif"), rows[0])
    labels = [row["label"] for row in rows]  # one that is tuned for each kind of scores has two rows
    drawn = any("seconds_per_draw" in row for row in rows)
    header = ["method", "fit s", "score s", "total s", f"x {reference['label']}", "memory", "agrees"]
    cells = [
        [
            row["label"] + f" ({row['settings']})" * (labels.count(row["label"]) > 1),
            number(row["fit_seconds"], 2),
            number(row["score_seconds"], 2),
            number(row["seconds"], 2),
            number(row["seconds"] / reference["seconds"], 2),
            bytes_text(row["peak_memory_bytes"]),
            number(row["agrees"]),
        ]
        for row in rows
    ]
    if drawn:
        header += ["ms/draw", "floor s", "of peak"]
        for row, line in zip(rows, cells, strict=True):
            line += [
                number(1000 * row["seconds_per_draw"] if "seconds_per_draw" in row else None, 2),
                number(row.get("floor_seconds"), 2),
                f"{100 * row['share_of_peak']:.0f} %" if "share_of_peak" in row else "",
            ]
    return "\n".join(
        [
            f"{question.task.description}: {rows[0]['num_train']:,} training examples x {rows[0]['num_queries']:,} "
            f"queries, {peak['device']}; peak {peak['flops'] / 1e9:,.0f} GFLOP/s "
            f"({peak['dtype']} products of {peak['size']}); median of {len(rows[0]['all_seconds'])}",
            "",
            table(header, cells),
            f"agrees: Spearman's correlation of raw scores with {labels[0]}'s, mean over queries",
        ]
    )


@contextlib.contextmanager
def _scratch(store: Store) -> Iterator[Path]:
    """Nothing of a timing is kept: where the cache can only be read, any other disk will do."""
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(store.scratch())
        except UnwritableStoreError:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tda-bench-speed-")))
        yield folder


def time_all(session: Any, repeats: int) -> tuple[list[dict[str, Any]], Any, dict[str, Any], list[str]]:
    """Rows of the methods, the question, the machine's peak, and labels that an interrupt left untimed."""
    from baselines.bif.method import BIF
    from bench.ground_truth import base_model
    from bench.scaling.measuring import matmul_peak
    from bench.scoring import problem_of

    task, device = session.task, session.execution.device
    (block,) = session.blocks
    question = session.question(*block)
    with _scratch(session.store) as scratch:
        model, _ = base_model(task, question.seed, session.store, device)
        problem = problem_of(question, model, session.store, device, scratch)
        peak = {**matmul_peak(problem.device), "device": session.device()}
        rows: list[dict[str, Any]] = []
        first = np.empty(0)
        for variant in session.active:
            if variant.method.further_subsets()[0]:
                session.skipped[variant.label] = "its seconds are those of retraining, which bench.lds counts"
        timed = [variant for variant in session.active if variant.label not in session.skipped]
        num_done, num_all = itertools.count(1), len(timed) * (1 + repeats)
        with counting(True, "runs of methods, warm-ups included") as show:
            show(0, num_all)
            try:
                for variant in timed:
                    row, scores = time_method(variant, problem, repeats, lambda: show(next(num_done), num_all))
                    first = scores if not rows else first
                    row["agrees"] = rank_agreement(first, scores)
                    row |= {"num_train": len(problem.attributed_indices), "num_queries": len(problem.queries)}
                    if isinstance(variant.method, BIF) and not variant.method.control_variate:
                        method = variant.method.fit(problem).method  # with the numbers that its pilot chose
                        add_floor(row, method, problem, peak["flops"])
                    rows.append(row)
            except KeyboardInterrupt:
                if not rows:
                    raise
                close_bars()
    if not rows:
        raise UsageError("every method was skipped; there is nothing to time")
    return rows, question, peak, [variant.label for variant in timed[len(rows) :]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(argv)
    arguments.methods = arguments.methods or list(TIMED_METHODS)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    command = command_line("bench.speed", argv)
    return guarded(parser.prog, lambda: time_methods(arguments, command, parser.prog), "nothing was written")


def time_methods(arguments: argparse.Namespace, command: str, prog: str) -> int:
    from bench.experiment import Session
    from bench.translate import execution_of, experiment_of

    if arguments.out:
        check_out(arguments.out)
    session = Session(experiment_of(arguments), execution_of(arguments))
    for note in session.notes:
        print(note, file=sys.stderr)
    rows, question, peak, untimed = time_all(session, arguments.repeats)
    print(speed_table(rows, question, peak))
    for label, reason in session.skipped.items():
        print(f"skipped {label}: {reason}", file=sys.stderr)
    for problem in session.out.problems:
        print(f"{prog}: {problem}", file=sys.stderr)
    path = Path(arguments.out or ".") / "speed.json"
    if arguments.out and not (untimed and path.exists()):  # a whole record is worth more than a part
        record = {
            "command": command,
            "description": question.task.description,
            "question": question.config(),
            "experiment": session.experiment.to_json(),
            "rows": rows,
            "peak": peak,
            "untimed": untimed,
            **provenance(session.device()),
        }
        if unwritten := why_unwritten(lambda: write_json(path, record), path):
            print(f"{prog}: {unwritten}", file=sys.stderr)
            return 1
        print(f"\nrecord: {path}")
    if untimed:
        print(f"{prog}: interrupted; these were not timed: {', '.join(untimed)}", file=sys.stderr)
        return 130
    return 1 if session.out.problems else 0


if __name__ == "__main__":
    sys.exit(main())
