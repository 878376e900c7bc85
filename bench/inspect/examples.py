"""What the scores look like: for queries chosen by rule, the training examples that matter most under some methods.

    python -m bench.lds --task digits --alpha 0.1                       # leaves its scores in the cache
    python -m bench.inspect examples --task digits --out results/examples   # reads them
    python -m bench.inspect examples --task tinylm --out results/examples   # token by token

For an image task, `examples.json` lists each query's most and least influential training images and how often two
methods name the same ones over all queries, and `images.png` holds every image once; raw scores have a folder beside
that of train-normalised ones. For a language task it holds, for a few pairs of sequences, the correlation of every
query token's loss with every training token's under the posterior (the paper's normalised BIF, sign included).
Queries and pairs are chosen by rule, never by hand: RULE and TOKEN_RULE.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bench.arguments import check_out
from bench.experiment import execution_of, experiment_of
from bench.ground_truth import base_model
from bench.inspect.tokens import score_tokens, strongest_of_each_query
from bench.methods import Variant
from bench.metrics import mean_and_standard_error
from bench.records import provenance, try_write
from bench.runner import Session
from retrain.errors import UsageError
from retrain.examples import Examples
from retrain.safe_files import write_whole
from retrain.store import default_cache
from retrain.task import Task
from retrain.units import checkpoint_unit, choose_device

MAX_TILE = 64  # pixels: larger images are shrunk
TILES_ACROSS = 32
SHOWN_METHODS = ("bif", "ekfac")
SHOWN_IMAGE_METHODS = (*SHOWN_METHODS, "trak")
SHOWN_QUERIES, SHOWN_PAIRS = 8, 5
POOL = 4  # language tasks: queries that are looked at for each pair that is shown
UNCERTAIN = 2  # of the queries that are shown
NAMED = (1, 3, 10, 30, 100)  # how many images a method may name when it is asked whether another names the same
RULE = (
    "Queries: one drawn at random from each of as many classes, drawn at random by the seed; the last two are those "
    "that the model is least sure of (highest entropy)."
)
TOKEN_RULE = "Pairs: of each query with the sequence that moves it most, those whose strongest two different words are"
ChosenQuery = tuple[int, str]  # position of a query, why it is shown


# ---- which queries and pairs ----


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


def entropies(probabilities: np.ndarray) -> np.ndarray:
    """(queries, classes) -> (queries,), in nats."""
    return -(probabilities * np.log(np.clip(probabilities, 1e-12, None))).sum(1)


def shared_images(scores: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """For every two methods, side and number named: the share of images both name, mean over all queries.

    scores: label -> (queries, train), helpful ones negative. Two that chose at random would share `chance` of them.
    """
    found: list[dict[str, Any]] = []
    if not scores:
        return found
    num_train = next(iter(scores.values())).shape[1]
    counts = [count for count in NAMED if count < num_train]
    for side, sign in (("helpful", 1.0), ("harmful", -1.0)):
        orders = {label: np.argsort(sign * matrix, axis=1, kind="stable") for label, matrix in scores.items()}
        for one, other in combinations(scores, 2):
            for count in counts:
                both = zip(orders[one][:, :count], orders[other][:, :count], strict=True)
                shares = np.array([len(np.intersect1d(a, b)) / count for a, b in both])
                mean, error = mean_and_standard_error(shares)
                found.append(
                    {
                        "one": one, "other": other, "side": side, "named": count, "shared": round(mean, 6),
                        "error": round(error, 6), "chance": round(count / num_train, 6),
                    }
                )  # fmt: skip
    return found


def strongest_of_different_words(
    matrix: np.ndarray, query_tokens: Sequence[str], train_tokens: Sequence[str]
) -> tuple[int, int, float] | None:
    """(query token, training token, correlation) of the largest size among tokens that are not the same word."""
    one = np.array([token.strip().casefold() for token in query_tokens])
    other = np.array([token.strip().casefold() for token in train_tokens])
    apart = (one[:, None] != other[None, :]) & (one != "")[:, None] & (other != "")[None, :] & np.isfinite(matrix)
    if not apart.any():
        return None
    sizes = np.where(apart, np.abs(matrix), -1.0)
    row, column = (int(k) for k in np.unravel_index(int(np.argmax(sizes)), sizes.shape))
    return row, column, float(matrix[row, column])


def pairs_by_rule(strengths: Sequence[tuple[int, int, float]], count: int) -> list[int]:
    """Positions of the strongest, each query and training sequence once; strengths: (query, train, size)."""
    chosen: list[int] = []
    queries, trains = set[int](), set[int]()
    for position in sorted(range(len(strengths)), key=lambda k: (-strengths[k][2], k)):
        query, train, size = strengths[position]
        if size >= 0 and query not in queries and train not in trains and len(chosen) < count:
            chosen.append(position)
            queries.add(query)
            trains.add(train)
    return chosen


# ---- images ----


def stored_scores(session: Session, variant: Variant, raw: bool) -> np.ndarray:
    """(queries, train) float32, from the cache and from nowhere else."""
    (block,) = session.blocks
    base = checkpoint_unit(session.task, block[0], 0, session.execution.device)
    attribution = None
    if session.store.has(base.kind, base.config):
        attribution = session.scorer(variant, *block).stored_scores()
    if attribution is None:
        raise UsageError(
            f"the cache {session.store.root} has no scores of {variant.label} on {session.task.name}, seed {block[0]}, "
            f"alpha_attribution {block[1]:g}, with these options; make them with `{command_for(session, variant)}`"
        )
    scaled = None if raw else attribution.normalised()
    return (attribution.scores if scaled is None else scaled).numpy()


def command_for(session: Session, variant: Variant) -> str:
    """The bench.lds that leaves the scores that are asked for here."""
    experiment, (block,) = session.experiment, session.blocks
    words = ["python", "-m", "bench.lds", "--task", experiment.task, "--alpha", "0.1", "--seeds", str(block[0])]
    words += ["--alpha-attribution", f"{block[1]:g}", "--methods"]
    words += [f"{variant.asked}@{variant.settings}" if variant.settings else variant.asked, "--settings", "default"]
    if experiment.queries is not None:
        words += ["--queries", str(experiment.queries)]
    for option, value in experiment.task_options.items():
        words += ["--set", f"{session.task.name}.{option}={value}"]
    if session.execution.cache != default_cache():
        words += ["--cache", session.execution.cache]
    return shlex.join(words)


def label_of(task: Task, target: int) -> str:
    return task.class_names[target] if task.class_names else str(target)


def image_examples(session: Session, num_queries: int, shown: int, raw: bool) -> tuple[dict[str, Any], Any]:
    task, (block,) = session.task, session.blocks
    question = session.question(*block)
    kind = "raw" if raw else "normalised"
    variants = [variant for variant in session.active if variant.rows in ("both", kind)]
    scores = {variant.label: stored_scores(session, variant, raw) for variant in variants}
    query_indices, attributed = question.query_indices(), question.attributed_indices()
    entropy = entropies(probabilities(session, query_indices))
    classes = task.query_data.targets[query_indices].numpy()
    chosen = queries_by_rule(classes, entropy, num_queries, question.seed)
    sheet = Sheet(task)

    def describe(examples: Examples, index: int) -> dict[str, Any]:
        return {"label": label_of(task, int(examples.targets[index])), "image": sheet.add(examples, index)}

    queries = []
    for position, why in chosen:
        index = int(query_indices[position])
        methods = {}
        for name, matrix in scores.items():
            order = np.argsort(matrix[position], kind="stable")
            sides = {"helpful": order[:shown], "harmful": order[::-1][:shown]}
            methods[name] = {
                side: [
                    {
                        "train": int(attributed[i]),
                        "score": float(f"{matrix[position, i]:.3g}"),
                        **describe(task.train_data, int(attributed[i])),
                    }
                    for i in found
                ]
                for side, found in sides.items()
            }
        shown_query = {"query": index, "chosen": why, "entropy": float(f"{entropy[position]:.3g}")}
        queries.append({**shown_query, **describe(task.query_data, index), "methods": methods})
    content = {
        "kind": "images",
        "task": task.name,
        "protocol": task.protocol,
        "description": task.description,
        "seed": question.seed,
        "alpha_attribution": question.alpha_attribution,
        "scores": "raw" if raw else "train-normalised",
        "methods": list(scores),
        "settings": {variant.label: variant.settings for variant in variants},
        "sprite": "images.png",
        "tile": list(sheet.tile),
        "rule": RULE,
        "queries": queries,
        "num_train": len(attributed),
        "num_queries": len(query_indices),
        "agreement": shared_images(scores),
    }
    return content, sheet.picture()


def probabilities(session: Session, indices: np.ndarray) -> np.ndarray:
    """(queries, classes) of the model that the methods look at."""
    task, (block,) = session.task, session.blocks
    model, _ = base_model(task, block[0], session.store, session.execution.device)
    device = choose_device(session.execution.device)
    model = model.to(device).eval()
    with torch.no_grad():
        parts = [
            torch.softmax(model(part.to(device)).float(), 1).cpu()
            for part in task.query_data.inputs[indices].split(task.eval_batch_size)
        ]
    return torch.cat(parts).numpy()


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
            image = (
                (scaled.clip(0, 1) * 255)
                .round()
                .astype(np.uint8)
                .reshape(self.channels, *examples.inputs[index].shape[-2:])
            )
            picture = Image.fromarray(image[0] if self.channels == 1 else image.transpose(1, 2, 0))
            if picture.size != self.tile[::-1]:
                picture = picture.resize(self.tile[::-1], Image.Resampling.BOX)
            self.places[key] = len(self.tiles)
            self.tiles.append(np.asarray(picture))
        return self.places[key]

    def picture(self) -> Any:
        height, width = self.tile
        across = min(TILES_ACROSS, len(self.tiles))
        down = -(-len(self.tiles) // across)
        canvas = np.zeros((down * height, across * width, *self.tiles[0].shape[2:]), dtype=np.uint8)
        for k, tile in enumerate(self.tiles):
            y, x = k // across * height, k % across * width
            canvas[y : y + height, x : x + width] = tile
        return Image.fromarray(canvas)


# ---- tokens ----


def token_examples(session: Session, num_pairs: int, candidates: int) -> dict[str, Any]:
    """Query tokens against training tokens: each query with the training sequence that moves it most, by BIF; of these
    the pairs with the strongest correlation of two different words."""
    task, (block,) = session.task, session.blocks
    question = session.question(*block)
    device = choose_device(session.execution.device)
    model, _ = base_model(task, question.seed, session.store, session.execution.device)
    variants = {variant.method.name: variant for variant in session.active}
    if missing := {"bif", "ekfac"} - set(variants):
        raise UsageError(f"per-token examples are of bif and ekfac; {sorted(missing)[0]} is missing from --methods")
    bif, ekfac = variants["bif"].method, variants["ekfac"].method
    places = strongest_of_each_query(question, bif, model, device, POOL * num_pairs, candidates)
    found, diagnostics = score_tokens(question, bif, model, device, places)
    strongest = [
        strongest_of_different_words(pair.measures["correlation"], pair.query_tokens, pair.train_tokens)
        for pair in found
    ]
    sizes = [(pair.query, pair.train, -1.0 if top is None else abs(top[2])) for pair, top in zip(found, strongest)]
    kept = pairs_by_rule(sizes, num_pairs)
    both, tops = [found[k] for k in kept], [strongest[k] for k in kept]
    of_train, _ = score_tokens(question, ekfac, model, device, [places[k] for k in kept])
    pairs = [
        {
            "query": pair.query,
            "train": pair.train,
            "query_tokens": pair.query_tokens,
            "train_tokens": pair.train_tokens,
            # The paper's sign: tokens that rise and fall together are negative.
            "bif": np.round(np.asarray(pair.measures["correlation"], dtype=float), 3).tolist(),
            "ekfac": [float(f"{value:.3g}") for value in other.measures["score"][0]],
            **({} if top is None else {"strongest": {"query": top[0], "train": top[1], "bif": round(top[2], 3)}}),
        }
        for pair, other, top in zip(both, of_train, tops, strict=True)
    ]
    return {
        "kind": "tokens",
        "task": task.name,
        "protocol": task.protocol,
        "description": task.description,
        "seed": question.seed,
        "scores": "normalised BIF",
        "methods": ["bif", "ekfac"],
        "settings": {name: variants[name].settings for name in ("bif", "ekfac")},
        "num_draws": diagnostics["num_draws"],
        "rule": f"{TOKEN_RULE} most correlated: {len(pairs)} of {len(places)}.",
        "pairs": pairs,
    }


# ---- what is written ----


def inspect_examples(arguments: argparse.Namespace, command: str, prog: str) -> int:
    check_out(arguments.out)
    if not arguments.methods:
        arguments.methods = list(SHOWN_IMAGE_METHODS)
        session = Session(experiment_of(arguments), execution_of(arguments))
        if session.task.image_shape() is None:
            arguments.methods = list(SHOWN_METHODS)
    session = Session(experiment_of(arguments), execution_of(arguments))
    task, seed = session.task, session.blocks[0][0]
    made: list[tuple[str, dict[str, Any], Any]] = []  # ending of the folder's name, content, picture
    if task.image_shape() is not None:
        asked = arguments.show or SHOWN_QUERIES
        kinds = ("normalised", "raw") if arguments.scores == "both" else (arguments.scores,)
        shown = arguments.shown or (4 if len(session.active) <= 2 else 3)
        for kind in kinds:
            made.append(("-raw" * (kind == "raw"), *image_examples(session, asked, shown, kind == "raw")))
    elif task.train_data.targets.ndim == 2:
        asked = arguments.show or SHOWN_PAIRS
        made.append(("", token_examples(session, asked, arguments.candidates), None))
    else:
        raise UsageError(f"task {task.name} has neither images nor tokens to show")
    for ending, content, picture in made:
        content |= {"command": command, **provenance(session.device())}
        folder = Path(arguments.out) / f"{task.name}-seed{seed}{ending}"
        if unwritten := try_write(partial(write_examples, folder, content, picture), folder):
            print(f"{prog}: {unwritten}", file=sys.stderr)
            return 1
        count = len(content.get("queries", content.get("pairs", [])))
        if count < asked:
            print(f"--show {asked}: there are {count} (report), and all are shown", file=sys.stderr)
        print(f"{count} {'pairs' if 'pairs' in content else 'queries'} written to {folder}")
    return 0


def write_examples(folder: Path, content: dict[str, Any], picture: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if picture is not None:
        picture.save(folder / "images.png", optimize=True)
    write_whole(folder / "examples.json", json.dumps(content, separators=(",", ":")) + "\n")
