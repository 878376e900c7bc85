"""source: its formula in dense matrices, and the unrolled gradient descent that it tends to with many segments."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from baselines.method import Problem, load_method
from baselines.support.snapshots import snapshots
from retrain.errors import UsageError
from retrain.examples import Indices
from retrain.replays.replay import TrainingState
from retrain.tasks import load_task
from tests.helpers.planted import Planted, PlantedReplay, make_problem
from tests.helpers.problems import run

STEPS, RATE = 60, 0.01


class Descent(Planted):
    """Least squares by gradient descent on everything, which does not get to the minimum."""

    def replay(self, indices: Indices, **_: object) -> "DescentReplay":  # type: ignore[override]
        return DescentReplay(self, indices)

    def train(self, indices: Indices, **_: object) -> torch.nn.Module:
        replay = DescentReplay(self, indices)
        state = replay.start()
        for step in range(STEPS):
            state = replay.advance(state, step, torch.ones(len(indices)))
        return replay.model(state)


class DescentReplay(PlantedReplay):
    num_steps = STEPS

    def learning_rate(self, step: int) -> float:
        return RATE * (1 + step / STEPS)

    def advance(self, state: TrainingState, step: int, weights: torch.Tensor) -> TrainingState:
        inputs = torch.cat([self.data.inputs, torch.ones(self.num_examples, 1)], dim=1)
        now = torch.cat([state["parameter/weight"][0], state["parameter/bias"]])
        slope = inputs.T @ (weights * (inputs @ now - self.data.targets)) / self.num_examples
        now = now - self.learning_rate(step) * slope
        return {"parameter/weight": now[None, :-1], "parameter/bias": now[-1:]}


def rows_at(weights: dict[str, torch.Tensor], examples: object) -> torch.Tensor:
    """(examples, parameters): gradients of the losses."""
    inputs = torch.cat([examples.inputs, torch.ones(len(examples), 1)], dim=1)  # type: ignore[attr-defined]
    now = torch.cat([weights["weight"][0], weights["bias"]])
    return inputs * (inputs @ now - examples.targets)[:, None]  # type: ignore[attr-defined]


@pytest.fixture
def problem(tmp_path: Path) -> Problem:
    return make_problem(Descent(num_train=60, num_queries=9), tmp_path)  # type: ignore[arg-type]


def test_it_is_its_formula_in_dense_matrices(problem: Problem) -> None:
    inputs = torch.cat([problem.train.inputs, torch.ones(60, 1)], dim=1).double()
    curvature = inputs.T @ inputs / 60
    taken = snapshots(problem, 6, "")
    expected, squares = torch.zeros(9, 60, dtype=torch.float64), torch.zeros(60, dtype=torch.float64)
    pulled = rows_at(problem.model.state_dict(), problem.queries).double()
    for pair in (taken[4:], taken[2:4], taken[:2]):
        left = torch.linalg.matrix_exp(-sum(one.distance for one in pair) * curvature)
        own = torch.stack([rows_at(one.weights, problem.train) for one in pair]).mean(0).double()
        response = torch.linalg.solve(curvature, torch.eye(5).double() - left)
        expected -= pulled @ response @ own.T
        squares += (own @ response * own).sum(1)
        pulled = pulled @ left
    method = load_method("source", labels="exact")
    answer = run(method, problem)
    torch.testing.assert_close(answer.scores, expected.float(), rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    torch.testing.assert_close(answer.train_scale, squares.sqrt().float(), rtol=1e-3, atol=1e-4)
    kept = load(save({n: v.contiguous() for n, v in method.pack_fit(method.fit(problem)).items()}))  # type: ignore[union-attr]
    torch.testing.assert_close(method.score(problem, method.unpack_fit(problem, kept)).scores, answer.scores)


def test_many_segments_are_the_unrolled_training(problem: Problem) -> None:
    """The slope of every query's loss in every example's weight, through all steps."""
    replay = DescentReplay(problem.task, range(60))  # type: ignore[arg-type]
    weights = torch.ones(60, requires_grad=True)
    state = replay.start()
    for step in range(STEPS):
        state = replay.advance(state, step, weights)
    inputs = torch.cat([problem.queries.inputs, torch.ones(9, 1)], dim=1)
    now = torch.cat([state["parameter/weight"][0], state["parameter/bias"]])
    losses = (inputs @ now - problem.queries.targets).square() / 2
    exact = torch.stack([torch.autograd.grad(loss, weights, retain_graph=True)[0] for loss in losses]) * 60

    def error(**options: object) -> float:
        found = run(load_method("source", labels="exact", **options), problem).scores
        return float((found - exact).norm() / exact.norm())

    errors = [error(segments=number, checkpoints=number) for number in (STEPS, 6, 1)]
    assert errors[0] < 0.03
    assert errors == sorted(errors)


def test_one_endless_segment_is_influence(problem: Problem) -> None:
    endless = run(load_method("source", labels="exact", segments=1, checkpoints=1, step_scale=1e4), problem)
    kfac = run(load_method("kfac", labels="exact", damping=1e-8), problem)
    torch.testing.assert_close(endless.scores, kfac.scores, rtol=1e-3, atol=1e-3)


def test_what_it_cannot_unroll_is_said() -> None:
    assert "Adam" in str(load_method("source").skip(load_task("tinylm")))
    with pytest.raises(UsageError, match="segments is 3"):
        load_method("source", checkpoints=2)
