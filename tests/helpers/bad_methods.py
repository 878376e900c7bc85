"""Methods that go wrong, to see that the harness takes it well."""

import errno
import os
import signal
from dataclasses import dataclass
from typing import Any

import torch

from baselines.gradsim import GradSim
from baselines.method import Attribution, Method, Problem, load_method
from retrain.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Raises(Method):
    def score(self, problem: Problem, state: Any) -> Attribution:
        raise RuntimeError("the sky\nfell")


@dataclass(frozen=True, kw_only=True)
class CannotHere(Method):
    """Its settings do not suit the task, which it finds out too late to be skipped."""

    def score(self, problem: Problem, state: Any) -> Attribution:
        raise UsageError("too few examples; expected more")


@dataclass(frozen=True, kw_only=True)
class GivesNaN(Method):
    """Knows nothing about training example 0."""

    def score(self, problem: Problem, state: Any) -> Attribution:
        scores = torch.randn(len(problem.queries), len(problem.attributed_indices))
        scores[:3, 0] = torch.nan
        return Attribution(scores=scores)


@dataclass(frozen=True, kw_only=True)
class Transposed(Method):
    def score(self, problem: Problem, state: Any) -> Attribution:
        return Attribution(scores=torch.zeros(len(problem.attributed_indices), len(problem.queries)))


@dataclass(frozen=True, kw_only=True)
class Meddles(Method):
    def score(self, problem: Problem, state: Any) -> Attribution:
        with torch.no_grad():
            next(problem.model.parameters()).add_(1)
        return Attribution(scores=torch.zeros(len(problem.queries), len(problem.attributed_indices)))


@dataclass(frozen=True, kw_only=True)
class Scribbles(GradSim):
    """Writes into what it is given, in its fit or in its scores."""

    target: str = "train"
    through: str = "torch"
    stage: str = "score"

    def _write(self, problem: Problem) -> None:
        examples = {"train": problem.train, "queries": problem.queries, "task": problem.task.query_data}[self.target]
        with torch.no_grad():
            values = {"torch": examples.inputs, "data": examples.inputs.data}.get(self.through)
            if values is None:
                examples.inputs.numpy()[:] *= -1
            else:
                values.mul_(-1)

    def fit(self, problem: Problem) -> Any:
        if self.stage == "fit":
            self._write(problem)
        return super().fit(problem)

    def score(self, problem: Problem, state: Any) -> Attribution:
        made = super().score(problem, state)
        if self.stage == "score":
            self._write(problem)
        return made


@dataclass(frozen=True, kw_only=True)
class Shifted(Method):
    """Another method whose scores all have the same offset, in float64."""

    of: str = "gradsim"
    offset: float = 0.0

    def fit(self, problem: Problem) -> Any:
        return load_method(self.of).fit(problem)

    def score(self, problem: Problem, state: Any) -> Attribution:
        made = load_method(self.of).score(problem, state)
        return Attribution(scores=made.scores.double() + self.offset)


@dataclass(frozen=True, kw_only=True)
class Slow(GradSim):
    """GradSim that does its work several times over."""

    times: int = 3

    def score(self, problem: Problem, state: Any) -> Attribution:
        for _ in range(self.times - 1):
            super().score(problem, state)
        return super().score(problem, state)


# ---- for the tests of bench.scaling: failures of large models, and one that is fitted ----


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
