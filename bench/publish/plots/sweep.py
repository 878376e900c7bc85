"""What a method's settings and its budget buy, and what leaving examples out does: from sweeps, budgets and removals.

`sweep` (paper: fig:loss_trace_*, fig:lds_llm_sweep): a grid of cells with LDS and the loss traces of each; cells that
diverged say so. `budget`: LDS against draws, projection, checkpoints and seconds. `removal`: how a query's loss changes
when its most helpful examples are left out, against how many are.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
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
    panels,
    seconds_axis,
)
from bench.publish.plots.style import FAINT, INK, QUIET, in_order, look, looks
from bench.records import ANSWERS_FILE, Results
from bench.tables import setting_text
from retrain.safe_files import SafeFileError, validate

# Pale, so that traces and numbers can be read on it.
PALE = ListedColormap(0.6 + 0.4 * colormaps["viridis"](np.linspace(0.15, 1, 128))[:, :3])
NEAREST = 1.4  # of two ticks: the larger over the smaller
DOTTED_AXES = ("checkpoints",)  # against seconds
CONTROL = "control"  # the origin of a row that no method made


def read_swept(results: Results, name: str, kind: Any) -> Iterator[dict[str, Any]]:
    for path, record in results.read(name, kind):
        alpha = record["alpha"]
        axes, cells = record.get("axes", {}), record.get("cells", [])
        lacking = [axis for axis in axes if not all(axis in cell for cell in cells)]
        try:
            validate(alpha if isinstance(alpha, list) else [alpha], schema.Alphas, path, "alpha")
            if lacking or (not axes and "curves" not in record):
                raise SafeFileError(path, f"its cells lack {(lacking or ['an axis'])[0]!r}; see results/FILES.md")
            yield record
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


def facts(task: str, protocol: str, **more: list[str]) -> dict[str, list[str]]:
    return {"task": [task], "protocol": [protocol], **more}


# ---- sweeps ----


def draw_sweep(results: Results) -> Iterator[Drawing]:
    """Below each other, a grid of the last two settings for every value of those before them."""
    for sweep in read_swept(results, "sweep.json", schema.SweepRecord):
        axes, cells = sweep["axes"], sweep["cells"]
        parts = ["sweep", sweep["task"], sweep["protocol"], sweep["method"], *axes, f"alpha {alpha_words(sweep)}"]
        if len(axes) == 1:  # a grid of one row
            axes, cells = {"": [""], **axes}, [{"": "", **cell} for cell in cells]
        *outer, down, across = list(axes)
        fixed = [dict(zip(outer, values, strict=True)) for values in product(*(axes[name] for name in outer))]
        fixed = fixed[:MOST_PANELS]
        figure, grids = panels(len(fixed), 0.35 + 0.52 * len(axes[down]), across=1)
        scores = [cell["lds"] for cell in cells if cell["lds"] is not None]
        shade = Normalize(*((min(scores), max(scores)) if scores else (0.0, 1.0)))
        for axis, at in zip(grids, fixed, strict=True):
            own = [cell for cell in cells if all(cell[name] == value for name, value in at.items())]
            grid_of_cells(
                axis, {(cell[down], cell[across]): cell for cell in own[::-1]}, axes[down], axes[across], shade
            )
            axis.set(xlabel=across, ylabel=down)
            if at:
                axis.set_title(", ".join(f"{name} {setting_text(value)}" for name, value in at.items()))
        if scores:
            figure.colorbar(ScalarMappable(shade, PALE), ax=grids, label="LDS", aspect=30, fraction=0.04, pad=0.02)
        told = "In each cell: LDS of raw scores"
        told += ", R-hat and ESS" if any(cell.get("rhat") is not None for cell in cells) else ""
        told += "; below, the mean training loss at every draw, a line a chain, each cell on its own scale."
        told += " Crossed: diverged." if any(cell["lds"] is None for cell in cells) else ""
        options: dict[str, Any] = sweep.get("options") or {}
        others = settings_words(sweep["method"], {k: v for k, v in options.items() if k not in sweep["axes"]})
        yield finish(
            figure, "-".join(file_slug(part) for part in parts),
            f"{sweep.get('description') or sweep['task']}: {look(sweep['method'])['label']} over {down} and {across}",
            [swept_on(sweep), "raw scores"],
            [f"{told} {widest(cells)}{sweep_sizes(sweep)}", f"Other settings. {others[:600]}." if others else ""],
            [sweep["run_id"]], facts(sweep["task"], sweep["protocol"], method=[sweep["method"]]),
        )  # fmt: skip


def widest(cells: list[dict[str, Any]]) -> str:
    """How far the numbers of a grid, which has no room for bars, may be off."""
    known = [cell for cell in cells if None not in (cell["lds"], cell.get("ci_low"), cell.get("ci_high"))]
    reach = [max(cell["ci_high"] - cell["lds"], cell["lds"] - cell["ci_low"]) for cell in known]
    return f"95 % intervals reach at most {max(reach):.3f} from the LDS. " if reach else ""


def grid_of_cells(
    axis: Axes, cells: Mapping[Any, dict[str, Any]], rows: list[Any], columns: list[Any], shade: Normalize
) -> None:
    values = np.full((len(rows), len(columns)), np.nan)
    for (row, row_value), (column, column_value) in product(enumerate(rows), enumerate(columns)):
        cell = cells.get((row_value, column_value))
        draw_traces(axis, cell.get("traces", []) if cell else [], row, column)
        if cell is None or cell["lds"] is None:
            for turn in (0.5, -0.5):
                axis.plot([column - 0.5, column + 0.5], [row - turn, row + turn], color="#9aa0a8", linewidth=0.6)
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


def draw_budget(results: Results) -> Iterator[Drawing]:
    for budget in read_swept(results, "budget.json", schema.BudgetRecord):
        curves = budget["curves"]
        if not curves:
            continue
        spent_on = list(dict.fromkeys(curve["axis"] for curve in curves))
        figure, axes = panels(len(spent_on) + 1, 2.1, across=2)
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
            logarithmic(axis, "x", ticks)
            axis.tick_params(axis="x", rotation=45 if len(ticks) > 4 else 0)
        axes[-1].set_xlabel("time")
        seconds_axis(axes[-1], "x")
        for axis in axes[::2]:
            axis.set_ylabel("LDS")
        known = all(p.get("ci_low") is not None for c in curves for p in c["points"] if p["lds"] is not None)
        told = f"Bars: 95 % intervals{'' if known else ', where recorded'}."
        if any(curve.get("normalised") for curve in curves):
            told += " Filled: raw scores; hollow: train-normalised."
        if len(spent_on) > 1 and (dotted := [name for name in spent_on if name in DOTTED_AXES]):
            told += f" Dotted against time: {' and '.join(dotted)}."
        parts = ["budget", budget["task"], budget["protocol"], f"alpha {alpha_words(budget)}", budget["device"]]
        yield finish(
            figure, "-".join(file_slug(part) for part in parts),
            f"{budget.get('description') or budget['task']}: LDS against budget",
            [swept_on(budget), budget["device"]], [f"{told} {sweep_sizes(budget)}", budget_settings(curves)],
            [budget["run_id"]],
            facts(budget["task"], budget["protocol"], method=in_order(curve["method"] for curve in curves)),
            handles_of(axes, list(shapes))[:MOST_NAMES],
        )  # fmt: skip


def curve_label(curve: dict[str, Any]) -> str:
    return series_label(curve["method"], curve.get("label") or curve["method"])


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


def budget_settings(curves: list[dict[str, Any]]) -> str:
    """Without what the budget is spent on, where that is one thing; of either kind of scores where they differ."""
    parts = []
    for label in dict.fromkeys(map(curve_label, curves)):
        own = [curve for curve in curves if curve_label(curve) == label]
        axes = {curve["axis"] for curve in own}
        told: dict[str, str] = {}
        for curve in own:
            options = {k: v for k, v in curve.get("options", {}).items() if axes != {k}}
            told["train-normalised" if curve.get("normalised") else "raw"] = settings_words(curve["method"], options)
        if len(set(told.values())) == 1:
            told = {"": next(iter(told.values()))}
        parts += [f"{label}{f' ({kind})' if kind else ''}: {text}" for kind, text in told.items() if text]
    return f"Settings. {'; '.join(parts)}." if parts else ""


# ---- leaving examples out ----


def draw_removal(results: Results) -> Iterator[Drawing]:
    for _, record in results.read(ANSWERS_FILE, schema.AnswersRecord):
        rows = [row for row in record["rows"] if row["metric"] == "removal" and row["value"] is not None]
        for normalised in sorted({row["normalised"] for row in rows}) if record["question"] == "removal" else ():
            here = [row for row in rows if row["normalised"] == normalised]
            if len({row["at"] for row in here}) > 1:  # one amount is no curve
                yield removal_drawing(record, here, normalised)


def removal_drawing(record: Mapping[str, Any], rows: Sequence[dict[str, Any]], normalised: bool) -> Drawing:
    seeds = sorted({(row["alpha_attribution"], row["seed"]) for row in rows})[:MOST_PANELS]
    figure, axes = panels(len(seeds), 2.8)
    names = {row["label"]: series_label(row["method"], row["label"]) for row in rows if row["origin"] != CONTROL}
    shapes = looks((row["method"], names[row["label"]]) for row in rows if row["label"] in names)
    for number, label in enumerate(dict.fromkeys(row["label"] for row in rows if row["origin"] == CONTROL)):
        line = ((0, (1, 1.5)), (0, (4, 2)))[number % 2]
        shapes[label] = {"color": QUIET, "marker": "x+"[number % 2], "linestyle": line, "label": label}
    for axis, (share, seed) in zip(axes, seeds, strict=True):
        for name, shape in shapes.items():
            own = [row for row in rows if names.get(row["label"], row["label"]) == name]
            own = sorted(
                (r for r in own if (r["alpha_attribution"], r["seed"]) == (share, seed)), key=lambda r: r["at"]
            )
            ends = [
                [0.0 if row[end] is None else abs(row[end] - row["value"]) for row in own]
                for end in ("ci_low", "ci_high")
            ]
            values = [row["value"] for row in own]
            axis.errorbar([100 * row["at"] for row in own], values, yerr=ends, elinewidth=0.7, **shape)
        axis.axhline(0.0, color=QUIET, linewidth=0.6)
        logarithmic(axis, "x")
        axis.set_xlabel("% of the attributed examples left out")
        axis.set_title(f"seed {seed}, alpha_attribution {share:g}")
    axes[0].set_ylabel("change of the query's loss")
    task, protocol = (str(record["config"]["task"].get(name, "")) for name in ("name", "protocol"))
    told = dict.fromkeys(f"{names[r['label']]}: {r['settings'].replace(',', ', ')}" for r in rows if r["settings"])
    # A control's class may have too few examples for some queries: its point is a mean over the others.
    fewer = {
        f"{row['label']} at {100 * row['at']:.2g} %: {asked - row['num_undefined']} of {asked}"
        for row in rows
        if row["num_undefined"] and (asked := row["num_queries"])
    }
    bars = (
        "Mean over queries of the loss after retraining without them, less the mean loss with nothing removed. Bars: "
        "95 % intervals over queries and models. Grey: as many at random, or at random from the query's own class."
    )
    some = f"A mean over some queries alone: {'; '.join(sorted(fewer))}." if fewer else ""
    scores = "train-normalised" if normalised else "raw"
    parts = ["removal", task, protocol, record["run_id"][:6], *(["normalised"] if normalised else [])]
    return finish(
        figure, file_slug("-".join(parts), 120),
        f"{record.get('description') or task}: leaving out each query's most helpful examples",
        [f"task {task}, protocol {protocol}", f"{scores} scores", record["truth"]],
        [bars, some, f"Settings. {'; '.join(told)}." if told else ""], [record["run_id"]],
        facts(task, protocol, scores=[scores]), handles_of(axes, list(shapes))[:MOST_NAMES],
    )  # fmt: skip
