"""LDS within groups (within class): what is left of LDS there, the models a method looks at, and what it costs.

`collapse`: LDS beside LDS within class, a line a method. `reference`: LDS against how much more data the model that a
method looks at has seen than the models asked about. `front`: LDS within class against seconds, every method.
A method with both kinds of scores shows the one with more LDS within class.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

import bench.publish.plots.captions as words
from bench.identity import file_slug, series_label, without_models
from bench.publish.plots.cost import SHORTEST, pareto_front, timed_rows
from bench.publish.plots.frame import Drawing, Label, finish, first_value, label_line, panel_grid, seconds_axis
from bench.publish.plots.lds import CEILINGS, PLACES
from bench.publish.plots.style import CONTROLS, INK, look
from bench.records import DATAMODEL, WITHIN, Results, bars_of, ceiling_over_seeds, over_seeds, within_groups

INSIDE = WITHIN["lds"]
USUAL_ALPHA = 0.5  # the second alpha of a picture of two
AS_PAPER = (
    "bif-paper",
    "ekfac-library",
    "trak-library",
    "gradsim",
)  # labels of the paper's settings, at the full model
KINDS = "Raw or train-normalised scores, whichever has more LDS within class."
LEFT = 4.0  # times cheaper than the cheapest method: where controls that cost nothing stand
APART = 0.13  # inches between two labels of lines


def points(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a method, label, reference and number of models, over seeds; of one truth, share and alpha.

    A method that has an LDS and nothing within groups knows the groups alone: its LDS there is exactly 0.
    """
    alone = rows["lds"].notna() & rows[INSIDE].isna()
    columns = (INSIDE, WITHIN["ci_low"], WITHIN["ci_high"])
    rows = rows.assign(**{name: rows[name].where(~alone, 0.0) for name in columns}, alone=alone)
    names = [series_label(method, without_models(label)) for method, label in zip(rows["method"], rows["label"])]
    rows = rows.assign(name=names)
    keys = ["method", "name", "reference", "models"]
    means = rows.groupby([*keys, "normalised"])[INSIDE].mean().sort_values(kind="stable")
    kind = {key[:-1]: key[-1] for key in means.index}  # the last one is the best
    found = []
    for key, cell in rows.groupby(keys, sort=True):
        cell = cell[cell["normalised"] == kind[key]]
        one: dict[str, Any] = dict(zip(keys, key)) | {"label": cell["label"].iloc[0], "alone": cell["alone"].all()}
        one |= dict(zip(("lds", "lds_low", "lds_high"), over_seeds(cell)))
        one |= dict(zip(("within", "low", "high"), over_seeds(cell, INSIDE)))
        seconds = float(cell["seconds"].median())
        found.append({**one, "seconds": max(seconds, SHORTEST), "seen": seen(cell.iloc[0]), "seeds": len(cell)})
    return pd.DataFrame(found)


def seen(row: Any) -> float:
    """How many times as many examples the reference model was trained on as each model that is asked about."""
    share = {"full": row["alpha_attribution"] * row["alpha"], "attributed": row["alpha"]}.get(row["reference"], 1.0)
    return round(1 / share, 6)


def one_of_each(found: pd.DataFrame) -> pd.DataFrame:
    """Of a method with several labels its own name, or else that with the most LDS within class."""
    found = found.assign(own=found["name"] == [look(method)["label"] for method in found["method"]])
    best = found.sort_values(["own", "within"], kind="stable").drop_duplicates("method", keep="last")
    return found[found["name"].isin(best["name"])]


def two_alphas(rows: pd.DataFrame) -> list[float]:
    """The smallest, and the usual one or the largest below it."""
    alphas = sorted(rows["alpha"].unique())
    return sorted({alphas[0], max(alpha for alpha in alphas if alpha <= max(USUAL_ALPHA, alphas[0]))})


def known_rows(results: Results) -> pd.DataFrame:
    """Rows of tasks with groups."""
    rows = results.rows
    return rows[rows["group_name"].notna() & rows["lds"].notna()]


def ceiling_within(rows: pd.DataFrame) -> float:
    inside = within_groups(Results(folder=None, rows=rows)).rows  # type: ignore[arg-type]
    return ceiling_over_seeds(inside).value


def notes_of(rows: pd.DataFrame, more: Sequence[str]) -> list[str]:
    cells = rows.groupby(["ground", "alpha", "series", "normalised"])
    bars = f"Bars: {bars_of(cells.size())}."
    return [" ".join([*more, KINDS, bars, words.sizes(rows)]), words.settings_text(rows)]


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
    rows = known_rows(results)
    rows = rows[(rows["reference"] == "full") & (rows["models"] == 1) & (rows["scheme"] != "balanced")]
    for (ground, share, truth), group in rows.groupby(["ground", *PLACES], sort=True):
        alphas = two_alphas(group)
        group = group[group["alpha"].isin(alphas)]
        if group["method"].nunique() < 2:
            continue
        panels = {alpha: one_of_each(points(group[group["alpha"] == alpha])) for alpha in alphas}
        every = pd.concat(panels.values())
        figure, grid = panel_grid(1, len(alphas), 3.4)
        for axis, (alpha, found) in zip(grid[0], panels.items(), strict=True):
            axis.set_ylim(min(-0.03, every[["within", "lds"]].min().min() - 0.05), every["lds_high"].max() + 0.03)
            collapse_panel(axis, found)
            axis.set_title(f"each subset keeps {alpha:.0%}")
        grid[0, 0].set_ylabel("rank correlation")
        title = f"{first_value(group, 'description')}: LDS, and what is left of it within class"
        about = [first_value(group, "ground_words"), f"alpha_attribution {share:g}", str(truth)]
        notes = notes_of(group, ["Within class: the classes' counts are taken out of both sides before ranking."])
        finish(figure, title, about, notes)
        caption = f"{title}; {', '.join(about)}. {' '.join(notes)}"
        stem = f"collapse-{ground}-of-{file_slug(f'{share:g}')}"
        yield Drawing(stem, title, caption, words.run_ids(group), figure, words.facts_of(group))


def collapse_panel(axis: Axes, found: pd.DataFrame) -> None:
    ends = []
    axis.plot((-0.15, 1), (0, 0), color=INK, linewidth=0.5, label="_zero")
    for one in found.to_dict("records"):
        shape = look(one["name"], one["method"])
        axis.plot((0, 1), (one["lds"], one["within"]), **shape)
        axis.vlines((0, 1), (one["lds_low"], one["low"]), (one["lds_high"], one["high"]), color=shape["color"], lw=0.6)
        told = "nothing" if one["alone"] else f"{one['within'] + 0.0:.2f}".replace("-0.00", "0.00")
        ends.append((one["within"], f"{shape['label']} {told}", shape["color"]))
    axis.set_xticks((0, 1), ("LDS", "within class"))
    axis.set_xlim(-0.15, 2.2)
    axis.spines["bottom"].set_bounds(-0.15, 1)
    axis.grid(axis="x", visible=False)
    name_lines(axis, ends, 2.6, 1.0, 0.06)


# ---- LDS against how much more data the reference model has seen ----

SCHEMES = {"fixed": "any subset", "bernoulli": "any subset", "balanced": "class-balanced subsets"}


def draw_reference(results: Results) -> Iterator[Drawing]:
    rows = known_rows(results)
    for (question, share), group in rows.groupby(["question", "alpha_attribution"], sort=True):
        schemes = [scheme for scheme in SCHEMES if scheme in set(group["scheme"])]
        alphas = two_alphas(group)
        group = group[group["alpha"].isin(alphas)]
        if group["reference"].nunique() < 2:
            continue
        figure, grid = panel_grid(len(alphas), len(schemes), 2.3, share_y=True)
        for line, alpha in zip(grid, alphas, strict=True):
            for axis, scheme in zip(line, schemes, strict=True):
                own = group[(group["alpha"] == alpha) & (group["scheme"] == scheme)]
                if len(own):
                    reference_panel(axis, own)
                axis.set_title(f"{SCHEMES[scheme]}, keeping {alpha:.0%}")
            line[0].set_ylabel("LDS")
        for axis in grid[-1]:
            axis.set_xlabel("training examples of the model looked at,\nover those of the models asked about")
        title = f"{first_value(group, 'description')}: which model to look at"
        about = [first_value(group, "ground_words"), f"alpha_attribution {share:g}"]
        notes = notes_of(group, ["Hollow: the mean over eight models." if (group["models"] > 1).any() else ""])
        finish(figure, title, about, notes)
        caption = f"LDS against how much more data the reference model has seen; {', '.join(about)}. {' '.join(notes)}"
        stem = f"reference-{file_slug(first_value(group, 'task'))}-{question}-of-{file_slug(f'{share:g}')}"
        yield Drawing(stem, title, caption, words.run_ids(group), figure, words.facts_of(group))


def reference_panel(axis: Axes, rows: pd.DataFrame) -> None:
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
        axis.plot(several["seen"], several["lds"], **{**shape, "linestyle": "none", "markerfacecolor": "white"})
        ends.append((float(one["lds"].iloc[0]), shape["label"], shape["color"]))
    if math.isfinite(ceiling := ceiling_over_seeds(rows).value):
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


# ---- LDS within class against seconds: the front picture ----


def draw_front(results: Results) -> Iterator[Drawing]:
    for ground, machine, everything in timed_rows(known_rows(results)):
        for (share, _, alpha), rows in everything.groupby([*PLACES, "alpha"], sort=True):
            found = points(rows)
            if len(found) < 3:
                continue
            control = found["method"].isin(CONTROLS)
            edge = found[~control]["seconds"].min() / LEFT
            cheap = control & (found["seconds"] < edge)
            found["seconds"] = found["seconds"].where(~cheap, edge)
            figure, grid = panel_grid(1, 1, 4.0)
            labels = front_panel(grid[0, 0], found, ceiling_within(rows))
            title = f"{first_value(rows, 'description')}: LDS within class against seconds"
            about = [first_value(rows, "ground_words"), f"alpha {alpha:g}, alpha_attribution {share:g}", machine]
            told = ["Stairs: what no other method beats on both, controls aside. Ring: the paper's settings."]
            if found["reference"].nunique() > 1:
                told.append("Hollow: looks at the full model. Filled: at models like those asked about; x8: at eight.")
            told += ["Controls at the left edge take less time."] if cheap.any() else []
            notes = notes_of(rows, told)
            finish(figure, title, about, notes, labels=labels)
            caption = f"{title}; {', '.join(about)}. {' '.join(notes)}"
            alphas = f"-of-{file_slug(f'{share:g}')}-alpha-{file_slug(f'{alpha:g}')}"
            stem = f"front-{ground}{alphas}-{file_slug(machine)}"
            yield Drawing(stem, title, caption, words.run_ids(rows), figure, words.facts_of(rows))


def front_panel(axis: Axes, found: pd.DataFrame, ceiling: float) -> list[Label]:
    """A mark a method, reference and number of models; those of one label are joined, and named once, at the best."""
    axis.axhline(0, color=INK, linewidth=0.5)
    several = found["reference"].nunique() > 1
    labels, stairs = [], []
    for (method, name), own in found.groupby(["method", "name"], sort=False):
        shape = look(name, method)
        own = own.assign(full=own["reference"] == "full").sort_values(["full", "models"], ascending=[False, True])
        axis.plot(own["seconds"], own["within"], color=shape["color"], linewidth=0.7, alpha=0.6, label="_joined")
        axis.vlines(own["seconds"], own["low"], own["high"], color=shape["color"], linewidth=0.7)
        for one in own.to_dict("records"):
            hollow = several and one["full"] and method not in (*CONTROLS, DATAMODEL)
            face = {"markerfacecolor": "white"} if hollow else {}
            axis.plot(one["seconds"], one["within"], **{**shape, "linestyle": "none", **face})
            if one["models"] > 1:
                place = (one["seconds"], one["within"])
                axis.annotate(f"x{one['models']}", place, (4, -2), textcoords="offset points", va="top", fontsize=5.5)
            if one["full"] and one["label"] in AS_PAPER:
                ring: dict[str, Any] = {
                    "marker": "o",
                    "markersize": 9,
                    "markerfacecolor": "none",
                    "markeredgewidth": 0.7,
                }
                axis.plot(one["seconds"], one["within"], color=INK, linestyle="none", label="_paper", **ring)
            if method not in CONTROLS:
                stairs.append((one["seconds"], one["within"]))
        best = own.loc[own["within"].idxmax()]
        labels.append(Label(axis, best["seconds"], best["within"], shape["label"], shape["color"]))
    front = pareto_front(stairs)
    axis.plot(*np.array(front).T, color=INK, linewidth=0.6, zorder=0, drawstyle="steps-post", label="_front")
    if math.isfinite(ceiling):
        axis.axhline(ceiling, color=INK, label="_ceiling", **CEILINGS["noise ceiling"])
        label_line(axis, ceiling, "noise ceiling")
    axis.set_xlabel("time: fit, scores and, where it trains models to look at, their training")
    axis.set_ylabel("LDS within class")
    seconds_axis(axis, "x")
    return labels
