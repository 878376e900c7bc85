"""What the job layer must show and takes its time: fifty kills, and every system call that fails once."""

import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from retrain import jobs as run_module
from retrain import store as store_module
from retrain.jobs import JobError, run_units
from retrain.leases import Lease, Leases
from retrain.resume import clean_resume_states, unfinished_units
from retrain.safe_files import SafeFileError
from retrain.store import Store, StoreError
from retrain.tasks import load_task
from retrain.units import Plan, retrain_units
from tests.helpers.faults import Faults
from tests.helpers.job_units import diary, unit, units, wait_for
from tests.retrain.jobs.test_jobs import driver, workers_of

ROOT = Path(__file__).resolve().parents[3]

slow = pytest.mark.skipif(os.environ.get("RUN_SLURM_TESTS") != "1", reason="takes minutes: make test-slurm runs it")


def kill(process, whom):
    """SIGKILL to the driver, to its workers, or to everybody."""
    workers = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout
    victims = [process.pid] if whom != "workers" else []
    victims += workers.split() if whom != "driver" else []
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(victim), signal.SIGKILL)


@pytest.mark.slow
@slow
def test_fifty_random_kills_lose_corrupt_and_duplicate_nothing(store, log):
    """A batch of 300 units killed fifty times at random moments, and run again each time."""
    rng = np.random.default_rng(50)
    num_units, num_kills = 300, 50
    for number in range(num_kills):
        process = driver(store, num_units, "local", jobs=3, seconds=0.05, diary=log)
        time.sleep(rng.uniform(0.2, 0.8))
        whom = ["driver", "everybody", "workers"][number % 3]
        kill(process, whom)
        if whom == "workers":
            # Their driver goes on with new ones; then everything ends.
            time.sleep(rng.uniform(0, 0.5))
            kill(process, "everybody")
        process.communicate()
        for info in store.entries():
            entry = store.verified(info.kind, info.key)
            assert (entry.arrays["number"] == entry.config["index"]).all()
        if len(list(store.entries())) == num_units:
            # An orphan may have yet to write its last unit into the diary.
            wait_for(lambda: not workers_of(store))
            # Done too early: some are thrown away, so that there is always something to kill.
            for info in list(store.entries())[::2]:
                store.remove_key(info.kind, info.key)
            Path(log).unlink()
    wait_for(lambda: not workers_of(store))
    before = len(list(store.entries()))
    report = run_units(units(num_units, diary=log), store, cluster="local", jobs=2)
    assert report.complete
    assert report.num_computed == num_units - before
    assert len(list(store.entries())) == num_units
    assert max(diary(log, "end").values()) == 1
    assert not (store.root / "quarantine").exists()
    Store(store.root)
    assert os.listdir(store.root / ".tmp") == []


@pytest.mark.slow
@slow
def test_digits_inline_and_local_agree_to_the_bit(tmp_path):
    """The same retrains in this process and in two others."""
    plan = Plan(alpha=0.1, alpha_attribution=1.0, seed=1, num_subsets=6)
    work, arrays = retrain_units(load_task("digits"), plan, "cpu"), []
    for cluster in ("inline", "local"):
        store = Store(tmp_path / cluster)
        assert run_units(work, store, cluster=cluster, jobs=2).num_computed == 6
        entries = [store.read(one.kind, one.config) for one in work]
        arrays.append([{name: array.tobytes() for name, array in entry.arrays.items()} for entry in entries])
    assert arrays[0] == arrays[1]


def test_the_account_of_a_killed_batch_are_right(store, log):
    """The short form of the fifty kills: one, and what it kept is not done again."""
    process = driver(store, 60, "local", jobs=2, seconds=0.02, diary=log, hold_after=40)
    wait_for(lambda: sum(diary(log, "end").values()) >= 10, process)
    kill(process, "everybody")
    process.communicate()
    wait_for(lambda: not workers_of(store))
    kept = len(list(store.entries()))
    again = driver(store, 60, "local", jobs=2, seconds=0.02, diary=log)
    assert json.loads(again.communicate()[0]) == [60, 0, 60 - kept]
    assert max(diary(log, "end").values()) == 1


# ---- every system call of a small batch fails once: no sound entry is ever lost, and a rerun finishes ----

ERRORS = [errno.EMFILE, errno.EIO, errno.ESTALE, errno.ENOMEM, errno.EACCES, errno.ENOSPC]


@pytest.fixture
def folder(monkeypatch):
    """A quick disk: there are thousands of batches to come."""
    monkeypatch.setattr(store_module, "RETRY_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(run_module, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(Lease, "_renew", lambda _: None)  # it would come after ten seconds
    parent = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="faults-", dir=parent) as path:
        yield path


def batch(root):
    """Leases, work that is saved, entries, events; one unit is done already."""
    store = Store(root)
    work = [unit(0), unit(1, "saves", steps=2)]
    report = run_units(work, store, name="two")
    return report, [store.read(one.kind, one.config) for one in work]


def sound(root, expected):
    """Every entry that is there is right, and at least those `expected` are."""
    store = Store(root)
    assert not (store.root / "quarantine").exists()
    found = set()
    for info in store.entries():
        entry = store.verified(info.kind, info.key)
        assert (entry.arrays["number"] == entry.config["index"]).all()
        found.add(entry.config["index"])
    assert found >= expected
    return found


def survives(folder, number_of, for_ever=False):
    """Run the batch once for each of its calls, which fails with `number_of(call)`; how many runs that stopped."""
    template, root = f"{folder}/template", f"{folder}/cache"
    run_units(units(1), Store(template))
    shutil.copytree(template, root)
    with Faults(root) as calls:
        batch(root)
    assert calls.count > 150, "the layer under test is not what the store calls"
    num_stopped = 0
    for position in range(1, calls.count + 1):
        shutil.rmtree(root)
        shutil.copytree(template, root)
        stopped, done = "", {0}
        with Faults(root, position, number_of(position), for_ever) as faults:
            try:
                report, entries = batch(root)
                done = {entry.config["index"] for entry in entries if entry is not None} if report.complete else {0}
            except (StoreError, SafeFileError, JobError) as error:
                stopped = str(error)
        num_stopped += bool(stopped)
        assert "\n" not in stopped
        assert faults.failed, position
        where = f"call {position}, {faults.failed[0]}, {errno.errorcode[number_of(position)]}"
        assert sound(root, done), where
        report, entries = batch(root)
        assert report.complete, where
        assert sound(root, {0, 1}) == {0, 1}, where
        clean_resume_states(Store(root), {})
        assert unfinished_units(Store(root)) == [], where
        assert Leases(root).held() == {}, where
    return num_stopped, calls.count


def test_no_call_that_fails_loses_a_sound_entry(folder, caplog):
    caplog.set_level(logging.CRITICAL)
    num_stopped, num_calls = survives(folder, lambda position: ERRORS[position % len(ERRORS)])
    # Most errors stop nobody; the others stop the run with one line.
    assert num_stopped < num_calls / 2


@pytest.mark.slow
@slow
@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("number", ERRORS, ids=lambda number: errno.errorcode[number])
def test_every_call_with_every_error(folder, number, for_ever, caplog):
    caplog.set_level(logging.CRITICAL)
    num_stopped, num_calls = survives(folder, lambda _: number, for_ever)
    print(f"{errno.errorcode[number]}: {num_calls} calls, {num_stopped} runs stopped with one line")
