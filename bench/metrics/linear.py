"""The linear ceiling: the LDS that the best additive score could be expected to reach, however it was found.

    from bench.metrics import linear_ceiling
    print(linear_ceiling(masks, replicates))

The share of the variance over subsets that is additive in the training examples comes from how the products of two
subsets' outcomes grow with their overlap (Haseman and Elston's regression). No coefficients are fitted, so there may be
many more training examples than subsets. STATISTICS.md derives it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from bench.metrics.intervals import (
    CONFIDENCE,
    BoolArray,
    FloatArray,
    as_replicates,
    defined_columns,
    query_blocks,
    rank_rows,
    t_quantile,
)

MINIMUM_SUBSETS_LINEAR = 10  # with fewer, the interval has nothing to rest on
_NUMBERS_PER_BLOCK = 1 << 21
_QUERIES_FOR_PAIRS = 2048  # enough to know what queries share; all of them would cost as much as everything else

Float32Array = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class AdditiveShare:
    """A share of the variance over subsets, pooled over queries. Chance may carry it below 0 or above 1."""

    share: float = math.nan  # the estimate
    ci_low: float = math.nan  # of its 95 % interval
    ci_high: float = math.nan  # its other end
    standard_error: float = math.nan  # by the jackknife


@dataclass(frozen=True, kw_only=True)
class LinearCeiling:
    """What the best additive score could be expected to reach against the mean over replicates, as LDS is measured."""

    ceiling: float  # an LDS
    ci_low: float  # of its 95 % interval
    ci_high: float  # its other end
    share: AdditiveShare  # of the replicate mean's variance
    share_of_run: AdditiveShare  # of a single run's variance
    share_of_signal: AdditiveShare | None  # of what is not noise of retraining; None without replicates
    num_subsets: int  # models retrained
    num_queries: int  # all queries, the undefined ones included
    num_undefined: int  # those without a share
    per_query: FloatArray = field(repr=False, compare=False)  # (num_queries,) share, noisy; NaN where undefined


def best_spearman(share: float) -> float:
    """Spearman's correlation of two jointly normal values, of which one explains so much of the other's variance."""
    return 6.0 / math.pi * math.asin(0.5 * math.sqrt(min(max(share, 0.0), 1.0))) if not math.isnan(share) else math.nan


def _overlap_weights(masks: BoolArray) -> Float32Array:
    """W, (K, K), symmetric, zero on the diagonal: y' W y is the additive variance in outcomes y of mean 0.

    It is the slope of y_k y_l on overlaps, in units in which a subset overlaps itself by 1. Dividing by tr(W H G H), H
    being the centring matrix, takes out what centring y does to the slope.
    """
    num_subsets = len(masks)
    centred = masks.astype(np.float32) - np.float32(masks.mean())
    overlap = centred @ centred.T
    overlap /= np.float32(np.trace(overlap, dtype=np.float64) / num_subsets)
    row_overlap = overlap.sum(axis=1, dtype=np.float64)
    on_diagonal = float(np.trace(overlap, dtype=np.float64))
    weights = overlap - np.float32((row_overlap.sum() - on_diagonal) / (num_subsets * (num_subsets - 1)))
    np.fill_diagonal(weights, 0.0)
    row_weights = weights.sum(axis=1, dtype=np.float64)
    found = _total(weights, overlap) - 2.0 * float(row_weights @ row_overlap) / num_subsets
    found += float(row_weights.sum() * row_overlap.sum()) / num_subsets**2
    weights /= np.float32(found)
    return weights


def _total(a: NDArray, b: NDArray) -> float:
    """The sum of the products of all elements, row by row in double precision."""
    return float(sum(float(np.dot(x, y)) for x, y in zip(a, b)))


def _standardise(values: FloatArray, exists: BoolArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """A block of queries in units of a single run's standard deviation: normal quantiles of the ranks.

    values: (replicates, subsets, queries), finite; exists: (replicates, subsets). Four arrays come back, (queries,
    subsets) but for the noise: the centred mean over replicates; the squares of the single runs, whose mean over
    subsets is 1; (queries,), the variance of a run about what its subset's runs average to, 0 where unknown; and what
    each subset contributes to that.
    """
    num_replicates, num_subsets, num_queries = values.shape
    counts = exists.sum(axis=0)
    again = exists & (counts >= 2)
    placed = np.zeros((num_queries, num_replicates, num_subsets))
    placed[:, exists] = values[exists].T
    if _knows_noise(exists):
        # What a replicate adds to every subset alike moves no rank, and is no noise.
        residual = np.where(again, placed - (placed.sum(axis=1) / counts)[:, None, :], 0.0)
        placed -= (residual.sum(axis=2) / np.maximum(again.sum(axis=1), 1))[:, :, None]
    runs = placed[:, exists]  # (queries, runs)
    num_runs = runs.shape[1]
    runs = special.ndtri((rank_rows(runs).ranks - 0.375) / (num_runs + 0.25))
    runs -= runs.mean(axis=1, keepdims=True)
    # A variance with K - 1 in the denominator is one.
    runs *= np.sqrt(num_runs * (1.0 - 1.0 / num_subsets) / np.einsum("jr,jr->j", runs, runs))[:, None]
    placed[:] = 0.0
    placed[:, exists] = runs
    mean = placed.sum(axis=1) / counts
    squares = np.einsum("jrk,jrk->jk", placed, placed)
    squares *= (num_subsets / squares.sum(axis=1))[:, None]

    noise, influence = np.zeros(num_queries), np.zeros((num_queries, num_subsets))
    if _knows_noise(exists):
        residual = np.where(again, placed - mean[:, None, :], 0.0)
        freedom = np.where(counts >= 2, counts - 1, 0)
        lost = 1.0 - 1.0 / int((counts >= 2).sum())
        by_subset = np.einsum("jrk,jrk->jk", residual, residual) / (freedom.sum() * lost)
        noise = by_subset.sum(axis=1)
        influence = num_subsets * (by_subset - noise[:, None] * (freedom / freedom.sum()))
    return mean - mean.mean(axis=1, keepdims=True), squares, noise, influence


def _knows_noise(exists: BoolArray) -> bool:
    return int((exists.sum(axis=0) >= 2).sum()) >= 2


class _Pool:
    """Goes over the queries block by block: the means of three shares, and what their intervals need to know."""

    def __init__(self, weights: Float32Array, exists: BoolArray):
        self.weights, self.exists = weights, exists
        self.values: list[FloatArray] = []
        self.by_subset = np.zeros((3, len(weights)))
        self.squares = np.zeros((3, 3))
        self.of_mean: list[Float32Array] = []  # (queries, subsets) of the queries that stand for all of them
        self.of_run: list[Float32Array] = []

    def add(self, values: FloatArray, for_pairs: BoolArray) -> FloatArray:
        """values: (replicates, subsets, queries); for_pairs: (queries,). The queries' shares, (queries,)."""
        num_subsets = len(self.weights)
        centred, squares, noise, noise_influence = _standardise(values, self.exists)
        mean = centred.astype(np.float32)
        # Each subset's part of y' W y. The variance that it is divided by is made from the same outcomes, which makes
        # the ratio low by 2 / K where they are normal.
        part = num_subsets / (1.0 - 2.0 / num_subsets) * centred * (mean @ self.weights)
        additive = part.mean(axis=1)
        variance = np.einsum("jk,jk->j", centred, centred) / (num_subsets - 1)
        share = additive / variance
        about_run = squares - 1.0
        about_mean = centred**2 * (num_subsets / (num_subsets - 1) / variance)[:, None] - 1.0
        influence = (
            2.0 * (part / variance[:, None] - share[:, None]) - share[:, None] * about_mean,
            2.0 * (part - additive[:, None]) - additive[:, None] * about_run,
            noise[:, None] * about_run - noise_influence,
        )
        self.values.append(np.stack([share, additive, 1.0 - noise]))
        self.by_subset += np.stack([table.sum(axis=0) for table in influence])
        self.squares += [[float(np.vdot(a, b)) for b in influence] for a in influence]
        self.of_run.append(mean[for_pairs])
        self.of_mean.append((mean / np.sqrt(variance, dtype=np.float32)[:, None])[for_pairs])
        return share

    def interval(self, weights: Sequence[float], centre: float, on_pairs: float) -> AdditiveShare:
        """Around `centre`, of the sum of means that these weights make.

        Leaving subsets out in turn counts the variance that lives on pairs twice: `on_pairs` is taken out once.
        """
        weight = np.asarray(weights)
        by_query = weight @ np.concatenate(self.values, axis=1)
        num_queries, num_subsets = len(by_query), self.by_subset.shape[1]
        if num_queries < 2:
            return AdditiveShare(share=centre)
        together = weight @ self.by_subset / num_queries
        freedom = num_subsets * (num_subsets - 1)
        each = float(weight @ self.squares @ weight) / num_queries / freedom
        unshared = max(0.0, each - float(together @ together) / freedom) * num_queries / (num_queries - 1)
        shared = max(0.0, each - unshared - on_pairs)
        from_queries = float(by_query.var(ddof=1)) / num_queries
        variance = from_queries + shared
        if variance <= 1e-30:
            return AdditiveShare(share=centre, ci_low=centre, ci_high=centre, standard_error=0.0)
        degrees = variance**2 / (from_queries**2 / (num_queries - 1) + shared**2 / (num_subsets - 1))
        error = math.sqrt(variance)
        reach = error * t_quantile(0.5 + 0.5 * CONFIDENCE, degrees)
        return AdditiveShare(share=centre, ci_low=centre - reach, ci_high=centre + reach, standard_error=error)

    def shares(self) -> tuple[AdditiveShare, AdditiveShare, AdditiveShare | None]:
        """Of the replicate mean's variance, of a run's, and of the signal's."""
        of_signal = AdditiveShare() if _knows_noise(self.exists) else None
        if not self.of_mean:
            return AdditiveShare(), AdditiveShare(), of_signal
        share, additive, signal = np.concatenate(self.values, axis=1).mean(axis=1).tolist()
        on_pairs = _variance_on_pairs(self.weights, np.concatenate(self.of_mean))
        of_mean = self.interval((1.0, 0.0, 0.0), share, on_pairs)
        if len(self.exists) == 1:
            return of_mean, of_mean, None
        on_pairs = _variance_on_pairs(self.weights, np.concatenate(self.of_run))
        of_run = self.interval((0.0, 1.0, 0.0), additive, on_pairs)
        if of_signal is not None and signal > 0.0:
            ratio = additive / signal
            of_signal = self.interval((0.0, 1.0 / signal, -ratio / signal), ratio, on_pairs / signal**2)
        return of_mean, of_run, of_signal


def _variance_on_pairs(weights: Float32Array, outcomes: Float32Array) -> float:
    """Of the mean over queries of y' W y: the part of its variance that lives on pairs of subsets and is shared by all.

    outcomes: (some of the queries, subsets). Their own squares tell how much is not shared.
    """
    num_queries = len(outcomes)
    if num_queries < 2:
        return 0.0
    squared = weights * weights
    products = outcomes.T @ outcomes
    products *= products
    together = 2.0 * _total(squared, products) / num_queries**2
    squares = outcomes * outcomes
    each = 2.0 * _total(squares, squares @ squared) / num_queries
    return max(0.0, together - each / num_queries) * num_queries / (num_queries - 1)


def linear_ceiling(masks: ArrayLike, replicates: ArrayLike, *, present: ArrayLike | None = None) -> LinearCeiling:
    """What LDS the best additive score could be expected to reach: a number for each example, summed over the members.

    masks: (num_subsets, num_examples), subsets drawn uniformly: all of one size, or every example by itself with one
    probability. replicates, present: as `noise_ceiling` takes them; one replicate is enough.
    """
    kept = np.asarray(masks, dtype=bool)
    values, exists = as_replicates(replicates, present)
    num_subsets, num_queries = values.shape[1:]
    if kept.ndim != 2 or len(kept) != num_subsets:
        raise ValueError(f"masks has shape {kept.shape}; expected ({num_subsets}, num_examples), one row a subset.")
    if num_subsets < MINIMUM_SUBSETS_LINEAR:
        raise ValueError(f"got {num_subsets} subsets; the linear ceiling needs at least {MINIMUM_SUBSETS_LINEAR}.")
    if (kept == kept[0]).all():
        raise ValueError("all subsets are the same, so that their overlaps say nothing; pass subsets that differ.")

    defined = np.flatnonzero(defined_columns(values[exists]))
    for_pairs = np.zeros(num_queries, dtype=bool)
    for_pairs[defined[np.linspace(0, len(defined) - 1, min(len(defined), _QUERIES_FOR_PAIRS)).astype(int)]] = True
    pool, per_query = _Pool(_overlap_weights(kept), exists), np.full(num_queries, np.nan)
    for block in query_blocks(defined, max(1, _NUMBERS_PER_BLOCK // (num_subsets * len(values)))):
        per_query[block] = pool.add(values[:, :, block], for_pairs[block])
    of_mean, of_run, of_signal = pool.shares()
    return LinearCeiling(
        ceiling=best_spearman(of_mean.share),
        ci_low=best_spearman(of_mean.ci_low),
        ci_high=best_spearman(of_mean.ci_high),
        share=of_mean,
        share_of_run=of_run,
        share_of_signal=of_signal,
        num_subsets=num_subsets,
        num_queries=num_queries,
        num_undefined=num_queries - len(defined),
        per_query=per_query,
    )


# ---- how regression on subsets learns: its LDS at m retrains says what it would be at unlimited ones ----


@dataclass(frozen=True, kw_only=True)
class UnlimitedRetrains:
    """The LDS that ridge regression would reach in the end. The interval is the LDS's own, carried through."""

    ceiling: float
    ci_low: float
    ci_high: float
    share: float  # of the variance of what LDS was measured against


def unlimited_retrains(
    score: tuple[float, float, float], num_retrains: int, num_examples: int, *, run_over_mean: float = 1.0
) -> UnlimitedRetrains:
    """score: corrected LDS, and its ends, of ridge regression without a prior on single runs of subsets drawn alike.

    run_over_mean: variance over subsets of a single run, which is learnt from, over that of the mean of several, which
    LDS was measured against; 1 where the truth is single runs too.
    """
    if num_retrains < 1 or num_examples < 2:
        raise ValueError(f"{num_retrains} retrains of {num_examples} examples; expected at least 1 of at least 2")
    if not run_over_mean >= 1.0:
        raise ValueError(f"run_over_mean is {run_over_mean}; expected at least 1: a mean of runs varies less than one")
    shares = []
    for lds in score:
        pearson = 2.0 * math.sin(math.pi / 6.0 * max(lds, 0.0))  # of jointly normal values
        explained = pearson**2 / run_over_mean
        shares.append(run_over_mean * additive_share(explained, num_retrains, num_examples))
    ceiling, low, high = map(best_spearman, shares)
    return UnlimitedRetrains(ceiling=ceiling, ci_low=low, ci_high=high, share=shares[0])


def additive_share(explained: float, num_retrains: int, num_examples: int) -> float:
    """h, the additive share of a run's variance, where so much of that variance is explained after m retrains."""
    if math.isnan(explained):
        return math.nan
    rate = num_retrains / (num_examples - 1)  # subsets of one size leave n - 1 directions
    inside = (explained * rate) ** 2 + 4.0 * rate * explained * max(0.0, 1.0 - explained)
    return (explained * rate + math.sqrt(inside)) / (2.0 * rate)


# ---- of records ----

WIDEST = 0.2  # interval that is shown


def is_known(numbers: Mapping[str, Any]) -> bool:
    """Whether one seed's linear ceiling is known well enough to be read; in records of old it is not there.

    Ends are cut at 0 and 1: one that lies there says that the interval is wider than it looks.
    """
    low, high = numbers.get("linear_low"), numbers.get("linear_high")
    return low is not None and high is not None and 0 < low <= high < 1 and high - low <= WIDEST


def pooled_linear_ceiling(shares: Sequence[float], noise: float) -> float:
    """Of the seeds' mean share; NaN where it is above their noise ceiling, if that is known.

    What an additive score could have is no more than what any prediction could: one above it is chance.
    """
    found = best_spearman(float(np.mean(shares)))
    return math.nan if found > noise else found
