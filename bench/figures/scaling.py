"""Seconds, memory and disk against model size, a figure for each machine: `python -m bench.figures --only scaling`.

The paper's fig:benchmark_big_ek-fac, and who is cheaper where; `bench.publish.plots.scaling` draws the panels.
"""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from bench import schema
from bench.figures.drawing import Drawing, UnusableError, frame, logarithmic, panel_row
from bench.identity import file_slug
from bench.publish.plots.scaling import PANELS, can_draw, draw_cheaper, draw_laws, draw_panel, explain, marks, usable
from bench.publish.plots.style import PaperSize
from bench.records import Results
from retrain.safe_files import SafeFileError, conforms, read_text

TEXTS = ("model", "method", "device")
NOT_NUMBERS = (
    "error", "run_id", "dtype", "weights", "text", "projected_from", "projected", "shared_parts", "held_out",
    "fit_sizes", "storage",
)  # fmt: skip
SCALING_COLUMNS = (*TEXTS, "parameters", "fit_seconds", "score_seconds", "peak_memory_bytes")
UNITS = {
    "seconds": "seconds (fit + score)",
    "peak_memory_bytes": "peak memory, GiB",
    "disk_bytes": "written by the fit, GiB",
}


def draw_scaling(results: Results, size: PaperSize) -> Iterator[Drawing]:
    for path in results.files("scaling.csv"):
        try:
            everything = read_scaling(path)
        except UnusableError as error:
            results.note(str(error))
            continue
        everything = everything[[results.shows(method) for method in everything["method"]]]
        rows = usable(everything)
        for device, group in rows.groupby("device", sort=True):
            if group["model"].nunique() < 2:
                continue  # one size is no scaling; its numbers are in the table
            shown = [(name, unit) for name, unit in PANELS if name in group and (group[name] > 0).any()]
            figure, axes = panel_row(len(shown), size, height=2.2, share_y=False)
            laws: list[str] = []
            for axis, (column, unit) in zip(axes, shown, strict=True):
                draw_panel(axis, group, column, unit)
                laws += draw_laws(axis, group) if column == "seconds" else []
                for line in axis.lines:  # words of records are never read as formulas, and so none are
                    line.set_label(str(line.get_label()).replace(r"$\Sigma$", "\u03a3"))
                logarithmic(axis, "x")
                logarithmic(axis, "y")
                models = group.drop_duplicates("parameters")
                if len(models) <= 3:  # too narrow a range for round numbers
                    axis.set_xticks(models["parameters"], models["model"])
                axis.set_xlabel("parameters")
                axis.set_ylabel(UNITS[column])
            title = "Seconds, peak memory and disk against model size"
            explained = explain(group, everything[everything["device"] == device], laws)
            frame(figure, size, title, [str(device)], [explained if len(explained) < 900 else marks(group)], axes)
            facts = {"method": sorted(set(group["method"]))}
            runs = sorted({str(run) for run in group.get("run_id", pd.Series(dtype=str)) if conforms(run, schema.Id)})
            place = file_slug(path.parent.name)
            stem = "-".join(["scaling", *([place] if place != "scaling" else []), file_slug(str(device))])
            caption = f"{title} on {device}. {explained}"
            yield Drawing(stem, f"{title}: {device}", caption, runs, figure, facts=facts)
            whole = everything[everything["device"] == device]
            if can_draw(whole):
                yield cheaper(whole, str(device), f"{stem}-cheaper", runs, size)


def cheaper(rows: pd.DataFrame, device: str, stem: str, runs: list[str], size: PaperSize) -> Drawing:
    """Who is cheaper where: model size x fitting set, for few and for many queries."""
    figure, axes = panel_row(2, size, height=2.6)
    explained = draw_cheaper(axes, rows)
    for axis in axes:
        logarithmic(axis, "x")
        logarithmic(axis, "y")
    title = "Who is cheaper, BIF or EK-FAC: model size x fitting set"
    frame(figure, size, title, [device], [explained], axes)
    return Drawing(stem, f"{title}: {device}", f"{title}, {device}. {explained}", runs, figure, facts={"method": []})


def read_scaling(path: Path) -> pd.DataFrame:
    found = read_table(path, SCALING_COLUMNS)
    for name in found.columns:
        if name not in (*TEXTS, *NOT_NUMBERS):
            try:
                found[name] = pd.to_numeric(found[name])
            except (ValueError, TypeError):
                raise UnusableError(f"{path}: the column {name[:60]!r} is not of numbers") from None
    for name in TEXTS:
        found[name] = found[name].astype(str).str.slice(0, 200)
        if not found[name].map(str.isprintable).all():
            raise UnusableError(f"{path}: the column {name} holds control characters")
    return found


def read_table(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    try:
        found = pd.read_csv(io.StringIO(read_text(path)))
    except (SafeFileError, ValueError) as error:
        raise UnusableError(f"{path}: is no readable CSV ({' '.join(str(error).split())[:200]})") from None
    if missing := [column for column in columns if column not in found]:
        raise UnusableError(f"{path}: lacks the columns {', '.join(missing)}; see results/README.md")
    return found
