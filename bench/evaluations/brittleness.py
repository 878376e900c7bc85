"""Brittleness: the smallest share of the attributed examples that flips a query's prediction, by bisection.

Sizes lie on a grid, so that methods and queries share trainings on as many examples, and a bisection takes as many
rounds as the grid has doublings. A query has flipped at a size where its mean margin over replicates is negative. That
a larger set flips what a smaller one did is assumed, as by Ilyas et al. (2022); where it does not hold, the size found
is one at which it flips, and perhaps not the smallest.

What is reported is the geometric mean over queries that are right with nothing removed. A query that the largest size
does not flip counts as if that size had: the mean is a lower bound then, the same for all methods, and the number of
such queries stands beside it.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.answers import MetricResult
from bench.evaluations.common import (
    ScoredMethod,
    ScoreKind,
    SeedAndShare,
    ends_of,
    orders_of,
    pairs_of,
    place_of,
    score_matrices,
)
from bench.evaluations.retrainer import NOTHING, RemovalRetrainer, RemovalSet
from bench.metrics.removal import mean_change
from bench.tables import table

# From one in a thousand to a fifth, by about 1.4 each.
SMALLEST_SHARES = (
    0.001, 0.0014, 0.002, 0.0028, 0.004, 0.0056, 0.008, 0.011, 0.016, 0.022, 0.032, 0.045, 0.063, 0.089, 0.13, 0.2,
)  # fmt: skip
BRITTLENESS = "brittleness"


class Bisection:
    """One method's search for every query at once: `low` does not flip, `high` does; both are places on the grid."""

    def __init__(self, orders: np.ndarray, queries: np.ndarray, num_sizes: int):
        self.orders, self.queries, self.num_sizes = orders, queries, num_sizes
        self.low = np.full(len(queries), -1)  # nothing removed: right
        self.high = np.full(len(queries), num_sizes)  # beyond the grid: unknown
        self.first = True

    def next_places(self) -> np.ndarray:
        """The place to try for each query; the largest size first, -1 where the search is over."""
        if self.first:
            return np.full(len(self.queries), self.num_sizes - 1)
        over = (self.high - self.low <= 1) | (self.high == self.num_sizes)
        return np.where(over, -1, (self.low + self.high) // 2)

    def learn(self, places: np.ndarray, flipped: np.ndarray) -> None:
        tried = places >= 0
        self.high = np.where(tried & flipped, places, self.high)
        self.low = np.where(tried & ~flipped, places, self.low)
        self.first = False


def add_brittleness(
    out: MetricResult,
    retrainer: RemovalRetrainer,
    block: SeedAndShare,
    scored: Sequence[ScoredMethod],
    kinds: Sequence[ScoreKind],
    reference: int,
    replicates: int,
) -> None:
    """Adds rows, pairs and every query's share."""
    (nothing,) = retrainer.retrain([(NOTHING, reference)], "margins", margins=True)
    right = np.flatnonzero(nothing["margins"].mean(axis=0) > 0)
    if len(right) < 2:
        out.problems.append(
            f"{len(right)} of {len(retrainer.queries)} queries are right with nothing removed; "
            "brittleness needs at least two: take more --queries (the removal curves above are whole)"
        )
        return
    sizes = sorted({retrainer.size_of(share) for share in SMALLEST_SHARES})
    searches = {
        (one.variant.label, normalised): (one, Bisection(orders_of(scores)[right], right, len(sizes)))
        for one, normalised, scores in score_matrices(scored, kinds)
    }
    _search([search for _, search in searches.values()], retrainer, sizes, replicates)
    where = place_of(retrainer.task, block)
    logs: dict[tuple[str, bool], np.ndarray] = {}
    detail: dict[str, Any] = {"queries": right.tolist(), "largest_size": sizes[-1], "sizes": {}}
    for (label, normalised), (one, search) in searches.items():
        flips = search.high < len(sizes)
        found = np.array(sizes)[np.minimum(search.high, len(sizes) - 1)]
        logs[label, normalised] = np.log10(found / retrainer.num_attributed)
        mean = mean_change(logs[label, normalised])
        detail["sizes"][f"{label}, normalised" if normalised else label] = [
            int(size) if flip else None for size, flip in zip(found, flips)
        ]
        unflipped = int((~flips).sum())
        out.rows.append(
            where | one.columns() | {"metric": BRITTLENESS, "at": None, "normalised": normalised, "higher": False}
            | {"value": 10**mean.mean, "ci_low": 10**mean.ci_low, "ci_high": 10**mean.ci_high}
            | {"num_queries": len(right), "num_undefined": 0, "num_unflipped": unflipped}
            | {"note": f"{unflipped} of {len(right)} never flipped" if unflipped else ""}
        )  # fmt: skip
    for names, first, second in pairs_of(logs):
        change = mean_change(first - second)
        out.pairs.append(
            where | {"metric": BRITTLENESS, "at": None} | names
            | {"difference": change.mean, **ends_of(change), "num_undefined": 0}
            | {"p_value": change.p_value, "unit": "log10 of the share"}
        )  # fmt: skip
    out.detail.setdefault(BRITTLENESS, {})[f"seed {block[0]}, share {block[1]:g}"] = detail


def _search(searches: Sequence[Bisection], retrainer: RemovalRetrainer, sizes: Sequence[int], replicates: int) -> None:
    """Round by round; a round of all methods and queries is one batch of jobs."""
    most = 2 + math.ceil(math.log2(len(sizes)))
    for number in itertools.count(1):
        places = [search.next_places() for search in searches]
        wanted: list[RemovalSet] = [
            (search.orders[query][: sizes[place]], replicates)
            for search, here in zip(searches, places)
            for query, place in enumerate(here)
            if place >= 0
        ]
        if not wanted:
            return
        found = iter(retrainer.retrain(wanted, f"bisection, round {number} of at most {most}", margins=True))
        for search, here in zip(searches, places):
            flipped = np.zeros(len(here), dtype=bool)
            for query, place in enumerate(here):
                if place >= 0:
                    flipped[query] = next(found)["margins"][:, search.queries[query]].mean() < 0
            search.learn(here, flipped)


def show_brittleness(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in sorted(rows, key=lambda row: row["value"]):
        flipped = row["num_queries"] - row["num_unflipped"]
        share = f"{'>= ' if row['num_unflipped'] else ''}{100 * row['value']:.2f} %"
        interval = f"[{100 * row['ci_low']:.2f}, {100 * row['ci_high']:.2f}]" if flipped else "-"
        lines.append([row["label"], share, interval, f"{flipped} of {row['num_queries']}"])
    legend = (
        "geometric mean over the queries that are right with nothing removed; one that the largest size does not flip "
        "counts\nas if it did: >= is a lower bound"
    )
    return f"{table(['brittleness', 'share that flips', '95 % interval', 'flipped'], lines)}\n{legend}"
