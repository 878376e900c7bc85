"""repsim: minus the cosine of the query's and the training example's last hidden representations.

What the model's last linear or convolution layer reads, at the base checkpoint: no gradients, no labels, one forward
pass an example. A cheap control: it knows what is alike and not which way it pushes. Of a sequence, or of an image that
the last layer still sees as positions, the positions are averaged (`pooling=last` takes the last, as for a causal
language model; padding does not count). `centred` subtracts the training set's mean first: representations of trained
networks share a large common direction, which cosines otherwise mostly measure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baselines.method import Attribution, Method, Problem, Size, batch_size_option
from retrain.errors import UsageError
from retrain.examples import Columns, Examples

POOLINGS = ("mean", "last")


@dataclass(frozen=True, kw_only=True)
class RepSim(Method):
    paper: ClassVar[str] = "Hanawa et al. 2021, Evaluation of similarity-based explanations"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"centred": (False, True), "pooling": POOLINGS}

    centred: bool = False  # the training set's mean representation is subtracted
    pooling: str = "mean"  # of a sequence's positions; or "last"
    batch_size: int = batch_size_option(500)

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ValueError(f'pooling is "{self.pooling}"; available: {", ".join(POOLINGS)}')

    def memory_bytes(self, size: Size) -> int:
        return 8 * size.num_attributed * size.num_queries

    def score(self, problem: Problem, state: Any) -> Attribution:
        centre = self._rows(problem, problem.train, "the mean").mean(0) if self.centred else 0.0
        queries, train = (
            F.normalize(self._rows(problem, examples, what) - centre)
            for examples, what in ((problem.queries, "queries"), (problem.attributed, "training examples"))
        )
        scores = -(queries @ train.T).float().cpu()
        return Attribution(scores=scores, train_scale=torch.ones(scores.shape[1]))

    @torch.no_grad()
    def _rows(self, problem: Problem, examples: Examples, what: str) -> Tensor:
        """(examples, width) float32."""
        parts = []
        total = -(-len(examples) // self.batch_size)
        batches = problem.progress(examples.batches(self.batch_size), total=total, description=f"repsim: {what}")
        for inputs, _ in batches:
            inputs = inputs.to(problem.device)
            parts.append(self._pooled(last_hidden(problem.model, inputs).float(), inputs))
        return torch.cat(parts)

    def _pooled(self, hidden: Tensor, inputs: Any) -> Tensor:
        """(batch, width) from (batch, width), (batch, positions, width) or (batch, channels, height, width)."""
        if hidden.dim() == 2:
            return hidden
        if hidden.dim() == 4:
            return hidden.flatten(2).mean(2)
        mask = inputs.get("attention_mask") if isinstance(inputs, Columns) else None
        mask = torch.ones(hidden.shape[:2], device=hidden.device) if mask is None else mask.to(hidden.dtype)
        if self.pooling == "mean":
            return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        last = (positions * (mask > 0)).argmax(1)
        return hidden[torch.arange(len(hidden), device=hidden.device), last]


def last_hidden(model: nn.Module, inputs: Any) -> Tensor:
    """What the last linear or convolution layer to run reads: (batch, ..., width)."""
    read: list[Tensor] = []

    def keep(module: nn.Module, arguments: Any) -> None:
        read[:] = [arguments[0].detach()]

    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    handles = [layer.register_forward_pre_hook(keep) for layer in layers]
    try:
        model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    if not read or read[0].dim() not in (2, 3, 4):
        raise UsageError("repsim looks at what the last linear or convolution layer reads, and this model has none")
    return read[0]
