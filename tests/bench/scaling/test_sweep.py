"""bench.scaling at work on tiny models: ladders and rows, EK-FAC's parts, sweeps that outlive failures."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bench.scaling import __main__ as sweeps
from bench.scaling import point as points
from bench.scaling.point import EkfacPoint, choose_sizes
from bench.scaling.rows import asked_rows, make_rows, read_rows
from tests.helpers.scaling_laws import TINY, specification


def climb(seconds_of: Any, budget: float, target: int, first: int = 4, wanted: int = 0) -> tuple[list[int], float]:
    done: list[tuple[int, float]] = []
    for size in choose_sizes(first, target, lambda: done, lambda: budget - sum(s for _, s in done), wanted=wanted):
        done.append((size, seconds_of(size)))
    return [size for size, _ in done], sum(seconds for _, seconds in done)


def test_a_point_takes_the_whole_run_or_a_hundred_draws_if_they_fit_and_two_sizes_at_least_if_not() -> None:
    law = lambda size: 1 + 0.01 * size  # noqa: E731
    sizes, spent = climb(law, budget=60, target=2000)
    assert sizes[-1] == 2000
    assert spent <= 60
    sizes, spent = climb(law, budget=15, target=2000)
    assert sizes[-1] < 2000
    assert len(sizes) >= 3
    assert spent <= 15
    assert all(size % 4 == 0 for size in sizes)
    assert sizes == sorted(set(sizes))
    assert climb(law, budget=0.001, target=2000)[0] == [4, 8]
    assert climb(law, budget=60, target=4)[0] == [4]
    for budget, first, wanted, expected in (
        (60, 8, 100, [8, 100]),
        (2000, 8, 100, [8, 100, 2000]),
        (30, 8, 100, [8, 16, 24]),
        (30, 16, 16, [16]),  # no more than were wanted
    ):
        assert climb(lambda size: 0.5 * size, budget, 2000, first, wanted)[0] == expected


@pytest.fixture
def ekfac_spec(tmp_path: Path, scratch: Path) -> dict[str, Any]:
    return specification(
        "ekfac", configuration=asdict(TINY.with_layers(1)),
        fit_sets=[4, 8, 1_000_000], fit_examples=4, query_counts=[2, 6],
        budget_seconds=600.0, scratch=str(scratch), result=str(tmp_path / "result.json"),
    )  # fmt: skip


def measured_parts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts as they are measured."""
    seen: list[str] = []
    part = EkfacPoint.part

    def watch(self: EkfacPoint, kind: str, work: Any, problem: Any) -> dict[str, Any]:
        seen.append(kind)
        return part(self, kind, work, problem)

    monkeypatch.setattr(EkfacPoint, "part", watch)
    return seen


def test_a_point_of_ekfac_has_every_part_and_new_files_for_every_fitting_set(
    ekfac_spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user's run has: nothing of an earlier fitting set is there when the clock starts."""
    before: list[str] = []
    run = points.measured

    def look(work: Any, problem: Any) -> Any:
        if names:  # after the warm-up
            before.append(" ".join(path.name for path in problem.scratch.rglob("*.safetensors")))
        return run(work, problem)

    names = measured_parts(monkeypatch)
    monkeypatch.setattr(points, "measured", look)
    result = points.perform_point(ekfac_spec, time.monotonic())
    assert result.get("error") is None
    fit = ["covariance", "eigen", "lambda"]
    assert names == [*fit, "score", *fit, *["score"] * 4]
    (rung,) = result["rungs"]
    assert [point[:2] for point in rung["score_points"]] == [(8, 2), (4, 2), (8, 1), (4, 1), (8, 6)]
    assert not any(kind in files for kind, files in zip(fit, before[4:7], strict=True))
    assert "eigen" in before[4], "there was something to remove"
    assert not any("pairwise" in files for files in before[7:])
    rows = make_rows(ekfac_spec, result, None)
    assert [row["projected"] for row in rows] == [False, False, True, False]
    assert all(row["error"] is None for row in rows)
    assert rows[0]["disk_bytes"] == pytest.approx(rows[0]["factor_bytes"], rel=0.5)  # headers weigh much at this size
    assert (rows[0]["fit_sizes"], rows[2]["fit_examples"]) == ("4, 8", 1_000_000)


def test_slow_eigendecompositions_are_shared_and_fitting_sets_beyond_the_budget_projected(
    ekfac_spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ekfac_spec |= {"fit_sets": [4, 8, 12, 1_000_000]}
    monkeypatch.setattr(points, "REPEATED_SECONDS", 0.0)
    monkeypatch.setattr(EkfacPoint, "predicted_fit", lambda self, count: 1e9 if count > 8 else 0.0)
    seen = measured_parts(monkeypatch)
    result = points.perform_point(ekfac_spec, time.monotonic())
    assert [kind for kind in seen if kind != "score"] == ["covariance", "eigen", "lambda", "covariance", "lambda"]
    rows = make_rows(ekfac_spec, result, None)
    assert [row["projected"] for row in rows] == [False, False, True, True, False]
    assert rows[1]["shared_parts"] == "eigendecomposition and scores of 4 fitting sequences"
    assert rows[0]["shared_parts"] is None


def test_ekfac_is_refused_with_the_bytes_it_would_take(ekfac_spec: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(EkfacPoint, "free_disk", lambda self: 1000)
    rows = make_rows(ekfac_spec, points.perform_point(ekfac_spec, time.monotonic()), None)
    assert [(row["fit_examples"], row["queries"]) for row in rows] == asked_rows(ekfac_spec)
    assert rows[-1]["error"].startswith("refused: ")
    assert "1000 B" in rows[-1]["error"]
    assert rows[-1]["needed_disk_bytes"] == TINY.with_layers(1).factor_bytes(4)
    assert rows[-1]["needed_memory_bytes"] > 0


# ---- sweeps of two tiny models ----


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a sweep over two tiny models whose points run in this process."""
    for name, hidden in (("tiny-a", 16), ("tiny-b", 32)):
        (tmp_path / name).mkdir()
        shape = {
            "model_type": "gpt_neox", "hidden_size": hidden, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 2 * hidden, "vocab_size": 64, "max_position_embeddings": 64,
        }  # fmt: skip
        (tmp_path / name / "config.json").write_text(json.dumps(shape))
    monkeypatch.setattr(points, "matmul_peak", lambda device: 1e10)
    monkeypatch.setattr(sweeps, "measure_point", lambda spec, limit: points.perform_point(spec, time.monotonic()))
    return [
        "--model", str(tmp_path / "tiny-a"), str(tmp_path / "tiny-b"), "--train", "6", "--queries", "2",
        "--tokens", "8", "--device", "cpu", "--draws", "8", "--fit-examples", "4", "6",
        "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out"),
    ]  # fmt: skip


def rows_of(tmp_path: Path) -> list[dict[str, Any]]:
    return read_rows(tmp_path / "out" / "scaling.csv")


METHODS = "tests.helpers.bad_methods"
OUT_OF_MEMORY, DISK_FULL, FITTED = (f"{METHODS}:{name}" for name in ("OutOfMemory", "DiskFull", "Fitted"))


def test_two_folders_of_one_name_are_refused(tiny: list[str], refused: Callable[..., str]) -> None:
    """Their rows could not be told apart, and a merge would keep one of them."""
    first, second = Path(tiny[1]), Path(tiny[2])
    other = shutil.copytree(second, first.parent / "elsewhere" / first.name)
    assert "would have another model's name" in refused(sweeps.main, [*tiny[:2], str(other), *tiny[3:]])


def test_a_sweep_of_two_sizes_has_complete_rows_and_outlives_failures(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*tiny, "--methods", "bif", "ekfac", OUT_OF_MEMORY, DISK_FULL, "gradsim", FITTED]
    assert sweeps.main(arguments) == 0
    rows = rows_of(tmp_path)
    asked = product(("tiny-a", "tiny-b"), (("bif", None), ("ekfac", 4), ("ekfac", 6)))
    assert [(row["model"], (row["method"], row["fit_examples"])) for row in rows[:6]] == list(asked)
    assert [row["fit_examples"] for row in rows if row["method"] == FITTED] == [4, 6, 4, 6]
    reasons = {
        OUT_OF_MEMORY: "out of memory: OutOfMemoryError: CUDA",
        DISK_FULL: f"the disk is full at {tmp_path / 'cache'}",
    }
    for row in rows:
        assert row["run_id"]
        if row["method"] in reasons:
            assert row["error"].startswith(reasons[row["method"]])
            continue
        assert row["error"] is None
        assert row["projected"] is False
        for column in ("load_seconds", "score_seconds", "peak_memory_bytes", "host_peak_bytes", "weight_bytes"):
            assert row[column] > 0, (row["method"], column)
        assert row["weights"] == "random"
    assert all(row["eigen_seconds"] > 0 for row in rows if row["method"] == "ekfac")
    assert all(row["floor_ratio"] > 0 for row in rows if row["method"] == "bif")
    record = json.loads((tmp_path / "out" / "scaling.json").read_text())
    assert {"rows", "points", "versions", "command"} <= set(record)
    assert len(list((tmp_path / "out").iterdir())) == 2
    said = capsys.readouterr().out
    assert "the disk is full" in said
    assert max(map(len, said.splitlines()[: len(rows) + 2])) <= 100

    # The same command again measures only what failed, and gives the same rows; --merge makes them again.
    assert sweeps.main(arguments) == 0
    for old, new in zip(rows, rows_of(tmp_path), strict=True):
        assert (old["score_seconds"], old["error"]) == (new["score_seconds"], new["error"])
    again = tmp_path / "again"
    assert sweeps.main(["--merge", str(tmp_path / "out" / "scaling.json"), "--out", str(again / "out")]) == 0
    made, merged = ({(row["method"], row["score_seconds"]) for row in some} for some in (rows, rows_of(again)))
    assert merged == made


def test_an_interrupted_sweep_goes_on_where_it_was(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`kill` and a queue's end are SIGTERM: an ordinary exit, so that the point in progress is ended too."""
    measured: list[str] = []
    measure = sweeps.measure_point

    def until_stopped(spec: dict[str, Any], limit: float) -> dict[str, Any]:
        measured.append(spec["configuration"]["name"])
        if len(measured) == 2:
            raise KeyboardInterrupt
        return measure(spec, limit) if len(measured) != 3 else os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sweeps, "measure_point", until_stopped)
    arguments = [*tiny, "--methods", "gradsim"]
    assert sweeps.main(arguments) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert len(rows_of(tmp_path)) == 1
    with pytest.raises(SystemExit) as ended:
        sweeps.main(arguments)
    assert ended.value.code == 128 + signal.SIGTERM
    assert "the same command goes on" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert sweeps.main(arguments) == 0
    assert measured == ["tiny-a", "tiny-b", "tiny-b", "tiny-b"]
    assert len(rows_of(tmp_path)) == 2


def test_what_exceeds_the_budget_is_projected_and_flagged(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured_run = points.measured_run

    def by_law(watched: Any, problem: Any) -> Any:
        """The real run, with the seconds of a law: what a busy machine adds is no part of this test."""
        attribution, cost = measured_run(watched, problem)
        return attribution, {**cost, "fit_seconds": 0.0, "score_seconds": 0.5 + 0.4 * getattr(watched, "draws", 0)}

    monkeypatch.setattr(points, "measured_run", by_law)
    monkeypatch.setattr(points.Ticks, "median", lambda self: None)
    monkeypatch.setitem(sweeps.BUDGET_SECONDS, "cpu", 0.01)
    assert sweeps.main([*tiny, "--methods", "bif", "--draws", "4000"]) == 0
    for row in rows_of(tmp_path):
        assert row["projected"] is True
        assert row["projected_from"].startswith("8, 16 of 4000 draws")
        assert row["score_seconds"] == pytest.approx(0.5 + 0.1 * 4000)
        assert row["seconds_low"] < row["score_seconds"] < row["seconds_high"]
    assert "* projected" in capsys.readouterr().out


def test_few_sequences_and_few_draws_are_measured_too(tiny: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    """As many sequences as a warm-up has, whose vocabulary is smaller; fewer draws than two a chain."""
    monkeypatch.setattr(sweeps, "TIMED_DRAWS", 2)
    assert sweeps.main([*tiny, "--methods", "bif", "kfac", "--train", "8"]) == 0
    assert {row["error"] for row in rows_of(tmp_path)} == {None}


def test_a_point_killed_by_the_system_is_a_row_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """A real process, as every point has one."""
    spec = specification(
        f"{METHODS}:Killed", budget_seconds=60, scratch=str(tmp_path), result=str(tmp_path / "point.json"),
    )  # fmt: skip
    result = sweeps.measure_point(spec, limit=120)
    assert "signal 9" in result["error"]
    (row,) = make_rows(spec, result, None)
    assert row["error"] == result["error"]
