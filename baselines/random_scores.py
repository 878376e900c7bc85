"""random: independent normal scores. The control: its LDS interval contains 0 nineteen times in twenty."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from baselines.method import Attribution, Method, Problem, Size


@dataclass(frozen=True, kw_only=True)
class RandomScores(Method):
    paper: ClassVar[str] = "no one's: a control"

    @property
    def uses_model(self) -> bool:
        return False

    def memory_bytes(self, size: Size) -> int:
        return 8 * size.num_attributed * size.num_queries

    def score(self, problem: Problem, state: Any) -> Attribution:
        # One stream an example, so that permuting the training set permutes the scores.
        columns = [
            np.random.default_rng([problem.seed, int(index)]).standard_normal(len(problem.queries), dtype=np.float32)
            for index in problem.attributed_indices
        ]
        scores = torch.from_numpy(np.stack(columns, axis=1))
        return Attribution(scores=scores, train_scale=torch.ones(scores.shape[1]))
