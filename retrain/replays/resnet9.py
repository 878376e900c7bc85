"""ResNet-9's training with momentum, replayed: what the digits and the CIFAR-10 task have in common."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrain.models.resnet9 import ResNet9
from retrain.replays.replay import (
    PARAMETERS,
    STATISTICS,
    Replay,
    TrainingState,
    attached,
    differentiable,
    gradients,
    initial_state,
    weighted_mean,
)

MOMENTUM = "momentum"
SLOW = "slow/"  # the slow weights of lookahead


@dataclass(frozen=True)
class MomentumStep:
    """One step of SGD with Nesterov momentum, as plain numbers."""

    members: Tensor  # (batch,) positions
    rate: float
    lookahead: float | None = None  # the share of the slow weights that is kept, after the step


class ResNet9Replay(Replay):
    """Of a loss that is the mean over the batch, or with `summed` that times the batch's (weighted) size."""

    def __init__(
        self,
        model: ResNet9,
        labels: Tensor,
        steps: Sequence[MomentumStep],
        *,
        momentum: float,
        label_smoothing: float,
        device: torch.device,
        summed: bool = False,
    ):
        self.device = torch.device(device)
        self._initial = model
        self.labels = labels.to(self.device)
        self.steps = steps
        self.num_steps, self.num_examples = len(steps), len(labels)
        self.momentum, self.label_smoothing, self.summed = momentum, label_smoothing, summed
        self.lookahead = any(step.lookahead is not None for step in steps)
        self._training, self._norms = differentiable(self._new(model).train())

    # ---- what a task adds ----

    def images(self, step: int) -> Tensor:
        """The step's batch as the network sees it: (batch, channels, size, size)."""
        raise NotImplementedError

    def decay_and_scale(self, name: str) -> tuple[float, float]:
        """(what of a parameter is added to its gradient, what its rate is multiplied by)."""
        raise NotImplementedError

    # ---- what follows ----

    def _new(self, model: ResNet9) -> nn.Module:
        return copy.deepcopy(model).to(self.device)

    def skeleton(self) -> nn.Module:
        return self._new(self._initial).eval()

    def start(self) -> TrainingState:
        state = initial_state(self._initial, self.device, [MOMENTUM])
        slow = (PARAMETERS, STATISTICS) if self.lookahead else ()
        return state | {SLOW + name: value.clone() for name, value in state.items() if name.startswith(slow)}

    def members(self, step: int) -> Tensor:
        return self.steps[step].members

    def learning_rate(self, step: int) -> float:
        return self.steps[step].rate

    def step_size(self, step: int) -> float:
        summed = len(self.steps[step].members) if self.summed else 1
        return self.steps[step].rate * summed / (1 - self.momentum)

    def advance(self, state: TrainingState, step: int, weights: Tensor) -> TrainingState:
        if not weights.any():  # nothing is left of this batch
            return state
        plan, after = self.steps[step], dict(state)
        with torch.enable_grad():
            inner = attached(state)
            for norm in self._norms.values():
                norm.weights = weights
            logits = torch.func.functional_call(self._training, self.weights_of(inner), (self.images(step),))
            losses = F.cross_entropy(
                logits, self.labels[plan.members], label_smoothing=self.label_smoothing, reduction="none"
            )
            mean = weighted_mean(losses, weights)
            found = gradients(mean * weights.sum() if self.summed else mean, inner, weights.requires_grad)
        for path, norm in self._norms.items():
            for name, value in norm.collected.items():
                after[f"{STATISTICS}{path}.{name}"] = value
            norm.weights, norm.collected = None, {}
        for name, gradient in found.items():
            plain = name.removeprefix(PARAMETERS)
            decay, scale = self.decay_and_scale(plain)
            gradient = gradient + decay * inner[name]
            momentum = self.momentum * state[f"{MOMENTUM}/{plain}"] + gradient
            after[f"{MOMENTUM}/{plain}"] = momentum
            after[name] = inner[name] - plan.rate * scale * (gradient + self.momentum * momentum)
        if plan.lookahead is not None:
            for name in [name for name in state if name.startswith(SLOW)]:
                fast = name.removeprefix(SLOW)
                after[name] = after[fast] = torch.lerp(after[fast], state[name], plan.lookahead)
        return after
