"""Reading JSON lines and wrapping them into sequences; every wrong file is one clear line."""

import gzip
import json
import lzma
import os
from pathlib import Path

import pytest

from retrain.data.text import Document, read_documents, tokenized, wrap
from tests.helpers.problems import refused


class Letters:
    """A tokenizer of letters: a = 1, b = 2 and so on; 0 ends a text."""

    eos_token_id = 0

    def __call__(self, batch: list[str], **options) -> dict[str, list[list[int]]]:
        assert options["add_special_tokens"] is False
        return {"input_ids": [[ord(letter) - 96 for letter in text] for text in batch]}


def write(path: Path, lines: list[str], opener=open) -> Path:
    with opener(path, "wb") as file:
        file.write("\n".join(lines).encode())
    return path


LINES = [json.dumps({"text": text, "meta": {"set": part}}) for text, part in (("abc", "x"), ("", "y"), ("déf", "x"))]


@pytest.mark.parametrize(("suffix", "opener"), [("", open), (".xz", lzma.open), (".gz", gzip.open)])
def test_every_compression_gives_the_same_documents_and_a_file_cut_short_says_so(tmp_path, suffix, opener) -> None:
    path = write(tmp_path / f"text.jsonl{suffix}", [*LINES, ""], opener)
    assert [text for text, _ in read_documents(path)] == ["abc", "", "déf"]
    assert [text for text, _ in read_documents(path, where={"meta.set": "x"})] == ["abc", "déf"]
    if suffix:
        write(path, LINES * 500, opener)
        os.truncate(path, path.stat().st_size - 20)
        refused(lambda: list(read_documents(path)), "damaged or cut short")


def test_without_zstandard_one_line_names_it(tmp_path, monkeypatch) -> None:
    path = write(tmp_path / "text.jsonl.zst", LINES)
    monkeypatch.setattr("retrain.data.text.find_spec", lambda name: None)
    refused(lambda: read_documents(path), "pip install zstandard")


def test_real_zstandard(tmp_path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = write(tmp_path / "text.jsonl.zst", LINES * 1000, zstandard.open)
    assert [text for text, _ in read_documents(path)] == ["abc", "", "déf"] * 1000
    path.write_bytes(path.read_bytes()[:-20])
    refused(lambda: list(read_documents(path)), "cut short")
    path.write_bytes(zstandard.compress(b"\0" * 2**28) * 40)
    refused(lambda: list(read_documents(path)), "which no text does")


def test_wrong_files_are_named_with_their_line(tmp_path) -> None:
    for lines, *parts in (
        ([], "has no documents"),
        ([LINES[0], "{not json"], "line 2 of ", " is not JSON"),
        ([LINES[0], '{"content": "abc"}'], "line 2 of ", ' has no text in the field "text"'),
        ([LINES[0], r'{"text": "\ud800"}'], "line 2 of ", " half of a surrogate pair"),
        (["[" * 100_000], "line 1 of ", " is not JSON"),
        (['{"text": ' + "9" * 5000 + "}"], "line 1 of ", " is not JSON"),
    ):
        path = write(tmp_path / "text.jsonl", lines)
        refused(lambda path=path: list(read_documents(path)), *parts)


def test_files_that_are_not_there_or_no_text(tmp_path) -> None:
    refused(lambda: read_documents(tmp_path / "missing.jsonl"), "there is no text file")
    text = write(tmp_path / "text.txt", LINES)
    refused(lambda: read_documents(text), "not a file of JSON lines")
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}')
    refused(lambda: list(read_documents(tmp_path / "latin.jsonl")), "UTF-8")
    lines = write(tmp_path / "text.jsonl", LINES)
    refused(lambda: list(read_documents(lines, where={"meta.set": "z"})), "has no documents with meta.set = z")


def test_long_documents_are_read_and_endless_lines_refused(tmp_path, monkeypatch) -> None:
    long = json.dumps({"text": "x" * 5_000_000})
    assert [len(text) for text, _ in read_documents(write(tmp_path / "a.jsonl", [LINES[0], long]))] == [3, 5_000_000]
    monkeypatch.setattr("retrain.data.text.MAX_DOCUMENT_BYTES", 1_000_000)
    path = write(tmp_path / "a.jsonl", [LINES[0], long])
    refused(lambda: list(read_documents(path)), "line 2 of ", " has more than 1,000,000 bytes")


def test_lines_are_the_same_wherever_the_chunks_end(tmp_path, monkeypatch) -> None:
    lines = [json.dumps({"text": "a" * length}) for length in range(20)] + [""] * 3 + LINES
    path = write(tmp_path / "a.jsonl", lines)
    expected = list(read_documents(path))
    for size in (1, 2, 3, 7, 64, 1000):
        monkeypatch.setattr("retrain.data.text.CHUNK_BYTES", size)
        assert list(read_documents(path)) == expected


def pieces(*texts: str):
    return tokenized((Document(text, group=text[:1]) for text in texts), Letters())


def test_documents_are_joined_and_wrapped_and_too_little_text_says_how_much_there_is() -> None:
    wrapped = wrap(pieces("abc", "de", "f", "ghij"), 3, 4, "the text")
    assert wrapped.tokens.tolist() == [[1, 2, 3], [0, 4, 5], [0, 6, 0], [7, 8, 9]]  # "j" and its end are left over
    assert (wrapped.groups, wrapped.num_documents) == (["a", "d", "f", "g"], 4)
    assert wrap(pieces("abc", "de", "f"), 3, 2, "the text").tokens.tolist() == [[1, 2, 3], [0, 4, 5]]
    left = pieces("abcd", "ef", "gh")
    assert wrap(left, 3, 1, "the text").tokens.tolist() == [[1, 2, 3]]
    assert wrap(left, 3, 2, "the text").tokens.tolist() == [[5, 6, 0], [7, 8, 0]]  # the rest of "abcd" is in neither

    said = "has 5 tokens in 2 documents, 2 sequences of 2, and 3 are wanted"
    refused(lambda: wrap(pieces("ab", "c"), 2, 3, "the text"), said)
    refused(lambda: wrap(pieces("ab", "c"), 1, 1, "the text"), "at least 2")
