"""What every metric rests on: checked tables, groups, ranks, and the two-way interval of a mean over queries.

Subsets and queries are both draws. STATISTICS.md derives the interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]

MINIMUM_SUBSETS = 3
CONFIDENCE = 0.95  # of every interval
NUM_BOOTSTRAP = 1000  # resamples, for steady ends


def as_table(values: ArrayLike, name: str) -> FloatArray:
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2:
        raise ValueError(
            f"{name} has shape {table.shape}; expected two dimensions, (num_subsets, num_queries). "
            "Reshape it, or average over replicates first."
        )
    return table


def check_pair(truth: ArrayLike, prediction: ArrayLike, name: str = "prediction") -> tuple[FloatArray, FloatArray]:
    truth, prediction = as_table(truth, "truth"), as_table(prediction, name)
    if truth.shape != prediction.shape:
        hint = (
            f"{name} looks transposed: pass masks @ scores.T"
            if truth.shape == prediction.shape[::-1]
            else "use the same subsets and the same queries, in the same order, for both"
        )
        raise ValueError(
            f"truth has shape {truth.shape} and {name} has shape {prediction.shape}; "
            f"expected the same (num_subsets, num_queries); {hint}."
        )
    return truth, prediction


def check_num_subsets(num_subsets: int) -> None:
    if num_subsets < MINIMUM_SUBSETS:
        raise ValueError(
            f"got {num_subsets} subsets (rows); a rank correlation across subsets needs at least {MINIMUM_SUBSETS}. "
            "Retrain on more subsets, or transpose if rows are queries."
        )


def as_replicates(replicates: ArrayLike, present: ArrayLike | None) -> tuple[FloatArray, BoolArray]:
    """(R, K, q) losses and (R, K) which of them exist."""
    values = np.asarray(replicates, dtype=np.float64)
    if values.ndim != 3:
        raise ValueError(
            f"replicates has shape {values.shape}; expected (num_replicates, num_subsets, num_queries). Stack the "
            "replicates along a new first axis, and say in `present` which are missing."
        )
    exists = np.ones(values.shape[:2], dtype=bool) if present is None else np.asarray(present, dtype=bool)
    if exists.shape != values.shape[:2] or not exists.any(axis=0).all():
        raise ValueError(
            f"present has shape {exists.shape} and leaves {int((~exists.any(axis=0)).sum())} subsets without any; "
            f"expected {values.shape[:2]}, (num_replicates, num_subsets), with one True or more a subset."
        )
    return values, exists


def mean_over_replicates(replicates: ArrayLike, *, present: ArrayLike | None = None) -> FloatArray:
    """The truth, (num_subsets, num_queries): what each subset's replicates average to."""
    values, exists = as_replicates(replicates, present)
    if exists.all():
        return values.mean(axis=0)
    return np.where(exists[:, :, None], values, 0.0).sum(axis=0) / exists.sum(axis=0)[:, None]


# ---- groups ----

# A column this close to what groups explain, in units of its largest value, is nothing but rounding.
_ROUNDING = {np.dtype(np.float32): 1e-5, np.dtype(np.float64): 2e-13}


@dataclass(frozen=True)
class GroupCounts:
    """How many examples of each group a subset holds, (num_subsets, num_groups): what LDS within groups takes out."""

    counts: FloatArray

    @classmethod
    def of(cls, masks: ArrayLike, groups: ArrayLike) -> GroupCounts:
        """masks: (num_subsets, n), which examples each keeps; groups: (n,), the group of each example."""
        kept, group = np.asarray(masks, dtype=bool), np.asarray(groups)
        if group.shape != kept.shape[1:]:
            raise ValueError(f"groups has shape {group.shape}; expected {kept.shape[1:]}, one for each example.")
        _, group = np.unique(group, return_inverse=True)
        return cls(np.stack([np.bincount(group[row], minlength=group.max() + 1) for row in kept]).astype(np.float64))

    def rows(self, subsets: IntArray) -> GroupCounts:
        return GroupCounts(self.counts[subsets])

    @cached_property
    def basis(self) -> FloatArray:
        """(num_subsets, lost), orthonormal: the centred counts' directions; none where all subsets hold the same."""
        if not len(self.counts):
            return self.counts
        centred = self.counts - self.counts.mean(axis=0)
        directions, lengths, _ = np.linalg.svd(centred, full_matrices=False)
        return directions[:, lengths > 1e-9 * max(1.0, float(lengths[0]))]

    @property
    def lost(self) -> int:
        return self.basis.shape[1] if len(self.counts) else 0

    def take_out(self, values: ArrayLike, precision: Any = None) -> FloatArray:
        """Residuals over subsets of (num_subsets, num_queries) values; exactly 0 where they are no more than rounding.

        precision: the type that the values were computed in, where it is not their own.
        """
        given = np.asarray(values)
        rounding = _ROUNDING.get(np.dtype(precision or given.dtype), _ROUNDING[np.dtype(np.float64)])
        with np.errstate(invalid="ignore"):  # of what is not finite: its query is undefined
            left = given - given.mean(axis=0, dtype=np.float64)
            left -= self.basis @ (self.basis.T @ left)
            left[:, np.abs(left).max(axis=0) <= rounding * np.abs(given).max(axis=0)] = 0.0
        return left


# ---- Student's t and the normal distribution: scipy.stats to the last bit, without its seconds of import ----


def t_quantile(share: float, degrees: float) -> float:
    return float(special.stdtrit(degrees, share))


def t_above(value: float, degrees: float) -> float:
    return float(special.stdtr(degrees, -value))


def normal_quantile(share: float) -> float:
    return float(special.ndtri(share))


def normal_above(value: float) -> float:
    return float(special.ndtr(-value))


# ---- ranks of whole tables at once, and the same without each subset in turn, exactly ----

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
        """For each index k, the sum of values[i] over i ranked above k, half of it where i ties with k or is k.

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
    """Ranks from 1 down each column of a (num_subsets, num_queries) array; ties share their average; NaN sorts last."""
    return np.ascontiguousarray(rank_rows(np.ascontiguousarray(as_table(values, "values").T)).ranks.T)


def defined_columns(*tables: FloatArray) -> BoolArray:
    """(num_queries,): the columns that are finite and not constant in every table."""
    defined = np.ones(tables[0].shape[1], dtype=bool)
    for table in tables:
        with np.errstate(invalid="ignore"):
            defined &= np.isfinite(table).all(axis=0) & (table != table[:1]).any(axis=0)
    return defined


def query_blocks(indices: IntArray, size: int = 0) -> Iterator[IntArray]:
    size = size or QUERIES_PER_BLOCK
    for start in range(0, len(indices), size):
        yield indices[start : start + size]


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
    for block in query_blocks(defined, max(1, QUERIES_PER_BLOCK * 100 // max(1, truth.shape[0]))):
        ranks = [rank_rows(np.ascontiguousarray(table[:, block].T)).ranks for table in (truth, prediction)]
        correlation[block] = correlate_ranks(ranks[0], ranks[1])
    return correlation


def spearman_per_column(truth: ArrayLike, prediction: ArrayLike) -> FloatArray:
    """Spearman's correlation down each column, (num_queries,); NaN where a column is constant or not finite."""
    truth, prediction = check_pair(truth, prediction)
    check_num_subsets(truth.shape[0])
    return spearman_columns(truth, prediction)


def mean_of_defined(values: FloatArray) -> float:
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else math.nan


# ---- leaving one subset out ----


def _concordance(a: Ranking, b: Ranking) -> FloatArray:
    """(num_rows, n): for each k, the sum over i of (weight of i above k in a) x (the same in b); see `sum_above`.

    Quadratic in n, but in bytes and without branches, which beats a tree up to thousands of subsets.
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

    No row is constant. One that is without a subset rests on that subset alone: zero is what remains.
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


# ---- the two-way interval ----

_DRAWS_PER_BLOCK = 1 << 20


@dataclass(frozen=True)
class Sampling:
    """How a mean over queries varies with the draw of queries and of subsets. Rows of undefined queries are NaN.

    Sums and multiples of samplings are samplings: a difference has its interval from the very same resamples.
    """

    plain: FloatArray  # (num_queries,)
    corrected: FloatArray  # (num_queries,), less the jackknife's bias
    influence: FloatArray  # (num_queries, num_subsets): the jackknife's, each row summing to zero

    def combine(self, weight: float, other: Sampling, other_weight: float) -> Sampling:
        return Sampling(
            weight * self.plain + other_weight * other.plain,
            weight * self.corrected + other_weight * other.corrected,
            weight * self.influence + other_weight * other.influence,
        )

    @property
    def num_undefined(self) -> int:
        return int(np.isnan(self.plain).sum())


@dataclass(frozen=True)
class TwoWayInterval:
    mean: float
    bias: float
    low: float
    high: float
    standard_error: float
    degrees_of_freedom: float


def sample_spearman(truth: FloatArray, prediction: FloatArray, lost: int = 0) -> Sampling:
    """lost: so many directions were regressed out of both. Residuals then vary like n - lost free values."""
    n, num_queries = truth.shape
    plain = np.full(num_queries, np.nan)
    corrected = np.full(num_queries, np.nan)
    influence = np.full((num_queries, n), np.nan)
    for block in query_blocks(np.flatnonzero(defined_columns(truth, prediction))):
        columns = (np.ascontiguousarray(table[:, block].T) for table in (truth, prediction))
        plain[block], without = leave_one_out(*columns)
        mean_without = without.mean(axis=1)
        corrected[block] = n * plain[block] - (n - 1) * mean_without
        influence[block] = (n - 1) * (mean_without[:, None] - without)
    if lost:
        larger = n / max(1, n - lost)
        corrected = plain + larger * (corrected - plain)
        influence *= math.sqrt(larger)
    return Sampling(plain, corrected, influence)


def _resampled_means(values: FloatArray, side: int) -> FloatArray:
    """(NUM_BOOTSTRAP,): means of `values`, (n,), drawn with replacement."""
    n, step = len(values), max(1, _DRAWS_PER_BLOCK // len(values))
    if step >= NUM_BOOTSTRAP:
        return values[_draws(n, side)].mean(axis=1)
    rng = np.random.default_rng([0, side])
    sizes = [min(step, NUM_BOOTSTRAP - start) for start in range(0, NUM_BOOTSTRAP, step)]
    return np.concatenate([values[rng.integers(0, n, size=(size, n))].mean(axis=1) for size in sizes])


@lru_cache(maxsize=8)
def _draws(n: int, side: int) -> IntArray:
    """Made once for all methods and pairs of a run, which share their resamples anyway."""
    return np.random.default_rng([0, side]).integers(0, n, size=(NUM_BOOTSTRAP, n))


def two_way_interval(sampling: Sampling, *, correlation: bool) -> TwoWayInterval:
    """The two-way bootstrap interval of STATISTICS.md; `correlation` asks for Fisher's z scale."""
    defined = ~np.isnan(sampling.plain)
    num_queries, num_subsets = int(defined.sum()), sampling.influence.shape[1]
    if num_queries == 0:
        return TwoWayInterval(*[math.nan] * 6)
    corrected, influence = sampling.corrected[defined], sampling.influence[defined]
    mean, centre = float(sampling.plain[defined].mean()), float(corrected.mean())
    if num_queries == 1:
        # One query says nothing about how queries differ.
        return TwoWayInterval(mean, mean - centre, math.nan, math.nan, math.nan, math.nan)

    by_subset = influence.mean(axis=0)
    squares = float(by_subset @ by_subset)
    all_squares = float(np.einsum("jk,jk->", influence, influence))
    interaction = max(0.0, all_squares - num_queries * squares) / ((num_queries - 1) * (num_subsets - 1))
    unshared = interaction / num_queries
    observed = squares / (num_subsets - 1)
    shared = max(0.0, observed - unshared)
    from_queries = float(corrected.var(ddof=1)) / num_queries
    from_subsets = shared / num_subsets
    variance = from_queries + from_subsets
    if variance <= 1e-30:
        return TwoWayInterval(mean, mean - centre, centre, centre, 0.0, math.inf)
    # Welch and Satterthwaite. The shared variance is a difference, as uncertain as its larger, observed term. Where
    # little is shared that overstates it without limit: half of what the scarcer sample has is the least.
    degrees_of_freedom = max(
        variance**2 / (from_queries**2 / (num_queries - 1) + (observed / num_subsets) ** 2 / (num_subsets - 1)),
        0.5 * (min(num_queries, num_subsets) - 1),
    )

    deviation = _resampled_means(corrected - centre, 0)
    deviation *= math.sqrt(num_queries / (num_queries - 1))
    if shared > 0.0:
        scale = math.sqrt(shared / observed * num_subsets / (num_subsets - 1))
        deviation += scale * _resampled_means(by_subset, 1)
    tail = 0.5 * (1.0 - CONFIDENCE)
    stretch = t_quantile(1.0 - tail, degrees_of_freedom) / normal_quantile(1.0 - tail)
    low, high = (stretch * float(end) for end in np.quantile(deviation, [tail, 1.0 - tail]))
    if correlation:
        # Taking out the bias can step over 1; halfway from the plain mean to 1 keeps z finite there.
        limit = min(0.5 * (1.0 + abs(mean)), 1.0 - 1e-12)
        inside = min(max(centre, -limit), limit)
        low, high = (math.tanh(math.atanh(inside) + end / (1.0 - inside**2)) for end in (low, high))
    else:
        low, high = centre + low, centre + high
    return TwoWayInterval(mean, mean - centre, low, high, math.sqrt(variance), degrees_of_freedom)
