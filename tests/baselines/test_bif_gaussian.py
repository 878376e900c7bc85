"""bif_gaussian: a quadratic loss in closed form, a logistic regression's kfac, and resuming."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baselines.method import AnswerError, checked_answer, load_method
from retrain.logistic import LogisticDigits
from retrain.tasks import load_task
from tests.helpers.planted import Planted, make_problem
from tests.helpers.problems import correlation, problem_of, run


def test_a_quadratic_loss_in_closed_form(tmp_path: Path) -> None:
    """Losses (r + x d)^2 / 2 with d ~ N(0, S): their covariance is r r' x S x' (odd) plus (x S x')^2 / 2 (even)."""
    task = Planted(num_train=60, num_queries=9)
    problem = make_problem(task, tmp_path)
    damping, n_beta = 0.3, 2.0
    answer = run(load_method("bif_gaussian", damping=damping, n_beta=n_beta, labels="exact", draws=10_000), problem)

    def parts(examples: object) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.cat([examples.inputs, torch.ones(len(examples), 1)], dim=1)  # type: ignore[attr-defined]
        return inputs, (problem.model(examples.inputs).squeeze(1) - examples.targets).detach()  # type: ignore[attr-defined]

    (own, residuals), (asked, wrong) = parts(task.train_data), parts(task.query_data)
    inverse = torch.linalg.inv(own.T @ own / 60 + damping * torch.eye(5)) / n_beta
    between = asked @ inverse @ own.T
    expected = {"odd part": wrong[:, None] * residuals * between, "even part": between.square() / 2}
    for name, matrix in expected.items():
        found = answer.components[name].scores
        assert (found + matrix).norm() < 0.1 * matrix.norm(), name
    assert (answer.scores + sum(expected.values())).norm() < 0.05 * sum(expected.values()).norm()
    own_between = (own @ inverse * own).sum(1)
    scale = (residuals.square() * own_between + own_between.square() / 2).sqrt()
    torch.testing.assert_close(answer.train_scale, scale, rtol=0.05, atol=0)


def test_on_a_logistic_regression_the_odd_part_is_kfac(tmp_path: Path) -> None:
    task = LogisticDigits(num_train=100, num_queries=20)
    problem = problem_of(task, tmp_path)
    settings = {"relative_damping": 1.0, "labels": "exact"}
    kfac = run(load_method("kfac", **settings), problem)
    answer = run(load_method("bif_gaussian", **settings, rise=1e-3, draws=4000), problem)
    assert answer.diagnostics["rise"] == pytest.approx(1e-3, rel=0.5), "the quadratic that kfac sees is near the loss"
    assert answer.diagnostics["even_share"] < 0.1
    odd = answer.components["odd part"]
    assert correlation(odd.scores, kfac.scores) > 0.98
    ratio = (odd.scores * kfac.scores).sum() / kfac.scores.square().sum()
    assert ratio * answer.diagnostics["n_beta"] == pytest.approx(1, rel=0.05)
    torch.testing.assert_close(
        odd.train_scale * answer.diagnostics["n_beta"] ** 0.5, kfac.train_scale, rtol=0.1, atol=0
    )


def test_what_fewer_draws_gave_is_kept(tmp_path: Path) -> None:
    problem = make_problem(Planted(num_train=30, num_queries=3), tmp_path)
    answer = run(load_method("bif_gaussian", draws=1200, curve=True), problem)
    assert set(answer.components) == {"odd part", "even part", "100 draws", "300 draws", "1000 draws"}
    fewer = run(load_method("bif_gaussian", draws=300), problem)
    torch.testing.assert_close(answer.components["300 draws"].scores, fewer.scores)
    torch.testing.assert_close(answer.components["300 draws"].train_scale, fewer.train_scale)


def test_the_loss_of_a_network_rises_by_what_was_asked(tmp_path: Path) -> None:
    """By K-FAC's quadratic alone, this network's loss would rise by 28 nats."""
    problem = problem_of(load_task("digits", num_train=150), tmp_path)
    answer = run(load_method("bif_gaussian", relative_damping=10.0, rise=1.0, draws=100), problem)
    assert answer.diagnostics["rise"] == pytest.approx(1.0, rel=0.25)


def test_the_checkpoints_own_losses_are_what_draws_are_about(tmp_path: Path) -> None:
    problem = make_problem(Planted(num_train=30, num_queries=3), tmp_path)
    near = run(load_method("bif_gaussian", draws=400, rise=1e-4), problem)
    far = run(load_method("bif_gaussian", draws=400, rise=10.0), problem)
    assert near.diagnostics["even_share"] < 0.05 < 0.5 < far.diagnostics["even_share"]
    for options, said in (({"draws": 3}, "even number"), ({"rise": 0.0}, "more than 0")):
        with pytest.raises(ValueError, match=said):
            load_method("bif_gaussian", **options)


def test_an_answer_with_parts_is_checked_part_by_part(tmp_path: Path) -> None:
    problem = make_problem(Planted(num_train=30, num_queries=3), tmp_path)
    method = load_method("bif_gaussian", draws=20)
    answer = run(method, problem)
    assert set(checked_answer(answer, method, 3, 30).components) == set(answer.components)
    part = replace(answer.components["odd part"], scores=torch.zeros(2, 30))
    with pytest.raises(AnswerError, match="odd part"):
        checked_answer(replace(answer, components={"odd part": part}), method, 3, 30)
