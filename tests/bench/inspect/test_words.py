"""Related words by WordNet's own files, made here, and single tokens' scores against the sequence's."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from baselines.method import load_method
from bench.inspect.__main__ import main
from bench.inspect.words import KINDS, WordNet, related, shares, token_matrices, whole_words
from bench.scoring import AttributionProblem
from retrain.errors import UsageError
from retrain.tasks import load_task

CPU = torch.device("cpu")
SMALL = {"length": 8, "num_train": 24, "num_queries": 10, "pretraining_steps": 5, "hidden": 16, "layers": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wordnet")
    words = {
        "noun": "house n 1 0 1 0 00000001\nhome n 2 0 2 0 00000001 00000002\nmouse n 1 0 1 0 00000003\n",
        "verb": "carry v 1 0 1 0 00000004\nbear v 1 0 1 0 00000004\n", "adj": "large a 1 0 1 0 00000005\n", "adv": "",
    }  # fmt: skip
    for part, lines in words.items():
        (folder / f"index.{part}").write_text("  1 a licence\n" + lines)
        (folder / f"{part}.exc").write_text(
            "mice mouse\n" if part == "noun" else "bore bear\n" if part == "verb" else ""
        )
    return folder


def test_words_are_one_word_one_lemma_synonyms_or_none(folder: Path) -> None:
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


def test_shares_are_counted_by_hand(folder: Path) -> None:
    """Two query words and three of training: the most helpful are a synonym and an unrelated one."""
    matrix = np.array([[0.0, -1.0, -2.0], [5.0, 4.0, 3.0]])
    found = related(matrix, {0: "house", 1: "mice"}, {0: "house", 1: "large", 2: "home"}, WordNet(folder))
    np.testing.assert_allclose(found, [[0, 0, 1, 1], [1 / 3, 0, 1 / 3, 4 / 3]])
    summed = shares(np.stack([found] * 5), range(len(KINDS)))
    assert summed == pytest.approx({"share": 0.5, "chance": 1 / 3, "ci_low": 1 / 6, "ci_high": 1 / 6})


def test_tokens_scores_add_up_to_the_sequences(tmp_path: Path) -> None:
    question = AttributionProblem(task=load_task("tinylm", **SMALL), seed=1, alpha_attribution=1.0)
    task, model = question.task, question.task.build_model(1)
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


def test_the_command_keeps_scores_and_says_it_later(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rank_bm25")
    settings = [word for name, value in SMALL.items() for word in ("--set", f"tinylm.{name}={value}")]
    bif = "bif@draws=4,chains=2,gamma=1e3,step_size=3e-4,minibatch=16"
    command = ["words", "--task", "tinylm", *settings, "--device", "cpu", "--queries", "2", "--methods", bif, "kfac"]
    assert main([*command, "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]) == 0
    content = json.loads((tmp_path / "out" / "words.json").read_text())
    assert [label.partition("@")[0] for label in content["methods"]] == ["bif", "kfac"]
    for pair in content["pairs"]:  # letters are no words: these take their place
        pair["query_tokens"], pair["train_tokens"] = (
            [" house", " home", " "] + ["x"] * 5,
            [" home", " mice", " "] + ["x"] * 5,
        )
    (tmp_path / "out" / "words.json").write_text(json.dumps(content))
    capsys.readouterr()
    out = ["--out", str(tmp_path / "out")]
    assert main(["words", "--read", str(tmp_path / "out"), "--wordnet", str(folder), *out]) == 0
    rows = json.loads((tmp_path / "out" / "related.json").read_text())["rows"]
    assert [row["chance"] for row in rows[:4]] == [0.25, 0, 0.25, 0.5]
    assert capsys.readouterr().out.count("synonyms") == 2
