"""The suite's own batch on a real Slurm: a hundred retrains of digits through every mishap, the same LDS to the bit."""

import os
import signal
import time
from collections import Counter

from retrain.jobs.unit import JobBatch
from retrain.leases import Leases
from retrain.store import Store
from tests.slurm.helpers import arrays, held_by, rows, running, start_lds, tasks, wait_for

NUM_SUBSETS = 100
COMMAND = [
    *("--task", "digits", "--alpha", "0.1", "--subsets", str(NUM_SUBSETS)),
    *("--replicates", "1", "--methods", "random", "gradsim"),
]


def batches(store):
    """The batch of the retrains, once there is one."""
    return [batch for batch in JobBatch.all(store) if batch.describe().get("num_units", 0) >= NUM_SUBSETS]


def test_a_hundred_retrains_survive_everything(cluster, tmp_path):
    process = start_lds(COMMAND, tmp_path, "slurm", "--cluster", "slurm", "--jobs", "4", "--timeout-min", "30")
    store = Store(tmp_path / "slurm")

    def count():
        return len(list(store.entries("retrain")))

    def reached(number):
        assert process.poll() is None, f"the driver is gone: {process.stderr.read()}"
        return count() >= number

    try:
        # Ten units are this test's until the last mishap is over: on a fast machine, too, there is work left then.
        batch = wait_for(lambda: next(iter(batches(store)), None), seconds=600)
        held = [Leases(store.root).take(kind, key) for kind, key in batch.unit_names()[-10:]]
        wait_for(lambda: reached(5) and tasks(cluster, 4), seconds=600)
        cancelled = running(cluster)[0]
        cluster.run("scancel", cancelled)
        wait_for(lambda: reached(20), seconds=600)
        # Between two units a task holds none.
        victim = wait_for(lambda: next((holder for holder in held_by(store) if holder.job != cancelled), None))
        os.kill(victim.pid, signal.SIGKILL)
        wait_for(lambda: reached(40), seconds=600)
        requeued = wait_for(lambda: next((job for job in running(cluster) if job not in (cancelled, victim.job)), None))
        cluster.run("scontrol", "requeue", requeued)
        wait_for(lambda: reached(60), seconds=600)
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
    inline = start_lds(COMMAND, tmp_path, "inline")
    assert rows(inline) == on_slurm
    assert arrays(Store(tmp_path / "inline"), "retrain") == arrays(store, "retrain")
