"""Units on a Slurm cluster, through submitit: array tasks that pull units until none is left.

The driver (`run_slurm`, called by `retrain/jobs.py` for `--cluster slurm`) submits a small array first. Every task
takes unit after unit from the campaign's list, so short units are packed into it; from the seconds the first units
took the driver then chooses how many tasks the rest deserves, so that each has at least `TASK_SECONDS` to do. What is
done is read from the store, which tasks live from `squeue`: no accounting is needed, nothing of submitit's results is
waited for or unpickled, and a task that is cancelled, killed or lost with its node is noticed by its absence, within
seconds. Its unit is freed and another task is submitted, up to a limit.

submitit's own handling of signals is replaced, because it ignores SIGTERM and counts every signal of a short job as a
timeout: here SIGUSR2 (preemption, or the time limit is near) and SIGTERM both give back the unit in progress, and the
former also puts the task back into the queue, so that a campaign goes on without its driver.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from retrain.campaign import Campaign, EventReader, append_line, read_lines
from retrain.claims import Claim, Claims, Holder
from retrain.errors import UsageError
from retrain.jobs import Book, JobError, logger, perform, tail
from retrain.safe_files import one_line
from retrain.store import Store, UnwritableStoreError, host_name

DEFAULT_TIMEOUT_MIN = 60.0
# The first array, before anything is known of the units.
FIRST_TASKS = 8
# Starting a task costs some ten seconds (Python, torch, the queue): it should have several times that to do.
TASK_SECONDS = 60.0
POLL_SECONDS = 1.0
MAX_POLL_SECONDS = 5.0
MAX_ARRAY = 500
# An array's tasks may be missing from squeue for a moment after sbatch returns.
GRACE_SECONDS = 5.0


# -- the driver -------------------------------------------------------------------------------------------------------


def live_jobs() -> dict[str, str] | None:
    """{job: state} of this user's jobs in the queue, array tasks as `array_task`; None when Slurm does not answer."""
    command = ["squeue", "-h", "-r", "-u", str(os.getuid()), "-o", "%i|%T"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if listing.returncode:
        return None
    return dict(line.strip().split("|", 1) for line in listing.stdout.splitlines() if "|" in line)


def submissions(campaign: Campaign) -> list[dict[str, Any]]:
    """What was submitted for a campaign, oldest first: {"jobs": [names], "run": ..., "time": ...}."""
    return [
        content
        for content in read_lines(campaign.folder / "jobs.jsonl")
        if isinstance(content.get("jobs"), list) and all(isinstance(job, str) for job in content["jobs"])
    ]


def live_run(campaign: Campaign) -> str | None:
    """The run whose jobs are still in the queue, which a new driver joins; None when there is none."""
    submitted = submissions(campaign)
    if not submitted:
        return None
    live = live_jobs() or {}
    for content in reversed(submitted):
        if any(job in live for job in content["jobs"]) and isinstance(content.get("run"), str):
            return content["run"]
    return None


def run_slurm(
    book: Book,
    run: str,
    jobs: int,
    gpus_per_job: int,
    timeout_min: float | None,
    options: dict[str, Any],
    collect: bool,
) -> None:
    """Drive a campaign on Slurm until every unit is done or has failed (collect: until its jobs have ended)."""
    if shutil.which("sbatch") is None or shutil.which("squeue") is None:
        raise JobError(
            "Slurm is not here (no sbatch and squeue on PATH); log in to the cluster, or use --cluster local"
        )
    parameters = sbatch_parameters(book.campaign, jobs, gpus_per_job, timeout_min or DEFAULT_TIMEOUT_MIN, options)
    driver = _Driver(book, run, jobs, parameters, timeout_min or DEFAULT_TIMEOUT_MIN, collect)
    try:
        driver.drive()
    except (KeyboardInterrupt, SystemExit):
        driver.say_how_to_come_back()
        raise
    finally:
        driver.end()


def sbatch_parameters(
    campaign: Campaign, jobs: int, gpus_per_job: int, timeout_min: float, options: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of submitit's `update_parameters`: what we need, and the user's --slurm options passed through."""
    from submitit.slurm.slurm import SlurmExecutor

    parameters: dict[str, Any] = {
        "name": f"tda-{campaign.id}",
        "timeout_min": max(1, math.ceil(timeout_min)),
        "slurm_array_parallelism": jobs,
        "slurm_stderr_to_stdout": True,
        "slurm_signal_delay_s": int(signal_seconds(timeout_min * 60)),
    }
    if gpus_per_job:
        parameters["gpus_per_node"] = gpus_per_job
    additional: dict[str, Any] = {"requeue": True}
    paths = os.pathsep.join(os.path.abspath(entry or os.curdir) for entry in sys.path)
    # The tasks find modules where the driver does; one thread unless the user asks for more cores.
    setup = [f"export PYTHONPATH={_quoted(paths)}", "export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}"]
    ours = {"time": "--timeout-min", "timeout_min": "--timeout-min", "array": "--jobs", "array_parallelism": "--jobs"}
    for key, text in options.items():
        if key in ours:
            raise UsageError(f"--slurm {key}=... is set by {ours[key]}")
        value = _option_value(text)
        if key == "setup":
            setup.append(str(text))
        elif key in ("nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node"):
            parameters[key] = value
        elif key in SlurmExecutor._valid_parameters():
            parameters[f"slurm_{key}"] = value
        else:
            additional[key.replace("_", "-")] = value
    parameters["slurm_setup"] = setup
    parameters["slurm_additional_parameters"] = additional
    return parameters


def signal_seconds(time_limit_s: float) -> float:
    """How long before the end of a task Slurm sends its warning (it may be up to a minute earlier)."""
    return min(90.0, 0.25 * time_limit_s)


def _option_value(text: Any) -> Any:
    if isinstance(text, str):
        if text.isdigit():
            return int(text)
        if text.lower() in ("true", "yes"):
            return True
    return text


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


class _Driver:
    def __init__(self, book: Book, run: str, jobs: int, parameters: dict[str, Any], timeout_min: float, collect: bool):
        self.book = book
        self.run = run
        self.max_jobs = jobs
        self.max_lost = max(6, 3 * jobs)
        self.parameters = parameters
        self.timeout_min = timeout_min
        self.collect = collect
        self.began = time.time()
        self.claims = Claims(book.store.root, book.campaign.id)
        self.lock: Claim | None = None
        self.reader = EventReader(book.campaign, run)
        self.submitted: dict[str, float] = {}  # {job: when}
        for content in submissions(book.campaign):
            if content.get("run") == run:
                self.submitted.update({job: float(content.get("time") or 0.0) for job in content["jobs"]})
        self.missing_since: dict[str, float] = {}
        self.ended: set[str] = set()
        self.started: set[str] = set()
        self.left_in_order: set[str] = set()
        self.num_lost = 0
        self.seconds: list[float] = []
        self.trials: Counter[str] = Counter()
        self.warned = False

    def drive(self) -> None:
        wait = POLL_SECONDS
        while True:
            num_done = len(self.book.done)
            self._take_in_events()
            for _, key in self.book.store.present((self.book.units[key].kind, key) for key in self.book.open()):
                self.book.finish(key, 0.0)
            if not self.book.open():
                return
            live = live_jobs()
            if live is None:
                if not self.warned:
                    logger.warning("Slurm does not answer (squeue failed); waiting for it")
                self.warned = True
            else:
                self.warned = False
                self._bury(live)
                if self.collect and self.ended.issuperset(self.submitted):
                    return
                if not self.collect and self._in_charge():
                    self._submit_what_is_needed()
            wait = POLL_SECONDS if len(self.book.done) > num_done else min(MAX_POLL_SECONDS, wait * 1.3)
            time.sleep(wait)

    def end(self) -> None:
        if not self.book.open() and not self.collect:
            # Everything is done: tasks that never got a turn need not wait for one.
            self._cancel("--state=PENDING")
        if self.lock is not None:
            self.lock.release()

    def say_how_to_come_back(self) -> None:
        live = live_jobs() or {}
        names = [job for job in self.submitted if job in live]
        kept = f"{len(self.book.done)} of {len(self.book.units)} units are finished and kept"
        if names:
            logger.warning(
                "stopped waiting: %s, and %d Slurm tasks go on without you. Come back with the same command and "
                "--collect, look with python -m bench.status, or cancel them with: scancel %s",
                kept,
                len(names),
                " ".join(_arrays(names)),
            )
        else:
            logger.warning("stopped: %s; the same command goes on from there", kept)

    def _in_charge(self) -> bool:
        """Whether this driver is the one that submits: a second one on the same campaign only watches."""
        if self.lock is None:
            self.lock = self.claims.take("driver", self.book.campaign.id)
        return self.lock is not None

    def _take_in_events(self) -> None:
        for event in self.reader.new():
            kind, key, job = event.get("event"), event.get("key"), str(event.get("job"))
            if kind == "done":
                self.seconds.append(event.get("seconds", 0.0))
            elif kind in ("failed", "died") and key in self.book.units:
                self.trials[key] += 1
                if self.trials[key] >= self.book.max_attempts and key not in self.book.done:
                    reason = f"failed {self.trials[key]} times, the last time with {event.get('reason')}"
                    self.book.failed.setdefault(key, reason)
                    logger.warning("%s %s %s", self.book.units[key].kind, key, reason.splitlines()[0])
            elif kind == "start":
                self.started.add(job)
                self.left_in_order.discard(job)  # it is back from the queue
            elif kind == "exit":
                # One that was terminated, or found nothing to do, is made up for only so many times: see `max_lost`.
                if not str(event.get("reason")).startswith("stopped by SIGTERM"):
                    self.left_in_order.add(job)
                self.num_lost += event.get("num_done") == 0 and job in self.left_in_order
            elif kind == "fatal" and event["time"] > self.began:
                self._cancel()
                error = UsageError if event.get("error") == "UsageError" else UnwritableStoreError
                raise error(str(event.get("reason")))

    def _bury(self, live: dict[str, str]) -> None:
        """Find the tasks that have left the queue, free the units they died with, and count those that were lost."""
        now = time.time()
        newly_ended = []
        for job in self.submitted:
            if job in live:
                self.missing_since.pop(job, None)
                self.ended.discard(job)  # requeued by hand
            elif job not in self.ended:
                since = self.missing_since.setdefault(job, now)
                if now - since >= GRACE_SECONDS:
                    newly_ended.append(job)
        if not newly_ended:
            return
        self.ended.update(newly_ended)
        self._take_in_events()
        held = self.claims.held(stale=True)
        for job in newly_ended:
            units = [place for place, holder in held.items() if holder.job == job]
            if job in self.left_in_order and not units:
                continue
            state = job_state(job)
            for kind, key in units:
                if self.claims.free(kind, key, held[kind, key]):
                    reason = "\n".join([f"Slurm job {job} ended ({state}) while it had the unit", *self._log_tail(job)])
                    self.book.log.add("died", key=key, job=job, reason=reason)
            if job not in self.left_in_order:
                self.num_lost += 1
                logger.warning("Slurm job %s ended (%s) before its work was done; other jobs go on with it", job, state)
        self._give_up_if_hopeless(newly_ended[-1])

    def _give_up_if_hopeless(self, last: str) -> None:
        if self.num_lost >= 3 and not self.started:
            self._cancel()
            lines = [f"no Slurm task starts: the last, {last}, ended ({job_state(last)})", *self._log_tail(last)]
            raise JobError("\n".join(lines))
        if self.num_lost > self.max_lost:
            self._cancel()
            reason = f"not done: {self.num_lost} Slurm tasks of this run were lost; the last was {last}"
            for key in self.book.open():
                self.book.failed[key] = "\n".join([reason, *self._log_tail(last)])

    def _log_tail(self, job: str) -> list[str]:
        return tail(self.book.campaign.folder / "slurm" / f"{job}_0_log.out")

    def _submit_what_is_needed(self) -> None:
        held = self.claims.held()
        num_free = sum((self.book.units[key].kind, key) not in held for key in self.book.open())
        wanted = min(self.max_jobs, num_free, tasks_for(num_free, self.seconds))
        num_missing = wanted - len(self.submitted.keys() - self.ended)
        while num_missing > 0:
            num_missing -= self._submit(min(num_missing, MAX_ARRAY))

    def _submit(self, count: int) -> int:
        import submitit

        campaign = self.book.campaign
        worker = ArrayWorker(
            root=str(self.book.store.root),
            campaign=campaign.id,
            run=self.run,
            units_sha256=str(campaign.describe().get("units_sha256")),
            time_limit_s=self.parameters["timeout_min"] * 60.0,
            max_attempts=self.book.max_attempts,
        )
        try:
            executor = submitit.AutoExecutor(folder=campaign.folder / "slurm", cluster="slurm")
            executor.update_parameters(**self.parameters)
            names = [str(job.job_id) for job in executor.map_array(worker, range(count))]
        except Exception as error:  # submitit raises many kinds; all of them mean that sbatch said no
            raise JobError(one_line(f"Slurm did not take the jobs: {' '.join(str(error).split())}", 1000)) from None
        now = time.time()
        append_line(campaign.folder / "jobs.jsonl", {"jobs": names, "run": self.run, "time": now})
        self.submitted.update(dict.fromkeys(names, now))
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


# -- the task ---------------------------------------------------------------------------------------------------------


class Stopped(BaseException):
    """Slurm wants the task to stop; like KeyboardInterrupt, it passes through a unit and frees its claim."""

    def __init__(self, signal_number: int):
        self.signal = signal.Signals(signal_number)


@dataclass(frozen=True)
class ArrayWorker:
    """What an array task does: take units that nobody else has until there are none, or its time is up."""

    root: str
    campaign: str
    run: str
    units_sha256: str
    time_limit_s: float
    max_attempts: int

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
        self.num_done = 0
        self.longest = 0.0
        self.began = time.monotonic()
        # The signal of a near end comes this early; see `signal_seconds`.
        self.deadline = self.began + worker.time_limit_s - signal_seconds(worker.time_limit_s)
        self.unit_began = self.began
        self.key = ""

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
        self.key, self.unit_began = key, time.monotonic()
        outcome = perform(self.store, self.claims, key, self.units[key], lambda holder: self._take_over(key, holder))
        self.key = ""
        if outcome.status == "done":
            self.num_done += 1
            self.longest = max(self.longest, outcome.seconds)
            self.log.add("done", key=key, seconds=outcome.seconds)
        elif outcome.status == "failed":
            self.log.add("failed", key=key, job=self.job, reason=outcome.reason)
            print(f"{self.units[key].kind} {key}: {outcome.reason}", file=sys.stderr, flush=True)
            self._count_trials()
        elif outcome.status == "fatal":
            self.log.add("fatal", reason=outcome.reason, error=outcome.error)
            self.log.add("exit", job=self.job, reason="fatal error", num_done=self.num_done)
            sys.exit(outcome.reason)
        return outcome.status in ("done", "failed")

    def _count_trials(self) -> None:
        for event in self.reader.new():
            if event.get("event") in ("failed", "died"):
                self.trials[str(event.get("key"))] += 1

    def _take_over(self, key: str, holder: Holder) -> str:
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
        if self.key and not self.num_done and time.monotonic() > self.deadline - 60:
            # It had a whole task for itself: again would not help, three times is enough.
            minutes = self.worker.time_limit_s / 60
            self.log.add("failed", key=self.key, job=self.job, reason=f"it takes more than --timeout-min {minutes:g}")
        self._requeue(f"stopped by {name}")

    def _requeue(self, reason: str) -> None:
        """Back into the queue, with the same job number; where Slurm does not allow it the driver submits another."""
        self.log.add("exit", job=self.job, reason=f"{reason}; back into the queue", num_done=self.num_done)
        print(f"{reason}: {self.num_done} units are kept, the task goes back into the queue", flush=True)
        try:
            subprocess.run(["scontrol", "requeue", self.job], check=True, timeout=60)
            time.sleep(120)  # Slurm ends this process now; anything it did would be cut short
        except (OSError, subprocess.SubprocessError) as error:
            print(f"cannot go back into the queue: {error}", file=sys.stderr, flush=True)
        except Stopped:
            sys.exit("back in the queue")
