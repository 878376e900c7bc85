"""Mean changes with intervals, where queries are draws and so, for some arms, are the models that they share.

A method's removal set belongs to one query, and so does the noise of its retraining: over queries these are independent
draws, and Student's interval holds. The reference (nothing removed) and the controls (random sets) are models that many
queries are measured on: what a model does to all of them does not shrink with more queries. Its variance is taken from
how the models' means over queries differ, less what single queries contribute to those means, and added. STATISTICS.md
derives the same for subsets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.metrics.intervals import CONFIDENCE, FloatArray, t_above, t_quantile


@dataclass(frozen=True, kw_only=True)
class MeanChange:
    """A mean over queries with its 95 % interval."""

    value: float  # NaN when no query is defined
    ci_low: float  # NaN when fewer than two are
    ci_high: float
    standard_error: float
    p_value: float  # two-sided, of a mean of 0
    num_queries: int
    num_undefined: int


@dataclass(frozen=True)
class Shared:
    """Models that several queries were measured on."""

    queries: np.ndarray  # (m,) which of the queries
    values: FloatArray  # (models, m)


def shared_variance(shared: Shared, num_queries: int) -> tuple[float, int]:
    """(variance that these models give the mean over all queries, its degrees of freedom)."""
    values = np.asarray(shared.values, dtype=np.float64)
    models, queries = values.shape
    if models < 2:
        raise ValueError(f"got {models} model; the spread between models needs two or more")
    by_model = values.mean(axis=1)
    observed = float(by_model.var(ddof=1))
    unshared = 0.0
    if queries > 1:
        rest = values - by_model[:, None] - values.mean(axis=0) + values.mean()
        unshared = float((rest**2).sum()) / ((models - 1) * (queries - 1)) / queries
    # Never less than a tenth of what was seen: the difference of two estimates may come out at nothing by chance.
    variance = max(observed - unshared, 0.1 * observed)
    return variance / models * (queries / num_queries) ** 2, models - 1


def mean_change(change: FloatArray, shared: Sequence[Shared] = ()) -> MeanChange:
    """change: (queries,), NaN where there is none; shared: models that enter it for several queries at once."""
    values = np.asarray(change, dtype=np.float64)
    defined = values[np.isfinite(values)]
    count, missing = len(defined), math.nan
    mean = float(defined.mean()) if count else math.nan
    sizes = {"num_queries": len(values), "num_undefined": len(values) - count}
    if count < 2:
        return MeanChange(value=mean, ci_low=missing, ci_high=missing, standard_error=missing, p_value=missing, **sizes)
    parts = [(float(defined.var(ddof=1)) / count, count - 1)]
    parts += [shared_variance(one, count) for one in shared]
    variance = sum(part for part, _ in parts)
    error = math.sqrt(variance)
    reach, p_value = 0.0, 1.0 if mean == 0.0 else 0.0
    if error > 0.0:  # Welch and Satterthwaite
        degrees = variance**2 / sum(part**2 / freedom for part, freedom in parts)
        reach = error * t_quantile(0.5 + 0.5 * CONFIDENCE, degrees)
        p_value = 2.0 * t_above(abs(mean) / error, degrees)
    return MeanChange(
        value=mean, ci_low=mean - reach, ci_high=mean + reach, standard_error=error, p_value=p_value, **sizes
    )
