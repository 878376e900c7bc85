"""Slurm without accounting, where sacct knows nothing: lost tasks are noticed and time limits survived all the same."""

import logging
import os
import signal
import time
from pathlib import Path

from retrain.jobs.unit import JobBatch
from retrain.resume import unfinished_units
from tests.helpers.job_units import diary, unit, units
from tests.slurm.helpers import Background, held_by, wait_for


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


def test_a_job_killed_by_its_time_limit_goes_on(bare_cluster, store, log):
    """Sixteen units of 4 s do not fit into one task of one minute: it goes back into the queue by itself."""
    report = Background(units(16, seconds=4, diary=log), store, jobs=1, timeout_min=1).result(1200)
    assert report.complete
    assert set(diary(log, "end").values()) == {1}
    (batch,) = JobBatch.all(store)
    exits = [e["reason"] for e in batch.events(batch.describe()["run"]) if e["event"] == "exit"]
    assert any("back into the queue" in reason for reason in exits)


def test_a_unit_that_outlasts_its_tasks_goes_on_from_what_it_saved(bare_cluster, store, log):
    """One takes 70 s, in tasks of a minute; the other hears no warning and is killed. Neither may fail even once."""
    work = [
        unit(0, "saves", steps=14, seconds=5, diary=log),
        unit(1, "saves", steps=2, per_attempt=1, deaf=True, diary=log),
    ]
    report = Background(work, store, jobs=2, timeout_min=1, max_attempts=1).result(1200)
    assert report.complete
    (batch,) = JobBatch.all(store)
    events = batch.events(batch.describe()["run"])
    stopped = {event["key"]: event["reason"] for event in events if event["event"] == "unfinished"}
    assert set(stopped) == set(report.done)
    print(*stopped.values(), sep="\n")
    assert not [event for event in events if event["event"] in ("failed", "died")]
    # What was saved was not done again, but for the step that was under way.
    assert diary(log, "step") == {0: 14, 1: 2}
    assert max(diary(log).values()) >= 2
    assert unfinished_units(store) == []
