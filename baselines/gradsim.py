"""gradsim: minus the inner product of the query's and the training example's loss gradients, exactly.

One step of gradient descent on a training example changes a query's loss by minus their gradients' inner product
(times the learning rate). Normalised, it is the cosine up to the query's own scale. kronfluence's `identity` strategy
gives the same numbers for the layers it tracks; a test holds that.
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from baselines.method import Attribution, Method, Problem, batch_size_option
from baselines.support.curvature import GradientsInMetric
from baselines.support.gradients import PerExampleGradients, trainable_parameters
from baselines.support.memory import free_bytes
from retrain.errors import UsageError
from retrain.examples import Examples


@dataclass(frozen=True, kw_only=True)
class GradSim(Method):
    version: ClassVar[int] = 1

    parameters: str = ""  # regular expression: only parameters whose name it finds; empty: every trainable one
    batch_size: int = batch_size_option(250)

    def score(self, problem: Problem, state: Any) -> Attribution:
        model = problem.model
        names = [name for name in trainable_parameters(model) if re.search(self.parameters, name)]
        if not names:
            raise UsageError(f'gradsim.parameters is "{self.parameters}", which no trainable parameter\'s name matches')
        gradients = PerExampleGradients(model, problem.task.loss_function.per_example, names)
        return inner_products(problem, gradients, self.batch_size, "gradsim")


def inner_products(
    problem: Problem, gradients: PerExampleGradients | GradientsInMetric, batch_size: int, description: str
) -> Attribution:
    """Minus the inner product of every query's and every attributed example's gradient; the scale is the norm."""
    device, queries, attributed = problem.device, problem.queries, problem.attributed

    # As many query gradients as fit are held at once; the training gradients stream past them.
    bytes_each = 4 * gradients.dimension
    held = max(1, min(len(queries), int(0.5 * free_bytes(device)) // bytes_each - 2 * batch_size))
    num_passes = -(-len(queries) // held)
    held = -(-len(queries) // num_passes)
    batch_size = max(1, min(batch_size, int(0.1 * free_bytes(device)) // bytes_each))

    scores = torch.empty(len(queries), len(attributed))
    scale = torch.empty(len(attributed))
    starts = [
        (first, start) for first in range(0, len(queries), held) for start in range(0, len(attributed), batch_size)
    ]
    block = torch.empty(0)
    for first, start in problem.progress(starts, description=description):
        if start == 0:
            del block
            chosen_queries = queries.select(range(first, min(first + held, len(queries))))
            block = _hold(gradients, chosen_queries, batch_size, device)
        chosen = slice(start, start + batch_size)
        rows = gradients((attributed.inputs[chosen].to(device), attributed.targets[chosen].to(device)))
        scores[first : first + held, chosen] = -(block @ rows.T).cpu()
        scale[chosen] = rows.norm(dim=1).cpu()
    return Attribution(scores=scores, train_scale=scale)


def _hold(
    gradients: PerExampleGradients | GradientsInMetric, examples: Examples, batch_size: int, device: torch.device
) -> Tensor:
    block = torch.empty(len(examples), gradients.dimension, device=device)
    start = 0
    for inputs, targets in examples.batches(batch_size):
        block[start : start + len(inputs)] = gradients((inputs.to(device), targets.to(device)))
        start += len(inputs)
    return block
