"""same_class: minus one for training examples of the query's own class; it never sees the model.

The control for whoever scores well on a classification: subsets that happen to hold more of a class predict that class
better, and a method that knows the labels alone already has that much. What a method finds beyond its labels is its LDS
less this one's. Where a task has groups of its own, such as the topics of texts, these are the classes.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from baselines.method import Attribution, Method, Problem, Size
from retrain.task import Task, classifies


@dataclass(frozen=True, kw_only=True)
class SameClass(Method):
    paper: ClassVar[str] = "no one's: a control"

    def skip(self, task: Task) -> str | None:
        grouped = task.query_data.groups is not None
        return None if classifies(task) or grouped else f"{task.name} has no classes: one label an example is needed"

    @property
    def uses_model(self) -> bool:
        return False

    def memory_bytes(self, size: Size) -> int:
        return 8 * size.num_attributed * size.num_queries

    def score(self, problem: Problem, state: Any) -> Attribution:
        parts = (problem.queries, problem.attributed)
        queries, train = (part.targets if part.groups is None else part.groups for part in parts)
        same = queries[:, None] == train[None]
        return Attribution(scores=-same.float().cpu(), train_scale=torch.ones(same.shape[1]))
