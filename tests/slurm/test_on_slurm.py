"""The job layer on a real Slurm: whatever is cancelled, killed, requeued or preempted, every unit is done, and once."""

import logging
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from retrain.jobs import run_units, slurm
from retrain.jobs.unit import JobBatch
from retrain.leases import Leases
from retrain.resume import unfinished_units
from retrain.store import Store
from retrain.tasks import load_task
from retrain.units import Plan, retrain_units
from tests.helpers.job_units import Background, diary, events, unit, units
from tests.retrain.jobs.test_jobs import driver
from tests.slurm.helpers import arrays, held_by, running, tasks, wait_for


def test_units_are_packed_into_few_tasks_each_done_once(cluster, store, log):
    report = run_units(units(120, seconds=0.05, diary=log), store, cluster="slurm", jobs=3, timeout_min=10)
    assert report.complete
    assert report.num_computed == 120
    assert diary(log) == dict.fromkeys(range(120), 1)
    (batch,) = JobBatch.all(store)
    assert sum(len(submission["jobs"]) for submission in slurm.submissions(batch)) == 3
    assert set(Counter(event["key"] for event in events(store, "done")).values()) == {1}


def test_a_hundred_retrains_survive_everything(cluster, store, tmp_path):
    """A task that is cancelled, one killed, one put back and a node that dies: none lost, none twice, inline's bits."""
    task = load_task("digits", epochs=2)
    work = retrain_units(task, Plan(alpha=0.1, alpha_attribution=1.0, seed=1, num_subsets=100), "cpu")
    # Ten units are this test's until the last mishap is over: on a fast machine, too, there is work left then.
    held = [Leases(store.root).take(unit.kind, unit.key) for unit in work[-10:]]
    background = Background(work, store, jobs=4, timeout_min=30)

    def count():
        return len(list(store.entries("retrain")))

    wait_for(lambda: count() >= 5 and tasks(cluster, 4))
    cancelled = running(cluster)[0]
    cluster.run("scancel", cancelled)
    wait_for(lambda: count() >= 20)
    # Between two units a task holds none.
    victim = wait_for(lambda: next((holder for holder in held_by(store) if holder.job != cancelled), None))
    os.kill(victim.pid, signal.SIGKILL)
    wait_for(lambda: count() >= 40)
    requeued = wait_for(lambda: next((job for job in running(cluster) if job not in (cancelled, victim.job)), None))
    cluster.run("scontrol", "requeue", requeued)
    wait_for(lambda: count() >= 60)
    cluster.stop_daemon("slurmd", signal.SIGKILL)
    assert count() < 90, "the batch was over before the last mishap"
    time.sleep(4)
    cluster.start_daemon("slurmd", "-D", "-N", cluster.host)
    for lease in held:
        lease.release()
    assert background.result(1200).complete
    wait_for(lambda: tasks(cluster, 0) == [])  # they have said their last words
    # By the store, and by what the tasks say they finished; one stopped right after storing its unit says nothing.
    assert count() == 100
    finished = Counter(event["key"] for event in events(store, "done"))
    assert 97 <= len(finished) <= 100
    assert set(finished.values()) == {1}
    assert not (store.root / "quarantine").exists()
    inline = Store(tmp_path / "inline")
    assert run_units(work, inline).complete
    assert arrays(inline, "retrain") == arrays(store, "retrain")


def test_preemption_keeps_what_is_finished_and_goes_on(cluster, store, log, gate):
    # Neither is over before it was seen, however slowly this test looks: the units wait for it, and so does the other.
    work = units(30, seconds=0.5, diary=log, hold_after=15, gate=gate)
    background = Background(work, store, jobs=1, timeout_min=10)
    wait_for(lambda: sum(diary(log, "end").values()) >= 3)
    (job,) = running(cluster)
    script = f"until [ -e {gate} ]; do sleep 0.1; done"
    command = ["sbatch", "--parsable", "-p", "high", "--exclusive", "-o", "/dev/null", "--wrap", script]
    urgent = cluster.run(*command).strip()
    wait_for(lambda: urgent in running(cluster))
    assert job not in running(cluster)
    Path(gate).touch()
    report = background.result()
    assert report.complete
    assert set(diary(log, "end").values()) == {1}
    assert sum(diary(log).values()) <= 31


def test_options_pass_through(cluster, store, log, gate):
    work = units(1, diary=log, hold_after=0, gate=gate)
    options = {"partition": "high", "comment": "hello", "cpus_per_task": "2", "nice": "5"}
    background = Background(work, store, jobs=1, timeout_min=7, slurm=options)
    shown = cluster.run("scontrol", "show", "job", *wait_for(lambda: tasks(cluster, 1)))
    Path(gate).touch()
    for text in ("Partition=high", "Comment=hello", "NumCPUs=2", "Nice=5", "TimeLimit=00:07:00", "Requeue=1"):
        assert text in shown
    assert background.result().complete


def test_ctrl_c_leaves_jobs_alone_and_collect_comes_back(cluster, store, log, gate):
    payload = {"seconds": 0.5, "diary": log, "hold_after": 10, "gate": gate}
    process = driver(store, 40, "slurm", **payload)
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


# ---- Slurm without accounting, where sacct knows nothing: lost tasks are noticed, and time limits survived ----
def test_a_lost_task_is_noticed_within_a_minute_without_accounting(bare_cluster, store, log, gate, caplog):
    work = units(2, diary=log, hold_after=0, gate=gate)  # so that one task cannot do both
    with caplog.at_level(logging.WARNING):
        background = Background(work, store, jobs=2, timeout_min=10)
        wait_for(lambda: sorted(diary(log).values()) == [1, 1])
        victim = held_by(store)[0]
        os.kill(victim.pid, signal.SIGKILL)
        killed = time.monotonic()
        wait_for(lambda: victim.job in caplog.text and "before its work was done" in caplog.text)
        noticed = time.monotonic() - killed
        print(f"noticed after {noticed:.1f} s")
        assert noticed < 60
        Path(gate).touch()
        report = background.result()
    assert report.complete
    assert sorted(diary(log).values()) == [1, 2]


def test_time_limits_end_tasks_and_no_unit(bare_cluster, tmp_path, log):
    """Two batches at once. Sixteen units of 4 s do not fit into one task of a minute: it goes back by itself. Of two
    units that save, one takes 70 s in tasks of a minute, the other hears no warning and is killed: neither fails."""
    many, long = Store(tmp_path / "many"), Store(tmp_path / "long")
    sixteen = Background(units(16, seconds=4, diary=f"{log}-many"), many, jobs=1, timeout_min=1)
    work = [unit(0, "saves", steps=14, seconds=5, diary=log)]
    work += [unit(1, "saves", steps=2, per_attempt=1, deaf=True, diary=log)]
    two = Background(work, long, jobs=2, timeout_min=1, max_attempts=1)
    assert sixteen.result(1200).complete
    assert set(diary(f"{log}-many", "end").values()) == {1}
    assert any("back into the queue" in event["reason"] for event in events(many, "exit"))
    report = two.result(1200)
    assert report.complete
    assert {event["key"] for event in events(long, "unfinished")} == set(report.done)
    assert not events(long, "failed") + events(long, "died")
    # What was saved was not done again, but for the step that was under way.
    assert diary(log, "step") == {0: 14, 1: 2}
    assert max(diary(log).values()) >= 2
    assert unfinished_units(long) == []
