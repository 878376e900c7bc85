"""The last tables of the questions beside LDS: explained, no wider than a screen, nothing undefined passed over."""

import math
from types import SimpleNamespace
from typing import Any

from bench import tables
from bench.evaluations.agreement import show as show_agreement
from bench.evaluations.removal import change_cell, show_brittleness


def test_a_wide_table_becomes_several_with_the_first_column_each() -> None:
    header = ["method", *(f"column {k}" for k in range(20))]
    rows = [[f"row {i}", *(f"{i}.{k:03d}" for k in range(20))] for i in range(2)]
    text = tables.tables(header, rows, width=60)
    parts = text.split("\n\n")
    assert len(parts) > 1
    assert max(map(len, text.splitlines())) <= 60
    assert all(part.splitlines()[0].startswith("method") and "row 1" in part for part in parts)
    assert [text.count(f"1.{k:03d}") for k in range(20)] == [1] * 20
    assert tables.tables(header[:3], [row[:3] for row in rows]) == tables.table(header[:3], [row[:3] for row in rows])


def test_changes_have_signs_and_say_what_is_undefined() -> None:
    row: dict[str, Any] = {"value": 0.17, "ci_low": -0.081, "ci_high": 0.421, "num_undefined": 0}
    assert change_cell(row) == "+0.170 [-0.081, +0.421]"
    assert change_cell(row | {"num_undefined": 2}).endswith("(2 undefined)")
    assert change_cell(row | {"ci_low": math.nan, "ci_high": math.nan}) == "+0.170 [-, -]"


def test_what_never_flips_is_a_lower_bound_without_an_interval() -> None:
    row = {"label": "random", "value": 0.2, "ci_low": 0.2, "ci_high": 0.2, "num_queries": 3, "num_unflipped": 3}
    text = show_brittleness([row, row | {"label": "bif", "value": 0.03, "ci_high": 0.3, "num_unflipped": 0}])
    first, second = text.splitlines()[2:4]
    assert first.split() == ["bif", "3.00", "%", "[20.00,", "30.00]", "3", "of", "3"]
    assert second.split() == ["random", ">=", "20.00", "%", "-", "0", "of", "3"]


def test_agreement_has_no_negative_zero_and_no_interval_of_nan() -> None:
    place = {"seed": 1, "alpha_attribution": 1.0, "normalised": False, "label": "a", "against": "b"}
    cell = place | {"metric": "overlap", "at": 0.1, "size": 4, "value": -0.001, "ci_low": math.nan, "ci_high": math.nan}
    known = {"truth": "1 queries, 40 attributed examples", "task": SimpleNamespace(description="a task", protocol="p")}
    text = show_agreement(SimpleNamespace(detail={"cells": [cell]}, **known))  # type: ignore[arg-type]
    assert "no intervals: too few queries" in text
    assert "0.1 by chance" in text
    assert "-0.00" not in text
    assert "nan" not in text
