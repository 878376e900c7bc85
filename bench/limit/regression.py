"""A logistic regression whose BIF and influence function are known, many copies of it in one model.

A chain of three parameters mixes slowly however fast the code is. So one model holds many copies of the regression,
each with weights of its own, and an example looks at those of its copy alone: the copies are independent chains, and
one run of the method has thousands of draws of one small posterior.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from retrain.errors import UsageError
from retrain.examples import Examples, Indices
from retrain.losses import CrossEntropy
from retrain.task import Task

NEWTON_STEPS = 40
LARGEST_NORM = 10.0  # of the minimum: beyond it lie separable classes, whose minimum is nowhere
GRID_POINTS, GRID_WIDTH = 49, 6.0  # of the posterior's grid: points an axis, standard deviations to each side


class CopiedRegression(nn.Module):
    """(batch, dimension + 1) inputs, the last column naming the copy -> (batch, 2) logits."""

    def __init__(self, solution: Tensor, copies: int):
        super().__init__()
        self.weights = nn.Parameter(solution.float().repeat(copies, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        own = nn.functional.embedding(inputs[:, -1].long(), self.weights)
        logit = (own * inputs[:, :-1]).sum(1, keepdim=True)
        return torch.cat([torch.zeros_like(logit), logit], 1)


@dataclass(frozen=True, kw_only=True)
class LogisticCopies(Task):
    """One logistic regression, `copies` times; inputs are white, so that every direction mixes alike."""

    loss_function: ClassVar = CrossEntropy()

    dimension: int = 3
    num_train: int = 16
    num_queries: int = 4
    copies: int = 1000
    data_seed: int = 5

    @cached_property
    def design(self) -> tuple[Tensor, Tensor]:
        """(train, then queries; dimension) inputs and their classes, in double precision."""
        generator = np.random.default_rng([self.data_seed, self.dimension])
        inputs = generator.normal(size=(self.num_train + self.num_queries, self.dimension))
        basis, _ = np.linalg.qr(inputs[: self.num_train])
        inputs[: self.num_train] = basis * self.num_train**0.5
        chances = 1 / (1 + np.exp(-inputs.sum(1)))
        classes = chances > generator.uniform(size=len(inputs))
        return torch.from_numpy(inputs), torch.from_numpy(classes).double()

    def losses_at(self, weights: Tensor) -> Tensor:
        """(..., examples) at weights (..., dimension)."""
        inputs, classes = self.design
        return nn.functional.softplus((1 - 2 * classes) * (weights @ inputs.T))

    @cached_property
    def minimum(self) -> Tensor:
        """Of the mean training loss, by Newton's method: there its gradient vanishes, and the localiser's with it."""
        weights = torch.zeros(self.dimension, dtype=torch.float64)
        assert self.design  # made here: a tensor that is first made inside a derivative stays there

        def mean_loss(at: Tensor) -> Tensor:
            return self.losses_at(at)[: self.num_train].mean()

        for _ in range(NEWTON_STEPS):
            step = torch.linalg.solve(torch.func.hessian(mean_loss)(weights), torch.func.grad(mean_loss)(weights))
            weights = weights - step
        if not float(torch.func.grad(mean_loss)(weights).norm()) < 1e-10 or float(weights.norm()) > LARGEST_NORM:
            raise UsageError(
                f"the classes of data_seed {self.data_seed} can be separated, or nearly: their mean loss has no "
                "minimum to stand at; take another seed or more training examples"
            )
        return weights

    # ---- as a task ----

    def _copied(self, chosen: slice) -> Examples:
        inputs, classes = (values[chosen] for values in self.design)
        copy = torch.arange(self.copies).repeat_interleave(len(inputs))[:, None]
        return Examples(torch.cat([inputs.float().repeat(self.copies, 1), copy], 1), classes.long().repeat(self.copies))

    def load_train_data(self) -> Examples:
        return self._copied(slice(0, self.num_train))

    def load_query_data(self) -> Examples:
        return self._copied(slice(self.num_train, None))

    def build_model(self, seed: int) -> nn.Module:
        return CopiedRegression(self.minimum, self.copies).eval()

    def train(self, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        return self.build_model(init_seed).to(device)

    # ---- what is known of it ----

    def hessian(self) -> Tensor:
        """Of the mean training loss at its minimum."""
        return torch.func.hessian(self.losses_at)(self.minimum)[: self.num_train].mean(0)

    def largest_precision(self, n_beta: float, damping: float) -> float:
        """Of the localised posterior, gamma being damping x n_beta."""
        return n_beta * (float(torch.linalg.eigvalsh(self.hessian())[-1]) + damping)

    def damped_influence(self, damping: float) -> Tensor:
        """(queries, train): -g_query (H + damping)^-1 g_train, this suite's sign."""
        gradients = torch.func.jacfwd(self.losses_at)(self.minimum)
        damped = self.hessian() + damping * torch.eye(self.dimension, dtype=torch.float64)
        scores = -gradients @ torch.linalg.solve(damped, gradients.T)
        return scores[self.num_train :, : self.num_train]

    def exact_bif(self, n_beta: float, damping: float) -> Tensor:
        """(queries, train): the covariance under the posterior summed over a grid, with neither chain nor expansion."""
        precision = n_beta * (self.hessian() + damping * torch.eye(self.dimension, dtype=torch.float64))
        widths = torch.linalg.inv(precision).diagonal().sqrt()
        steps = torch.linspace(-GRID_WIDTH, GRID_WIDTH, GRID_POINTS, dtype=torch.float64)
        points = torch.cartesian_prod(
            *(centre + width * steps for centre, width in zip(self.minimum, widths, strict=True))
        )
        losses = self.losses_at(points)
        away = (points - self.minimum).square().sum(1)
        potential = n_beta * losses[:, : self.num_train].mean(1) + damping * n_beta / 2 * away
        mass = torch.softmax(-potential, 0)[:, None]
        centred = losses - (mass * losses).sum(0)
        return -(centred[:, self.num_train :].T @ (mass * centred[:, : self.num_train]))


def relative_distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
