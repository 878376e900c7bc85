"""The noise ceiling: the LDS that a perfect prediction could reach, LDS as a share of it, and both over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from bench.metrics.intervals import (
    CONFIDENCE,
    MINIMUM_SUBSETS,
    NUM_BOOTSTRAP,
    BoolArray,
    FloatArray,
    IntArray,
    Sampling,
    TwoWayInterval,
    as_replicates,
    check_num_subsets,
    check_pair,
    mean_of_defined,
    mean_over_replicates,
    normal_quantile,
    sample_spearman,
    t_quantile,
    two_way_interval,
)
from bench.metrics.lds import GroupCounts

MOST_SPLITS = 20  # of the replicates into halves


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The score a perfect prediction could be expected to reach, given the noise of retraining."""

    ceiling: float  # sqrt(reliability); 0.0 when the reliability is not positive, NaN when it is unknown
    ci_low: float
    ci_high: float
    reliability: float  # of the truth averaged over all replicates
    reliability_low: float
    reliability_high: float
    split_half: float  # mean correlation between the halves, before the step-up
    num_subsets: int  # all subsets
    num_subsets_replicated: int  # those with two or more replicates, which the estimate rests on
    num_replicates: float  # harmonic mean over subsets
    num_queries: int
    num_undefined: int
    per_query: FloatArray = field(repr=False, compare=False)  # (num_queries,) split-half correlation
    sampling: Sampling | None = field(repr=False, compare=False)  # what `lds_over_ceiling` needs
    step_up: StepUp | None = field(repr=False, compare=False)

    @property
    def touches_zero(self) -> bool:
        """Whether the interval of the reliability reaches 0: then nothing should be divided by the ceiling."""
        return not self.reliability_low > 0.0


@dataclass(frozen=True, kw_only=True)
class CeilingRatio:
    """LDS divided by the noise ceiling, over the queries that both define."""

    ratio: float  # NaN when the ceiling is zero or unknown
    ci_low: float
    ci_high: float
    standard_error: float
    lds: float
    ceiling: float
    num_subsets: int
    num_queries: int
    num_undefined: int


@dataclass(frozen=True)
class StepUp:
    """From the correlation between two halves of the replicates to the reliability of their mean over all of them.

    With one replicate's noise variance `noise` in units of the signal's, the halves correlate by
    1 / sqrt((1 + noise * half_a) (1 + noise * half_b)) and the whole has reliability 1 / (1 + noise * whole), where
    each field is the mean over subsets of one over the number of replicates. For R even and the same everywhere this is
    Spearman and Brown's 2c / (1 + c); the longer form also holds for odd and for unequal numbers.
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

    def ceiling(self, split_half: float) -> float:
        reliability = self.reliability(split_half)
        return math.nan if math.isnan(reliability) else math.sqrt(max(0.0, reliability))


def _replicate_orders(num_replicates: int, seed: int) -> Iterator[IntArray]:
    """Orders of the replicates; taken alternately they fall into two halves, the first one larger when the number is
    odd.

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
        rng = np.random.default_rng([seed, 2])
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


def _mean_over_splits(
    values: FloatArray, exists: BoolArray, subsets: IntArray, within: GroupCounts | None, seed: int
) -> Sampling:
    """Of the correlation between the halves of these subsets' replicates; within: their counts."""
    orders, total = list(_replicate_orders(values.shape[0], seed)), None
    for order in orders:
        halves = _halves(values, exists, order, subsets)
        if within is not None:
            halves = [within.take_out(half, np.float32) for half in halves]
        sampling = sample_spearman(halves[0], halves[1], 0 if within is None else within.lost)
        total = sampling if total is None else total.combine(1.0, sampling, 1.0)
    assert total is not None
    return total.combine(1.0 / len(orders), total, 0.0)


def noise_ceiling(
    replicates: ArrayLike,
    *,
    present: ArrayLike | None = None,
    within: GroupCounts | None = None,
    seed: int = 0,
    num_bootstrap: int = NUM_BOOTSTRAP,
) -> Ceiling:
    """What LDS a perfect prediction could be expected to reach, from how well replicates agree with each other.

    replicates: (num_replicates, num_subsets, num_queries) retrained losses; where subsets differ in their number of
    replicates, with anything in the missing blocks, and `present`, (num_replicates, num_subsets), False for them. NaN
    alone does not mark a replicate as missing: a run that diverged makes its queries undefined, and they are counted.

    For each split of the replicates into halves (the same split for every subset, since replicates may share seeds
    across subsets), each query's half-means are correlated by Spearman across the subsets that have two replicates or
    more. The mean over splits and queries is stepped up to the replicates that the truth averages, over all subsets
    (see `StepUp`; odd and unequal numbers included), and the ceiling is the square root of that reliability. Step-up
    and square root are concave, so where queries differ much in reliability the ceiling is too high and a score divided
    by it too low: never flattering. So is another approximation: the step-up holds for Pearson's correlation, and with
    Spearman's of Gaussian losses it is high by 1.4 % at a ceiling of 0.56 and by 0.4 % at 0.80. within: the ceiling of
    LDS within groups, whose counts are taken out of both halves.

    NaN when fewer than three subsets have two replicates. A reliability that is not positive gives ceiling 0.0.
    """
    values, exists = as_replicates(replicates, present)
    check_num_subsets(values.shape[1])
    num_subsets, num_queries = values.shape[1:]
    counts = exists.sum(axis=0)
    replicated = np.flatnonzero(counts >= 2)
    whole = float((1.0 / counts).mean())
    within = None if within is None else within.rows(replicated)
    sizes: dict[str, Any] = {
        "num_subsets": num_subsets, "num_subsets_replicated": len(replicated), "num_replicates": 1.0 / whole,
        "num_queries": num_queries,
    }  # fmt: skip
    if len(replicated) - (0 if within is None else within.lost) < MINIMUM_SUBSETS:
        names = ("ceiling", "ci_low", "ci_high", "reliability", "reliability_low", "reliability_high", "split_half")
        unknown: dict[str, Any] = dict.fromkeys(names, math.nan)
        nothing = np.full(num_queries, np.nan)
        return Ceiling(
            **unknown, **sizes, num_undefined=num_queries, per_query=nothing, sampling=None,
            step_up=None,
        )  # fmt: skip
    larger = (counts[replicated] + 1) // 2
    step_up = StepUp(float((1.0 / larger).mean()), float((1.0 / (counts[replicated] - larger)).mean()), whole)

    sampling = _mean_over_splits(values, exists, replicated, within, seed)
    interval = two_way_interval(sampling, seed=seed, num_bootstrap=num_bootstrap, correlation=True)

    # The interval is about the value less its bias, which for nearly perfect agreement of a few subsets is larger than
    # the interval is wide: it is stretched to hold the plain value too, which is the one that is reported.
    low, high = (min(interval.low, interval.mean), max(interval.high, interval.mean))

    # Subsets without a second replicate say nothing here; the others count for more, so that the mean stays the same.
    influence = np.zeros((num_queries, num_subsets))
    influence[:, replicated] = sampling.influence * (num_subsets / len(replicated))
    return Ceiling(
        ceiling=step_up.ceiling(interval.mean),
        ci_low=step_up.ceiling(low),
        ci_high=step_up.ceiling(high),
        reliability=step_up.reliability(interval.mean),
        reliability_low=step_up.reliability(low),
        reliability_high=step_up.reliability(high),
        split_half=interval.mean,
        **sizes,
        num_undefined=sampling.num_undefined,
        per_query=sampling.plain,
        sampling=Sampling(sampling.plain, sampling.corrected, influence),
        step_up=step_up,
    )


def lds_over_ceiling(
    replicates: ArrayLike,
    prediction: ArrayLike,
    *,
    present: ArrayLike | None = None,
    ceiling: Ceiling | None = None,
    seed: int = 0,
    num_bootstrap: int = NUM_BOOTSTRAP,
) -> CeilingRatio:
    """LDS divided by the noise ceiling of the same truth: 1 for a prediction that is as good as the noise lets it be.

    replicates, present: as `noise_ceiling` takes them; prediction: (num_subsets, num_queries); ceiling: that of these
    replicates, where it is known already. The interval moves numerator and denominator together, by the same resamples
    of the linearised ratio; it can reach beyond 1. Ratio and interval are NaN when the ceiling is zero or unknown.
    """
    truth, prediction = check_pair(mean_over_replicates(replicates, present=present), prediction)
    check_num_subsets(truth.shape[0])
    if ceiling is None:
        ceiling = noise_ceiling(replicates, present=present, seed=seed, num_bootstrap=num_bootstrap)
    if truth.shape != (ceiling.num_subsets, ceiling.num_queries):
        raise ValueError(
            f"the replicates have {truth.shape[0]} subsets and {truth.shape[1]} queries, but the ceiling was made from "
            f"{ceiling.num_subsets} and {ceiling.num_queries}; make both from the same replicates."
        )
    score = sample_spearman(truth, prediction)
    lds, height = mean_of_defined(score.plain), ceiling.ceiling
    num_undefined = score.num_undefined
    interval = TwoWayInterval(*[math.nan] * 6)
    if ceiling.sampling is not None and ceiling.step_up is not None:
        both = ~np.isnan(score.plain) & ~np.isnan(ceiling.sampling.plain)
        num_undefined = int((~both).sum())
        lds = float(score.plain[both].mean()) if both.any() else math.nan
        split_half = float(ceiling.sampling.plain[both].mean()) if both.any() else math.nan
        height = ceiling.step_up.ceiling(split_half)
        if height > 0.0:
            step = min(1e-5, 0.5 * split_half, max(0.5 * (1.0 - split_half), 1e-12))
            ends = [ceiling.step_up.ceiling(split_half + side * step) for side in (-1, 1)]
            slope = (ends[1] - ends[0]) / (2.0 * step)
            linearised = score.combine(1.0 / height, ceiling.sampling, -lds * slope / height**2)
            interval = two_way_interval(linearised, seed=seed, num_bootstrap=num_bootstrap, correlation=False)
            # The linear form gives the deviations; its own mean lacks a constant.
            offset = lds / height - interval.mean
            interval = replace(interval, low=interval.low + offset, high=interval.high + offset)
    return CeilingRatio(
        ratio=lds / height if height > 0.0 else math.nan,
        ci_low=interval.low,
        ci_high=interval.high,
        standard_error=interval.standard_error,
        lds=lds,
        ceiling=height,
        num_subsets=truth.shape[0],
        num_queries=truth.shape[1],
        num_undefined=num_undefined,
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
    standard_error: float  # of the mean
    num_seeds: int  # of those that are known
    num_unknown: int

    @property
    def touches_zero(self) -> bool:
        """Whether the interval of the mean reaches 0: then nothing should be divided by the ceiling."""
        return not self.mean > 0.0 or self.mean_low <= 0.0  # where no interval is known, the mean says it


def pooled_ceiling(reliabilities: Sequence[float], errors: Sequence[float]) -> PooledCeiling:
    """One ceiling for several seeds, of their reliabilities and these' standard errors (NaN where none is known).

    A mean of roots counts a seed whose reliability came out below 0 as 0, and is the root of nothing where the
    reliability is small; chance cancels in the mean of reliabilities. The interval is Student's over seeds. Errors say
    how far chance alone spreads a seed, and the wider of the two intervals counts: seeds may agree by chance. A single
    seed has its own. Seeds of which nothing is known are left out and counted.
    """
    values, own = np.asarray(reliabilities, dtype=np.float64), np.asarray(errors, dtype=np.float64)
    if not values.size:
        raise ValueError("got no seeds; expected a reliability for each, one or more.")
    known = np.isfinite(values)
    values, own = values[known], own[known]
    num_seeds = len(values)
    mean, error, reach = (float(values.mean()) if num_seeds else math.nan), math.nan, math.nan
    if num_seeds == 1:
        error = float(own[0])
        reach = error * normal_quantile(0.5 + 0.5 * CONFIDENCE)
    elif num_seeds > 1:
        between = math.sqrt(float(values.var(ddof=1)) / num_seeds)
        within = math.sqrt(float((own**2).sum())) / num_seeds
        error, reach = between, between * t_quantile(0.5 + 0.5 * CONFIDENCE, num_seeds - 1)
        if within > 0:  # not NaN, which stays unknown
            error, reach = max(error, within), max(reach, within * normal_quantile(0.5 + 0.5 * CONFIDENCE))
    low, high = mean - reach, mean + reach
    return PooledCeiling(
        ceiling=_root(mean),
        ci_low=_root(low),
        ci_high=_root(high),
        mean=mean,
        mean_low=low,
        mean_high=high,
        standard_error=error,
        num_seeds=num_seeds,
        num_unknown=len(known) - num_seeds,
    )


def ceiling_of_ends(reliabilities: Sequence[float], lows: Sequence[float], highs: Sequence[float]) -> PooledCeiling:
    """`pooled_ceiling` of seeds whose noise ceilings were written down: reliability and the ends of the ceiling.

    An end that was cut at 0 says nothing of the width below, so there the width above counts for both. A seed's
    interval is about its value less its bias (see `noise_ceiling`), which is alike in all seeds and does not cancel:
    the pooled one reaches higher by the mean of what they correct. Where a seed's is stretched to hold its value, how
    much it corrects is hidden, and the upper end is no lower than the mean of theirs. Fewer than five seeds say little
    of their spread: where all of their own intervals are above 0, no more than what these span.
    """
    middle, below, above = (np.asarray(values, dtype=np.float64) for values in (reliabilities, lows, highs))
    half = np.where(below > 0.0, 0.5 * (above**2 - below**2), above**2 - middle)
    errors = np.maximum(half, 0.0) / normal_quantile(0.5 + 0.5 * CONFIDENCE)
    pooled = pooled_ceiling(middle.tolist(), errors.tolist())
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
        ci_low, ci_high = map(_root, (low, high))
        return replace(pooled, mean_low=low, mean_high=high, ci_low=ci_low, ci_high=ci_high)
    one = int(np.isfinite(middle).argmax())  # its own interval, to the last digit
    low, high = float(below[one]), float(above[one])
    return replace(pooled, ci_low=low, ci_high=high, mean_low=low**2, mean_high=high**2)


def _root(reliability: float) -> float:
    return reliability if math.isnan(reliability) else math.sqrt(min(max(reliability, 0.0), 1.0))
