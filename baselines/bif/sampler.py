"""Samplers of the localised posterior, the paper's eq:local-posterior with an inverse temperature:

    p(w) ∝ exp(-n_beta * mean_i loss_i(w) - gamma / 2 * |w - w*|^2)

Each sampler moves a list of parameters in place, from a minibatch gradient and its own seeded generator; no step reads
anything back to the host. All are run at a fixed step size, so each has a discretisation bias of order `step_size`.

What a chain keeps is its displacement w - w*, in float32 unless told otherwise: steps of a millionth are not lost in
weights of order one, and the weights the model computes with may be bf16. With a `Metric` it keeps the displacement in
that metric's coordinates, and gradients come in them: the localising Gaussian is then curved as the metric is, and
every sampler below takes steps that fit each direction.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baselines.support.curvature import Metric


@dataclass
class Position:
    """Where a chain is: the parameters it moves (in place), and the checkpoint they are tied to."""

    parameters: list[Tensor]
    anchor: list[Tensor]
    dtype: torch.dtype = torch.float32  # of the displacement, and of whatever else a sampler carries
    # A second position driven by the same noise under the prior alone (no loss): what its covariance is, is known.
    shadow: "Position | None" = None
    metric: Metric | None = None  # whose coordinates the displacement is in; None: the weights themselves
    memory: dict[str, list[Tensor]] = field(default_factory=dict)  # what a sampler carries from step to step

    def __post_init__(self) -> None:
        self.displacement = [
            (parameter - anchor).to(self.dtype) for parameter, anchor in zip(self.parameters, self.anchor, strict=True)
        ]

    def recall(self, name: str) -> list[Tensor]:
        """A tensor a parameter that persists between steps, zero at first."""
        if name not in self.memory:
            self.memory[name] = [torch.zeros_like(displacement) for displacement in self.displacement]
        return self.memory[name]

    def publish(self) -> None:
        """Write anchor + displacement into the parameters the model computes with."""
        moved = self.displacement if self.metric is None else self.metric.to_weights(self.displacement)
        for parameter, anchor, displacement in zip(self.parameters, self.anchor, moved, strict=True):
            torch.add(anchor, displacement, out=parameter)

    def reset(self) -> None:
        """Back to the checkpoint, as if nothing had happened, in the same tensors: a captured step knows no others."""
        torch._foreach_zero_(self.displacement)
        self._forget()
        self.publish()
        if self.shadow is not None:
            self.shadow.reset()

    def _forget(self) -> None:
        for tensors in self.memory.values():
            torch._foreach_zero_(tensors)

    def state(self) -> dict[str, Tensor]:
        """What a chain here must not lose, by name: the tensors themselves, not copies."""
        state = {f"displacement.{k}": tensor for k, tensor in enumerate(self.displacement)}
        for name, tensors in self.memory.items():
            state |= {f"memory.{name}.{k}": tensor for k, tensor in enumerate(tensors)}
        if self.shadow is not None:
            state |= {f"shadow.{name}": tensor for name, tensor in self.shadow.state().items()}
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Back to where `state` was taken."""
        self._forget()
        for key, value in state.items():
            kind, _, rest = key.partition(".")
            if kind == "displacement":
                self.displacement[int(rest)].copy_(value)
            elif kind == "memory":
                name, _, k = rest.rpartition(".")
                self.recall(name)[int(k)].copy_(value)
        self.publish()
        if self.shadow is not None:
            start = "shadow."
            self.shadow.restore({key[len(start) :]: state[key] for key in state if key.startswith(start)})


# (position, gradient of n_beta * mean loss, gamma, step_size, generator) -> None
Step = Callable[[Position, list[Tensor], float, float, torch.Generator], None]


def _noise(tensors: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(t.shape, generator=generator, device=t.device, dtype=t.dtype) for t in tensors]


def _drift(position: Position, gradient: list[Tensor], gamma: float) -> list[Tensor]:
    """Gradient of minus log posterior: loss term plus gamma (w - w*)."""
    gradient = [g.to(position.dtype) for g in gradient]
    return list(torch._foreach_add(gradient, position.displacement, alpha=gamma))


@torch.no_grad()
def sgld(
    position: Position, gradient: list[Tensor], gamma: float, step_size: float, generator: torch.Generator
) -> None:
    """w <- w - step_size / 2 * drift + N(0, step_size): the paper's alg:sgld."""
    drift = _drift(position, gradient, gamma)
    torch._foreach_add_(position.displacement, drift, alpha=-step_size / 2)
    del drift
    noise = _noise(position.displacement, generator)
    torch._foreach_add_(position.displacement, noise, alpha=step_size**0.5)
    position.publish()
    if position.shadow is not None:
        torch._foreach_mul_(position.shadow.displacement, 1 - step_size * gamma / 2)
        torch._foreach_add_(position.shadow.displacement, noise, alpha=step_size**0.5)
        position.shadow.publish()


RMSPROP_DECAY = 0.99
RMSPROP_STABILITY = 0.1


@torch.no_grad()
def rmsprop_sgld(
    position: Position, gradient: list[Tensor], gamma: float, step_size: float, generator: torch.Generator
) -> None:
    """SGLD under the diagonal metric G = 1 / (stability + sqrt(v)), v a running mean of squared loss gradients.

    As in Li et al. 2015 without the term for the metric's own change (and as in devinterp). While v is steady, as it
    is when minibatch noise dominates the gradients, the target is the same posterior. Where v follows the position
    the target is wider: on a noiseless Gaussian the variance comes out half as large again.
    """
    squares = position.recall("squares")
    gradient = [g.to(position.dtype) for g in gradient]
    torch._foreach_mul_(squares, RMSPROP_DECAY)
    torch._foreach_addcmul_(squares, gradient, gradient, value=1 - RMSPROP_DECAY)
    metric = torch._foreach_add(torch._foreach_sqrt(squares), RMSPROP_STABILITY)
    torch._foreach_reciprocal_(metric)
    drift = _drift(position, gradient, gamma)
    torch._foreach_addcmul_(position.displacement, drift, metric, value=-step_size / 2)
    del drift
    noise = _noise(position.displacement, generator)
    torch._foreach_addcmul_(position.displacement, noise, torch._foreach_sqrt(metric), value=step_size**0.5)
    position.publish()


FRICTION = 0.1  # the share of the momentum lost in one step


@torch.no_grad()
def sghmc(
    position: Position, gradient: list[Tensor], gamma: float, step_size: float, generator: torch.Generator
) -> None:
    """Stochastic-gradient Hamiltonian Monte Carlo: SGLD with momentum, which crosses flat directions faster.

    v <- (1 - a) v - (step_size / 2) drift + N(0, a step_size),  w <- w + v, with friction a = FRICTION.
    On a quadratic potential of curvature h this is a second-order autoregression of stationary variance
    1 / (h (1 - step_size h / (4 (2 - a)))): 1 / h up to order step_size * h.
    """
    velocity = position.recall("velocity")
    drift = _drift(position, gradient, gamma)
    torch._foreach_mul_(velocity, 1 - FRICTION)
    torch._foreach_add_(velocity, drift, alpha=-step_size / 2)
    torch._foreach_add_(velocity, _noise(position.displacement, generator), alpha=(step_size * FRICTION) ** 0.5)
    torch._foreach_add_(position.displacement, velocity)
    position.publish()


SAMPLERS: dict[str, Step] = {"sgld": sgld, "rmsprop_sgld": rmsprop_sgld, "sghmc": sghmc}
