"""arnoldi: influence in the largest eigenvectors of the Hessian that Arnoldi's iteration finds, computed by dattri.

    pip install dattri                     # optional: without it the method is skipped, with this line

-g_query^T V diag(1 / lambda) V^T g_train, with the Ritz values lambda (of largest size) and vectors V of
`iterations` products with the Hessian of the mean training loss plus damping. Directions that the iteration has not
found count as having no influence, and so do those with a negative Ritz value: dattri announces that it leaves them
out and takes their root all the same, which would make every score NaN; here what comes out as NaN is left out. Its
default damping of 0 is in `library_settings`. The Hessian's products are over the whole training set as one batch: 7 GB
on the digits task's 1,200 images.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from baselines.method import Attribution, Method, Problem, Size, batch_size_option
from baselines.support.dattri_task import (
    dattri_loader,
    dattri_missing,
    dattri_scores,
    dattri_task,
    held_representations,
    without_bars,
)
from baselines.support.second_derivatives import twice_differentiable
from retrain.task import Task


@dataclass(frozen=True, kw_only=True)
class Arnoldi(Method):
    libraries: ClassVar[tuple[str, ...]] = ("dattri",)
    paper: ClassVar[str] = "Schioppa et al. 2022, Scaling up influence functions"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"damping": (1.0, 0.01, 0.1, 10.0), "projection": (100, 30)}
    library_settings: ClassVar[dict[str, Any]] = {"damping": 0.0, "projection": 100, "iterations": 100}

    damping: float = 1.0  # added to every eigenvalue of the mean loss's Hessian
    projection: int = 100  # eigenvectors that are kept
    iterations: int = 100  # Hessian products
    batch_size: int = batch_size_option(100)

    def __post_init__(self) -> None:
        if not 0 <= self.damping < float("inf") or self.projection < 1 or self.iterations < 2:
            raise ValueError(
                f"damping is {self.damping}, projection {self.projection} and iterations {self.iterations}; expected "
                "damping from 0 on, a projection of at least 1 and 2 iterations"
            )

    def skip(self, task: Task) -> str | None:
        return dattri_missing()

    def memory_bytes(self, size: Size) -> int:
        basis = 8 * self.iterations * size.num_parameters
        sizes = (size.num_attributed, size.num_queries, size.num_parameters)
        return basis + held_representations(*sizes, self.batch_size)

    def score(self, problem: Problem, state: Any) -> Attribution:
        with twice_differentiable():
            return self._score(problem)

    def _score(self, problem: Problem) -> Attribution:
        from dattri.algorithm import IFAttributorArnoldi

        dropped: list[int] = []

        class Positive(IFAttributorArnoldi):
            def transform_test_rep(self, ckpt_idx: int, test_rep: Tensor) -> Tensor:
                made = super().transform_test_rep(ckpt_idx, test_rep)
                usable = torch.isfinite(made).all(0)
                dropped[:] = [int((~usable).sum()), made.shape[1]]
                return torch.where(usable, made, 0.0)

            def transform_train_rep(self, ckpt_idx: int, train_rep: Tensor) -> Tensor:
                return self.transform_test_rep(ckpt_idx, train_rep)

        attributor = Positive(
            dattri_task(problem),
            device=str(problem.device),
            proj_dim=self.projection,
            max_iter=self.iterations,
            regularization=self.damping,
            seed=problem.seed,
        )
        with without_bars():
            attributor.cache(dattri_loader(problem.train, len(problem.train)))
        scores, norms = dattri_scores(
            problem, attributor, batch_size=self.batch_size, query_batch_size=self.batch_size, description="arnoldi"
        )
        if dropped[0] == dropped[1]:
            raise FloatingPointError(f"no eigenvalue that was found is above 0 at damping {self.damping:g}; take more")
        diagnostics = {"damping": self.damping, "directions": dropped[1] - dropped[0], "negative": dropped[0]}
        return Attribution(scores=scores, train_scale=norms, diagnostics=diagnostics)
