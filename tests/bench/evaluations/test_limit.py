"""BIF approaches the damped influence function as the theory says, and the record of it says how it was measured."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.evaluations import limit
from bench.evaluations.__main__ import main
from bench.evaluations.limit import DAMPING, LogisticCopies, distances, relative_distance
from retrain.errors import UsageError


def test_what_n_beta_leaves_shrinks_like_its_inverse_and_separable_classes_have_no_minimum() -> None:
    task = LogisticCopies(copies=1)
    expected = task.damped_influence(DAMPING)
    apart = [relative_distance(n * task.exact_bif(n, DAMPING), expected) for n in (200.0, 2000.0)]
    assert 8 < apart[0] / apart[1] < 12
    assert apart[1] < 0.003
    with pytest.raises(UsageError, match="can be separated"):
        _ = LogisticCopies(num_train=3, copies=1).minimum


def test_the_damped_influence_function_is_a_refit_of_the_weights() -> None:
    """Its definition: the query's loss, when an example's weight in the damped mean loss grows a little."""
    task = LogisticCopies(copies=1)
    centre = task.minimum
    small = 1e-5

    def losses_after(example: int) -> torch.Tensor:
        def objective(weights: torch.Tensor) -> torch.Tensor:
            losses = task.losses_at(weights)
            damped = losses[: task.num_train].mean() + DAMPING / 2 * (weights - centre).square().sum()
            return damped + small * losses[example]

        weights, gradient, hessian = centre.clone(), torch.func.grad(objective), torch.func.hessian(objective)
        for _ in range(4):
            weights = weights - torch.linalg.solve(hessian(weights), gradient(weights))
        return task.losses_at(weights)[task.num_train :]

    before = task.losses_at(centre)[task.num_train :]
    refitted = torch.stack([(losses_after(i) - before) / small for i in range(4)], 1)
    assert relative_distance(refitted, task.damped_influence(DAMPING)[:, :4]) < 1e-3


def test_a_gaussian_posterior_has_the_slope_of_the_draws() -> None:
    """Draws of the Laplace posterior itself stand for a chain: the distance must fall like one over their root."""
    task, n_beta = LogisticCopies(copies=512), 1e5
    generator = torch.Generator().manual_seed(1)
    precision = n_beta * (task.hessian() + DAMPING * torch.eye(3, dtype=torch.float64))
    root = torch.linalg.cholesky(torch.linalg.inv(precision))
    noise = torch.randn(task.copies, 16, 3, generator=generator, dtype=torch.float64)
    found = distances(task, task.losses_at(task.minimum + noise @ root.T), n_beta)
    assert list(found) == [128, 256, 512, 1024, 2048, 4096, 8192]
    slope = np.polyfit(np.log(list(found)), np.log(list(found.values())), 1)[0]
    assert abs(slope + 0.5) < 0.1


def test_the_command_writes_its_record_and_goes_on_from_the_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit, "COPIES", 16)
    monkeypatch.setattr(limit, "N_BETAS", (30.0, 100.0))
    words = ["limit", "--draws", "4", "--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    assert main(words) == 0
    first = json.loads((tmp_path / "out" / "limit.json").read_text())
    assert "slope in draws" in capsys.readouterr().out
    monkeypatch.setattr(limit, "sampled_losses", None)
    assert main(words) == 0
    second = json.loads((tmp_path / "out" / "limit.json").read_text())
    assert first["run_id"] == second["run_id"]
    assert {one["n_beta"] for one in first["sampled"]} == {30.0, 100.0}
    assert first["config"]["seeds"] == [1]
    assert all(first[name] for name in ("command", "versions", "code", "device", "machine"))
