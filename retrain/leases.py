"""Who is working on what: one small file per unit in progress, so that no two workers do the same unit.

A lease is a file `<root>/.leases/<kind>.<key>` that appears whole (hard link) and names its holder: host, process,
Slurm job. While it is held its time stamp is renewed. It is stale, and is taken over, when

- its holder is a dead process of this host, or an earlier incarnation of the same Slurm job;
- its holder is elsewhere and has not renewed it for `STALE_SECONDS` by the clock of the disk;
- this process itself has watched it for `STALE_SECONDS` and nothing changed: whatever clocks say, and also where the
  holder was stopped, names no possible process, or is no file at all.

Leases only save work: the store itself stays correct when two workers race on one unit, because the first whole entry
wins.

    lease = Leases(store.root).take("losses", key)
    if lease is not None:
        with lease: ...
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct, structs

from retrain.processes import host_name, process_alive, process_started
from retrain.safe_files import PassingFileError, SafeFileError, make_folder, matching, read_checked, remove
from retrain.store import KIND, Store, StoreError

LEASES = ".leases"
BATCH_ID = re.compile("[0-9a-f]{12}")
JOB = re.compile(r"[0-9]{1,20}(_[0-9]{1,20})?")
Job = Annotated[str, matching(JOB.pattern)]
JobOrNone = Annotated[str, matching(f"({JOB.pattern})?")]
LOCK = ".lock"
RENEW_SECONDS = 10.0
# Several missed renewals: a holder on another host that is only slow (or whose disk is) keeps its lease.
STALE_SECONDS = 90.0
LOCK_SECONDS = 5.0
LEFT_SECONDS = 86400.0  # a hidden file older than this was left by a killed process

LEASE_NAME = re.compile(rf"({KIND.pattern})\.([0-9a-f]{{1,64}})")


class Holder(Struct, frozen=True, forbid_unknown_fields=True):
    """The process that holds a lease, as the lease's file has it."""

    host: Annotated[str, Meta(max_length=200)]
    pid: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    started: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    job: JobOrNone = ""
    restart: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    token: Annotated[str, matching("[0-9a-f]{0,64}")] = ""
    since: Annotated[float, Meta(ge=0, le=1e11)] = 0.0
    batch: Annotated[str, matching(f"({BATCH_ID.pattern})?")] = ""
    work: Annotated[str, matching("[0-9a-f]{0,64}")] = ""  # what was saved when it began: see ResumeState.mark

    @classmethod
    def this_process(cls, batch: str = "", work: str = "") -> Holder:
        array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        job = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")
        restart = os.environ.get("SLURM_RESTART_COUNT", "")
        return cls(
            host=host_name(),
            pid=os.getpid(),
            started=process_started(os.getpid()),
            job=job if JOB.fullmatch(job) else "",
            restart=int(restart) if restart.isdigit() else 0,
            token=secrets.token_hex(8),
            since=time.time(),
            batch=batch,
            work=work,
        )

    def __str__(self) -> str:
        return f"{self.host} pid {self.pid}" + (f" (Slurm job {self.job})" if self.job else "")


# The leases that this process holds now, by their tokens: nobody knows better.
_MINE: set[str] = set()

# What stands in a lease's place and is none.
UNKNOWN = Holder(host="an unreadable lease,", pid=0, started=0)


@dataclass
class Lease:
    """A lease held by this process; `previous` is the dead holder it was taken from, if any."""

    path: Path
    holder: Holder
    previous: Holder | None = None
    _released: threading.Event = field(default_factory=threading.Event, repr=False)

    def __post_init__(self) -> None:
        threading.Thread(target=self._renew, name="lease", daemon=True).start()

    def _renew(self) -> None:
        while not self._released.wait(RENEW_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self.path, follow_symlinks=False)

    def release(self) -> None:
        self._released.set()
        seen = _see(self.path)
        if seen is not None and seen.holder.token == self.holder.token:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        _MINE.discard(self.holder.token)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _SeenLease(NamedTuple):
    """A lease as it was seen; it is another one after every renewal."""

    holder: Holder
    renewed: float
    mark: tuple[Any, ...]


class Leases:
    """The leases of one cache folder. Keep one object while you wait: it is what remembers how long it has watched."""

    def __init__(self, root: str | os.PathLike[str], batch: str = ""):
        self.root = Path(root)
        self.folder = self.root / LEASES
        self.batch = batch
        self._watched: dict[Path, tuple[tuple[Any, ...], float]] = {}

    def path(self, kind: str, key: str) -> Path:
        return self.folder / f"{kind}.{key}"

    def take(self, kind: str, key: str, work: str = "") -> Lease | None:
        """The lease on a unit, or None while another live process holds it; work: see `Holder`."""
        path = self.path(kind, key)
        make_folder(self.folder)
        mine = Holder.this_process(self.batch, work)
        draft = self.folder / f".{mine.token}"
        lease = previous = None
        _MINE.add(mine.token)  # before anybody can see it
        try:
            draft.write_text(json.dumps(structs.asdict(mine)))
            for _ in range(10):
                if _appear(draft, path):
                    lease = Lease(path, mine, previous)
                    return lease
                seen = _see(path)
                if seen is None:
                    continue  # released this moment
                if not self._stale(path, seen, mine):
                    return None
                if self._break(path, seen.holder):
                    previous = seen.holder if seen.holder.pid else previous
            return None
        finally:
            if lease is None:
                _MINE.discard(mine.token)
            with contextlib.suppress(OSError):
                draft.unlink()

    def holder(self, kind: str, key: str) -> Holder | None:
        """Who holds a unit now; None when nobody does or only a dead process."""
        seen = _see(self.path(kind, key))
        return None if seen is None or self._stale(self.path(kind, key), seen) else seen.holder

    def held(self, *, stale: bool = False) -> dict[tuple[str, str], Holder]:
        """{(kind, key): holder} of every live lease, and with `stale` of the dead ones too."""
        found = {}
        with contextlib.suppress(OSError):
            for match in filter(None, map(LEASE_NAME.fullmatch, os.listdir(self.folder))):
                kind, key = match.groups()
                seen = _see(self.path(kind, key))
                if seen is not None and (stale or not self._stale(self.path(kind, key), seen)):
                    found[kind, key] = seen.holder
        return found

    def clean(self, store: Store) -> None:
        """Remove what killed processes left: leases on units that are done, and hidden files older than a day."""
        with contextlib.suppress(OSError, StoreError):
            for name in os.listdir(self.folder):
                if match := LEASE_NAME.fullmatch(name):
                    kind, key = match.groups()
                    seen = _see(self.path(kind, key))
                    if store.has_key(kind, key) and seen and self._stale(self.path(kind, key), seen):
                        self.free(kind, key, seen.holder)
                    continue
                age = time.time() - os.lstat(self.folder / name).st_mtime
                if name.startswith(".") and name != LOCK and age > LEFT_SECONDS:
                    remove(self.folder / name)

    def free(self, kind: str, key: str, holder: Holder) -> bool:
        """Remove the lease of a holder that is known to be gone; false when it is not this holder's, or stays."""
        try:
            return self._break(self.path(kind, key), holder)
        except OSError:
            return False

    def _stale(self, path: Path, seen: _SeenLease, asker: Holder | None = None) -> bool:
        holder = seen.holder
        if holder.pid and holder.host == host_name():
            began = process_started(holder.pid)
            if not process_alive(holder.pid) or (began and holder.started and began != holder.started):
                return True
            if holder.pid == os.getpid():
                # Ours, and if we do not hold it we could not remove it when we were done.
                return holder.token not in _MINE
        elif time.time() - seen.renewed > STALE_SECONDS and self._disk_time() - seen.renewed > STALE_SECONDS:
            return True  # also by the clock of the disk, which all hosts share: this host's may be wrong
        elif asker is not None and holder.job and holder.job == asker.job and holder.restart < asker.restart:
            return True  # the same Slurm job before it was put back into the queue
        mark, since = self._watched.get(path, (None, 0.0))
        if mark != seen.mark:
            self._watched[path] = (seen.mark, time.monotonic())
            return False
        return time.monotonic() - since > STALE_SECONDS

    def _disk_time(self) -> float:
        touched = self.folder / f".{secrets.token_hex(8)}"
        try:
            touched.touch()
            return touched.stat().st_mtime
        except OSError:
            return time.time()  # where nothing can be written, nothing can be removed either
        finally:
            remove(touched)

    def _break(self, path: Path, holder: Holder) -> bool:
        """Remove a stale lease; false when somebody else was faster.

        Only one process breaks at a time, and only the very lease it found stale: otherwise the slower of two would
        remove the fresh lease of the faster. Where the lock cannot be had (a disk without locks, an owner that was
        stopped) the worst that happens is work done twice.
        """
        with _locked(self.folder / LOCK):
            seen = _see(path)
            if seen is None or seen.holder.token != holder.token:
                return False
            aside = self.folder / f".{secrets.token_hex(8)}"
            try:
                os.rename(path, aside)  # also what is no file
            except FileNotFoundError:
                return False
            remove(aside)
            self._watched.pop(path, None)
            return True


@contextlib.contextmanager
def _locked(path: Path):
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError:
        yield
        return
    try:
        limit = time.monotonic() + LOCK_SECONDS
        with contextlib.suppress(OSError):  # a disk without locks
            while time.monotonic() < limit:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.005)
        yield
    finally:
        os.close(descriptor)


def _appear(draft: Path, path: Path) -> bool:
    """Give a file its second name, whole and at once; false when something has that name already."""
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
            raise
        # A disk without hard links: whoever makes the file has it, though others may see it empty for a moment.
        try:
            with open(path, "x") as file:
                file.write(draft.read_text())
        except FileExistsError:
            return False
    return True


def _see(path: Path) -> _SeenLease | None:
    """What is in a lease's place; None when there is nothing."""
    try:
        status = os.lstat(path)
        mark = (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns)
        return _SeenLease(Holder(**read_checked(path, Holder, 65536)), status.st_mtime, mark)
    except PassingFileError:
        # It cannot be read just now. Whoever has it keeps it; a watcher sees no change by that.
        return _SeenLease(UNKNOWN, time.time(), mark)
    except SafeFileError:
        return _SeenLease(UNKNOWN, status.st_mtime, mark) if os.path.lexists(path) else None
    except OSError:
        return None
