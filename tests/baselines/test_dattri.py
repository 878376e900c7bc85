"""dattri's methods: against dattri's own `attribute`, against exact inverses, and without the state that it shares."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baselines.method import Problem, load_method
from baselines.support.snapshots import snapshots
from retrain.losses import SquaredError
from retrain.tasks import load_task
from tests.baselines.test_kfac import influence
from tests.helpers.planted import Planted, make_problem
from tests.helpers.problems import correlation, gradients_by_hand, problem_of, run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("dattri") is None, reason="pip install dattri")


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    sizes = {"num_train": 12, "num_queries": 5, "length": 8, "hidden": 4, "layers": 1, "heads": 1}
    task = load_task("tinylm", **sizes, batch_size=4, pretraining_steps=2)
    return problem_of(task, tmp_path_factory.mktemp("dattri"), chosen=[7, 1, 3], seed=0)


def test_enough_iterations_are_the_exact_damped_inverse(scratch: Path) -> None:
    task, damping = Planted(num_train=60, num_queries=7), 0.02
    problem = make_problem(task, scratch)
    inputs = torch.cat([task.train_data.inputs, torch.ones(60, 1)], dim=1)
    expected, _ = influence(problem.model, SquaredError().per_example, inputs.T @ inputs / 60, damping, problem)
    by_cg, by_arnoldi = (run(load_method(name, damping=damping), problem).scores for name in ("if_cg", "arnoldi"))
    torch.testing.assert_close(by_cg, expected, rtol=1e-3, atol=1e-3)
    # Without the damping it added it would find the same; it finds 5 of 5 directions.
    assert correlation(by_arnoldi, expected) > 0.98


@pytest.mark.parametrize("name", ["if_cg", "arnoldi", "datainf"])
def test_autograd_records_nothing(name: str, language: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten iterations for five queries of a tiny language model took 20 GiB while it did."""
    from dattri.algorithm.base import BaseInnerProductAttributor

    seen, generate = [], BaseInnerProductAttributor.generate_test_rep

    def watched(*words: object, **named: object) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        return generate(*words, **named)

    monkeypatch.setattr(BaseInnerProductAttributor, "generate_test_rep", watched)
    found = load_method(name).score(language, load_method(name).fit(language)).scores
    assert not found.requires_grad
    assert seen
    assert not any(seen)


def test_self_influence_is_the_root_of_an_examples_own_score(scratch: Path) -> None:
    task = Planted(num_train=30, num_queries=3)
    problem = make_problem(task, scratch)
    found = run(load_method("if_cg", self_influence=True), problem)
    itself = replace(problem, queries=task.train_data)
    own = -run(load_method("if_cg"), itself).scores.diagonal()
    torch.testing.assert_close(found.train_scale, own.sqrt(), rtol=1e-3, atol=1e-4)


def test_directions_of_negative_curvature_are_left_out(scratch: Path) -> None:
    task = load_task("digits", num_train=30, epochs=1)
    problem = problem_of(task, scratch, task.build_model(0).eval(), queries=[0, 1], chosen=range(3), seed=0)
    found = load_method("arnoldi", damping=0.0, iterations=30).score(problem, None)
    assert torch.isfinite(found.scores).all()
    assert found.diagnostics["negative"] > 0
    assert found.diagnostics["negative"] + found.diagnostics["directions"] == 29
    found = load_method("arnoldi", damping=50.0, iterations=5, projection=3).score(problem, None)
    assert found.diagnostics["negative"] == 0


def test_tracin_follows_the_training_and_shares_nothing(language: Problem) -> None:
    from dattri.algorithm import tracin

    before = dict(tracin.DEFAULT_PROJECTOR_KWARGS)
    method = load_method("tracin", snapshots=3)
    found = method.score(language, None)
    taken = snapshots(language, 3, "")
    assert len(taken) == 3 == found.diagnostics["snapshots"]
    assert all(torch.equal(taken[-1].weights[name], value) for name, value in language.model.state_dict().items())
    rates = [one.rate for one in taken]
    assert rates == sorted(rates, reverse=True), "tinylm's learning rate falls"
    assert rates[0] != rates[1]

    def gradients(weights, examples):
        model = language.task.build_model(0)
        model.load_state_dict(weights)
        return gradients_by_hand(model, examples, lambda *batch: language.task.example_loss(model, batch).sum())

    parts = language.queries, language.attributed
    both = [[gradients(one.weights, part) for part in parts] for one in taken]
    expected = -sum(one.rate * queries @ train.T for one, (queries, train) in zip(taken, both))
    torch.testing.assert_close(found.scores, expected, rtol=1e-3, atol=1e-7)
    load_method("tracin", snapshots=1, projection=16).score(language, None)
    assert before == tracin.DEFAULT_PROJECTOR_KWARGS
    torch.testing.assert_close(method.score(language, None).scores, found.scores)
