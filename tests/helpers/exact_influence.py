"""The influence function with the exact Hessian, of the exact logistic regression: a known answer for leave-one-out."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baselines.method import Attribution, Method, Problem
from retrain.examples import Examples
from retrain.logistic import CLASSES


@dataclass(frozen=True, kw_only=True)
class ExactInfluence(Method):
    """Including example i moves the minimum by minus inverse Hessian times its gradient: scores in units of loss."""

    def score(self, problem: Problem, state: Any) -> Attribution:
        task: Any = problem.task
        train, queries = self._gradients(problem, problem.train), self._gradients(problem, problem.queries)
        inputs, probabilities = self._parts(problem, problem.train)
        hessian = task.ridge * torch.eye(train.shape[1], dtype=torch.float64)
        for x, p in zip(inputs, probabilities):
            hessian += torch.kron(torch.diag(p) - torch.outer(p, p), torch.outer(x, x))
        moved = torch.linalg.solve(hessian, train[problem.attributed_indices].T)
        scale = (train[problem.attributed_indices] * moved.T).sum(1).sqrt()
        return Attribution(scores=-(queries @ moved).float(), train_scale=scale.float())

    def _parts(self, problem: Problem, examples: Examples) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            probabilities = problem.model(examples.inputs).double().softmax(1)
        return torch.cat([examples.inputs, torch.ones(len(examples), 1)], dim=1).double(), probabilities

    def _gradients(self, problem: Problem, examples: Examples) -> Tensor:
        """(examples, classes x features)"""
        inputs, probabilities = self._parts(problem, examples)
        errors = probabilities - torch.eye(CLASSES, dtype=torch.float64)[examples.targets]
        return torch.einsum("nc,nf->ncf", errors, inputs).flatten(1)
