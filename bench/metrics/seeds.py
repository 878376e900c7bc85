"""From one experiment to several seeds: means with standard errors, and ceilings pooled before the root."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from bench.metrics.ceiling import Ceiling
from bench.metrics.checks import FloatArray, check_confidence
from bench.metrics.linear import LinearCeiling, best_spearman
from bench.metrics.quantiles import normal_quantile, t_quantile

MANY_SEEDS = 5  # fewer: Student's interval says more of the number of seeds than of their spread


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
        return not self.mean > 0.0 or self.mean_low <= 0.0  # where no interval is known, the mean says it


def pooled_ceiling(
    seeds: Sequence[Ceiling | LinearCeiling | float],
    *,
    errors: Sequence[float] | None = None,
    linear: bool = False,
    confidence: float = 0.95,
) -> PooledCeiling:
    """One ceiling for several seeds: of their noise ceilings, or of their linear ceilings.

    Numbers are reliabilities, or additive shares if `linear`; `errors` are their standard errors. A mean of roots
    counts a seed whose reliability came out below 0 as 0, and is the root of nothing where the reliability is small;
    chance cancels in the mean of reliabilities. The interval is Student's over seeds. Where ceilings or errors are
    given, they say how far chance alone spreads a seed, and the wider of the two intervals counts: seeds may agree by
    chance. A single seed has its own. Seeds of which nothing is known are left out and counted.
    """
    check_confidence(confidence, 1)
    shares, found, linear = _shares(seeds, linear)
    own = found if errors is None else np.asarray(errors, dtype=np.float64)
    known = np.isfinite(shares)
    shares, own = shares[known], own[known]
    num_seeds = len(shares)
    mean, error, reach = (float(shares.mean()) if num_seeds else math.nan), math.nan, math.nan
    if num_seeds == 1:
        error = float(own[0])
        reach = error * normal_quantile(0.5 + 0.5 * confidence)
    elif num_seeds > 1:
        between = math.sqrt(float(shares.var(ddof=1)) / num_seeds)
        within = math.sqrt(float((own**2).sum())) / num_seeds
        error, reach = between, between * t_quantile(0.5 + 0.5 * confidence, num_seeds - 1)
        if within > 0:  # not NaN, which stays unknown
            error, reach = max(error, within), max(reach, within * normal_quantile(0.5 + 0.5 * confidence))
    low, high = mean - reach, mean + reach
    return PooledCeiling(
        ceiling=_ceiling(mean, linear),
        ci_low=_ceiling(low, linear),
        ci_high=_ceiling(high, linear),
        mean=mean,
        mean_low=low,
        mean_high=high,
        standard_error=error,
        confidence=confidence,
        num_seeds=num_seeds,
        num_unknown=len(seeds) - num_seeds,
    )


def ceiling_of_ends(
    reliabilities: Sequence[float], lows: Sequence[float], highs: Sequence[float], *, confidence: float = 0.95
) -> PooledCeiling:
    """`pooled_ceiling` of seeds whose noise ceilings were written down: reliability and the ends of the ceiling.

    An end that was cut at 0 says nothing of the width below, so there the width above counts for both. A seed's
    interval is about its value less its bias (see `noise_ceiling`), which is alike in all seeds and does not cancel:
    the pooled one reaches higher by the mean of what they correct. Where a seed's is stretched to hold its value, how
    much it corrects is hidden, and the upper end is no lower than the mean of theirs. Fewer than five seeds say little
    of their spread: where all of their own intervals are above 0, no more than what these span.
    """
    middle, below, above = (np.asarray(values, dtype=np.float64) for values in (reliabilities, lows, highs))
    half = np.where(below > 0.0, 0.5 * (above**2 - below**2), above**2 - middle)
    errors = np.maximum(half, 0.0) / normal_quantile(0.5 + 0.5 * confidence)
    pooled = pooled_ceiling(middle.tolist(), errors=errors.tolist(), confidence=confidence)
    if pooled.num_seeds != 1:
        known = np.isfinite(middle) & np.isfinite(below) & np.isfinite(above)
        if not known.any():
            return pooled
        corrects = np.where(below > 0.0, 0.5 * (above**2 + below**2) - middle, 0.0)[known].mean()
        low, high = pooled.mean_low, pooled.mean_high + max(0.0, float(corrects))
        if (np.isclose(below**2, middle, rtol=1e-6) & known).any():
            high = max(high, float((above[known] ** 2).mean()))
        if pooled.num_seeds < MANY_SEEDS and (below[known] > 0.0).all():
            low, high = max(low, float(below[known].min()) ** 2), min(high, float(above[known].max()) ** 2)
        ci_low, ci_high = (_ceiling(end, linear=False) for end in (low, high))
        return replace(pooled, mean_low=low, mean_high=high, ci_low=ci_low, ci_high=ci_high)
    one = int(np.isfinite(middle).argmax())  # its own interval, to the last digit
    low, high = float(below[one]), float(above[one])
    return replace(pooled, ci_low=low, ci_high=high, mean_low=low**2, mean_high=high**2)


@dataclass(frozen=True, kw_only=True)
class PooledRatio:
    """The mean LDS over seeds divided by their pooled ceiling."""

    ratio: float  # NaN when the ceiling's interval touches 0
    ci_low: float
    ci_high: float
    standard_error: float
    confidence: float
    num_seeds: int


def lds_over_pooled_ceiling(
    scores: Sequence[float],
    seeds: Sequence[Ceiling | LinearCeiling | float],
    *,
    linear: bool = False,
    confidence: float = 0.95,
) -> PooledRatio:
    """The mean of `scores`, each seed's LDS, over the pooled ceiling of `seeds`, in the same order.

    Both are averaged before they are divided, since a single seed's ceiling may be close to 0. The interval is
    Student's over two seeds or more, of the linearised ratio, so that what a seed does to both cancels; one seed has
    `lds_over_ceiling`.
    """
    if len(scores) != len(seeds) or len(seeds) < 2:
        raise ValueError(f"got {len(scores)} scores and {len(seeds)} seeds; expected as many of both, two or more.")
    shares, _, linear = _shares(seeds, linear)
    values = np.array([scores, shares])
    known = np.isfinite(values).all(axis=0)
    values = values[:, known]
    num_seeds = int(known.sum())
    ratio = low = high = error = math.nan
    pooled = pooled_ceiling([seed for seed, use in zip(seeds, known) if use], linear=linear) if num_seeds > 1 else None
    if pooled is not None and not pooled.touches_zero:
        ratio = float(values[0].mean()) / pooled.ceiling
        step = 1e-3 * min(pooled.mean, 1.0)
        at = min(pooled.mean, 1.0 - step)  # a share above 1 is chance: the linear ceiling ends there
        slope = (_ceiling(at + step, linear) - _ceiling(at - step, linear)) / (2.0 * step)
        _, error = mean_and_standard_error((values[0] - ratio * slope * values[1]) / pooled.ceiling)
        reach = error * t_quantile(0.5 + 0.5 * confidence, num_seeds - 1)
        low, high = ratio - reach, ratio + reach
    return PooledRatio(
        ratio=ratio, ci_low=low, ci_high=high, standard_error=error, confidence=confidence, num_seeds=num_seeds
    )


def _shares(seeds: Sequence[Ceiling | LinearCeiling | float], linear: bool) -> tuple[FloatArray, FloatArray, bool]:
    """Each seed's reliability or share, its standard error (NaN for a number), and whether these are linear."""
    if not len(seeds):
        raise ValueError("got no seeds; expected a ceiling or a number for each, one or more.")
    kinds = {type(seed) if isinstance(seed, Ceiling | LinearCeiling) else float for seed in seeds}
    if len(kinds) > 1:
        raise ValueError("got seeds of different kinds; pass noise ceilings, linear ceilings or numbers, all alike.")
    found = []
    for seed in seeds:
        if isinstance(seed, Ceiling):
            width = (seed.reliability_high - seed.reliability_low) / normal_quantile(0.5 + 0.5 * seed.confidence)
            found.append((seed.reliability, 0.5 * width))
        elif isinstance(seed, LinearCeiling):
            found.append((seed.share.share, seed.share.standard_error))
        else:
            found.append((float(seed), math.nan))
    shares, errors = np.array(found).T
    return shares, errors, linear or isinstance(seeds[0], LinearCeiling)


def _ceiling(share: float, linear: bool) -> float:
    if linear or math.isnan(share):
        return best_spearman(share)
    return math.sqrt(min(max(share, 0.0), 1.0))
