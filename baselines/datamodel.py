"""datamodel: linear regression from subsets to retrained losses, on retrains of its own and around any method's scores.

It asks for models retrained on further subsets, which cost it their seconds, and predicts a query's loss by a sum over
the subset's members. With a prior the weights are expected where another method's scores are, and to vary together as
these do over queries: with P the train-normalised scores (queries x train), query j's weights are Gaussian with mean
c_j P_j and covariance s_j^2 (t I + (1 - t) P'P). c, s, t and the noise are what makes its own subsets likeliest
(`baselines/support/subset_regression.py`); reported subsets are of another stream, and it never sees them.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from baselines.method import Attribution, Method, Problem, Retrained, Size
from baselines.support.nested import method_option, nested_method
from baselines.support.subset_regression import regress, workspace_bytes
from retrain.errors import UsageError
from retrain.task import Task

LEAST_RETRAINS = 10


@dataclass(frozen=True, kw_only=True)
class Datamodel(Method):
    paper: ClassVar[str] = "Ilyas et al. 2022, Datamodels: Predicting predictions from training data"

    retrains: int = 500  # models retrained on subsets of its own
    alpha: float = 0.0  # share of the attributed examples that these keep; 0: the asked one
    prior: str = method_option()  # or a method, with its options behind +: ekfac+damping:1e-4

    def __post_init__(self) -> None:
        if self.retrains < LEAST_RETRAINS:
            raise ValueError(f"retrains is {self.retrains}; expected at least {LEAST_RETRAINS}")
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha is {self.alpha}; expected a fraction below 1, or 0 for the asked one")
        if self.prior_method is not None and self.prior_method.further_subsets()[0]:
            raise ValueError(f"the prior {self.prior} retrains by itself; expected a method that does not")

    @cached_property
    def prior_method(self) -> Method | None:
        return nested_method(self.prior)

    @property
    def source(self) -> str:
        """The prior's code and libraries count as its own."""
        own = super().source
        if self.prior_method is None:
            return own
        versions = [f"{name} {metadata.version(name)}" for name in self.prior_method.libraries]
        return hashlib.sha256("\n".join([own, self.prior_method.source, *versions]).encode()).hexdigest()[: len(own)]

    def skip(self, task: Task) -> str | None:
        return None if self.prior_method is None else self.prior_method.skip(task)

    def memory_bytes(self, size: Size) -> int:
        n, q = size.num_attributed, size.num_queries
        own = workspace_bytes(self.retrains, n, q, self.prior_method is not None)
        return max(own, 0 if self.prior_method is None else self.prior_method.memory_bytes(size))

    def further_subsets(self) -> tuple[int, float]:
        return self.retrains, self.alpha

    def fit(self, problem: Problem) -> Retrained:
        if problem.retrained is None:
            raise UsageError(
                "datamodel learns from models retrained on further subsets, and here are none; bench.lds makes them"
            )
        return problem.retrained()

    def score(self, problem: Problem, state: Retrained) -> Attribution:
        usable = np.isfinite(state.losses).all(axis=1)
        if usable.sum() < LEAST_RETRAINS:
            raise FloatingPointError(
                f"{usable.sum()} of {len(usable)} retrained models have finite losses; expected {LEAST_RETRAINS}"
            )
        scores = self._prior_scores(problem)
        found = regress(
            state.masks[usable],
            state.losses[usable],
            mean=scores,
            covariance=None if scores is None else _covariance(scores, problem.device),
            device=problem.device,
            progress=problem.progress,
        )
        kept = float(state.masks.mean())
        diagnostics = {"retrains": int(usable.sum()), "retrain_alpha": round(kept, 4), **found.diagnostics}
        return Attribution(scores=found.weights, train_scale=torch.ones(state.masks.shape[1]), diagnostics=diagnostics)

    def _prior_scores(self, problem: Problem) -> Tensor | None:
        """(q, n) float32, train-normalised where the method knows a scale."""
        method = self.prior_method
        if method is None:
            return None
        answer = problem.answer_of(method) if problem.answer_of else method.score(problem, method.fit(problem))
        scaled = answer.normalised()
        return (answer.scores if scaled is None else scaled).float().cpu()


def _covariance(scores: Tensor, device: torch.device) -> Tensor:
    """(n, n): how scores vary together over queries."""
    total = torch.zeros(scores.shape[1], scores.shape[1], dtype=torch.float64, device=device)
    for rows in scores.split(1024):
        wide = rows.to(device, torch.float64)
        total += wide.T @ wide
    return total / len(scores)
