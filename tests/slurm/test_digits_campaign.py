"""The suite's own campaign on a real Slurm: 200 retrains of digits through every mishap, the same LDS to the bit."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from retrain.campaign import Campaign
from retrain.store import Store
from tests.slurm.helpers import held_by, running, wait_for

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


def test_two_hundred_retrains_survive_everything(cluster, tmp_path):
    process = start(tmp_path, "slurm", "--cluster", "slurm", "--jobs", "4", "--timeout-min", "30")
    store = Store(tmp_path / "slurm")
    count = lambda: len(list(store.entries("retrain")))  # noqa: E731
    try:
        wait_for(lambda: count() >= 5 and len(running(cluster)) == 4, 180)
        cancelled = running(cluster)[0]
        cluster.run("scancel", cancelled)
        wait_for(lambda: count() >= 30, 180)
        victim = next(holder for holder in held_by(store) if holder.job != cancelled)
        os.kill(victim.pid, signal.SIGKILL)
        wait_for(lambda: count() >= 60, 180)
        requeued = next(job for job in running(cluster) if job not in (cancelled, victim.job))
        cluster.run("scontrol", "requeue", requeued)
        wait_for(lambda: count() >= 90, 180)
        cluster.stop_daemon("slurmd", signal.SIGKILL)
        time.sleep(4)
        cluster.start_daemon("slurmd", "-D", "-N", cluster.host)
        assert count() < NUM_SUBSETS, "the campaign was over before the last mishap"
        on_slurm = rows(process)
    finally:
        process.kill()
    # None lost, none twice: by the store, and by what the tasks say they finished.
    assert count() == NUM_SUBSETS
    (campaign,) = [c for c in Campaign.all(store) if c.describe()["num_units"] == NUM_SUBSETS]
    events = campaign.events(campaign.describe()["run"])
    finished = Counter(event["key"] for event in events if event["event"] == "done")
    assert len(finished) == NUM_SUBSETS
    assert set(finished.values()) == {1}
    assert not (store.root / "quarantine").exists()
    inline = start(tmp_path, "inline")
    assert rows(inline) == on_slurm
    assert retrains(Store(tmp_path / "inline")) == retrains(store)
