"""One look for every figure: each method's colour and marker, matplotlib's settings, and how a picture is written."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from retrain.safe_files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL import Image

WIDTH = 5.2  # inches: letters can be read where a phone shrinks the picture to its own width
FONT_SIZE = 8.0
SMALL = 6.0
INK, FAINT, QUIET = "#1b1e23", "#d5d8dd", "#6b7280"

# Name -> (label, colour, marker): the only place that says how a method looks. Labels of settings (`bif-paper`) have a
# line of their own, in a shade of their method's colour. Most are Okabe and Ito's colours.
METHODS: dict[str, tuple[str, str, str]] = {
    "bif": ("BIF", "#0072b2", "o"),
    "bif-paper": ("bif-paper", "#00304d", "D"),
    "bif-equal": ("bif-equal", "#2f93d1", "P"),
    "bif-long": ("bif-long", "#7db8dc", "s"),
    "bif-short": ("bif-short", "#9fc9e6", "v"),
    "bif-close": ("bif-close", "#4a7fa5", "^"),
    "bif-tuned": ("bif-tuned", "#3d9be0", "X"),
    "bif_tokens": ("BIF, every token", "#7cc4f2", "X"),
    "bif_cv": ("BIF, control variate", "#56b4e9", "p"),
    "bif_kfac": ("BIF, Kronecker localiser", "#e69f00", "v"),
    "bif_devinterp": ("BIF, devinterp", "#5b4ea2", "h"),
    "ekfac": ("EK-FAC", "#d55e00", "s"),
    "ekfac-library": ("ekfac-library", "#8a3d00", "D"),
    "kfac": ("EK-FAC (kfac)", "#b8914a", "p"),
    "kfac-library": ("kfac-library", "#7d5f24", ">"),
    "shampoo": ("Shampoo", "#7f5539", "8"),
    "logra": ("LoGra", "#2a6f97", "v"),
    "trackstar": ("TrackStar", "#6a994e", "*"),
    "astra": ("ASTRA", "#e377c2", "<"),
    "bif_gaussian": ("BIF, K-FAC's Gaussian", "#0f4c81", "d"),
    "ekfac_cg": ("EK-FAC, CG", "#b15928", "d"),
    "if_cg": ("CG (if_cg)", "#6a3d9a", "8"),
    "trak": ("TRAK", "#009e73", "^"),
    "trak-library": ("trak-library", "#00664b", "v"),
    "gradsim": ("GradSim", "#cc79a7", "D"),
    "datamodel": ("datamodel", "#3b3f46", "*"),
    "magic": ("MAGIC", "#4d4d00", "H"),
    "tracin": ("TracIn", "#1f9e9e", ">"),
    "source": ("SOURCE", "#556b2f", "s"),
    "daunce": ("DAUNCE", "#c04080", "o"),
    "datainf": ("DataInf", "#7a9a01", "<"),
    "arnoldi": ("Arnoldi", "#a6761d", "v"),
    "repsim": ("RepSim", "#8a6b8f", "h"),
    "bm25": ("BM25", "#b8860b", "p"),
    "same_class": ("labels alone", "#e7298a", "P"),
    "random": ("random", "#7f7f7f", "X"),
}
ALIASES = {"same-class": "same_class", "labels-alone": "same_class"}  # labels that older records have
CONTROLS = ("same_class", "repsim", "bm25", "random")  # which every method should beat, at no cost
SPARE = ("#a6761d", "#1b9e77", "#b15928", "#6a3d9a", "#666666", "#386cb0", "#bf5b17", "#66a61e")  # methods of others
SHADES = (0.0, 0.45, -0.35, 0.65, -0.6)  # of a method's unnamed settings: to white, to black
SHAPES = "osD^vPp<>h8dH*"

RC: dict[str, Any] = {
    "figure.dpi": 100, "savefig.dpi": 200, "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"],
    "font.size": FONT_SIZE, "axes.titlesize": FONT_SIZE, "axes.labelsize": FONT_SIZE,
    "xtick.labelsize": 7.5, "ytick.labelsize": 7.5, "legend.fontsize": 7.5, "legend.frameon": False,
    "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": FAINT, "grid.linewidth": 0.5,
    "lines.linewidth": 1.1, "lines.markersize": 4.0,
}  # fmt: skip
_BY_LABEL = {label: name for name, (label, _, _) in METHODS.items()}


def settings() -> Any:
    """matplotlib's, whatever the user's own matplotlibrc says."""
    import matplotlib

    # A "$" of a record is a "$"; formulas of our own ask to be read as such.
    return {**matplotlib.rcParamsDefault, "backend": "agg", **RC, "text.parse_math": False}


def look(name: str, method: str = "") -> dict[str, Any]:
    """Label, colour, marker and line of a method, or of a label or series (`name`) of a `method`.

    Settings without a line in the table look as their method does. A method of others has a look by its name.
    """
    named = (name, ALIASES.get(name), _BY_LABEL.get(name), ALIASES.get(method, method))
    known = next((one for one in named if one in METHODS), None)
    if known:
        label, colour, marker = METHODS[known]
        label = label if name in (known, label) or name in ALIASES else name
    else:
        place = crc32((method or name).encode())
        label, colour, marker = name, SPARE[place % len(SPARE)], SHAPES[place % len(SHAPES)]
        label = name if method else name.rpartition(":")[2]
    return {"label": label, "color": colour, "marker": marker, "linestyle": "-"}


def looks(series: Iterable[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """Of (method, series) pairs: each series' look, in a fixed order; two of one figure never look alike."""
    pairs = list(dict.fromkeys(series))
    found: dict[str, dict[str, Any]] = {}
    for method in in_order(method for method, _ in pairs):
        own = [name for other, name in pairs if other == method]
        for name in sorted(own, key=lambda name: (look(name, method)["label"] != look(method)["label"], name)):
            shape = look(name, method) | {"label": name}
            taken = {(one["color"], one["marker"]) for one in found.values()}
            if shape["color"] in {colour for colour, _ in taken}:  # of settings without a name: another shade
                spare = [(shaded(look(method)["color"], shade), marker) for marker in SHAPES for shade in SHADES[1:]]
                free = [pair for pair in spare if pair not in taken]
                fresh = [pair for pair in free if pair[0] not in {colour for colour, _ in taken}]
                shape["color"], shape["marker"] = (fresh or free)[0]
            found[name] = shape
    return found


def shaded(colour: str, share: float) -> str:
    """A share of the way to white, or to black where it is negative."""
    end = 255 if share > 0 else 0
    parts = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    return "#" + "".join(f"{round(part + abs(share) * (end - part)):02x}" for part in parts)


def in_order(methods: Iterable[Any]) -> list[str]:
    """The suite's own first, in the table's order."""
    names = list(dict.fromkeys(methods))
    return [name for name in METHODS if name in names] + sorted(name for name in names if name not in METHODS)


def new_figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def fix_layout(figure: "Figure") -> None:
    """Lays the figure out, once: the solver's last digits go by addresses in memory, so positions are rounded."""
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")
    for axis in figure.axes:
        axis.set_position(tuple(round(end, 4) for end in axis.get_position().bounds))


def with_a_palette(picture: "Image.Image") -> "Image.Image":
    """Of 256 colours: a third of the bytes, and to the eye the same. What is grey stays as it is."""
    from PIL import Image

    return picture if picture.mode == "L" else picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)


def save(figure: "Figure", path: Path) -> Path:
    """As PNG, with the same bytes for the same figure: no dates, no names of software; written whole or not at all."""
    from PIL import Image

    fix_layout(figure)
    target = path.with_name(f"{path.name}.png")
    data, small = io.BytesIO(), io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    with_a_palette(Image.open(data)).save(small, format="png", optimize=True)
    write_whole(target, small.getvalue())
    return target
