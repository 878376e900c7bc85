"""EK-FAC's point: covariance, eigendecomposition, lambda and scores as parts that are measured one by one and kept.

    <cache>/.work/scaling.<key>/ledger.json          seconds and peaks of every finished part (retrain/work.py)
    <cache>/.work/scaling.<key>/layers-24/           what kronfluence wrote, until the point is finished

A part that was finished is never measured again: a point that is cut short goes on after its last part when the same
command runs again, in another process or another command. Where the ledger is there but the factors are not (another
machine), what the next part needs is made again and not counted.

First the whole run at the smallest fitting set and number of queries, at each depth of the ladder; then, at the last
depth, further fitting sets, scores of half the sequences and queries, and further numbers of queries, each if the
budget has room for it. Eigendecompositions do not depend on the number of fitting sequences: those of a further
fitting set are only repeated where they are quick, and its row says which parts it shares.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from baselines.method import Problem
from bench.scaling.costs import Needs, ekfac_needs
from bench.scaling.ekfac import FACTORS, SCORES, LowMemoryEKFAC
from bench.scaling.ladder import ladder
from bench.scaling.lines import bilinear, fit_line
from bench.scaling.measuring import TimedWork, clock, measured_run
from bench.scaling.methods import sized
from bench.scaling.sizes import MOST_FITTED
from bench.tables import bytes_text
from retrain.examples import Examples
from retrain.models.pythia_suite import Configuration
from retrain.safe_files import folder_bytes
from retrain.work import Work

DISK_SHARE = 0.8  # of the free disk that factors may take
REPEATED_SECONDS = 10.0  # an eigendecomposition quicker than this is repeated for every fitting set
PEAKS = ("peak_memory_bytes", "peak_reserved_bytes", "host_peak_bytes")


class RefusedError(RuntimeError):
    """The whole run cannot fit this machine; the message says what it would take."""


class PointTools(Protocol):
    """What a point offers to whoever measures it (bench/scaling/point.py)."""

    spec: dict[str, Any]
    device: torch.device
    dtype: torch.dtype
    configuration: Configuration
    result: dict[str, Any]
    train: Examples
    queries: Examples

    def load_model(self, layers: int) -> nn.Module: ...
    def fit_sequences(self, count: int) -> Examples: ...
    def problem(
        self, model: nn.Module, train: Examples, queries: Examples, scratch: Path, progress: Any = None
    ) -> Problem: ...
    def forget(self) -> None: ...
    def left(self) -> float: ...
    def save(self) -> None: ...


class Stages:
    def __init__(self, point: PointTools, work: Work):
        self.point, self.work = point, work
        self.spec, self.configuration = point.spec, point.configuration
        self.method: Any = sized(self.spec, {"fit_examples": self.spec["fit_sets"][0]})
        assert isinstance(self.method, LowMemoryEKFAC)
        kept = work.load("ledger")
        self.ledger: dict[str, dict[str, Any]] = kept[1] if kept else {}
        self.depth = 0
        self.opened: tuple[int, nn.Module, Any] | None = None  # (depth, model, analyzer)

    # ---- the order of things ----

    def run(self) -> None:
        self.tell()
        first_fit, first_queries = self.spec["fit_sets"][0], self.spec["query_counts"][0]
        for depth in self.depths():
            self.depth = depth
            self.fit(first_fit, first=True)
            self.score(self.spec["train"], first_queries)
            self.tell()
        for count in self.spec["fit_sets"][1:]:
            if count <= MOST_FITTED and self.predicted_fit(count) <= self.point.left():
                self.fit(count, first=False)
                self.tell()
        n, q = self.spec["train"], first_queries
        halves = [(n // 2, q), (n, q // 2), (n // 2, q // 2)]
        if self.spec["score_parts"] and min(n, q) > 1 and 2.5 * self.seconds(f"score/{n}x{q}") <= self.point.left():
            for train, queries in halves:
                self.score(train, queries)
            self.tell()
        for queries in self.spec["query_counts"][1:]:
            if self.predicted_score(n, queries) <= self.point.left():
                self.score(n, queries)
                self.tell()

    def depths(self) -> Iterator[int]:
        if self.spec["depths"]:
            yield from self.spec["depths"]
            return
        target = self.configuration.layers
        yield from ladder(1, target, self.depths_and_seconds, self.point.left, self.fits_disk)

    def depths_and_seconds(self) -> list[tuple[int, float]]:
        rungs = self.point.result["rungs"]
        return [(rung["size"]["layers"], rung["fit_seconds"] + rung["score_seconds"]) for rung in rungs]

    # ---- what it takes ----

    def check_needs(self) -> None:
        """Refuses a run whose deepest model cannot fit, before anything is measured."""
        depth = max(self.spec["depths"] or [self.configuration.layers])
        needs = self.needs(depth)
        self.point.result["needs"] = {"memory_bytes": needs.memory_bytes, "disk_bytes": needs.disk_bytes}
        memory, disk = self.memory_bytes(), self.free_disk(depth)
        too_much = [needs.memory_bytes > memory, needs.disk_bytes > disk]
        if any(too_much):
            texts = [
                f"about {bytes_text(needs.memory_bytes)} of memory ({bytes_text(memory)} there)",
                f"{bytes_text(needs.disk_bytes)} on the disk ({bytes_text(disk)} to be had)",
            ]
            raise RefusedError(f"refused: a run of {depth} layers takes {' and '.join(texts)}")

    def needs(self, depth: int) -> Needs:
        return ekfac_needs(self.configuration.with_layers(depth), self.spec["tokens"], self.point.dtype.itemsize)

    def memory_bytes(self) -> int:
        if self.point.device.type == "cuda":
            return torch.cuda.get_device_properties(self.point.device).total_memory
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def free_disk(self, depth: int) -> int:
        """What a run may write; what an earlier attempt at it left counts as free."""
        self.work.folder.mkdir(parents=True, exist_ok=True)
        there = folder_bytes(self.folder(depth)) if self.folder(depth).exists() else 0
        return int(DISK_SHARE * shutil.disk_usage(self.work.folder).free) + there

    def fits_disk(self, depth: int) -> bool:
        return self.needs(depth).disk_bytes < self.free_disk(depth)

    # ---- one depth ----

    def folder(self, depth: int) -> Path:
        return self.work.folder / f"layers-{depth}"

    @property
    def model(self) -> nn.Module:
        return self.open()[1]

    @property
    def analyzer(self) -> Any:
        return self.open()[2]

    def open(self) -> tuple[int, nn.Module, Any]:
        """A model of so many blocks, and the folder of its factors; those of other depths are removed."""
        if self.opened is None or self.opened[0] != self.depth:
            self.opened = None
            self.point.forget()
            for other in self.work.folder.glob("layers-*"):
                if other != self.folder(self.depth):
                    shutil.rmtree(other, ignore_errors=True)
            self.folder(self.depth).mkdir(parents=True, exist_ok=True)
            start = clock(self.point.device)
            model = self.point.load_model(self.depth)
            self.point.result["load_seconds"] = clock(self.point.device) - start
            self.opened = (self.depth, model, self.method.analyzer(self.problem(model)))
        return self.opened

    def problem(self, model: nn.Module, train: int | None = None, queries: int | None = None) -> Problem:
        chosen = (
            self.point.train.select(range(train or self.spec["train"])),
            self.point.queries.select(range(queries or self.spec["query_counts"][0])),
        )
        return self.point.problem(model, *chosen, self.folder(self.depth))

    def fit(self, count: int, *, first: bool) -> None:
        if self.done(f"lambda/{count}"):
            return
        data = self.point.fit_sequences(count)
        self.part(f"covariance/{count}", lambda: self.method.fit_covariance(self.analyzer, data, count))
        if first or self.seconds(f"eigen/{self.spec['fit_sets'][0]}") <= REPEATED_SECONDS:
            self.require("covariance", count)
            self.part(f"eigen/{count}", lambda: self.method.decompose(self.analyzer, count))
        self.require("eigen", count)
        self.part(f"lambda/{count}", lambda: self.method.fit_lambda(self.analyzer, data, count))

    def score(self, train: int, queries: int) -> None:
        if self.done(f"score/{train}x{queries}"):
            return
        self.require("lambda", self.spec["fit_sets"][0])
        problem = self.problem(self.model, train, queries)
        self.part(f"score/{train}x{queries}", lambda: self.method.score(problem, self.analyzer))

    def require(self, kind: str, count: int) -> None:
        """Makes the files of a part that is in the ledger but not on this machine."""
        from kronfluence.factor.covariance import covariance_matrices_exist
        from kronfluence.factor.eigen import eigendecomposition_exist, lambda_matrices_exist

        place, data = self.analyzer.factors_output_dir(FACTORS), self.point.fit_sequences(count)
        exist: dict[str, Callable[..., bool]] = {
            "covariance": covariance_matrices_exist, "eigen": eigendecomposition_exist, "lambda": lambda_matrices_exist,
        }  # fmt: skip
        if exist[kind](output_dir=place):
            return
        if kind == "covariance":
            self.method.fit_covariance(self.analyzer, data, count)
        elif kind == "eigen":
            self.require("covariance", count)
            self.method.decompose(self.analyzer, count)
        else:
            self.require("eigen", count)
            self.method.fit_lambda(self.analyzer, data, count)

    # ---- the ledger ----

    def name(self, part: str) -> str:
        return f"{self.depth}/{part}"

    def done(self, part: str) -> bool:
        return self.name(part) in self.ledger

    def seconds(self, part: str) -> float:
        return self.ledger[self.name(part)]["seconds"]

    def part(self, name: str, work: Callable[[], Any]) -> None:
        """Measures a part and keeps what it took, unless that is known."""
        if self.done(name):
            return
        problem = self.problem(self.model)
        self.point.forget()
        self.remove(name.partition("/")[0])
        _, cost = measured_run(TimedWork(work), problem)
        self.ledger[self.name(name)] = {
            "seconds": cost["fit_seconds"],
            "disk_bytes": folder_bytes(self.folder(self.depth)),
            "weight_bytes": cost["weight_bytes"],
            "threads": cost["threads"],
            **{peak: cost[peak] for peak in PEAKS},
        }
        self.work.save("ledger", {}, self.ledger)

    def remove(self, kind: str) -> None:
        """What an earlier fitting set left: a user's run writes new files, and writing over old ones takes longer."""
        from kronfluence.utils import constants

        names = {
            "covariance": constants.COVARIANCE_FACTOR_NAMES,
            "eigen": constants.EIGENDECOMPOSITION_FACTOR_NAMES,
            "lambda": constants.LAMBDA_FACTOR_NAMES,
        }
        if kind == "score":
            shutil.rmtree(self.analyzer.scores_output_dir(SCORES), ignore_errors=True)
        for factor in names.get(kind, ()):
            for path in self.analyzer.factors_output_dir(FACTORS).glob(f"{factor}*.safetensors"):
                path.unlink()

    def predicted_fit(self, count: int) -> float:
        """Of covariance and lambda, from the fitting sets so far; one alone counts as if all of it grew."""
        known = self.fits(self.depth)
        sizes = [fit["fit_examples"] for fit in known]
        seconds = [fit["covariance"] + fit["lambda"] for fit in known]
        return fit_line(sizes, seconds).at(count) if len(known) > 1 else seconds[0] * count / sizes[0]

    def predicted_score(self, train: int, queries: int) -> float:
        points = self.score_points(self.depth)
        if len(points) >= 4:
            base, per_train, per_query, per_pair = bilinear(points)  # type: ignore[arg-type]
            return base + per_train * train + per_query * queries + per_pair * train * queries
        n, q, seconds = points[0]
        return seconds * train * queries / (n * q)

    def fits(self, depth: int) -> list[dict[str, Any]]:
        """Every fitting set whose covariance and lambda were measured; `eigen` only where it was its own."""
        found = []
        for count in self.spec["fit_sets"]:
            parts = {kind: self.ledger.get(f"{depth}/{kind}/{count}") for kind in ("covariance", "eigen", "lambda")}
            if parts["covariance"] and parts["lambda"]:
                seconds = {kind: part["seconds"] if part else None for kind, part in parts.items()}
                found.append({"fit_examples": count, **seconds})
        return found

    def score_points(self, depth: int) -> list[list[float]]:
        """[sequences, queries, seconds], the whole run's first."""
        whole = f"{depth}/score/{self.spec['train']}x{self.spec['query_counts'][0]}"
        names = [name for name in self.ledger if name.startswith(f"{depth}/score/")]
        found = []
        for name in sorted(names, key=lambda name: (name != whole, name)):
            train, queries = name.rpartition("/")[2].split("x")
            found.append([int(train), int(queries), self.ledger[name]["seconds"]])
        return found

    def rung(self, depth: int) -> dict[str, Any] | None:
        """The whole run of a depth as the rows take it; None where a part of it is missing."""
        count, n, q = self.spec["fit_sets"][0], self.spec["train"], self.spec["query_counts"][0]
        kinds = {kind: self.ledger.get(f"{depth}/{kind}/{count}") for kind in ("covariance", "eigen", "lambda")}
        score = self.ledger.get(f"{depth}/score/{n}x{q}")
        if score is None or not all(kinds.values()):
            return None
        parts = [*kinds.values(), score]
        phases = {kind: part["seconds"] for kind, part in kinds.items() if part}
        known = {peak: [part[peak] for part in parts if part and part[peak] is not None] for peak in PEAKS}
        return {
            "size": {"layers": depth, "fit_examples": count, "train": n, "queries": q, "draws": 0},
            "fit_seconds": sum(phases.values()),
            "score_seconds": score["seconds"],
            "phases": phases,
            "fits": self.fits(depth),
            "score_points": self.score_points(depth),
            "weight_bytes": score["weight_bytes"],
            "threads": score["threads"],
            "disk_bytes": kinds["lambda"]["disk_bytes"] if kinds["lambda"] else 0,
            **{peak: max(values, default=None) for peak, values in known.items()},
        }

    def tell(self) -> None:
        depths = sorted({int(name.partition("/")[0]) for name in self.ledger})
        self.point.result["rungs"] = [rung for depth in depths if (rung := self.rung(depth)) is not None]
        self.point.save()


def finished_parts(work: Work) -> str:
    """What an unfinished point has, in words; empty where it has nothing."""
    kept = work.load("ledger")
    by_depth: dict[str, list[str]] = {}
    for name in kept[1] if kept else {}:
        depth, _, part = name.partition("/")
        by_depth.setdefault(depth, []).append(part.replace("/", " "))
    return "; ".join(f"{', '.join(parts)} of {depth} layers" for depth, parts in by_depth.items())


def drop_factors(work: Work) -> None:
    """Frees the disk and keeps the ledger."""
    for folder in work.folder.glob("layers-*"):
        shutil.rmtree(folder, ignore_errors=True)
