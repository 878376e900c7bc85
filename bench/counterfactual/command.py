"""The command of `bench.counterfactual`."""

import argparse
import logging
import sys
from collections.abc import Sequence

from bench.answers import Answers
from bench.arguments import add_method_arguments, add_query_arguments
from bench.attributions import SCORE_CHOICES
from bench.counterfactual.brittleness import BRITTLENESS
from bench.counterfactual.removal import SAME_CLASS, SHARES, Removal, run_removal
from bench.experiment import Experiment
from bench.record import command_line, why_unwritten
from bench.tables import interval, table
from bench.translate import asked_for, execution_of
from retrain.command import (
    RUNS,
    Parser,
    add_cluster_arguments,
    add_task_arguments,
    at_least,
    check_out,
    fraction,
    guarded,
    share,
)
from retrain.seeds import INITIALISATIONS

NUM_QUERIES = 100


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """What questions beside LDS have in common: task, methods, queries, seeds, where it runs and where records go."""
    add_task_arguments(parser)
    add_method_arguments(parser)
    add_query_arguments(parser)
    add = parser.add_argument
    add("--alpha-attribution", nargs="+", type=share, help="share of the training set attributed (default: the task's)")
    add("--seeds", "--seed", nargs="+", type=at_least(0), help="whole experiments to repeat (default: 1)")
    add("--initialisation", choices=INITIALISATIONS, help="of retrained models: the base model's, or each its own")
    add("--out", default=RUNS, help="where records go, a folder each (default: %(default)s)")
    add("--force", action="store_true", help="retrain and score again what this command needs, even if it is cached")
    add("--rescore", action="store_true", help="score again, and keep the retrains")
    add_cluster_arguments(parser)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.counterfactual", description="Removal curves and brittleness, by retraining.")
    add_question_arguments(parser)
    add = parser.add_argument
    add("--shares", nargs="+", type=fraction, default=list(SHARES), help="of the attributed examples that are removed")
    add("--replicates", type=at_least(1), default=3, help="retrains of every set (default: %(default)s)")
    add("--reference", type=at_least(2), default=20, help="models with nothing removed (default: %(default)s)")
    add("--controls", type=at_least(2), default=10, help="random sets of a size, or class and size (default: 10)")
    add("--scores", choices=tuple(SCORE_CHOICES), default="raw", help="whose order is removed (default: %(default)s)")
    add("--brittleness", action="store_true", help="also find the smallest share that flips each prediction")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    command = command_line("bench.counterfactual", argv)
    return guarded(parser.prog, lambda: _run(arguments, command, parser.prog), traceback=arguments.traceback)


def _run(arguments: argparse.Namespace, command: str, prog: str) -> int:
    check_out(arguments.out)
    if arguments.queries is None:
        arguments.queries = NUM_QUERIES
    asked = asked_for(argparse.Namespace(**{**vars(arguments), "replicates": None}))
    removal = Removal(
        experiment=Experiment(**asked),
        **{name: getattr(arguments, name) for name in ("replicates", "reference", "controls", "scores", "brittleness")},
        shares=tuple(dict.fromkeys(arguments.shares)),
    )
    out = run_removal(removal, execution_of(arguments))
    return finish(out, show_removal(out), arguments.out, command, prog)


def finish(out: Answers, text: str, folder: str, command: str, prog: str) -> int:
    """Prints, writes the record, and says what went wrong: the end of every such command."""
    out.name_it()
    print(text)
    place = f"{folder}/{out.run_id}"
    unwritten = why_unwritten(lambda: out.save(folder, command), place)
    print(f"\nrun {out.run_id} in {out.seconds:.0f} s" + ("" if unwritten else f"; record: {place}/answers.json"))
    for label, reason in out.skipped.items():
        print(f"skipped {label}: {reason}", file=sys.stderr)
    for problem in [*out.problems, *([unwritten] if unwritten else [])]:
        print(f"{prog}: {problem}", file=sys.stderr)
    return 1 if out.problems or unwritten else 0


def show_removal(out: Answers) -> str:
    """One table a seed and kind of score: a line a method, a column a share; then who differs from the controls."""
    parts = []
    kinds = sorted({(row["seed"], row["alpha_attribution"], row["normalised"]) for row in out.rows})
    for seed, attributed, normalised in kinds:
        here = [
            row
            for row in out.rows
            if (row["seed"], row["alpha_attribution"], row["normalised"]) == (seed, attributed, normalised)
        ]
        curves = [row for row in here if row["metric"] == "removal"]
        sizes = sorted({row["size"] for row in curves})
        cells = {(row["label"], row["size"]): row for row in curves}
        labels = sorted({row["label"] for row in curves}, key=lambda name: -_value(cells.get((name, sizes[-1]))))
        header = ["removed", *(f"{size} ({100 * _at(curves, size):.2g} %)" for size in sizes)]
        lines = [[label, *(_cell(cells.get((label, size))) for size in sizes)] for label in labels]
        words = (
            f"{out.task.description}, protocol {out.task.protocol}: change of a query's loss when its most helpful "
            f"examples are left out,\n{out.truth}; {'train-normalised' if normalised else 'raw'} scores, seed {seed}"
        )
        parts.append(f"{words}\n{table(header, lines)}")
        if len({size for label, size in cells if label == SAME_CLASS}) < len(sizes) and (SAME_CLASS, sizes[0]) in cells:
            parts[-1] += f"\n{SAME_CLASS} ends where no query's class has so many examples"
        # The largest size at which there is the most to compare: a class may have fewer examples than the largest.
        compared = max(sizes, key=lambda size: (sum((label, size) in cells for label in labels), size))
        if pairs := _pairs_text(out, seed, attributed, normalised, compared):
            parts.append(pairs)
        if flips := [row for row in here if row["metric"] == BRITTLENESS]:
            parts.append(_flips_text(flips))
    return "\n\n".join(parts)


def _value(row: dict | None) -> float:
    return -1e30 if row is None or row["value"] != row["value"] else row["value"]


def _at(rows: Sequence[dict], size: int) -> float:
    return next(row["at"] for row in rows if row["size"] == size)


def _cell(row: dict | None) -> str:
    if row is None:
        return "-"
    return f"{row['value']:+.3f} {interval(row['ci_low'], row['ci_high'])}"


def _pairs_text(out: Answers, seed: int, attributed: float, normalised: bool, size: int) -> str:
    lines = [
        [
            f"{pair['label']} - {pair['against']}",
            f"{pair['difference']:+.3f}",
            f"[{pair['ci_low']:+.3f}, {pair['ci_high']:+.3f}]",
            f"{pair['p_value']:.2g}",
        ]
        for pair in out.pairs
        if pair["metric"] == "removal"
        and pair["size"] == size
        and (pair["seed"], pair["alpha_attribution"], pair["normalised"]) == (seed, attributed, normalised)
    ]
    header = [f"paired difference, {size} removed", "loss", "95 % interval", "p"]
    return table(header, lines) if lines else ""


def _flips_text(rows: Sequence[dict]) -> str:
    lines = [
        [
            row["label"],
            f"{100 * row['value']:.2f} %",
            f"[{100 * row['ci_low']:.2f}, {100 * row['ci_high']:.2f}]",
            f"{row['num_queries'] - row['num_unflipped']} of {row['num_queries']}",
        ]
        for row in sorted(rows, key=lambda row: row["value"])
    ]
    header = ["brittleness", "share that flips", "95 % interval", "flipped"]
    largest = "geometric mean; a query that the largest size does not flip counts as if it did"
    return f"{table(header, lines)}\n{largest}"
