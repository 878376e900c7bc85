"""Where retrained models start, and whether anything but the data differs between them.

- `shared`: from the base model's initial weights, each in an order of its own;
- `fresh`: from initial weights of its own as well;
- `replayed`: the base model's own training over again, initial weights, order, augmentation and number of steps, with
  the examples that are left out struck out of their batches (`retrain/replays`). Nothing is random, so a subset has one
  retraining and the noise ceiling is 1: this is what "the same seed" means for methods that differentiate a training.

The first two are in `retrain/seeds.py`, which counts as part of every task's code; this file does not.
"""

from retrain.seeds import INITIALISATIONS

REPLAYED = "replayed"
STARTS = (*INITIALISATIONS, REPLAYED)
