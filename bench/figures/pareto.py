"""What one gets for the seconds: LDS against cost, and what no other point beats on both.

`python -m bench.figures --only pareto`. A row of panels for each share of the training set, a panel for each alpha.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

import bench.figures.words as words
from bench.figures.drawing import (
    Drawing,
    frame,
    full_grids,
    logarithmic,
    names_in,
    series_shapes,
)
from bench.figures.lds import panels_by_seconds
from bench.figures.seconds import timed_rows
from bench.identity import file_slug
from bench.publish.plots.style import INK, QUIET, PaperSize
from bench.records import Results, bars_of, over_seeds

CONTROLS = ("random", "same_class", "repsim", "bm25")  # whom everybody should beat, at no cost


def draw_pareto(results: Results, size: PaperSize) -> Iterator[Drawing]:
    for ground, machine, everything in timed_rows(results.rows):
        for suffix, group in full_grids(everything, "alpha"):
            yield pareto_drawing(f"pareto-{ground}{suffix}-{file_slug(machine)}", machine, group, size)


def pareto_drawing(stem: str, machine: str, group: pd.DataFrame, size: PaperSize) -> Drawing:
    shapes = series_shapes(group)
    names = sum(map(len, names_in(shapes)))  # letters: a long legend needs the width even where one panel does not
    height = 1.9 if group.groupby(["alpha_attribution", "truth"]).ngroups == 1 else 1.5
    figure, axes, shown = panels_by_seconds(group, size, height, names > 60, "fit + score")
    for axis, rows in zip(axes, shown, strict=True):
        pareto_panel(axis, rows, shapes)
    bars = f"Bars: {bars_of(group.groupby(['alpha_attribution', 'truth', 'alpha', 'series', 'normalised']).size())}."
    description, about = words.first_value(group, "description"), words.first_value(group, "ground_words")
    title = f"{description}: LDS against seconds"
    dot: Any = {"marker": "o", "linestyle": "none", "color": QUIET}
    more = [
        (Line2D([], [], **dot), "filled: raw scores"),
        (Line2D([], [], **dot, markerfacecolor="none"), "hollow: train-normalised"),
        (Line2D([], [], color=INK, linewidth=0.7), "beaten by no other method on both axes"),
    ]
    notes = words.frame_notes(bars, group, ceiling=False)
    frame(figure, size, title, [about, machine], notes, axes, more, names_in(shapes))
    caption = (
        f"Cost and quality: LDS against seconds; {description}, {about}, on {machine}. Filled: raw scores; hollow: "
        f"train-normalised. {bars} The line joins what no other method beats on both axes, controls aside. "
        f"{words.sizes(group)} {words.settings_text(group)}"
    )
    facts = words.facts_of(group, [False, True])
    return Drawing(stem, title, caption, words.run_ids(group), figure, facts=facts)


def pareto_panel(axis: Axes, rows: pd.DataFrame, shapes: Mapping[str, dict[str, Any]]) -> None:
    """Rows of one truth and one alpha."""
    points = []
    axis.axhline(0, color=INK, linewidth=0.5, label="chance")
    # Settings that were tuned for normalised scores have no raw row, which would name them.
    named = set(rows.loc[~rows["normalised"].astype(bool), "series"])
    for (normalised, series), cell in rows.groupby(["normalised", "series"], sort=True):
        mean, low, high = over_seeds(cell)
        bars = [[max(0.0, mean - low)], [max(0.0, high - mean)]]
        seconds = max(float(cell["seconds"].median()), 1e-3)
        shape = shapes[str(series)] | {"linestyle": "none"}
        if normalised:
            shape |= {"markerfacecolor": "none"} | ({"label": "_"} if series in named else {})
        axis.errorbar(seconds, mean, yerr=bars, elinewidth=0.8, **shape)
        if cell["method"].iloc[0] not in CONTROLS:
            points.append((seconds, mean))
    front = pareto_front(points)
    if len(front) > 1:
        axis.plot(*np.array(front).T, color=INK, linewidth=0.7, zorder=0, drawstyle="steps-post")
    logarithmic(axis, "x")


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (seconds, score) points that no other is both cheaper and better than, by rising cost."""
    front: list[tuple[float, float]] = []
    for cost, score in sorted(points, key=lambda point: (point[0], -point[1])):
        if math.isfinite(score) and (not front or score > front[-1][1]):
            front.append((cost, score))
    return front
