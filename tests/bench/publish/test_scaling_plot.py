"""The panels of the scaling figures, drawn from rows by known laws."""

from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
import pandas as pd

from bench.publish.plots import style
from bench.publish.plots.scaling import (
    FIT_LINES,
    PANELS,
    blocks_of,
    can_draw,
    draw_cheaper,
    draw_panel,
    explain,
    usable,
)
from bench.scaling.estimate import PAPER_FITTED
from bench.scaling.suite import SUITE
from tests.helpers.scaling_laws import LAW, bif_law, ekfac_law, rows_by_law

SIZES = ("14m", "70m", "160m", "410m", "1.4b", "2.8b")


def test_who_is_cheaper_where_is_drawn_from_rows_alone() -> None:
    rows = pd.DataFrame(rows_by_law(SIZES))
    assert can_draw(rows)
    assert not can_draw(rows[rows["method"] == "bif"])
    assert not can_draw(rows.drop(columns="lambda_per_example"))
    settings: Any = {**matplotlib.rcParamsDefault, "backend": "agg", **style.RC}
    with matplotlib.rc_context(settings):
        figure = style.new_figure(style.WIDTH, 2.8)
        axes = list(figure.subplots(1, 2, sharey=True))
        said = draw_cheaper(axes, rows)
        figure.canvas.draw()
    at = replace(LAW, fit_examples=PAPER_FITTED)
    for count in (18, 1800):
        asked = replace(at, queries=count)
        ratio = ekfac_law(SUITE["2.8b"], asked) / bif_law(SUITE["2.8b"], asked)
        assert f"{ratio:,.0f} times as long" in said
    assert "Not run right of the dotted line: BIF, EK-FAC." in said, "both end at one size"
    assert "Run with that many: BIF at no size; EK-FAC at no size." in said
    assert [axis.get_title() for axis in axes] == ["18 queries", "1,800 queries"]
    assert axes[0].get_xscale() == axes[0].get_yscale() == "log"
    stars = [line for axis in axes for line in axis.lines if line.get_marker() == "*"]
    assert [tuple(float(v[0]) for v in line.get_data()) for line in stars] == [
        (SUITE["2.8b"].num_parameters, PAPER_FITTED)
    ] * 2


def test_each_fitting_set_has_a_line_of_its_own() -> None:
    rows = rows_by_law(SIZES)
    rows += [
        row | {"fit_examples": count, "fit_seconds": row["fit_seconds"] * count / 400, "projected": True}
        for row in rows if row["method"] == "ekfac" for count in FIT_LINES[1:]
    ]  # fmt: skip
    rows += [row | {"queries": 1800, "score_seconds": 1e9} for row in rows]
    rows.append(dict.fromkeys(rows[0]) | {"model": "12b", "method": "ekfac", "parameters": 1e10, "error": "refused: x"})
    frame = usable(pd.DataFrame(rows))
    assert (frame["queries"] == 18).all()
    assert [len(block) for _, block in blocks_of(frame, "ekfac", "seconds")] == [len(SIZES)] * 3
    assert len(blocks_of(frame, "ekfac", "peak_memory_bytes")) == 1
    axis = style.new_figure(3, 2).subplots()
    for column in PANELS:
        draw_panel(axis, frame, column)
    labels = axis.get_legend_handles_labels()[1]
    assert {"EK-FAC, fitted on 400", "EK-FAC, fitted on 1,000,000"} <= set(labels)
    said = " ".join(explain(frame, pd.DataFrame(rows)))
    assert "EK-FAC fitted on 400, 10,000, 1,000,000 sequences (the paper: 1,000,000)" in said
    assert "Without numbers: 12b ekfac: refused: x." in said


def test_what_fewer_sequences_would_write_is_hollow() -> None:
    row = rows_by_law(("14m",))[0] | {"method": "trak", "fit_examples": None, "depth": None, "disk_bytes": 6e6}
    for projected in (False, True):
        axis = style.new_figure(3, 2).subplots()
        draw_panel(axis, usable(pd.DataFrame([row | {"projected": projected}])), "disk_bytes")
        filled, hollow = [line for line in axis.lines if line.get_marker() != "None" and line.get_zorder() == 3]
        assert (len(np.asarray(filled.get_xdata())), len(np.asarray(hollow.get_xdata()))) == (1 - projected, projected)
