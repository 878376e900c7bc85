"""LDS against the share of data that models are retrained on, raw or train-normalised, a line a method.

`python -m bench.figures --only lds lds-normalised` (paper: fig:retraining). Where there is one share only, the methods
stand below each other instead.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import bench.figures.words as words
from bench.figures.drawing import ALPHA_ATTRIBUTION, ALPHA_RETRAIN, Drawing, frame, panel_row, text_width
from bench.results import Results, bars_of, ceiling_over_seeds, linear_ceiling_over_seeds, over_seeds
from bench.style import INK, PaperSize, looks, new_figure

Shapes = Mapping[str, dict[str, Any]]


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
        shapes = looks(list(zip(group["method"], group["series"])))
        one_alpha = group["alpha"].nunique() == 1
        figure, axes = (dots if one_alpha else lines)(group, shapes, size)
        bars = f"Bars: {bars_of(group.groupby(['alpha_attribution', 'truth', 'alpha', 'series']).size())}."
        kind = words.kind_of_scores(normalised)
        description, about = words.first_value(group, "description"), words.first_value(group, "ground_words")
        title = f"{description}: LDS of {kind}"
        at = f"alpha_retrain {group['alpha'].iloc[0]:g}" if one_alpha else "against the share retrained on"
        frame(figure, size, title, [about, at], words.frame_notes(bars, group), axes, order=list(shapes))
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


def lds_panel(axis: Axes, rows: pd.DataFrame, shapes: Shapes) -> None:
    """LDS against alpha, one line a series, over however many seeds there are; rows of one truth."""
    alphas = sorted(rows["alpha"].unique())
    axis.axhline(0, color=INK, linewidth=0.5, label="chance")
    series = [name for name in shapes if name in set(rows["series"])]
    for position, name in enumerate(series):
        points = []
        for alpha, cell in rows[rows["series"] == name].groupby("alpha", sort=True):
            mean, low, high = over_seeds(cell)
            points.append((alpha, mean, max(0.0, mean - low), max(0.0, high - mean)))
        x, y, low, high = np.array(points, dtype=float).T
        # A little to the side of each other, so that equal scores do not hide one another.
        spread = 0.012 * (position - (len(series) - 1) / 2)
        axis.errorbar(x + spread, y, yerr=[low, high], capsize=1.5, elinewidth=0.8, **shapes[name])
    for label, style in CEILINGS.items():
        ceilings = [(alpha, ceiling_called(label, cell)) for alpha, cell in rows.groupby("alpha", sort=True)]
        known = np.array([pair for pair in ceilings if np.isfinite(pair[1])], dtype=float)
        if len(known):
            x, y = known.T if len(known) > 1 else (known[0, 0] + np.array([-0.06, 0.06]), np.full(2, known[0, 1]))
            axis.plot(x, y, color=INK, label=label, **style)
    axis.set_xticks(alphas, [f"{alpha:g}" for alpha in alphas])
    axis.set_xlim(min(alphas) - 0.08, max(alphas) + 0.08)


def dots(group: pd.DataFrame, shapes: Shapes, size: PaperSize) -> tuple[Figure, list[Axes]]:
    """One alpha: the series below each other, each named beside its point."""
    places = list(group.groupby(["alpha_attribution", "truth"], sort=True))
    names = [name for name in shapes if name in set(group["series"])]
    longest = max(text_width(name, size.points(7)) for name in names)
    narrow = len(places) == 1 and longest < 0.4 * size.column
    figure = new_figure(size.column if narrow else size.width, (0.55 + 0.19 * len(names)) * size.scale)
    axes = list(figure.subplots(1, len(places), sharey=True, squeeze=False)[0])
    for axis, ((share, _), here) in zip(axes, places, strict=True):
        axis.axvline(0, color=INK, linewidth=0.5, label="chance")
        for position, name in enumerate(names):
            cell = here[here["series"] == name]
            if len(cell):
                mean, low, high = over_seeds(cell)
                ends = [[max(0.0, mean - low)], [max(0.0, high - mean)]]
                shape = shapes[name] | {"linestyle": "none", "label": "_"}
                axis.errorbar(mean, position, xerr=ends, capsize=1.5, elinewidth=0.8, **shape)
        for label, style in CEILINGS.items():
            if np.isfinite(ceiling := ceiling_called(label, here)):
                axis.axvline(ceiling, color=INK, label=label, **style)
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.set_xlabel("LDS")
        axis.set_title(f"{ALPHA_ATTRIBUTION} = {share:g}{panel_note(here, group)}", parse_math=True)
    return figure, axes
