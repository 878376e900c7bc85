"""The suite's own batch on a real Slurm: 200 retrains of digits through every mishap, the same LDS to the bit."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from retrain.jobs.unit import JobBatch
from retrain.leases import Leases
from retrain.store import Store
from tests.slurm.helpers import held_by, running, tasks, wait_for

ROOT = Path(__file__).parent.parent.parent
NUM_SUBSETS = 200
COMMAND = [
    *(sys.executable, "-m", "bench.lds", "--task", "digits", "--alpha", "0.1", "--subsets", str(NUM_SUBSETS)),
    *("--replicates", "1", "--methods", "random", "gradsim", "--device", "cpu", "--json"),
]
MEASURED = ("fit_seconds", "score_seconds", "peak_memory_bytes", "run_id")


def start(tmp_path, name, *options):
    command = [*COMMAND, "--cache", str(tmp_path / name), "--out", str(tmp_path / f"{name}-runs"), *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rows(process):
    output, errors = process.communicate(timeout=1200)
    assert process.returncode == 0, errors
    return [{name: value for name, value in row.items() if name not in MEASURED} for row in json.loads(output)]


def retrains(store):
    entries = [store.verified(info.kind, info.key) for info in store.entries("retrain")]
    return {entry.key: {name: array.tobytes() for name, array in entry.arrays.items()} for entry in entries}


def batches(store):
    """The batch of the retrains, once there is one."""
    return [batch for batch in JobBatch.all(store) if batch.describe().get("num_units", 0) >= NUM_SUBSETS]


def test_two_hundred_retrains_survive_everything(cluster, tmp_path):
    process = start(tmp_path, "slurm", "--cluster", "slurm", "--jobs", "4", "--timeout-min", "30")
    store = Store(tmp_path / "slurm")

    def count():
        return len(list(store.entries("retrain")))

    def reached(number):
        assert process.poll() is None, f"the driver is gone: {process.stderr.read()}"
        return count() >= number

    try:
        # Ten units are this test's until the last mishap is over: on a fast machine, too, there is work left then.
        batch = wait_for(lambda: next(iter(batches(store)), None), 600)
        held = [Leases(store.root).take(kind, key) for kind, key in batch.unit_names()[-10:]]
        wait_for(lambda: reached(5) and tasks(cluster, 4), 600)
        cancelled = running(cluster)[0]
        cluster.run("scancel", cancelled)
        wait_for(lambda: reached(30), 600)
        # Between two units a task holds none.
        victim = wait_for(lambda: next((holder for holder in held_by(store) if holder.job != cancelled), None))
        os.kill(victim.pid, signal.SIGKILL)
        wait_for(lambda: reached(60), 600)
        requeued = wait_for(lambda: next((job for job in running(cluster) if job not in (cancelled, victim.job)), None))
        cluster.run("scontrol", "requeue", requeued)
        wait_for(lambda: reached(90), 600)
        cluster.stop_daemon("slurmd", signal.SIGKILL)
        assert count() < NUM_SUBSETS - 10, "the batch was over before the last mishap"
        time.sleep(4)
        cluster.start_daemon("slurmd", "-D", "-N", cluster.host)
        assert count() < NUM_SUBSETS
        for lease in held:
            lease.release()
        on_slurm = rows(process)
    finally:
        process.kill()
    wait_for(lambda: tasks(cluster, 0) == [])  # they have said their last words
    # None lost, none twice: by the store, and by what the tasks say they finished.
    assert count() == NUM_SUBSETS
    (batch,) = batches(store)
    events = batch.events(batch.describe()["run"])
    wanted = {key for kind, key in batch.unit_names() if kind == "retrain"}  # the base model is a unit of it, too
    finished = Counter(event["key"] for event in events if event["event"] == "done" and event["key"] in wanted)
    # A task that is stopped right after storing its unit has no time left to say so.
    assert NUM_SUBSETS - 3 <= len(finished) <= NUM_SUBSETS
    assert set(finished.values()) == {1}
    assert not (store.root / "quarantine").exists()
    inline = start(tmp_path, "inline")
    assert rows(inline) == on_slurm
    assert retrains(Store(tmp_path / "inline")) == retrains(store)
