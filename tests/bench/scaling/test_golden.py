"""What results/scaling gives is pinned: its rows from its points, estimates, crossovers, held-out checks, the tables.

A change that is meant to move these numbers rewrites tests/golden/scaling.json and scaling_table.md by hand.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bench.scaling.estimate import by_device, crossing_in, held_out
from bench.scaling.report import verdict_text
from bench.scaling.rows import merge_rows, read_rows, write_csv
from bench.scaling.suite import SUITE, Setting

ROOT = Path(__file__).resolve().parents[3]
COMMITTED = ROOT / "results" / "scaling"
GOLDEN: dict[str, Any] = json.loads((ROOT / "tests" / "golden" / "scaling.json").read_text())
DEVICE = "NVIDIA H200"
ESTIMATOR = by_device(read_rows(COMMITTED / "scaling.csv"))[DEVICE]
PAPER = Setting(train=400, queries=18, tokens=150, draws=2000, fit_examples=400)
LONGER = replace(PAPER, train=1000, tokens=512, draws=500, queries=50)


def test_the_committed_rows_are_made_again_from_the_committed_points(tmp_path: Path) -> None:
    """Every word and flag is the same; numbers to 12 digits, since linear algebra rounds differently by machine."""
    record = json.loads((COMMITTED / "scaling.json").read_text())
    write_csv(tmp_path / "scaling.csv", merge_rows([record]))
    made, committed = pd.read_csv(tmp_path / "scaling.csv"), pd.read_csv(COMMITTED / "scaling.csv")
    assert len(committed) == 82
    pd.testing.assert_frame_equal(made, committed, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", GOLDEN["estimates"])
def test_estimates(name: str) -> None:
    model, method, *rest = name.split()
    asked = LONGER if rest == ["longer"] else replace(PAPER, fit_examples=int(rest[0]), queries=int(rest[1]))
    one = ESTIMATOR.estimate(method, SUITE[model], asked)
    found = [one.seconds, one.seconds_low, one.seconds_high, one.peak_memory_bytes, one.disk_bytes]
    expected = [float("nan") if value is None else value for value in GOLDEN["estimates"][name]]
    assert found == pytest.approx(expected, rel=1e-8, nan_ok=True)


@pytest.mark.parametrize("name", GOLDEN["crossovers"])
def test_crossovers(name: str) -> None:
    model, count, axis = name.split()
    found = asdict(crossing_in(ESTIMATOR, SUITE[model], replace(PAPER, fit_examples=int(count)), axis))
    near = lambda value: pytest.approx(value, rel=1e-8) if isinstance(value, float) else value  # noqa: E731
    expected = {field: near(value) for field, value in GOLDEN["crossovers"][name].items()}
    expected["values"] = pytest.approx(expected["values"], rel=1e-8)
    assert {**found, "cheaper": list(found["cheaper"]), "values": list(found["values"])} == {"axis": axis, **expected}


def test_every_held_out_row_is_inside_its_interval_and_the_tables_are_printed_as_before() -> None:
    found = held_out(ESTIMATOR)
    assert all(one["inside"] for one in found)
    assert [sum(one["method"] == method for one in found) for method in ("bif", "ekfac")] == [16, 48]
    made = [[one[name] for name in ("model", "method", "fit_examples", "queries")] for one in found]
    assert made == [row[:4] for row in GOLDEN["held_out"]]
    assert [one["seconds_off"] for one in found] == pytest.approx([row[4] for row in GOLDEN["held_out"]], rel=1e-7)
    assert f"{verdict_text(DEVICE, ESTIMATOR)}\n" == (ROOT / "tests" / "golden" / "scaling_table.md").read_text()
