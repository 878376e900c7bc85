"""Who is working on what: one small file per unit in progress, so that no two workers do the same unit.

A claim is a file `<root>/.claims/<kind>.<key>` that appears whole (hard link) and names its holder: host, process,
Slurm job. While it is held its time stamp is renewed. It is stale, and is taken over, when its holder is a dead process
of this host, an earlier incarnation of the same Slurm job, or has not renewed it for `STALE_SECONDS`. Claims only save
work: the store itself stays correct when two workers race on one unit, because the first whole entry wins.

    claim = Claims(store.root).take("losses", key)
    if claim is not None:
        with claim: ...
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import threading
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from retrain.safe_files import SafeFileError, read_json
from retrain.store import Store, host_name, process_alive

CLAIMS = ".claims"
LOCK = ".lock"
RENEW_SECONDS = 10.0
# Several missed renewals: a holder on another host that is only slow (or whose disk is) keeps its claim.
STALE_SECONDS = 90.0


def process_started(pid: int) -> int:
    """When a process began, in clock ticks since boot (0: unknown): tells it from a later one with the same id."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


@dataclass(frozen=True)
class Holder:
    """The process that holds a claim."""

    host: str
    pid: int
    started: int
    job: str = ""
    restart: int = 0
    token: str = ""
    since: float = 0.0
    campaign: str = ""

    @classmethod
    def this_process(cls, campaign: str = "") -> Holder:
        array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        job = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")
        restart = os.environ.get("SLURM_RESTART_COUNT", "")
        return cls(
            host=host_name(),
            pid=os.getpid(),
            started=process_started(os.getpid()),
            job=job,
            restart=int(restart) if restart.isdigit() else 0,
            token=secrets.token_hex(8),
            since=time.time(),
            campaign=campaign,
        )

    @classmethod
    def from_json(cls, content: Any) -> Holder | None:
        """The holder a claim file names, or None when the file is not one of ours."""
        if not isinstance(content, dict):
            return None
        values = {f.name: content.get(f.name) for f in fields(cls)}
        kinds: dict[str, Any] = {"pid": int, "started": int, "restart": int, "since": (int, float)}
        if not all(isinstance(value, kinds.get(name, str)) for name, value in values.items()):
            return None
        return cls(**values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" (Slurm job {self.job})" if self.job else "")


@dataclass
class Claim:
    """A claim held by this process; `previous` is the dead holder it was taken from, if any."""

    path: Path
    holder: Holder
    previous: Holder | None = None
    _released: threading.Event = field(default_factory=threading.Event, repr=False)

    def __post_init__(self) -> None:
        threading.Thread(target=self._renew, name="claim", daemon=True).start()

    def _renew(self) -> None:
        while not self._released.wait(RENEW_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def release(self) -> None:
        self._released.set()
        holder, _ = _read(self.path)
        if holder is not None and holder.token == self.holder.token:
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Claims:
    """The claims of one cache folder."""

    def __init__(self, root: str | os.PathLike[str], campaign: str = ""):
        self.folder = Path(root) / CLAIMS
        self.campaign = campaign

    def path(self, kind: str, key: str) -> Path:
        return self.folder / f"{kind}.{key}"

    def take(self, kind: str, key: str) -> Claim | None:
        """The claim on a unit, or None while another live process holds it."""
        path = self.path(kind, key)
        self.folder.mkdir(parents=True, exist_ok=True)
        mine = Holder.this_process(self.campaign)
        draft = self.folder / f".{mine.token}"
        try:
            draft.write_text(json.dumps(asdict(mine)))
            previous = None
            for _ in range(10):
                if _appear(draft, path):
                    return Claim(path, mine, previous)
                holder, renewed = _read(path)
                if renewed is None:
                    continue  # released this moment
                # The draft's time stamp is "now" by the clock of the disk, which all hosts share.
                if not self._stale(holder, draft.stat().st_mtime - renewed, mine):
                    return None
                if self._break(path, holder):
                    previous = holder or previous
            return None
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()

    def holder(self, kind: str, key: str) -> Holder | None:
        """Who holds a unit now; None when nobody does or only a dead process."""
        holder, renewed = _read(self.path(kind, key))
        if renewed is None or self._stale(holder, time.time() - renewed, None):
            return None
        return holder or Holder(host="unknown", pid=0, started=0)

    def held(self, *, stale: bool = False) -> dict[tuple[str, str], Holder]:
        """{(kind, key): holder} of every live claim, and with `stale` of the dead ones too."""
        try:
            names = [name for name in os.listdir(self.folder) if not name.startswith(".") and "." in name]
        except OSError:
            return {}
        found = {}
        for name in names:
            kind, _, key = name.rpartition(".")
            holder = _read(self.path(kind, key))[0] if stale else self.holder(kind, key)
            if holder is not None:
                found[kind, key] = holder
        return found

    def clean(self, store: Store) -> None:
        """Remove what killed processes left: claims on units that are done, and drafts older than a day."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self.folder):
                kind, _, key = name.rpartition(".")
                if not name.startswith("."):
                    if store.has_key(kind, key) and self.holder(kind, key) is None:
                        self._break(self.folder / name, _read(self.folder / name)[0])
                elif name != LOCK and time.time() - os.lstat(self.folder / name).st_mtime > 86400:
                    os.unlink(self.folder / name)

    def free(self, kind: str, key: str, holder: Holder) -> bool:
        """Remove the claim of a holder that is known to be gone; false when it is no longer this holder's."""
        return self._break(self.path(kind, key), holder)

    @staticmethod
    def _stale(holder: Holder | None, age: float, asker: Holder | None) -> bool:
        if holder is not None:
            if holder.host == host_name():
                if not process_alive(holder.pid):
                    return True
                began = process_started(holder.pid)
                return bool(began and holder.started and began != holder.started)
            if asker is not None and holder.job and holder.job == asker.job and holder.restart < asker.restart:
                return True
        return age > STALE_SECONDS

    def _break(self, path: Path, holder: Holder | None) -> bool:
        """Remove a stale claim; false when somebody else was faster.

        Only one process breaks at a time, and only the very claim it found stale: otherwise the slower of two would
        remove the fresh claim of the faster. Where the disk knows no locks the worst that happens is work done twice.
        """
        with open(self.folder / LOCK, "w") as lock:
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            current, renewed = _read(path)
            if renewed is None or (current and current.token) != (holder and holder.token):
                return False
            with contextlib.suppress(OSError):
                os.unlink(path)
                return True
        return False


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


def _read(path: Path) -> tuple[Holder | None, float | None]:
    """(holder, time of its last renewal) of a claim file; the time is None when there is no file."""
    try:
        renewed = os.lstat(path).st_mtime
        return Holder.from_json(read_json(path, max_bytes=65536)), renewed
    except SafeFileError:
        return None, renewed if os.path.lexists(path) else None
    except OSError:
        return None, None
