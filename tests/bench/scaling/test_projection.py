"""bench.scaling's rows: projected along lines and held against what was measured, and merged from several sweeps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.scaling.__main__ import ROOT, main
from bench.scaling.rows import make_rows, merge_rows, read_rows
from bench.scaling.suite import draw_flops
from tests.helpers.scaling_laws import TINY, ekfac_rung, rung, specification


def one_row(spec: dict[str, Any], result: dict[str, Any], peak_flops: float | None = None) -> dict[str, Any]:
    (row,) = make_rows(spec, result, peak_flops)
    return row


def test_rows_are_projected_along_the_line_or_by_the_median_of_draws() -> None:
    spec = specification("bif")
    rungs = [rung(draws, 1 + 0.5 * draws) for draws in (4, 8, 16)]
    row = one_row(spec, {"rungs": rungs, "finished": True}, peak_flops=1e12)
    assert row["projected"]
    assert row["fit_seconds"] + row["score_seconds"] == pytest.approx(1001.0)
    assert row["seconds_low"] <= 1001.0 <= row["seconds_high"]
    assert row["projected_from"] == "4, 8, 16 of 2000 draws"
    assert row["seconds_per_draw"] == pytest.approx(9 / 16)
    flops = draw_flops(row["token_parameters"], 8, 2, 4, 12)
    assert row["floor_ratio"] == pytest.approx(9 / 16 / (flops / 1e12))
    whole = one_row(spec, {"rungs": [rung(4, 3.0), rung(2000, 900.0)]})
    assert (whole["projected"], whole["score_seconds"], whole["seconds_low"]) == (False, 900.0, None)
    one = one_row(spec, {"rungs": [rung(4, 3.0)], "stopped": "stopped after 5 s"})
    assert "needs two sizes" in one["error"]
    assert "too busy" in one_row(spec, {"rungs": [rung(4, 3.0), rung(8, 2.0)]})["error"]
    bent = [rung(draws, float(draws**2)) for draws in (4, 8, 16, 32)]
    assert "not linear" in one_row(spec, {"rungs": bent})["projected_from"]
    spec = specification("trak", train=8)
    rungs = [rung(0, 0.1 * n, fit=1.0, disk=100 + 20 * n) | {"size": {"train": n}} for n in (2, 4)]
    row = one_row(spec, {"rungs": rungs})
    assert (row["projected_from"], row["disk_bytes"], row["peak_memory_bytes"]) == ("2, 4 of 8 train", 260, 100)
    # Setups of 0.3 and 0.9 s would turn two totals into any line; the draws themselves agree.
    spec = specification("bif")
    rungs = [rung(8, 0.9 + 8 * 0.1, tick_seconds=0.1), rung(100, 0.3 + 100 * 0.102, tick_seconds=0.102)]
    row = one_row(spec, {"rungs": rungs})
    assert row["score_seconds"] == pytest.approx(0.3 + spec["draws"] * 0.102)
    assert row["seconds_low"] < row["score_seconds"] < row["seconds_high"]
    assert row["seconds_high"] / row["score_seconds"] - 1 == pytest.approx(0.05, abs=0.01)
    assert (row["projected"], row["timed_draws"]) == (True, 100)
    assert row["held_out"] == "100 draws from 8"
    assert row["held_out_error"] == pytest.approx((0.9 + 10.0) / 10.5 - 1)
    alone = one_row(spec, {"rungs": rungs[1:]})
    assert alone["score_seconds"] == row["score_seconds"], "a hundred draws say what a draw takes by themselves"
    apart = one_row(spec, {"rungs": [rung(8, 1.6, tick_seconds=0.2), rung(100, 5.0, tick_seconds=0.05)]})
    assert apart["seconds_low"] == 0.0, "no run takes less than nothing"


def fitted(count: int) -> float:
    """A block's covariance, eigendecomposition and lambda by the law of `ekfac_rung`."""
    return (1.0 + count) + 6.0 + (2.0 + 2 * count)


def test_ekfac_rows_are_measured_at_every_fitting_set_that_was_and_projected_beyond() -> None:
    layers = TINY.layers
    spec = specification("ekfac", fit_sets=[8, 16, 64, 1_000_000], query_counts=[2, 10])
    rows = make_rows(spec, {"rungs": [ekfac_rung(layers, (8, 16, 64))]}, None)
    assert [(row["fit_examples"], row["queries"]) for row in rows] == [
        (8, 2), (16, 2), (64, 2), (1_000_000, 2), (8, 10),
    ]  # fmt: skip
    for row in rows[:4]:
        assert row["fit_seconds"] == pytest.approx(layers * fitted(row["fit_examples"]))
        assert row["score_seconds"] == pytest.approx(0.1 * layers * 8 * 2)
        assert (row["lambda_base"], row["lambda_per_example"]) == (pytest.approx(2.0 * layers), pytest.approx(4.0))
        assert row["fit_seconds_per_example"] == pytest.approx(3.0 * layers)
    assert [row["projected"] for row in rows] == [False, False, False, True, True]
    assert rows[2]["held_out"] == "64 fitting sequences from 8, 16"
    assert rows[2]["held_out_error"] == pytest.approx(0, abs=1e-6)
    assert rows[3]["projected_from"] == "8, 16, 64 of 1000000 fitting sequences"
    assert rows[3]["seconds_low"] < rows[3]["fit_seconds"] + rows[3]["score_seconds"] < rows[3]["seconds_high"]
    assert rows[3]["shared_parts"] == "eigendecomposition and scores of 8 fitting sequences"
    assert rows[4]["score_seconds"] == pytest.approx(0.1 * layers * 8 * 10)
    assert rows[4]["projected_from"] == "1, 2 of 10 queries"


def test_ekfac_rows_are_lines_in_blocks_and_one_that_cannot_be_had_says_why() -> None:
    spec = specification("ekfac", fit_sets=[8, 1000])
    spec["configuration"]["layers"] = layers = 10
    rows = make_rows(spec, {"rungs": [ekfac_rung(blocks, (8, 16)) for blocks in (1, 2, 4)]}, None)
    assert all(row["projected"] for row in rows)
    assert [row["fit_seconds"] for row in rows] == pytest.approx([layers * fitted(8), layers * fitted(1000)])
    assert rows[0]["eigen_seconds"] == pytest.approx(6.0 * layers)
    assert rows[0]["score_per_pair"] == pytest.approx(0.1 * layers)
    assert rows[0]["disk_bytes"] == 50 * layers
    assert rows[1]["projected_from"] == "1, 2, 4 of 10 layers; 8, 16 of 1000 fitting sequences"
    (alone,) = make_rows(spec | {"fit_sets": [8]}, {"rungs": [ekfac_rung(1)]}, None)
    assert alone["error"] == "1 of 10 layers were measured, and a projection needs two depths"
    spec = specification("ekfac", query_counts=[2, 1800])
    result = {"rungs": [ekfac_rung(TINY.layers, points=False)], "error": "out of memory: 20 GiB"}
    first, second = make_rows(spec, result, None)
    assert not first["error"]
    assert second["error"] == "out of memory: 20 GiB: scores of 1800 queries were not measured"


def record_of(run_id: str, *measured: tuple[dict[str, Any], list[dict[str, Any]]], **changes: Any) -> dict[str, Any]:
    """A sweep's record: (specification, sizes) of each point."""
    points = [
        {"model": "tiny", "method": spec["method"], "spec": spec, "cost_code": "x", "run_id": run_id, "rungs": rungs}
        for spec, rungs in measured
    ]
    return {"run_id": run_id, "commit": f"c{run_id}", "versions": {}, "rows": [], "points": points, **changes}


def test_several_sweeps_are_merged_row_by_row(tmp_path: Path, refused: Callable[..., str]) -> None:
    """A row measured whole counts before a projected one, a hundred draws before eight, whatever the order."""
    few, many = ([rung(draws, 0.1 * draws, tick_seconds=0.1)] for draws in (8, 100))
    trak = [rung(0, 1.0), rung(0, 1.0)]
    shallow = (specification("ekfac", fit_sets=[8, 64]), [ekfac_rung(1), ekfac_rung(2, (8,))])
    whole = (specification("ekfac", fit_sets=[8, 16, 64]), [ekfac_rung(2, (8, 16))])
    records = [
        record_of("0", (specification("bif", timed_draws=8), few), shallow),
        record_of("1", (specification("bif"), many), whole),
        record_of("2", (specification("trak", options={"batch_size": 8}), trak)),
        record_of("3", (specification("trak", options={"batch_size": 1}), trak)),
        record_of("4", (specification("bif"), many), cost_code="y") | {"versions": {"torch": "9"}},
        record_of("5", (specification("bif", tokens=13), many)),
        {},
    ]
    paths = [str(tmp_path / f"{number}.json") for number in range(len(records))]
    for path, record in zip(paths, records):
        Path(path).write_text(json.dumps(record))
    out = ["--out", str(tmp_path / "out")]
    assert main(["--merge", *paths[:4], *out]) == 0
    rows = read_rows(tmp_path / "out" / "scaling.csv")
    assert [(row["method"], row["fit_examples"], row["run_id"]) for row in rows] == [
        ("bif", None, 1), ("ekfac", 8, 1), ("ekfac", 16, 1), ("ekfac", 64, 1), ("trak", None, 2),
    ]  # fmt: skip
    assert rows[0]["timed_draws"] == 100
    assert rows[3]["fit_sizes"] == "8, 16"
    merged = json.loads((tmp_path / "out" / "scaling.json").read_text())["merged"]
    assert [(one["run_id"], one["commit"]) for one in merged] == [(str(number), f"c{number}") for number in range(4)]
    for path, said in zip(paths[4:], ("versions", "bif's tokens", "no scaling.json"), strict=True):
        assert said in refused(main, ["--merge", paths[1], path, *out])


@pytest.mark.parametrize("turn", [1, -1])
def test_a_check_that_went_badly_outlives_the_run_it_was_of(turn: int) -> None:
    """16 from 4 and 8 is off by much in the first run; the second, fitted on more, takes its rows."""
    first, second = ekfac_rung(2, (4, 8, 16)), ekfac_rung(2, (8, 16, 64))
    first["fits"][2] |= {"lambda": 10 * first["fits"][2]["lambda"]}
    records = [
        record_of("run0", (specification("ekfac", fit_sets=[4, 8, 16]), [first])),
        record_of("run1", (specification("ekfac", fit_sets=[8, 16, 64]), [second])),
    ]
    rows = {row["fit_examples"]: row for row in merge_rows(records[::turn])}
    assert (rows[16]["run_id"], rows[16]["held_out"]) == ("run1", "16 fitting sequences from 4, 8")
    assert rows[16]["held_out_error"] < -0.5
    assert rows[64]["held_out_error"] == pytest.approx(0, abs=1e-6)


def test_a_run_that_was_made_twice_says_what_the_other_took_and_their_order_decides_nothing() -> None:
    """Of several others the furthest; a point that two sweeps took from one cache is no other."""
    for seconds, again in (((2.0, 2.5, 1.9), 2.5), ((2.0, 2.0), None)):
        points = [(specification("bif"), [rung(2000, score, tick_seconds=0.001)]) for score in seconds]
        (row,) = merge_rows([record_of(str(number), point) for number, point in enumerate(points)])
        assert row["again_seconds"] == again
    # On what was measured: the faster of two whole runs is the row; fewer blocks check a set only if it was run.
    record = json.loads((ROOT / "results/scaling/scaling.json").read_text())
    points = [point for point in record["points"] if point["method"] == "ekfac" and point["model"] in ("31m", "410m")]
    rows = merge_rows([{"points": points}])
    assert merge_rows([{"points": points[::-1]}]) == rows
    assert merge_rows([{"points": points[2:]}, {"points": points[:2]}]) == rows
    found = {(row["model"], row["fit_examples"], row["queries"]): row for row in rows}
    small, again = found["31m", 400, 18], found["31m", 400, 18]["again_seconds"]
    assert small["fit_seconds"] + small["score_seconds"] < again
    assert "fitting sequences from" in found["410m", 2000, 18]["held_out"]
    assert "layers from" in found["410m", 400, 18]["held_out"]
