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

    mean: float  # NaN when no query is defined
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
    defined = np.isfinite(values)
    count = int(defined.sum())
    if count < 2:
        mean = float(values[defined].mean()) if count else math.nan
        return MeanChange(
            mean=mean, ci_low=math.nan, ci_high=math.nan, standard_error=math.nan, p_value=math.nan,
            num_queries=len(values), num_undefined=len(values) - count,
        )  # fmt: skip
    mean = float(values[defined].mean())
    parts = [(float(values[defined].var(ddof=1)) / count, count - 1)]
    parts += [shared_variance(one, count) for one in shared]
    variance = sum(part for part, _ in parts)
    error = math.sqrt(variance)
    if error == 0.0:
        ends, p_value = (mean, mean), (1.0 if mean == 0.0 else 0.0)
    else:
        # Welch and Satterthwaite.
        degrees = variance**2 / sum(part**2 / freedom for part, freedom in parts)
        reach = error * t_quantile(0.5 + 0.5 * CONFIDENCE, degrees)
        ends = (mean - reach, mean + reach)
        p_value = 2.0 * t_above(abs(mean) / error, degrees)
    return MeanChange(
        mean=mean, ci_low=ends[0], ci_high=ends[1], standard_error=error, p_value=p_value, num_queries=len(values),
        num_undefined=len(values) - count,
    )  # fmt: skip
