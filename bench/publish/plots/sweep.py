"""LDS over the settings of a method (paper: fig:loss_trace_*, fig:lds_llm_sweep), and against what is spent.

`sweep`: a grid of cells with the loss traces of each, or a line where one setting is swept; cells that diverged say so.
`budget`: LDS against draws, projection, checkpoints and seconds.
"""

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize

import bench.schema as schema
from bench.identity import file_slug, series_label, settings_words
from bench.publish.plots.frame import (
    MOST_NAMES,
    MOST_PANELS,
    Drawing,
    finish,
    handles_of,
    logarithmic,
    panel_grid,
    panel_row,
    seconds_axis,
)
from bench.publish.plots.style import FAINT, INK, in_order, look, looks
from bench.records import Results
from bench.tables import setting_text
from retrain.safe_files import SafeFileError, validate

# Pale, so that traces and numbers can be read on it.
PALE = ListedColormap(0.6 + 0.4 * colormaps["viridis"](np.linspace(0.15, 1, 128))[:, :3])


def read_swept(results: Results, name: str, kind: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path, record in results.read(name, kind):
        try:
            alpha = record["alpha"]
            validate(alpha if isinstance(alpha, list) else [alpha], schema.Alphas, path, "alpha")
            yield path, record
        except SafeFileError as error:
            results.note(str(error))


def swept_on(record: dict[str, Any]) -> str:
    seed = record.get("seed", "?")
    split = f", {record['split']} queries" if "split" in record else ""
    return f"task {record['task']}, protocol {record['protocol']}, alpha {alpha_words(record)}, seed {seed}{split}"


def alpha_words(record: dict[str, Any]) -> str:
    """One number, or those that LDS is the mean over."""
    alphas = record["alpha"] if isinstance(record["alpha"], list) else [record["alpha"]]
    return " and ".join(f"{alpha:g}" for alpha in alphas)


def sweep_sizes(record: dict[str, Any]) -> str:
    """n of a sweep or a budget."""
    subsets, replicates = record.get("num_subsets", "?"), record.get("replicates", "?")
    queries = f", {record['num_queries']:,} queries" if record.get("num_queries") else ""
    some = f" of {record['replicated_subsets']}" if replicates != 1 and record.get("replicated_subsets") else ""
    return f"n: 1 seed, {subsets} subsets, {replicates} replicate{'s' * (replicates != 1)}{some}{queries}."


def sweep_facts(record: dict[str, Any], methods: list[str]) -> dict[str, list[str]]:
    return {"task": [record["task"]], "protocol": [record["protocol"]], "method": methods}


def other_settings(sweep: dict[str, Any]) -> str:
    """The settings that were not swept, where the record has them."""
    options = sweep.get("options")
    kept = {k: v for k, v in options.items() if k not in sweep["axes"]} if isinstance(options, dict) else {}
    told = settings_words(sweep["method"], kept)
    return f"Other settings. {told[:600]}." if told else ""


# ---- sweeps ----


def draw_sweep(results: Results) -> Iterator[Drawing]:
    for path, sweep in read_swept(results, "sweep.json", schema.SweepRecord):
        axes, cells = sweep["axes"], sweep["cells"]
        if lacking := [name for name in axes if not all(name in cell for cell in cells)] or (not axes and ["an axis"]):
            results.note(f"{path}: its cells lack {lacking[0]!r}; see results/README.md")
            continue
        parts = ["sweep", sweep["task"], sweep["protocol"], sweep["method"], *axes, f"alpha {alpha_words(sweep)}"]
        stem = "-".join(file_slug(part) for part in parts)
        yield sweep_grids(sweep, stem)


def sweep_grids(sweep: dict[str, Any], stem: str) -> Drawing:
    """Below each other, a grid of the last two settings for every value of those before them."""
    axes, cells = sweep["axes"], sweep["cells"]
    if len(axes) == 1:  # a grid of one row
        axes, cells = {"": [""], **axes}, [{"": "", **cell} for cell in cells]
    *outer, down, across = list(axes)
    fixed = [dict(zip(outer, values, strict=True)) for values in product(*(axes[name] for name in outer))]
    fixed = fixed[:MOST_PANELS]
    figure, grid = panel_grid(len(fixed), 1, 0.35 + 0.52 * len(axes[down]))
    scores = [cell["lds"] for cell in cells if cell["lds"] is not None]
    shade = Normalize(*((min(scores), max(scores)) if scores else (0.0, 1.0)))
    for axis, at in zip(grid.ravel(), fixed, strict=True):
        own = [cell for cell in cells if all(cell[name] == value for name, value in at.items())]
        grid_of_cells(axis, own, down, axes[down], across, axes[across], shade)
        if at:
            axis.set_title(", ".join(f"{name} {setting_text(value)}" for name, value in at.items()))
    if scores:
        figure.colorbar(ScalarMappable(shade, PALE), ax=grid, label="LDS", aspect=30, fraction=0.04, pad=0.02)
    title = f"{sweep.get('description') or sweep['task']}: {look(sweep['method'])['label']} over {down} and {across}"
    inside = "In each cell: LDS of raw scores"
    inside += ", R-hat and ESS" if any(cell.get("rhat") is not None for cell in cells) else ""
    inside += "; below, the mean training loss at every draw, a line a chain, each cell on its own scale."
    crossed = "Crossed: diverged." if any(cell["lds"] is None for cell in cells) else ""
    notes = [" ".join(filter(None, [inside, crossed, widest(cells), sweep_sizes(sweep)])), other_settings(sweep)]
    finish(figure, title, [swept_on(sweep), "raw scores"], notes)
    caption = f"Loss traces and LDS of {sweep['method']} over {', '.join(axes)}; {swept_on(sweep)}. {' '.join(notes)}"
    return Drawing(stem, title, caption, [sweep["run_id"]], figure, sweep_facts(sweep, [sweep["method"]]))


def widest(cells: list[dict[str, Any]]) -> str:
    """How far the numbers of a grid, which has no room for bars, may be off."""
    reach = [
        max(cell["ci_high"] - cell["lds"], cell["lds"] - cell["ci_low"])
        for cell in cells
        if cell["lds"] is not None and cell.get("ci_low") is not None and cell.get("ci_high") is not None
    ]
    return f"95 % intervals reach at most {max(reach):.3f} from the LDS." if reach else ""


def grid_of_cells(
    axis: Axes,
    cells: list[dict[str, Any]],
    down: str,
    rows: list[Any],
    across: str,
    columns: list[Any],
    shade: Normalize,
) -> None:
    values = np.full((len(rows), len(columns)), np.nan)
    for (row, row_value), (column, column_value) in product(enumerate(rows), enumerate(columns)):
        found = [cell for cell in cells if cell[down] == row_value and cell[across] == column_value]
        cell = found[0] if found else None
        draw_traces(axis, cell.get("traces", []) if cell else [], row, column)
        if cell is None or cell["lds"] is None:
            axis.plot([column - 0.5, column + 0.5], [row - 0.5, row + 0.5], color="#9aa0a8", linewidth=0.6)
            axis.plot([column - 0.5, column + 0.5], [row + 0.5, row - 0.5], color="#9aa0a8", linewidth=0.6)
            axis.text(column, row, "diverged" if cell else "not run", ha="center", va="center", fontsize=7)
            continue
        values[row, column] = cell["lds"]
        axis.text(column + 0.44, row - 0.4, f"{cell['lds']:.3f}", ha="right", va="top", fontsize=7.5, weight="bold")
        if cell.get("rhat") is not None and cell.get("ess") is not None:
            said = f"R-hat {cell['rhat']:.2f}\nESS {cell['ess']:.0f}"
            axis.text(column - 0.45, row - 0.42, said, ha="left", va="top", fontsize=4.6)
    axis.imshow(values, cmap=PALE, norm=shade, aspect="auto")
    axis.set_facecolor((FAINT, 0.4))
    axis.grid(False)
    axis.set_xticks(range(len(columns)), [setting_text(value) for value in columns])
    axis.set_yticks(range(len(rows)), [setting_text(value) for value in rows])
    axis.tick_params(length=0)
    axis.set_xlabel(across)
    axis.set_ylabel(down)


def draw_traces(axis: Axes, traces: list[list[float | None]], row: int, column: int) -> None:
    """The lower half of a cell: from the first to the last draw, from the lowest to the highest loss."""
    known = [np.array([np.nan if value is None else value for value in trace], dtype=float) for trace in traces]
    finite = np.concatenate([trace[np.isfinite(trace)] for trace in known]) if known else np.empty(0)
    if not finite.size:
        return
    low, reach = finite.min(), max(float(np.ptp(finite)), 1e-12)
    for trace in known:
        x = column - 0.46 + 0.92 * np.arange(len(trace)) / max(1, len(trace) - 1)
        axis.plot(x, row + 0.45 - 0.5 * (trace - low) / reach, linewidth=0.4, color=INK, alpha=0.75, label="_trace")


# ---- budgets ----

NEAREST = 1.4  # of two ticks: the larger over the smaller
DOTTED_AXES = ("checkpoints",)  # against seconds


def draw_budget(results: Results) -> Iterator[Drawing]:
    for _, budget in read_swept(results, "budget.json", schema.BudgetRecord):
        curves = budget["curves"]
        if not curves:
            continue
        spent_on = list(dict.fromkeys(curve["axis"] for curve in curves))
        figure, axes = panel_row(len(spent_on) + 1, 2.1, across=2)
        for axis in axes:
            axis.axhline(0, color=INK, linewidth=0.5)
        shapes = looks((curve["method"], curve_label(curve)) for curve in curves)
        for curve in curves:
            draw_curve(axes[spent_on.index(curve["axis"])], axes[-1], curve, shapes[curve_label(curve)])
        for axis, name in zip(axes, spent_on, strict=False):
            axis.set_xlabel(name)
            values = apart({p["value"] for c in curves if c["axis"] == name for p in c["points"]})
            logarithmic(axis, "x", values)
            axis.tick_params(axis="x", rotation=45 if len(values) > 4 else 0)
        axes[-1].set_xlabel("time")
        seconds_axis(axes[-1], "x")
        for axis in axes[::2]:
            axis.set_ylabel("LDS")
        title = f"{budget.get('description') or budget['task']}: LDS against budget"
        known = all(p.get("ci_low") is not None for c in curves for p in c["points"] if p["lds"] is not None)
        told = f"Bars: 95 % intervals{'' if known else ', where recorded'}."
        if any(curve.get("normalised") for curve in curves):
            told += " Filled: raw scores; hollow: train-normalised."
        if len(spent_on) > 1 and (dotted := [name for name in spent_on if name in DOTTED_AXES]):
            told += f" Dotted against time: {' and '.join(dotted)}."
        notes = [f"{told} {sweep_sizes(budget)}", budget_settings(curves)]
        finish(figure, title, [swept_on(budget), budget["device"]], notes, handles_of(axes, list(shapes))[:MOST_NAMES])
        caption = f"LDS against budget; {swept_on(budget)}, on {budget['device']}. {' '.join(notes)}".strip()
        parts = ["budget", budget["task"], budget["protocol"], f"alpha {alpha_words(budget)}", budget["device"]]
        stem = "-".join(file_slug(part) for part in parts)
        facts = sweep_facts(budget, in_order(curve["method"] for curve in curves))
        yield Drawing(stem, title, caption, [budget["run_id"]], figure, facts)


def curve_label(curve: dict[str, Any]) -> str:
    return series_label(curve["method"], curve.get("label") or curve["method"])


def scores_kind(curve: dict[str, Any]) -> str:
    return "train-normalised" if curve.get("normalised") else "raw"


def draw_curve(axis: Axes, seconds: Axes, curve: dict[str, Any], shape: dict[str, Any]) -> None:
    points = pd.DataFrame(curve["points"])
    numbers = [name for name in ("value", "seconds", "lds", "ci_low", "ci_high") if name in points]
    points[numbers] = points[numbers].astype(float)
    if curve.get("normalised"):
        shape = shape | {"markerfacecolor": "white"}
    bars = None
    if {"ci_low", "ci_high"} <= set(points):
        bars = [(points["lds"] - points["ci_low"]).clip(lower=0), (points["ci_high"] - points["lds"]).clip(lower=0)]
    axis.errorbar(points["value"], points["lds"], yerr=bars, elinewidth=0.8, **shape)
    if curve["axis"] in DOTTED_AXES:  # beside the same variant's other line
        shape = shape | {"linestyle": ":"}
    seconds.errorbar(points["seconds"], points["lds"], yerr=bars, elinewidth=0.8, **shape)


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
        told: dict[str, str] = {}
        for curve in own:
            options = {k: v for k, v in curve.get("options", {}).items() if axes != {k}}
            told[scores_kind(curve)] = settings_words(curve["method"], options)
        if len(set(told.values())) == 1:
            told = {"": next(iter(told.values()))}
        parts += [f"{label}{f' ({kind})' if kind else ''}: {text}" for kind, text in told.items() if text]
    return f"Settings. {'; '.join(parts)}." if parts else ""
