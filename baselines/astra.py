"""astra: EK-FAC's answer refined by stochastic Neumann iterations, preconditioned by EK-FAC.

-g_query^T (G + damping)^-1 g_train as `ekfac_cg` has it, by steps on minibatches instead of whole passes:

    x <- x - step P^-1 ((G_batch + damping) x - g_query),    P = EK-FAC's curvature + damping, x = P^-1 g_query at first

All queries share a minibatch, so that its gradients are computed once for all of them. The step is 1 / (1 + the largest
eigenvalue of P^-1 G_batch), found by power iterations on the first minibatch. The answer is the mean of the iterates of
the second half, which takes out most of the minibatches' noise. `iterations` = 0 is kfac. As in `ekfac_cg`, all layers
are damped alike.

bergson's ASTRA has momentum and a step size that is chosen by hand, minibatches of its own for every query, exact
products with G, and each layer's own damping. With whole batches and one damping both end at the same solution.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from baselines.ekfac_cg import EKFACCG, Rows
from baselines.method import Problem, batch_size_option

POWER_ITERATIONS = 10
_BATCH_STREAM = 61


@dataclass(frozen=True, kw_only=True)
class ASTRA(EKFACCG):
    version: ClassVar[int] = 1
    paper: ClassVar[str] = (
        "Wang et al. 2025, Better training data attribution via better inverse Hessian-vector products"
    )
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "relative_damping": (100.0, 0.1, 1.0, 10.0, 1000.0),
        "iterations": (100, 400),
    }

    iterations: int = 100
    product: str = "gradients"
    minibatch: int = 1000  # training examples of each step
    step_size: float = 0.0  # 0: by the largest eigenvalue
    query_batch_size: int = batch_size_option(500)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.minibatch < 1 or self.step_size < 0:
            raise ValueError(
                f"minibatch is {self.minibatch} and step_size {self.step_size}; expected at least 1, and 0 or more"
            )

    def _solve(
        self, product: Any, inverse: Rows, wanted: Tensor, damping: float, problem: Problem
    ) -> tuple[Tensor, list[float]]:
        found = inverse(wanted)
        if not self.iterations:
            return found, [float("nan")] * len(wanted)
        rng = np.random.default_rng([problem.seed, _BATCH_STREAM])
        size, count = min(self.minibatch, len(problem.train)), len(problem.train)
        batches = [rng.choice(count, size, replace=False) for _ in range(self.iterations)]
        step = self.step_size or 1 / (1 + largest_eigenvalue(product, inverse, wanted[:1], batches[0]))
        kept, mean = 0, torch.zeros_like(found)
        for number, chosen in enumerate(batches):
            moved = inverse(product(found, chosen, stream=number).add_(found, alpha=damping).sub_(wanted))
            found = found.sub_(moved, alpha=step)
            if 2 * number >= self.iterations - 1:
                kept += 1
                mean.add_(found - mean, alpha=1 / kept)
        left = product(mean, batches[-1], stream=self.iterations - 1).add_(mean, alpha=damping).sub_(wanted)
        return mean, (left.norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-30)).tolist()


def largest_eigenvalue(product: Any, inverse: Rows, like: Tensor, chosen: np.ndarray) -> float:
    """Of P^-1 G over the chosen examples."""
    vector = torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).to(like)
    size = torch.zeros(())
    for _ in range(POWER_ITERATIONS):
        vector = inverse(product(vector / vector.norm().clamp(min=1e-30), chosen))
        size = vector.norm()
    return float(size)
