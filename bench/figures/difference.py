"""What the settings of one method change: LDS under each of them, and the paired difference to published settings.

`python -m bench.figures --only difference` (paper: fig:absolute_difference_LDS_sweep). One figure for a method and a
ground: above, the LDS under every setting; below, each one's difference, on the same subsets and queries and with its
interval, to the settings that its paper or library comes with, or else to those that the method has by default.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

import bench.figures.words as words
from bench.figures.drawing import (
    ALPHA_ATTRIBUTION,
    ALPHA_RETRAIN,
    Drawing,
    frame,
    names_in,
    panel_grid,
    series_shapes,
)
from bench.figures.lds import SIDE_BY_SIDE, Shapes, lds_panel, panel_note, side_by_side
from bench.identity import file_slug
from bench.publish.plots.style import INK, PaperSize, look
from bench.records import Results, bars_of, over_seeds

PUBLISHED = ("-paper", "-library")  # how labels of published settings end
PANEL = 1.6  # inches that a panel needs: where there is no room, raw and train-normalised scores have a figure each


def draw_difference(results: Results, size: PaperSize) -> Iterator[Drawing]:
    for (ground, method), group in results.rows.groupby(["ground", "method"], sort=True):
        panels = list(_panels(results.pairs, str(ground), group))
        if not panels:
            continue
        stem = f"difference-{ground}-{file_slug(str(method))}"
        if len(panels) * PANEL * size.scale <= size.width:
            yield _figure(stem, str(method), panels, size)
            continue
        for normalised in (False, True):
            if own := [panel for panel in panels if panel["normalised"] == normalised]:
                yield _figure(f"{stem}{'-normalised' * normalised}", str(method), own, size)


def _panels(pairs: pd.DataFrame, ground: str, group: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """For each kind of scores, share and truth with two settings that one run has beside each other."""
    for (normalised, share, truth), rows in group.groupby(["normalised", "alpha_attribution", "truth"], sort=True):
        known = rows.drop_duplicates("series")
        if len(known) < 2:
            continue
        base = reference(known)
        others = {}
        for other in sorted(set(known["series"]) - {base}):
            found = differences_between(pairs, ground, other, base, bool(normalised))
            if len(found):
                found = found[(found["alpha_attribution"] == share) & (found["truth"] == truth)]
            if len(found):
                others[other] = found
        if others:
            kept = rows[rows["series"].isin([base, *others])]
            here = {"normalised": bool(normalised), "share": share, "rows": kept, "base": base, "others": others}
            yield here


def reference(known: pd.DataFrame) -> str:
    """Of rows, one a series: the published settings, else the method's own defaults, else the first by name."""

    def place(row: Any) -> tuple[bool, bool, str]:
        return (not str(row["label"]).endswith(PUBLISHED), row["label"] != row["method"], row["series"])

    return str(min((row for _, row in known.iterrows()), key=place)["series"])


def differences_between(pairs: pd.DataFrame, ground: str, one: str, other: str, normalised: bool) -> pd.DataFrame:
    """Rows of LDS of `one` minus LDS of `other`, whichever way round the runs have them."""
    if not len(pairs):
        return pairs
    here = pairs[(pairs["ground"] == ground) & (pairs["normalised"].astype(bool) == normalised)]
    straight = here[(here["series"] == one) & (here["against"] == other)]
    turned = here[(here["series"] == other) & (here["against"] == one)]
    swapped = turned.assign(
        difference=-turned["difference"],
        ci_low=-turned["ci_high"],
        ci_high=-turned["ci_low"],
        series=one,
        against=other,
    )
    found = pd.concat([straight, swapped]) if len(swapped) else straight
    return found.drop_duplicates(["truth", "alpha", "alpha_attribution", "seed"])


def _figure(stem: str, method: str, panels: list[dict[str, Any]], size: PaperSize) -> Drawing:
    rows = pd.concat([panel["rows"] for panel in panels])
    shapes = series_shapes(rows)
    figure, grid = panel_grid(2, len(panels), size, 1.4, share_y="row", wide=True)
    for (upper, lower), panel in zip(grid.T, panels, strict=True):
        lds_panel(upper, panel["rows"], shapes)
        kind = words.kind_of_scores(panel["normalised"])
        note = panel_note(panel["rows"], rows)
        upper.set_title(f"{kind}\n{ALPHA_ATTRIBUTION} = {panel['share']:g}{note}", parse_math=True)
        difference_panel(lower, panel["others"], shapes)
        lower.set_xticks(upper.get_xticks(), [text.get_text() for text in upper.get_xticklabels()])
        lower.set_xlim(upper.get_xlim())
        lower.set_xlabel(ALPHA_RETRAIN, parse_math=True)
    grid[0, 0].set_ylabel("LDS")
    grid[1, 0].set_ylabel("paired difference")
    bases = list(dict.fromkeys(panel["base"] for panel in panels))
    description, about = words.first_value(rows, "description"), words.first_value(rows, "ground_words")
    title = f"{description}: what the settings of {look(method, [method])['label']} change"
    below = f"Below: LDS minus that of {' or '.join(bases)}, paired over subsets and queries."
    counts = [found.groupby("alpha").size() for panel in panels for found in panel["others"].values()]
    bars = f"{SIDE_BY_SIDE} Bars: {bars_of(pd.concat(counts))}."
    scores = list(dict.fromkeys(words.kind_of_scores(panel["normalised"]) for panel in panels))
    notes = [below, *words.frame_notes(bars, rows)]
    frame(figure, size, title, [about, " and ".join(scores)], notes, grid.ravel(), order=names_in(shapes))
    caption = (
        f"LDS of {' and '.join(scores)} under {rows['series'].nunique()} settings of one method, and their paired "
        f"differences; {description}, {about}. {below} {bars} {words.ceiling_caption(rows)}{words.sizes(rows)} "
        f"{words.settings_text(rows)}"
    )
    kinds = sorted({panel["normalised"] for panel in panels})
    return Drawing(stem, title, caption, words.run_ids(rows, True), figure, facts=words.facts_of(rows, kinds))


def difference_panel(axis: Axes, others: dict[str, pd.DataFrame], shapes: Shapes) -> None:
    """Every other setting's difference to the reference, in the look that its LDS has above."""
    alphas = sorted({alpha for found in others.values() for alpha in found["alpha"]})
    beside = side_by_side(axis, alphas, len(others))
    axis.axhline(0, color=INK, linewidth=0.5)
    for (series, found), place in zip(others.items(), beside, strict=True):
        points = [(alpha, *over_seeds(cell, "difference")) for alpha, cell in found.groupby("alpha", sort=True)]
        x, y, low, high = np.array(points, dtype=float).T
        ends = [np.maximum(0, y - low), np.maximum(0, high - y)]
        axis.errorbar(x + place, y, yerr=ends, capsize=1.5, elinewidth=0.8, **shapes[series] | {"label": "_"})
    axis.grid(axis="x", visible=False)
