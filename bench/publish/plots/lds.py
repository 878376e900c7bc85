"""LDS against the share of data that models are retrained on (paper: fig:retraining).

A line a method, each seed by itself as a faint dot (fig:individual_LDS_scores).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import bench.publish.plots.captions as words
from bench.publish.plots.frame import (
    ALPHA_ATTRIBUTION,
    ALPHA_RETRAIN,
    MOST_NAMES,
    MOST_PANELS,
    Drawing,
    bars_at,
    finish,
    first_value,
    handles_of,
    panel_row,
)
from bench.publish.plots.style import FAINT, INK, looks
from bench.records import Results, bars_of, ceiling_over_seeds, linear_ceiling_over_seeds, over_seeds

Shapes = Mapping[str, dict[str, Any]]
BAND = 0.3  # of the way from one share to the next: at most as far as points of one share stand apart
PLACES = ["alpha_attribution", "truth"]
CEILINGS: dict[str, dict[str, Any]] = {
    "noise ceiling": {"linestyle": "--", "linewidth": 0.9},
    "linear ceiling": {"linestyle": (0, (2, 1.2)), "linewidth": 0.7},
}


def ceiling_called(label: str, cell: pd.DataFrame) -> float:
    return linear_ceiling_over_seeds(cell) if label == "linear ceiling" else ceiling_over_seeds(cell).ceiling


def series_shapes(rows: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """The look of every series; one with fewer seeds than another of them says so wherever it is named."""
    shapes = looks(zip(rows["method"], rows["series"]))
    seeds = rows.groupby("series")["seed"].nunique()
    for name, shape in shapes.items():
        if seeds[name] < seeds.max():
            shape["label"] = f"{name} ({seeds[name]} seed{'s' * bool(seeds[name] > 1)})"
    return shapes


# ---- LDS ----


def draw_lds(results: Results) -> Iterator[Drawing]:
    for (ground, normalised), group in results.rows.groupby(["ground", "normalised"], sort=True):
        if group["alpha"].nunique() < 2:  # no curve: its picture is the front one
            continue
        group = words.short_names(group)
        shapes = few_of(series_shapes(group), group)
        left_out = sorted(set(group["series"]) - set(shapes) - {"random"})
        group = group[group["series"].isin(shapes)]
        figure, axes = lines(group, shapes)
        bars = f"Bars: {bars_of(group.groupby([*PLACES, 'alpha', 'series']).size())}."
        if group["seed"].nunique() > 1:
            bars += " Faint dots: each seed."
        if left_out:
            bars += f" Not drawn: {', '.join(left_out)}."
        kind = words.kind_of_scores(bool(normalised))
        description, about = first_value(group, "description"), first_value(group, "ground_words")
        title = f"{description}: LDS of {kind}"
        names = handles_of(axes, [shape["label"] for shape in shapes.values()])
        notes = words.notes_of(bars, group)
        finish(figure, title, [about], notes, names)
        caption = f"{title} against the share of the attributed examples retrained on; {about}. {' '.join(notes)}"
        stem = f"lds-{ground}{'-normalised' if normalised else ''}"
        facts = words.facts_of(group, [bool(normalised)])
        yield Drawing(stem, title, caption, words.run_ids(group, ceilings=True), figure, facts)


def few_of(shapes: Shapes, rows: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """At most nine of them: the line at 0 stands for random, and settings without a name of their own go first."""
    method = dict(zip(rows["series"], rows["method"]))
    last = [name for name in shapes if method[name] == "random"]
    last += [name for name in shapes if ", " in name][::-1] + list(shapes)[::-1]
    dropped = set(list(dict.fromkeys(last))[: max(0, len(shapes) - MOST_NAMES)])
    return {name: shape for name, shape in shapes.items() if name not in dropped}


def lines(group: pd.DataFrame, shapes: Shapes) -> tuple[Figure, list[Axes]]:
    """A panel for each share that is attributed and each truth."""
    places = list(group.groupby(PLACES, sort=True))[:MOST_PANELS]
    figure, axes = panel_row(len(places), 2.0 if len(places) > 1 else 2.6)
    for axis, ((share, _), here) in zip(axes, places, strict=True):
        lds_panel(axis, here, shapes, axis is axes[0])
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


def lds_panel(axis: Axes, rows: pd.DataFrame, shapes: Shapes, named: bool) -> None:
    """LDS against alpha, one line a series, over however many seeds there are; rows of one truth.

    `named`: whether the ceiling says that it is one.
    """
    alphas = sorted(rows["alpha"].unique())
    gap = min(np.diff(alphas), default=0.2)
    axis.axhline(0, color=INK, linewidth=0.5)
    series = [name for name in shapes if name in set(rows["series"])]
    for name, place in zip(series, side_by_side(axis, alphas, len(series)), strict=True):
        own = rows[rows["series"] == name]
        points = [(alpha + place, *over_seeds(cell)) for alpha, cell in own.groupby("alpha", sort=True)]
        bars_at(axis, points, dict(shapes[name]) | {"capsize": 1.5})
        if own["seed"].nunique() > 1:
            dot: dict[str, Any] = {
                "marker": ".",
                "markersize": 2,
                "linestyle": "none",
                "alpha": 0.5,
                "markeredgewidth": 0,
            }
            axis.plot(own["alpha"] + place, own["lds"], color=shapes[name]["color"], label="_seeds", **dot)
    for label, style in CEILINGS.items():
        ceilings = [(alpha, ceiling_called(label, cell)) for alpha, cell in rows.groupby("alpha", sort=True)]
        known = np.array([pair for pair in ceilings if np.isfinite(pair[1])], dtype=float)
        if len(known):
            half = 0.4 * gap
            x, y = known.T if len(known) > 1 else (known[0, 0] + np.array([-half, half]), np.full(2, known[0, 1]))
            axis.plot(x, y, color=INK, label=f"_{label}", **style)
            if label == "noise ceiling" and named:
                alone = len(known) == 1
                place = (float(x.mean()) if alone else x[-1], y[-1])
                end: dict[str, Any] = {
                    "textcoords": "offset points",
                    "ha": "center" if alone else "right",
                    "va": "bottom",
                }
                axis.annotate(label, place, (0, 2), annotation_clip=False, fontsize=6, in_layout=False, **end)
                low, high = axis.get_ylim()
                axis.set_ylim(low, max(high, y[-1] + 0.1 * (high - low)))
    axis.set_xticks(alphas, [f"{alpha:g}" for alpha in alphas])
    axis.set_xlim(min(alphas) - 0.45 * gap, max(alphas) + 0.45 * gap)
    axis.grid(axis="x", visible=False)


def side_by_side(axis: Axes, alphas: Sequence[float], count: int) -> np.ndarray:
    """How far each of `count` points stands from its share, so that equal scores do not hide one another; its band."""
    width = min(np.diff(alphas), default=0.2) * min(BAND, 0.035 * count)
    for alpha in alphas:
        axis.axvspan(alpha - width / 2, alpha + width / 2, color=FAINT, alpha=0.35, linewidth=0, zorder=0)
    return width * (np.arange(count) - (count - 1) / 2) / max(1, count)
