"""Retraining without chosen examples: what really becomes of some queries when exactly these are left out.

The ground truth of `retrain/train.py` leaves out at random; here whoever asks says what. A unit is one retraining on
the attributed examples but for a given set, and its entry has the losses (and, where a classification is asked for
them, the margins) of the queries that were asked about. The key holds a digest of the set, so two methods that name the
same examples share the retraining, and its noise: order seeds follow from the set as well.
"""

import base64
import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from retrain.errors import UsageError
from retrain.examples import Examples
from retrain.jobs import Unit
from retrain.source import code_fingerprint, source_fingerprint
from retrain.store import Entry, Store
from retrain.subsets import Initialisation, attributed_indices, derived_seed
from retrain.task import Split, Task
from retrain.train import one_thread
from retrain.units import SHARED, choose_device, describe_device, task_from, task_specification, write_entry

_REMOVAL_STREAM, _REMOVAL_INITIAL_STREAM = 25, 26
KIND_OF_REMOVAL = "removal"


@dataclass(frozen=True, kw_only=True)
class RemovalPlan:
    """Among which examples something is removed, and which queries are looked at afterwards."""

    seed: int
    alpha_attribution: float
    split: Split = "report"
    max_queries: int | None = None
    initialisation: Initialisation = "shared"

    def attributed(self, task: Task) -> np.ndarray:
        """(n,) indices into the training set: what a model is retrained on when nothing is removed."""
        return attributed_indices(self.seed, self.alpha_attribution, len(task.train_data))

    def query_indices(self, task: Task) -> np.ndarray:
        return task.query_indices(self.split)[: self.max_queries]


def removal_units(
    task: Task, plan: RemovalPlan, wanted: Sequence[tuple[np.ndarray, Sequence[int]]], device: str, margins: bool
) -> list[Unit]:
    """Of every set its replicates, in order. A set: positions among the attributed examples; none is the reference.

    margins: of a classification, beside the losses. A task that trains several models side by side does so for losses
    alone.
    """
    known = {
        "task": task.config,
        "seed": plan.seed,
        "alpha_attribution": plan.alpha_attribution,
        "split": plan.split,
        "num_queries": len(plan.query_indices(task)),
        "initialisation": plan.initialisation,
        "margins": margins,
        "versions": task.versions,
        "source": source_fingerprint(__name__),
    }
    at_once = 1 if margins else task.trainings_at_once(choose_device(device))
    payload = {"task": task_specification(task), "device": device, "at_once": at_once}
    units = []
    for removed, replicates in wanted:
        packed = _packed(removed, len(plan.attributed(task)))
        digest = hashlib.sha256(packed).hexdigest()[:32]
        text = base64.b64encode(zlib.compress(packed)).decode()
        for replicate in replicates:
            config = {**known, "num_removed": len(removed), "removed": digest, "replicate": replicate}
            call = "retrain.removal:retrain_without"
            units.append(Unit(KIND_OF_REMOVAL, config, call, {**payload, "removed": text}))
    return units


def _packed(removed: np.ndarray, n: int) -> bytes:
    """The set as a bit an attributed example: the same whatever the order it was named in."""
    gone = np.zeros(n, dtype=bool)
    gone[removed] = True
    if gone.sum() != len(removed):
        raise ValueError("an example is removed twice; expected every position once")
    if gone.all():
        raise UsageError(f"all {n} attributed examples would be removed; nothing is left to retrain on")
    return np.packbits(gone).tobytes()


def removal_seeds(config: dict[str, Any]) -> tuple[int, int]:
    """(init_seed, order_seed) of one such retraining."""
    parts = [config["seed"], config["replicate"], int(config["removed"][:12], 16)]
    fresh = config["initialisation"] == "fresh"
    init_seed = derived_seed(*parts, _REMOVAL_INITIAL_STREAM) if fresh else config["seed"]
    return init_seed, derived_seed(*parts, _REMOVAL_STREAM)


def retrain_without(store: Store, unit: Unit) -> Entry:
    """Retrains, and stores what became of the queries."""
    config, payload = unit.config, unit.payload
    task, device = task_from(payload["task"]), choose_device(payload["device"])
    attributed = attributed_indices(config["seed"], config["alpha_attribution"], len(task.train_data))
    packed = zlib.decompress(base64.b64decode(payload["removed"]))
    gone = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=len(attributed)).astype(bool)
    init_seed, order_seed = removal_seeds(config)
    with one_thread(device), SHARED.measured() as seconds:
        if config["margins"]:
            queries = _queries(payload["task"], config["split"], config["num_queries"])
            model = task.train(attributed[~gone], init_seed=init_seed, order_seed=order_seed, device=device)
            arrays = outcomes(task, model, queries, device)
        else:
            losses = task.retrained_losses(attributed[~gone], init_seed=init_seed, order_seed=order_seed, device=device)
            asked = task.query_indices(config["split"])[: config["num_queries"]]
            arrays = {"losses": losses.numpy()[asked]}
    record = {"seconds": seconds(), "device": describe_device(device), "code": code_fingerprint()}
    return write_entry(store, unit, task, arrays, record)


@lru_cache(maxsize=4)
def _queries(specification: str, split: Split, count: int) -> Examples:
    """Selected once a process: a task may keep them on the device for as long as they live."""
    task = task_from(specification)
    return task.query_data.select(task.query_indices(split)[:count])


def outcomes(task: Task, model: nn.Module, queries: Examples, device: torch.device) -> dict[str, np.ndarray]:
    """losses (q,); margins (q,): the label's logit less the best other, negative where the prediction is wrong."""
    logits = _logits(task, model, queries, device).float().cpu()
    losses = task.loss_function.per_example(logits, queries.targets)
    index = queries.targets[:, None]
    others = logits.scatter(1, index, -torch.inf).amax(1)
    margins = logits.gather(1, index)[:, 0] - others
    return {"losses": losses.numpy(), "margins": margins.numpy()}


@torch.no_grad()
def _logits(task: Task, model: nn.Module, queries: Examples, device: torch.device) -> Tensor:
    """As the task itself makes them for its losses, where it has a way of its own."""
    if hasattr(task, "logits"):
        return task.logits(model, queries, device)
    model.eval()
    return torch.cat([model(inputs.to(device)) for inputs, _ in queries.batches(task.eval_batch_size)])


def stacked(entries: Sequence[Entry], name: str) -> np.ndarray:
    """(replicates, queries) of the replicates of one set."""
    return np.stack([entry.arrays[name] for entry in entries])
