"""The ground truth as idempotent work units: train the base model, or retrain on one subset and measure every query.

A unit is described by plain data, so that any process on any machine can do it (`retrain/jobs`), and its result is one
entry of the store. The key holds what decides the result (task, data, seeds, subset, library versions), never the
device or a path. `retrain/train.py` does the work.
"""

import hashlib
import json
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from retrain import subsets
from retrain.errors import UsageError
from retrain.jobs.unit import Unit
from retrain.plugins import plugin_reference
from retrain.replays import replay_source, why_not_replayed
from retrain.source import OURS
from retrain.store import Entry, Store, canonical_json, plain_data
from retrain.subsets import REPLAYED, checkpoint_seeds
from retrain.task import Task
from retrain.tasks import load_task


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


@lru_cache
def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.machine()}"


# ---- tasks as plain data ----


def task_specification(task: Task) -> str:
    """What a worker needs to build the same task, folders included, and what it must find there: data and weights."""
    options = {f.name: getattr(task, f.name) for f in fields(task)}
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
    expected = {"config": plain_data(task.config), "versions": task.versions}
    reference = plugin_reference(type(task))
    return json.dumps({"name": reference, "options": options, **expected}, sort_keys=True, default=str)


@lru_cache(maxsize=4)
def task_from(specification: str) -> Task:
    """Built once a process: its data stays loaded from unit to unit."""
    content = json.loads(specification)
    options = {name: tuple(v) if isinstance(v, list) else v for name, v in content["options"].items()}
    task = load_task(content["name"], **options)
    found = {**task.config, "versions": task.versions}
    expected = {**content["config"], "versions": content["versions"]}
    both = {name: (found.get(name), expected.get(name)) for name in {**found, **expected}}
    refuse_changed(task, [name for name, (now, then) in both.items() if canonical_json(now) != canonical_json(then)])
    return task


def refuse_changed(task: Task, names: list[str]) -> None:
    if names:
        what = {"source": "code", "data": "data", "weights": "initial weights", "versions": "libraries"}
        said = " and ".join(what.get(name, name) for name in sorted(names))
        raise UsageError(
            f"the {said} of task {task.name} changed while this run was going on; what is finished is kept under what "
            "made it: run the same command again"
        )


def write_entry(
    store: Store, unit: Unit, task: Task, arrays: Mapping[str, np.ndarray], record: Mapping[str, Any]
) -> Entry:
    """Keeps what a unit made, unless the task is no longer what the unit's key says it is."""
    check_task(task)
    return store.write(unit.kind, unit.config, arrays, record)


def check_task(task: Task) -> None:
    """Refuses a task whose code, declared files, data or given weights were changed since it was loaded."""
    names = ["source"] if task.current_source() != task.source else []
    names += ["data"] if task.train_data.was_changed() or task.query_data.was_changed() else []
    # The suite's own tasks hold the weights in memory; another one may read them for every model.
    own = type(task).__module__.partition(".")[0] in OURS
    if task.weights_fingerprint and not own and task.given_weights() != task.weights_fingerprint:
        names.append("weights")
    refuse_changed(task, names)


# ---- the base model, and further checkpoints like it ----


def checkpoint_unit(task: Task, seed: int, number: int, device: str) -> Unit:
    """Checkpoint 0 is the base model of the experiment's seed; the others differ in every seed."""
    config = {"task": task.config, **checkpoint_seeds(seed, number), "versions": task.versions}
    payload = {"task": task_specification(task), "device": device}
    return Unit(kind="model", config=config, call="retrain.train:train_checkpoint", payload=payload)


def checkpoint_of(task: Task, entry: Entry, device: torch.device) -> nn.Module:
    """The model of a stored checkpoint, in eval mode."""
    model = task.build_model(0)
    model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in entry.arrays.items()})
    return model.to(device).eval()


def checkpoint_fingerprint(entry: Entry) -> str:
    """Of the weights themselves: scores belong to these numbers, whoever trained them."""
    digest = hashlib.sha256()
    for name in sorted(entry.arrays):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(entry.arrays[name]).tobytes())
    return digest.hexdigest()[:20]


# ---- retraining on subsets ----


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which subsets are retrained on: num_subsets of the attributed examples, each `replicates` times.

    With `replicated_subsets` only the first so many are retrained more than once: enough for the noise ceiling. Models
    start from the base model's initial weights, so that replicates differ in the order of the data alone, or with
    `initialisation` fresh each from its own; `replayed` ones differ in nothing but the data (`retrain/subsets.py`), and
    have no replicates.
    """

    alpha: float
    alpha_attribution: float
    seed: int
    num_subsets: int = 100
    replicates: int = 1
    scheme: subsets.Scheme = "fixed"
    replicated_subsets: int | None = None
    initialisation: str = "shared"
    stream: subsets.Stream = "report"

    def __post_init__(self) -> None:
        if self.initialisation == REPLAYED:
            object.__setattr__(self, "replicates", 1)

    def replicates_of(self, subset: int) -> int:
        everyone = self.replicated_subsets is None or subset < self.replicated_subsets
        return self.replicates if everyone else 1

    def attributed(self, task: Task) -> np.ndarray:
        """(n,) indices into the training set."""
        return subsets.attributed_indices(self.seed, self.alpha_attribution, len(task.train_data))

    def masks(self, task: Task) -> np.ndarray:
        """(num_subsets, n) bool: which attributed examples each subset keeps."""
        attributed = self.attributed(task)
        groups = groups_to_balance(task, attributed, self.scheme)
        return subsets.masks(self.seed, self.num_subsets, self.alpha, len(attributed), self.scheme, self.stream, groups)


def groups_of(task: Task, attributed: np.ndarray) -> np.ndarray | None:
    """(n,) int: the group of each attributed example; None where the task has none, or all examples are of one."""
    groups = task.groups()
    if groups is None:
        return None
    groups = np.asarray(groups)
    if groups.shape != (len(task.train_data),):
        raise UsageError(
            f"task {task.name} declares groups of shape {groups.shape}; expected one for each of its "
            f"{len(task.train_data)} training examples"
        )
    here = np.unique(groups[attributed], return_inverse=True)[1]
    return here if here.any() else None


def groups_to_balance(task: Task, attributed: np.ndarray, scheme: str) -> np.ndarray | None:
    """What a mask of this scheme is drawn by, beside its seeds."""
    return groups_of(task, attributed) if scheme == "balanced" else None


def groups_in_key(task: Task, attributed: np.ndarray, scheme: str) -> dict[str, str | None]:
    """A task's own groups decide which examples balanced subsets keep, and are not in its data."""
    if scheme != "balanced":
        return {}
    groups = groups_of(task, attributed)
    return {"groups": None if groups is None else hashlib.sha256(groups.astype("<i8").tobytes()).hexdigest()[:20]}


def retrain_unit(task: Task, plan: Plan, subset: int, replicate: int, device: str) -> Unit:
    config = {
        "task": task.config,
        "alpha": plan.alpha,
        "alpha_attribution": plan.alpha_attribution,
        "scheme": plan.scheme,
        "seed": plan.seed,
        "subset": subset,
        "replicate": replicate,
        "initialisation": plan.initialisation,
        "stream": plan.stream,
        "versions": task.versions,
        **groups_in_key(task, plan.attributed(task), plan.scheme),
    }
    at_once, call = task.trainings_at_once(choose_device(device)), "retrain.train:train_one"
    if plan.initialisation == REPLAYED:
        config["replay"], at_once, call = replay_source(task), 1, "retrain.replays.train:train_replayed"
    payload = {"task": task_specification(task), "device": device, "at_once": at_once}
    return Unit(kind="retrain", config=config, call=call, payload=payload)


def retrain_units(task: Task, plan: Plan, device: str) -> list[Unit]:
    """Replicate by replicate, so that a run cut short has every subset once before any twice."""
    if plan.initialisation == "fresh" and task.pretrained:
        raise UsageError(
            f"task {task.name} starts from pretrained weights; there is no --initialisation but the shared one"
        )
    if plan.initialisation == REPLAYED and (reason := why_not_replayed(task)):
        raise UsageError(f"--initialisation {REPLAYED}: {reason}")
    num_attributed = len(plan.attributed(task))
    kept = round(plan.alpha * num_attributed)
    if plan.scheme != "bernoulli" and not 0 < kept < num_attributed:
        raise UsageError(
            f"alpha {plan.alpha:g} of {num_attributed} attributed examples keeps {'all' if kept else 'none'} of them: "
            "subsets would not differ; take another --alpha, or attribute more"
        )
    if plan.scheme == "balanced":
        _check_balanced(task, plan)
    first = retrain_unit(task, plan, 0, 0, device)
    return [
        first.with_config(subset=subset, replicate=replicate)
        for replicate in range(plan.replicates)
        for subset in range(plan.num_subsets)
        if replicate < plan.replicates_of(subset)
    ]


def _check_balanced(task: Task, plan: Plan) -> None:
    groups = groups_of(task, plan.attributed(task))
    if groups is None:
        raise UsageError(
            f"--scheme balanced: task {task.name} has no groups (no labels, no Task.groups, or one group only); "
            "take --scheme fixed"
        )
    kept = subsets.mask(plan.seed, 0, plan.alpha, len(groups), "balanced", plan.stream, groups)
    sizes, counts = np.bincount(groups), np.bincount(groups[kept], minlength=groups.max() + 1)
    if not counts.all():
        smallest = sizes[counts == 0].min()
        raise UsageError(
            f"--scheme balanced: alpha {plan.alpha:g} keeps none of {int((counts == 0).sum())} of {len(sizes)} groups "
            f"(the smallest has {smallest} of {len(groups)} examples); take a larger --alpha, or attribute more"
        )


# ---- what a unit takes ----


class SharedSeconds:
    """Seconds of what runs side by side on one device: each moment is divided among those that are at work in it.

    with SHARED.measured() as seconds:
        ...
    seconds()       # the shares of everybody add up to the time during which anybody was at work
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._lock = clock, threading.Lock()
        self._at_work, self._share, self._since = 0, 0.0, 0.0

    def _arrive(self, change: int) -> float:
        """Count somebody in or out; what one who was there all along would have been given so far."""
        with self._lock:
            now = self._clock()
            if self._at_work:
                self._share += (now - self._since) / self._at_work
            self._at_work, self._since = self._at_work + change, now
            return self._share

    @contextmanager
    def measured(self) -> Iterator[Callable[[], float]]:
        start = end = self._arrive(+1)
        try:
            yield lambda: end - start
        finally:
            end = self._arrive(-1)


SHARED = SharedSeconds()  # a process works on one device
