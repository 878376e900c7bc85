"""Methods are warmed up before they are timed, once a process, and what they answer is the same."""

import json
from pathlib import Path

import pytest

import bench.scoring
from baselines.method import Method, Problem
from bench.cli import lds_main as main


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
    assert main([*command, "--out", str(folder / "out"), "--methods", *methods]) == 0
    (path,) = (folder / "out").glob("*/run.json")
    rows = json.loads(path.read_text())["rows"]
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
