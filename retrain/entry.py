"""An entry of the cache as a folder: what its two files hold, how they are written, and how they are verified.

`arrays.safetensors` holds the arrays, `entry.json` the configuration, a free record and the checksums of both. The key
is a hash of the kind and the configuration. `retrain/store.py` says where entries lie and keeps them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from retrain.safe_files import (
    MAX_HEADER_BYTES,
    MAX_INTEGER_DIGITS,
    MAX_JSON_BYTES,
    SAFETENSORS_NAMES,
    SafeFileError,
    is_text,
    matching,
    one_line,
    parse_json,
    read_checked,
    read_safetensors,
    sync_folder,
    write_safetensors,
)

FORMAT_VERSION = 1
KEY_DIGITS = 20
MAX_ENTRY_BYTES = 16 * 2**30
ARRAYS_FILE = "arrays.safetensors"
ENTRY_FILE = "entry.json"

KIND = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
KEY = re.compile(rf"[0-9a-f]{{{KEY_DIGITS}}}")
RESERVED_KINDS = {"quarantine"}
Key = Annotated[str, matching(KEY.pattern)]
Kind = Annotated[str, matching(KIND.pattern)]
Sha256 = Annotated[str, matching("[0-9a-f]{64}")]
Table = dict[str, Any]


class EntryContent(msgspec.Struct, forbid_unknown_fields=True):
    """What entry.json holds."""

    format_version: Annotated[int, msgspec.Meta(ge=FORMAT_VERSION, le=FORMAT_VERSION)]
    kind: Kind
    key: Key
    config: Table
    record: Table
    arrays: Table
    arrays_sha256: Sha256
    sha256: Sha256


class StoreError(RuntimeError):
    """The store cannot be used, or was asked for something it cannot keep; the message is one line."""

    def __init__(self, message: str):
        super().__init__(one_line(message, 1000))


class UnwritableStoreError(StoreError):
    """The disk is full or does not take files: no other entry could be kept either, so work should stop."""


class DamagedEntryError(StoreError):
    """An entry that does not hold what its place and its checksums promise."""


class PassingStoreError(StoreError):
    """The system could not read an entry now (too many open files, a server away); the entry itself may be sound."""

    def __init__(self, path: Path, error: OSError | MemoryError | SafeFileError):
        if isinstance(error, SafeFileError):
            path, why = error.path, error.reason
        else:
            why = f"cannot be read ({getattr(error, 'strerror', None) or 'out of memory'})"
        super().__init__(f"{path}: {why}; this says nothing about the entry, which stays where it is: try again later")


@dataclass(frozen=True)
class Entry:
    """A verified entry; `arrays` are in memory and belong to the caller."""

    path: Path
    key: str
    kind: str
    config: dict[str, Any]
    record: dict[str, Any]
    arrays: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class EntryInfo:
    """An entry as it is listed, unread."""

    path: Path
    kind: str
    key: str

    def num_bytes(self) -> int:
        return sum(self._stat(name).st_size for name in (ARRAYS_FILE, ENTRY_FILE) if self._stat(name))

    def modified(self) -> float:
        """When it was written, in seconds since 1970; 0 when it is gone."""
        status = self._stat(ENTRY_FILE)
        return status.st_mtime if status else 0.0

    def _stat(self, name: str) -> Any:
        try:
            return os.lstat(self.path / name)
        except OSError:
            return None


# ---- what can be kept ----


def plain_data(value: Any, where: str = "config") -> Any:
    """`value` as plain JSON data: tuples become lists, numpy scalars Python ones; anything else is refused by name."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if not is_text(value):
            raise StoreError(f"{where} holds half of a surrogate pair, which is no character")
        return value
    if isinstance(value, np.generic) and isinstance(value, (np.bool_, np.integer, np.floating)):
        value = value.item()
        if isinstance(value, bool):
            return value
    if isinstance(value, int):
        if abs(value) >= 10**MAX_INTEGER_DIGITS:
            raise StoreError(f"{where} is a number of more than {MAX_INTEGER_DIGITS} digits; keep it as text")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise StoreError(f"{where} is {value}, which JSON cannot hold; use None, or keep it in an array")
        return float(value)
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str) or not is_text(name):
                raise StoreError(f"{where} has the key {name!r} of type {type(name).__name__}; keys must be text")
        return {name: plain_data(item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item, f"{where}[{index}]") for index, item in enumerate(value)]
    hint = "; paths do not belong in a key, since the cache is portable" if isinstance(value, os.PathLike) else ""
    raise StoreError(
        f"{where} is a {type(value).__name__}; only None, bool, int, float, str, list, tuple and dict can be kept{hint}"
    )


def canonical_json(value: Any, where: str = "config") -> str:
    """One text for one value: sorted keys, no blanks, ASCII, no NaN."""
    try:
        return json.dumps(plain_data(value, where), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise StoreError(f"{where} is nested too deeply") from None


def entry_key(kind: str, config: Mapping[str, Any]) -> str:
    """20 hexadecimal digits: the sha256 of the canonical JSON of the kind and the configuration."""
    if not KIND.fullmatch(kind) or kind in RESERVED_KINDS:
        raise StoreError(f"the kind of an entry must be lower-case letters, digits, - and _, not {kind!r}")
    text = f'{{"config":{canonical_json(config)},"kind":"{kind}"}}'
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]


# ---- the two files ----


def read_entry(path: Path, kind: str, key: str) -> Entry:
    """The entry in the folder `path`, fully checked; raises `SafeFileError` with one line that names the file."""
    entry_file = path / ENTRY_FILE
    arrays_file = path / ARRAYS_FILE
    content = read_checked(entry_file, EntryContent)
    claimed = content.pop("sha256")
    try:
        sealed = _sha256(content)
        belongs = content["kind"] == kind and content["key"] == key and entry_key(kind, content["config"]) == key
    except StoreError as error:
        raise SafeFileError(entry_file, str(error)) from None
    if claimed != sealed:
        raise SafeFileError(entry_file, "does not match its checksum (edited or damaged)")
    if not belongs:
        raise SafeFileError(entry_file, f"does not belong here: its configuration has another key than {key}")
    digest = hashlib.sha256()
    arrays = read_safetensors(arrays_file, MAX_ENTRY_BYTES, digest=digest)
    if digest.hexdigest() != content["arrays_sha256"]:
        raise SafeFileError(arrays_file, "does not match its checksum (edited or damaged)")
    if _describe(arrays) != content["arrays"]:
        raise SafeFileError(arrays_file, f"holds other arrays than {ENTRY_FILE} describes")
    return Entry(path, key, kind, content["config"], content["record"], arrays)


def fill_entry(
    folder: Path,
    kind: str,
    key: str,
    config: dict[str, Any],
    record: dict[str, Any],
    arrays: Mapping[str, np.ndarray],
) -> None:
    """Write both files of an entry into `folder` and flush them, and the folder, to disk."""
    num_bytes = sum(array.nbytes for array in arrays.values() if isinstance(array, (np.ndarray, np.generic)))
    if num_bytes > MAX_ENTRY_BYTES - MAX_HEADER_BYTES - 8:
        raise StoreError(f"{kind} {key} cannot be kept: {num_bytes:,} bytes of arrays are more than can be read back")
    with open(folder / ARRAYS_FILE, "xb") as file:
        arrays_sha256 = write_safetensors(file, arrays)
        file.flush()
        os.fsync(file.fileno())
    content: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "key": key,
        "config": config,
        "record": record,
        "arrays": _describe(arrays),
        "arrays_sha256": arrays_sha256,
    }
    content["sha256"] = _sha256(content)
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    if len(text) > MAX_JSON_BYTES:
        raise StoreError(
            f"{kind} {key} cannot be kept: its configuration and record take {len(text):,} bytes of JSON; "
            f"at most {MAX_JSON_BYTES:,} can be read back, so put bulk data into arrays"
        )
    try:
        parse_json(text, folder / ENTRY_FILE)
    except SafeFileError as error:
        raise StoreError(f"{kind} {key} cannot be kept, as it could not be read back: {error.reason}") from None
    with open(folder / ENTRY_FILE, "x", encoding="ascii") as text_file:
        text_file.write(text)
        text_file.flush()
        os.fsync(text_file.fileno())
    sync_folder(folder)


def _describe(arrays: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    return {
        name: {"dtype": SAFETENSORS_NAMES[np.dtype(array.dtype).newbyteorder("<")], "shape": list(array.shape)}
        for name, array in arrays.items()
    }


def _sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(content, "entry").encode()).hexdigest()
