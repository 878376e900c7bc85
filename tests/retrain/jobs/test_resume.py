"""Unfinished work: kept whole while a unit is not done, gone when it is, and never mistaken for nothing."""

import errno
import os
import time
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from retrain import resume as work_module
from retrain import safe_files
from retrain.jobs import run_units
from retrain.leases import Leases
from retrain.resume import NullResumeState, ResumeState, clean_resume_states, unfinished_units
from retrain.safe_files import PassingFileError
from tests.helpers.damage import edit, to_link, to_pipe
from tests.helpers.job_units import unit
from tests.retrain.test_store import flip

KEY = "a" * 20
ARRAYS = {"draws": np.arange(6.0).reshape(2, 3)}


@pytest.fixture
def work(store):
    return ResumeState.of(store, "numbers", KEY)


def test_what_was_saved_last_comes_back_and_saving_is_due_now_and_again(work, monkeypatch):
    assert work.load("chain") is None
    for draw in range(5):
        work.save("chain", {"draws": ARRAYS["draws"] + draw}, {"draw": draw})
        arrays, record = work.load("chain")
        np.testing.assert_array_equal(arrays["draws"], ARRAYS["draws"] + draw)
        assert record == {"draw": draw}
    work.save("other", {}, {})
    files = {"chain.1.safetensors", "chain.json", "other.1.safetensors", "other.json"}
    assert set(os.listdir(work.folder)) == files
    work.clear()
    assert work.load("chain") is None
    assert NullResumeState().load("chain") is None
    assert not work.due()
    monkeypatch.setattr(work_module, "SAVE_SECONDS", 0.0)
    assert work.due()


def test_what_is_resumed_knows_how_long_it_took_in_all_attempts(store, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(work_module, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
    for attempt in range(3):
        work = ResumeState.of(store, "numbers", KEY)
        work.start_clock()
        assert work.earlier_seconds == 0, "nothing was taken over yet"
        work.load("chain")
        assert work.earlier_seconds == 10 * attempt
        clock[0] += 10
        work.save("chain", ARRAYS, {"draw": attempt})
        work.load("chain")
        assert work.earlier_seconds == 10 * attempt, "its own seconds are on its own clock"
        clock[0] += 5  # lost with the kill
    work.start_clock()  # the next stage takes nothing over
    assert work.earlier_seconds == 0


HOSTILE = {
    "arrays truncated": lambda f: os.truncate(f / "chain.1.safetensors", 20),
    "arrays edited": lambda f: flip(f, "chain.1.safetensors", -1),
    "description truncated": lambda f: os.truncate(f / "chain.json", 9),
    "turn of a path": lambda f: edit(f / "chain.json", turn="../../x"),
    "a link": lambda f: to_link(f / "chain.json"),
    "a pipe": lambda f: to_pipe(f / "chain.json"),
}


@pytest.mark.parametrize("damage", HOSTILE)
def test_damaged_work_counts_as_none_and_is_replaced(work, damage):
    work.save("chain", ARRAYS, {"draw": 1})
    HOSTILE[damage](work.folder)
    assert work.load("chain") is None
    work.mark()
    work.save("chain", ARRAYS, {"draw": 2})
    assert work.load("chain")[1] == {"draw": 2}


def test_an_error_of_the_system_is_no_reason_to_begin_anew(work, monkeypatch):
    work.save("chain", ARRAYS, {"draw": 1})
    with monkeypatch.context() as patch:
        patch.setattr(safe_files.os, "open", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(PassingFileError):
            work.load("chain")
        work.save("chain", ARRAYS, {"draw": 2})  # a save that fails stops nobody
    assert work.load("chain")[1] == {"draw": 1}


def test_the_mark_tells_progress_from_standing_still(work):
    assert work.mark() == ""
    work.save("chain", ARRAYS, {"draw": 1})
    first = work.mark()
    work.save("chain", ARRAYS, {"draw": 1})
    assert work.mark() == first, "the same state saved again is no progress"
    work.save("chain", ARRAYS, {"draw": 2})
    second = work.mark()
    work.save("chain", {"draws": ARRAYS["draws"] + 1}, {"draw": 2})
    third = work.mark()
    assert len({first, second, third}) == 3
    (work.folder / ".progress.json").write_text("{}")
    assert work.mark() == third


def test_what_nobody_came_back_to_is_removed(store):
    done = unit(0)
    run_units([done], store)
    names = {"done": store.key("numbers", {"index": 0}), "fresh": "1" * 20, "old": "2" * 20, "held": "3" * 20}
    for key in names.values():
        ResumeState.of(store, "numbers", key).save("chain", ARRAYS, {})
    (store.root / ".work" / "strange").mkdir()
    for name in ("old", "held"):
        folder = ResumeState.of(store, "numbers", names[name]).folder
        for path in (*folder.iterdir(), folder):
            os.utime(path, (time.time() - 8 * 86400,) * 2)
    with Leases(store.root).take("numbers", names["held"]):
        clean_resume_states(store, Leases(store.root).held())
    assert [work.key for work in unfinished_units(store)] == [names["fresh"], names["held"]]
    # A run cleans up like that before it begins.
    run_units([unit(1)], store)
    assert [work.key for work in unfinished_units(store)] == [names["fresh"]]
    assert (store.root / ".work" / "strange").exists()
