"""Scores of single tokens and of related words: decoded as the task has it, seeded, and adding up to a sequence's."""

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
from bench.inspect.words import KINDS, WordNet, related, shares, token_matrices, whole_words
from bench.scoring import AttributionProblem
from retrain.errors import UsageError
from retrain.examples import Examples
from retrain.tasks import load_task
from tests.helpers.tiny_language import save_both, write_text

CPU = torch.device("cpu")
SMALL = {"length": 8, "num_train": 24, "num_queries": 10, "pretraining_steps": 5, "hidden": 16, "layers": 1}
TINY = ["--task", "tinylm", *(word for name in SMALL for word in ("--set", f"tinylm.{name}={SMALL[name]}"))]
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
    settings = [word for name, value in SAMPLING.items() for word in ("--set", f"bif.{name}={value}")]
    command = ["tokens", *TINY, *settings, "--device", "cpu", "--top", "2", "--methods", "bif", "ekfac"]
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
    # More queries than classes go round, and few are all shown.
    entropy = np.linspace(0, 1, 300)
    many = list(queries_by_rule(CLASSES, entropy, 24, seed=1))
    counts = np.bincount(CLASSES[many[:22]], minlength=10)
    assert (counts.min(), counts.max()) == (2, 3)
    assert len(queries_by_rule(CLASSES[:3], entropy[:3], 8, seed=1)) == 3
    assert list(queries_by_rule(CLASSES, entropy, 1, seed=1).values()) == ["drawn from its class"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wordnet")
    words = {
        "noun": "house n 1 0 1 0 00000001\nhome n 2 0 2 0 00000001 00000002\nmouse n 1 0 1 0 00000003\n",
        "verb": "carry v 1 0 1 0 00000004\nbear v 1 0 1 0 00000004\n", "adj": "large a 1 0 1 0 00000005\n", "adv": "",
    }  # fmt: skip
    for part, lines in words.items():
        (folder / f"index.{part}").write_text("  1 a licence\n" + lines)
        (folder / f"{part}.exc").write_text({"noun": "mice mouse\n", "verb": "bore bear\n"}.get(part, ""))
    return folder


def test_related_words_are_told_and_their_shares_are_counted_by_hand(folder: Path) -> None:
    wordnet = WordNet(folder)
    expected = {
        ("house", "house"): 0, ("houses", "house"): 1, ("mice", "mouse"): 1, ("carries", "carry"): 1,
        ("larger", "large"): 1, ("house", "homes"): 2, ("bore", "carrying"): 2, ("house", "mouse"): 3,
        ("house", "nowhere"): 3,
    }  # fmt: skip
    assert {pair: wordnet.kind(*pair) for pair in expected} == expected
    tokens = [" house", "holds", " mice", " Homes", ",", " xyzzy", " bear"]
    assert whole_words(tokens, wordnet) == {2: "mice", 3: "homes"}, "no part of a word, no unknown one, not the last"
    with pytest.raises(UsageError, match="wordnet-base"):
        WordNet(folder / "nowhere")
    # Two query words and three of training: the most helpful are a synonym and an unrelated one.
    matrix = np.array([[0.0, -1.0, -2.0], [5.0, 4.0, 3.0]])
    found = related(matrix, {0: "house", 1: "mice"}, {0: "house", 1: "large", 2: "home"}, WordNet(folder))
    np.testing.assert_allclose(found, [[0, 0, 1, 1], [1 / 3, 0, 1 / 3, 4 / 3]])
    summed = shares(np.stack([found] * 5), range(len(KINDS)))
    assert summed == pytest.approx({"share": 0.5, "chance": 1 / 3, "ci_low": 1 / 6, "ci_high": 1 / 6})
    matrix = np.array([[-0.9, 0.2, -0.3], [0.1, -0.8, 0.95]])
    assert strongest_of_different_words(matrix, [" Cat", "dog"], ["cat", "Dog", " "]) == (0, 1, 0.2)
    assert strongest_of_different_words(matrix[:1, :1], ["a"], [" A"]) is None


def test_tokens_scores_add_up_to_the_sequences(tmp_path: Path, question: Any, model: Any) -> None:
    task = question.task
    pairs = [(2, 5), (0, 3)]
    every, some = list(range(8)), ([1, 6], [0, 3, 7])
    asked = (question, load_method("gradsim"), model, CPU, tmp_path, pairs)
    found = token_matrices(*asked, [(every, every)] * 2)
    of_some = token_matrices(*asked, [some, ([], every)])
    np.testing.assert_allclose(of_some[0][np.ix_(*some)], found[0][np.ix_(*some)], rtol=1e-5)
    assert np.isnan(of_some[1]).all()
    for (query, train), matrix in zip(pairs, found, strict=True):
        assert matrix.shape == (8, 8)
        gradients = []
        for examples, index in ((task.query_data, query), (task.train_data, train)):
            losses = task.loss(model, (examples.inputs[index][None], examples.targets[index][None]))[0]
            rows = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
            gradients.append(torch.stack([torch.cat([part.flatten() for part in row]) for row in rows]))
        own, other = gradients
        expected = -(own / 8) @ (other / other.norm(dim=1, keepdim=True)).T
        np.testing.assert_allclose(matrix, expected.numpy(), rtol=1e-3, atol=1e-6)


def test_the_command_keeps_scores_and_says_it_later(tmp_path: Path, folder: Path, capsys: Any) -> None:
    pytest.importorskip("rank_bm25")
    bif = "bif@draws=4,chains=2,gamma=1e3,step_size=3e-4,minibatch=16"
    command = ["words", *TINY, "--device", "cpu", "--queries", "2", "--methods", bif, "kfac"]
    assert main([*command, "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]) == 0
    content = json.loads((tmp_path / "out" / "words.json").read_text())
    assert [label.partition("@")[0] for label in content["methods"]] == ["bif", "kfac"]
    for pair in content["pairs"]:  # letters are no words: these take their place
        pair["query_tokens"] = [" house", " home", " "] + ["x"] * 5
        pair["train_tokens"] = [" home", " mice", " "] + ["x"] * 5
    (tmp_path / "out" / "words.json").write_text(json.dumps(content))
    capsys.readouterr()
    out = ["--out", str(tmp_path / "out")]
    assert main(["words", "--read", str(tmp_path / "out"), "--wordnet", str(folder), *out]) == 0
    rows = json.loads((tmp_path / "out" / "related.json").read_text())["rows"]
    assert [row["chance"] for row in rows[:4]] == [0.25, 0, 0.25, 0.5]
    assert capsys.readouterr().out.count("synonyms") == 2
