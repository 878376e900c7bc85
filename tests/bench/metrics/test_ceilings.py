"""Ceilings pooled over seeds, and LDS from plain arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.metrics import linear_ceiling, linear_datamodelling_score, noise_ceiling, pooled_ceiling, score_arrays
from tests.bench.metrics.test_lds import draw_replicates
from tests.helpers.linear_queries import draw_masks


def pooled_of(ceilings):
    """Of what a record has of each seed's."""
    return pooled_ceiling(*([getattr(one, name) for one in ceilings] for name in ("reliability", "ci_low", "ci_high")))


def test_pooling_reliabilities_is_no_mean_of_roots():
    """Small reliabilities: a mean of roots takes every negative one for 0, the root of the mean does not."""
    ceilings = [noise_ceiling(draw_replicates(2, 30, 5, noise=4.0, seed=seed)[0]) for seed in range(40)]
    known = 1 / (1 + 16 / 2)
    pooled = pooled_of(ceilings)
    assert pooled.mean_low <= known <= pooled.mean_high
    assert pooled.ceiling == pytest.approx(math.sqrt(known), abs=0.08)
    assert sum(ceiling.touches_zero for ceiling in ceilings) > 10
    assert not pooled.touches_zero
    assert np.mean([ceiling.ceiling for ceiling in ceilings]) < pooled.ceiling
    few = pooled_of(ceilings[:3])
    assert (few.touches_zero, few.ci_low) == (True, 0.0)


def test_pooled_intervals_cover():
    known, covered = 1 / 1.5, 0
    for draw in range(100):
        pooled = pooled_of([noise_ceiling(draw_replicates(2, 40, 10, seed=1000 + 3 * draw + k)[0]) for k in range(3)])
        covered += pooled.mean_low <= known <= pooled.mean_high
    assert 88 <= covered <= 100


@pytest.mark.parametrize("reliability", [0.5, 0.98])
def test_intervals_pooled_from_records_cover_where_few_subsets_are_replicated(reliability: float):
    """25 subsets twice: Spearman's correlation is biased towards 0, in every seed alike."""
    right = 6 / math.pi * math.asin(math.sqrt(reliability) / 2)  # Spearman's, of the signal with the mean of two
    noise, covered = math.sqrt(2 * (1 / reliability - 1)), 0
    for draw in range(20):
        seeds = [noise_ceiling(draw_replicates(2, 25, 20, noise=noise, seed=5 * draw + k)[0]) for k in range(5)]
        pooled = pooled_of(seeds)
        covered += pooled.ci_low <= right <= pooled.ci_high
    assert covered >= 18


def test_one_seed_keeps_its_interval_and_unknown_ones_are_counted():
    one, unknown = noise_ceiling(draw_replicates(2)[0]), noise_ceiling(draw_replicates(1)[0])
    pooled = pooled_of([one, unknown])
    assert pooled.ceiling == one.ceiling
    assert (pooled.ci_low, pooled.ci_high) == pytest.approx((one.ci_low, one.ci_high), abs=0.01)
    assert (pooled.num_seeds, pooled.num_unknown) == (1, 1)
    assert math.isnan(pooled_of([unknown]).ceiling)
    assert math.isnan(pooled_ceiling([0.5], [math.nan], [math.nan]).ci_low)
    assert pooled_ceiling([0.49] * 2, [math.nan] * 2, [math.nan] * 2).ceiling == pytest.approx(0.7)
    with pytest.raises(ValueError, match="no seeds"):
        pooled_ceiling([], [], [])


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3, 1.0])
def test_the_interval_holds_the_printed_ceiling(noise: float) -> None:
    """Nearly perfect agreement of 25 subsets is where the value less its bias is far from the value."""
    rng = np.random.default_rng(0)
    signal = rng.normal(size=(25, 200))
    replicates = signal + noise * rng.normal(size=(2, 25, 200))
    found = noise_ceiling(replicates)
    assert found.ci_low <= found.ceiling <= found.ci_high
    assert found.reliability_low <= found.reliability <= found.reliability_high
    # The truth: the signal's correlation with the mean of two.
    right = 1 / np.sqrt(1 + noise**2 / 2)
    assert found.ci_low - 0.01 <= right <= found.ci_high + 0.01


def plain_problem(num_replicates=2, seed=5):
    """masks (K, n), losses (R, K, q) and the scores that made them (q, n)."""
    rng = np.random.default_rng(seed)
    masks, scores = draw_masks(60, rng), rng.normal(size=(20, 100))
    return masks, masks @ scores.T + 3.0 * rng.normal(size=(num_replicates, 60, 20)), scores


def test_plain_arrays_give_what_the_pieces_give_and_no_ceiling_without_replicates():
    masks, losses, scores = plain_problem()
    found = score_arrays(masks, losses, scores)
    result = linear_datamodelling_score(losses.mean(axis=0), masks @ scores.T)
    for name in ("lds", "ci_low", "ci_high", "num_undefined", "across_queries", "num_subsets", "num_queries"):
        assert getattr(found, name) == getattr(result, name), name
    np.testing.assert_array_equal(found.per_query, result.per_query)
    assert found.ceiling == noise_ceiling(losses)
    assert found.linear_ceiling == linear_ceiling(masks, losses)
    assert found.lds > 0.7
    assert score_arrays(masks.astype(int), losses, -scores).lds == pytest.approx(-found.lds)
    masks, losses, scores = plain_problem()
    once = score_arrays(masks, losses[0], scores.astype(np.float32))
    assert once.ceiling is None
    assert once.linear_ceiling is not None
    assert once.lds == pytest.approx(score_arrays(masks, losses[:1], scores).lds, abs=1e-3)
    assert score_arrays(masks[:5], losses[:, :5], scores).linear_ceiling is None
    present = np.ones((2, 60), dtype=bool)
    present[1, 2:] = False
    assert score_arrays(masks, losses, scores, present=present).ceiling is None
    scores[3, 4] = np.nan
    assert score_arrays(masks, losses, scores).num_undefined == 1
