"""What a campaign is, on disk: which units it has, and what has happened to them.

`<root>/.jobs/<campaign>/` holds `campaign.json` (name, command, how it runs), `units.jsonl` (one unit a line) and
`events/<run>-<writer>.jsonl` (one event a line: done, failed, died, start, exit). Every writer appends to a file of its
own, so nothing is locked and a torn last line is all that a crash can leave. `python -m bench.status` reads these; what
is *done* is never read from here but from the store.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.safe_files import SafeFileError, open_plain, parse_json, read_json
from retrain.store import Store, normalised, process_name

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
    def create(cls, store: Store, units: Mapping[str, Unit], *, name: str, cluster: str, run: str) -> Campaign:
        """Write (or renew) the description of a campaign; `units` is {key: unit}."""
        digest = hashlib.sha256("\n".join(sorted(units)).encode()).hexdigest()
        campaign = cls(store, digest[:12])
        (campaign.folder / "events").mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps({"key": key, **unit.to_json()}) + "\n" for key, unit in units.items())
        replace_text(campaign.folder / "units.jsonl", lines)
        content = {
            "name": name,
            "cluster": cluster,
            "run": run,
            "num_units": len(units),
            "units_sha256": hashlib.sha256(lines.encode()).hexdigest(),
            "command": " ".join(sys.argv),
            "process": process_name(),
            "started": time.time(),
        }
        replace_text(campaign.folder / "campaign.json", json.dumps(content, indent=1) + "\n")
        return campaign

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

    def units(self, expected_sha256: str | None = None) -> dict[str, Unit]:
        """{key: unit}; with a checksum, exactly the file that had it (a worker runs nothing else)."""
        path = self.folder / "units.jsonl"
        with open_plain(path, MAX_LINES_BYTES) as (file, _):
            data = file.read()
        if expected_sha256 is not None and hashlib.sha256(data).hexdigest() != expected_sha256:
            raise SafeFileError(path, "has changed since the job was submitted; run the command again")
        units = {}
        for line in data.decode("utf-8", "replace").splitlines():
            content = parse_json(line, path)
            units[content["key"]] = Unit.from_json(content)
        return units

    def unit_names(self) -> list[tuple[str, str]]:
        """[(kind, key)] of every unit; cheap, for the status of thousands."""
        path = self.folder / "units.jsonl"
        names = []
        for content in read_lines(path):
            if isinstance(content.get("kind"), str) and isinstance(content.get("key"), str):
                names.append((content["kind"], content["key"]))
        return names

    def log(self, run: str, writer: str) -> EventLog:
        return EventLog(self.folder / "events" / f"{run}-{writer}.jsonl")

    def events(self, run: str) -> list[dict[str, Any]]:
        """Everything that happened in a run, by time."""
        found = []
        for path in sorted((self.folder / "events").glob(f"{run}-*.jsonl")):
            found += list(read_lines(path))
        return sorted(found, key=lambda event: event["time"] if isinstance(event.get("time"), float) else 0.0)


class EventLog:
    """An append-only file of one writer."""

    def __init__(self, path: Path):
        self.path = path

    def add(self, event: str, **values: Any) -> None:
        line = json.dumps({"event": event, "time": time.time(), **values}) + "\n"
        # A log that cannot be written (a full disk) must not stop the work: the store says so itself, and clearly.
        with contextlib.suppress(OSError):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)


def new_run() -> str:
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + secrets.token_hex(3)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a .jsonl file; a torn or strange line is passed over."""
    try:
        with open_plain(path, MAX_LINES_BYTES) as (file, _):
            lines: Iterable[bytes] = file.read().splitlines()
    except SafeFileError:
        return
    for line in lines:
        try:
            content = json.loads(line) if len(line) <= MAX_LINE_BYTES else None
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict):
            yield content


def replace_text(path: Path, text: str) -> None:
    """Put `text` into a file at once: a reader sees the old or the new one."""
    draft = path.with_name(f".{path.name}.{process_name()}.{secrets.token_hex(4)}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
