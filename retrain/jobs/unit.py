"""A unit is one piece of work that can be done anywhere, any number of times, with one result; a batch is many of them.

`<root>/.jobs/<batch>/` holds `batch.json` (name, command, how it runs), `units-<hash>.jsonl` (one unit a line),
`events/<run>-<writer>.jsonl` (one event a line: start, done, failed, died, unfinished, fatal, exit) and the logs of
failures. Every writer appends to a file of its own, so nothing is locked and a torn last line is all that a crash can
leave. `python -m bench.cache status` reads these; what is *done* is never read from here but from the store.

All of it may have been edited or come from others: what is read is checked field by field, and nothing that is not of
the expected form becomes part of a path.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import json
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from retrain.leases import BATCH_ID, JobOrNone
from retrain.processes import process_name
from retrain.safe_files import (
    SafeFileError,
    append,
    conforms,
    make_folder,
    matching,
    open_plain,
    parse_json,
    read_checked,
    validate,
    write_whole,
)
from retrain.store import Key, Kind, Sha256, Store, Table, entry_key, folder_names, plain_data

CALL = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class UnitLine(msgspec.Struct, forbid_unknown_fields=True):
    """A unit as a line of a batch's list."""

    key: Key
    kind: Kind
    config: Table
    call: Annotated[str, matching(CALL.pattern)]
    payload: Table


@dataclass(frozen=True)
class Unit:
    """Its result is an entry of the store: it is done when the store has (kind, config).

    `call` names the function, "package.module:function", that computes and writes the entry when called as
    function(store, unit); `payload` is what it needs beyond the configuration. Both are plain JSON data, so that a
    unit is the same in this process, in another one and on another machine.
    """

    kind: str
    config: dict[str, Any]
    call: str
    payload: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", plain_data(self.config, "config"))
        object.__setattr__(self, "payload", plain_data(self.payload, "payload"))
        if not CALL.fullmatch(self.call):
            raise ValueError(f'a unit\'s call must read "package.module:function", not {self.call!r}')

    def with_config(self, **changes: Any) -> Unit:
        """The same work of a configuration that differs in these; what they have in common is not looked at again."""
        other = copy.copy(self)
        other.__dict__.pop("key", None)
        object.__setattr__(other, "config", {**self.config, **plain_data(changes, "config")})
        return other

    @cached_property
    def key(self) -> str:
        """Its entry's in any store."""
        return entry_key(self.kind, self.config)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "config": self.config, "call": self.call, "payload": self.payload}

    def function(self) -> Callable[[Store, Unit], Any]:
        module, _, function = self.call.partition(":")
        return getattr(importlib.import_module(module), function)


# ---- batches of units, on disk ----


JOBS = ".jobs"
MAX_LINES_BYTES = 2**32
MAX_LINE_BYTES = 4 * 2**20

RunId = Annotated[str, matching("[0-9A-Za-z]{1,40}")]
Seconds = Annotated[float, Meta(ge=0)]
Word = Annotated[str, matching("[a-z]{1,20}")]


class BatchContent(Struct, forbid_unknown_fields=True):
    """What batch.json holds."""

    name: str
    cluster: Word
    run: RunId
    num_units: Annotated[int, Meta(ge=0)]
    units_sha256: Sha256
    command: str
    process: Annotated[str, Meta(max_length=200)]
    started: Seconds


class EventLine(Struct):
    """A line of a batch's log; events have fields of their own beside these."""

    event: Word
    time: Seconds
    key: Key = ""
    seconds: Seconds = 0.0
    reason: str = ""
    error: Annotated[str, Meta(max_length=200)] = ""
    place: Annotated[str, Meta(max_length=5000)] = ""
    job: JobOrNone = ""


class JobBatch:
    """The folder of one batch; its id follows from its units, so the same command finds it again."""

    def __init__(self, store: Store, batch_id: str):
        if not BATCH_ID.fullmatch(batch_id):
            raise ValueError(f"a batch's id has 12 hexadecimal digits; {batch_id!r} has not")
        self.store = store
        self.id = batch_id
        self.folder = store.root / JOBS / batch_id

    @classmethod
    def of(cls, store: Store, keys: Iterable[str]) -> JobBatch:
        return cls(store, hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()[:12])

    @classmethod
    def all(cls, store: Store) -> list[JobBatch]:
        """Every batch of a store, the one started last first; what is not one of ours is passed over."""
        batches = [cls(store, name) for name in folder_names(store.root / JOBS, BATCH_ID)]
        found = [batch for batch in batches if os.path.lexists(batch.folder / "batch.json")]
        return sorted(found, key=lambda batch: (-batch.describe().get("started", 0.0), batch.id))

    # -- writing --------------------------------------------------------------------------------------------------

    def write(self, units: Mapping[str, Unit], *, name: str, cluster: str, run: str) -> str:
        """Write (or renew) the description of a batch; `units` is {key: unit}. Returns the sha256 of their list."""
        # The list is named by its content: jobs in a queue find the very list that they were submitted with.
        text = "".join(json.dumps({"key": key, **unit.to_json()}) + "\n" for key, unit in units.items())
        digest = hashlib.sha256(text.encode()).hexdigest()
        content = {
            "name": utf8(name)[:100_000], "cluster": cluster, "run": run, "num_units": len(units),
            "units_sha256": digest, "command": utf8(this_command())[:100_000], "process": process_name(),
            "started": time.time(),
        }  # fmt: skip
        self.subfolder("events")
        try:
            write_whole(self._units_file(digest), text, sync=False)
            write_whole(self.folder / "batch.json", json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise self.store.unwritable(error) from None
        return digest

    def subfolder(self, name: str) -> Path:
        """A folder of the batch, made where it is missing."""
        try:
            make_folder(self.store.root / JOBS)
            make_folder(self.folder)
            return make_folder(self.folder / name)
        except OSError as error:
            raise self.store.unwritable(error) from None

    def _units_file(self, digest: str) -> Path:
        return self.folder / f"units-{digest[:16]}.jsonl"

    # -- reading --------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """batch.json, or an empty table when it cannot be read or is not one."""
        with contextlib.suppress(SafeFileError, OSError):
            if not os.path.islink(self.folder):
                return read_checked(self.folder / "batch.json", BatchContent)
        return {}

    def units(self, digest: str) -> dict[str, Unit]:
        """{key: unit} of exactly the list with this sha256: a worker runs nothing else."""
        path = self._units_file(validate(digest, Sha256, self.folder, "units_sha256"))
        with open_plain(path, MAX_LINES_BYTES) as (file, _):
            data = file.read()
        if hashlib.sha256(data).hexdigest() != digest:
            raise SafeFileError(path, "has changed since the job was submitted; run the command again")
        lines = [parse_json(line, path) for line in data.decode().splitlines()]
        return {line.pop("key"): Unit(**line) for line in validate(lines, list[UnitLine], path)}

    def unit_names(self) -> list[tuple[str, str]]:
        """[(kind, key)] of every unit; cheap, for the status of thousands."""
        digest = self.describe().get("units_sha256")
        lines = read_lines(self._units_file(digest), UnitLine) if digest else []
        return [(content["kind"], content["key"]) for content in lines]

    def log(self, run: str, writer: str) -> EventLog:
        return EventLog(self.folder / "events" / f"{run}-{writer}.jsonl")

    def events(self, run: str) -> list[dict[str, Any]]:
        """Everything that happened in a run, by time."""
        return EventReader(self, run).new()


class EventReader:
    """Reads the events of a run as they come, each once; a line still being written is left for the next time."""

    def __init__(self, batch: JobBatch, run: str):
        self.folder = batch.folder / "events"
        # A run that is not one of ours must not lead elsewhere.
        self.pattern = f"{run}-*.jsonl" if conforms(run, RunId) else ""
        self._offsets: dict[Path, int] = {}

    def new(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for path in sorted(self.folder.glob(self.pattern)) if self.pattern else []:
            with contextlib.suppress(SafeFileError), open_plain(path, MAX_LINES_BYTES) as (file, _):
                file.seek(self._offsets.get(path, 0))
                while (line := file.readline(MAX_LINE_BYTES)).endswith(b"\n") or len(line) == MAX_LINE_BYTES:
                    self._offsets[path] = file.tell()
                    found += _objects([line], EventLine, path)
        return sorted(found, key=lambda event: event["time"])


@dataclass(frozen=True)
class EventLog:
    """An append-only file of one writer."""

    path: Path

    def add(self, event: str, **values: Any) -> None:
        append_line(self.path, {"event": event, "time": time.time(), **values})


def append_line(path: Path, content: dict[str, Any]) -> None:
    """Append one JSON object to a .jsonl file."""
    # A log that cannot be written (a full disk) must not stop the work: the store says so itself, and clearly.
    with contextlib.suppress(OSError):
        append(path, json.dumps(content) + "\n")


def read_lines(path: Path, schema: Any) -> Iterator[dict[str, Any]]:
    """The JSON objects of a .jsonl file that are like `schema`; a torn or strange line is passed over."""
    with contextlib.suppress(SafeFileError), open_plain(path, MAX_LINES_BYTES) as (file, _):
        # A line that is too long comes in pieces, none of which is JSON.
        yield from _objects(iter(lambda: file.readline(MAX_LINE_BYTES), b""), schema, path)


def _objects(lines: Iterable[bytes], schema: Any, path: Path) -> Iterator[dict[str, Any]]:
    for line in lines:
        with contextlib.suppress(SafeFileError, UnicodeDecodeError):
            yield validate(parse_json(line.decode(), path), schema, path)


def this_command() -> str:
    """How this process was started, as one would type it."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = ["python", "-m", spec.name.removesuffix(".__main__")] if spec else sys.argv[:1]
    return shlex.join([*program, *sys.argv[1:]])


def new_run() -> str:
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + secrets.token_hex(3)


def utf8(text: str) -> str:
    """Text that any log takes: a message or an argument may hold bytes that are no characters."""
    return text.encode("utf-8", "backslashreplace").decode()
