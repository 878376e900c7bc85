"""One look for every figure: colours that colour-blind readers tell apart, sizes for a paper's column, fixed bytes."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.safe_files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN, PAGE = 3.35, 6.9  # inches: one column of a two-column paper, and both
FONT_SIZE = 7.5
INK, FAINT, QUIET = "#1b1e23", "#d5d8dd", "#6b7280"  # bench.report swaps these for the page's own colours
FORMATS = ("svg", "png", "pdf")

# Okabe and Ito's palette; the marker and the dash tell methods apart without colour.
PALETTE: dict[str, tuple[str, str, str, Any]] = {
    "bif": ("BIF", "#0072b2", "o", "-"),
    "bif_tokens": ("BIF, every token", "#7cc4f2", "X", "none"),
    "bif_cv": ("BIF, control variate", "#56b4e9", "P", (0, (8, 1))),
    "bif_kfac": ("BIF, Kronecker localiser", "#e69f00", "v", (0, (10, 1.5))),
    "bif_devinterp": ("BIF, devinterp", "#5b4ea2", "h", (0, (6, 1, 1, 1))),
    "ekfac": ("EK-FAC", "#d55e00", "s", (0, (5, 1.2))),
    "kfac": ("EK-FAC (kfac)", "#8c6d31", "p", (0, (4, 1, 1, 1))),
    "trak": ("TRAK", "#009e73", "^", (0, (3, 1.2, 1, 1.2))),
    "gradsim": ("GradSim", "#cc79a7", "D", (0, (1.5, 1))),
    "datamodel": ("datamodel", "#3b3f46", "*", (0, (7, 1, 2, 1))),
    "if_cg": ("CG (if_cg)", "#6a3d9a", "8", (0, (6, 1.5))),
    "ekfac_cg": ("EK-FAC, CG", "#b15928", "d", (0, (2, 1, 2, 3))),
    "magic": ("MAGIC", "#4d4d00", "H", (0, (9, 2))),
    "tracin": ("TracIn", "#1f9e9e", ">", (0, (3, 2))),
    "datainf": ("DataInf", "#7a9a01", "<", (0, (1, 1, 4, 1))),
    "arnoldi": ("Arnoldi", "#a6761d", "v", (0, (2, 2))),
    "same_class": ("labels alone", "#e7298a", "P", (0, (1, 3))),
    "repsim": ("RepSim", "#8a6b8f", "h", (0, (5, 3))),
    "bm25": ("BM25", "#b8860b", "p", (0, (3, 3))),
    "random": ("random", "#7f7f7f", "X", (0, (1, 2))),
}
SPARE = [("#a6761d", "<"), ("#1b9e77", ">"), ("#b15928", "d"), ("#6a3d9a", "8"), ("#666666", "H")]
SHADES = (0.0, 0.5, -0.35, 0.7, -0.6)  # of the second, third ... series of a method: to white, to black
SHAPES = "osD^vPp<>h8dH*"

RC: dict[str, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": FONT_SIZE,
    "axes.titlesize": FONT_SIZE,
    "axes.labelsize": FONT_SIZE,
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
    "axes.axisbelow": True,
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


@dataclass(frozen=True)
class PaperSize:
    """The paper that figures are for: its text width in inches, and the size of its letters in points."""

    width: float = PAGE
    font_size: float = FONT_SIZE

    @property
    def column(self) -> float:
        """Of a figure that needs no more than one column."""
        return min(COLUMN * max(1.0, self.scale), self.width)

    @property
    def scale(self) -> float:
        return self.font_size / FONT_SIZE

    def points(self, size: float) -> float:
        """A size of letters that is `size` where letters are as large as usual."""
        return size * self.scale

    def settings(self) -> Any:
        """matplotlib's, whatever the user's own matplotlibrc says."""
        import matplotlib

        sized = {name: self.points(value) for name, value in RC.items() if name.endswith(("fontsize", "labelsize"))}
        sized |= {"font.size": self.font_size, "axes.titlesize": self.font_size}
        # A "$" of a record is a "$"; formulas of our own ask to be read as such.
        return {**matplotlib.rcParamsDefault, "backend": "agg", **RC, **sized, "text.parse_math": False}


def look(method: str, others: Iterable[str] = ()) -> dict[str, Any]:
    """Label, colour, marker and dash of a method; methods from elsewhere take the spare colours in order."""
    if method in PALETTE:
        label, colour, marker, dash = PALETTE[method]
        return {"label": label, "color": colour, "marker": marker, "linestyle": dash}
    names = sorted({*others, method} - set(PALETTE))
    colour, marker = SPARE[names.index(method) % len(SPARE)]
    return {"label": method.rpartition(":")[2], "color": colour, "marker": marker, "linestyle": "-"}


def looks(series: Sequence[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """Of (method, series) pairs: the method's look, and for its second series on another shade and marker."""
    found: dict[str, dict[str, Any]] = {}
    methods = [method for method, _ in series]
    for method in in_order(methods):
        own = sorted({name for other, name in series if other == method})
        shape = look(method, methods)
        markers = shape["marker"] + SHAPES.replace(shape["marker"], "")
        for position, name in enumerate(own):
            change = {"color": shaded(shape["color"], SHADES[position % len(SHADES)]), "label": name}
            found[name] = shape | change | {"marker": markers[position % len(markers)]}
    return found


def shaded(colour: str, share: float) -> str:
    """A share of the way to white, or to black where it is negative."""
    end = 255 if share > 0 else 0
    parts = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    return "#" + "".join(f"{round(part + abs(share) * (end - part)):02x}" for part in parts)


def in_order(methods: Iterable[Any]) -> list[str]:
    """The suite's own first, in a fixed order, so that a colour is always at the same place of a legend."""
    names = list(dict.fromkeys(methods))
    return [name for name in PALETTE if name in names] + sorted(name for name in names if name not in PALETTE)


def new_figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", path: Path, formats: Iterable[str]) -> list[Path]:
    """The same figure gives the same bytes: no dates, no random ids; written whole or not at all."""
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")  # it has done its work: each format would do it again
    for axis in figure.axes:
        # The layout's solver goes by addresses in memory, and its last digits with them.
        axis.set_position(tuple(round(end, 4) for end in axis.get_position().bounds))
    written = []
    for ending in formats:
        target = path.with_name(f"{path.name}.{ending}")
        data = io.BytesIO()
        figure.savefig(data, format=ending, metadata=METADATA[ending])
        write_whole(target, data.getvalue())
        written.append(target)
    return written
