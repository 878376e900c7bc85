"""logra and trackstar: exact layer by layer where nothing is projected, and nearer to it with wider projections."""

from pathlib import Path

import pytest
import torch
from torch import nn

from baselines.method import load_method
from baselines.support.gradients import PerExampleGradients
from retrain.errors import UsageError
from retrain.losses import CrossEntropy
from tests.baselines.test_kfac import classification, influence
from tests.helpers.problems import correlation, run


def exact(problem: object, sizes: tuple[int, ...], damping: float) -> tuple[torch.Tensor, torch.Tensor]:
    gradients = PerExampleGradients(problem.model, CrossEntropy().per_example)  # type: ignore[attr-defined]
    rows = gradients((problem.train.inputs, problem.train.targets))  # type: ignore[attr-defined]
    layers = torch.cat([torch.full((size,), k) for k, size in enumerate(sizes)])
    moment = rows.T @ rows / len(rows) * (layers[:, None] == layers)
    return influence(problem.model, CrossEntropy().per_example, moment, damping, problem)  # type: ignore[attr-defined]


def test_without_projection_it_is_each_layers_damped_influence(tmp_path: Path) -> None:
    torch.manual_seed(0)
    problem = classification(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3), tmp_path=tmp_path)
    expected, scale = exact(problem, (36, 21), 0.05)
    answer = run(load_method("logra", damping=0.05), problem)
    torch.testing.assert_close(answer.scores, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    torch.testing.assert_close(answer.train_scale, scale, rtol=1e-3, atol=1e-4)
    assert answer.diagnostics["projection"] == 57


def test_wider_projections_are_nearer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    problem = classification(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 3), tmp_path=tmp_path, num_train=200)
    expected, _ = exact(problem, (240, 123), 0.1)

    def likeness(side: int) -> float:
        found = run(load_method("logra", damping=0.1, side=side), problem).scores
        return correlation(found, expected)

    assert 0.2 < likeness(2) < likeness(12) < likeness(41)
    assert likeness(41) > 0.999


def test_what_has_no_layer_is_said(tmp_path: Path) -> None:
    problem = classification(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3), tmp_path=tmp_path)
    with pytest.raises(UsageError, match="matches no linear"):
        load_method("logra", parameters=r"^1\.").fit(problem)
    assert run(load_method("logra", parameters=r"^2\."), problem).diagnostics["layers"] == 1


def test_trackstar_is_the_same_on_gradients_in_units_of_their_size(tmp_path: Path) -> None:
    """Its metric holds the queries' second moment as well; rescaled inputs do not matter to it."""
    torch.manual_seed(0)
    problem = classification(nn.Linear(5, 3), tmp_path=tmp_path)
    rows, asked = (
        PerExampleGradients(problem.model, CrossEntropy().per_example)((e.inputs, e.targets)).double()
        for e in (problem.train, problem.queries)
    )
    units = rows.square().mean(0).rsqrt()
    rows, asked = rows * units, asked * units
    for mix in (0.0, 0.3):
        moment = (1 - mix) * rows.T @ rows / len(rows) + mix * asked.T @ asked / len(asked)
        expected = -(asked @ torch.linalg.solve(moment + 0.1 * torch.eye(18), rows.T)).float()
        found = run(load_method("trackstar", mix=mix, damping=0.1), problem).scores
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    with pytest.raises(UsageError, match="expected a share"):
        load_method("trackstar", mix=2.0)
