"""Hostile ground truths, experiments and words on the command line: one line, exit code 2, and nothing runs."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.cli import lds_main as main
from bench.ground_truth import GroundTruth
from bench.records import write_recorded
from bench.truth.folder import write_truth
from retrain.safe_files import write_safetensors

# ---- ground truths ----


@pytest.fixture
def truth(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    masks = np.array([generator.permutation(20) < 10 for _ in range(12)])
    losses = generator.normal(size=(2, 12, 5)).astype(np.float32)
    write_truth(tmp_path / "truth", GroundTruth.of_arrays(masks, losses, record={"source": "arrays"}))
    np.save(tmp_path / "scores.npy", generator.normal(size=(5, 20)))
    return tmp_path / "truth"


def rewritten(folder: Path, **changed: Any) -> None:
    """Sound by its checksum: whoever made it is the attacker."""
    arrays = {"masks": np.eye(12, 20, dtype=bool), "losses": np.zeros((2, 12, 5), np.float32), **changed}
    known = {np.dtype(bool): "BOOL", np.dtype(np.float32): "F32", np.dtype(np.int64): "I64"}
    header, body = {}, b""
    for name, array in arrays.items():
        data = array.tobytes()
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": known[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        body += data
    place(folder, header, body)


def place(folder: Path, header: Any, body: bytes = b"") -> None:
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + body
    (folder / "truth.safetensors").write_bytes(content)
    edit(folder, arrays_sha256=hashlib.sha256(content).hexdigest())


def edit(folder: Path, **fields: Any) -> None:
    path = folder / "truth.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def other(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**42)


def shape(folder: Path, *sizes: int) -> None:
    place(folder, {"masks": {"dtype": "BOOL", "shape": list(sizes), "data_offsets": [0, 0]}})


def recorded(folder: Path, arrays: dict[str, np.ndarray] | None = None, **fields: Any) -> None:
    """Predictions beside the ground truth, sound but for these fields or arrays."""
    truth_sha256 = json.loads((folder / "truth.json").read_text())["arrays_sha256"]
    write_recorded(folder, {}, {"methods": [], "rows": []}, truth_sha256)
    path = folder / "recorded.json"
    content = {**json.loads(path.read_text()), **fields}
    if arrays is not None:
        with (folder / "recorded.safetensors").open("wb") as file:
            content["arrays_sha256"] = write_safetensors(file, arrays)
    path.write_text(json.dumps(content))


TRUTHS: dict[str, Callable[[Path], Any]] = {
    "no replicates": lambda f: rewritten(f, losses=np.zeros((0, 12, 5), np.float32)),
    "no queries": lambda f: rewritten(f, losses=np.zeros((2, 12, 0), np.float32)),
    "no subsets": lambda f: rewritten(f, masks=np.zeros((0, 20), bool)),
    "no examples": lambda f: rewritten(f, masks=np.zeros((12, 0), bool)),
    "losses that are NaN": lambda f: rewritten(f, losses=np.full((2, 12, 5), np.nan, np.float32)),
    "masks of one axis": lambda f: rewritten(f, masks=np.ones(12, bool)),
    "present of another shape": lambda f: rewritten(f, present=np.ones((1, 1), bool)),
    "nothing present": lambda f: rewritten(f, present=np.zeros((2, 12), bool)),
    "a shape of 2^62": lambda f: shape(f, 2**62),
    "a shape that overflows": lambda f: shape(f, 2**62, 4),
    "a shape of 400 digits": lambda f: shape(f, 10**400),
    "a negative shape": lambda f: shape(f, -1),
    "offsets elsewhere": lambda f: place(
        f, {"masks": {"dtype": "BOOL", "shape": [9], "data_offsets": [10**9, 10**9 + 9]}}
    ),
    "no arrays": lambda f: place(f, {}),
    "a list of arrays": lambda f: place(f, []),
    "arrays that are a link": lambda f: other(f / "truth.safetensors", lambda p: p.symlink_to("/etc/passwd")),
    "arrays that are a pipe": lambda f: other(f / "truth.safetensors", os.mkfifo),
    "arrays that are a folder": lambda f: other(f / "truth.safetensors", Path.mkdir),
    "arrays of 4 TB": lambda f: other(f / "truth.safetensors", huge),
    "arrays that are pickled": lambda f: (f / "truth.safetensors").write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR."),
    "a record that is a link": lambda f: other(f / "truth.json", lambda p: p.symlink_to("/etc/passwd")),
    "a record that is a pipe": lambda f: other(f / "truth.json", os.mkfifo),
    "a record of 4 TB": lambda f: other(f / "truth.json", huge),
    "a record that is deep": lambda f: (f / "truth.json").write_text("[" * 100_000),
    "a record that is a list": lambda f: (f / "truth.json").write_text("[]"),
    "an alpha of 400 digits": lambda f: edit(f, alpha=10**400),
    "an alpha that is text": lambda f: edit(f, alpha="0.1"),
    "a source that is a table": lambda f: edit(f, source={"a": 1}),
    "a source of two lines": lambda f: edit(f, source="all\nis well"),
    "a source with half a character": lambda f: edit(f, source="\ud800"),
    "another checksum": lambda f: edit(f, arrays_sha256="0" * 64),
    "a checksum that is a path": lambda f: edit(f, arrays_sha256="../../x"),
    "a task that is a word": lambda f: edit(f, task="digits", seed=1),
    "a task without a name": lambda f: edit(f, task={}, seed=1),
    "a task of two lines": lambda f: edit(f, task={"name": "a\nb"}),
    "a seed that is text": lambda f: edit(f, task={"name": "a"}, seed="1"),
    "a negative seed": lambda f: edit(f, seed=-1),
    "a protocol that is a list": lambda f: edit(f, protocol=[]),
    "a share of 2": lambda f: edit(f, alpha_attribution=2),
    "a split that is a table": lambda f: edit(f, query_split={}),
    "queries that are text": lambda f: edit(f, queries="all"),
    "a description that is a list": lambda f: edit(f, description=["a"]),
    "replicated subsets that are text": lambda f: edit(f, replicated_subsets="all"),
    "recorded methods that are a list": lambda f: recorded(f, methods={}),
    "recorded methods of numbers": lambda f: recorded(f, methods=[1]),
    "recorded methods without a label": lambda f: recorded(f, methods=[{"name": "a"}]),
    "recorded rows that are text": lambda f: recorded(f, rows="none"),
    "recorded rows without numbers": lambda f: recorded(f, rows=[{"label": "a", "method": "a"}]),
    "recorded rows of lists": lambda f: recorded(f, rows=[[]]),
    "recorded predictions of another shape": lambda f: recorded(f, arrays={"a/raw": np.ones((3, 3), np.uint8)}),
    "a list of recorded predictions": lambda f: (f / "recorded.json").write_text("[]"),
    "recorded predictions of 0 bytes": lambda f: (f / "recorded.json").write_text(""),
}


@pytest.mark.parametrize("name", TRUTHS)
def test_a_hostile_ground_truth_is_one_line(
    truth: Path, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    TRUTHS[name](truth)
    words = ["--ground-truth", str(truth), "--scores", str(tmp_path / "scores.npy"), "--out", str(tmp_path / "runs")]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    assert "root:" not in line
    assert not list((tmp_path / "runs").rglob("*.json"))


# ---- words ----

LONG = "9" * 400
WORDS: dict[str, list[str]] = {
    "a method outside": ["--methods", "../../evil:Cls"],
    "a method that is a file": ["--methods", "/etc/passwd"],
    "a method that is none": ["--methods", "os:system"],
    "a method with a line break": ["--methods", "bif\nlds: all is well"],
    "a method with half a character": ["--methods", "\udcff"],
    "a label that is markup": ["--methods", "<img src=x>=random"],
    "an option of 400 digits": ["--methods", f"bif@draws={LONG}"],
    "an option that is none": ["--methods", "bif@__class__=1"],
    "a task outside": ["--task", "../../evil:Cls"],
    "a task that is none": ["--task", "os:system"],
    "a protocol outside": ["--protocol", "a/../.."],
    "a task's option of 400 digits": ["--set", f"digits.num_train={LONG}"],
    "a task's option that is none": ["--set", "digits.__class__=1"],
    "an alpha of 400 digits": ["--alpha", LONG],
    "a seed of 400 digits": ["--seed", LONG],
    "a seed of 20 digits": ["--seed", LONG[:20]],
    "an alpha that is none": ["--alpha", "nan"],
    "no subsets": ["--subsets", "0"],
    "no replicates": ["--replicates", "0"],
    "a device that is none": ["--device", "../../cpu"],
    "an experiment that is a pipe": ["--experiment", "PIPE"],
    "an experiment of 4 TB": ["--experiment", "HUGE.json"],
    "a cache that is a file": ["--cache", "/etc/passwd"],
    "a cache with a zero": ["--cache", "a\0b"],
}


@pytest.mark.parametrize("name", WORDS)
def test_hostile_words_are_one_line(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "evil.py").write_text("open('executed', 'w')\n")
    os.mkfifo(tmp_path / "PIPE")
    huge(tmp_path / "HUGE.json")
    monkeypatch.chdir(tmp_path / "deep" / "er")
    words = [str(tmp_path / word) if word in ("PIPE", "HUGE.json") else word for word in WORDS[name]]
    usual = {"--task": "digits", "--alpha": "0.5", "--methods": "random", "--cache": str(tmp_path / "cache")}
    rest = [part for flag, value in usual.items() if flag not in words for part in (flag, value)]
    try:
        code = main([*words, *rest, "--dry-run"])
    except SystemExit as refused:
        code = refused.code
    said = capsys.readouterr().err
    assert code == 2, said
    assert len(said.splitlines()) == 1, said
    assert said.rstrip("\n").isprintable()
    assert not list(tmp_path.rglob("executed"))


# ---- experiments and tuned settings ----

TOML: dict[str, str] = {
    "a task that is a number": "task = 3",
    "a task that is a list": 'task = ["digits"]',
    "task options that are a list": "task_options = [1]",
    "methods that are a number": "methods = 3",
    "methods of numbers": "methods = [1, 2]",
    "methods of tables": "methods = [{a = 1}]",
    "methods of lists": 'methods = [["random"]]',
    "settings that are a table": "settings = {a = 1}",
    "options of numbers": "options = {random = 3}",
    "an alpha that is text": 'alpha = ["0.1"]',
    "an alpha that is a table": "alpha = {a = 0.1}",
    "an alpha that is true": "alpha = true",
    "alphas of lists": "alpha = [[0.1]]",
    "seeds that are text": 'seeds = "1"',
    "seeds of tables": "seeds = [{a = 1}]",
    "seeds that are fractions": "seeds = [1.5]",
    "subsets that are text": 'subsets = "100"',
    "replicates that are a list": "replicates = [2]",
    "checkpoints of lists": "checkpoints = [[1]]",
    "a scheme that is a list": 'scheme = ["fixed"]',
    "a date": "queries = 2026-01-01",
    "a date among options": "options = {random = {seed = 2026-01-01}}",
    "a number that is none": "options = {random = {seed = nan}}",
    "a name that no experiment has": "subset = 3",
    "no TOML": "a = [",
}
RECORDS: dict[str, Any] = {
    "a list": [],
    "no experiment": {},
    "an experiment that is a list": {"experiment": []},
    "a config that is a list": {"experiment": {"task": "digits"}, "config": []},
    "methods that are numbers": {"experiment": {"task": "digits"}, "config": {"methods": [1]}},
    "a method without a label": {"experiment": {"task": "digits"}, "config": {"methods": [{"asked": "random"}]}},
    "a method of lists": {
        "experiment": {"task": "digits"},
        "config": {"methods": [{"asked": ["random"], "label": {}, "rows": 3}]},
    },
    "seeds that are tables": {"experiment": {"task": "digits", "seeds": [{}]}},
}
FORMAT = {"format": "tda-bench tuned settings 1"}
TUNED: dict[str, Any] = {
    "a list": [],
    "no methods": FORMAT,
    "methods that are a list": {**FORMAT, "methods": []},
    "a method that is a list": {**FORMAT, "methods": {"ekfac": []}},
    "a method without kinds": {**FORMAT, "methods": {"ekfac": {}}},
    "a kind that is a number": {**FORMAT, "methods": {"ekfac": {"raw": 3, "normalised": 3}}},
    "options that are a list": {
        **FORMAT,
        "methods": {"ekfac": {"raw": {"options": []}, "normalised": {"options": []}}},
    },
    "an option of a list": {
        **FORMAT,
        "methods": {"ekfac": {"raw": {"options": {"damping": [1]}}, "normalised": {"options": {"damping": [1]}}}},
    },
    "an option that is none": {
        **FORMAT,
        "methods": {"ekfac": {"raw": {"options": {"colour": 1}}, "normalised": {"options": {"colour": 1}}}},
    },
}


def refused_in_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        code = main([*words, "--dry-run"])
    except SystemExit as refused:
        code = refused.code  # type: ignore[assignment]
    said = capsys.readouterr().err
    assert code == 2, said
    assert len(said.splitlines()) == 1, said
    assert "internal error" not in said
    return said


@pytest.mark.parametrize("name", TOML)
def test_a_hostile_experiment_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text(TOML[name] + "\n")
    words = ["--experiment", str(path), "--cache", str(tmp_path / "cache")]
    assert str(path) in refused_in_one_line(words, capsys) or "a name" not in name


@pytest.mark.parametrize("name", RECORDS)
def test_a_hostile_record_run_again_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(RECORDS[name]))
    assert str(path) in refused_in_one_line(["--experiment", str(path), "--cache", str(tmp_path / "cache")], capsys)


@pytest.mark.parametrize("name", TUNED)
def test_hostile_tuned_settings_are_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "digits-scratch.json").write_text(json.dumps(TUNED[name]))
    monkeypatch.setenv("TDA_BENCH_TUNED", str(tmp_path))
    words = ["--task", "digits", "--methods", "ekfac", "--cache", str(tmp_path / "cache")]
    refused_in_one_line(words, capsys)
