"""The linear ceiling recovers planted shares of additive variance, and its interval covers them; so does any one point
of the curve on which regression on subsets is heading there.

A query's loss on a subset is a sum over the subset's members, plus something that depends on the subset but on no
example by itself, plus noise of retraining, in known shares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from baselines.method import load_method
from baselines.support.subset_regression import regress
from bench.metrics import (
    best_spearman,
    linear,
    linear_ceiling,
    linear_datamodelling_score,
    noise_ceiling,
    spearman_per_column,
)
from bench.metrics.lds import LDS
from bench.rows import AT_UNLIMITED, linear_numbers, retrains_alone, unlimited_numbers
from bench.tables import linear_ceiling_text
from tests.bench.test_ensembles import EXAMPLES, QUERIES, truth
from tests.helpers.linear_queries import draw_masks


@dataclass(frozen=True)
class Planted:
    additive: float  # shares of a single run's variance
    interaction: float = 0.0  # noise is the rest
    num_subsets: int = 300
    num_examples: int = 300
    num_queries: int = 40
    num_replicates: int = 1
    alpha: float = 0.5
    scheme: str = "fixed"
    shared: float = 0.5  # of everything, by all queries, in units of their own part

    def draw_masks(self, rng: np.random.Generator) -> np.ndarray:
        if self.scheme == "bernoulli":
            return rng.random((self.num_subsets, self.num_examples)) < self.alpha
        return draw_masks(self.num_subsets, rng, self.num_examples, self.alpha)

    def mixed(self, rng: np.random.Generator, *shape: int) -> np.ndarray:
        own, common = rng.normal(size=shape), rng.normal(size=(*shape[:-1], 1))
        return (own + self.shared * common) / math.sqrt(1 + self.shared**2)

    def draw(self, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """masks (K, n), losses (R, K, q), and the additive part alone (K, q)."""
        rng = np.random.default_rng([seed, 11])
        masks = self.draw_masks(rng)
        coefficients = self.mixed(rng, self.num_examples, self.num_queries)
        additive = (masks - self.alpha) @ coefficients
        coefficients -= coefficients.mean(axis=0) * (self.scheme == "fixed")
        additive /= np.sqrt(self.alpha * (1 - self.alpha) * (coefficients**2).sum(axis=0))
        size = (self.num_replicates, self.num_subsets, self.num_queries)
        losses = math.sqrt(self.additive) * additive + math.sqrt(self.interaction) * self.mixed(rng, *size[1:])
        noise = math.sqrt(max(0.0, 1 - self.additive - self.interaction))
        return masks, losses + noise * self.mixed(rng, *size), additive


@pytest.mark.parametrize("scheme", ["fixed", "bernoulli"])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_planted_shares_are_recovered(share, scheme):
    world = Planted(share, interaction=0.5 * (1 - share), scheme=scheme, alpha=0.2)
    found = [linear_ceiling(*world.draw(seed)[:2]) for seed in range(10)]
    assert sum(one.share.ci_low <= share <= one.share.ci_high for one in found) >= 9
    assert np.mean([one.share.share for one in found]) == pytest.approx(share, abs=0.03)
    assert all(one.share == one.share_of_run and one.share_of_signal is None for one in found)


def test_a_linear_problem_has_share_one_and_pairs_of_examples_and_noise_zero():
    found = linear_ceiling(*Planted(1.0).draw(0)[:2])
    assert found.share.ci_low <= 1.0 <= found.share.ci_high
    assert found.share.share == pytest.approx(1.0, abs=0.05)
    assert found.ceiling == pytest.approx(1.0, abs=0.05)
    world = Planted(0.0)
    rng = np.random.default_rng(0)
    masks = world.draw_masks(rng)
    signs = 2.0 * masks - 1.0
    pairs = rng.normal(size=(40, 300, 300)) * (1 - np.eye(300))
    losses = np.stack([((signs @ weights) * signs).sum(axis=1) for weights in pairs], axis=1)
    for outcomes in (losses[None], rng.normal(size=(2, 300, 40)), world.draw(1)[1]):
        found = linear_ceiling(masks, outcomes)
        assert found.share.ci_low <= 0.0 <= found.share.ci_high
        assert found.share.share == pytest.approx(0.0, abs=0.1)


def test_replicates_separate_noise_and_what_they_add_to_every_subset_is_none():
    world = Planted(0.3, interaction=0.3, num_replicates=2, num_queries=100)
    masks, losses, additive = world.draw(3)
    found = linear_ceiling(masks, losses)
    assert found.share_of_run.ci_low <= 0.3 <= found.share_of_run.ci_high
    assert found.share.ci_low <= 0.3 / 0.8 <= found.share.ci_high
    assert found.share_of_signal.ci_low <= 0.5 <= found.share_of_signal.ci_high
    # What they promise is what the planted coefficients themselves score.
    assert found.ci_low <= linear_datamodelling_score(losses.mean(axis=0), additive).lds <= found.ci_high
    assert found.share_of_run.share < found.share.share
    assert found.ceiling < noise_ceiling(losses).ceiling
    masks, losses, _ = Planted(0.4, interaction=0.6, num_replicates=2).draw(5)
    found = linear_ceiling(masks, losses + np.array([0.0, 3.0])[:, None, None])
    assert found.share_of_signal.share == pytest.approx(linear_ceiling(masks, losses[:1]).share.share, abs=0.03)


WORLDS = {
    "few examples": Planted(0.5, 0.2, num_subsets=100, num_examples=100),
    "many examples": Planted(0.5, 0.2, num_subsets=100, num_examples=800, num_queries=20),
    "nothing additive": Planted(0.0, 0.5, num_subsets=100, num_queries=20, num_replicates=2),
    "independent queries": Planted(0.3, 0.3, num_subsets=60, num_examples=60, shared=0.0, scheme="bernoulli"),
}


@pytest.mark.parametrize("name", WORLDS)
def test_intervals_cover_the_planted_share(name):
    """At least 90 % of 200 draws; STATISTICS.md has more."""
    world = WORLDS[name]
    found = [linear_ceiling(*world.draw(100 + draw)[:2]).share_of_run for draw in range(200)]
    covered = np.mean([one.ci_low <= world.additive <= one.ci_high for one in found])
    assert 0.9 <= covered <= 0.99, covered
    spread = np.std([one.share for one in found])
    assert np.sqrt(np.mean([one.standard_error**2 for one in found])) == pytest.approx(spread, rel=0.2)
    assert np.mean([one.share for one in found]) == pytest.approx(world.additive, abs=0.03)


def test_undefined_queries_are_counted_and_left_out():
    masks, losses, _ = Planted(0.5).draw(7)
    clean = linear_ceiling(masks, losses[:, :, 2:])
    losses[:, :, 0] = 1.0
    losses[0, 3, 1] = np.nan
    found = linear_ceiling(masks, losses)
    assert found.num_undefined == 2
    assert np.isnan(found.per_query[:2]).all()
    assert found.share.share == pytest.approx(clean.share.share, abs=1e-9)
    nothing = linear_ceiling(masks, np.ones((1, 300, 3)))
    assert math.isnan(nothing.ceiling)
    assert nothing.num_undefined == 3


def test_monotone_transforms_and_blocks_of_queries_change_nothing(monkeypatch):
    masks, losses, _ = Planted(0.5, num_replicates=2).draw(8)
    whole = linear_ceiling(masks, losses)
    assert linear_ceiling(masks, np.exp(2 * losses[:1])) == linear_ceiling(masks, losses[:1])
    monkeypatch.setattr("bench.metrics.linear._NUMBERS_PER_BLOCK", 2 * 300 * 7)
    blocked = linear_ceiling(masks, losses)
    assert blocked.share.share == pytest.approx(whole.share.share, abs=1e-6)
    assert blocked.share.standard_error == pytest.approx(whole.share.standard_error, rel=1e-4)


def learnt(additive: float, count: int, replicates: int = 1) -> tuple[LDS, dict]:
    """LDS of regression on so many subsets of a planted problem, and the linear ceiling's numbers."""
    reported, further = truth(200, replicates, "report", additive, 0.2), truth(count, 1, "learn", additive, 0.2)
    found = regress(further.masks, further.losses[0], device=torch.device("cpu"))
    score = linear_datamodelling_score(reported.mean(), reported.masks @ found.weights.numpy().T)
    return score, linear_numbers(reported, further, np.arange(QUERIES))


@pytest.mark.parametrize("additive", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("count", [150, 600])
def test_planted_shares_come_back(additive: float, count: int) -> None:
    score, _ = learnt(additive, count)
    found = linear.unlimited_retrains((score.lds_corrected, score.ci_low, score.ci_high), count, EXAMPLES)
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
    assert unlimited_numbers({}, EXAMPLES, linear) == dict.fromkeys(AT_UNLIMITED)
    texts = [linear_ceiling_text([{**linear, **more}]) for more in (numbers, dict.fromkeys(AT_UNLIMITED))]
    assert ["its check" in text for text in texts] == [True, False]


def explained_variance(share: float, num_retrains: int, num_examples: int) -> float:
    """How much of a run's variance ridge regression explains: e = h A, A = r / (1 - e + r), r = h m / (n - 1)."""
    rate = share * num_retrains / (num_examples - 1)
    half = 0.5 * (1.0 + rate)
    return half - math.sqrt(max(0.0, half**2 - share * rate))


def test_the_curve_its_inverse_what_is_on_it_and_best_spearman() -> None:
    for share in (0.05, 0.5, 1.0):
        for count in (10, 1000, 10**6):
            explained = explained_variance(share, count, 500)
            assert linear.additive_share(explained, count, 500) == pytest.approx(share, rel=1e-6)
    assert explained_variance(0.5, 10**9, 500) == pytest.approx(0.5, rel=1e-3)
    assert linear.additive_share(0.0, 100, 500) == 0.0
    assert math.isnan(linear.additive_share(math.nan, 100, 500))
    for options, count in (({}, 40), ({"alpha": 0.5}, 40), ({"alpha": 0.1}, 0), ({"prior": "gradsim"}, 0)):
        assert retrains_alone(load_method("datamodel", retrains=40, **options), 0.5) == count
    assert retrains_alone(load_method("gradsim"), 0.5) == 0
    rng = np.random.default_rng(0)
    signal = rng.normal(size=(20_000, 1))
    mixed = math.sqrt(0.4) * signal + math.sqrt(0.6) * rng.normal(size=signal.shape)
    assert best_spearman(0.4) == pytest.approx(spearman_per_column(mixed, signal)[0], abs=0.01)
    assert best_spearman(1.0) == pytest.approx(1.0)
    assert best_spearman(-0.1) == 0.0
