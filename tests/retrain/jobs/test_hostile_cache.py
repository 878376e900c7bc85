"""Hostile files in a cache: batches, lists of units, events and jobs; none leads out of it, none is believed.

What is no sound JSON at all is refused by one reader for all of them: `tests/retrain/test_safe_files.py`.
"""

import json
import os

import pytest

from bench import cache
from retrain.jobs import run_units
from retrain.jobs.unit import JobBatch
from retrain.safe_files import SafeFileError
from tests.helpers.damage import edit, replace, to_folder, to_link, to_pipe
from tests.helpers.job_units import units


@pytest.fixture
def batch(store):
    run_units(units(2), store, name="fine")
    (found,) = JobBatch.all(store)
    return found


BATCHES = {
    "no JSON": lambda p: replace(p, "{"),
    "a link": to_link,
    "a pipe": to_pipe,
    "a folder": to_folder,
    "run leads out": lambda p: edit(p, run="../../x"),
    "units lead out": lambda p: edit(p, units_sha256="../../../../etc/passwd"),
}


@pytest.mark.parametrize("what", BATCHES)
def test_a_hostile_batch_is_shown_empty_and_hides_no_other(store, batch, capsys, what):
    run_units(units(3), store, name="another")
    BATCHES[what](batch.folder / "batch.json")
    assert cache.main(["status", "--cache", str(store.root), "--json"]) == 0
    states = {state["batch"]: state for state in json.loads(capsys.readouterr().out)}
    assert len(states) == 2
    assert states[batch.id]["num_units"] == 0
    assert {state["name"] for state in states.values()} >= {"another"}
    assert cache.main(["status", "--cache", str(store.root)]) == 0
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())
    assert cache.main(["--cache", str(store.root)]) == 0


def test_a_batch_that_is_a_link_is_neither_read_nor_written(store, batch, tmp_path):
    outside = tmp_path / "outside"
    batch.folder.rename(outside)
    batch.folder.symlink_to(outside)
    assert JobBatch.all(store) == []
    assert batch.describe() == {}
    before = sorted(os.listdir(outside))
    store.remove_key("numbers", store.key("numbers", {"index": 0}))
    with pytest.raises(RuntimeError, match="link"):
        run_units(units(2), store, name="fine")
    assert cache.main(["prune", "logs", "--yes", "--cache", str(store.root)]) == 0
    assert sorted(os.listdir(outside)) == before


@pytest.mark.parametrize("line", ["{", '{"key": "' + "x" * 5_000_000 + '"}'], ids=["not JSON", "long"])
def test_hostile_lists_of_units_name_nothing_and_run_nothing(store, batch, line):
    (path,) = batch.folder.glob("units-*.jsonl")
    with open(path, "a") as file:
        file.write(line + "\n")
    assert len(batch.unit_names()) == 2
    with pytest.raises(SafeFileError) as caught:
        batch.units(batch.describe()["units_sha256"])
    assert str(caught.value).isprintable()


def test_a_worker_runs_only_the_list_it_was_submitted_with(store, batch):
    (path,) = batch.folder.glob("units-*.jsonl")
    digest = batch.describe()["units_sha256"]
    path.write_text(path.read_text().replace("tests.helpers.job_units:work", "tests.helpers.job_units:evil"))
    with pytest.raises(SafeFileError, match="has changed since the job was submitted"):
        batch.units(digest)
    for wrong in ("../../x", "0" * 63, ["0" * 64]):
        with pytest.raises(SafeFileError, match="units_sha256"):
            batch.units(wrong)


def test_reasons_of_others_forge_no_lines_and_logs_are_not_written_through_links(store, batch, capsys, tmp_path):
    """A log may say anything; what is shown of it is printable."""
    run = batch.describe()["run"]
    key = store.key("numbers", {"index": 0})
    store.remove_key("numbers", key)
    line = json.dumps({"event": "failed", "time": 1.0, "key": key, "reason": "\x1b[2J\rall\nis well"})
    (batch.folder / "events" / f"{run}-stranger.jsonl").write_text(f"{line}\n" * 3)
    assert cache.main(["status", "--cache", str(store.root)]) == 0
    said = capsys.readouterr().out
    assert "\\x1b[2J\\rall\n    is well\n" in said
    assert all(line.isprintable() for line in said.splitlines())
    precious = tmp_path / "precious"
    precious.write_text("precious")
    log = batch.log("run1", "driver")
    log.path.symlink_to(precious)
    log.add("done")
    assert precious.read_text() == "precious"
