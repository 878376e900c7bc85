"""The account of a run: which units are done, failed or open, and when failing means to stop.

A unit that fails `MAX_ATTEMPTS` times is reported, and the others go on. But the same exception at the same place in
the first `SAME_FAILURES` different units, with not one unit of their kind done, is a bug in the code they share: every
other unit would end the same way, so the run stops with one message. One unit is never enough for that (it may be the
odd one), and neither are many once a unit of the kind is done, now or earlier: then the code works, and it is the
units that differ.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from retrain.errors import UsageError
from retrain.jobs.attempt import Attempt, Told, last_traceback
from retrain.jobs.campaign import Campaign, EventLog
from retrain.jobs.claims import Holder
from retrain.jobs.unit import Unit
from retrain.progress import Progress, beside_bars
from retrain.store import PassingStoreError, Store, UnwritableStoreError

MAX_ATTEMPTS = 3
SAME_FAILURES = 3
SAY_SECONDS = 60.0
KEPT_TRACEBACKS = 20

logger = logging.getLogger("retrain.jobs")


class JobError(RuntimeError):
    """The job layer itself cannot work (no worker starts, no Slurm here); the message says what to do."""


class RepeatedFailureError(JobError):
    """The first units all failed alike: a bug, which no other unit would escape."""


@dataclass(frozen=True)
class Report:
    """What became of a campaign, by key: `done` are in the store, `pending` were left undone (only with collect)."""

    done: list[str]
    failed: dict[str, str]
    pending: list[str]
    num_computed: int
    seconds: float
    campaign: str = ""
    tracebacks: dict[str, str] = field(default_factory=dict)  # of the first that failed, as their logs have them

    def told(self, key: str) -> Told | None:
        """What to raise another failure from."""
        return Told(self.tracebacks[key]) if self.tracebacks.get(key) else None

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

    def done(self, kind: str) -> None:
        self.kinds_done.add(kind)

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
class Book:
    """Drivers of all clusters keep it the same way."""

    store: Store
    units: dict[str, Unit]
    campaign: Campaign
    log: EventLog
    progress: Progress
    max_attempts: int
    same: SameFailure
    retry_errors: bool = True  # whether a unit that raised is tried again; one whose worker died always is
    print_tracebacks: bool = False
    units_sha256: str = ""  # of the campaign's list as this run wrote it
    done: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    attempts: Counter[str] = field(default_factory=Counter)
    num_computed: int = 0
    tracebacks: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._open = dict.fromkeys(key for key in self.units if key not in self.done and key not in self.failed)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open(self) -> list[str]:
        """The units that are neither done nor given up, in their order."""
        return list(self._open)

    def is_open(self, key: str) -> bool:
        return key in self._open

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
        self._open.pop(key, None)
        self.failed.pop(key, None)
        self.same.done(self.units[key].kind)
        if seconds is not None:
            self.num_computed += 1
        self.progress(len(self.done), len(self.units))

    def record(self, key: str, attempt: Attempt) -> bool:
        """Enter an attempt; true when the unit has to be tried again."""
        if attempt.status == "done":
            self.log.add("done", key=key, seconds=attempt.seconds)
            self.finish(key, attempt.seconds)
            return False
        if attempt.status == "found":
            self.finish(key)
            return False
        if attempt.status == "fatal":
            self.log.add("fatal", reason=attempt.reason, error=attempt.error)
            raise fatal_error(attempt.error, attempt.reason)
        if attempt.status == "unfinished":
            self.log.add("unfinished", key=key, reason=attempt.reason)
            return True
        self.log.add("failed", key=key, reason=attempt.reason, error=attempt.error, place=attempt.place)
        return self.count(key, attempt)

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
        self.tracebacks[key] = last_traceback(self.campaign, self.units[key], key)
        if self.print_tracebacks and self.tracebacks[key]:
            with beside_bars():
                print(self.tracebacks[key], file=sys.stderr, flush=True)

    def give_up(self, key: str, reason: str) -> None:
        self.failed[key] = reason
        self._open.pop(key, None)


class Waiting:
    """Says whom a run waits for: once, and again every minute."""

    def __init__(self) -> None:
        self._next = 0.0

    def say(self, unit: Unit, key: str, holder: Holder | None, num_waiting: int) -> None:
        """holder: who has this unit, one of `num_waiting` that nothing but waiting is left for."""
        if holder is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + SAY_SECONDS
        more = f" and {num_waiting - 1:,} more" if num_waiting > 1 else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since)) if holder.since else "some time"
        with beside_bars():
            logger.warning("waiting for %s since %s: it has %s %s%s", holder, since, unit.kind, key, more)
