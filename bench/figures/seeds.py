"""Every seed by itself, a row of panels a seed: `python -m bench.figures --only seeds`.

The paper's fig:individual_LDS_scores.
"""

from collections.abc import Iterator

import pandas as pd

import bench.figures.words as words
from bench.figures.drawing import ALPHA_ATTRIBUTION, ALPHA_RETRAIN, Drawing, frame, full_grids, panel_grid
from bench.figures.lds import SIDE_BY_SIDE, lds_panel, panel_note
from bench.publish.plots.style import PaperSize, looks
from bench.records import Results


def draw_seeds(results: Results, size: PaperSize) -> Iterator[Drawing]:
    for (ground, normalised), everything in results.rows.groupby(["ground", "normalised"], sort=True):
        for suffix, group in full_grids(everything, "seed"):
            if group["seed"].nunique() > 1:
                yield seeds_drawing(f"seeds-{ground}{suffix}", bool(normalised), group, size)


def seeds_drawing(stem: str, normalised: bool, group: pd.DataFrame, size: PaperSize) -> Drawing:
    seeds = sorted(group["seed"].unique())
    shapes = looks(list(zip(group["method"], group["series"])))
    places = list(group.groupby(["alpha_attribution", "truth"], sort=True))
    figure, grid = panel_grid(len(seeds), len(places), size, 1.2)
    for column, ((share, _), everything) in enumerate(places):
        for row, seed in enumerate(seeds):
            axis = grid[row, column]
            lds_panel(axis, everything[everything["seed"] == seed], shapes)
            axis.tick_params(labelbottom=row == len(seeds) - 1)
            if column == 0:
                axis.set_ylabel(f"seed {seed}\nLDS")
        title = f"{ALPHA_ATTRIBUTION} = {share:g}{panel_note(everything, group)}"
        grid[0, column].set_title(title, parse_math=True)
        grid[-1, column].set_xlabel(ALPHA_RETRAIN, parse_math=True)
    kind = words.kind_of_scores(normalised)
    description, about = words.first_value(group, "description"), words.first_value(group, "ground_words")
    title = f"{description}: LDS of {kind}, seed by seed"
    bars = f"{SIDE_BY_SIDE} Bars: 95 % intervals."
    frame(figure, size, title, [about], words.frame_notes(bars, group, by=["seed"]), grid.ravel(), order=list(shapes))
    caption = (
        f"LDS of {kind}, every seed by itself; {description}, {about}. {bars} "
        f"{words.ceiling_caption(group, by=['seed'])}{words.sizes(group)} {words.settings_text(group)}"
    )
    facts = words.facts_of(group, [normalised])
    return Drawing(
        f"{stem}{'-normalised' if normalised else ''}",
        title,
        caption,
        words.run_ids(group, ceilings=True),
        figure,
        facts=facts,
    )
