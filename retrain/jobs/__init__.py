"""The same work in this process, in local processes, or on Slurm; nothing that is finished is ever lost.

A batch is a list of idempotent `Unit`s. `run_units` does those whose entry the store does not have yet:

    report = run_units(units, store, cluster="local", jobs=4)
    report.failed        # {key: reason; its first line says what, and where in whose code}

- `inline`: one after another in this process.
- `local`: worker processes on this machine (`local.py`), each with its share of the cores, or its own GPUs.
- `slurm`: array tasks (`slurm.py`).

In all three, a unit is leased before it is worked on (`retrain/leases.py`), so batches may overlap and share the work;
a unit that fails three times is reported and does not stop the others (`tracker.py`); a worker that is killed is
replaced and its unit tried again; Ctrl-C or a kill at any moment keeps every finished unit, and the same command goes
on from there. What an unfinished unit saved (`retrain/resume.py`) is kept, too.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from retrain.errors import UsageError
from retrain.jobs.local import run_local
from retrain.jobs.slurm import live_run, run_slurm
from retrain.jobs.tracker import (
    MAX_ATTEMPTS,
    POLL_SECONDS,
    SAME_FAILURES,
    Attempt,
    JobError,
    JobTracker,
    Report,
    SameFailure,
    Terminated,
    UnitQueue,
    do_unit,
    logger,
)
from retrain.jobs.unit import JobBatch, Unit, new_run
from retrain.leases import Leases
from retrain.progress import Progress, close_bars, progress_counter
from retrain.resume import clean_resume_states
from retrain.store import Store

__all__ = ["CLUSTERS", "JobError", "Report", "Unit", "run_units"]
CLUSTERS = ("inline", "local", "slurm")
TURN_SECONDS = 2e-4  # that one of several threads holds the interpreter


def run_units(
    units: Iterable[Unit],
    store: Store,
    *,
    cluster: str = "inline",
    jobs: int | None = None,
    slurm: Mapping[str, Any] | None = None,
    timeout_min: float | None = None,
    collect: bool = False,
    progress: bool | Progress = False,
    name: str = "",
    max_attempts: int = MAX_ATTEMPTS,
    same_failures: int = SAME_FAILURES,
    retry_errors: bool = True,
    traceback: bool = False,
) -> Report:
    """Do the units whose entry is missing from the store, and say what became of them all.

    jobs: how many at once; default one per GPU or core (local), 16 array tasks (slurm). A job gets a GPU where units
        name a device other than the CPU and there are GPUs (on Slurm: name CUDA).
    timeout_min: the most minutes one unit (local) or one array task (slurm) may take at a time; one that saved its
        work meanwhile goes on from there.
    collect: start nothing; on Slurm, wait for the jobs of this batch that still run.
    progress: True for a bar on stderr, or a function called with (number done, number of all).
    retry_errors: false where trying again costs much and an exception would come again (not on Slurm).
    traceback: print the whole traceback of a unit that is given up, not only where and what.
    same_failures: how many different units must fail alike before any is done for the run to stop; 0: never.
    Raises UsageError or UnwritableStoreError at once when a unit does: another unit would fare no better.
    """
    _check_options(cluster, jobs, timeout_min)
    start = time.perf_counter()
    by_key = {unit.key: unit for unit in units}
    present = {key for _, key in store.present((unit.kind, key) for key, unit in by_key.items())}
    if len(present) == len(by_key) or (collect and cluster != "slurm"):
        pending = [key for key in by_key if key not in present]
        return Report([key for key in by_key if key in present], {}, pending, 0, time.perf_counter() - start)
    batch, run = JobBatch.of(store, by_key), new_run()
    if cluster == "slurm":
        run = live_run(batch) or (collect and batch.describe().get("run")) or run
    leases = Leases(store.root)
    with progress_counter(progress, name) as report_progress, terminable():
        # A nameless step in this process is over before anyone could ask how it stands.
        told = not collect and (name or cluster != "inline")
        digest = batch.write(by_key, name=name, cluster=cluster, run=run) if told else ""
        leases.clean(store)
        clean_resume_states(store, leases.held())
        tracker = JobTracker(
            store=store, units=by_key, batch=batch, log=batch.log(run, "driver"), progress=report_progress,
            max_attempts=max_attempts, same=SameFailure({by_key[key].kind for key in present}, same_failures),
            retry_errors=retry_errors, print_tracebacks=traceback, units_sha256=digest, done=set(present),
        )  # fmt: skip
        report_progress(len(tracker.done), len(by_key))
        if cluster == "slurm":
            run_slurm(tracker, run, jobs or 16, timeout_min, dict(slurm or {}), collect)
        else:
            with _saying_what_is_kept(tracker):
                run_inline(tracker) if cluster == "inline" else run_local(tracker, run, jobs, timeout_min)
    return tracker.report(time.perf_counter() - start)


def _check_options(cluster: str, jobs: int | None, timeout_min: float | None) -> None:
    if cluster not in CLUSTERS:
        raise UsageError(f'Unknown cluster "{cluster}"; available: {", ".join(CLUSTERS)}')
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs must be at least 1, not {jobs}")
    if timeout_min is not None and not timeout_min > 0:
        raise UsageError(f"--timeout-min must be above 0, not {timeout_min}")


@contextlib.contextmanager
def _saying_what_is_kept(tracker: JobTracker) -> Iterator[None]:
    """When the run is ended from outside."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        close_bars()
        if len(tracker.units) > 1:  # of one, whoever asked for it says what is kept
            kept = len(tracker.store.present((unit.kind, key) for key, unit in tracker.units.items()))
            words = "stopped: %d of %d units are finished and kept; the same command goes on from there"
            logger.warning(words, kept, len(tracker.units))
        raise


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM an ordinary exit (code 143), so that workers are ended and the log says what is kept."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    def stop(_signal: int, _frame: object) -> None:
        raise Terminated(128 + signal.SIGTERM)

    if ours:
        signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_inline(tracker: JobTracker) -> None:
    """In this process: one after another, or side by side in threads where units say that they can be."""
    alone = [key for key in tracker.open if _at_once(tracker.units[key]) == 1]
    together = [key for key in tracker.open if _at_once(tracker.units[key]) > 1]
    queue = UnitQueue(tracker, alone)
    while (key := _next(queue)) is not None:
        queue.enter(key, do_unit(tracker.store, queue.leases, key, tracker.units[key]))
    if together:
        _run_side_by_side(tracker, together)


def _next(queue: UnitQueue) -> str | None:
    """The next unit, after a wait where others are at all of them; None when nothing is left."""
    while (key := queue.next()) is None and queue.retry():
        time.sleep(POLL_SECONDS)
    return key


def _at_once(unit: Unit) -> int:
    """How many units of its kind one process does best at a time: a small training leaves most of a GPU idle."""
    return int(unit.payload.get("at_once", 1))


def _run_side_by_side(tracker: JobTracker, keys: list[str]) -> None:
    queue, running = UnitQueue(tracker, keys), dict[Future[Attempt], str]()
    most = min(_at_once(tracker.units[key]) for key in keys)
    # Threads take short turns: a training that waits 5 ms, the default, to launch a step of 2 ms idles the GPU.
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN_SECONDS)
    try:
        with ThreadPoolExecutor(most, thread_name_prefix="unit") as pool:  # what has begun is finished and kept
            # The first one runs alone: it loads the data and sets the device up for all of them.
            allowed = 1
            while True:
                while len(running) < allowed and (key := queue.next() if running else _next(queue)) is not None:
                    running[pool.submit(do_unit, tracker.store, queue.leases, key, tracker.units[key])] = key
                if not running:
                    return
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    queue.enter(running.pop(future), future.result())
                allowed = most
    finally:
        sys.setswitchinterval(before)
