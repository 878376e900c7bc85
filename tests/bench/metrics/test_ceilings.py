"""Ceilings pooled over seeds, and LDS from plain arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.metrics import (
    ceiling_of_ends,
    lds_over_ceiling,
    lds_over_pooled_ceiling,
    linear_ceiling,
    linear_datamodelling_score,
    noise_ceiling,
    pooled_ceiling,
    score_arrays,
)
from tests.bench.metrics.test_lds import NUM_EXAMPLES, draw_masks, draw_replicates

# ---- ceilings pooled ----


def test_pooling_reliabilities_is_no_mean_of_roots():
    """Small reliabilities: a mean of roots takes every negative one for 0, the root of the mean does not."""
    ceilings = [noise_ceiling(draw_replicates(2, 30, 5, noise=4.0, seed=seed)[0]) for seed in range(40)]
    known = 1 / (1 + 16 / 2)
    pooled = pooled_ceiling(ceilings)
    assert pooled.mean_low <= known <= pooled.mean_high
    assert pooled.ceiling == pytest.approx(math.sqrt(known), abs=0.08)
    assert sum(ceiling.touches_zero for ceiling in ceilings) > 10
    assert not pooled.touches_zero
    assert np.mean([ceiling.ceiling for ceiling in ceilings]) < pooled.ceiling
    numbers = pooled_ceiling([ceiling.reliability for ceiling in ceilings])
    assert (numbers.ceiling, numbers.num_seeds) == (pooled.ceiling, 40)
    ends = zip(*((ceiling.reliability, ceiling.ci_low, ceiling.ci_high) for ceiling in ceilings))
    written = ceiling_of_ends(*map(list, ends))  # what a record has of them
    assert written.ceiling == pooled.ceiling
    assert (written.mean_low, written.mean_high) == pytest.approx((pooled.mean_low, pooled.mean_high), abs=0.02)
    few = pooled_ceiling(ceilings[:3])
    assert few.touches_zero
    assert few.ci_low == 0.0


def test_pooled_intervals_cover():
    known, covered = 1 / 1.5, 0
    for draw in range(100):
        seeds = [noise_ceiling(draw_replicates(2, 40, 10, seed=1000 + 3 * draw + k)[0]) for k in range(3)]
        pooled = pooled_ceiling(seeds)
        covered += pooled.mean_low <= known <= pooled.mean_high
    assert 88 <= covered <= 100


@pytest.mark.parametrize("reliability", [0.5, 0.98])
def test_intervals_pooled_from_records_cover_where_few_subsets_are_replicated(reliability: float):
    """25 subsets twice: Spearman's correlation is biased towards 0, in every seed alike."""
    right = 6 / math.pi * math.asin(math.sqrt(reliability) / 2)  # Spearman's, of the signal with the mean of two
    noise, covered = math.sqrt(2 * (1 / reliability - 1)), 0
    for draw in range(20):
        seeds = [noise_ceiling(draw_replicates(2, 25, 20, noise=noise, seed=5 * draw + k)[0]) for k in range(5)]
        pooled = ceiling_of_ends(
            *(list(map(f, seeds)) for f in (lambda c: c.reliability, lambda c: c.ci_low, lambda c: c.ci_high))
        )
        covered += pooled.ci_low <= right <= pooled.ci_high
    assert covered >= 18


def test_one_seed_keeps_its_interval_and_unknown_ones_are_counted():
    one, unknown = noise_ceiling(draw_replicates(2)[0]), noise_ceiling(draw_replicates(1)[0])
    pooled = pooled_ceiling([one, unknown])
    assert pooled.ceiling == one.ceiling
    assert (pooled.ci_low, pooled.ci_high) == pytest.approx((one.ci_low, one.ci_high), abs=0.01)
    assert (pooled.num_seeds, pooled.num_unknown) == (1, 1)
    assert math.isnan(pooled_ceiling([unknown]).ceiling)
    assert math.isnan(pooled_ceiling([0.5]).ci_low)
    assert pooled_ceiling([0.49, 0.49]).ceiling == pytest.approx(0.7)
    with pytest.raises(ValueError, match="no seeds"):
        pooled_ceiling([])
    with pytest.raises(ValueError, match="different kinds"):
        pooled_ceiling([one, 0.5])


def test_linear_ceilings_pool_by_their_shares():
    problems = [plain_problem(seed=seed) for seed in range(5)]
    found = [linear_ceiling(masks, losses) for masks, losses, _ in problems]
    pooled = pooled_ceiling(found)
    assert pooled.mean == pytest.approx(np.mean([one.share.share for one in found]))
    assert pooled.standard_error < min(one.share.standard_error for one in found)
    best = np.mean([score_arrays(*problem).lds for problem in problems])
    assert pooled.ci_low < best < pooled.ci_high
    assert pooled_ceiling(found[:1]).ci_low == pytest.approx(found[0].ci_low, abs=0.01)
    assert pooled_ceiling([one.share.share for one in found], linear=True).ceiling == pooled.ceiling


def test_the_mean_score_over_the_pooled_ceiling_covers():
    """The noiseless losses score as high as noise lets them: the ratio is 1, up to what Spearman makes of it."""
    covered, ratios = 0, []
    for draw in range(100):
        drawn = [draw_replicates(2, 40, 10, seed=2000 + 4 * draw + k) for k in range(4)]
        scores = [linear_datamodelling_score(losses.mean(axis=0), signal).lds for losses, signal in drawn]
        found = lds_over_pooled_ceiling(scores, [noise_ceiling(losses, num_bootstrap=50) for losses, _ in drawn])
        covered += found.ci_low <= 0.99 <= found.ci_high
        ratios.append(found.ratio)
    assert 88 <= covered <= 100
    assert np.mean(ratios) == pytest.approx(0.99, abs=0.02)
    unknown = lds_over_pooled_ceiling([0.3, 0.3, 0.3], [-0.5, 0.1, 0.5])
    assert math.isnan(unknown.ratio)
    assert lds_over_pooled_ceiling([0.4, 0.5, 0.1], [0.49, 0.49, math.nan]).ratio == pytest.approx(0.45 / 0.7)
    with pytest.raises(ValueError, match="1 scores and 2 seeds"):
        lds_over_pooled_ceiling([0.1], [0.2, 0.3])


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


# ---- plain arrays ----


def plain_problem(num_replicates=2, seed=5):
    """masks (K, n), losses (R, K, q) and the scores that made them (q, n)."""
    rng = np.random.default_rng(seed)
    masks, scores = draw_masks(60, rng) > 0, rng.normal(size=(20, NUM_EXAMPLES))
    return masks, masks @ scores.T + 3.0 * rng.normal(size=(num_replicates, 60, 20)), scores


def test_plain_arrays_give_what_the_pieces_give():
    masks, losses, scores = plain_problem()
    found, prediction = score_arrays(masks, losses, scores), masks @ scores.T
    result = linear_datamodelling_score(losses.mean(axis=0), prediction)
    for name in ("lds", "ci_low", "ci_high", "num_undefined", "across_queries", "num_subsets", "num_queries"):
        assert getattr(found, name) == getattr(result, name), name
    np.testing.assert_array_equal(found.per_query, result.per_query)
    assert found.ceiling == noise_ceiling(losses)
    assert found.over_ceiling == lds_over_ceiling(losses, prediction)
    assert found.linear_ceiling == linear_ceiling(masks, losses)
    assert found.lds > 0.7
    assert score_arrays(masks.astype(int), losses, -scores).lds == pytest.approx(-found.lds)


def test_plain_arrays_without_replicates_have_no_ceiling():
    masks, losses, scores = plain_problem()
    once = score_arrays(masks, losses[0], scores.astype(np.float32))
    assert once.ceiling is None
    assert once.over_ceiling is None
    assert once.linear_ceiling is not None
    assert once.lds == pytest.approx(score_arrays(masks, losses[:1], scores).lds, abs=1e-3)
    assert score_arrays(masks[:5], losses[:, :5], scores).linear_ceiling is None
    present = np.ones((2, 60), dtype=bool)
    present[1, 2:] = False
    assert score_arrays(masks, losses, scores, present=present).ceiling is None
    scores[3, 4] = np.nan
    assert score_arrays(masks, losses, scores).num_undefined == 1
