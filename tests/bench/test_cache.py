"""bench.cache: they say what is there, and change only what they are told to."""

import errno
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

import bench.cache
import bench.cli
import bench.publish.__main__
import bench.speed
import bench.truth.__main__
from bench import cache
from retrain.jobs import run_units
from retrain.jobs.unit import JobBatch
from retrain.leases import Leases
from retrain.processes import host_name
from tests.helpers.faults import Faults
from tests.helpers.job_units import unit, units

ROOT = Path(__file__).resolve().parents[2]


def states(store, capsys, *words):
    assert cache.main(["status", "--cache", str(store.root), "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_status_counts_what_is_done_running_failed_and_missing(store, capsys, caplog):
    work = [*units(6), unit(6, "fail")]
    run_units(work, store, name="some numbers")
    capsys.readouterr()
    for index in (1, 2, 3):
        (info,) = [i for i in store.entries() if i.key == store.key("numbers", {"index": index})]
        store.remove_key(info.kind, info.key)
    with Leases(store.root).take("numbers", store.key("numbers", {"index": 1})):
        (state,) = states(store, capsys)
        assert cache.main(["status", "--cache", str(store.root)]) == 0
        text = capsys.readouterr().out
    assert [state[f"num_{name}"] for name in ("done", "running", "failed", "missing", "units")] == [3, 1, 1, 2, 7]
    assert state["name"] == "some numbers"
    assert state["eta_seconds"] > 0
    assert "ValueError: unit 6 cannot be done" in text
    assert state["kinds"] == {"numbers": 7}
    key = store.key("numbers", {"index": 1})
    assert [(held["kind"], held["key"], held["pid"]) for held in state["holders"]] == [("numbers", key, os.getpid())]
    assert f"numbers {key} is held by {host_name()} pid {os.getpid()} for " in text
    (state,) = states(store, capsys, state["batch"][:4])
    assert (state["num_missing"], state["eta_seconds"]) == (3, None)
    assert cache.main(["status", "--cache", str(store.root), "zz"]) == 2
    assert cache.main(["status", "--cache", str(store.root / "absent")]) == 2


def test_cache_lists_verifies_and_prunes(store, capsys):
    for index in range(4):
        store.write("numbers", {"index": index}, {"number": np.zeros(index + 1)}, {})
    store.write("scores", {"index": 0}, {"number": np.zeros(1)}, {})
    where = ["--cache", str(store.root)]

    def run(*words):
        code = cache.main([*words, *where] if words else where)
        return code, capsys.readouterr()

    code, said = run()
    assert code == 0
    assert re.search("numbers +4 entries", said.out)
    code, said = run("list", "--kind", "numbers")
    assert said.out.count("\n") == 4
    assert '{"index":3}' in said.out
    assert run("verify")[0] == 0
    place = store.place("numbers", store.key("numbers", {"index": 2}))
    os.truncate(place / "arrays.safetensors", 20)
    code, said = run("verify")
    assert code == 1
    assert str(place) in said.err
    assert "5 entries" in said.out
    assert not store.has("numbers", {"index": 2})
    assert "quarantine" in run()[1].out
    assert run("prune")[0] == 2
    assert run("prune", "--kind", "scores")[0] == 2  # nobody there to ask
    assert "would delete 1 entries" in run("prune", "--kind", "scores", "--dry-run")[1].out
    assert run("prune", "--kind", "numbers", "--older-than", "1", "--yes")[1].out == "nothing to delete\n"
    assert run("prune", "--kind", "scores", "--yes")[0] == 0
    assert [info.kind for info in store.entries()] == ["numbers"] * 3
    assert run("prune", "quarantine", "--yes")[0] == 0
    assert not any((store.root / "quarantine").iterdir())
    run_units(units(9), store, name="numbers")
    assert run("prune", "logs", "--yes")[0] == 0
    assert JobBatch.all(store) == []
    assert run("prune", "all", "--yes")[0] == 0
    assert list(store.entries()) == []
    assert cache.main(["--cache", str(store.root / "absent")]) == 2


def test_every_command_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache, runs = ["--cache", str(tmp_path / "cache")], str(tmp_path / "runs")
    task = ["--task", "tests.helpers.planted:Planted", "--device", "cpu", *cache]
    plan = [*task, "--alpha", "0.5", "--subsets", "12", "--replicates", "1"]
    words = [*plan, "--methods", "gradsim", "random", "--out", runs]
    assert bench.cli.lds_main([*words, "--cluster", "inline"]) == 0
    root = tmp_path / "cache"
    with Faults(root, number=errno.EROFS, read_only=True):
        with pytest.raises(OSError, match="Read-only"):
            (root / "mine").mkdir()
        before = sorted(path for path in root.rglob("*"))
        capsys.readouterr()
        for cluster in ("inline", "local"):
            assert bench.cli.lds_main([*words, "--cluster", cluster]) == 0
        assert bench.cli.lds_main([*words, "--dry-run"]) == 0
        assert capsys.readouterr().out.count(": cached") == 2
        assert [bench.cache.main([word, *cache]) for word in ("list", "verify", "status")] == [0, 0, 0]
        assert bench.truth.__main__.main(["export", *plan, "--out", str(tmp_path / "truth")]) == 0
        assert bench.truth.__main__.main(["check", str(tmp_path / "truth")]) == 0
        timed = [*task, "--methods", "gradsim", "--repeats", "1", "--out", str(tmp_path / "speed")]
        assert bench.speed.main(timed) == 0
        for word in ("figures", "report"):
            assert bench.publish.__main__.main([word, "--results", runs, "--out", str(tmp_path / word)]) == 0
        capsys.readouterr()
        # What is missing is one line, and nothing was left in it.
        for more in (["--methods", "kfac"], ["--subsets", "13"], ["--methods", "gradsim", "--rescore"]):
            assert bench.cli.lds_main([*words, *more, "--cluster", "inline"]) == 2
            said = capsys.readouterr().err
            assert re.search(r"can only be read|cannot be removed \(Read-only", said.splitlines()[-1]), said
            assert "Traceback" not in said
        assert sorted(path for path in root.rglob("*")) == before
