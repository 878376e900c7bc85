"""bench.cache: they say what is there, and change only what they are told to."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bench import cache
from retrain.jobs import Unit, run_units
from retrain.jobs.unit import JobBatch
from retrain.leases import Leases
from retrain.processes import host_name
from retrain.resume import ResumeState
from retrain.store import Store
from tests.helpers.job_units import unit, units
from tests.helpers.pace import at_most

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "cache")


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
    assert {name: state[f"num_{name}"] for name in ("done", "running", "failed", "missing", "units")} == {
        "done": 3,
        "running": 1,
        "failed": 1,
        "missing": 2,
        "units": 7,
    }
    assert state["name"] == "some numbers"
    assert state["eta_seconds"] > 0
    assert str(os.getpid()) in state["workers"][0]
    assert "ValueError: unit 6 cannot be done" in text
    assert state["kinds"] == {"numbers": 7}
    key = store.key("numbers", {"index": 1})
    assert [(held["kind"], held["key"], held["pid"]) for held in state["holders"]] == [("numbers", key, os.getpid())]
    assert f"numbers {key} is held by {host_name()} pid {os.getpid()} for " in text
    (state,) = states(store, capsys, state["batch"][:4])
    assert state["num_missing"] == 3
    assert state["eta_seconds"] is None
    assert cache.main(["status", "--cache", str(store.root), "zz"]) == 2
    assert cache.main(["status", "--cache", str(store.root / "absent")]) == 2


def test_status_of_six_thousand_units_takes_less_than_two_seconds(store, capsys):
    function, task = "tests.helpers.job_units:work", "x" * 300
    work = [Unit("numbers", {"index": index, "task": task}, function) for index in range(6000)]
    by_key = {store.key(unit.kind, unit.config): unit for unit in work}
    batch = JobBatch.of(store, by_key)
    batch.write(by_key, name="many", cluster="slurm", run="run1")
    log = batch.log("run1", "driver")
    for key in list(by_key)[:4000]:
        folder = store.place("numbers", key)
        folder.mkdir(parents=True)
        (folder / "entry.json").touch()
        (folder / "arrays.safetensors").touch()
        log.add("done", key=key, seconds=1.0)
    command = [sys.executable, "-m", "bench.cache", "status", "--cache", str(store.root), "--json"]
    with at_most(2.0, children=True):
        output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (state,) = json.loads(output)
    assert (state["num_done"], state["num_missing"]) == (4000, 2000)
    # Without the start of Python it is a tenth of that, and anything that looks at all pairs of units is much more.
    with at_most(0.7):
        assert states(store, capsys) == [state]


def test_hostile_batch_folders_are_passed_over(store, capsys):
    run_units(units(2), store, name="fine")
    folder = store.root / ".jobs"
    texts = [
        "",
        "[]",
        "{",
        '{"run": "../../x", "units_sha256": "../../etc/passwd"}',
        '{"started": "x", "name": "a\\nb"}',
    ]
    for number, text in enumerate([*texts, "[" * 100_000, '{"units_sha256": ["x"], "run": 5}']):
        (folder / f"bad{number}").mkdir()
        (folder / f"bad{number}" / "batch.json").write_text(text)
    (folder / "file").write_text("x")
    found = states(store, capsys)
    assert found[0]["name"] == "fine"
    assert all(state["num_units"] == 0 for state in found[1:])
    assert all(state["name"].isprintable() for state in found)


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
    assert "numbers                     4 entries" in said.out
    code, said = run("list", "--kind", "numbers", "--match", '"index":3')
    assert said.out.count("\n") == 1
    assert '{"index":3}' in said.out
    assert run("verify")[0] == 0
    os.truncate(store.path("numbers", {"index": 2}) / "arrays.safetensors", 20)
    code, said = run("verify")
    assert code == 1
    assert "damaged" in said.err
    assert str(store.path("numbers", {"index": 2})) in said.err
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


def test_work_of_another_host_is_kept_by_a_host_whose_clock_is_ahead(store, capsys, monkeypatch):
    """A lease is judged by the clock of the disk alone: 95 seconds ahead, this host's would call every lease stale."""
    key = store.key("numbers", {"index": 1})
    with Leases(store.root).take("numbers", key) as lease:
        path = Leases(store.root).path("numbers", key)
        path.write_text(json.dumps({**json.loads(path.read_text()), "host": "another-host", "token": "ab"}))
        ResumeState.of(store, "numbers", key).save("state", {"a": np.zeros(3)}, {})
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 95)
        assert cache.main(["prune", "work", "--yes", "--cache", str(store.root)]) == 0
        assert "nothing to delete" in capsys.readouterr().out
        assert ResumeState.of(store, "numbers", key).folder.is_dir()
        assert lease is not None
