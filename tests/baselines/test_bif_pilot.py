"""The pilot chooses what is left open: known answers on a quadratic, the same at every call, and blind to queries."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from baselines.bif.diagnostics import diagnose, effective_sample_size, judge_chain, split_rhat
from baselines.bif.engine import Workbench
from baselines.bif.method import BIF
from baselines.bif.pilot import FEWEST_DRAWS, LOSS_PULL, MOST_DRAWS, RISE, Pilot, _Place, rounded
from baselines.bif.presets import PAPER_SETTINGS
from baselines.bif_cv import BIFControlVariate
from baselines.method import Problem
from tests.helpers.planted import Planted, make_problem

TASK = Planted(num_train=120, num_queries=8)


@pytest.fixture
def problem(tmp_path: Path) -> Problem:
    return make_problem(TASK, tmp_path)


def pilot_of(method: BIF, problem: Problem) -> Pilot:
    return method.fit(problem).pilot


def test_a_quadratics_numbers_are_known(problem: Problem) -> None:
    """Displacements of variance 1 / gamma raise half a squared error by |x|^2 / (2 gamma) on average."""
    pilot = pilot_of(BIF(), problem)
    inputs = torch.cat([TASK.train_data.inputs, torch.ones(TASK.num_train, 1)], 1)
    expected = float(inputs.square().sum(1).mean()) / 2 / RISE
    assert expected / 2 <= pilot.gamma <= 4 * expected
    assert pilot.gamma == rounded(pilot.gamma)
    assert pilot.rise <= RISE
    assert pilot.step_size == 1 / pilot.gamma
    largest = float(torch.linalg.eigvalsh(inputs.T @ inputs / TASK.num_train)[-1])
    assert 0.75 * largest < pilot.curvature < 1.01 * largest, "ten steps of a power iteration come so near"
    assert pilot.n_beta == rounded(LOSS_PULL * pilot.gamma / pilot.curvature)
    assert FEWEST_DRAWS <= pilot.draws <= MOST_DRAWS


def test_it_is_a_function_of_the_seed_and_looks_at_no_query(problem: Problem) -> None:
    before, draws = copy.deepcopy(problem.model.state_dict()), torch.get_rng_state()
    pilot = pilot_of(BIF(), problem)
    other = replace(problem, queries=problem.queries.select([3]), attributed_indices=np.array([7]))
    assert pilot_of(BIF(), other) == pilot
    assert all(torch.equal(value, before[name]) for name, value in problem.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), draws), "the global generator is the harness's"


def test_what_is_given_is_kept(problem: Problem) -> None:
    method = BIF(gamma=300.0, draws=40)
    fitted = method.fit(problem)
    assert (fitted.method.gamma, fitted.method.draws, fitted.method.step_size) == (300.0, 40, 1 / 300.0)
    assert "effective_share" not in fitted.pilot.shown()  # type: ignore[union-attr]
    everything = BIF(gamma=300.0, draws=40, step_size=0.001, n_beta=5.0)
    assert everything.fit(problem).method is everything
    assert everything.fit(problem).pilot is None
    assert everything.pack_fit(everything.fit(problem)) is None
    with pytest.raises(ValueError, match="n_beta not chosen yet"):
        Workbench(replace(everything, n_beta=0.0), TASK, problem.model, problem.train, problem.queries)
    with pytest.raises(ValueError, match="leaves it to the pilot"):
        BIF(gamma=-1.0)


def test_a_slow_chain_gets_more_draws(problem: Problem) -> None:
    fast = pilot_of(BIF(gamma=50.0, n_beta=1.0), problem)
    slow = pilot_of(BIF(gamma=50.0, n_beta=1.0, step_size=1e-4), problem)
    assert fast.draws < slow.draws == MOST_DRAWS
    assert slow.effective_share < 0.2 < fast.effective_share
    pilot = pilot_of(BIF(sampler="rmsprop_sgld", n_beta=10.0, draws=10), problem)
    assert pilot.step_size * pilot.gamma == pytest.approx(0.1), "as much shorter as its metric is longer"


@pytest.mark.parametrize("options", [{}, {"localiser": "kronecker", "damping": 1.0, "control_variate": True}])
def test_a_kept_fit_is_the_fit(problem: Problem, options: dict) -> None:
    method = BIF(**options, draws=20)
    fitted = method.fit(problem)
    again = method.unpack_fit(problem, method.pack_fit(fitted))
    assert again.pilot.shown() == fitted.pilot.shown()  # type: ignore[union-attr]
    assert again.method == fitted.method
    assert torch.equal(method.score(problem, again).scores, method.score(problem, fitted).scores)


def test_the_defaults_find_the_influential_on_a_task_nobody_tuned(problem: Problem) -> None:
    answer = BIF().score(problem, None)
    truth = TASK.exact_inclusion_effect()
    found = np.mean([spearmanr(truth[j], answer.scores[j]).statistic for j in range(TASK.num_queries)])
    assert found > 0.8
    assert "mixing" not in answer.diagnostics
    assert answer.diagnostics["pilot"]["draws"] * 4 == answer.diagnostics["num_draws"]


def test_the_papers_settings_leave_nothing_to_a_pilot() -> None:
    for settings in PAPER_SETTINGS.values():
        assert BIF(**settings).left_to_the_pilot == ()
    images = BIF(**BIF().settings_in_paper(TASK))
    assert (images.chains, images.draws, images.step_size, images.n_beta, images.gamma) == (4, 100, 1e-5, 200.0, 1e4)
    assert BIFControlVariate(gamma=1e4, n_beta=200.0).left_to_the_pilot == ("step_size",)


def test_a_chain_that_runs_away_gets_a_smaller_n_beta(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a model that is flat at its weights and steep beside them: the curvature there says too little."""
    usual = pilot_of(BIF(), problem)
    monkeypatch.setattr(_Place, "largest_curvature", lambda place, gamma: usual.curvature / 1000)
    careful = pilot_of(BIF(), problem)
    assert usual.n_beta <= careful.n_beta * 10 <= 100 * usual.n_beta
    assert math.isfinite(careful.effective_share)
    assert torch.isfinite(BIF(draws=20).score(problem, None).scores).all()


# ---- diagnostics: R-hat and ESS are ArviZ's, and what they say is said in words ----
def test_chains_that_run_away_are_judged() -> None:
    steady, draws = np.full(50, 1.0), np.arange(50)
    assert judge_chain(0, steady, 1.0, limit=5).healthy
    assert "ran away" in judge_chain(0, steady + 0.4 * draws, 1.0, limit=5).reason
    broken = np.where(draws < 30, steady, np.nan)
    assert "non-finite loss at draw 30" in judge_chain(0, broken, 1.0, limit=5).reason


# name: (chains, draws, autoregression, drift over the whole trace, rounded to whole numbers: ties; and by ArviZ 0.22.0
# float(arviz.rhat(x, method="rank")), float(arviz.ess(x, method="bulk")))
RECIPES = {
    "independent": (4, 100, 0.0, 0.0, False, 1.0016925691266099, 419.15009946376364),
    "odd": (3, 51, 0.5, 0.0, False, 1.0022341233631935, 104.89066290278184),
    "slow": (4, 300, 0.95, 0.0, False, 1.1460371424863938, 19.568511565217978),
    "alternating": (2, 64, -0.7, 0.0, False, 1.0050531282291415, 269.72287611492715),
    "drifting": (4, 100, 0.3, 3.0, False, 1.2344808376442695, 12.872592086775102),
    "ties": (5, 40, 0.6, 0.0, True, 1.126285162612135, 30.087882657109645),
    "short": (2, 4, 0.0, 0.0, False, 1.338194556310251, 7.224719895935548),
}


def traces_of(name: str) -> np.ndarray:
    chains, draws, coefficient, drift, whole, *_ = RECIPES[name]
    values = np.random.default_rng(list(RECIPES).index(name)).normal(size=(chains, draws))
    for t in range(1, draws):
        values[:, t] += coefficient * values[:, t - 1]
    values += np.linspace(0, drift, draws)
    return np.round(values) if whole else values


@pytest.mark.parametrize("name", RECIPES)
def test_rhat_and_ess_are_arvizs(name: str) -> None:
    values = traces_of(name)
    found = (float(split_rhat(values)), float(effective_sample_size(values)))
    assert found == pytest.approx(RECIPES[name][5:], rel=1e-9)


def test_each_examples_trace_is_judged_alone() -> None:
    names = ("independent", "drifting")
    together = np.stack([traces_of(name) for name in names], axis=-1)
    assert split_rhat(together).tolist() == [float(split_rhat(traces_of(name))) for name in names]
    assert effective_sample_size(together).shape == (2,)
    assert math.isnan(split_rhat(together[:, :3, 0])), "three draws cannot tell"
    assert split_rhat(np.ones((2, 10))) == 1.0


# ---- in words ----
def test_chains_that_have_not_mixed_are_said_so() -> None:
    mixed, drifting = traces_of("independent"), traces_of("drifting")
    assert "mixing" not in diagnose(mixed, mixed[..., None])
    assert diagnose(mixed, drifting[..., None])["mixing"].startswith("not mixed: ")
    slow = traces_of("ties")[:2]
    assert diagnose(slow, slow[..., None])["mixing"].startswith("too few draws: ")
    few = mixed[:, :12]
    assert "mixing" not in diagnose(few, few[..., None]), "few independent draws are mixed"
    assert "mixing" not in diagnose(few[:, :3], few[:, :3, None]), "three draws cannot tell"
