"""Worker processes on this machine: started once, they take unit after unit, each with its share of the hardware.

A process for every unit would cost more: importing torch takes seconds, a retrain often less. A worker never outlives
its driver: it ends with its pipe, and Linux kills it when the driver dies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from retrain.jobs.tracker import (
    MAX_ATTEMPTS,
    POLL_SECONDS,
    Attempt,
    JobError,
    JobTracker,
    UnitQueue,
    do_unit,
    logger,
    tail,
)
from retrain.jobs.unit import Unit
from retrain.leases import Leases
from retrain.processes import die_with
from retrain.resume import ResumeState
from retrain.store import Store

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


# -- what there is to share -------------------------------------------------------------------------------------------


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus() -> list[str]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip() not in ("", "-1")]
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(index) for index in range(sum(line.startswith("GPU") for line in listing.stdout.splitlines()))]


def worker_environment(index: int, jobs: int, gpus: list[str]) -> dict[str, str]:
    """The environment of local worker `index`: a share of the cores, and its own GPU where there are any."""
    environment = dict(os.environ)
    share = max(1, cores() // jobs)
    for variable in THREAD_VARIABLES:
        given = environment.get(variable, "")
        environment[variable] = str(min(share, int(given))) if given.isdigit() and int(given) else str(share)
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[index % len(gpus)]
    # The worker finds modules where this process does, wherever it was started.
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry or os.curdir) for entry in sys.path)
    return environment


# -- the driver -------------------------------------------------------------------------------------------------------


def run_local(tracker: JobTracker, run: str, jobs: int | None, timeout_min: float | None) -> None:
    """Do a batch's open units in worker processes."""
    gpus = visible_gpus() if tracker.devices() != {"cpu"} else []
    if jobs is None:
        jobs = len(gpus) or cores()  # one a GPU, else every core would start a process on the same one
    if gpus and jobs > len(gpus):
        logger.warning("%d jobs share %d GPUs: some jobs run on the same one", jobs, len(gpus))
    jobs = min(jobs, len(tracker.open))
    tracker.batch.subfolder("logs")
    pool = _Pool(tracker, run, jobs, gpus, timeout_min)
    try:
        pool.run()
    finally:
        for worker in pool.workers.values():
            worker.end()


class LocalWorker:
    """The driver's end of one worker process: units go down its pipe, attempts come up."""

    def __init__(self, root: Path, batch: str, log_path: Path, environment: dict[str, str]):
        self.log_path = log_path
        self.key: str | None = None
        self.saved_before = ""  # the mark of its unit's work when it got the unit
        self.since, self.ready, self.killed_because, self._log_offset = 0.0, False, "", 0
        self.pipe, end = Pipe()
        # Not from the working folder first: it may hold a `bench` or `baselines` of the user's own.
        path = "import sys; sys.path = [entry for entry in sys.path if entry]"
        code = f"{path}; from retrain.jobs.local import local_worker; local_worker({end.fileno()}, {os.getpid()})"
        try:
            with end, open(log_path, "ab") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[end.fileno()],
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for the driver, which then ends its workers
                )
        except BaseException:
            self.pipe.close()
            raise
        self._send((str(root), batch))

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # a dead worker is noticed by the end of its pipe
            self.pipe.send(message)

    def give(self, key: str, unit: Unit, saved_before: str) -> None:
        self.key, self.since, self.saved_before = key, time.monotonic(), saved_before
        with contextlib.suppress(OSError):
            self._log_offset = self.log_path.stat().st_size
        self._send((key, unit))

    def messages(self) -> tuple[list[tuple[str, Attempt | None]], bool]:
        """(keys with their attempts, whether the worker is gone); at first, that it is ready."""
        found = []
        try:
            while self.pipe.poll():
                found.append(self.pipe.recv())
        except (EOFError, OSError):
            return found, True
        return found, False

    def last_lines(self) -> list[str]:
        """The end of what it logged since its present unit began."""
        return tail(self.log_path, self._log_offset)

    def kill(self, why: str) -> None:
        self.killed_because = why
        self.process.kill()

    def end(self) -> int:
        """Stop it, if it still runs, and return its exit code."""
        self.process.kill()
        self.pipe.close()
        return self.process.wait()


class _Pool:
    """Keeps `jobs` workers busy until every unit is done or has failed."""

    def __init__(self, tracker: JobTracker, run: str, jobs: int, gpus: list[str], timeout_min: float | None):
        self.tracker, self.run_name, self.jobs, self.gpus = tracker, run, jobs, gpus
        self.timeout_s = timeout_min * 60 if timeout_min else float("inf")
        self.queue = UnitQueue(tracker, tracker.open)
        self.workers: dict[int, LocalWorker] = {}
        self.num_started = self.false_starts = 0

    def run(self) -> None:
        next_poll = 0.0
        while self.tracker.open:
            while len(self.workers) < min(self.jobs, len(self.tracker.open)):
                self._start(next(index for index in range(self.jobs) if index not in self.workers))
            indices: dict[Any, int] = {worker.pipe: index for index, worker in self.workers.items()}
            for pipe in wait(list(indices), timeout=POLL_SECONDS):
                self._listen(indices[pipe])
            if time.monotonic() >= next_poll:
                next_poll = time.monotonic() + POLL_SECONDS
                self.queue.retry()
                self._stop_overdue()
            self._feed()

    def _start(self, index: int) -> None:
        log_path = self.tracker.batch.folder / "logs" / f"{self.run_name}-{self.num_started}.log"
        environment = worker_environment(index, self.jobs, self.gpus)
        try:
            self.workers[index] = LocalWorker(self.tracker.store.root, self.tracker.batch.id, log_path, environment)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self.tracker.store.unwritable(error) from None
            raise JobError(f"a worker process cannot be started: {error}") from None
        self.num_started += 1

    def _listen(self, index: int) -> None:
        worker = self.workers[index]
        messages, gone = worker.messages()
        for key, attempt in messages:
            worker.key = None
            if attempt is None:
                worker.ready, self.false_starts = True, 0
            else:
                self.queue.enter(key, attempt)
        if gone:
            self._bury(index)

    def _feed(self) -> None:
        """The next units; one a worker, as only that one is accounted for when it dies."""
        for worker in self.workers.values():
            if worker.ready and worker.key is None and (key := self.queue.next()) is not None:
                worker.give(key, self.tracker.units[key], self._work(key).mark())

    def _work(self, key: str) -> ResumeState:
        return ResumeState.of(self.tracker.store, self.tracker.units[key].kind, key)

    def _bury(self, index: int) -> None:
        """Account for a worker that is gone; the main loop starts another in its place."""
        worker = self.workers.pop(index)
        code = worker.end()
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if code == -signal.SIGKILL:
            cause = worker.killed_because or f"{cause} (out of memory?)"
        if worker.key is None:
            self.false_starts += not worker.ready
            if self.false_starts >= MAX_ATTEMPTS:
                lines = "\n".join([f"no worker process starts: the last one {cause}", *worker.last_lines()])
                raise JobError(lines)
        elif self.tracker.in_store(worker.key):
            self.queue.enter(worker.key, Attempt("done", time.monotonic() - worker.since))
        elif worker.killed_because and self._work(worker.key).advanced(worker.saved_before):
            # We stopped it, not the unit itself, and it got on: that is no failure, and it goes on from there.
            self.queue.enter(worker.key, Attempt("unfinished", reason=f"{cause}; it saved its work and goes on"))
        else:
            lines = "\n".join([f"the worker {cause}; its log is {worker.log_path}", *worker.last_lines()])
            self.queue.enter(worker.key, Attempt("failed", reason=lines))

    def _stop_overdue(self) -> None:
        for worker in self.workers.values():
            if worker.key is not None and time.monotonic() - worker.since > self.timeout_s:
                worker.kill(f"was stopped after --timeout-min {self.timeout_s / 60:g}")


# -- the worker -------------------------------------------------------------------------------------------------------


def local_worker(descriptor: int, driver: int) -> None:
    """The life of a worker process: take units from the pipe, do them, and say what became of each."""
    die_with(driver)
    pipe = Connection(descriptor)
    try:
        root, batch = pipe.recv()
        store = Store(root, create=False)  # the driver made it; a full disk must not stop us before we can say so
        leases = Leases(store.root, batch)
        pipe.send(("", None))
        while True:
            key, unit = pipe.recv()
            attempt = do_unit(store, leases, key, unit)
            if attempt.status == "failed":
                print(f"{unit.kind} {key}: {attempt.reason}", file=sys.stderr, flush=True)
            pipe.send((key, attempt))
    except (EOFError, ConnectionError):
        return  # the driver is gone, or done with us
