"""`python -m bench.lds` killed in the middle of a BIF chain: the same command goes on from what the chain had saved."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.cli import lds_main as main
from retrain.resume import ResumeState, unfinished_units
from retrain.store import Store

ROOT = Path(__file__).resolve().parents[2]
DRAWS, SAVED_AT, KILLED_AT = 60, 25, 40
MEASURED = ("fit_seconds", "score_seconds", "peak_memory_bytes", "run_id")

# What the command imports first. It saves once, at draw SAVED_AT of the first chain, and stays at draw KILLED_AT until
# it is killed: however busy the machine is, it is never too late. Every draw it takes is a line of `draws`.
FIRST = """
import os, time
from baselines.bif import saving

taken_here = os.open(os.environ["TRIAL"] + "/draws", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def progress(self, name, taken, state):
    os.write(taken_here, f"{name} {taken}\\n".encode())
    if name == "chain-0" and taken == SAVED_AT:
        self._save(name, state(), taken)
    if name == "chain-0" and taken == KILLED_AT and "STAY" in os.environ:
        open(os.environ["TRIAL"] + "/there", "w").close()
        time.sleep(600)

saving.Saver.progress = progress
"""


def words(folder: Path, cache: str) -> list[str]:
    return [
        "--task", "tests.helpers.planted:Planted", "--alpha", "0.5", "--subsets", "12", "--replicates", "1",
        "--methods", f"bif@chains=2,draws={DRAWS},step_size=1e-3,n_beta=20,gamma=5", "--device", "cpu", "--json",
        "--cluster", "inline", "--cache", str(folder / cache), "--out", str(folder / f"{cache}-runs"),
    ]  # fmt: skip


def start(folder: Path, **environment: str) -> subprocess.Popen:
    paths = os.pathsep.join((str(folder / "first"), str(ROOT)))
    return subprocess.Popen(
        [sys.executable, "-m", "bench.lds", *words(folder, "cache")],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": paths, "TRIAL": str(folder / "first"), **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def rows(output: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in MEASURED} for row in json.loads(output)]


def scores(root: Path) -> dict[str, bytes]:
    (info,) = Store(root).entries("scores")
    return {name: array.tobytes() for name, array in Store(root).verified(info.kind, info.key).arrays.items()}


def test_a_chain_killed_after_a_save_goes_on_from_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = tmp_path / "first"
    first.mkdir()
    text = FIRST.replace("SAVED_AT", str(SAVED_AT)).replace("KILLED_AT", str(KILLED_AT))
    (first / "sitecustomize.py").write_text(text)
    process = start(tmp_path, STAY="1")
    try:
        limit = time.monotonic() + 600
        while not (first / "there").exists():
            assert process.poll() is None, f"it ended before it could be killed: {process.communicate()[1]}"
            assert time.monotonic() < limit, "it never came to its draw"
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    store = Store(tmp_path / "cache")
    (left,) = [item for item in unfinished_units(store) if item.kind == "scores"]
    saved = ResumeState.of(store, left.kind, left.key).load("chain-0")
    assert saved is not None
    assert saved[1]["taken"] == SAVED_AT
    diary = first / "draws"
    assert diary.read_text().split("\n")[-2] == f"chain-0 {KILLED_AT}"
    diary.unlink()

    again = start(tmp_path)
    assert main(words(tmp_path, "calm")) == 0
    undisturbed = rows(capsys.readouterr().out)
    output, errors = again.communicate(timeout=600)
    assert again.returncode == 0, errors
    taken = [int(line.split()[1]) for line in diary.read_text().splitlines() if line.startswith("chain-0 ")]
    assert taken == list(range(SAVED_AT + 1, DRAWS + 1)), "it began where it had saved, and not at 0"
    assert rows(output) == undisturbed
    assert scores(tmp_path / "cache") == scores(tmp_path / "calm")
    assert not unfinished_units(store), "what was saved goes when the scores are there"
