"""The job layer on a real Slurm: whatever is cancelled, killed, requeued or preempted, every unit is done, and once."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from retrain.errors import UsageError
from retrain.jobs import JobError, run_units, slurm
from retrain.jobs.unit import JobBatch
from tests.helpers.job_units import diary, unit, units
from tests.slurm.helpers import Background, done_events, held_by, running, tasks, wait_for

ROOT = Path(__file__).parent.parent.parent


def test_units_are_packed_into_few_tasks_each_done_once(cluster, store, log):
    report = run_units(units(120, seconds=0.05, diary=log), store, cluster="slurm", jobs=3, timeout_min=10)
    assert report.complete
    assert report.num_computed == 120
    assert diary(log) == dict.fromkeys(range(120), 1)
    (batch,) = JobBatch.all(store)
    assert sum(len(submission["jobs"]) for submission in slurm.submissions(batch)) == 3
    assert set(done_events(store).values()) == {1}


def test_cancel_kill_requeue_and_a_dead_slurmd(cluster, store, log, gate):
    """Every mishap at once, on short units: the one with real retrains is below."""
    work = units(80, seconds=0.5, diary=log, hold_after=60, gate=gate)  # there is work left for after the mishaps
    background = Background(work, store, jobs=4, timeout_min=10)
    wait_for(lambda: sum(diary(log, "end").values()) >= 4)
    one, two, three, _ = wait_for(lambda: tasks(cluster, 4))
    os.kill(wait_for(lambda: held_by(store, two))[0].pid, signal.SIGKILL)
    cluster.run("scancel", one)
    cluster.run("scontrol", "requeue", three)
    time.sleep(3)
    cluster.stop_daemon("slurmd", signal.SIGKILL)
    time.sleep(3)
    cluster.start_daemon("slurmd", "-D", "-N", cluster.host)
    Path(gate).touch()
    report = background.result()
    assert report.complete
    assert len(list(store.entries("numbers"))) == 80
    assert set(done_events(store).values()) == {1}
    assert set(diary(log, "end").values()) == {1}
    # Only what was interrupted was begun again.
    assert sum(diary(log).values()) <= 80 + 4
    assert not (store.root / "quarantine").exists()


def test_preemption_keeps_what_is_finished_and_goes_on(cluster, store, log, gate):
    # Neither is over before it was seen, however slowly this test looks: the units wait for it, and so does the other.
    work = units(30, seconds=0.5, diary=log, hold_after=15, gate=gate)
    background = Background(work, store, jobs=1, timeout_min=10)
    wait_for(lambda: sum(diary(log, "end").values()) >= 3)
    (job,) = running(cluster)
    script = f"until [ -e {gate} ]; do sleep 0.1; done"
    urgent = cluster.run(
        "sbatch", "--parsable", "-p", "high", "--exclusive", "-o", "/dev/null", "--wrap", script
    ).strip()
    wait_for(lambda: urgent in running(cluster))
    assert job not in running(cluster)
    Path(gate).touch()
    report = background.result()
    assert report.complete
    assert set(diary(log, "end").values()) == {1}
    assert sum(diary(log).values()) <= 31


def test_failures_are_reported_with_their_log(cluster, store, log):
    work = [
        *units(3, diary=log),
        unit(3, "fail", diary=log),
        unit(4, "die", diary=log),
        unit(5, "fail_first", diary=log),
    ]
    report = run_units(work, store, cluster="slurm", jobs=2, timeout_min=10)
    assert len(report.done) == 4
    fail, die = (report.failed[store.key("numbers", {"index": index})] for index in (3, 4))
    assert fail.startswith("failed 3 times")
    assert "ValueError: unit 3 cannot be done" in fail
    assert "died" in die or "ended" in die
    assert diary(log) == {0: 1, 1: 1, 2: 1, 3: 3, 4: 3, 5: 3}


def test_a_usage_error_stops_the_batch(cluster, store):
    with pytest.raises(UsageError, match="what was asked for cannot be"):
        run_units([unit(0, "refuse")], store, cluster="slurm", jobs=1, timeout_min=10)


def test_bad_options_are_one_line(cluster, store):
    with pytest.raises(JobError, match="Slurm did not take the jobs") as caught:
        run_units(units(1), store, cluster="slurm", jobs=1, slurm={"partition": "nowhere"})
    assert str(caught.value).isprintable()
    with pytest.raises(UsageError, match="--timeout-min"):
        run_units(units(1), store, cluster="slurm", slurm={"time": "10"})


def test_options_pass_through(cluster, store, log, gate):
    work = units(1, diary=log, hold_after=0, gate=gate)
    options = {"partition": "high", "comment": "hello", "cpus_per_task": "2", "nice": "5"}
    background = Background(work, store, jobs=1, timeout_min=7, slurm=options)
    shown = cluster.run("scontrol", "show", "job", *wait_for(lambda: tasks(cluster, 1)))
    Path(gate).touch()
    for text in ("Partition=high", "Comment=hello", "NumCPUs=2", "Nice=5", "TimeLimit=00:07:00", "Requeue=1"):
        assert text in shown
    assert background.result().complete


DRIVER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in a shell's background inherits an ignored one
sys.path[:0] = [{root!r}]
from tests.helpers.job_units import units
from retrain.jobs import run_units
from retrain.store import Store
run_units(units({count}, **{payload!r}), Store({cache!r}), cluster="slurm", jobs=2, timeout_min=10)
"""


def test_ctrl_c_leaves_jobs_alone_and_collect_comes_back(cluster, store, log, gate):
    payload = {"seconds": 0.5, "diary": log, "hold_after": 10, "gate": gate}
    text = DRIVER.format(root=str(ROOT), count=40, payload=payload, cache=str(store.root))
    process = subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: sum(diary(log, "end").values()) >= 2 and tasks(cluster, 2))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert "--collect" in errors
    assert "scancel" in errors
    assert len(running(cluster)) == 2
    submitted = len(slurm.submissions(JobBatch.all(store)[0]))
    work = units(40, **payload)
    # The one who collects finds work in progress, and some that is not begun.
    opener = threading.Timer(1.0, Path(gate).touch)
    opener.start()
    report = run_units(work, store, cluster="slurm", jobs=2, collect=True)
    assert report.complete
    assert len(slurm.submissions(JobBatch.all(store)[0])) == submitted
    assert set(diary(log).values()) == {1}
    # Collecting a batch that nobody works on takes what there is.
    report = run_units([*work, unit(99)], store, cluster="slurm", collect=True)
    assert len(report.done) == 40
    assert len(report.pending) == 1


def test_six_thousand_units_are_submitted_in_less_than_thirty_seconds(cluster, store, monkeypatch):
    began = time.monotonic()
    submitted = []
    submit = slurm._Driver._submit

    def stop_after(driver, count):
        submit(driver, count)
        submitted.append(time.monotonic() - began)
        raise KeyboardInterrupt

    monkeypatch.setattr(slurm._Driver, "_submit", stop_after)
    with pytest.raises(KeyboardInterrupt):
        run_units(units(6000, seconds=1), store, cluster="slurm", jobs=64, timeout_min=10)
    print(f"6,000 units were submitted in {submitted[0]:.1f} s")
    assert submitted[0] < 30
