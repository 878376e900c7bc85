"""Diagnostics: R-hat and ESS are ArviZ's, and what they say is said in words."""

import importlib.util
import math

import numpy as np
import pytest

from baselines.bif.diagnostics import diagnose, effective_sample_size, judge_chain, split_rhat


def autoregressive(coefficient: float, chains: int = 4, draws: int = 4000) -> np.ndarray:
    generator = np.random.default_rng(0)
    values = np.zeros((chains, draws))
    for t in range(1, draws):
        values[:, t] = coefficient * values[:, t - 1] + generator.normal(size=chains)
    return values[:, 200:]


@pytest.mark.parametrize("coefficient", [0.0, 0.5, 0.9])
def test_effective_sample_size_of_an_autoregression(coefficient: float) -> None:
    values = autoregressive(coefficient)
    expected = values.size * (1 - coefficient) / (1 + coefficient)
    assert 0.75 < effective_sample_size(values) / expected < 1.3


def test_rhat_sees_chains_that_disagree_and_chains_that_drift() -> None:
    values = autoregressive(0.0)
    assert split_rhat(values) < 1.01
    assert split_rhat(values + np.arange(4)[:, None]) > 1.2
    assert split_rhat(values + np.linspace(0, 5, values.shape[1])) > 1.2
    assert math.isnan(split_rhat(values[:, :3]))
    assert split_rhat(np.ones((2, 10))) == 1.0


def test_chains_that_run_away_are_judged() -> None:
    steady = np.full(50, 1.0)
    assert judge_chain(0, steady, 1.0, limit=5).healthy
    assert "ran away" in judge_chain(0, steady + np.linspace(0, 20, 50), 1.0, limit=5).reason
    broken = steady.copy()
    broken[30:] = np.nan
    assert "non-finite loss at draw 30" in judge_chain(0, broken, 1.0, limit=5).reason


# ---- against ArviZ ----

# name: (chains, draws, autoregression, drift over the whole trace, rounded to whole numbers: ties)
RECIPES = {
    "independent": (4, 100, 0.0, 0.0, False),
    "odd": (3, 51, 0.5, 0.0, False),
    "slow": (4, 300, 0.95, 0.0, False),
    "alternating": (2, 64, -0.7, 0.0, False),
    "drifting": (4, 100, 0.3, 3.0, False),
    "ties": (5, 40, 0.6, 0.0, True),
    "short": (2, 4, 0.0, 0.0, False),
}
# (rhat, ess) of them by ArviZ 0.22.0: float(arviz.rhat(x, method="rank")), float(arviz.ess(x, method="bulk")).
ARVIZ = {
    "independent": (1.0016925691266099, 419.15009946376364),
    "odd": (1.0022341233631935, 104.89066290278184),
    "slow": (1.1460371424863938, 19.568511565217978),
    "alternating": (1.0050531282291415, 269.72287611492715),
    "drifting": (1.2344808376442695, 12.872592086775102),
    "ties": (1.126285162612135, 30.087882657109645),
    "short": (1.338194556310251, 7.224719895935548),
}


def traces_of(name: str) -> np.ndarray:
    chains, draws, coefficient, drift, whole = RECIPES[name]
    values = np.random.default_rng(list(RECIPES).index(name)).normal(size=(chains, draws))
    for t in range(1, draws):
        values[:, t] += coefficient * values[:, t - 1]
    values += np.linspace(0, drift, draws)
    return np.round(values) if whole else values


@pytest.mark.parametrize("name", RECIPES)
def test_rhat_and_ess_are_arvizs(name: str) -> None:
    values = traces_of(name)
    found = (float(split_rhat(values)), float(effective_sample_size(values)))
    assert found == pytest.approx(ARVIZ[name], rel=1e-9)
    if importlib.util.find_spec("arviz"):
        import arviz

        now = float(arviz.rhat(values, method="rank")), float(arviz.ess(values, method="bulk"))
        assert found == pytest.approx(now, rel=1e-9)


def test_each_examples_trace_is_judged_alone() -> None:
    names = ("independent", "drifting")
    together = np.stack([traces_of(name) for name in names], axis=-1)
    assert split_rhat(together).tolist() == [float(split_rhat(traces_of(name))) for name in names]
    assert effective_sample_size(together).shape == (2,)


# ---- in words ----


def test_chains_that_have_not_mixed_are_said_so() -> None:
    mixed, drifting = traces_of("independent"), traces_of("drifting")
    assert "mixing" not in diagnose(mixed, mixed[..., None])
    found = diagnose(mixed, drifting[..., None])
    assert found["mixing"].startswith(f"not mixed: R-hat {found['rhat_examples_median']:.2f}, ")
    assert found["mixing"].endswith(" of 400 draws count")
    slow = autoregressive(0.9, chains=2, draws=500)
    assert diagnose(slow, slow[..., None])["mixing"].startswith("too few draws: ")


def test_few_independent_draws_are_not_called_unmixed() -> None:
    few = traces_of("independent")[:, :12]
    assert "mixing" not in diagnose(few, few[..., None])
    assert "mixing" not in diagnose(few[:, :3], few[:, :3, None]), "three draws cannot tell"
