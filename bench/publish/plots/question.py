"""LDS within groups (within class): what is left of LDS there, and which models a method should look at.

`collapse`: LDS beside LDS within class, a line a method. `reference`: LDS against how much more data the model that a
method looks at has seen than the models asked about.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

import bench.publish.plots.captions as words
from bench.identity import file_slug
from bench.publish.plots.frame import Drawing, finish, first_value, label_line, panel_grid
from bench.publish.plots.front import notes_of, points, two_alphas
from bench.publish.plots.lds import CEILINGS, PLACES
from bench.publish.plots.style import CONTROLS, INK, look
from bench.records import DATAMODEL, Results, ceiling_over_seeds
from retrain.reference import FULL

LARGE = 10  # points: a mark that stands for several models
APART = 0.13  # inches between two labels of lines


def one_of_each(found: pd.DataFrame) -> pd.DataFrame:
    """Of a method with several labels its own name, or else that with the most LDS within class."""
    found = found.assign(own=found["name"] == [look(method)["label"] for method in found["method"]])
    best = found.sort_values(["own", "value"], kind="stable").drop_duplicates("method", keep="last")
    return found[found["name"].isin(best["name"])]


def spread(values: Sequence[float], gap: float, floor: float, top: float) -> list[float]:
    """The same values, moved as little as they must be to stand `gap` apart, between the floor and the top."""
    order = np.argsort(values, kind="stable")
    steps = gap * np.arange(len(order))
    # Of values less their steps, the nearest that never fall: neighbours that would fall have their mean.
    pools: list[list[float]] = []
    for value in np.asarray(values, dtype=float)[order] - steps:
        pools.append([value])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    found = np.empty(len(order))
    highest = max(floor, top - steps[-1]) if len(steps) else floor
    found[order] = [min(max(float(np.mean(pool)), floor), highest) for pool in pools for _ in pool] + steps
    return found.tolist()


def name_lines(axis: Axes, ends: Sequence[tuple[float, str, str]], height: float, x: float, aside: float) -> None:
    """Words right of lines that end at (x, y), in their colours; with a thin line where they had to move.

    height: of the axis, in inches.
    """
    low, high = axis.get_ylim()
    gap = APART / height * (high - low)
    for (y, text, colour), at in zip(
        ends, spread([y for y, _, _ in ends], gap, low + gap / 2, high - gap / 2), strict=True
    ):
        axis.plot((x, x + aside), (y, at), color=colour, linewidth=0.4, label="_name", clip_on=False)
        axis.annotate(f" {text}", (x + aside, at), va="center", fontsize=6.5, color=colour, annotation_clip=False,
                      path_effects=[withStroke(linewidth=1.6, foreground="white")])  # fmt: skip


# ---- LDS beside LDS within class ----


def draw_collapse(results: Results) -> Iterator[Drawing]:
    rows = results.rows[results.rows["group_name"].notna()]
    rows = rows[(rows["reference"] == FULL) & (rows["models"] == 1) & (rows["scheme"] != "balanced")]
    for (ground, share, truth), group in rows.groupby(["ground", *PLACES], sort=True):
        alphas = two_alphas(group)
        group = group[group["alpha"].isin(alphas)]
        if group["method"].nunique() < 2:
            continue
        panels = {alpha: one_of_each(points(group[group["alpha"] == alpha])) for alpha in alphas}
        every = pd.concat(panels.values())
        figure, grid = panel_grid(1, len(alphas), 3.4)
        for axis, (alpha, found) in zip(grid[0], panels.items(), strict=True):
            axis.set_ylim(min(-0.03, every[["value", "lds"]].min().min() - 0.05), every["lds_high"].max() + 0.03)
            collapse_panel(axis, found)
            axis.set_title(f"each subset keeps {alpha:.0%}")
        grid[0, 0].set_ylabel("rank correlation")
        title = f"{first_value(group, 'description')}: LDS, and what is left of it within class"
        about = [first_value(group, "ground_words"), f"alpha_attribution {share:g}", str(truth)]
        notes = notes_of(
            group, every, ["Within class: the classes' counts are taken out of both sides before ranking."]
        )
        finish(figure, title, about, notes)
        caption = f"{title}; {', '.join(about)}. {' '.join(notes)}"
        stem = f"collapse-{ground}-of-{file_slug(f'{share:g}')}"
        yield Drawing(stem, title, caption, words.run_ids(group), figure, words.facts_of(group))


def collapse_panel(axis: Axes, found: pd.DataFrame) -> None:
    ends = []
    axis.plot((-0.15, 1), (0, 0), color=INK, linewidth=0.5, label="_zero")
    for one in found.to_dict("records"):
        shape = look(one["name"], one["method"])
        axis.plot((0, 1), (one["lds"], one["value"]), **shape)
        axis.vlines((0, 1), (one["lds_low"], one["low"]), (one["lds_high"], one["high"]), color=shape["color"], lw=0.6)
        told = "nothing" if one["alone"] else f"{one['value'] + 0.0:.2f}".replace("-0.00", "0.00")
        ends.append((one["value"], f"{shape['label']} {told}", shape["color"]))
    axis.set_xticks((0, 1), ("LDS", "within class"))
    axis.set_xlim(-0.15, 2.2)
    axis.spines["bottom"].set_bounds(-0.15, 1)
    axis.grid(axis="x", visible=False)
    name_lines(axis, ends, 2.6, 1.0, 0.06)


# ---- LDS against how much more data the reference model has seen ----

SCHEMES = {"fixed": "any subset", "bernoulli": "any subset", "balanced": "class-balanced subsets"}


def draw_reference(results: Results) -> Iterator[Drawing]:
    rows = results.rows[results.rows["group_name"].notna()]
    for (question, share), group in rows.groupby(["question", "alpha_attribution"], sort=True):
        schemes = [scheme for scheme in SCHEMES if scheme in set(group["scheme"])]
        alphas = two_alphas(group)
        same = ["series", "reference", "models", "normalised", "scheme", "alpha", "seed"]
        group = group[group["alpha"].isin(alphas)].drop_duplicates(same)  # of a seed that two records have, one
        if group["reference"].nunique() < 2:
            continue
        panels = []
        figure, grid = panel_grid(len(alphas), len(schemes), 2.3, share_y=True)
        for line, alpha in zip(grid, alphas, strict=True):
            for axis, scheme in zip(line, schemes, strict=True):
                own = group[(group["alpha"] == alpha) & (group["scheme"] == scheme)]
                if len(own):
                    panels.append(reference_panel(axis, own))
                axis.set_title(f"{SCHEMES[scheme]}, keeping {alpha:.0%}")
            line[0].set_ylabel("LDS")
        for axis in grid[-1]:
            axis.set_xlabel("training examples of the model looked at,\nover those of the models asked about")
        title = f"{first_value(group, 'description')}: which model to look at"
        about = [first_value(group, "ground_words"), f"alpha_attribution {share:g}"]
        several = f"Large: the mean over {group['models'].max()} models." if (group["models"] > 1).any() else ""
        notes = notes_of(group, pd.concat(panels), [several])
        finish(figure, title, about, notes)
        caption = f"LDS against how much more data the reference model has seen; {', '.join(about)}. {' '.join(notes)}"
        stem = f"reference-{file_slug(first_value(group, 'task'))}-{question}-of-{file_slug(f'{share:g}')}"
        yield Drawing(stem, title, caption, words.run_ids(group), figure, words.facts_of(group))


def reference_panel(axis: Axes, rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of one scheme and alpha: a line a method over the data of the one model; several models at their side."""
    found = points(rows)
    found = one_of_each(found[~found["method"].isin(CONTROLS) & (found["method"] != DATAMODEL)])
    axis.axhline(0, color=INK, linewidth=0.5)
    ends = []
    for (method, name), own in found.groupby(["method", "name"], sort=False):
        shape = look(name, method)
        one = own[own["models"] == 1].sort_values("seen")
        several = own[own["models"] > 1].sort_values("models").drop_duplicates("seen", keep="last")
        axis.plot(one["seen"], one["lds"], **shape)
        axis.vlines(one["seen"], one["lds_low"], one["lds_high"], color=shape["color"], linewidth=0.6)
        axis.plot(several["seen"], several["lds"], **{**shape, "linestyle": "none", "markersize": LARGE})
        ends.append((float(one["lds"].iloc[0]), shape["label"], shape["color"]))
    if math.isfinite(ceiling := ceiling_over_seeds(rows).ceiling):
        axis.axhline(ceiling, color=INK, label="_ceiling", **CEILINGS["noise ceiling"])
        label_line(axis, ceiling, "noise ceiling", at=0.0)
    ticks = sorted(found["seen"].unique())
    reach = ticks[-1] / ticks[0]
    axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{tick:.3g}x" for tick in ticks])
    axis.minorticks_off()
    # From the model that has seen most to those like the models asked about, where lines are named.
    axis.set_xlim(ticks[-1] * 1.3 * reach**0.05, ticks[0] / 1.3 / reach**0.75)
    axis.set_ylim(-0.05, 1.0)
    name_lines(axis, ends, 1.6, ticks[0], ticks[0] * (reach**-0.06 - 1))
    return found
