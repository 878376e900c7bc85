"""A chain's step as one CUDA graph gives the bits of the same step launched kernel by kernel."""

import gc
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from baselines.bif.engine import Chain, Workbench
from baselines.bif.method import BIF
from baselines.bif.transfer import PIECE_BYTES, on_device, to_device, to_host
from retrain.examples import Batch, Examples
from tests.baselines.test_methods import make_problem
from tests.helpers.planted import Planted

METHOD = BIF(chains=2, draws=20, minibatch=10, n_beta=50.0, gamma=1.0, step_size=0.005)
WAYS = [
    {},
    {"sampler": "rmsprop_sgld", "burn_in": 3},
    {"sampler": "sghmc", "thinning": 2},
    {"control_variate": True},
    {"gradient": "difference"},
    {"minibatch": 1000},  # all of the training set: nothing is drawn
    {"displacement": "bfloat16"},
]


@dataclass(frozen=True, kw_only=True)
class Reading(Planted):
    """Its loss looks at a number on the host, which no capture can."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        losses = super().loss(model, batch)
        return losses * (1.0 if float(losses.detach().sum()) >= 0 else 2.0)


def workbench(method: BIF, task: Planted, device: str, folder: Path) -> Workbench:
    problem = make_problem(task, folder)
    model = problem.model.to(device)
    return Workbench(method, task, model, problem.train.to(device), problem.queries.to(device))


def losses_of(bench: Workbench, number: int) -> Tensor:
    return torch.stack([losses.clone() for losses in bench.draws(3, number)])


@pytest.mark.parametrize("way", WAYS)
def test_a_chain_is_the_same_after_another_on_one_workbench(way: dict, tmp_path: Path) -> None:
    method, task = replace(METHOD, **way), Planted(num_train=50, num_queries=5)
    used = workbench(method, task, "cpu", tmp_path)
    losses_of(used, 0)
    assert torch.equal(losses_of(used, 1), losses_of(workbench(method, task, "cpu", tmp_path), 1))


@pytest.mark.cuda
@pytest.mark.parametrize("way", WAYS)
def test_a_captured_step_gives_the_bits_of_a_plain_one(
    way: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, task = replace(METHOD, **way), Planted(num_train=50, num_queries=5)
    captured = workbench(method, task, "cuda", tmp_path)
    assert captured._whole_step.has_graph
    start = captured.losses().clone()
    monkeypatch.setattr("baselines.bif.passes._capture", lambda *_: None)
    plain = workbench(method, task, "cuda", tmp_path)
    assert torch.equal(start, plain.losses()), "capturing leaves the chain at the checkpoint"
    for number in (0, 1):
        assert torch.equal(losses_of(captured, number), losses_of(plain, number))


@pytest.mark.cuda
@pytest.mark.parametrize("way", WAYS)
def test_a_captured_chain_goes_on_from_where_it_was_saved(way: dict, tmp_path: Path) -> None:
    method, task = replace(METHOD, **way), Planted(num_train=50, num_queries=5)
    bench = workbench(method, task, "cuda", tmp_path)
    whole = losses_of(bench, 1)
    chain = Chain(bench, 3, 1)
    for _ in zip(range(8), chain.draws(), strict=False):
        pass
    state = {name: value.clone() for name, value in chain.state().items()}
    for number in (0, 1):  # what else happens on the workbench meanwhile does not matter
        losses_of(bench, number)
    again = Chain(bench, 3, 1)
    again.restore(state, 8)
    rest = torch.stack([losses.clone() for losses in again.draws() if losses is not None])
    assert torch.equal(rest, whole[-len(rest) :])


@pytest.mark.cuda
def test_a_captured_workbench_is_freed_when_nobody_holds_it(tmp_path: Path) -> None:
    """Gigabytes of examples would wait for the next garbage collection."""
    bench = workbench(METHOD, Planted(num_train=50, num_queries=5), "cuda", tmp_path)
    seen = [weakref.ref(bench), weakref.ref(bench.losses), weakref.ref(bench.gradient)]
    gc.disable()
    try:
        del bench
        assert [one() for one in seen] == [None, None, None]
    finally:
        gc.enable()


@pytest.mark.cuda
def test_what_cannot_be_captured_runs_without_a_graph(tmp_path: Path) -> None:
    task = Reading(num_train=50, num_queries=5)
    bench = workbench(METHOD, task, "cuda", tmp_path)
    assert not bench._whole_step.has_graph
    expected = losses_of(workbench(METHOD, Planted(num_train=50, num_queries=5), "cuda", tmp_path), 1)
    torch.testing.assert_close(losses_of(bench, 1), expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("rows", [3, PIECE_BYTES // 1000, PIECE_BYTES // 1000 + 1, PIECE_BYTES // 300 + 7])
def test_copies_in_pieces_are_copies(device: str, rows: int) -> None:
    given = torch.randn(rows, 250, dtype=torch.float64, device=device)
    for tensor in (given, given.T, given.float()):
        assert torch.equal(to_host(tensor), tensor.cpu())
        there = to_device(tensor.cpu(), torch.device(device))
        assert there.device == given.device
        assert torch.equal(there, tensor)
    examples = Examples({"ids": given.cpu(), "mask": given.cpu() > 0}, torch.arange(rows))
    moved = on_device(examples, torch.device(device))
    assert torch.equal(moved.inputs["ids"], given)
    assert moved.targets.device == given.device
