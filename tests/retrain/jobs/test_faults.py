"""Every system call of a small batch fails once: no sound entry is ever lost, and a rerun finishes."""

import errno
import logging
import os
import shutil
import tempfile

import pytest

from retrain import store as store_module
from retrain.jobs import JobError, run_units
from retrain.jobs import run as run_module
from retrain.leases import Lease, Leases
from retrain.resume import clean_resume_states, unfinished_units
from retrain.safe_files import SafeFileError
from retrain.store import Store, StoreError
from tests.helpers.faults import Faults
from tests.helpers.job_units import unit, units

slow = pytest.mark.skipif(os.environ.get("RUN_SLURM_TESTS") != "1", reason="takes minutes: make test-slurm runs it")
ERRORS = [errno.EMFILE, errno.EIO, errno.ESTALE, errno.ENOMEM, errno.EACCES, errno.ENOSPC]


@pytest.fixture
def folder(monkeypatch):
    """A quick disk: there are thousands of batches to come."""
    monkeypatch.setattr(store_module, "RETRY_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(run_module, "LOCAL_POLL_SECONDS", 0.0)
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
