"""What a run leaves behind: damaged files are written again, and our reader takes all that our writer writes."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from bench.cli import lds_main as main
from bench.ground_truth import GroundTruth
from bench.records import csv_text, edited_since, load_results, read_record, save_record, try_write, write_record
from bench.schema import RunRecord
from bench.truth.folder import write_truth
from retrain import safe_files
from retrain.safe_files import SafeFileError, write_whole

ROOT = Path(__file__).parents[2]


def scored(folder: Path, name: str = "scores", **record: Any) -> list[str]:
    """The words of a command that scores one file against a small ground truth."""
    generator = np.random.default_rng(0)
    masks = np.array([generator.permutation(20) < 10 for _ in range(12)])
    losses = generator.normal(size=(2, 12, 5)).astype(np.float32)
    write_truth(folder / "truth", GroundTruth.of_arrays(masks, losses, record={"source": "arrays", **record}))
    np.save(folder / f"{name}.npy", generator.normal(size=(5, 20)))
    words = ["--ground-truth", str(folder / "truth"), "--scores", str(folder / f"{name}.npy")]
    return [*words, "--out", str(folder / "runs")]


def lds(folder: Path) -> list[str]:
    small = "--task digits --alpha 0.5 --set digits.num_train=60 --set digits.epochs=1 --subsets 5 --replicates 1"
    rest = ["--queries", "9", "--methods", "random", "--cluster", "inline", "--cache", str(folder / "cache")]
    return [*small.split(), *rest, "--out", str(folder / "runs")]


def one_record(folder: Path) -> Path:
    (path,) = (folder / "runs").rglob("run.json")
    return path


@pytest.mark.parametrize("command", [scored, lds])
def test_a_damaged_record_and_a_missing_table_come_back(tmp_path: Path, command: Any) -> None:
    words = command(tmp_path)
    assert main(words) == 0
    path = one_record(tmp_path)
    rows = read_record(path, RunRecord)["rows"]
    sound, table = path.read_bytes(), path.with_name("lds.csv").read_bytes()
    for damage in (b"", sound[: len(sound) // 2], sound.replace(b'"num_undefined": ', b'"num_undefined": 1', 1)):
        path.write_bytes(damage)
        path.with_name("lds.csv").unlink()
        assert main(words) == 0
        record = read_record(path, RunRecord)
        assert not edited_since(record)
        assert record["rows"] == rows
        assert path.with_name("lds.csv").read_bytes() == table
    assert main(words) == 0
    assert path.with_name("run-again").exists()  # a sound record stays


def test_files_and_their_folder_are_flushed_and_what_could_not_be_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, real = [], os.fsync
    flush = lambda fd: flushed.append(Path(os.readlink(f"/proc/self/fd/{fd}"))) or real(fd)  # noqa: E731
    monkeypatch.setattr(safe_files.os, "fsync", flush)
    write_whole(tmp_path / "run.json", "{}")
    file, folder = flushed
    assert (file.parent, folder) == (tmp_path, tmp_path)
    record, path = {"run_id": "0123456789ab", "device": "CPU\nall is well"}, tmp_path / "a" / "run.json"
    with pytest.raises(SafeFileError, match="device is 'CPU"):
        save_record(path, record, RunRecord, {})
    assert "cannot be written" in try_write(lambda: save_record(path, record, RunRecord, {}), tmp_path)
    assert not path.exists()


def test_names_seeds_and_sources_of_any_kind_give_records_that_are_read(tmp_path: Path) -> None:
    for number, name in enumerate(("two\nlines", "\x1b[2J", "x" * 200, "\u202ebackwards", "=1+1")):
        assert main(scored(tmp_path / str(number), name)) == 0
        results = load_results(tmp_path / str(number) / "runs")
        assert (results.problems, len(results.rows)) == ([], 1)
    assert main([*lds(tmp_path), "--seeds", str(10**18 - 1)]) == 0
    assert main(scored(tmp_path, source="x" * 1900)) == 0
    results = load_results(tmp_path / "runs")
    assert results.problems == []
    assert 10**18 - 1 in set(results.rows["seed"])


def test_tables_of_a_file_are_the_same_rows_again_and_formulas_are_escaped(tmp_path: Path) -> None:
    rows = [{"seed": 1, "lds": None, "at": 1, "task": "digits"}, {"seed": 2, "lds": 0.1, "at": True, "task": "digits"}]
    for table in ([], rows[:1], rows, [*rows, {"seed": 3}]):
        write_record(tmp_path / "rows.json", {"rows": table, "detail": [{"rows": rows}]}, dict)
        found = read_record(tmp_path / "rows.json", dict)["rows"]
        assert json.dumps(found, sort_keys=True) == json.dumps(table, sort_keys=True)  # 1 is not true
    write_record(tmp_path / "rows.json", {"rows": rows}, dict)
    lines = (tmp_path / "rows.json").read_text().splitlines()
    assert '  "same": {"task": "digits"},' in lines
    assert "   [2,0.1,true]" in lines
    frame = pd.DataFrame({"label": ["=1+1", "+1", "-1", "@x", "bif", None], "lds": [-0.5, 0.1, 0, 1, 2, 3]})
    lines = csv_text(frame).splitlines()
    assert lines == ["label,lds", "'=1+1,-0.5", "'+1,0.1", "'-1,0.0", "'@x,1.0", "bif,2.0", ",3.0"]


def test_a_record_that_was_edited_is_named(tmp_path: Path) -> None:
    assert main(scored(tmp_path)) == 0
    path = one_record(tmp_path)
    record = json.loads(path.read_text())
    record["rows"][0]["lds"] = 0.99
    path.write_text(json.dumps(record))
    (problem,) = load_results(tmp_path / "runs").problems
    assert f"{path}: its content no longer matches its run id {record['run_id']}" in problem
    path.write_text(json.dumps({**record, "edited": "a known mistake"}))
    results = load_results(tmp_path / "runs")
    assert results.problems == []
    assert "a known mistake" in results.left_out[0]
