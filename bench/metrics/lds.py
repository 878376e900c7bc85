"""The linear datamodelling score (LDS): of stored tables, of plain arrays, and the difference of two of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from bench.metrics.ceilings import Ceiling, noise_ceiling
from bench.metrics.intervals import (
    MINIMUM_SUBSETS,
    FloatArray,
    GroupCounts,
    Sampling,
    check_num_subsets,
    check_pair,
    mean_of_defined,
    mean_over_replicates,
    sample_spearman,
    spearman_columns,
    t_above,
    two_way_interval,
)
from bench.metrics.linear import MINIMUM_SUBSETS_LINEAR, LinearCeiling, linear_ceiling
from bench.prediction import subset_sums


@dataclass(frozen=True, kw_only=True)
class LDS:
    """A linear datamodelling score with its two-way interval."""

    lds: float  # mean over the defined queries of `per_query`; NaN when none is defined
    ci_low: float  # NaN when fewer than two queries are defined
    ci_high: float  # of the 95 % interval over subsets and queries
    standard_error: float  # by the jackknife
    bias: float  # of `lds`, from having finitely many subsets; the interval is centred on lds - bias
    num_subsets: int  # models retrained
    num_queries: int  # all queries, the undefined ones included
    num_undefined: int  # those without a correlation: constant or not finite
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

    Queries with a value that is not finite are left out, as they are from LDS; NaN where nothing is defined.
    """
    truth, prediction = check_pair(truth, prediction)
    finite = np.isfinite(truth).all(axis=0) & np.isfinite(prediction).all(axis=0)
    if finite.sum() < 2:
        return math.nan
    return mean_of_defined(spearman_columns(truth[:, finite].T, prediction[:, finite].T))


def linear_datamodelling_score(truth: ArrayLike, prediction: ArrayLike, *, within: GroupCounts | None = None) -> LDS:
    """LDS of one method, with its interval over subsets and queries; truth, prediction: (num_subsets, num_queries).

    The interval is for infinitely many subsets: where the bias exceeds the error, `lds` can lie outside, and
    `lds_corrected` lies inside. within: the groups' counts, for LDS within groups.
    """
    return sampled_score(truth, prediction, within=within)[0]


def sampled_score(
    truth: ArrayLike, prediction: ArrayLike, *, within: GroupCounts | None = None
) -> tuple[LDS, Sampling]:
    """As `linear_datamodelling_score`, with the sampling that `difference_of_samplings` compares with others'."""
    sampling = sample_spearman(*_tables(truth, prediction, within))
    interval = two_way_interval(sampling, correlation=True)
    score = LDS(
        lds=interval.mean,
        ci_low=interval.low,
        ci_high=interval.high,
        standard_error=interval.standard_error,
        bias=interval.bias,
        num_subsets=sampling.influence.shape[1],
        num_queries=len(sampling.plain),
        num_undefined=sampling.num_undefined,
        across_queries=lds_across_queries(truth, prediction) if within is None else math.nan,
        per_query=sampling.plain,
    )
    return score, sampling


def _tables(
    truth: ArrayLike, prediction: ArrayLike, within: GroupCounts | None, name: str = "prediction"
) -> tuple[FloatArray, FloatArray, int]:
    """Both checked, without what the groups' counts explain; and how many directions that took out."""
    tables = check_pair(truth, prediction, name)
    num_subsets = len(tables[0])
    check_num_subsets(num_subsets)
    if within is None:
        return *tables, 0
    if len(within.counts) != num_subsets:
        raise ValueError(f"got the groups of {len(within.counts)} subsets; expected those of {num_subsets}.")
    if num_subsets - within.lost < MINIMUM_SUBSETS:  # nothing is left to be ranked
        return np.zeros_like(tables[0]), np.zeros_like(tables[1]), 0
    # Losses come from float32 networks, whatever they were averaged in.
    return within.take_out(truth, np.float32), within.take_out(prediction), within.lost


def paired_difference(
    truth: ArrayLike, prediction_a: ArrayLike, prediction_b: ArrayLike, *, within: GroupCounts | None = None
) -> Difference:
    """LDS of method a minus LDS of method b on the same truth: positive when a predicts better.

    Both see the same resampled queries and subsets, so what they share cancels.
    """
    named = (("prediction_a", prediction_a), ("prediction_b", prediction_b))
    samplings = [sample_spearman(*_tables(truth, prediction, within, name)) for name, prediction in named]
    return difference_of_samplings(*samplings)


def difference_of_samplings(first: Sampling, second: Sampling) -> Difference:
    """As `paired_difference`, of what `sampled_score` gave for two predictions of one truth."""
    sampling = first.combine(1.0, second, -1.0)
    interval = two_way_interval(sampling, correlation=False)
    centre, p_value = interval.mean - interval.bias, math.nan
    if interval.standard_error > 0.0:
        p_value = 2.0 * t_above(abs(centre) / interval.standard_error, interval.degrees_of_freedom)
    elif interval.standard_error == 0.0:
        p_value = 1.0 if centre == 0.0 else 0.0
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


@dataclass(frozen=True, kw_only=True, repr=False)
class ArrayScore:
    """How well scores predict retrained losses."""

    lds: float  # mean over queries of Spearman's correlation across subsets; NaN when no query has one
    ci_low: float  # of the 95 % interval over subsets and queries
    ci_high: float  # its other end
    num_subsets: int  # models retrained
    num_queries: int  # all queries, the undefined ones included
    num_undefined: int  # queries without a correlation: constant or not finite
    across_queries: float  # Spearman across queries, mean over subsets: the paper's printed formula
    ceiling: Ceiling | None  # what a perfect prediction could reach; None without replicates
    linear_ceiling: LinearCeiling | None  # what the best additive score could reach; None with too few subsets
    within_groups: LDS | None  # LDS beyond the groups' counts; None without groups
    ceiling_within_groups: Ceiling | None  # of LDS within groups; None without groups or replicates
    per_query: FloatArray = field(repr=False, compare=False)  # (num_queries,), NaN where undefined

    def __str__(self) -> str:
        """Three lines: the score, what it is of, and what it could be."""
        why = "losses or predictions that are not finite, or the same for all subsets"
        undefined = f", {self.num_undefined} of them undefined: {why}" if self.num_undefined else ""
        within = "" if self.within_groups is None else f"; within groups {self.within_groups.lds:.3f}"
        flipped = "; is the sign flipped? Scores of helpful examples are negative" if self.ci_high < 0 else ""
        known = "unknown: it needs losses of two retrains a subset, (2, subsets, queries)"
        if self.ceiling is not None:
            known = f"{self.ceiling.ceiling:.3f} [{self.ceiling.ci_low:.3f}, {self.ceiling.ci_high:.3f}]"
        return (
            f"LDS {self.lds:.3f}, 95 % interval [{self.ci_low:.3f}, {self.ci_high:.3f}]{within}{flipped}\n"
            f"{self.num_subsets} subsets, {self.num_queries} queries{undefined}\n"
            f"noise ceiling {known}"
        )

    __repr__ = __str__

    @property
    def lds_within_groups(self) -> float:
        """NaN where no groups were given, or where nothing is left without them."""
        return math.nan if self.within_groups is None else self.within_groups.lds


def score_arrays(
    masks: ArrayLike,
    losses: ArrayLike,
    scores: ArrayLike,
    *,
    groups: ArrayLike | None = None,
    present: ArrayLike | None = None,
) -> ArrayScore:
    """The linear datamodelling score of `scores`, with its 95 % interval over subsets and queries.

    masks: (K, n), which of n training examples each of K subsets keeps; losses: (K, q), each query's loss after
    retraining on each subset, or (R, K, q) with R replicates, which give the ceiling; scores: (q, n), the predicted
    change of the query's loss when the example is included (helpful examples are negative). groups: (n,), each
    example's label or source, for LDS within groups. present: (R, K), False where a replicate is missing.
    """
    kept, given, predicted = _as_masks(masks), np.asarray(losses, dtype=np.float64), np.asarray(scores)
    values = given[None] if given.ndim == 2 else given
    if values.ndim != 3 or values.shape[1] != len(kept):
        raise ValueError(
            f"losses has shape {given.shape} beside masks of shape {kept.shape}; expected ({len(kept)}, q) or "
            f"(R, {len(kept)}, q): subsets x queries, or replicates x subsets x queries."
        )
    expected = (values.shape[2], kept.shape[1])
    if predicted.shape != expected:
        hint = "; they are transposed" if predicted.shape == expected[::-1] else ""
        raise ValueError(f"scores has shape {predicted.shape}; expected {expected}: queries x training examples{hint}.")
    truth, prediction = mean_over_replicates(values, present=present), subset_sums(kept, predicted)
    result = linear_datamodelling_score(truth, prediction)
    counts = None if groups is None else GroupCounts.of(kept, groups)
    again = len(values) if present is None else np.asarray(present, dtype=bool).sum(axis=0)
    ceiling, within, ceiling_within = None, None, None
    if replicated := int((np.broadcast_to(again, len(kept)) >= 2).sum()) >= MINIMUM_SUBSETS:
        ceiling = noise_ceiling(values, present=present)
    if counts is not None:
        within = linear_datamodelling_score(truth, prediction, within=counts)
        ceiling_within = noise_ceiling(values, present=present, within=counts) if replicated else None
    linear = linear_ceiling(kept, values, present=present) if len(kept) >= MINIMUM_SUBSETS_LINEAR else None
    shared = ("lds", "ci_low", "ci_high", "num_subsets", "num_queries", "num_undefined", "across_queries", "per_query")
    return ArrayScore(
        **{name: getattr(result, name) for name in shared},
        ceiling=ceiling,
        linear_ceiling=linear,
        within_groups=within,
        ceiling_within_groups=ceiling_within,
    )


def _as_masks(masks: ArrayLike) -> np.ndarray:
    kept = np.asarray(masks)
    if kept.ndim != 2:
        raise ValueError(f"masks has shape {kept.shape}; expected (K, n): subsets x training examples.")
    if kept.dtype != bool and not np.isin(kept, (0, 1)).all():
        raise ValueError(f"masks holds values other than 0 and 1 ({kept.dtype}); pass True where an example is kept.")
    return kept.astype(bool)
