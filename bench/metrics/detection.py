"""How well a score finds known examples: the area under the ROC curve and precision at k, with intervals.

The AUC is the chance that a known example has a higher score than another, ties counting half. Its variance, and the
covariance of two scores' on the same examples, are DeLong, DeLong and Clarke-Pearson's (1988). Precision at k has no
such formula, since its threshold moves with the examples: it is resampled, known and other examples each among
themselves, and two scores are compared on the same draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from bench.metrics.intervals import CONFIDENCE, BoolArray, FloatArray, average_ranks, normal_above, normal_quantile


@dataclass(frozen=True, kw_only=True)
class Area:
    """An AUC with its interval."""

    auc: float
    ci_low: float
    ci_high: float
    of_known: FloatArray = field(repr=False, compare=False)  # each known example's share of others below it
    of_others: FloatArray = field(repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class Detected:
    """A precision, or a difference of AUCs or precisions, with its interval."""

    value: float
    ci_low: float
    ci_high: float
    p_value: float


def _checked(known: ArrayLike, score: ArrayLike) -> tuple[BoolArray, FloatArray]:
    mask, values = np.asarray(known), np.asarray(score, dtype=np.float64)
    if mask.dtype != bool or mask.ndim != 1 or mask.shape != values.shape:
        raise ValueError(
            f"known has shape {mask.shape} and dtype {mask.dtype}, score {values.shape}; expected two arrays of the "
            "same length, the first of them bool."
        )
    if mask.sum() < 2 or (~mask).sum() < 2:
        raise ValueError(f"{int(mask.sum())} of {len(mask)} examples are known; expected two of each kind or more.")
    if bad := int((~np.isfinite(values)).sum()):
        raise ValueError(f"{bad} of {len(values)} scores are not finite.")
    return mask, values


def area_under_curve(known: ArrayLike, score: ArrayLike) -> Area:
    """known: (n,) bool; score: (n,), higher where an example is thought to be known. The interval is on the logit."""
    mask, values = _checked(known, score)
    m, k = int(mask.sum()), int((~mask).sum())
    tables = (values, values[mask], values[~mask])
    ranks, known_ranks, other_ranks = (average_ranks(one[:, None])[:, 0] for one in tables)
    of_known = (ranks[mask] - known_ranks) / k
    of_others = 1.0 - (ranks[~mask] - other_ranks) / m
    auc = float(of_known.mean())
    error = math.sqrt(of_known.var(ddof=1) / m + of_others.var(ddof=1) / k)
    low = high = auc
    if 0.0 < auc < 1.0 and error > 0.0:
        reach = normal_quantile(0.5 + 0.5 * CONFIDENCE) * error / (auc * (1.0 - auc))
        centre = math.log(auc / (1.0 - auc))
        low, high = (1.0 / (1.0 + math.exp(-end)) for end in (centre - reach, centre + reach))
    return Area(auc=auc, ci_low=low, ci_high=high, of_known=of_known, of_others=of_others)


def auc_difference(first: Area, second: Area) -> Detected:
    """Of two scores of the same examples, in the same order."""
    difference = first.auc - second.auc
    known, others = first.of_known - second.of_known, first.of_others - second.of_others
    error = math.sqrt(known.var(ddof=1) / len(known) + others.var(ddof=1) / len(others))
    if error == 0.0:
        return Detected(value=difference, ci_low=difference, ci_high=difference, p_value=float(difference == 0.0))
    reach = normal_quantile(0.5 + 0.5 * CONFIDENCE) * error
    p_value = 2.0 * normal_above(abs(difference) / error)
    return Detected(value=difference, ci_low=difference - reach, ci_high=difference + reach, p_value=p_value)


def precision_at(known: ArrayLike, score: ArrayLike, k: int) -> float:
    """The share of known examples among the k of highest score; where the k-th is tied, those tied count by share."""
    mask, values = _checked(known, score)
    if not 1 <= k <= len(values):
        raise ValueError(f"k is {k}; expected 1 to {len(values)}, the number of examples.")
    return _precision(mask, values, k)


def _precision(mask: BoolArray, values: FloatArray, k: int) -> float:
    threshold = -np.partition(-values, k - 1)[k - 1]
    above, at = values > threshold, values == threshold
    tied = (mask & at).sum() / at.sum()
    return float(((mask & above).sum() + (k - above.sum()) * tied) / k)


def precision_draws(
    known: ArrayLike, score: ArrayLike, k: int, *, seed: int = 0, num_bootstrap: int = 500
) -> FloatArray:
    """(num_bootstrap,): precision at k of resampled examples; the same draws for the same seed and `known`."""
    mask, values = _checked(known, score)
    generator = np.random.default_rng([seed, 7])
    found = []
    groups = (np.flatnonzero(mask), np.flatnonzero(~mask))
    for _ in range(num_bootstrap):
        drawn = np.concatenate([group[generator.integers(0, len(group), len(group))] for group in groups])
        found.append(_precision(mask[drawn], values[drawn], k))
    return np.array(found)


def resampled(value: float, draws: FloatArray) -> Detected:
    """The percentile interval, and twice the smaller share of draws on either side of 0."""
    tail = 0.5 * (1.0 - CONFIDENCE)
    low, high = (float(end) for end in np.quantile(draws, [tail, 1.0 - tail]))
    smaller = min(float((draws <= 0).mean()), float((draws >= 0).mean()))
    return Detected(value=value, ci_low=low, ci_high=high, p_value=min(1.0, 2.0 * max(smaller, 1 / len(draws))))
