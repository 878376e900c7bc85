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
SIDES = (("helpful", 1), ("harmful", -1))
COLUMNS = ["query", "method", "side", "rank", "train", "score", "label", "text"]
ChosenQuery = tuple[int, str]  # position of a query, why it is shown


# ---- which queries ----


def queries_by_rule(classes: np.ndarray, entropy: np.ndarray, count: int, seed: int) -> list[ChosenQuery]:
    """`count` positions, in the order in which they are shown; all there are where they are fewer."""
    generator = np.random.default_rng([seed, len(classes)])
    unsure = min(UNCERTAIN, max(0, count - 1))
    least_sure = [int(k) for k in np.argsort(-entropy, kind="stable")[:unsure]]
    waiting = {
        one: [int(k) for k in generator.permutation(np.flatnonzero(classes == one)) if k not in least_sure]
        for one in np.unique(classes)
    }
    order = generator.permutation(list(waiting))
    drawn: list[int] = []
    while len(drawn) < count - len(least_sure) and any(waiting.values()):
        for one in order:
            if waiting[one] and len(drawn) < count - len(least_sure):
                drawn.append(waiting[one].pop(0))
    return [(k, "drawn from its class") for k in drawn] + [(k, "least sure") for k in least_sure]


def choose_queries(task: Task, model: Any, indices: np.ndarray, count: int, seed: int) -> list[ChosenQuery]:
    """Positions in `indices`: all where they are few; of a classification task by RULE; otherwise the first."""
    if len(indices) <= count or not classifies(task):
        return [(k, "") for k in range(min(count, len(indices)))]
    examples = task.query_data.select(indices)
    device = next(model.parameters()).device
    with torch.no_grad():
        logits = torch.cat(
            [model(inputs.to(device)).float().cpu() for inputs, _ in examples.batches(task.eval_batch_size)]
        )
    entropy = torch.distributions.Categorical(logits=logits).entropy().numpy()
    return queries_by_rule(examples.targets.numpy(), entropy, count, seed)


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
    inputs = examples.inputs["input_ids"] if isinstance(examples.inputs, Columns) else examples.inputs
    values = inputs[index].flatten().tolist()
    if not inputs.is_floating_point():
        decode = _decoder(task)
        return str(decode(values)) if decode is not None else " ".join(map(str, values))
    names = task.feature_names if len(task.feature_names) == len(values) else ()
    return ", ".join(f"{name}={value:.4g}" for name, value in zip(names, values)) or " ".join(
        f"{v:.4g}" for v in values
    )


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


class Sheet:
    """Every image that is shown, once, as tiles of one picture."""

    def __init__(self, task: Task):
        shape = task.image_shape()
        assert shape is not None
        self.channels, height, width = shape
        shrink = min(1.0, MAX_TILE / max(height, width))
        self.tile = (round(height * shrink), round(width * shrink))
        inputs = task.train_data.inputs[:2000].reshape(-1, *shape)
        # Whatever the normalisation was, the darkest and the brightest pixel of each channel undo it.
        self.low, self.high = inputs.amin(dim=(0, 2, 3)).numpy(), inputs.amax(dim=(0, 2, 3)).numpy()
        self.places: dict[tuple[int, int], int] = {}
        self.tiles: list[np.ndarray] = []

    def add(self, examples: Examples, index: int) -> int:
        key = (id(examples), index)
        if key not in self.places:
            pixels = examples.inputs[index].numpy().reshape(self.channels, -1)
            scaled = (pixels - self.low[:, None]) / np.maximum(self.high - self.low, 1e-9)[:, None]
            image = (scaled.clip(0, 1) * 255).round().astype(np.uint8)
            image = image.reshape(self.channels, *examples.inputs[index].shape[-2:])
            picture = Image.fromarray(image[0] if self.channels == 1 else image.transpose(1, 2, 0))
            if picture.size != self.tile[::-1]:
                picture = picture.resize(self.tile[::-1], Image.Resampling.BOX)
            self.places[key] = len(self.tiles)
            self.tiles.append(np.asarray(picture))
        return self.places[key]

    def data_uri(self, examples: Examples, index: int) -> str:
        file = io.BytesIO()
        Image.fromarray(self.tiles[self.add(examples, index)]).save(file, "PNG", optimize=True)
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"

    def picture(self) -> Any:
        height, width = self.tile
        across = min(TILES_ACROSS, len(self.tiles))
        down = -(-len(self.tiles) // across)
        canvas = np.zeros((down * height, across * width, *self.tiles[0].shape[2:]), dtype=np.uint8)
        for k, tile in enumerate(self.tiles):
            y, x = k // across * height, k % across * width
            canvas[y : y + height, x : x + width] = tile
        return Image.fromarray(canvas)


# ---- what is shown ----


@dataclass(frozen=True, eq=False)
class Influential:
    """The training examples that help and harm some queries most, by one method or several side by side."""

    task: Task = field(repr=False)  # whose examples they are
    methods: tuple[str, ...]  # side by side
    scores: str  # "raw" or "normalised"
    queries: tuple[int, ...]  # indices into the task's query data
    num_train: int  # training examples that were scored
    rows: list[dict[str, Any]] = field(repr=False)  # of COLUMNS, an example each

    def frame(self) -> pd.DataFrame:
        """A row for every example shown: query, method, side, rank, train, score, label, text."""
        return pd.DataFrame(self.rows, columns=COLUMNS)

    def __str__(self) -> str:
        return self.text()

    def of(self, query: int, side: str) -> list[list[dict[str, Any]]]:
        """Rank by rank, each method's example."""
        found = {
            m: [r for r in self.rows if (r["query"], r["method"], r["side"]) == (query, m, side)] for m in self.methods
        }
        return [list(of_rank) for of_rank in zip(*found.values(), strict=True)]

    def text(self) -> str:
        """Tables for a terminal; examples' words are shown where there is one method."""
        known = f"{len(self.task.train_data):,} training examples of {self.task.name}, {self.scores} scores"
        parts = [f"{', '.join(self.methods)}: {known}; negative scores help"]
        alone = len(self.methods) == 1
        for query in self.queries:
            examples = self.task.query_data
            words = [label_of(self.task, examples, query), _shortened(text_of(self.task, examples, query))]
            parts.append(f"\nquery {query}: {'; '.join(filter(None, words))}".rstrip(": "))
            for side, _ in SIDES:
                header = [side]
                for method in self.methods:
                    header += ["train", "score" if alone else method, "label", *(["example"] if alone else [])]
                lines = []
                for rank, examples_of_rank in enumerate(self.of(query, side), 1):
                    line = [str(rank)]
                    for one in examples_of_rank:
                        line += [str(one["train"]), f"{one['score']:.3g}", one["label"]]
                        line += [_shortened(one["text"])] if alone else []
                    lines.append(line)
                left = {k for k, name in enumerate(header) if name in ("label", "example")}
                kept = [k for k in range(len(header)) if k not in left or any(line[k] for line in lines)]
                places = [place for place, k in enumerate(kept) if k in left]
                parts.append(table([header[k] for k in kept], [[line[k] for k in kept] for line in lines], places))
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
        sheet = Sheet(self.task) if self.task.image_shape() is not None else None

        def shown(examples: Examples, index: int) -> dict[str, Any]:
            picture = "" if sheet is None else sheet.data_uri(examples, index)
            said = {"label": label_of(self.task, examples, index), "text": text_of(self.task, examples, index)}
            return {"index": index, "picture": picture, **said}

        queries = []
        for query in self.queries:
            own = shown(self.task.query_data, query)
            sides = {
                side: [
                    [
                        {**shown(self.task.train_data, one["train"]), "score": f"{one['score']:.3g}",
                         "same": bool(one["label"]) and one["label"] == own["label"]}
                        for one in of_rank
                    ]
                    for of_rank in self.of(query, side)
                ]
                for side, _ in SIDES
            }  # fmt: skip
            queries.append({**own, "sides": sides})
        lead = f"{self.num_train:,} training examples of {self.task.description}; {self.scores} scores: negative helps."
        title = f"What matters to queries of {self.task.name}"
        return built_page("inspect", title=title, lead=lead, methods=self.methods, queries=queries)

    def save_record(self, folder: Path, why: Mapping[int, str], known: Mapping[str, Any]) -> None:
        """Of images, examples.json and its picture: what figures are drawn from."""
        task, sheet = self.task, Sheet(self.task)
        queries = []
        for query in self.queries:
            methods: dict[str, Any] = {method: {} for method in self.methods}
            for side, _ in SIDES:
                for of_rank in self.of(query, side):
                    for one in of_rank:
                        tile = {"image": sheet.add(task.train_data, one["train"])}
                        made = {"train": one["train"], "score": float(f"{one['score']:.3g}"), "label": one["label"]}
                        methods[one["method"]].setdefault(side, []).append(made | tile)
            shown = {"label": label_of(task, task.query_data, query), "image": sheet.add(task.query_data, query)}
            queries.append({"query": query, "chosen": why.get(query, ""), **shown, "methods": methods})
        content = {
            "kind": "images", "task": task.name, "protocol": task.protocol, "description": task.description,
            "scores": "raw" if self.scores == "raw" else "train-normalised", "methods": list(self.methods),
            "sprite": "images.png", "tile": list(sheet.tile), "rule": RULE if any(why.values()) else "",
            "queries": queries, "num_train": self.num_train, **known,
        }  # fmt: skip
        sheet.picture().save(folder / "images.png", optimize=True)
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
            raise UsageError(
                f"{one.method} was asked about other data than {first.method}; expected scores of one task"
            )
    for query in map(int, queries):
        for one in scores:
            places = np.flatnonzero(one.queries == query)
            if not len(places):
                known = f"{len(one.queries)} queries, {one.queries.min()} to {one.queries.max()}"
                raise UsageError(f"{one.method} has no scores of query {query}; it has {known}")
            values = one.values[places[0]]
            for side, sign in SIDES:
                order = np.argsort(sign * values, kind="stable")  # what is not finite comes last
                for rank, place in enumerate(order[:k], 1):
                    index = int(one.train[place])
                    said = {"label": label_of(one.task, one.task.train_data, index)}
                    said["text"] = text_of(one.task, one.task.train_data, index)
                    where = {"query": query, "method": one.method, "side": side, "rank": rank, "train": index}
                    rows.append({**where, "score": float(values[place]), **said})
    kind = "normalised" if first.normalised else "raw"
    return Influential(
        first.task, tuple(one.method for one in scores), kind, tuple(map(int, queries)), len(first.train), rows
    )
