"""Pairs tasks with methods: gets the ground truth and the scores, from the store or by computing them.

The only clock and the only memory meter of the suite are here, so every method is measured alike: seeded, its fit and
its score timed apart (the device synchronised), its peak memory taken over what was there before. Raw outputs are
stored; metrics are computed from them afterwards.
"""

import contextlib
import ctypes
import gc
import json
import logging
import resource
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from baselines.method import Attribution, Method, Problem, load_method
from retrain.jobs import Unit, run_units
from retrain.progress import progress_bar
from retrain.store import Entry, Store
from retrain.task import Split, Task
from retrain.train import (
    Plan,
    checkpoint_fingerprint,
    checkpoint_unit,
    choose_device,
    describe_device,
    library_versions,
    load_checkpoint,
    retrain_units,
    task_from,
    task_specification,
)

logger = logging.getLogger("tda-bench")

KEEP_SCORES = {"auto": 2**30, "always": 2**62, "never": 0}  # largest score matrix kept, in bytes
MAX_ROUNDS = 3  # how often damaged entries are made again before giving up


class MethodFailedError(RuntimeError):
    """A method raised or gave no usable scores; the message is one line."""


# ---- entries that must be there ----


def obtain(units: list[Unit], store: Store, *, force: bool = False, **job_options: Any) -> dict[str, Entry]:
    """Every unit's verified entry by key, computing what is missing or damaged. Missing ones are left out (collect)."""
    if force:
        for info in list(store.entries()):
            if any(info.key == store.key(unit.kind, unit.config) for unit in units):
                store.remove(info)
    by_key = {store.key(unit.kind, unit.config): unit for unit in units}
    entries: dict[str, Entry] = {}
    for _ in range(MAX_ROUNDS):
        missing = [unit for key, unit in by_key.items() if key not in entries]
        if not missing:
            break
        report = run_units(missing, store, **job_options)
        if report.failed:
            reason = next(iter(report.failed.values()))
            raise RuntimeError(f"{len(report.failed)} of {len(by_key)} units failed; the first: {reason}")
        # Reading verifies; what is damaged is quarantined, comes back as None and goes into the next round.
        for key, unit in by_key.items():
            if key not in entries and (entry := store.read(unit.kind, unit.config)) is not None:
                entries[key] = entry
        if job_options.get("collect"):
            break
    return entries


@dataclass(frozen=True)
class GroundTruth:
    """What really happened."""

    losses: np.ndarray  # (replicates, subsets, all queries) float32; zeros where a subset has fewer replicates
    masks: np.ndarray  # (subsets, n) bool
    subsets: np.ndarray  # which of the plan's subsets these are; all of them unless --collect found some missing
    present: np.ndarray  # (replicates, subsets) bool: which retrains there are

    def mean(self) -> np.ndarray:
        """(subsets, queries): averaged over replicates."""
        return self.losses.sum(axis=0) / self.present.sum(axis=0)[:, None]


def ground_truth(task: Task, plan: Plan, store: Store, device: str, *, force: bool = False, **jobs: Any) -> GroundTruth:
    units = retrain_units(task, plan, device)
    name = f"{task.name} retrains, alpha {plan.alpha:g}, seed {plan.seed}"
    entries = obtain(units, store, force=force, name=name, progress=jobs.pop("progress", True), **jobs)
    by_subset: dict[int, list[np.ndarray]] = {}
    for entry in entries.values():
        by_subset.setdefault(entry.config["subset"], []).append(entry.arrays["losses"])
    complete = sorted(subset for subset, losses in by_subset.items() if len(losses) == plan.replicates_of(subset))
    num_queries = len(next(iter(by_subset.values()))[0]) if complete else 0
    losses = np.zeros((plan.replicates, len(complete), num_queries), dtype=np.float32)
    present = np.zeros(losses.shape[:2], dtype=bool)
    for position, subset in enumerate(complete):
        losses[: len(by_subset[subset]), position] = by_subset[subset]
        present[: len(by_subset[subset]), position] = True
    return GroundTruth(losses, plan.masks(task)[complete], np.array(complete, dtype=int), present)


def base_model(
    task: Task, seed: int, store: Store, device: str, number: int = 0, force: bool = False
) -> tuple[nn.Module, Entry]:
    unit = checkpoint_unit(task, seed, number, device)
    (entry,) = obtain([unit], store, force=force).values()
    return load_checkpoint(task, entry, choose_device(device)), entry


# ---- scores ----


@dataclass(frozen=True, kw_only=True)
class Question:
    """Everything a method's scores depend on beside the method: what is attributed to what."""

    task: Task
    seed: int
    alpha_attribution: float
    split: Split = "report"
    max_queries: int | None = None

    def attributed_indices(self) -> np.ndarray:
        from retrain.subsets import attributed_indices

        return attributed_indices(self.seed, self.alpha_attribution, len(self.task.train_data))

    def query_indices(self) -> np.ndarray:
        """Into the task's queries."""
        return self.task.query_indices(self.split)[: self.max_queries]

    def config(self) -> dict[str, Any]:
        return {
            "task": self.task.scoring_config,
            "seed": self.seed,
            "alpha_attribution": self.alpha_attribution,
            "split": self.split,
            "num_queries": len(self.query_indices()),
        }


def problem_of(question: Question, model: nn.Module, store: Store, device_name: str, scratch: Path) -> Problem:
    """The question as a method is asked it, at this checkpoint."""

    def checkpoint(number: int) -> nn.Module:
        return base_model(question.task, question.seed, store, device_name, number)[0]

    return Problem(
        task=question.task,
        model=model,
        train=question.task.train_data,
        attributed_indices=question.attributed_indices(),
        queries=question.task.query_data.select(question.query_indices()),
        seed=question.seed,
        device=choose_device(device_name),
        scratch=scratch,
        checkpoint=checkpoint,
        progress=progress_bar,
    )


@dataclass(frozen=True)
class Prediction:
    """What a method predicts for every subset and query, and what that cost."""

    raw: np.ndarray  # (subsets, queries): sum of scores over the subset's members
    normalised: np.ndarray | None  # the same from train-normalised scores
    record: dict[str, Any]  # seconds, memory, diagnostics, device


class Scorer:
    """Scores one method on one question and turns the scores into predictions; both come from the store if they can."""

    def __init__(self, question: Question, method: Method, store: Store, device: str, keep_scores: str = "auto"):
        self.question, self.method, self.store, self.device_name = question, method, store, device
        self.device = choose_device(device)
        self.keep_scores = keep_scores

    def config(self) -> dict[str, Any]:
        """The key of the scores: the question, the checkpoint's own weights, the method, the versions it rests on."""
        _, entry = self._base()
        return {
            **self.question.config(),
            "checkpoint": checkpoint_fingerprint(entry),
            "method": self.method.config,
            "versions": library_versions("torch", *self.method.libraries),
        }

    def _base(self) -> tuple[nn.Module, Entry]:
        if not hasattr(self, "_base_model"):
            self._base_model = base_model(self.question.task, self.question.seed, self.store, self.device_name)
        return self._base_model

    def predictions(self, plans: list[Plan], *, force: bool = False) -> list[Prediction]:
        """One a plan; the scores are computed at most once."""
        config = self.config()
        attribution: Attribution | None = None
        record: dict[str, Any] = {}
        found: list[Prediction | None] = [None if force else self._stored(config, plan) for plan in plans]
        if None in found and not force:
            entry = self.store.read("scores", config)
            if entry is not None and "scores" in entry.arrays:
                attribution, record = _from_arrays(entry), entry.record
        if None in found and attribution is None:
            if force:
                _remove(self.store, "scores", config)
            attribution, record = self.compute()
            self._keep(config, attribution, record)
        for position, plan in enumerate(plans):
            if found[position] is None:
                assert attribution is not None
                found[position] = self._predict(config, plan, attribution, record, force)
        return [prediction for prediction in found if prediction is not None]

    def cached(self, plans: list[Plan]) -> bool:
        """Whether nothing would have to be computed."""
        config = self.config()
        return all(self.store.has("predictions", self._plan_config(config, plan)) for plan in plans)

    def compute(self) -> tuple[Attribution, dict[str, Any]]:
        """Runs the method, timed and metered; never stores anything."""
        question = self.question
        model, _ = self._base()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with self.store.scratch() as scratch:
            problem = problem_of(question, model, self.store, self.device_name, scratch)
            attribution, cost = measure(self.method, problem)
        self._check(attribution, problem)
        after = model.state_dict()
        if any(not torch.equal(before[name], after[name]) for name in before):
            raise MethodFailedError(f"{self.method.name} changed the model it was given; expected it untouched")
        record = {**cost, "device": describe_device(self.device), "diagnostics": attribution.diagnostics}
        return attribution, record

    def _check(self, attribution: Attribution, problem: Problem) -> None:
        expected = (len(problem.queries), len(problem.attributed_indices))
        if tuple(attribution.scores.shape) != expected:
            raise MethodFailedError(
                f"{self.method.name} gave scores of shape {tuple(attribution.scores.shape)}; "
                f"expected {expected}: queries x training examples"
            )

    def _keep(self, config: dict[str, Any], attribution: Attribution, record: dict[str, Any]) -> None:
        """Scores that are not finite are evidence, not results: they are never cached."""
        if num_not_finite(attribution):
            return
        arrays = {name: value.numpy() for name, value in attribution.arrays.items()}
        if attribution.scores.numel() * 4 <= KEEP_SCORES[self.keep_scores]:
            arrays["scores"] = attribution.scores.numpy()
            if attribution.train_scale is not None:
                arrays["train_scale"] = attribution.train_scale.numpy()
        self.store.write("scores", config, arrays, record)

    def _plan_config(self, config: dict[str, Any], plan: Plan) -> dict[str, Any]:
        subsets = {"alpha": plan.alpha, "scheme": plan.scheme, "num_subsets": plan.num_subsets, "plan_seed": plan.seed}
        return {**config, **subsets}

    def _stored(self, config: dict[str, Any], plan: Plan) -> Prediction | None:
        entry = self.store.read("predictions", self._plan_config(config, plan))
        if entry is None:
            return None
        return Prediction(entry.arrays["raw"], entry.arrays.get("normalised"), entry.record)

    def _predict(
        self, config: dict[str, Any], plan: Plan, attribution: Attribution, record: dict[str, Any], force: bool
    ) -> Prediction:
        masks = torch.from_numpy(plan.masks(self.question.task)).float()
        raw = (masks @ attribution.scores.float().T).numpy()
        scaled = attribution.normalised()
        normalised = None if scaled is None else (masks @ scaled.float().T).numpy()
        not_finite = num_not_finite(attribution)
        prediction = Prediction(raw, normalised, {**record, "num_scores_not_finite": not_finite})
        if not not_finite:
            arrays = {"raw": raw} if normalised is None else {"raw": raw, "normalised": normalised}
            if force:
                _remove(self.store, "predictions", self._plan_config(config, plan))
            self.store.write("predictions", self._plan_config(config, plan), arrays, prediction.record)
        return prediction


def num_not_finite(attribution: Attribution) -> int:
    return int((~torch.isfinite(attribution.scores)).sum())


def _from_arrays(entry: Entry) -> Attribution:
    scale = entry.arrays.get("train_scale")
    return Attribution(
        scores=torch.from_numpy(np.array(entry.arrays["scores"])),
        train_scale=None if scale is None else torch.from_numpy(np.array(scale)),
        diagnostics=entry.record.get("diagnostics", {}),
    )


def _remove(store: Store, kind: str, config: dict[str, Any]) -> None:
    key = store.key(kind, config)
    for info in list(store.entries(kind)):
        if info.key == key:
            store.remove(info)


# ---- scoring as a work unit, for a cluster ----


def score_unit(
    question: Question, method: Method, plans: list[Plan], store: Store, device: str, keep_scores: str = "auto"
) -> Unit:
    """The same work as `Scorer.predictions`, described as plain data; its entry is the scores."""
    options = {f.name: getattr(method, f.name) for f in fields(method)}
    payload = {
        "task": task_specification(question.task),
        "keep_scores": keep_scores,
        "question": {
            "seed": question.seed,
            "alpha_attribution": question.alpha_attribution,
            "split": question.split,
            "max_queries": question.max_queries,
        },
        "method": {"name": method.name, "options": options},
        "plans": [{f.name: getattr(plan, f.name) for f in fields(plan)} for plan in plans],
        "device": device,
    }
    config = Scorer(question, method, store, device).config()
    return Unit(
        kind="scores", config=config, call="bench.runner:perform_score_unit", payload=json.loads(json.dumps(payload))
    )


def perform_score_unit(store: Store, unit: Unit) -> None:
    payload = unit.payload
    question = Question(task=task_from(payload["task"]), **payload["question"])
    options = {name: tuple(v) if isinstance(v, list) else v for name, v in payload["method"]["options"].items()}
    method = load_method(payload["method"]["name"], **options)
    scorer = Scorer(question, method, store, payload["device"], payload["keep_scores"])
    scorer.predictions([Plan(**plan) for plan in payload["plans"]])


# ---- the clock and the meter ----


def measure(method: Method, problem: Problem) -> tuple[Attribution, dict[str, Any]]:
    """Fit and score, seeded; seconds of each and the peak of memory added."""
    device = problem.device
    torch.manual_seed(problem.seed)
    # Every method alike: float32 products in TensorFloat-32, where the GPU has it.
    torch.set_float32_matmul_precision("high")
    np.random.seed(problem.seed % 2**32)  # noqa: NPY002  (libraries draw from the global generator)
    with _threads(problem.task.cpu_threads), _peak_memory(device) as peak, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries' own making, and nothing the user can act on
        start = _now(device)
        state = method.fit(problem)
        fitted = _now(device)
        attribution = method.score(problem, state)
        scored = _now(device)
        threads = torch.get_num_threads()
    cost = {
        "fit_seconds": fitted - start,
        "score_seconds": scored - fitted,
        "peak_memory_bytes": peak[0],
        "threads": threads,
    }
    return attribution, cost


@contextlib.contextmanager
def _threads(wanted: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def _peak_memory(device: torch.device) -> Iterator[list[int]]:
    """The most memory in use during the block beyond what was in use before: GPU allocations, or resident memory."""
    peak = [0]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak[0] = torch.cuda.max_memory_allocated(device) - before
        return
    # What the last method freed goes back first: glibc keeps it, and the next one's use of it would not show. (torch on
    # aarch64 has an allocator of its own, which only MIMALLOC_PURGE_DELAY=0 in the environment makes do the same.)
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    # Linux forgets the old high-water mark when told to; elsewhere only a new record shows.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = _resident_peak()
    yield peak
    peak[0] = max(0, _resident_peak() - before)


def _resident_peak() -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
