"""From one experiment to several seeds: means with standard errors, and noise ceilings pooled before the root."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from bench.metrics.ceiling import Ceiling
from bench.metrics.checks import check_confidence


def mean_and_standard_error(values: ArrayLike) -> tuple[float, float]:
    """The mean over seeds and its standard error, NaN for a single value. A NaN among the values stays visible."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"values has shape {array.shape}; expected (num_seeds,), one number or more.")
    error = float(array.std(ddof=1) / math.sqrt(array.size)) if array.size > 1 else math.nan
    return float(array.mean()), error


@dataclass(frozen=True, kw_only=True)
class PooledCeiling:
    """The noise ceiling of several seeds: the root of their mean reliability."""

    ceiling: float  # 0.0 when the mean reliability is not positive
    ci_low: float
    ci_high: float
    reliability: float
    reliability_low: float  # may be negative, where the ceiling's end is 0
    reliability_high: float
    standard_error: float  # of the reliability
    confidence: float
    num_seeds: int  # with a known reliability
    num_unknown: int

    @property
    def touches_zero(self) -> bool:
        """Whether the interval of the reliability reaches 0: then nothing should be divided by the ceiling."""
        return not self.reliability_low > 0.0


def pooled_ceiling(seeds: Sequence[Ceiling] | Sequence[float], *, confidence: float = 0.95) -> PooledCeiling:
    """One ceiling for several seeds, from their noise ceilings or from the reliabilities alone.

    A mean of roots counts a seed whose reliability came out below 0 as 0, and so is too high where the reliability is
    small; chance cancels in the mean of reliabilities. The interval is Student's over seeds. Where `Ceiling`s are
    given, their own intervals say how far chance alone spreads a seed, and the spread over seeds counts as no less; a
    single seed keeps its own interval. Seeds of unknown reliability are left out and counted.
    """
    check_confidence(confidence, 1)
    if not len(seeds):
        raise ValueError("got no seeds; expected a Ceiling or a reliability for each, one or more.")
    ceilings = [seed for seed in seeds if isinstance(seed, Ceiling)]
    if ceilings and len(ceilings) != len(seeds):
        raise ValueError(f"got {len(ceilings)} Ceilings among {len(seeds)} seeds; pass Ceilings or numbers, not both.")
    known = [seed for seed in ceilings if math.isfinite(seed.reliability)]
    values = np.array([seed.reliability for seed in known] if ceilings else seeds, dtype=np.float64)
    values = values[np.isfinite(values)]
    num_seeds = len(values)
    mean = float(values.mean()) if num_seeds else math.nan
    error = low = high = math.nan
    if num_seeds == 1 and known:
        error = _standard_error(known[0])
        low, high = known[0].reliability_low, known[0].reliability_high
    elif num_seeds > 1:
        between = float(values.var(ddof=1)) / num_seeds
        within = sum(_standard_error(seed) ** 2 for seed in known) / num_seeds**2
        within = within if math.isfinite(within) else 0.0
        degrees = num_seeds - 1 if between >= within else math.inf
        error = math.sqrt(max(between, within))
        reach = error * float(stats.t.ppf(0.5 + 0.5 * confidence, degrees))
        low, high = mean - reach, min(1.0, mean + reach)
    return PooledCeiling(
        ceiling=_root(mean),
        ci_low=_root(low),
        ci_high=_root(high),
        reliability=mean,
        reliability_low=low,
        reliability_high=high,
        standard_error=error,
        confidence=confidence,
        num_seeds=num_seeds,
        num_unknown=len(seeds) - num_seeds,
    )


def _root(reliability: float) -> float:
    return math.nan if math.isnan(reliability) else math.sqrt(max(0.0, reliability))


def _standard_error(ceiling: Ceiling) -> float:
    """Of the reliability, from the width of its interval."""
    width = ceiling.reliability_high - ceiling.reliability_low
    return width / (2.0 * float(stats.norm.ppf(0.5 + 0.5 * ceiling.confidence)))
