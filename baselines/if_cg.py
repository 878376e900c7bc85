"""if_cg: the exact damped influence function by conjugate gradients, computed by dattri.

    pip install dattri                     # optional: without it the method is skipped, with this line

-g_query^T (H + damping)^-1 g_train over every trainable parameter, H the whole Hessian of the mean training loss (not
Gauss-Newton's part, no Kronecker factors). dattri's `IFAttributorCG` starts each solve from the query's gradient and
takes a fixed number of steps without looking at the residual. Conjugate gradients need H + damping to be positive
definite; a trained network's H has negative eigenvalues, and damping has to exceed them: dattri's default of 0 is in
`library_settings`. Its solver sums over batches of the training set what it solved on each, so the whole set is given
as one batch: the memory of a Hessian product over all of it, for `query_batch_size` queries at once. On the digits
task (1,200 images, 9,456 parameters) that was half a gigabyte a query, and 170 s for 40 of them (EK-FAC: 12 s).

Scores are normalised by the norm of the training example's gradient; with `self_influence` by the root of its own
influence, for a solve an example.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from baselines.method import Attribution, Method, Problem, Size, batch_size_option
from baselines.support.dattri_task import (
    dattri_loader,
    dattri_missing,
    dattri_scores,
    dattri_task,
    finite_or_refuse,
    held_representations,
)
from baselines.support.second_derivatives import twice_differentiable
from retrain.task import Task


@dataclass(frozen=True, kw_only=True)
class InfluenceCG(Method):
    libraries: ClassVar[tuple[str, ...]] = ("dattri",)
    paper: ClassVar[str] = "Koh and Liang 2017, Understanding black-box predictions via influence functions"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"damping": (0.1, 1e-3, 0.01, 1.0, 10.0), "iterations": (10, 3)}
    library_settings: ClassVar[dict[str, Any]] = {"damping": 0.0, "iterations": 10}

    damping: float = 0.1  # added to every eigenvalue of the mean loss's Hessian
    iterations: int = 10  # of conjugate gradients, for every query
    self_influence: bool = False  # solve for every training example, too, for normalised scores
    query_batch_size: int = batch_size_option(5)
    batch_size: int = batch_size_option(100)

    def __post_init__(self) -> None:
        if not 0 <= self.damping < float("inf") or self.iterations < 1:
            raise ValueError(
                f"damping is {self.damping} and iterations is {self.iterations}; expected damping from 0 on and at "
                "least 1 iteration"
            )

    def skip(self, task: Task) -> str | None:
        return dattri_missing()

    def memory_bytes(self, size: Size) -> int:
        sizes = (size.num_attributed, size.num_queries, size.num_parameters)
        return held_representations(*sizes, max(self.batch_size, 4 * self.query_batch_size))

    def score(self, problem: Problem, state: Any) -> Attribution:
        with twice_differentiable():
            return self._score(problem)

    def _score(self, problem: Problem) -> Attribution:
        from dattri.algorithm import IFAttributorCG

        attributor = IFAttributorCG(
            dattri_task(problem), device=str(problem.device), max_iter=self.iterations, regularization=self.damping
        )
        attributor.cache(dattri_loader(problem.train, len(problem.train)))
        scores, norms = dattri_scores(
            problem, attributor, batch_size=self.batch_size, query_batch_size=self.query_batch_size, description="if_cg"
        )
        if self.self_influence:
            norms = self._own(problem, attributor)
        found = Attribution(scores=scores, train_scale=norms, diagnostics={"damping": self.damping})
        return finite_or_refuse(
            found, f"conjugate gradients broke down at damping {self.damping:g}; a larger one makes H positive definite"
        )

    @torch.no_grad()
    def _own(self, problem: Problem, attributor: Any) -> torch.Tensor:
        parts = []
        batches = dattri_loader(problem.attributed, self.query_batch_size)
        for batch in problem.progress(batches, total=len(batches), description="if_cg: self-influence"):
            data = tuple(part.to(problem.device).unsqueeze(0) for part in batch)
            gradient = attributor.generate_train_rep(ckpt_idx=0, data=data)
            solved = attributor.transform_test_rep(0, gradient)
            parts.append((gradient * solved).sum(1).clamp(min=0).sqrt().detach().cpu())
        return torch.cat(parts)
