"""The linear datamodelling score (LDS), and the difference of two of them on the same truth."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from bench.metrics.intervals import (
    MINIMUM_SUBSETS,
    NUM_BOOTSTRAP,
    FloatArray,
    IntArray,
    Sampling,
    check_num_subsets,
    check_pair,
    mean_of_defined,
    sample_spearman,
    spearman_columns,
    t_above,
    two_way_interval,
)

# ---- groups ----

# A column this close to what groups explain, in units of its largest value, is nothing but rounding.
_ROUNDING = {np.dtype(np.float32): 1e-5, np.dtype(np.float64): 2e-13}


@dataclass(frozen=True)
class GroupCounts:
    """How many examples of each group a subset holds, (num_subsets, num_groups): what LDS within groups takes out.

    `take_out` regresses the counts, and a constant, out of values over subsets; STATISTICS.md says why of the values
    and not of their ranks.
    """

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
        """What is left of each column of (num_subsets, num_queries); exactly 0 where that is no more than rounding.

        precision: the type that the values were computed in, where it is not their own.
        """
        given = np.asarray(values)
        rounding = _ROUNDING.get(np.dtype(precision or given.dtype), _ROUNDING[np.dtype(np.float64)])
        with np.errstate(invalid="ignore"):  # of what is not finite: its query is undefined
            left = given - given.mean(axis=0, dtype=np.float64)
            left -= self.basis @ (self.basis.T @ left)
            left[:, np.abs(left).max(axis=0) <= rounding * np.abs(given).max(axis=0)] = 0.0
        return left


# ---- LDS ----


@dataclass(frozen=True, kw_only=True)
class LDS:
    """A linear datamodelling score with its two-way interval."""

    lds: float  # mean over the defined queries of `per_query`; NaN when none is defined
    ci_low: float  # NaN when fewer than two queries are defined
    ci_high: float
    standard_error: float
    bias: float  # of `lds`, from having finitely many subsets; the interval is centred on lds - bias
    num_subsets: int
    num_queries: int  # all queries, the undefined ones included
    num_undefined: int
    across_queries: float  # see `lds_across_queries`
    per_query: FloatArray = field(repr=False, compare=False)  # (num_queries,), NaN where undefined

    @property
    def lds_corrected(self) -> float:
        """The estimate for infinitely many subsets, which the interval is around."""
        return self.lds - self.bias


@dataclass(frozen=True, kw_only=True)
class Difference:
    """LDS of method a minus LDS of method b, over the queries that both define."""

    difference: float
    ci_low: float
    ci_high: float
    standard_error: float
    p_value: float  # two-sided, Student's t on the jackknife standard error; 1 when the two are the same
    bias: float
    num_subsets: int
    num_queries: int
    num_undefined: int  # queries undefined for a or for b
    per_query: FloatArray = field(repr=False, compare=False)  # (num_queries,)


def lds_across_queries(truth: ArrayLike, prediction: ArrayLike) -> float:
    """For each subset, Spearman across queries; then the mean over subsets: what the paper's equation literally prints.

    It mostly rewards knowing which queries are hard, which needs no attribution; LDS proper correlates across subsets.
    Queries with a value that is not finite are left out, as they are from LDS, where they are counted. Subsets for
    which the correlation is undefined are left out; NaN when all are, or with fewer than two queries.
    """
    truth, prediction = check_pair(truth, prediction)
    finite = np.isfinite(truth).all(axis=0) & np.isfinite(prediction).all(axis=0)
    if finite.sum() < 2:
        return math.nan
    return mean_of_defined(spearman_columns(truth[:, finite].T, prediction[:, finite].T))


def linear_datamodelling_score(
    truth: ArrayLike,
    prediction: ArrayLike,
    *,
    within: GroupCounts | None = None,
    seed: int = 0,
    num_bootstrap: int = NUM_BOOTSTRAP,
) -> LDS:
    """LDS of one method, with its interval over subsets and queries.

    truth, prediction: (num_subsets, num_queries); see the module's opening for both and for the interval. The interval
    is for infinitely many subsets, so where the bias exceeds the error (few subsets, or very many queries that
    share little) `lds` can lie below `ci_low`; `lds_corrected` lies inside. within: LDS within groups, their counts
    taken out of both sides first; a prediction that knows the groups alone is undefined there.
    """
    return sampled_score(truth, prediction, within=within, seed=seed, num_bootstrap=num_bootstrap)[0]


def sampled_score(
    truth: ArrayLike,
    prediction: ArrayLike,
    *,
    within: GroupCounts | None = None,
    seed: int = 0,
    num_bootstrap: int = NUM_BOOTSTRAP,
) -> tuple[LDS, Sampling]:
    """As `linear_datamodelling_score`, with the sampling that `difference_of_samplings` compares with others'."""
    truth, prediction, lost = _taken_out(*check_pair(truth, prediction), within, (truth, prediction))
    sampling = sample_spearman(truth, prediction, lost)
    interval = two_way_interval(sampling, seed=seed, num_bootstrap=num_bootstrap, correlation=True)
    score = LDS(
        lds=interval.mean,
        ci_low=interval.low,
        ci_high=interval.high,
        standard_error=interval.standard_error,
        bias=interval.bias,
        num_subsets=truth.shape[0],
        num_queries=truth.shape[1],
        num_undefined=sampling.num_undefined,
        across_queries=lds_across_queries(truth, prediction) if within is None else math.nan,
        per_query=sampling.plain,
    )
    return score, sampling


def _taken_out(
    truth: FloatArray, prediction: FloatArray, within: GroupCounts | None, given: tuple[ArrayLike, ArrayLike]
) -> tuple[FloatArray, FloatArray, int]:
    """Both tables as they are ranked, and how many directions they lost; given: the same, in the types they came in."""
    check_num_subsets(truth.shape[0])
    if within is None:
        return truth, prediction, 0
    if len(within.counts) != len(truth):
        raise ValueError(f"got the groups of {len(within.counts)} subsets; expected those of {len(truth)}.")
    if len(truth) - within.lost < MINIMUM_SUBSETS:  # nothing is left to be ranked
        return np.zeros_like(truth), np.zeros_like(prediction), 0
    # Losses come from float32 networks, whatever they were averaged in.
    return within.take_out(given[0], np.float32), within.take_out(given[1]), within.lost


def paired_difference(
    truth: ArrayLike,
    prediction_a: ArrayLike,
    prediction_b: ArrayLike,
    *,
    within: GroupCounts | None = None,
    seed: int = 0,
    num_bootstrap: int = NUM_BOOTSTRAP,
) -> Difference:
    """LDS of method a minus LDS of method b on the same truth: positive when a predicts better.

    All three: (num_subsets, num_queries). Both methods see the same resampled queries and subsets, so what they share
    cancels; this is sharper than comparing two intervals. Queries undefined for either are left out of both and
    counted.
    """
    samplings = []
    for name, prediction in (("prediction_a", prediction_a), ("prediction_b", prediction_b)):
        tables = check_pair(truth, prediction, name)
        samplings.append(sample_spearman(*_taken_out(*tables, within, (truth, prediction))))
    return difference_of_samplings(*samplings, seed=seed, num_bootstrap=num_bootstrap)


def difference_of_samplings(
    first: Sampling, second: Sampling, *, seed: int = 0, num_bootstrap: int = NUM_BOOTSTRAP
) -> Difference:
    """As `paired_difference`, of what `sampled_score` gave for two predictions of one truth."""
    sampling = first.combine(1.0, second, -1.0)
    interval = two_way_interval(sampling, seed=seed, num_bootstrap=num_bootstrap, correlation=False)
    centre = interval.mean - interval.bias
    if interval.standard_error > 0.0:
        p_value = 2.0 * t_above(abs(centre) / interval.standard_error, interval.degrees_of_freedom)
    elif interval.standard_error == 0.0:
        p_value = 1.0 if centre == 0.0 else 0.0
    else:
        p_value = math.nan
    return Difference(
        difference=interval.mean,
        ci_low=max(interval.low, -2.0),  # two correlations differ by no more
        ci_high=min(interval.high, 2.0),
        standard_error=interval.standard_error,
        p_value=p_value,
        bias=interval.bias,
        num_subsets=sampling.influence.shape[1],
        num_queries=sampling.influence.shape[0],
        num_undefined=sampling.num_undefined,
        per_query=sampling.plain,
    )
