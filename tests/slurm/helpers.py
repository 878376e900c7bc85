"""What the tests on Slurm share."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from retrain.leases import Leases
from tests.helpers import job_units

ROOT = Path(__file__).parents[2]
wait_for = partial(job_units.wait_for, step=0.1)  # most looks are a command of Slurm's
MEASURED = ("fit_seconds", "score_seconds", "peak_memory_bytes", "run_id")


def start_lds(command, folder, name, *options, first=None):
    """`bench.lds` on a cache of this name; `first` is a folder that its processes import from before all others."""
    where = ["--device", "cpu", "--json", "--cache", str(folder / name), "--out", str(folder / f"{name}-runs")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(path) for path in (first, ROOT) if path)}
    return subprocess.Popen(
        [sys.executable, "-m", "bench.lds", *command, *where, *options],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def rows(process):
    """What such a command printed, without what it measured."""
    output, errors = process.communicate(timeout=1200)
    assert process.returncode == 0, errors
    return [{name: value for name, value in row.items() if name not in MEASURED} for row in json.loads(output)]


def arrays(store, kind=None):
    """{(kind, key): {name: bytes}} of every entry."""
    entries = [store.verified(info.kind, info.key) for info in store.entries(kind)]
    return {(e.kind, e.key): {name: array.tobytes() for name, array in e.arrays.items()} for e in entries}


def running(cluster):
    return sorted(cluster.run("squeue", "-h", "-r", "-t", "RUNNING", "-o", "%i").split())


def tasks(cluster, count):
    """The names of this many tasks that run at the same time; None while there are not as many."""
    names = running(cluster)
    return names if len(names) == count else None


def held_by(store, job=None):
    return [h for h in Leases(store.root).held().values() if h.job and (job is None or h.job == job)]
