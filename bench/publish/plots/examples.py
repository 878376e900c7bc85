"""What methods find, example by example: images (paper: fig:image-main) and tokens (fig:lang-main), from examples.json.

`examples`: queries, and the training images that move their loss most. `tokens`: query tokens against training tokens,
coloured by signed influence; of long sequences the record has the part around the strongest pair.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import bench.schema as schema
from bench.identity import file_slug, series_label
from bench.publish.html import read_png
from bench.publish.plots.frame import Drawing, finish, plain_number, text_width
from bench.publish.plots.style import INK, WIDTH, new_figure
from bench.records import Results
from retrain.safe_files import SafeFileError

SAME, OTHER = "#0072b2", "#d55e00"
MOST_QUERIES = 8  # of a picture of images


def examples_of(results: Results, kind: str) -> list[tuple[Path, dict[str, Any]]]:
    """Every examples.json of images or of tokens."""
    found = results.read("examples.json", schema.ExamplesRecord)
    return [(path, content) for path, content in found if content["kind"] == kind]


def told_of(content: dict[str, Any]) -> tuple[str, str]:
    """The task, and the settings where the record has them: label -> what is not the method's default."""
    known = [f"{label_words(name)}: {words.replace(',', ', ')}" for name, words in content["settings"].items() if words]
    settings = f"Settings. {'; '.join(known)[:1500]}." if known else ""
    return f"task {content['task']}, protocol {content['protocol']}", settings


def label_words(label: str) -> str:
    """Of a method or a variant of one."""
    return series_label(label.partition("@")[0], label)


# ---- images ----


def draw_examples(results: Results) -> Iterator[Drawing]:
    for path, content in examples_of(results, "images"):
        queries = content["queries"]
        lacking = [(q["query"], name) for q in queries for name in content["methods"] if name not in q["methods"]]
        try:
            if lacking:
                raise SafeFileError(path, f"query {lacking[0][0]} lacks the method {lacking[0][1]!r}")
            yield images_drawing(path, content, read_tiles(path.parent / content["sprite"], content["tile"]))
        except SafeFileError as error:
            results.note(str(error))


def images_drawing(path: Path, content: dict[str, Any], tiles: list[np.ndarray]) -> Drawing:
    """A row a query; beside it, of each method, the images that lower its loss most and those that raise it most."""
    methods, queries = content["methods"], content["queries"][:MOST_QUERIES]
    sides = [query["methods"][m][side] for query in queries for m in methods for side in ("helpful", "harmful")]
    shown = max(map(len, sides))
    biggest = max([query["image"] for query in queries] + [example["image"] for side in sides for example in side])
    if biggest >= len(tiles):
        raise SafeFileError(path, f"names tile {biggest} of {len(tiles)} in {content['sprite']}")
    unit = WIDTH / (1.5 + (2 * shown + 0.7) * len(methods))
    letters = min(5.0, 14.5 * unit)
    step = unit + 1.25 * letters / 72 * 2 + 0.04  # a tile, and two lines of words below it
    panel = step * len(queries) + 0.32
    figure = Figure(figsize=(WIDTH, panel))
    axis = figure.add_axes((0, 0, 1, 1))  # in inches, from the lower left corner
    axis.set_axis_off()
    left_of = {method: unit * (1.5 + (2 * shown + 0.7) * number) for number, method in enumerate(methods)}
    for row, query in enumerate(queries):
        bottom = panel - 0.32 - (row + 1) * step + (step - unit)
        why = "unsure" if query["chosen"] == "least sure" else f"no. {query['query']}"
        image_tile(axis, (0.03, bottom, unit), tiles[query["image"]], INK, [query["label"], why], letters)
        for method, left in left_of.items():
            for side, away in (("helpful", 0.0), ("harmful", unit * (shown + 0.2))):
                for position, example in enumerate(query["methods"][method][side]):
                    colour = SAME if example["label"] == query["label"] else OTHER
                    told = [example["label"], score_text(example["score"])]
                    place = (left + away + position * unit, bottom, unit)
                    image_tile(axis, place, tiles[example["image"]], colour, told, letters)
    room = unit * (shown + 0.1)
    small = min(6.5, 0.92 * min(room, 9) / max(text_width(text, 1.0) for text in ("lower its loss", "raise it")))
    for method, left in left_of.items():
        axis.text(left, panel - 0.03, label_words(method), fontsize=7.5, va="top", weight="bold")
        axis.text(left, panel - 0.29, "lower its loss", fontsize=small, va="bottom")
        axis.text(left + unit * (shown + 0.2), panel - 0.29, "raise it", fontsize=small, va="bottom")
    axis.text(0.03, panel - 0.29, "query", fontsize=small, va="bottom")
    axis.set(xlim=(0, WIDTH), ylim=(0, panel), aspect="auto")
    task, settings = told_of(content)
    kind = [content["scores"]] if content["scores"] in ("raw", "train-normalised") else []
    return finish(
        figure, f"examples-{file_slug(content['task'])}-seed-{content['seed']}-{file_slug(content['scores'])}",
        f"{content['description']}: images that move each query's loss most",
        [task, f"{content['scores']} scores", f"seed {content['seed']}",
         f"alpha_attribution {content['alpha_attribution']:g}"],
        [
            "Frame: blue, of the query's own class; orange, of another. Below each: its class and score.",
            f"{content['rule']} n: {len(queries)} queries, {shown} images on each side of {content['num_train']:,}."
            .strip(),
            settings,
        ],
        facts={"task": [content["task"]], "method": methods, **({"scores": kind} if kind else {})},
    )  # fmt: skip


def score_text(score: float | None) -> str:
    """Two digits, without an exponent where that is short."""
    return "" if score is None else f"{score:,.0f}" if 100 <= abs(score) < 1e5 else f"{score:.2g}"


def image_tile(
    axis: Axes, place: tuple[float, float, float], pixels: np.ndarray, colour: str, lines: Sequence[str], size: float
) -> None:
    """A framed picture at (left, bottom), `unit` wide, with words below it."""
    left, bottom, unit = place
    side = 0.94 * unit
    extent = (left, left + side, bottom, bottom + side)
    axis.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest", extent=extent, aspect="auto")
    axis.add_patch(Rectangle((left, bottom), side, side, fill=False, edgecolor=colour, linewidth=1.0))
    room = max(3, int(side * 72 / (0.58 * size)))
    text = "\n".join(line if len(line) <= room else line[: room - 1] + "\u2026" for line in lines)
    axis.text(left + side / 2, bottom - 0.02, text, ha="center", va="top", fontsize=size, linespacing=1.05)


def read_tiles(path: Path, tile: Sequence[int]) -> list[np.ndarray]:
    """Row by row."""
    picture = read_png(path)
    sheet = np.asarray(picture.convert("L" if picture.mode in ("1", "L", "I", "I;16") else "RGB")) / 255
    height, width = tile
    return [
        sheet[y : y + height, x : x + width]
        for y in range(0, sheet.shape[0] - height + 1, height)
        for x in range(0, sheet.shape[1] - width + 1, width)
    ]


# ---- tokens ----


def draw_tokens(results: Results) -> Iterator[Drawing]:
    """Of matrices that have a number for every pair of tokens."""
    for path, content in examples_of(results, "tokens"):
        for position, pair in enumerate(content["pairs"]):
            across = len(pair["train_tokens"])
            rows, columns = parts_of(pair)
            down, wide = len(pair["query_tokens"][rows]), len(pair["train_tokens"][columns])
            if not down or not wide or len(pair["bif"]) != down or any(len(row) != wide for row in pair["bif"]):
                results.note(f"{path}: pairs[{position}].bif is not of {down} x {wide} numbers")
            elif pair.get("ekfac") and len(pair["ekfac"]) != across:
                results.note(f"{path}: pairs[{position}].ekfac has {len(pair['ekfac'])} numbers, not {across}")
            else:
                yield pair_drawing(content, pair)


def pair_drawing(content: dict[str, Any], pair: dict[str, Any]) -> Drawing:
    """One matrix, and below it EK-FAC's strip."""
    matrix = np.array([[np.nan if v is None else v for v in row] for row in pair["bif"]], dtype=float)
    strip = np.array(pair["ekfac"], dtype=float)[None] if pair.get("ekfac") else None
    rows, columns = parts_of(pair)
    whole = len(pair["query_tokens"]), len(pair["train_tokens"])
    largest = pair["part"]["largest"] if pair.get("part") else scale_of(matrix)
    figure = new_figure(WIDTH, min(6.5, 1.1 + 0.125 * len(matrix) + (0.3 if strip is not None else 0)))
    heights = [max(6, len(matrix)), 1.3] if strip is not None else [1]
    axes = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False).ravel())
    image = heat_map(axes[0], matrix, largest or 1.0)
    figure.colorbar(image, ax=axes[0], label="normalised BIF", shrink=0.8).ax.tick_params(labelsize=6)
    name_tokens(axes[0], "y", pair["query_tokens"][rows])
    axes[0].set_ylabel("query")
    if strip is not None:
        largest = scale_of(strip)
        scale = figure.colorbar(heat_map(axes[1], strip[:, columns], largest), ax=axes[1], aspect=2)
        end = plain_number(float(f"{largest:.2g}"))
        scale.set_ticks([-largest, largest], labels=[f"\u2212{end}", end], fontsize=4.5)
        axes[1].set_yticks([0], ["EK-FAC"], fontsize=6)
    name_tokens(axes[-1], "x", pair["train_tokens"][columns])
    axes[-1].set_xlabel("training sequence")
    task, settings = told_of(content)
    return finish(
        figure,
        f"tokens-{file_slug(content['task'])}-seed-{content['seed']}-query-{pair['query']}-train-{pair['train']}",
        f"{content['description']}: query {pair['query']} and training sequence {pair['train']}, token by token",
        [task, content["scores"], f"seed {content['seed']}", f"{content['num_draws']:,} draws"],
        [
            "Blue: seeing the training token lowers the query token's loss (negative influence); red: raises it.",
            "" if strip is None else "EK-FAC's strip: each training token with the whole query, on a scale of its own.",
            f"Shown: the {matrix.shape[0]} x {matrix.shape[1]} tokens around the strongest pair."
            if pair.get("part") else "",
            pair_words(pair),
            f"{content['rule']} n: {whole[0]} query tokens, {whole[1]} training tokens.".strip(),
            settings,
        ],
        facts={"task": [content["task"]], "method": content["methods"]},
    )  # fmt: skip


def parts_of(pair: dict[str, Any]) -> tuple[slice, slice]:
    """Which query tokens and training tokens `bif` has: all, unless the record says which."""
    part = pair.get("part")
    if not part:
        return slice(0, len(pair["query_tokens"])), slice(0, len(pair["train_tokens"]))
    return slice(*part["query"]), slice(*part["train"])


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


def scale_of(matrix: np.ndarray) -> float:
    known = np.abs(matrix[np.isfinite(matrix)])
    return float(known.max()) if known.size and known.max() > 0 else 1.0


def heat_map(axis: Axes, matrix: np.ndarray, limit: float) -> Any:
    axis.grid(False)
    return axis.imshow(matrix, cmap="RdBu_r", norm=Normalize(-limit, limit), aspect="auto", interpolation="nearest")


def name_tokens(axis: Axes, which: str, tokens: Sequence[str]) -> None:
    turned = {"rotation": 90} if which == "x" else {}
    getattr(axis, f"set_{which}ticks")(range(len(tokens)), list(map(visible_token, tokens)), fontsize=6, **turned)


def visible_token(token: str) -> str:
    """Spaces and control characters as something one can see; long tokens cut."""
    text = token.replace("\n", "\\n").replace("\t", "\\t")
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in text[:16]) + "\u2026" * (len(text) > 16)
    return text if text.strip() else "\u00b7" * max(1, len(text))
