"""What one gets for the seconds: LDS against cost, what retraining and further models buy, and seconds themselves.

`cost` is LDS against seconds, of records without LDS within groups (see `front` in question.py). `retraining` has a
curve over the number of retrains for every prior of the datamodel, `ensembles` one over the number of base models that
scores are averaged over. A method has one point: raw or train-normalised scores, whichever it does better with.
`seconds` (paper: fig:timings_bif-vs-ekfac) is cost against the share that is attributed. Seconds of different machines
never share an axis.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

import bench.publish.plots.captions as words
from baselines.support.nested import parts_of
from bench.identity import USUAL, file_slug, series_label, without_models
from bench.publish.plots.frame import (
    ALPHA_ATTRIBUTION,
    ALPHA_RETRAIN,
    MOST_NAMES,
    Drawing,
    Label,
    bars_at,
    finish,
    first_value,
    handles_of,
    label_line,
    logarithmic,
    panel_row,
    seconds_axis,
)
from bench.publish.plots.lds import CEILINGS, PLACES, ceiling_called, series_shapes
from bench.publish.plots.style import CONTROLS, INK, look
from bench.records import DATAMODEL, Results, bars_of, over_seeds
from retrain.reference import FULL

KINDS_OF_SCORES = "Filled: raw scores; hollow: train-normalised; whichever a method does better with."
NO_PRIOR = USUAL[DATAMODEL]["prior"]
ALONE = "retraining alone"
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


@dataclass
class Curve:
    """A point or a line of a panel: its look and its series, by rising cost, each with words for its point."""

    shape: dict[str, Any]
    series: list[str] = field(default_factory=list)
    counts: list[str] = field(default_factory=list)


# ---- LDS against seconds ----


def draw_cost(results: Results) -> Iterator[Drawing]:
    """Of records without LDS within groups, whose picture is the front one."""
    rows = results.rows
    for ground, machine, everything in timed_rows(rows[rows["group_name"].isna()]):
        best = best_scores(everything)
        places = list(best.groupby(PLACES, sort=True))
        for (share, _), group in places:
            group = words.short_names(group)
            curves = [Curve(shape, [name]) for name, shape in series_shapes(group).items()]
            apart = f"-of-{file_slug(f'{share:g}')}" if len(places) > 1 else ""
            stem = f"cost-{ground}{apart}-{file_slug(machine)}"
            title = f"{first_value(group, 'description')}: LDS against seconds"
            front = "The line joins what no other method beats on both axes, controls aside."
            yield cost_drawing(stem, title, machine, group, curves, [front, KINDS_OF_SCORES])


def cost_drawing(
    stem: str,
    title: str,
    machine: str,
    group: pd.DataFrame,
    curves: Sequence[Curve],
    sentences: Sequence[str],
    more_settings: Sequence[str] = (),
) -> Drawing:
    """A panel for each alpha; one panel alone names its points, several have a legend."""
    alphas = sorted(group["alpha"].unique())[-4:]
    group = group[group["alpha"].isin(alphas)]
    labels: list[Label] = []
    named = len(alphas) == 1 or len(curves) > MOST_NAMES + 1
    figure, axes = panel_row(len(alphas), 2.9 if named else 2.0, across=1 if named else 2)
    for axis, alpha in zip(axes, alphas, strict=True):
        own = cost_panel(axis, group[group["alpha"] == alpha], curves)
        labels += own if named else [label for label in own if label.text in ("random", "labels alone")]
        if len(alphas) > 1:
            axis.set_title(f"{ALPHA_RETRAIN} = {alpha:g}", parse_math=True)
    for axis in axes[-1 if named else -2 :]:
        axis.set_xlabel("time")
    for axis in axes[:: 1 if named else 2]:
        axis.set_ylabel("LDS")
    share = float(group["alpha_attribution"].iloc[0])
    alpha_words = f"alpha {alphas[0]:g}, " if len(alphas) == 1 else ""
    about = [first_value(group, "ground_words"), f"{alpha_words}alpha_attribution {share:g}", machine]
    bars = f"Bars: {bars_of(group.groupby(['alpha', 'series']).size())}."
    others = group[group["method"] != DATAMODEL]
    settings = words.settings_text(others if len(others) else group, more_settings)
    if group["label"].str.endswith("-paper").any():
        sentences = [*sentences, "Ring: the paper's settings."]
    notes = [" ".join(filter(None, [*sentences, bars, words.sizes(group)])), settings]
    names = [] if named else handles_of(axes, [curve.shape["label"] for curve in curves])
    names = [(handle, name) for handle, name in names if name not in {label.text for label in labels}]
    finish(figure, title, about, notes, names, labels)
    caption = f"{title}; {', '.join(about)}. {' '.join(notes)}"
    return Drawing(stem, title, caption, words.run_ids(group, True), figure, words.facts_of(group, [False, True]))


def cost_panel(axis: Axes, rows: pd.DataFrame, curves: Sequence[Curve]) -> list[Label]:
    """Rows of one truth and one alpha; the words for its points."""
    if not all(curve.counts for curve in curves):  # curves alone are compared with each other, far from 0
        axis.axhline(0, color=INK, linewidth=0.5)
    labels, points = [], []
    for curve in curves:
        found, counts, hollow = [], [], False
        for name, count in zip(curve.series, curve.counts or [""] * len(curve.series), strict=True):
            if len(cell := rows[rows["series"] == name]):
                found.append((max(float(cell["seconds"].median()), SHORTEST), *over_seeds(cell)))
                counts.append(count)
                hollow = hollow or bool(cell["normalised"].iloc[0])
                if str(cell["label"].iloc[0]).endswith("-paper"):
                    ring: dict[str, Any] = {
                        "marker": "o",
                        "markersize": 9,
                        "markerfacecolor": "none",
                        "markeredgewidth": 0.7,
                    }
                    axis.plot(*found[-1][:2], color=INK, linestyle="none", label="_paper", **ring)
                if cell["method"].iloc[0] not in (*CONTROLS, DATAMODEL):
                    points.append(found[-1][:2])
        if not found:
            continue
        line = {"linestyle": "-" if len(found) > 1 else "none"} | ({"markerfacecolor": "white"} if hollow else {})
        bars_at(axis, found, curve.shape | line)
        labels.append(Label(axis, *found[-1][:2], curve.shape["label"], curve.shape["color"]))
        for place, count in zip(found, counts, strict=True):
            if count:
                axis.annotate(count, place[:2], (4, -2), textcoords="offset points", va="top", fontsize=5.5)
    front = pareto_front(points)
    if len(front) > 1 and not any(len(curve.series) > 1 for curve in curves):
        axis.plot(*np.array(front).T, color=INK, linewidth=0.6, zorder=0, drawstyle="steps-post", label="_front")
    # Other methods' records may be of other seeds, or without enough subsets to know the linear ceiling.
    retrained = rows[rows["method"] == DATAMODEL]
    for label, style in CEILINGS.items():
        seen = rows if label == "noise ceiling" else retrained
        if len(retrained) and np.isfinite(height := ceiling_called(label, seen)):
            axis.axhline(height, color=INK, label=f"_{label}", **style)
            if label == "noise ceiling":
                label_line(axis, height, label)
    seconds_axis(axis, "x")
    return labels


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (seconds, score) points that no other is both cheaper and better than, by rising cost."""
    front: list[tuple[float, float]] = []
    for cost, score in sorted(points, key=lambda point: (point[0], -point[1])):
        if math.isfinite(score) and (not front or score > front[-1][1]):
            front.append((cost, score))
    return front


# ---- what retraining buys ----


def draw_retraining(results: Results) -> Iterator[Drawing]:
    for ground, machine, rows in timed_rows(results.rows):
        for name in ("alpha", "truth"):
            rows = rows[rows[name].isin(set(rows[rows["method"] == DATAMODEL][name]))]
        for (_, _), group in best_scores(rows).groupby(PLACES, sort=True) if len(rows) else ():
            group = words.short_names(group)
            own = group[group["method"] == DATAMODEL]
            others = series_shapes(group[group["method"] != DATAMODEL]) if len(own) < len(group) else {}
            curves = [*(Curve(shape, [name]) for name, shape in others.items()), *datamodel_curves(own)]
            counts = f"Numbers: retrains of the datamodel, {words.span(retrains_of(own))}; seconds include them."
            title = f"{first_value(group, 'description')}: what retraining buys"
            shown = {name for curve in curves for name in curve.series}
            if left_out := sorted(set(own["label"]) - set(own[own["series"].isin(shown)]["label"])):
                counts += f" Not drawn: {', '.join(left_out)}."
            counts += " With a prior, what retraining says is added to another method's scores."
            kinds = "Raw or train-normalised scores, whichever a method does better with."
            stem = f"retraining-{ground}-{file_slug(machine)}"
            yield cost_drawing(stem, title, machine, group, curves, [counts, kinds], more_settings=prior_settings(own))


def retrains_of(rows: pd.DataFrame) -> pd.Series:
    return pd.Series([json.loads(options)["retrains"] for options in rows["options"]], index=rows.index)


def prior_settings(own: pd.DataFrame) -> list[str]:
    """Every prior's once, however many rows learn from it."""
    found = []
    for prior in sorted({str(json.loads(options).get("prior", NO_PRIOR)) for options in own["options"]}):
        method, options = parts_of(prior)
        told = ", ".join(f"{name}={value.removesuffix('.0')}" for name, value in options.items())
        found += [f"prior {look(method)['label']}: {told}"] if told else []
    return found


def datamodel_curves(own: pd.DataFrame) -> list[Curve]:
    """One a prior, in the colour of its method, over the number of retrains; variants of the datamodel are left out."""
    found: dict[str, Curve] = {}
    known = own.drop_duplicates("series").assign(retrains=lambda rows: retrains_of(rows))
    for _, row in known.sort_values(["retrains", "series"]).iterrows():
        options = json.loads(row["options"])
        prior = str(options.pop("prior", NO_PRIOR))
        usual = {**USUAL[DATAMODEL], "retrains": options["retrains"]}
        if any(usual.get(name) != value for name, value in options.items()):
            continue
        shape = look(DATAMODEL if prior == NO_PRIOR else prior.partition("+")[0])
        name = ALONE if prior == NO_PRIOR else f"+ prior {shape['label']}"
        curve = found.setdefault(prior, Curve(shape | {"label": name, "marker": "."}))
        curve.series.append(row["series"])
        count = row["retrains"]
        curve.counts.append((f"{count:,}" if isinstance(count, int) else str(count)) if prior == NO_PRIOR else "")
    return list(found.values())


# ---- what further base models buy ----


def models_of(rows: pd.DataFrame) -> pd.Series:
    return pd.Series([int(json.loads(options).get("models", 1)) for options in rows["options"]], rows.index, dtype=int)


def draw_ensembles(results: Results) -> Iterator[Drawing]:
    known = results.rows
    for ground, machine, rows in timed_rows(known[known["reference"] == FULL]):  # others are in the front picture
        rows = best_scores(rows)
        rows = rows.assign(models=models_of(rows))
        runs = set(rows[rows["models"] > 1]["run_id"])
        own = rows[rows["run_id"].isin(runs) & (rows["method"] != "random")]
        for (_, _, alpha), group in own.groupby([*PLACES, "alpha"], sort=True):
            if group["models"].nunique() < 2:
                continue
            families: dict[tuple[str, str], Curve] = {}
            for _, row in group.drop_duplicates("series").sort_values("models").iterrows():
                name = series_label(row["method"], without_models(row["label"]))
                curve = families.setdefault((row["method"], name), Curve(look(name, row["method"]) | {"label": name}))
                curve.series.append(row["series"])
                curve.counts.append(str(row["models"]))
            title = f"{first_value(group, 'description')}: scores averaged over base models"
            told = ["Numbers: base models. Seconds: fit, score and training further models.", KINDS_OF_SCORES]
            stem = f"ensembles-{ground}-alpha-{file_slug(f'{alpha:g}')}-{file_slug(machine)}"
            yield cost_drawing(stem, title, machine, group, list(families.values()), told)


# ---- seconds ----

SPANS = (("seconds", "fit + score"), ("fit_seconds", "fit"), ("score_seconds", "score"))


def draw_seconds(results: Results) -> Iterator[Drawing]:
    """All of runs that attribute several shares, so that one line is of one engine."""
    for ground, machine, group in timed_rows(results.timed):
        shares = group.groupby("run_id")["alpha_attribution"].transform("nunique")
        once = group[(group["method"] != "random") & (shares > 1)]
        once = once.drop_duplicates(["series", "alpha_attribution", "seed", "normalised"]).copy()
        if not len(once):
            continue
        # Tuned for raw and for normalised scores, a method is one line: its settings cost the same.
        once["series"] = [series_label(method, label) for method, label in zip(once["method"], once["label"])]
        shapes = series_shapes(once)
        figure, axes = panel_row(len(SPANS), 2.2)
        for axis, (column, name) in zip(axes, SPANS, strict=True):
            for series, shape in shapes.items():
                block = once[(once["series"] == series) & (once[column] > SHORTEST)]
                if len(block):
                    seconds = block.groupby("alpha_attribution")[column]
                    least, most = seconds.min(), seconds.max()
                    bars_at(axis, list(zip(least.index, least, least, most)), shape)
            axis.set_title(name)
            logarithmic(axis, "x", sorted(once["alpha_attribution"].unique()))
            seconds_axis(axis, "y")
            axis.set_xlabel(ALPHA_ATTRIBUTION, parse_math=True)
        description, about = first_value(once, "description"), first_value(once, "ground_words")
        title = f"{description}: seconds of each method"
        what = (
            "The fastest of a method's runs, bars to the slowest, which may have warmed the machine up; a part below "
            "1 ms is not drawn."
        )
        counts = words.span(once.groupby(["series", "alpha_attribution"])["seed"].nunique())
        engine = "EK-FAC: fit and score are kronfluence's." if "ekfac" in set(once["method"]) else ""
        notes = [
            " ".join(filter(None, [what, engine, f"n: {counts} seed(s), {words.span(once['num_queries'])} queries."])),
            words.settings_text(once),
        ]
        finish(figure, title, [about, machine], notes, handles_of(axes)[:MOST_NAMES])
        caption = (
            f"Seconds of fitting and scoring against the share of the training set that is attributed; {description}, "
            f"{about}, on {machine}. {' '.join(notes)}"
        )
        stem = f"seconds-{ground}-{file_slug(machine)}"
        yield Drawing(stem, title, caption, words.run_ids(once), figure, words.facts_of(once))
