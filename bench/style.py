"""One look for every figure: colours that colour-blind readers tell apart, sizes for a paper's column, fixed bytes."""

import io
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.figure import Figure

from retrain.safe_files import write_whole

COLUMN, PAGE = 3.35, 6.9  # inches: one column of a two-column paper, and both
INK, FAINT = "#1b1e23", "#d5d8dd"  # bench.report swaps these for the page's own colours

# Okabe and Ito's palette; the marker and the dash tell methods apart without colour.
METHODS: dict[str, tuple[str, str, str, Any]] = {
    "bif": ("BIF", "#0072b2", "o", "-"),
    "bif_cv": ("BIF, control variate", "#56b4e9", "P", (0, (8, 1))),
    "bif_kfac": ("BIF, Kronecker localiser", "#e69f00", "v", (0, (10, 1.5))),
    "ekfac": ("EK-FAC", "#d55e00", "s", (0, (5, 1.2))),
    "trak": ("TRAK", "#009e73", "^", (0, (3, 1.2, 1, 1.2))),
    "gradsim": ("GradSim", "#cc79a7", "D", (0, (1.5, 1))),
    "random": ("random", "#7f7f7f", "x", (0, (1, 2))),
}
SPARE = [("#a6761d", "p"), ("#1b9e77", "<"), ("#8c6d31", "*"), ("#5b4ea2", "h")]

RC = {
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 7.5,
    "axes.titlesize": 8,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.6,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: searchable, and in the page's own colour
    "svg.hashsalt": "tda-bench",
    "pdf.fonttype": 42,
    "path.simplify": False,
}
METADATA: dict[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Producer": None, "Creator": None},
    "png": {"Software": None},
}


def look(method: str, others: list[str] | None = None) -> dict[str, Any]:
    """Label, colour, marker and dash of a method; methods from elsewhere take the spare colours in order."""
    if method in METHODS:
        label, colour, marker, dash = METHODS[method]
        return {"label": label, "color": colour, "marker": marker, "linestyle": dash}
    names = sorted({*(others or []), method} - set(METHODS))
    colour, marker = SPARE[names.index(method) % len(SPARE)]
    return {"label": method.rpartition(":")[2], "color": colour, "marker": marker, "linestyle": "-"}


def in_order(methods: Any) -> list[str]:
    """The suite's own first, in a fixed order, so that a colour is always at the same place of a legend."""
    names = list(dict.fromkeys(methods))
    return [name for name in METHODS if name in names] + sorted(name for name in names if name not in METHODS)


def new_figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path, formats: tuple[str, ...]) -> list[Path]:
    """The same figure gives the same bytes: no dates, no random ids; written whole or not at all."""
    written = []
    for ending in formats:
        target = path.with_name(f"{path.name}.{ending}")
        data = io.BytesIO()
        figure.savefig(data, format=ending, metadata=METADATA[ending])
        write_whole(target, data.getvalue())
        written.append(target)
    return written
