"""What retraining buys: LDS against seconds, with a curve over the number of retrains for every prior of the datamodel.

`python -m bench.figures --only retraining`. Other methods are points: a prior's curve leaves from its method's own, in
the same colour. Seconds are all of them, those of retraining included.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

import bench.figures.words as words
from baselines.support.nested import parts_of
from bench.figures.drawing import (
    Drawing,
    frame,
    full_grids,
    logarithmic,
    names_in,
    series_shapes,
)
from bench.figures.lds import CEILINGS, ceiling_called, panels_by_seconds
from bench.figures.seconds import timed_rows
from bench.identity import USUAL, file_slug
from bench.publish.plots.style import INK, PaperSize, look
from bench.records import DATAMODEL, Results, bars_of, over_seeds

NO_PRIOR = USUAL[DATAMODEL]["prior"]
ALONE = "retraining alone"


def draw_retraining(results: Results, size: PaperSize) -> Iterator[Drawing]:
    for ground, machine, rows in timed_rows(results.rows):
        for name in ("alpha", "truth"):
            rows = rows[rows[name].isin(set(rows[rows["method"] == DATAMODEL][name]))]
        for suffix, group in full_grids(best_scores(rows), "alpha"):
            yield retraining_drawing(f"retraining-{ground}{suffix}-{file_slug(machine)}", machine, group, size)


def retraining_drawing(stem: str, machine: str, group: pd.DataFrame, size: PaperSize) -> Drawing:
    curves = curves_of(group)
    others = group[group["method"] != DATAMODEL]
    points = series_shapes(others) if len(others) else {}
    figure, axes, shown = panels_by_seconds(group, size, 2.2, True, "all of them")
    for axis, rows in zip(axes, shown, strict=True):
        retraining_panel(axis, rows, points, curves)
    bars = f"Bars: {bars_of(group.groupby(['alpha_attribution', 'truth', 'alpha', 'series']).size())}."
    description, about = words.first_value(group, "description"), words.first_value(group, "ground_words")
    title = f"{description}: what retraining buys"
    counts = f"Retrains of the datamodel: {words.span(retrains_of(group[group['method'] == DATAMODEL]))}."
    kinds = "Raw or train-normalised scores, whichever a method does better with."
    settings = words.settings_text(others, prior_settings(group))
    notes = [f"{counts} {kinds}", words.frame_notes(bars, group)[0], settings]
    frame(figure, size, title, [about, machine], notes, axes, (), [*names_in(points), *curves])
    caption = (
        f"LDS against seconds, retraining included; {description}, {about}, on {machine}. Curves: the datamodel "
        f"over its number of retrains, one a prior. {counts} {kinds} {bars} "
        f"{words.ceiling_caption(group, by=['series'])}{words.sizes(group)} {settings}"
    )
    facts = words.facts_of(group, [False, True])
    return Drawing(stem, title, caption, words.run_ids(group, ceilings=True), figure, facts=facts)


def best_scores(rows: pd.DataFrame) -> pd.DataFrame:
    """Of every series the rows of the kind of scores with the higher mean LDS; raw where they are equal.

    A method that is tuned for each kind has a series of each under one label: the better of the two. Means are over
    the truths, alphas and seeds that have both.
    """
    both = (rows.groupby("series")["normalised"].transform("nunique") > 1).groupby(rows["label"]).transform("all")
    kept = [rows.iloc[:0]]
    for _, own in rows.groupby(rows["series"].where(both, rows["label"])):
        kinds = own.groupby(["truth", "alpha", "seed"])["normalised"].transform("nunique")
        means = own[kinds == kinds.max()].groupby(["series", "normalised"])["lds"].mean()
        series, normalised = max(means.index, key=lambda key: (means[key], not key[1]))
        kept.append(own[(own["series"] == series) & (own["normalised"] == normalised)])
    return pd.concat(kept).sort_index()


def retrains_of(rows: pd.DataFrame) -> pd.Series:
    return pd.Series([json.loads(options)["retrains"] for options in rows["options"]], index=rows.index)


def priors_of(own: pd.DataFrame) -> list[str]:
    return sorted({str(json.loads(options).get("prior", NO_PRIOR)) for options in own["options"]})


def prior_settings(group: pd.DataFrame) -> list[str]:
    """Every prior's once, however many rows learn from it; what else a curve has is in its name."""
    found = []
    for prior in priors_of(group[group["method"] == DATAMODEL]):
        method, options = parts_of(prior)
        told = ", ".join(f"{name}={value.removesuffix('.0')}" for name, value in options.items())
        found += [f"prior {look(method)['label']}: {told}"] if told else []
    return found


def curves_of(group: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Name -> look of every curve, in the colour of its prior's method, and its series in the order of retrains."""
    found: dict[str, dict[str, Any]] = {}
    own = group[group["method"] == DATAMODEL].drop_duplicates("series").assign(retrains=lambda rows: retrains_of(rows))
    priors = priors_of(own)
    for _, row in own.sort_values(["retrains", "series"]).iterrows():
        options = json.loads(row["options"])
        prior = str(options.pop("prior", NO_PRIOR))
        usual = {**USUAL[DATAMODEL], "retrains": options["retrains"]}
        apart = "".join(f", {name}={value}" for name, value in options.items() if usual.get(name) != value)
        method = prior.partition("+")[0]
        shape = look(DATAMODEL if prior == NO_PRIOR else method)
        name = ALONE if prior == NO_PRIOR else f"retraining, prior {shape['label']}"
        if sum(other.partition("+")[0] == method for other in priors) > 1:  # else the note below has its settings
            name += prior.removeprefix(method)
        name += apart
        shape = shape | {"label": name, "marker": "o", "linestyle": "--" if apart else "-", "series": []}
        found.setdefault(name, shape)["series"].append(row["series"])
    return found


def retraining_panel(
    axis: Axes, rows: pd.DataFrame, points: Mapping[str, dict[str, Any]], curves: Mapping[str, dict[str, Any]]
) -> None:
    """Rows of one truth and one alpha."""
    axis.axhline(0, color=INK, linewidth=0.5, label="chance")
    for name, shape in points.items():
        if len(cell := rows[rows["series"] == name]):
            _bars(axis, [cell], shape | {"linestyle": "none"})
    for shape in sorted(curves.values(), key=lambda one: len(one["series"])):  # no point upon a curve
        cells = [cell for name in shape["series"] if len(cell := rows[rows["series"] == name])]
        if cells:
            _bars(axis, cells, {name: value for name, value in shape.items() if name != "series"})
            if shape["label"] == ALONE:
                _counts(axis, cells)
    for label, style in CEILINGS.items():
        # Other methods' records may be of other seeds, or without enough subsets to know the linear ceiling.
        seen = rows if label == "noise ceiling" else rows[rows["method"] == DATAMODEL]
        if np.isfinite(height := ceiling_called(label, seen)):
            axis.axhline(height, color=INK, label=label, **style)
    logarithmic(axis, "x")


def _bars(axis: Axes, cells: list[pd.DataFrame], shape: Mapping[str, Any]) -> None:
    found = [(max(float(cell["seconds"].median()), 1e-3), *over_seeds(cell)) for cell in cells]
    x, mean, low, high = np.array(found, dtype=float).T
    axis.errorbar(x, mean, yerr=[np.maximum(0, mean - low), np.maximum(0, high - mean)], elinewidth=0.8, **shape)


def _counts(axis: Axes, cells: list[pd.DataFrame]) -> None:
    """How many retrains, beside each point."""
    for cell in cells:
        place = float(cell["seconds"].median()), float(cell["lds"].mean())
        count = json.loads(cell["options"].iloc[0])["retrains"]
        text = f"{count:,}" if isinstance(count, int) else str(count)
        axis.annotate(text, place, (4, -2), textcoords="offset points", va="top", fontsize="x-small", parse_math=False)
