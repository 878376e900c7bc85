"""The code that trains: one model of a task, and every query's loss under it. Its source is in every retrain's key.

`retrain/units.py` says which models there are.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from retrain import subsets
from retrain.jobs.unit import Unit
from retrain.source import code_fingerprint
from retrain.store import Entry, Store
from retrain.subsets import retrain_seeds
from retrain.task import Task
from retrain.units import SHARED, choose_device, describe_device, groups_to_balance, task_from, write_entry


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


def train_checkpoint(store: Store, unit: Unit) -> Entry:
    task, device = task_from(unit.payload["task"]), choose_device(unit.payload["device"])
    started = time.perf_counter()
    with one_thread(device):
        model = task.train_base(init_seed=unit.config["init_seed"], order_seed=unit.config["order_seed"], device=device)
        losses = task.losses(model, task.query_data, device)
    mean = _finite(losses.mean())
    if mean is None:
        raise FloatingPointError(
            f"the base model's loss on the queries is {float(losses.mean())}: its training diverged, or the data holds "
            "what is not finite"
        )
    record = {"device": describe_device(device), "code": code_fingerprint(), "mean_query_loss": mean}
    record["seconds"] = time.perf_counter() - started
    arrays = {name: value.detach().cpu().contiguous().numpy() for name, value in model.state_dict().items()}
    return write_entry(store, unit, task, arrays, record)


def retrained_losses(
    task: Task, attributed: np.ndarray, kept: np.ndarray, config: dict[str, Any], device: torch.device
) -> torch.Tensor:
    """(queries,): after training on these of the attributed examples."""
    init_seed, order_seed = retrain_seeds(config)
    return task.retrained_losses(attributed[kept], init_seed=init_seed, order_seed=order_seed, device=device)


def train_one(store: Store, unit: Unit, measure: Callable[..., torch.Tensor] = retrained_losses) -> Entry:
    """Retrains on one subset and stores the loss of every query, whatever split it belongs to."""
    task, device = task_from(unit.payload["task"]), choose_device(unit.payload["device"])
    config = unit.config
    attributed = subsets.attributed_indices(config["seed"], config["alpha_attribution"], len(task.train_data))
    groups = groups_to_balance(task, attributed, config["scheme"])
    seed, subset, alpha = config["seed"], config["subset"], config["alpha"]
    kept = subsets.mask(seed, subset, alpha, len(attributed), config["scheme"], config["stream"], groups)
    with one_thread(device), SHARED.measured() as seconds:
        losses = measure(task, attributed, kept, config, device)
    record = {
        "seconds": seconds(), "first": _is_first(unit.payload["task"]), "device": describe_device(device),
        "code": code_fingerprint(), "num_kept": int(kept.sum()), "mean_loss": _finite(losses.mean()),
    }  # fmt: skip
    return write_entry(store, unit, task, {"losses": losses.numpy()}, record)


_BEGUN: set[str] = set()  # tasks that this process has retrained


def _is_first(specification: str) -> bool:
    """Whether these seconds hold what a process takes to start: imports, a device's context, compilation."""
    first = specification not in _BEGUN
    _BEGUN.add(specification)
    return first


def _finite(value: torch.Tensor) -> float | None:
    return float(value) if torch.isfinite(value) else None
