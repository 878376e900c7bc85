"""Known answers for the linear datamodelling score, its intervals, and the noise ceiling."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from bench.metrics import (
    intervals,
    lds_across_queries,
    linear_datamodelling_score,
    mean_and_standard_error,
    mean_over_replicates,
    noise_ceiling,
    paired_difference,
    spearman_per_column,
)
from bench.metrics.ceilings import StepUp
from bench.metrics.intervals import leave_one_out, normal_above, normal_quantile, t_above, t_quantile
from bench.rows import compute_metrics
from tests.helpers.linear_queries import LinearQueries


def planted(num_subsets=40, num_queries=12, noise=1.0, seed=0):
    """truth and prediction that agree up to noise, both (num_subsets, num_queries)."""
    rng = np.random.default_rng([seed, 1])
    truth = rng.normal(size=(num_subsets, num_queries))
    return truth, truth + noise * rng.normal(size=truth.shape)


# ------------------------------------------------------------------------------------------------------- known answers


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "tied"])
@pytest.mark.parametrize("num_subsets", [4, 11, 300])
def test_spearman_with_and_without_each_subset_is_that_of_scipy(num_subsets, rounded):
    truth, prediction = planted(num_subsets, 6, seed=3)
    if rounded:
        truth, prediction = np.round(2 * truth), np.round(2 * prediction)
    whole, without = leave_one_out(truth.T, prediction.T)
    ours = spearman_per_column(truth, prediction)
    for j in range(6):
        a, b = truth[:, j], prediction[:, j]
        assert whole[j] == ours[j] == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)
        for k in range(0, num_subsets, max(1, num_subsets // 20)):
            left = np.delete(a, k), np.delete(b, k)
            expected = stats.spearmanr(*left).statistic if np.ptp(left[0]) > 0 and np.ptp(left[1]) > 0 else 0.0
            assert without[j, k] == pytest.approx(expected, abs=1e-9)


def test_bias_is_the_textbook_one_and_perfect_predictions_have_none():
    """Without ties the unbiased estimate is ((K + 1) r - 3 tau) / (K - 2), and the jackknife is that up to 1 / K^2."""
    truth, prediction = planted(30, 6)
    result = linear_datamodelling_score(truth, prediction)
    tau = np.mean([stats.kendalltau(truth[:, j], prediction[:, j]).statistic for j in range(6)])
    unbiased = (31 * result.lds - 3 * tau) / 28
    assert result.lds - result.bias == pytest.approx(unbiased, abs=3 / 30**2)
    perfect = linear_datamodelling_score(truth, truth)
    assert (perfect.lds, perfect.ci_low, perfect.ci_high) == pytest.approx((1.0, 1.0, 1.0))
    assert linear_datamodelling_score(truth, -truth).lds == pytest.approx(-1.0)


def test_undefined_queries_are_counted_and_left_out():
    truth, prediction = planted()
    clean = linear_datamodelling_score(truth[:, 4:], prediction[:, 4:])
    truth[:, 0] = 2.0
    prediction[:, 1] = 0.0
    truth[5, 2] = np.nan
    prediction[6, 3] = np.inf
    result = linear_datamodelling_score(truth, prediction)
    assert np.isnan(result.per_query[:4]).all()
    assert not np.isnan(result.per_query[4:]).any()
    assert (result.num_undefined, result.num_queries) == (4, 12)
    assert (result.lds, result.ci_low, result.ci_high) == (clean.lds, clean.ci_low, clean.ci_high)
    assert math.isfinite(result.across_queries)
    truth, _ = planted()
    nothing = linear_datamodelling_score(truth, np.zeros_like(truth))
    difference = paired_difference(truth, truth, np.zeros_like(truth))
    assert np.isnan([nothing.lds, nothing.ci_low, difference.difference, difference.p_value]).all()
    assert nothing.num_undefined == 12


def test_orientation_is_across_subsets():
    """Queries that differ in level, with a prediction that knows only the levels: nothing is known about subsets."""
    rng = np.random.default_rng(0)
    level = 100.0 * np.arange(50)
    truth, prediction = (level + rng.normal(size=(200, 50)) for _ in range(2))
    result = linear_datamodelling_score(truth, prediction)
    assert abs(result.lds) < 0.05
    assert result.across_queries == pytest.approx(1.0)
    assert (result.num_subsets, result.num_queries) == (200, 50)
    by_hand = np.mean([stats.spearmanr(truth[k], prediction[k]).statistic for k in range(200)])
    assert lds_across_queries(truth, prediction) == pytest.approx(by_hand)


def test_monotone_transforms_order_and_blocks_change_nothing(monkeypatch):
    truth, prediction = planted()
    before = linear_datamodelling_score(truth, prediction)
    after = linear_datamodelling_score(np.exp(truth) + np.arange(12), 3.0 * prediction - 5.0)
    np.testing.assert_allclose(after.per_query, before.per_query)
    assert after.ci_low == pytest.approx(before.ci_low)
    rng = np.random.default_rng(0)
    queries, subsets = rng.permutation(12), rng.permutation(40)
    after = linear_datamodelling_score(truth[subsets][:, queries], prediction[subsets][:, queries])
    np.testing.assert_allclose(after.per_query, before.per_query[queries])
    for name in ("lds", "bias", "standard_error", "across_queries"):
        assert getattr(after, name) == pytest.approx(getattr(before, name))
    monkeypatch.setattr(intervals, "QUERIES_PER_BLOCK", 5)
    assert linear_datamodelling_score(truth, prediction) == before


REGIMES = {
    "alike queries": LinearQueries(),
    "heterogeneous queries": LinearQueries(shared=0.7, shared_error=0.3, own_error=1.0, spread=0.8),
    "near zero": LinearQueries(shared_error=0.0, own_error=1.0, signal=0.02),
}


@pytest.mark.parametrize("name", REGIMES)
def test_intervals_cover_the_truth(name):
    """91 to 98.5 % of 200 draws; see STATISTICS.md for more regimes and sizes."""
    regime, num_draws = REGIMES[name], 200
    limit, worse_limit = regime.limits()
    covered = covered_difference = 0
    for draw in range(num_draws):
        truth, better, worse = regime.predictions(100, 60, np.random.default_rng([draw, 9]))
        result = linear_datamodelling_score(truth, better)
        covered += result.ci_low <= limit <= result.ci_high
        difference = paired_difference(truth, better, worse)
        covered_difference += difference.ci_low <= limit - worse_limit <= difference.ci_high
    assert 0.91 <= covered / num_draws <= 0.985, f"{name}: LDS interval covers {covered / num_draws:.3f}"
    assert 0.91 <= covered_difference / num_draws <= 0.985, f"{name}: difference {covered_difference / num_draws:.3f}"


def test_intervals_of_few_subsets_are_not_empty_and_of_many_queries_about_the_corrected_estimate():
    """Where queries share nothing, the degrees of freedom used to fall below one, and the interval was [-1, 1]."""
    for draw in range(50):
        regime = LinearQueries(shared_error=0.05, own_error=0.2, noise=0.05)
        truth, prediction, _ = regime.predictions(12, 7, np.random.default_rng([draw, 9]))
        result = linear_datamodelling_score(truth, prediction)
        assert result.ci_low > 0.4, f"draw {draw}: {result}"
    truth, prediction = planted(100, 10_000)
    result = linear_datamodelling_score(truth, prediction)
    assert result.ci_low < result.lds_corrected < result.ci_high
    # Independent queries: the interval is so narrow that only the corrected estimate meets the limit.
    assert result.ci_low < 6 / np.pi * math.asin(math.sqrt(0.5) / 2) < result.ci_high


def test_a_true_difference_is_found_and_a_method_does_not_differ_from_itself():
    truth, better, worse = REGIMES["alike queries"].predictions(100, 200, np.random.default_rng(0))
    result = paired_difference(truth, better, worse)
    a, b = (linear_datamodelling_score(truth, prediction) for prediction in (better, worse))
    assert result.difference == pytest.approx(a.lds - b.lds)
    assert result.ci_low > 0
    assert result.p_value < 1e-4
    assert result.standard_error < math.hypot(a.standard_error, b.standard_error)
    swapped = paired_difference(truth, worse, better)
    assert swapped.difference == pytest.approx(-result.difference)
    assert swapped.p_value == pytest.approx(result.p_value)
    same = paired_difference(truth, better, better)
    assert (same.difference, same.ci_low, same.ci_high, same.p_value) == (0.0, 0.0, 0.0, 1.0)


# ------------------------------------------------------------------------------------------------------- noise ceiling


def draw_replicates(num_replicates, num_subsets=100, num_queries=60, noise=1.0, seed=0):
    """Replicates (R, K, q) with unit signal and noise variance `noise**2`, and the noiseless losses (K, q)."""
    rng = np.random.default_rng([seed, 3])
    signal = rng.normal(size=(num_subsets, num_queries))
    return signal + noise * rng.normal(size=(num_replicates, num_subsets, num_queries)), signal


@pytest.mark.parametrize("num_replicates", [2, 3, 4, 5, 8])
def test_ceiling_recovers_known_reliability(num_replicates):
    replicates, signal = draw_replicates(num_replicates, num_queries=200)
    result = noise_ceiling(replicates)
    known = 1.0 / (1.0 + 1.0 / num_replicates)
    assert result.reliability == pytest.approx(known, abs=0.03)
    assert result.ceiling == pytest.approx(math.sqrt(result.reliability))
    # The interval is for infinitely many subsets; the estimate carries the small bias of having a hundred.
    assert result.ci_low - 0.005 < result.ceiling < result.ci_high
    assert result.num_replicates == pytest.approx(num_replicates)
    # The noiseless losses are the best prediction there is.
    best = linear_datamodelling_score(replicates.mean(axis=0), signal)
    assert best.lds == pytest.approx(result.ceiling, abs=0.03)


def test_step_up_is_spearman_brown_and_one_replicate_or_opposite_ones_have_no_ceiling():
    assert StepUp(half_a=0.5, half_b=0.5, whole=0.25).reliability(0.6) == pytest.approx(2 * 0.6 / 1.6)
    # Odd: two replicates against one, noise as large as the signal, so (2/3)(1/2) under the root and 3/4 in all.
    assert StepUp(0.5, 1.0, 1 / 3).reliability(math.sqrt(1 / 3)) == pytest.approx(0.75)
    replicates, _ = draw_replicates(1)
    unknown = noise_ceiling(replicates)
    assert np.isnan([unknown.ceiling, unknown.reliability]).all()
    opposite = noise_ceiling(np.concatenate([replicates, -replicates + 0.1 * draw_replicates(1, seed=1)[0]]))
    assert opposite.ceiling == 0.0
    assert -1.0 <= opposite.reliability < 0.0
    assert opposite.touches_zero


def test_ragged_replicates():
    """Two replicates on a quarter of the subsets, one on the others."""
    replicates, _ = draw_replicates(2, num_subsets=200, num_queries=200)
    present = np.ones((2, 200), dtype=bool)
    present[1, 50:] = False
    replicates[1, 50:] = np.nan
    result = noise_ceiling(replicates, present=present)
    # Noise variance 1/2 on a quarter and 1 on the rest.
    assert result.reliability == pytest.approx(1 / (1 + 0.875), abs=0.03)
    assert (result.num_subsets, result.num_subsets_replicated, result.num_undefined) == (200, 50, 0)
    truth = np.array([replicates[present[:, k], k].mean(axis=0) for k in range(200)])
    np.testing.assert_array_equal(mean_over_replicates(replicates, present=present), truth)


def test_ceiling_intervals_cover():
    """Signal and noise of equal size, so that the limit is known: Spearman from Pearson's r for normal losses."""
    half = 6 / np.pi * math.asin(0.5 / 2)
    ceiling, covered = math.sqrt(2 * half / (1 + half)), 0
    for draw in range(200):
        result = noise_ceiling(draw_replicates(2, 60, 40, seed=draw)[0])
        covered += result.ci_low <= ceiling <= result.ci_high
    assert 180 <= covered <= 198


# ------------------------------------------------------------------------------------------------ seeds, errors, speed


def test_means_their_errors_and_quantiles_are_those_of_scipy():
    assert mean_and_standard_error([1.0, 2.0, 3.0]) == pytest.approx((2.0, 1 / math.sqrt(3)))
    assert mean_and_standard_error([4.0]) == pytest.approx((4.0, math.nan), nan_ok=True)
    assert math.isnan(mean_and_standard_error([1.0, math.nan])[0])
    with pytest.raises(ValueError, match="expected"):
        mean_and_standard_error([])
    for degrees in (1, 2, 4, 7.3, 24.5, 99, 1e4, math.inf):
        for share in (0.025, 0.5, 0.9, 0.975, 0.9995):
            assert t_quantile(share, degrees) == stats.t.ppf(share, degrees)
            assert normal_quantile(share) == stats.norm.ppf(share)
        for value in (-1.0, 0.0, 0.1, 1.96, 8.0, math.inf):
            assert t_above(value, degrees) == stats.t.sf(value, degrees)
            assert normal_above(value) == stats.norm.sf(value)
    assert math.isnan(t_quantile(0.975, 0))
    assert math.isnan(t_above(math.nan, 5))


def test_a_block_of_numbers_is_what_each_function_gives() -> None:
    """Samplings are made once a method, and differences from them."""
    rng = np.random.default_rng(4)
    truth = rng.normal(size=(20, 30))
    made = {(name, False): truth * k + rng.normal(size=truth.shape) for k, name in enumerate("abc")}
    made["a", False][:, 3] = 1.0  # undefined there
    _, scores, differences = compute_metrics(truth[None], np.ones((1, 20), dtype=bool), truth, made)
    assert len(differences) == 3
    for key, score in scores.items():
        expected = linear_datamodelling_score(truth, made[key])
        assert (score.lds, score.ci_low, score.ci_high) == (expected.lds, expected.ci_low, expected.ci_high)
    for (first, second), found in differences.items():
        alone = paired_difference(truth, made[first], made[second])
        assert replace(found, per_query=None) == replace(alone, per_query=None)  # type: ignore[arg-type]
        np.testing.assert_array_equal(found.per_query, alone.per_query)


def test_shapes_and_shares_that_cannot_be_are_refused():
    truth, prediction = planted()
    with pytest.raises(ValueError, match="transposed"):
        linear_datamodelling_score(truth, prediction.T)
    for wrong in (
        lambda: spearman_per_column(truth, prediction[:-1]),
        lambda: paired_difference(truth, prediction, prediction[:, :-1]),
        lambda: linear_datamodelling_score(truth[:2], prediction[:2]),
        lambda: noise_ceiling(truth),
        lambda: noise_ceiling(np.stack([truth, truth]), present=np.zeros((2, 40), dtype=bool)),
    ):
        with pytest.raises(ValueError, match=r"expected|needs|same"):
            wrong()
