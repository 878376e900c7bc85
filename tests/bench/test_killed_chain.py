"""`python -m bench.lds` killed in the middle of a BIF chain: the same command goes on from what the chain had saved."""

import json
import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing import get_context, parent_process
from pathlib import Path

import pytest
from torch import Tensor

from baselines.bif.saving import Saver
from bench.cli import lds_main as main
from retrain.resume import ResumeState, unfinished_units
from retrain.store import Store

DRAWS, SAVED_AT, KILLED_AT = 60, 25, 40
MEASURED = ("fit_seconds", "score_seconds", "peak_memory_bytes", "run_id")


def words(folder: Path, cache: str) -> list[str]:
    return [
        "--task", "tests.helpers.planted:Planted", "--alpha", "0.5", "--subsets", "12", "--replicates", "1",
        "--methods", f"bif@chains=2,draws={DRAWS},step_size=1e-3,n_beta=20,gamma=5", "--device", "cpu", "--json",
        "--cluster", "inline", "--cache", str(folder / cache), "--out", str(folder / f"{cache}-runs"),
    ]  # fmt: skip


def scores(root: Path) -> dict[str, bytes]:
    (info,) = Store(root).entries("scores")
    return {name: array.tobytes() for name, array in Store(root).verified(info.kind, info.key).arrays.items()}


def test_a_chain_killed_after_a_save_goes_on_from_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saves once, and the first process kills itself some draws later; a fork, as importing torch takes seconds."""
    drawn: list[int] = []

    def progress(saver: Saver, name: str, taken: int, state: Callable[[], Mapping[str, Tensor]]) -> None:
        if name == "chain-0":
            drawn.append(taken)
            if taken == SAVED_AT:
                saver._save(name, state(), taken)
            if taken == KILLED_AT and parent_process() is not None:
                os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Saver, "progress", progress)
    killed = get_context("fork").Process(target=main, args=(words(tmp_path, "cache"),))
    killed.start()
    killed.join(600)
    assert killed.exitcode == -signal.SIGKILL
    store = Store(tmp_path / "cache")
    (left,) = [item for item in unfinished_units(store) if item.kind == "scores"]
    saved = ResumeState.of(store, left.kind, left.key).load("chain-0")
    assert saved is not None
    assert saved[1]["taken"] == SAVED_AT

    found = []
    for cache in ("cache", "calm"):
        assert main(words(tmp_path, cache)) == 0
        rows = json.loads(capsys.readouterr().out)
        found.append([{name: value for name, value in row.items() if name not in MEASURED} for row in rows])
    assert drawn == [*range(SAVED_AT + 1, DRAWS + 1), *range(1, DRAWS + 1)], "it began where it had saved, and not at 0"
    assert found[0] == found[1]
    assert scores(tmp_path / "cache") == scores(tmp_path / "calm")
    assert not unfinished_units(store), "what was saved goes when the scores are there"
