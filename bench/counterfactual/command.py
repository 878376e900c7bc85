"""The command of `bench.counterfactual`."""

import argparse
import math
from collections.abc import Sequence

from bench.answers import Answers
from bench.attributions import SCORE_CHOICES
from bench.counterfactual.brittleness import BRITTLENESS
from bench.counterfactual.removal import RANDOM_REMOVAL, SAME_CLASS, SHARES, Removal, run_removal
from bench.experiment import Experiment
from bench.question_command import add_question_arguments, answer_command, finish
from bench.tables import table, tables
from bench.translate import asked_for, execution_of
from retrain.command import (
    Parser,
    at_least,
    check_out,
    fraction,
)
from retrain.removal import classifies

NUM_QUERIES = 100


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.counterfactual", description="Removal curves and brittleness, by retraining.")
    add_question_arguments(parser)
    add = parser.add_argument
    shares = " ".join(f"{share:g}" for share in SHARES)
    add("--shares", nargs="+", type=fraction, help=f"of the attributed examples that are removed (default: {shares})")
    add("--replicates", type=at_least(1), default=3, help="retrains of every set (default: %(default)s)")
    add("--reference", type=at_least(2), default=20, help="models with nothing removed (default: %(default)s)")
    add("--controls", type=at_least(2), default=10, help="random sets of a size, or class and size (default: 10)")
    add("--scores", choices=tuple(SCORE_CHOICES), default="raw", help="whose order is removed (default: %(default)s)")
    add("--brittleness", action="store_true", help="also find the smallest share that flips each prediction")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return answer_command(make_parser(), argv, _run)


def _run(arguments: argparse.Namespace, command: str, prog: str) -> int:
    check_out(arguments.out)
    if arguments.queries is None:
        arguments.queries = NUM_QUERIES
    asked = asked_for(argparse.Namespace(**{**vars(arguments), "replicates": None}))
    removal = Removal(
        experiment=Experiment(**asked),
        **{name: getattr(arguments, name) for name in ("replicates", "reference", "controls", "scores", "brittleness")},
        shares=tuple(dict.fromkeys(arguments.shares or ())),
    )
    out = run_removal(removal, execution_of(arguments))
    return finish(out, show_removal(out), arguments.out, command, prog)


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
            f"examples are left out,\nmean over queries with its 95 % interval; {out.truth};\n"
            f"{'train-normalised' if normalised else 'raw'} scores, seed {seed}"
        )
        controls = f"{RANDOM_REMOVAL}: sets drawn at random"
        if classifies(out.task):
            controls += f"; {SAME_CLASS}: drawn from the query's own class"
        parts.append(f"{words}\n{tables(header, lines)}\n{controls}")
        if classifies(out.task) and len({size for label, size in cells if label == SAME_CLASS}) < len(sizes):
            parts[-1] += f"\n{SAME_CLASS} ends where no query's class has so many examples"
        if any(row["num_undefined"] for row in curves if row["label"] == SAME_CLASS):
            parts[-1] += "\nundefined: queries whose class has fewer examples than are removed"
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
    undefined = f" ({row['num_undefined']} undefined)" if row["num_undefined"] else ""
    return f"{row['value']:+.3f} {_signed(row)}{undefined}"


def _signed(row: dict) -> str:
    """Its interval, with signs as changes have them."""
    low, high = (f"{end:+.3f}" if math.isfinite(end) else "-" for end in (row["ci_low"], row["ci_high"]))
    return f"[{low}, {high}]"


def _pairs_text(out: Answers, seed: int, attributed: float, normalised: bool, size: int) -> str:
    lines = [
        [
            f"{pair['label']} - {pair['against']}"
            + (f" ({pair['num_undefined']} undefined)" if pair["num_undefined"] else ""),
            f"{pair['difference']:+.3f}",
            _signed(pair),
            "-" if not math.isfinite(pair["p_value"]) else f"{pair['p_value']:.2g}",
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
            f"{'>= ' if row['num_unflipped'] else ''}{100 * row['value']:.2f} %",
            "-"
            if row["num_unflipped"] == row["num_queries"]
            else f"[{100 * row['ci_low']:.2f}, {100 * row['ci_high']:.2f}]",
            f"{row['num_queries'] - row['num_unflipped']} of {row['num_queries']}",
        ]
        for row in sorted(rows, key=lambda row: row["value"])
    ]
    header = ["brittleness", "share that flips", "95 % interval", "flipped"]
    largest = (
        "geometric mean over the queries that are right with nothing removed; one that the largest size does not flip "
        "counts\nas if it did: >= is a lower bound"
    )
    return f"{table(header, lines)}\n{largest}"
