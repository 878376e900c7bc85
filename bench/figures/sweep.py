"""LDS over the settings of a method: grids with the loss traces of every cell, or a line where one setting is swept.

`python -m bench.figures --only sweep` (paper: fig:loss_trace_*, fig:lds_llm_sweep). Cells that diverged say so.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure

from bench import schema
from bench.figures.drawing import Drawing, frame, panel_row
from bench.identity import file_slug, settings_words
from bench.publish.plots.style import FAINT, INK, PaperSize, look, new_figure
from bench.records import Results
from bench.tables import setting_text
from retrain.safe_files import SafeFileError, validate

# Pale, so that traces and numbers can be read on it.
PALE = ListedColormap(0.6 + 0.4 * colormaps["viridis"](np.linspace(0.15, 1, 128))[:, :3])


def draw_sweep(results: Results, size: PaperSize) -> Iterator[Drawing]:
    for path, sweep in read_swept(results, "sweep.json", schema.SweepRecord):
        if not results.shows(sweep["method"]):
            continue
        axes, cells = sweep["axes"], sweep["cells"]
        if lacking := [name for name in axes if not all(name in cell for cell in cells)] or (not axes and ["an axis"]):
            results.note(f"{path}: its cells lack {lacking[0]!r}; see results/README.md")
            continue
        names = "-".join(file_slug(name) for name in axes)
        stem = f"sweep-{file_slug(sweep['task'])}-{file_slug(sweep['protocol'])}-{file_slug(sweep['method'])}-{names}"
        stem += f"-alpha-{file_slug(alpha_words(sweep))}"
        if len(axes) == 1:
            yield sweep_line(sweep, stem, size)
            continue
        *outer, down, across = list(axes)
        for values in product(*(axes[name] for name in outer)):
            fixed = dict(zip(outer, values, strict=True))
            chosen = [cell for cell in cells if all(cell[name] == value for name, value in fixed.items())]
            parts = [file_slug(f"{name}-{setting_text(value)}") for name, value in fixed.items()]
            yield sweep_grid(sweep, chosen, fixed, down, across, "-".join([stem, *parts]), size)


def swept_on(record: dict[str, Any]) -> str:
    seed = record.get("seed", "?")
    split = f", {record['split']} queries" if "split" in record else ""
    return f"task {record['task']}, protocol {record['protocol']}, alpha {alpha_words(record)}, seed {seed}{split}"


def alpha_words(record: dict[str, Any]) -> str:
    """One number, or those that LDS is the mean over."""
    alphas = record["alpha"] if isinstance(record["alpha"], list) else [record["alpha"]]
    return " and ".join(f"{alpha:g}" for alpha in alphas)


def read_swept(results: Results, name: str, kind: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path, record in results.read(name, kind):
        try:
            alpha = record["alpha"]
            validate(alpha if isinstance(alpha, list) else [alpha], schema.Alphas, path, "alpha")
            yield path, record
        except SafeFileError as error:
            results.note(str(error))


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
    words = settings_words(sweep["method"], kept)
    return f"Other settings. {words[:600]}." if words else ""


def sweep_line(sweep: dict[str, Any], stem: str, size: PaperSize) -> Drawing:
    """LDS against one setting, raw and train-normalised; values that diverged are left out and counted."""
    ((name, values),) = sweep["axes"].items()
    by_value = {setting_text(cell[name]): cell for cell in sweep["cells"]}
    in_turn = sorted(values, key=lambda value: (isinstance(value, str), value if not isinstance(value, str) else 0))
    ordered = [by_value[setting_text(value)] for value in in_turn if setting_text(value) in by_value]
    positions = range(len(ordered))
    figure, (axis,) = panel_row(1, size)
    shape = look(sweep["method"], [sweep["method"]])
    axis.axhline(0, color=INK, linewidth=0.5, label="chance")
    known = all(cell.get("ci_low") is not None for cell in ordered if cell["lds"] is not None)
    for column, change in (
        ("lds", {"label": f"{shape['label']}, raw"}),
        ("lds_normalised", {"markerfacecolor": "none", "label": f"{shape['label']}, train-normalised"}),
    ):
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
    missing = sum(cell["lds"] is None for cell in ordered)
    bars = "Bars: 95 % intervals, recorded for raw scores only." if known else "No intervals recorded."
    diverged = f"{missing} value{'s' * (missing != 1)} diverged." if missing else ""
    title = f"{sweep.get('description') or sweep['task']}: {shape['label']} over {name}"
    notes = [" ".join(filter(None, [bars, diverged, sweep_sizes(sweep)])), other_settings(sweep)]
    frame(figure, size, title, [swept_on(sweep)], notes, [axis])
    caption = (
        f"LDS of {sweep['method']} against {name}; {swept_on(sweep)}; {missing} values diverged. {bars} "
        f"{sweep_sizes(sweep)} {other_settings(sweep)}"
    ).strip()
    return Drawing(stem, title, caption, [sweep["run_id"]], figure, facts=sweep_facts(sweep, [sweep["method"]]))


def widest(cells: list[dict[str, Any]]) -> str:
    """How far the numbers of a grid, which has no room for bars, may be off."""
    reach = [
        max(cell["ci_high"] - cell["lds"], cell["lds"] - cell["ci_low"])
        for cell in cells
        if cell["lds"] is not None and cell.get("ci_low") is not None and cell.get("ci_high") is not None
    ]
    return f"95 % intervals reach at most {max(reach):.3f} from the LDS." if reach else ""


def sweep_grid(
    sweep: dict[str, Any],
    cells: list[dict[str, Any]],
    fixed: dict[str, Any],
    down: str,
    across: str,
    stem: str,
    size: PaperSize,
) -> Drawing:
    figure = grid_of_traces(cells, down, sweep["axes"][down], across, sweep["axes"][across], size)
    name = look(sweep["method"], [sweep["method"]])["label"]
    at = ", ".join(f"{option} {setting_text(value)}" for option, value in fixed.items())
    title = f"{sweep.get('description') or sweep['task']}: {name} over {down} and {across}{f', {at}' if at else ''}"
    inside = "In each cell: mean loss of the training data at every draw, a line a chain; LDS of raw scores"
    inside += ", R-hat and ESS." if any(cell.get("rhat") is not None for cell in cells) else "."
    crossed = any(cell["lds"] is None for cell in cells)
    about = [inside, "Crossed: diverged." if crossed else "", widest(cells), sweep_sizes(sweep)]
    notes = [" ".join(filter(None, about)), other_settings(sweep)]
    frame(figure, size, title, [swept_on(sweep), "raw scores"], notes)
    caption = (
        f"Loss traces and LDS of {sweep['method']} over {down}, {across}{f' at {at}' if at else ''}; "
        f"{swept_on(sweep)}. {' '.join(filter(None, notes))}"
    )
    return Drawing(stem, title, caption, [sweep["run_id"]], figure, facts=sweep_facts(sweep, [sweep["method"]]))


def grid_of_traces(
    cells: list[dict[str, Any]], down: str, rows: list[Any], across: str, columns: list[Any], size: PaperSize
) -> Figure:
    width = min(size.width, max(size.column, (0.9 + 1.3 * len(columns)) * size.scale))
    figure = new_figure(width, 0.85 * len(rows) * size.scale)
    grid = figure.subplots(len(rows), len(columns), sharex=True, sharey=False, squeeze=False)
    scores = [cell["lds"] for cell in cells if cell["lds"] is not None]
    shade = Normalize(*((min(scores), max(scores)) if scores else (0.0, 1.0)))
    for row, row_value in enumerate(rows):
        for column, column_value in enumerate(columns):
            axis = grid[row, column]
            axis.grid(False)
            axis.tick_params(labelsize=size.points(5.5), length=2)
            found = [cell for cell in cells if cell[down] == row_value and cell[across] == column_value]
            draw_cell(axis, found[0] if found else None, shade, size)
            if row == 0:
                axis.set_title(f"{across} {setting_text(column_value)}", fontsize=size.points(7))
            if column == 0:
                axis.set_ylabel(f"{down}\n{setting_text(row_value)}\nloss", fontsize=size.points(6.5))
            if row == len(rows) - 1:
                axis.set_xlabel("draw", fontsize=size.points(6.5))
    if scores:
        bar = figure.colorbar(ScalarMappable(shade, PALE), ax=grid, label="LDS", aspect=30, fraction=0.04, pad=0.02)
        bar.ax.tick_params(labelsize=size.points(6))
    return figure


def draw_cell(axis: Any, cell: dict[str, Any] | None, shade: Normalize, size: PaperSize) -> None:
    """Loss traces, LDS, R-hat and ESS; a cell that diverged is crossed, above what traces it has."""
    for trace in cell.get("traces", []) if cell else []:
        axis.plot([np.nan if value is None else value for value in trace], linewidth=0.5, color=INK, alpha=0.75)
    if cell is None or cell["lds"] is None:
        axis.set_facecolor((FAINT, 0.4))
        axis.plot([0, 1], [0, 1], [0, 1], [1, 0], color="#9aa0a8", linewidth=0.6, transform=axis.transAxes)
        said = "diverged" if cell else "not run"
        axis.text(0.5, 0.5, said, transform=axis.transAxes, ha="center", va="center", fontsize=size.points(7))
        if not (cell and cell.get("traces")):
            axis.set_yticks([])
        return
    low, high = axis.get_ylim()
    axis.set_ylim(low, high + 0.75 * (high - low))  # room for the numbers
    axis.ticklabel_format(axis="y", useOffset=False)
    axis.set_facecolor(PALE(shade(cell["lds"])))
    axis.text(
        0.96, 0.95, f"{cell['lds']:.3f}", transform=axis.transAxes, ha="right", va="top", fontsize=size.points(7),
        weight="bold",
    )  # fmt: skip
    if cell.get("rhat") is not None and cell.get("ess") is not None:
        said = f"R-hat {cell['rhat']:.2f}\nESS {cell['ess']:.0f}"
        axis.text(0.04, 0.95, said, transform=axis.transAxes, ha="left", va="top", fontsize=size.points(4.8))
