"""The linear datamodelling score (LDS), and the difference of two of them on the same truth."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from bench.metrics.intervals import (
    FloatArray,
    Sampling,
    check_confidence,
    check_num_subsets,
    check_pair,
    mean_of_defined,
    sample_spearman,
    spearman_columns,
    t_above,
    two_way_interval,
)


@dataclass(frozen=True, kw_only=True)
class LDS:
    """A linear datamodelling score with its two-way interval."""

    lds: float  # mean over the defined queries of `per_query`; NaN when none is defined
    ci_low: float  # NaN when fewer than two queries are defined
    ci_high: float
    standard_error: float
    bias: float  # of `lds`, from having finitely many subsets; the interval is centred on lds - bias
    confidence: float
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
    confidence: float
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
    truth: ArrayLike, prediction: ArrayLike, *, seed: int = 0, num_bootstrap: int = 1000, confidence: float = 0.95
) -> LDS:
    """LDS of one method, with its interval over subsets and queries.

    truth, prediction: (num_subsets, num_queries); see the module's opening for both and for the interval. The interval
    is for infinitely many subsets, so where the bias exceeds the error (few subsets, or very many queries that
    share little) `lds` can lie below `ci_low`; `lds_corrected` lies inside.
    """
    return sampled_score(truth, prediction, seed=seed, num_bootstrap=num_bootstrap, confidence=confidence)[0]


def sampled_score(
    truth: ArrayLike, prediction: ArrayLike, *, seed: int = 0, num_bootstrap: int = 1000, confidence: float = 0.95
) -> tuple[LDS, Sampling]:
    """As `linear_datamodelling_score`, with the sampling that `difference_of_samplings` compares with others'."""
    truth, prediction = check_pair(truth, prediction)
    check_num_subsets(truth.shape[0])
    check_confidence(confidence, num_bootstrap)
    sampling = sample_spearman(truth, prediction)
    interval = two_way_interval(
        sampling, seed=seed, num_bootstrap=num_bootstrap, confidence=confidence, correlation=True
    )
    score = LDS(
        lds=interval.mean,
        ci_low=interval.low,
        ci_high=interval.high,
        standard_error=interval.standard_error,
        bias=interval.bias,
        confidence=confidence,
        num_subsets=truth.shape[0],
        num_queries=truth.shape[1],
        num_undefined=sampling.num_undefined,
        across_queries=lds_across_queries(truth, prediction),
        per_query=sampling.plain,
    )
    return score, sampling


def paired_difference(
    truth: ArrayLike,
    prediction_a: ArrayLike,
    prediction_b: ArrayLike,
    *,
    seed: int = 0,
    num_bootstrap: int = 1000,
    confidence: float = 0.95,
) -> Difference:
    """LDS of method a minus LDS of method b on the same truth: positive when a predicts better.

    All three: (num_subsets, num_queries). Both methods see the same resampled queries and subsets, so what they share
    cancels; this is sharper than comparing two intervals. Queries undefined for either are left out of both and
    counted.
    """
    truth, prediction_a = check_pair(truth, prediction_a, "prediction_a")
    truth, prediction_b = check_pair(truth, prediction_b, "prediction_b")
    check_num_subsets(truth.shape[0])
    check_confidence(confidence, num_bootstrap)
    samplings = (sample_spearman(truth, prediction) for prediction in (prediction_a, prediction_b))
    return difference_of_samplings(*samplings, seed=seed, num_bootstrap=num_bootstrap, confidence=confidence)


def difference_of_samplings(
    first: Sampling, second: Sampling, *, seed: int = 0, num_bootstrap: int = 1000, confidence: float = 0.95
) -> Difference:
    """As `paired_difference`, of what `sampled_score` gave for two predictions of one truth."""
    sampling = first.combine(1.0, second, -1.0)
    interval = two_way_interval(
        sampling, seed=seed, num_bootstrap=num_bootstrap, confidence=confidence, correlation=False
    )
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
        confidence=confidence,
        num_subsets=sampling.influence.shape[1],
        num_queries=sampling.influence.shape[0],
        num_undefined=sampling.num_undefined,
        per_query=sampling.plain,
    )
