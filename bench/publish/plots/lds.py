"""LDS, and what one gets for the seconds. Of raw and normalised scores the better are shown.

`lds`: against the share of data that models are retrained on (paper: fig:retraining), each seed a faint dot.
`front`: against time, within groups where a task has them; every method, label and model that is looked at.
`retraining`: a curve over the retrains for every prior of the datamodel, beside the other methods.
`collapse`: LDS beside LDS within class, a line a method.
`reference`: against how much more data the model that a method looks at has seen than the models asked about.
`draws`: bif_gaussian's covariance as it fills up, with BIF's chains, and EK-FAC's line, which the odd part tends to.
`budget`: against draws, projection, checkpoints and seconds, from budget.json.

Seconds of two machines never share an axis.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from baselines.support.nested import parts_of
from bench.identity import USUAL, file_slug, series_label, settings_words, without_models
from bench.publish.plots import frame
from bench.publish.plots.style import CONTROLS, FAINT, INK, QUIET, in_order, look, looks
from bench.records import (
    DATAMODEL,
    WITHIN,
    Results,
    bars_of,
    ceiling_over_seeds,
    linear_ceiling_over_seeds,
    over_seeds,
    within_groups,
)
from bench.schema import BudgetRecord
from retrain.reference import FULL, SUBSET

BAND = 0.3  # of the way from one share to the next: at most as far as points of one share stand apart
PLACES = ["alpha_attribution", "truth"]
CEILINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "noise ceiling": (lambda cell: ceiling_over_seeds(cell).ceiling, {"linestyle": "--", "linewidth": 0.9}),
    "linear ceiling": (linear_ceiling_over_seeds, {"linestyle": (0, (2, 1.2)), "linewidth": 0.7}),
}
AS_PAPER = ("bif-paper", "ekfac-library", "trak-library", "gradsim")  # labels of the paper's settings
LABELS_ALONE = "same_class"
SCHEMES = {"fixed": "any subset", "bernoulli": "any subset", "balanced": "class-balanced subsets"}
USUAL_ALPHA = 0.5  # the second alpha of a picture of two
LEFT = 4.0  # times cheaper than the cheapest method: where controls that cost nothing stand
SHORTEST = 1e-3  # seconds: a part that takes less is no part of the method
FLAT = 3.0  # times lower than the next panel's: curves that one axis for both would flatten
NEAREST = 1.4  # of two ticks: the larger over the smaller
DOTTED_AXES = ("checkpoints",)  # against seconds
NO_PRIOR = USUAL[DATAMODEL]["prior"]
RING: dict[str, Any] = {"marker": "o", "markersize": 9, "markerfacecolor": "none", "markeredgewidth": 0.7}
SOME = re.compile(r"(?P<whole>.*): (?P<draws>\d+) draws")
PARTS = {"odd part": "<", "even part": ">"}  # of all draws, with their markers
VERSION = re.compile(r" \([0-9a-f]{6}\)$")  # of a truth: the code that made it


def of_fewer(seeds: int, most: int) -> str:
    return f" ({seeds} seed{'s' * bool(seeds > 1)})" if seeds < most else ""


# ---- LDS against alpha ----


def draw_lds(results: Results) -> Iterator[frame.Drawing]:
    for (ground, normalised), group in without_studies(results).groupby(["ground", "normalised"], sort=True):
        if group["alpha"].nunique() < 2:  # no curve: its picture is the front one
            continue
        group = frame.short_names(group)
        shapes, seeds = looks(zip(group["method"], group["series"])), group.groupby("series")["seed"].nunique()
        for name, shape in shapes.items():  # one with fewer seeds than another says so
            shape["label"] += of_fewer(seeds[name], seeds.max())
        # At most nine: the line at 0 stands for random, and settings without a name of their own go first.
        last = [name for name in shapes if set(group[group["series"] == name]["method"]) == {"random"}]
        last += [name for name in shapes if ", " in name][::-1] + list(shapes)[::-1]
        dropped = list(dict.fromkeys(last))[: max(0, len(shapes) - frame.MOST_NAMES)]
        shapes = {name: shape for name, shape in shapes.items() if name not in dropped}
        left_out = sorted(set(group["series"]) - set(shapes) - {"random"})
        group = group[group["series"].isin(shapes)]
        places = list(group.groupby(PLACES, sort=True))[: frame.MOST_PANELS]
        figure, axes = frame.panels(len(places), 2.0 if len(places) > 1 else 2.6)
        for axis, ((share, _), here) in zip(axes, places, strict=True):
            lds_panel(axis, here, shapes, axis is axes[0])
            axis.set_title(f"{frame.ALPHA_ATTRIBUTION} = {share:g}{panel_note(here, group)}", parse_math=True)
            axis.set_xlabel(frame.ALPHA_RETRAIN, parse_math=True)
        axes[0].set_ylabel("LDS")
        bars = f"Bars: {bars_of(group.groupby([*PLACES, 'alpha', 'series']).size())}."
        bars += " Faint dots: each seed." if group["seed"].nunique() > 1 else ""
        bars += f" Not drawn: {', '.join(left_out)}." if left_out else ""
        scores = "train-normalised" if normalised else "raw"
        names = frame.handles_of(axes, [shape["label"] for shape in shapes.values()])
        stem, notes = f"lds-{ground}{'-normalised' if normalised else ''}", frame.notes_of(bars, group)
        yield frame.finish_rows(group, figure, stem, f"LDS of {scores} scores", [], notes, [scores], names)


def panel_note(here: pd.DataFrame, group: pd.DataFrame) -> str:
    """What a panel has otherwise than another of its figure: seeds, and how its truth was measured."""
    notes = []
    if here["seed"].nunique() < group["seed"].nunique():
        notes.append(f"{here['seed'].nunique()} seed{'s' * (here['seed'].nunique() > 1)}")
    if group["truth"].nunique() > 1:
        replicates = frame.span(here["num_replicates"])
        notes += [f"{frame.span(here['num_subsets'])} subsets"] if group["num_subsets"].nunique() > 1 else []
        notes.append(f"{replicates} replicate{'s' * (replicates != '1')}")
    return f"\n({', '.join(notes)})" if notes else ""


def lds_panel(axis: Axes, rows: pd.DataFrame, shapes: Mapping[str, dict[str, Any]], named: bool) -> None:
    """LDS against alpha, one line a series, over however many seeds there are; rows of one truth.

    `named`: whether the ceiling says that it is one.
    """
    alphas = sorted(rows["alpha"].unique())
    gap = min(np.diff(alphas), default=0.2)
    axis.axhline(0, color=INK, linewidth=0.5)
    series = [name for name in shapes if name in set(rows["series"])]
    # Points of one share stand beside each other in a band, so that equal scores do not hide one another.
    width = gap * min(BAND, 0.035 * len(series))
    for alpha in alphas:
        axis.axvspan(alpha - width / 2, alpha + width / 2, color=FAINT, alpha=0.35, linewidth=0, zorder=0)
    beside = width * (np.arange(len(series)) - (len(series) - 1) / 2) / max(1, len(series))
    dot: dict[str, Any] = {"marker": ".", "markersize": 2, "linestyle": "none", "alpha": 0.5, "markeredgewidth": 0}
    for name, place in zip(series, beside, strict=True):
        own = rows[rows["series"] == name]
        means = [(alpha + place, *over_seeds(cell)) for alpha, cell in own.groupby("alpha", sort=True)]
        frame.bars_at(axis, means, dict(shapes[name]) | {"capsize": 1.5})
        if own["seed"].nunique() > 1:
            axis.plot(own["alpha"] + place, own["lds"], color=shapes[name]["color"], label="_seeds", **dot)
    for label, (ceiling, style) in CEILINGS.items():
        heights = [(alpha, ceiling(cell)) for alpha, cell in rows.groupby("alpha", sort=True)]
        known = np.array([pair for pair in heights if np.isfinite(pair[1])], dtype=float)
        if not len(known):
            continue
        half = 0.4 * gap
        x, y = known.T if len(known) > 1 else (known[0, 0] + np.array([-half, half]), np.full(2, known[0, 1]))
        axis.plot(x, y, color=INK, label=f"_{label}", **style)
        if label == "noise ceiling" and named:
            frame.label_line(axis, y[-1], label)
            low, high = axis.get_ylim()
            axis.set_ylim(low, max(high, y[-1] + 0.1 * (high - low)))
    axis.set_xticks(alphas, [f"{alpha:g}" for alpha in alphas])
    axis.set_xlim(min(alphas) - 0.45 * gap, max(alphas) + 0.45 * gap)
    axis.grid(axis="x", visible=False)


# ---- points: methods over seeds ----


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


def settings_of_truth(rows: pd.DataFrame) -> pd.DataFrame:
    """With the records of one campaign as one truth: where LDS within groups is known, sizes name it, not its code.

    What was measured before within groups were is left out where both are.
    """
    grouped_rows = rows["group_name"].notna()
    truth = rows["truth"].where(~grouped_rows, rows["truth"].str.replace(VERSION, "", regex=True))
    rows = rows.assign(truth=truth)
    known = grouped_rows.groupby([rows["ground"], rows["alpha_attribution"], truth]).transform("any")
    return rows[grouped_rows | ~known]


def folders_of(rows: pd.DataFrame, results: Results) -> pd.Series:
    """Of each row, the name of its record's folder."""
    paths = {run: PurePosixPath(results.records[run]["path"]).parts for run in rows["run_id"].unique()}
    return rows["run_id"].map({run: parts[-3] if len(parts) > 2 else parts[0] for run, parts in paths.items()})


def records_of(rows: pd.DataFrame, results: Results) -> str:
    """Which records of one setting are drawn together."""
    seeds = rows.groupby(folders_of(rows, results))["seed"].nunique()
    told = [f"{folder} ({count} seed{'s' * bool(count > 1)})" for folder, count in seeds.items()]
    return f"Records of one setting: {', '.join(told)}." if len(told) > 1 else ""


def studies_of(rows: pd.DataFrame, drawn: pd.DataFrame, results: Results) -> str:
    """Which records of these rows' setting are not among those drawn: what `without_studies` leaves out."""
    every, one = results.rows, rows.iloc[0]
    same = np.logical_and.reduce([every[key] == one[key] for key in ("ground", "alpha", "alpha_attribution")])
    aside = every[same].drop(drawn.index, errors="ignore")
    return f"Studies, not drawn: {', '.join(sorted(set(folders_of(aside, results))))}." if len(aside) else ""


def two_alphas(rows: pd.DataFrame) -> list[float]:
    """The smallest, and the usual one or the largest below it."""
    alphas = sorted(rows["alpha"].unique())
    return sorted({alphas[0], max(alpha for alpha in alphas if alpha <= max(USUAL_ALPHA, alphas[0]))})


def metric_words(rows: pd.DataFrame) -> str:
    return f"LDS within {rows['group_name'].iloc[0]}" if rows["group_name"].notna().all() else "LDS"


def shown_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """With LDS within groups in the place of LDS where it is known of all."""
    return within_groups(Results(rows=rows)).rows if rows["group_name"].notna().all() else rows


def points(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a method, name, reference and number of models, over seeds; of one truth, share and alpha.

    `value` is LDS within groups where that is known. What knows the groups alone has nothing there: exactly 0.
    """
    measure, low, high = (
        WITHIN[name] if rows["group_name"].notna().all() else name for name in ("lds", "ci_low", "ci_high")
    )
    rows = rows[rows["lds"].notna() | (rows["group_name"].notna() & (rows["method"] == LABELS_ALONE))]
    alone = rows[measure].isna()
    rows = rows.assign(**{name: rows[name].where(~alone, 0.0) for name in (measure, low, high)}, alone=alone)
    rows["name"] = names_of(rows)
    keys = ["method", "name", "reference", "models"]
    several = rows.groupby([*keys, "normalised"])["series"].transform("nunique") > 1  # settings under one label
    several = several.groupby([rows[key] for key in keys]).transform("any")
    rows["name"] = rows["name"].where(~several, rows["series"])
    # Of a seed that two records have, that of the record with more seeds.
    rows["of_run"] = rows.groupby("run_id")["seed"].transform("nunique")
    rows = rows.sort_values("of_run", ascending=False, kind="stable").drop_duplicates([*keys, "normalised", "seed"])
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
        one |= {"seeds": cell["seed"].nunique(), "runs": tuple(cell["run_id"].unique())}
        found.append({**one, "seconds": max(float(cell["seconds"].median()), SHORTEST)})
    return pd.DataFrame(found)


def one_of_each(found: pd.DataFrame) -> pd.DataFrame:
    """Of a method with several labels its own name, or else that with the most LDS within class."""
    found = found.assign(own=found["name"] == [look(method)["label"] for method in found["method"]])
    best = found.sort_values(["own", "value"], kind="stable").drop_duplicates("method", keep="last")
    return found[found["name"].isin(best["name"])]


def names_of(rows: pd.DataFrame) -> list[str]:
    """A method's own name, also with settings of its own, where no other of it looks at the same models."""
    labels = [without_models(label) for label in rows["label"]]
    own = [label.partition("@")[0] == method for label, method in zip(labels, rows["method"])]
    counts = rows.assign(plain=labels)[own].groupby(["method", "reference", "models"])["plain"].nunique()
    several = {method for (method, *_), count in counts.items() if count > 1}  # type: ignore[misc]
    return [
        series_label(method, method if mine and method not in several else label)
        for method, label, mine in zip(rows["method"], labels, own)
    ]


def seen(row: Any) -> float:
    """How many times as many examples the reference model was trained on as each model that is asked about."""
    share = {FULL: row["alpha_attribution"] * row["alpha"], "attributed": row["alpha"]}.get(row["reference"], 1.0)
    return round(1 / share, 6)


def notes_of_points(rows: pd.DataFrame, found: pd.DataFrame, told: Sequence[str], results: Results) -> list[str]:
    """Below the panels that show these points of the rows: what is drawn, bars, ceiling, n; then settings."""
    drawn = {run for runs in found["runs"] for run in runs}
    rows = frame.short_names(rows[rows["series"].isin(found["series"]) & rows["run_id"].isin(drawn)])
    cells = rows.groupby(["ground", "alpha", "series", "normalised"])
    kinds = f"Raw or train-normalised scores, whichever has more {metric_words(rows)}."
    told = [*told, kinds, f"Bars: {bars_of(cells['seed'].nunique())}.", records_of(rows, results)]
    first, _ = frame.notes_of(" ".join(filter(None, told)), shown_rows(rows))
    return [first, frame.settings_text(rows[rows["method"] != DATAMODEL])]


# ---- LDS against seconds ----


def draw_front(results: Results) -> Iterator[frame.Drawing]:
    drawn = without_studies(results)
    for ground, machine, everything in timed_rows(settings_of_truth(drawn)):
        for (share, _), here in everything.groupby(PLACES, sort=True):
            for alpha in two_alphas(here):
                rows = here[here["alpha"] == alpha]
                if len(found := points(rows)) < 3:
                    continue
                several = found["reference"].nunique() > 1
                found = front_looks(found, several)
                figure, (axis,) = frame.panels(1, 4.0)
                labels = seconds_panel(axis, found, rows)
                training = ", and training of the models that it looks at" if several else ""
                axis.set_xlabel(f"time: fit and scores{training}")
                told = ["Grey stairs: what no other method beats on both, controls aside."]
                told += ["xK: scores averaged over K models."] if (found["models"] > 1).any() else []
                told += ["Numbers: retrains of the datamodel."] if DATAMODEL in set(found["method"]) else []
                told += ["Controls at the left edge take less time."] if found["edge"].any() else []
                told += [studies_of(rows, drawn, results)]
                place = f"of-{file_slug(f'{share:g}')}-alpha-{file_slug(f'{alpha:g}')}"
                yield frame.finish_rows(
                    rows, figure, f"front-{ground}-{place}-{file_slug(machine)}",
                    f"{metric_words(rows)} against seconds", [f"alpha {alpha:g}, alpha_attribution {share:g}", machine],
                    notes_of_points(rows, found, told, results), names=front_key(found, several), labels=labels,
                )  # fmt: skip


def front_key(found: pd.DataFrame, several: bool) -> list[tuple[Any, str]]:
    """What hollow, filled and ringed points are."""
    grey: dict[str, Any] = {"color": QUIET, "linestyle": "none", "marker": "o"}
    key = [(Line2D([], [], **{**grey, **RING}), "the paper's settings")] if found["ring"].any() else []
    if several:
        key.append((Line2D([], [], **grey, markerfacecolor="white"), "looks at the full model"))
        key.append((Line2D([], [], **grey), "at models of fewer examples"))
    return key


def front_looks(found: pd.DataFrame, several: bool) -> pd.DataFrame:
    """With the look of every point."""
    control, datamodel = found["method"].isin(CONTROLS), found["method"] == DATAMODEL
    edge = found[~control]["seconds"].min() / LEFT if (~control).any() else SHORTEST
    cheap, full = control & (found["seconds"] < edge), found["reference"] == FULL
    retrained = [f"{retrains(options):,}" if own else "" for options, own in zip(found["options"], datamodel)]
    most = found.groupby("name")["models"].transform("max")
    averaged = [f"x{models}" if 1 < models == last else "" for models, last in zip(found["models"], most)]
    found = found.assign(
        name=found["name"].where(~datamodel, DATAMODEL), seconds=found["seconds"].where(~cheap, edge), edge=cheap,
        mark=[" ".join(filter(None, both)) for both in zip(retrained, averaged)], step=~control,
        hollow=several & full & ~control & ~datamodel, ring=full & found["label"].isin(AS_PAPER),
        order=found["models"] - 1000 * full,
    )  # fmt: skip
    found["shape"] = [look(*pair) for pair in zip(found["name"], found["method"])]
    found["fewer"] = [of_fewer(seeds, found["seeds"].max()) for seeds in found["seeds"]]
    return found.sort_values("order", kind="stable")


def seconds_panel(axis: Axes, found: pd.DataFrame, rows: pd.DataFrame, joined: bool = False) -> list[frame.Label]:
    """Points of one alpha, with a name at the best one model (or datamodel) of each; ceilings are of the rows.

    `joined`: with lines between the points of a datamodel.
    """
    axis.axhline(0, color=INK, linewidth=0.5)
    labels = []
    for name, own in found.groupby("name", sort=False):
        shape = own["shape"].iloc[0]
        retrained = own["method"].iloc[0] == DATAMODEL
        if retrained and joined:
            axis.plot(own["seconds"], own["value"], color=shape["color"], linewidth=0.7, alpha=0.6, label="_joined")
        alone = own if retrained or own["models"].min() > 1 else own[own["models"] == 1]
        best = alone["value"].idxmax()
        for number, one in zip(own.index, own.to_dict("records"), strict=True):
            place = (one["seconds"], one["value"])
            face = {"markerfacecolor": "white"} if one["hollow"] else {}
            look_of_point = {**shape, "label": name, "linestyle": "none", **face}
            frame.bars_at(axis, [(*place, one["low"], one["high"])], look_of_point)
            text, colour = one["mark"] + ("" if retrained or not one["mark"] else one["fewer"]), QUIET
            if number == best:
                text, colour = f"{shape['label']} {one['mark']}".rstrip() + one["fewer"], shape["color"]
            labels += [frame.Label(axis, *place, text, colour)] if text else []
            if one["ring"]:
                axis.plot(*place, color=INK, linestyle="none", label="_paper", **RING)
    steps = found[found["step"]]
    if len(steps) > 1:
        front = pareto_front(list(zip(steps["seconds"], steps["value"])))
        axis.plot(*np.array(front).T, color=FAINT, linewidth=1.2, zorder=0, drawstyle="steps-post", label="_front")
    rows = shown_rows(rows)
    for label, (ceiling, style) in CEILINGS.items():
        if math.isfinite(height := ceiling(rows)):
            axis.axhline(height, color=INK, label=f"_{label}", **style)
            if label == "noise ceiling":
                frame.label_line(axis, height, label)
    axis.set_ylabel(metric_words(rows))
    axis.margins(x=0.09)  # where words of the last points stand
    frame.seconds_axis(axis, "x")
    return labels


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (seconds, score) points that no other is both cheaper and better than, by rising cost."""
    front: list[tuple[float, float]] = []
    for cost, score in sorted(points, key=lambda point: (point[0], -point[1])):
        if math.isfinite(score) and (not front or score > front[-1][1]):
            front.append((cost, score))
    return front


# ---- what retraining buys ----


def draw_retraining(results: Results) -> Iterator[frame.Drawing]:
    """At the full model; the front picture has those at others."""
    for ground, machine, rows in timed_rows(results.rows[results.rows["reference"] == FULL]):
        for name in ("alpha", "truth"):
            rows = rows[rows[name].isin(set(rows[rows["method"] == DATAMODEL][name]))]
        for (share, _), group in rows.groupby(PLACES, sort=True) if len(rows) else ():
            alphas = sorted(group["alpha"].unique())[-4:]
            figure, axes = frame.panels(len(alphas), 2.9, across=1)
            labels, found = list[frame.Label](), list[pd.DataFrame]()
            for axis, alpha in zip(axes, alphas, strict=True):
                here = group[group["alpha"] == alpha]
                found.append(datamodel_lines(front_looks(points(here), False)).assign(step=False, ring=False))
                labels += seconds_panel(axis, found[-1][found[-1]["name"] != ""], here, joined=True)
                axis.set_title(f"{frame.ALPHA_RETRAIN} = {alpha:g}", parse_math=True)
            axes[-1].set_xlabel("time")
            every, own = pd.concat(found), group[group["method"] == DATAMODEL]
            left_out = sorted(set(every[every["name"] == ""]["label"]))
            most = frame.span(own["options"].map(retrains))
            counts = f"Numbers: retrains of the datamodel, {most}; seconds have them."
            prior = "With a prior, what retraining says is added to another method's scores."
            told = [counts, f"Not drawn: {', '.join(left_out)}." if left_out else "", prior]
            yield frame.finish_rows(
                group, figure, f"retraining-{ground}-{file_slug(machine)}", "what retraining buys",
                [f"alpha_attribution {share:g}", machine],
                [*notes_of_points(group, every, told, results), prior_settings(own)], labels=labels,
            )  # fmt: skip


def retrains(options: str) -> int:
    return int(json.loads(options)["retrains"])


def prior_settings(own: pd.DataFrame) -> str:
    """Every prior's once, however many rows learn from it."""
    found = []
    for prior in sorted({str(json.loads(options).get("prior", NO_PRIOR)) for options in own["options"]}):
        method, options = parts_of(prior)
        told = ", ".join(f"{name}={value.removesuffix('.0')}" for name, value in options.items())
        found += [f"prior {look(method)['label']}: {told}"] if told else []
    return f"{'; '.join(found)}." if found else ""


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


# ---- LDS beside LDS within class ----


def draw_collapse(results: Results) -> Iterator[frame.Drawing]:
    rows = settings_of_truth(results.rows[results.rows["group_name"].notna()])
    rows = rows[rows["reference"].isin([FULL, SUBSET]) & (rows["models"] == 1) & (rows["scheme"] != "balanced")]
    rows = rows[rows["method"] != DATAMODEL]
    for (ground, share, truth), group in rows.groupby(["ground", *PLACES], sort=True):
        alphas = two_alphas(group)
        group = group[group["alpha"].isin(alphas)]
        if group["method"].nunique() < 2:
            continue
        several = group["reference"].nunique() > 1
        by_alpha = {}
        for alpha in alphas:
            found = front_looks(points(group[group["alpha"] == alpha]), several)
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
            notes_of_points(group, every, told, results), names=front_key(every.assign(ring=False), several),
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
    rows = without_studies(results)
    rows = rows[rows["group_name"].notna()]
    for (question, share), group in rows.groupby(["question", "alpha_attribution"], sort=True):
        lines = {place: moving(own) for place, own in group.groupby(["alpha", "scheme"])}
        group = group[[len(lines[place]) > 0 for place in zip(group["alpha"], group["scheme"], strict=True)]]
        if group.empty:
            continue
        group = group[group["alpha"].isin(two_alphas(group))]
        places = sorted(group.groupby(["alpha", "scheme"]), key=lambda one: (one[0][0], list(SCHEMES).index(one[0][1])))
        figure, axes = frame.panels(len(places), 2.3, across=2)
        found = [lines[place] for place, _ in places]
        for number, (axis, ((alpha, scheme), own)) in enumerate(zip(axes, places, strict=True)):
            reference_panel(axis, own, found[number])
            axis.set_title(f"{SCHEMES[scheme]}, keeping {alpha:.0%}")
            if not number % 2:
                axis.set_ylabel("LDS")
            if number // 2 == (len(axes) - 1) // 2:
                axis.set_xlabel("training examples of the model,\nover those of the models asked about")
        stem = f"reference-{file_slug(str(group['task'].iloc[0]))}-{question}-of-{file_slug(f'{share:g}')}"
        notes = notes_of_points(group, pd.concat(found), [], results)
        about = [f"alpha_attribution {share:g}"]
        yield frame.finish_rows(group, figure, stem, "which model to look at", about, notes)


def moving(rows: pd.DataFrame) -> pd.DataFrame:
    """The points of methods that looked at models of more than one kind; of several settings as `one_of_each` says."""
    found = points(rows)
    found = found[~found["method"].isin(CONTROLS) & (found["method"] != DATAMODEL)]
    each = [one_of_each(some).sort_values("value") for _, some in found.groupby(["reference", "models"])]
    found = pd.concat(each).drop_duplicates(["method", "reference", "models"], keep="last")
    found["name"] = [look(method)["label"] for method in found["method"]]
    return found[found.groupby("method")["seen"].transform("nunique") > 1]


def reference_panel(axis: Axes, rows: pd.DataFrame, found: pd.DataFrame) -> None:
    """Rows of one scheme and alpha: a line a method over the data of the one model, then what several models reach."""
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
    ceiling, style = CEILINGS["noise ceiling"]
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


# ---- LDS within class against draws ----


def draw_draws(results: Results) -> Iterator[frame.Drawing]:
    rows = results.rows[results.rows["group_name"].notna() & ~results.rows["normalised"]]
    rows = rows[over_draws(rows)]
    for (ground, share, truth), group in rows.groupby(["ground", *PLACES], sort=True):
        some = group.assign(whole=group["label"].str.extract(SOME)["whole"]).dropna(subset="whole")
        gaussian = look("bif_gaussian")["label"]
        names = {one: with_size(gaussian, json.loads(options)) for one, options in zip(some["whole"], some["options"])}
        places = sorted(set(zip(some["alpha"], some["reference"])), reverse=True)[: frame.MOST_PANELS]
        owns = [group[(group["alpha"] == alpha) & (group["reference"] == reference)] for alpha, reference in places]
        highest = [own[WITHIN["lds"]].max() for own in owns]
        figure, axes = frame.panels(len(places), 2.8, share_y=max(highest) < FLAT * min(highest), across=2)
        for axis, own, (alpha, reference) in zip(axes, owns, places, strict=True):
            # A Gaussian looks as those of its rank in the other panels, whatever its damping is there.
            shapes = looks(("bif_gaussian", name) for label, name in names.items() if label in set(own["label"]))
            draws_panel(axis, own, {label: shapes[name] for label, name in names.items() if name in shapes})
            ceiling = ceiling_over_seeds(shown_rows(own)).ceiling
            axis.set_title(f"at the {reference} model, alpha {alpha:g}\n(ceiling {ceiling:.2f})")
        for axis in axes[::2]:
            axis.set_ylabel(metric_words(group))
        drawn = group[group["method"].isin(("bif", "bif_gaussian", "kfac")) & ~group["label"].str.contains(": ")]
        told = (
            "Of a Gaussian all draws so far, and beside one's last its odd and even part; of nearly no rise the "
            "linear part is left. BIF: all chains together. Bands: EK-FAC's intervals. Raw scores. Bars: "
            f"{bars_of(drawn.groupby(['label', 'alpha'])['seed'].nunique())}."
        )
        yield frame.finish_rows(
            drawn, figure, f"draws-{ground}-of-{file_slug(f'{share:g}')}", f"{metric_words(group)} against draws",
            [f"alpha_attribution {share:g}", str(truth)], frame.notes_of(told, shown_rows(drawn)), ["raw"],
            names_of_panels(axes, [reference for _, reference in places])[: frame.MOST_NAMES],
        )  # fmt: skip


def over_draws(rows: pd.DataFrame) -> pd.Series:
    """Whether a row's run has a curve over draws."""
    return rows["run_id"].isin(rows[rows["label"].str.fullmatch(SOME)]["run_id"])


def without_studies(results: Results) -> pd.DataFrame:
    """Rows without those of runs over draws, or of settings given by hand, where other runs measured the ground.

    Their many rows would crowd these.
    """
    rows = results.rows
    by_hand = [run for run, one in results.records.items() if one.get("experiment", {}).get("settings") == "default"]
    other = ~over_draws(rows) & ~rows["run_id"].isin(by_hand)
    return rows[other | ~other.groupby(rows["ground"]).transform("any")]


def names_of_panels(axes: Sequence[Axes], references: Sequence[str]) -> list[tuple[Any, str]]:
    """(handle, name) for the legend: of what only some panels have with the model that they are about."""
    found = dict[str, Any]()
    panels = [dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True)) for axis in axes]
    for panel, reference in zip(panels, references, strict=True):
        for name, handle in panel.items():
            everywhere = all(name in other for other in panels)
            found.setdefault(name if everywhere else f"{name} ({reference})", handle)
    return [(handle, name) for name, handle in found.items()]


def with_size(name: str, options: Mapping[str, Any]) -> str:
    """With the damping, if it is one for all layers, as BIF's localisation is, and how wide a Gaussian is."""
    size = "n_beta" if options.get("n_beta") else "rise"
    told = {one: options.get(one) for one in ("damping", size)}
    return ", ".join([name, *(f"{one} {value:g}" for one, value in told.items() if value is not None)])


def draws_panel(axis: Axes, rows: pd.DataFrame, shapes: Mapping[str, dict[str, Any]]) -> None:
    """Of one alpha and reference; shapes: of each Gaussian's label. One, of an n_beta or else wide, has parts."""
    at = {label: over_seeds(own, WITHIN["lds"]) for label, own in rows.groupby("label")}
    options = {label: json.loads(text) for label, text in zip(rows["label"], rows["options"])}
    methods = dict(zip(rows["label"], rows["method"]))
    gaussians = [label for label in at if label in shapes]
    gaussians.sort(key=lambda label: (options[label]["n_beta"] > 0, options[label]["rise"]))
    for label in gaussians:  # last the one with parts
        last = options[label]["draws"]
        some = [found for one in at if (found := SOME.fullmatch(one)) and found["whole"] == label]
        curve = [(int(found["draws"]), *at[found[0]]) for found in some] + [(last, *at[label])]
        frame.bars_at(axis, sorted(curve), shapes[label])
    for place, (part, marker) in enumerate(PARTS.items(), 1):
        x, shape = last * 1.35**place, shapes[label] | {"marker": marker, "markerfacecolor": "white"}
        frame.bars_at(axis, [(x, *at[f"{label}: {part}"])], shape | {"label": f"_{part}"})
        # Upright under its bar: beside it the other part's name would be as near.
        axis.annotate(
            part, (x, at[f"{label}: {part}"][1]), (0, -3), textcoords="offset points", rotation=90, ha="center",
            va="top", fontsize=7, color=shape["color"], path_effects=[withStroke(linewidth=1.6, foreground="white")],
        )  # fmt: skip
    chains = [(options[one]["draws"] * options[one]["chains"], *at[one]) for one in at if methods[one] == "bif"]
    if chains:
        frame.bars_at(axis, sorted(chains), look("bif"))
    for label in (one for one in at if methods[one] == "kfac"):
        (value, low, high), shape = at[label], look("kfac")
        name = with_size(shape["label"], options[label])
        style = "-" if name == shape["label"] else "--"
        axis.axhline(value, color=shape["color"], linewidth=1.2, linestyle=style, label=name)
        axis.axhspan(low, high, color=shape["color"], alpha=0.15, linewidth=0)
    axis.axhline(0, color=INK, linewidth=0.5)
    axis.set_xlabel("draws")
    frame.logarithmic(axis, "x")


# ---- LDS against what is spent ----


def draw_budget(results: Results) -> Iterator[frame.Drawing]:
    for _, budget in results.read("budget.json", BudgetRecord):
        curves = budget["curves"]
        alphas = budget["alpha"] if isinstance(budget["alpha"], list) else [budget["alpha"]]
        alpha = " and ".join(f"{one:g}" for one in alphas)  # LDS is the mean over them
        spent_on = list(dict.fromkeys(curve["axis"] for curve in curves))
        figure, axes = frame.panels(len(spent_on) + 1, 2.1, across=2)
        shapes = looks((curve["method"], curve_label(curve)) for curve in curves)
        for axis in axes:
            axis.axhline(0, color=INK, linewidth=0.5)
        for curve in curves:
            draw_curve(axes[spent_on.index(curve["axis"])], axes[-1], curve, shapes[curve_label(curve)])
        for axis, name in zip(axes, spent_on, strict=False):
            axis.set_xlabel(name)
            values = sorted({p["value"] for c in curves if c["axis"] == name for p in c["points"]})
            # Those whose numbers do not run into the next one's.
            ticks = [value for value, after in zip(values, [*values[1:], math.inf]) if after >= NEAREST * value]
            frame.logarithmic(axis, "x", ticks)
            axis.tick_params(axis="x", rotation=45 if len(ticks) > 4 else 0)
        axes[-1].set_xlabel("time")
        frame.seconds_axis(axes[-1], "x")
        for axis in axes[::2]:
            axis.set_ylabel("LDS")
        told = "Bars: 95 % intervals."
        if any(curve["normalised"] for curve in curves):
            told += " Filled: raw scores; hollow: train-normalised."
        if len(spent_on) > 1 and (dotted := [name for name in spent_on if name in DOTTED_AXES]):
            told += f" Dotted against time: {' and '.join(dotted)}."
        times = f"{budget['replicates']} replicate{'s' * (budget['replicates'] != 1)}"
        if budget["replicates"] != 1 and budget.get("replicated_subsets"):
            times += f" of {budget['replicated_subsets']}"
        seed, split = budget.get("seed", "?"), f", {budget['split']} queries" if "split" in budget else ""
        parts = ["budget", budget["task"], budget["protocol"], f"alpha {alpha}", budget["device"]]
        yield frame.finish(
            figure, "-".join(file_slug(part) for part in parts),
            f"{budget.get('description') or budget['task']}: LDS against budget",
            [f"task {budget['task']}, protocol {budget['protocol']}, alpha {alpha}, seed {seed}{split}",
             budget["device"]],
            [f"{told} n: 1 seed, {budget['num_subsets']} subsets, {times}, {budget['num_queries']:,} queries.",
             budget_settings(curves)],
            [budget["run_id"]],
            {"task": [budget["task"]], "protocol": [budget["protocol"]],
             "method": in_order(curve["method"] for curve in curves)},
            frame.handles_of(axes, list(shapes))[:frame.MOST_NAMES],
        )  # fmt: skip


def curve_label(curve: dict[str, Any]) -> str:
    return series_label(curve["method"], curve["label"])


def draw_curve(axis: Axes, seconds: Axes, curve: dict[str, Any], shape: dict[str, Any]) -> None:
    points = pd.DataFrame(curve["points"])[["value", "seconds", "lds", "ci_low", "ci_high"]].astype(float)
    if curve["normalised"]:
        shape = shape | {"markerfacecolor": "white"}
    bars = [(points["lds"] - points["ci_low"]).clip(lower=0), (points["ci_high"] - points["lds"]).clip(lower=0)]
    axis.errorbar(points["value"], points["lds"], yerr=bars, elinewidth=0.8, **shape)
    if curve["axis"] in DOTTED_AXES:  # beside the same variant's other line
        shape = shape | {"linestyle": ":"}
    seconds.errorbar(points["seconds"], points["lds"], yerr=bars, elinewidth=0.8, **shape)


def budget_settings(curves: list[dict[str, Any]]) -> str:
    """Without what the budget is spent on, where that is one thing; of either kind of scores where they differ."""
    parts = []
    for label in dict.fromkeys(map(curve_label, curves)):
        own = [curve for curve in curves if curve_label(curve) == label]
        axes = {curve["axis"] for curve in own}
        told: dict[str, str] = {}
        for curve in own:
            options = {k: v for k, v in curve["options"].items() if axes != {k}}
            told["train-normalised" if curve["normalised"] else "raw"] = settings_words(curve["method"], options)
        if len(set(told.values())) == 1:
            told = {"": next(iter(told.values()))}
        parts += [f"{label}{f' ({kind})' if kind else ''}: {text}" for kind, text in told.items() if text]
    return f"Settings. {'; '.join(parts)}." if parts else ""
