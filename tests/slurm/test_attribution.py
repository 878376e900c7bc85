"""Attribution on a real Slurm: four chains and four methods as array tasks through every mishap, inline's bits."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from retrain.jobs.campaign import Campaign
from retrain.jobs.claims import Claims
from retrain.store import Store
from tests.slurm.helpers import running, wait_for

ROOT = Path(__file__).parent.parent.parent
METHODS = ("bif", "ekfac", "kfac", "trak")
MINUTES = 3  # Slurm warns a task up to a minute too early; what is left must do for a slow start and one unit
MEASURED = ("fit_seconds", "score_seconds", "peak_memory_bytes", "run_id")
COMMAND = [
    *(sys.executable, "-m", "bench.lds", "--task", "digits", "--set", "digits.num_train=200"),
    *("--set", "digits.epochs=2", "--alpha", "0.5", "--subsets", "10", "--replicates", "1", "--queries", "20"),
    *("--settings", "default", "--device", "cpu", "--json"),
]
SLURM = ["--cluster", "slurm", "--jobs", "4", "--timeout-min", str(MINUTES)]
BIF = ["--set", "bif.chains=4", "--set", "bif.draws=60", "--set", "bif.burn_in=5"]


def start(tmp_path, name, *options):
    command = [*COMMAND, "--cache", str(tmp_path / name), "--out", str(tmp_path / f"{name}-runs"), *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rows(process):
    output, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors
    return [{name: value for name, value in row.items() if name not in MEASURED} for row in json.loads(output)]


def arrays(store):
    entries = [store.verified(info.kind, info.key) for info in store.entries()]
    return {(e.kind, e.key): {name: array.tobytes() for name, array in e.arrays.items()} for e in entries}


def stopped_tasks(store, kind, count, process):
    """{job: pid} of tasks with a unit of this kind, each stopped in the middle of it as soon as it has it."""
    found = {}

    def all_there():
        assert process.poll() is None, f"the driver is gone: {process.stderr.read()}"
        for (held, _), holder in Claims(store.root).held().items():
            if held == kind and holder.job and holder.job not in found:
                os.kill(holder.pid, signal.SIGSTOP)
                found[holder.job] = holder.pid
        return len(found) == count

    wait_for(all_there, step=0.005)
    return found


def states(cluster, job):
    lines = cluster.run("sacct", "-n", "-X", "-P", "--duplicates", "-j", job, "-o", "State", check=False)
    return lines.split()


def test_four_chains_and_four_methods_survive_a_kill_a_requeue_and_a_time_limit(cluster, tmp_path):
    rows(start(tmp_path, "truth", "--methods", "random", "--cluster", "inline"))
    for name in ("inline", "slurm"):
        shutil.copytree(tmp_path / "truth", tmp_path / name)
    inline = rows(start(tmp_path, "inline", "--methods", *METHODS, *BIF, "--cluster", "inline"))
    process = start(
        tmp_path,
        "slurm",
        "--methods",
        *METHODS,
        *BIF,
        "--cluster",
        "slurm",
        "--jobs",
        "4",
        "--timeout-min",
        str(MINUTES),
    )
    store = Store(tmp_path / "slurm")
    try:
        # Four chains, each a task of its own: one is killed, one never goes on and is over its limit, two go on.
        tasks = stopped_tasks(store, "part", 4, process)
        began = time.monotonic()
        (_, killed), (late, _), *others = tasks.items()
        os.kill(killed, signal.SIGKILL)
        for _, pid in others:
            os.kill(pid, signal.SIGCONT)
        wait_for(lambda: late not in running(cluster))
        print(f"the task over its {MINUTES} minutes was gone {time.monotonic() - began:.0f} s after it was stopped")
        # Four methods on four tasks: one is put back into the queue in the middle of its work.
        ((requeued, _),) = stopped_tasks(store, "scores", 1, process).items()
        cluster.run("scontrol", "requeue", requeued)
        assert "Restarts=1" in cluster.run("scontrol", "show", "job", requeued)
        on_slurm = rows(process)
    finally:
        process.kill()
    assert on_slurm == inline
    wait_for(lambda: not running(cluster))  # they have said their last words
    found, wanted = arrays(store), arrays(Store(tmp_path / "inline"))
    assert found == wanted
    kinds = {kind for kind, _ in found}
    assert {"model", "retrain", "fit", "scores", "predictions"} <= kinds
    assert "part" not in kinds, "chains go when their sum is there"
    assert not (store.root / "quarantine").exists()
    # Slurm ended it at its limit, or its warning woke it and it put itself back into the queue.
    wait_for(lambda: any(state.startswith(("TIMEOUT", "REQUEUED")) for state in states(cluster, late)))
    for campaign in Campaign.all(store):
        events = campaign.events(campaign.describe().get("run", ""))
        done = [event["key"] for event in events if event["event"] == "done"]
        assert len(done) == len(set(done)), "nothing was done twice"
        if campaign.describe().get("cluster") == "slurm":
            assert campaign.describe()["num_units"] == 4
            assert len({event["job"] for event in events if event["event"] == "start"}) >= 4
