"""Text from JSON lines, wrapped into token sequences of one length.

    documents = read_documents("articles.jsonl.xz")
    wrapped = wrap(tokenized(documents, tokenizer), 1024, 4096, "the text")    # .tokens: (4096, 1024) int64

A file has one JSON object a line with the field `text`, plain or compressed (.xz, .gz, .zst). Documents are joined with
the tokenizer's end-of-text token and cut into sequences; what is left at the end is dropped. Nothing is cached: 5,680
articles take less than a minute on two cores. A line that is too long, or a small file that unpacks without end, is
refused before it fills the memory.
"""

import gzip
import json
import lzma
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, nullcontext
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from retrain.errors import UsageError
from retrain.safe_files import is_text

SUFFIXES = (".jsonl", ".jsonl.xz", ".jsonl.gz", ".jsonl.zst")
TOKENIZED_AT_ONCE = 256  # documents: the tokenizer spreads a batch over the cores
MAX_DOCUMENT_BYTES = 64 * 2**20  # of one document: a long book has a few MB
# Text shrinks to a tenth or a fiftieth; what unpacks to more than this is no text.
MAX_TEXT_RATIO = 200
ALWAYS_UNPACKED_BYTES = 4 * 2**20
CHUNK_BYTES = 2**20
# Four compressed bytes can be 128 KiB in a .zst: what one piece of the file unpacks to stays small.
ZSTANDARD_CHUNK_BYTES = 2**10


class Document(NamedTuple):
    text: str
    group: str = ""  # such as its topic, where a field says it


def read_documents(
    path: str | Path, *, field: str = "text", where: dict[str, str] | None = None, group_field: str = ""
) -> Iterator[Document]:
    """The text and the group of each line, in order; `where` keeps lines whose (dotted) fields have these values.

    Opening happens at once, so that a wrong path is an error here and not at the first document.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise UsageError(f'there is no text file "{path}"; expected {", ".join(SUFFIXES)} with the field "{field}"')
    if not path.name.endswith((".jsonl", ".json", ".xz", ".gz", ".zst")):
        raise UsageError(f'"{path}" is not a file of JSON lines; expected {", ".join(SUFFIXES)}')
    if path.suffix == ".zst" and find_spec("zstandard") is None:
        raise UsageError("reading .zst needs the package zstandard: pip install zstandard")
    return _documents(path, field, where or {}, group_field)


def _documents(path: Path, field: str, where: dict[str, str], group_field: str) -> Iterator[Document]:
    num_documents = 0
    for number, line in _readable(path):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f'line {number} of "{path}" is not JSON ({error}); expected one object a line') from None
        text = content.get(field) if isinstance(content, dict) else None
        if not isinstance(text, str):
            raise UsageError(
                f'line {number} of "{path}" has no text in the field "{field}"; expected {{"{field}": "..."}}'
            )
        if not is_text(text):
            raise UsageError(f'line {number} of "{path}" holds half of a surrogate pair, which is no character')
        if all(_value(content, name) == value for name, value in where.items()):
            group = _value(content, group_field) if group_field else ""
            if not isinstance(group, str | int):
                raise UsageError(
                    f'line {number} of "{path}" has no group in the field "{group_field}"; expected a name'
                )
            num_documents += 1
            yield Document(text, str(group))
    if num_documents == 0:
        wanted = " and ".join(f"{name} = {value}" for name, value in where.items())
        raise UsageError(
            f'"{path}" has no documents{f" with {wanted}" if wanted else ""}; '
            f'expected one JSON object with the field "{field}" a line'
        )


def plain_text(file: str | Path) -> str:
    """The whole of a text file, plain or compressed."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise UsageError(f'there is no text file "{path}"')
    return b"".join(_chunks(path)).decode(errors="replace")


def _value(content: Any, name: str) -> Any:
    for part in name.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content


def _readable(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of the lines that are not empty; a file that ends in the middle of its compression says so."""
    try:
        for number, line in _lines(path):
            yield number, line.decode()
    except (UsageError, MemoryError):
        raise
    except UnicodeDecodeError as error:
        raise UsageError(f'"{path}" is not UTF-8 text ({error.reason}); expected JSON lines') from None
    except Exception as error:  # every compression has errors of its own
        raise UsageError(f'"{path}" is damaged or cut short ({error}); copy or download it again') from None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The same in bytes; no line is ever longer than `MAX_DOCUMENT_BYTES`."""
    pieces: list[bytes] = []
    length, number = 0, 1
    with closing(_chunks(path)) as chunks:
        for chunk in chunks:
            first, *others = chunk.split(b"\n")
            pieces.append(first)
            length += len(first)
            if length > MAX_DOCUMENT_BYTES:
                raise UsageError(
                    f'line {number} of "{path}" has more than {MAX_DOCUMENT_BYTES:,} bytes; expected a document a line'
                )
            if others:
                if length:
                    yield number, b"".join(pieces)
                yield from ((number + i, line) for i, line in enumerate(others[:-1], start=1) if line)
                pieces, length = others[-1:], len(others[-1])
                number += len(others)
    if length:
        yield number, b"".join(pieces)


def _chunks(path: Path) -> Generator[bytes, None, None]:
    """A file's bytes, unpacked piece by piece; one that unpacks to more than any text does is refused on the way."""
    unpacked = 0
    with open(path, "rb") as packed, closing(_unpacked(path, packed)) as chunks:
        for chunk in chunks:
            unpacked += len(chunk)
            if unpacked > ALWAYS_UNPACKED_BYTES + MAX_TEXT_RATIO * packed.tell():
                raise UsageError(
                    f'"{path}" unpacks to more than {unpacked:,} bytes from its first {packed.tell():,}, which no text '
                    "does; if it is yours, pass it uncompressed"
                )
            yield chunk


def _unpacked(path: Path, packed: IO[bytes]) -> Generator[bytes, None, None]:
    if path.suffix == ".zst":
        yield from _zstandard_chunks(packed)
        return
    openers: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}
    opener = openers.get(path.suffix, lambda file, _: nullcontext(file))
    with opener(packed, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _zstandard_chunks(packed: IO[bytes]) -> Iterator[bytes]:
    """Frame by frame: the package's own file object takes a file that ends early for one that ends."""
    import zstandard

    decompressor, frame = zstandard.ZstdDecompressor(), None
    while chunk := packed.read(ZSTANDARD_CHUNK_BYTES):
        while chunk:
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(chunk)
            chunk = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the last frame does not end")


def tokenized(documents: Iterable[Document], tokenizer: Any) -> Iterator[tuple[np.ndarray, str]]:
    """Each document's tokens with the end-of-text token behind, and its group, in order; tokenised in batches."""
    iterator = iter(documents)
    while batch := list(islice(iterator, TOKENIZED_AT_ONCE)):
        texts = [document.text for document in batch]
        # No special tokens but the one between documents; long documents are meant to be long.
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        for ids, document in zip(encoded, batch, strict=True):
            yield np.array([*ids, tokenizer.eos_token_id], dtype=np.int64), document.group


class Wrapped(NamedTuple):
    tokens: Tensor  # (sequences, length) int64
    groups: list[str]  # of each sequence: the one that most of its tokens come from
    num_documents: int  # that they were cut from


def wrap(pieces: Iterator[tuple[np.ndarray, str]], length: int, num_sequences: int, what: str) -> Wrapped:
    """Exactly `num_sequences`, of documents one behind the other.

    Takes no more pieces from the iterator than it needs, so another call can go on there.
    """
    if length < 2:
        raise UsageError(f"sequences of {length} tokens predict nothing; expected a length of at least 2")
    wanted, total = num_sequences * length, 0
    taken: list[np.ndarray] = []
    groups: list[str] = []
    while total < wanted and (piece := next(pieces, None)) is not None:
        taken.append(piece[0])
        groups.append(piece[1])
        total += len(piece[0])
    if total < wanted:
        raise UsageError(
            f"{what} has {total:,} tokens in {len(taken):,} documents, {total // length:,} sequences of {length:,}, "
            f"and {num_sequences:,} are wanted; pass more text, or ask for fewer or shorter ones"
        )
    names, codes = np.unique(groups, return_inverse=True)
    of_token = np.repeat(codes, [len(ids) for ids in taken])[:wanted].reshape(num_sequences, length)
    tokens = torch.from_numpy(np.concatenate(taken)[:wanted].reshape(num_sequences, length))
    return Wrapped(tokens, [str(names[np.bincount(row).argmax()]) for row in of_token], len(groups))
