"""Units on a Slurm cluster: array tasks that pull units until none is left.

A small array is submitted first. Every task takes unit after unit from the batch's list, so short units are packed into
it; from the seconds the first units took the driver then chooses how many tasks the rest deserves, so that each has at
least `TASK_SECONDS` to do. What is done is read from the store, which tasks live from `squeue`: no accounting is
needed, and a task that is cancelled, killed or lost with its node is noticed by its absence, within seconds. Its unit
is freed and another task is submitted, up to a limit.

Slurm keeps the script that it was given: nothing that a task runs lies in the cache, which others may write.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from retrain.errors import UsageError
from retrain.jobs.tracker import (
    Attempt,
    JobError,
    JobTracker,
    RepeatedFailureError,
    SameFailure,
    do_unit,
    fatal_error,
    logger,
    tail,
)
from retrain.jobs.unit import EventReader, JobBatch, RunId, Seconds, append_line, read_lines
from retrain.leases import Holder, Job, Lease, Leases
from retrain.processes import host_name
from retrain.resume import ResumeState
from retrain.safe_files import one_line
from retrain.store import PassingStoreError, Store, UnwritableStoreError

# ---- the driver ----


DEFAULT_TIMEOUT_MIN = 60.0
# The first array, before anything is known of the units.
FIRST_TASKS = 8
# Starting a task costs some ten seconds (Python, torch, the queue): it should have several times that to do.
TASK_SECONDS = 60.0
QUEUE_SECONDS = 1.0
MAX_POLL_SECONDS = 5.0
# A controller that restarts is back by then; one that is not there would be waited for without end.
FIRST_ANSWER_SECONDS = 60.0
MAX_ARRAY = 500
# An array's tasks may be missing from squeue for a moment after sbatch returns.
GRACE_SECONDS = 5.0
# The whole list is looked up in the store this much more seldom than the look-up takes.
SWEEP_RATIO = 20
# How Slurm ends a task that did nothing wrong.
SLURMS_DOING = ("TIMEOUT", "DEADLINE", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REQUEUED")


class Submission(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a batch's list of what was submitted."""

    jobs: list[Job]
    run: RunId
    time: Seconds


def live_jobs() -> dict[str, str]:
    """{job: state} of this user's jobs in the queue, array tasks as `array_task`; empty when Slurm does not answer."""
    found = _ask_queue()
    return found if isinstance(found, dict) else {}


def _ask_queue() -> dict[str, str] | str:
    """The jobs, or why there is no answer."""
    command = ["squeue", "-h", "-r", "-u", str(os.getuid()), "-o", "%i|%T"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except subprocess.CalledProcessError as error:
        return one_line(error.stderr.strip().split("\n")[-1] or str(error), 200)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return dict(line.strip().split("|", 1) for line in listing.stdout.splitlines() if "|" in line)


def submissions(batch: JobBatch) -> list[dict[str, Any]]:
    """What was submitted for a batch, oldest first: {"jobs": [names], "run": ..., "time": ...}."""
    return list(read_lines(batch.folder / "jobs.jsonl", Submission))


def live_run(batch: JobBatch) -> str | None:
    """The run whose jobs are still in the queue, which a new driver joins; None when there is none."""
    submitted = submissions(batch)
    live = live_jobs() if submitted else {}
    return next((content["run"] for content in reversed(submitted) if live.keys() & content["jobs"]), None)


def run_slurm(
    tracker: JobTracker, run: str, jobs: int, timeout_min: float | None, options: dict[str, Any], collect: bool
) -> None:
    """Drive a batch on Slurm until every unit is done or has failed (collect: until its jobs have ended)."""
    if shutil.which("sbatch") is None or shutil.which("squeue") is None:
        raise JobError("Slurm is not here (no sbatch, squeue on PATH); log in to the cluster, or use --cluster local")
    minutes = max(1, math.ceil(timeout_min or DEFAULT_TIMEOUT_MIN))
    driver = _Driver(tracker, run, jobs, minutes, options, collect)
    try:
        driver.drive()
    except (KeyboardInterrupt, SystemExit):
        driver.say_how_to_come_back()
        raise
    finally:
        driver.end()


def sbatch_options(name: str, gpu: bool, minutes: int, options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """sbatch's options but those of the array, and the script's first lines; --slurm KEY=VALUE are passed through."""
    flags: dict[str, Any] = {
        "job-name": name, "nodes": 1, "time": minutes, "requeue": True, "open-mode": "append",
        "signal": f"USR2@{int(signal_seconds(60.0 * minutes))}", **({"gpus-per-node": 1} if gpu else {}),
    }  # fmt: skip
    paths = os.pathsep.join(os.path.abspath(entry or os.curdir) for entry in sys.path)
    # The tasks find modules where the driver does; one thread unless the user asks for more cores.
    setup = [
        f"export PYTHONPATH={shlex.quote(paths)} PYTHONSAFEPATH=1",
        "export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}",
    ]
    ours = {"time": "--timeout-min", "timeout_min": "--timeout-min", "array": "--jobs", "array_parallelism": "--jobs"}
    for key, value in options.items():
        if key in ours:
            raise UsageError(f"--slurm {key}=... is set by {ours[key]}")
        if key == "setup":
            setup.append(str(value))
        else:
            flag = "ntasks-per-node" if key == "tasks_per_node" else key.replace("_", "-")
            flags[flag] = True if str(value).lower() in ("true", "yes") else value
    return [f"--{flag}" if value is True else f"--{flag}={value}" for flag, value in flags.items()], setup


class _Driver:
    """One run's view of its batch: what it submitted, what has ended, and what is left to do."""

    def __init__(self, tracker: JobTracker, run: str, jobs: int, minutes: int, options: dict[str, Any], collect: bool):
        self.tracker, self.run, self.max_jobs, self.collect = tracker, run, jobs, collect
        self.time_limit_s, gpu = 60.0 * minutes, "cuda" in tracker.devices()
        self.flags, self.setup = sbatch_options(f"tda-{tracker.batch.id}", gpu, minutes, options)
        self.max_lost = max(6, 3 * jobs)
        self.began = time.time()
        self.leases = Leases(tracker.store.root, tracker.batch.id)
        self.lock: Lease | None = None
        self.reader = EventReader(tracker.batch, run)
        ours = [content["jobs"] for content in submissions(tracker.batch) if content["run"] == run]
        self.submitted: list[str] = [job for jobs_of_one in ours for job in jobs_of_one]
        self.missing_since: dict[str, float] = {}
        self.ended, self.started, self.left_in_order = set[str](), set[str](), set[str]()
        self.num_lost = 0
        self.seconds: list[float] = []
        self.next_sweep = 0.0
        self.warned = False

    def drive(self) -> None:
        wait = QUEUE_SECONDS
        while True:
            num_done = len(self.tracker.done)
            self._take_in_events()
            if time.monotonic() >= self.next_sweep:
                self._sweep()
            if not self.tracker.open:
                return
            live = _ask_queue()
            if isinstance(live, str):
                if not self.submitted and time.time() - self.began > FIRST_ANSWER_SECONDS:
                    raise JobError(
                        f"Slurm does not answer, and nothing was submitted: {live}; sinfo shows whether it runs"
                    )
                if not self.warned:
                    logger.warning("Slurm does not answer (%s); waiting for it", live)
            else:
                self._bury(live)
                if self.collect and self.ended.issuperset(self.submitted):
                    self._sweep()
                    return
                if not self.collect and self._in_charge():
                    self._submit_what_is_needed()
            self.warned = isinstance(live, str)
            wait = QUEUE_SECONDS if len(self.tracker.done) > num_done else min(MAX_POLL_SECONDS, wait * 1.3)
            time.sleep(wait)

    def _sweep(self) -> None:
        """Look every open unit up in the store; events say the same sooner, but may be lost."""
        began = time.monotonic()
        with contextlib.suppress(PassingStoreError):
            for _, key in self.tracker.store.present((self.tracker.units[key].kind, key) for key in self.tracker.open):
                self.tracker.finish(key, 0.0)
        self.next_sweep = time.monotonic() + SWEEP_RATIO * (time.monotonic() - began)

    def end(self) -> None:
        if not self.tracker.open and not self.collect:
            # Everything is done: tasks that never got a turn need not wait for one.
            self._cancel("--state=PENDING")
        if self.lock is not None:
            self.lock.release()

    def say_how_to_come_back(self) -> None:
        live = live_jobs()
        names = [job for job in self.submitted if job in live]
        kept = f"{len(self.tracker.done)} of {len(self.tracker.units)} units are finished and kept"
        if not names:
            logger.warning("stopped: %s; the same command goes on from there", kept)
            return
        logger.warning(
            "stopped waiting: %s, and %d Slurm tasks go on without you. Come back with the same command and "
            "--collect, look with tda-bench cache status, or cancel them with: scancel %s",
            *(kept, len(names), " ".join(_arrays(names))),
        )

    def _in_charge(self) -> bool:
        """Whether this driver is the one that submits: a second one on the same batch only watches."""
        if self.lock is None:
            with contextlib.suppress(OSError):  # it is asked again in a moment
                self.lock = self.leases.take("driver", self.tracker.batch.id)
        return self.lock is not None

    def _take_in_events(self) -> None:
        for event in self.reader.new():
            kind, job = event["event"], event.get("job", "")
            try:
                self.tracker.take_in(event)
            except RepeatedFailureError:
                self._cancel()
                raise
            if kind == "done":
                self.seconds.append(event.get("seconds", 0.0))
            elif kind == "start":
                self.started.add(job)
                self.left_in_order.discard(job)  # it is back from the queue
            elif kind == "exit":
                # One that was terminated, or found nothing to do, is made up for only so many times: see `max_lost`.
                if not event.get("reason", "").startswith("stopped by SIGTERM"):
                    self.left_in_order.add(job)
                idle = event.get("num_done") == 0 and event.get("advanced") is not True
                self.num_lost += idle and job in self.left_in_order
            elif kind == "fatal" and event["time"] > self.began:
                self._cancel()
                raise fatal_error(event.get("error", ""), Attempt.from_event(event).reason)

    def _bury(self, live: dict[str, str]) -> None:
        """Find the tasks that have left the queue, free the units they died with, and count those that were lost."""
        now = time.time()
        newly_ended = []
        for job in self.submitted:
            if job in live:
                self.missing_since.pop(job, None)
                self.ended.discard(job)  # requeued by hand
            elif job not in self.ended and now - self.missing_since.setdefault(job, now) >= GRACE_SECONDS:
                newly_ended.append(job)
        if not newly_ended:
            return
        self.ended.update(newly_ended)
        self._take_in_events()
        held = self.leases.held(stale=True)
        for job in newly_ended:
            units = [place for place, holder in held.items() if holder.job == job]
            if job in self.left_in_order and not units:
                continue
            state = job_state(job)
            got_on = False
            for kind, key in units:
                holder = held[kind, key]
                if self.leases.free(kind, key, holder):
                    reason = "\n".join([f"Slurm job {job} ended ({state}) while it had the unit", *self._log_tail(job)])
                    work = ResumeState.of(self.tracker.store, kind, key)
                    unharmed = state in SLURMS_DOING and work.advanced(holder.work)
                    self.tracker.log.add("unfinished" if unharmed else "died", key=key, job=job, reason=reason)
                    got_on |= unharmed
            if job not in self.left_in_order and not got_on:
                self.num_lost += 1
                logger.warning("Slurm job %s ended (%s) before its work was done; other jobs go on with it", job, state)
        last = newly_ended[-1]
        if self.num_lost >= 3 and not self.started:
            self._cancel()
            reason = f"no Slurm task starts: the last, {last}, ended ({job_state(last)})"
            raise JobError("\n".join([reason, *self._log_tail(last)]))
        if self.num_lost > self.max_lost:
            self._cancel()
            reason = f"not done: {self.num_lost} Slurm tasks of this run were lost; the last was {last}"
            for key in list(self.tracker.open):
                self.tracker.give_up(key, "\n".join([reason, *self._log_tail(last)]))

    def _log_tail(self, job: str) -> list[str]:
        return tail(self.tracker.batch.folder / "logs" / f"{self.run}-{job}.out")

    def _submit_what_is_needed(self) -> None:
        num_free = len(self.tracker.open) - sum(key in self.tracker.open for _, key in self.leases.held())
        wanted = min(self.max_jobs, num_free, tasks_for(num_free, self.seconds))
        num_missing = wanted - len(set(self.submitted) - self.ended)
        while num_missing > 0:
            num_missing -= self._submit(min(num_missing, MAX_ARRAY))

    def _submit(self, count: int) -> int:
        batch = self.tracker.batch
        worker = ArrayWorker(
            root=str(self.tracker.store.root), batch_id=batch.id, run=self.run,
            units_sha256=self.tracker.units_sha256, time_limit_s=self.time_limit_s,
            max_attempts=self.tracker.max_attempts, same_failures=self.tracker.same.limit,
            kinds_done=tuple(sorted(self.tracker.same.kinds_done)),
        )  # fmt: skip
        task = ["srun", "-u", sys.executable, "-u", "-c", TASK_CODE, json.dumps(asdict(worker))]
        script = "\n".join(["#!/bin/bash", *self.setup, shlex.join(task)]) + "\n"
        # %A and %a are the array's number and the task's.
        output = str(batch.subfolder("logs")).replace("%", "%%") + f"/{self.run}-%A_%a.out"
        array = [f"--array=0-{count - 1}%{self.max_jobs}", f"--output={output}"]
        done = subprocess.run(["sbatch", *self.flags, *array], input=script, capture_output=True, text=True)
        number = re.search(r"batch job (\d+)", done.stdout)
        if done.returncode or number is None:
            said = " ".join((done.stderr or done.stdout).split())
            raise JobError(one_line(f"Slurm did not take the jobs: {said}", 1000))
        names = [f"{number[1]}_{task}" for task in range(count)]
        append_line(batch.folder / "jobs.jsonl", {"jobs": names, "run": self.run, "time": time.time()})
        self.submitted += names
        return count

    def _cancel(self, *options: str) -> None:
        arrays = _arrays(job for job in self.submitted if job not in self.ended)
        if arrays:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(["scancel", *options, *arrays], capture_output=True, timeout=30)


def tasks_for(num_units: int, seconds: list[float]) -> int:
    """How many array tasks units deserve: few before any was measured, then one per `TASK_SECONDS` of work."""
    if not seconds:
        return FIRST_TASKS
    return max(1, math.ceil(num_units * statistics.median(seconds) / TASK_SECONDS))


def job_state(job: str) -> str:
    """How a job that left the queue ended, as far as slurmctld still knows (it forgets after some minutes)."""
    try:
        shown = subprocess.run(["scontrol", "show", "job", "-o", job], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    match = re.search(r"JobState=(\S+)", shown.stdout)
    return match[1] if match else "unknown"


def _arrays(jobs: Iterable[str]) -> list[str]:
    return sorted({job.partition("_")[0] for job in jobs})


# ---- an array task ----


def signal_seconds(time_limit_s: float) -> float:
    """How long before the end of a task Slurm sends its warning (it may be up to a minute earlier)."""
    return min(90.0, 0.25 * time_limit_s)


class Stopped(BaseException):
    """Slurm wants the task to stop; like KeyboardInterrupt, it passes through a unit and frees its lease."""

    def __init__(self, signal_number: int):
        self.signal = signal.Signals(signal_number)


def _stop(number: int, _frame: object) -> None:
    raise Stopped(number)


# Not from the working folder first: it may hold a `bench` or `baselines` of the user's own.
TASK_CODE = (
    "import sys; sys.path = [entry for entry in sys.path if entry]; "
    "import json; from retrain.jobs.slurm import ArrayWorker; ArrayWorker(**json.loads(sys.argv[1]))()"
)


@dataclass
class ArrayWorker:
    """What an array task is told; everything else that it needs, it reads and checks itself when it begins."""

    root: str
    batch_id: str
    run: str
    units_sha256: str
    time_limit_s: float
    max_attempts: int
    same_failures: int = 0
    kinds_done: tuple[str, ...] = ()

    def __call__(self) -> int:
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, _stop)
        me = Holder.this_process()
        self.job = me.job
        self.store = Store(self.root, create=False)
        self.batch = JobBatch(self.store, self.batch_id)
        self.units = self.batch.units(self.units_sha256)
        self.leases = Leases(self.store.root, self.batch_id)
        self.log = self.batch.log(self.run, f"{me.job}.{me.restart}")
        self.reader = EventReader(self.batch, self.run)
        self.tracker = JobTracker(
            store=self.store, units=self.units, batch=self.batch, log=self.log, progress=lambda *_: None,
            max_attempts=self.max_attempts, same=SameFailure(self.kinds_done, self.same_failures),
        )  # fmt: skip
        self.num_done, self.longest = 0, 0.0
        # The signal of a near end comes this early; see `signal_seconds`.
        self.deadline = time.monotonic() + self.time_limit_s - signal_seconds(self.time_limit_s)
        self.key = self.saved_before = ""  # of the unit in progress: see ResumeState.mark
        self.log.add("start", job=self.job, host=host_name(), pid=os.getpid())
        try:
            self._work()
        except Stopped as stopped:
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            self._stopped(stopped)
        except (UsageError, UnwritableStoreError, RepeatedFailureError) as error:
            self.log.add("exit", job=self.job, reason="fatal error", num_done=self.num_done)
            sys.exit(str(error))
        else:
            self.log.add("exit", job=self.job, reason="nothing left to do", num_done=self.num_done)
        return self.num_done

    def _work(self) -> None:
        """Pass over the list, from a place of our own, until a pass finds nothing to do."""
        keys = list(self.units)
        first = random.Random(f"{self.job} {self.batch.id}").randrange(len(keys))
        left = keys[first:] + keys[:first]
        progress = True
        while progress:
            progress = False
            self._take_in_events()
            left = [key for key in left if not self.store.has_key(self.units[key].kind, key)]
            for key in left:
                if key in self.tracker.failed:
                    continue
                if self.num_done and time.monotonic() + 1.2 * self.longest > self.deadline:
                    self._requeue("its time is up")
                    return
                progress |= self._do(key)

    def _do(self, key: str) -> bool:
        """Try a unit; false when there was nothing to do, as another process has it or did it."""
        unit = self.units[key]
        self.key, self.saved_before = key, ResumeState.of(self.store, unit.kind, key).mark()
        attempt = do_unit(self.store, self.leases, key, unit, lambda holder: self._take_over(key, holder))
        self.key = ""
        if attempt.status == "done":
            self.num_done += 1
            self.longest = max(self.longest, attempt.seconds)
            self.tracker.finish(key, attempt.seconds)
            self.log.add("done", key=key, seconds=attempt.seconds)
        elif attempt.status == "failed":
            values = {"reason": attempt.reason, "error": attempt.error, "place": attempt.place}
            self.log.add("failed", key=key, job=self.job, **values)
            print(f"{unit.kind} {key}: {attempt.reason}", file=sys.stderr, flush=True)
            self._take_in_events()
        elif attempt.status == "fatal":
            self.tracker.record(key, attempt)  # raises it
        return attempt.status in ("done", "failed")

    def _take_in_events(self) -> None:
        """What happened here and in the other tasks."""
        for event in self.reader.new():
            self.tracker.take_in(event)

    def _take_over(self, key: str, holder: Holder) -> str:
        """Enter the death of a unit's last holder; why not to try the unit once more, or nothing."""
        kind = self.units[key].kind
        if holder.job == self.job and ResumeState.of(self.store, kind, key).advanced(holder.work):
            # This very job, before it was put back into the queue, had no time to say so.
            self.log.add("unfinished", key=key, job=self.job, reason=f"{holder} was cut short; its work was saved")
            return ""
        self.log.add("died", key=key, job=holder.job, reason=f"{holder} died while it had the unit")
        self._take_in_events()
        return "its workers died" if key in self.tracker.failed else ""

    def _stopped(self, stopped: Stopped) -> None:
        name = stopped.signal.name
        if stopped.signal != signal.SIGUSR2:
            # scancel, or a requeue by somebody else: not for us to undo. A second signal must not cut this short.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self.log.add("exit", job=self.job, reason=f"stopped by {name}", num_done=self.num_done)
            sys.exit(f"stopped by {name}; {self.num_done} units are kept")
        work = ResumeState.of(self.store, self.units[self.key].kind, self.key) if self.key else None
        got_on = work is not None and work.advanced(self.saved_before)
        if got_on:
            self.log.add("unfinished", key=self.key, job=self.job, reason=f"stopped by {name}; its work was saved")
        elif self.key and not self.num_done and time.monotonic() > self.deadline - 60:
            # It had a whole task for itself and saved nothing: again would not help, three times is enough.
            minutes = self.time_limit_s / 60
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
