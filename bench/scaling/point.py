"""One point of the scaling sweep, one model and one method, in a process of its own so that its peaks are its own.

    python -m bench.scaling.point SPECIFICATION      # bench.scaling starts this

What is counted. `load_seconds`: making the model, on the device. `fit_seconds` and `score_seconds`: the two
parts of the method, by the harness's own clock, device synchronised. Not counted: imports, the CUDA context and a
warm-up: the method on a tiny model, and for BIF on a GPU, whose kernels are made for the shapes at hand, its shortest
run once on the model itself.

A point is measured at growing sizes until the whole run fits what is left of the budget, then the whole run is done. If
it never fits, the row is projected from the sizes (bench/scaling/projection.py). What is repeated, and so linear: draws
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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from baselines.method import Attribution, Problem
from bench.measure import Cost, metered, now, resident_peak
from bench.scaling.lines import bilinear, fit_line
from bench.scaling.methods import (
    FACTORS,
    SCORES,
    TRAINABLE,
    LowMemoryEKFAC,
    ScalingTask,
    build_random,
    random_sequences,
    sized,
)
from bench.scaling.suite import Configuration, Needs, ekfac_needs
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
MOST_FITTED = 20_000  # a larger fitting set is never measured, only projected
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


def measured_run(method: Any, problem: Problem) -> tuple[Attribution, dict[str, Any]]:
    """Fit and score by the harness: seconds of both, and peaks of both that hold the weights too."""
    device = problem.device
    weight_bytes = sum(p.numel() * p.element_size() for p in problem.model.parameters())
    costs: list[Cost] = []
    peaks: list[tuple[int, int | None]] = []
    host_peaks: list[int] = []

    def stage(work: Callable[[], Any]) -> Any:
        made, cost = metered(work, problem.seed, device, problem.task.cpu_threads)
        costs.append(cost)
        host_peaks.append(resident_peak())
        # Each stage starts its own peak, so each is asked before the next begins.
        peaks.append(
            (torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
            if device.type == "cuda"
            else (weight_bytes + cost.peak_memory_bytes, None)
        )
        return made

    state = stage(lambda: method.fit(problem))
    disk_bytes = folder_bytes(problem.scratch)  # what the fit left
    attribution = stage(lambda: method.score(problem, state))
    return attribution, {
        "disk_bytes": disk_bytes,
        "fit_seconds": costs[0].seconds,
        "score_seconds": costs[1].seconds,
        "threads": costs[1].threads,
        "weight_bytes": weight_bytes,
        "peak_memory_bytes": max(allocated for allocated, _ in peaks),
        "peak_reserved_bytes": max((reserved for _, reserved in peaks if reserved is not None), default=None),
        "host_peak_bytes": max(host_peaks),
    }


def matmul_peak(device: torch.device) -> dict[str, Any]:
    """FLOP a second of a large square product, the best of several: bfloat16 on a GPU, float32 on a CPU."""
    size = MATMUL_SIZES[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    best = float("inf")
    for _ in range(8):
        torch.matmul(a, b, out=out)
    for _ in range(10):
        repeats = 5
        start = now(device)
        for _ in range(repeats):
            torch.matmul(a, b, out=out)
        best = min(best, (now(device) - start) / repeats)
    return {"flops": 2.0 * size**3 / best, "size": size, "dtype": str(dtype).removeprefix("torch.")}


# ---- which sizes are measured ----


def choose_sizes(
    first: int,
    target: int,
    measured: Callable[[], list[tuple[int, float]]],
    left: Callable[[], float],
    allowed: Callable[[int], bool] = lambda value: True,
    wanted: int = 0,
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
        if fixed + each * following > left() or not allowed(following):
            if 0 < wanted <= size:
                return  # as many as were wanted; more would only cost
            affordable = (MOST_SHARE * left() - fixed) / each
            following = int(min(4 * size, affordable, target)) // first * first
            if len(done) == 1:
                following = min(2 * first, target)
            if following < 1.5 * size or not allowed(following):
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

    def load_model(self, layers: int) -> nn.Module:
        start = now(self.device)
        configuration = self.configuration.with_layers(layers)
        model = build_random(configuration, dtype=self.dtype, device=self.device, seed=self.spec["seed"])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(re.search(TRAINABLE, name) is not None)
        model.eval()
        self.result["load_seconds"] = now(self.device) - start
        return model

    def load_data(self) -> None:
        """Queries, and the training sequences that are scored."""
        spec = self.spec
        self.queries = self.sequences(max(spec["query_counts"]), QUERY_STREAM)
        self.fit_data = Examples(torch.empty(0, spec["tokens"]), torch.empty(0, spec["tokens"]))
        self.train = self.fit_sequences(spec["train"]).select(range(spec["train"]))
        if spec["fitted"] and spec["method"] != "ekfac":
            self.fit_sequences(spec["fit_examples"])

    def fit_sequences(self, count: int) -> Examples:
        """At least so many to fit curvature on: those that are scored, and others behind them."""
        if count > len(self.fit_data):
            self.fit_data = self.sequences(count, TRAIN_STREAM)
        return self.fit_data

    def sequences(self, count: int, stream: int) -> Examples:
        spec, vocabulary = self.spec, self.configuration.vocabulary
        return random_sequences(count, spec["tokens"], vocabulary, seed=spec["seed"], stream=stream)

    def problem(
        self, model: nn.Module, train: Examples, queries: Examples, scratch: Path, progress: Any = None
    ) -> Problem:
        """`train` is scored; a method that is fitted on a number of sequences finds further ones behind it."""
        seen = self.fit_data if self.spec["fitted"] and self.spec["method"] != "ekfac" else train
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
        with self.folder() as scratch:
            problem = replace(self.problem(model, few, few.select([0, 1]), scratch), train=few)
            with contextlib.suppress(FloatingPointError):  # a chain on noise may run away; the kernels have run
                measured_run(sized(self.spec, size), problem)
        self.free_memory()

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def free_memory(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def measure(self, model: nn.Module, size: dict[str, int]) -> dict[str, Any]:
        """One size, measured by the harness."""
        ticks, method = Ticks(self.device), sized(self.spec, size)
        self.free_memory()
        with self.folder() as scratch:
            train = self.train.select(range(size["train"]))
            progress = ticks if self.axis == "draws" else None
            attribution, cost = measured_run(method, self.problem(model, train, self.queries, scratch, progress))
        not_finite = int((~torch.isfinite(attribution.scores)).sum())
        found = {"size": size, **cost, "num_scores_not_finite": not_finite}
        return found | ({"tick_seconds": ticks.median()} if self.axis == "draws" else {})

    def left(self) -> float:
        return self.spec["budget_seconds"] - (time.monotonic() - self.started)

    def run(self) -> None:
        parts = EkfacParts(self) if self.axis == "layers" else None
        if parts is not None:
            parts.check_needs()
        self.load_data()
        now(self.device)  # the CUDA context
        if self.spec.get("measure_peak"):
            self.result["peak_flops"] = matmul_peak(self.device)["flops"]
        self.warm_up()
        # kronfluence collects garbage at every step; what the imports left behind is no part of its cost.
        gc.freeze()
        if parts is not None:
            parts.run()
        else:
            self.measure_sizes()
        self.result["finished"] = True

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

    def sizes_and_seconds(self) -> list[tuple[int, float]]:
        return [(rung["size"][self.axis], rung["fit_seconds"] + rung["score_seconds"]) for rung in self.result["rungs"]]

    def save(self) -> None:
        write_whole(Path(self.spec["result"]), json.dumps(self.result))


# ---- EK-FAC's point ----


class EkfacParts:
    """Covariance, eigendecomposition, lambda and scores as parts that are measured one by one.

    First the whole run at the smallest fitting set and number of queries, at each depth; then, at the last depth,
    further fitting sets, scores of half the sequences and queries, and further numbers of queries, each if the budget
    has room for it. Eigendecompositions do not depend on the number of fitting sequences: those of a further fitting
    set are only repeated where they are quick, and its row says which parts it shares.
    """

    def __init__(self, point: Point):
        self.point, self.spec, self.configuration = point, point.spec, point.configuration
        self.method: Any = sized(self.spec, {"fit_examples": self.spec["fit_sets"][0]})
        assert isinstance(self.method, LowMemoryEKFAC)
        self.taken: dict[str, dict[str, Any]] = {}  # "depth/part" -> what it took
        self.depth = 0
        self.model: Any = None  # of that depth
        self.analyzer: Any = None
        self.folder = point.scratch / "factors"  # what kronfluence writes

    def run(self) -> None:
        n, q = self.spec["train"], self.spec["query_counts"][0]
        layers, point = self.configuration.layers, self.point
        for depth in choose_sizes(1, layers, point.sizes_and_seconds, point.left, self.fits_disk):
            self.open(depth)
            self.fit(self.spec["fit_sets"][0], first=True)
            self.score(n, q)
            self.report()
        for count in self.spec["fit_sets"][1:]:
            if count <= MOST_FITTED and self.predicted_fit(count) <= self.point.left():
                self.fit(count, first=False)
                self.report()
        if min(n, q) > 1 and 2.5 * self.seconds(f"score/{n}x{q}") <= self.point.left():
            for train, queries in ((n // 2, q), (n, q // 2), (n // 2, q // 2)):
                self.score(train, queries)
            self.report()
        for queries in self.spec["query_counts"][1:]:
            if self.predicted_score(n, queries) <= self.point.left():
                self.score(n, queries)
                self.report()

    # ---- what it takes ----

    def check_needs(self) -> None:
        """Refuses a run that cannot fit, before anything is measured."""
        needs = self.needs(self.configuration.layers)
        self.point.result["needs"] = {"memory_bytes": needs.memory_bytes, "disk_bytes": needs.disk_bytes}
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if self.point.device.type == "cuda":
            memory = torch.cuda.get_device_properties(self.point.device).total_memory
        disk = self.free_disk()
        if needs.memory_bytes > memory or needs.disk_bytes > disk:
            raise RefusedError(
                f"refused: a run of {self.configuration.layers} layers takes about "
                f"{bytes_text(needs.memory_bytes)} of memory ({bytes_text(memory)} there) and "
                f"{bytes_text(needs.disk_bytes)} on the disk ({bytes_text(disk)} to be had)"
            )

    def free_disk(self) -> int:
        """What a run may write; what was written for fewer blocks is removed first."""
        return int(DISK_SHARE * shutil.disk_usage(self.point.scratch).free) + folder_bytes(self.folder)

    def needs(self, depth: int) -> Needs:
        return ekfac_needs(self.configuration.with_layers(depth), self.spec["tokens"], self.point.dtype.itemsize)

    def fits_disk(self, depth: int) -> bool:
        return self.needs(depth).disk_bytes < self.free_disk()

    # ---- one depth ----

    def open(self, depth: int) -> None:
        """A model of so many blocks and its analyzer; the factors of other depths are removed."""
        self.model = self.analyzer = None
        self.point.free_memory()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.depth, self.model = depth, self.point.load_model(depth)
        self.analyzer = self.method.analyzer(self.problem(self.spec["train"], self.spec["query_counts"][0]))

    def problem(self, train: int, queries: int) -> Problem:
        chosen = self.point.train.select(range(train)), self.point.queries.select(range(queries))
        return self.point.problem(self.model, *chosen, self.folder)

    def fit(self, count: int, *, first: bool) -> None:
        data = self.point.fit_sequences(count)
        self.part(f"covariance/{count}", lambda: self.method.fit_covariance(self.analyzer, data, count))
        if first or self.seconds(f"eigen/{self.spec['fit_sets'][0]}") <= REPEATED_SECONDS:
            self.part(f"eigen/{count}", lambda: self.method.decompose(self.analyzer, count))
        self.part(f"lambda/{count}", lambda: self.method.fit_lambda(self.analyzer, data, count))

    def score(self, train: int, queries: int) -> None:
        problem = self.problem(train, queries)
        self.part(f"score/{train}x{queries}", lambda: self.method.score(problem, self.analyzer))

    def part(self, name: str, work: Callable[[], Any]) -> None:
        """Measures a part, and keeps what it took."""
        problem = self.problem(self.spec["train"], self.spec["query_counts"][0])
        self.point.free_memory()
        self.remove(name.partition("/")[0])
        nothing = Attribution(scores=torch.zeros(0, 0))
        _, cost = measured_run(SimpleNamespace(fit=lambda _: work(), score=lambda *_: nothing), problem)
        self.taken[f"{self.depth}/{name}"] = {
            "seconds": cost["fit_seconds"],
            "disk_bytes": folder_bytes(self.folder),
            **{name: cost[name] for name in ("weight_bytes", "threads", *PEAKS)},
        }

    def remove(self, kind: str) -> None:
        """What an earlier fitting set left: a user's run writes new files, and writing over old ones takes longer."""
        from kronfluence.utils import constants

        if kind == "score":
            shutil.rmtree(self.analyzer.scores_output_dir(SCORES), ignore_errors=True)
            return
        for factor in getattr(constants, f"{FACTOR_NAMES[kind]}_FACTOR_NAMES"):
            for path in self.analyzer.factors_output_dir(FACTORS).glob(f"{factor}*.safetensors"):
                path.unlink()

    # ---- what was taken ----

    def seconds(self, part: str) -> float:
        return self.taken[f"{self.depth}/{part}"]["seconds"]

    def predicted_fit(self, count: int) -> float:
        """Of covariance and lambda, from the fitting sets so far; one alone counts as if all of it grew."""
        known = {fit["fit_examples"]: fit["covariance"] + fit["lambda"] for fit in self.fits(self.depth)}
        if len(known) > 1:
            return fit_line(list(known), list(known.values())).at(count)
        return max(seconds * count / size for size, seconds in known.items())

    def predicted_score(self, train: int, queries: int) -> float:
        points = self.score_points(self.depth)
        if len(points) >= 4:
            base, per_train, per_query, per_pair = bilinear(points)
            return base + per_train * train + per_query * queries + per_pair * train * queries
        n, q, seconds = points[0]
        return seconds * train * queries / (n * q)

    def fits(self, depth: int) -> list[dict[str, Any]]:
        """Every fitting set whose covariance and lambda were measured; `eigen` only where it was its own."""
        found = []
        for count in self.spec["fit_sets"]:
            parts = {kind: self.taken.get(f"{depth}/{kind}/{count}") for kind in ("covariance", "eigen", "lambda")}
            if parts["covariance"] and parts["lambda"]:
                seconds = {kind: part["seconds"] if part else None for kind, part in parts.items()}
                found.append({"fit_examples": count, **seconds})
        return found

    def score_points(self, depth: int) -> list[tuple[int, int, float]]:
        """(sequences, queries, seconds), the whole run's first."""
        found = []
        for name, part in self.taken.items():
            if name.startswith(f"{depth}/score/"):
                train, queries = name.rpartition("/")[2].split("x")
                found.append((int(train), int(queries), part["seconds"]))
        return found

    def rung(self, depth: int) -> dict[str, Any]:
        """The whole run of a depth as the rows take it."""
        count, n, q = self.spec["fit_sets"][0], self.spec["train"], self.spec["query_counts"][0]
        kinds = {kind: self.taken[f"{depth}/{kind}/{count}"] for kind in ("covariance", "eigen", "lambda")}
        phases = {kind: part["seconds"] for kind, part in kinds.items()}
        score = self.taken[f"{depth}/score/{n}x{q}"]
        known = {peak: [part[peak] for part in (*kinds.values(), score) if part[peak] is not None] for peak in PEAKS}
        return {
            "size": {"layers": depth, "fit_examples": count, "train": n, "queries": q, "draws": 0},
            "fit_seconds": sum(phases.values()),
            "score_seconds": score["seconds"],
            "phases": phases,
            "fits": self.fits(depth),
            "score_points": self.score_points(depth),
            "weight_bytes": score["weight_bytes"],
            "threads": score["threads"],
            "disk_bytes": kinds["lambda"]["disk_bytes"],
            **{peak: max(values, default=None) for peak, values in known.items()},
        }

    def report(self) -> None:
        depths = sorted({int(name.partition("/")[0]) for name in self.taken})
        self.point.result["rungs"] = [self.rung(depth) for depth in depths]
        self.point.save()


# ---- the process ----


def perform_point(spec: dict[str, Any], started: float) -> dict[str, Any]:
    """Measures one specification; whatever goes wrong becomes the reason in the result."""
    point = Point(spec, started)
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
