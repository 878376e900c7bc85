"""A task in a file of one's own, around a Hugging Face model with padding: every method of the default run finishes."""

import json
import random
from pathlib import Path

import pytest

from bench.cli import lds_main as main
from tests.helpers.tiny_language import END, WORDS

TASK = str(Path(__file__).resolve().parents[1] / "helpers" / "huggingface_task.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bert/ with a tokenizer, and sentences whose label is their first word's."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("bert")
    words = [END, *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=END, unk_token=END, model_max_length=16
    ).save_pretrained(folder / "bert")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        configuration = BertConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=16, pad_token_id=0, num_labels=2,
        )  # fmt: skip
        BertForSequenceClassification(configuration).save_pretrained(folder / "bert")
    chooser = random.Random(0)
    with open(folder / "sentences.jsonl", "w") as file:
        for _ in range(150):
            text = chooser.choices(WORDS, k=chooser.randint(3, 9))
            file.write(json.dumps({"text": " ".join(text), "label": WORDS.index(text[0]) % 2}) + "\n")
    return folder


def test_every_method_runs_on_a_bert_in_a_file_of_ones_own(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "--task", TASK, "--model", str(folder / "bert"), "--text", str(folder / "sentences.jsonl"), "--alpha", "0.5",
        "--subsets", "8", "--replicates", "1", "--device", "cpu", "--cluster", "inline", "--json",
        "--methods", "gradsim", "trak", "ekfac", "kfac", "random", "bif@draws=4,chains=2,gamma=1000,step_size=1e-4",
        "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "runs"),
    ]  # fmt: skip
    assert main(command) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["task"] for row in rows} == {"huggingface_task"}
    assert {row["method"] for row in rows} == {"gradsim", "trak", "ekfac", "kfac", "random", "bif", "same_class"}
    assert main([word for word in [*command, "--dry-run"] if word != "--json"]) == 0
    assert "8 of 8 retrains cached, 0 to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("no_such_file.py", "there is no such file"),
        ("two words.py", "no such file"),
        ("../../evil:Cls", "names no task"),
        ("tests.nowhere:Cls", "cannot import"),
        ("tests.helpers.planted:Nobody", "has no class Nobody"),
        ("tests.helpers.planted:RIDGE", "is not a retrain.task.Task"),
    ],
)
def test_bad_names_are_one_line(task: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--task", task, "--alpha", "0.5", "--cache", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_broken_file_says_which_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, words in (
        ("x = 1 / 0\n", "ZeroDivisionError"),
        ("def f(:\n", "SyntaxError"),
        ("x = 1\n", "defines 0 Task"),
    ):
        path = tmp_path / f"broken_{len(text)}.py"
        path.write_text(text)
        assert main(["--task", str(path), "--alpha", "0.5", "--cache", str(tmp_path / "cache")]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
