"""What is no damage: errors of the system, copies under way, disks that take nothing, links that lead elsewhere."""

import errno
import os
import shutil
import subprocess
from unittest.mock import Mock

import numpy as np
import pytest

from bench import cache as cache_command
from retrain import store as store_module
from retrain.jobs import run_units
from retrain.store import PassingStoreError, Store, StoreError, UnwritableStoreError, default_cache
from tests.helpers.faults import Faults
from tests.helpers.job_units import units
from tests.retrain.test_store import ARRAYS, CONFIG, RECORD

PASSING = [errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.ENOMEM, errno.EACCES]


@pytest.mark.parametrize("number", PASSING)
@pytest.mark.parametrize("call", ["open", "lstat", "fstat", "listdir"])
def test_an_error_of_the_system_is_said_and_quarantines_nothing(store, monkeypatch, number, call):
    entry = store.write("losses", CONFIG, ARRAYS, RECORD)
    real = getattr(os, call)
    calls = []

    def fail(path, *arguments, **options):
        if call != "fstat" and not str(path).startswith(str(entry.path)):
            return real(path, *arguments, **options)
        calls.append(path)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(store_module, "RETRY_SECONDS", (0.0, 0.0))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(PassingStoreError, match="says nothing about the entry") as caught:
            store.read("losses", CONFIG)
    assert len(calls) == 3
    assert str(caught.value).isprintable()
    assert str(entry.path) in str(caught.value)
    assert store.read("losses", CONFIG) is not None
    assert not (store.root / "quarantine").exists()


def test_an_error_of_a_moment_is_tried_again(store, monkeypatch):
    """Of a write, as what took an hour to compute is not given up, and of a read."""
    monkeypatch.setattr(store_module, "RETRY_SECONDS", (0.0, 0.0))

    def fail_twice(call, ending, number):
        real, left = getattr(os, call), [2]

        def stand_in(path, *arguments, **options):
            if left[0] and str(path).endswith(ending):
                left[0] -= 1
                raise OSError(number, os.strerror(number))
            return real(path, *arguments, **options)

        monkeypatch.setattr(os, call, stand_in)

    fail_twice("rename", "", errno.EIO)
    store.write("losses", CONFIG, ARRAYS, RECORD)
    assert os.listdir(store.root / ".tmp") == []
    fail_twice("open", "arrays.safetensors", errno.ESTALE)
    assert store.read("losses", CONFIG) is not None


@pytest.mark.parametrize("before", ["empty", "the same entries"])
def test_a_cache_that_is_copied_over_another_is_read_meanwhile(tmp_path, monkeypatch, before):
    """With cp, which empties files before it fills them."""
    monkeypatch.setattr(store_module, "QUIET_SECONDS", 60.0)
    monkeypatch.setattr(store_module, "LOOK_SECONDS", 0.001)
    ours, theirs = Store(tmp_path / "ours"), Store(tmp_path / "theirs")
    for index in range(20):
        for store in (theirs, ours) if before != "empty" else (theirs,):
            store.write("losses", {"index": index}, {"loss": np.full(3000, index)}, {})
    found = set()
    for _ in range(3):
        copying = subprocess.Popen(["cp", "-r", f"{theirs.root}/.", f"{ours.root}/"])
        while copying.poll() is None or len(found) < 20:
            for index in range(20):
                entry = ours.read("losses", {"index": index})
                if entry is not None:
                    found.add(index)
                    assert (entry.arrays["loss"] == index).all()
        assert copying.returncode == 0
    assert not (ours.root / "quarantine").exists()


def test_a_copy_that_stopped_half_way_is_damage_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "QUIET_SECONDS", 0.3)
    monkeypatch.setattr(store_module, "LOOK_SECONDS", 0.01)
    ours, theirs = Store(tmp_path / "ours"), Store(tmp_path / "theirs")
    entry = theirs.write("losses", CONFIG, ARRAYS, RECORD)
    place = ours.place("losses", ours.key("losses", CONFIG))
    place.mkdir(parents=True)
    for name in ("entry.json", "arrays.safetensors"):
        (place / name).write_bytes((entry.path / name).read_bytes()[:100])
    # Whatever the clocks of hosts say, this process sees for itself that nothing changes.
    monkeypatch.setattr(store_module, "_quiet", lambda _: False)
    assert ours.read("losses", CONFIG) is None
    assert len(os.listdir(ours.root / "quarantine")) == 1


def test_a_cache_that_cannot_be_written_can_be_read(store):
    """One entry on a disk that takes nothing."""
    store.write("losses", CONFIG, ARRAYS, RECORD)
    shutil.rmtree(store.root / ".tmp")
    with Faults(store.root, number=errno.EROFS, read_only=True):
        store = Store(store.root)
        assert store.read("losses", CONFIG).record == RECORD
        assert store.write("losses", CONFIG, ARRAYS, {}).record == RECORD
        assert len(list(store.entries())) == 1
        for change in (
            lambda: store.write("losses", {"index": 1}, ARRAYS, RECORD),
            lambda: store.scratch().__enter__(),
            lambda: run_units(units(1), store),
            lambda: run_units(units(2), store, name="named"),
            lambda: run_units(units(1), store, cluster="local"),
        ):
            with pytest.raises(UnwritableStoreError, match=r"can only be read .* give a folder of your own") as caught:
                change()
            assert str(caught.value).isprintable()
        with pytest.raises(StoreError, match="cannot be removed"):
            store.remove_key("losses", store.key("losses", CONFIG))


# -- links ------------------------------------------------------------------------------------------------------------
def test_nothing_is_written_or_removed_through_a_link(store, tmp_path):
    outside = tmp_path / "outside"
    (outside / "otherhost.1.aa").mkdir(parents=True)
    (outside / "precious").mkdir()
    for path in (outside / "otherhost.1.aa", outside / "precious"):
        os.utime(path, (1, 1))
    (store.root / ".tmp").symlink_to(outside)
    Store(store.root)
    with pytest.raises(UnwritableStoreError, match="link"):
        store.write("losses", CONFIG, ARRAYS, RECORD)
    (store.root / ".tmp").unlink()
    (store.root / "losses").symlink_to(outside)
    with pytest.raises(UnwritableStoreError, match="link"):
        store.write("losses", CONFIG, ARRAYS, RECORD)
    assert sorted(os.listdir(outside)) == ["otherhost.1.aa", "precious"]
    (store.root / "losses").unlink()
    entry = store.write("losses", CONFIG, ARRAYS, RECORD)
    os.truncate(entry.path / "entry.json", 5)
    (store.root / "quarantine").symlink_to(outside)
    assert store.read("losses", CONFIG) is None
    assert sorted(os.listdir(outside)) == ["otherhost.1.aa", "precious"]


def test_without_a_home_the_cache_is_one_line(monkeypatch, capsys):
    for name in ("HOME", "XDG_CACHE_HOME", "TDA_BENCH_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError("no such user")))
    assert default_cache() == ""
    for words in ([], ["status"]):
        assert cache_command.main(words) == 2
        assert capsys.readouterr().err.count("\n") == 1
    for root in ("~/cache", "~nobodyatall/cache"):
        with pytest.raises(StoreError, match="unknown home"):
            Store(root)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache() == "/somewhere/tda-bench"
