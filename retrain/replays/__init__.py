"""Which tasks' trainings can be replayed, and how to ask for one.

A task of one's own offers it by a method `replay(indices, *, init_seed, order_seed, device)` that returns a `Replay`.
Those of the suite's tasks lie here and not in the tasks' files: how a training is replayed decides nothing about the
ordinary ground truth, whose keys hold the tasks' source.
"""

from typing import Any

import torch

from retrain.errors import UsageError
from retrain.examples import Indices
from retrain.replays.replay import Replay
from retrain.replays.tasks import Cifar10Replay, DigitsReplay, TinyLMReplay
from retrain.source import source_fingerprint
from retrain.task import Task

REPLAYS: dict[str, Any] = {
    "cifar10": Cifar10Replay,
    "digits": DigitsReplay,
    "smooth_digits": DigitsReplay,
    "tinylm": TinyLMReplay,
}


def why_not_replayed(task: Task) -> str | None:
    """Why there is no replay of this task's training, or None."""
    if hasattr(task, "replay"):
        return None
    own = type(task).__module__.startswith("retrain.tasks.")  # not a subclass of somebody else
    if not own or task.name not in REPLAYS:
        return f"the training of task {task.name} cannot be replayed step by step; see retrain/replays"
    return REPLAYS[task.name].why_not(task) if hasattr(REPLAYS[task.name], "why_not") else None


def replay_of(
    task: Any, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device, **options: Any
) -> Replay:
    """The task's training on these examples."""
    if reason := why_not_replayed(task):
        raise UsageError(reason)
    make = task.replay if hasattr(task, "replay") else lambda *args, **kw: REPLAYS[task.name](task, *args, **kw)
    return make(indices, init_seed=init_seed, order_seed=order_seed, device=device, **options)


def replay_source(task: Task) -> str:
    """A fingerprint of the code that replays: part of the key of what it made."""
    return source_fingerprint("retrain.replays", "retrain.replays.train", type(task).__module__)
