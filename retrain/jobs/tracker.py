"""What became of each unit: one attempt at it, and the account of a whole run.

A failure is told in two parts. The reason is for people: its first line has the exception, its message, and the file
and line in the code of whoever wrote the task or method; the second has the path of a log with the whole traceback.
`error` and `place` are for programs: the same pair from several units is a bug and not bad luck. A unit that fails
because one that it needs failed is reported as that one was: `UnitTraceback` carries its traceback on.

A unit that fails `MAX_ATTEMPTS` times is reported, and the others go on. But the same exception at the same place in
the first `SAME_FAILURES` different units, with not one unit of their kind done, is a bug in the code they share: every
other unit would end the same way, so the run stops with one message. One unit is never enough for that (it may be the
odd one), and neither are many once a unit of the kind is done, now or earlier: then the code works, and it is the
units that differ.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import sysconfig
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.errors import UsageError, error_line
from retrain.jobs.unit import EventLog, JobBatch, Unit, utf8
from retrain.leases import Holder, Leases
from retrain.progress import Progress, beside_bars
from retrain.resume import ResumeState
from retrain.safe_files import SafeFileError, append, one_line, open_plain
from retrain.store import PASSING, PassingStoreError, Store, UnwritableStoreError

# ---- one attempt ----


LOG_LINES = 15
LOG_HEAD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d .*\n", re.MULTILINE)  # before each traceback of a log
MAX_TRACEBACK = 200_000
MAX_LOG = 2**40
PACKAGES = Path(__file__).resolve().parents[2]  # where retrain, baselines and bench are
LIBRARIES = tuple({os.path.realpath(path) for name, path in sysconfig.get_paths().items() if "lib" in name})


@dataclass(frozen=True)
class Attempt:
    """What one attempt at a unit came to.

    status: done; found (it was done already); busy (another process has it); failed; unfinished (it was stopped, and
    what it saved is further than before); fatal (stop everything); refused (its last holder died, once too often).
    """

    status: str
    seconds: float = 0.0
    reason: str = ""
    error: str = ""
    place: str = ""

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> Attempt:
        """The one that failed or died by what a log says of it; people read it, so no line may pass for another."""
        reason = "\n".join(one_line(line, 1000) for line in event.get("reason", "").split("\n"))
        return cls("failed", 0.0, reason, event.get("error", ""), event.get("place", ""))


def do_unit(
    store: Store, leases: Leases, key: str, unit: Unit, take_over: Callable[[Holder], str] | None = None
) -> Attempt:
    """Do one unit unless it is done or another process is at it.

    take_over: called when the unit was held by a process that died; a reason it returns is why not to try once more.
    """
    try:
        if store.has_key(unit.kind, key):
            return Attempt("found")
        lease = leases.take(unit.kind, key, ResumeState.of(store, unit.kind, key).mark())
    except PassingStoreError as error:
        return Attempt("failed", reason=str(error))
    except OSError as error:
        if error.errno in PASSING:
            return Attempt("failed", reason=f"the unit could not be leased ({error})")
        return Attempt("fatal", reason=str(store.unwritable(error)), error=UnwritableStoreError.__name__)
    if lease is None:
        return Attempt("busy")
    with lease:
        start = time.perf_counter()
        try:
            if store.has_key(unit.kind, key):
                ResumeState.of(store, unit.kind, key).clear()
                return Attempt("found")
            if take_over is not None and lease.previous is not None:
                refusal = take_over(lease.previous)
                if refusal:
                    return Attempt("refused", reason=refusal)
            if store.key(unit.kind, unit.config) != key:
                return Attempt("failed", reason=f"{unit.kind} {key} is listed under a key that is not its own")
            function = unit.function()
            start = time.perf_counter()
            function(store, unit)
            seconds = time.perf_counter() - start
            if not store.has_key(unit.kind, key):
                reason = f"{unit.call} returned without writing its entry to the store"
                return Attempt("failed", reason=reason, error="nothing written", place=unit.call)
        except (UsageError, UnwritableStoreError) as error:
            return Attempt("fatal", reason=str(error), error=type(error).__name__)
        except Terminated:
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit):  # of a plug-in: it must not end the others' work without a word
                told = f"its code called sys.exit({error.code!r}), which ends nothing here; raise an error instead"
                error = RuntimeError(told).with_traceback(error.__traceback__)
            return failure(error, JobBatch(store, leases.batch) if leases.batch else None, unit, key)
        ResumeState.of(store, unit.kind, key).clear()
        return Attempt("done", seconds)


class Terminated(SystemExit):
    """This process was asked to end (SIGTERM)."""


class UnitTraceback(Exception):
    """The traceback of a unit that failed, as the cause of what fails with it."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0].strip()}\n"""'


# -- failures ---------------------------------------------------------------------------------------------------------


def failure(error: Exception, batch: JobBatch | None, unit: Unit, key: str) -> Attempt:
    """An exception as an attempt that failed; its traceback goes to a log of the batch."""
    # Of one that needed another the place is the other's, which its message names.
    needed = isinstance(error.__cause__, UnitTraceback)
    file, line = ("", 0) if needed else blamed(error)
    place = f"{file}:{line}" if file else ""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))[-MAX_TRACEBACK:]
    words = str(error).split("\n")[0] if needed else error_line(error, 500)
    first = one_line(words, 600) + (f" ({one_line(shortened(file))}:{line})" if file else "")
    log = _log_traceback(text, batch, unit, key)
    where = [f"the traceback is in {log}"] if log is not None else text.strip().splitlines()[-LOG_LINES:]
    lines = [first, *indented(where)]
    name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    return Attempt("failed", reason=utf8("\n".join(lines)), error=utf8(name)[:200], place=utf8(place)[:5000])


def blamed(error: BaseException) -> tuple[str, int]:
    """(file, line) of the innermost call in a task's or method's code; else in ours; else wherever it was raised."""
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno or 0
    if place := getattr(error, "place", None):  # raised after the code that is to blame returned
        return place
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return min(reversed(frames), key=lambda frame: _distance(frame[0]), default=("", 0))


def _distance(file: str) -> int:
    """0 for the file of somebody's task or method, 1 for the rest of this suite, 2 for libraries."""
    path = Path(os.path.realpath(file))
    parts = path.relative_to(PACKAGES).parts if path.is_relative_to(PACKAGES) else ()
    if parts[:1] in (("retrain",), ("baselines",), ("bench",)):  # also where the suite was installed as a library
        return 0 if parts[0] == "baselines" or parts[:2] == ("retrain", "tasks") else 1
    installed = str(path).startswith(LIBRARIES) or {"site-packages", "dist-packages"} & set(path.parts)
    return 2 if installed or file.startswith("<") else 0


def shortened(file: str) -> str:
    """A file as one would type it from here."""
    with contextlib.suppress(ValueError, OSError):
        return os.fspath(Path(file).relative_to(Path.cwd()))
    return file


def _log_of(batch: JobBatch, unit: Unit, key: str) -> Path:
    return batch.folder / "failures" / f"{unit.kind}.{key}.log"


def last_traceback(batch: JobBatch, unit: Unit, key: str) -> str:
    """The traceback of a unit's latest failure, line by line printable; empty where its log has none."""
    text = LOG_HEAD.split(_end_of(_log_of(batch, unit, key), MAX_TRACEBACK))[-1]
    return "\n".join(one_line(line, 2000) for line in text.strip().split("\n"))


def _log_traceback(text: str, batch: JobBatch | None, unit: Unit, key: str) -> Path | None:
    if batch is None:
        return None
    try:
        batch.subfolder("failures")
        path = _log_of(batch, unit, key)
        append(path, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {Holder.this_process()}\n{text}\n")
    except (OSError, UnwritableStoreError):
        return None
    return path


def tail(path: Path, offset: int = 0) -> list[str]:
    """The last lines of a log from `offset` on, indented; empty when there is none."""
    return indented([line[:400] for line in _end_of(path, 8192, offset).strip().splitlines()[-LOG_LINES:]])


def _end_of(path: Path, most: int, offset: int = 0) -> str:
    try:
        with open_plain(path, MAX_LOG) as (file, size):
            file.seek(max(offset, size - most))
            return file.read(most).decode("utf-8", "replace")
    except SafeFileError:
        return ""


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


# ---- the account of a run ----


MAX_ATTEMPTS = 3
SAME_FAILURES = 3
SAY_SECONDS = 60.0
POLL_SECONDS = 0.5
KEPT_TRACEBACKS = 20

logger = logging.getLogger("retrain.jobs")


class JobError(RuntimeError):
    """The job layer itself cannot work (no worker starts, no Slurm here); the message says what to do."""


class RepeatedFailureError(JobError):
    """The first units all failed alike: a bug, which no other unit would escape."""


@dataclass(frozen=True)
class Report:
    """What became of a batch, by key: `done` are in the store, `pending` were left undone (only with collect)."""

    done: list[str]
    failed: dict[str, str]
    pending: list[str]
    num_computed: int
    seconds: float
    batch: str = ""
    tracebacks: dict[str, str] = field(default_factory=dict)  # of the first that failed, as their logs have them

    def traceback_of(self, key: str) -> UnitTraceback | None:
        """What to raise another failure from."""
        return UnitTraceback(self.tracebacks[key]) if self.tracebacks.get(key) else None

    @property
    def complete(self) -> bool:
        return not self.failed and not self.pending


def fatal_error(name: str, reason: str) -> Exception:
    """The exception that a worker or task named when it asked for everything to stop."""
    known = {error.__name__: error for error in (UsageError, UnwritableStoreError, RepeatedFailureError)}
    return known.get(name, UnwritableStoreError)(reason)


class SameFailure:
    """Tells a bug from bad luck; see the module's text."""

    def __init__(self, kinds_done: Iterable[str] = (), limit: int = SAME_FAILURES):
        self.limit = limit
        self.kinds_done = set(kinds_done)
        self._failed: dict[tuple[str, str], dict[str, str]] = {}  # {(error, place): {key: kind}}

    def failed(self, kind: str, key: str, attempt: Attempt) -> str:
        """Why to stop, now that this unit has failed so; empty to go on."""
        if not attempt.error or not attempt.place or not self.limit:
            return ""
        alike = self._failed.setdefault((attempt.error, attempt.place), {})
        alike[key] = kind
        if sum(kind not in self.kinds_done for kind in alike.values()) < self.limit:
            return ""
        return (
            f"stopped, as the first {self.limit} units failed alike and none was done: {attempt.reason}\n"
            "finished work is kept: mend it and run the same command again"
        )


@dataclass
class JobTracker:
    """Drivers of all clusters keep it the same way."""

    store: Store
    units: dict[str, Unit]
    batch: JobBatch
    log: EventLog
    progress: Progress
    max_attempts: int
    same: SameFailure
    retry_errors: bool = True  # whether a unit that raised is tried again; one whose worker died always is
    print_tracebacks: bool = False
    units_sha256: str = ""  # of the batch's list as this run wrote it
    done: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    attempts: Counter[str] = field(default_factory=Counter)
    num_computed: int = 0
    tracebacks: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The units that are neither done nor given up, in their order.
        self.open = dict.fromkeys(key for key in self.units if key not in self.done)

    def report(self, seconds: float) -> Report:
        done = [key for key in self.units if key in self.done]
        return Report(done, self.failed, list(self.open), self.num_computed, seconds, self.batch.id, self.tracebacks)

    def devices(self) -> set[str]:
        """The kinds of device that units name in their payload: cpu, cuda, auto."""
        return {str(unit.payload.get("device", "cpu")).partition(":")[0] for unit in self.units.values()}

    def in_store(self, key: str) -> bool:
        """Whether a unit is done; one that cannot be looked up now is looked up again later."""
        try:
            return self.store.has_key(self.units[key].kind, key)
        except PassingStoreError:
            return False

    def finish(self, key: str, seconds: float | None = None) -> None:
        """`seconds` when it was computed by this run, None when it turned up in the store."""
        if key in self.done:
            return
        self.done.add(key)
        self.open.pop(key, None)
        self.failed.pop(key, None)
        self.same.kinds_done.add(self.units[key].kind)
        if seconds is not None:
            self.num_computed += 1
        self.progress(len(self.done), len(self.units))

    def record(self, key: str, attempt: Attempt) -> bool:
        """Enter an attempt; true when the unit has to be tried again."""
        if attempt.status == "done":
            self.log.add("done", key=key, seconds=attempt.seconds)
            self.finish(key, attempt.seconds)
        elif attempt.status == "found":
            self.finish(key)
        elif attempt.status == "fatal":
            self.log.add("fatal", reason=attempt.reason, error=attempt.error)
            raise fatal_error(attempt.error, attempt.reason)
        elif attempt.status == "unfinished":
            self.log.add("unfinished", key=key, reason=attempt.reason)
            return True
        else:
            self.log.add("failed", key=key, reason=attempt.reason, error=attempt.error, place=attempt.place)
            return self.count(key, attempt)
        return False

    def take_in(self, event: Mapping[str, Any]) -> None:
        """Enter what a log of this run says became of a unit."""
        key = event.get("key", "")
        if key not in self.units:
            return
        if event["event"] in ("failed", "died"):
            self.count(key, Attempt.from_event(event))
        elif event["event"] == "done":
            self.same.kinds_done.add(self.units[key].kind)
            if key not in self.done and self.in_store(key):
                self.finish(key, 0.0)

    def count(self, key: str, attempt: Attempt) -> bool:
        """Count an attempt that failed; true when the unit may be tried again. Raises where all would fail alike."""
        self.attempts[key] += 1
        if key in self.done or key in self.failed:
            return False
        unit = self.units[key]
        if why := self.same.failed(unit.kind, key, attempt):
            self.log.add("fatal", reason=why, error=RepeatedFailureError.__name__)
            self._tell_whole(key, attempt)
            raise RepeatedFailureError(why)
        final = bool(attempt.error) and not self.retry_errors
        if self.attempts[key] < self.max_attempts and not final:
            return True
        times = f"failed {self.attempts[key]} times, the last time with " if self.attempts[key] > 1 else ""
        self.give_up(key, f"{times}{attempt.reason}")
        with beside_bars():
            logger.warning("%s %s %s", unit.kind, key, self.failed[key].splitlines()[0])
        self._tell_whole(key, attempt)
        return False

    def _tell_whole(self, key: str, attempt: Attempt) -> None:
        """Keeps the traceback of a unit that is given up, and prints it where it was asked for."""
        if not attempt.error or len(self.tracebacks) >= KEPT_TRACEBACKS:
            return
        self.tracebacks[key] = last_traceback(self.batch, self.units[key], key)
        if self.print_tracebacks and self.tracebacks[key]:
            with beside_bars():
                print(self.tracebacks[key], file=sys.stderr, flush=True)

    def give_up(self, key: str, reason: str) -> None:
        self.failed[key] = reason
        self.open.pop(key, None)


class UnitQueue:
    """The units that are left to a process, those that another process is at last and at intervals."""

    def __init__(self, tracker: JobTracker, keys: Iterable[str]):
        self.tracker, self.leases = tracker, Leases(tracker.store.root, tracker.batch.id)
        self._left, self._busy, self._next_notice = deque(keys), set[str](), 0.0

    def next(self) -> str | None:
        """None when nothing is left, or nothing but what others are at: see `retry`."""
        if not self._left or (self._left[0] in self._busy and self._busy.issuperset(self._left)):
            return None
        key = self._left.popleft()
        self._busy.discard(key)
        return key

    def enter(self, key: str, attempt: Attempt) -> None:
        if attempt.status == "busy":
            self._busy.add(key)
            self._left.append(key)
        elif self.tracker.record(key, attempt):
            self._left.append(key)

    def retry(self) -> bool:
        """Let the units that others are at come up again; false when there are none."""
        if self._busy and len(self._busy) == len(self.tracker.open):
            self._say_who_has(self.tracker.units[self._left[0]])
        found = bool(self._busy)
        self._busy.clear()
        return found

    def _say_who_has(self, unit: Unit) -> None:
        """A unit of those that nothing but waiting is left for: at once, and again every minute."""
        holder = self.leases.holder(unit.kind, unit.key) if time.monotonic() >= self._next_notice else None
        if holder is None:
            return
        self._next_notice = time.monotonic() + SAY_SECONDS
        more = f" and {len(self._busy) - 1:,} more" if len(self._busy) > 1 else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since)) if holder.since else "some time"
        with beside_bars():
            logger.warning("waiting for %s since %s: it has %s %s%s", holder, since, unit.kind, unit.key, more)
