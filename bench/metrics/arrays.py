"""LDS of plain arrays: masks, retrained losses and scores in, the score with its interval and ceilings out.

from bench.metrics import score_arrays
print(score_arrays(masks, losses, scores))
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from bench.metrics.ceilings import Ceiling, CeilingRatio, lds_over_ceiling, noise_ceiling
from bench.metrics.intervals import MINIMUM_SUBSETS, NUM_BOOTSTRAP, FloatArray, mean_over_replicates
from bench.metrics.lds import LDS, GroupCounts, linear_datamodelling_score
from bench.metrics.linear import MINIMUM_SUBSETS_LINEAR, LinearCeiling, linear_ceiling
from bench.prediction import subset_sums


@dataclass(frozen=True, kw_only=True, repr=False)
class ArrayScore:
    """How well scores predict retrained losses."""

    lds: float  # mean over queries of Spearman's correlation across subsets; NaN when no query has one
    ci_low: float
    ci_high: float
    num_subsets: int
    num_queries: int
    num_undefined: int  # queries without a correlation: constant or not finite
    across_queries: float  # Spearman across queries, mean over subsets: the paper's printed formula
    ceiling: Ceiling | None  # what a perfect prediction could reach; None without replicates
    over_ceiling: CeilingRatio | None  # LDS divided by it
    linear_ceiling: LinearCeiling | None  # what the best additive score could reach; None with too few subsets
    within_groups: LDS | None  # LDS beyond the groups' counts; None without groups
    ceiling_within_groups: Ceiling | None
    per_query: FloatArray = field(repr=False, compare=False)  # (num_queries,), NaN where undefined

    def __str__(self) -> str:
        """Three lines: the score, what it is of, and what it could be."""
        undefined = f", {self.num_undefined} of them undefined" if self.num_undefined else ""
        within = "" if self.within_groups is None else f"; within groups {self.within_groups.lds:.3f}"
        known = "unknown: it needs losses of two retrains a subset, (2, subsets, queries)"
        if self.ceiling is not None:
            known = f"{self.ceiling.ceiling:.3f} [{self.ceiling.ci_low:.3f}, {self.ceiling.ci_high:.3f}]"
        return (
            f"LDS {self.lds:.3f}, 95 % interval [{self.ci_low:.3f}, {self.ci_high:.3f}]{within}\n"
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
    seed: int = 0,
    num_bootstrap: int = NUM_BOOTSTRAP,
) -> ArrayScore:
    """The linear datamodelling score of `scores`, with its 95 % interval over subsets and queries.

    masks: (K, n), which of n training examples each of K subsets keeps; losses: (K, q), each query's loss after
    retraining on each subset, or (R, K, q) with R replicates, which give the ceiling; scores: (q, n), the predicted
    change of the query's loss when the example is included (helpful examples are negative). groups: (n,), each
    example's label or source, for LDS within groups. present: (R, K), False where a replicate is missing.
    """
    kept = _as_masks(masks)
    given = np.asarray(losses, dtype=np.float64)
    values = given[None] if given.ndim == 2 else given
    if values.ndim != 3 or values.shape[1] != len(kept):
        raise ValueError(
            f"losses has shape {given.shape} beside masks of shape {kept.shape}; expected ({len(kept)}, q) or "
            f"(R, {len(kept)}, q): subsets x queries, or replicates x subsets x queries."
        )
    predicted = np.asarray(scores)
    expected = (values.shape[2], kept.shape[1])
    if predicted.shape != expected:
        hint = "; they are transposed" if predicted.shape == expected[::-1] else ""
        raise ValueError(f"scores has shape {predicted.shape}; expected {expected}: queries x training examples{hint}.")
    truth = mean_over_replicates(values, present=present)
    prediction = subset_sums(kept, predicted)
    options: dict[str, Any] = {"seed": seed, "num_bootstrap": num_bootstrap}
    result = linear_datamodelling_score(truth, prediction, **options)
    counts = None if groups is None else GroupCounts.of(kept, groups)
    within = None if counts is None else linear_datamodelling_score(truth, prediction, within=counts, **options)
    ceiling = ceiling_within = ratio = linear = None
    again = len(values) if present is None else np.asarray(present, dtype=bool).sum(axis=0)
    if int((np.broadcast_to(again, len(kept)) >= 2).sum()) >= MINIMUM_SUBSETS:
        ceiling = noise_ceiling(values, present=present, **options)
        if counts is not None:
            ceiling_within = noise_ceiling(values, present=present, within=counts, **options)
        ratio = lds_over_ceiling(values, prediction, present=present, ceiling=ceiling, **options)
    if len(kept) >= MINIMUM_SUBSETS_LINEAR:
        linear = linear_ceiling(kept, values, present=present)
    shared = ("lds", "ci_low", "ci_high", "num_subsets", "num_queries", "num_undefined", "across_queries", "per_query")
    return ArrayScore(
        **{name: getattr(result, name) for name in shared},
        ceiling=ceiling,
        over_ceiling=ratio,
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
