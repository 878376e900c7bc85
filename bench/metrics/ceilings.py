"""The noise ceiling, the LDS that a perfect prediction could reach, of one seed and of several."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from bench.metrics.intervals import (
    CONFIDENCE,
    MINIMUM_SUBSETS,
    BoolArray,
    FloatArray,
    GroupCounts,
    IntArray,
    as_replicates,
    check_num_subsets,
    normal_quantile,
    sample_spearman,
    t_quantile,
    two_way_interval,
)

MOST_SPLITS = 20  # of the replicates into halves
_NORMAL = normal_quantile(0.5 + 0.5 * CONFIDENCE)


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The score a perfect prediction could be expected to reach, given the noise of retraining."""

    ceiling: float  # sqrt(reliability); 0.0 when the reliability is not positive, NaN when it is unknown
    ci_low: float  # of its 95 % interval
    ci_high: float  # its other end
    reliability: float  # of the truth averaged over all replicates
    reliability_low: float  # of its 95 % interval
    reliability_high: float  # its other end
    split_half: float  # mean correlation between the halves, before the step-up
    num_subsets: int  # all subsets
    num_subsets_replicated: int  # those with two or more replicates, which the estimate rests on
    num_replicates: float  # harmonic mean over subsets
    num_queries: int  # all queries, the undefined ones included
    num_undefined: int  # those without a correlation
    per_query: FloatArray = field(repr=False, compare=False)  # (num_queries,) split-half correlation

    @property
    def touches_zero(self) -> bool:
        """Whether the interval of the reliability reaches 0: then nothing should be divided by the ceiling."""
        return not self.reliability_low > 0.0


@dataclass(frozen=True)
class StepUp:
    """From the correlation between two halves of the replicates to the reliability of their mean over all of them.

    Each field is the mean over subsets of one over the number of replicates; STATISTICS.md has the formula.
    """

    half_a: float
    half_b: float
    whole: float

    def reliability(self, split_half: float) -> float:
        if split_half == 0.0 or math.isnan(split_half):
            return split_half
        # A negative correlation is chance; mirroring it keeps the step-up monotone and the sign visible.
        total, product = self.half_a + self.half_b, self.half_a * self.half_b
        root = math.sqrt(total**2 + 4.0 * product * (1.0 / split_half**2 - 1.0))
        noise = (root - total) / (2.0 * product)
        return math.copysign(1.0 / (1.0 + noise * self.whole), split_half)


def _replicate_orders(num_replicates: int) -> Iterator[IntArray]:
    """Orders of the replicates; taken alternately they fall into two halves, the first the larger of an odd number.

    All the splits there are when these are no more than MOST_SPLITS, else that many at random.
    """
    larger = (num_replicates + 1) // 2
    even = num_replicates % 2 == 0
    if math.comb(num_replicates, larger) // (2 if even else 1) <= MOST_SPLITS:
        for chosen in combinations(range(num_replicates), larger):
            if even and 0 not in chosen:
                continue  # the same split with the halves swapped
            order = np.empty(num_replicates, dtype=np.int64)
            order[0::2] = chosen
            order[1::2] = [r for r in range(num_replicates) if r not in chosen]
            yield order
    else:
        rng = np.random.default_rng([0, 2])
        for _ in range(MOST_SPLITS):
            yield rng.permutation(num_replicates)


def _halves(values: FloatArray, exists: BoolArray, order: IntArray, subsets: IntArray) -> list[FloatArray]:
    """The means of both halves of these subsets' replicates, (subsets, queries) each."""
    ordered = exists[order][:, subsets]
    turn = np.cumsum(ordered, axis=0) % 2 == 1
    halves = []
    for chosen in (ordered & turn, ordered & ~turn):
        half = np.zeros((len(subsets), values.shape[2]))
        for slot, replicate in enumerate(order):
            half[chosen[slot]] += values[replicate, subsets[chosen[slot]]]
        halves.append(half / chosen.sum(axis=0)[:, None])
    return halves


def noise_ceiling(
    replicates: ArrayLike, *, present: ArrayLike | None = None, within: GroupCounts | None = None
) -> Ceiling:
    """What LDS a perfect prediction could be expected to reach, from how well replicates agree with each other.

    replicates: (num_replicates, num_subsets, num_queries) retrained losses; present: (num_replicates, num_subsets),
    False where one is missing. within: for LDS within groups. NaN when too few subsets have two replicates.
    """
    values, exists = as_replicates(replicates, present)
    check_num_subsets(values.shape[1])
    counts = exists.sum(axis=0)
    replicated = np.flatnonzero(counts >= 2)
    whole = float((1.0 / counts).mean())
    within = None if within is None else within.rows(replicated)
    lost = 0 if within is None else within.lost
    sizes: dict[str, Any] = {
        "num_subsets": values.shape[1], "num_subsets_replicated": len(replicated), "num_replicates": 1.0 / whole,
        "num_queries": values.shape[2],
    }  # fmt: skip
    if len(replicated) - lost < MINIMUM_SUBSETS:
        names = ("ceiling", "ci_low", "ci_high", "reliability", "reliability_low", "reliability_high", "split_half")
        nothing = np.full(values.shape[2], np.nan)
        unknown: dict[str, Any] = dict.fromkeys(names, math.nan)
        return Ceiling(**unknown, **sizes, num_undefined=values.shape[2], per_query=nothing)
    larger = (counts[replicated] + 1) // 2
    step_up = StepUp(float((1.0 / larger).mean()), float((1.0 / (counts[replicated] - larger)).mean()), whole)

    # The same split for every subset, since replicates may share seeds across subsets.
    orders, total = list(_replicate_orders(len(values))), None
    for order in orders:
        first, second = _halves(values, exists, order, replicated)
        if within is not None:
            first, second = within.take_out(first, np.float32), within.take_out(second, np.float32)
        one = sample_spearman(first, second, lost)
        total = one if total is None else total.combine(1.0, one, 1.0)
    assert total is not None
    sampling = total.combine(1.0 / len(orders), total, 0.0)
    interval = two_way_interval(sampling, correlation=True)

    # The interval is about the value less its bias, which for nearly perfect agreement of a few subsets is larger than
    # the interval is wide: it is stretched to hold the plain value too, which is the one that is reported.
    ends = (interval.mean, min(interval.low, interval.mean), max(interval.high, interval.mean))
    reliability, low, high = map(step_up.reliability, ends)
    return Ceiling(
        ceiling=_root(reliability),
        ci_low=_root(low),
        ci_high=_root(high),
        reliability=reliability,
        reliability_low=low,
        reliability_high=high,
        split_half=interval.mean,
        **sizes,
        num_undefined=sampling.num_undefined,
        per_query=sampling.plain,
    )


# ---- from one experiment to several seeds: means with standard errors, and ceilings pooled before the root ----

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
    """One ceiling for several seeds, from the mean of their reliabilities."""

    ceiling: float  # 0.0 when the mean is not positive
    ci_low: float
    ci_high: float
    mean: float  # of the reliabilities
    mean_low: float  # may be negative, where the ceiling's end is 0
    mean_high: float
    num_seeds: int  # of those that are known
    num_unknown: int

    @property
    def touches_zero(self) -> bool:
        """Whether the interval of the mean reaches 0: then nothing should be divided by the ceiling."""
        # Where no interval is known, the mean says it; where no seed is, nothing does.
        return self.num_seeds > 0 and (not self.mean > 0.0 or self.mean_low <= 0.0)


def pooled_ceiling(reliabilities: Sequence[float], lows: Sequence[float], highs: Sequence[float]) -> PooledCeiling:
    """One ceiling for several seeds: of the reliability and the ends of the ceiling of each; STATISTICS.md says how.

    Unknown ends are NaN; a seed of which nothing is known is left out and counted.
    """
    middle, below, above = (np.asarray(values, dtype=np.float64) for values in (reliabilities, lows, highs))
    if not middle.size:
        raise ValueError("got no seeds; expected a reliability for each, one or more.")
    seeds = np.isfinite(middle)
    num_unknown = int((~seeds).sum())
    middle, below, above = middle[seeds], below[seeds], above[seeds]
    known = np.isfinite(below) & np.isfinite(above)
    num_seeds, low, high = len(middle), math.nan, math.nan
    mean = float(middle.mean()) if num_seeds else math.nan
    ends = None
    if num_seeds == 1:  # its own interval, to the last digit
        ends = float(below[0]), float(above[0])
        low, high = ends[0] ** 2, ends[1] ** 2
    elif num_seeds > 1:
        # Student's interval over seeds, or theirs together where it is wider, as seeds may agree by chance. An end that
        # was cut at 0 says nothing of the width below: there the width above counts for both.
        half = np.maximum(np.where(below > 0.0, 0.5 * (above**2 - below**2), above**2 - middle), 0.0)
        reach = math.sqrt(float(middle.var(ddof=1)) / num_seeds) * t_quantile(0.5 + 0.5 * CONFIDENCE, num_seeds - 1)
        together = math.sqrt(float(((half / _NORMAL) ** 2).sum())) / num_seeds * _NORMAL
        reach = max(reach, together) if together > 0 else reach  # NaN stays unknown
        low, high = mean - reach, mean + reach
        if known.any():
            # Seeds' intervals are about the value less its bias, which is alike in all and does not cancel. Where one
            # is stretched to hold its value, how much it corrects is hidden.
            corrects = np.where(below > 0.0, 0.5 * (above**2 + below**2) - middle, 0.0)[known].mean()
            high += max(0.0, float(corrects))
            if (np.isclose(below**2, middle, rtol=1e-6) & known).any():
                high = max(high, float((above[known] ** 2).mean()))
            if num_seeds < MANY_SEEDS and (below[known] > 0.0).all():  # few say little of their spread
                low, high = max(low, float(below[known].min()) ** 2), min(high, float(above[known].max()) ** 2)
    ci_low, ci_high = ends or (_root(low), _root(high))
    return PooledCeiling(
        ceiling=_root(mean), ci_low=ci_low, ci_high=ci_high, mean=mean, mean_low=low, mean_high=high,
        num_seeds=num_seeds, num_unknown=num_unknown,
    )  # fmt: skip


def _root(reliability: float) -> float:
    return reliability if math.isnan(reliability) else math.sqrt(min(max(reliability, 0.0), 1.0))
