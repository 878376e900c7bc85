"""Do methods agree? Spearman's correlation of their scores and the overlap of their top examples, as a matrix.

    python -m bench.evaluations agreement                         # the embedded task, every two of the default methods
    python -m bench.evaluations agreement --methods bif ekfac kfac trak gradsim --shares 0.01 0.1 --seeds 1 2 3

For every query, the scores of two methods over the attributed examples are correlated, and their most helpful shares
compared: an overlap of 1 means that both name the same examples; two random orders share as much as the top is large.
Means over queries, with Student's intervals. Nothing is retrained: this is about methods, not about who is right.
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import bench.evaluations as evaluations
from bench.arguments import fraction
from bench.evaluations import MetricResult, groups_of, measured, orders_of
from bench.metrics import MINIMUM_SUBSETS, spearman_per_column
from bench.metrics.removal import mean_change
from bench.tables import number, tables
from retrain.errors import UsageError

TOP_SHARES = (0.01, 0.1)
MATRIX = ("seed", "alpha_attribution", "normalised", "metric", "at")  # what the cells of one matrix have in common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    evaluations.add_shared_arguments(parser)
    usual = " ".join(f"{share:g}" for share in TOP_SHARES)
    parser.add_argument("--shares", nargs="+", type=fraction, help=f"whose overlap is measured (default: {usual})")


def overlap(first: np.ndarray, second: np.ndarray, size: int) -> np.ndarray:
    """(queries,): the share that the first `size` of two orders, (queries, n), have in common."""
    shared = [len(np.intersect1d(a[:size], b[:size], assume_unique=True)) for a, b in zip(first, second, strict=True)]
    return np.array(shared) / size


def evaluate(arguments: argparse.Namespace) -> MetricResult:
    session = evaluations.session_of(arguments)
    if len(session.active) < 2:
        raise UsageError(f"agreement is between two methods; --methods leaves {len(session.active)} that can run here")
    n = evaluations.num_attributed(session, needed=MINIMUM_SUBSETS)
    sizes = evaluations.sizes_of(arguments.shares or (), TOP_SHARES, n)
    num_queries = len(session.question(*session.blocks[0]).query_indices())
    asked = session.experiment
    out = MetricResult.of(
        session,
        "agreement",
        {"tops": list(arguments.shares or TOP_SHARES), "scores": arguments.scores},
        {"query_split": asked.query_split, "queries": asked.queries, "num_attributed": n},
        f"{num_queries} queries, {n:,} attributed examples",
    )
    cells: list[dict[str, Any]] = []
    for block, methods in evaluations.score_methods(session).items():
        ranked = {
            (one.variant.label, normalised): (values.T.astype(np.float64), orders_of(values))
            for one, normalised, values in evaluations.score_matrices(methods, arguments.scores)
        }
        pairs = sorted(evaluations.pairs_of(ranked), key=lambda pair: pair[0]["normalised"])
        for names, (first, first_order), (second, second_order) in pairs:
            where = evaluations.place_of(session.task, block) | names
            found = mean_change(spearman_per_column(first, second))
            cells.append(where | {"metric": "Spearman", "at": None} | measured(found.value, found))
            for size in sizes:
                found = mean_change(overlap(first_order, second_order, size))
                cell = {"metric": "overlap", "at": size / n, "size": size}
                cells.append(where | cell | measured(found.value, found))
    if not cells:
        reasons = "".join(f"; {problem}" for problem in out.problems)
        raise UsageError(f"agreement is between two methods; fewer than two have such scores here{reasons}")
    out.detail["cells"] = cells
    return out


def matrix_of(cells: Sequence[dict[str, Any]]) -> tuple[list[str], np.ndarray]:
    """Labels, and the symmetric matrix of one metric, place, seed and kind of scores; ones on the diagonal."""
    labels = list(dict.fromkeys(name for cell in cells for name in (cell["label"], cell["against"])))
    matrix = np.eye(len(labels))
    for cell in cells:
        a, b = labels.index(cell["label"]), labels.index(cell["against"])
        matrix[a, b] = matrix[b, a] = np.nan if cell["value"] is None else cell["value"]
    return labels, matrix


def show(out: MetricResult) -> str:
    parts = []
    for (seed, _, normalised, metric, at), cells in groups_of(out.detail["cells"], *MATRIX).items():
        labels, matrix = matrix_of(cells)
        what = "Spearman over examples" if metric == "Spearman" else f"overlap of the top {cells[0]['size']} ({at:.3g})"
        widths = [width for cell in cells if math.isfinite(width := (cell["ci_high"] - cell["ci_low"]) / 2)]
        ends = f"95 % intervals at most +-{max(widths):.3f}" if widths else "no intervals: too few queries"
        heading = out.heading(f"{what}, mean over {out.truth}", seed, normalised)
        # Adding 0 takes the sign from what rounds to -0.
        lines = [[label, *(number(round(value, 2) + 0.0, 2) for value in row)] for label, row in zip(labels, matrix)]
        chance = "0" if at is None else f"{at:.3g}"
        parts.append(f"{heading};\n{chance} by chance; {ends}\n{tables(['', *labels], lines)}")
    return "\n\n".join(parts)
