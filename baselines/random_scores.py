"""random: independent normal scores. The control: its LDS interval must contain 0."""

from dataclasses import dataclass
from typing import Any

import torch

from baselines.method import Attribution, Method, Problem


@dataclass(frozen=True, kw_only=True)
class RandomScores(Method):
    def score(self, problem: Problem, state: Any) -> Attribution:
        # One stream an example, so that permuting the training set permutes the scores.
        scores = torch.stack(
            [
                torch.randn(len(problem.queries), generator=torch.Generator().manual_seed(problem.seed << 32 | int(i)))
                for i in problem.attributed_indices
            ],
            dim=1,
        )
        return Attribution(scores=scores, train_scale=torch.ones(scores.shape[1]))
