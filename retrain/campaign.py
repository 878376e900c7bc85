"""What a campaign is, on disk: which units it has, and what has happened to them.

`<root>/.jobs/<campaign>/` holds `campaign.json` (name, command, how it runs), `units-<hash>.jsonl` (one unit a line)
and `events/<run>-<writer>.jsonl` (one event a line: start, done, failed, died, fatal, exit). Every writer appends to a
file of its own, so nothing is locked and a torn last line is all that a crash can leave. `python -m bench.status`
reads these; what is *done* is never read from here but from the store.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.safe_files import SafeFileError, open_plain, parse_json, read_json, write_whole
from retrain.store import KEY, KIND, Store, normalised, process_name

JOBS = ".jobs"
MAX_LINES_BYTES = 2**30
MAX_LINE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Unit:
    """One piece of work that can be done anywhere, any number of times, with one result: an entry of the store.

    It is done when the store has (kind, config). `call` names the function, "package.module:function", that computes
    and writes the entry when called as function(store, unit); `payload` is what it needs beyond the configuration.
    Both are plain JSON data, so that a unit is the same in this process, in another one and on another machine.
    """

    kind: str
    config: dict[str, Any]
    call: str
    payload: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", normalised(self.config, "config"))
        object.__setattr__(self, "payload", normalised(self.payload, "payload"))
        if self.call.count(":") != 1:
            raise ValueError(f'a unit\'s call must read "package.module:function", not {self.call!r}')

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "config": self.config, "call": self.call, "payload": self.payload}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Unit:
        return cls(content["kind"], content["config"], content["call"], content["payload"])


class Campaign:
    """The folder of one campaign; its id follows from its units, so the same command finds it again."""

    def __init__(self, store: Store, campaign_id: str):
        self.store = store
        self.id = campaign_id
        self.folder = store.root / JOBS / campaign_id

    @classmethod
    def of(cls, store: Store, keys: Iterable[str]) -> Campaign:
        return cls(store, hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()[:12])

    def write(self, units: Mapping[str, Unit], *, name: str, cluster: str, run: str) -> None:
        """Write (or renew) the description of a campaign; `units` is {key: unit}."""
        (self.folder / "events").mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps({"key": key, **unit.to_json()}) + "\n" for key, unit in units.items())
        digest = hashlib.sha256(lines.encode()).hexdigest()
        # Named by its content: jobs in a queue find the very list that they were submitted with.
        if not self._units_file(digest).exists():
            write_whole(self._units_file(digest), lines)
        content = {
            "name": name,
            "cluster": cluster,
            "run": run,
            "num_units": len(units),
            "units_sha256": digest,
            "command": this_command(),
            "process": process_name(),
            "started": time.time(),
        }
        write_whole(self.folder / "campaign.json", json.dumps(content, indent=1) + "\n")

    def _units_file(self, digest: str) -> Path:
        return self.folder / f"units-{digest[:16]}.jsonl"

    @classmethod
    def all(cls, store: Store) -> list[Campaign]:
        """Every campaign of a store, the one started last first; unreadable ones are passed over."""
        try:
            names = os.listdir(store.root / JOBS)
        except OSError:
            return []
        found = [cls(store, name) for name in names if (store.root / JOBS / name / "campaign.json").is_file()]
        return sorted(found, key=lambda campaign: (-campaign.started(), campaign.id))

    def describe(self) -> dict[str, Any]:
        """campaign.json, or an empty table when it cannot be read."""
        try:
            content = read_json(self.folder / "campaign.json")
        except SafeFileError:
            return {}
        return content if isinstance(content, dict) else {}

    def started(self) -> float:
        value = self.describe().get("started", 0.0)
        return float(value) if isinstance(value, (int, float)) else 0.0

    def units(self, digest: str) -> dict[str, Unit]:
        """{key: unit} of exactly the list with this sha256: a worker runs nothing else."""
        path = self._units_file(digest)
        with open_plain(path, MAX_LINES_BYTES) as (file, _):
            data = file.read()
        if hashlib.sha256(data).hexdigest() != digest:
            raise SafeFileError(path, "has changed since the job was submitted; run the command again")
        units = {}
        for line in data.decode("utf-8").splitlines():
            content = parse_json(line, path)
            units[content["key"]] = Unit.from_json(content)
        return units

    def unit_names(self) -> list[tuple[str, str]]:
        """[(kind, key)] of every unit; cheap, for the status of thousands."""
        digest = self.describe().get("units_sha256", "")
        if not re.fullmatch("[0-9a-f]{64}", digest if isinstance(digest, str) else ""):
            return []
        names = []
        for content in read_lines(self._units_file(digest)):
            kind, key = content.get("kind"), content.get("key")
            if isinstance(kind, str) and isinstance(key, str) and KIND.fullmatch(kind) and KEY.fullmatch(key):
                names.append((kind, key))
        return names

    def log(self, run: str, writer: str) -> EventLog:
        return EventLog(self.folder / "events" / f"{run}-{writer}.jsonl")

    def events(self, run: str) -> list[dict[str, Any]]:
        """Everything that happened in a run, by time."""
        found: list[dict[str, Any]] = []
        if not run.isalnum():  # not one of ours: it must not lead elsewhere
            return found
        for path in sorted((self.folder / "events").glob(f"{run}-*.jsonl")):
            found += filter(_is_event, read_lines(path))
        return sorted(found, key=lambda event: event["time"])


class EventReader:
    """Reads the events of a run as they come, each once; a line still being written is left for the next time."""

    def __init__(self, campaign: Campaign, run: str):
        self.folder = campaign.folder / "events"
        self.pattern = f"{run}-*.jsonl"
        self._offsets: dict[Path, int] = {}

    def new(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for path in self.folder.glob(self.pattern):
            offset = self._offsets.get(path, 0)
            try:
                with open_plain(path, MAX_LINES_BYTES) as (file, size):
                    if size == offset:
                        continue
                    file.seek(offset)
                    whole, newline, _ = file.read().rpartition(b"\n")
            except SafeFileError:
                continue
            self._offsets[path] = offset + len(whole) + len(newline)
            found += filter(_is_event, _json_lines(whole.splitlines()))
        return sorted(found, key=lambda event: event["time"])


class EventLog:
    """An append-only file of one writer."""

    def __init__(self, path: Path):
        self.path = path

    def add(self, event: str, **values: Any) -> None:
        append_line(self.path, {"event": event, "time": time.time(), **values})


def append_line(path: Path, content: dict[str, Any]) -> None:
    """Append one JSON object to a .jsonl file."""
    # A log that cannot be written (a full disk) must not stop the work: the store says so itself, and clearly.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, json.dumps(content).encode() + b"\n")
        finally:
            os.close(descriptor)


def this_command() -> str:
    """How this process was started, as one would type it."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = ["python", "-m", spec.name.removesuffix(".__main__")] if spec else sys.argv[:1]
    return shlex.join([*program, *sys.argv[1:]])


def new_run() -> str:
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + secrets.token_hex(3)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a .jsonl file; a torn or strange line is passed over."""
    try:
        with open_plain(path, MAX_LINES_BYTES) as (file, _):
            lines = file.read().splitlines()
    except SafeFileError:
        return
    yield from _json_lines(lines)


def _is_event(event: dict[str, Any]) -> bool:
    """Whether the numbers of an event are numbers: what is read here may have been edited."""
    numbers = [event.get("time"), event.get("seconds", 0.0) if event.get("event") == "done" else 0.0]
    return all(isinstance(number, (int, float)) for number in numbers)


def _json_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            content = json.loads(line) if len(line) <= MAX_LINE_BYTES else None
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict):
            yield content
