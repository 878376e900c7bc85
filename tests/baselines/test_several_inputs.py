"""Examples of several tensors: a Hugging Face BERT on padded sentences with their attention masks."""

from pathlib import Path

import pytest
import torch
from scipy.stats import spearmanr

from baselines.method import load_method
from baselines.support.gradients import PerExampleGradients
from retrain.examples import Columns, Examples
from retrain.losses import IGNORED, CrossEntropy, keep_ignored, mean_over_tokens
from retrain.tasks import load_task
from tests.helpers.made_up import small_options
from tests.helpers.problems import CPU, gradients_by_hand, problem_of, run
from tests.helpers.tiny_language import sentences, tiny_bert


@pytest.mark.parametrize("way", ["hooks", "vmap", "loop"])
def test_every_way_to_its_gradients(way: str) -> None:
    """Position embeddings run once for all examples: their output is repeated. vmap does not follow the mask."""
    model, examples = tiny_bert(), sentences(8)
    gradients = PerExampleGradients(model, CrossEntropy().per_example)
    gradients.way = way
    found = gradients((examples.inputs, examples.targets))
    assert gradients.way == {"hooks": "hooks", "vmap": "loop", "loop": "loop"}[way]
    summed = lambda inputs, targets: CrossEntropy().per_example(model(inputs), targets).sum()  # noqa: E731
    torch.testing.assert_close(found, gradients_by_hand(model, examples, summed), rtol=1e-3, atol=1e-5)
    alone = gradients((examples.inputs[3:4], examples.targets[3:4]))
    torch.testing.assert_close(alone, found[3:4], rtol=1e-3, atol=1e-5)


def test_kfac_is_near_ekfac(scratch: Path) -> None:
    """Not the same: kronfluence leaves padding out of its activations' covariance."""
    task = load_task("text_classifier", **small_options("text_classifier", scratch, scratch))
    problem = problem_of(task, scratch, chosen=[5, 2, 30, 11, 7, 19])
    methods = load_method("kfac", layers="kronfluence"), load_method("ekfac")
    ours, theirs = (run(method, problem).scores for method in methods)
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
    others = {"a": ids, "c": ids + 1}, {"a": ids + 1, "b": ids}, {"b": ids + 1, "a": ids}
    prints = [Examples(inputs, labels).fingerprint for inputs in (ids, base, *others)]
    assert len(set(prints)) == 4
    assert prints[1] == prints[4], "the order of names is none of the data"


def test_bad_inputs_are_said() -> None:
    for inputs, said in (
        ((torch.zeros(3), torch.zeros(3)), "by name"),
        ({}, "expected tensors by name"),
        ({"a": [[1], [2, 3], [4]]}, "a have rows of different lengths"),
        ({"a": ["x", "y", "z"]}, 'a hold "x"; expected numbers'),
        ({"a": torch.zeros(3), "b": torch.zeros(2)}, "as many of each"),
        ({"a": torch.zeros(2)}, "2 inputs came with 3 targets"),
    ):
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
