"""Do methods agree? Spearman's correlation of their scores and the overlap of their top examples, as a matrix.

    python -m bench.agreement                                     # the embedded task, every two of the default methods
    python -m bench.agreement --methods bif ekfac kfac trak gradsim --tops 0.01 0.1 --seeds 1 2 3
    python -m bench.figures --results runs --only agreement       # the matrix, drawn

For every query, the scores of two methods over the attributed examples are correlated, and their most helpful shares
compared: an overlap of 1 means that both name the same examples; two random orders share as much as the top is large.
Means over queries, with Student's intervals. Nothing is retrained: this is about methods, not about who is right.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.answers import Answers
from bench.attributions import SCORE_CHOICES, answering_session, attributions
from bench.counterfactual.laboratory import orders_of
from bench.experiment import Execution, Experiment
from bench.metrics import spearman_per_column
from bench.metrics.removal import mean_change
from bench.question_command import add_question_arguments, answer_command, finish
from bench.sizes import enough_to_correlate, sizes_of
from bench.tables import number, tables
from bench.translate import asked_for, execution_of
from retrain.command import Parser, check_out, fraction
from retrain.errors import UsageError

TOP_SHARES = (0.01, 0.1)
AGREEMENT = "agreement"


def overlap(first: np.ndarray, second: np.ndarray, size: int) -> np.ndarray:
    """(queries,): the share that the first `size` of two orders, (queries, n), have in common."""
    shared = [len(np.intersect1d(a[:size], b[:size], assume_unique=True)) for a, b in zip(first, second, strict=True)]
    return np.array(shared) / size


def run_agreement(experiment: Experiment, execution: Execution, tops: Sequence[float], scores: str) -> Answers:
    """tops: shares of the attributed examples; none: TOP_SHARES, of each one example at least."""
    started = time.perf_counter()
    session = answering_session(experiment, execution)
    if len(session.active) < 2:
        raise UsageError(f"agreement is between two methods; --methods leaves {len(session.active)} that can run here")
    n = enough_to_correlate(session)
    sizes = sizes_of("--tops", tops, TOP_SHARES, n)
    scored = attributions(session)
    num_queries = len(session.question(*session.blocks[0]).query_indices())
    out = Answers(
        question=AGREEMENT,
        task=session.task,
        variants=session.active,
        asked={"experiment": experiment.to_json(), "tops": list(tops or TOP_SHARES), "scores": scores},
        ground={"query_split": experiment.query_split, "queries": experiment.queries, "num_attributed": n},
        truth=f"{num_queries} queries, {n:,} attributed examples",
        device=session.device(),
        skipped=session.skipped,
        notes=session.notes,
    )
    cells: list[dict[str, Any]] = []
    for (seed, share), found in scored.items():
        where = {"task": session.task.name, "protocol": session.task.protocol, "alpha_attribution": share, "seed": seed}
        for kind in SCORE_CHOICES[scores]:
            named = {
                one.variant.label: values
                for one in found
                if (values := one.scores(kind)) is not None  # type: ignore[arg-type]
            }
            orders = {label: orders_of(values) for label, values in named.items()}
            for a, b in itertools.combinations(named, 2):
                known = where | {"normalised": kind == "normalised", "label": a, "against": b}
                ranks = spearman_per_column(named[a].T.astype(np.float64), named[b].T.astype(np.float64))
                cells.append(known | {"metric": "Spearman", "at": None, **_numbers(ranks)})
                for size in sizes:
                    both = overlap(orders[a], orders[b], size)
                    cells.append(known | {"metric": "overlap", "at": size / n, "size": size, **_numbers(both)})
    if not cells:
        reasons = "".join(f"; {problem}" for problem in session.out.problems)
        raise UsageError(f"agreement is between two methods; fewer than two have such scores here{reasons}")
    out.detail["cells"] = cells
    out.problems += session.out.problems
    out.seconds = time.perf_counter() - started
    return out


def _numbers(values: np.ndarray) -> dict[str, Any]:
    found = mean_change(values)
    ends = {"value": found.mean, "ci_low": found.ci_low, "ci_high": found.ci_high}
    return {**ends, "num_queries": found.num_queries, "num_undefined": found.num_undefined}


def matrix_of(cells: Sequence[dict[str, Any]]) -> tuple[list[str], np.ndarray]:
    """Labels, and the symmetric matrix of one metric, place, seed and kind of scores; ones on the diagonal."""
    labels = list(dict.fromkeys(name for cell in cells for name in (cell["label"], cell["against"])))
    matrix = np.eye(len(labels))
    for cell in cells:
        a, b = labels.index(cell["label"]), labels.index(cell["against"])
        matrix[a, b] = matrix[b, a] = np.nan if cell["value"] is None else cell["value"]
    return labels, matrix


def matrices_of(cells: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Cells by (seed, share, normalised, metric, at)."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        names = ("seed", "alpha_attribution", "normalised", "metric", "at")
        found.setdefault(tuple(cell[name] for name in names), []).append(cell)
    return found


def show_agreement(out: Answers) -> str:
    parts = []
    for (seed, _, normalised, metric, at), cells in matrices_of(out.detail["cells"]).items():
        labels, matrix = matrix_of(cells)
        what = "Spearman over examples" if metric == "Spearman" else f"overlap of the top {cells[0]['size']} ({at:.3g})"
        widths = [width for cell in cells if math.isfinite(width := (cell["ci_high"] - cell["ci_low"]) / 2)]
        chance = "0" if at is None else f"{at:.3g}"
        words = (
            f"{out.task.description}, protocol {out.task.protocol}: {what}, mean over {out.truth}, seed {seed},\n"
            f"{'train-normalised' if normalised else 'raw'} scores; {chance} by chance; "
            + (f"95 % intervals at most +-{max(widths):.3f}" if widths else "no intervals: too few queries")
        )
        # Adding 0 takes the sign from what rounds to -0.
        lines = [[label, *(number(round(value, 2) + 0.0, 2) for value in row)] for label, row in zip(labels, matrix)]
        parts.append(f"{words}\n{tables(['', *labels], lines)}")
    return "\n\n".join(parts)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.agreement", description="How alike methods rank the training examples.")
    add_question_arguments(parser)
    add = parser.add_argument
    tops = " ".join(f"{share:g}" for share in TOP_SHARES)
    add("--tops", nargs="+", type=fraction, help=f"shares whose overlap is measured (default: {tops})")
    add("--scores", choices=tuple(SCORE_CHOICES), default="raw", help="which scores (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return answer_command(make_parser(), argv, _run)


def _run(arguments: argparse.Namespace, command: str, prog: str) -> int:
    check_out(arguments.out)
    experiment = Experiment(**asked_for(arguments))
    out = run_agreement(experiment, execution_of(arguments), arguments.tops or (), arguments.scores)
    return finish(out, show_agreement(out), arguments.out, command, prog)


if __name__ == "__main__":
    sys.exit(main())
