"""Synthetic units for the tests of the job layer: what they do is written down, so that it can be counted."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

from retrain.jobs import Unit, run_units
from retrain.jobs.unit import JobBatch
from retrain.resume import ResumeState


def unit(index, action="work", **payload):
    return Unit("numbers", {"index": index}, f"tests.helpers.job_units:{action}", payload)


def units(count, action="work", **payload):
    return [unit(index, action, **payload) for index in range(count)]


def note(unit, what="begin"):
    """One line per event in the file the test named; a short append is atomic."""
    if unit.payload.get("diary"):
        with open(unit.payload["diary"], "a") as file:
            file.write(f"{what} {unit.config['index']} {os.getpid()} {time.time()}\n")


def diary(path, what="begin"):
    """How often each unit began (or ended)."""
    lines = [line.split() for line in Path(path).read_text().splitlines()] if Path(path).exists() else []
    return Counter(int(words[1]) for words in lines if words[0] == what)


def begun_by(path):
    """The processes that have begun a unit."""
    lines = [line.split() for line in Path(path).read_text().splitlines()] if Path(path).exists() else []
    return {int(words[2]) for words in lines if words[0] == "begin"}


def wait_for(condition, process=None, seconds=300.0, step=0.01):
    """Wait until something is so, and return it; not for ever, and not where the `process` that does it is gone."""
    limit = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < limit, "waited too long"
        assert process is None or process.poll() is None, f"the driver is gone: {process.stderr.read()}"
        time.sleep(step)
    return value


class Background:
    """run_units on Slurm in a thread, so that the test can make trouble meanwhile."""

    def __init__(self, work, store, **options):
        self.report = self.error = None

        def target():
            try:
                self.report = run_units(work, store, cluster="slurm", **options)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=target, daemon=True)
        self.thread.start()

    def result(self, seconds=600.0):
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "the driver hangs"
        if self.error is not None:
            raise self.error
        return self.report


def events(store, kind=None):
    """Of the one batch of a store."""
    (batch,) = JobBatch.all(store)
    return [event for event in batch.events(batch.describe()["run"]) if kind in (None, event["event"])]


def hold(unit):
    """Once `hold_after` units have ended the others wait for the file `gate` (without one: until they are killed).

    A batch with this cannot be over before the test has done to it what it wants, however slow the test is.
    """
    limit = unit.payload.get("hold_after")
    if limit is not None and sum(diary(unit.payload["diary"], "end").values()) >= limit:
        wait_for(lambda: "gate" in unit.payload and os.path.exists(unit.payload["gate"]), seconds=600)


def keep(store, unit):
    index = unit.config["index"]
    store.write(unit.kind, unit.config, {"number": np.full(50, index, np.float32)}, {"pid": os.getpid()})
    note(unit, "end")


def work(store, unit):
    note(unit)
    time.sleep(unit.payload.get("seconds", 0))
    hold(unit)
    keep(store, unit)


def fail(store, unit):
    note(unit)
    print("a last word before it fails", flush=True)
    raise ValueError(f"unit {unit.config['index']} cannot be done")


def leave(store, unit):
    sys.exit(0)


def fail_first(store, unit):
    """Fail twice, then succeed."""
    note(unit)
    if diary(unit.payload["diary"])[unit.config["index"]] < 3:
        raise ValueError("not yet")
    keep(store, unit)


def die(store, unit):
    note(unit)
    print("a last word before it dies", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def die_first(store, unit):
    note(unit)
    if diary(unit.payload["diary"])[unit.config["index"]] < 2:
        os.kill(os.getpid(), signal.SIGKILL)
    keep(store, unit)


def forget(store, unit):
    note(unit)


def environment(store, unit):
    names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    note(unit)
    # Every worker gets a unit, however late it starts.
    wait_for(lambda: len(begun_by(unit.payload["diary"])) >= unit.payload["num_workers"], seconds=120)
    record = {name: os.environ.get(name) for name in names}
    store.write(unit.kind, unit.config, {}, {**record, "pid": os.getpid()})


def saves(store, unit):
    """Count up to `steps` and save every number; after `per_attempt` steps it hangs until somebody stops it.

    With `deaf` it hangs so that it hears no signal but SIGKILL.
    """
    note(unit)
    work = ResumeState.of(store, unit.kind, store.key(unit.kind, unit.config))
    state = work.load("count")
    first = int(state[0]["count"]) if state else 0
    for count in range(first + 1, unit.payload["steps"] + 1):
        if count > first + unit.payload.get("per_attempt", 10**9):
            if "deaf" in unit.payload:
                for number in (signal.SIGUSR2, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)
            wait_for(lambda: False, seconds=600)
        if "seconds" in unit.payload:
            time.sleep(unit.payload["seconds"])
        work.save("count", {"count": np.array(count)}, {"count": count})
        note(unit, "step")
    keep(store, unit)


def grip(store, unit):
    """Hold Python's lock for ever, as a careless library may: no other thread of this process runs."""
    note(unit)
    ctypes.PyDLL(None).sleep(10**6)


def mistake(store, unit):
    """The same bug in every unit."""
    note(unit)
    return [][unit.config["index"]]


def large(store, unit):
    note(unit)
    store.write(unit.kind, unit.config, {"number": np.ones(25_000, np.float32)}, {})


def refuse(store, unit):
    from retrain.errors import UsageError

    raise UsageError("what was asked for cannot be")


def meet(store, unit):
    """Waits until every unit of `meeting` has begun."""
    note(unit)
    wait_for(lambda: set(diary(unit.payload["diary"])) >= set(unit.payload["meeting"]), seconds=60)
    keep(store, unit)
