"""Looking at scores: `tda-bench inspect`; its `tokens` and `words` are modules here.

Which training examples matter most to a query: as text, as a table, and as a page with pictures or texts.

`influential` takes scores (bench/api.py) of one method or several and gives an `Influential`: its `text()` is for a
terminal, `frame()` a row for every example shown, and `save(folder)` writes inspect.csv and inspect.html. `record()` is
what figures of images are drawn from. Where nobody names the queries, RULE chooses them.
"""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image

from bench.publish.html import built_page
from bench.publish.plots.style import with_a_palette
from bench.tables import table
from retrain.errors import UsageError
from retrain.examples import Columns, Examples
from retrain.losses import SquaredError
from retrain.safe_files import write_whole
from retrain.task import Task, classifies

MAX_TILE = 64  # pixels: larger images are shrunk
TILES_ACROSS = 32
UNCERTAIN = 2  # of the queries that are shown
CHARACTERS = 128  # ids below this are characters where a task has no tokenizer
WORDS_SHOWN = 60  # characters of an example's text in a terminal
RULE = (
    "Queries: one drawn at random from each of as many classes, drawn at random by the seed; the last two are those "
    "that the model is least sure of (highest entropy)."
)
SIDES = {"helpful": 1, "harmful": -1}
COLUMNS = ["query", "method", "side", "rank", "train", "score", "label", "text"]


# ---- which queries ----


def queries_by_rule(classes: np.ndarray, entropy: np.ndarray, count: int, seed: int) -> dict[int, str]:
    """`count` positions, in the order in which they are shown, with the reason; all there are where they are fewer."""
    generator = np.random.default_rng([seed, len(classes)])
    unsure = min(UNCERTAIN, max(0, count - 1))
    least_sure = [int(k) for k in np.argsort(-entropy, kind="stable")[:unsure]]
    waiting = [
        [int(k) for k in generator.permutation(np.flatnonzero(classes == one)) if k not in least_sure]
        for one in np.unique(classes)
    ]
    order = [waiting[k] for k in generator.permutation(len(waiting))]
    in_turn = [queue[turn] for turn in range(len(classes)) for queue in order if turn < len(queue)]
    drawn = in_turn[: count - len(least_sure)]
    return {**dict.fromkeys(drawn, "drawn from its class"), **dict.fromkeys(least_sure, "least sure")}


def choose_queries(task: Task, model: Any, indices: np.ndarray, count: int, seed: int) -> dict[int, str]:
    """Some of these indices with the reason: all where they are few; of a classification task by RULE; or the first."""
    if len(indices) <= count or not classifies(task):
        return {int(index): "" for index in indices[:count]}
    examples = task.query_data.select(indices)
    device = next(model.parameters()).device
    with torch.no_grad():
        logits = [model(inputs.to(device)).float().cpu() for inputs, _ in examples.batches(task.eval_batch_size)]
    entropy = torch.distributions.Categorical(logits=torch.cat(logits)).entropy().numpy()
    chosen = queries_by_rule(examples.targets.numpy(), entropy, count, seed)
    return {int(indices[k]): why for k, why in chosen.items()}


# ---- an example as people read it ----


def label_of(task: Task, examples: Examples, index: int) -> str:
    """Its class by name, or its value; empty of a sequence."""
    target = examples.targets[index]
    if target.dim():
        return ""
    if target.is_floating_point() or isinstance(task.loss_function, SquaredError):
        return f"{float(target):.4g}"
    return task.class_names[int(target)] if int(target) < len(task.class_names) else str(int(target))


def text_of(task: Task, examples: Examples, index: int) -> str:
    """What the task says of it; else its tokens, or its features by name; empty where a picture shows it."""
    if text := task.text_of(examples, index):
        return text
    if task.image_shape() is not None:
        return ""
    if examples.targets.dim() == 2:
        return "".join(token_texts(task, examples, index))
    inputs = examples.inputs.get("input_ids") if isinstance(examples.inputs, Columns) else examples.inputs
    if inputs is None:
        return ""
    values = inputs[index].flatten().tolist()
    if not inputs.is_floating_point():
        decode = _decoder(task)
        return str(decode(values)) if decode is not None else " ".join(map(str, values))
    names = task.feature_names if len(task.feature_names) == len(values) else ()
    named = [f"{name}={value:.4g}" for name, value in zip(names, values)]
    return ", ".join(named) or " ".join(f"{value:.4g}" for value in values)


def token_texts(task: Any, examples: Any, index: int) -> list[str]:
    """The text of the tokens whose losses are measured, the targets, each decoded as the task's tokenizer has it."""
    ids = [int(i) for i in examples.targets[index] if i >= 0]  # padding does not count
    decode = _decoder(task)
    if decode is not None:
        return [str(decode([i])) for i in ids]
    if max(ids, default=0) < CHARACTERS:
        return [chr(i) if 32 <= i < 127 else "\n" if i == 10 else "\ufffd" for i in ids]
    return [f"#{i}" for i in ids]  # of a vocabulary that nobody here knows


def _decoder(task: Any) -> Any:
    if getattr(task, "decode", None) is not None:
        return task.decode
    if getattr(task, "tokenizer", None) is not None:
        return task.tokenizer.decode
    if isinstance(getattr(task, "model", None), str):
        return _tokenizer(task.model).decode
    return None


@lru_cache(maxsize=2)
def _tokenizer(model: str) -> Any:
    from retrain.models.pretrained import load_tokenizer

    return load_tokenizer(model, allow_download=False)


class Pictures:
    """Examples of a task of images, small enough to be shown side by side."""

    def __init__(self, task: Task):
        shape = task.image_shape()
        assert shape is not None
        self.channels, height, width = shape
        shrink = min(1.0, MAX_TILE / max(height, width))
        self.height, self.width = round(height * shrink), round(width * shrink)
        inputs = task.train_data.inputs[:2000].reshape(-1, *shape)
        # Whatever the normalisation was, the darkest and the brightest pixel of each channel undo it.
        self.low, self.high = (inputs.amin(dim=(0, 2, 3)).numpy(), inputs.amax(dim=(0, 2, 3)).numpy())
        self.shape = shape

    def of(self, examples: Examples, index: int) -> Image.Image:
        pixels = examples.inputs[index].numpy().reshape(self.channels, -1)
        scaled = (pixels - self.low[:, None]) / np.maximum(self.high - self.low, 1e-9)[:, None]
        image = (scaled.clip(0, 1) * 255).round().astype(np.uint8).reshape(self.shape)
        picture = Image.fromarray(image[0] if self.channels == 1 else image.transpose(1, 2, 0))
        size = (self.width, self.height)
        return picture if picture.size == size else picture.resize(size, Image.Resampling.BOX)


# ---- what is shown ----


@dataclass(frozen=True, eq=False)
class Influential:
    """The training examples that help and harm some queries most, by one method or several side by side."""

    task: Task = field(repr=False)  # whose examples they are
    methods: tuple[str, ...]  # side by side
    scores: str  # "raw" or "normalised"
    queries: tuple[int, ...]  # indices into the task's query data
    num_train: int  # training examples that were scored
    rows: list[dict[str, Any]] = field(repr=False)  # an example each, with the columns of `frame()`

    def frame(self) -> pd.DataFrame:
        """A row for every example shown: query, method, side (helpful or harmful), rank, train, score, label, text."""
        return pd.DataFrame(self.rows, columns=COLUMNS)

    def __str__(self) -> str:
        return self.text()

    def _of(self, query: int, method: str, side: str) -> list[dict[str, Any]]:
        """The rows of a query, in the order of their ranks."""
        return [row for row in self.rows if (row["query"], row["method"], row["side"]) == (query, method, side)]

    def text(self) -> str:
        """Tables for a terminal; examples' words are shown where there is one method."""
        known = f"{len(self.task.train_data):,} training examples of {self.task.name}, {self.scores} scores"
        parts = [f"{', '.join(self.methods)}: {known}; negative scores help"]
        alone = len(self.methods) == 1
        for query in self.queries:
            examples = self.task.query_data
            words = [label_of(self.task, examples, query), _shortened(text_of(self.task, examples, query))]
            parts.append(f"\nquery {query}: {'; '.join(filter(None, words))}".rstrip(": "))
            for side in SIDES:
                columns: list[tuple[str, list[str]]] = []
                for method in self.methods:
                    rows = self._of(query, method, side)
                    columns = columns or [(side, [str(row["rank"]) for row in rows])]
                    columns.append(("train", [str(row["train"]) for row in rows]))
                    columns.append(("score" if alone else method, [f"{row['score']:.3g}" for row in rows]))
                    columns.append(("label", [row["label"] for row in rows]))
                    columns.append(("example", [_shortened(row["text"]) if alone else "" for row in rows]))
                columns = [(name, cells) for name, cells in columns if any(cells)]
                left = [place for place, (name, _) in enumerate(columns) if name in ("label", "example")]
                lines = list(zip(*(cells for _, cells in columns), strict=True))
                parts.append(table([name for name, _ in columns], lines, left))
        return "\n".join(parts)

    def save(self, folder: str | Path) -> list[Path]:
        """inspect.csv and inspect.html; the files that were written."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "inspect.csv", self.frame().to_csv(index=False))
        write_whole(folder / "inspect.html", self.page())
        return [folder / "inspect.csv", folder / "inspect.html"]

    def page(self) -> str:
        """One file that needs nothing else: every query with its examples, as pictures or texts."""
        task, pictures = self.task, None if self.task.image_shape() is None else Pictures(self.task)

        def picture(examples: Examples, index: int) -> str:
            if pictures is None:
                return ""
            file = io.BytesIO()
            pictures.of(examples, index).save(file, "PNG", optimize=True)
            return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"

        queries = []
        for query in self.queries:
            shown = {"query": query, "picture": picture(task.query_data, query)}
            shown |= {"label": label_of(task, task.query_data, query), "text": text_of(task, task.query_data, query)}
            for side in SIDES:
                of_methods = [
                    [
                        {**row, "picture": picture(task.train_data, row["train"])}
                        for row in self._of(query, method, side)
                    ]
                    for method in self.methods
                ]
                shown[side] = list(zip(*of_methods, strict=True))
            queries.append(shown)
        lead = f"{self.num_train:,} training examples of {self.task.description}; {self.scores} scores: negative helps."
        title = f"What matters to queries of {self.task.name}"
        return built_page("inspect", title=title, lead=lead, methods=self.methods, queries=queries, sides=list(SIDES))

    def save_record(self, folder: Path, why: Mapping[int, str], known: Mapping[str, Any]) -> None:
        """Of images, examples.json and its picture: what figures are drawn from."""
        task, pictures = self.task, Pictures(self.task)
        tiles: dict[tuple[Examples, int], int] = {}

        def tile(examples: Examples, index: int) -> int:
            return tiles.setdefault((examples, index), len(tiles))

        queries = []
        for query in self.queries:
            methods = {method: {side: self._of(query, method, side) for side in SIDES} for method in self.methods}
            for rows in (rows for sides in methods.values() for rows in sides.values()):
                rows[:] = [
                    {"train": row["train"], "score": float(f"{row['score']:.3g}"), "label": row["label"],
                     "image": tile(task.train_data, row["train"])}
                    for row in rows
                ]  # fmt: skip
            shown = {"label": label_of(task, task.query_data, query), "image": tile(task.query_data, query)}
            queries.append({"query": query, "chosen": why.get(query, ""), **shown, "methods": methods})
        across = min(TILES_ACROSS, len(tiles))
        height, width = pictures.height, pictures.width
        down = -(-len(tiles) // across)
        canvas = Image.new("L" if pictures.channels == 1 else "RGB", (across * width, down * height))
        for (examples, index), place in tiles.items():
            canvas.paste(pictures.of(examples, index), (place % across * width, place // across * height))
        content = {
            "kind": "images", "task": task.name, "protocol": task.protocol, "description": task.description,
            "scores": "raw" if self.scores == "raw" else "train-normalised", "methods": list(self.methods),
            "sprite": "images.png", "tile": [height, width], "rule": RULE if any(why.values()) else "",
            "queries": queries, "num_train": self.num_train, **known,
        }  # fmt: skip
        with_a_palette(canvas).save(folder / "images.png", optimize=True)
        write_whole(folder / "examples.json", json.dumps(content, separators=(",", ":")) + "\n")


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= WORDS_SHOWN else f"{text[: WORDS_SHOWN - 1]}\u2026"


def _data_of(task: Task) -> tuple[str, str]:
    return task.train_data.fingerprint, task.query_data.fingerprint


def influential(scores: Sequence[Any], k: int, queries: Sequence[int] | np.ndarray) -> Influential:
    """Of these `Scores` of one task: the k most helpful and most harmful examples of each query."""
    first, rows = scores[0], []
    if k < 1:
        raise UsageError(f"the top {k} examples were asked for; expected at least 1")
    for one in scores[1:]:
        if one.task is not first.task and _data_of(one.task) != _data_of(first.task):
            raise UsageError(f"{one.method} has scores of other data than {first.method}; expected those of one task")
    for query in map(int, queries):
        for one in scores:
            places = np.flatnonzero(one.queries == query)
            if not len(places):
                known = f"{len(one.queries)} queries, {one.queries.min()} to {one.queries.max()}"
                raise UsageError(f"{one.method} has no scores of query {query}; it has {known}")
            values = one.values[places[0]]
            for side, sign in SIDES.items():
                order = np.argsort(sign * values, kind="stable")  # what is not finite comes last
                for rank, place in enumerate(order[:k], 1):
                    index = int(one.train[place])
                    said = {"label": label_of(one.task, one.task.train_data, index)}
                    said["text"] = text_of(one.task, one.task.train_data, index)
                    where = {"query": query, "method": one.method, "side": side, "rank": rank, "train": index}
                    rows.append({**where, "score": float(values[place]) + 0.0, **said})  # never -0
    kind = "normalised" if first.normalised else "raw"
    return Influential(
        first.task, tuple(one.method for one in scores), kind, tuple(map(int, queries)), len(first.train), rows
    )
