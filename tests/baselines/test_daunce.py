"""daunce: a quadratic loss, where each perturbed model is known in closed form, and influence in the mean of many."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baselines.daunce import Daunce
from baselines.method import load_method
from retrain.errors import UsageError
from retrain.losses import SquaredError
from retrain.outputs import output_of
from retrain.tasks import load_task
from tests.helpers.planted import Planted, make_problem
from tests.helpers.problems import run


def test_least_squares_in_closed_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H_S d = the mean of r_i g_i over the share S; scores are minus the covariance of the losses there."""
    task = Planted(num_train=60, num_queries=9)
    problem = make_problem(task, tmp_path)
    method = Daunce(models=4, step_size=0.3, steps=300, minibatch=200, objective="hessian", rho=1.0)
    losses, models, perturbed = [], {}, Daunce.perturbed
    monkeypatch.setattr(Daunce, "perturbed", lambda *given: models.setdefault(given[-1], perturbed(*given)))
    answer = run(method, problem)
    for number, model in sorted(models.items()):
        chosen, factors, _ = method.drawn(problem, number)
        assert len(chosen) == 18
        data = task.train_data.select(chosen)
        inputs = torch.cat([data.inputs, torch.ones(18, 1)], dim=1)
        residuals = (problem.model(data.inputs).squeeze(1) - data.targets).detach()
        slope = (inputs * ((factors - 1) * residuals)[:, None]).sum(0)
        moved = torch.linalg.solve(inputs.T @ inputs, slope)
        now = torch.cat([problem.model.weight[0], problem.model.bias]).detach() + moved  # type: ignore[arg-type, index]
        torch.testing.assert_close(torch.cat([model.weight[0], model.bias]), now, rtol=1e-3, atol=1e-4)  # type: ignore[index]
        everyone = torch.cat([task.query_data.inputs, task.train_data.inputs])
        targets = torch.cat([task.query_data.targets, task.train_data.targets])
        losses.append((everyone @ now[:-1] + now[-1] - targets).square() / 2)
    expected = -torch.cov(torch.stack(losses).T)[:9, 9:]
    torch.testing.assert_close(answer.scores, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))
    torch.testing.assert_close(answer.train_scale, torch.stack(losses).std(0)[9:], rtol=1e-2, atol=1e-4)


class Linear(SquaredError):
    """The output times the target, so that a change of the loss is known from its gradient."""

    def per_example(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.squeeze(1) * targets


class LinearlyPlanted(Planted):
    loss_function = Linear()


def test_linear_losses_in_closed_form(tmp_path: Path) -> None:
    """By default 2 F_S d = the mean of r_i g_i over the share S, F_S the second moment of the g_i."""
    task = LinearlyPlanted(num_train=60, num_queries=9)
    problem = make_problem(task, tmp_path)
    method = Daunce(models=2, step_size=0.1, steps=900, minibatch=200)
    for number in range(2):
        chosen, factors, _ = method.drawn(problem, number)
        gradients = torch.cat([task.train_data.inputs[chosen], torch.ones(18, 1)], dim=1)
        gradients = gradients * task.train_data.targets[chosen, None]
        moved = torch.linalg.solve(2 * gradients.T @ gradients, gradients.T @ (factors - 1))
        before = torch.cat([problem.model.weight[0], problem.model.bias])  # type: ignore[arg-type, index]
        model = method.perturbed(problem, number)
        after = torch.cat([model.weight[0], model.bias])  # type: ignore[index]
        torch.testing.assert_close(after - before.detach(), moved, rtol=1e-3, atol=1e-4)


def test_a_single_step_goes_along_the_perturbed_gradient(tmp_path: Path) -> None:
    """Both objectives' first slope is minus the mean of r_i g_i: then scores are -g_query^T F g_train."""
    problem = make_problem(Planted(num_train=60, num_queries=9), tmp_path)
    one, other = (
        Daunce(models=2, steps=1, minibatch=200, objective=objective).perturbed(problem, 0)
        for objective in ("fisher", "hessian")
    )
    torch.testing.assert_close(one.weight, other.weight)
    assert not torch.equal(one.weight, problem.model.weight)  # type: ignore[arg-type]


def test_outputs_are_the_models_own_and_divergence_is_said(tmp_path: Path) -> None:
    digits = load_task("digits", num_train=40, epochs=1)
    problem = replace(
        make_problem(Planted(), tmp_path), task=digits, train=digits.train_data,
        queries=digits.query_data.select(range(5)),
        model=digits.train_base(init_seed=0, order_seed=0, device=torch.device("cpu")),
    )  # fmt: skip
    problem = replace(problem, attributed_indices=problem.attributed_indices[:40])
    method = Daunce(models=4, minibatch=16, steps=1)
    (losses, margins) = (
        method.score_part(replace(problem, output=output), None, 0)["losses"] for output in ("loss", "margin")
    )
    torch.testing.assert_close(margins[:, :5], output_of(losses[:, :5], "margin"))
    torch.testing.assert_close(margins[:, 5:], losses[:, 5:])
    with pytest.raises(FloatingPointError, match="smaller step_size"):
        run(Daunce(models=2, step_size=1e30, steps=20, rho=1.0), problem)
    with pytest.raises(UsageError, match="objective is"):
        load_method("daunce", objective="loss")
    with pytest.raises(UsageError, match="models is 1"):
        load_method("daunce", models=1)
