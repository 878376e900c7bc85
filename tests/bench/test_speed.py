"""bench.speed: the table it prints and the record it writes, on the smallest question there is."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import speed

SMALL = ["--task", "digits", "--device", "cpu", "--queries", "4", "--alpha-attribution", "0.02"]
# With every number given there is no pilot.
GIVEN = ("digits.epochs=1", "bif.draws=3", "bif.chains=1", "bif.gamma=1e4", "bif.n_beta=1000", "bif.step_size=1e-4")
PEAK = {"flops": 1e10, "dtype": "float32", "size": 64}
QUICK = [word for setting in GIVEN for word in ("--set", setting)]


def test_methods_are_timed_and_bif_is_held_against_its_floor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*SMALL, *QUICK, "--methods", "bif", "gradsim", "--cache", str(tmp_path / "cache")]
    assert speed.main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert "of peak" in capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "speed.json").read_text())
    bif, gradsim = record["rows"]
    assert (bif["num_train"], bif["num_queries"], bif["num_draws"]) == (24, 4, 3)
    assert bif["seconds"] == pytest.approx(bif["fit_seconds"] + bif["score_seconds"])
    assert 0 < bif["share_of_peak"] == pytest.approx(bif["floor_seconds"] / bif["score_seconds"])
    assert "share_of_peak" not in gradsim
    assert record["command"].startswith("python -m bench.speed --task digits")
    assert not list((tmp_path / "cache").glob("scratch-*")), "what a method wrote is removed"


def test_bad_arguments_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert speed.main([*SMALL, "--methods", "efkac", "--cache", str(tmp_path)]) == 2
    assert "available: " in capsys.readouterr().err


def test_what_was_timed_before_an_interrupt_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    time_method = speed.time_method

    def interrupted(variant: Any, *others: Any) -> Any:
        if variant.label == "bif":
            raise KeyboardInterrupt
        return time_method(variant, *others)

    monkeypatch.setattr(speed, "time_method", interrupted)
    monkeypatch.setattr("bench.scaling.measuring.matmul_peak", lambda device: PEAK)
    arguments = [*SMALL, *QUICK, "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out"), "--methods"]
    assert speed.main([*arguments, "gradsim", "bif", "random"]) == 130
    assert "interrupted; these were not timed: bif, random" in capsys.readouterr().err
    record = json.loads((tmp_path / "out" / "speed.json").read_text())
    assert ([row["label"] for row in record["rows"]], record["untimed"]) == (["gradsim"], ["bif", "random"])
    whole = tmp_path / "out" / "speed.json"
    whole.write_text("an earlier record")
    assert speed.main([*arguments, "gradsim", "bif"]) == 130
    assert whole.read_text() == "an earlier record"
    whole.unlink()
    assert speed.main([*arguments, "bif"]) == 130
    assert "interrupted; nothing was written" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())
