"""Examples of several tensors: a Hugging Face BERT on padded sentences with their attention masks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

from baselines.method import Attribution, Problem, load_method
from baselines.support.gradients import PerExampleGradients
from retrain.examples import Columns, Examples, Indices
from retrain.losses import IGNORED, CrossEntropy, keep_ignored, mean_over_tokens
from retrain.task import Task
from tests.helpers.problems import CPU, gradients_by_hand, problem_of, run
from tests.helpers.tiny_language import sentences, tiny_bert


@dataclass(frozen=True, kw_only=True)
class Sentences(Task):
    """As a user would write it."""

    def load_train_data(self) -> Examples:
        return sentences(40).select(range(32))

    def load_query_data(self) -> Examples:
        return sentences(40).select(range(32, 40))

    def build_model(self, seed: int) -> nn.Module:
        return tiny_bert(seed)

    def train(self, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        model, data = self.build_model(init_seed).to(device), self.train_data.select(indices).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(5):
            for batch in data.batches(8):
                optimizer.zero_grad()
                self.example_loss(model, batch).mean().backward()
                optimizer.step()
        return model.eval()


@pytest.fixture(scope="module")
def task() -> Sentences:
    return Sentences()


@pytest.fixture(scope="module")
def model(task: Sentences) -> nn.Module:
    return task.train(np.arange(32), init_seed=0, order_seed=0, device=CPU)


def ask(task: Sentences, model: nn.Module, scratch: Path) -> Problem:
    return problem_of(task, scratch, model, chosen=[5, 2, 30, 11, 7, 19])


def score(name: str, problem: Problem, **options: Any) -> Attribution:
    return run(load_method(name, **options), problem)


def by_hand(model: nn.Module, examples: Examples) -> torch.Tensor:
    return gradients_by_hand(model, examples, lambda inputs, y: CrossEntropy().per_example(model(inputs), y).sum())


@pytest.mark.parametrize("way", ["hooks", "vmap", "loop"])
def test_every_way_to_its_gradients(task: Sentences, model: nn.Module, way: str) -> None:
    """Position embeddings run once for all examples: their output is repeated. vmap does not follow the mask."""
    gradients = PerExampleGradients(model, CrossEntropy().per_example)
    gradients.way = way
    found = gradients((task.query_data.inputs, task.query_data.targets))
    assert gradients.way == {"hooks": "hooks", "vmap": "loop", "loop": "loop"}[way]
    torch.testing.assert_close(found, by_hand(model, task.query_data), rtol=1e-3, atol=1e-5)
    alone = gradients((task.query_data.inputs[3:4], task.query_data.targets[3:4]))
    torch.testing.assert_close(alone, found[3:4], rtol=1e-3, atol=1e-5)


def test_kfac_is_near_ekfac(task: Sentences, model: nn.Module, scratch: Path) -> None:
    """Not the same: kronfluence leaves padding out of its activations' covariance."""
    problem = ask(task, model, scratch)
    ours, theirs = (
        score(name, problem, **o).scores for name, o in (("kfac", {"layers": "kronfluence"}), ("ekfac", {}))
    )
    assert spearmanr(ours.flatten(), theirs.flatten()).statistic > 0.95


# ---- Columns ----


def test_columns_are_sliced_moved_and_joined_as_one_tensor() -> None:
    data = sentences(10)
    assert isinstance(data.inputs, Columns)
    assert len(data) == len(data.inputs) == 10
    assert data.inputs.keys() == ["input_ids", "attention_mask"]
    chosen = data.select([3, 1])
    assert torch.equal(chosen.inputs["input_ids"], data.inputs["input_ids"][[3, 1]])
    assert torch.equal(chosen.inputs["attention_mask"], data.inputs["attention_mask"][[3, 1]])
    assert [len(targets) for _, targets in data.batches(4)] == [4, 4, 2]
    joined = torch.cat([data.inputs[:4], data.inputs[4:]])
    assert Examples(joined, data.targets).fingerprint == data.fingerprint
    assert data.to("cpu").inputs.device == CPU
    assert data.nbytes == 10 * 8 * (7 + 7 + 1)
    assert "input_ids: (10, 7)" in repr(data.inputs)
    with pytest.raises(TypeError):
        torch.stack([data.inputs, data.inputs])
    one, target = data[3]
    assert torch.equal(one["input_ids"], data.inputs["input_ids"][3])
    assert target == data.targets[3]


def test_fingerprints_know_names_and_bytes_and_keep_those_of_one_tensor() -> None:
    ids, labels = torch.arange(12).reshape(4, 3), torch.arange(4)
    assert Examples(ids, labels).fingerprint == "0f5718bd6b9b973e288c"
    base = {"a": ids, "b": ids + 1}
    prints = [
        Examples(inputs, labels).fingerprint
        for inputs in (ids, base, {"a": ids, "c": ids + 1}, {"a": ids + 1, "b": ids}, {"b": ids + 1, "a": ids})
    ]
    assert len(set(prints)) == 4
    assert prints[1] == prints[4], "the order of names is none of the data"


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ((torch.zeros(3), torch.zeros(3)), "by name"),
        ({}, "expected tensors by name"),
        ({"a": [[1], [2, 3], [4]]}, "a have rows of different lengths"),
        ({"a": ["x", "y", "z"]}, 'a hold "x"; expected numbers'),
        ({"a": torch.zeros(3), "b": torch.zeros(2)}, "as many of each"),
        ({"a": torch.zeros(2)}, "2 inputs came with 3 targets"),
    ],
)
def test_bad_inputs_are_said(inputs: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Examples(inputs, torch.zeros(3))


# ---- targets that do not count ----


def test_padded_targets_count_as_nothing() -> None:
    torch.manual_seed(0)
    loss, outputs = CrossEntropy(), torch.randn(2, 3, 5, requires_grad=True)
    targets = torch.tensor([[1, 2, IGNORED], [0, IGNORED, IGNORED]])
    for function in (loss.per_example, loss.model_output, loss.output_slope):
        values = mean_over_tokens(function(outputs, targets))
        whole = mean_over_tokens(function(outputs[:1, :2], targets[:1, :2]))
        torch.testing.assert_close(values[0], whole[0] * 2 / 3)
        (gradient,) = torch.autograd.grad(values.sum(), outputs)
        assert not gradient[targets == IGNORED].any()
    sampled = keep_ignored(loss.sample_targets(outputs), targets)
    assert (sampled[targets == IGNORED] == IGNORED).all()
    assert (sampled[targets != IGNORED] >= 0).all()
