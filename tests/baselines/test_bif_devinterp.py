"""Ours and devinterp's BIF are one estimator: the same step to rounding, the same matrix within Monte-Carlo error.

pip install "devinterp==2.0.1"           # or: PYTHONPATH=folder, with devinterp, xarray and zarr in it
python -m pytest tests/baselines/test_bif_devinterp.py
"""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from baselines.bif.method import BIF
from baselines.bif.sampler import SAMPLERS, Position
from baselines.bif_devinterp import INSTALL, BIFDevinterp
from baselines.method import Problem
from retrain.tasks.tinylm import TinyLM
from tests.helpers.planted import Planted
from tests.helpers.problems import problem_of

INSTALLED = all(importlib.util.find_spec(name) for name in ("devinterp", "xarray", "zarr"))
needs_devinterp = pytest.mark.skipif(not INSTALLED, reason=f"devinterp is not installed: {INSTALL}")


def test_without_devinterp_the_reason_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert 'pip install "devinterp==2.0.1"' in BIFDevinterp().skip(Planted())


def test_options_are_checked_as_bif_checks_them_and_translated() -> None:
    with pytest.raises(ValueError, match="draws is 0"):
        BIFDevinterp(draws=0)
    with pytest.raises(ValueError, match="devinterp offers: sgld, rmsprop_sgld"):
        BIFDevinterp(sampler="sghmc")
    numbers = {"step_size": 0.5, "n_beta": 50.0, "burn_in": 3, "thinning": 4, "minibatch": 60, "micro_batch": 25}
    options = BIFDevinterp(sampler="rmsprop_sgld", **numbers).sampling_options(num_train=48)
    assert options["lr"] == 0.01
    assert options["rmsprop_eps"] == 0.1 / 50
    assert options["num_burnin_steps"] == 11, "its first draw comes after one step more: after 12, as ours"
    assert (options["batch_size"], options["gradient_accumulation_steps"]) == (24, 2)


@needs_devinterp
@pytest.mark.parametrize("sampler", ["sgld", "rmsprop_sgld"])
def test_the_steps_are_the_same_to_rounding(sampler: str) -> None:
    """The same gradients and the same noise: sixty steps lead both to the same place."""
    from baselines.bif_devinterp import import_devinterp

    import_devinterp()
    from devinterp.optim import SGMCMC

    options = BIFDevinterp(sampler=sampler, step_size=0.02, n_beta=40.0, gamma=3.0).sampling_options(100)
    start, curvature = torch.randn(7), torch.linspace(0.01, 2, 7)
    theirs = torch.nn.Parameter(start.clone())
    named = {"lr": "lr", "nbeta": "n_beta", "localization": "localization"}
    named |= {"eps": "rmsprop_eps", "alpha": "rmsprop_alpha"} if sampler == "rmsprop_sgld" else {}
    optimizer = SGMCMC.get_method(sampler)([theirs], **{name: options[option] for name, option in named.items()})
    position = Position([start.clone()], [start.clone()])
    noises = [torch.Generator().manual_seed(4) for _ in range(2)]
    minibatches = [torch.Generator().manual_seed(5) for _ in range(2)]

    def gradient(at: Tensor, generator: torch.Generator) -> Tensor:
        return curvature * at + 0.3 * torch.randn(7, generator=generator)

    for _ in range(60):
        theirs.grad = gradient(theirs.detach(), minibatches[0])
        optimizer.step(noise_generator=noises[0])
        scaled = 40.0 * gradient(position.parameters[0], minibatches[1])
        SAMPLERS[sampler](position, [scaled], 3.0, 0.02, noises[1])
    assert (position.parameters[0] - start).abs().max() > 0.1
    torch.testing.assert_close(position.parameters[0], theirs.detach(), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    """A tiny GPT-NeoX, finetuned a little."""
    task = TinyLM(
        length=8, num_train=20, num_queries=1, hidden=16, layers=1, heads=2, pretraining_steps=40, batch_size=10
    )
    queries = task.train_data.select(range(6))  # some pairs are the same sequence: strong scores among weak ones
    chosen = np.arange(task.num_train)[::-1]
    return problem_of(task, tmp_path_factory.mktemp("devinterp"), queries=queries, chosen=chosen, seed=1)


@needs_devinterp
@pytest.mark.parametrize("sampler", ["sgld", "rmsprop_sgld"])
def test_tiny_gpt_neox_gives_the_same_bif(sampler: str, problem: Problem) -> None:
    step_size, n_beta = {"sgld": (6e-4, 100.0), "rmsprop_sgld": (1e-4, 5.0)}[sampler]
    chains, draws, num_train = 8, 16, len(problem.attributed_indices)
    options: dict[str, Any] = {
        "sampler": sampler, "chains": chains, "draws": draws, "burn_in": 3, "thinning": 2, "step_size": step_size,
        "n_beta": n_beta, "gamma": 1000.0, "minibatch": 20, "keep_traces": True,
    }  # fmt: skip
    answers = [method(**options).score(problem, None) for method in (BIF, BIFDevinterp)]
    means, errors = [], []
    for answer in answers:
        traces = answer.arrays["loss_traces"].double()  # (chains, draws, n + q)
        centred = traces - traces.mean((0, 1))
        products = -torch.einsum("cdq,cdn->cqn", centred[..., num_train:], centred[..., :num_train]) / draws
        pooled = products.mean(0) * (chains * draws) / (chains * draws - 1)
        torch.testing.assert_close(answer.scores.double(), pooled, rtol=1e-3, atol=1e-6)
        # The chains are independent, so their scatter is the Monte-Carlo error of the mean over them.
        means.append(products.mean(0))
        errors.append((products.var(0) / chains).sqrt())
    z = (means[0] - means[1]) / (errors[0].square() + errors[1].square()).sqrt()
    assert 0.3 < z.square().mean() < 2.0, "neither further apart than chance, nor copies of each other"
    assert (z.abs() > 4).double().mean() < 0.02
    # The correlation of the two matrices, and what it would be without the Monte-Carlo error of either.
    together = np.cov(means[0].flatten(), means[1].flatten())
    signal = [together[k, k] - float(errors[k].square().mean()) for k in range(2)]
    assert together[0, 1] / (together[0, 0] * together[1, 1]) ** 0.5 > 0.6
    assert together[0, 1] / (signal[0] * signal[1]) ** 0.5 > 0.85
    spreads = [answer.train_scale for answer in answers]
    assert abs(float((spreads[0] / spreads[1]).log().mean())) < 0.1, "the same stationary spread of the losses"


@needs_devinterp
def test_weight_restriction_scratch_and_a_chain_that_diverges(problem: Problem) -> None:
    method = BIFDevinterp(chains=1, draws=6, step_size=50.0, gamma=1.0, minibatch=20)
    with pytest.raises(FloatingPointError, match=r"0 of 1 devinterp chains are healthy.*smaller bif_devinterp"):
        method.score(problem, None)
    answer = BIFDevinterp(parameters="attention", chains=1, draws=4, minibatch=10, step_size=1e-4).score(problem, None)
    assert torch.isfinite(answer.scores).all()
    assert list(Path(problem.scratch).iterdir()) == [], "its store is gone"
    with pytest.raises(ValueError, match="no trainable parameter"):
        BIFDevinterp(parameters="nowhere").score(problem, None)
