"""Methods that fail the way large models do, for the sweep's tests."""

import os
import signal
from dataclasses import dataclass
from typing import Any

import torch

from baselines.method import Attribution, Method, Problem


@dataclass(frozen=True, kw_only=True)
class OutOfMemory(Method):
    """Runs out of memory on any but the warm-up's few sequences."""

    def score(self, problem: Problem, state: Any) -> Attribution:
        if len(problem.model.transformer.gpt_neox.layers) > 1:  # type: ignore[union-attr, arg-type]
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return Attribution(scores=torch.zeros(len(problem.queries), len(problem.attributed_indices)))


@dataclass(frozen=True, kw_only=True)
class Killed(Method):
    """Is ended by the system, as when the host's memory is full."""

    def score(self, problem: Problem, state: Any) -> Attribution:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still here")
