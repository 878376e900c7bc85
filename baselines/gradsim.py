"""gradsim: minus the inner product of the query's and the training example's loss gradients, exactly.

One step of gradient descent on a training example changes a query's loss by minus their gradients' inner product
(times the learning rate). Normalised, it is the cosine up to the query's own scale. kronfluence's `identity` strategy
gives the same numbers for the layers it tracks; a test holds that.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from baselines.method import Attribution, Method, Problem, Size, batch_size_option
from baselines.support.gradients import PerExampleGradients, matching_parameters
from baselines.support.inner_products import held_bytes, inner_products


@dataclass(frozen=True, kw_only=True)
class GradSim(Method):
    version: ClassVar[int] = 1
    paper: ClassVar[str] = "Charpiat et al. 2019, Input similarity from the neural network perspective"

    parameters: str = ""  # regular expression: only parameters whose name it finds; empty: every trainable one
    batch_size: int = batch_size_option(250)

    def memory_bytes(self, size: Size) -> int:
        return held_bytes(size.num_attributed, size.num_queries, size.num_parameters)

    def score(self, problem: Problem, state: Any) -> Attribution:
        names = matching_parameters(problem.model, self.parameters, "gradsim")
        gradients = PerExampleGradients(problem.model, problem.task.loss_function.per_example, names)
        return inner_products(problem, gradients, self.batch_size, "gradsim")
