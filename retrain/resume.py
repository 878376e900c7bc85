"""What an unfinished unit has so far, so that a kill costs a minute and not the whole of it.

A unit that takes longer than a minute saves its state now and again under names of its own choosing, and begins by
asking for it; when its entry is written, its work is removed. States are written whole or not at all and carry a
checksum: a torn or edited one counts as absent. Each says how long it took to get there, so that work that was resumed
is charged for all of its attempts.

    work = ResumeState.of(store, kind, key)
    state = work.load("chain")                       # None, or (arrays, record) of an earlier attempt
    if work.due(): work.save("chain", arrays, {"draw": 812})

What nobody came back to is removed after a week (`clean_resume_states`); `python -m bench.cache` counts it.
"""

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from retrain.safe_files import (
    PassingFileError,
    SafeFileError,
    make_folder,
    one_line,
    read_checked,
    read_json,
    read_safetensors,
    remove,
    whole_file,
    write_safetensors,
    write_whole,
)
from retrain.store import KEY, KIND, OLD_SECONDS, EntryInfo, Sha256, Store, StoreError, Table, folder_names, plain_data

WORK = ".work"  # beside the store's kinds
PROGRESS = ".progress.json"  # hidden: saying how far it is is no saved work
TELL_SECONDS = 1.0
SAVE_SECONDS = 30.0  # between two saves: a kill loses at most this and the save's own time


class StateContent(Struct, forbid_unknown_fields=True):
    """What the .json of a saved state holds; its arrays lie in one of two files, which take turns."""

    turn: Annotated[int, Meta(ge=0, le=1)]
    arrays_sha256: Sha256
    record: Table
    seconds: Annotated[float, Meta(ge=0, le=1e12)] = 0.0


class ResumeState:
    """The folder of one unit in progress. Only whoever holds the unit's lease writes to it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._saved = time.monotonic()
        self._own: set[str] = set()  # names saved by this attempt, whose seconds its clock has
        self.start_clock()

    def start_clock(self) -> None:
        """A stage of the work begins here: what is saved from now on took so long, and what it loads took before."""
        self._began, self.earlier_seconds = time.monotonic(), 0.0

    @classmethod
    def of(cls, store: Store, kind: str, key: str) -> "ResumeState":
        return cls(resume_folder(store.root, kind, key))

    def due(self) -> bool:
        """Whether it is time to save again."""
        return time.monotonic() - self._saved >= SAVE_SECONDS

    def save(self, name: str, arrays: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> None:
        """Replaces what was saved under this name. A disk that takes nothing must not stop the work itself."""
        with contextlib.suppress(OSError, PassingFileError):
            make_folder(self.folder.parent)
            make_folder(self.folder)
            before = self._description(name)
            turn = 1 - int((before or {}).get("turn", 0))
            with whole_file(self._arrays(name, turn)) as file:
                digest = write_safetensors(file, arrays)
            self._own.add(name)
            seconds = round(self.earlier_seconds + time.monotonic() - self._began, 3)
            kept = plain_data(record, "record")
            content = {"turn": turn, "arrays_sha256": digest, "record": kept, "seconds": seconds}
            write_whole(self.folder / f"{name}.json", json.dumps(content) + "\n")
            with contextlib.suppress(FileNotFoundError):
                self._arrays(name, 1 - turn).unlink()
        self._saved = time.monotonic()

    def load(self, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        """(arrays, record) as saved last; None when there is nothing sound.

        An error of the system is raised: taking it for nothing would begin anew, over what an hour had made.
        """
        content = self._description(name)
        if content is None:
            return None
        digest = hashlib.sha256()
        arrays = _unless_damaged(lambda: read_safetensors(self._arrays(name, content["turn"]), digest=digest))
        if arrays is None or digest.hexdigest() != content["arrays_sha256"]:
            return None
        if name not in self._own:
            self.earlier_seconds = max(self.earlier_seconds, content.get("seconds", 0.0))
        return arrays, content["record"]

    def clear(self) -> None:
        remove(self.folder)

    def mark(self) -> str:
        """What is saved, as a short text, empty for nothing; an attempt that got on leaves another than it found.

        It is of the states' content: saving the same once more is no progress.
        """
        lines = []
        with contextlib.suppress(OSError, PassingFileError):
            for name in sorted(os.listdir(self.folder)):
                state, _, ending = name.rpartition(".")
                if ending == "json" and (content := self._description(state)):
                    lines.append(json.dumps([state, content["arrays_sha256"], content["record"]], sort_keys=True))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] if lines else ""

    def advanced(self, before: str) -> bool:
        """Whether more is saved than when an attempt found what had this mark."""
        return self.mark() not in ("", before)

    def _arrays(self, name: str, turn: int) -> Path:
        return self.folder / f"{name}.{turn}.safetensors"

    def _description(self, name: str) -> dict[str, Any] | None:
        return _unless_damaged(lambda: read_checked(self.folder / f"{name}.json", StateContent))


def _unless_damaged(read: Callable[[], Any]) -> Any:
    """What was read; None for a damaged file. An error of the system is raised."""
    try:
        return read()
    except PassingFileError:
        raise
    except SafeFileError:
        return None


def progress_to_file(work: ResumeState) -> Callable[..., Iterator[Any]]:
    """A progress function for a process that nobody watches: it goes to a file, which `read_progress` reads."""

    def progress(items: Iterable[Any], total: int | None = None, description: str = "") -> Iterator[Any]:
        count = total if total is not None else len(items) if isinstance(items, Sized) else None
        latest = time.monotonic()
        for done, item in enumerate(items):
            if time.monotonic() - latest >= TELL_SECONDS:
                latest = time.monotonic()
                with contextlib.suppress(OSError):
                    make_folder(work.folder.parent)
                    make_folder(work.folder)
                    content = {"what": description, "done": done, "of": count}
                    write_whole(work.folder / PROGRESS, json.dumps(content), sync=False)  # old news is no loss
            yield item

    return progress


def read_progress(store: Store, kind: str, key: str) -> str:
    """How far a unit is, in a few words; empty where it has said nothing."""
    try:
        content = read_json(ResumeState.of(store, kind, key).folder / PROGRESS, max_bytes=4096)
        share = f" {100 * content['done'] / content['of']:.0f} %" if content["of"] else ""
        return one_line(f"{content['what']}{share}", 60)
    except (SafeFileError, KeyError, TypeError, ZeroDivisionError):
        return ""


class NullResumeState(ResumeState):
    """Keeps nothing: for a problem that nobody would resume."""

    def __init__(self) -> None:
        super().__init__(Path(os.devnull))

    def due(self) -> bool:
        return False

    def save(self, name: str, arrays: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> None:
        return None

    def load(self, name: str) -> None:
        return None


# ---- all of it ----


class UnfinishedUnit(EntryInfo):
    """A folder of work as it is listed."""

    def modified(self) -> float:
        """When anything in it changed last, in seconds since 1970; 0 when it is gone."""
        newest = 0.0
        with contextlib.suppress(OSError):
            newest = os.lstat(self.path).st_mtime
            for name in os.listdir(self.path):
                newest = max(newest, os.lstat(self.path / name).st_mtime)
        return newest

    def remove(self) -> None:
        remove(self.path)


def resume_folder(root: Path, kind: str, key: str) -> Path:
    return root / WORK / f"{kind}.{key}"


def unfinished_units(store: Store) -> list[UnfinishedUnit]:
    """Every folder of work in a cache, by name; whatever else lies there is passed over."""
    parent = store.root / WORK
    names = folder_names(parent, re.compile(rf"{KIND.pattern}\.{KEY.pattern}")) if not os.path.islink(parent) else []
    return [UnfinishedUnit(parent / name, *name.split(".")) for name in names]


def clean_resume_states(store: Store, held: Container[tuple[str, str]]) -> None:
    """Remove the work of units that are done, and what nobody has touched for a week; never of a unit that is held."""
    for work in unfinished_units(store):
        if (work.kind, work.key) in held:
            continue
        with contextlib.suppress(StoreError):  # to be cleaned another time
            if store.has_key(work.kind, work.key) or time.time() - work.modified() > OLD_SECONDS:
                work.remove()
