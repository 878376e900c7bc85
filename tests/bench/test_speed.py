"""bench.speed: the table it prints and the record it writes, on the smallest question there is."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import speed

SMALL = ["--task", "digits", "--device", "cpu", "--queries", "4", "--alpha-attribution", "0.02"]
# With every number given there is no pilot.
GIVEN = ("digits.epochs=1", "bif.draws=3", "bif.chains=1", "bif.gamma=1e4", "bif.n_beta=1000", "bif.step_size=1e-4")
PEAK = {"flops": 1e10, "dtype": "float32", "size": 64}
QUICK = [word for setting in GIVEN for word in ("--set", setting)]


@dataclass
class AttributionProblem:
    """As much of a problem as the clock looks at."""

    scratch: Path
    shared: dict[str, Any] = field(default_factory=dict)


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


@pytest.mark.parametrize(("method", "said"), [("efkac", "available: "), ("datamodel", "datamodel is skipped")])
def test_bad_arguments_are_one_line(method: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert speed.main([*SMALL, "--methods", method, "--cache", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command but for its methods, which come next."""
    monkeypatch.setattr("bench.scaling.point.matmul_peak", lambda device: PEAK)
    folders = ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]
    return [*SMALL, "--set", "digits.epochs=1", "--repeats", "1", *folders, "--methods"]


def test_a_method_that_fails_costs_its_own_row_alone(
    quick: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    diverges = "a=bif@step_size=1e3,draws=20,chains=1,gamma=1e4,n_beta=1000"
    assert speed.main([*quick, diverges]) == 1
    assert "python -m bench.speed: a failed: 0 of 1 bif chains are healthy" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())
    assert speed.main([*quick, "gradsim", diverges, "random"]) == 1
    said = capsys.readouterr()
    assert said.err.count("bench.speed: a failed: ") == 1
    assert "random" in said.out
    record = json.loads((tmp_path / "out" / "speed.json").read_text())
    assert [row["label"] for row in record["rows"]] == ["gradsim", "random"]
    assert list(record["failed"]) == ["a"]
    assert record["failed"]["a"].startswith("0 of 1 bif chains are healthy")


def test_another_questions_record_is_put_aside(
    quick: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert speed.main([*quick, "random"]) == 0
    first = json.loads((tmp_path / "out" / "speed.json").read_text())["run_id"]
    assert speed.main([*quick, "random"]) == 0
    assert "is kept as" not in capsys.readouterr().err, "the same question again"
    assert speed.main([*quick, "random", "gradsim"]) == 0
    aside = tmp_path / "out" / f"speed.{first}.json"
    assert f"another run's record was there and is kept as {aside}" in capsys.readouterr().err
    assert json.loads(aside.read_text())["run_id"] == first
    assert json.loads((tmp_path / "out" / "speed.json").read_text())["run_id"] != first


@pytest.mark.parametrize(("seconds", "taken"), [([3.0, 1.0], 1.0), ([3.0, 1.0, 2.0], 2.0), ([4.0, 1.0, 3.0, 2.0], 2.0)])
def test_the_median_of_an_even_number_of_runs_is_the_lower(
    seconds: list[float], taken: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = iter(seconds)
    scored = SimpleNamespace(scores=torch.zeros(1, 1), diagnostics={})
    monkeypatch.setattr("bench.scoring.warm_up", lambda *_: None)
    monkeypatch.setattr("bench.measure.measure", lambda *_: (scored, {"fit_seconds": next(costs), "score_seconds": 0}))
    variant = SimpleNamespace(method=SimpleNamespace(name="m", config={}), label="m", settings="")
    row, _ = speed.time_method(variant, AttributionProblem(tmp_path), len(seconds))
    assert (row["seconds"], row["fit_seconds"], row["all_seconds"]) == (taken, taken, sorted(seconds))


def test_a_long_label_stands_below_the_table_and_not_in_its_head() -> None:
    cost = {"fit_seconds": 1.0, "score_seconds": 1.0, "seconds": 2.0, "peak_memory_bytes": 2**20, "agrees": 1.0}
    known = {"settings": "", "num_train": 24, "num_queries": 4, "all_seconds": [2.0, 3.0]}
    draws = {"seconds_per_draw": 0.1, "floor_seconds": 0.1, "share_of_peak": 0.1}
    label = "bif@draws=20,chains=1"
    task = SimpleNamespace(description="digits")
    found = speed.Timings(SimpleNamespace(task=task), {**PEAK, "device": "CPU"})
    found.rows = [{**cost, **known, **draws, "method": "bif", "label": label}]
    title, *lines = speed.speed_table(found).splitlines()
    assert title.endswith("lower median of 2")
    assert max(map(len, lines)) <= 100
    assert f"relative: total s over that of {label}" in lines
