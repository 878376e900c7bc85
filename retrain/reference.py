"""Reference models: what methods look at where that is not the base model (`--reference attributed` or `subset`).

An influence is a derivative at a model, and LDS asks about models trained on subsets. A subset model is trained as the
plan's own are (alpha, scheme, protocol, initialisation), on further subsets of the stream that methods learn from:
model k is that of a datamodel's k-th retrain. An attributed model is trained on all attributed examples.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from retrain import subsets
from retrain.backends import without_onednn
from retrain.jobs.unit import Unit
from retrain.replays import replay_of
from retrain.replays.replay import run_replay
from retrain.source import code_fingerprint, source_fingerprint
from retrain.store import Entry, Store
from retrain.subsets import REPLAYED, checkpoint_seeds, retrain_seeds
from retrain.task import Task
from retrain.train import one_thread
from retrain.units import (
    SHARED,
    Plan,
    choose_device,
    describe_device,
    groups_in_key,
    groups_to_balance,
    task_from,
    task_specification,
    write_entry,
)

FULL, ATTRIBUTED, SUBSET = "full", "attributed", "subset"
REFERENCES = (FULL, ATTRIBUTED, SUBSET)
STREAM: subsets.Stream = "learn"  # nobody is judged on these subsets, and settings are not chosen on them


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A series of models, by number: of each its training examples, its seeds and its unit of work."""

    kind: str  # ATTRIBUTED or SUBSET
    seed: int
    alpha_attribution: float
    initialisation: str = "shared"
    alpha: float = 1.0  # share of the attributed examples that each model is trained on
    scheme: subsets.Scheme = "fixed"

    @classmethod
    def like(cls, kind: str, plan: Plan) -> "Reference":
        """Drawn and trained as this plan's own models are."""
        known = {name: getattr(plan, name) for name in ("seed", "alpha_attribution", "initialisation")}
        if kind == ATTRIBUTED:
            return cls(kind=kind, **known)
        return cls(kind=kind, alpha=plan.alpha, scheme=plan.scheme, **known)

    def attributed(self, task: Task) -> np.ndarray:
        return subsets.attributed_indices(self.seed, self.alpha_attribution, len(task.train_data))

    def kept(self, task: Task, number: int) -> np.ndarray:
        """(n,) bool: which of the attributed examples model `number` is trained on."""
        attributed = self.attributed(task)
        if self.kind == ATTRIBUTED:
            return np.ones(len(attributed), dtype=bool)
        groups = groups_to_balance(task, attributed, self.scheme)
        return subsets.mask(self.seed, number, self.alpha, len(attributed), self.scheme, STREAM, groups)

    def indices(self, task: Task, number: int) -> np.ndarray:
        """The same as indices into the training set."""
        return self.attributed(task)[self.kept(task, number)]

    def seeds(self, number: int) -> dict[str, int]:
        if self.initialisation == REPLAYED:
            return checkpoint_seeds(self.seed, 0)
        config = {"seed": self.seed, "subset": number, "replicate": 0, "alpha": self.alpha, "stream": STREAM}
        init_seed, order_seed = retrain_seeds({**config, "initialisation": self.initialisation})
        return {"init_seed": init_seed, "order_seed": order_seed}

    def config(self, task: Task, number: int) -> dict[str, Any]:
        """What decides model `number` beside the task: part of every key that rests on it."""
        groups = groups_in_key(task, self.attributed(task), self.scheme)
        return {**asdict(self), "number": number, "drawn_by": source_fingerprint(__name__), **groups}

    def unit(self, task: Task, number: int, device: str) -> Unit:
        config = {"task": task.config, "reference": self.config(task, number), "versions": task.versions}
        payload = {"task": task_specification(task), "device": device, "reference": asdict(self), "number": number}
        return Unit(kind="model", config=config, call="retrain.reference:train_reference", payload=payload)

    def train(self, task: Task, number: int, device: torch.device) -> nn.Module:
        seeds = self.seeds(number)
        if self.initialisation == REPLAYED:
            replay = replay_of(task, self.attributed(task), **seeds, device=device)
            with without_onednn():
                weights = torch.from_numpy(self.kept(task, number)).float().to(device)
                return replay.model(run_replay(replay, weights))
        return task.train(self.indices(task, number), **seeds, device=device)


def train_reference(store: Store, unit: Unit) -> Entry:
    task, device = task_from(unit.payload["task"]), choose_device(unit.payload["device"])
    with one_thread(device), SHARED.measured() as seconds:
        model = Reference(**unit.payload["reference"]).train(task, unit.payload["number"], device)
    record = {"device": describe_device(device), "code": code_fingerprint(), "seconds": seconds()}
    arrays = {name: value.detach().cpu().contiguous().numpy() for name, value in model.state_dict().items()}
    return write_entry(store, unit, task, arrays, record)
