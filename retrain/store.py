"""Content-addressed entries, written whole or not at all: the cache behind every command.

An entry is a folder `<root>/<kind>/<key[:2]>/<key>/` with two files: `arrays.safetensors` and `entry.json` (its
configuration, a free record, and checksums). The key is a hash of the kind and the configuration, so an entry's place
follows from what it is: caches made on two machines are merged by copying one over the other, and existing means
complete, since a folder is filled under a temporary name, flushed to disk and then renamed.

Nothing here is trusted on reading and nothing is unpickled: a truncated, edited or hostile entry is named in one line,
moved to `<root>/quarantine/`, and reported as absent, so that it is computed again.

    store = Store("~/.cache/tda-bench")
    entry = store.read("losses", config) or store.write("losses", config, {"loss": losses}, {"seconds": 1.2})
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
import shutil
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrain.safe_files import (
    MAX_JSON_BYTES,
    SAFETENSORS_NAMES,
    SafeFileError,
    one_line,
    read_json,
    read_safetensors,
    write_safetensors,
)

FORMAT_VERSION = 1
KEY_DIGITS = 20
MAX_ENTRY_BYTES = 16 * 2**30
STALE_SECONDS = 7 * 24 * 3600.0  # of another host's temporary folder: longer than any run of a method
ARRAYS_FILE = "arrays.safetensors"
ENTRY_FILE = "entry.json"
TEMPORARY = ".tmp"
QUARANTINE = "quarantine"

KIND = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
KEY = re.compile(rf"[0-9a-f]{{{KEY_DIGITS}}}")
FIELDS = {"format_version", "kind", "key", "config", "record", "arrays", "arrays_sha256", "sha256"}

logger = logging.getLogger(__name__)


def default_cache() -> str:
    """Where finished work is kept unless --cache says otherwise."""
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return os.environ.get("TDA_BENCH_CACHE") or str(Path(user_cache) / "tda-bench")


class StoreError(RuntimeError):
    """The store cannot be used, or was asked for something it cannot keep; the message is one line."""

    def __init__(self, message: str):
        super().__init__(one_line(message, 1000))


class UnwritableStoreError(StoreError):
    """The disk is full or does not take files: no other entry could be kept either, so work should stop."""


class DamagedEntryError(StoreError):
    """An entry that does not hold what its place and its checksums promise."""


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


def normalised(value: Any, where: str = "config") -> Any:
    """`value` as plain JSON data: tuples become lists, numpy scalars Python ones; anything else is refused by name."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, np.generic) and isinstance(value, (np.bool_, np.integer, np.floating)):
        value = value.item()
        if isinstance(value, bool):
            return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise StoreError(f"{where} is {value}, which JSON cannot hold; use None, or keep it in an array")
        return float(value)
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise StoreError(f"{where} has the key {name!r} of type {type(name).__name__}; keys must be strings")
        return {name: normalised(item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [normalised(item, f"{where}[{index}]") for index, item in enumerate(value)]
    hint = "; paths do not belong in a key, since the cache is portable" if isinstance(value, os.PathLike) else ""
    raise StoreError(
        f"{where} is a {type(value).__name__}; only None, bool, int, float, str, list, tuple and dict can be kept{hint}"
    )


def canonical_json(value: Any, where: str = "config") -> str:
    """One text for one value: sorted keys, no blanks, ASCII, no NaN."""
    try:
        return json.dumps(normalised(value, where), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise StoreError(f"{where} is nested too deeply") from None


def process_name() -> str:
    """`host.pid`, where host includes the pid namespace: two containers may share a name but not their processes."""
    return f"{host_name()}.{os.getpid()}"


def host_name() -> str:
    name = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:64] or "host"
    try:
        return f"{name}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return name


def process_alive(pid: int) -> bool:
    """Whether a process with this id runs on this host (a zombie does not)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return True


def sync_folder(path: str | os.PathLike[str]) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network filesystems cannot flush a folder
            raise
    finally:
        os.close(descriptor)


class Store:
    """A cache folder; see the module's text. Cheap to make, safe to use from many processes and hosts at once."""

    root: Path

    def __init__(self, root: str | os.PathLike[str], *, create: bool = True):
        if not os.fspath(root):
            raise StoreError("the cache folder is an empty path; give a folder, for example --cache ~/.cache/tda-bench")
        try:
            self.root = Path(os.path.abspath(os.path.expanduser(root)))
            if create:
                self.root.mkdir(parents=True, exist_ok=True)
                temporary = self.root / TEMPORARY
                temporary.mkdir(exist_ok=True)
                # Permission bits say nothing to root or on a read-only disk: only writing shows that one can write.
                probe = temporary / f"{process_name()}.{secrets.token_hex(8)}"
                probe.mkdir()
                probe.rmdir()
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
        """20 hexadecimal digits: the sha256 of the canonical JSON of the kind and the configuration."""
        if not KIND.fullmatch(kind) or kind == QUARANTINE:
            raise StoreError(f"the kind of an entry must be lower-case letters, digits, - and _, not {kind!r}")
        text = f'{{"config":{canonical_json(config)},"kind":"{kind}"}}'
        return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]

    def path(self, kind: str, config: Mapping[str, Any]) -> Path:
        return self.place(kind, self.key(kind, config))

    def place(self, kind: str, key: str) -> Path:
        return self.root / kind / key[:2] / key

    # -- reading --------------------------------------------------------------------------------------------------

    def has(self, kind: str, config: Mapping[str, Any]) -> bool:
        """Whether the entry is there; cheap, without a look inside (existing means complete)."""
        return self.has_key(kind, self.key(kind, config))

    def has_key(self, kind: str, key: str) -> bool:
        return os.path.exists(f"{self.root}/{kind}/{key[:2]}/{key}/{ENTRY_FILE}")

    def present(self, names: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Those of many (kind, key) that are there; for thousands, folders are listed instead of asking for each."""
        wanted = set(names)
        if len(wanted) < 500:
            return {name for name in wanted if self.has_key(*name)}
        kinds = {kind for kind, _ in wanted}
        return {(info.kind, info.key) for kind in kinds for info in self.entries(kind)} & wanted

    def read(self, kind: str, config: Mapping[str, Any]) -> Entry | None:
        """The verified entry, or None when it is absent or was damaged (then it is quarantined, with a warning)."""
        key = self.key(kind, config)
        path = self.place(kind, key)
        try:
            before = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"{path}: cannot be read ({error.strerror})") from None
        try:
            return self.verified(kind, key)
        except DamagedEntryError as error:
            self._quarantine(path, before, str(error))
            return None

    def verified(self, kind: str, key: str) -> Entry:
        """The entry of this key, fully checked; raises `DamagedEntryError` with one line that names the file."""
        path = self.place(kind, key)
        try:
            folder = os.lstat(path)
            if not stat.S_ISDIR(folder.st_mode):
                raise DamagedEntryError(f"{path}: is not a folder")
            real_root = os.path.realpath(self.root)
            if os.path.commonpath([real_root, os.path.realpath(path)]) != real_root:
                raise DamagedEntryError(f"{path}: leads out of the cache through a symbolic link")
            return self._verified(path, kind, key)
        except SafeFileError as error:
            raise DamagedEntryError(str(error)) from None
        except OSError as error:
            raise DamagedEntryError(f"{path}: cannot be read ({error.strerror})") from None

    def _verified(self, path: Path, kind: str, key: str) -> Entry:
        entry_file = path / ENTRY_FILE
        arrays_file = path / ARRAYS_FILE
        content = read_json(entry_file, MAX_JSON_BYTES)
        if not isinstance(content, dict) or set(content) != FIELDS:
            raise SafeFileError(entry_file, f"must have exactly the fields {', '.join(sorted(FIELDS))}")
        if content["format_version"] != FORMAT_VERSION:
            raise SafeFileError(
                entry_file, f"has format version {content['format_version']!r}; this program reads {FORMAT_VERSION}"
            )
        if not all(isinstance(content[name], dict) for name in ("config", "record", "arrays")):
            raise SafeFileError(entry_file, "config, record and arrays must be JSON objects")
        claimed = content.pop("sha256")
        if claimed != _sha256(content):
            raise SafeFileError(entry_file, "does not match its checksum (edited or damaged)")
        if content["kind"] != kind or content["key"] != key or self.key(kind, content["config"]) != key:
            raise SafeFileError(entry_file, f"does not belong here: its configuration has another key than {key}")
        digest = hashlib.sha256()
        arrays = read_safetensors(arrays_file, MAX_ENTRY_BYTES, digest=digest)
        if digest.hexdigest() != content["arrays_sha256"]:
            raise SafeFileError(arrays_file, "does not match its checksum (edited or damaged)")
        if _describe(arrays) != content["arrays"]:
            raise SafeFileError(arrays_file, f"holds other arrays than {ENTRY_FILE} describes")
        return Entry(path, key, kind, content["config"], content["record"], arrays)

    def quarantine(self, info: EntryInfo, reason: str) -> None:
        """Move an entry that was found damaged out of the way."""
        try:
            self._quarantine(info.path, os.lstat(info.path), reason)
        except FileNotFoundError:
            return

    def _quarantine(self, path: Path, before: os.stat_result, reason: str) -> None:
        target = self.root / QUARANTINE / f"{path.parent.parent.name}-{path.name}-{secrets.token_hex(4)}"
        action = f"moved to {target}"
        try:
            target.parent.mkdir(exist_ok=True)
            now = os.lstat(path)
            # Another process may have repaired it meanwhile: a fresh folder is left alone.
            if (now.st_dev, now.st_ino) == (before.st_dev, before.st_ino):
                os.rename(path, target)
        except FileNotFoundError:
            action = "already moved away by another process"
        except OSError as error:
            action = f"could not be moved away ({error.strerror})"
        logger.warning(one_line(f"damaged cache entry, to be computed again: {reason}; {action}", 1000))

    # -- writing --------------------------------------------------------------------------------------------------

    def write(
        self,
        kind: str,
        config: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray],
        record: Mapping[str, Any],
    ) -> Entry:
        """Keep an entry, whole or not at all. When a sound one is already there it stays, and is what comes back."""
        key = self.key(kind, config)
        path = self.place(kind, key)
        existing = self.read(kind, config)
        if existing is not None:
            return existing
        clean_record = normalised(record, "record")
        clean_config = normalised(config)
        temporary: Path | None = None
        try:
            for attempt in range(3):
                temporary = self._temporary_folder()
                try:
                    _fill(temporary, kind, key, clean_config, clean_record, arrays)
                except FileNotFoundError:
                    # A cleaner on a host of the same name took the folder for a dead process's: once more.
                    if attempt == 2:
                        raise
                    continue
                winner = self._publish(temporary, path, kind, config)
                if winner is not None:
                    return winner
                loaded = {name: np.asarray(array) for name, array in arrays.items()}
                return Entry(path, key, kind, clean_config, clean_record, loaded)
            raise StoreError(f"{path}: could not be written in 3 attempts")
        except OSError as error:
            raise self.unwritable(error) from None
        except TypeError as error:
            raise StoreError(f"{kind} {key} cannot be kept: {error}") from None
        finally:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)

    def unwritable(self, error: OSError) -> UnwritableStoreError:
        """What to say when the disk refuses to take a file."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return UnwritableStoreError(
                f"no space left in {self.root} ({error.strerror}); finished entries are safe: "
                "free some space and run the same command again"
            )
        return UnwritableStoreError(f"the cache {self.root} cannot be written ({error})")

    def _publish(self, temporary: Path, path: Path, kind: str, config: Mapping[str, Any]) -> Entry | None:
        """Rename a filled folder to its place; the entry of another writer who was first, or None when ours is it."""
        created = [folder for folder in (path.parent.parent, path.parent) if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in created:
            sync_folder(folder.parent)
        for _ in range(3):
            try:
                os.rename(temporary, path)
                sync_folder(path.parent)
                return None
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            existing = self.read(kind, config)  # a damaged one is moved out of the way by this
            if existing is not None:
                return existing
        raise StoreError(f"{path}: a damaged entry is in the way and cannot be moved")

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder to write in, gone afterwards; where the process was killed, once the next one opens the store."""
        folder = self._temporary_folder()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _temporary_folder(self) -> Path:
        folder = self.root / TEMPORARY / f"{process_name()}.{secrets.token_hex(8)}"
        try:
            folder.mkdir()
        except FileNotFoundError:
            folder.mkdir(parents=True)
        return folder

    def _clean_temporary(self) -> None:
        """Remove temporary folders of dead processes of this host, and those of other hosts older than a week."""
        host = host_name()
        try:
            names = os.listdir(self.root / TEMPORARY)
        except OSError:
            return
        for name in names:
            folder = self.root / TEMPORARY / name
            owner, _, rest = name.partition(".")
            pid = rest.partition(".")[0]
            try:
                old = time.time() - os.lstat(folder).st_mtime > STALE_SECONDS
            except OSError:
                continue
            if not process_alive(int(pid)) if owner == host and pid.isdigit() else old:
                shutil.rmtree(folder, ignore_errors=True)

    def remove(self, info: EntryInfo) -> None:
        """Delete an entry, as atomically as it was written: it is moved aside first."""
        trash = self.root / TEMPORARY / f"{process_name()}.{secrets.token_hex(8)}"
        try:
            os.rename(info.path, trash)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreError(f"{info.path}: cannot be removed ({error.strerror})") from None
        shutil.rmtree(trash, ignore_errors=True)

    def remove_key(self, kind: str, key: str) -> None:
        """Delete the entry of this key, if it is there."""
        self.remove(EntryInfo(self.place(kind, key), kind, key))

    # -- listing --------------------------------------------------------------------------------------------------

    def entries(self, kind: str | None = None) -> Iterator[EntryInfo]:
        """Every entry (of one kind), sorted by kind and key, unread; whatever else lies there is passed over."""
        kinds = [kind] if kind is not None else _folder_names(self.root, KIND)
        for name in kinds:
            if name == QUARANTINE:
                continue
            for prefix in _folder_names(self.root / name, re.compile("[0-9a-f]{2}")):
                for key in _folder_names(self.root / name / prefix, KEY):
                    if key.startswith(prefix):
                        yield EntryInfo(self.root / name / prefix / key, name, key)


def _fill(
    folder: Path,
    kind: str,
    key: str,
    config: dict[str, Any],
    record: dict[str, Any],
    arrays: Mapping[str, np.ndarray],
) -> None:
    """Write both files of an entry into `folder` and flush them, and the folder, to disk."""
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


def _folder_names(folder: Path, pattern: re.Pattern[str]) -> list[str]:
    try:
        with os.scandir(folder) as items:
            return sorted(
                item.name for item in items if pattern.fullmatch(item.name) and item.is_dir(follow_symlinks=False)
            )
    except OSError:
        return []
