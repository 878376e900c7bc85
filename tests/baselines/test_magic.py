"""magic: its gradient against finite differences of replayed trainings, and its predictions against left-out ones."""

from pathlib import Path

import numpy as np
import pytest
import torch

from baselines.magic import TrainingPath, metagradient
from baselines.method import Problem, load_method
from retrain.losses import mean_over_tokens
from retrain.replays import replay_of
from retrain.replays.replay import run_replay
from retrain.subsets import checkpoint_seeds
from retrain.tasks import load_task
from retrain.tasks.cifar10 import Cifar10
from tests.helpers.made_up import small_options
from tests.helpers.problems import CPU, problem_of


def small_tasks(folder: Path) -> dict:
    language = {"num_train": 12, "num_queries": 4, "length": 8, "hidden": 8, "layers": 1, "batch_size": 4}
    # Six steps: what lookahead averages after the fifth is what counts.
    cifar10 = {"protocol": "scratch", "learning_rate": 0.2, "lookahead_from": 1, "batch_size": 60, "epochs": 2}
    return {
        "smooth_digits": load_task("smooth_digits", num_train=60, epochs=2, widths=(4, 4, 4), learning_rate=0.1),
        # Larger steps than a training's, for changes that float32 can measure.
        "tinylm": load_task("tinylm", pretraining_steps=4, learning_rate=0.02, **language),
        "cifar10": Cifar10(**{**small_options("cifar10", folder, folder), **cifar10}),
    }


def ask(task, scratch: Path, chosen: np.ndarray | None = None, queries: int = 3) -> Problem:
    model = task.train_base(**checkpoint_seeds(1, 0), device=CPU)
    return problem_of(task, scratch, model, queries=range(queries), chosen=chosen, seed=1)


@pytest.mark.parametrize("name", ["smooth_digits", "tinylm", "cifar10"])
def test_it_is_the_slope_of_the_retrained_loss(name: str, tmp_path: Path) -> None:
    task = small_tasks(tmp_path)[name]
    problem = ask(task, tmp_path)
    found = load_method("magic", query_batch_size=2).score(problem, None)
    replay = replay_of(task, np.arange(len(task.train_data)), **checkpoint_seeds(1, 0), device=CPU)

    def losses(weights: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            outputs = replay.outputs(run_replay(replay, weights), problem.queries.inputs)
            return mean_over_tokens(task.loss_function.per_example(outputs, problem.queries.targets))

    def slope(example: int, step: float) -> torch.Tensor:
        up, down = torch.ones(2, len(task.train_data))
        up[example] += step
        down[example] -= step
        return (losses(up) - losses(down)) / (2 * step)

    checked = 0
    for example in found.scores.abs().sum(0).argsort(descending=True)[:8].tolist():
        near, far = slope(example, 0.02), slope(example, 0.04)
        scale = float(near.abs().max())
        assert scale > 1e-5
        if (near - far).abs().max() > 0.1 * scale:
            continue  # Adam's steps jump where a gradient changes its sign: no slope there, whatever the text
        torch.testing.assert_close(found.scores[:, example], near, rtol=0.05, atol=0.05 * scale)
        checked += 1
        if checked == 2:
            break
    assert checked == 2
    assert found.diagnostics["replay_differs_by"] < 0.01


def test_states_computed_again_give_the_same_gradient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    task = small_tasks(tmp_path)["smooth_digits"]
    replay = replay_of(task, np.arange(60), init_seed=1, order_seed=2, device=CPU)
    queries = task.query_data.select(range(2))

    def losses(state) -> torch.Tensor:
        return task.loss_function.per_example(replay.outputs(state, queries.inputs), queries.targets)

    plain = TrainingPath(replay, lambda states, **_: states)
    assert plain.every == 1
    expected, _ = metagradient(plain, losses)
    bytes_of_one = sum(value.nbytes for value in replay.start().values())
    monkeypatch.setattr("baselines.magic.free_bytes", lambda device: 3.5 * bytes_of_one / 0.3)
    sparse = TrainingPath(replay, lambda states, **_: states)
    assert sparse.every > 1
    assert len(sparse.kept) < len(plain.kept)
    found, _ = metagradient(sparse, losses)
    torch.testing.assert_close(found, expected)


def test_only_what_is_attributed_is_trained_on_where_that_is_asked_for(tmp_path: Path) -> None:
    task = small_tasks(tmp_path)["tinylm"]
    chosen = np.array([9, 2, 5, 7])
    found = load_method("magic", trained_on="attributed").score(ask(task, tmp_path, chosen), None)
    again = load_method("magic", trained_on="attributed").score(ask(task, tmp_path, chosen[::-1]), None)
    torch.testing.assert_close(found.scores.flip(1), again.scores)
    assert found.diagnostics["steps"] == 2, "one batch of four, twice"
    with pytest.raises(ValueError, match="available: everything, attributed"):
        load_method("magic", trained_on="some")
