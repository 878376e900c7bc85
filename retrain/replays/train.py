"""A retrain that replays the base model's training; `retrain/train.py` has the ordinary one."""

from typing import Any

import numpy as np
import torch

from retrain.backends import without_onednn
from retrain.jobs import Unit
from retrain.replays import replay_of
from retrain.replays.replay import run_replay
from retrain.store import Entry, Store
from retrain.subsets import checkpoint_seeds
from retrain.task import Task
from retrain.train import train_one


def train_replayed(store: Store, unit: Unit) -> Entry:
    return train_one(store, unit, replayed_losses)


def replayed_losses(
    task: Task, attributed: np.ndarray, kept: np.ndarray, config: dict[str, Any], device: torch.device
) -> torch.Tensor:
    """(queries,): after training on all attributed examples with the base model's seeds, those left out struck out."""
    replay = replay_of(task, attributed, **checkpoint_seeds(config["seed"], 0), device=device)
    with without_onednn():
        state = run_replay(replay, torch.from_numpy(kept).float().to(device))
    return task.losses(replay.model(state), task.query_data, device)
