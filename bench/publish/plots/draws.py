"""LDS within class against draws: bif_gaussian's covariance as it fills up, BIF's chains beside it, EK-FAC's lines.

bif_gaussian draws from K-FAC's own Gaussian, so that its odd part has kfac's line for its limit; what its even part and
BIF have beyond is of higher order, or what chains know of the posterior beyond that Gaussian.
"""

import re
from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from bench.identity import file_slug
from bench.publish.plots.frame import (
    MOST_NAMES,
    Drawing,
    Label,
    bars_at,
    finish,
    handles_of,
    logarithmic,
    panel_row,
)
from bench.publish.plots.lds import PLACES
from bench.publish.plots.style import METHODS, look, shaded
from bench.records import Results

SOME = re.compile(r"(?P<whole>.*): (?P<draws>\d+) draws")
LINES = ("kfac", "shampoo", "gradsim")  # methods without draws
PART_LINES = {"odd part": (0, (4, 2)), "even part": (0, (1, 1.5))}
VALUES = ("lds_within_groups", "within_groups_low", "within_groups_high")


def draw_draws(results: Results) -> Iterator[Drawing]:
    rows = results.rows[results.rows["normalised"] & results.rows["lds_within_groups"].notna()]
    rows = rows[rows["run_id"].isin(rows[rows["label"].str.match(SOME)]["run_id"])]
    for (ground, share, truth), group in rows.groupby(["ground", *PLACES], sort=True):
        alphas = sorted(group["alpha"].unique())
        figure, axes = panel_row(len(alphas), 3.0)
        labels: list[Label] = []
        for axis, alpha in zip(axes, alphas, strict=True):
            _panel(axis, group[group["alpha"] == alpha], results, labels)
            axis.set_title(f"alpha {alpha:g}")
            axis.set_xlabel("draws")
            logarithmic(axis, "x")
        axes[0].set_ylabel("LDS within class")
        first = group.iloc[0]
        seeds = sorted(map(int, group["seed"].unique()))
        told = (
            "Lines with bars: bif_gaussian by all its draws so far; dashed and dotted at its last: its odd and even "
            "part alone. BIF at its chains' draws together. Levels: methods that draw nothing."
        )
        counted = (
            f"n: {first['num_subsets']} subsets, {first['num_queries']} queries, seeds {', '.join(map(str, seeds))}; "
            "bars from the lowest to the highest end of the seeds' 95 % intervals."
        )
        title = f"{first['description']}: what more draws add within class"
        names = handles_of(axes[:1])[:MOST_NAMES]
        finish(figure, title, [f"train-normalised scores, {first['ground_words']}"], [told, counted], names, labels)
        stem = file_slug(f"draws-{ground}-of-{share:g}-{truth}"[:150])
        facts = {"task": [first["task"]], "method": sorted(set(group["method"])), "scores": ["normalised"]}
        yield Drawing(stem, title, f"{title}. {told} {counted}", sorted(set(group["run_id"])), figure, facts)


def _panel(axis: Axes, rows: pd.DataFrame, results: Results, labels: list[Label]) -> None:
    at: dict[str, Any] = {}  # a label's value, and the ends of its bar
    for label, own in rows.groupby("label"):
        at[label] = [float(own[name].agg(how)) for name, how in zip(VALUES, ("mean", "min", "max"), strict=True)]
    known = dict(zip(rows["label"], zip(rows["method"], rows["run_id"], strict=True), strict=True))
    wholes = sorted(label for label, (method, _) in known.items() if method == "bif_gaussian" and ": " not in label)
    for number, label in enumerate(wholes):
        last = _draws(results, known[label][1], label)
        shape = look("bif_gaussian") | {"label": label}
        shape["color"] = shaded(shape["color"], 0.4 * number)
        found: list[Any] = [
            (int(m["draws"]), *at[one]) for one in at if (m := SOME.fullmatch(one)) and m["whole"] == label
        ]
        bars_at(axis, sorted([*found, (last, *at[label])]), shape)
        for part, style in PART_LINES.items():
            if (one := f"{label}: {part}") in at:
                axis.plot((last / 3, last), [at[one][0]] * 2, color=shape["color"], linestyle=style, label="_part")
                labels.append(Label(axis, last, at[one][0], part, shape["color"]))
    for label, (method, run) in sorted(known.items()):
        shape = look(label, method) | {"label": label}
        if method == "bif" and (draws := _draws(results, run, label)):
            bars_at(axis, [(draws, *at[label])], shape | {"linestyle": "none"})
        elif method in LINES and method in METHODS:
            axis.axhline(at[label][0], color=shape["color"], linewidth=0.9, label=label)


def _draws(results: Results, run: str, label: str) -> int:
    """Of all chains together."""
    methods: list[dict[str, Any]] = results.records[run]["config"]["methods"]
    own = next((one for one in methods if one["label"] == label), {})
    return int(own.get("draws", 0)) * int(own.get("chains", 1))
