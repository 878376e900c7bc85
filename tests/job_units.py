"""Synthetic units for the tests of the job layer: what they do is written down, so that it can be counted."""

import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from retrain.jobs import Unit


def unit(index, action="work", **payload):
    return Unit("numbers", {"index": index}, f"tests.job_units:{action}", payload)


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


def keep(store, unit):
    index = unit.config["index"]
    store.write(unit.kind, unit.config, {"number": np.full(50, index, np.float32)}, {"pid": os.getpid()})
    note(unit, "end")


def work(store, unit):
    note(unit)
    time.sleep(unit.payload.get("seconds", 0))
    keep(store, unit)


def burn(store, unit):
    """Keep one core busy with a fixed amount of work."""
    note(unit)
    total = 0
    for number in range(int(unit.payload["loops"])):
        total += number * number % 7
    # How long this process has run, or stood in the queue for a core, since it began.
    running, waiting, _ = map(int, Path("/proc/self/schedstat").read_text().split())
    record = {"pid": os.getpid(), "wanted_seconds": (running + waiting) / 1e9}
    store.write(unit.kind, unit.config, {}, record)


def fail(store, unit):
    note(unit)
    print("a last word before it fails", flush=True)
    raise ValueError(f"unit {unit.config['index']} cannot be done")


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
    time.sleep(0.3)
    record = {name: os.environ.get(name) for name in names}
    store.write(unit.kind, unit.config, {}, {**record, "pid": os.getpid()})


def large(store, unit):
    note(unit)
    store.write(unit.kind, unit.config, {"number": np.ones(25_000, np.float32)}, {})


def refuse(store, unit):
    from retrain.plugins import UsageError

    raise UsageError("what was asked for cannot be")
