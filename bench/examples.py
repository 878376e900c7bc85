"""What the scores look like: for some queries, the training examples that matter most under two methods.

    python -m bench.lds --task digits --alpha 0.1                       # leaves its scores in the cache
    python -m bench.examples --task digits --out results/examples       # reads them; `bench.figures` draws the panels
    python -m bench.examples --task tinylm --out results/examples       # token by token; this one samples a short chain

For an image task, `examples.json` lists each query's most and least influential training images, and `images.png` holds
every image once. For a language task it holds, for a few pairs of sequences, the correlation of every query token's
loss with every training token's under the posterior (the paper's normalised BIF, sign included).
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.record import why_unwritten
from retrain.command import Parser, add_task_arguments, at_least, build_task, check_device, check_out, options_of, share
from retrain.errors import UsageError
from retrain.progress import close_bars
from retrain.safe_files import write_whole
from retrain.store import Store, StoreError, default_cache

if TYPE_CHECKING:
    from bench.runner import Question
    from retrain.examples import Examples
    from retrain.task import Task

MAX_TILE = 64  # pixels: larger images are shrunk
TILES_ACROSS = 32
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


# ---- images ----


def command_for(arguments: argparse.Namespace, question: "Question", name: str) -> str:
    """The bench.lds that leaves the scores that are asked for here."""
    words = ["python", "-m", "bench.lds", "--task", question.task.name, "--alpha", "0.1"]
    words += ["--seeds", str(question.seed), "--alpha-attribution", f"{question.alpha_attribution:g}"]
    words += ["--methods", name]
    for option in ("protocol", "data_dir", "model", "text", "eval_text"):
        if value := getattr(arguments, option):
            words += [f"--{option.replace('_', '-')}", value]
    for setting in arguments.set:
        if setting.partition("=")[0].rpartition(".")[0] in (question.task.name, name):
            words += ["--set", setting]
    if arguments.cache != default_cache():
        words += ["--cache", arguments.cache]
    return shlex.join(words)


def stored_scores(arguments: argparse.Namespace, question: "Question", name: str, store: Store) -> np.ndarray:
    """(queries, train) float32, from the cache and from nowhere else."""
    import torch

    from baselines.method import Attribution, load_method
    from bench.runner import Scorer
    from retrain.train import checkpoint_unit

    task, device = question.task, arguments.device
    method = load_method(name, **{**task.method_settings.get(name, {}), **options_of(name, arguments.set)})
    base = checkpoint_unit(task, question.seed, 0, device)
    entry = None
    if store.has(base.kind, base.config):
        entry = store.read("scores", Scorer(question, method, store, device).config())
    if entry is None or "scores" not in entry.arrays:
        raise UsageError(
            f"the cache {store.root} has no scores of {name} on {task.name}, seed {question.seed}, alpha_attribution "
            f"{question.alpha_attribution:g}, with these options; make them with `"
            f"{command_for(arguments, question, name)}`"
        )
    scale = entry.arrays.get("train_scale")
    attribution = Attribution(
        scores=torch.from_numpy(np.array(entry.arrays["scores"])),
        train_scale=None if scale is None or arguments.raw else torch.from_numpy(np.array(scale)),
    )
    scaled = attribution.normalised()
    return (attribution.scores if scaled is None else scaled).numpy()


def label_of(task: "Task", target: int) -> str:
    return CIFAR10[target] if task.name == "cifar10" else str(target)


def image_examples(
    arguments: argparse.Namespace, task: "Task", question: "Question", store: Store
) -> tuple[dict[str, Any], Any]:
    scores = {name: stored_scores(arguments, question, name, store) for name in arguments.methods}
    query_indices, attributed = question.query_indices(), question.attributed_indices()
    chosen = np.unique(np.linspace(0, len(query_indices) - 1, arguments.queries).round().astype(int))
    sheet = Sheet(task)

    def describe(examples: "Examples", index: int) -> dict[str, Any]:
        return {"label": label_of(task, int(examples.targets[index])), "image": sheet.add(examples, index)}

    queries = []
    for position in chosen:
        index = int(query_indices[position])
        methods = {}
        for name, matrix in scores.items():
            order = np.argsort(matrix[position], kind="stable")
            sides = {"helpful": order[: arguments.shown], "harmful": order[::-1][: arguments.shown]}
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
        queries.append({"query": index, **describe(task.query_data, index), "methods": methods})
    content = {
        "kind": "images",
        "task": task.name,
        "description": task.description,
        "seed": question.seed,
        "alpha_attribution": question.alpha_attribution,
        "scores": "raw" if arguments.raw else "train-normalised",
        "methods": list(arguments.methods),
        "sprite": "images.png",
        "tile": list(sheet.tile),
        "queries": queries,
    }
    return content, sheet.picture()


class Sheet:
    """Every image that is shown, once, as tiles of one picture."""

    def __init__(self, task: "Task"):
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

    def add(self, examples: "Examples", index: int) -> int:
        from PIL import Image

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
        from PIL import Image

        height, width = self.tile
        across = min(TILES_ACROSS, len(self.tiles))
        down = -(-len(self.tiles) // across)
        canvas = np.zeros((down * height, across * width, *self.tiles[0].shape[2:]), dtype=np.uint8)
        for k, tile in enumerate(self.tiles):
            y, x = k // across * height, k % across * width
            canvas[y : y + height, x : x + width] = tile
        return Image.fromarray(canvas)


# ---- tokens ----


def token_examples(arguments: argparse.Namespace, task: "Task", question: "Question", store: Store) -> dict[str, Any]:
    """Query tokens against training tokens: each query with the training sequence that moves it most, by BIF."""
    from baselines.method import load_method
    from bench.runner import base_model
    from bench.token_scores import score_tokens, strongest_of_each_query
    from retrain.train import choose_device

    device = choose_device(arguments.device)
    model, _ = base_model(task, question.seed, store, arguments.device)
    short = {"bif": {"chains": 2, "minibatch": 64}}
    bif, ekfac = (
        load_method(
            name, **{**short.get(name, {}), **task.method_settings.get(name, {}), **options_of(name, arguments.set)}
        )
        for name in ("bif", "ekfac")
    )
    places = strongest_of_each_query(question, bif, model, device, arguments.queries, arguments.candidates)
    both, diagnostics = score_tokens(question, bif, model, device, places)
    of_train, _ = score_tokens(question, ekfac, model, device, places)
    pairs = [
        {
            "query": pair.query,
            "train": pair.train,
            "query_tokens": pair.query_tokens,
            "train_tokens": pair.train_tokens,
            # The paper's sign: tokens that rise and fall together are negative.
            "bif": np.round(pair.measures["correlation"], 3).tolist(),
            "ekfac": [float(f"{value:.3g}") for value in other.measures["score"][0]],
        }
        for pair, other in zip(both, of_train, strict=True)
    ]
    return {
        "kind": "tokens",
        "task": task.name,
        "description": task.description,
        "seed": question.seed,
        "scores": "normalised BIF",
        "methods": ["bif", "ekfac"],
        "num_draws": diagnostics["num_draws"],
        "pairs": pairs,
    }


# ---- the command ----


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.examples", description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add_task_arguments(parser)
    add("--methods", nargs="+", default=["bif", "ekfac"], help="whose scores are shown (default: bif ekfac)")
    add("--queries", type=at_least(1), default=8, help="how many (default: 8)")
    add("--shown", type=at_least(1), default=4, help="most and least influential images of each (default: 4)")
    add("--candidates", type=at_least(1), default=64, help="language tasks: training sequences looked at (default: 64)")
    add("--raw", action="store_true", help="raw scores instead of train-normalised ones")
    add("--seed", type=at_least(0), default=1, help="as bench.lds had it (default: 1)")
    add("--alpha-attribution", type=share, help="as bench.lds had it (default: the task's)")
    add("--out", default="results/examples", help="a folder for each task is made there (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(sys.argv[1:] if argv is None else list(argv))
    try:
        from bench.runner import Question

        check_device(arguments.device)
        task = build_task(arguments)
        alpha_attribution = arguments.alpha_attribution or task.default_alpha_attribution
        question = Question(task=task, seed=arguments.seed, alpha_attribution=alpha_attribution)
        store = Store(arguments.cache)
        check_out(arguments.out)
        picture = None
        if task.image_shape() is not None:
            content, picture = image_examples(arguments, task, question, store)
        elif task.train_data.targets.ndim == 2:
            content = token_examples(arguments, task, question, store)
        else:
            raise UsageError(f"task {task.name} has neither images nor tokens to show")
    except (UsageError, StoreError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        close_bars()
        print(f"{parser.prog}: interrupted; nothing was written", file=sys.stderr)
        return 130
    folder = Path(arguments.out) / f"{task.name}-seed{arguments.seed}"
    if unwritten := why_unwritten(lambda: write(folder, content, picture), folder):
        print(f"{parser.prog}: {unwritten}", file=sys.stderr)
        return 1
    count = len(content.get("queries", content.get("pairs", [])))
    if count < arguments.queries:
        print(f"--queries {arguments.queries}: there are {count} (report), and all are shown", file=sys.stderr)
    print(f"{count} queries written to {folder}")
    return 0


def write(folder: Path, content: dict[str, Any], picture: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if picture is not None:
        picture.save(folder / "images.png", optimize=True)
    write_whole(folder / "examples.json", json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    sys.exit(main())
