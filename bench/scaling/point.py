"""One point of the scaling sweep, one model and one method, in a process of its own so that its peaks are its own.

    python -m bench.scaling.point --spec SPEC.json      # bench.scaling writes the specification and starts this
    python -m bench.scaling.point --spec -              # imports first, then waits for the specification on stdin

What is counted. `load_seconds`: making or loading the model, on the device. `fit_seconds` and `score_seconds`: the two
parts of the method, by the harness's own clock (`bench/scaling/measuring.py`), device synchronised. Not counted:
imports, the CUDA context, reading and tokenising text, and a warm-up: the method on a tiny model, and for BIF on a GPU,
whose kernels are made for the shapes at hand, its shortest run once on the model itself.

A point climbs a ladder of sizes until the whole run fits what is left of the budget, then does the whole run. If it
never fits, the ladder is all there is, and the row is projected from it (bench/scaling/rows.py). What is repeated, and
so linear: draws for BIF; blocks of the model for EK-FAC, as every block has the same layers (bench/scaling/stages.py);
training sequences for the others. After each rung the result so far is written whole, so that a point cut short still
counts.
"""

import argparse
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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from baselines.method import Problem
from bench.scaling.ladder import ladder
from bench.scaling.measuring import Ticks, Watched, clock, matmul_peak, measured_run, storage_of
from bench.scaling.methods import sized
from bench.scaling.problem import (
    TRAINABLE,
    ScalingTask,
    load_queries,
    open_tokenizer,
    query_examples,
    repeated,
    train_examples,
)
from bench.scaling.sizes import FEW_DRAWS, whole_size
from bench.scaling.stages import RefusedError, Stages, drop_factors
from retrain.errors import error_line
from retrain.examples import Examples
from retrain.models.pythia_suite import Configuration, build_random, keep_layers
from retrain.processes import die_with
from retrain.safe_files import write_whole
from retrain.units import describe_device
from retrain.work import Work

TINY = Configuration(name="tiny", hidden=64, layers=1, heads=2, intermediate=256, vocabulary=512)
LONGEST_REASON = 300


class Point:
    """One specification being measured."""

    def __init__(self, spec: dict[str, Any], started: float):
        self.spec, self.started = spec, started
        self.device = torch.device(spec["device"])
        self.dtype = getattr(torch, spec["dtype"])
        self.configuration = Configuration(**spec["configuration"])
        self.result: dict[str, Any] = {"rungs": [], "device": describe_device(self.device)}
        self.axis: str = spec["axis"]
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
        """Queries, and the training sequences that are scored."""
        spec = self.spec
        self.tokenizer = open_tokenizer(spec["tokenizer"], self.configuration.vocabulary)
        pairs = repeated(load_queries(spec["query_file"]), max(spec["query_counts"]))
        self.queries = query_examples(pairs, self.tokenizer, spec["tokens"])
        self.fit_data = Examples(torch.empty(0, spec["tokens"]), torch.empty(0, spec["tokens"]))
        self.train = self.fit_sequences(spec["train"]).select(range(spec["train"]))
        if spec["fitted"] and spec["method"] != "ekfac":
            self.fit_sequences(spec["fit_examples"])

    def fit_sequences(self, count: int) -> Examples:
        """At least so many to fit curvature on: those that are scored, and others behind them.

        Made when they are asked for: ten thousand take longer to tokenise than a small point to measure.
        """
        if count > len(self.fit_data):
            spec = self.spec
            self.fit_data = train_examples(
                count, spec["tokens"], self.configuration.vocabulary, text=spec["text"], tokenizer=self.tokenizer,
                seed=spec["seed"], least=min(count, spec["train"]),
            )  # fmt: skip
        return self.fit_data

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

    def size(self, value: int) -> dict[str, int]:
        """The whole point's sizes, with the axis at `value`; a shorter ladder's fit is as much shorter."""
        size = whole_size(self.spec) | {self.axis: value}
        if self.axis == "train" and self.spec["fitted"]:
            size["fit_examples"] = max(2, round(self.spec["fit_examples"] * value / self.spec["train"]))
        return size

    # ---- measuring ----

    def warm_up(self) -> None:
        """So that no rung pays for the library handles, and BIF's first not for its kernels."""
        tokens = min(16, self.spec["tokens"])
        model = build_random(TINY, dtype=self.dtype, device=self.device)
        few = Examples(torch.zeros(8, tokens, dtype=torch.long), torch.ones(8, tokens, dtype=torch.long))
        size = whole_size(self.spec) | {"draws": 2 * max(self.spec["chains"], 1), "train": 8, "fit_examples": 8}
        with self.folder() as scratch:
            problem = replace(self.problem(model, few, few.select([0, 1]), scratch), train=few)
            with contextlib.suppress(FloatingPointError):  # a chain on noise may run away; the kernels have run
                measured_run(sized(self.spec, size), problem)
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
        ticks, watched = Ticks(self.device), Watched(sized(self.spec, size))
        self.forget()
        with self.folder() as scratch:
            train = self.train.select(range(size["train"]))
            progress = ticks if self.axis == "draws" else None
            attribution, cost = measured_run(watched, self.problem(model, train, self.queries, scratch, progress))
            found = {
                "size": size,
                **cost,
                "disk_bytes": watched.disk_bytes,
                "num_scores_not_finite": int((~torch.isfinite(attribution.scores)).sum()),
            }
            if self.axis == "draws":
                found["tick_seconds"] = ticks.median()
            if "token_bytes" in attribution.diagnostics:
                found["token_bytes"] = attribution.diagnostics["token_bytes"]
        return found

    def left(self) -> float:
        return self.spec["budget_seconds"] - (time.monotonic() - self.started)

    def run(self) -> None:
        stages = Stages(self, Work(Path(self.spec["work"]))) if self.axis == "layers" else None
        if stages is not None:
            stages.check_needs()
            self.result["storage"] = storage_of(Path(self.spec["work"]))
        self.load_data()
        clock(self.device)  # the CUDA context
        if self.spec.get("measure_peak"):
            self.result["peak_flops"] = matmul_peak(self.device)["flops"]
        self.warm_up()
        # kronfluence collects garbage at every step; what the imports left behind is no part of its cost.
        gc.freeze()
        if stages is not None:
            stages.run()
        else:
            self.climb()
        self.result["finished"] = True

    def climb(self) -> None:
        start = clock(self.device)
        model = self.load_model(self.configuration.layers)
        self.result["load_seconds"] = clock(self.device) - start
        target = whole_size(self.spec)[self.axis]
        first, wanted = min(8, target), 0
        if self.axis == "draws":
            chains = self.spec["chains"]
            # At least two draws a chain, so that each takes a step; at once those that were wanted, where they are few.
            wanted = max(2, -(-self.spec["timed_draws"] // chains)) * chains
            first = wanted if wanted <= FEW_DRAWS * chains else 2 * chains
            if self.spec["rehearse"]:
                self.rung(model, self.size(2) | {"chains": 1})
        for value in ladder(first, target, self.sizes_and_seconds, self.left, wanted=wanted):
            self.result["rungs"].append(self.rung(model, self.size(value)))
            self.save()

    def sizes_and_seconds(self) -> list[tuple[int, float]]:
        return [(rung["size"][self.axis], rung["fit_seconds"] + rung["score_seconds"]) for rung in self.result["rungs"]]

    def save(self) -> None:
        write_whole(Path(self.spec["result"]), json.dumps(self.result))


def perform_point(spec: dict[str, Any], started: float) -> dict[str, Any]:
    """Measures one specification; whatever goes wrong becomes the reason in the result."""
    point = Point(spec, started)
    try:
        point.run()
    except Exception as error:
        point.result["error"] = failure_reason(error, Path(spec["scratch"]).parent)
    finally:
        shutil.rmtree(point.scratch, ignore_errors=True)
        if point.axis == "layers":
            drop_factors(Work(Path(spec["work"])))
    point.save()
    return point.result


def failure_reason(error: BaseException, place: Path | None = None) -> str:
    """In one line; memory and disk by name, since these are what larger models run into.

    place: where the point writes, in the cache; what reports a full disk rarely says which.
    """
    if isinstance(error, RefusedError):
        return str(error)
    text = str(error).lower()
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in text:
        return f"out of memory: {error_line(error)}"[:LONGEST_REASON]
    if getattr(error, "errno", None) == errno.ENOSPC or "no space left on device" in text or "os error 28" in text:
        where = f" at {place}" if place else ""
        return f"the disk is full{where}: {error_line(error)}"[:LONGEST_REASON]
    return error_line(error)[:LONGEST_REASON]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scaling.point", description=__doc__.split("\n")[0])
    parser.add_argument("--spec", required=True, help="a JSON file, or - to wait for its path on stdin")
    path = parser.parse_args().spec
    if path == "-":
        die_with(os.getppid())  # a sweep that is killed outright cannot end its point
        # Imported while the point before is still being measured, and idle from here on.
        import kronfluence  # noqa: F401
        import transformers  # noqa: F401

        path = sys.stdin.readline().strip()
        if not path:
            return 0
    perform_point(json.loads(Path(path).read_text()), time.monotonic())
    return 0


if __name__ == "__main__":
    sys.exit(main())
