"""One point of the scaling sweep, one model and one method, in a process of its own so that its peaks are its own.

    python -m bench.scaling_point --spec SPEC.json      # bench.scaling writes the specification and starts this
    python -m bench.scaling_point --spec -              # imports first, then waits for the specification on stdin
    python -m bench.scaling_point --peak cuda           # the matrix product's peak rate on this device

What is counted. `load_seconds`: making or loading the model, on the device. `fit_seconds` and `score_seconds`: the two
parts of the method, by the harness's own clock (`bench.runner.measure`), device synchronised. Not counted: imports, the
CUDA context, reading and tokenising text, and a warm-up: the method on a tiny model, and for BIF on a GPU, whose
kernels are made for the shapes at hand, its shortest run once on the model itself.

A point climbs a ladder of sizes until the whole run fits what is left of the budget, then does the whole run. If it
never fits, the ladder is all there is, and the row is projected from it (bench/scaling_rows.py). What is repeated, and
so linear: draws for BIF; blocks of the model for EK-FAC, as every block has the same layers and eigendecompositions
outweigh what fitting examples cost; training sequences for the others. After each rung the result so far is written
whole, so that a point cut short still counts.
"""

import argparse
import contextlib
import gc
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from baselines.method import Attribution, Method, Problem, load_method
from bench.runner import _now, _resident_peak, measure
from bench.scaling_fits import fit_line
from bench.scaling_problem import ScalingTask, load_queries, open_tokenizer, query_examples, train_examples
from bench.scaling_rows import axis_of, whole_size
from retrain.errors import error_line
from retrain.examples import Examples
from retrain.models.pythia_suite import Configuration, build_random, keep_layers
from retrain.safe_files import folder_bytes, write_whole
from retrain.train import describe_device

PLUGINS = {"ekfac": "bench.scaling_ekfac:LowMemoryEKFAC"}
TRAINABLE = r"\.(attention|mlp)\."  # every method looks at these alone
TINY = Configuration(name="tiny", hidden=64, layers=1, heads=2, intermediate=256, vocabulary=512)
MAX_RUNGS = 5
PEAK_SIZES = {"cuda": 8192, "cpu": 1024}
DISK_SHARE = 0.8  # of the free disk that factors may take


class Ticks:
    """Watches a method's own progress to time each draw; on the GPU by events, which wait for nothing."""

    def __init__(self, device: torch.device):
        self.device = device
        self.marks: list[Any] = []

    def __call__(self, items: Iterable, total: int | None = None, description: str = "") -> Iterator:
        for item in items:
            self.mark()
            yield item

    def mark(self) -> None:
        if self.device.type != "cuda":
            self.marks.append(time.perf_counter())
        elif not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)

    def median(self) -> float | None:
        """Seconds between marks; None where there are too few to say."""
        if len(self.marks) < 4:
            return None
        pairs = zip(self.marks[:-1], self.marks[1:])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return float(np.median([a.elapsed_time(b) / 1000 for a, b in pairs]))
        return float(np.median([b - a for a, b in pairs]))


class Watched:
    """A method that also says what its fit left on the disk, and keeps what was fitted."""

    def __init__(self, method: Method):
        self.method, self.disk_bytes = method, 0
        self.state: Any = None

    def fit(self, problem: Problem) -> Any:
        self.state = self.method.fit(problem)
        self.disk_bytes = folder_bytes(problem.scratch)
        return self.state

    def score(self, problem: Problem, state: Any) -> Attribution:
        return self.method.score(problem, state)


class Point:
    """One specification being measured."""

    def __init__(self, spec: dict[str, Any], started: float):
        self.spec, self.started = spec, started
        self.device = torch.device(spec["device"])
        self.dtype = getattr(torch, spec["dtype"])
        self.configuration = Configuration(**spec["configuration"])
        self.method_name: str = spec["method"]
        self.result: dict[str, Any] = {"rungs": [], "device": describe_device(self.device)}
        self.axis = axis_of(self.method_name)
        self.scratch = Path(tempfile.mkdtemp(prefix="scaling-", dir=spec["scratch"]))

    # ---- the problem ----

    def load_model(self, layers: int) -> nn.Module:
        configuration, weights = self.configuration.with_layers(layers), self.spec["weights"]
        if weights == "random":
            model = build_random(configuration, dtype=self.dtype, device=self.device, seed=self.spec["seed"])
        else:
            from retrain.models.pretrained import load_language_model

            model = keep_layers(load_language_model(weights, self.dtype), layers).to(self.device)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(re.search(TRAINABLE, name) is not None)
        return model.eval()

    def load_data(self) -> None:
        spec, vocabulary = self.spec, self.configuration.vocabulary
        tokenizer = open_tokenizer(spec["tokenizer"], vocabulary)
        pairs = load_queries(spec["query_file"])[: spec["queries"]]
        self.queries = query_examples(pairs, tokenizer, spec["tokens"])
        self.train = train_examples(
            spec["train"], spec["tokens"], vocabulary, text=spec["text"], tokenizer=tokenizer, seed=spec["seed"]
        )

    def problem(
        self, model: nn.Module, train: Examples, queries: Examples, scratch: Path, progress: Any = None
    ) -> Problem:
        return Problem(
            task=ScalingTask(train_examples=train, query_examples=queries),
            model=model,
            train=train,
            attributed_indices=np.arange(len(train)),
            queries=queries,
            seed=self.spec["seed"],
            device=self.device,
            scratch=scratch,
            **({"progress": progress} if progress else {}),
        )

    def method(self, size: dict[str, int]) -> Method:
        options = dict(self.spec["options"])
        if self.method_name == "bif":
            options["draws"] = -(-size["draws"] // options["chains"])
        if self.method_name == "ekfac":
            options["fit_examples"] = size["fit_examples"]
        if self.method_name == "trak" and size["train"] <= options["projection"]:
            options["ridge"] = 1.0  # a kernel of few sequences has no inverse; its cost is the same
        return load_method(PLUGINS.get(self.method_name, self.method_name), **options)

    def size(self, value: int) -> dict[str, int]:
        """The whole point's sizes, with the axis at `value`."""
        return whole_size(self.spec) | {self.axis: value}

    # ---- measuring ----

    def warm_up(self) -> None:
        """So that no rung pays for the library handles, and BIF's first not for its kernels."""
        tokens = min(16, self.spec["tokens"])
        model = build_random(TINY, dtype=self.dtype, device=self.device)
        few = Examples(torch.zeros(8, tokens, dtype=torch.long), torch.ones(8, tokens, dtype=torch.long))
        size = self.size({"draws": 8, "layers": 1, "train": 8}[self.axis]) | {"train": 8, "fit_examples": 8}
        with self.folder() as scratch:
            problem = self.problem(model, few, few.select([0, 1]), scratch)
            with contextlib.suppress(FloatingPointError):  # a chain on noise may run away; the kernels have run
                measure(self.method(size), problem)
        self.forget()

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def forget(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def rung(self, model: nn.Module, size: dict[str, int]) -> dict[str, Any]:
        """One size, measured by the harness."""
        method, ticks = self.method(size), Ticks(self.device)
        watched = Watched(method)
        weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        self.forget()
        with self.folder() as scratch:
            train = self.train.select(range(size["train"]))
            progress = ticks if self.method_name == "bif" else None
            problem = self.problem(model, train, self.queries, scratch, progress)
            attribution, cost = measure(watched, problem)  # type: ignore[arg-type]
            found = {
                "size": size,
                "fit_seconds": cost["fit_seconds"],
                "score_seconds": cost["score_seconds"],
                "weight_bytes": weight_bytes,
                "peak_memory_bytes": weight_bytes + cost["peak_memory_bytes"],
                "peak_reserved_bytes": None,
                "host_peak_bytes": _resident_peak(),
                "disk_bytes": watched.disk_bytes,
                "num_scores_not_finite": int((~torch.isfinite(attribution.scores)).sum()),
                "threads": cost["threads"],
            }
            if self.device.type == "cuda":
                found["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self.device)
                found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(self.device)
            if self.method_name == "bif":
                found["tick_seconds"] = ticks.median()
            if self.method_name == "ekfac":
                found["phases"] = dict(method.phases)  # type: ignore[attr-defined]
                found |= self.ekfac_extras(method, problem, watched.state, found)
        return found

    def ekfac_extras(self, method: Any, problem: Problem, state: Any, found: dict[str, Any]) -> dict[str, Any]:
        """What scoring costs a sequence, a query and a pair, and fitting an example: from halves of each."""
        n, q, e = len(problem.train), len(problem.queries), found["size"]["fit_examples"]
        half = e // 2
        more = 1.3 * found["score_seconds"] + 0.5 * (found["phases"]["covariance"] + found["phases"]["lambda"])
        if min(n, q, e) < 2 or more > 0.3 * max(self.left(), 1.0):
            return {}
        points = [[n, q, found["score_seconds"]]]
        for train, queries in ((n // 2, q), (n, q // 2), (n // 2, q // 2)):
            part = self.problem(
                problem.model,
                problem.train.select(range(train)),
                problem.queries.select(range(queries)),
                problem.scratch,
            )
            start = _now(self.device)
            method.score(part, state)
            points.append([train, queries, _now(self.device) - start])
        shorter = method.fit_factors(state, problem, half, eigen=False)
        return {"score_points": points, "half_examples": half, "half_phases": shorter}

    def left(self) -> float:
        return self.spec["budget_seconds"] - (time.monotonic() - self.started)

    def run(self) -> None:
        self.load_data()
        _now(self.device)  # the CUDA context
        self.warm_up()
        # kronfluence collects garbage at every step; what the imports left behind is no part of its cost.
        gc.freeze()
        start = _now(self.device)
        model: nn.Module | None = self.load_model(self.configuration.layers)
        self.result["load_seconds"] = _now(self.device) - start
        if self.axis == "layers":
            model = None  # every rung makes its own, as deep as it needs
            self.forget()
        elif self.method_name == "bif" and self.device.type == "cuda":
            assert model is not None
            self.rung(model, self.size(self.spec["chains"]))
        target = whole_size(self.spec)[self.axis]
        # Two draws a chain, so that each takes a step.
        first = {"draws": 2 * self.spec["chains"], "layers": 1, "train": min(8, target)}[self.axis]
        for value in ladder(first, target, self.sizes_and_seconds, self.left, self.allowed):
            here = model if model is not None else self.load_model(value)
            self.result["rungs"].append(self.rung(here, self.size(value)))
            del here
            self.save()
        self.result["finished"] = True

    def sizes_and_seconds(self) -> list[tuple[int, float]]:
        return [(rung["size"][self.axis], rung["fit_seconds"] + rung["score_seconds"]) for rung in self.result["rungs"]]

    def allowed(self, value: int) -> bool:
        """Whether the disk takes the factors of so many blocks."""
        if self.axis != "layers":
            return True
        needed = self.configuration.with_layers(value).factor_bytes(self.dtype.itemsize)
        return needed < DISK_SHARE * shutil.disk_usage(self.scratch).free

    def save(self) -> None:
        write_whole(Path(self.spec["result"]), json.dumps(self.result))


def ladder(
    first: int,
    target: int,
    measured: Callable[[], list[tuple[int, float]]],
    left: Callable[[], float],
    allowed: Callable[[int], bool] = lambda value: True,
) -> Iterator[int]:
    """Sizes to measure, each chosen from the seconds of those before: at least two, then the whole if it fits.

    Sizes are multiples of the first, each at most four times the one before. The third may take most of what is left,
    further ones a third.
    """
    yield min(first, target)
    while True:
        done = measured()
        size, seconds = done[-1]
        if size >= target:
            return
        if len(done) == 1:
            whole = seconds * target / size  # at most: what does not grow is counted as if it did
            if whole <= left() and allowed(target):
                yield target
            elif allowed(min(2 * first, target)):
                yield min(2 * first, target)
            else:
                return
            continue
        line = fit_line(*zip(*done))
        slope = line.slope if line.slope > 0 else seconds / size
        if line.intercept + slope * target <= left() and allowed(target):
            yield target
            continue
        share = 0.8 if len(done) == 2 else 1 / 3  # three sizes leave a residual to judge the line by
        affordable = (share * left() - line.intercept) / slope
        following = int(min(4 * size, affordable, target)) // first * first
        if len(done) == 2 and line.slope <= 0:
            following = min(2 * size, target)  # noise hides the slope: one more size, whatever it takes
        if len(done) >= MAX_RUNGS or following < 1.5 * size or not allowed(following):
            return
        yield following


def matmul_peak(device: torch.device) -> dict[str, Any]:
    """FLOP a second of a large square product, the best of several: bfloat16 on a GPU, float32 on a CPU."""
    size = PEAK_SIZES[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    best = float("inf")
    for _ in range(8):
        torch.matmul(a, b, out=out)
    for _ in range(10):
        repeats = 5
        start = _now(device)
        for _ in range(repeats):
            torch.matmul(a, b, out=out)
        best = min(best, (_now(device) - start) / repeats)
    kind = str(dtype).removeprefix("torch.")
    return {"flops": 2.0 * size**3 / best, "size": size, "dtype": kind, "device": describe_device(device)}


def perform(spec: dict[str, Any], started: float) -> dict[str, Any]:
    """Measures one specification; whatever goes wrong becomes the reason in the result."""
    point = Point(spec, started)
    try:
        point.run()
    except Exception as error:
        point.result["error"] = reason(error)
    finally:
        shutil.rmtree(point.scratch, ignore_errors=True)
    point.save()
    return point.result


def reason(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in str(error).lower():
        return f"out of memory: {error_line(error)}"[:300]
    return error_line(error)[:300]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scaling_point", description=__doc__.split("\n")[0])
    parser.add_argument("--spec", help="a JSON file, or - to wait for its path on stdin")
    parser.add_argument("--peak", metavar="DEVICE", help="measure the matrix product's peak rate, as JSON on stdout")
    arguments = parser.parse_args()
    if arguments.peak:
        print(json.dumps(matmul_peak(torch.device(arguments.peak))))
        return 0
    path = arguments.spec
    if path == "-":
        # Imported while the point before is still being measured, and idle from here on.
        import kronfluence  # noqa: F401
        import transformers  # noqa: F401

        path = sys.stdin.readline().strip()
        if not path:
            return 0
    spec = json.loads(Path(path).read_text())
    perform(spec, time.monotonic())
    return 0


if __name__ == "__main__":
    sys.exit(main())
