"""shampoo: its sides are the gradients' own second moments, and it is exact where these decide the Fisher."""

from pathlib import Path

import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

from baselines.method import load_method
from baselines.support.pieces import Outer, Piece, Scattered, Whole
from retrain.losses import CrossEntropy, SquaredError
from tests.baselines.test_kfac import classification, dense_fisher, influence
from tests.baselines.test_methods import make_problem, run
from tests.helpers.planted import Planted


@pytest.mark.parametrize(
    "piece",
    [
        Outer(torch.randn(6, 2, 5), torch.randn(6, 2, 7)),  # few positions: by their inner products
        Outer(torch.randn(6, 9, 5), torch.randn(6, 9, 7)),  # many: by the gradients themselves
        Outer(torch.randn(6, 1, 5), torch.randn(6, 1, 7)).with_bias(),
        Scattered(torch.randn(6, 9, 5), torch.randint(0, 4, (6, 9)), rows=4),
        Whole(torch.randn(6, 5, 7)),
    ],
    ids=["few positions", "many positions", "bias", "embedding", "whole"],
)
def test_sides_are_the_second_moments_of_the_gradients(piece: Piece) -> None:
    gradients = piece.matrices()
    left, right = piece.gradient_moments()
    if not isinstance(piece, Scattered):  # whose rows keep their own axes
        assert left is not None
        torch.testing.assert_close(left, torch.einsum("bij,bkj->ik", gradients, gradients), rtol=1e-4, atol=1e-4)
    assert right is not None
    torch.testing.assert_close(right, torch.einsum("bij,bik->jk", gradients, gradients), rtol=1e-4, atol=1e-4)


def test_linear_regression_is_exact(tmp_path: Path) -> None:
    """One output: G^T G sums to the Fisher itself."""
    task = Planted(num_train=60, num_queries=7)
    problem = make_problem(task, tmp_path)
    inputs = torch.cat([task.train_data.inputs, torch.ones(60, 1)], dim=1)
    expected, scale = influence(problem.model, SquaredError().per_example, inputs.T @ inputs / 60, 0.3, problem)
    answer = run(load_method("shampoo", damping=0.3, labels="exact"), problem)
    torch.testing.assert_close(answer.scores, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    torch.testing.assert_close(answer.train_scale, scale, rtol=1e-3, atol=1e-5)


class Copied(nn.Module):
    """One linear layer at two positions of each example, which read multiples of one input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4, bias=False)
        self.out = nn.Linear(4, 3, bias=False).requires_grad_(False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(self.linear(inputs[:, None] * torch.tensor([[1.0], [0.5]])).sum(1))


def test_positions_that_agree_are_counted_as_one_gradient(tmp_path: Path) -> None:
    """Without weights every class is as likely for every input; both positions' gradients add up in each example."""
    problem = classification(nn.Linear(5, 4, bias=False), Copied(), tmp_path=tmp_path)
    problem.model[0].requires_grad_(False)  # type: ignore[index]
    fisher = dense_fisher(problem.model, problem.train.inputs)
    expected, scale = influence(problem.model, CrossEntropy().per_example, fisher, 1e-2, problem)
    answer = run(load_method("shampoo", damping=1e-2, labels="exact"), problem)
    torch.testing.assert_close(answer.scores, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    torch.testing.assert_close(answer.train_scale, scale, rtol=1e-3, atol=1e-4)


def test_it_is_near_kfac_and_not_kfac_on_a_network(tmp_path: Path) -> None:
    torch.manual_seed(0)
    problem = classification(nn.Linear(5, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3), tmp_path=tmp_path)
    ours, kfac = (run(load_method(name, labels="exact"), problem).scores for name in ("shampoo", "kfac"))
    assert spearmanr(ours.flatten(), kfac.flatten()).statistic > 0.9
    assert not torch.allclose(ours, kfac, rtol=1e-3)
