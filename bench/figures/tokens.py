"""Query tokens against training tokens, coloured by signed influence: `python -m bench.figures --only tokens`.

The paper's fig:lang-main, fig:p14M-1 and fig:p14M-2. Up to MOST_LABELS tokens are named one by one; longer sequences
are shown whole, with the part around their strongest pair of tokens beside it, large enough to be read.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from bench import schema
from bench.figures.drawing import Drawing, frame, plain_number
from bench.figures.examples import example_settings, example_task
from bench.identity import file_slug
from bench.publish.plots.style import INK, PaperSize, new_figure
from bench.records import Results
from retrain.safe_files import SafeFileError, validate

MOST_LABELS = 48  # tokens up to which each is named
CLOSE_UP = 24  # tokens of the part that is shown large
HEAT_COLOURS = "RdBu_r"


def draw_tokens(results: Results, size: PaperSize) -> Iterator[Drawing]:
    for path, content in token_examples_of(results):
        for pair in content["pairs"]:
            yield pair_drawing(path, content, pair, size)


def token_examples_of(results: Results) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every examples.json of tokens, whose matrices have a number for every pair of tokens."""
    for path, content in results.read("examples.json", schema.ExamplesRecord):
        if content["kind"] == "tokens":
            try:
                validate(content, schema.TokensRecord, path)
                for position, pair in enumerate(content["pairs"]):
                    shape = (len(pair["query_tokens"]), len(pair["train_tokens"]))
                    if len(pair["bif"]) != shape[0] or any(len(row) != shape[1] for row in pair["bif"]):
                        raise SafeFileError(path, f"pairs[{position}].bif is not of {shape[0]} x {shape[1]} numbers")
                    if pair.get("ekfac") and len(pair["ekfac"]) != shape[1]:
                        raise SafeFileError(path, f"pairs[{position}].ekfac has {len(pair['ekfac'])}, not {shape[1]}")
                yield path, content
            except SafeFileError as error:
                results.note(str(error))


def pair_drawing(path: Path, content: dict[str, Any], pair: dict[str, Any], size: PaperSize) -> Drawing:
    matrix = np.array([[np.nan if v is None else v for v in row] for row in pair["bif"]], dtype=float)
    strip = np.array(pair["ekfac"], dtype=float)[None] if pair.get("ekfac") else None
    close = max(matrix.shape) > MOST_LABELS
    figure = whole_and_part(matrix, strip, pair, size) if close else whole_matrix(matrix, strip, pair, size)
    strongest = pair_words(pair)
    title = f"{content['description']}: query {pair['query']} and training sequence {pair['train']}, token by token"
    draws = f"{content['num_draws']:,} draws" if "num_draws" in content else ""
    about = [example_task(content), content["scores"], f"seed {content['seed']}", draws]
    notes = [
        "Blue: seeing the training token lowers the query token's loss (negative influence); red: raises it.",
        "EK-FAC's strip: each training token with the whole query, on a scale of its own." if strip is not None else "",
        "Left, the whole; right, the part around the strongest pair, which is framed." if close else "",
        strongest,
        f"{content.get('rule', '')} n: {matrix.shape[0]} query tokens, {matrix.shape[1]} training tokens.".strip(),
        example_settings(content),
    ]
    frame(figure, size, title, about, filter(None, notes))
    caption = f"{title}; {content['scores']}, seed {content['seed']}. {' '.join(filter(None, notes))}"
    task = content.get("task") or content["description"]
    stem = f"tokens-{file_slug(task)}-seed-{content['seed']}-query-{pair['query']}-train-{pair['train']}"
    return Drawing(stem, title, caption, [], figure, facts={"task": [task], "method": content.get("methods", [])})


def strongest_place(pair: dict[str, Any]) -> tuple[int, int] | None:
    """Of the two different words that the pair was chosen for, where the record has them."""
    top = pair.get("strongest")
    if not top or top["query"] >= len(pair["query_tokens"]) or top["train"] >= len(pair["train_tokens"]):
        return None
    return top["query"], top["train"]


def pair_words(pair: dict[str, Any]) -> str:
    if (place := strongest_place(pair)) is None:
        return ""
    one, other = visible_token(pair["query_tokens"][place[0]]), visible_token(pair["train_tokens"][place[1]])
    return (
        f"Strongest pair of different words: \u201c{one.strip()}\u201d (query token {place[0]}) and "
        f"\u201c{other.strip()}\u201d (training token {place[1]}), {pair['strongest']['bif']:.2f}."
    )


def whole_matrix(matrix: np.ndarray, strip: np.ndarray | None, pair: dict[str, Any], size: PaperSize) -> Figure:
    rows = len(matrix)
    figure = new_figure(size.width, min(7.5, 0.9 + 0.125 * size.scale * rows + (0.3 if strip is not None else 0)))
    if strip is None:
        upper, lower = figure.subplots(), None
    else:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[max(6, rows), 1.3])
    colour_bar(figure, upper, heat_map(upper, matrix), "normalised BIF", size)
    name_tokens(upper, "y", pair["query_tokens"], size)
    upper.set_ylabel("query")
    bottom = upper
    if lower is not None and strip is not None:
        strip_below(figure, lower, strip, size, aspect=1.3 / (0.8 * max(6, rows) / 20))
        bottom = lower
    name_tokens(bottom, "x", pair["train_tokens"], size)
    bottom.set_xlabel("training sequence")
    return figure


def whole_and_part(matrix: np.ndarray, strip: np.ndarray | None, pair: dict[str, Any], size: PaperSize) -> Figure:
    largest = np.unravel_index(int(np.nanargmax(np.abs(matrix))), matrix.shape)
    row, column = strongest_place(pair) or (int(largest[0]), int(largest[1]))
    rows, columns = around(row, matrix.shape[0]), around(column, matrix.shape[1])
    figure = new_figure(size.width, 3.4 * size.scale)
    heights = [1.0] if strip is None else [12.0, 1.0]
    grid = figure.subplots(len(heights), 2, squeeze=False, height_ratios=heights, width_ratios=[1, 1.15])
    limit = scale_of(matrix)
    left, right = grid[0]
    heat_map(left, matrix, limit)
    colour_bar(figure, right, heat_map(right, matrix[rows, columns], limit), "normalised BIF", size)
    corner = (columns.start - 0.5, rows.start - 0.5)
    left.add_patch(_box(corner, columns.stop - columns.start, rows.stop - rows.start))
    left.set_ylabel("query, token by number")
    name_tokens(right, "y", pair["query_tokens"][rows], size)
    bottom = grid[-1]
    if strip is not None:
        heat_map(bottom[0], strip)
        bottom[0].set_yticks([0], ["EK-FAC"], fontsize=size.points(6))
        strip_below(figure, bottom[1], strip[:, columns], size, limit=scale_of(strip), aspect=2)
        for axis in grid[0]:
            axis.tick_params(labelbottom=False)
    name_tokens(bottom[1], "x", pair["train_tokens"][columns], size)
    bottom[0].set_xlabel("training sequence, token by number")
    bottom[1].set_xlabel("training sequence")
    return figure


def _box(corner: tuple[float, float], width: float, height: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, fill=False, edgecolor=INK, linewidth=0.8)


def around(position: int, length: int) -> slice:
    start = min(max(0, position - CLOSE_UP // 2), max(0, length - CLOSE_UP))
    return slice(start, min(length, start + CLOSE_UP))


def scale_of(matrix: np.ndarray) -> float:
    known = np.abs(matrix[np.isfinite(matrix)])
    return float(known.max()) if known.size and known.max() > 0 else 1.0


def heat_map(axis: Axes, matrix: np.ndarray, limit: float | None = None) -> Any:
    axis.grid(False)
    largest = limit or scale_of(matrix)
    shade = Normalize(-largest, largest)
    return axis.imshow(matrix, cmap=HEAT_COLOURS, norm=shade, aspect="auto", interpolation="nearest")


def colour_bar(figure: Figure, axis: Axes, image: Any, label: str, size: PaperSize) -> None:
    bar = figure.colorbar(image, ax=axis, label=label, shrink=0.8)
    bar.ax.tick_params(labelsize=size.points(6))


def strip_below(
    figure: Figure, axis: Axes, strip: np.ndarray, size: PaperSize, aspect: float, limit: float | None = None
) -> None:
    largest = limit or scale_of(strip)
    scale = figure.colorbar(heat_map(axis, strip, largest), ax=axis, aspect=aspect)
    end = plain_number(float(f"{largest:.2g}"))
    scale.set_ticks([-largest, largest], labels=[f"\u2212{end}", end], fontsize=size.points(4.5))
    axis.set_yticks([0], ["EK-FAC"], fontsize=size.points(6))


def name_tokens(axis: Axes, which: str, tokens: Sequence[str], size: PaperSize) -> None:
    words = [visible_token(token) for token in tokens]
    turned = {"rotation": 90} if which == "x" else {}
    getattr(axis, f"set_{which}ticks")(range(len(words)), words, fontsize=size.points(5), **turned)


def visible_token(token: str) -> str:
    """Spaces and control characters as something one can see; long tokens cut."""
    text = token.replace("\n", "\\n").replace("\t", "\\t")
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in text[:16]) + "\u2026" * (len(text) > 16)
    return text if text.strip() else "\u00b7" * max(1, len(text))
