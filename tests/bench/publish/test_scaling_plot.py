"""The panels of the scaling figures, drawn from rows by known laws."""

from dataclasses import replace
from typing import Any

import matplotlib
import pandas as pd

from bench.publish.plots import style
from bench.publish.plots.scaling import (
    can_draw,
    draw_cheaper,
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
