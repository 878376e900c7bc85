"""A classification task some of whose training labels are wrong, and known to be: everything else is the task's own.

    load_task("retrain.mislabelled:Mislabelled", of="digits", share=0.1, flip_seed=1)

A share of the training examples, drawn from `flip_seed`, gets another label, uniformly among the others; queries keep
theirs. The task behind it trains as it always does, on these labels, and under the same name, so that methods run with
the settings they have there; every key holds the labels that were used.
"""

import hashlib
import json
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrain.errors import UsageError
from retrain.examples import Examples
from retrain.plugins import plugin_reference
from retrain.task import TRAINING, Task, classifies, not_in_key
from retrain.tasks import load_task

_FLIP_STREAM = 41
# What a task says of itself in class variables; this one says what the task behind it does.
_AS_INSIDE = (
    "loss_function", "protocols", "default_alpha_attribution", "default_replicates", "eval_batch_size", "cpu_threads",
    "method_settings", "pretrained", "class_names", "libraries",
)  # fmt: skip


def flipped_labels(num_train: int, share: float, flip_seed: int) -> np.ndarray:
    """(training examples,) bool: whose label is wrong."""
    order = np.random.default_rng([_FLIP_STREAM, flip_seed]).permutation(num_train)
    return np.isin(np.arange(num_train), order[: max(1, round(share * num_train))])


def _asked_of(task: str, name: str) -> Any:
    """The method `name` of one of the two tasks behind this one."""
    return lambda self, *args, **options: getattr(getattr(self, task), name)(*args, **options)


@dataclass(frozen=True, kw_only=True)
class Mislabelled(Task):
    """`of` names the task, `of_options` are its options as JSON."""

    of: str = not_in_key("digits")  # its whole configuration is in the key
    of_options: str = not_in_key("{}")
    share: float = 0.1
    flip_seed: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"share is {self.share}; expected a fraction of the training examples, such as 0.1")
        for name in _AS_INSIDE:
            object.__setattr__(self, name, getattr(self.clean, name))
        object.__setattr__(self, "protocol", self.clean.protocol)
        if not classifies(self.clean):
            raise UsageError(f"task {self.of} has no class labels that could be wrong; take a classification")

    @cached_property
    def clean(self) -> Task:
        """The task with the labels it has."""
        options = json.loads(self.of_options)
        return load_task(self.of, **({**options, "protocol": self.protocol} if self.protocol else options))

    @cached_property
    def flipped(self) -> np.ndarray:
        """(training examples,) bool: whose label is wrong."""
        return flipped_labels(len(self.clean.train_data), self.share, self.flip_seed)

    @cached_property
    def targets(self) -> Tensor:
        """The labels that models are trained on."""
        targets = self.clean.train_data.targets.clone()
        classes = len(torch.unique(targets))
        generator = np.random.default_rng([_FLIP_STREAM, self.flip_seed, 1])
        steps = torch.from_numpy(generator.integers(1, classes, size=int(self.flipped.sum())))
        wrong = torch.from_numpy(self.flipped)
        targets[wrong] = (targets[wrong] + steps) % classes
        return targets

    @cached_property
    def inside(self) -> Task:
        """A task of its own with these labels; the clean one stays as it is."""
        made: Any = type(self.clean)(**{f.name: getattr(self.clean, f.name) for f in fields(self.clean)})
        if hasattr(made, "cifar10"):  # which trains on the labels of the official order; warm-up images keep theirs
            labels = made.cifar10.train_labels.clone()
            labels[torch.from_numpy(made.train_indices)] = self.targets
            made.__dict__["cifar10"] = replace(made.cifar10, train_labels=labels)
        # What was loaded is used: a file may have been edited since.
        made.__dict__["train_data"] = Examples(self.clean.train_data.inputs, self.targets)
        made.__dict__["query_data"] = self.clean.query_data
        return made

    # ---- a task ----

    @property
    def name(self) -> str:
        return self.clean.name

    @property
    def description(self) -> str:
        return f"{self.clean.description}, {self.share:.0%} of the labels wrong"

    def load_train_data(self) -> Examples:
        return Examples(self.clean.train_data.inputs, self.targets)

    def load_query_data(self) -> Examples:
        return self.clean.query_data

    tune_queries = _asked_of("clean", "tune_queries")
    image_shape = _asked_of("clean", "image_shape")
    key_files = _asked_of("clean", "key_files")
    given_weights = _asked_of("clean", "given_weights")
    build_model = _asked_of("inside", "build_model")
    train = _asked_of("inside", "train")
    train_base = _asked_of("inside", "train_base")
    retrained_losses = _asked_of("inside", "retrained_losses")
    trainings_at_once = _asked_of("inside", "trainings_at_once")
    loss = _asked_of("inside", "loss")
    losses = _asked_of("inside", "losses")
    resident = _asked_of("inside", "resident")

    def key_modules(self) -> tuple[str, ...]:
        return (type(self.clean).__module__, __name__, *TRAINING)

    @cached_property
    def data_fingerprint(self) -> str:
        digest = hashlib.sha256(np.ascontiguousarray(self.targets.numpy()).tobytes()).hexdigest()[:20]
        return f"{self.clean.data_fingerprint}-{digest}"

    @cached_property
    def config(self) -> dict[str, Any]:
        wrong = {"of": plugin_reference(type(self.clean)), "share": self.share, "flip_seed": self.flip_seed}
        return {**self.clean.config, "source": self.source, "data": self.data_fingerprint, "mislabelled": wrong}
