"""Where regression on subsets is heading: planted shares come back from any one point of the curve."""

import math

import numpy as np
import pytest
import torch

from baselines.method import load_method
from baselines.support.subset_regression import regress
from bench.metrics import best_spearman, linear_datamodelling_score, unlimited_retrains
from bench.metrics.lds import LDS
from bench.metrics.linear import additive_share
from bench.rows import AT_UNLIMITED, linear_numbers, retrains_alone, unlimited_numbers
from bench.tables import linear_ceiling_text
from tests.bench.test_ensembles import EXAMPLES, QUERIES, truth

CPU = torch.device("cpu")


def learnt(additive: float, count: int, replicates: int = 1) -> tuple[LDS, dict]:
    """LDS of regression on so many subsets of a planted problem, and the linear ceiling's numbers."""
    reported = truth(200, replicates, "report", additive, 0.2)
    further = truth(count, 1, "learn", additive, 0.2)
    found = regress(further.masks, further.losses[0], device=CPU)
    score = linear_datamodelling_score(reported.mean(), reported.masks @ found.weights.numpy().T)
    return score, linear_numbers(reported, further, np.arange(QUERIES))


@pytest.mark.parametrize("additive", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("count", [150, 600])
def test_planted_shares_come_back(additive: float, count: int) -> None:
    score, _ = learnt(additive, count)
    found = unlimited_retrains((score.lds_corrected, score.ci_low, score.ci_high), count, EXAMPLES)
    assert found.share == pytest.approx(additive, abs=0.06)
    assert found.ci_low < found.ceiling < found.ci_high
    assert found.ci_low - 0.02 < best_spearman(additive) < found.ci_high + 0.02
    assert found.ceiling > score.lds + 0.05, "extrapolated, not repeated"


def test_it_agrees_with_the_linear_ceiling_against_a_mean_of_replicates() -> None:
    score, linear = learnt(0.5, 400, replicates=2)
    assert linear["run_over_mean"] == pytest.approx(1 / 0.9, abs=0.03)
    numbers = unlimited_numbers({400: score, 50: score}, EXAMPLES, linear)
    assert numbers["unlimited_from"] == 400
    assert numbers["unlimited_low"] < linear["linear_ceiling"] < numbers["unlimited_high"]
    assert numbers["unlimited_share"] == pytest.approx(0.5 / 0.9, abs=0.06)
    assert "its check: 0." in linear_ceiling_text([{**linear, **numbers}])
    assert "its check" not in linear_ceiling_text([{**linear, **unlimited_numbers({}, EXAMPLES, linear)}])
    assert unlimited_numbers({}, EXAMPLES, linear) == dict.fromkeys(AT_UNLIMITED)


def explained_variance(share: float, num_retrains: int, num_examples: int) -> float:
    """How much of a run's variance ridge regression explains: e = h A, A = r / (1 - e + r), r = h m / (n - 1)."""
    rate = share * num_retrains / (num_examples - 1)
    half = 0.5 * (1.0 + rate)
    return half - math.sqrt(max(0.0, half**2 - share * rate))


def test_the_curve_and_its_inverse() -> None:
    for share in (0.05, 0.5, 1.0):
        for count in (10, 1000, 10**6):
            assert additive_share(explained_variance(share, count, 500), count, 500) == pytest.approx(share, rel=1e-6)
    assert explained_variance(0.5, 10**9, 500) == pytest.approx(0.5, rel=1e-3)
    assert additive_share(0.0, 100, 500) == 0.0
    assert math.isnan(additive_share(math.nan, 100, 500))


def test_only_regression_on_subsets_alone_is_on_the_curve() -> None:
    asked = {"retrains": 40}
    assert retrains_alone(load_method("datamodel", **asked), 0.5) == 40
    assert retrains_alone(load_method("datamodel", alpha=0.5, **asked), 0.5) == 40
    assert retrains_alone(load_method("datamodel", alpha=0.1, **asked), 0.5) == 0
    assert retrains_alone(load_method("datamodel", prior="gradsim", **asked), 0.5) == 0
    assert retrains_alone(load_method("gradsim"), 0.5) == 0
