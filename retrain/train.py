"""The ground truth as idempotent work units: train the base model, or retrain on one subset and measure every query.

A unit is described by plain data, so that any process on any machine can do it (`retrain/jobs.py`), and its result is
one entry of the store. The key holds what decides the result (task, data, seeds, subset, library versions), never the
device or a path.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import metadata

import numpy as np
import torch
from torch import nn

from retrain import subsets
from retrain.backends import without_onednn
from retrain.errors import UsageError
from retrain.jobs import Unit
from retrain.plugins import plugin_reference
from retrain.replays import replay_of, replay_source, why_not_replayed
from retrain.replays.replay import run_replay
from retrain.seeds import checkpoint_seeds, retrain_seeds
from retrain.shared_seconds import SHARED
from retrain.source import code_fingerprint
from retrain.starts import REPLAYED
from retrain.store import Entry, Store
from retrain.task import Task
from retrain.tasks import load_task


@lru_cache
def library_versions(*distributions: str) -> dict[str, str]:
    """Major and minor version of each: what a cache key depends on."""
    return {name: ".".join(metadata.version(name).split("+")[0].split(".")[:2]) for name in distributions}


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """One core a training run: on the CPU, sums then come out the same whoever runs it beside how many others."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- tasks as plain data ----


def task_specification(task: Task) -> str:
    """What a worker needs to build the same task, folders included."""
    options = {f.name: getattr(task, f.name) for f in fields(task)}
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
    reference = plugin_reference(type(task))
    return json.dumps({"name": reference, "source": task.source, "options": options}, sort_keys=True, default=str)


@lru_cache(maxsize=4)
def task_from(specification: str) -> Task:
    """Built once a process: its data stays loaded from unit to unit."""
    content = json.loads(specification)
    options = {name: tuple(v) if isinstance(v, list) else v for name, v in content["options"].items()}
    task = load_task(content["name"], **options)
    if task.source != content["source"]:
        raise UsageError(
            f"the code of task {task.name} was edited while this run was going on; what is finished is kept under the "
            "code that made it: run the same command again"
        )
    return task


# ---- the base model, and further checkpoints like it ----


def checkpoint_unit(task: Task, seed: int, number: int, device: str) -> Unit:
    """Checkpoint 0 is the base model of the experiment's seed; the others differ in every seed."""
    config = {
        "task": task.config,
        **checkpoint_seeds(seed, number),
        "versions": library_versions("torch"),
    }
    payload = {"task": task_specification(task), "device": device}
    return Unit(kind="model", config=config, call="retrain.train:train_checkpoint", payload=payload)


def train_checkpoint(store: Store, unit: Unit) -> Entry:
    task, device = task_from(unit.payload["task"]), choose_device(unit.payload["device"])
    started = time.perf_counter()
    with one_thread(device):
        model = task.train_base(init_seed=unit.config["init_seed"], order_seed=unit.config["order_seed"], device=device)
        losses = task.losses(model, task.query_data, device)
    record = {"device": describe_device(device), "code": code_fingerprint(), "mean_query_loss": float(losses.mean())}
    record["seconds"] = time.perf_counter() - started
    arrays = {name: value.detach().cpu().contiguous().numpy() for name, value in model.state_dict().items()}
    return store.write(unit.kind, unit.config, arrays, record)


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
    `initialisation` fresh each from its own; `replayed` ones differ in nothing but the data (`retrain/starts.py`), and
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
        groups = groups_of(task, attributed) if self.scheme == "balanced" else None
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
        "versions": library_versions("torch"),
    }
    if plan.scheme == "balanced":  # a task's own groups decide which examples are drawn, and are not in its data
        groups = groups_of(task, plan.attributed(task))
        config["groups"] = None if groups is None else hashlib.sha256(groups.astype("<i8").tobytes()).hexdigest()[:20]
    at_once = task.trainings_at_once(choose_device(device))
    if plan.initialisation == REPLAYED:
        config["replay"], at_once = replay_source(task), 1
    payload = {"task": task_specification(task), "device": device, "at_once": at_once}
    return Unit(kind="retrain", config=config, call="retrain.train:train_one", payload=payload)


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


def train_one(store: Store, unit: Unit) -> Entry:
    """Retrains on one subset and stores the loss of every query, whatever split it belongs to."""
    task, device = task_from(unit.payload["task"]), choose_device(unit.payload["device"])
    config = unit.config
    attributed = subsets.attributed_indices(config["seed"], config["alpha_attribution"], len(task.train_data))
    kept = subsets.mask(
        config["seed"],
        config["subset"],
        config["alpha"],
        len(attributed),
        config["scheme"],
        config["stream"],
        groups_of(task, attributed) if config["scheme"] == "balanced" else None,
    )
    with one_thread(device), SHARED.measured() as seconds:
        if config["initialisation"] == REPLAYED:
            model = _replayed(task, attributed, kept, config["seed"], device)
            losses = task.losses(model, task.query_data, device)  # on the CPU: the device is done
        else:
            init_seed, order_seed = retrain_seeds(config)
            losses = task.retrained_losses(attributed[kept], init_seed=init_seed, order_seed=order_seed, device=device)
    record = {
        "seconds": seconds(),
        "first": _is_first(unit.payload["task"]),
        "device": describe_device(device),
        "code": code_fingerprint(),
        "num_kept": int(kept.sum()),
        "mean_loss": _finite(losses.mean()),
    }
    return store.write(unit.kind, unit.config, {"losses": losses.numpy()}, record)


_BEGUN: set[str] = set()  # tasks that this process has retrained


def _is_first(specification: str) -> bool:
    """Whether these seconds hold what a process takes to start: imports, a device's context, compilation."""
    first = specification not in _BEGUN
    _BEGUN.add(specification)
    return first


def _replayed(task: Task, attributed: np.ndarray, kept: np.ndarray, seed: int, device: torch.device) -> nn.Module:
    """The training on all attributed examples with the base model's seeds, those that are not kept struck out."""
    replay = replay_of(task, attributed, **checkpoint_seeds(seed, 0), device=device)
    with without_onednn():
        state = run_replay(replay, torch.from_numpy(kept).float().to(device))
    return replay.model(state)


def _finite(value: torch.Tensor) -> float | None:
    return float(value) if torch.isfinite(value) else None


@lru_cache
def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    import platform

    return f"CPU {platform.machine()}"
