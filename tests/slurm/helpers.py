"""What the tests on Slurm share."""

import threading
import time
from collections import Counter

from retrain.jobs import run_units
from retrain.jobs.unit import JobBatch
from retrain.leases import Leases


def wait_for(condition, seconds=300.0, step=0.1):
    """Wait until something is so, and return it."""
    limit = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < limit, "waited too long"
        time.sleep(step)
    return value


class Background:
    """run_units in a thread, so that the test can make trouble meanwhile."""

    def __init__(self, work, store, **options):
        self.report = None
        self.error = None
        self.began = time.monotonic()

        def target():
            try:
                self.report = run_units(work, store, cluster="slurm", **options)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=target)
        self.thread.start()

    def result(self, seconds=600.0):
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "the driver hangs"
        if self.error is not None:
            raise self.error
        return self.report


def running(cluster):
    lines = cluster.run("squeue", "-h", "-r", "-t", "RUNNING", "-o", "%i").split()
    return sorted(lines)


def tasks(cluster, count):
    """The names of this many tasks that run at the same time; None while there are not as many."""
    names = running(cluster)
    return names if len(names) == count else None


def held_by(store, job=None):
    return [h for h in Leases(store.root).held().values() if h.job and (job is None or h.job == job)]


def done_events(store):
    """How often each unit was finished, by the logs of all tasks."""
    (batch,) = JobBatch.all(store)
    events = batch.events(batch.describe()["run"])
    return Counter(event["key"] for event in events if event["event"] == "done")
