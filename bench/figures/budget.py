"""LDS against what is spent (draws, projection, checkpoints) and seconds: `python -m bench.figures --only budget`."""

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from bench import schema
from bench.figures.drawing import Drawing, frame, logarithmic, panel_row
from bench.figures.sweep import alpha_words, read_swept, sweep_facts, sweep_sizes, swept_on
from bench.identity import file_slug, settings_words
from bench.publish.plots.style import INK, PaperSize, in_order, look, looks
from bench.records import Results

NEAREST = 1.4  # of two ticks: the larger over the smaller
DOTTED_AXES = ("checkpoints",)  # against seconds


def draw_budget(results: Results, size: PaperSize) -> Iterator[Drawing]:
    for _, budget in read_swept(results, "budget.json", schema.BudgetRecord):
        curves = [curve for curve in budget["curves"] if results.shows(curve["method"])]
        if not curves:
            continue
        spent_on = list(dict.fromkeys(curve["axis"] for curve in curves))
        figure, axes = panel_row(len(spent_on) + 1, size, height=2.1)
        for axis in axes:
            axis.axhline(0, color=INK, linewidth=0.5, label="chance")
        names = in_order(curve["method"] for curve in curves)
        shapes = looks([(curve["method"], curve_label(curve)) for curve in curves])
        for curve in curves:
            draw_curve(axes[spent_on.index(curve["axis"])], axes[-1], curve, shapes[curve_label(curve)])
        for axis, name in zip(axes, spent_on, strict=False):
            axis.set_xlabel(name)
            values = apart({p["value"] for c in curves if c["axis"] == name for p in c["points"]})
            logarithmic(axis, "x", values)
            axis.tick_params(axis="x", rotation=45 if len(values) > 4 else 0)
        axes[-1].set_xlabel("seconds")
        logarithmic(axes[-1], "x")
        axes[0].set_ylabel("LDS")
        title = f"{budget.get('description') or budget['task']}: LDS against budget"
        known = all(p.get("ci_low") is not None for c in curves for p in c["points"] if p["lds"] is not None)
        bars = "Bars: 95 % intervals." if known else "Bars: 95 % intervals, where recorded."
        if len(spent_on) > 1 and (dotted := [name for name in spent_on if name in DOTTED_AXES]):
            bars += f" Dotted against seconds: {' and '.join(dotted)}."
        settings = budget_settings(curves)
        notes = [f"{bars} {sweep_sizes(budget)}", settings]
        frame(figure, size, title, [swept_on(budget), budget["device"]], notes, axes)
        caption = (
            f"LDS against budget; {swept_on(budget)}, on {budget['device']}. {bars} {sweep_sizes(budget)} {settings}"
        ).strip()
        parts = ["budget", budget["task"], budget["protocol"], f"alpha {alpha_words(budget)}", budget["device"]]
        stem = "-".join(file_slug(part) for part in parts)
        facts = sweep_facts(budget, names)
        yield Drawing(stem, title, caption, [budget["run_id"]], figure, facts=facts)


def curve_label(curve: dict[str, Any]) -> str:
    """The variant's own; a plain method's is the one that every figure has for it."""
    label = curve.get("label") or curve["method"]
    return look(curve["method"])["label"] if label == curve["method"] else label


def scores_kind(curve: dict[str, Any]) -> str:
    return "train-normalised" if curve.get("normalised") else "raw"


def draw_curve(axis: Any, seconds_axis: Any, curve: dict[str, Any], shape: dict[str, Any]) -> None:
    points = pd.DataFrame(curve["points"])
    numbers = [name for name in ("value", "seconds", "lds", "ci_low", "ci_high") if name in points]
    points[numbers] = points[numbers].astype(float)
    own = {"markerfacecolor": "none"} if curve.get("normalised") else {}
    shape = shape | own | {"label": f"{shape['label']}, {scores_kind(curve)}"}
    bars = None
    if {"ci_low", "ci_high"} <= set(points):
        bars = [(points["lds"] - points["ci_low"]).clip(lower=0), (points["ci_high"] - points["lds"]).clip(lower=0)]
    axis.errorbar(points["value"], points["lds"], yerr=bars, capsize=1.5, elinewidth=0.8, **shape)
    if curve["axis"] in DOTTED_AXES:  # beside the same variant's other line
        shape = shape | {"linestyle": ":"}
    seconds_axis.errorbar(points["seconds"], points["lds"], yerr=bars, capsize=1.5, elinewidth=0.8, **shape)


def apart(values: set[float]) -> list[float]:
    """Those whose numbers do not run into the next one's on a logarithmic axis."""
    ordered = sorted(values)
    return [value for value, after in zip(ordered, [*ordered[1:], math.inf]) if after >= NEAREST * value]


def budget_settings(curves: list[dict[str, Any]]) -> str:
    """Without what the budget is spent on, where that is one thing; of either kind of scores where they differ."""
    parts = []
    for label in dict.fromkeys(map(curve_label, curves)):
        own = [curve for curve in curves if curve_label(curve) == label]
        axes = {curve["axis"] for curve in own}
        words: dict[str, str] = {}
        for curve in own:
            options = {k: v for k, v in curve.get("options", {}).items() if axes != {k}}
            words[scores_kind(curve)] = settings_words(curve["method"], options)
        if len(set(words.values())) == 1:
            words = {"": next(iter(words.values()))}
        parts += [f"{label}{f' ({kind})' if kind else ''}: {text}" for kind, text in words.items() if text]
    return f"Settings. {'; '.join(parts)}." if parts else ""
