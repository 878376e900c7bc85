"""Attribution on a real Slurm: four chains and four methods as array tasks through every mishap, inline's bits."""

import os
import re
import shutil
import signal
import time

from retrain.jobs.unit import JobBatch
from retrain.leases import Leases
from retrain.store import Store
from tests.slurm.helpers import arrays, rows, running, start_lds, wait_for

METHODS = ("bif", "ekfac", "kfac", "trak")
MINUTES = 3  # Slurm warns a task up to a minute too early; what is left must do for a slow start and one unit
SAVED_AT, STAYS_AT = 20, 30  # draws
COMMAND = [
    *("--task", "digits", "--set", "digits.num_train=200", "--set", "digits.epochs=2"),
    *("--alpha", "0.5", "--subsets", "10", "--replicates", "1", "--queries", "20"),
    *("--settings", "default"),
]
SLURM = ["--cluster", "slurm", "--jobs", "4", "--timeout-min", str(MINUTES)]
# What every process of the command imports first: what befalls a chain, once each. All are at the same draw then.
# - "warned" has saved its work, and waits there for Slurm's warning, as a chain of hours would;
# - "deaf" waits there, too, and hears no signal but SIGKILL, as one that hangs in a driver or on a disk;
# - "killed" waits there for this test.
# A task that is merely stopped (SIGSTOP) does not outlast its limit for sure: slurmstepd sends SIGCONT with Slurm's
# warning, so it wakes then, hears the warning, and puts itself back into the queue before its time is up.
FIRST = """
import os, signal, time
from baselines.bif import saving
from retrain.leases import Holder

def progress(self, name, taken, state):
    fate = {"chain-0": "warned", "chain-1": "deaf", "chain-2": "killed"}.get(name, "")
    if "SLURM_JOB_ID" not in os.environ or not fate:
        return
    with open(f"FOLDER/{name}.draws", "a") as diary:
        diary.write(f"{taken}\\n")
    if fate == "warned" and taken == SAVED_AT:
        self._save(name, state(), taken)
    if taken != STAYS_AT or os.path.exists(f"FOLDER/{fate}"):
        return
    if fate == "deaf":
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(f"FOLDER/{fate}.draft", "w") as file:
        file.write(f"{Holder.this_process().job} {os.getpid()}")
    os.rename(f"FOLDER/{fate}.draft", f"FOLDER/{fate}")
    while True:
        time.sleep(1)

saving.Saver.progress = progress
"""
NUM_DRAWS = 65  # and those of the burn-in
BIF = ["--set", "bif.chains=4", "--set", "bif.draws=60", "--set", "bif.burn_in=5"]


def stopped_tasks(store, kind, count, process):
    """{job: pid} of tasks with a unit of this kind, each stopped in the middle of it as soon as it has it."""
    found = {}

    def all_there():
        assert process.poll() is None, f"the driver is gone: {process.stderr.read()}"
        for (held, _), holder in Leases(store.root).held().items():
            if held == kind and holder.job and holder.job not in found:
                os.kill(holder.pid, signal.SIGSTOP)
                found[holder.job] = holder.pid
        return len(found) == count

    wait_for(all_there, step=0.005)
    return found


def states(cluster, job):
    lines = cluster.run("sacct", "-n", "-X", "-P", "--duplicates", "-j", job, "-o", "State", check=False)
    return lines.split()


def test_four_chains_and_four_methods_survive_a_kill_a_warning_a_requeue_and_a_time_limit(cluster, tmp_path):
    rows(start_lds(COMMAND, tmp_path, "truth", "--methods", "random", "--cluster", "inline"))
    for name in ("inline", "slurm"):
        shutil.copytree(tmp_path / "truth", tmp_path / name)
    inline = rows(start_lds(COMMAND, tmp_path, "inline", "--methods", *METHODS, *BIF, "--cluster", "inline"))
    first = tmp_path / "first"
    first.mkdir()
    text = FIRST.replace("SAVED_AT", str(SAVED_AT)).replace("STAYS_AT", str(STAYS_AT)).replace("FOLDER", str(first))
    (first / "sitecustomize.py").write_text(text)
    process = start_lds(COMMAND, tmp_path, "slurm", "--methods", *METHODS, *BIF, *SLURM, first=first)
    store = Store(tmp_path / "slurm")

    def met(fate):
        assert process.poll() is None, f"the driver is gone: {process.stderr.read()}"
        return (first / fate).read_text().split() if (first / fate).exists() else None

    try:
        # Four chains, each a task of its own.
        warned, _ = wait_for(lambda: met("warned"))
        late, _ = wait_for(lambda: met("deaf"))
        began = time.monotonic()
        killed, pid = wait_for(lambda: met("killed"))
        os.kill(int(pid), signal.SIGKILL)
        assert len({warned, late, killed}) == 3
        wait_for(lambda: states(cluster, warned)[:1] == ["REQUEUED"])
        assert late in running(cluster), "Slurm's warning ends nobody who does not hear it"
        wait_for(lambda: late not in running(cluster))
        print(f"the task over its {MINUTES} minutes was gone {time.monotonic() - began:.0f} s after it began to hang")
        # Four methods on four tasks: one is put back into the queue in the middle of its work.
        ((requeued, _),) = stopped_tasks(store, "scores", 1, process).items()
        before = cluster.run("scontrol", "show", "job", requeued)
        cluster.run("scontrol", "requeue", requeued)
        assert restarts(cluster.run("scontrol", "show", "job", requeued)) == restarts(before) + 1
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
    # How each ended, by Slurm's own accounts: at its limit; with an error; in the queue, by itself and by hand.
    wait_for(lambda: states(cluster, late)[-1:] == ["TIMEOUT"])
    wait_for(lambda: states(cluster, killed)[:1] == ["FAILED"])
    wait_for(lambda: "REQUEUED" in states(cluster, requeued))
    # The warned chain went on from what it had saved, whoever had it next; the other two had saved nothing.
    draws = {name: [int(line) for line in (first / f"chain-{name}.draws").read_text().split()] for name in range(3)}
    whole = list(range(1, NUM_DRAWS + 1))
    assert draws[0][-(NUM_DRAWS - SAVED_AT) :] == whole[SAVED_AT:]
    assert draws[0][-(NUM_DRAWS - SAVED_AT) - 1] == STAYS_AT
    for name in (1, 2):
        assert draws[name] == [*whole[:STAYS_AT], *whole]
    told = []
    for batch in JobBatch.all(store):
        events = batch.events(batch.describe().get("run", ""))
        done = [event["key"] for event in events if event["event"] == "done"]
        assert len(done) == len(set(done)), "nothing was done twice"
        told += [(event["event"], event["job"]) for event in events if event["event"] in ("unfinished", "died")]
        if batch.describe().get("cluster") == "slurm":
            assert batch.describe()["num_units"] == 4
            assert len({event["job"] for event in events if event["event"] == "start"}) >= 4
    assert ("unfinished", warned) in told
    assert {("died", late), ("died", killed)} <= set(told)


def restarts(shown):
    return int(re.search(r"Restarts=(\d+)", shown)[1])
