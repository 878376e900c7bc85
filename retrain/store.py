"""Content-addressed entries, written whole or not at all: the cache behind every command.

An entry is a folder `<root>/<kind>/<key[:2]>/<key>/`. Its place follows from what it is: caches
made on two machines are merged by copying one over the other. A folder is filled under a temporary name, flushed to
disk and then renamed, so that what this program wrote is complete as soon as it is there.

Nothing here is trusted on reading and nothing is unpickled: a truncated, edited or hostile entry is named in one line,
moved to `<root>/quarantine/`, and reported as absent, so that it is computed again. Two things are not damage: an error
of the system (`PassingStoreError`), and an entry that somebody is copying into the cache, which is waited for.

    store = Store("~/.cache/tda-bench")
    entry = store.read("losses", config) or store.write("losses", config, {"loss": losses}, {"seconds": 1.2})

A cache that cannot be written can still be read; only what would change it fails, with one line.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from retrain.processes import host_name, process_alive, process_name
from retrain.safe_files import (
    ABOUT_THE_FILE,
    MAX_INTEGER_DIGITS,
    MAX_JSON_BYTES,
    SAFETENSORS_NAMES,
    PassingFileError,
    SafeFileError,
    folder_bytes,
    is_text,
    make_folder,
    matching,
    one_line,
    parse_json,
    read_checked,
    read_safetensors,
    remove,
    safetensors_bytes,
    sync_folder,
    write_whole,
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
        why = getattr(error, "reason", "") or f"cannot be read ({getattr(error, 'strerror', None) or 'out of memory'})"
        path = getattr(error, "path", path)
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
        return folder_bytes(self.path)

    def modified(self) -> float:
        """When it was written, in seconds since 1970; 0 when it is gone."""
        with contextlib.suppress(OSError):
            return os.lstat(self.path / ENTRY_FILE).st_mtime
        return 0.0


# ---- what can be kept ----


def plain_data(value: Any, where: str = "config") -> Any:
    """`value` as plain JSON data: tuples become lists, numpy scalars Python ones; anything else is refused by name."""
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        value = value.item()
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str) or not is_text(name):
                raise StoreError(f"{where} has the key {name!r} of type {type(name).__name__}; keys must be text")
        return {name: plain_data(item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, str) and not is_text(value):
        raise StoreError(f"{where} holds half of a surrogate pair, which is no character")
    if isinstance(value, int) and abs(value) >= 10**MAX_INTEGER_DIGITS:
        raise StoreError(f"{where} is a number of more than {MAX_INTEGER_DIGITS} digits; keep it as text")
    if isinstance(value, float) and not math.isfinite(value):
        raise StoreError(f"{where} is {value}, which JSON cannot hold; use None, or keep it in an array")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
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


def _describe(arrays: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    return {
        name: {"dtype": SAFETENSORS_NAMES[np.dtype(array.dtype).newbyteorder("<")], "shape": list(array.shape)}
        for name, array in arrays.items()
    }


def _sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(content, "entry").encode()).hexdigest()


# ---- the store ----

TEMPORARY = ".tmp"
QUARANTINE = "quarantine"
TEMPORARY_NAME = re.compile(r"([A-Za-z0-9-]+)\.([0-9]+)\.[0-9a-f]+")
OLD_SECONDS = 7 * 24 * 3600.0  # of another host's temporary folder: longer than any run of a method
# An unsound entry that changed within this time may be a copy under way. Longer than a network's caches of names.
QUIET_SECONDS = 60.0
LOOK_SECONDS = 0.25  # between two looks at it
# Errors that may be gone a moment later; tried again after so many seconds.
PASSING = {errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR}
RETRY_SECONDS = (0.1, 1.0)

logger = logging.getLogger(__name__)


def default_cache() -> str:
    """Where finished work is kept unless --cache says otherwise; empty where nobody knows a home folder."""
    try:
        user_cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    except RuntimeError:  # HOME is not set, and this user has no entry in /etc/passwd
        user_cache = ""
    return os.environ.get("TDA_BENCH_CACHE") or (user_cache and str(Path(user_cache) / "tda-bench"))


class Store:
    """A cache folder; see the module's text. Cheap to make, safe to use from many processes and hosts at once."""

    root: Path

    def __init__(self, root: str | os.PathLike[str], *, create: bool = True):
        expanded = os.path.expanduser(os.fspath(root))
        if not expanded or expanded.startswith("~"):
            problem = "is below an unknown home" if expanded else "is an empty path"
            raise StoreError(f"the cache folder {root} {problem}; give another, as in --cache /folder")
        try:
            self.root = Path(os.path.abspath(expanded))
            if create:
                self.root.mkdir(parents=True, exist_ok=True)
            elif not self.root.is_dir():
                raise StoreError(f"the cache folder {self.root} does not exist")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise StoreError(f"the cache folder {root} cannot be used ({reason}); give another with --cache") from None
        if create:
            self._clean_temporary()

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r})"

    # -- places ---------------------------------------------------------------------------------------------------

    def key(self, kind: str, config: Mapping[str, Any]) -> str:
        """20 hexadecimal digits; see `entry_key`."""
        return entry_key(kind, config)

    def place(self, kind: str, key: str) -> Path:
        return self.root / kind / key[:2] / key

    # -- reading --------------------------------------------------------------------------------------------------

    def has(self, kind: str, config: Mapping[str, Any]) -> bool:
        """Whether the entry is there; cheap, without a look inside (`read` has the last word)."""
        return self.has_key(kind, self.key(kind, config))

    def has_key(self, kind: str, key: str) -> bool:
        path = f"{self.root}/{kind}/{key[:2]}/{key}"
        try:
            # Both, as whoever copies an entry into the cache may bring them in any order.
            os.stat(f"{path}/{ENTRY_FILE}")
            os.stat(f"{path}/{ARRAYS_FILE}")
        except OSError as error:
            if error.errno in ABOUT_THE_FILE:
                return False
            raise PassingStoreError(Path(path), error) from None
        return True

    def present(self, names: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Those of many (kind, key) that are there; for thousands, folders are listed instead of asking for each."""
        wanted = set(names)
        if len(wanted) >= 500:
            kinds = {kind for kind, _ in wanted}
            wanted &= {(info.kind, info.key) for kind in kinds for info in self.entries(kind)}
        return {name for name in wanted if self.has_key(*name)}

    def read(self, kind: str, config: Mapping[str, Any]) -> Entry | None:
        """The verified entry, or None when it is absent or was damaged (then it is quarantined, with a warning)."""
        return self._read_key(kind, self.key(kind, config))

    def _read_key(self, kind: str, key: str) -> Entry | None:
        for seconds in RETRY_SECONDS:
            try:
                return self._read(kind, key)
            except PassingStoreError:
                time.sleep(seconds)
        return self._read(kind, key)

    def _read(self, kind: str, key: str) -> Entry | None:
        path = self.place(kind, key)
        seen, since, waiting = _look(path), time.monotonic(), False
        while seen is not None:
            try:
                return self.verified(kind, key)
            except DamagedEntryError as error:
                damage = str(error)
            # Unsound: is it damaged, or is somebody still copying it? Wait as long as it changes.
            while (now := _look(path)) == seen:
                if _quiet(now) or time.monotonic() - since > QUIET_SECONDS:
                    self._quarantine(path, seen, damage)
                    return None
                if not waiting:
                    logger.warning(one_line(f"{damage}; changed just now, so waiting for whoever copies it", 1000))
                    waiting = True
                time.sleep(LOOK_SECONDS)
            seen, since = now, time.monotonic()
        return None

    def verified(self, kind: str, key: str) -> Entry:
        """The entry of this key, fully checked; raises `DamagedEntryError` with one line that names the file."""
        path = self.place(kind, key)
        try:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise DamagedEntryError(f"{path}: is not a folder")
            if not path.resolve().is_relative_to(self.root.resolve()):
                raise DamagedEntryError(f"{path}: leads out of the cache through a symbolic link")
            content, digest = read_checked(path / ENTRY_FILE, EntryContent), hashlib.sha256()
            arrays = read_safetensors(path / ARRAYS_FILE, MAX_ENTRY_BYTES, digest=digest)
        except (PassingFileError, MemoryError) as error:
            raise PassingStoreError(path, error) from None
        except SafeFileError as error:
            raise DamagedEntryError(str(error)) from None
        except OSError as error:
            if error.errno not in ABOUT_THE_FILE:
                raise PassingStoreError(path, error) from None
            raise DamagedEntryError(f"{path}: cannot be read ({error.strerror})") from None
        if content.pop("sha256") != _sha256(content):
            raise DamagedEntryError(f"{path / ENTRY_FILE}: does not match its checksum (edited or damaged)")
        if content["kind"] != kind or not content["key"] == key == entry_key(kind, content["config"]):
            raise DamagedEntryError(f"{path / ENTRY_FILE}: its configuration has another key than {key}")
        if digest.hexdigest() != content["arrays_sha256"] or _describe(arrays) != content["arrays"]:
            raise DamagedEntryError(f"{path / ARRAYS_FILE}: does not match its checksum in {ENTRY_FILE}")
        return Entry(path, key, kind, content["config"], content["record"], arrays)

    def arriving(self, info: EntryInfo) -> bool:
        """Whether an entry changed a moment ago: when it is unsound, somebody may still be copying it."""
        seen = _look(info.path)
        return seen is not None and not _quiet(seen)

    def quarantine(self, info: EntryInfo, reason: str) -> None:
        """Move an entry that was found damaged out of the way."""
        seen = _look(info.path)
        if seen is not None:
            self._quarantine(info.path, seen, reason)

    def _quarantine(self, path: Path, seen: tuple[float, Any], reason: str) -> None:
        target = self.root / QUARANTINE / f"{path.parent.parent.name}-{path.name}-{secrets.token_hex(4)}"
        action = f"moved to {target}"
        try:
            make_folder(target.parent)
            # Another process may have repaired it meanwhile: what is not as it was seen is left alone.
            if _look(path) == seen:
                os.rename(path, target)
        except FileNotFoundError:
            action = "already moved away by another process"
        except OSError as error:
            action = f"could not be moved away ({error.strerror})"
        logger.warning(one_line(f"damaged cache entry, to be computed again: {reason}; {action}", 1000))

    # -- writing --------------------------------------------------------------------------------------------------

    def write(
        self, kind: str, config: Mapping[str, Any], arrays: Mapping[str, np.ndarray], record: Mapping[str, Any]
    ) -> Entry:
        """Keep an entry, whole or not at all. When a sound one is already there it stays, and is what comes back."""
        key = self.key(kind, config)
        existing = self._read_key(kind, key)
        if existing is not None:
            return existing
        try:
            content = self._content(kind, key, plain_data(config), plain_data(record, "record"), arrays)
        except TypeError as error:
            raise StoreError(f"{kind} {key} cannot be kept: {error}") from None
        for seconds in (*RETRY_SECONDS, None):
            try:
                winner = self._publish(kind, key, *content)
                break
            except OSError as error:
                # What took an hour to compute is not given up for an error of a moment. A missing file is one too:
                # a cleaner on a host of the same name took the temporary folder for a dead process's.
                if seconds is None or error.errno not in PASSING | {errno.ENOENT}:
                    raise self.unwritable(error) from None
                time.sleep(seconds)
        loaded = {name: np.asarray(array) for name, array in arrays.items()}
        return winner or Entry(self.place(kind, key), key, kind, plain_data(config), plain_data(record), loaded)

    def _content(
        self, kind: str, key: str, config: dict[str, Any], record: dict[str, Any], arrays: Mapping[str, np.ndarray]
    ) -> tuple[bytes, str]:
        """What both files of an entry hold; what could not be read back is refused."""
        data = safetensors_bytes(arrays)
        content: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "kind": kind,
            "key": key,
            "config": config,
            "record": record,
            "arrays": _describe(arrays),
            "arrays_sha256": hashlib.sha256(data).hexdigest(),
        }
        text = json.dumps({**content, "sha256": _sha256(content)}, indent=1, allow_nan=False) + "\n"
        for what, size, most in (("arrays", len(data), MAX_ENTRY_BYTES), ("JSON", len(text), MAX_JSON_BYTES)):
            if size > most:
                problem = f"{size:,} bytes of {what}, and at most {most:,} can be read back"
                raise StoreError(f"{kind} {key} cannot be kept: it has {problem}; bulk data belongs into arrays")
        try:
            parse_json(text, self.place(kind, key))
        except SafeFileError as error:
            raise StoreError(f"{kind} {key} cannot be kept, as it could not be read back: {error.reason}") from None
        return data, text

    def unwritable(self, error: OSError) -> UnwritableStoreError:
        """What to say when the disk refuses to take a file."""
        problem = f"the cache {self.root} cannot be written ({error})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = f"no space left in {self.root} ({error.strerror}); finished entries are safe: free some space "
            problem += "and run the same command again"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            problem = f"the cache {self.root} can only be read ({error.strerror}), and something is missing from it; "
            problem += "give a folder of your own with --cache"
        return UnwritableStoreError(problem)

    def _publish(self, kind: str, key: str, data: bytes, text: str) -> Entry | None:
        """Fill a folder and rename it to its place; the entry of another writer who was first, else None."""
        path, temporary = self.place(kind, key), self._temporary_folder()
        try:
            write_whole(temporary / ARRAYS_FILE, data)
            write_whole(temporary / ENTRY_FILE, text)
            for folder in (path.parent.parent, path.parent):
                is_new = not folder.exists()
                make_folder(folder)
                if is_new:
                    sync_folder(folder.parent)
            for _ in range(3):
                try:
                    os.rename(temporary, path)
                    sync_folder(path.parent)
                    return None
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                        raise
                existing = self._read_key(kind, key)  # a damaged one is moved out of the way by this
                if existing is not None:
                    return existing
            raise StoreError(f"{path}: a damaged entry is in the way and cannot be moved")
        finally:
            remove(temporary)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder to write in, gone afterwards; where the process was killed, once the next one opens the store."""
        try:
            folder = self._temporary_folder()
        except OSError as error:
            raise self.unwritable(error) from None
        try:
            yield folder
        finally:
            remove(folder)

    def _temporary_folder(self) -> Path:
        return make_folder(make_folder(self.root / TEMPORARY) / f"{process_name()}.{secrets.token_hex(8)}")

    def _clean_temporary(self) -> None:
        """Remove temporary folders of dead processes of this host, and those of other hosts older than a week."""
        host, parent = host_name(), self.root / TEMPORARY
        for name in folder_names(parent, TEMPORARY_NAME) if not os.path.islink(parent) else []:
            owner, pid, _ = name.split(".")
            try:
                old = time.time() - os.lstat(parent / name).st_mtime > OLD_SECONDS
            except OSError:
                continue
            if not process_alive(int(pid)) if owner == host else old:
                remove(parent / name)

    def remove_key(self, kind: str, key: str) -> bool:
        """Delete an entry, as atomically as it was written: it is moved aside first. Whether there was one."""
        path = self.place(kind, key)
        if not KIND.fullmatch(kind) or not KEY.fullmatch(key) or kind in RESERVED_KINDS:
            raise StoreError(f"{kind} {key} is not the name of an entry")
        try:
            trash = make_folder(self.root / TEMPORARY) / f"{process_name()}.{secrets.token_hex(8)}"
            os.rename(path, trash)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(f"{path}: cannot be removed ({error.strerror})") from None
        remove(trash)
        return True

    # -- listing --------------------------------------------------------------------------------------------------

    def entries(self, kind: str | None = None) -> Iterator[EntryInfo]:
        """Every entry (of one kind), sorted by kind and key, unread; whatever else lies there is passed over."""
        kinds = [kind] if kind is not None else folder_names(self.root, KIND)
        for name in kinds:
            if name in RESERVED_KINDS:
                continue
            for prefix in folder_names(self.root / name, re.compile("[0-9a-f]{2}")):
                for key in folder_names(self.root / name / prefix, KEY):
                    if key.startswith(prefix):
                        yield EntryInfo(self.root / name / prefix / key, name, key)


def _look(path: Path) -> tuple[float, Any] | None:
    """(when an entry changed last, what is seen of it from outside); None when there is nothing.

    Another look that differs means that somebody is at it.
    """
    try:
        folder = os.lstat(path)
        if not stat.S_ISDIR(folder.st_mode):
            return 0.0, (folder.st_ino, folder.st_mode)  # nobody copies an entry in this shape
        items = {name: os.lstat(path / name) for name in sorted(os.listdir(path))}
    except OSError as error:
        if error.errno not in ABOUT_THE_FILE:
            raise PassingStoreError(path, error) from None
        # What was listed is gone again: a change, too.
        return (time.time(), ()) if os.path.lexists(path) else None
    changed = max(max(status.st_mtime, status.st_ctime) for status in (folder, *items.values()))
    return changed, (
        folder.st_ino,
        [(name, s.st_ino, s.st_size, s.st_mode, s.st_ctime_ns) for name, s in items.items()],
    )


def _quiet(seen: tuple[float, Any]) -> bool:
    """Whether an entry's last change is long ago. One in the future says nothing: somebody's clock is wrong."""
    return time.time() - seen[0] > QUIET_SECONDS


def folder_names(folder: Path, pattern: re.Pattern[str]) -> list[str]:
    try:
        with os.scandir(folder) as items:
            return sorted(
                item.name for item in items if pattern.fullmatch(item.name) and item.is_dir(follow_symlinks=False)
            )
    except OSError:
        return []
