"""BIF samples what it says: known posteriors, known covariances, and chains judged before they are believed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from baselines.bif.collect import JoinedSums, JoinedTraces, RunningSums, Traces
from baselines.bif.covariance import covariance
from baselines.bif.engine import Chain, Workbench
from baselines.bif.method import BIF
from baselines.bif.sampler import SAMPLERS, Position
from tests.helpers.planted import Planted, make_problem
from tests.helpers.problems import correlation

NUMBERS: dict = {"draws": 100, "step_size": 1e-5, "n_beta": 200.0, "gamma": 1e4}  # nothing left to a pilot
SMALL = Planted(num_train=50, num_queries=5)


def test_chains_are_independent_and_individually_reproducible(tmp_path: Path) -> None:
    problem = make_problem(SMALL, tmp_path)
    method = BIF(chains=4, draws=200, minibatch=10, n_beta=50.0, gamma=1.0, step_size=0.005)

    def chain(number: int, of: int) -> torch.Tensor:
        workbench = Workbench(replace(method, chains=of), SMALL, problem.model, problem.train, problem.queries)
        return torch.stack([losses.clone() for losses in workbench.draws(3, number)])

    assert torch.equal(chain(2, of=4), chain(2, of=3)), "a chain does not depend on how many there are"
    one, two = chain(0, 4)[20:, 0], chain(1, 4)[20:, 0]
    assert abs(correlation(one, two)) < 0.5


def test_only_the_named_parameters_move(tmp_path: Path) -> None:
    problem = make_problem(SMALL, tmp_path)
    scores = BIF(parameters="bias", draws=50, gamma=10.0, step_size=0.01, n_beta=50.0).score(problem, None).scores
    # With the bias alone, losses move together up to their residuals: the score matrix has rank one (to first order).
    singular = torch.linalg.svdvals(scores)
    assert singular[1] < 0.3 * singular[0]
    with pytest.raises(ValueError, match="no trainable parameter"):
        BIF(parameters="nowhere", **NUMBERS).score(problem, None)


@pytest.mark.parametrize("centring", ["pooled", "chain"])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("among_training", [False, True])
def test_chains_are_collected_and_joined_as_one_sample(among_training: bool, streaming: bool, centring: str) -> None:
    """With `among_training` the training examples' covariances come from the same draws."""
    generator = torch.Generator().manual_seed(0)
    losses = torch.randn(3, 100, 18, generator=generator) + 3 * torch.randn(3, 1, 18, generator=generator) + 5
    cpu = torch.device("cpu")
    joined = (JoinedSums if streaming else JoinedTraces)(11, 7, centring, cpu, among_training)  # type: ignore[arg-type]
    for chain in range(3):
        collector: Traces | RunningSums = Traces(100, 11, 7, cpu)
        if streaming:
            start = torch.full((18,), 5.0)
            collector = RunningSums(100, 11, 7, cpu, checkpoint=start, train_covariance=among_training)
        for draw in range(100):
            collector.add(losses[chain, draw])
        np.testing.assert_allclose(collector.mean_losses(), losses[chain, :, :11].mean(1).numpy(), rtol=1e-5)
        joined.add(collector.part(), 100)
        if among_training:
            continue
        cross, variances = joined.of_last_chain()
        alone = covariance(losses[chain : chain + 1, :, 11:], losses[chain : chain + 1, :, :11], "chain")
        torch.testing.assert_close(cross, alone[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(variances, alone[2].square(), rtol=1e-4, atol=1e-5)
        joined.forget_last()
    assert torch.equal(joined.diagnosed(), losses)
    rows = losses if among_training else losses[..., 11:]
    expected = covariance(rows, losses[..., :11], centring)  # type: ignore[arg-type]
    for got, want in list(zip(joined.covariance(), expected, strict=True))[: 2 if among_training else 3]:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_streaming_is_chosen_when_smaller_and_neither_it_nor_more_covariances_change_a_score(tmp_path: Path) -> None:
    problem = make_problem(Planted(num_train=20, num_queries=3), tmp_path)
    options: dict = {"chains": 2, "draws": 150, "gamma": 1.0, "step_size": 0.005, "n_beta": 50.0}
    ways: list[dict] = [{}, {"keep_traces": True}, {"train_covariance": True}]
    streamed, kept, more = (BIF(**options, **way).score(problem, None) for way in ways)
    torch.testing.assert_close(more.scores, streamed.scores, rtol=1e-5, atol=1e-7)
    among = more.arrays["train_covariance"]
    torch.testing.assert_close(among, among.T, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(among.diagonal().sqrt(), more.train_scale, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="no train_covariance"):
        BIF(train_covariance=True, control_variate=True)
    assert streamed.diagnostics.pop("streaming")
    assert not kept.diagnostics.pop("streaming")
    assert streamed.diagnostics.pop("planned_bytes") < kept.diagnostics.pop("planned_bytes")
    assert streamed.diagnostics == kept.diagnostics
    assert kept.arrays["loss_traces"].shape == (2, 150, 23)
    torch.testing.assert_close(streamed.scores, kept.scores, rtol=1e-3, atol=1e-6)


def test_large_models_move_each_parameter_within_the_backward_pass(tmp_path: Path, monkeypatch) -> None:
    """The same sampler, so the same distribution; the order in which noise is drawn differs."""
    problem = make_problem(SMALL, tmp_path)
    method = BIF(draws=800, chains=2, gamma=5.0, step_size=0.02, n_beta=50.0)
    usual = method.score(problem, None)
    monkeypatch.setattr("baselines.bif.engine.STEP_IN_BACKWARD_BYTES", 0)
    moved = method.score(problem, None)
    assert not torch.equal(usual.scores, moved.scores)
    assert correlation(usual.scores, moved.scores) > 0.95
    half = replace(method, displacement="bfloat16").score(problem, None)
    assert correlation(usual.scores, half.scores) > 0.95


def test_differences_from_the_checkpoint_take_its_slope_away(tmp_path: Path) -> None:
    """At a checkpoint that is no minimum, plain gradients drift off and differences stay; at a minimum both agree."""
    problem = make_problem(SMALL, tmp_path)
    with torch.no_grad():
        for parameter in problem.model.parameters():
            parameter.add_(1.0)
    method = BIF(chains=2, draws=400, burn_in=50, minibatch=10, gamma=5.0, step_size=0.01, n_beta=50.0)
    start = float(SMALL.losses(problem.model, problem.attributed, problem.device).mean())
    plain, difference = (
        float(replace(method, gradient=gradient).score(problem, None).arrays["mean_loss_trace"].mean())
        for gradient in ("minibatch", "difference")
    )
    assert plain < 0.8 * start < start < difference


@pytest.mark.parametrize("centring", ["pooled", "chain"])
def test_the_shadows_variance_is_known(centring: str) -> None:
    """kappa against many simulated shadows, burn-in, thinning and few draws included."""
    numbers = {"chains": 3, "draws": 7, "burn_in": 1, "thinning": 2, "step_size": 0.1, "gamma": 8.0}
    method = BIF(control_variate=True, centring=centring, **numbers)
    position = Position([torch.zeros(200_000)], [torch.zeros(200_000)])
    position.shadow = Position([torch.zeros(200_000)], [torch.zeros(200_000)])
    generator = torch.Generator().manual_seed(0)
    draws = []
    for _ in range(method.chains):
        position.reset()
        for draw in range(method.burn_in + method.draws):
            if draw >= method.burn_in:
                draws.append(position.shadow.parameters[0].clone())
            for _ in range(method.thinning):
                SAMPLERS["sgld"](position, [torch.ones(200_000)], method.gamma, method.step_size, generator)
    traces = torch.stack(draws).view(method.chains, method.draws, -1)
    measured = covariance(traces, traces[..., :1], centring)[1].square().mean()  # type: ignore[arg-type]
    assert method.prior_variance(method.chains) == pytest.approx(float(measured), rel=0.01)


@pytest.mark.parametrize("centring", ["pooled", "chain"])
@pytest.mark.parametrize(("step_size", "burn_in", "thinning"), [(0.1, 0, 1), (0.4, 3, 2), (1e-6, 5, 1), (0.25, 0, 3)])
def test_the_shadows_variance_needs_no_matrix_of_draws(centring, step_size, burn_in, thinning) -> None:
    """The same as the sum over every pair of draws; a steps' product from 2 on makes the autoregression alternate."""
    chain = {"burn_in": burn_in, "thinning": thinning, "step_size": step_size, "gamma": 8.0}
    method = BIF(control_variate=True, centring=centring, chains=3, draws=50, **chain)
    a = 1 - step_size * method.gamma / 2
    steps = thinning * (burn_in + np.arange(50))
    variance = step_size * (1 - np.power(a, 2.0 * steps)) / (1 - a * a)
    earlier = np.minimum.outer(np.arange(50), np.arange(50))
    covariances = np.power(a, np.abs(np.subtract.outer(steps, steps)).astype(int)) * variance[earlier]
    taken = covariances.mean() / (3 if centring == "pooled" else 1)
    expected = 150 * (variance.mean() - taken) / (150 - (1 if centring == "pooled" else 3))
    assert method.prior_variance(3) == pytest.approx(expected, rel=1e-9)
    long = BIF(control_variate=True, chains=3, draws=200_000, step_size=0.1, gamma=8.0)  # 960 GB by pairs
    assert long.prior_variance(3) == pytest.approx(0.1 / (1 - 0.6**2), rel=1e-3)


def test_the_control_variate_is_far_closer_with_few_draws(tmp_path: Path) -> None:
    """Against the exact linear part, where the prior decides; plain BIF of as many draws is a noisy projection."""
    task = Planted(num_train=60, num_queries=10, dimension=3)
    method = BIF(chains=2, draws=50, burn_in=20, minibatch=60, step_size=1e-4, gamma=1e4, n_beta=500.0)
    problem = make_problem(task, tmp_path)
    residual = lambda x, y: (problem.model(x)[:, 0] - y).detach().double()  # noqa: E731
    ones = lambda x: torch.cat([x, torch.ones(len(x), 1)], 1).double()  # noqa: E731
    train, query = ones(task.train_data.inputs), ones(task.query_data.inputs)
    hessian = train.T @ train * (500.0 / len(train)) + 1e4 * torch.eye(train.shape[1])
    gradients = residual(task.train_data.inputs, task.train_data.targets)[:, None] * train
    query_gradients = residual(task.query_data.inputs, task.query_data.targets)[:, None] * query
    exact = -(query_gradients @ torch.linalg.inv(hessian) @ gradients.T)
    with_it, without = (
        correlation(replace(method, control_variate=chosen).score(problem, None).scores.double(), exact)
        for chosen in (True, False)
    )
    assert with_it > 0.999 > without
    with pytest.raises(ValueError, match="takes the sgld sampler"):
        BIF(control_variate=True, sampler="sghmc")


def test_pooled_covariance_is_numpys() -> None:
    query, train = torch.randn(2, 30, 4), torch.randn(2, 30, 6)
    joint = np.cov(torch.cat([query, train], -1).flatten(0, 1).numpy(), rowvar=False)
    np.testing.assert_allclose(covariance(query, train, "pooled")[0].numpy(), joint[:4, 4:], atol=1e-5)


def test_query_normalised_and_train_normalised_scores_are_correlations(tmp_path: Path) -> None:
    method = BIF(draws=60, gamma=1.0, step_size=0.005, n_beta=50.0, query_normalised=True)
    correlations = method.score(make_problem(SMALL, tmp_path), None).normalised()
    assert 0.5 < correlations.abs().max() <= 1 + 1e-4


# ---- chains that run away ----
@pytest.mark.parametrize(("gamma", "hint"), [(0.1, "smaller bif.step_size"), (1.0, r"1 / gamma = 1 or less")])
def test_a_diverging_sampler_fails_with_its_reason(tmp_path: Path, gamma: float, hint: str) -> None:
    """Whether it is the loss or the prior that throws it out."""
    method = BIF(draws=60, chains=2, step_size=10.0, gamma=gamma, n_beta=50.0)
    with pytest.raises(FloatingPointError, match=rf"0 of 2 bif chains are healthy.*{hint}"):
        method.score(make_problem(Planted(), tmp_path), None)


def test_a_diverged_chain_is_dropped_and_named_and_too_little_memory_said_at_once(tmp_path, monkeypatch) -> None:
    start, healthy = Chain.__init__, Chain.draws

    def numbered(self, workbench, seed, number):  # type: ignore[no-untyped-def]
        self.number = number
        start(self, workbench, seed, number)

    def broken(self, ticks):  # type: ignore[no-untyped-def]
        for losses in healthy(self, ticks):
            yield losses * torch.nan if self.number == 1 else losses

    monkeypatch.setattr(Chain, "__init__", numbered)
    monkeypatch.setattr(Chain, "draws", broken)
    method = BIF(chains=3, draws=30, step_size=0.004, gamma=1.0, n_beta=50.0)
    attribution = method.score(make_problem(Planted(), tmp_path), None)
    assert torch.isfinite(attribution.scores).all()
    assert attribution.diagnostics["dropped_chains"] == ["chain 1: non-finite loss at draw 0"]
    assert attribution.diagnostics["num_draws"] == 60
    monkeypatch.setattr("baselines.bif.method.free_bytes", lambda _: 1000)
    with pytest.raises(ValueError, match="GiB are free; take fewer queries"):
        BIF(**NUMBERS).score(make_problem(Planted(), tmp_path), None)


@pytest.mark.parametrize(("control_variate", "expected"), [(False, 1), (True, 2)])
def test_a_chain_has_one_collector_and_takes_no_step_in_vain(tmp_path, monkeypatch, control_variate, expected) -> None:
    """Memory is planned for what is kept, and the chain ends at its last draw."""
    made, steps = [], []

    class Counted(Traces):
        def __init__(self, *arguments):  # type: ignore[no-untyped-def]
            made.append(self)
            super().__init__(*arguments)

    step = Workbench.step
    monkeypatch.setattr("baselines.bif.parts.Traces", Counted)
    monkeypatch.setattr(Workbench, "step", lambda self, *given: (steps.append(1), step(self, *given)))
    options = {"chains": 2, "draws": 4, "burn_in": 1, "thinning": 3, "step_size": 1e-4, "gamma": 1e4, "n_beta": 200.0}
    problem = make_problem(Planted(num_train=50, num_queries=20), tmp_path)
    BIF(**options, control_variate=control_variate).score(problem, None)
    assert len(made) == 2 * expected
    assert len(steps) == 2 * 3 * (1 + 4 - 1)
