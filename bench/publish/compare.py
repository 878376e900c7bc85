"""The one rule for "A is ahead of B", used by tables, figures, leaderboard, tuning and the paper's claims.

**A is ahead of B where the 95 % interval of their difference A - B lies above 0.** The difference is of one question:
the same subsets, queries, alpha and kind of scores. Its interval is

- from MANY_SEEDS (5) seeds on, Student's interval of the seeds' differences;
- with fewer seeds, from the lowest to the highest end of the seeds' own paired 95 % intervals, so that every seed has
  to agree (two seeds say too little of their own spread);
- of a seed in which the two were not paired (they are in different runs), from A's low end minus B's high end to A's
  high end minus B's low end, which is the stricter rule;
- of a quantity without an interval of its own (LDS across queries), Student's from two seeds on, and unknown for one;
- over several alphas of one seed (tuning), of the mean, the alphas' subsets being independent.

A difference that three digits do not show (NEGLIGIBLE) is a tie, in quantities that end at 1. Where a lower value is
better, the difference is turned round first. Nobody is ahead where the interval is unknown. Intervals are of one
comparison at a time: of twenty true ties about one is called a lead.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.metrics import MANY_SEEDS
from bench.metrics.intervals import t_quantile

if TYPE_CHECKING:  # numbers are compared without pandas
    import pandas as pd

CONFIDENCE = 0.95
NEGLIGIBLE = 0.0005

PLACE = ["ground", "truth", "normalised", "alpha", "alpha_attribution"]  # rows alike in these answer one question

Measured = tuple[float, float, float]  # a value and the two ends of its own 95 % interval; NaN where it has none
Pairs = Mapping[tuple[Any, ...], Measured]  # (*place, seed, series, rival) -> a seed's paired difference


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % interval; NaN ends where there is none."""

    mean: float
    low: float = math.nan
    high: float = math.nan
    num_seeds: int = 1

    @property
    def known(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    def __neg__(self) -> "Estimate":
        return Estimate(-self.mean, -self.high, -self.low, self.num_seeds)

    def __str__(self) -> str:
        ends = f" [{self.low:+.3f}, {self.high:+.3f}]" if self.known else ""
        return f"{self.mean:+.3f}{ends}" if math.isfinite(self.mean) else "undefined"


def student(values: Sequence[float]) -> Estimate:
    """Student's interval over seeds; none from a single one, or where a seed's value is undefined."""
    numbers = np.asarray(values, dtype=float)
    mean = float(numbers.mean()) if len(numbers) else math.nan
    if len(numbers) < 2 or not np.isfinite(numbers).all():
        return Estimate(mean, num_seeds=len(numbers))
    reach = float(t_quantile(0.5 + CONFIDENCE / 2, len(numbers) - 1) * numbers.std(ddof=1) / math.sqrt(len(numbers)))
    return Estimate(mean, mean - reach, mean + reach, len(numbers))


def over_seeds(seeds: Sequence[Measured]) -> Estimate:
    """Of each seed's (value, low, high): Student's interval of many or without ends, else the outermost ends."""
    values = [value for value, _, _ in seeds]
    if len(seeds) >= MANY_SEEDS or all(math.isnan(low) and math.isnan(high) for _, low, high in seeds):
        return student(values)
    ends = min(low for _, low, _ in seeds), max(high for _, _, high in seeds)
    return Estimate(float(np.mean(values)), *ends, len(seeds))


def difference(
    one: Sequence[Measured], other: Sequence[Measured], pairs: Sequence[Measured | None] | None = None
) -> Estimate:
    """`one` minus `other`, seed by seed; `pairs` has a seed's paired difference with its ends, or None."""
    seeds = []
    for mine, rival, pair in zip(one, other, pairs or [None] * len(one), strict=True):
        apart = (mine[0] - rival[0], mine[1] - rival[2], mine[2] - rival[1])
        seeds.append(apart if pair is None else pair)
    return over_seeds(seeds)


def turned(pair: Measured) -> Measured:
    value, low, high = pair
    return -value, -high, -low


def pairs_of(frame: "pd.DataFrame") -> Pairs:
    """The paired differences of `Results.pairs`, by PLACE, seed, series and rival."""
    if not len(frame):
        return {}
    columns = [*PLACE, "seed", "series", "against", "difference", "ci_low", "ci_high"]
    rows = frame[columns].itertuples(index=False, name=None)
    return {tuple(key): (difference, low, high) for *key, difference, low, high in rows}


def paired(pairs: Pairs, place: tuple[Any, ...], one: str, other: str) -> Measured | None:
    """`one` minus `other`, whichever of the two was measured against the other."""
    forward, backward = (*place, one, other), (*place, other, one)
    if forward in pairs:
        return pairs[forward]
    return turned(pairs[backward]) if backward in pairs else None


def mean_of_independent(estimates: Sequence[Estimate]) -> Estimate:
    """Of several alphas of one seed: half the widths of intervals add up as errors do."""
    reach = math.sqrt(sum(((one.high - one.low) / 2) ** 2 for one in estimates)) / len(estimates)
    mean = float(np.mean([one.mean for one in estimates]))
    return Estimate(mean, mean - reach, mean + reach, estimates[0].num_seeds)


def is_ahead(gap: Estimate, negligible: float = NEGLIGIBLE) -> bool:
    """Whether a difference A - B, of which higher is better, says that A is ahead."""
    return gap.known and gap.low > 0 and gap.mean >= negligible


def interval_words(num_seeds: int) -> str:
    """What the interval of `over_seeds` is, for a caption."""
    if num_seeds >= MANY_SEEDS:
        return f"Student's 95 % interval over {num_seeds} seeds"
    if num_seeds > 1:
        return f"lowest to highest end of the {num_seeds} seeds' 95 % intervals"
    return "95 % interval of the one seed"
