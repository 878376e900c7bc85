"""The linear ceiling of a run: pooled over reported and further subsets, and shown where it is known well enough."""

import math
from typing import Any

import numpy as np
import pytest

from bench.additive import LINEAR, is_known, linear_numbers
from bench.ground_truth import GroundTruth
from bench.metrics import best_spearman
from bench.tables import ceiling_text, divisor, linear_ceiling_of, linear_ceiling_text
from bench.truth.scores import show_scores
from retrain.subsets import masks as draw

EXAMPLES, QUERIES = 300, 60


def truth(count: int, replicates: int, stream: str, additive: float, noise: float) -> GroundTruth:
    """Outcomes of variance 1 a run: an additive part, noise of retraining, and the rest an interaction."""
    weights = np.random.default_rng(3).normal(size=(EXAMPLES, QUERIES))
    kept = draw(1, count, 0.5, EXAMPLES, stream=stream)  # type: ignore[arg-type]
    linear = kept @ weights
    linear = (linear - linear.mean(0)) / linear.std(0)
    generator = np.random.default_rng([count, replicates])
    other = generator.normal(size=linear.shape)  # of the subset, and of no example by itself
    chance = generator.normal(size=(replicates, *linear.shape))
    signal = np.sqrt(additive) * linear + np.sqrt(1 - additive - noise) * other
    return GroundTruth.of_arrays(kept, (signal + np.sqrt(noise) * chance).astype(np.float32))


@pytest.mark.parametrize("additive", [0.3, 0.5, 0.7])
def test_a_planted_share_comes_back_from_reported_and_further_subsets(additive: float) -> None:
    reported, further = (truth(60, 2, "report", additive, 0.2), truth(400, 1, "learn", additive, 0.2))
    found = linear_numbers(reported, further, np.arange(QUERIES))
    expected = additive / (0.8 + 0.2 / 2)  # of the mean of two replicates
    assert found["linear_subsets"] == 460
    assert found["linear_share"] == pytest.approx(expected, abs=0.07)
    assert found["linear_low"] < best_spearman(expected) < found["linear_high"]
    assert is_known(found)
    assert linear_ceiling_of([found]) == pytest.approx(found["linear_ceiling"])
    assert "from 460 subsets" in linear_ceiling_text([found])


def test_further_subsets_make_it_sharper() -> None:
    reported, further = truth(60, 1, "report", 0.5, 0.2), truth(400, 1, "learn", 0.5, 0.2)
    few, many = (linear_numbers(reported, more, np.arange(QUERIES)) for more in (None, further))
    assert many["linear_high"] - many["linear_low"] < 0.7 * (few["linear_high"] - few["linear_low"])


def test_too_few_subsets_and_old_records_show_none() -> None:
    few = linear_numbers(truth(5, 1, "report", 0.5, 0.2), None, np.arange(QUERIES))
    assert few == dict.fromkeys(LINEAR)
    for numbers in (few, {}, {"linear_low": 0.3, "linear_high": 0.8}, {"linear_low": 0.0, "linear_high": 0.1}):
        assert not is_known(numbers)
        assert linear_ceiling_text([numbers]) == ""


KNOWN = {"linear_ceiling": 0.7, "linear_low": 0.62, "linear_high": 0.78, "linear_share": 0.5, "linear_subsets": 400}
ENDS = {"ci_low": 0.6, "ci_high": 0.8}  # of the noise ceiling


@pytest.mark.parametrize(
    ("differs", "shown"),
    [
        ({}, True),
        ({"reliability": 0.6}, True),
        ({"reliability": None}, True),  # without replicates no noise ceiling is known
        ({"reliability": 0.4}, False),
        ({"linear_ceiling": 0.96, "linear_low": 0.92, "linear_high": 1.0}, False),  # of which the upper end is cut
        ({"linear_ceiling": 0.96, "linear_low": 0.92, "linear_high": 0.99}, True),
        ({"linear_ceiling": 1.0, "linear_low": 1.0, "linear_high": 1.0}, False),
    ],
)
def test_an_end_that_is_cut_and_a_ceiling_above_the_noise_ceiling_are_not_shown(
    differs: dict[str, float], shown: bool
) -> None:
    numbers = {**KNOWN, **differs}
    assert is_known(numbers) is (shown or "reliability" in differs)
    assert math.isfinite(linear_ceiling_of([numbers])) is shown
    assert bool(linear_ceiling_text([numbers])) is shown


def test_one_seeds_linear_ceiling_may_be_above_its_noise_ceiling_if_that_of_all_is_not() -> None:
    measured = ((0.5, 0.45), (0.4, 0.6))
    chance = [{**KNOWN, **ENDS, "linear_share": share, "reliability": one} for share, one in measured]
    assert math.isnan(linear_ceiling_of(chance[:1]))
    assert linear_ceiling_of(chance) == pytest.approx(best_spearman(0.45))
    assert math.isnan(linear_ceiling_of([{**one, "ci_low": 0.0} for one in chance]))  # there may be noise alone


def test_nothing_is_divided_by_a_noise_ceiling_that_touches_0_or_is_unknown() -> None:
    known: dict[str, Any] = {"ceiling": 0.7, "reliability": 0.49, **ENDS}
    assert divisor([known]) == pytest.approx(0.7)
    assert "touches" not in ceiling_text([known])
    noisy = {**known, "ceiling": 0.2, "reliability": 0.04, "ci_low": 0.0}
    assert divisor([noisy]) == divisor([noisy] * 3) == divisor([]) == 0.0
    assert "touches 0: no share" in ceiling_text([noisy])
    assert divisor([known, {**known, "ceiling": math.nan, "reliability": None}]) == 0.0


@pytest.mark.parametrize(("low", "shares"), [(0.6, 1), (0.0, 0)])
def test_given_scores_have_a_share_of_the_ceiling_unless_it_touches_0(low: float, shares: int) -> None:
    found: dict[str, Any] = {
        "rows": [{"label": "mine", "origin": "given", "lds": 0.35, "ci_low": 0.3, "ci_high": 0.4, "num_undefined": 0}],
        "ceilings": [{"ceiling": 0.7, "reliability": 0.49, "ci_low": low, "ci_high": 0.8}],
        "pairs": [],
    }
    found["rows"][0]["lds_across_queries"] = 0.1
    truth = GroundTruth.of_arrays(np.ones((8, 20), dtype=bool), np.zeros((2, 8, 3)))
    assert show_scores(found, truth).count("0.50") == shares
