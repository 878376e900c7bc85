"""Samplers of the localised posterior, the paper's eq:local-posterior with an inverse temperature:

    p(w) ∝ exp(-n_beta * mean_i loss_i(w) - gamma / 2 * |w - w*|^2)

Each sampler moves a list of parameters in place, from a minibatch gradient and its own seeded generator; no step reads
anything back to the host. All are run at a fixed step size, so each has a discretisation bias of order `step_size`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Position:
    """Where a chain is: the parameters it moves (in place), and the checkpoint they are tied to."""

    parameters: list[Tensor]
    anchor: list[Tensor]
    memory: dict[str, list[Tensor]] = field(default_factory=dict)  # what a sampler carries from step to step

    def recall(self, name: str) -> list[Tensor]:
        """A tensor a parameter that persists between steps, zero at first."""
        if name not in self.memory:
            self.memory[name] = [torch.zeros_like(parameter) for parameter in self.parameters]
        return self.memory[name]


# (position, gradient of n_beta * mean loss, gamma, step_size, generator) -> None
Step = Callable[[Position, list[Tensor], float, float, torch.Generator], None]


def _noise(parameters: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(p.shape, generator=generator, device=p.device, dtype=p.dtype) for p in parameters]


def _drift(position: Position, gradient: list[Tensor], gamma: float) -> list[Tensor]:
    """Gradient of minus log posterior: loss term plus gamma (w - w*)."""
    displacement = torch._foreach_sub(position.parameters, position.anchor)
    return list(torch._foreach_add(gradient, displacement, alpha=gamma))


@torch.no_grad()
def sgld(
    position: Position, gradient: list[Tensor], gamma: float, step_size: float, generator: torch.Generator
) -> None:
    """w <- w - step_size / 2 * drift + N(0, step_size): the paper's alg:sgld."""
    drift = _drift(position, gradient, gamma)
    torch._foreach_add_(position.parameters, drift, alpha=-step_size / 2)
    torch._foreach_add_(position.parameters, _noise(position.parameters, generator), alpha=step_size**0.5)


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
    torch._foreach_mul_(squares, RMSPROP_DECAY)
    torch._foreach_addcmul_(squares, gradient, gradient, value=1 - RMSPROP_DECAY)
    metric = torch._foreach_add(torch._foreach_sqrt(squares), RMSPROP_STABILITY)
    torch._foreach_reciprocal_(metric)
    drift = _drift(position, gradient, gamma)
    torch._foreach_addcmul_(position.parameters, drift, metric, value=-step_size / 2)
    noise = _noise(position.parameters, generator)
    torch._foreach_addcmul_(position.parameters, noise, torch._foreach_sqrt(metric), value=step_size**0.5)


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
    torch._foreach_add_(velocity, _noise(position.parameters, generator), alpha=(step_size * FRICTION) ** 0.5)
    torch._foreach_add_(position.parameters, velocity)


SAMPLERS: dict[str, Step] = {"sgld": sgld, "rmsprop_sgld": rmsprop_sgld, "sghmc": sghmc}
