"""What every kind of figure shares: the frame that says what is shown, panels, legends, axes.

A drawing is made of records alone. Its frame holds what a reader of the picture by itself must know: above the panels
what was measured on which task, below them bars, n and settings; the figure grows by as much as its words need.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from bench.identity import file_slug
from bench.publish.plots.style import INK, QUIET, PaperSize, looks, new_figure
from bench.records import Results

ALPHA_RETRAIN = r"$\alpha_{\mathrm{retrain}}$"
ALPHA_ATTRIBUTION = r"$\alpha_{\mathrm{attribution}}$"
MARGIN = 0.05  # inches around the words
LINE = 1.3  # height of a line, in sizes of its letters


class UnusableError(ValueError):
    """A result file lacks what a figure needs; the message is one line that names it."""


@dataclass
class Drawing:
    """One picture or table, ready to be saved."""

    stem: str
    title: str
    caption: str
    runs: list[str]
    figure: Figure | None = None
    table: pd.DataFrame | None = None
    latex: str = ""  # of a table
    facts: dict[str, list[str]] = field(default_factory=dict)  # what the report's filters go by


@dataclass(frozen=True)
class Kind:
    """A family of figures: what it shows, of which of the paper's, what it needs and the command that makes that."""

    name: str
    shows: str
    needs: str
    command: str
    draw: Callable[[Results, PaperSize], Iterator[Drawing]] = field(repr=False)
    paper: tuple[str, ...] = ()  # labels of the paper's figures and tables

    def command_for(self, folder: str) -> str:
        """The command, with its records where they are looked for."""
        return self.command.replace("--out results/", f"--out {folder}/")


def series_shapes(rows: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """The look of every series; one with fewer seeds than another of them says so wherever it is named."""
    shapes = looks(list(zip(rows["method"], rows["series"])))
    seeds = rows.groupby("series")["seed"].nunique()
    for name, shape in shapes.items():
        if seeds[name] < seeds.max():
            shape["label"] = f"{name} ({seeds[name]} seed{'s' * bool(seeds[name] > 1)})"
    return shapes


def names_in(shapes: Mapping[str, dict[str, Any]]) -> list[str]:
    """As a legend has them."""
    return [shape["label"] for shape in shapes.values()]


# ---- panels ----


def full_grids(rows: pd.DataFrame, across: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Suffix of the name and rows of a figure for all places (share and truth) with the same values of `across`.

    So no panel is empty. The places with most values come first, under the plain name.
    """
    together: dict[tuple[float, ...], list[pd.DataFrame]] = {}
    for _, here in rows.groupby(["alpha_attribution", "truth"], sort=True):
        together.setdefault(tuple(sorted(here[across].unique())), []).append(here)
    for number, values in enumerate(sorted(together, key=lambda values: (-len(values), values))):
        some = pd.concat(together[values])
        shares = "-".join(f"{share:g}" for share in sorted(some["alpha_attribution"].unique()))
        yield (f"-{file_slug(f'alpha-attribution-{shares}')}" if number else ""), some


def panel_row(count: int, size: PaperSize, height: float = 1.9, share_y: bool = True) -> tuple[Figure, list[Axes]]:
    """A row of panels, at most four beside each other."""
    across = min(count, 4)
    figure, grid = panel_grid(-(-count // across), across, size, height, share_y)
    axes = list(grid.ravel())
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def panel_grid(
    down: int, across: int, size: PaperSize, height: float, share_y: Any = True, wide: bool = False
) -> tuple[Figure, Any]:
    figure = new_figure(size.width if across > 1 or wide else size.column, height * down * max(1.0, size.scale))
    return figure, figure.subplots(down, across, sharey=share_y, squeeze=False)


def logarithmic(axis: Axes, which: str, ticks: Sequence[float] | None = None) -> None:
    """A logarithmic axis with plain numbers: 0.1, 1, 10; or ticks at just these values."""
    getattr(axis, f"set_{which}scale")("log")
    line = getattr(axis, f"{which}axis")
    low, high = getattr(axis, f"get_{which}lim")()
    if 0 < low <= high < 3 * low:  # too narrow for round numbers
        low, high = low / 1.7, high * 1.7
        getattr(axis, f"set_{which}lim")(low, high)
    steps = (1.0, 2.0, 5.0) if high < 100 * low else (1.0,)
    line.set_major_locator(FixedLocator(list(ticks)) if ticks is not None else LogLocator(10, subs=steps, numticks=8))
    line.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value)))
    line.set_minor_formatter(NullFormatter())


def plain_number(value: float) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:g} {name}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


# ---- the frame ----


def frame(
    figure: Figure,
    size: PaperSize,
    title: str,
    about: Iterable[str] = (),
    notes: Iterable[str] = (),
    axes: Iterable[Axes] = (),
    more: Sequence[tuple[Any, str]] = (),
    order: Sequence[str] = (),
) -> float:
    """Title, facts and legend above the panels, notes below, whose height in inches is returned.

    `more`: (handle, name) beyond what the axes have; `order`: of the names in the legend, those not in it last.
    """
    width, panels = figure.get_figwidth(), figure.get_figheight()
    inside = 0.94 * (width - 2 * MARGIN)  # letters on pixels are a little wider
    large, middle, small = size.points(8), size.points(6.5), size.points(6)
    above = [(line, large, "bold", INK) for line in wrapped(title, inside, large, "bold")]
    above += [(line, middle, "normal", QUIET) for line in wrapped(" \u00b7 ".join(filter(None, about)), inside, middle)]
    below = [line for note in notes for line in wrapped(note, inside, small)]
    head = sum(_height(points) for _, points, _, _ in above) + 2 * MARGIN
    foot = len(below) * _height(small) + (2 * MARGIN if below else 0)
    legend = fitting_legend(figure, [*handles_of(axes, order), *more], inside, size.points(7))
    if legend is not None:
        renderer: Any = FigureCanvasAgg(figure).get_renderer()  # type: ignore[attr-defined]
        head += legend.get_window_extent(renderer).height / figure.dpi
    height = panels + head + foot
    figure.set_figheight(height)
    top = height - MARGIN
    for line, points, weight, colour in above:
        figure.text(MARGIN / width, top / height, line, fontsize=points, weight=weight, va="top", color=colour)
        top -= _height(points)
    if legend is not None:
        legend.set_bbox_to_anchor((0.0, top / height))
    for position, line in enumerate(reversed(below)):
        y = (MARGIN + position * _height(small)) / height
        figure.text(MARGIN / width, y, line, fontsize=small, color=QUIET, va="bottom")
    engine: Any = figure.get_layout_engine()
    if engine is not None:
        engine.set(rect=(0, foot / height, 1, panels / height))
    return foot


def _height(points: float) -> float:
    return LINE * points / 72


@lru_cache(maxsize=10_000)
def text_width(text: str, points: float, weight: str = "normal") -> float:
    """In inches."""
    font = FontProperties(family="DejaVu Sans", size=points, weight=weight)
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, False)
    return width / 72


def wrapped(text: str, width: float, points: float, weight: str = "normal") -> list[str]:
    """Lines of at most `width` inches; a word that is longer has a line of its own."""
    lines: list[str] = []
    room = 0.0
    space = text_width("n n", points, weight) - 2 * text_width("n", points, weight)
    for word in text.split():
        length = text_width(word, points, weight)
        if lines and length <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
            room = width
        room -= length + space
    return lines


def handles_of(axes: Iterable[Axes], order: Sequence[str]) -> list[tuple[Any, str]]:
    """Each name once; the ceiling and chance, which are no methods, come last."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    place = {name: position for position, name in enumerate(order)}
    names = sorted(found, key=lambda name: (name in LAST, place.get(name, len(place))))
    return [(found[name], name) for name in names]


LAST = ("noise ceiling", "linear ceiling", "chance")


def fitting_legend(figure: Figure, entries: Sequence[tuple[Any, str]], width: float, points: float) -> Any:
    """As many names beside each other as there is room for; matplotlib fills column by column."""
    if not entries:
        return None
    handle, gap = 2.4, 1.2  # in sizes of letters
    wide = [text_width(name, points) + (handle + 0.8 + gap) * points / 72 for _, name in entries]
    for across in range(len(wide), 0, -1):
        down, longer = divmod(len(wide), across)
        ends = [(k + 1) * down + min(k + 1, longer) for k in range(across)]
        columns = [wide[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        if across == 1 or sum(max(column) for column in columns) <= width:
            break
    legend = figure.legend(
        [handle for handle, _ in entries], [name for _, name in entries], loc="upper left", borderaxespad=0.2,
        ncols=across, handlelength=handle, columnspacing=gap, bbox_to_anchor=(0, 1),
    )  # fmt: skip
    legend.set_in_layout(False)
    return legend
