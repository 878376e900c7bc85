"""The same work in this process, in local processes, or on Slurm; nothing that is finished is ever lost.

A campaign is a list of idempotent `Unit`s. `run_units` does those whose entry the store does not have yet:

    report = run_units(units, store, cluster="local", jobs=4)
    report.failed        # {key: reason, with the last lines of the log}

- `inline`: one after another in this process.
- `local`: worker processes on this machine. They are our own and not submitit's LocalExecutor, which starts a process
  for every submission (importing torch takes seconds, a retrain often less) and pins nothing: ours start once, pull
  unit after unit, and each has its share of the cores, or its own GPUs.
- `slurm`: array tasks through submitit (`retrain/slurm.py`), which pull units just the same.

In all three, a unit is claimed before it is worked on (`retrain/claims.py`), so campaigns may overlap and share the
work; a unit that fails three times is reported and does not stop the others; a worker that is killed is replaced and
its unit tried again; Ctrl-C or a kill at any moment keeps every finished unit, and the same command goes on from there.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from retrain.campaign import Campaign, EventLog, Unit, new_run
from retrain.claims import Claims, Holder
from retrain.errors import UsageError
from retrain.progress import Progress, beside_bars, close_bars, counting
from retrain.store import Store, UnwritableStoreError

__all__ = ["JobError", "Report", "Unit", "run_units"]

CLUSTERS = ("inline", "local", "slurm")
MAX_ATTEMPTS = 3
LOG_LINES = 15
POLL_SECONDS = 0.5
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

logger = logging.getLogger(__name__)


class JobError(RuntimeError):
    """The job layer itself cannot work (no worker starts, no Slurm here); the message says what to do."""


@dataclass(frozen=True)
class Report:
    """What became of a campaign, by key: `done` are in the store, `pending` were left undone (only with collect)."""

    done: list[str]
    failed: dict[str, str]
    pending: list[str]
    num_computed: int
    seconds: float
    campaign: str = ""

    @property
    def complete(self) -> bool:
        return not self.failed and not self.pending


@dataclass(frozen=True)
class Outcome:
    """What one attempt at a unit came to.

    status: done; found (it was done already); busy (another process has it); failed; fatal (stop everything);
    refused (its last holder died, once too often).
    """

    status: str
    seconds: float = 0.0
    reason: str = ""
    error: str = ""


@dataclass
class Book:
    """The account of a run: which units are done, failed or open. Drivers of all clusters keep it the same way."""

    store: Store
    units: dict[str, Unit]
    campaign: Campaign
    log: EventLog
    progress: Progress
    max_attempts: int
    done: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    attempts: Counter[str] = field(default_factory=Counter)
    num_computed: int = 0

    def open(self) -> list[str]:
        return [key for key in self.units if key not in self.done and key not in self.failed]

    def finish(self, key: str, seconds: float | None = None) -> None:
        """`seconds` when it was computed by this run, None when it turned up in the store."""
        if key in self.done:
            return
        self.done.add(key)
        if seconds is not None:
            self.num_computed += 1
        self.progress(len(self.done), len(self.units))

    def record(self, key: str, outcome: Outcome) -> bool:
        """Enter an outcome; true when the unit has to be tried again."""
        if outcome.status == "done":
            self.log.add("done", key=key, seconds=outcome.seconds)
            self.finish(key, outcome.seconds)
            return False
        if outcome.status == "found":
            self.finish(key)
            return False
        if outcome.status == "fatal":
            raise (UsageError if outcome.error == "UsageError" else UnwritableStoreError)(outcome.reason)
        self.attempts[key] += 1
        self.log.add("failed", key=key, reason=outcome.reason)
        if self.attempts[key] < self.max_attempts:
            return True
        self.failed[key] = f"failed {self.attempts[key]} times, the last time with {outcome.reason}"
        unit = self.units[key]
        with beside_bars():
            logger.warning("%s %s %s", unit.kind, key, self.failed[key].splitlines()[0])
        return False


def run_units(
    units: Iterable[Unit],
    store: Store,
    *,
    cluster: str = "inline",
    jobs: int | None = None,
    gpus_per_job: int | None = None,
    slurm: Mapping[str, Any] | None = None,
    timeout_min: float | None = None,
    collect: bool = False,
    progress: bool | Progress = False,
    name: str = "",
    max_attempts: int = MAX_ATTEMPTS,
) -> Report:
    """Do the units whose entry is missing from the store, and say what became of them all.

    jobs: how many at once; default one per GPU or core (local), 16 array tasks (slurm).
    gpus_per_job: default one where units name a device other than the CPU and there are GPUs (on Slurm: name CUDA).
    timeout_min: the most minutes one unit (local) or one array task (slurm) may take.
    collect: start nothing; on Slurm, wait for the jobs of this campaign that still run.
    progress: True for a bar on stderr, or a function called with (number done, number of all).
    Raises UsageError or UnwritableStoreError at once when a unit does: another unit would fare no better.
    """
    if cluster not in CLUSTERS:
        raise UsageError(f'Unknown cluster "{cluster}"; available: {", ".join(CLUSTERS)}')
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs must be at least 1, not {jobs}")
    if gpus_per_job is not None and gpus_per_job < 0:
        raise UsageError(f"--gpus-per-job must be at least 0, not {gpus_per_job}")
    if timeout_min is not None and not timeout_min > 0:
        raise UsageError(f"--timeout-min must be above 0, not {timeout_min}")
    start = time.perf_counter()
    by_key = {store.key(unit.kind, unit.config): unit for unit in units}
    present = {key for key, unit in by_key.items() if store.has_key(unit.kind, key)}
    if len(present) == len(by_key) or (collect and cluster != "slurm"):
        pending = [key for key in by_key if key not in present]
        return Report([key for key in by_key if key in present], {}, pending, 0, time.perf_counter() - start)
    with counting(progress, name) as report_progress:
        campaign = Campaign.of(store, by_key)
        run = new_run()
        if cluster == "slurm":
            from retrain.slurm import live_run, run_slurm  # here, because nobody else needs submitit

            run = live_run(campaign) or (collect and campaign.describe().get("run")) or run
        try:
            # A nameless step in this process is over before anyone could ask how it stands.
            if not collect and (name or cluster != "inline"):
                campaign.write(by_key, name=name, cluster=cluster, run=run)
        except OSError as error:
            raise store.unwritable(error) from None
        log = campaign.log(run, "driver")
        Claims(store.root).clean(store)
        book = Book(store, by_key, campaign, log, report_progress, max_attempts, done=set(present))
        report_progress(len(book.done), len(by_key))
        with _terminable():
            try:
                if cluster == "inline":
                    _run_inline(book)
                elif cluster == "local":
                    _run_local(book, run, jobs, gpus_per_job, timeout_min)
                else:
                    if gpus_per_job is None:
                        gpus_per_job = int("cuda" in devices(by_key.values()))
                    run_slurm(book, run, jobs or 16, gpus_per_job, timeout_min, dict(slurm or {}), collect)
            except (KeyboardInterrupt, SystemExit):
                close_bars()
                if cluster != "slurm":
                    kept = sum(store.has_key(unit.kind, key) for key, unit in by_key.items())
                    logger.warning(
                        "stopped: %d of %d units are finished and kept; the same command goes on from there",
                        kept,
                        len(by_key),
                    )
                raise
    return Report(
        done=[key for key in by_key if key in book.done],
        failed=book.failed,
        pending=book.open(),
        num_computed=book.num_computed,
        seconds=time.perf_counter() - start,
        campaign=campaign.id,
    )


# -- one unit ---------------------------------------------------------------------------------------------------------


def resolve(call: str) -> Callable[[Store, Unit], Any]:
    """The function that "package.module:function" names."""
    module, _, function = call.partition(":")
    return getattr(importlib.import_module(module), function)


def perform(
    store: Store, claims: Claims, key: str, unit: Unit, take_over: Callable[[Holder], str] | None = None
) -> Outcome:
    """Do one unit unless it is done or another process is at it.

    take_over: called when the unit was held by a process that died; a reason it returns is why not to try once more.
    """
    if store.has_key(unit.kind, key):
        return Outcome("found")
    try:
        claim = claims.take(unit.kind, key)
    except OSError as error:
        return Outcome("fatal", 0.0, str(store.unwritable(error)), "UnwritableStoreError")
    if claim is None:
        return Outcome("busy")
    with claim:
        if store.has_key(unit.kind, key):
            return Outcome("found")
        if take_over is not None and claim.previous is not None:
            refusal = take_over(claim.previous)
            if refusal:
                return Outcome("refused", 0.0, refusal)
        start = time.perf_counter()
        try:
            function = resolve(unit.call)
            start = time.perf_counter()
            function(store, unit)
        except (UsageError, UnwritableStoreError) as error:
            return Outcome("fatal", 0.0, str(error), type(error).__name__)
        except Exception:
            lines = traceback.format_exc().strip().splitlines()
            return Outcome("failed", 0.0, "\n".join([lines[-1], *_indented(lines[-LOG_LINES:])]))
        if not store.has_key(unit.kind, key):
            return Outcome("failed", 0.0, f"{unit.call} returned without writing its entry to the store")
        return Outcome("done", time.perf_counter() - start)


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


# -- inline -----------------------------------------------------------------------------------------------------------


def _run_inline(book: Book) -> None:
    claims = Claims(book.store.root, book.campaign.id)
    queue = deque(book.open())
    busy: set[str] = set()
    while queue:
        key = queue.popleft()
        outcome = perform(book.store, claims, key, book.units[key])
        if outcome.status == "busy":
            # Another process has it: come back to it when everything else is done, and then now and again.
            if key in busy and busy.issuperset(queue):
                time.sleep(POLL_SECONDS / max(1, len(busy)))
            busy.add(key)
            queue.append(key)
            continue
        busy.discard(key)
        if book.record(key, outcome):
            queue.append(key)


# -- local ------------------------------------------------------------------------------------------------------------


def cores() -> int:
    """How many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def visible_gpus() -> list[str]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip() not in ("", "-1")]
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [
        str(index) for index, _ in enumerate(line for line in listing.stdout.splitlines() if line.startswith("GPU"))
    ]


def worker_environment(index: int, jobs: int, gpus: list[str], gpus_per_job: int) -> dict[str, str]:
    """The environment of local worker `index`: a share of the cores, and its own GPUs where it has any."""
    environment = dict(os.environ)
    share = max(1, cores() // jobs)
    for variable in THREAD_VARIABLES:
        given = environment.get(variable, "")
        environment[variable] = str(min(share, int(given))) if given.isdigit() and int(given) else str(share)
    if gpus_per_job:
        first = index * gpus_per_job
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[(first + i) % len(gpus)] for i in range(gpus_per_job))
    # The worker finds modules where this process does, wherever it was started.
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry or os.curdir) for entry in sys.path)
    return environment


class LocalWorker:
    """The driver's end of one worker process: units go down its stdin, outcomes come up a pipe of their own."""

    def __init__(self, root: Path, campaign: str, log_path: Path, environment: dict[str, str]):
        self.log_path = log_path
        self.key: str | None = None
        self.since = 0.0
        self.ready = False
        self.overdue = False
        self._log_offset = 0
        self._buffer = b""
        read_end, write_end = os.pipe()
        try:
            with open(log_path, "ab") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", f"from retrain.jobs import local_worker; local_worker({write_end})"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=[write_end],
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for the driver, which then ends its workers
                )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        os.set_blocking(read_end, False)
        self.outcomes = read_end
        self.send({"root": str(root), "campaign": campaign})

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a dead worker is noticed by the end of its other pipe
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def give(self, key: str, unit: Unit) -> None:
        self.key, self.since = key, time.monotonic()
        with contextlib.suppress(OSError):
            self._log_offset = self.log_path.stat().st_size
        self.send({"key": key, **unit.to_json()})

    def messages(self) -> tuple[list[dict[str, Any]], bool]:
        """(messages that have arrived, whether the worker is gone)."""
        gone = False
        while True:
            try:
                data = os.read(self.outcomes, 65536)
            except BlockingIOError:
                break
            if not data:
                gone = True
                break
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines], gone

    def last_lines(self) -> list[str]:
        """The end of what it logged since its present unit began."""
        return tail(self.log_path, self._log_offset)

    def end(self) -> int:
        """Stop it, if it still runs, and return its exit code."""
        if self.process.poll() is None:
            self.process.kill()
        code = self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        os.close(self.outcomes)
        return code


def tail(path: Path, offset: int = 0, lines: int = LOG_LINES) -> list[str]:
    """The last lines of a log from `offset` on, indented; empty when there is none."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(offset, size - 8192))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return _indented([line[:400] for line in text.strip().splitlines()[-lines:]])


def devices(units: Iterable[Unit]) -> set[str]:
    """The kinds of device that units name in their payload: cpu, cuda, auto."""
    return {str(unit.payload.get("device", "cpu")).partition(":")[0] for unit in units}


def _run_local(book: Book, run: str, jobs: int | None, gpus_per_job: int | None, timeout_min: float | None) -> None:
    if gpus_per_job is None:
        # Without this, every core would start a process on the same GPU.
        gpus = visible_gpus() if devices(book.units.values()) != {"cpu"} else []
        gpus_per_job = min(1, len(gpus))
    else:
        gpus = visible_gpus() if gpus_per_job else []
    if gpus_per_job > len(gpus):
        raise UsageError(f"--gpus-per-job {gpus_per_job} asks for more GPUs than this machine has ({len(gpus)})")
    if jobs is None:
        jobs = len(gpus) // gpus_per_job if gpus_per_job else cores()
    if gpus_per_job and jobs * gpus_per_job > len(gpus):
        logger.warning("%d jobs share %d GPUs: some jobs run on the same one", jobs, len(gpus))
    jobs = min(jobs, len(book.open()))
    try:
        (book.campaign.folder / "logs").mkdir(exist_ok=True)
    except OSError as error:
        raise book.store.unwritable(error) from None
    pool = _Pool(book, run, jobs, gpus, gpus_per_job, timeout_min)
    try:
        pool.run()
    finally:
        pool.end()


class _Pool:
    """Keeps `jobs` workers busy until every unit is done or has failed."""

    def __init__(self, book: Book, run: str, jobs: int, gpus: list[str], gpus_per_job: int, timeout_min: float | None):
        self.book = book
        self.run_name = run
        self.jobs = jobs
        self.gpus = gpus
        self.gpus_per_job = gpus_per_job
        self.timeout_s = timeout_min * 60 if timeout_min else float("inf")
        self.claims = Claims(book.store.root, book.campaign.id)
        self.queue = deque(book.open())
        self.busy: set[str] = set()
        self.workers: dict[int, LocalWorker] = {}
        self.num_started = 0
        self.false_starts = 0
        self.selector = selectors.DefaultSelector()

    def run(self) -> None:
        next_poll = 0.0
        while self.book.open():
            while len(self.workers) < min(self.jobs, len(self.book.open())):
                self._start(next(index for index in range(self.jobs) if index not in self.workers))
            for event, _ in self.selector.select(timeout=POLL_SECONDS if self._must_poll() else None):
                self._listen(event.data)
            if time.monotonic() >= next_poll:
                next_poll = time.monotonic() + POLL_SECONDS
                self._poll()

    def _must_poll(self) -> bool:
        return bool(self.busy) or self.timeout_s != float("inf")

    def _start(self, index: int) -> None:
        log_path = self.book.campaign.folder / "logs" / f"{self.run_name}-{self.num_started}.log"
        environment = worker_environment(index, self.jobs, self.gpus, self.gpus_per_job)
        try:
            worker = LocalWorker(self.book.store.root, self.book.campaign.id, log_path, environment)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self.book.store.unwritable(error) from None
            raise JobError(f"a worker process cannot be started: {error}") from None
        self.num_started += 1
        self.workers[index] = worker
        self.selector.register(worker.outcomes, selectors.EVENT_READ, index)

    def _listen(self, index: int) -> None:
        worker = self.workers[index]
        messages, gone = worker.messages()
        for message in messages:
            if "ready" in message:
                worker.ready = True
                self.false_starts = 0
            else:
                worker.key = None
                self._enter(message.pop("key"), Outcome(**message))
            self._feed(worker)
        if gone:
            self._bury(index)

    def _feed(self, worker: LocalWorker) -> None:
        while self.queue:
            key = self.queue.popleft()
            if key not in self.book.done:
                worker.give(key, self.book.units[key])
                return

    def _enter(self, key: str, outcome: Outcome) -> None:
        if outcome.status == "busy":
            self.busy.add(key)
        elif self.book.record(key, outcome):
            self.queue.append(key)
            self._wake()

    def _wake(self) -> None:
        """Give waiting workers what has come back into the queue."""
        for worker in self.workers.values():
            if worker.ready and worker.key is None and self.queue:
                self._feed(worker)

    def _bury(self, index: int) -> None:
        """Account for a worker that is gone; the main loop starts another in its place."""
        worker = self.workers.pop(index)
        self.selector.unregister(worker.outcomes)
        code = worker.end()
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if code == -signal.SIGKILL and not worker.overdue:
            cause += " (out of memory?)"
        if worker.overdue:
            cause = f"was stopped after --timeout-min {self.timeout_s / 60:g}"
        if worker.key is None:
            self.false_starts += not worker.ready
            if self.false_starts >= MAX_ATTEMPTS:
                lines = "\n".join([f"no worker process starts: the last one {cause}", *worker.last_lines()])
                raise JobError(lines)
            return
        reason = "\n".join([f"the worker {cause}; its log is {worker.log_path}", *worker.last_lines()])
        if self.book.store.has_key(self.book.units[worker.key].kind, worker.key):
            self._enter(worker.key, Outcome("done", time.monotonic() - worker.since))
        else:
            self._enter(worker.key, Outcome("failed", 0.0, reason))

    def _poll(self) -> None:
        for key in list(self.busy):
            unit = self.book.units[key]
            if self.book.store.has_key(unit.kind, key):
                self.busy.discard(key)
                self.book.finish(key)
            elif self.claims.holder(unit.kind, key) is None:
                self.busy.discard(key)
                self.queue.append(key)
        self._wake()
        for worker in self.workers.values():
            if worker.key is not None and time.monotonic() - worker.since > self.timeout_s:
                worker.overdue = True
                worker.process.kill()

    def end(self) -> None:
        for worker in self.workers.values():
            worker.end()
        self.workers.clear()
        self.selector.close()


def local_worker(outcomes: int) -> None:
    """The life of a worker process: read units from stdin, do them, report to the file descriptor `outcomes`."""
    lines: deque[bytes] = deque()
    arrived = threading.Semaphore(0)

    def listen(source: IO[bytes]) -> None:
        for line in source:
            lines.append(line)
            arrived.release()
        # The driver is gone, or done with us. An unfinished unit leaves nothing behind, so there is nothing to clean.
        os._exit(0)

    def say(message: dict[str, Any]) -> None:
        os.write(outcomes, json.dumps(message).encode() + b"\n")

    threading.Thread(target=listen, args=(sys.stdin.buffer,), daemon=True).start()
    arrived.acquire()
    setup = json.loads(lines.popleft())
    store = Store(setup["root"], create=False)  # the driver made it; a full disk must not stop us before we can say so
    claims = Claims(store.root, setup["campaign"])
    say({"ready": True})
    while True:
        arrived.acquire()
        content = json.loads(lines.popleft())
        unit, key = Unit.from_json(content), content["key"]
        outcome = perform(store, claims, key, unit)
        if outcome.status == "failed":
            print(f"{unit.kind} {key}: {outcome.reason}", file=sys.stderr, flush=True)
        say({"key": key, **vars(outcome)})


# -- around a run -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM an ordinary exit (code 143), so that workers are ended and the log says what is kept."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    def stop(_signal: int, _frame: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    if ours:
        signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
