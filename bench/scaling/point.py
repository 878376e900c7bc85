"""One point of the scaling sweep, one model and one method, in a process of its own so that its peaks are its own.

    python -m bench.scaling.point SPECIFICATION      # bench.scaling starts this

What is counted. `load_seconds`: making the model, on the device. `fit_seconds` and `score_seconds`: the two
parts of the method, by the harness's own clock, device synchronised. Not counted: imports, the CUDA context and a
warm-up: the method on a tiny model, and for BIF on a GPU, whose kernels are made for the shapes at hand, its shortest
run once on the model itself.

A point is measured at growing sizes until the whole run fits what is left of the budget, then the whole run is done. If
it never fits, the row is projected from the sizes (bench/scaling/rows.py). What is repeated, and so linear: draws
for BIF; blocks of the model for EK-FAC, as every block has the same layers; training sequences for the others. After
each size the result so far is written whole, so that a point cut short still counts.
"""

import contextlib
import errno
import gc
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from baselines.method import Attribution, Problem
from bench.measure import metered, now, resident_peak
from bench.scaling.lines import bilinear, bilinear_at, fit_line
from bench.scaling.methods import FACTORS, SCORES, TRAINABLE, ScalingTask, build_random, random_sequences, sized
from bench.scaling.suite import MOST_FITTED, Configuration, ekfac_needs
from bench.tables import bytes_text
from retrain.errors import error_line
from retrain.examples import Examples
from retrain.processes import die_with
from retrain.safe_files import folder_bytes, write_whole
from retrain.units import describe_device

TINY = Configuration(name="tiny", hidden=64, layers=1, heads=2, intermediate=256, vocabulary=512)
TRAIN_STREAM, QUERY_STREAM = 31, 41  # of random tokens
LONGEST_REASON = 300
MAX_SIZES, MOST_SHARE = 5, 0.8  # of a point; of what is left of its budget, for one that is not the whole run
FEW_DRAWS = 8  # a chain: so many are timed at once, without fewer before
DISK_SHARE = 0.8  # of the free disk that factors may take
REPEATED_SECONDS = 10.0  # an eigendecomposition quicker than this is repeated for every fitting set
PEAKS = ("peak_memory_bytes", "peak_reserved_bytes", "host_peak_bytes")
MATMUL_SIZES = {"cuda": 8192, "cpu": 1024}
FACTOR_NAMES = {"covariance": "COVARIANCE", "eigen": "EIGENDECOMPOSITION", "lambda": "LAMBDA"}  # kronfluence's


class RefusedError(RuntimeError):
    """The whole run cannot fit this machine; the message says what it would take."""


# ---- how a run is timed ----


class Ticks:
    """Watches a method's own progress to time each draw; on the GPU by events, which wait for nothing."""

    def __init__(self, device: torch.device):
        self.device = device
        self.marks: list[Any] = []

    def __call__(self, items: Iterable, total: int | None = None, description: str = "") -> Iterator:
        for item in items:
            if self.device.type != "cuda":
                self.marks.append(time.perf_counter())
            elif not torch.cuda.is_current_stream_capturing():
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                self.marks.append(event)
            yield item

    def median(self) -> float | None:
        """Seconds between marks; None where there are too few to say."""
        if len(self.marks) < 4:
            return None
        pairs = zip(self.marks[:-1], self.marks[1:])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return float(np.median([a.elapsed_time(b) / 1000 for a, b in pairs]))
        return float(np.median([b - a for a, b in pairs]))


def measured(work: Callable[[], Any], problem: Problem) -> tuple[Any, dict[str, Any]]:
    """A stage of a method by the harness: what it made, its seconds, and its peaks, which hold the weights too."""
    device = problem.device
    made, cost = metered(work, problem.seed, device, problem.task.cpu_threads)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in problem.model.parameters())
    found: dict[str, Any] = {"seconds": cost.seconds, "disk_bytes": folder_bytes(problem.scratch)}
    found |= dict(zip(PEAKS, (weights + cost.peak_memory_bytes, None, resident_peak())))
    if device.type == "cuda":  # each stage starts its own peak
        found["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)
        found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    return made, found


def together(fit: Sequence[dict[str, Any]], score: dict[str, Any]) -> dict[str, Any]:
    """A run's columns from its stages: the disk is what the fit left, a peak the largest of any stage."""
    return {
        "fit_seconds": sum(stage["seconds"] for stage in fit),
        "score_seconds": score["seconds"],
        "disk_bytes": fit[-1]["disk_bytes"],
        **{peak: max((one[peak] for one in (*fit, score) if one[peak] is not None), default=None) for peak in PEAKS},
    }


def measured_run(method: Any, problem: Problem) -> tuple[Attribution, dict[str, Any]]:
    state, fit = measured(lambda: method.fit(problem), problem)
    attribution, score = measured(lambda: method.score(problem, state), problem)
    return attribution, together([fit], score)


def matmul_peak(device: torch.device) -> float:
    """FLOP a second of a large square product, the best of several: bfloat16 on a GPU, float32 on a CPU."""
    size, repeats = MATMUL_SIZES[device.type], 5
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out, seconds = torch.empty_like(a), []
    for _ in range(12):
        start = now(device)
        for _ in range(repeats):
            torch.matmul(a, b, out=out)
        seconds.append((now(device) - start) / repeats)
    return 2.0 * size**3 / min(seconds[2:])  # the first two warm up


# ---- which sizes are measured ----


def choose_sizes(
    first: int, target: int, measured: Callable[[], list[tuple[int, float]]], left: Callable[[], float], wanted: int = 0
) -> Iterator[int]:
    """Each chosen from the (size, seconds) of those before: at least two, then the whole if it fits.

    The second is `wanted` if there is room for it, and then no other but the whole is. Otherwise sizes are multiples of
    the first, each at most four times the one before, and none takes more than most of what is left.
    """
    yield min(first, target)
    while len(done := measured()) < MAX_SIZES and (size := done[-1][0]) < target:
        line = fit_line([value for value, _ in done], [taken for _, taken in done]) if len(done) > 1 else None
        # What does not grow is counted as if it did.
        fixed, each = (line.intercept, line.slope) if line and line.slope > 0 else (0.0, done[-1][1] / size)
        following = wanted if size < wanted < target and fixed + each * wanted <= left() else target
        if fixed + each * following > left():
            if 0 < wanted <= size:
                return  # as many as were wanted; more would only cost
            affordable = (MOST_SHARE * left() - fixed) / each
            following = int(min(4 * size, affordable, target)) // first * first
            if len(done) == 1:
                following = min(2 * first, target)
            if following < 1.5 * size:
                return
        yield following


# ---- a point ----


class Point:
    """One specification being measured."""

    def __init__(self, spec: dict[str, Any], started: float):
        self.spec, self.started = spec, started
        self.device = torch.device(spec["device"])
        self.dtype = getattr(torch, spec["dtype"])
        self.configuration = Configuration(**spec["configuration"])
        self.result: dict[str, Any] = {"rungs": [], "device": describe_device(self.device)}  # a rung is a measured size
        self.axis: str = spec["axis"]
        self.scratch = Path(tempfile.mkdtemp(prefix="scaling-", dir=spec["scratch"]))

    def run(self) -> None:
        now(self.device)  # the CUDA context
        if self.spec.get("measure_peak"):
            self.result["peak_flops"] = matmul_peak(self.device)
        self.load_data()
        self.warm_up()
        # kronfluence collects garbage at every step; what the imports left behind is no part of its cost.
        gc.freeze()
        self.measure_sizes()
        self.result["finished"] = True

    def load_data(self) -> None:
        """Queries, the training sequences that are scored, and those to fit curvature on: the same, and others behind
        them."""
        spec, vocabulary = self.spec, self.configuration.vocabulary
        most = max([spec["train"], *(size for size in spec["fit_sets"] if size <= MOST_FITTED)])
        counts = {TRAIN_STREAM: most, QUERY_STREAM: max(spec["query_counts"])}
        self.fit_data, self.queries = (
            random_sequences(count, spec["tokens"], vocabulary, seed=spec["seed"], stream=stream)
            for stream, count in counts.items()
        )
        self.train = self.fit_data.select(range(spec["train"]))

    def load_model(self, layers: int) -> nn.Module:
        start = now(self.device)
        configuration = self.configuration.with_layers(layers)
        model = build_random(configuration, dtype=self.dtype, device=self.device, seed=self.spec["seed"])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(re.search(TRAINABLE, name) is not None)
        self.result["load_seconds"] = now(self.device) - start
        return model

    def problem(
        self, model: nn.Module, train: Examples, queries: Examples, scratch: Path, progress: Any = None
    ) -> Problem:
        """`train` is scored; a method that is fitted on a number of sequences finds further ones behind it."""
        seen = self.fit_data if self.spec["fitted"] else train
        return Problem(
            task=ScalingTask(train_examples=seen, query_examples=queries),
            model=model,
            train=seen,
            attributed_indices=np.arange(len(train)),
            queries=queries,
            seed=self.spec["seed"],
            device=self.device,
            scratch=scratch,
            **({"progress": progress} if progress else {}),
        )

    def size(self, **changes: int) -> dict[str, int]:
        """The whole point's sizes with these changes; a shorter run's fit is as much shorter."""
        whole = {name: self.spec[name] for name in ("draws", "train", "queries", "fit_examples")}
        size = whole | {"layers": self.configuration.layers} | changes
        if self.axis == "train" and self.spec["fitted"] and "fit_examples" not in changes:
            size["fit_examples"] = max(2, round(self.spec["fit_examples"] * size["train"] / self.spec["train"]))
        return size

    def warm_up(self) -> None:
        """So that no size pays for the library handles, and BIF's first not for its kernels."""
        tokens = min(16, self.spec["tokens"])
        model = build_random(TINY, dtype=self.dtype, device=self.device)
        few = Examples(torch.zeros(8, tokens, dtype=torch.long), torch.ones(8, tokens, dtype=torch.long))
        size = self.size(draws=2 * max(self.spec["chains"], 1), train=8, fit_examples=8)
        with self.folder() as scratch, contextlib.suppress(FloatingPointError):
            # A chain on noise may run away; the kernels have run.
            problem = replace(self.problem(model, few, few.select([0, 1]), Path(scratch)), train=few)
            measured_run(sized(self.spec, size), problem)

    def folder(self) -> tempfile.TemporaryDirectory:
        """Emptied and removed at its end; memory is freed at its start."""
        self.free_memory()
        return tempfile.TemporaryDirectory(dir=self.scratch, ignore_cleanup_errors=True)

    def free_memory(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def measure(self, model: nn.Module, size: dict[str, int]) -> dict[str, Any]:
        """One size, measured by the harness."""
        ticks, method = Ticks(self.device), sized(self.spec, size)
        progress = ticks if self.axis == "draws" else None
        with self.folder() as scratch:
            train = self.train.select(range(size["train"]))
            problem = self.problem(model, train, self.queries, Path(scratch), progress)
            attribution, found = measured_run(method, problem)
        found |= {"size": size, "num_scores_not_finite": int((~torch.isfinite(attribution.scores)).sum())}
        return found | ({"tick_seconds": ticks.median()} if self.axis == "draws" else {})

    def measure_sizes(self) -> None:
        model = self.load_model(self.configuration.layers)
        target = self.spec[self.axis]
        first, wanted = min(8, target), 0
        if self.axis == "draws":
            chains = self.spec["chains"]
            # At least two draws a chain, so that each takes a step; at once those that were wanted, where they are few.
            wanted = max(2, -(-self.spec["timed_draws"] // chains)) * chains
            first = wanted if wanted <= FEW_DRAWS * chains else 2 * chains
            if self.device.type == "cuda":  # whose kernels are made for the shapes at hand
                self.measure(model, self.size(draws=2, chains=1))
        for value in choose_sizes(first, target, self.sizes_and_seconds, self.left, wanted=wanted):
            self.result["rungs"].append(self.measure(model, self.size(**{self.axis: value})))
            self.save()

    def left(self) -> float:
        return self.spec["budget_seconds"] - (time.monotonic() - self.started)

    def sizes_and_seconds(self) -> list[tuple[int, float]]:
        return [(rung["size"][self.axis], rung["fit_seconds"] + rung["score_seconds"]) for rung in self.result["rungs"]]

    def save(self) -> None:
        write_whole(Path(self.spec["result"]), json.dumps(self.result))


class EkfacPoint(Point):
    """Covariance, eigendecomposition, lambda and scores as parts that are measured one by one.

    First the whole run at the smallest fitting set and number of queries, at each depth; then, at the last depth,
    further fitting sets, scores of half the sequences and queries, and further numbers of queries, each if the budget
    has room for it. Eigendecompositions do not depend on the number of fitting sequences: those of a further fitting
    set are only repeated where they are quick, and its row says which parts it shares.
    """

    def __init__(self, spec: dict[str, Any], started: float):
        super().__init__(spec, started)
        self.method: Any = sized(spec, {"fit_examples": spec["fit_sets"][0]})
        self.model: Any = None  # of the depth at hand
        self.analyzer: Any = None
        self.factors = self.scratch / "factors"  # what kronfluence writes
        self.fits: list[dict[str, Any]] = []  # seconds of each fitting set at this depth; no `eigen` where it is shared
        self.scores: list[tuple[int, int, float]] = []  # (sequences, queries, seconds), the whole run's first

    def run(self) -> None:
        """Refuses a run that cannot fit, before anything is measured."""
        layers = self.configuration.layers
        memory_bytes, disk_bytes = ekfac_needs(self.configuration, self.spec["tokens"], self.dtype.itemsize)
        self.result["needs"] = {"memory_bytes": memory_bytes, "disk_bytes": disk_bytes}
        memory, disk = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), self.free_disk()
        if self.device.type == "cuda":
            memory = torch.cuda.get_device_properties(self.device).total_memory
        if memory_bytes > memory or disk_bytes > disk:
            raise RefusedError(
                f"refused: a run of {layers} layers takes about "
                f"{bytes_text(memory_bytes)} of memory ({bytes_text(memory)} there) and "
                f"{bytes_text(disk_bytes)} on the disk ({bytes_text(disk)} to be had)"
            )
        super().run()

    def free_disk(self) -> int:
        """What a run may write."""
        return int(DISK_SHARE * shutil.disk_usage(self.scratch).free)

    def measure_sizes(self) -> None:
        (first, *fit_sets), (q, *counts), n = self.spec["fit_sets"], self.spec["query_counts"], self.spec["train"]
        for depth in choose_sizes(1, self.configuration.layers, self.sizes_and_seconds, self.left):
            self.open(depth)
            fit, score = self.fit(first), self.score(n, q)
            phases = {name: seconds for name, seconds in self.fits[0].items() if name != "fit_examples"}
            size = {"layers": depth, "fit_examples": first, "train": n, "queries": q, "draws": 0}
            parts = {"phases": phases, "fits": self.fits, "score_points": self.scores}
            self.result["rungs"].append({"size": size, **together(fit, score), **parts})
            self.save()
        for count in fit_sets:
            if count <= MOST_FITTED and self.predicted_fit(count) <= self.left():
                self.fit(count)
                self.save()
        if min(n, q) > 1 and 2.5 * self.scores[0][2] <= self.left():
            for train, queries in ((n // 2, q), (n, q // 2), (n // 2, q // 2)):
                self.score(train, queries)
            self.save()
        for queries in counts:
            if self.predicted_score(n, queries) <= self.left():
                self.score(n, queries)
                self.save()

    def open(self, depth: int) -> None:
        """A model of so many blocks and its analyzer; the factors of other depths are removed."""
        self.model = self.analyzer = None
        self.free_memory()
        shutil.rmtree(self.factors, ignore_errors=True)
        self.factors.mkdir()
        self.fits, self.scores, self.model = [], [], self.load_model(depth)
        self.analyzer = self.method.analyzer(self.part_of(self.spec["train"], self.spec["query_counts"][0]))

    def part_of(self, train: int, queries: int) -> Problem:
        chosen = self.train.select(range(train)), self.queries.select(range(queries))
        return self.problem(self.model, *chosen, self.factors)

    def fit(self, count: int) -> list[dict[str, Any]]:
        method, costs = self.method, {}
        problem = self.part_of(self.spec["train"], self.spec["query_counts"][0])
        works = {"covariance": method.fit_covariance, "eigen": method.decompose, "lambda": method.fit_lambda}
        if self.fits and self.fits[0]["eigen"] > REPEATED_SECONDS:
            del works["eigen"]
        for kind, work in works.items():
            costs[kind] = self.part(kind, partial(work, self.analyzer, self.fit_data, count), problem)
        taken = {kind: costs[kind]["seconds"] if kind in costs else None for kind in FACTOR_NAMES}
        self.fits.append({"fit_examples": count, **taken})
        return list(costs.values())

    def score(self, train: int, queries: int) -> dict[str, Any]:
        problem = self.part_of(train, queries)
        cost = self.part("score", lambda: self.method.score(problem, self.analyzer), problem)
        self.scores.append((train, queries, cost["seconds"]))
        return cost

    def part(self, kind: str, work: Callable[[], Any], problem: Problem) -> dict[str, Any]:
        """What a part took. A user's run writes new files, and writing over old ones takes longer: what an earlier
        fitting set left is removed first."""
        from kronfluence.utils import constants

        self.free_memory()
        if kind == "score":
            shutil.rmtree(self.analyzer.scores_output_dir(SCORES), ignore_errors=True)
        else:
            for factor in getattr(constants, f"{FACTOR_NAMES[kind]}_FACTOR_NAMES"):
                for path in self.analyzer.factors_output_dir(FACTORS).glob(f"{factor}*.safetensors"):
                    path.unlink()
        return measured(work, problem)[1]

    def predicted_fit(self, count: int) -> float:
        """Of covariance and lambda, from the fitting sets so far; one alone counts as if all of it grew."""
        known = {fit["fit_examples"]: fit["covariance"] + fit["lambda"] for fit in self.fits}
        if len(known) > 1:
            return fit_line(list(known), list(known.values())).at(count)
        return max(seconds * count / size for size, seconds in known.items())

    def predicted_score(self, train: int, queries: int) -> float:
        if len(self.scores) >= 4:
            return bilinear_at(bilinear(self.scores), train, queries)
        n, q, seconds = self.scores[0]
        return seconds * train * queries / (n * q)


# ---- the process ----


def perform_point(spec: dict[str, Any], started: float) -> dict[str, Any]:
    """Measures one specification; whatever goes wrong becomes the reason in the result."""
    point = (EkfacPoint if spec["axis"] == "layers" else Point)(spec, started)
    try:
        point.run()
    except Exception as error:
        point.result["error"] = failure_reason(error, Path(spec["scratch"]).parent)
    finally:
        shutil.rmtree(point.scratch, ignore_errors=True)
    point.save()
    return point.result


def failure_reason(error: BaseException, place: Path) -> str:
    """In one line; memory and disk by name, since these are what larger models run into.

    place: where the point writes, in the cache; what reports a full disk rarely says which.
    """
    if isinstance(error, RefusedError):
        return str(error)
    text, said = str(error).lower(), error_line(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in text:
        said = f"out of memory: {said}"
    elif getattr(error, "errno", None) == errno.ENOSPC or "no space left on device" in text or "os error 28" in text:
        said = f"the disk is full at {place}: {said}"
    return said[:LONGEST_REASON]


def main() -> int:
    die_with(os.getppid())  # a sweep that is killed outright cannot end its point
    import kronfluence  # noqa: F401  (before the clock starts)
    import transformers  # noqa: F401

    perform_point(json.loads(Path(sys.argv[1]).read_text()), time.monotonic())
    return 0


if __name__ == "__main__":
    sys.exit(main())
