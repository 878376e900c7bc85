"""LDS within groups (within class): what is left of LDS there, which models to look at, and what more draws add.

`collapse`: LDS beside LDS within class, a line a method. `reference`: LDS against how much more data the model that a
method looks at has seen than the models asked about. `draws`: bif_gaussian's covariance as it fills up, BIF's chains
and EK-FAC's line beside it. bif_gaussian draws from K-FAC's own Gaussian, so that its odd part has kfac's line for its
limit; what its even part and BIF have beyond is of higher order, or what chains know beyond that Gaussian.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from bench.identity import file_slug
from bench.publish.plots import frame, lds
from bench.publish.plots.style import CONTROLS, INK, look, looks
from bench.records import DATAMODEL, Results, bars_of, over_seeds
from retrain.reference import FULL, SUBSET

SCHEMES = {"fixed": "any subset", "bernoulli": "any subset", "balanced": "class-balanced subsets"}
SOME = re.compile(r"(?P<whole>.*): (?P<draws>\d+) draws")
LINES = ("kfac", "shampoo", "gradsim")  # methods without draws
PART_LINES = {"odd part": (0, (4, 2)), "even part": (0, (1, 1.5))}


def one_of_each(found: pd.DataFrame) -> pd.DataFrame:
    """Of a method with several labels its own name, or else that with the most LDS within class."""
    found = found.assign(own=found["name"] == [look(method)["label"] for method in found["method"]])
    best = found.sort_values(["own", "value"], kind="stable").drop_duplicates("method", keep="last")
    return found[found["name"].isin(best["name"])]


# ---- LDS beside LDS within class ----


def draw_collapse(results: Results) -> Iterator[frame.Drawing]:
    rows = lds.settings_of_truth(results.rows[results.rows["group_name"].notna()])
    rows = rows[rows["reference"].isin([FULL, SUBSET]) & (rows["models"] == 1) & (rows["scheme"] != "balanced")]
    rows = rows[rows["method"] != DATAMODEL]
    for (ground, share, truth), group in rows.groupby(["ground", *lds.PLACES], sort=True):
        alphas = lds.two_alphas(group)
        group = group[group["alpha"].isin(alphas)]
        if group["method"].nunique() < 2:
            continue
        several = group["reference"].nunique() > 1
        by_alpha = {}
        for alpha in alphas:
            found = lds.front_looks(lds.points(group[group["alpha"] == alpha]), several)
            by_alpha[alpha] = pd.concat([one_of_each(own) for _, own in found.groupby("reference")])
        every = pd.concat(by_alpha.values())
        figure, axes = frame.panels(len(alphas), 3.4)
        for axis, (alpha, found) in zip(axes, by_alpha.items(), strict=True):
            axis.set_ylim(min(-0.03, every[["value", "lds"]].min().min() - 0.05), every["lds_high"].max() + 0.03)
            collapse_panel(axis, found)
            axis.set_title(f"each subset keeps {alpha:.0%}")
            axis.set_xlim(-0.15, 1.5 + 0.45 * len(alphas))  # with room for the names
        axes[0].set_ylabel("rank correlation")
        told = ["Within class: the classes' counts are taken out of both sides before ranking."]
        yield frame.finish_rows(
            group, figure, f"collapse-{ground}-of-{file_slug(f'{share:g}')}",
            "LDS, and what is left of it within class", [f"alpha_attribution {share:g}", str(truth)],
            lds.notes_of_points(group, every, told, results), names=lds.front_key(every.assign(ring=False), several),
        )  # fmt: skip


def collapse_panel(axis: Axes, found: pd.DataFrame) -> None:
    ends = []
    axis.plot((-0.15, 1), (0, 0), color=INK, linewidth=0.5, label="_zero")
    for one in found.to_dict("records"):
        shape = one["shape"]
        face = {"markerfacecolor": "white"} if one["hollow"] else {}
        axis.plot((0, 1), (one["lds"], one["value"]), **(shape | face))
        axis.vlines((0, 1), (one["lds_low"], one["low"]), (one["lds_high"], one["high"]), color=shape["color"], lw=0.6)
        told = "nothing" if one["alone"] else f"{one['value'] + 0.0:.2f}".replace("-0.00", "0.00")
        told = f"{shape['label']}{':' * one['alone']} {told}{one['fewer']}"
        ends.append((1.0, one["value"], told, shape["color"]))
    axis.set_xticks((0, 1), ("LDS", "within class"))
    axis.spines["bottom"].set_bounds(-0.15, 1)
    axis.grid(axis="x", visible=False)
    frame.name_lines(axis, ends, 2.6, 1.06)


# ---- LDS against how much more data the reference model has seen ----


def draw_reference(results: Results) -> Iterator[frame.Drawing]:
    rows = results.rows[results.rows["group_name"].notna()]
    for (question, share), group in rows.groupby(["question", "alpha_attribution"], sort=True):
        group = group[group["alpha"].isin(lds.two_alphas(group))]
        if group["reference"].nunique() < 2:
            continue
        places = sorted(group.groupby(["alpha", "scheme"]), key=lambda one: (one[0][0], list(SCHEMES).index(one[0][1])))
        figure, axes = frame.panels(len(places), 2.3, across=2)
        found = []
        for number, (axis, ((alpha, scheme), own)) in enumerate(zip(axes, places, strict=True)):
            found.append(reference_panel(axis, own))
            axis.set_title(f"{SCHEMES[scheme]}, keeping {alpha:.0%}")
            if not number % 2:
                axis.set_ylabel("LDS")
            if number // 2 == (len(axes) - 1) // 2:
                axis.set_xlabel("training examples of the model,\nover those of the models asked about")
        stem = f"reference-{file_slug(str(group['task'].iloc[0]))}-{question}-of-{file_slug(f'{share:g}')}"
        notes = lds.notes_of_points(group, pd.concat(found), [], results)
        about = [f"alpha_attribution {share:g}"]
        yield frame.finish_rows(group, figure, stem, "which model to look at", about, notes)


def reference_panel(axis: Axes, rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of one scheme and alpha: a line a method over the data of the one model, then what several models reach."""
    found = lds.points(rows)
    found = one_of_each(found[~found["method"].isin(CONTROLS) & (found["method"] != DATAMODEL)])
    axis.axhline(0, color=INK, linewidth=0.5)
    reach = math.log10(found["seen"].max() / found["seen"].min())
    aside = 0.28 * reach * (found["models"].max() > 1)  # where several models stand
    ends = []
    for (method, name), own in found.groupby(["method", "name"], sort=False):
        shape = look(name, method)
        one = own[own["models"] == 1].sort_values("seen")
        several = own[own["models"] > 1].sort_values("models").drop_duplicates("seen", keep="last")
        for some, away, line in ((one, 0.0, "-"), (several, aside, "none")):
            if len(some):
                x = away - np.log10(some["seen"])
                axis.plot(x, some["lds"], **{**shape, "linestyle": line})
                axis.vlines(x, some["lds_low"], some["lds_high"], color=shape["color"], linewidth=0.6)
        thin: dict[str, Any] = {"color": shape["color"], "linewidth": 0.6}
        for seen, both in own[own["seen"].isin(several["seen"])].sort_values("models").groupby("seen"):
            x = aside * (both["models"] > 1) - math.log10(seen)
            axis.plot(x, both["lds"], **thin, linestyle=":", label="_more")
        last = own.sort_values(["seen", "models"], ascending=[False, True]).iloc[-1]
        end = aside * (last["models"] > 1) - math.log10(last["seen"])
        ends.append((end, last["lds"], shape["label"], shape["color"]))
    ceiling, style = lds.CEILINGS["noise ceiling"]
    if math.isfinite(height := ceiling(rows)):
        axis.axhline(height, color=INK, label="_ceiling", **style)
        frame.label_line(axis, height, "noise ceiling", at=0.0)
    ticks = {-math.log10(seen): f"{seen:.3g}x" for seen in sorted(found["seen"].unique(), reverse=True)}
    for (seen, models), _ in found[found["models"] > 1].groupby(["seen", "models"]):
        ticks[aside - math.log10(seen)] = f"\n{models} models"
    axis.set_xticks(list(ticks), list(ticks.values()))
    right = -math.log10(found["seen"].min()) + aside
    axis.set_xlim(-math.log10(found["seen"].max()) - 0.07 * reach - 0.05, right + 0.8 * reach)
    axis.set_ylim(-0.05, 1.1)
    frame.name_lines(axis, ends, 1.6, right + 0.06 * reach)
    return found


# ---- LDS within class against draws ----


def draw_draws(results: Results) -> Iterator[frame.Drawing]:
    rows = lds.settings_of_truth(results.rows[results.rows["group_name"].notna()])
    rows = rows[rows["normalised"] & rows["lds_within_groups"].notna() & (rows["models"] == 1)]
    for (ground, share, truth), group in rows.groupby(["ground", *lds.PLACES], sort=True):
        curves = group[group["label"].str.match(SOME)]
        kinds = set(zip(curves["alpha"], curves["reference"]))
        places = sorted(kinds, key=lambda one: (one[0], one[1] == FULL, one[1]))
        if not places:
            continue
        # BIF of any record of the setting; what draws nothing, of the one with the curve.
        group = group[group["run_id"].isin(curves["run_id"]) | (group["method"] == "bif")]
        figure, axes = frame.panels(len(places[: frame.MOST_PANELS]), 3.0, across=2)
        labels = list[frame.Label]()
        for axis, (alpha, reference) in zip(axes, places):
            own = group[(group["alpha"] == alpha) & (group["reference"] == reference)]
            draws_panel(axis, own, results, labels)
            looked = f"{'the' if reference == FULL else 'a'} {reference} model"
            axis.set_title(f"alpha {alpha:g}, at {looked}")
            axis.set_xlabel("draws")
            frame.logarithmic(axis, "x")
        for axis in axes[::2]:
            axis.set_ylabel("LDS within class")
        told = (
            "Lines with bars: bif_gaussian by all its draws so far; dashed and dotted at its last: its odd and even "
            "part alone. BIF at its chains' draws together. Levels: methods that draw nothing."
        )
        seeds = ", ".join(map(str, sorted(map(int, group["seed"].unique()))))
        bars = bars_of(group.groupby(["label", "alpha"])["seed"].nunique())
        sizes = f"{group['num_subsets'].iloc[0]} subsets, {group['num_queries'].iloc[0]} queries, seeds {seeds}"
        counted = f"n: {sizes}; bars: {bars}."
        stem, names = file_slug(f"draws-{ground}-of-{share:g}-{truth}"[:150]), frame.handles_of(axes)
        yield frame.finish_rows(
            group, figure, stem, "what more draws add within class", ["train-normalised scores"],
            [told, f"{counted} {lds.records_of(group, results)}".strip()], ["normalised"],
            names[: frame.MOST_NAMES], labels,
        )  # fmt: skip


def draws_panel(axis: Axes, rows: pd.DataFrame, results: Results, labels: list[frame.Label]) -> None:
    """Of one alpha and reference."""
    known = rows.drop_duplicates("label").set_index("label")
    at = {label: over_seeds(own, "lds_within_groups") for label, own in rows.groupby("label")}
    wholes = sorted(label for label in at if known["method"][label] == "bif_gaussian" and ": " not in label)
    shapes = looks(("bif_gaussian", label) for label in wholes)
    for label, shape in shapes.items():
        last = draws_of(results, known["run_id"][label], label)
        some = {one: found for one in at if (found := SOME.fullmatch(one)) and found["whole"] == label}
        parts: list[Any] = [(int(found["draws"]), *at[one]) for one, found in some.items()]
        shape |= {"label": look("bif_gaussian")["label"]} if len(wholes) == 1 else {}
        frame.bars_at(axis, sorted([*parts, (last, *at[label])]), shape)
        for part, style in PART_LINES.items():
            if (one := f"{label}: {part}") in at:
                axis.plot((last / 3, last), [at[one][0]] * 2, color=shape["color"], linestyle=style, label="_part")
                labels.append(frame.Label(axis, last, at[one][0], part, shape["color"]))
    chains = dict[str, list[tuple[float, ...]]]()
    for label in at:
        method, run = known["method"][label], known["run_id"][label]
        if method == "bif" and (draws := draws_of(results, run, label)):
            own = "bif" if label.partition("@")[0] == "bif" else label
            chains.setdefault(own, []).append((draws, *at[label]))
        elif method in LINES:
            shape = look(label, method)
            axis.axhline(at[label][0], color=shape["color"], linewidth=0.9, label=look(method)["label"])
    for label, curve in chains.items():
        frame.bars_at(axis, sorted(curve), look(label, "bif"))


def draws_of(results: Results, run: str, label: str) -> int:
    """Of all chains together."""
    methods: list[dict[str, Any]] = results.records[run]["config"]["methods"]
    own = next((one for one in methods if one.get("label", one["name"]) == label), {})
    return int(own.get("draws", 0)) * int(own.get("chains", 1))
