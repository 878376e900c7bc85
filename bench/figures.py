"""Draws every figure and table of the paper that the committed results allow, and says how to make the others.

    python -m bench.figures                        # everything, from results/ into results/figures
    python -m bench.figures --only lds seconds     # some of it
    python -m bench.figures --list                 # the names, what each shows and what it needs

Nothing is recomputed, and the same results give the same bytes. Seconds of different machines never share an axis:
each machine gets a figure of its own. `figures.json` beside the pictures holds their captions and the runs behind them.
"""

import argparse
import contextlib
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from bench import style
from bench.metrics import mean_and_standard_error
from bench.results import Results, bars_of, load_results, over_seeds
from bench.style import COLUMN, FAINT, INK, PAGE, in_order, look
from bench.tables import number, setting_text
from retrain.command import Parser
from retrain.safe_files import SafeFileError, read_text, write_whole

LANGUAGE_TASKS = ("pythia14m", "tinylm")
PAPER_LLM_TABLE = {"gradsim": 0.198, "ekfac": 0.221, "bif": 0.110}  # tab:LLM_LDS_scores
SCALING_COLUMNS = ("model", "parameters", "method", "fit_seconds", "score_seconds", "peak_memory_bytes", "device")
FORMATS = ("svg", "png", "pdf")
STRIP = 1.3  # height of EK-FAC's strip of tokens, in rows of the matrix above it


class UnusableError(ValueError):
    """A result file lacks what a figure needs; the message is one line that names it."""


@dataclass
class Drawing:
    """One picture or table, ready to be saved."""

    stem: str
    caption: str
    runs: list[str]
    figure: Figure | None = None
    table: pd.DataFrame | None = None


@dataclass(frozen=True)
class Kind:
    """A family of figures: what it shows, how it is drawn, and the command that makes what it needs."""

    name: str
    shows: str
    needs: str
    command: str
    draw: Callable[[Results], Iterator[Drawing]] = field(repr=False)


# ---- LDS curves ----


def draw_lds(results: Results) -> Iterator[Drawing]:
    yield from _lds_curves(results, normalised=False)


def draw_lds_normalised(results: Results) -> Iterator[Drawing]:
    yield from _lds_curves(results, normalised=True)


def _lds_curves(results: Results, normalised: bool) -> Iterator[Drawing]:
    rows = results.rows[results.rows["normalised"] == normalised] if len(results.rows) else results.rows
    for (name, protocol), group in rows.groupby(["name", "protocol"], sort=True):
        shares = sorted(group["alpha_attribution"].unique())
        figure, axes = panels(len(shares))
        for axis, share in zip(axes, shares, strict=True):
            here = group[group["alpha_attribution"] == share]
            lds_panel(axis, here, list(group["method"]))
            fewer = here["seed"].nunique() < group["seed"].nunique()  # than another panel of this figure has
            seeds = f" ({here['seed'].nunique()} seeds)" if fewer else ""
            axis.set_title(rf"$\alpha_{{\mathrm{{attribution}}}}$ = {share:g}{seeds}")
        finish(figure, axes, r"$\alpha_{\mathrm{retrain}}$", "LDS")
        kind = "train-normalised" if normalised else "raw"
        stem = f"lds-{'normalised-' if normalised else ''}{name}-{protocol}"
        keys = ["alpha_attribution", "alpha", "method"]
        bars = f"Bars: {bars_of(set(group.groupby(keys).size()))}."
        note(figure, bars, missing_ceiling(group), borrowed_ceiling(group))
        caption = (
            f"LDS of {kind} scores against the share of the attributed examples retrained on; "
            f"{first(group, 'description')}, protocol {protocol}. {bars} {ceiling_text(group)}{sizes(group)}"
        )
        yield Drawing(stem, caption, run_ids(group, ceilings=True), figure)


def lds_panel(axis: Axes, rows: pd.DataFrame, everybody: list[str]) -> None:
    """LDS against alpha, one line a method, over however many seeds there are."""
    alphas = sorted(rows["alpha"].unique())
    axis.axhline(0, color=INK, linewidth=0.5)
    methods = in_order(rows["method"])
    for position, method in enumerate(methods):
        block = rows[rows["method"] == method]
        points = []
        for alpha, cell in block.groupby("alpha", sort=True):
            mean, low, high = over_seeds(cell)
            points.append((alpha, mean, max(0.0, mean - low), max(0.0, high - mean)))
        x, y, low, high = np.array(points, dtype=float).T
        # A little to the side of each other, so that equal scores do not hide one another.
        spread = 0.012 * (position - (len(methods) - 1) / 2)
        axis.errorbar(x + spread, y, yerr=[low, high], capsize=1.5, elinewidth=0.8, **look(method, everybody))
    ceilings = rows.drop_duplicates(["alpha", "seed"]).groupby("alpha")["ceiling"].mean().dropna()
    if len(ceilings) == 1:
        alpha = ceilings.index[0]
        axis.plot(
            [alpha - 0.06, alpha + 0.06],
            [ceilings.iloc[0]] * 2,
            color=INK,
            linestyle="--",
            linewidth=0.9,
            label="ceiling",
        )
    elif len(ceilings):
        axis.plot(ceilings.index, ceilings, color=INK, linestyle="--", linewidth=0.9, label="ceiling")
    axis.set_xticks(alphas, [f"{alpha:g}" for alpha in alphas])
    axis.set_xlim(min(alphas) - 0.08, max(alphas) + 0.08)


def missing_ceiling(rows: pd.DataFrame) -> str:
    known = rows.groupby(["alpha_attribution", "alpha"])["ceiling"].count() > 0
    if known.all():
        return ""
    return f"Ceiling unknown{' where none is drawn' if known.any() else ''}: no replicates."


def borrowed_ceiling(rows: pd.DataFrame) -> str:
    """Where the ceiling comes from if these runs have no replicates."""
    groups = rows.groupby("ceiling_from", sort=True)
    runs = [f"{run} ({span(group, 'ceiling_subsets')} subsets)" for run, group in groups]
    return f"Ceiling from replicates in run {', '.join(runs)}." if runs else ""


def ceiling_text(rows: pd.DataFrame, name: str = "Dashed: the noise ceiling,") -> str:
    """The caption's sentences on the ceiling: what it is, and where it comes from."""
    text = f"{name} what a perfect prediction could reach. " if rows["ceiling"].notna().any() else ""
    if borrowed := borrowed_ceiling(rows):
        text += (
            f"{borrowed.removesuffix('.')}, which measured the same ground truth; its reliability is converted to the "
            "number of replicates here. "
        )
    return text + (f"{missing_ceiling(rows)} " if missing_ceiling(rows) else "")


def draw_seeds(results: Results) -> Iterator[Drawing]:
    """The paper's fig:individual_LDS_scores: a row of panels a seed."""
    rows = results.rows
    if not len(rows):
        return
    for (name, protocol, normalised), group in rows.groupby(["name", "protocol", "normalised"], sort=True):
        seeds, shares = sorted(group["seed"].unique()), sorted(group["alpha_attribution"].unique())
        if len(seeds) < 2:
            continue
        figure = style.new_figure(PAGE if len(shares) > 1 else COLUMN, 0.6 + 1.25 * len(seeds))
        grid = figure.subplots(len(seeds), len(shares), sharex=True, sharey=True, squeeze=False)
        for row, seed in enumerate(seeds):
            for column, share in enumerate(shares):
                axis = grid[row, column]
                here = group[(group["seed"] == seed) & (group["alpha_attribution"] == share)]
                if len(here):
                    lds_panel(axis, here, list(group["method"]))
                else:
                    axis.text(0.5, 0.5, "not run", transform=axis.transAxes, ha="center", va="center", color="#7f7f7f")
                if row == 0:
                    axis.set_title(rf"$\alpha_{{\mathrm{{attribution}}}}$ = {share:g}")
                if column == 0:
                    axis.set_ylabel(f"seed {seed}\nLDS")
                if row == len(seeds) - 1:
                    axis.set_xlabel(r"$\alpha_{\mathrm{retrain}}$")
        legend(figure, grid.ravel())
        note(figure, "Bars: 95 % intervals.", missing_ceiling(group), borrowed_ceiling(group))
        stem = f"seeds-{'normalised-' if normalised else ''}{name}-{protocol}"
        caption = (
            f"LDS of {'train-normalised' if normalised else 'raw'} scores, every seed by itself; "
            f"{first(group, 'description')}, protocol {protocol}. Bars: 95 % intervals. "
            f"{ceiling_text(group)}{sizes(group)}"
        )
        yield Drawing(stem, caption, run_ids(group, ceilings=True), figure)


# ---- cost ----


def timings(results: Results) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """(name, machine, rows): seconds may be compared within each, and only there."""
    rows = results.rows
    if not len(rows):
        return
    rows = rows[rows["seconds"].notna()].copy()
    # Scores from a cache carry the device they were computed on, which may not be the one that read them.
    here = [
        machine if device and str(machine).startswith(str(device)) else device
        for machine, device in zip(rows["machine"], rows["device"])
    ]
    rows["timed_on"] = here
    for (name, machine), group in rows.groupby(["name", "timed_on"], sort=True):
        yield str(name), str(machine), group


def draw_seconds(results: Results) -> Iterator[Drawing]:
    """The paper's fig:timings_bif-vs-ekfac, with every method."""
    for name, machine, group in timings(results):
        once = group.drop_duplicates(["method", "alpha_attribution", "seed", "protocol"])
        once = once[once["method"] != "random"]
        if once["alpha_attribution"].nunique() < 2:
            continue
        figure = style.new_figure(COLUMN, 2.5)
        axis = figure.subplots()
        for method in in_order(once["method"]):
            # Only points of the same settings are joined: a line says that nothing but its axis has changed.
            for position, (_, alike) in enumerate(once[once["method"] == method].groupby("settings", sort=True)):
                block = alike.groupby("alpha_attribution")["seconds"]
                middle = block.median()
                bars = [middle - block.min(), block.max() - middle]
                appearance = look(method, list(once["method"])) | ({"label": "_"} if position else {})
                axis.errorbar(middle.index, middle, yerr=bars, capsize=1.5, elinewidth=0.8, **appearance)
        logarithmic(axis, "x", sorted(once["alpha_attribution"].unique()))
        logarithmic(axis, "y")
        finish(figure, [axis], r"$\alpha_{\mathrm{attribution}}$", "seconds (fit + score)")
        caption = (
            f"Seconds of fitting and scoring against the share of the training set that is attributed; "
            f"{first(once, 'description')} on {machine}. Median over seeds, bars from the fastest to the slowest. "
            f"{differing_settings(once)}{sizes(once)}"
        )
        yield Drawing(f"seconds-{name}-{slug(machine)}", caption, run_ids(once), figure)


def differing_settings(rows: pd.DataFrame) -> str:
    """Says which methods were not run with the same settings throughout, and in what they differ."""
    found = []
    for method in in_order(rows["method"]):
        settings = [json.loads(text) for text in sorted(set(rows[rows["method"] == method]["settings"])) if text]
        options = {option for setting in settings for option in setting}
        for option in sorted(options):
            values = list(dict.fromkeys(str(setting.get(option)) for setting in settings))
            if len(values) > 1:
                found.append(f"{method}.{option} {' or '.join(values)}")
    return f"Points that are not joined differ in settings ({'; '.join(found)}). " if found else ""


def draw_pareto(results: Results) -> Iterator[Drawing]:
    """What one gets for the seconds: LDS against cost, with the methods that no other beats on both."""
    for name, machine, everything in timings(results):
        for protocol, group in everything.groupby("protocol", sort=True):
            # One share of the training set: the one most experiments were made at, 0.1 (the paper's) among equals.
            counts = group.groupby("alpha_attribution").size()
            share = max(counts.index, key=lambda value: (counts[value], value == 0.1))
            here = group[group["alpha_attribution"] == share]
            alphas = sorted(here["alpha"].unique())
            figure, axes = panels(len(alphas), height=2.3)
            for axis, alpha in zip(axes, alphas, strict=True):
                pareto_panel(axis, here[here["alpha"] == alpha])
                axis.set_title(rf"$\alpha_{{\mathrm{{retrain}}}}$ = {alpha:g}")
            finish(figure, axes, "seconds (fit + score)", "LDS")
            bars = f"Bars: {bars_of(set(here.groupby(['alpha', 'method', 'normalised']).size()))}."
            note(figure, bars)
            caption = (
                f"Cost and quality: LDS against seconds; {first(here, 'description')}, protocol {protocol}, "
                f"alpha_attribution {share:g}, on {machine}. Filled: raw scores; hollow: train-normalised. {bars} "
                f"The line joins what no other point beats on both axes. {sizes(here)}"
            )
            yield Drawing(f"pareto-{name}-{protocol}-{slug(machine)}", caption, run_ids(here), figure)


def pareto_panel(axis: Axes, rows: pd.DataFrame) -> None:
    points = []
    everybody = list(rows["method"])
    for normalised in (False, True):
        for method in in_order(rows["method"]):
            cell = rows[(rows["method"] == method) & (rows["normalised"] == normalised)]
            if not len(cell):
                continue
            mean, low, high = over_seeds(cell)
            bars = [[max(0.0, mean - low)], [max(0.0, high - mean)]]
            seconds = max(float(cell["seconds"].median()), 1e-3)
            shape = look(method, everybody) | {"linestyle": "none"}
            if normalised:
                shape |= {"label": "_", "markerfacecolor": "none" if method != "random" else shape["color"]}
            axis.errorbar(seconds, mean, yerr=bars, elinewidth=0.8, **shape)
            if method != "random":
                points.append((seconds, mean))
    front = pareto_front(points)
    if len(front) > 1:
        axis.plot(*np.array(front).T, color=INK, linewidth=0.7, zorder=0, drawstyle="steps-post")
    axis.axhline(0, color=INK, linewidth=0.5)
    logarithmic(axis, "x")


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (seconds, score) points that no other is both cheaper and better than, by rising cost."""
    front: list[tuple[float, float]] = []
    for cost, score in sorted(points, key=lambda point: (point[0], -point[1])):
        if math.isfinite(score) and (not front or score > front[-1][1]):
            front.append((cost, score))
    return front


# ---- language models ----


def draw_llm(results: Results) -> Iterator[Drawing]:
    """The paper's tab:LLM_LDS_scores."""
    rows = results.rows
    if not len(rows):
        return
    language = rows[rows["task"].isin(LANGUAGE_TASKS)]
    for (name, task, protocol), group in language.groupby(["name", "task", "protocol"], sort=True):
        lines = []
        for (alpha, normalised), block in group.groupby(["alpha", "normalised"], sort=True):
            for method in in_order(block["method"]):
                cell = block[block["method"] == method]
                mean, error = mean_and_standard_error(cell["lds"].to_numpy())
                ceiling = float(cell["ceiling"].mean())
                lines.append(
                    {
                        "method": look(method)["label"],
                        "scores": "train-normalised" if normalised else "raw",
                        "alpha": f"{alpha:g}",
                        "LDS": number(mean),
                        "spread over queries": number(float(cell["spread"].mean())),
                        "95 % interval": f"[{number(cell['ci_low'].mean())}, {number(cell['ci_high'].mean())}]",
                        "standard error over seeds": number(error),
                        "ceiling": number(ceiling),
                        "LDS / ceiling": number(mean / ceiling, 2) if ceiling > 0 else "-",
                        "undefined": str(int(cell["num_undefined"].sum())),
                        "paper": number(PAPER_LLM_TABLE.get(method)) if task == "pythia14m" and not normalised else "-",
                        "run": ", ".join(run_ids(cell)),
                        "ceiling's run": ", ".join(sorted(cell["ceiling_from"].fillna(cell["run_id"]).unique()))
                        if ceiling > 0
                        else "-",
                    }
                )
        caption = (
            f"LDS of finetuning; {first(group, 'description')}, protocol {protocol}. "
            f"{ceiling_text(group, 'Ceiling:')}{sizes(group)}"
        )
        runs = run_ids(group, ceilings=True)
        yield Drawing(f"llm-{name}-{protocol}", caption, runs, table=pd.DataFrame(lines))


# ---- scaling, sweeps and budgets: see results/README.md for their files ----


def draw_scaling(results: Results) -> Iterator[Drawing]:
    """The paper's fig:benchmark_big_ek-fac: seconds, memory and disk against parameters."""
    from bench.scaling.figure import PANELS, draw_laws, draw_panel, explain, marks, usable

    for path in results.files("scaling.csv"):
        everything = read_table(path, SCALING_COLUMNS)
        rows = usable(everything)
        for device, group in rows.groupby("device", sort=True):
            shown = [(name, unit) for name, unit in PANELS if name in group and (group[name] > 0).any()]
            figure, axes = panels(len(shown), height=2.4, share_y=False)
            laws: list[str] = []
            for axis, (column, unit) in zip(axes, shown, strict=True):
                draw_panel(axis, group, column, unit)
                laws += draw_laws(axis, group) if column == "seconds" else []
                logarithmic(axis, "x")
                logarithmic(axis, "y")
                models = group.drop_duplicates("parameters")
                if len(models) <= 3:  # too narrow a range for round numbers
                    axis.set_xticks(models["parameters"], models["model"])
                axis.set_xlabel("parameters")
                axis.set_ylabel(
                    {"seconds": "seconds (fit + score)", "peak_memory_bytes": "peak memory, GiB"}.get(
                        column, "written by the fit, GiB"
                    )
                )
            legend(figure, axes)
            note(figure, marks(group))
            here = everything[everything["device"] == device]
            caption = f"Seconds, peak memory and disk against model size on {device}. {explain(group, here, laws)}"
            stem = f"scaling-{slug(path.parent.name)}-{slug(str(device))}"
            yield Drawing(stem, caption, sorted(set(group.get("run_id", pd.Series(dtype=str)).dropna())), figure)


def draw_sweep(results: Results) -> Iterator[Drawing]:
    """The paper's fig:loss_trace_*: a grid of loss traces with the LDS in each cell; cells that diverged say so."""
    for path, sweep in results.read("sweep.json"):
        try:
            axes_values, cells = sweep["axes"], sweep["cells"]
            if len(axes_values) == 1:
                yield sweep_line(sweep, f"sweep-{slug(path.parent.name)}")
                continue
            *outer, down, across = list(axes_values)
            outer_values: list[tuple[Any, ...]] = [()]
            for name in outer:
                outer_values = [(*values, value) for values in outer_values for value in axes_values[name]]
            for values in outer_values:
                fixed = dict(zip(outer, values, strict=True))
                chosen = [cell for cell in cells if all(cell[name] == value for name, value in fixed.items())]
                figure = sweep_grid(chosen, down, axes_values[down], across, axes_values[across])
                text = ", ".join(f"{name} {setting_text(value)}" for name, value in fixed.items())
                parts = [slug(f"{name}{setting_text(value)}") for name, value in fixed.items()]
                stem = "-".join(["sweep", slug(path.parent.name), *parts])
                caption = (
                    f"Loss traces and LDS of {sweep['method']} over {down}, {across}{f' at {text}' if text else ''}; "
                    f"{swept_on(sweep)}, chosen on {sweep['split']} queries. Crossed cells diverged. "
                    f"{widest(chosen)}{sweep_sizes(sweep)}"
                )
                yield Drawing(stem, caption, [sweep["run_id"]], figure)
        except (KeyError, TypeError, ValueError) as error:
            raise UnusableError(
                f"{path}: lacks what a sweep needs ({type(error).__name__}: {error}); see results/README.md"
            ) from None


def sweep_line(sweep: dict[str, Any], stem: str) -> Drawing:
    """LDS against one setting, raw and train-normalised; values that diverged are left out and counted."""
    ((name, values),) = sweep["axes"].items()
    by_value = {setting_text(cell[name]): cell for cell in sweep["cells"]}
    ordered = [by_value[setting_text(value)] for value in sorted(values) if setting_text(value) in by_value]
    positions = range(len(ordered))
    figure, (axis,) = panels(1, height=2.2)
    shape = look(sweep["method"], [sweep["method"]])
    axis.axhline(0, color=INK, linewidth=0.5)  # so that the axis starts there
    known = all(cell.get("ci_low") is not None for cell in ordered if cell["lds"] is not None)
    for column, change in (("lds", {}), ("lds_normalised", {"markerfacecolor": "none", "label": "train-normalised"})):
        points = [(x, cell) for x, cell in zip(positions, ordered) if cell.get(column) is not None]
        if not points:
            continue
        # A little to the side of each other, so that equal scores do not hide one another.
        x = np.array([x for x, _ in points]) + (-0.05 if column == "lds" else 0.05)
        y = np.array([cell[column] for _, cell in points])
        ends = None
        if known and column == "lds":  # the record's intervals are of raw scores
            ends = np.array([[cell["lds"] - cell["ci_low"], cell["ci_high"] - cell["lds"]] for _, cell in points])
            ends = ends.T.clip(min=0.0)
        axis.errorbar(x, y, yerr=ends, capsize=1.5, elinewidth=0.8, **(shape | change))
    axis.set_xticks(positions, [setting_text(cell[name]) for cell in ordered])
    axis.set_xlabel(name)
    axis.set_ylabel("LDS")
    legend(figure, [axis])
    missing = sum(cell["lds"] is None for cell in ordered)
    bars = "Bars: 95 % intervals, recorded for raw scores only." if known else "No intervals recorded."
    note(figure, bars, sweep_sizes(sweep))
    caption = (
        f"LDS of {sweep['method']} against {name}; {swept_on(sweep)}, {sweep['split']} queries; "
        f"{missing} values diverged. {bars} {sweep_sizes(sweep)}"
    )
    return Drawing(stem, caption, [sweep["run_id"]], figure)


def swept_on(record: dict[str, Any]) -> str:
    return (
        f"task {record['task']}, protocol {record['protocol']}, alpha {record['alpha']:g}, "
        f"seed {record.get('seed', '?')}"
    )


def sweep_sizes(record: dict[str, Any]) -> str:
    """n of a sweep or a budget."""
    subsets, replicates = record.get("num_subsets", "?"), record.get("replicates", "?")
    queries = f", {record['num_queries']:,} queries" if record.get("num_queries") else ""
    return f"n: 1 seed, {subsets} subsets, {replicates} replicate{'s' * (replicates != 1)}{queries}."


def widest(cells: list[dict[str, Any]]) -> str:
    """How far the numbers of a grid, which has no room for bars, may be off."""
    reach = [
        max(cell["ci_high"] - cell["lds"], cell["lds"] - cell["ci_low"])
        for cell in cells
        if cell["lds"] is not None and cell.get("ci_low") is not None and cell.get("ci_high") is not None
    ]
    return f"95 % intervals reach at most {max(reach):.3f} from the LDS. " if reach else ""


def sweep_grid(cells: list[dict[str, Any]], down: str, rows: list[Any], across: str, columns: list[Any]) -> Figure:
    from matplotlib import colormaps

    figure = style.new_figure(min(PAGE, max(COLUMN, 0.5 + 1.3 * len(columns))), 0.7 + 0.85 * len(rows))
    grid = figure.subplots(len(rows), len(columns), sharex=True, sharey=False, squeeze=False)
    scores = [cell["lds"] for cell in cells if cell["lds"] is not None]
    lowest, highest = (min(scores), max(scores)) if scores else (0.0, 1.0)
    for row, row_value in enumerate(rows):
        for column, column_value in enumerate(columns):
            axis = grid[row, column]
            axis.grid(False)
            axis.tick_params(labelsize=5.5, length=2)
            found = [cell for cell in cells if cell[down] == row_value and cell[across] == column_value]
            cell = found[0] if found else None
            if cell is None or cell["lds"] is None:
                axis.set_facecolor((FAINT, 0.4))
                axis.plot([0, 1], [0, 1], [0, 1], [1, 0], color="#9aa0a8", linewidth=0.6, transform=axis.transAxes)
                axis.text(
                    0.5,
                    0.5,
                    "NaN" if cell else "not run",
                    transform=axis.transAxes,
                    ha="center",
                    va="center",
                    fontsize=7,
                )
                axis.set_yticks([])
            else:
                for trace in cell.get("traces", []):
                    axis.plot(trace, linewidth=0.5, color=INK, alpha=0.75)
                low, high = axis.get_ylim()
                axis.set_ylim(low, high + 0.4 * (high - low))  # room for the number
                share = (cell["lds"] - lowest) / (highest - lowest) if highest > lowest else 1.0
                axis.set_facecolor((*colormaps["viridis"](0.25 + 0.75 * share)[:3], 0.35))
                axis.text(0.96, 0.92, f"{cell['lds']:.3f}", transform=axis.transAxes, ha="right", va="top", fontsize=7)
            if row == 0:
                axis.set_title(f"{across} {setting_text(column_value)}", fontsize=7)
            if column == 0:
                axis.set_ylabel(f"{down}\n{setting_text(row_value)}\nloss", fontsize=6.5)
            if row == len(rows) - 1:
                axis.set_xlabel("draw", fontsize=6.5)
    return figure


def draw_budget(results: Results) -> Iterator[Drawing]:
    """LDS against the size of the budget (draws, projection, checkpoints) and against seconds."""
    for path, budget in results.read("budget.json"):
        try:
            curves = budget["curves"]
            sizes_of = list(dict.fromkeys(curve["axis"] for curve in curves))
            figure, axes = panels(len(sizes_of) + 1, height=2.4)
            names = [curve["method"] for curve in curves]
            for curve in curves:
                points = pd.DataFrame(curve["points"])
                shape = look(curve["method"], names)
                if curve.get("normalised"):
                    shape |= {"markerfacecolor": "none", "label": shape["label"] + ", normalised"}
                bars = None
                if {"ci_low", "ci_high"} <= set(points):
                    bars = [points["lds"] - points["ci_low"], points["ci_high"] - points["lds"]]
                axis = axes[sizes_of.index(curve["axis"])]
                axis.errorbar(points["value"], points["lds"], yerr=bars, capsize=1.5, elinewidth=0.8, **shape)
                axis.set_xlabel(curve["axis"])
                axes[-1].errorbar(
                    points["seconds"], points["lds"], yerr=bars, capsize=1.5, elinewidth=0.8, **(shape | {"label": "_"})
                )
            axes[-1].set_xlabel("seconds")
            for axis in axes:
                axis.axhline(0, color=INK, linewidth=0.5)
            for axis, name in zip(axes, sizes_of, strict=False):
                logarithmic(axis, "x", sorted({p["value"] for c in curves if c["axis"] == name for p in c["points"]}))
            logarithmic(axes[-1], "x")
            axes[0].set_ylabel("LDS")
            legend(figure, axes)
            note(figure, "Bars: 95 % intervals.", sweep_sizes(budget))
            caption = (
                f"LDS against budget; {swept_on(budget)}, {budget.get('split', '?')} queries, on {budget['device']}. "
                f"Bars: 95 % intervals. {sweep_sizes(budget)}"
            )
            yield Drawing(f"budget-{slug(path.parent.name)}", caption, [budget["run_id"]], figure)
        except (KeyError, TypeError, ValueError) as error:
            raise UnusableError(
                f"{path}: lacks what a budget curve needs ({type(error).__name__}: {error}); see results/README.md"
            ) from None


# ---- what the scores look like ----


def draw_examples(results: Results) -> Iterator[Drawing]:
    """The paper's fig:image-full: a query, and the training images that two methods find most and least influential."""
    for path, content in results.read("examples.json"):
        if content.get("kind") != "images":
            continue
        tiles = read_tiles(path.parent / content["sprite"], content)
        methods, queries = content["methods"], content["queries"]
        shown = len(queries[0]["methods"][methods[0]]["helpful"])
        columns = 1 + 2 * shown * len(methods)
        unit = PAGE / (columns + 0.9 * len(methods) + 0.5)
        figure = Figure(figsize=(PAGE, unit * 1.05 * len(queries) + 0.2))
        top = 1 - 0.2 / figure.get_figheight()
        height = top / len(queries)
        width = unit / PAGE
        for row, query in enumerate(queries):
            bottom = top - (row + 1) * height
            place = [0.004, bottom, width * 0.94, height * 0.92]
            show_tile(figure, place, tiles[query["image"]], INK)
            left = width * 1.5
            for method in methods:
                for side in ("helpful", "harmful"):
                    for example in query["methods"][method][side]:
                        same = example["label"] == query["label"]
                        show_tile(
                            figure,
                            [left, bottom, width * 0.94, height * 0.92],
                            tiles[example["image"]],
                            "#0072b2" if same else "#d55e00",
                        )
                        left += width
                    left += width * 0.2
                left += width * 0.5
        figure.text(0.004, top + 0.01, "query", fontsize=7, va="bottom")
        left = width * 1.5
        for method in methods:
            label = look(method)["label"]
            figure.text(left, top + 0.01, f"{label}: lower its loss most", fontsize=6.5, va="bottom")
            figure.text(left + width * (shown + 0.2), top + 0.01, "raise it most", fontsize=6.5, va="bottom")
            left += width * (2 * shown + 0.9)
        caption = (
            f"Queries (left) and the training images whose inclusion lowers or raises the query's loss most, by "
            f"{' and '.join(look(method)['label'] for method in methods)} ({content['scores']} scores); "
            f"{content['description']}, seed {content['seed']}. Blue frame: the query's own class; orange: another."
        )
        yield Drawing(f"examples-{slug(path.parent.name)}", caption, [], figure)


def read_tiles(path: Path, content: dict[str, Any]) -> list[np.ndarray]:
    from matplotlib.image import imread

    if path.parent.resolve() not in path.resolve().parents:
        raise UnusableError(f"{path}: the sprite must lie beside its examples.json")
    sheet = imread(path)
    height, width = content["tile"]
    across = sheet.shape[1] // width
    count = across * (sheet.shape[0] // height)
    corners = [(k // across * height, k % across * width) for k in range(count)]
    return [sheet[y : y + height, x : x + width] for y, x in corners]


def show_tile(figure: Figure, place: Sequence[float], tile: np.ndarray, colour: str) -> None:
    axis = figure.add_axes(tuple(place))  # type: ignore[arg-type]
    axis.imshow(tile, cmap="gray", vmin=0, vmax=1, interpolation="nearest", aspect="equal")
    axis.set_xticks([])
    axis.set_yticks([])
    for spine in axis.spines.values():
        spine.set_visible(True)
        spine.set_color(colour)
        spine.set_linewidth(1.0)


def draw_tokens(results: Results) -> Iterator[Drawing]:
    """The paper's fig:lang-main: query tokens against training tokens, coloured by signed influence."""
    for path, content in results.read("examples.json"):
        if content.get("kind") != "tokens":
            continue
        for pair in content["pairs"]:
            matrix = np.array(pair["bif"], dtype=float)
            rows, columns = len(pair["query_tokens"]), len(pair["train_tokens"])
            strip = pair.get("ekfac")
            figure = style.new_figure(PAGE, min(8.5, 1.6 + 0.115 * rows + (0.3 if strip else 0)))
            if strip:
                upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[max(6, rows), STRIP])
            else:
                upper, lower = figure.subplots(), None
            limit = float(np.abs(matrix).max()) or 1.0
            image = upper.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
            figure.colorbar(image, ax=upper, label="normalised BIF", shrink=0.8)
            upper.set_yticks(range(rows), [visible(token) for token in pair["query_tokens"]], fontsize=5)
            upper.set_ylabel("query")
            bottom = upper
            if strip and lower is not None:
                values = np.array(strip, dtype=float)[None]
                limit = float(np.abs(values).max()) or 1.0
                strip_image = lower.imshow(
                    values, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest"
                )
                # As wide as the bar above, which is a twentieth of 0.8 of the matrix's height.
                scale = figure.colorbar(strip_image, ax=lower, aspect=STRIP / (0.8 * max(6, rows) / 20))
                end = plain(float(f"{limit:.2g}"))
                scale.set_ticks([-limit, 0, limit], labels=[f"\u2212{end}", "0", end], fontsize=5)
                lower.set_yticks([0], ["EK-FAC"], fontsize=6)
                lower.grid(False)
                bottom = lower
            bottom.set_xticks(
                range(columns), [visible(token) for token in pair["train_tokens"]], rotation=90, fontsize=5
            )
            bottom.set_xlabel("training sequence")
            upper.grid(False)
            caption = (
                f"Query {pair['query']} against training sequence {pair['train']}, token by token; blue: seeing the "
                f"training token lowers the query token's loss (negative influence). "
                f"{'Below: EK-FAC with the whole query, on a scale of its own. ' if strip else ''}"
                f"{content['description']}, seed {content['seed']}."
            )
            yield Drawing(f"tokens-{slug(path.parent.name)}-{pair['query']}-{pair['train']}", caption, [], figure)


def visible(token: str) -> str:
    text = token.replace("\n", "\\n").replace("\t", "\\t").replace("$", "\\$")
    return text if text.strip() else "\u00b7" * max(1, len(text))


# ---- shared pieces ----


def panels(count: int, height: float = 2.2, share_y: bool = True) -> tuple[Figure, list[Axes]]:
    """A row of panels, at most four beside each other."""
    across = min(count, 4)
    down = -(-count // across)
    figure = style.new_figure(COLUMN if count == 1 else PAGE, 0.25 + height * down)
    grid = figure.subplots(down, across, sharey=share_y, squeeze=False)
    axes = list(grid.ravel())
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def logarithmic(axis: Axes, which: str, ticks: Sequence[float] | None = None) -> None:
    """A logarithmic axis with plain numbers: 0.1, 1, 10; or ticks at just these values."""
    getattr(axis, f"set_{which}scale")("log")
    line = getattr(axis, f"{which}axis")
    low, high = getattr(axis, f"get_{which}lim")()
    steps = (1.0, 2.0, 5.0) if high < 100 * low else (1.0,)
    line.set_major_locator(FixedLocator(list(ticks)) if ticks is not None else LogLocator(10, subs=steps, numticks=8))
    line.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    line.set_minor_formatter(NullFormatter())


def plain(value: float) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:g} {name}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def finish(figure: Figure, axes: Sequence[Axes], x: str, y: str) -> None:
    for axis in axes:
        axis.set_xlabel(x)
    axes[0].set_ylabel(y)
    legend(figure, axes)


def legend(figure: Figure, axes: Any) -> None:
    """One for the whole figure, above the panels, each name once."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        found |= {"ceiling": found.pop("ceiling")} if "ceiling" in found else {}
        wide = figure.get_figwidth() > COLUMN
        across = min(len(found), 6 if wide else 2 if len(found) == 4 else 3)
        figure.legend(
            found.values(), found.keys(), loc="outside upper center", ncols=across, handlelength=2.6, columnspacing=1.2
        )


def note(figure: Figure, *sentences: str) -> None:
    """What a reader of the picture alone must know, in small letters below it; the figure grows by its lines."""
    width = int(21 * figure.get_figwidth())  # letters of this size to the inch
    text = " ".join(filter(None, sentences))
    if len(text) > width:
        text = "\n".join(textwrap.fill(sentence, width) for sentence in sentences if sentence)
    figure.set_figheight(figure.get_figheight() + 0.04 + 0.1 * (text.count("\n") + 1))
    figure.supxlabel(text, fontsize=6, color="#6b7280")


def read_table(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    import io

    try:
        frame = pd.read_csv(io.StringIO(read_text(path)))
    except (SafeFileError, ValueError) as error:
        raise UnusableError(f"{path}: is no readable CSV ({error})") from None
    if missing := [column for column in columns if column not in frame]:
        raise UnusableError(f"{path}: lacks the columns {', '.join(missing)}; see results/README.md")
    return frame


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def first(rows: pd.DataFrame, column: str) -> str:
    return str(rows[column].iloc[0] or rows["task"].iloc[0])


def run_ids(rows: pd.DataFrame, ceilings: bool = False) -> list[str]:
    """The runs behind the rows, with those that only the ceiling comes from or without."""
    return sorted({*rows["run_id"].dropna(), *(rows["ceiling_from"].dropna() if ceilings else [])})


def span(rows: pd.DataFrame, column: str) -> str:
    values = sorted(int(value) for value in rows[column].dropna().unique())
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}" if values else "?"


def sizes(rows: pd.DataFrame) -> str:
    seeds = sorted(rows["seed"].unique())
    return (
        f"n: {len(seeds)} seed{'s' * (len(seeds) > 1)} ({', '.join(map(str, seeds))}), "
        f"{span(rows, 'num_subsets')} subsets, {span(rows, 'num_replicates')} replicate(s), "
        f"{span(rows, 'num_queries')} queries, {int(rows['num_undefined'].sum())} undefined values."
    )


CIFAR = "python -m bench.lds --task cifar10 --alpha 0.1 0.3 0.5 0.7 --alpha-attribution 0.01 0.1 1.0 --seeds 1 2 3 4 42"
KINDS = (
    Kind(
        "lds",
        "LDS against alpha_retrain, a panel for each alpha_attribution (paper: fig:retraining)",
        "rows of bench.lds",
        f"{CIFAR} --out results/cifar10    # or, on a laptop: python -m bench.lds --alpha 0.1 --out results/digits",
        draw_lds,
    ),
    Kind(
        "lds-normalised",
        "the same for train-normalised scores",
        "rows of bench.lds",
        f"{CIFAR} --out results/cifar10",
        draw_lds_normalised,
    ),
    Kind(
        "seeds",
        "every seed by itself (paper: fig:individual_LDS_scores)",
        "rows of two seeds or more",
        f"{CIFAR} --out results/cifar10",
        draw_seeds,
    ),
    Kind(
        "seconds",
        "seconds against alpha_attribution, a figure for each machine (paper: fig:timings_bif-vs-ekfac)",
        "rows at two values of alpha_attribution or more, from one machine",
        f"{CIFAR} --out results/cifar10",
        draw_seconds,
    ),
    Kind(
        "pareto",
        "LDS against seconds, and what no other method beats on both",
        "rows of bench.lds",
        f"{CIFAR} --out results/cifar10",
        draw_pareto,
    ),
    Kind(
        "llm",
        "the table of finetuning LDS (paper: tab:LLM_LDS_scores)",
        "rows of a language task",
        "python -m bench.lds --task tinylm --alpha 0.5 --out results/tinylm",
        draw_llm,
    ),
    Kind(
        "scaling",
        "seconds, memory and disk against model size (paper: fig:benchmark_big_ek-fac)",
        "scaling.csv",
        "python -m bench.scaling --out results/scaling    # on a CPU it takes the two smallest models",
        draw_scaling,
    ),
    Kind(
        "sweep",
        "grids of loss traces and LDS over sampler settings (paper: fig:loss_trace_*)",
        "sweep.json",
        "python -m bench.sweep --task cifar10 --alpha 0.1 --out results/sweep",
        draw_sweep,
    ),
    Kind(
        "budget",
        "LDS against draws and seconds",
        "budget.json",
        "python -m bench.sweep --budget --task cifar10 --alpha 0.1 --out results/budget",
        draw_budget,
    ),
    Kind(
        "examples",
        "queries and their most and least influential training images (paper: fig:image-full)",
        "examples.json of an image task",
        "python -m bench.examples --task digits --out results/examples  # from the scores that bench.lds cached",
        draw_examples,
    ),
    Kind(
        "tokens",
        "query tokens against training tokens (paper: fig:lang-main)",
        "examples.json of a language task",
        "python -m bench.examples --task tinylm --out results/examples",
        draw_tokens,
    ),
)


# ---- the command ----


def markdown_table(table: pd.DataFrame) -> str:
    lines = ["| " + " | ".join(table.columns) + " |", "| " + " | ".join("---" for _ in table.columns) + " |"]
    lines += ["| " + " | ".join(str(cell).replace("|", "/") for cell in row) + " |" for row in table.to_numpy()]
    return "\n".join(lines) + "\n"


def write(drawing: Drawing, out: Path, formats: tuple[str, ...]) -> list[str]:
    if drawing.figure is not None:
        return [path.name for path in style.save(drawing.figure, out / drawing.stem, formats)]
    assert drawing.table is not None
    names = [f"{drawing.stem}.csv", f"{drawing.stem}.md"]
    for name, text in zip(names, (drawing.table.to_csv(index=False), markdown_table(drawing.table)), strict=True):
        write_whole(out / name, text)
    return names


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.figures", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--results", default="results", help="where the results are (default: %(default)s)")
    parser.add_argument("--out", help="where the figures go (default: figures inside the results)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"some of: {', '.join(kind.name for kind in KINDS)}")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["svg", "png"], help="(default: svg png)")
    parser.add_argument("--list", action="store_true", help="name every figure and what it needs")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    import matplotlib

    parser = make_parser()
    arguments = parser.parse_args(sys.argv[1:] if argv is None else list(argv))
    if arguments.list:
        print("\n".join(f"{kind.name:15} {kind.shows}\n{'':15} needs {kind.needs}: {kind.command}" for kind in KINDS))
        return 0
    chosen = {kind.name: kind for kind in KINDS if not arguments.only or kind.name in arguments.only}
    if unknown := [name for name in arguments.only or [] if name not in chosen]:
        parser.error(f'unknown figure "{unknown[0]}"; available: {", ".join(kind.name for kind in KINDS)}')
    if not Path(arguments.results).is_dir():
        parser.error(
            f'--results "{arguments.results}" is no folder; expected one with run records, made by --out of bench.lds'
        )
    results = load_results(arguments.results)
    out = Path(arguments.out or Path(arguments.results) / "figures")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f'--out "{out}" cannot be made: {error.strerror}')
    index: dict[str, Any] = {}
    missing: list[Kind] = []
    settings: Any = {**matplotlib.rcParamsDefault, "backend": "agg", **style.RC}  # not the user's own matplotlibrc
    with matplotlib.rc_context(settings):
        for kind in chosen.values():
            drawn = 0
            try:
                for drawing in kind.draw(results):
                    files = write(drawing, out, tuple(arguments.formats))
                    index[drawing.stem] = {
                        "kind": kind.name, "caption": drawing.caption, "runs": drawing.runs, "files": files,
                    }  # fmt: skip
                    print(f"{kind.name}: {out / files[0]}" + (f" and {', '.join(files[1:])}" if files[1:] else ""))
                    drawn += 1
            except UnusableError as error:
                results.problems.append(str(error))
            if not drawn:
                missing.append(kind)
    write_index(out / "figures.json", index, whole=not arguments.only)
    for kind in missing:
        print(f"{kind.name}: missing, needs {kind.needs}; make it with\n    {kind.command}")
    for problem in results.problems:
        print(f"{parser.prog}: {problem}", file=sys.stderr)
    return 1 if results.problems or (arguments.only and missing) else 0


def write_index(path: Path, index: dict[str, Any], whole: bool) -> None:
    """With --only, the captions of the other figures stay."""
    if not whole and path.exists():
        with contextlib.suppress(ValueError):
            index = json.loads(path.read_text()) | index
    write_whole(path, json.dumps(dict(sorted(index.items())), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
