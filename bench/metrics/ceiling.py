"""The noise ceiling: the LDS that a perfect prediction could be expected to reach, and LDS as a share of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike

from bench.metrics.checks import (
    MINIMUM_SUBSETS,
    FloatArray,
    IntArray,
    as_replicates,
    check_confidence,
    check_num_subsets,
    check_pair,
    mean_over_replicates,
)
from bench.metrics.interval import Sampling, TwoWayInterval, sample_spearman, two_way_interval
from bench.metrics.ranks import mean_of_defined


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
    confidence: float
    num_subsets: int  # all subsets
    num_subsets_replicated: int  # those with two or more replicates, which the estimate rests on
    num_replicates: float  # harmonic mean over subsets
    num_splits: int
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
    confidence: float
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


def _replicate_orders(num_replicates: int, num_splits: int, seed: int) -> Iterator[IntArray]:
    """Orders of the replicates; taken alternately they fall into two halves, the first one larger when the number is
    odd.

    All the splits there are when that is no more than `num_splits`, else that many at random.
    """
    larger = (num_replicates + 1) // 2
    even = num_replicates % 2 == 0
    if math.comb(num_replicates, larger) // (2 if even else 1) <= num_splits:
        for chosen in combinations(range(num_replicates), larger):
            if even and 0 not in chosen:
                continue  # the same split with the halves swapped
            order = np.empty(num_replicates, dtype=np.int64)
            order[0::2] = chosen
            order[1::2] = [r for r in range(num_replicates) if r not in chosen]
            yield order
    else:
        rng = np.random.default_rng([seed, 2])
        for _ in range(num_splits):
            yield rng.permutation(num_replicates)


def noise_ceiling(
    replicates: ArrayLike | Sequence[ArrayLike],
    *,
    present: ArrayLike | None = None,
    num_splits: int = 20,
    seed: int = 0,
    num_bootstrap: int = 1000,
    confidence: float = 0.95,
) -> Ceiling:
    """What LDS a perfect prediction could be expected to reach, from how well replicates agree with each other.

    replicates: (num_replicates, num_subsets, num_queries) retrained losses. Where subsets differ in their number of
    replicates, give either a list with one (num_replicates_k, num_queries) array a subset, or the array with anything
    in the missing blocks and `present`, (num_replicates, num_subsets), False for them. NaN alone does not mark a
    replicate as missing: a run that diverged makes its queries undefined, and they are counted.

    For each split of the replicates into halves (the same split for every subset, since replicates may share seeds
    across subsets), each query's half-means are correlated by Spearman across the subsets that have two replicates or
    more. The mean over splits and queries is stepped up to the replicates that the truth averages, over all subsets
    (see `StepUp`; odd and unequal numbers included), and the ceiling is the square root of that reliability. Step-up
    and square root are concave, so where queries differ much in reliability the ceiling is too high and a score divided
    by it too low: never flattering. So is another approximation: the step-up holds for Pearson's correlation, and with
    Spearman's of Gaussian losses it is high by 1.4 % at a ceiling of 0.56 and by 0.4 % at 0.80.

    NaN when fewer than three subsets have two replicates. A reliability that is not positive gives ceiling 0.0.
    """
    values, exists = as_replicates(replicates, present)
    check_num_subsets(values.shape[1])
    check_confidence(confidence, num_bootstrap)
    if num_splits < 1:
        raise ValueError(f"num_splits is {num_splits}; expected at least 1.")
    num_subsets, num_queries = values.shape[1:]
    counts = exists.sum(axis=0)
    replicated = np.flatnonzero(counts >= 2)
    whole = float((1.0 / counts).mean())
    nothing = np.full(num_queries, np.nan)
    if len(replicated) < MINIMUM_SUBSETS:
        return Ceiling(
            ceiling=math.nan,
            ci_low=math.nan,
            ci_high=math.nan,
            reliability=math.nan,
            reliability_low=math.nan,
            reliability_high=math.nan,
            split_half=math.nan,
            confidence=confidence,
            num_subsets=num_subsets,
            num_subsets_replicated=len(replicated),
            num_replicates=1.0 / whole,
            num_splits=0,
            num_queries=num_queries,
            num_undefined=num_queries,
            per_query=nothing,
            sampling=None,
            step_up=None,
        )
    larger = (counts[replicated] + 1) // 2
    step_up = StepUp(float((1.0 / larger).mean()), float((1.0 / (counts[replicated] - larger)).mean()), whole)

    splits_done = 0
    total: Sampling | None = None
    for order in _replicate_orders(values.shape[0], num_splits, seed):
        ordered = exists[order][:, replicated]
        turn = np.cumsum(ordered, axis=0) % 2 == 1
        halves = []
        for chosen in (ordered & turn, ordered & ~turn):
            half = np.zeros((len(replicated), num_queries))
            for slot, replicate in enumerate(order):
                half[chosen[slot]] += values[replicate, replicated[chosen[slot]]]
            halves.append(half / chosen.sum(axis=0)[:, None])
        sampling = sample_spearman(halves[0], halves[1])
        total = sampling if total is None else total.combine(1.0, sampling, 1.0)
        splits_done += 1
    assert total is not None
    sampling = total.combine(1.0 / splits_done, total, 0.0)
    interval = two_way_interval(
        sampling, seed=seed, num_bootstrap=num_bootstrap, confidence=confidence, correlation=True
    )

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
        confidence=confidence,
        num_subsets=num_subsets,
        num_subsets_replicated=len(replicated),
        num_replicates=1.0 / whole,
        num_splits=splits_done,
        num_queries=num_queries,
        num_undefined=sampling.num_undefined,
        per_query=sampling.plain,
        sampling=Sampling(sampling.plain, sampling.corrected, influence),
        step_up=step_up,
    )


def lds_over_ceiling(
    replicates: ArrayLike | Sequence[ArrayLike],
    prediction: ArrayLike,
    *,
    present: ArrayLike | None = None,
    ceiling: Ceiling | None = None,
    seed: int = 0,
    num_bootstrap: int = 1000,
    confidence: float = 0.95,
) -> CeilingRatio:
    """LDS divided by the noise ceiling of the same truth: 1 for a prediction that is as good as the noise lets it be.

    replicates, present: as `noise_ceiling` takes them; prediction: (num_subsets, num_queries); ceiling: that of these
    replicates, where it is known already. The interval moves numerator and denominator together, by the same resamples
    of the linearised ratio; it can reach beyond 1. Ratio and interval are NaN when the ceiling is zero or unknown.
    """
    truth, prediction = check_pair(mean_over_replicates(replicates, present=present), prediction)
    check_num_subsets(truth.shape[0])
    check_confidence(confidence, num_bootstrap)
    if ceiling is None:
        ceiling = noise_ceiling(
            replicates, present=present, seed=seed, num_bootstrap=num_bootstrap, confidence=confidence
        )
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
            interval = two_way_interval(
                linearised, seed=seed, num_bootstrap=num_bootstrap, confidence=confidence, correlation=False
            )
            # The linear form gives the deviations; its own mean lacks a constant.
            offset = lds / height - interval.mean
            interval = replace(interval, low=interval.low + offset, high=interval.high + offset)
    return CeilingRatio(
        ratio=lds / height if height > 0.0 else math.nan,
        ci_low=interval.low,
        ci_high=interval.high,
        standard_error=interval.standard_error,
        confidence=confidence,
        lds=lds,
        ceiling=height,
        num_subsets=truth.shape[0],
        num_queries=truth.shape[1],
        num_undefined=num_undefined,
    )
