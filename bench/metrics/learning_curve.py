"""How ridge regression on subsets learns: its LDS at m retrains says what it would be at unlimited ones.

    from bench.metrics import unlimited_retrains
    print(unlimited_retrains(lds, 1_000, num_examples))      # a check of the linear ceiling, which fits no coefficients

One unknown decides the whole curve, the additive share of a run's variance, so that every point of it gives an estimate
of the linear ceiling. STATISTICS.md derives it.
"""

import math
from dataclasses import dataclass

from bench.metrics.linear import best_spearman
from bench.metrics.score import LDS


@dataclass(frozen=True, kw_only=True)
class UnlimitedRetrains:
    """The LDS that ridge regression would reach in the end. The interval is the LDS's own, carried through."""

    ceiling: float
    ci_low: float
    ci_high: float
    share: float  # of the variance of what LDS was measured against
    num_retrains: int
    num_examples: int


def unlimited_retrains(
    score: LDS, num_retrains: int, num_examples: int, *, run_over_mean: float = 1.0
) -> UnlimitedRetrains:
    """score: of ridge regression on single runs, its penalty well chosen, without a prior, on subsets drawn alike.

    run_over_mean: variance over subsets of a single run, which is learnt from, over that of the mean of several, which
    LDS was measured against; 1 where the truth is single runs too.
    """
    if num_retrains < 1 or num_examples < 2:
        raise ValueError(f"{num_retrains} retrains of {num_examples} examples; expected at least 1 of at least 2")
    if not run_over_mean >= 1.0:
        raise ValueError(f"run_over_mean is {run_over_mean}; expected at least 1: a mean of runs varies less than one")

    def share(lds: float) -> float:
        explained = pearson_of(max(lds, 0.0)) ** 2 / run_over_mean
        return run_over_mean * additive_share(explained, num_retrains, num_examples)

    ends = [best_spearman(share(value)) for value in (score.lds_corrected, score.ci_low, score.ci_high)]
    return UnlimitedRetrains(
        ceiling=ends[0],
        ci_low=ends[1],
        ci_high=ends[2],
        share=share(score.lds_corrected),
        num_retrains=num_retrains,
        num_examples=num_examples,
    )


def additive_share(explained: float, num_retrains: int, num_examples: int) -> float:
    """h, the additive share of a run's variance, where so much of that variance is explained after m retrains."""
    if math.isnan(explained):
        return math.nan
    rate = num_retrains / (num_examples - 1)  # subsets of one size leave n - 1 directions
    inside = (explained * rate) ** 2 + 4.0 * rate * explained * max(0.0, 1.0 - explained)
    return (explained * rate + math.sqrt(inside)) / (2.0 * rate)


def explained_variance(share: float, num_retrains: int, num_examples: int) -> float:
    """The other way: how much of a run's variance ridge regression explains after m retrains, where h is additive."""
    rate = share * num_retrains / (num_examples - 1)
    # e = h A with A = rate / (1 - e + rate): a quadratic in e, of which the smaller root is meant.
    half = 0.5 * (1.0 + rate)
    return half - math.sqrt(max(0.0, half**2 - share * rate))


def pearson_of(spearman: float) -> float:
    """Of jointly normal values."""
    return 2.0 * math.sin(math.pi / 6.0 * spearman)
