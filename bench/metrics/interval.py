"""The two-way interval of a mean over queries: subsets and queries are both draws. STATISTICS.md derives it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bench.metrics.checks import FloatArray
from bench.metrics.quantiles import normal_quantile, t_quantile
from bench.metrics.ranks import defined_columns, leave_one_out, query_blocks

_DRAWS_PER_BLOCK = 1 << 20


@dataclass(frozen=True)
class Sampling:
    """How a mean over queries varies with the draw of queries and of subsets. Rows of undefined queries are NaN.

    plain: (num_queries,) the statistic; corrected: (num_queries,) less its jackknife bias; influence: (num_queries,
    num_subsets) jackknife influence values, each row summing to zero. Sums and multiples of samplings are samplings,
    which is how differences and ratios get their intervals from the very same resamples.
    """

    plain: FloatArray
    corrected: FloatArray
    influence: FloatArray

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


def sample_spearman(truth: FloatArray, prediction: FloatArray) -> Sampling:
    """truth, prediction: (num_subsets, num_queries)."""
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
    return Sampling(plain, corrected, influence)


def _resampled_means(values: FloatArray, num_bootstrap: int, rng: np.random.Generator) -> FloatArray:
    """(num_bootstrap,): means of `values`, (n,), drawn with replacement."""
    n = len(values)
    means = np.empty(num_bootstrap)
    step = max(1, _DRAWS_PER_BLOCK // n)
    for start in range(0, num_bootstrap, step):
        stop = min(start + step, num_bootstrap)
        draws = rng.integers(0, n, size=(stop - start, n))
        means[start:stop] = values[draws].mean(axis=1)
    return means


def two_way_interval(
    sampling: Sampling, *, seed: int, num_bootstrap: int, confidence: float, correlation: bool
) -> TwoWayInterval:
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
    # Welch and Satterthwaite. The shared variance is a difference; its uncertainty is that of the larger, observed
    # term. Where little is shared that overstates it without limit, and Student's t at less than one degree of freedom
    # makes an interval from -1 to 1: half of what the scarcer of the two samples has is the least.
    degrees_of_freedom = max(
        variance**2 / (from_queries**2 / (num_queries - 1) + (observed / num_subsets) ** 2 / (num_subsets - 1)),
        0.5 * (min(num_queries, num_subsets) - 1),
    )

    query_rng, subset_rng = (np.random.default_rng([seed, side]) for side in (0, 1))
    deviation = _resampled_means(corrected - centre, num_bootstrap, query_rng)
    deviation *= math.sqrt(num_queries / (num_queries - 1))
    if shared > 0.0:
        scale = math.sqrt(shared / observed * num_subsets / (num_subsets - 1))
        deviation += scale * _resampled_means(by_subset, num_bootstrap, subset_rng)
    tail = 0.5 * (1.0 - confidence)
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
