"""BIF converges to its closed form: on linear regression, on damped logistic regression, and on Gaussians.

    python -m pytest tests/baselines/test_bif_exact.py

A chain on four parameters mixes slowly however fast the code is, so the problems here hold many copies of one
regression in one model: replica r has weights of its own, and example (i, r) looks at them alone. The replicas are
independent chains, and one ordinary run of the method gives thousands of draws: its traces of (i, r) and (j, r) are
those of example i and query j in chain r.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from baselines.bif.covariance import covariance
from baselines.bif.method import BIF
from baselines.bif.sampler import FRICTION, RMSPROP_STABILITY, SAMPLERS, Position
from retrain.examples import Examples, Indices
from retrain.losses import CrossEntropy, SquaredError
from retrain.task import Task
from tests.helpers.problems import problem_of

REPLICAS, DRAWS = 500, 40  # 20,000 draws
NUM_TRAIN, NUM_QUERIES = 8, 3


class Replicas(nn.Module):
    """(batch, dimension + 1) inputs, the last column naming the replica -> (batch, outputs)."""

    def __init__(self, solution: Tensor, classes: bool):
        super().__init__()
        self.weights = nn.Parameter(solution.float().repeat(REPLICAS, 1))  # (replicas, dimension)
        self.classes = classes

    def forward(self, inputs: Tensor) -> Tensor:
        chosen = nn.functional.embedding(inputs[:, -1].long(), self.weights)
        value = (chosen * inputs[:, :-1]).sum(1, keepdim=True)
        return torch.cat([torch.zeros_like(value), value], 1) if self.classes else value


@dataclass(frozen=True, kw_only=True)
class Replicated(Task):
    """One regression, REPLICAS times. Inputs are white, so that every direction mixes alike."""

    dimension: int = 3

    @cached_property
    def design(self) -> tuple[Tensor, Tensor]:
        """(train + queries, dimension) inputs and their targets, in double precision."""
        generator = np.random.default_rng(5)
        inputs = generator.normal(size=(NUM_TRAIN + NUM_QUERIES, self.dimension))
        basis, _ = np.linalg.qr(inputs[:NUM_TRAIN])
        inputs[:NUM_TRAIN] = basis * NUM_TRAIN**0.5  # the mean outer product is the identity
        return torch.from_numpy(inputs), self.draw_targets(torch.from_numpy(inputs), generator)

    def draw_targets(self, inputs: Tensor, generator: np.random.Generator) -> Tensor:
        raise NotImplementedError

    def mean_loss_minimum(self) -> Tensor:
        """Newton's method on the mean training loss: where its gradient vanishes, and with it the potential's."""
        inputs, targets = (values[:NUM_TRAIN] for values in self.design)
        weights = torch.zeros(self.dimension, dtype=torch.float64)
        loss: Callable[[Tensor], Tensor] = lambda w: self.losses_at(inputs, targets, w).mean()  # noqa: E731
        for _ in range(30):
            gradient = torch.func.grad(loss)(weights)
            weights = weights - torch.linalg.solve(torch.func.hessian(loss)(weights), gradient)
        assert torch.func.grad(loss)(weights).abs().max() < 1e-10
        return weights

    def losses_at(self, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """(..., examples) at weights (..., dimension)."""
        raise NotImplementedError

    def _repeat(self, chosen: slice) -> Examples:
        inputs, targets = (values[chosen] for values in self.design)
        replica = torch.arange(REPLICAS).repeat_interleave(len(inputs))[:, None]
        targets = targets.float() if isinstance(self.loss_function, SquaredError) else targets.long()
        return Examples(torch.cat([inputs.float().repeat(REPLICAS, 1), replica], 1), targets.repeat(REPLICAS))

    def load_train_data(self) -> Examples:
        return self._repeat(slice(0, NUM_TRAIN))

    def load_query_data(self) -> Examples:
        return self._repeat(slice(NUM_TRAIN, None))

    def build_model(self, seed: int) -> nn.Module:
        return Replicas(self.mean_loss_minimum(), isinstance(self.loss_function, CrossEntropy)).eval()

    def train(self, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        return self.build_model(init_seed)

    # ---- what the answer must be ----

    def derivatives(self) -> tuple[Tensor, Tensor]:
        """Every example's gradient (examples, d) and Hessian (examples, d, d) at the checkpoint, queries last."""
        single = lambda weights: self.losses_at(*self.design, weights)  # noqa: E731
        weights = self.mean_loss_minimum()
        return torch.func.jacfwd(single)(weights), torch.func.hessian(single)(weights)

    def precision(self, n_beta: float, gamma: float) -> Tensor:
        """n_beta H + gamma I."""
        return n_beta * self.derivatives()[1][:NUM_TRAIN].mean(0) + gamma * torch.eye(
            self.dimension, dtype=torch.float64
        )

    def expansion(self, covariance: Tensor) -> Tensor:
        """(queries, train): -g_phi S g_i - tr(H_phi S H_i S) / 2, the terms of eq:bif_laplace_expansion."""
        gradients, hessians = self.derivatives()
        first = gradients @ covariance @ gradients.T
        scaled = hessians @ covariance
        second = 0.5 * torch.einsum("aij,bji->ab", scaled, scaled)
        return -(first + second)[NUM_TRAIN:, :NUM_TRAIN]


@dataclass(frozen=True, kw_only=True)
class Linear(Replicated):
    loss_function: ClassVar = SquaredError()

    def draw_targets(self, inputs: Tensor, generator: np.random.Generator) -> Tensor:
        return inputs.sum(1) + torch.from_numpy(generator.normal(size=len(inputs)))

    def losses_at(self, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return 0.5 * (weights @ inputs.T - targets).square()


@dataclass(frozen=True, kw_only=True)
class Logistic(Replicated):
    loss_function: ClassVar = CrossEntropy()

    def draw_targets(self, inputs: Tensor, generator: np.random.Generator) -> Tensor:
        return (torch.sigmoid(inputs.sum(1)) > torch.from_numpy(generator.uniform(size=len(inputs)))).double()

    def losses_at(self, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return nn.functional.softplus((1 - 2 * targets) * (weights @ inputs.T))

    def by_quadrature(self, n_beta: float, gamma: float) -> Tensor:
        """(queries, train): BIF by summing the localised posterior over a grid, with no expansion at all."""
        minimum, root = self.mean_loss_minimum(), torch.linalg.inv(self.precision(n_beta, gamma)).diagonal().sqrt()
        axes = [centre + width * torch.linspace(-6, 6, 49, dtype=torch.float64) for centre, width in zip(minimum, root)]
        weights = torch.cartesian_prod(*axes)
        losses = self.losses_at(*self.design, weights)  # (points, examples)
        potential = n_beta * losses[:, :NUM_TRAIN].mean(1) + gamma / 2 * (weights - minimum).square().sum(1)
        mass = torch.softmax(-potential, 0)[:, None]
        centred = losses - (mass * losses).sum(0)
        return -(centred[:, NUM_TRAIN:].T @ (mass * centred[:, :NUM_TRAIN]))


def traces_by_replica(
    task: Replicated, folder: Path, seed: int, n_beta: float, gamma: float, step_size: float, sampler: str
) -> Tensor:
    """(replicas, draws, train + queries) losses: one run of the method."""
    curvature = float(torch.linalg.eigvalsh(task.precision(n_beta, gamma))[-1])
    # Draws are half a relaxation time apart.
    thinning = {"sgld": round(1 / (step_size * curvature)), "sghmc": 16}[sampler]
    method = BIF(
        sampler=sampler, chains=1, draws=DRAWS, burn_in=8, thinning=thinning, step_size=step_size, gamma=gamma,
        n_beta=n_beta * REPLICAS, minibatch=NUM_TRAIN * REPLICAS, batch_size=10**6, keep_traces=True,
    )  # fmt: skip
    attribution = method.score(problem_of(task, folder, task.build_model(0), seed=seed), None)
    traces = attribution.arrays["loss_traces"][0].double()  # (draws, (train, then queries) of every replica)
    train, queries = traces.split([NUM_TRAIN * REPLICAS, NUM_QUERIES * REPLICAS], dim=1)
    shape = (DRAWS, REPLICAS, -1)
    own = -covariance(queries[None, :, :NUM_QUERIES], train[None, :, :NUM_TRAIN], "pooled")[0]
    torch.testing.assert_close(attribution.scores[:NUM_QUERIES, :NUM_TRAIN].double(), own, rtol=1e-3, atol=1e-6)
    return torch.cat([train.reshape(shape), queries.reshape(shape)], -1).transpose(0, 1)


def bif(traces: Tensor) -> Tensor:
    """(queries, train), over all draws of these replicas."""
    return -covariance(traces[..., NUM_TRAIN:], traces[..., :NUM_TRAIN], "pooled")[0]


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def error_slope(runs: list[Tensor], expected: Tensor) -> float:
    """d log error / d log draws from 1,250 to 20,000 draws: errors of disjoint groups of replicas, averaged."""
    sizes, errors, weights = [], [], []
    for groups in (16, 8, 4, 2, 1):
        size = REPLICAS // groups
        parts = [traces[g * size : (g + 1) * size] for traces in runs for g in range(groups)]
        sizes.append(size * DRAWS)
        errors.append(np.sqrt(np.mean([relative_error(bif(part), expected) ** 2 for part in parts])))
        weights.append(len(parts) ** 0.5)
    return float(np.polyfit(np.log(sizes), np.log(errors), 1, w=weights)[0])


@pytest.mark.parametrize("sampler", ["sgld", "sghmc"])
def test_linear_regression(sampler: str, tmp_path: Path) -> None:
    """Losses quadratic in the weights: both terms of the expansion are all there is."""
    task, n_beta, gamma = Linear(), 20.0, 4.0
    precision = task.precision(n_beta, gamma)
    step_size = 0.05 / float(precision[0, 0])
    # What the step's length adds to the variance is known, and small beside 5 %.
    shrinkage = {"sgld": 4.0, "sghmc": 4 * (2 - FRICTION)}[sampler]
    discretised = torch.linalg.inv(precision - step_size / shrinkage * precision @ precision)
    runs = [traces_by_replica(task, tmp_path, seed, n_beta, gamma, step_size, sampler) for seed in (0, 1)]
    for traces in runs:
        assert relative_error(bif(traces), task.expansion(torch.linalg.inv(precision))) < 0.05
    assert abs(error_slope(runs, task.expansion(discretised)) + 0.5) < 0.15


def test_damped_logistic_regression(tmp_path: Path) -> None:
    """Against the posterior summed over a grid, and against the expansion where the posterior is narrow."""
    task, n_beta, gamma = Logistic(), 600.0, 30.0
    precision = task.precision(n_beta, gamma)
    exact, expansion = task.by_quadrature(n_beta, gamma), task.expansion(torch.linalg.inv(precision))
    step_size = 0.04 / float(torch.linalg.eigvalsh(precision)[-1])
    runs = [traces_by_replica(task, tmp_path, seed, n_beta, gamma, step_size, "sghmc") for seed in range(4)]
    for traces in runs:
        assert relative_error(bif(traces), exact) < 0.05
        assert relative_error(bif(traces), expansion) < 0.05
    assert abs(error_slope(runs, exact) + 0.5) < 0.15


# ---- Gaussians, at steps so long that the discretisation shows ----

CURVATURES = torch.tensor([0.5, 2.0, 5.0, 9.0])  # of the loss; gamma adds 1


def stationary(
    sampler: str, step_size: float, num_steps: int, gradient_noise: float = 0.0, num_chains: int = 3000
) -> Tensor:
    """The four coordinates' variances, over chains and the last half of the steps."""
    position = Position([torch.zeros(num_chains, 4)], [torch.zeros(num_chains, 4)])
    generator = torch.Generator().manual_seed(1)
    squares, count = torch.zeros(4), 0
    for step in range(num_steps):
        gradient = position.parameters[0] * CURVATURES
        if gradient_noise:
            gradient = gradient + gradient_noise * torch.randn(num_chains, 4, generator=generator)
        SAMPLERS[sampler](position, [gradient], 1.0, step_size, generator)
        if step >= num_steps // 2 and step % 10 == 0:
            squares, count = squares + position.parameters[0].square().mean(0), count + 1
    return squares / count


@pytest.mark.parametrize("sampler", ["sgld", "sghmc"])
def test_stationary_variance_is_the_discretised_chains_own(sampler: str) -> None:
    """Every coordinate within 3 % of the autoregression's closed form, which is up to a third off the posterior's."""
    step_size, precision = 0.1, CURVATURES + 1
    shrinkage = {"sgld": step_size * precision / 4, "sghmc": step_size * precision / (4 * (2 - FRICTION))}[sampler]
    expected = 1 / (precision * (1 - shrinkage))
    found = stationary(sampler, step_size, num_steps=1200)
    assert (found / expected - 1).abs().max() < 0.03
    assert (found * precision - 1).abs().max() > 0.1, "a step this long shows"


def test_rmsprop_sgld_keeps_the_target_its_docstring_names() -> None:
    """Under minibatch noise the metric is steady, G = 1 / (stability + sqrt(E gradient^2)), and the chain linear:

    w <- (1 - a p) w - a s z + N(0, 2 a) with a = step_size G / 2, p = curvature + gamma, s the gradient's noise.
    """
    step_size, noise, precision = 0.1, 30.0, CURVATURES + 1
    variance = 1 / precision
    for _ in range(20):  # the metric depends, weakly, on the variance
        a = step_size / 2 / (RMSPROP_STABILITY + (noise**2 + CURVATURES**2 * variance).sqrt())
        variance = (2 * a + (a * noise) ** 2) / (1 - (1 - a * precision) ** 2)
    found = stationary("rmsprop_sgld", step_size, num_steps=4000, gradient_noise=noise, num_chains=800)
    assert (found / variance - 1).abs().max() < 0.03
    moving = stationary("rmsprop_sgld", 0.002, num_steps=4000, num_chains=400)
    assert (moving * precision).min() > 1.2, "without noise the metric moves, and the target is another (documented)"
