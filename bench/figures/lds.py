"""LDS against the share of data that models are retrained on, raw or train-normalised, a line a method.

`python -m bench.figures --only lds lds-normalised` (paper: fig:retraining). One or two shares make no curve: there the
methods stand below each other, a panel a share, each named beside its point.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import bench.figures.words as words
from bench.figures.drawing import (
    ALPHA_ATTRIBUTION,
    ALPHA_RETRAIN,
    Drawing,
    frame,
    names_in,
    panel_grid,
    panel_row,
    series_shapes,
    text_width,
)
from bench.publish.plots.style import FAINT, INK, QUIET, PaperSize, new_figure
from bench.records import Results, bars_of, ceiling_over_seeds, linear_ceiling_over_seeds, over_seeds

Shapes = Mapping[str, dict[str, Any]]
FEWEST_OF_A_CURVE = 3  # shares retrained on
BAND = 0.3  # of the way from one share to the next: at most as far as points of one share stand apart

SIDE_BY_SIDE = "Within a band, points of one share stand side by side."
CEILINGS: dict[str, dict[str, Any]] = {
    "noise ceiling": {"linestyle": "--", "linewidth": 0.9},
    "linear ceiling": {"linestyle": (0, (2, 1.2)), "linewidth": 0.7},
}


def ceiling_called(label: str, cell: pd.DataFrame) -> float:
    return linear_ceiling_over_seeds(cell) if label == "linear ceiling" else ceiling_over_seeds(cell).value


def draw_lds(results: Results, size: PaperSize) -> Iterator[Drawing]:
    yield from _curves(results, size, normalised=False)


def draw_lds_normalised(results: Results, size: PaperSize) -> Iterator[Drawing]:
    yield from _curves(results, size, normalised=True)


def _curves(results: Results, size: PaperSize, normalised: bool) -> Iterator[Drawing]:
    rows = results.rows[results.rows["normalised"].astype(bool) == normalised]
    for ground, group in rows.groupby("ground", sort=True):
        shapes = series_shapes(group)
        curves = group["alpha"].nunique() >= FEWEST_OF_A_CURVE
        figure, axes = (lines if curves else dots)(group, shapes, size)
        bars = f"Bars: {bars_of(group.groupby(['alpha_attribution', 'truth', 'alpha', 'series']).size())}."
        kind = words.kind_of_scores(normalised)
        description, about = words.first_value(group, "description"), words.first_value(group, "ground_words")
        title = f"{description}: LDS of {kind}"
        notes = words.frame_notes(f"{SIDE_BY_SIDE} {bars}" if curves else bars, group)
        frame(figure, size, title, [about], notes, axes, order=names_in(shapes))
        caption = (
            f"LDS of {kind} against the share of the attributed examples retrained on; {description}, {about}. {bars} "
            f"{words.ceiling_caption(group)}{words.sizes(group)} {words.settings_text(group)}"
        )
        stem = f"lds-{ground}{'-normalised' if normalised else ''}"
        facts = words.facts_of(group, [normalised])
        yield Drawing(stem, title, caption, words.run_ids(group, ceilings=True), figure, facts=facts)


def lines(group: pd.DataFrame, shapes: Shapes, size: PaperSize) -> tuple[Figure, list[Axes]]:
    """A panel for each share that is attributed and each truth."""
    places = list(group.groupby(["alpha_attribution", "truth"], sort=True))
    figure, axes = panel_row(len(places), size)
    for axis, ((share, _), here) in zip(axes, places, strict=True):
        lds_panel(axis, here, shapes)
        axis.set_title(f"{ALPHA_ATTRIBUTION} = {share:g}{panel_note(here, group)}", parse_math=True)
        axis.set_xlabel(ALPHA_RETRAIN, parse_math=True)
    axes[0].set_ylabel("LDS")
    return figure, axes


def panel_note(here: pd.DataFrame, group: pd.DataFrame) -> str:
    """What a panel has otherwise than another of its figure: seeds, and how its truth was measured."""
    notes = []
    if here["seed"].nunique() < group["seed"].nunique():
        notes.append(f"{here['seed'].nunique()} seed{'s' * (here['seed'].nunique() > 1)}")
    if group["truth"].nunique() > 1:
        replicates = words.span(here["num_replicates"])
        subsets = f"{words.span(here['num_subsets'])} subsets" if group["num_subsets"].nunique() > 1 else ""
        notes += [subsets, f"{replicates} replicate{'s' * (replicates != '1')}"]
    text = ", ".join(filter(None, notes))
    return f"\n({text})" if text else ""


def panels_by_seconds(
    group: pd.DataFrame, size: PaperSize, height: float, wide: bool, seconds: str
) -> tuple[Figure, list[Axes], list[pd.DataFrame]]:
    """A panel for each place (a row) and alpha (a column) of a full grid, with the rows that it shows."""
    places = list(group.groupby(["alpha_attribution", "truth"], sort=True))
    alphas = sorted(group["alpha"].unique())
    figure, grid = panel_grid(len(places), len(alphas), size, height, wide=wide)
    for line, ((share, _), here) in zip(grid, places, strict=True):
        line[0].set_ylabel(f"{ALPHA_ATTRIBUTION} = {share:g}{panel_note(here, group)}\nLDS", parse_math=True)
    for axis, alpha in zip(grid[0], alphas, strict=True):
        axis.set_title(f"{ALPHA_RETRAIN} = {alpha:g}", parse_math=True)
    for axis in grid[-1]:
        axis.set_xlabel(f"seconds ({seconds})")
    return figure, list(grid.ravel()), [here[here["alpha"] == alpha] for _, here in places for alpha in alphas]


def lds_panel(axis: Axes, rows: pd.DataFrame, shapes: Shapes) -> None:
    """LDS against alpha, one line a series, over however many seeds there are; rows of one truth."""
    alphas = sorted(rows["alpha"].unique())
    gap = min(np.diff(alphas), default=0.2)
    axis.axhline(0, color=INK, linewidth=0.5, label="chance")
    series = [name for name in shapes if name in set(rows["series"])]
    beside = side_by_side(axis, alphas, len(series))
    for name, place in zip(series, beside, strict=True):
        points = []
        for alpha, cell in rows[rows["series"] == name].groupby("alpha", sort=True):
            mean, low, high = over_seeds(cell)
            points.append((alpha, mean, max(0.0, mean - low), max(0.0, high - mean)))
        x, y, low, high = np.array(points, dtype=float).T
        axis.errorbar(x + place, y, yerr=[low, high], capsize=1.5, elinewidth=0.8, **shapes[name])
    for label, style in CEILINGS.items():
        ceilings = [(alpha, ceiling_called(label, cell)) for alpha, cell in rows.groupby("alpha", sort=True)]
        known = np.array([pair for pair in ceilings if np.isfinite(pair[1])], dtype=float)
        if len(known):
            half = 0.4 * gap
            x, y = known.T if len(known) > 1 else (known[0, 0] + np.array([-half, half]), np.full(2, known[0, 1]))
            axis.plot(x, y, color=INK, label=label, **style)
    axis.set_xticks(alphas, [f"{alpha:g}" for alpha in alphas])
    axis.set_xlim(min(alphas) - 0.45 * gap, max(alphas) + 0.45 * gap)
    axis.grid(axis="x", visible=False)


def side_by_side(axis: Axes, alphas: Sequence[float], count: int) -> np.ndarray:
    """How far each of `count` points stands from its share, so that equal scores do not hide one another; its band."""
    width = min(np.diff(alphas), default=0.2) * min(BAND, 0.035 * count)
    for alpha in alphas:
        axis.axvspan(alpha - width / 2, alpha + width / 2, color=FAINT, alpha=0.35, linewidth=0, zorder=0)
    return width * (np.arange(count) - (count - 1) / 2) / max(1, count)


def dots(group: pd.DataFrame, shapes: Shapes, size: PaperSize) -> tuple[Figure, list[Axes]]:
    """A panel for each share retrained on, a row of them for each share attributed; the series below each other."""
    places = list(group.groupby(["alpha_attribution", "truth"], sort=True))
    alphas = sorted(group["alpha"].unique())
    names = [name for name in shapes if name in set(group["series"])]
    longest = max(text_width(shapes[name]["label"], size.points(7)) for name in names)
    narrow = len(alphas) == 1 and longest < 0.4 * size.column
    named = [[name for name in names if name in set(here["series"])] for _, here in places]  # none without a point
    heights = [(0.7 + 0.19 * len(some)) * size.scale for some in named]
    figure = new_figure(size.column if narrow else size.width, sum(heights))
    grid = figure.subplots(len(places), len(alphas), sharey="row", squeeze=False, height_ratios=heights)
    for line, ((share, _), here), names in zip(grid, places, named, strict=True):
        for axis, alpha in zip(line, alphas, strict=True):
            cell = here[here["alpha"] == alpha]
            if len(cell):
                dots_panel(axis, cell, names, shapes)
            else:
                axis.text(0.5, 0.5, "not run", transform=axis.transAxes, ha="center", va="center", color=QUIET)
                axis.set_xticks([])
            at = f"{ALPHA_RETRAIN} = {alpha:g}\n{ALPHA_ATTRIBUTION} = {share:g}"
            axis.set_title(f"{at}{panel_note(here, group)}", parse_math=True)
            axis.set_yticks(range(len(names)), [shapes[name]["label"] for name in names])
            axis.set_ylim(len(names) - 0.5, -0.5)
            axis.tick_params(labelleft=axis is line[0])
    for axis in grid[-1]:
        axis.set_xlabel("LDS")
    return figure, list(grid.ravel())


def dots_panel(axis: Axes, rows: pd.DataFrame, names: list[str], shapes: Shapes) -> None:
    """Rows of one truth and one alpha."""
    axis.axvline(0, color=INK, linewidth=0.5, label="chance")
    for position, name in enumerate(names):
        cell = rows[rows["series"] == name]
        if len(cell):
            mean, low, high = over_seeds(cell)
            ends = [[max(0.0, mean - low)], [max(0.0, high - mean)]]
            shape = shapes[name] | {"linestyle": "none", "label": "_"}
            axis.errorbar(mean, position, xerr=ends, capsize=1.5, elinewidth=0.8, **shape)
    for label, style in CEILINGS.items():
        if np.isfinite(ceiling := ceiling_called(label, rows)):
            axis.axvline(ceiling, color=INK, label=label, **style)
