"""Ranks and Spearman correlations of whole tables at once, and the same without each subset in turn, exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bench.metrics.checks import BoolArray, FloatArray, IntArray, as_table, check_num_subsets, check_pair

# Small enough for one block's temporaries to stay in cache, which is several times faster than all queries at once.
QUERIES_PER_BLOCK = 1024


@dataclass(frozen=True)
class Ranking:
    """The rows of a (num_rows, n) array in order: everything that ranks and leave-one-out ranks are made from."""

    order: IntArray  # (num_rows, n) position -> index
    first: IntArray | None  # (num_rows, n) position -> first position of its tie group; None when nothing ties
    last: IntArray | None  # (num_rows, n) position -> last position of its tie group
    ranks: FloatArray  # (num_rows, n) index -> average rank, from 1

    def scatter(self, by_position: NDArray) -> NDArray:
        """From sorted positions back to the original index."""
        by_index = np.empty_like(by_position)
        np.put_along_axis(by_index, self.order, by_position, axis=1)
        return by_index

    def sum_above(self, values: FloatArray) -> FloatArray:
        """For each index k, the sum of values[i] over i ranked above k, with weight one half where i ties with k (or is
        k).

        That weight is by how much i's average rank falls when k is left out.
        """
        running = np.zeros((values.shape[0], values.shape[1] + 1))
        np.cumsum(np.take_along_axis(values, self.order, axis=1), axis=1, out=running[:, 1:])
        if self.first is None or self.last is None:
            below = 0.5 * (running[:, 1:] + running[:, :-1])
        else:
            upto_last = np.take_along_axis(running, self.last + 1, axis=1)
            before_first = np.take_along_axis(running, self.first, axis=1)
            below = 0.5 * (upto_last + before_first)
        return self.scatter(running[:, -1:] - below)


def rank_rows(values: FloatArray) -> Ranking:
    """values: (num_rows, n)."""
    num_rows, n = values.shape
    order = np.argsort(values, axis=1)
    ordered = np.take_along_axis(values, order, axis=1)
    ties = ordered[:, 1:] == ordered[:, :-1]
    positions = np.broadcast_to(np.arange(n), (num_rows, n))
    first = last = None
    rank_at = positions + 1.0
    if ties.any():
        first, last = positions.copy(), positions.copy()
        first[:, 1:][ties] = 0
        first = np.maximum.accumulate(first, axis=1)
        last[:, :-1][ties] = n - 1
        last = np.minimum.accumulate(last[:, ::-1], axis=1)[:, ::-1]
        rank_at = 0.5 * (first + last) + 1.0
    ranks = np.empty((num_rows, n))
    np.put_along_axis(ranks, order, rank_at, axis=1)
    return Ranking(order, first, last, ranks)


def average_ranks(values: ArrayLike) -> FloatArray:
    """Ranks from 1 down each column of a (num_subsets, num_queries) array; ties share their average rank.

    NaN sorts last and gets a rank like any other value: the caller decides what a column with NaN means.
    """
    return np.ascontiguousarray(rank_rows(np.ascontiguousarray(as_table(values, "values").T)).ranks.T)


def defined_columns(*tables: FloatArray) -> BoolArray:
    """(num_queries,): the columns that are finite and not constant in every table."""
    defined = np.ones(tables[0].shape[1], dtype=bool)
    for table in tables:
        with np.errstate(invalid="ignore"):
            defined &= np.isfinite(table).all(axis=0) & (table != table[:1]).any(axis=0)
    return defined


def query_blocks(indices: IntArray) -> Iterator[IntArray]:
    for start in range(0, len(indices), QUERIES_PER_BLOCK):
        yield indices[start : start + QUERIES_PER_BLOCK]


def correlate_ranks(ranks_a: FloatArray, ranks_b: FloatArray) -> FloatArray:
    """Pearson correlation of each row's ranks, (num_rows,). Both inputs: (num_rows, n)."""
    middle = 0.5 * (ranks_a.shape[1] + 1)
    a, b = ranks_a - middle, ranks_b - middle
    numerator = np.einsum("jk,jk->j", a, b)
    return numerator / np.sqrt(np.einsum("jk,jk->j", a, a) * np.einsum("jk,jk->j", b, b))


def spearman_columns(truth: FloatArray, prediction: FloatArray) -> FloatArray:
    correlation = np.full(truth.shape[1], np.nan)
    defined = np.flatnonzero(defined_columns(truth, prediction))
    # A block holds about as many numbers whatever the column length, so that long columns stay in cache as well.
    size = max(1, QUERIES_PER_BLOCK * 100 // max(1, truth.shape[0]))
    for start in range(0, len(defined), size):
        block = defined[start : start + size]
        ranks = [rank_rows(np.ascontiguousarray(table[:, block].T)).ranks for table in (truth, prediction)]
        correlation[block] = correlate_ranks(ranks[0], ranks[1])
    return correlation


def spearman_per_column(truth: ArrayLike, prediction: ArrayLike) -> FloatArray:
    """Spearman correlation down each column, with average ranks for ties.

    truth, prediction: (num_subsets, num_queries). Returns (num_queries,): NaN where either column is constant or holds
    a value that is not finite.
    """
    truth, prediction = check_pair(truth, prediction)
    check_num_subsets(truth.shape[0])
    return spearman_columns(truth, prediction)


def mean_of_defined(values: FloatArray) -> float:
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else math.nan


# ---- leaving one subset out ----


def _concordance(a: Ranking, b: Ranking) -> FloatArray:
    """For each index k, the sum over i of (weight of i above k in a) * (the same in b); weight one half for a tie or i
    = k.

    Returns (num_rows, n). Quadratic in n, but in bytes and without branches, which beats a tree up to thousands of
    subsets.
    """
    num_rows, n = a.ranks.shape
    dtype = np.uint8 if n < 1 << 8 else np.uint16 if n < 1 << 16 else np.uint32
    above = np.empty((n, num_rows), dtype=dtype)
    if a.first is None and b.first is None:
        # Along a's order only later positions are above, so half the comparisons suffice.
        b_along_a = np.ascontiguousarray(np.take_along_axis(b.ranks, a.order, axis=1).T).astype(dtype)
        for position in range(n):
            is_above = b_along_a[position + 1 :] > b_along_a[position]
            np.add.reduce(is_above.view(np.uint8), axis=0, dtype=dtype, out=above[position])
        return a.scatter(np.ascontiguousarray(above.T)) + 0.25
    doubled = [np.ascontiguousarray((2.0 * ranking.ranks).T).astype(np.uint32) for ranking in (a, b)]
    total = np.empty((n, num_rows))
    for index in range(n):
        weight_a, weight_b = (
            (ranks > ranks[index]).view(np.uint8) + (ranks >= ranks[index]).view(np.uint8) for ranks in doubled
        )
        total[index] = np.add.reduce(weight_a * weight_b, axis=0, dtype=np.uint32)
    return np.ascontiguousarray(0.25 * total.T)


def _leave_one_out_spread(ranking: Ranking) -> FloatArray | float:
    """The sum of squared centred ranks that is left without each k: a number when nothing ties, else (num_rows, n)."""
    n = ranking.ranks.shape[1]
    if ranking.first is None or ranking.last is None:
        return (n - 1) * ((n - 1) ** 2 - 1) / 12.0
    squares = np.einsum("jk,jk->j", ranking.ranks, ranking.ranks)[:, None] - ranking.ranks**2
    cross = ranking.sum_above(ranking.ranks) - 0.5 * ranking.ranks
    weights = ranking.scatter((n - 1.0 - ranking.last) + 0.25 * (ranking.last - ranking.first))
    return squares - 2.0 * cross + weights - (n - 1) * (0.5 * n) ** 2


def leave_one_out(truth: FloatArray, prediction: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Spearman of each row, (num_rows,), and the same without each subset in turn, (num_rows, num_subsets).

    truth, prediction: (num_rows, num_subsets), finite, no row constant. Where leaving a subset out makes a row
    constant, the whole association rests on that subset, and zero is what remains.
    """
    a, b = rank_rows(truth), rank_rows(prediction)
    n = truth.shape[1]
    products = a.ranks * b.ranks
    remaining = products.sum(axis=1, keepdims=True) - products
    remaining -= a.sum_above(b.ranks) - 0.5 * b.ranks
    remaining -= b.sum_above(a.ranks) - 0.5 * a.ranks
    remaining += _concordance(a, b) - 0.25
    remaining -= (n - 1) * (0.5 * n) ** 2
    spread = np.sqrt(np.asarray(_leave_one_out_spread(a) * _leave_one_out_spread(b)))
    without = np.divide(remaining, spread, out=np.zeros_like(remaining), where=spread > 1e-9)
    return correlate_ranks(a.ranks, b.ranks), without
