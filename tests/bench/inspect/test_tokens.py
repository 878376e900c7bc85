"""Scores of single tokens: decoded as the task's own tokenizer has it, seeded, and the same for whoever asks."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from baselines.method import load_method
from bench.inspect import queries_by_rule, token_texts
from bench.inspect.__main__ import main
from bench.inspect.tokens import score_tokens, strongest_of_different_words
from bench.scoring import AttributionProblem
from retrain.examples import Examples
from retrain.tasks import load_task
from tests.helpers.tiny_language import save_both, write_text

CPU = torch.device("cpu")
SMALL = {"length": 8, "num_train": 24, "num_queries": 10, "pretraining_steps": 5, "hidden": 16, "layers": 1}
SAMPLING = {"draws": 6, "chains": 2, "gamma": 1e3, "step_size": 3e-4, "minibatch": 16}


@pytest.fixture(scope="module")
def question() -> AttributionProblem:
    return AttributionProblem(task=load_task("tinylm", **SMALL), seed=1, alpha_attribution=1.0)


@pytest.fixture(scope="module")
def model(question: AttributionProblem) -> torch.nn.Module:
    return question.task.build_model(1)


@pytest.mark.parametrize("name", ["bif", "ekfac"])
def test_the_same_seed_gives_the_same_numbers_whatever_was_drawn_before(name: str, question: Any, model: Any) -> None:
    method = load_method(name, **(SAMPLING if name == "bif" else {}))
    found = []
    for state in (0, 17):
        torch.manual_seed(state)
        found.append(score_tokens(question, method, model, CPU, [(2, 5), (0, 3)])[0])
    for one, other in zip(*found, strict=True):
        for measure in one["measures"]:
            np.testing.assert_array_equal(one["measures"][measure], other["measures"][measure])


def test_the_tasks_own_tokenizer_says_what_a_token_is(tmp_path: Path, question: Any) -> None:
    text = write_text(tmp_path / "text.jsonl", 40)
    pythia = load_task(
        "pythia14m", model=str(save_both(tmp_path / "model")), text=str(text), length=16, num_train=8, num_queries=4
    )
    words = token_texts(pythia, pythia.query_data, 0)
    assert len(words) == 15
    assert all(word.startswith("w") or word == "<|endoftext|>" for word in words), "words, not characters of the ids"
    bytes_of_text = question.task.query_data
    assert "".join(token_texts(question.task, bytes_of_text, 0)) == "".join(chr(i) for i in bytes_of_text.targets[0])
    large = Examples(torch.zeros(1, 3), torch.tensor([[70, 50_000, 3]]))
    assert token_texts(SimpleNamespace(), large, 0) == ["#70", "#50000", "#3"]


def test_two_methods_make_the_record_of_a_figure(tmp_path: Path, question: Any) -> None:
    settings = [word for name, value in SMALL.items() for word in ("--set", f"tinylm.{name}={value}")]
    settings += [word for name, value in SAMPLING.items() for word in ("--set", f"bif.{name}={value}")]
    command = ["tokens", "--task", "tinylm", *settings, "--device", "cpu", "--top", "2"]
    command += ["--methods", "bif", "ekfac"]
    assert main([*command, "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]) == 0
    content = json.loads((tmp_path / "out" / "examples.json").read_text())
    assert content["num_draws"] == 12
    assert len(content["pairs"]) == 2
    attributed = question.attributed_indices()
    for pair in content["pairs"]:
        assert pair["train"] in attributed
        assert np.shape(pair["bif"]) == (8, 8)
        assert np.shape(pair["ekfac"]) == (8,)
        assert len(pair["query_tokens"]) == len(pair["train_tokens"]) == 8


# ---- which queries are shown, and which pair of words is named ----


CLASSES = np.repeat(np.arange(10), 30)


def test_queries_are_of_different_classes_and_the_least_sure_come_last() -> None:
    entropy = np.random.default_rng(0).uniform(size=300)
    chosen = queries_by_rule(CLASSES, entropy, 8, seed=1)
    assert chosen == queries_by_rule(CLASSES, entropy, 8, seed=1)
    assert chosen != queries_by_rule(CLASSES, entropy, 8, seed=2)
    positions = list(chosen)
    assert len(set(positions)) == 8
    assert list(chosen.values()) == ["drawn from its class"] * 6 + ["least sure"] * 2
    assert len({CLASSES[position] for position in positions[:6]}) == 6
    assert positions[6:] == list(np.argsort(-entropy)[:2])


def test_more_queries_than_classes_go_round_and_few_are_all_shown() -> None:
    entropy = np.linspace(0, 1, 300)
    many = list(queries_by_rule(CLASSES, entropy, 24, seed=1))
    counts = np.bincount(CLASSES[many[:22]], minlength=10)
    assert counts.min() == 2
    assert counts.max() == 3
    assert len(queries_by_rule(CLASSES[:3], entropy[:3], 8, seed=1)) == 3
    assert list(queries_by_rule(CLASSES, entropy, 1, seed=1).values()) == ["drawn from its class"]


def test_the_strongest_pair_is_of_two_different_words() -> None:
    matrix = np.array([[-0.9, 0.2, -0.3], [0.1, -0.8, 0.95]])
    assert strongest_of_different_words(matrix, [" Cat", "dog"], ["cat", "Dog", " "]) == (0, 1, 0.2)
    assert strongest_of_different_words(matrix[:1, :1], ["a"], [" A"]) is None
