"""Seconds against the share of the training set that is attributed: `python -m bench.figures --only seconds`.

The paper's fig:timings_bif-vs-ekfac, with every method, fit and score apart. Seconds of different machines never share
an axis, and all are of runs that attribute several shares, so that one line is of one engine.
"""

from collections.abc import Iterator

import pandas as pd

import bench.figures.words as words
from bench.figures.drawing import ALPHA_ATTRIBUTION, Drawing, frame, logarithmic, names_in, panel_row, series_shapes
from bench.identity import file_slug, series_label
from bench.publish.plots.style import PaperSize
from bench.records import Results

SPANS = (("seconds", "fit + score"), ("fit_seconds", "fit"), ("score_seconds", "score"))
SHORTEST = 1e-3  # seconds: a part that takes less is no part of the method


def timed_rows(rows: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """(ground, machine, rows): seconds may be compared within each, and only there."""
    rows = rows[rows["seconds"].notna()].copy()
    # Scores from a cache carry the device they were computed on, which may not be the one that read them.
    rows["timed_on"] = [
        machine if device and str(machine).startswith(str(device)) else device
        for machine, device in zip(rows["machine"], rows["device"])
    ]
    for (ground, machine), group in rows.groupby(["ground", "timed_on"], sort=True):
        yield str(ground), str(machine), group


def draw_seconds(results: Results, size: PaperSize) -> Iterator[Drawing]:
    for ground, machine, group in timed_rows(results.timed):
        shares = group.groupby("run_id")["alpha_attribution"].transform("nunique")
        once = group[(group["method"] != "random") & (shares > 1)]
        once = once.drop_duplicates(["series", "alpha_attribution", "seed", "normalised"]).copy()
        if not len(once):
            continue
        # Tuned for raw and for normalised scores, a method is one line: its settings cost the same.
        once["series"] = [series_label(method, label) for method, label in zip(once["method"], once["label"])]
        shapes = series_shapes(once)
        figure, axes = panel_row(len(SPANS), size, 2.0)
        for axis, (column, name) in zip(axes, SPANS, strict=True):
            for series, shape in shapes.items():
                block = once[(once["series"] == series) & (once[column] > SHORTEST)]
                if len(block):
                    seconds = block.groupby("alpha_attribution")[column]
                    least = seconds.min()
                    bars = [0 * least, seconds.max() - least]
                    axis.errorbar(least.index, least, yerr=bars, capsize=1.5, elinewidth=0.8, **shape)
            axis.set_title(name)
            logarithmic(axis, "x", sorted(once["alpha_attribution"].unique()))
            logarithmic(axis, "y")
            axis.set_xlabel(ALPHA_ATTRIBUTION, parse_math=True)
        axes[0].set_ylabel("seconds")
        description, about = words.first_value(once, "description"), words.first_value(once, "ground_words")
        title = f"{description}: seconds of each method"
        what_text = (
            "The fastest of a method's runs (seeds; settings for raw and for normalised scores), bars to the slowest, "
            "which may have warmed the machine up; a part below 1 ms is not drawn."
        )
        counts = words.span(once.groupby(["series", "alpha_attribution"])["seed"].nunique())
        seeds = f"n: {counts} seed(s), {words.span(once['num_queries'])} queries."
        engine = "EK-FAC: fit and score are kronfluence's." if "ekfac" in set(once["method"]) else ""
        notes = [f"{what_text} {engine} {seeds}", words.settings_text(once)]
        frame(figure, size, title, [about, machine], notes, axes, order=names_in(shapes))
        caption = (
            f"Seconds of fitting and scoring against the share of the training set that is attributed; {description}, "
            f"{about}, on {machine}. {what_text} {engine} {seeds} {words.settings_text(once)}"
        )
        stem = f"seconds-{ground}-{file_slug(machine)}"
        yield Drawing(stem, title, caption, words.run_ids(once), figure, facts=words.facts_of(once))
