"""Methods that fail the way large models do, and one that is fitted, for the sweep's tests."""

import errno
import os
import signal
from dataclasses import dataclass
from typing import Any

import torch

from baselines.method import Attribution, Method, Problem


def _zeros(problem: Problem) -> Attribution:
    return Attribution(scores=torch.zeros(len(problem.queries), len(problem.attributed_indices)))


@dataclass(frozen=True, kw_only=True)
class OutOfMemory(Method):
    """Runs out of memory on any but the warm-up's few sequences."""

    def score(self, problem: Problem, state: Any) -> Attribution:
        if len(problem.model.transformer.gpt_neox.layers) > 1:  # type: ignore[union-attr, arg-type]
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return _zeros(problem)


@dataclass(frozen=True, kw_only=True)
class DiskFull(Method):
    """Finds no room for what its fit writes."""

    def fit(self, problem: Problem) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    def score(self, problem: Problem, state: Any) -> Attribution:
        return _zeros(problem)


@dataclass(frozen=True, kw_only=True)
class Killed(Method):
    """Is ended by the system, as when the host's memory is full."""

    def score(self, problem: Problem, state: Any) -> Attribution:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still here")


@dataclass(frozen=True, kw_only=True)
class Fitted(Method):
    """Takes its curvature from so many sequences of the training set, which need not be those that are scored."""

    fit_examples: int = 4

    def fit(self, problem: Problem) -> Any:
        if len(problem.train) < self.fit_examples:
            raise ValueError(f"{len(problem.train)} sequences to fit {self.fit_examples} on")
        return problem.train.inputs[: self.fit_examples].float().mean()

    def score(self, problem: Problem, state: Any) -> Attribution:
        return _zeros(problem)
