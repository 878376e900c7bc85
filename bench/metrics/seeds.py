"""From one experiment to several seeds: means with standard errors, and ceilings pooled before the root."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from bench.metrics.ceiling import Ceiling
from bench.metrics.checks import check_confidence
from bench.metrics.linear import LinearCeiling, best_spearman


def mean_and_standard_error(values: ArrayLike) -> tuple[float, float]:
    """The mean over seeds and its standard error, NaN for a single value. A NaN among the values stays visible."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"values has shape {array.shape}; expected (num_seeds,), one number or more.")
    error = float(array.std(ddof=1) / math.sqrt(array.size)) if array.size > 1 else math.nan
    return float(array.mean()), error


@dataclass(frozen=True, kw_only=True)
class PooledCeiling:
    """One ceiling for several seeds, from the mean of their reliabilities, or of their additive shares."""

    ceiling: float  # 0.0 when the mean is not positive
    ci_low: float
    ci_high: float
    mean: float  # of the reliabilities or shares
    mean_low: float  # may be negative, where the ceiling's end is 0
    mean_high: float
    standard_error: float  # of the mean
    confidence: float
    num_seeds: int  # of those that are known
    num_unknown: int

    @property
    def touches_zero(self) -> bool:
        """Whether the interval of the mean reaches 0: then nothing should be divided by the ceiling."""
        return not self.mean_low > 0.0


def pooled_ceiling(seeds: Sequence[Ceiling] | Sequence[float], *, confidence: float = 0.95) -> PooledCeiling:
    """One noise ceiling for several seeds, from theirs or from the reliabilities alone.

    A mean of roots counts a seed whose reliability came out below 0 as 0, and is the root of nothing where the
    reliability is small; chance cancels in the mean of reliabilities. The interval is Student's over seeds. Where
    `Ceiling`s are given, their own intervals say how far chance alone spreads a seed, and the spread over seeds counts
    as no less; a single seed keeps its own interval. Seeds of unknown reliability are left out and counted.
    """

    def share(seed: Ceiling) -> tuple[float, float, float]:
        return seed.reliability, seed.reliability_low, seed.reliability_high

    def root(reliability: float) -> float:
        return math.nan if math.isnan(reliability) else math.sqrt(max(0.0, reliability))

    return _pool(seeds, Ceiling, share, root, confidence)


def pooled_linear_ceiling(
    seeds: Sequence[LinearCeiling] | Sequence[float], *, confidence: float = 0.95
) -> PooledCeiling:
    """One linear ceiling for several seeds, from theirs or from the additive shares alone; as `pooled_ceiling`."""

    def share(seed: LinearCeiling) -> tuple[float, float, float]:
        return seed.share.share, seed.share.ci_low, seed.share.ci_high

    return _pool(seeds, LinearCeiling, share, best_spearman, confidence)


def _pool(
    seeds: Sequence[Any],
    kind: type,
    share: Callable[[Any], tuple[float, float, float]],
    ceiling: Callable[[float], float],
    confidence: float,
) -> PooledCeiling:
    check_confidence(confidence, 1)
    if not len(seeds):
        raise ValueError(f"got no seeds; expected a {kind.__name__} or a number for each, one or more.")
    whole = sum(isinstance(seed, kind) for seed in seeds)
    if whole not in (0, len(seeds)):
        raise ValueError(f"got {whole} {kind.__name__}s among {len(seeds)} seeds; pass these or numbers, not both.")
    found = [share(seed) if whole else (float(seed), math.nan, math.nan) for seed in seeds]
    known = np.array([one for one in found if math.isfinite(one[0])]).reshape(-1, 3)
    num_seeds = len(known)
    mean = float(known[:, 0].mean()) if num_seeds else math.nan
    error = low = high = math.nan
    if num_seeds:
        own = confidence if not whole else seeds[0].confidence
        errors = (known[:, 2] - known[:, 1]) / (2.0 * float(stats.norm.ppf(0.5 + 0.5 * own)))
    if num_seeds == 1:
        error, low, high = float(errors[0]), float(known[0, 1]), float(known[0, 2])
    elif num_seeds > 1:
        between = float(known[:, 0].var(ddof=1)) / num_seeds
        within = float((errors**2).sum()) / num_seeds**2
        within = within if math.isfinite(within) else 0.0
        error = math.sqrt(max(between, within))
        reach = error * float(stats.t.ppf(0.5 + 0.5 * confidence, num_seeds - 1 if between >= within else math.inf))
        low, high = mean - reach, min(max(1.0, mean), mean + reach)
    return PooledCeiling(
        ceiling=ceiling(mean),
        ci_low=ceiling(low),
        ci_high=ceiling(high),
        mean=mean,
        mean_low=low,
        mean_high=high,
        standard_error=error,
        confidence=confidence,
        num_seeds=num_seeds,
        num_unknown=len(seeds) - num_seeds,
    )
