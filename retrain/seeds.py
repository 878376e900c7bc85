"""Which seed decides what: every random number of a training run follows from named parts through one of these.

Where retrained models start, and whether anything but the data differs between them:

- `shared`: from the base model's initial weights, each in an order of its own;
- `fresh`: from initial weights of its own as well;
- `replayed`: the base model's own training over again, initial weights, order, augmentation and number of steps, with
  the examples that are left out struck out of their batches (`retrain/replays`). Nothing is random, so a subset has one
  retraining and the noise ceiling is 1: this is what "the same seed" means for methods that differentiate a training.
"""

from typing import Any, Literal

import numpy as np

from retrain import subsets

Initialisation = Literal["shared", "fresh"]
INITIALISATIONS: tuple[Initialisation, ...] = ("shared", "fresh")
REPLAYED = "replayed"
STARTS = (*INITIALISATIONS, REPLAYED)

_BASE_STREAM, _SUBSET_STREAM, _CHECKPOINT_STREAM, _INITIAL_STREAM = 21, 22, 23, 24


def derived_seed(*parts: int) -> int:
    """A 32-bit seed from named parts; distinct parts give unrelated seeds."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def checkpoint_seeds(seed: int, number: int) -> dict[str, int]:
    """Of the base model (number 0), whose initial weights are the experiment's, and of further ones like it."""
    return {
        "init_seed": seed if number == 0 else derived_seed(seed, number, _CHECKPOINT_STREAM),
        "order_seed": derived_seed(seed, number, _BASE_STREAM),
    }


def retrain_seeds(config: dict[str, Any]) -> tuple[int, int]:
    """(init_seed, order_seed) of one retraining, from its unit's configuration."""
    parts = [config["seed"], config["subset"], config["replicate"], round(config["alpha"] * 1e6)]
    if config["stream"] != "report":
        parts.append(subsets.STREAMS[config["stream"]])
    fresh = config["initialisation"] == "fresh"
    return derived_seed(*parts, _INITIAL_STREAM) if fresh else config["seed"], derived_seed(*parts, _SUBSET_STREAM)
