"""What one gets for the seconds: LDS (within groups, where a task has them) against time; and seconds themselves.

`front` has every method, label and model that is looked at. `retraining` has a curve over the number of retrains for
every prior of the datamodel, beside the other methods. `seconds` (paper: fig:timings_bif-vs-ekfac) is cost against the
share that is attributed. A method with both kinds of scores shows the better one. Seconds of different machines never
share an axis.
"""

import json
import math
from collections.abc import Iterator, Sequence
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
from bench.records import DATAMODEL, WITHIN, Results, bars_of, over_seeds, within_groups
from retrain.reference import FULL

AS_PAPER = (
    "bif-paper",
    "ekfac-library",
    "trak-library",
    "gradsim",
)  # labels of the paper's settings, at the full model
USUAL_ALPHA = 0.5  # the second alpha of a picture of two
LEFT = 4.0  # times cheaper than the cheapest method: where controls that cost nothing stand
SHORTEST = 1e-3  # seconds: a part that takes less is no part of the method
NO_PRIOR = USUAL[DATAMODEL]["prior"]
RING: dict[str, Any] = {"marker": "o", "markersize": 9, "markerfacecolor": "none", "markeredgewidth": 0.7}


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


def two_alphas(rows: pd.DataFrame) -> list[float]:
    """The smallest, and the usual one or the largest below it."""
    alphas = sorted(rows["alpha"].unique())
    return sorted({alphas[0], max(alpha for alpha in alphas if alpha <= max(USUAL_ALPHA, alphas[0]))})


def grouped(rows: pd.DataFrame) -> bool:
    """Whether LDS within groups is known of these rows."""
    return bool(rows["group_name"].notna().all())


def metric_words(rows: pd.DataFrame) -> str:
    return f"LDS within {rows['group_name'].iloc[0]}" if grouped(rows) else "LDS"


def points(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a method, name, reference and number of models, over seeds; of one truth, share and alpha.

    `value` is LDS within groups where that is known. A method that has an LDS and nothing within groups knows the
    groups alone: its value is exactly 0.
    """
    measure, low, high = (WITHIN[name] if grouped(rows) else name for name in ("lds", "ci_low", "ci_high"))
    rows = rows[rows["lds"].notna()]
    alone = rows[measure].isna()
    rows = rows.assign(**{name: rows[name].where(~alone, 0.0) for name in (measure, low, high)}, alone=alone)
    names = [series_label(method, without_models(label)) for method, label in zip(rows["method"], rows["label"])]
    rows = rows.assign(name=names)
    keys = ["method", "name", "reference", "models"]
    several = rows.groupby([*keys, "normalised"])["series"].transform("nunique") > 1  # settings under one label
    several = several.groupby([rows[key] for key in keys]).transform("any")
    rows["name"] = rows["name"].where(~several, rows["series"])
    rows = rows.drop_duplicates([*keys, "normalised", "seed"])  # of a seed that two records have, one
    means = rows.groupby([*keys, "normalised"])[measure].mean()
    order = sorted(means.index, key=lambda key: (means[key], not key[-1]))
    kind = {key[:-1]: key[-1] for key in order}  # the last one is the best
    found = []
    for key, cell in rows.groupby(keys, sort=True):
        cell = cell[cell["normalised"] == kind[key]]
        one: dict[str, Any] = dict(zip(keys, key)) | {"label": cell["label"].iloc[0], "alone": cell["alone"].all()}
        one |= dict(zip(("lds", "lds_low", "lds_high"), over_seeds(cell)))
        one |= dict(zip(("value", "low", "high"), over_seeds(cell, measure)))
        one |= {"series": cell["series"].iloc[0], "options": cell["options"].iloc[0], "seen": seen(cell.iloc[0])}
        one["seeds"] = cell["seed"].nunique()
        found.append({**one, "seconds": max(float(cell["seconds"].median()), SHORTEST)})
    return pd.DataFrame(found)


def seen(row: Any) -> float:
    """How many times as many examples the reference model was trained on as each model that is asked about."""
    share = {FULL: row["alpha_attribution"] * row["alpha"], "attributed": row["alpha"]}.get(row["reference"], 1.0)
    return round(1 / share, 6)


def notes_of(rows: pd.DataFrame, found: pd.DataFrame, more: Sequence[str]) -> list[str]:
    """Below the panels that show these points of the rows: what is drawn, bars, ceiling, n; then settings."""
    rows = words.short_names(rows[rows["series"].isin(found["series"])])
    cells = rows.groupby(["ground", "alpha", "series", "normalised"])
    kinds = f"Raw or train-normalised scores, whichever has more {metric_words(rows)}."
    told = " ".join(filter(None, [*more, kinds, f"Bars: {bars_of(cells['seed'].nunique())}."]))
    first, _ = words.notes_of(told, within_groups(Results(rows=rows)).rows if grouped(rows) else rows)
    return [first, words.settings_text(rows[rows["method"] != DATAMODEL])]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (seconds, score) points that no other is both cheaper and better than, by rising cost."""
    front: list[tuple[float, float]] = []
    for cost, score in sorted(points, key=lambda point: (point[0], -point[1])):
        if math.isfinite(score) and (not front or score > front[-1][1]):
            front.append((cost, score))
    return front


# ---- every method ----


def draw_front(results: Results) -> Iterator[Drawing]:
    for ground, machine, everything in timed_rows(results.rows):
        for (share, _), here in everything.groupby(PLACES, sort=True):
            if (known := here["group_name"].notna()).any():  # older rows of the same truth lack LDS within groups
                here = here[known]
            for alpha in two_alphas(here):
                rows = here[here["alpha"] == alpha]
                if len(found := points(rows)) < 3:
                    continue
                several = found["reference"].nunique() > 1
                found = front_lines(found, several)
                figure, (axis,) = panel_row(1, 4.0)
                labels = seconds_panel(axis, found, rows)
                training = ", and training of the models that it looks at" if several else ""
                axis.set_xlabel(f"time: fit and scores{training}")
                told = ["Stairs: what no other method beats on both, controls aside. Ring: the paper's settings."]
                if several:
                    told.append(
                        "Hollow: looks at the full model. Filled: at models of fewer examples; xK: K of them. "
                        "Lines join one method's."
                    )
                told += ["Controls at the left edge take less time."] if found["edge"].any() else []
                title = f"{first_value(rows, 'description')}: {metric_words(rows)} against seconds"
                about = [first_value(rows, "ground_words"), f"alpha {alpha:g}, alpha_attribution {share:g}", machine]
                notes = notes_of(rows, found, told)
                finish(figure, title, about, notes, labels=labels)
                place = f"of-{file_slug(f'{share:g}')}-alpha-{file_slug(f'{alpha:g}')}"
                stem = f"front-{ground}-{place}-{file_slug(machine)}"
                caption = f"{title}; {', '.join(about)}. {' '.join(notes)}"
                yield Drawing(stem, title, caption, words.run_ids(rows, True), figure, words.facts_of(rows))


def front_lines(found: pd.DataFrame, several: bool) -> pd.DataFrame:
    """With the looks of every point: those of one name are joined, from the full model to the most models."""
    control = found["method"].isin(CONTROLS)
    edge = found[~control]["seconds"].min() / LEFT if (~control).any() else SHORTEST
    cheap, full = control & (found["seconds"] < edge), found["reference"] == FULL
    most = found.groupby("name")["models"].transform("max")
    fewer = [f" ({n} seed{'s' * (n > 1)})" if n < found["seeds"].max() else "" for n in found["seeds"]]
    shapes = [look(*pair) for pair in zip(found["name"], found["method"])]
    found = found.assign(
        seconds=found["seconds"].where(~cheap, edge),
        edge=cheap,
        shape=[shape | {"label": f"{shape['label']}{seeds}"} for shape, seeds in zip(shapes, fewer)],
        mark=[f"x{models}" if 1 < models == last else "" for models, last in zip(found["models"], most)],
        hollow=several & full & ~found["method"].isin((*CONTROLS, DATAMODEL)),
        ring=full & found["label"].isin(AS_PAPER),
        step=~control,
        order=found["models"] - 1000 * full,
    )
    return found.sort_values("order", kind="stable")


def seconds_panel(axis: Axes, found: pd.DataFrame, rows: pd.DataFrame) -> list[Label]:
    """Points of one alpha, joined by name, with words for the best of each; ceilings are of the rows."""
    axis.axhline(0, color=INK, linewidth=0.5)
    labels = []
    for name, own in found.groupby("name", sort=False):
        shape = own["shape"].iloc[0]
        axis.plot(own["seconds"], own["value"], color=shape["color"], linewidth=0.7, alpha=0.6, label="_joined")
        for one in own.to_dict("records"):
            place = (one["seconds"], one["value"])
            face = {"markerfacecolor": "white"} if one["hollow"] else {}
            bars_at(axis, [(*place, one["low"], one["high"])], {**shape, "label": name, "linestyle": "none", **face})
            axis.annotate(one["mark"], place, (4, -2), textcoords="offset points", va="top", fontsize=5.5)
            if one["ring"]:
                axis.plot(*place, color=INK, linestyle="none", label="_paper", **RING)
        best = own.loc[own["value"].idxmax()]
        labels.append(Label(axis, best["seconds"], best["value"], shape["label"], shape["color"]))
    steps = found[found["step"]]
    if len(steps) > 1:
        front = pareto_front(list(zip(steps["seconds"], steps["value"])))
        axis.plot(*np.array(front).T, color=INK, linewidth=0.6, zorder=0, drawstyle="steps-post", label="_front")
    if grouped(rows):
        rows = within_groups(Results(rows=rows)).rows
    for label, style in CEILINGS.items():
        if math.isfinite(height := ceiling_called(label, rows)):
            axis.axhline(height, color=INK, label=f"_{label}", **style)
            if label == "noise ceiling":
                label_line(axis, height, label)
    axis.set_ylabel(metric_words(rows))
    seconds_axis(axis, "x")
    return labels


# ---- what retraining buys ----


def draw_retraining(results: Results) -> Iterator[Drawing]:
    for ground, machine, rows in timed_rows(results.rows):
        for name in ("alpha", "truth"):
            rows = rows[rows[name].isin(set(rows[rows["method"] == DATAMODEL][name]))]
        for (share, _), group in rows.groupby(PLACES, sort=True) if len(rows) else ():
            alphas = sorted(group["alpha"].unique())[-4:]
            figure, axes = panel_row(len(alphas), 2.9, across=1)
            labels: list[Label] = []
            panels = []
            for axis, alpha in zip(axes, alphas, strict=True):
                here = group[group["alpha"] == alpha]
                panels.append(datamodel_lines(front_lines(points(here), False)).assign(step=False, ring=False))
                labels += seconds_panel(axis, panels[-1][panels[-1]["name"] != ""], here)
                axis.set_title(f"{ALPHA_RETRAIN} = {alpha:g}", parse_math=True)
            axes[-1].set_xlabel("time")
            found, own = pd.concat(panels), group[group["method"] == DATAMODEL]
            left_out = sorted(set(found[found["name"] == ""]["label"]))
            counts = (
                f"Numbers: retrains of the datamodel, {words.span(own['options'].map(retrains))}; seconds have them."
            )
            prior = "With a prior, what retraining says is added to another method's scores."
            more = f"Not drawn: {', '.join(left_out)}." if left_out else ""
            title = f"{first_value(group, 'description')}: what retraining buys"
            about = [first_value(group, "ground_words"), f"alpha_attribution {share:g}", machine]
            notes = [*notes_of(group, found, [counts, more, prior]), *prior_settings(own)]
            finish(figure, title, about, notes, labels=labels)
            caption = f"{title}; {', '.join(about)}. {' '.join(notes)}"
            stem = f"retraining-{ground}-{file_slug(machine)}"
            yield Drawing(stem, title, caption, words.run_ids(group, True), figure, words.facts_of(group))


def retrains(options: str) -> int:
    return int(json.loads(options)["retrains"])


def prior_settings(own: pd.DataFrame) -> list[str]:
    """Every prior's once, however many rows learn from it."""
    found = []
    for prior in sorted({str(json.loads(options).get("prior", NO_PRIOR)) for options in own["options"]}):
        method, options = parts_of(prior)
        told = ", ".join(f"{name}={value.removesuffix('.0')}" for name, value in options.items())
        found += [f"prior {look(method)['label']}: {told}"] if told else []
    return [f"{'; '.join(found)}."] if found else []


def datamodel_lines(found: pd.DataFrame) -> pd.DataFrame:
    """A datamodel's points on a line a prior, in the colour of its method; variants of the datamodel have no name."""
    lines = []
    for one in found.to_dict("records"):
        if one["method"] == DATAMODEL:
            options = json.loads(one["options"])
            prior, count = str(options.pop("prior", NO_PRIOR)), int(options["retrains"])
            usual = {**USUAL[DATAMODEL], "retrains": options["retrains"]}
            unusual = any(usual.get(name) != value for name, value in options.items())
            shape = look(DATAMODEL if prior == NO_PRIOR else prior.partition("+")[0])
            label = "retraining alone" if prior == NO_PRIOR else f"+ prior {shape['label']}"
            one |= {"shape": shape | {"label": label, "marker": "."}, "order": count}
            one |= {"name": "" if unusual else prior, "mark": f"{count:,}" if prior == NO_PRIOR else ""}
        lines.append(one)
    return pd.DataFrame(lines).sort_values("order", kind="stable")


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
