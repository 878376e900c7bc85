"""Time methods against each other on one question, in one process: seconds and memory.

    python -m bench.speed --task cifar10 --data-dir DIR --methods bif ekfac --query-split all --set bif.draws=100

Every method is warmed up on a small version of the same question (libraries load, kernels are chosen), then timed by
the suite's one clock: fit and score apart, the device synchronised. Nothing comes from the cache but the checkpoint.
`agrees` is how alike two methods rank the training examples: the Spearman correlation of raw scores with those of the
first method, mean over queries. A method that fails is named, and the others are timed.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import bench.arguments as options
import bench.measure
import bench.scoring
from baselines.method import Problem
from bench.arguments import at_least
from bench.experiment import execution_of, experiment_of
from bench.ground_truth import base_model
from bench.methods import Variant
from bench.metrics import spearman_per_column
from bench.records import command_line, digest_of, provenance, replace_record
from bench.runner import Session
from bench.tables import bytes_text, number, table
from retrain.errors import UsageError
from retrain.progress import bar

COMPARED_QUERIES = 500  # the first so many tell how alike two methods are
TIMED_METHODS = ("bif", "ekfac", "trak", "gradsim")


def time_methods(arguments: argparse.Namespace, command: str, prog: str) -> int:
    arguments.methods = arguments.methods or list(TIMED_METHODS)
    if arguments.out:
        options.check_out(arguments.out)
    session = Session(experiment_of(arguments), execution_of(arguments))
    for variant in session.active:
        if variant.method.extra_retrains()[0]:
            session.skipped[variant.label] = "its seconds are those of retraining, which bench.lds counts"
    session.active = [variant for variant in session.active if variant.label not in session.skipped]
    session.report_skipped()
    question, device = session.question(*session.blocks[0]), session.device()
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    first_scores = np.empty(0)
    with tempfile.TemporaryDirectory(prefix="tda-bench-speed-") as scratch:  # nothing of a timing is kept
        model, _ = base_model(session.task, question.seed, session.store, session.execution.device)
        problem = bench.scoring.problem_of(question, model, session.store, session.execution.device, Path(scratch))
        sizes = {"num_train": len(problem.attributed_indices), "num_queries": len(problem.queries)}
        for variant in bar(session.active, desc="methods", unit="method", leave=False):
            try:
                row, scores = time_method(variant, problem, arguments.repeats)
            except (RuntimeError, FloatingPointError, UsageError) as error:  # the last: it cannot do with its settings
                failed[variant.label] = (str(error).splitlines() or [type(error).__name__])[0]
                continue
            first_scores = first_scores if rows else scores
            rows.append(row | sizes | {"agrees": mean_correlation(first_scores.T, scores.T)})
    problems = [*session.out.problems, *(f"{label} failed: {reason}" for label, reason in failed.items())]
    if rows:
        print(speed_table(rows, session.task.description, device))
        asked = {"question": question.config(), "experiment": session.experiment.to_json()}
        # Its id is that of what was asked, and where: seconds never come out the same twice.
        run_id = digest_of({**asked, "repeats": arguments.repeats, "device": device})
        known = {"run_id": run_id, "command": command, "description": session.task.description}
        record = {**known, **asked, "rows": rows, "failed": failed, **provenance(device)}
        if arguments.out:  # another question's record is put aside
            path = Path(arguments.out) / "speed.json"
            unwritten = replace_record(path, record)
            print("" if unwritten else f"\nrecord: {path}")
            problems += [unwritten] if unwritten else []
    return options.report(prog, session.notes, problems, session.skipped)


def time_method(variant: Variant, problem: Problem, repeats: int) -> tuple[dict[str, Any], np.ndarray]:
    """The row of the run whose total is the median, the lower of two; and the scores of some queries."""
    method, rows = variant.method, []
    bench.scoring.warm_up(method, problem)
    for _ in range(repeats):
        # Gone when the method fails, too: the next one starts from an empty folder.
        with tempfile.TemporaryDirectory(dir=problem.scratch, ignore_cleanup_errors=True) as scratch:
            own = replace(problem, scratch=Path(scratch), shared={})
            attribution, cost = bench.measure.measure(method, own)
        total = cost["fit_seconds"] + cost["score_seconds"]
        rows.append({"method": method.name, "seconds": total, **cost, "diagnostics": attribution.diagnostics})
        scores = attribution.scores[:COMPARED_QUERIES].float().cpu().numpy()
        del attribution
    rows.sort(key=lambda row: row["seconds"])
    known = {"label": variant.label, "settings": variant.settings, "options": method.config}
    return {**rows[(len(rows) - 1) // 2], **known, "all_seconds": [row["seconds"] for row in rows]}, scores


def mean_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Mean over columns of Spearman's correlation."""
    return float(np.nanmean(spearman_per_column(first, second)))


def speed_table(rows: list[dict[str, Any]], description: str, device: str) -> str:
    """Seconds also over those of BIF, or without it of the first method."""
    labels = [row["label"] for row in rows]  # one that is tuned for each kind of scores has two rows
    names = [row["label"] + f" ({row['settings']})" * (labels.count(row["label"]) > 1) for row in rows]
    reference = next((k for k, row in enumerate(rows) if row["method"] == "bif"), 0)
    cells = []
    for name, row in zip(names, rows, strict=True):
        relative = row["seconds"] / rows[reference]["seconds"]
        seconds = [number(row[kind], 2) for kind in ("fit_seconds", "score_seconds", "seconds")]
        memory = bytes_text(row["peak_memory_bytes"])
        cells.append([name, *seconds, number(relative, 2), memory, number(row["agrees"])])
    repeats, first = len(rows[0]["all_seconds"]), rows[0]
    return (
        f"{description}: {first['num_train']:,} training examples x {first['num_queries']:,} queries, {device}; "
        f"{'median' if repeats % 2 else 'lower median'} of {repeats}\n\n"
        f"{table(['method', 'fit s', 'score s', 'total s', 'relative', 'memory', 'agrees'], cells)}\n"
        f"relative: total s over that of {names[reference]}\n"
        f"agrees: Spearman's correlation of raw scores with {names[0]}'s, mean over queries"
    )


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = options.Parser(prog="python -m bench.speed", description=str(__doc__).split("\n")[0])
    options.add_task_arguments(parser)
    options.add_method_arguments(parser, TIMED_METHODS)
    options.add_query_arguments(parser)
    options.add_block_arguments(parser, nargs=1)
    add = parser.add_argument
    add("--repeats", type=at_least(1), default=3, help="timed runs, of which the (lower) median counts (default: 3)")
    add("--out", help="folder for the record (default: nothing is written)")
    parser.set_defaults(alpha=[0.5])  # nothing is retrained
    arguments, command = parser.parse_args(words), command_line("bench.speed", words)
    return options.run_cli(parser.prog, lambda: time_methods(arguments, command, parser.prog), "nothing was written")


if __name__ == "__main__":
    sys.exit(main())
