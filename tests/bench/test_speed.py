"""bench.speed: the table it prints and the record it writes, on the smallest question there is."""

import json
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import bench.scoring
from baselines.method import Method, Problem
from bench import speed
from bench.cli import lds_main
from bench.records import read_record
from bench.schema import RunRecord
from bench.speed import mean_correlation

SMALL = ["--task", "digits", "--device", "cpu", "--queries", "4", "--alpha-attribution", "0.02"]

# With every number given there is no pilot.
GIVEN = ("digits.epochs=1", "bif.draws=3", "bif.chains=1", "bif.gamma=1e4", "bif.n_beta=1000", "bif.step_size=1e-4")
QUICK = [word for setting in GIVEN for word in ("--set", setting)]


def test_methods_are_timed_and_bad_ones_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL, *QUICK, "--methods", "bif", "gradsim", "--cache", str(tmp_path / "cache")]
    assert speed.main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert "agrees" in capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "speed.json").read_text())
    bif, gradsim = record["rows"]
    assert (bif["num_train"], bif["num_queries"]) == (24, 4)
    assert bif["seconds"] == pytest.approx(bif["fit_seconds"] + bif["score_seconds"])
    assert (bif["agrees"], gradsim["label"]) == (pytest.approx(1.0), "gradsim")
    assert record["command"].startswith("python -m bench.speed --task digits")
    for method, said in (("efkac", "available: "), ("datamodel", "datamodel is skipped")):
        assert speed.main([*SMALL, "--methods", method, "--cache", str(tmp_path / "cache")]) == 2
        assert said in capsys.readouterr().err


def test_a_method_that_fails_costs_its_own_row_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = [*SMALL, "--set", "digits.epochs=1", "--repeats", "1", "--cache", str(tmp_path / "cache"), "--out"]
    quick += [str(tmp_path / "out"), "--methods"]
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


@pytest.mark.parametrize(("seconds", "taken"), [([3.0, 1.0], 1.0), ([3.0, 1.0, 2.0], 2.0), ([4.0, 1.0, 3.0, 2.0], 2.0)])
def test_the_median_of_an_even_number_of_runs_is_the_lower(
    seconds: list[float], taken: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = iter(seconds)
    scored = SimpleNamespace(scores=torch.zeros(1, 1), diagnostics={})
    monkeypatch.setattr("bench.scoring.warm_up", lambda *_: None)
    monkeypatch.setattr("bench.measure.measure", lambda *_: (scored, {"fit_seconds": next(costs), "score_seconds": 0}))
    variant = SimpleNamespace(method=SimpleNamespace(name="m", config={}), label="m", settings="")
    problem = make_dataclass("Problem", ["scratch", "shared"])(tmp_path, {})
    row, _ = speed.time_method(variant, problem, len(seconds))
    assert (row["seconds"], row["fit_seconds"], row["all_seconds"]) == (taken, taken, sorted(seconds))


def test_correlation_of_known_orders():
    first = np.array([[1.0, 5.0], [2.0, 4.0], [3.0, 3.0]])
    assert mean_correlation(first, first) == pytest.approx(1)
    assert mean_correlation(first, -first) == pytest.approx(-1)
    assert mean_correlation(first, np.array([[1.0, 5.0], [3.0, 4.0], [2.0, 3.0]])) == pytest.approx(0.75)


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods that are warmed up, on this device as on a GPU."""
    names: list[str] = []
    real = bench.scoring.warm_up

    def counted(method: Method, problem: Problem) -> None:
        real(method, problem)
        names.append(method.name)

    monkeypatch.setattr(bench.scoring, "warm_up", counted)
    monkeypatch.setattr(bench.scoring, "SLOW_AT_FIRST", {"cpu"})
    monkeypatch.setattr(bench.scoring, "_warm", set())
    return names


def scores_of(folder: Path, *methods: str) -> dict[str, float]:
    command = ["--task", "tests.helpers.planted:Planted", "--alpha", "0.5", "--subsets", "8", "--seeds", "1", "2"]
    command += ["--device", "cpu", "--cluster", "inline", "--cache", str(folder / "cache")]
    assert lds_main([*command, "--out", str(folder / "out"), "--methods", *methods]) == 0
    (path,) = (folder / "out").glob("*/run.json")
    rows = read_record(path, RunRecord)["rows"]
    return {f"{row['label']} {row['seed']} {row['normalised']}": row["lds"] for row in rows}


METHODS = ("bif@draws=20,step_size=0.004,gamma=1", "gradsim", "random")


def test_each_is_warmed_up_once_and_answers_the_same(
    tmp_path: Path, warmed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = scores_of(tmp_path / "warm", *METHODS)
    assert sorted(warmed) == ["bif", "gradsim"], "not once a seed, and not what does not gain by it"
    monkeypatch.setattr(bench.scoring, "SLOW_AT_FIRST", set())
    assert scores_of(tmp_path / "cold", *METHODS) == found
    assert sorted(warmed) == ["bif", "gradsim"]


def test_a_warm_up_that_fails_stops_nothing(tmp_path: Path, warmed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("too few examples")

    monkeypatch.setattr(bench.scoring, "measure", broken)
    assert scores_of(tmp_path, "gradsim")
    assert warmed == ["gradsim"]
