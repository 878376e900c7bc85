"""Replayed trainings: the tasks' own steps at weights of one, batches without the struck out at weights of zero."""

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from retrain.backends import without_onednn
from retrain.examples import Examples
from retrain.replays import replay_of, why_not_replayed
from retrain.replays.replay import FirstMaximum, WeightedBatchNorm2d, run_replay, steps_of
from retrain.tasks import load_task
from retrain.tasks.cifar10 import Cifar10
from retrain.units import Plan, retrain_unit, retrain_units
from tests.helpers.made_up import small_options
from tests.helpers.problems import CPU, refused

SEEDS = {"init_seed": 1, "order_seed": 5, "device": CPU}


@pytest.fixture(scope="module")
def cifar10_options(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("cifar10")
    return {**small_options("cifar10", folder, folder), "protocol": "scratch", "learning_rate": 1.0}


def noise_digits(num_train: int, **options) -> object:
    """The digits task on images of noise: no two pixels are equal, so rounding decides no maximum."""
    task = load_task("digits", num_train=num_train, learning_rate=0.05, **options)
    noise = torch.randn(num_train, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    task.__dict__["train_data"] = Examples(noise, task.train_data.targets)
    return task


def assert_same_model(found: nn.Module, expected: nn.Module, tolerance: float) -> None:
    for (name, one), other in zip(found.state_dict().items(), expected.state_dict().values(), strict=True):
        if one.is_floating_point():
            scale = float(other.abs().max()) + 1e-6
            assert float((one - other).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("name", ["digits", "tinylm", "cifar10", "cifar10 with lookahead"])
def test_at_weights_of_one_it_is_the_training(name: str, cifar10_options: dict) -> None:
    if name == "digits":
        task: Any = noise_digits(70, epochs=2)
    elif name == "tinylm":
        task = load_task("tinylm", num_train=20, num_queries=4, length=8, hidden=8, layers=1, pretraining_steps=4)
    else:
        task = Cifar10(**cifar10_options, lookahead_from=int(name != "cifar10"))
    indices = np.arange(3, len(task.train_data))
    replay = replay_of(task, indices, **SEEDS)
    with without_onednn() if name == "digits" else contextlib.nullcontext():
        found = replay.model(run_replay(replay))
    assert_same_model(found, task.train(indices, **SEEDS), 2e-3)


def test_a_replay_does_not_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's shortcuts are off in every step, and as they were between steps."""
    replay = replay_of(noise_digits(20, epochs=1), np.arange(20), **SEEDS)
    seen, advance = [], replay.advance

    def watched(*words: object) -> object:
        seen.append((torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic))
        return advance(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(replay, "advance", watched)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    for _ in steps_of(replay):
        assert (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic) == (True, False)
    assert seen
    assert set(seen) == {(False, True)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_replay_on_a_gpu_is_the_same_again(cifar10_options: dict) -> None:
    task = Cifar10(**cifar10_options)
    seeds = {**SEEDS, "device": torch.device("cuda")}
    first, again = (run_replay(replay_of(task, np.arange(40), **seeds)) for _ in range(2))
    assert all(torch.equal(value, again[name]) for name, value in first.items())


def test_an_example_of_weight_zero_is_struck_out_of_its_batch() -> None:
    """Its own label and pixels no longer matter, and a step is that of a batch without it."""
    task = noise_digits(30, epochs=1)
    indices = np.arange(30)
    weights = torch.ones(30)
    weights[[4, 17]] = 0
    replay = replay_of(task, indices, **SEEDS)
    found = run_replay(replay, weights)

    model = task.build_model(1).train()
    kept = torch.tensor([k for k in range(30) if k not in (4, 17)])
    data = task.train_data
    loss = F.cross_entropy(model(data.inputs[kept]), data.targets[kept], label_smoothing=task.label_smoothing)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    for (name, parameter), gradient in zip(parameters.items(), gradients):
        step = (1 + task.momentum) * (gradient + task.weight_decay * parameter)
        expected = parameter.detach() - replay.learning_rate(0) * step
        torch.testing.assert_close(found[f"parameter/{name}"], expected, rtol=1e-3, atol=1e-4)
    for name, value in model.named_buffers():
        if name.endswith(("mean", "var")):
            torch.testing.assert_close(found[f"statistic/{name}"], value, rtol=1e-4, atol=1e-5)
    unmoved = run_replay(replay, torch.zeros(30))
    assert all(torch.equal(unmoved[name], value) for name, value in replay.start().items()), "nothing is left: no step"


def test_normalisation_is_torchs_own_at_weights_of_one_and_pooling_splits_no_gradient() -> None:
    torch.manual_seed(0)
    own = nn.BatchNorm2d(3, momentum=0.4)
    inputs = torch.randn(6, 3, 4, 5)
    ours = WeightedBatchNorm2d(nn.BatchNorm2d(3, momentum=0.4))
    ours.weights = torch.ones(6)
    torch.testing.assert_close(ours(inputs), own(inputs))
    for name, value in ours.collected.items():
        torch.testing.assert_close(value, getattr(own, name))
    ours.eval(), own.eval()
    ours.running_mean, ours.running_var = own.running_mean, own.running_var
    torch.testing.assert_close(ours(inputs), own(inputs))
    # Of equal maxima the first gets the gradient.
    inputs = torch.randn(2, 3, 7, 7)
    torch.testing.assert_close(FirstMaximum(nn.MaxPool2d(2))(inputs), nn.MaxPool2d(2)(inputs), rtol=1e-3, atol=1e-3)
    for bump in (0.0, 1e-7, -1e-7):
        flat = torch.ones(1, 1, 2, 2)
        flat[0, 0, 1, 1] += bump
        flat.requires_grad_()
        (gradient,) = torch.autograd.grad(FirstMaximum(nn.MaxPool2d(2))(flat).sum(), flat)
        assert gradient.flatten().tolist() == [1, 0, 0, 0]


def test_a_plan_of_replays_has_no_replicates_and_a_key_of_its_own(cifar10_options: dict) -> None:
    task = load_task("digits")
    plan = Plan(alpha=0.9, alpha_attribution=1.0, seed=1, replicates=3, num_subsets=5, initialisation="replayed")
    assert plan.replicates == 1
    assert len(retrain_units(task, plan, "cpu")) == 5
    assert retrain_unit(task, plan, 0, 0, "cpu").config["replay"]
    usual = Plan(alpha=0.9, alpha_attribution=1.0, seed=1)
    assert "replay" not in retrain_unit(task, usual, 0, 0, "cpu").config, "as before there were any"
    cannot = Cifar10(**{**cifar10_options, "protocol": "paper"})
    assert why_not_replayed(cannot)
    refused(lambda: replay_of(cannot, np.arange(5), **SEEDS), "take scratch")
    refused(lambda: retrain_units(cannot, plan, "cpu"), "--initialisation replayed")
