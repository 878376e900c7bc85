"""What an array task does on Slurm: take units that nobody else has until there are none, or its time is up.

submitit's own handling of signals is replaced, because it ignores SIGTERM and counts every signal of a short job as a
timeout: here SIGUSR2 (preemption, or the time limit is near) and SIGTERM both give back the unit in progress, and the
former also puts the task back into the queue, so that a campaign goes on without its driver. A unit that outlasts a
whole task has failed only if it saved nothing new meanwhile; else the next task goes on from what it saved.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass

from retrain.jobs.attempt import Attempt, do_unit
from retrain.jobs.book import RepeatedFailureError, SameFailure
from retrain.jobs.campaign import Campaign, EventReader
from retrain.jobs.claims import Claims, Holder
from retrain.processes import host_name
from retrain.store import Store
from retrain.work import Work


def signal_seconds(time_limit_s: float) -> float:
    """How long before the end of a task Slurm sends its warning (it may be up to a minute earlier)."""
    return min(90.0, 0.25 * time_limit_s)


def advanced(store: Store, kind: str, key: str, before: str) -> bool:
    """Whether a unit's saved work is further than when an attempt found it so (`Work.mark`)."""
    return Work.of(store, kind, key).mark() not in ("", before)


class Stopped(BaseException):
    """Slurm wants the task to stop; like KeyboardInterrupt, it passes through a unit and frees its claim."""

    def __init__(self, signal_number: int):
        self.signal = signal.Signals(signal_number)


@dataclass(frozen=True)
class ArrayWorker:
    """The callable that submitit pickles; everything else a task needs, it reads and checks itself."""

    root: str
    campaign: str
    run: str
    units_sha256: str
    time_limit_s: float
    max_attempts: int
    same_failures: int = 0
    kinds_done: tuple[str, ...] = ()

    def __call__(self, index: int) -> int:
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, _stop)
        return _Task(self, Holder.this_process()).run()


def _stop(number: int, _frame: object) -> None:
    raise Stopped(number)


class _Task:
    def __init__(self, worker: ArrayWorker, me: Holder):
        self.job = me.job
        self.worker = worker
        self.store = Store(worker.root, create=False)
        self.campaign = Campaign(self.store, worker.campaign)
        self.units = self.campaign.units(worker.units_sha256)
        self.claims = Claims(self.store.root, worker.campaign)
        self.log = self.campaign.log(worker.run, f"{me.job}.{me.restart}")
        self.reader = EventReader(self.campaign, worker.run)
        self.trials: Counter[str] = Counter()
        self.same = SameFailure(worker.kinds_done, worker.same_failures)
        self.num_done = 0
        self.longest = 0.0
        self.began = time.monotonic()
        # The signal of a near end comes this early; see `signal_seconds`.
        self.deadline = self.began + worker.time_limit_s - signal_seconds(worker.time_limit_s)
        self.key = ""
        self.saved_before = ""  # of the unit in progress: see Work.mark

    def run(self) -> int:
        self.log.add("start", job=self.job, host=host_name(), pid=os.getpid())
        try:
            self._work()
        except Stopped as stopped:
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            self._stopped(stopped)
        else:
            self.log.add("exit", job=self.job, reason="nothing left to do", num_done=self.num_done)
        return self.num_done

    def _work(self) -> None:
        """Pass over the list, from a place of our own, until a pass finds nothing to do."""
        keys = list(self.units)
        first = random.Random(f"{self.job} {self.campaign.id}").randrange(len(keys))
        left = keys[first:] + keys[:first]
        progress = True
        while progress:
            progress = False
            self._count_trials()
            left = [key for key in left if not self.store.has_key(self.units[key].kind, key)]
            for key in left:
                if self.trials[key] >= self.worker.max_attempts:
                    continue
                if self.num_done and time.monotonic() + 1.2 * self.longest > self.deadline:
                    self._requeue("its time is up")
                    return
                progress |= self._do(key)

    def _do(self, key: str) -> bool:
        """Try a unit; false when there was nothing to do, as another process has it or did it."""
        unit = self.units[key]
        self.key, self.saved_before = key, Work.of(self.store, unit.kind, key).mark()
        attempt = do_unit(self.store, self.claims, key, unit, lambda holder: self._take_over(key, holder))
        self.key = ""
        if attempt.status == "done":
            self.num_done += 1
            self.longest = max(self.longest, attempt.seconds)
            self.same.done(unit.kind)
            self.log.add("done", key=key, seconds=attempt.seconds)
        elif attempt.status == "failed":
            values = {"reason": attempt.reason, "error": attempt.error, "place": attempt.place}
            self.log.add("failed", key=key, job=self.job, **values)
            print(f"{unit.kind} {key}: {attempt.reason}", file=sys.stderr, flush=True)
            self._count_trials()
        elif attempt.status == "fatal":
            self._fatal(attempt.reason, attempt.error)
        return attempt.status in ("done", "failed")

    def _fatal(self, reason: str, error: str) -> None:
        self.log.add("fatal", reason=reason, error=error)
        self.log.add("exit", job=self.job, reason="fatal error", num_done=self.num_done)
        sys.exit(reason)

    def _count_trials(self) -> None:
        """Take in what happened here and in the other tasks."""
        for event in self.reader.new():
            key = event.get("key", "")
            if key not in self.units:
                continue
            if event["event"] in ("failed", "died"):
                self.trials[key] += 1
                if why := self.same.failed(self.units[key].kind, key, Attempt.from_event(event)):
                    self._fatal(why, RepeatedFailureError.__name__)
            elif event["event"] == "done":
                self.same.done(self.units[key].kind)

    def _take_over(self, key: str, holder: Holder) -> str:
        """Enter the death of a unit's last holder; why not to try the unit once more, or nothing."""
        kind = self.units[key].kind
        if holder.job == self.job and advanced(self.store, kind, key, holder.work):
            # This very job, before it was put back into the queue, had no time to say so.
            self.log.add("unfinished", key=key, job=self.job, reason=f"{holder} was cut short; its work was saved")
            return ""
        self.log.add("died", key=key, job=holder.job, reason=f"{holder} died while it had the unit")
        self._count_trials()
        return "its workers died" if self.trials[key] >= self.worker.max_attempts else ""

    def _stopped(self, stopped: Stopped) -> None:
        name = stopped.signal.name
        if stopped.signal != signal.SIGUSR2:
            # scancel, or a requeue by somebody else: not for us to undo. A second signal must not cut this short.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self.log.add("exit", job=self.job, reason=f"stopped by {name}", num_done=self.num_done)
            sys.exit(f"stopped by {name}; {self.num_done} units are kept")
        got_on = bool(self.key) and advanced(self.store, self.units[self.key].kind, self.key, self.saved_before)
        if got_on:
            self.log.add("unfinished", key=self.key, job=self.job, reason=f"stopped by {name}; its work was saved")
        elif self.key and not self.num_done and time.monotonic() > self.deadline - 60:
            # It had a whole task for itself and saved nothing: again would not help, three times is enough.
            minutes = self.worker.time_limit_s / 60
            self.log.add("failed", key=self.key, job=self.job, reason=f"it takes more than --timeout-min {minutes:g}")
        self._requeue(f"stopped by {name}", got_on)

    def _requeue(self, reason: str, got_on: bool = False) -> None:
        """Back into the queue, with the same job number; where Slurm does not allow it the driver submits another."""
        values = {"num_done": self.num_done, "advanced": got_on}
        self.log.add("exit", job=self.job, reason=f"{reason}; back into the queue", **values)
        print(f"{reason}: {self.num_done} units are kept, the task goes back into the queue", flush=True)
        try:
            subprocess.run(["scontrol", "requeue", self.job], check=True, timeout=60)
            time.sleep(120)  # Slurm ends this process now; anything it did would be cut short
        except (OSError, subprocess.SubprocessError) as error:
            print(f"cannot go back into the queue: {error}", file=sys.stderr, flush=True)
        except Stopped:
            sys.exit("back in the queue")
