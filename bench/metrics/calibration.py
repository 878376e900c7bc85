"""Are predictions in units of loss? The slope of actual against predicted changes, and how much of them is explained.

Both tables are (num_subsets, num_queries), and what a query has in common over subsets is taken out of both. With x the
predicted and y the actual deviation, pooled over queries:

- slope: the sum of x y over that of x x. 1 where scores are in units of loss; 1e-4 where they are 10,000 times too
  large. Noise of retraining is noise of y, and leaves it alone.
- R2: 1 less the squares of y - x over those of y. Predictions as they are; far below 0 where they are too large.
- R2 rescaled: the same with slope x, which is the squared correlation: what is left once units are forgiven.
- reachable: the share of y's squares that is not noise of retraining, from replicates. No prediction explains more.

Intervals are jackknifed over subsets and over queries, the two variances added, with Student's t.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from bench.metrics.intervals import (
    FloatArray,
    as_replicates,
    check_num_subsets,
    check_pair,
    mean_over_replicates,
    t_above,
    t_quantile,
)


@dataclass(frozen=True, kw_only=True)
class Jackknifed:
    """A number with its interval, and the values without each subset and each query that it rests on."""

    value: float
    ci_low: float
    ci_high: float
    standard_error: float
    without_subset: FloatArray = field(repr=False, compare=False)
    without_query: FloatArray = field(repr=False, compare=False)

    def minus(self, other: Jackknifed) -> Jackknifed:
        """The difference of two on the same subsets and queries."""
        subsets, queries = self.without_subset - other.without_subset, self.without_query - other.without_query
        return jackknifed(self.value - other.value, subsets, queries)

    @property
    def p_value(self) -> float:
        """Two-sided, of a value of 0."""
        if not self.standard_error > 0:
            return 1.0 if self.value == 0 else math.nan
        degrees = min(len(self.without_subset), len(self.without_query)) - 1
        return 2.0 * t_above(abs(self.value) / self.standard_error, degrees)


@dataclass(frozen=True, kw_only=True)
class UnitsOfLoss:
    """What the module's text says; NaN throughout where predictions or losses do not vary."""

    slope: Jackknifed
    r2: Jackknifed
    r2_rescaled: Jackknifed
    median_slope: float  # over queries, each by itself
    num_subsets: int
    num_queries: int
    num_undefined: int  # queries left out: something of theirs is not finite


def jackknifed(value: float, without_subset: FloatArray, without_query: FloatArray) -> Jackknifed:
    variance = 0.0
    for left in (without_subset, without_query):
        count = len(left)
        variance += (count - 1) / count * float(((left - left.mean()) ** 2).sum()) if count > 1 else math.nan
    error = math.sqrt(variance)
    degrees = min(len(without_subset), len(without_query)) - 1
    reach = error * t_quantile(0.975, degrees) if degrees > 0 else math.nan
    return Jackknifed(
        value=value, ci_low=value - reach, ci_high=value + reach, standard_error=error, without_subset=without_subset,
        without_query=without_query,
    )  # fmt: skip


def calibration(truth: ArrayLike, prediction: ArrayLike) -> UnitsOfLoss:
    """truth, prediction: (num_subsets, num_queries): losses, and what was predicted for them up to a constant."""
    truth, prediction = check_pair(truth, prediction)
    num_subsets, num_queries = truth.shape
    check_num_subsets(num_subsets)
    finite = np.isfinite(truth).all(axis=0) & np.isfinite(prediction).all(axis=0)
    y, x = truth[:, finite], prediction[:, finite]
    y, x = y - y.mean(axis=0), x - x.mean(axis=0)
    # Of each query, (3, q): and of each subset how much the three lose without it, its query's mean moving along.
    products = np.stack([x * y, x * x, y * y])
    by_query = products.sum(axis=1)
    without_query = by_query.sum(axis=1, keepdims=True) - by_query
    by_subset = products.sum(axis=2) * num_subsets / (num_subsets - 1)
    without_subset = by_query.sum(axis=1, keepdims=True) - by_subset
    whole, subsets, queries = (_statistics(sums) for sums in (by_query.sum(axis=1), without_subset, without_query))
    found = {name: jackknifed(float(whole[name]), subsets[name], queries[name]) for name in whole}
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = by_query[0] / by_query[1]
    return UnitsOfLoss(
        **found,
        median_slope=float(np.nanmedian(slopes)) if np.isfinite(slopes).any() else math.nan,
        num_subsets=num_subsets,
        num_queries=num_queries,
        num_undefined=num_queries - int(finite.sum()),
    )


def _statistics(sums: FloatArray) -> dict[str, FloatArray]:
    """sums: (3, ...) of x y, x x and y y."""
    xy, xx, yy = sums
    with np.errstate(divide="ignore", invalid="ignore"):
        return {"slope": xy / xx, "r2": (2 * xy - xx) / yy, "r2_rescaled": xy**2 / (xx * yy)}


def reachable_share(replicates: ArrayLike, present: ArrayLike | None = None) -> float:
    """1 less the noise of retraining in the mean over replicates; NaN without. Arguments: see `noise_ceiling`."""
    values, exists = as_replicates(replicates, present)
    counts = exists.sum(axis=0)
    several = counts >= 2
    if not several.any():
        return math.nan
    means = mean_over_replicates(values, present=exists)
    squares = np.where(exists[:, :, None], (values - means) ** 2, 0.0).sum(axis=0)[several]
    noise = (squares / (counts[several] - 1)[:, None]).mean()  # of one retraining
    noise_of_mean = noise * float((1.0 / counts).mean())
    total = float(((means - means.mean(axis=0)) ** 2).mean()) * len(means) / (len(means) - 1)
    return 1.0 - noise_of_mean / total if total > 0 else math.nan
