"""Queries, and the training images that methods find most and least influential.

`python -m bench.figures --only examples`: the paper's fig:image-main and fig:image-full.
"""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bench import schema
from bench.figures.drawing import Drawing, UnusableError, frame, text_width
from bench.identity import file_slug, series_label
from bench.publish.plots.style import INK, PaperSize
from bench.records import Results
from retrain.safe_files import SafeFileError, open_plain, validate

SAME, OTHER = "#0072b2", "#d55e00"
MAX_PICTURE_BYTES = 32 * 2**20
MAX_PIXELS = 64 * 2**20


def draw_examples(results: Results, size: PaperSize) -> Iterator[Drawing]:
    for path, content in image_examples_of(results):
        try:
            tiles = read_tiles(path.parent / content["sprite"], content["tile"])
            yield examples_drawing(path, content, tiles, size)
        except (UnusableError, SafeFileError) as error:
            results.note(str(error))


def image_examples_of(results: Results) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every examples.json of images, checked to the last tile's number."""
    for path, content in results.read("examples.json", schema.ExamplesRecord):
        if content["kind"] == "images":
            try:
                validate(content, schema.ImagesRecord, path)
                for query in content["queries"]:
                    if lacking := [name for name in content["methods"] if name not in query["methods"]]:
                        raise SafeFileError(path, f"query {query['query']} lacks the method {lacking[0]!r}")
                yield path, content
            except SafeFileError as error:
                results.note(str(error))


def examples_drawing(path: Path, content: dict[str, Any], tiles: list[np.ndarray], size: PaperSize) -> Drawing:
    methods, queries = content["methods"], content["queries"]
    shown = max(len(query["methods"][m][side]) for query in queries for m in methods for side in ("helpful", "harmful"))
    biggest = max(
        [query["image"] for query in queries]
        + [e["image"] for query in queries for m in methods for side in query["methods"][m].values() for e in side]
    )
    if biggest >= len(tiles):
        raise UnusableError(f"{path}: names tile {biggest} of {len(tiles)} in {content['sprite']}")
    columns = 1 + 2 * shown * len(methods)
    unit = size.width / (columns + 0.9 * len(methods) + 0.5)
    letters = size.points(min(5.0, 14.5 * unit))
    step = unit + 1.25 * letters / 72 * 2 + 0.04  # a tile, and two lines of words below it
    panel = step * len(queries) + 0.2 * size.scale
    figure = Figure(figsize=(size.width, panel))
    title = f"{content['description']}: images that move each query's loss most"
    about = [example_task(content), f"{content['scores']} scores", f"seed {content['seed']}"]
    if "alpha_attribution" in content:
        about.append(f"alpha_attribution {content['alpha_attribution']:g}")
    names = [label_words(method) for method in methods]
    sizes = [f"{len(queries)} queries", f"{shown} images on each side"]
    if "num_train" in content:
        sizes[1] += f" of {content['num_train']:,}"
    notes = [
        "Frame: blue, of the query's own class; orange, of another. Below each: its class and score.",
        f"{content.get('rule', '')} n: {', '.join(sizes)}.".strip(),
        example_settings(content),
    ]
    notes = list(filter(None, notes))
    below = frame(figure, size, title, about, notes)
    places = Places(figure, size.width, figure.get_figheight(), unit, below, letters)
    top = panel - 0.2 * size.scale
    for row, query in enumerate(queries):
        bottom = top - (row + 1) * step + (step - unit)
        why = "unsure" if query.get("chosen") == "least sure" else f"no. {query['query']}"
        places.tile(0.03, bottom, tiles[query["image"]], INK, [query["label"], why])
        left = unit * 1.5
        for method in methods:
            for side in ("helpful", "harmful"):
                for position, example in enumerate(query["methods"][method][side]):
                    colour = SAME if example["label"] == query["label"] else OTHER
                    score = score_text(example["score"])
                    places.tile(
                        left + position * unit, bottom, tiles[example["image"]], colour, [example["label"], score]
                    )
                left += unit * (shown + 0.2)
            left += unit * 0.5
    headings = [(0.03, "query", 1.4 * unit)]
    left = unit * 1.5
    for name in names:
        headings.append((left, f"{name}: lower its loss most", unit * (shown + 0.1)))
        headings.append((left + unit * (shown + 0.2), "raise it most", unit * (shown + 0.1)))
        left += unit * (2 * shown + 0.9)
    places.headings(top + 0.03, headings)
    caption = (
        f"Queries (left) and the training images whose inclusion lowers or raises the query's loss most, by "
        f"{' and '.join(names)} ({content['scores']} scores); {content['description']}, seed {content['seed']}. "
        f"{' '.join(notes)}"
    )
    task = content.get("task") or content["description"]
    stem = f"examples-{file_slug(task)}-seed-{content['seed']}-{file_slug(content['scores'])}"
    kind = [content["scores"]] if content["scores"] in ("raw", "train-normalised") else []
    facts = {"task": [task], "method": methods, **({"scores": kind} if kind else {})}
    return Drawing(stem, title, caption, [], figure, facts=facts)


def example_task(content: dict[str, Any]) -> str:
    task, protocol = content.get("task"), content.get("protocol")
    return ", ".join(filter(None, [f"task {task}" if task else "", f"protocol {protocol}" if protocol else ""]))


def label_words(label: str) -> str:
    """Of a method or a variant of one."""
    method = label.partition("@")[0]
    return series_label(method, label)


def example_settings(content: dict[str, Any]) -> str:
    """Where the record has them: label -> what is not the method's default."""
    settings = content.get("settings") or {}
    known = [f"{label_words(name)}: {words.replace(',', ', ')}" for name, words in settings.items() if words]
    return f"Settings. {'; '.join(known)[:1500]}." if known else ""


def score_text(score: float | None) -> str:
    """Two digits, without an exponent where that is short."""
    return "" if score is None else f"{score:,.0f}" if 100 <= abs(score) < 1e5 else f"{score:.2g}"


class Places:
    """Tiles and words at inches from the lower left corner of the panels."""

    def __init__(self, figure: Figure, width: float, height: float, unit: float, base: float, letters: float):
        self.figure, self.width, self.height, self.unit, self.base = figure, width, height, unit, base
        self.letters = letters

    def tile(self, left: float, bottom: float, pixels: np.ndarray, colour: str, lines: Sequence[str]) -> None:
        side = 0.94 * self.unit
        place = (left / self.width, (self.base + bottom) / self.height, side / self.width, side / self.height)
        axis = self.figure.add_axes(place)
        axis.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest", aspect="equal")
        axis.set_xticks([])
        axis.set_yticks([])
        axis.grid(False)
        for spine in axis.spines.values():
            spine.set_visible(True)
            spine.set_color(colour)
            spine.set_linewidth(1.0)
        room = max(3, int(side * 72 / (0.58 * self.letters)))
        text = "\n".join(line if len(line) <= room else line[: room - 1] + "\u2026" for line in lines)
        self.figure.text(
            (left + side / 2) / self.width, (self.base + bottom - 0.02) / self.height, text, ha="center", va="top",
            fontsize=self.letters, linespacing=1.05,
        )  # fmt: skip

    def headings(self, bottom: float, words: Sequence[tuple[float, str, float]]) -> None:
        """(left, text, room) in letters of one size, as large as there is room for where it is scarcest."""
        fitting = min(0.92 * room / text_width(text, 1.0) for _, text, room in words)
        for left, text, _ in words:
            place = (left / self.width, (self.base + bottom) / self.height)
            self.figure.text(*place, text, fontsize=min(1.25 * self.letters, fitting), va="bottom")


def read_picture(path: Path) -> bytes:
    """The bytes of a PNG that is one by its header and not too large to unpack."""
    with open_plain(path, MAX_PICTURE_BYTES) as (file, _):
        data = file.read()
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    if data[:8] != b"\x89PNG\r\n\x1a\n" or data[12:16] != b"IHDR":
        raise SafeFileError(path, "does not begin like a PNG picture")
    if not 0 < width * height <= MAX_PIXELS:
        raise SafeFileError(path, f"is a picture of {width:,} x {height:,} pixels; at most {MAX_PIXELS:,} are shown")
    return data


def read_tiles(path: Path, tile: Sequence[int]) -> list[np.ndarray]:
    """Row by row."""
    from PIL import Image, UnidentifiedImageError

    try:
        picture = Image.open(io.BytesIO(read_picture(path)), formats=["PNG"])
        sheet = np.asarray(picture.convert("L" if picture.mode in ("1", "L", "I", "I;16") else "RGB")) / 255
    except (OSError, SyntaxError, ValueError, UnidentifiedImageError) as error:
        if isinstance(error, SafeFileError):
            raise
        raise SafeFileError(path, f"is no picture that can be shown ({type(error).__name__})") from None
    height, width = tile
    across, down = sheet.shape[1] // width, sheet.shape[0] // height
    return [
        sheet[y * height : (y + 1) * height, x * width : (x + 1) * width] for y in range(down) for x in range(across)
    ]
