"""What every kind of figure shares: panels, axes, labels at points, and the frame with the words around them.

A drawing is made of records alone. Above the panels stands what was measured on which task, below them bars, n and
settings; the figure grows by as much as its words need.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patheffects import withStroke
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter
from scipy.optimize import isotonic_regression

from bench.identity import series_label
from bench.publish.plots.style import INK, QUIET, SMALL, WIDTH, fix_layout, in_order, look, new_figure
from bench.records import ceiling_over_seeds

ALPHA_RETRAIN = r"$\alpha_{\mathrm{retrain}}$"
ALPHA_ATTRIBUTION = r"$\alpha_{\mathrm{attribution}}$"
LONGEST = 700  # letters of a note below the panels
MOST_PANELS = 6
MOST_NAMES = 9  # of a legend
APART = 0.13  # inches between two labels of lines
MARGIN = 0.05  # inches around the words
LINE = 1.3  # height of a line, in sizes of its letters
TIMES = {
    1e-3: "1 ms", 1e-2: "10 ms", 0.1: "0.1 s", 1.0: "1 s", 10.0: "10 s", 60.0: "1 min", 600.0: "10 min", 3600.0: "1 h",
    36_000.0: "10 h", 345_600.0: "4 d", 3_456_000.0: "40 d", 31_536_000.0: "1 y", 315_360_000.0: "10 y",
}  # fmt: skip


@dataclass
class Drawing:
    """One picture, ready to be saved."""

    stem: str
    title: str
    caption: str
    runs: list[str]
    figure: Figure
    facts: dict[str, list[str]] = field(default_factory=dict)  # what the report's filters go by


# ---- panels and axes ----


def panels(count: int, height: float = 2.2, share_y: bool = True, across: int = 3) -> tuple[Figure, list[Axes]]:
    """So many panels of that many inches, at most `across` of them beside each other."""
    across = min(count, across)
    down = -(-count // across)
    figure = new_figure(WIDTH, height * down)
    axes = list(figure.subplots(down, across, sharey=share_y, squeeze=False).ravel())
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def logarithmic(axis: Axes, which: str, ticks: Sequence[float] | None = None) -> None:
    """A logarithmic axis with plain numbers: 0.1, 1, 10; or ticks at just these values."""
    low, high = _log_scale(axis, which)
    line = getattr(axis, f"{which}axis")
    steps = (1.0, 2.0, 5.0) if high < 100 * low else (1.0,)
    line.set_major_locator(FixedLocator(list(ticks)) if ticks is not None else LogLocator(10, subs=steps, numticks=8))
    line.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value)))
    line.set_minor_formatter(NullFormatter())


def seconds_axis(axis: Axes, which: str) -> None:
    """A logarithmic axis of time: 1 s, 10 s, 1 min, 10 min, 1 h."""
    low, high = _log_scale(axis, which)
    seen = [seconds for seconds in TIMES if low <= seconds <= high]
    step = -(-len(seen) // 5)  # at most five, or else they run into each other
    if len(seen) < 2:
        logarithmic(axis, which)
        getattr(axis, f"{which}axis").set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.3g} s"))
        return
    line = getattr(axis, f"{which}axis")
    line.set_major_locator(FixedLocator(seen[::step]))
    line.set_major_formatter(FuncFormatter(lambda value, _: TIMES.get(value, "")))
    line.set_minor_locator(LogLocator(10, subs=(1.0,), numticks=20))
    line.set_minor_formatter(NullFormatter())


def _log_scale(axis: Axes, which: str) -> tuple[float, float]:
    """Its limits; wider where the values are too near each other for round numbers."""
    getattr(axis, f"set_{which}scale")("log")
    low, high = getattr(axis, f"get_{which}lim")()
    if 0 < low <= high < 3 * low:
        low, high = low / 1.7, high * 1.7
        getattr(axis, f"set_{which}lim")(low, high)
    return low, high


def plain_number(value: float) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:g} {name}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def bars_at(axis: Axes, points: Sequence[Sequence[float]], shape: dict[str, Any]) -> None:
    """Points (x, value, low, high) with their intervals."""
    x, y, low, high = np.array(points, dtype=float).T
    axis.errorbar(x, y, yerr=[np.maximum(0, y - low), np.maximum(0, high - y)], elinewidth=0.8, **shape)


# ---- labels where the points are ----


@dataclass
class Label:
    """Words for a point."""

    axis: Axes
    x: float
    y: float
    text: str
    colour: str = INK


def place_labels(labels: Sequence[Label], points: float = 7.0) -> None:
    """Writes every label beside its point: where it covers no other and no point, with a thin line if that is far.

    The figure is laid out by then, since what overlaps is decided in pixels.
    """
    for axis in dict.fromkeys(label.axis for label in labels):
        own = sorted((one for one in labels if one.axis is axis), key=lambda one: -one.y)
        scale = 72 / axis.figure.dpi
        frame = axis.get_window_extent()
        marks = np.array([axis.transData.transform((one.x, one.y)) for one in own])
        crowd = np.concatenate([marks, _covered(axis)])
        canvas: Any = FigureCanvasAgg(axis.get_figure(root=True))
        taken = [tuple(text.get_window_extent(canvas.get_renderer()).extents) for text in axis.texts]
        for label, (x, y) in zip(own, marks, strict=True):
            width, height = text_width(label.text, points) * 72 / scale, 1.15 * points / scale
            best: tuple[float, float, float, float] | None = None
            least = math.inf
            for dx, dy, far in _places(width, height, 5 / scale):
                left, low = x + dx, y + dy
                box = (left, low, left + width, low + height)
                inside = (crowd[:, 0] > box[0] - 3) & (crowd[:, 0] < box[2] + 3)
                inside &= (crowd[:, 1] > box[1] - 2) & (crowd[:, 1] < box[3] + 2)
                wide = (box[0] - 5, box[1], box[2] + 5, box[3])  # two labels side by side do not read as one
                covered = sum(_overlap(wide, other) for other in taken)
                out = max(0, frame.x0 - box[0]) + max(0, box[2] - frame.x1 - 2)
                out += max(0, frame.y0 - box[1]) + max(0, box[3] - frame.y1 - 4)
                cost = 12 * int(inside.sum()) + 3 * covered + 30 * out + far
                if cost < least:
                    best, least = box, cost
            assert best is not None
            taken.append(best)
            _write(axis, label, best, (x, y), points, scale)


def _covered(axis: Axes) -> np.ndarray:
    """In pixels: every marker, and points along every line."""
    found = [np.empty((0, 2))]
    for line in axis.lines:
        pixels = line.get_transform().transform(np.asarray(line.get_xydata(), dtype=float))
        pixels = pixels[np.isfinite(pixels).all(axis=1)]
        marked = line.get_marker() not in ("None", None, "", "|", "_")
        if marked:
            found.append(pixels)
        if line.get_linestyle() != "None" and len(pixels) > 1:
            steps = np.linspace(0, 1, 25)[:, None]
            found += [one + steps * (other - one) for one, other in itertools.pairwise(pixels)]
    return np.concatenate(found)


def _places(width: float, height: float, gap: float) -> Iterator[tuple[float, float, float]]:
    """(dx, dy, how far): right, left, above, below and between them, then further away."""
    for number, reach in enumerate((1.0, 2.2, 3.6, 5.2, 7.0, 9.0)):
        away = gap * reach
        for turn, (side, lift) in enumerate(
            ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1), (0.5, 1), (0.5, -1))
        ):
            dx = away if side > 0.5 else -width - away if side < 0 else -width / 2 + (width * side if side else 0)
            dy = away - 0.2 * height if lift > 0 else -height - away + 0.2 * height if lift < 0 else -height / 2
            yield dx, dy, 40 * number + turn


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    across = min(one[2], other[2]) - max(one[0], other[0])
    down = min(one[3], other[3]) - max(one[1], other[1])
    return across * down if across > 0 and down > 0 else 0.0


def _write(
    axis: Axes, label: Label, box: tuple[float, ...], mark: tuple[float, float], points: float, scale: float
) -> None:
    middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
    halo = [withStroke(linewidth=1.6, foreground="white")]
    axis.annotate(
        label.text, (label.x, label.y), ((middle[0] - mark[0]) * scale, (middle[1] - mark[1]) * scale),
        textcoords="offset points", ha="center", va="center", fontsize=points, color=label.colour, path_effects=halo,
        annotation_clip=False, zorder=6,
    )  # fmt: skip
    nearest = (min(max(mark[0], box[0]), box[2]), min(max(mark[1], box[1]), box[3]))
    if math.dist(nearest, mark) > 11 / scale:
        end = ((nearest[0] - mark[0]) * scale, (nearest[1] - mark[1]) * scale)
        axis.annotate(
            "", (label.x, label.y), end, textcoords="offset points",
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": label.colour, "shrinkA": 0, "shrinkB": 2},
        )  # fmt: skip


def label_line(axis: Axes, height: float, text: str, at: float = 1.0) -> None:
    """Words on a horizontal line, at its right end, or at its left one (0)."""
    axis.annotate(
        text, (at, height), (2 - 4 * at, 1.5), xycoords=("axes fraction", "data"), textcoords="offset points",
        ha="right" if at else "left", va="bottom", fontsize=SMALL, color=QUIET, in_layout=False,
    )  # fmt: skip


def spread(values: Sequence[float], gap: float, floor: float, top: float) -> list[float]:
    """The same values, moved as little as they must be to stand `gap` apart, between the floor and the top."""
    order = np.argsort(values, kind="stable")
    steps = gap * np.arange(len(order))
    # Of values less their steps, the nearest that never fall.
    rising = isotonic_regression(np.asarray(values, dtype=float)[order] - steps).x
    found = np.empty(len(order))
    found[order] = np.clip(rising, floor, max(floor, top - steps[-1])) + steps
    return found.tolist()


def name_lines(axis: Axes, ends: Sequence[tuple[float, float, str, str]], height: float, at: float) -> None:
    """Words at x = `at`, right of lines that end at (x, y, text, colour); with a thin line where they had to move.

    height: of the axis, in inches.
    """
    low, high = axis.get_ylim()
    gap = APART / height * (high - low)
    lifted = spread([y for _, y, _, _ in ends], gap, low + gap / 2, high - gap / 2)
    for (x, y, text, colour), level in zip(ends, lifted, strict=True):
        axis.plot((x, at), (y, level), color=colour, linewidth=0.4, label="_name", clip_on=False)
        axis.annotate(f" {text}", (at, level), va="center", fontsize=6.5, color=colour, annotation_clip=False,
                      path_effects=[withStroke(linewidth=1.6, foreground="white")])  # fmt: skip


# ---- the frame ----


def finish(
    figure: Figure,
    stem: str,
    title: str,
    about: Iterable[str],
    notes: Iterable[str],
    runs: Iterable[str] = (),
    facts: dict[str, list[str]] | None = None,
    names: Sequence[tuple[Any, str]] = (),
    labels: Sequence[Label] = (),
) -> Drawing:
    """Title, facts and legend above the panels, notes below; lays all of it out.

    `names`: (handle, name) of the legend; `labels` stand at their points instead. The caption has long notes whole.
    """
    about, notes = list(filter(None, about)), list(filter(None, notes))
    width, panel = figure.get_figwidth(), figure.get_figheight()
    inside = 0.95 * (width - 2 * MARGIN)  # letters on pixels are a little wider
    above = [(line, 9.0, "bold", INK) for line in wrapped(title, inside, 9.0, "bold")]
    above += [(line, 7.0, "normal", QUIET) for line in wrapped(" \u00b7 ".join(about), inside, 7.0)]
    short = [note if len(note) <= LONGEST else f"{note.partition('.')[0]}: in figures.json." for note in notes]
    below = [line for note in short for line in wrapped(note, inside, SMALL)]
    head = sum(_height(points) for _, points, _, _ in above) + 2 * MARGIN
    foot = len(below) * _height(SMALL) + (2 * MARGIN if below else 0)
    across, down = _columns([name for _, name in names], inside)
    height = panel + head + foot + (down * 1.45 * 7.5 / 72 + 0.05 if names else 0.0)
    figure.set_figheight(height)
    top = height - MARGIN
    for line, points, weight, colour in above:
        figure.text(MARGIN / width, top / height, line, fontsize=points, weight=weight, va="top", color=colour)
        top -= _height(points)
    if names:
        legend = figure.legend(
            [handle for handle, _ in names], [name for _, name in names], loc="upper left", borderaxespad=0.1,
            ncols=across, handlelength=1.8, columnspacing=1.2, bbox_to_anchor=(0, top / height),
        )  # fmt: skip
        legend.set_in_layout(False)
    for position, line in enumerate(reversed(below)):
        y = (MARGIN + position * _height(SMALL)) / height
        figure.text(MARGIN / width, y, line, fontsize=SMALL, color=QUIET, va="bottom")
    engine: Any = figure.get_layout_engine()
    if engine is None:  # axes that are placed by hand, in shares of the panels
        for axis in figure.axes:
            left, low, wide, high = axis.get_position().bounds
            axis.set_position((left, (foot + low * panel) / height, wide, high * panel / height))
    else:
        engine.set(rect=(0, foot / height, 1, panel / height))
        fix_layout(figure)
    place_labels(labels)
    caption = f"{title}; {', '.join(about)}. {' '.join(notes)}"
    return Drawing(stem, title, caption, list(runs), figure, facts or {})


def finish_rows(
    rows: pd.DataFrame,
    figure: Figure,
    stem: str,
    title: str,
    about: Sequence[str],
    notes: Iterable[str],
    scores: Sequence[str] = (),
    names: Sequence[tuple[Any, str]] = (),
    labels: Sequence[Label] = (),
) -> Drawing:
    """Of rows of one ground: its description before the title, its words first, and the runs behind the rows.

    `scores` are for the report's filters.
    """
    runs = sorted(set(rows["run_id"]))
    facts = {name: sorted(set(rows[name])) for name in ("task", "protocol")} | {"method": in_order(rows["method"])}
    facts |= {"scores": list(scores)} if scores else {}
    first = rows.iloc[0]
    title, about = f"{first['description']}: {title}", [str(first["ground_words"]), *about]
    return finish(figure, stem, title, about, notes, runs, facts, names, labels)


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


def handles_of(axes: Iterable[Axes], order: Sequence[str] = ()) -> list[tuple[Any, str]]:
    """(handle, name) of what the axes name, each name once."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    place = {name: position for position, name in enumerate(order)}
    return [(found[name], name) for name in sorted(found, key=lambda name: place.get(name, len(place)))]


def _columns(names: Sequence[str], width: float, points: float = 7.5) -> tuple[int, int]:
    """(across, down) of a legend: as many names beside each other as there is room for; filled column by column."""
    if not names:
        return 0, 0
    wide = [text_width(name, points) + (1.8 + 0.8 + 1.2) * points / 72 for name in names]
    for across in range(len(wide), 0, -1):
        down, longer = divmod(len(wide), across)
        ends = [(k + 1) * down + min(k + 1, longer) for k in range(across)]
        columns = [wide[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        if across == 1 or sum(max(column) for column in columns) <= width:
            return across, down + bool(longer)
    raise AssertionError


# ---- words ----


def span(values: pd.Series) -> str:
    found = sorted({int(value) for value in values.dropna()})
    return "?" if not found else f"{found[0]:,}" if len(found) == 1 else f"{found[0]:,} to {found[-1]:,}"


def short_names(rows: pd.DataFrame) -> pd.DataFrame:
    """The same rows with series named by their label alone, where a figure has but one series of it."""
    names = [series_label(method, label) for method, label in zip(rows["method"], rows["label"])]
    alone = rows.groupby("label")["series"].transform("nunique") == 1
    return rows.assign(series=[name if one else series for name, one, series in zip(names, alone, rows["series"])])


def settings_text(rows: pd.DataFrame) -> str:
    """Every method with its settings, but for what nearly always is as it is; what its series share is said once."""
    known = rows.drop_duplicates("series")
    parts = []
    for method in in_order(known["method"]):
        mine = known[known["method"] == method]
        settings = [_items(str(text)) if text else [] for text in mine["settings"]]
        shared = [item for item in settings[0] if all(item in other for other in settings)]
        name = f"{look(method)['label']} (all)" if len(mine) > 1 else str(mine["series"].iloc[0])
        told = [item for item in shared if item not in name]
        parts.append(f"{name}: {', '.join(told)}" if told else "")
        for series, own in zip(mine["series"], settings, strict=True):
            apart = [item for item in own if item not in shared and item not in series]
            parts.append(f"{series}: {', '.join(apart)}" if apart else "")
    text = "; ".join(filter(None, parts))
    return f"Settings. {text}." if text else ""


def _items(settings: str) -> list[str]:
    """One by one; of scores that somebody handed in, that they were."""
    items = settings.split(", ")
    own = [item for item in items if not item.startswith(("scores_are=", "scores_sha256="))]
    return own if len(own) == len(items) else [*own, "scores from a file"]


def notes_of(told: str, rows: pd.DataFrame) -> list[str]:
    """Below the panels: what was told, ceiling and n; then settings."""
    seeds = rows["seed"].nunique()
    fewer = rows["num_subsets_replicated"] < rows["num_subsets"]
    some = f" of {span(rows['num_subsets_replicated'])}" if fewer.any() and (rows["num_replicates"] > 1).any() else ""
    undefined = int(rows.loc[rows["lds"].notna(), "num_undefined"].sum())
    sizes = (
        f"n: {seeds} seed{'s' * (seeds > 1)}, {span(rows['num_subsets'])} subsets, "
        f"{span(rows['num_replicates'])} replicate(s){some}, {span(rows['num_queries'])} queries"
        f"{f', {undefined} undefined values' if undefined else ''}."
    )
    return [" ".join(filter(None, [told, *ceiling_notes(rows), sizes])), settings_text(rows)]


def ceiling_notes(rows: pd.DataFrame) -> Iterator[str]:
    """Where the ceiling is unknown, or may be 0."""
    unknown, noisy = [], dict[float, set[float]]()
    for (_, share, alpha), cell in rows.groupby(["truth", "alpha_attribution", "alpha"], sort=True):
        unknown.append(not cell["reliability"].count())
        if ceiling_over_seeds(cell).touches_zero:
            noisy.setdefault(share, set()).add(alpha)
    if any(unknown):
        yield f"Ceiling unknown{'' if all(unknown) else ' where none is drawn'}: no replicates."
    if noisy:
        places = [
            f"alpha {', '.join(f'{a:g}' for a in sorted(alphas))} of {share:g}" for share, alphas in noisy.items()
        ]
        yield f"The ceiling's interval touches 0 at {'; '.join(places)}."
