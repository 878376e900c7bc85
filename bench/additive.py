"""The linear ceiling of a run: from the reported subsets, and from the further ones that its methods retrained on.

Where there are thousands of examples, a hundred subsets say little about how much is additive; what methods retrain on
is drawn alike and counts too. It is in every record, and shown where its interval is narrow enough to be read.

It is held against retraining itself: regression on subsets alone reaches it in the end, and its LDS says how far it has
come (`bench/metrics/linear.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.metrics import LDS, best_spearman, linear_ceiling, unlimited_retrains
from bench.metrics.linear import MINIMUM_SUBSETS_LINEAR

if TYPE_CHECKING:  # figures and pages read what is here of records, without torch
    from baselines.method import Method
    from bench.ground_truth import GroundTruth

WIDEST = 0.2  # interval that is shown
LINEAR = ("linear_ceiling", "linear_low", "linear_high", "linear_share", "linear_subsets", "run_over_mean")
AT_UNLIMITED = ("unlimited_ceiling", "unlimited_low", "unlimited_high", "unlimited_share", "unlimited_from")


def linear_numbers(truth: GroundTruth, further: GroundTruth | None, queries: np.ndarray) -> dict[str, Any]:
    """Of what LDS is measured against: the mean over the reported subsets' replicates."""
    masks, losses, present = truth.masks, truth.losses[:, :, queries], truth.present
    if further is not None:
        once = np.zeros((len(losses), *further.losses[0][:, queries].shape), dtype=losses.dtype)
        once[0] = further.losses[0][:, queries]
        there = np.zeros(once.shape[:2], dtype=bool)
        there[0] = further.present[0]
        masks, losses = np.concatenate([masks, further.masks]), np.concatenate([losses, once], axis=1)
        present = np.concatenate([present, there], axis=1)
    if len(masks) < MINIMUM_SUBSETS_LINEAR:
        return dict.fromkeys(LINEAR)
    found = linear_ceiling(masks, losses, present=present)
    run, signal = found.share_of_run, found.share_of_signal
    larger = 1.0  # a share of a single run's variance is a larger one of the mean's, which has less noise
    if signal is not None and 0 < run.share < signal.share:
        noiseless = run.share / signal.share
        larger = 1 / (noiseless + (1 - noiseless) * float((1 / truth.present.sum(axis=0)).mean()))
    shares = [larger * value for value in (run.share, run.ci_low, run.ci_high)]
    if not math.isfinite(shares[0]):
        return dict.fromkeys(LINEAR)
    return dict(zip(LINEAR, [*map(best_spearman, shares), shares[0], len(masks), larger], strict=True))


def unlimited_numbers(
    scores: Mapping[int, LDS], num_examples: int, linear: Mapping[str, Any]
) -> dict[str, float | int | None]:
    """scores: number of retrains -> LDS of regression on so many without a prior; the most of them say it best."""
    if not scores or linear["run_over_mean"] is None:
        return dict.fromkeys(AT_UNLIMITED)
    most = max(scores)
    ends = (scores[most].lds_corrected, scores[most].ci_low, scores[most].ci_high)
    found = unlimited_retrains(ends, most, num_examples, run_over_mean=linear["run_over_mean"])
    return dict(zip(AT_UNLIMITED, [found.ceiling, found.ci_low, found.ci_high, found.share, most], strict=True))


def retrains_alone(method: Method, alpha: float) -> int:
    """On how many subsets, drawn like those that are reported, it rests, and on nothing else; 0: on other things."""
    from baselines.support.nested import NONE

    count, kept = method.extra_retrains()
    return count if getattr(method, "prior", None) == NONE and kept in (0.0, alpha) else 0


def is_known(numbers: Mapping[str, Any]) -> bool:
    """Whether one seed's linear ceiling is known well enough to be read; in records of old it is not there.

    Ends are cut at 0 and 1: one that lies there says that the interval is wider than it looks.
    """
    low, high = numbers.get("linear_low"), numbers.get("linear_high")
    return low is not None and high is not None and 0 < low <= high < 1 and high - low <= WIDEST


def pooled_linear_ceiling(shares: Sequence[float], noise: float) -> float:
    """Of the seeds' mean share; NaN where it is above their noise ceiling, if that is known.

    What an additive score could have is no more than what any prediction could: one above it is chance.
    """
    found = best_spearman(float(np.mean(shares)))
    return math.nan if found > noise else found
