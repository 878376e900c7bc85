"""LDS against the number of base models that a method's scores are averaged over, and against what that costs.

`python -m bench.figures --only ensembles`, from rows of `bench.lds --checkpoints 1 2 4 8`: a curve a method, raw scores
or train-normalised ones, whichever it does better with.
"""

import json
from collections.abc import Iterator
from dataclasses import replace

import pandas as pd
from matplotlib.axes import Axes

import bench.figures.words as words
from bench.figures.drawing import Drawing, frame, logarithmic, names_in, panel_grid, series_shapes
from bench.figures.retraining import best_scores
from bench.figures.seconds import timed_rows
from bench.identity import file_slug, series_label
from bench.publish.plots.style import PaperSize
from bench.records import FEW, Results, bars_of, ceiling_over_seeds, over_seeds

AGAINST = (("models", "base models"), ("seconds", "seconds"))


def models_of(rows: pd.DataFrame) -> pd.Series:
    return pd.Series([int(json.loads(options).get("models", 1)) for options in rows["options"]], rows.index, dtype=int)


def without_ensembles(results: Results) -> Results:
    """For every other figure: a run with many of them is made of curves here, and would be a crowd there."""
    rows = results.rows
    counts = rows[models_of(rows) > 1].groupby("run_id")["series"].nunique()
    return replace(results, rows=rows[~rows["run_id"].isin(counts[counts > FEW].index)])


def draw_ensembles(results: Results, size: PaperSize) -> Iterator[Drawing]:
    for ground, machine, rows in timed_rows(results.rows):
        rows = best_scores(rows)
        rows = rows.assign(models=models_of(rows))
        runs = set(rows[rows["models"] > 1]["run_id"])
        own = rows[rows["run_id"].isin(runs) & (rows["method"] != "random")].copy()
        for place, group in own.groupby(["alpha_attribution", "truth", "alpha"], sort=True):
            if group["models"].nunique() > 1:
                yield _drawing(ground, machine, float(str(place[2])), group, size)


def _drawing(ground: str, machine: str, alpha: float, group: pd.DataFrame, size: PaperSize) -> Drawing:
    names = [_without_models(method, label) for method, label in zip(group["method"], group["label"])]
    group = group.assign(series=names)
    shapes = series_shapes(group)
    figure, grid = panel_grid(1, len(AGAINST), size, 2.2, wide=True)
    axes = list(grid.ravel())
    for axis, (column, name) in zip(axes, AGAINST, strict=True):
        for series, shape in shapes.items():
            _curve(axis, group[group["series"] == series], column, shape)
        ceiling = ceiling_over_seeds(group).value
        if ceiling == ceiling:
            axis.axhline(ceiling, color="black", linestyle="--", linewidth=0.9, label="noise ceiling")
        logarithmic(axis, "x", sorted(group["models"].unique()) if column == "models" else None)
        axis.set_xlabel(name)
    axes[0].set_ylabel("LDS")
    description, about = words.first_value(group, "description"), words.first_value(group, "ground_words")
    title = f"{description}: scores averaged over base models"
    bars = f"Bars: {bars_of(group.groupby(['series', 'models']).size())}."
    kinds = "Raw or train-normalised scores, whichever a method does better with. Seconds: fit, score, further models."
    settings = words.settings_text(group[group["models"] == 1])
    notes = [kinds, words.frame_notes(bars, group)[0], settings]
    share = float(group["alpha_attribution"].iloc[0])
    facts = [about, f"alpha {alpha:g}, alpha_attribution {share:g}", machine]
    frame(figure, size, title, facts, filter(None, notes), axes, (), names_in(shapes))
    caption = f"LDS against base models and against seconds; {', '.join(facts)}. {kinds} {bars} {settings}"
    stem = f"ensembles-{ground}-alpha-{file_slug(f'{alpha:g}')}-{file_slug(machine)}"
    return Drawing(stem, title, caption, words.run_ids(group), figure, facts=words.facts_of(group, [False, True]))


def _without_models(method: str, label: str) -> str:
    kept = [part for part in label.replace("@", ",").split(",") if not part.startswith("models=")]
    return series_label(method, "@".join(filter(None, (kept[0], ",".join(kept[1:])))))


def _curve(axis: Axes, rows: pd.DataFrame, column: str, shape: dict[str, object]) -> None:
    points = []
    for _, cell in rows.groupby("models", sort=True):
        mean, low, high = over_seeds(cell)
        points.append((float(cell[column].median()), mean, max(0.0, mean - low), max(0.0, high - mean)))
    places, means, lows, highs = zip(*points, strict=True)
    axis.errorbar(places, means, yerr=[lows, highs], elinewidth=0.7, **shape)  # type: ignore[arg-type]
