"""LDS against what is spent (`budget`): draws, projection, checkpoints, and seconds; from budget.json."""

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

import bench.schema as schema
from bench.identity import file_slug, series_label, settings_words
from bench.publish.plots import frame
from bench.publish.plots.style import INK, in_order, looks
from bench.records import Results

NEAREST = 1.4  # of two ticks: the larger over the smaller
DOTTED_AXES = ("checkpoints",)  # against seconds


def draw_budget(results: Results) -> Iterator[frame.Drawing]:
    for _, budget in results.read("budget.json", schema.BudgetRecord):
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
        seed, split = budget.get("seed", "?"), f", {budget['split']} queries" if "split" in budget else ""
        parts = ["budget", budget["task"], budget["protocol"], f"alpha {alpha}", budget["device"]]
        yield frame.finish(
            figure, "-".join(file_slug(part) for part in parts),
            f"{budget.get('description') or budget['task']}: LDS against budget",
            [f"task {budget['task']}, protocol {budget['protocol']}, alpha {alpha}, seed {seed}{split}",
             budget["device"]],
            [f"{told} {sizes_text(budget)}", budget_settings(curves)],
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


def sizes_text(record: dict[str, Any]) -> str:
    replicates = record["replicates"]
    some = f" of {record['replicated_subsets']}" if replicates != 1 and record.get("replicated_subsets") else ""
    told = f"{replicates} replicate{'s' * (replicates != 1)}{some}"
    return f"n: 1 seed, {record['num_subsets']} subsets, {told}, {record['num_queries']:,} queries."
