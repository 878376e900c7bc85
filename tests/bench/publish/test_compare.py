"""The one rule for "A is ahead of B", on differences whose answer is known."""

import math

import pytest

from bench.publish.compare import Estimate, difference, is_ahead, mean_of_independent, over_seeds, student

FIVE = [(0.03, math.nan, math.nan), (0.05, math.nan, math.nan), (0.04, math.nan, math.nan)] + 2 * [
    (0.04, math.nan, math.nan)
]


def test_students_interval() -> None:
    gap = student([1.0, 2.0, 3.0])
    assert gap.mean == pytest.approx(2.0)
    assert gap.high - gap.mean == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)  # t of 2 degrees of freedom
    assert not student([1.0]).known
    assert not student([1.0, math.nan]).known


def test_many_seeds_have_students_interval_and_few_have_to_agree() -> None:
    assert over_seeds(FIVE) == student([0.03, 0.05, 0.04, 0.04, 0.04])
    assert is_ahead(over_seeds(FIVE))
    few = over_seeds([(0.03, 0.01, 0.05), (0.02, -0.01, 0.05)])
    assert (few.mean, few.low, few.high, few.num_seeds) == (pytest.approx(0.025), -0.01, 0.05, 2)
    assert not is_ahead(few)
    assert is_ahead(over_seeds([(0.03, 0.01, 0.05), (0.02, 0.005, 0.05)]))


def test_a_pair_decides_where_both_intervals_alone_would_not() -> None:
    one, other = [(0.40, 0.36, 0.44)], [(0.34, 0.30, 0.38)]
    apart = difference(one, other)
    assert (apart.low, apart.high) == (pytest.approx(-0.02), pytest.approx(0.14))
    assert not is_ahead(apart)
    assert is_ahead(difference(one, other, [(0.06, 0.03, 0.09)]))
    assert is_ahead(difference([(0.9, 0.88, 0.92)], other)), "intervals that do not overlap need no pair"


def test_what_no_digit_shows_or_nobody_knows_is_a_tie() -> None:
    tiny = Estimate(2e-4, 1e-4, 3e-4)
    assert not is_ahead(tiny)
    assert is_ahead(tiny, negligible=0.0), "of a metric without an end"
    assert not is_ahead(Estimate(0.5)), "without an interval"
    assert not is_ahead(-Estimate(0.5, 0.4, 0.6))
    assert is_ahead(-Estimate(-0.5, -0.6, -0.4)), "where lower is better"


def test_independent_alphas_add_up_as_errors_do() -> None:
    mean = mean_of_independent([Estimate(0.10, 0.07, 0.13), Estimate(0.02, -0.02, 0.06)])
    assert mean.mean == pytest.approx(0.06)
    assert mean.high - mean.mean == pytest.approx(0.05 / 2)
