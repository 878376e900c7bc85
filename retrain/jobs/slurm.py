"""The driver of units on a Slurm cluster, through submitit: array tasks that pull units until none is left.

A small array is submitted first. Every task (`retrain/jobs/slurm_task.py`) takes unit after unit from the campaign's
list, so short units are packed into it; from the seconds the first units took the driver then chooses how many tasks
the rest deserves, so that each has at least `TASK_SECONDS` to do. What is done is read from the store, which tasks
live from `squeue`: no accounting is needed, nothing of submitit's results is waited for or unpickled, and a task that
is cancelled, killed or lost with its node is noticed by its absence, within seconds. Its unit is freed and another task
is submitted, up to a limit. What submitit pickles for the tasks lies in a folder of this user alone (`private.py`).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from retrain.errors import UsageError
from retrain.jobs.attempt import Attempt, tail
from retrain.jobs.book import Book, JobError, RepeatedFailureError, fatal_error, logger
from retrain.jobs.campaign import Campaign, EventReader, Job, RunId, Seconds, append_line, read_lines
from retrain.jobs.claims import Claim, Claims
from retrain.jobs.private import private_folder, private_path
from retrain.jobs.slurm_task import ArrayWorker, advanced, signal_seconds
from retrain.safe_files import one_line
from retrain.store import PassingStoreError

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
    """A line of a campaign's list of what was submitted."""

    jobs: list[Job]
    run: RunId
    time: Seconds


# -- the driver -------------------------------------------------------------------------------------------------------


def live_jobs() -> dict[str, str] | None:
    """{job: state} of this user's jobs in the queue, array tasks as `array_task`; None when Slurm does not answer."""
    found = _ask_queue()
    return found if isinstance(found, dict) else None


def _ask_queue() -> dict[str, str] | str:
    """The jobs, or why there is no answer."""
    command = ["squeue", "-h", "-r", "-u", str(os.getuid()), "-o", "%i|%T"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if listing.returncode:
        lines = [line for line in listing.stderr.splitlines() if line.strip()]
        return one_line(lines[-1] if lines else f"squeue exited with {listing.returncode}", 200)
    return dict(line.strip().split("|", 1) for line in listing.stdout.splitlines() if "|" in line)


def submissions(campaign: Campaign) -> list[dict[str, Any]]:
    """What was submitted for a campaign, oldest first: {"jobs": [names], "run": ..., "time": ...}."""
    return list(read_lines(campaign.folder / "jobs.jsonl", Submission))


def live_run(campaign: Campaign) -> str | None:
    """The run whose jobs are still in the queue, which a new driver joins; None when there is none."""
    submitted = submissions(campaign)
    if not submitted:
        return None
    live = live_jobs() or {}
    for content in reversed(submitted):
        if any(job in live for job in content["jobs"]):
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
        self.folder = private_path(book.campaign)
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
            if content["run"] == run:
                self.submitted.update(dict.fromkeys(content["jobs"], content["time"]))
        self.missing_since: dict[str, float] = {}
        self.ended: set[str] = set()
        self.started: set[str] = set()
        self.left_in_order: set[str] = set()
        self.num_lost = 0
        self.seconds: list[float] = []
        self.next_sweep = 0.0
        self.warned = False

    def drive(self) -> None:
        wait = QUEUE_SECONDS
        while True:
            num_done = len(self.book.done)
            self._take_in_events()
            if time.monotonic() >= self.next_sweep:
                self._sweep()
            if not self.book.num_open:
                return
            live = _ask_queue()
            if isinstance(live, str):
                if not self.submitted and time.time() - self.began > FIRST_ANSWER_SECONDS:
                    raise JobError(
                        f"Slurm does not answer, and nothing was submitted: {live}; sinfo shows whether it runs"
                    )
                if not self.warned:
                    logger.warning("Slurm does not answer (%s); waiting for it", live)
                self.warned = True
            else:
                self.warned = False
                self._bury(live)
                if self.collect and self.ended.issuperset(self.submitted):
                    self._sweep()
                    return
                if not self.collect and self._in_charge():
                    self._submit_what_is_needed()
            wait = QUEUE_SECONDS if len(self.book.done) > num_done else min(MAX_POLL_SECONDS, wait * 1.3)
            time.sleep(wait)

    def _sweep(self) -> None:
        """Look every open unit up in the store; events say the same sooner, but may be lost."""
        began = time.monotonic()
        with contextlib.suppress(PassingStoreError):
            for _, key in self.book.store.present((self.book.units[key].kind, key) for key in self.book.open()):
                self.book.finish(key, 0.0)
        self.next_sweep = time.monotonic() + SWEEP_RATIO * (time.monotonic() - began)

    def end(self) -> None:
        if not self.book.num_open and not self.collect:
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
            with contextlib.suppress(OSError):  # it is asked again in a moment
                self.lock = self.claims.take("driver", self.book.campaign.id)
        return self.lock is not None

    def _take_in_events(self) -> None:
        for event in self.reader.new():
            kind, key, job = event["event"], event.get("key", ""), event.get("job", "")
            unit = self.book.units.get(key)
            if kind == "done" and unit is not None:
                self.seconds.append(event.get("seconds", 0.0))
                self.book.same.done(unit.kind)
                if self.book.in_store(key):
                    self.book.finish(key, 0.0)
            elif kind in ("failed", "died") and unit is not None:
                try:
                    self.book.count(key, Attempt.from_event(event))
                except RepeatedFailureError:
                    self._cancel()
                    raise
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
            got_on = False
            for kind, key in units:
                holder = held[kind, key]
                if self.claims.free(kind, key, holder):
                    reason = "\n".join([f"Slurm job {job} ended ({state}) while it had the unit", *self._log_tail(job)])
                    unharmed = state in SLURMS_DOING and advanced(self.book.store, kind, key, holder.work)
                    self.book.log.add("unfinished" if unharmed else "died", key=key, job=job, reason=reason)
                    got_on |= unharmed
            if job not in self.left_in_order and not got_on:
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
                self.book.give_up(key, "\n".join([reason, *self._log_tail(last)]))

    def _log_tail(self, job: str) -> list[str]:
        return tail(self.folder / f"{job}_0_log.out") if self.folder is not None else []

    def _submit_what_is_needed(self) -> None:
        num_free = self.book.num_open - sum(self.book.is_open(key) for _, key in self.claims.held())
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
            units_sha256=self.book.units_sha256,
            time_limit_s=self.parameters["timeout_min"] * 60.0,
            max_attempts=self.book.max_attempts,
            same_failures=self.book.same.limit,
            kinds_done=tuple(sorted(self.book.same.kinds_done)),
        )
        try:
            executor = submitit.AutoExecutor(folder=private_folder(campaign), cluster="slurm")
            executor.update_parameters(**self.parameters)
            names = [str(job.job_id) for job in executor.map_array(worker, range(count))]
        except JobError:
            raise
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
