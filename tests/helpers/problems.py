"""What a method is asked, in tests: a task, its model, and which examples and queries."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from baselines.method import Attribution, Method, Problem
from retrain.errors import UsageError
from retrain.examples import Examples

CPU = torch.device("cpu")


def problem_of(
    task: Any,
    scratch: Path,
    model: nn.Module | None = None,
    *,
    train: Examples | None = None,
    queries: Examples | Sequence[int] | None = None,
    chosen: Sequence[int] | np.ndarray | None = None,
    seed: int = 3,
    **more: Any,
) -> Problem:
    """By default the base model, every training example and every query; queries: some of the task's by number."""
    train = task.train_data if train is None else train
    if queries is None:
        queries = task.query_data
    asked: Examples = queries if isinstance(queries, Examples) else task.query_data.select(queries)
    return Problem(
        task=task, model=task.train_base(init_seed=0, order_seed=0, device=CPU) if model is None else model,
        train=train, attributed_indices=np.arange(len(train)) if chosen is None else np.array(chosen),
        queries=asked, seed=seed, device=CPU, scratch=scratch, **more,
    )  # fmt: skip


def run(method: Method, problem: Problem) -> Attribution:
    torch.manual_seed(problem.seed)
    return method.score(problem, method.fit(problem))


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])


def assert_same(scores: torch.Tensor, expected: torch.Tensor, rtol: float = 2e-3, atol: float = 1e-3) -> None:
    """Within a share `atol` of the largest: methods' scores differ in scale by many orders of magnitude."""
    torch.testing.assert_close(scores, expected, rtol=rtol, atol=atol * float(expected.abs().max()))


def refused(call: Callable[[], object], *parts: str) -> None:
    """With a UsageError of one line that has these parts."""
    with pytest.raises(UsageError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def gradients_by_hand(
    model: nn.Module,
    examples: Examples,
    value: Callable[[Any, torch.Tensor], torch.Tensor],
    names: list[str] | None = None,
) -> torch.Tensor:
    """(examples, d): each example's gradient of value(inputs, targets), one after another, in the named parameters."""
    names = [name for name, p in model.named_parameters() if p.requires_grad] if names is None else names
    parameters = [model.get_parameter(name) for name in names]
    rows = []
    for batch in examples.batches(1):
        found = torch.autograd.grad(value(*batch), parameters, materialize_grads=True, allow_unused=True)
        rows.append(torch.cat([gradient.flatten() for gradient in found]))
    return torch.stack(rows)
