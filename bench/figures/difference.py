"""Two settings of one method on one ground truth, and their paired difference.

`python -m bench.figures --only difference`: the paper's fig:absolute_difference_LDS_sweep. Above, the LDS under either
setting; below, the difference on the same subsets and queries with its interval: does the setting matter?
"""

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pandas as pd

import bench.figures.words as words
from bench.figures.drawing import ALPHA_ATTRIBUTION, ALPHA_RETRAIN, Drawing, frame, panel_grid
from bench.figures.lds import lds_panel
from bench.identity import file_slug, series_label
from bench.results import Results, bars_of, over_seeds
from bench.style import INK, PaperSize, looks


def draw_difference(results: Results, size: PaperSize) -> Iterator[Drawing]:
    for (ground, method, normalised), group in results.rows.groupby(["ground", "method", "normalised"], sort=True):
        for one, other in combinations(sorted(group["series"].unique()), 2):
            pairs = differences_between(results.pairs, str(ground), one, other, bool(normalised))
            if len(pairs):
                both = group[group["series"].isin([one, other])]
                name = series_label(str(method), str(method))
                parts = [ground, file_slug(str(method)), *(settings_slug(series, name) for series in (one, other))]
                parts.append("normalised" if normalised else "")
                stem = "-".join(["difference", *filter(None, parts)])
                yield _two_settings(stem, both, pairs, one, other, bool(normalised), size)


def settings_slug(series: str, name: str) -> str:
    """Of what a series is called beyond its method; nothing for the method as it usually is."""
    rest = series.removeprefix(name).strip(", ")
    return file_slug(rest, 40) if rest else ""


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


def _two_settings(
    stem: str, rows: pd.DataFrame, pairs: pd.DataFrame, one: str, other: str, normalised: bool, size: PaperSize
) -> Drawing:
    shapes = looks(list(zip(rows["method"], rows["series"])))
    compared = pairs[["alpha_attribution", "truth"]].drop_duplicates()
    rows = rows.merge(compared, on=["alpha_attribution", "truth"])
    places = list(rows.groupby(["alpha_attribution", "truth"], sort=True))
    figure, grid = panel_grid(2, len(places), size, 1.4, share_y="row")
    for column, ((share, truth), here) in enumerate(places):
        lds_panel(grid[0, column], here, shapes)
        grid[0, column].set_title(f"{ALPHA_ATTRIBUTION} = {share:g}", parse_math=True)
        axis = grid[1, column]
        axis.axhline(0, color=INK, linewidth=0.5)
        mine = pairs[(pairs["alpha_attribution"] == share) & (pairs["truth"] == truth)]
        points = [(alpha, *over_seeds(cell, "difference")) for alpha, cell in mine.groupby("alpha", sort=True)]
        x, y, low, high = np.array(points, dtype=float).T
        ends = [np.maximum(0, y - low), np.maximum(0, high - y)]
        axis.errorbar(x, y, yerr=ends, color=INK, marker="o", capsize=1.5, elinewidth=0.8, label="difference")
        axis.set_xticks(*[grid[0, column].get_xticks()], [f"{alpha:g}" for alpha in sorted(here["alpha"].unique())])
        axis.set_xlim(grid[0, column].get_xlim())
        axis.set_xlabel(ALPHA_RETRAIN, parse_math=True)
    grid[0, 0].set_ylabel("LDS")
    grid[1, 0].set_ylabel("difference")
    kind = words.kind_of_scores(normalised)
    description, about = words.first_value(rows, "description"), words.first_value(rows, "ground_words")
    title = f"{description}: {one} against {other}"
    below = f"Below: LDS of {one} minus LDS of {other}, paired over subsets and queries."
    bars = f"Bars: {bars_of(pairs.groupby(['alpha_attribution', 'truth', 'alpha']).size())}."
    notes = [below, *words.frame_notes(bars, rows)]
    frame(figure, size, title, [about, kind], notes, grid.ravel(), order=list(shapes))
    caption = (
        f"LDS of {kind} under two settings, and their paired difference; {description}, {about}. {below} {bars} "
        f"{words.ceiling_caption(rows)}{words.sizes(rows)} {words.settings_text(rows)}"
    )
    return Drawing(stem, title, caption, words.run_ids(rows, True), figure, facts=words.facts_of(rows, [normalised]))
