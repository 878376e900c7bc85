"""`run_units`: do what is missing from the store, wherever that is to happen, and say what became of it all."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from retrain.errors import UsageError
from retrain.jobs.attempt import do_unit
from retrain.jobs.book import MAX_ATTEMPTS, SAME_FAILURES, Book, Report, SameFailure, Waiting, logger
from retrain.jobs.campaign import Campaign, new_run
from retrain.jobs.claims import Claims
from retrain.jobs.local import LOCAL_POLL_SECONDS, devices, run_local
from retrain.jobs.slurm import live_run, run_slurm
from retrain.jobs.unit import Unit
from retrain.progress import Progress, close_bars, counting
from retrain.store import Store
from retrain.work import clean_work

CLUSTERS = ("inline", "local", "slurm")


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
    same_failures: int = SAME_FAILURES,
    retry_errors: bool = True,
    traceback: bool = False,
) -> Report:
    """Do the units whose entry is missing from the store, and say what became of them all.

    jobs: how many at once; default one per GPU or core (local), 16 array tasks (slurm).
    gpus_per_job: default one where units name a device other than the CPU and there are GPUs (on Slurm: name CUDA).
    timeout_min: the most minutes one unit (local) or one array task (slurm) may take at a time; one that saved its
        work meanwhile goes on from there.
    collect: start nothing; on Slurm, wait for the jobs of this campaign that still run.
    progress: True for a bar on stderr, or a function called with (number done, number of all).
    retry_errors: false where trying again costs much and an exception would come again (not on Slurm).
    traceback: print the whole traceback of a unit that is given up, not only where and what.
    same_failures: how many different units must fail alike before any is done for the run to stop; 0: never.
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
    present = {key for _, key in store.present((unit.kind, key) for key, unit in by_key.items())}
    if len(present) == len(by_key) or (collect and cluster != "slurm"):
        pending = [key for key in by_key if key not in present]
        return Report([key for key in by_key if key in present], {}, pending, 0, time.perf_counter() - start)
    with counting(progress, name) as report_progress:
        campaign = Campaign.of(store, by_key)
        run = new_run()
        if cluster == "slurm":
            run = live_run(campaign) or (collect and campaign.describe().get("run")) or run
        digest = ""
        try:
            # A nameless step in this process is over before anyone could ask how it stands.
            if not collect and (name or cluster != "inline"):
                digest = campaign.write(by_key, name=name, cluster=cluster, run=run)
        except OSError as error:
            raise store.unwritable(error) from None
        claims = Claims(store.root)
        claims.clean(store)
        clean_work(store, claims.held())
        same = SameFailure({by_key[key].kind for key in present}, same_failures)
        log = campaign.log(run, "driver")
        book = Book(
            store=store,
            units=by_key,
            campaign=campaign,
            log=log,
            progress=report_progress,
            max_attempts=max_attempts,
            same=same,
            retry_errors=retry_errors,
            print_tracebacks=traceback,
            units_sha256=digest,
            done=set(present),
        )
        report_progress(len(book.done), len(by_key))
        with _terminable():
            try:
                if cluster == "inline":
                    run_inline(book)
                elif cluster == "local":
                    run_local(book, run, jobs, gpus_per_job, timeout_min)
                else:
                    if gpus_per_job is None:
                        gpus_per_job = int("cuda" in devices(by_key.values()))
                    run_slurm(book, run, jobs or 16, gpus_per_job, timeout_min, dict(slurm or {}), collect)
            except (KeyboardInterrupt, SystemExit):
                close_bars()
                if cluster != "slurm":
                    kept = len(store.present((unit.kind, key) for key, unit in by_key.items()))
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
        tracebacks=book.tracebacks,
    )


def run_inline(book: Book) -> None:
    """One after another in this process."""
    claims = Claims(book.store.root, book.campaign.id)
    waiting = Waiting()
    queue = deque(book.open())
    busy: set[str] = set()
    while queue:
        key = queue.popleft()
        attempt = do_unit(book.store, claims, key, book.units[key])
        if attempt.status == "busy":
            # Another process has it: come back to it when everything else is done, and then now and again.
            if key in busy and busy.issuperset(queue):
                unit = book.units[key]
                waiting.say(unit, key, claims.holder(unit.kind, key), len(busy))
                time.sleep(LOCAL_POLL_SECONDS / max(1, len(busy)))
            busy.add(key)
            queue.append(key)
            continue
        busy.discard(key)
        if book.record(key, attempt):
            queue.append(key)


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
