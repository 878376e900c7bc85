"""A planted problem with a closed-form answer: ridge regression, whose exact leave-one-out every method must rank."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from baselines.method import Problem, Retrained
from retrain import subsets
from retrain.examples import Examples, Indices
from retrain.losses import SquaredError
from retrain.replays.replay import Replay, TrainingState
from retrain.task import Task
from tests.helpers.problems import CPU, problem_of

RIDGE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Planted(Task):
    """y = x w + noise; the model is one linear layer, fitted exactly."""

    loss_function: ClassVar = SquaredError()

    num_train: int = 200
    num_queries: int = 25
    dimension: int = 4
    noise: float = 1.5

    @cached_property
    def _data(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = np.random.default_rng(7)
        n = self.num_train + self.num_queries
        inputs = generator.normal(size=(n, self.dimension))
        targets = inputs @ generator.normal(size=self.dimension) + self.noise * generator.normal(size=n)
        return torch.from_numpy(inputs).float(), torch.from_numpy(targets).float()

    def load_train_data(self) -> Examples:
        inputs, targets = self._data
        return Examples(inputs[: self.num_train], targets[: self.num_train])

    def load_query_data(self) -> Examples:
        inputs, targets = self._data
        return Examples(inputs[self.num_train :], targets[self.num_train :])

    def build_model(self, seed: int) -> nn.Module:
        model = nn.Linear(self.dimension, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        return model

    def train(self, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        data = self.train_data.select(indices)
        inputs = torch.cat([data.inputs, torch.ones(len(data), 1)], dim=1).double()
        hessian = inputs.T @ inputs + RIDGE * torch.eye(inputs.shape[1], dtype=torch.float64)
        solution = torch.linalg.solve(hessian, inputs.T @ data.targets.double())
        model = self.build_model(init_seed)
        with torch.no_grad():
            model.weight.copy_(solution[:-1][None])
            model.bias.copy_(solution[-1:])
        return model.to(device).eval()

    def exact_inclusion_effect(self) -> np.ndarray:
        """(queries, train): each query's loss with all examples minus its loss without example i."""
        everything = np.arange(self.num_train)

        def losses(indices: np.ndarray) -> np.ndarray:
            model = self.train(indices, init_seed=0, order_seed=0, device=CPU)
            return self.losses(model, self.query_data, CPU).double().numpy()

        full = losses(everything)
        return np.stack([full - losses(np.delete(everything, i)) for i in everything], axis=1)

    def replay(self, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> "PlantedReplay":
        return PlantedReplay(self, indices)

    def retrained(self, indices: np.ndarray, num_subsets: int, alpha: float = 0.8) -> Retrained:
        """Of subsets of the whole training set, whatever the order it is attributed in."""
        masks = subsets.masks(0, num_subsets, alpha, self.num_train, stream="learn")
        models = [self.train(np.flatnonzero(kept), init_seed=0, order_seed=0, device=CPU) for kept in masks]
        losses = torch.stack([self.losses(model, self.query_data, CPU) for model in models])
        return Retrained(masks[:, indices], losses.numpy())


class PlantedReplay(Replay):
    """The whole fit as one step: ridge regression with a weight for every example, in closed form."""

    num_steps = 1
    device = CPU

    def __init__(self, task: Planted, indices: Indices):
        self.task, self.data = task, task.train_data.select(indices)
        self.num_examples = len(self.data)

    def start(self) -> TrainingState:
        return {f"parameter/{name}": value.detach() for name, value in self.skeleton().named_parameters()}

    def members(self, step: int) -> torch.Tensor:
        return torch.arange(self.num_examples)

    def learning_rate(self, step: int) -> float:
        return 1.0

    def skeleton(self) -> nn.Module:
        return self.task.build_model(0).eval()

    def advance(self, state: TrainingState, step: int, weights: torch.Tensor) -> TrainingState:
        inputs = torch.cat([self.data.inputs, torch.ones(self.num_examples, 1)], dim=1).double()
        weighted = inputs * weights.double()[:, None]
        hessian = weighted.T @ inputs + RIDGE * torch.eye(inputs.shape[1], dtype=torch.float64)
        solution = torch.linalg.solve(hessian, weighted.T @ self.data.targets.double()).float()
        return {"parameter/weight": solution[:-1][None], "parameter/bias": solution[-1:]}


def make_problem(task: Planted, folder: Path, indices: np.ndarray | None = None, seed: int = 3) -> Problem:
    """With further checkpoints, all of them the one, and with retrained models to learn from."""
    return problem_of(
        task, folder, chosen=indices, seed=seed,
        checkpoint=lambda _: task.train_base(init_seed=0, order_seed=0, device=CPU),
        retrained=lambda: task.retrained(np.arange(task.num_train) if indices is None else indices, 800),
    )  # fmt: skip
