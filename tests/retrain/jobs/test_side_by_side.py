"""Units that share one process: done in threads, each once, and the bill for them adds up."""

import threading

import pytest

from retrain.jobs import run_units
from retrain.leases import Leases
from retrain.store import Store
from retrain.units import SharedSeconds
from tests.helpers.job_units import diary, unit, units


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "cache")


@pytest.fixture
def log(tmp_path):
    return str(tmp_path / "diary")


def test_units_that_may_run_side_by_side_do(store, log):
    """Each of three waits for the other two: one at a time, the run would never end."""
    alone = units(2, diary=log)
    together = [unit(index, "meet", diary=log, at_once=3, meeting=[3, 4, 5]) for index in range(2, 6)]
    together[0].payload["meeting"] = []  # the first one sets everything up, alone
    report = run_units([*together, *alone], store)
    assert report.complete
    assert report.num_computed == 6
    assert diary(log) == dict.fromkeys(range(6), 1)
    assert run_units([*together, *alone], store).num_computed == 0


def test_a_failure_beside_others_is_told_and_the_others_are_kept(store, log):
    work = [unit(index, "mistake" if index == 3 else "work", diary=log, at_once=4) for index in range(8)]
    report = run_units(work, store)
    assert list(report.failed) == [store.key("numbers", {"index": 3})]
    assert len(report.done) == 7
    assert diary(log, "end") == {index: 1 for index in range(8) if index != 3}


def test_an_interrupt_lets_what_has_begun_finish(store, log):
    seen = []

    def interrupt(done, _all):
        seen.append(done)
        if done == 3:
            raise KeyboardInterrupt

    work = [unit(index, diary=log, at_once=2, seconds=0.01) for index in range(20)]
    with pytest.raises(KeyboardInterrupt):
        run_units(work, store, progress=interrupt)
    assert diary(log) == diary(log, "end")
    assert 3 <= sum(diary(log).values()) <= 5
    assert not Leases(store.root).held()
    assert run_units(work, store).complete
    assert set(diary(log).values()) == {1}


def test_a_unit_that_another_process_has_is_waited_for(store, log):
    work = [unit(index, diary=log, at_once=2) for index in range(4)]
    lease = Leases(store.root).take("numbers", store.key("numbers", {"index": 2}))
    released = threading.Timer(0.5, lease.__exit__, (None, None, None))
    with lease:
        released.start()
        assert run_units(work, store).complete
    assert set(diary(log).values()) == {1}


def test_shared_seconds_add_up_to_the_time_in_which_anybody_worked():
    now = 0.0
    shared = SharedSeconds(lambda: now)
    with shared.measured() as first:
        now = 4.0
        with shared.measured() as second:
            now = 10.0
        assert second() == pytest.approx(3)  # six seconds, shared by two
        now = 11.0
    assert first() == pytest.approx(4 + 3 + 1)
    now = 50.0
    with shared.measured() as third:
        now = 52.0
    assert third() == pytest.approx(2)
