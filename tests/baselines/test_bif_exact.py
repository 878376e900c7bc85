"""BIF converges to its closed form: on linear regression, on damped logistic regression, and on Gaussians.

    python -m pytest tests/baselines/test_bif_exact.py

A chain on three parameters mixes slowly however fast the code is, so the problems hold many copies of one regression in
one model, as `bench.evaluations.limit` has them. One ordinary run of the method gives thousands of draws: its traces of
(i, copy) and (j, copy) are those of example i and query j in one chain.
"""

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
from bench.evaluations.limit import CopiedRegression, LogisticCopies
from retrain.examples import Examples
from retrain.losses import SquaredError
from tests.helpers.problems import problem_of

COPIES, DRAWS = 500, 40  # 20,000 draws


class OneOutput(CopiedRegression):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs)[:, 1:]


@dataclass(frozen=True, kw_only=True)
class LinearCopies(LogisticCopies):
    """The same inputs with real targets: losses are quadratic in the weights."""

    loss_function: ClassVar = SquaredError()

    @cached_property
    def design(self) -> tuple[Tensor, Tensor]:
        inputs, _ = LogisticCopies(num_train=self.num_train, num_queries=self.num_queries).design
        noise = np.random.default_rng(5).normal(size=len(inputs))
        return inputs, inputs.sum(1) + torch.from_numpy(noise)

    def losses_at(self, weights: Tensor) -> Tensor:
        inputs, targets = self.design
        return 0.5 * (weights @ inputs.T - targets).square()

    def _copied(self, chosen: slice) -> Examples:
        return Examples(super()._copied(chosen).inputs, self.design[1][chosen].float().repeat(self.copies))

    def build_model(self, seed: int) -> nn.Module:
        return OneOutput(self.minimum, self.copies).eval()

    def expansion(self, covariance: Tensor) -> Tensor:
        """(queries, train): -g_phi S g_i - tr(H_phi S H_i S) / 2, the terms of eq:bif_laplace_expansion."""
        gradients, hessians = (of(self.losses_at)(self.minimum) for of in (torch.func.jacfwd, torch.func.hessian))
        scaled = hessians @ covariance
        second = 0.5 * torch.einsum("aij,bji->ab", scaled, scaled)
        return -(gradients @ covariance @ gradients.T + second)[self.num_train :, : self.num_train]


def largest_precision(task: LogisticCopies, n_beta: float, gamma: float) -> float:
    return n_beta * float(torch.linalg.eigvalsh(task.hessian())[-1]) + gamma


def traces_by_copy(task: LogisticCopies, folder: Path, seed: int, n_beta, gamma, step_size, sampler: str) -> Tensor:
    """(copies, draws, train + queries) losses: one run of the method."""
    # Draws are half a relaxation time apart.
    thinning = {"sgld": round(1 / (step_size * largest_precision(task, n_beta, gamma))), "sghmc": 16}[sampler]
    train, queries = task.num_train, task.num_queries
    method = BIF(
        sampler=sampler, chains=1, draws=DRAWS, burn_in=8, thinning=thinning, step_size=step_size, gamma=gamma,
        n_beta=n_beta * COPIES, minibatch=train * COPIES, batch_size=10**6, keep_traces=True,
    )  # fmt: skip
    attribution = method.score(problem_of(task, folder, task.build_model(0), seed=seed), None)
    traces = attribution.arrays["loss_traces"][0].double()  # (draws, (train, then queries) of every copy)
    of_train, of_queries = traces.split([train * COPIES, queries * COPIES], dim=1)
    own = -covariance(of_queries[None, :, :queries], of_train[None, :, :train], "pooled")[0]
    torch.testing.assert_close(attribution.scores[:queries, :train].double(), own, rtol=1e-3, atol=1e-6)
    shape = (DRAWS, COPIES, -1)
    return torch.cat([of_train.reshape(shape), of_queries.reshape(shape)], -1).transpose(0, 1)


def bif(task: LogisticCopies, traces: Tensor) -> Tensor:
    """(queries, train), over all draws of these copies."""
    return -covariance(traces[..., task.num_train :], traces[..., : task.num_train], "pooled")[0]


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def error_slope(task: LogisticCopies, runs: list[Tensor], expected: Tensor) -> float:
    """d log error / d log draws from 1,250 to 20,000 draws: errors of disjoint groups of copies, averaged."""
    sizes, errors, weights = [], [], []
    for groups in (16, 8, 4, 2, 1):
        size = COPIES // groups
        parts = [traces[g * size : (g + 1) * size] for traces in runs for g in range(groups)]
        sizes.append(size * DRAWS)
        errors.append(np.sqrt(np.mean([relative_error(bif(task, part), expected) ** 2 for part in parts])))
        weights.append(len(parts) ** 0.5)
    return float(np.polyfit(np.log(sizes), np.log(errors), 1, w=weights)[0])


@pytest.mark.parametrize("sampler", ["sgld", "sghmc"])
def test_linear_regression(sampler: str, tmp_path: Path) -> None:
    """Losses quadratic in the weights: both terms of the expansion are all there is."""
    task, n_beta, gamma = LinearCopies(copies=COPIES), 20.0, 4.0
    precision = n_beta * task.hessian() + gamma * torch.eye(task.dimension, dtype=torch.float64)
    step_size = 0.05 / float(precision[0, 0])
    # What the step's length adds to the variance is known, and small beside 5 %.
    shrinkage = {"sgld": 4.0, "sghmc": 4 * (2 - FRICTION)}[sampler]
    discretised = torch.linalg.inv(precision - step_size / shrinkage * precision @ precision)
    runs = [traces_by_copy(task, tmp_path, seed, n_beta, gamma, step_size, sampler) for seed in (0, 1)]
    for traces in runs:
        assert relative_error(bif(task, traces), task.expansion(torch.linalg.inv(precision))) < 0.05
    assert abs(error_slope(task, runs, task.expansion(discretised)) + 0.5) < 0.15


def test_damped_logistic_regression(tmp_path: Path) -> None:
    """Against the posterior summed over a grid."""
    task, n_beta, gamma = LogisticCopies(copies=COPIES), 600.0, 30.0
    exact = task.exact_bif(n_beta, gamma / n_beta)
    step_size = 0.04 / largest_precision(task, n_beta, gamma)
    runs = [traces_by_copy(task, tmp_path, seed, n_beta, gamma, step_size, "sghmc") for seed in (0, 1)]
    for traces in runs:
        assert relative_error(bif(task, traces), exact) < 0.05
    assert abs(error_slope(task, runs, exact) + 0.5) < 0.15


# ---- Gaussians, at steps so long that the discretisation shows ----

CURVATURES = torch.tensor([0.5, 2.0, 5.0, 9.0])  # of the loss; gamma adds 1


def stationary(sampler: str, step_size, num_steps: int, gradient_noise=0.0, num_chains=3000) -> Tensor:
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
