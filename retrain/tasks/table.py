"""A table of one's own: columns of numbers and a label, with a network trained here or one that is trained already.

    tda-bench inspect --train train.csv --queries test.csv                   # a small network, trained here
    tda-bench inspect --model mlp.pt --train train.csv --queries test.csv    # yours: nothing is trained
    tda-bench lds --alpha 0.5 --train train.csv --queries test.csv           # which method is right on this table

A label that is a word or a whole number is a class, any other number a value to predict. A file of weights (a state
dict) is taken for a multi-layer perceptron; any other network is named by `--set table.network=mine.py:Net`.
"""

import copy
import itertools
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from retrain import plugins
from retrain.data.rows import LABEL_NAMES, class_numbers, filled, named_column, read_train_and_queries
from retrain.errors import UsageError, error_line
from retrain.examples import Examples, Indices
from retrain.losses import CrossEntropy, Loss, SquaredError
from retrain.models.weights import load_state, read_state, refuse_labels, refuse_other_order, trained_by_adamw
from retrain.task import Task, not_in_key, weights_digest

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "sigmoid": nn.Sigmoid, "silu": nn.SiLU}


@dataclass(frozen=True, kw_only=True)
class Table(Task):
    """Without a file of queries every fifth row is one. Without `model`, features are standardised."""

    protocols: ClassVar[tuple[str, ...]] = ("scratch", "given")
    cpu_threads: ClassVar[int] = 1
    method_settings: ClassVar[dict[str, dict[str, Any]]] = {"bif": {"minibatch": 64}}

    train_file: str = not_in_key("")
    query_file: str = not_in_key("")
    model: str = not_in_key("")  # a file of weights, which are in the key
    classes: str = ""  # the labels in the order of the model's outputs, "no,yes"; else sorted
    target: str = ""  # the label's column; else one that is called label, target, class or y
    network: str = ""  # FILE.py:CLASS that makes the model that `model` has the weights of
    activation: str = "relu"
    hidden: tuple[int, ...] = (32,)
    epochs: int = 40
    batch_size: int = 32
    learning_rate: float = 0.01
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        if self.model and not self.protocol:
            object.__setattr__(self, "protocol", "given")
        super().__post_init__()
        if self.activation not in ACTIVATIONS:
            raise ValueError(f'activation is "{self.activation}"; available: {", ".join(ACTIVATIONS)}')
        if (self.protocol == "given") != bool(self.model):
            raise ValueError("protocol `given` and --model belong together: a model that is trained already")

    # ---- data ----

    @cached_property
    def _frames(self) -> tuple[Any, Any]:
        return read_train_and_queries(self.train_file, self.query_file)

    @cached_property
    def _target(self) -> str:
        option = f"{self.name}.target"
        return named_column(self._frames[0], self.target, LABEL_NAMES, "label", self.train_file, option)

    @cached_property
    def _classes(self) -> list[Any]:
        """In the order of the model's outputs; empty where the target is a value."""
        labels = filled(self._frames[0], self._target, self.train_file)
        if self.classes:
            known = {str(one): one for one in labels.unique().tolist()}
            return [known.get(name.strip(), name.strip()) for name in self.classes.split(",")]
        return [] if labels.dtype.kind == "f" else sorted(labels.unique().tolist())

    @property
    def class_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(map(str, self._classes))

    @property
    def feature_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(str(name) for name in self._frames[0].columns if str(name) != self._target)

    @property
    def loss_function(self) -> Loss:  # type: ignore[override]
        return CrossEntropy() if self._classes else SquaredError()

    def _examples(self, frame: Any, path: str) -> Examples:
        if missing := [name for name in (*self.feature_names, self._target) if name not in frame.columns]:
            raise UsageError(f'"{path}" has no column "{missing[0]}", which the training data have')
        labels = filled(frame, self._target, path)
        targets: Any = class_numbers(labels, self._classes, path) if self._classes else labels
        found = Examples.of((frame[list(self.feature_names)], targets))
        if self.model:
            found = Examples(found.inputs.float(), found.targets)  # a file may have whole numbers alone
            self._refuse_unfit(found, path)
            return found
        return Examples((found.inputs - self._scale[0]) / self._scale[1], found.targets)

    @torch.no_grad()
    def _refuse_unfit(self, found: Examples, path: str) -> None:
        """One row goes through the model, before any unit fails at it."""
        count = found.inputs.shape[1]
        try:
            outputs = self._given.eval()(found.inputs[:1])
        except Exception as error:  # whatever a network of one's own raises
            linear = next((one for one in self._given.modules() if isinstance(one, nn.Linear)), None)
            takes = count if linear is None else linear.in_features
            reason = f"the model takes {takes} columns," if takes != count else f"{error_line(error, 200)}:"
            raise UsageError(
                f"{reason} {Path(path).name} has {count}; give it those that the model was trained on, in their order"
            ) from None
        refuse_labels(self.loss_function, outputs, found.targets, path, self.class_names if self.classes else ())

    @cached_property
    def _scale(self) -> tuple[Tensor, Tensor]:
        inputs = Examples(
            (self._frames[0][list(self.feature_names)]), torch.zeros(len(self._frames[0]))
        ).inputs.double()
        deviation = inputs.std(0)
        return inputs.mean(0).float(), torch.where(deviation > 0, deviation, torch.ones_like(deviation)).float()

    def load_train_data(self) -> Examples:
        return self._examples(self._frames[0], self.train_file)

    def load_query_data(self) -> Examples:
        return self._examples(self._frames[1], self.query_file or self.train_file)

    @property
    def description(self) -> str:
        return f"table {Path(self.train_file).name}"

    # ---- model ----

    def key_files(self) -> tuple[Path, ...]:
        return (*super().key_files(), *([Path(self.network.partition(":")[0])] if self.network else []))

    def given_weights(self) -> str:
        return weights_digest(self._given.state_dict()) if self.model else ""

    @cached_property
    def _given(self) -> nn.Module:
        state = read_state(self.model)
        if not self.network:
            return perceptron_of(state, ACTIVATIONS[self.activation], self.model)
        model = network_of(self.network)
        load_state(model, state, self.model)
        return model.float()

    def build_model(self, seed: int) -> nn.Module:
        if self.model:
            return copy.deepcopy(self._given)
        outputs = len(self._classes) or 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return perceptron([len(self.feature_names), *self.hidden, outputs], ACTIVATIONS[self.activation])

    def train_base(self, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        if self.model:
            model = self.build_model(init_seed).to(device).eval()
            refuse_other_order(self, model, device)
            return model
        return super().train_base(init_seed=init_seed, order_seed=order_seed, device=device)

    def train(self, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        if self.model:
            raise UsageError(
                "how the model of --model was trained is not known, so methods cannot be judged at it; leave --model "
                "out to have one trained here, or write a task with a `train`"
            )
        model, rates = self.build_model(init_seed), {"lr": self.learning_rate, "weight_decay": self.weight_decay}
        return trained_by_adamw(self, model.train(), indices, order_seed, device, **rates).eval()


def perceptron(sizes: list[int], activation: type[nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        layers += [*([activation()] if number else []), nn.Linear(inputs, outputs)]
    return nn.Sequential(*layers)


def perceptron_of(state: dict[str, Tensor], activation: type[nn.Module], path: str) -> nn.Module:
    """The multi-layer perceptron whose weights and biases these are, in their order."""
    weights = [value for value in state.values() if value.dim() == 2]
    biases = [value for value in state.values() if value.dim() == 1]
    sizes = [weights[0].shape[1], *(weight.shape[0] for weight in weights)] if weights else []
    fits = [weight.shape[1] for weight in weights] == sizes[:-1] and [len(bias) for bias in biases] == sizes[1:]
    if not weights or not fits or len(weights) + len(biases) != len(state):
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in list(state.items())[:6])
        raise UsageError(
            f'"{path}" is no multi-layer perceptron of linear layers ({shapes}); name the network that it belongs to: '
            "--set table.network=mine.py:Net"
        )
    model = perceptron(sizes, activation)
    model.load_state_dict(dict(zip(model.state_dict(), state.values(), strict=True)))
    return model


def network_of(name: str) -> nn.Module:
    """What the class FILE.py:CLASS makes without arguments."""
    network = plugins.find("retrain.tasks", "network", nn.Module, name)
    try:
        return network()
    except Exception as error:  # whatever a network of one's own raises
        raise UsageError(f'network "{name}" cannot be made ({error_line(error, 200)})') from None
