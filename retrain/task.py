"""Task: the one interface of every experiment: its data, its model, and how that model is trained.

A task is one file in `retrain/tasks/`; the file's name is its name on the command line, and it is imported only when
asked for. Its dataclass fields are its configuration and part of every cache key, except those marked `not_in_key`
(folders, and whatever else does not change a result).

Seeds. `init_seed` decides the initial weights, `order_seed` everything random during training (order, augmentation).
The experiment's seed is every model's init_seed, so the retrained models start where the base model started;
replicates of a subset differ in order_seed alone.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from retrain.errors import UsageError
from retrain.examples import Batch, Examples, Indices
from retrain.losses import CrossEntropy, Loss, mean_over_tokens
from retrain.plugins import plugin_name
from retrain.source import OURS, KeyedPlugin

Split = Literal["tune", "report", "all"]
TRAINING = ("retrain.train",)  # the code that turns a task into ground truth, with the seeds and subsets it imports


def not_in_key(default: Any = MISSING) -> Any:
    """A field that cannot change a result (a folder, say) and so stays out of every cache key."""
    return field(default=default, metadata={"key": False})


@dataclass(frozen=True, kw_only=True)
class Task(KeyedPlugin, ABC):
    version: ClassVar[int] = 1  # raised when its ground truth would change
    loss_function: ClassVar[Loss] = CrossEntropy()
    protocols: ClassVar[tuple[str, ...]] = ("scratch",)  # ways of retraining; the first is the default
    default_alpha_attribution: ClassVar[float] = 1.0
    default_replicates: ClassVar[int] = 1
    eval_batch_size: ClassVar[int] = 500
    # CPU threads for scoring; 0 leaves it to torch. On tensors of a few kilobytes two threads wait for each other more
    # than they work, the more so when something else runs beside them.
    cpu_threads: ClassVar[int] = 0
    # What works on this task, per method; chosen on `tune` queries. `--set method.option=value` overrides it.
    method_settings: ClassVar[dict[str, dict[str, Any]]] = {}

    pretrained: ClassVar[bool] = False  # models start from given weights: no seed decides them
    class_names: ClassVar[tuple[str, ...]] = ()  # of a classification task, where they are more than numbers
    feature_names: ClassVar[tuple[str, ...]] = ()  # of the columns of a table
    group_name: ClassVar[str] = "class"  # what one of `groups` is, in tables

    protocol: str = ""

    def __post_init__(self) -> None:
        if not self.protocol:
            object.__setattr__(self, "protocol", self.protocols[0])
        if self.protocol not in self.protocols:
            raise ValueError(
                f'unknown protocol "{self.protocol}" for task {self.name}; available: {", ".join(self.protocols)}'
            )

    # ---- what a task provides ----

    @abstractmethod
    def load_train_data(self) -> Examples:
        """The whole training set, always in the same order."""

    @abstractmethod
    def load_query_data(self) -> Examples:
        """Every query, always in the same order; `query_indices` splits them."""

    @abstractmethod
    def build_model(self, seed: int) -> nn.Module:
        """The freshly initialised model, on the CPU; the same seed gives the same weights. model(inputs) -> outputs."""

    def train(self, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        """The model retrained on these training examples under `self.protocol`; in eval mode, on `device`.

        Needed only where methods are judged; a task without it says which examples matter to the model it builds.
        """
        raise UsageError(
            f"task {self.name} has no `train`; `inspect` and `scores` need none, but to judge methods, models are "
            "retrained: write one (bench/OWN_DATA.md)"
        )

    def train_base(self, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        """The checkpoint the methods look at: by default the same training on the whole training set.

        Without a `train` it is what `build_model` gives, which then loads the weights.
        """
        if type(self).train is Task.train:
            return self.build_model(init_seed).to(device).eval()
        return self.train(np.arange(len(self.train_data)), init_seed=init_seed, order_seed=order_seed, device=device)

    def retrained_losses(self, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> Tensor:
        """Every query's loss after `train` on these examples, (queries,) float32 on the CPU."""
        model = self.train(indices, init_seed=init_seed, order_seed=order_seed, device=device)
        return self.losses(model, self.query_data, device)

    def plain(self) -> "Task":
        """The same task, retrained one by one without what makes it faster at the price of other roundings."""
        return self

    def trainings_at_once(self, device: torch.device) -> int:
        """How many threads may call `retrained_losses` side by side in one process, to fill one device."""
        return 1

    def tune_queries(self) -> np.ndarray:
        """The queries that settings may be chosen on, never reported: by default every fifth."""
        return np.arange(0, len(self.query_data), 5)

    def groups(self) -> np.ndarray | None:
        """(training examples,) int: the kind of each, such as its class or its source; None where there are none.

        Balanced subsets keep every group's share, and LDS within groups asks what is known beyond them.
        """
        if self.train_data.groups is not None:
            return self.train_data.groups.cpu().numpy()
        targets = self.train_data.targets
        labels = isinstance(self.loss_function, CrossEntropy) and targets.dim() == 1 and not targets.is_floating_point()
        return targets.cpu().numpy() if labels else None

    def image_shape(self) -> tuple[int, int, int] | None:
        """(channels, height, width) if inputs are images that can be shown; None otherwise."""
        return None

    def text_of(self, examples: Examples, index: int) -> str:
        """What people read of an example, such as its text; empty where its picture, features or tokens say it."""
        return ""

    # ---- what follows from it ----

    @property
    def name(self) -> str:
        return plugin_name(type(self))

    @property
    def versioned_name(self) -> str:
        """By which a number of this task is cited, cifar10-scratch/1, with the options that are not the usual ones."""
        told = [f for f in fields(self) if f.metadata.get("key", True) and f.name != "protocol"]
        changed = [f"{f.name}={getattr(self, f.name)}" for f in told if getattr(self, f.name) != f.default]
        version = f"{self.name.rpartition(':')[2]}-{self.protocol}/{self.version}"
        return f"{version} with {','.join(changed)}" if changed else version

    @property
    def description(self) -> str:
        """A few words for tables and captions; says so if a stand-in model or data is in use."""
        return self.name

    @cached_property
    def train_data(self) -> Examples:
        return self._checked(self.load_train_data, "training examples")

    @cached_property
    def query_data(self) -> Examples:
        return self._checked(self.load_query_data, "queries")

    def _checked(self, load: Callable[[], Any], what: str) -> Examples:
        """As Examples, whatever they came as; what no model can be trained on is named here and not inside of it."""
        try:
            found = Examples.of(load())
        except UsageError:
            raise
        except ValueError as error:
            raise UsageError(f"the {what} of task {self.name}: {error}") from None
        if not len(found):
            raise UsageError(f"task {self.name} has no {what}; expected at least one")
        for tensor in found.tensors():
            if tensor.is_floating_point() and not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
                row = int((~torch.isfinite(tensor)).reshape(len(tensor), -1).any(1).nonzero()[0])
                raise UsageError(
                    f"the {what} of task {self.name} hold what is not finite, first in row {row}, counted from 0; fill "
                    "in or drop missing values"
                )
        if isinstance(self.loss_function, CrossEntropy) and found.targets.is_floating_point():
            raise UsageError(
                f"the {what} of task {self.name} have real numbers as targets, but its loss is CrossEntropy, which "
                "expects whole numbers from 0; declare loss_function = SquaredError() where they are values"
            )
        return found

    def query_indices(self, split: Split) -> np.ndarray:
        everything = np.arange(len(self.query_data))
        if split == "all":
            return everything
        return self.tune_queries() if split == "tune" else np.setdiff1d(everything, self.tune_queries())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The measured loss (no smoothing, no augmentation): (batch,), or (batch, tokens) for sequences."""
        inputs, targets = batch
        return self.loss_function.per_example(model(inputs), targets)

    def resident(self, examples: Examples, device: torch.device) -> Examples:
        """The examples on the device, as `loss` takes them fastest, for what looks at them thousands of times."""
        return examples.to(device)

    def example_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """(batch,): a sequence's loss is the mean over its tokens."""
        return mean_over_tokens(self.loss(model, batch))

    @torch.no_grad()
    def losses(self, model: nn.Module, examples: Examples, device: torch.device) -> Tensor:
        """Every example's loss in eval mode: (len(examples),) float32 on the CPU."""
        model.eval()
        parts = [
            self.example_loss(model, (inputs.to(device), targets.to(device))).float()
            for inputs, targets in examples.batches(self.eval_batch_size)
        ]
        return torch.cat(parts).cpu()

    @cached_property
    def config(self) -> dict[str, Any]:
        """What identifies this task in a cache key: its name, key fields, source, and the bytes of its data."""
        in_key = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata.get("key", True)}
        named = {"name": self.name, "version": self.version, "source": self.source}
        weights = {"weights": self.weights_fingerprint} if self.weights_fingerprint else {}
        return {**named, **in_key, "data": self.data_fingerprint, **weights}

    @cached_property
    def weights_fingerprint(self) -> str:
        """Of the weights that models are given, wherever they came from; empty where a seed decides all of them."""
        return self.given_weights()

    def given_weights(self) -> str:
        """The same, of what `build_model` gives now."""
        if self.pretrained:
            return weights_digest(self.build_model(0).state_dict())
        if type(self).__module__.partition(".")[0] in OURS:
            return ""  # the suite's tasks say so themselves
        # What no seed changes was given, and may have been read from a file. A constant (zeros, ones) was not.
        with torch.random.fork_rng(devices=[]):
            one, other = (self.build_model(seed).state_dict() for seed in (0, 1))
        given = {
            name: value
            for name, value in one.items()
            if name in other
            and torch.equal(value, other[name])
            and value.numel() > 1
            and (value != value.flatten()[0]).any()
        }
        return weights_digest(given) if given else ""

    def key_modules(self) -> tuple[str, ...]:
        return (type(self).__module__, *TRAINING)

    @cached_property
    def data_fingerprint(self) -> str:
        """Of every training example and query."""
        return f"{self.train_data.fingerprint}-{self.query_data.fingerprint}"

    @property
    def scoring_config(self) -> dict[str, Any]:
        """What scores depend on beside the checkpoint's own weights: not how models are retrained on subsets."""
        named = {"name": self.name, "version": self.version, "source": self.source}
        return {**named, "data": self.data_fingerprint, "versions": self.versions}


def classifies(task: Task) -> bool:
    """Whether a query has one label, so that its prediction can flip."""
    targets = task.query_data.targets
    return isinstance(task.loss_function, CrossEntropy) and targets.dim() == 1 and not targets.is_floating_point()


def weights_digest(state: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:20]
