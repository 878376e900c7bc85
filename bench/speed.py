"""Time methods against each other on one question, in one process: seconds and memory.

    python -m bench.speed --task cifar10 --data-dir DIR --methods bif ekfac --query-split all --set bif.draws=100
    python -m bench.speed retrain --task cifar10 --alpha 0.1 0.5 --data-dir DIR --out FOLDER     # models, not methods

Every method is warmed up on a small version of the same question (libraries load, kernels are chosen), then timed by
the suite's one clock: fit and score apart, the device synchronised. Nothing comes from the cache but the checkpoint.
`agrees` is how alike two methods rank the training examples: the Spearman correlation of raw scores with those of the
first method, mean over queries. A method that fails is named, and the others are timed.

`retrain` times how fast a task's models are retrained, and compares losses with the plain way's. Retrains go the way of
any run: as units, through the job layer, into a (temporary) store, with every query's loss. Beside it stands the plain
way: one training after another by torch's own kernels, nothing kept. Both train on the same subsets with the same
seeds, so that their losses differ by rounding alone; how much replicates of a subset differ says how little that is.
"""

import argparse
import hashlib
import statistics
import sys
import tempfile
import time
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
from bench.experiment import execution_of, experiment_of, task_and_plans
from bench.ground_truth import base_model
from bench.methods import Variant
from bench.metrics import spearman_per_column
from bench.records import command_line, keep_earlier, provenance, try_write, write_json
from bench.runner import Session
from bench.tables import bytes_text, number, table
from retrain.errors import UsageError
from retrain.jobs import run_units
from retrain.progress import bar
from retrain.store import Store, canonical_json
from retrain.subsets import retrain_seeds
from retrain.task import Task
from retrain.train import one_thread
from retrain.units import Plan, choose_device, describe_device, retrain_units, task_from, task_specification

COMPARED_QUERIES = 500  # the first so many tell how alike two methods are
TIMED_METHODS = ("bif", "ekfac", "trak", "gradsim")
WARM_UP_RETRAINS = 32
FEWEST_SUBSETS = 10  # or else a correlation across them says nothing


# ---- methods ----


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
        identity = canonical_json({**asked, "repeats": arguments.repeats, "device": device}, "result")
        run_id = hashlib.sha256(identity.encode()).hexdigest()[:12]
        known = {"run_id": run_id, "command": command, "description": session.task.description}
        record = {**known, **asked, "rows": rows, "failed": failed, **provenance(device)}
        problems += write_record(arguments.out, "speed.json", record)
    skipped = [f"skipped {label}: {reason}" for label, reason in session.skipped.items()]
    return options.report(prog, [*session.notes, *skipped], problems)


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


def write_record(out: str | None, name: str, record: dict[str, Any]) -> list[str]:
    """Why it was not written; empty when it was, or nobody asked. Another question's record is put aside."""
    if not out:
        return []
    path = Path(out) / name

    def write() -> None:
        if "run_id" in record:
            keep_earlier(path, record["run_id"])
        write_json(path, record)

    unwritten = try_write(write, path)
    print("" if unwritten else f"\nrecord: {path}")
    return [unwritten] if unwritten else []


# ---- how fast models are retrained ----


def time_retrains(arguments: argparse.Namespace, command: str, prog: str) -> int:
    options.check_device(arguments.device)
    if arguments.replicates not in (None, 2) or arguments.replicated_subsets is not None:
        raise UsageError("every subset is retrained twice here; leave out --replicates and --replicated-subsets")
    if arguments.out:
        options.check_out(arguments.out)
    (task, asked), device = task_and_plans(arguments), describe_device(choose_device(arguments.device))
    plans = [replace(plan, replicates=2, replicated_subsets=None) for plan in asked]
    for plan in plans:
        retrain_units(task, plan, arguments.device)  # one that cannot be drawn is refused before the first is timed
    rows = []
    for plan in plans:
        rows.append(timed_both_ways(task, plan, arguments.device, arguments.repeats))
        print(f"alpha {plan.alpha:g}: {rows[-1]['a_second']:.1f} retrains a second", file=sys.stderr)
    print(retrain_table(rows, task.description, device))
    known = {"command": command, "description": task.description, "task": task.config, "rows": rows}
    return options.report(prog, [], write_record(arguments.out, "retrain_speed.json", {**known, **provenance(device)}))


def timed_both_ways(task: Task, plan: Plan, device: str, repeats: int) -> dict[str, Any]:
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
        "correlation_with_plain": mean_correlation(first, plain[0][0]),
        "correlation_of_replicates": mean_correlation(first, second),
    }


def by_units(task: Task, plan: Plan, device: str) -> tuple[np.ndarray, float]:
    """(replicates, subsets, queries) of losses as any run makes them, and the seconds of it all."""
    with tempfile.TemporaryDirectory(prefix="retrain-speed-") as folder:
        store, units = Store(folder), retrain_units(task, plan, device)
        start = time.perf_counter()
        report = run_units(units, store)
        seconds = time.perf_counter() - start
        if report.failed:
            raise RuntimeError(next(iter(report.failed.values())))
        losses = [store.read(unit.kind, unit.config).arrays["losses"] for unit in units]  # type: ignore[union-attr]
    return np.stack(losses).reshape(plan.replicates, plan.num_subsets, -1), seconds


def one_by_one(task: Task, plan: Plan, device: str) -> tuple[np.ndarray, float]:
    """(subsets, queries) of the first replicate the plain way, whatever the task does better; and the seconds."""
    units = retrain_units(task, plan, device)[: plan.num_subsets]
    where, attributed, rows = choose_device(device), plan.attributed(task), []
    start = time.perf_counter()
    for unit, kept in zip(units, plan.masks(task), strict=True):
        init_seed, order_seed = retrain_seeds(unit.config)
        seeds = {"init_seed": init_seed, "order_seed": order_seed}
        with one_thread(where):
            rows.append(Task.retrained_losses(task, attributed[kept], device=where, **seeds).numpy())
    return np.stack(rows), time.perf_counter() - start


def retrain_table(rows: list[dict[str, Any]], description: str, device: str) -> str:
    head = ["seed", "alpha", "examples", "retrains/s", "plain/s", "same bits again", "|difference| from plain",
            "of replicates", "correlation with plain", "of replicates"]  # fmt: skip
    lines = []
    for row in rows:
        differences = [number(row[f"difference_{of}"], 5) for of in ("from_plain", "of_replicates")]
        correlations = [number(row[f"correlation_{of}"], 4) for of in ("with_plain", "of_replicates")]
        pace = [number(row["a_second"], 1), number(row["plain_a_second"], 1), "yes" if row["same_again"] else "no"]
        asked = [str(row["seed"]), f"{row['alpha']:g}", f"{row['num_kept']:,}"]
        lines.append([*asked, *pace, *differences, *correlations])
    first = rows[0]
    return (
        f"{description}, protocol {first['protocol']}: {first['num_retrains']} retrains with the losses of "
        f"{first['num_queries']:,} queries, {device}; median of {len(first['seconds'])}\n\n"
        f"{table(head, lines)}\n"
        "plain: one by one with torch's own kernels; |difference|: of losses, mean; correlation: across subsets, mean "
        "over queries;\nof replicates: the same of two trainings on a subset, for comparison"
    )


# ---- the command ----


def make_parser(retrain: bool) -> argparse.ArgumentParser:
    told = "How many models a task retrains in a second." if retrain else str(__doc__).split("\n")[0]
    parser = options.Parser(prog="python -m bench.speed" + " retrain" * retrain, description=told)
    options.add_task_arguments(parser)
    add = parser.add_argument
    if retrain:
        options.add_plan_arguments(parser, FEWEST_SUBSETS)
    else:
        options.add_method_arguments(parser, TIMED_METHODS)
        attributed = "share of the training set attributed (default: the task's)"
        add("--alpha-attribution", nargs=1, type=options.share, help=attributed)
        options.add_query_arguments(parser)
        add("--seed", dest="seeds", nargs=1, type=at_least(0), help="of the checkpoint and the methods (default: 1)")
        parser.set_defaults(alpha=[0.5])  # nothing is retrained
    add("--repeats", type=at_least(1), default=3, help="timed runs, of which the (lower) median counts (default: 3)")
    add("--out", help="folder for the record (default: nothing is written)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    retrain = words[:1] == ["retrain"]
    parser = make_parser(retrain)
    arguments = parser.parse_args(words[1:] if retrain else words)
    command, work = command_line("bench.speed", words), time_retrains if retrain else time_methods
    return options.run_cli(parser.prog, lambda: work(arguments, command, parser.prog), "nothing was written")


if __name__ == "__main__":
    sys.exit(main())
