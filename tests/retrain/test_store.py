"""The store: whole or not at all, verified on reading, quarantined when damaged."""

import itertools
import json
import logging
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from retrain import store as store_module
from retrain.processes import host_name
from retrain.store import DamagedEntryError, Store, StoreError
from tests.helpers.damage import edit, replace, to_link, to_pipe

CONFIG = {"task": "digits", "alpha": 0.1, "subset": 3, "sizes": (1, 2)}
ARRAYS = {"loss": np.arange(6, dtype=np.float32).reshape(2, 3), "kept": np.array([True, False])}
RECORD = {"seconds": 1.5, "note": "größe"}


def test_round_trip(store):
    assert not store.has("losses", CONFIG)
    assert store.read("losses", CONFIG) is None
    written = store.write("losses", CONFIG, ARRAYS, RECORD)
    entry = store.read("losses", CONFIG)
    assert store.has("losses", CONFIG)
    assert entry.key == written.key == store.key("losses", CONFIG) == entry.path.name
    assert entry.path == store.root / "losses" / entry.key[:2] / entry.key
    assert entry.config == json.loads(json.dumps(CONFIG))
    assert entry.record == RECORD
    assert entry.arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(entry.arrays[name], array)
        assert entry.arrays[name].dtype == array.dtype
    assert os.listdir(store.root / ".tmp") == []
    assert [info.key for info in store.entries()] == [entry.key]


def test_key_is_a_function_of_what_matters(store):
    key = store.key("losses", CONFIG)
    assert len(key) == 20
    assert key == store.key("losses", dict(reversed(CONFIG.items())))
    assert key == store.key("losses", {**CONFIG, "sizes": [1, 2], "subset": np.int64(3), "alpha": np.float64(0.1)})
    assert key != store.key("losses", {**CONFIG, "alpha": 0.2})
    assert key != store.key("scores", CONFIG)
    # Pinned: another value would orphan every cache.
    assert Store(store.root).key("losses", {"a": 1}) == "e3da40ecedfed6f9e7b3"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Path("x"), "portable"),
        (float("nan"), "nan"),
        ({1: 2}, "keys must be text"),
        ({"a": "\ud800"}, "half of a surrogate pair"),
        ({"\udfff": 1}, "keys must be text"),
        ({"a": 10**100}, "more than 100 digits"),
        (np.arange(2), "ndarray"),
    ],
)
def test_configurations_that_json_cannot_hold_are_refused_by_name(store, value, reason):
    with pytest.raises(StoreError, match=reason):
        store.key("losses", value if isinstance(value, dict) else {"a": value})


def test_what_cannot_be_kept_leaves_nothing(store):
    for arrays, record, reason in [
        ({"a": np.array([object()])}, {}, "dtype object"),
        ({"a": [1, 2]}, {}, "numpy array"),
        (ARRAYS, {"loss": float("nan")}, r"record\.loss is nan"),
        (ARRAYS, {"x": "y" * (17 * 2**20)}, "bytes of JSON"),
        (ARRAYS, json.loads('{"x":' * 70 + "{}" + "}" * 70), "nested"),
        ({"\ud800": np.zeros(1)}, {}, "name must be"),
    ]:
        with pytest.raises(StoreError, match=reason):
            store.write("losses", CONFIG, arrays, record)
    assert not store.has("losses", CONFIG)
    assert list(store.root.iterdir()) == []


@pytest.mark.parametrize("root", ["", "file", "file/below", "/proc/cache", "/dev/null/x", "nul\0"])
def test_unusable_roots_are_one_line(tmp_path, monkeypatch, root):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(StoreError, match="cache folder") as caught:
        Store(root)
    assert str(caught.value).isprintable()
    with pytest.raises(StoreError):
        Store("absent", create=False)
    assert not Path("absent").exists()


# -- damage -----------------------------------------------------------------------------------------------------------
def reseal(path, change):
    """An edit whose author also mends the checksum of entry.json."""
    content = json.loads((path / "entry.json").read_text())
    del content["sha256"]
    change(content)
    (path / "entry.json").write_text(json.dumps({**content, "sha256": store_module._sha256(content)}))


def flip(path, name, position):
    data = bytearray((path / name).read_bytes())
    data[position] ^= 1
    (path / name).write_bytes(data)


def move_out(path):
    outside = path.parent.parent.parent.parent / "outside"
    path.rename(outside)
    path.symlink_to(outside)


DAMAGE = {
    "arrays truncated": lambda p: os.truncate(p / "arrays.safetensors", 100),
    "one bit of the data": lambda p: flip(p, "arrays.safetensors", -1),
    "arrays gone": lambda p: (p / "arrays.safetensors").unlink(),
    "arrays are a pickle": lambda p: replace(p / "arrays.safetensors", b"\x80\x04\x95cos\nsystem\n"),
    "arrays are a link": lambda p: to_link(p / "arrays.safetensors"),
    "arrays are a pipe": lambda p: to_pipe(p / "arrays.safetensors"),
    "json truncated": lambda p: os.truncate(p / "entry.json", 50),
    "json is huge": lambda p: os.truncate(p / "entry.json", 2**40),
    "config edited": lambda p: edit(p / "entry.json", config={"alpha": 0.9}),
    "config edited, checksum mended": lambda p: reseal(p, lambda c: c["config"].update(alpha=0.9)),
    "key edited, checksum mended": lambda p: reseal(p, lambda c: c.update(key="0" * 20)),
    "shape edited, checksum mended": lambda p: reseal(p, lambda c: c["arrays"]["loss"].update(shape=[3, 2])),
    "array hidden, checksum mended": lambda p: reseal(p, lambda c: c["arrays"].pop("kept")),
    "folder leads outside": move_out,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_quarantined_and_recomputed(store, damage, caplog):
    entry = store.write("losses", CONFIG, ARRAYS, RECORD)
    DAMAGE[damage](entry.path)
    with caplog.at_level(logging.WARNING):
        assert store.read("losses", CONFIG) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert str(entry.path) in line
    assert line.isprintable()
    assert not store.has("losses", CONFIG)
    assert len(os.listdir(store.root / "quarantine")) == 1
    store.write("losses", CONFIG, ARRAYS, RECORD)
    np.testing.assert_array_equal(store.read("losses", CONFIG).arrays["loss"], ARRAYS["loss"])
    assert [info.kind for info in store.entries()] == ["losses"]
    # Somebody who writes without reading first finds the damage, too.
    DAMAGE[damage](entry.path) if damage != "folder leads outside" else os.truncate(entry.path / "entry.json", 9)
    store.write("losses", CONFIG, ARRAYS, RECORD)
    assert store.read("losses", CONFIG) is not None


def test_an_entry_copied_to_a_wrong_place_is_not_believed(store):
    entry = store.write("losses", CONFIG, ARRAYS, RECORD)
    other = store.place("losses", store.key("losses", {"alpha": 0.5}))
    shutil.copytree(entry.path, other)
    assert store.read("losses", {"alpha": 0.5}) is None
    with pytest.raises(DamagedEntryError):
        store.verified("losses", "0" * 20)


# -- writers ----------------------------------------------------------------------------------------------------------
def test_the_first_writer_wins_also_in_a_race(store, monkeypatch):
    first = store.write("losses", {"index": 0}, ARRAYS, RECORD)
    second = store.write("losses", {"index": 0}, {"loss": np.zeros(1)}, {"seconds": 9.0})
    assert second.record == first.record
    np.testing.assert_array_equal(second.arrays["loss"], ARRAYS["loss"])
    rival = Store(store.root)
    publish = Store._publish

    def slow_publish(*arguments):
        monkeypatch.setattr(Store, "_publish", publish)
        rival.write("losses", CONFIG, ARRAYS, {"writer": "rival"})
        return publish(*arguments)

    monkeypatch.setattr(Store, "_publish", slow_publish)
    assert store.write("losses", CONFIG, ARRAYS, {"writer": "us"}).record == {"writer": "rival"}
    assert os.listdir(store.root / ".tmp") == []


def race(root, seed):
    store = Store(root)
    order = list(range(40))
    random.Random(seed).shuffle(order)
    for index in order:
        store.write("losses", {"index": index}, {"loss": np.full(100, index)}, {"writer": seed})
        assert store.read("losses", {"index": index}) is not None


def test_racing_processes_leave_whole_entries(store):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=race, args=(store.root, seed)) for seed in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    for index in range(40):
        assert (store.read("losses", {"index": index}).arrays["loss"] == index).all()
    assert len(list(store.entries())) == 40
    assert not (store.root / "quarantine").exists()


def write_for_ever(root, ready):
    store = Store(root)
    ready.set()
    for index in itertools.count():
        store.write("losses", {"index": index % 200}, {"loss": np.full(20_000, index % 200)}, {})
        if index % 50 == 49:
            for info in list(store.entries())[::2]:
                store.remove_key(info.kind, info.key)


def test_killed_writers_leave_nothing_half_done(store):
    rng = np.random.default_rng(7)
    context = multiprocessing.get_context("fork")
    for _ in range(8):
        ready = context.Event()
        process = context.Process(target=write_for_ever, args=(store.root, ready))
        process.start()
        assert ready.wait(30)
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        process.join()
        for info in store.entries():
            entry = store.verified(info.kind, info.key)
            assert (entry.arrays["loss"] == entry.config["index"]).all()
    Store(store.root)
    assert os.listdir(store.root / ".tmp") == []
    assert not (store.root / "quarantine").exists()


def test_stale_temporary_folders_go_and_live_ones_stay(store):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    names = {
        f"{host_name()}.{dead.pid}.aa": False,
        f"{host_name()}.{os.getpid()}.bb": True,
        "otherhost.1.cc": True,
        "otherhost.1.dd": False,
        "junk": True,
    }
    for name in names:
        (store.root / ".tmp" / name).mkdir(parents=True, exist_ok=True)
    os.utime(store.root / ".tmp" / "otherhost.1.dd", (1, 1))
    Store(store.root)
    assert {name: (store.root / ".tmp" / name).exists() for name in names} == names


def test_listing_passes_over_junk_and_removal_is_whole(store):
    entry = store.write("losses", CONFIG, ARRAYS, RECORD)
    store.write("scores", CONFIG, ARRAYS, RECORD)
    (store.root / "README").write_text("x")
    for junk in ("losses/zz", "losses/00/not-a-key", "Strange Folder"):
        (store.root / junk).mkdir(parents=True)
    infos = list(store.entries())
    assert [info.kind for info in infos] == ["losses", "scores"]
    assert list(store.entries("losses")) == infos[:1]
    assert list(store.entries("absent")) == []
    assert infos[0].num_bytes() > 100
    assert infos[0].modified() > 1e9
    assert store.remove_key("scores", infos[1].key)
    assert not store.remove_key("scores", infos[1].key)
    assert list(store.entries()) == infos[:1]
    for kind, key in (("..", infos[0].key), ("losses", "../../x"), ("quarantine", infos[0].key)):
        with pytest.raises(StoreError, match="not the name of an entry"):
            store.remove_key(kind, key)
    store.remove_key(infos[0].kind, infos[0].key)
    assert not entry.path.exists()
    assert infos[0].num_bytes() == 0
    store.remove_key(infos[0].kind, infos[0].key)
