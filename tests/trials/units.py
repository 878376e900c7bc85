"""What many units cost: seconds and memory of everything that looks at all of them, at 10,000 and at 100,000.

    python -m tests.trials.units                            # some minutes, and 1 GB below --folder
    python -m tests.trials.units --units 1000 --folder /tmp
    python -m tests.trials.units --out results/trials/units.json

Each step runs in a process of its own, so that its peak of memory is its own. `us/unit` should not grow with the number
of units: it would where something looks at every unit for every unit.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench import cache
from bench.records import command_line, provenance, write_json
from retrain.jobs import Unit, run_units
from retrain.jobs.tracker import Attempt, JobTracker, SameFailure
from retrain.jobs.unit import JobBatch
from retrain.store import Store

ROOT = Path(__file__).resolve().parents[2]
TASK = {"name": "digits", "version": 1, "num_train": 1000, "epochs": 20, "widths": [64, 64], "protocol": "scratch"}
RUN = "trial"


def all_units(count):
    """As large as the units of a real batch."""
    payload = {"task": json.dumps({"name": "digits", "options": TASK}), "device": "cpu"}
    for index in range(count):
        config = {"task": TASK, "alpha": 0.1, "scheme": "fixed", "seed": 1, "subset": index, "versions": {"torch": "2"}}
        yield Unit("retrain", config, "tests.trials.units:train", payload)


def fill(root, count):
    """Every unit's entry, as the store writes it but without asking the disk to keep it."""
    store = Store(root)
    os.fsync = lambda _: None
    for unit in all_units(count):
        store.write(unit.kind, unit.config, {"losses": np.zeros(50, np.float32)}, {"device": "CPU"})


def describe(root, count):
    """The batch's list and an event for each unit, as a run leaves them."""
    store = Store(root)
    by_key = {store.key(unit.kind, unit.config): unit for unit in all_units(count)}
    batch = JobBatch.of(store, by_key)
    batch.write(by_key, name="trial", cluster="local", run=RUN)
    tracker = JobTracker(store, by_key, batch, batch.log(RUN, "driver"), lambda *_: None, 3, SameFailure())
    for key in by_key:
        assert tracker.num_open
        tracker.record(key, Attempt("done", 1.0))
    assert not tracker.num_open


def dry_run(root, count):
    """What a command's --dry-run asks: make every unit, and look for its entry."""
    store = Store(root, create=False)
    assert sum(store.has(unit.kind, unit.config) for unit in all_units(count)) == count


def nothing_to_do(root, count):
    assert len(run_units(all_units(count), Store(root)).done) == count


def show_status(root, count):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert cache.main(["status", "--cache", root, "--json"]) == 0
    assert json.loads(said.getvalue())[0]["num_done"] == count


def read_units(root, count):
    """What every Slurm task does first."""
    (batch,) = JobBatch.all(Store(root, create=False))
    assert len(batch.units(batch.describe()["units_sha256"])) == count


def verify(root, count):
    with contextlib.redirect_stdout(io.StringIO()):
        assert cache.main(["verify", "--cache", root]) == 0


def remove(root, count):
    """What --force does to the units of a command."""
    store = Store(root, create=False)
    assert all(store.remove_key(unit.kind, store.key(unit.kind, unit.config)) for unit in all_units(count))


STEPS = {
    "write entries": fill,
    "write list and events": describe,
    "dry run": dry_run,
    "run with nothing to do": nothing_to_do,
    "status": show_status,
    "read list (Slurm task)": read_units,
    "verify": verify,
    "remove": remove,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--units", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--folder", help="where the caches are made (default: the temporary folder)")
    parser.add_argument("--out", type=Path, help="a file for the record")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--root", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if arguments.step:
        began = time.perf_counter()
        STEPS[arguments.step](arguments.root, arguments.units[0])
        megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps([time.perf_counter() - began, time.process_time(), megabytes]))
        return
    print(f"{'':24}{'units':>9}{'seconds':>10}{'CPU s':>9}{'us/unit':>9}{'MB':>8}")
    rows = []
    for count in arguments.units:
        with tempfile.TemporaryDirectory(prefix="units-trials-", dir=arguments.folder) as root:
            for step in STEPS:
                command = [sys.executable, "-m", "tests.trials.units", "--step", step, "--root", root]
                done = subprocess.run([*command, "--units", str(count)], cwd=ROOT, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(f"{step}: {done.stderr.strip()}")
                seconds, cpu, megabytes = json.loads(done.stdout)
                each = 1e6 * seconds / count
                names = ("step", "units", "seconds", "cpu_seconds", "microseconds_per_unit", "peak_megabytes")
                found = (step, count, round(seconds, 3), round(cpu, 3), round(each, 2), round(megabytes, 1))
                rows.append(dict(zip(names, found, strict=True)))
                print(f"{step:24}{count:9,}{seconds:10.2f}{cpu:9.2f}{each:9.1f}{megabytes:8.0f}", flush=True)
                if arguments.out:
                    command = command_line("tests.trials.units", sys.argv[1:])
                    record = {"what": __doc__.split("\n")[0], "command": command, "rows": rows, **provenance()}
                    arguments.out.parent.mkdir(parents=True, exist_ok=True)
                    write_json(arguments.out, record)


if __name__ == "__main__":
    main()
