"""Leases: one worker a unit, and nothing in a lease's place makes anybody wait for ever."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from msgspec import structs

from retrain import leases as leases_module
from retrain.jobs import run_units
from retrain.leases import Holder, Leases
from retrain.processes import boot_id, host_name, process_started
from tests.helpers.damage import edit, to_folder, to_link, to_pipe
from tests.helpers.job_units import units, wait_for

KEY = "b" * 20


def test_a_lease_is_exclusive_until_released(store):
    leases = Leases(store.root, "c" * 12)
    lease = leases.take("numbers", "a" * 20)
    assert leases.take("numbers", "a" * 20) is None
    assert leases.holder("numbers", "a" * 20).pid == os.getpid()
    assert list(leases.held()) == [("numbers", "a" * 20)]
    lease.release()
    assert leases.holder("numbers", "a" * 20) is None
    with leases.take("numbers", "a" * 20) as again:
        assert again.previous is None
    assert leases.held() == {}


def planted(leases, age=0.0, **values):
    path = leases.path("numbers", "b" * 20)
    path.parent.mkdir(exist_ok=True)
    alive = os.getppid()  # this process knows what it holds itself
    holder = {**structs.asdict(Holder.this_process()), "pid": alive, "started": process_started(alive), **values}
    path.write_text(json.dumps(holder))
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_stale_leases_are_taken_over(store, monkeypatch):
    leases = Leases(store.root)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for stale, values in [
        (False, {}),
        (True, {"pid": dead.pid}),
        (True, {"started": 1}),  # the same process id, another process
        (False, {"age": 10_000}),  # alive on this host, however long it takes
        (False, {"host": "elsewhere"}),
        (True, {"host": "elsewhere", "age": 10_000}),
        (False, {"host": "elsewhere", "age": 60}),
    ]:
        planted(leases, **values)
        lease = leases.take("numbers", KEY)
        assert (lease is not None) == stale, values
        if lease:
            assert lease.previous is not None
            lease.release()
    # A requeued Slurm job knows that its earlier self is gone; another job does not.
    planted(leases, host="elsewhere", job="7_1", restart=0)
    assert leases.take("numbers", KEY) is None
    for name, value in (("JOB_ID", "9"), ("ARRAY_JOB_ID", "7"), ("ARRAY_TASK_ID", "1"), ("RESTART_COUNT", "1")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    leases.take("numbers", KEY).release()


def test_leases_are_renewed_while_held(store, monkeypatch):
    monkeypatch.setattr(leases_module, "RENEW_SECONDS", 0.02)
    lease = Leases(store.root).take("numbers", "c" * 20)
    os.utime(lease.path, (1, 1))
    wait_for(lambda: lease.path.stat().st_mtime > 1e9)
    lease.release()


def test_one_of_many_threads_takes_over(store):
    leases = Leases(store.root)
    together = threading.Barrier(8)

    def take(_):
        together.wait()
        return leases.take("numbers", KEY)

    for _ in range(30):
        planted(leases, started=1)
        with ThreadPoolExecutor(8) as pool:
            taken = list(pool.map(take, range(8)))
        (winner,) = [lease for lease in taken if lease]
        winner.release()


def test_leases_without_hard_links(store, monkeypatch):
    refuse = Mock(side_effect=PermissionError(errno.EPERM, "no hard links here"))
    monkeypatch.setattr(leases_module.os, "link", refuse)
    test_a_lease_is_exclusive_until_released(store)
    test_stale_leases_are_taken_over(store, monkeypatch)


def test_what_killed_processes_left_is_cleaned(store):
    leases = Leases(store.root)
    run_units(units(2), store)
    keys = [store.key("numbers", {"index": index}) for index in (0, 1, 2)]
    planted(leases, started=1).rename(leases.path("numbers", keys[0]))  # dead, and its unit done: goes
    planted(leases, started=1).rename(leases.path("numbers", keys[2]))  # dead, its unit not done: to be taken over
    mine = leases.take("numbers", keys[1])  # alive: stays
    (leases.folder / ".draft").write_text("")
    os.utime(leases.folder / ".draft", (1, 1))
    (leases.folder / ".fresh").write_text("")
    leases.clean(store)
    assert set(os.listdir(leases.folder)) == {f"numbers.{keys[1]}", f"numbers.{keys[2]}", ".fresh", ".lock"}
    mine.release()


# -- what cannot be waited for ----------------------------------------------------------------------------------------

HOSTILE = {
    "a folder": to_folder,
    "a link": to_link,
    "a pipe": to_pipe,
    "empty": lambda p: p.write_text(""),
    "large": lambda p: os.truncate(p, 2**40),
    "pid 0": lambda p: edit(p, pid=0),
    "pid 2^70": lambda p: edit(p, pid=2**70),
    "host of lines": lambda p: edit(p, host="a\nb\x1b[2J"),
    "job with a path": lambda p: edit(p, job="../../x"),
    "from the future": lambda p: (edit(p, host="elsewhere", since=9e10), os.utime(p, (9e9, 9e9))),
    "elsewhere and silent": lambda p: edit(p, host="elsewhere"),
    "another boot of this host": lambda p: edit(p, host=host_name().removesuffix(boot_id()) + "0" * 8),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_nothing_in_a_leases_place_is_waited_for_for_ever(store, monkeypatch, what):
    monkeypatch.setattr(leases_module, "STALE_SECONDS", 0.05)
    leases = Leases(store.root)
    path = planted(leases, pid=os.getppid())
    HOSTILE[what](path)
    before = sorted(os.listdir(store.root))
    limit = time.monotonic() + 60
    while (lease := leases.take("numbers", KEY)) is None:
        assert time.monotonic() < limit, "it waits for ever"
        leases.held()
        assert leases.holder("numbers", KEY) is None or str(leases.holder("numbers", KEY)).count("\n") <= 1
        time.sleep(0.01)
    lease.release()
    assert leases.held() == {}
    assert sorted(os.listdir(store.root)) == before
    assert set(os.listdir(leases.folder)) <= {".lock"}


def test_a_holder_that_was_stopped_loses_its_lease(store, monkeypatch):
    monkeypatch.setattr(leases_module, "STALE_SECONDS", 0.3)
    leases = Leases(store.root)
    sleeper = subprocess.Popen(["sleep", "1000"])
    try:
        os.kill(sleeper.pid, signal.SIGSTOP)
        planted(leases, pid=sleeper.pid, started=process_started(sleeper.pid))
        assert leases.take("numbers", KEY) is None
        assert leases.holder("numbers", KEY).pid == sleeper.pid
        wait_for(lambda: leases.holder("numbers", KEY) is None)
        leases.take("numbers", KEY).release()
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_lease_that_is_renewed_is_never_broken(store, monkeypatch):
    """By a clock that the test turns: a holder on this host, and one elsewhere whose clock runs a year ahead."""
    now = [1000.0]
    monkeypatch.setattr(leases_module.time, "monotonic", lambda: now[0])
    leases = Leases(store.root)
    for values in ({}, {"host": "elsewhere"}):
        path = planted(leases, **values)
        stamp = time.time() + 365 * 86400
        for _ in range(20):
            os.utime(path, (stamp, stamp))
            assert leases.take("numbers", KEY) is None
            assert leases.holder("numbers", KEY) is not None
            now[0] += leases_module.STALE_SECONDS - 1
            stamp += 1
        assert leases.take("numbers", KEY) is None
        now[0] += leases_module.STALE_SECONDS + 1
        leases.take("numbers", KEY).release()
