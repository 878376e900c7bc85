"""What an unfinished unit has so far, so that a kill costs a minute and not the whole of it.

A unit that takes longer than a minute saves its state now and again under names of its own choosing, and begins by
asking for it; when its entry is written, its work is removed. States are written whole or not at all and carry a
checksum: a torn or edited one counts as absent. `folder` is for what a library insists on writing itself.

    work = Work.of(store, kind, key)
    state = work.load("chain")                       # None, or (arrays, record) of an earlier attempt
    if work.due(): work.save("chain", arrays, {"draw": 812})
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from retrain.safe_files import SafeFileError, read_json, read_safetensors, whole_file, write_safetensors, write_whole
from retrain.store import Store, normalised

WORK = ".work"  # beside the store's kinds
SAVE_SECONDS = 30.0  # between two saves: a kill loses at most this and the save's own time


class Work:
    """The folder of one unit in progress. Only whoever holds the unit's claim writes to it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._saved = time.monotonic()

    @classmethod
    def of(cls, store: Store, kind: str, key: str) -> "Work":
        return cls(store.root / WORK / f"{kind}.{key}")

    def due(self) -> bool:
        """Whether it is time to save again."""
        return time.monotonic() - self._saved >= SAVE_SECONDS

    def save(self, name: str, arrays: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> None:
        """Replaces what was saved under this name. A disk that takes nothing must not stop the work itself."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            before = self._description(name)
            turn = 1 - int((before or {}).get("turn", 0))
            with whole_file(self._arrays(name, turn)) as file:
                digest = write_safetensors(file, arrays)
                file.flush()
                os.fsync(file.fileno())
            content = {"turn": turn, "arrays_sha256": digest, "record": normalised(record, "record")}
            write_whole(self.folder / f"{name}.json", json.dumps(content) + "\n")
            with contextlib.suppress(FileNotFoundError):
                self._arrays(name, 1 - turn).unlink()
        self._saved = time.monotonic()

    def load(self, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        """(arrays, record) as saved last; None when there is nothing sound."""
        content = self._description(name)
        if content is None:
            return None
        digest = hashlib.sha256()
        try:
            arrays = read_safetensors(self._arrays(name, content["turn"]), digest=digest)
        except SafeFileError:
            return None
        return (arrays, content["record"]) if digest.hexdigest() == content["arrays_sha256"] else None

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _arrays(self, name: str, turn: int) -> Path:
        return self.folder / f"{name}.{turn}.safetensors"

    def _description(self, name: str) -> dict[str, Any] | None:
        try:
            content = read_json(self.folder / f"{name}.json")
        except SafeFileError:
            return None
        sound = isinstance(content, dict) and content.get("turn") in (0, 1) and isinstance(content.get("record"), dict)
        return content if sound else None


class NoWork(Work):
    """Keeps nothing: for a problem that nobody would resume."""

    def __init__(self, folder: Path | None = None):
        super().__init__(folder or Path(os.devnull))

    def due(self) -> bool:
        return False

    def save(self, name: str, arrays: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> None:
        return None

    def load(self, name: str) -> None:
        return None
