"""Chooses what a setting of 0 leaves open, at the checkpoint, in the time of some tens of draws.

- `gamma`: the localising Gaussian is as wide as the losses bear. Weights drawn from it alone raise the mean training
  loss by RISE nats: wide enough for the losses to move by amounts that matter, not so wide that the model is gone.
- `n_beta`: where the loss is curved most, it pulls a chain back as hard as LOSS_PULL times the Gaussian does. More
  would need shorter steps and many more of them. A model that fits a few hundred examples is flat at its weights and
  steep beside them: there a pilot chain runs away, and a tenth of n_beta is taken until none does.
- `step_size`: 1 / gamma, which halves a displacement's memory of itself at every step (for `rmsprop_sgld`, whose step
  is as much longer as its metric allows at the most, that much less).
- `draws`: enough for EFFECTIVE_DRAWS independent ones, by how many of a pilot chain's draws are, within bounds.

A function of the seed, the checkpoint and the settings, through the training losses alone: no query is looked at.
Numbers are rounded to 1, 2 or 5 times a power of ten, so that rounding errors of another machine rarely matter.
"""

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baselines.bif.collect import diagnosed_examples
from baselines.bif.diagnostics import effective_sample_size
from baselines.bif.engine import Workbench, copy_to_sample
from baselines.bif.passes import Gradient, Measured
from baselines.bif.sampler import RMSPROP_STABILITY, Position
from baselines.bif.settings import DISPLACEMENTS, FROM_PILOT, ChainSettings
from baselines.method import Problem
from baselines.support.curvature import Metric
from baselines.support.transfer import on_device
from retrain.examples import Examples

# Measured on four tasks at RISE 0.001 to 3: images gain a little from more than 0.1, sequences lose all from 1 on.
RISE = 0.1  # nats
LOSS_PULL = 0.5
EFFECTIVE_DRAWS = 500
FEWEST_DRAWS, MOST_DRAWS = 100, 1000  # of a chain
MEASURED_EXAMPLES = 128  # training examples that the pilot looks at
DIRECTIONS = 6  # random displacements, and their opposites, that the rise is averaged over
POWER_STEPS = 10  # of the power iteration for the largest curvature
PILOT_CHAINS, PILOT_DRAWS = 2, 50
LEAST_SHARE = 0.02  # of effective draws: fewer cannot be told apart in a pilot this short
SMALLEST_GAMMA, LARGEST_GAMMA = 1e-2, 1e10
SMALLEST_CURVATURE = 1e-6
RUN_AWAY = 5.0  # nats above the checkpoint's mean loss
SMALLEST_N_BETA = 1e-3
FIRST_PILOT_CHAIN = 10**6  # no chain of the scores has its noise
_PILOT_STREAM = 31


@dataclass(frozen=True)
class Pilot:
    """What it chose, or was given, and what it saw."""

    gamma: float
    step_size: float
    n_beta: float
    draws: int
    rise: float  # nats by which the localising Gaussian alone raises the mean training loss
    curvature: float  # the largest of a minibatch's mean loss; NaN where n_beta was given
    effective_share: float  # of the pilot chains' draws; NaN where draws were given

    def chosen(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FROM_PILOT}

    def shown(self) -> dict[str, float]:
        """For a record: without what was not looked at."""
        return {f.name: getattr(self, f.name) for f in fields(self) if math.isfinite(getattr(self, f.name))}

    def packed(self) -> Tensor:
        return torch.tensor(astuple(self), dtype=torch.float64)

    @classmethod
    def unpacked(cls, values: Tensor) -> "Pilot":
        numbers = dict(zip((f.name for f in fields(cls)), values.tolist(), strict=True))
        return cls(**(numbers | {"draws": int(numbers["draws"])}))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.shown().items())


def run_pilot(settings: ChainSettings, problem: Problem, metric: Metric | None) -> Pilot:
    train = problem.task.resident(on_device(problem.train, problem.device), problem.device)
    order = np.random.default_rng([problem.seed, _PILOT_STREAM]).permutation(len(train))
    measured = train.select(order[:MEASURED_EXAMPLES])
    place = _Place(settings, problem, train, measured, metric)
    gamma = settings.gamma or place.gamma_of_rise(RISE)
    rise = place.rise(gamma)
    curvature = math.nan
    n_beta = settings.n_beta
    if not n_beta:
        curvature = place.largest_curvature(gamma)
        n_beta = rounded(LOSS_PULL * gamma / curvature)
    step_size = settings.step_size or _step_size(settings.sampler, gamma)
    start = place.start
    del place
    draws, share = settings.draws, math.nan
    own = {f.name: getattr(settings, f.name) for f in fields(ChainSettings)}
    while not draws or not settings.n_beta:
        numbers = {"gamma": gamma, "n_beta": n_beta, "step_size": step_size, "draws": PILOT_DRAWS}
        with_numbers = ChainSettings(**(own | numbers | {"control_variate": False}))
        traces = _pilot_traces(with_numbers, problem, train, measured, metric)
        risen = float(traces[:, PILOT_DRAWS // 2 :].mean(dim=(1, 2)).max()) - start
        if settings.n_beta or risen <= RUN_AWAY or n_beta < SMALLEST_N_BETA:  # not so where it is not a number
            share = math.nan if draws else _effective_share(traces)
            break
        n_beta = rounded(n_beta / 10)
    if not draws:
        wanted = rounded(EFFECTIVE_DRAWS / (settings.chains * share))
        draws = int(min(max(wanted, FEWEST_DRAWS), MOST_DRAWS))
    return Pilot(gamma, step_size, n_beta, draws, rise, curvature, share)


def rounded(value: float) -> float:
    """The nearest of 1, 2 and 5 times a power of ten, on a logarithmic scale."""
    power = math.floor(math.log10(value))
    choices = [factor * 10.0**exponent for exponent in (power, power + 1) for factor in (1, 2, 5)]
    nearest = min(choices, key=lambda choice: abs(math.log(choice / value)))
    return float(f"{nearest:g}")


def _step_size(sampler: str, gamma: float) -> float:
    return (RMSPROP_STABILITY if sampler == "rmsprop_sgld" else 1.0) / gamma


class _Place:
    """The checkpoint, and what losses and gradients are at some distance from it."""

    def __init__(
        self, settings: ChainSettings, problem: Problem, train: Examples, measured: Examples, metric: Metric | None
    ):
        self.device = problem.device
        self.model, sampled = copy_to_sample(problem.model, settings.parameters)
        parameters = list(sampled.values())
        anchor = [problem.model.get_parameter(name).data for name in sampled]
        weights = [parameter.data for parameter in parameters]
        self.position = Position(weights, anchor, DISPLACEMENTS[settings.displacement], metric=metric)
        self.losses = Measured(problem.task, self.model, measured, settings.batch_size)
        self.gradient = Gradient(problem.task, self.model, parameters, train, settings.minibatch, 1.0, metric=metric)
        self.seed = int(np.random.SeedSequence([problem.seed, _PILOT_STREAM]).generate_state(1)[0])
        self.start = float(self.losses().mean())

    def rise(self, gamma: float) -> float:
        """Nats by which weights drawn from the localising Gaussian raise the mean loss; the same draws at any gamma."""
        generator = torch.Generator(self.device).manual_seed(self.seed)
        found = []
        for _ in range(DIRECTIONS):
            direction = self._random(generator)
            for sign in (1.0, -1.0):  # a slope cancels
                self._move(direction, sign * gamma**-0.5)
                found.append(float(self.losses().mean()) - self.start)
        rise = float(np.mean(found))
        return rise if math.isfinite(rise) else math.inf

    def gamma_of_rise(self, target: float) -> float:
        """The gamma, rounded, at which the rise is closest to the target from below."""
        return _first_below(self.rise, target, SMALLEST_GAMMA, LARGEST_GAMMA)

    def largest_curvature(self, gamma: float) -> float:
        """Of one minibatch's mean loss, by power iteration on differences of gradients as far apart as a chain goes."""
        length = gamma**-0.5
        generator = torch.Generator(self.device)
        direction = self._random(generator.manual_seed(self.seed))
        curvature = 0.0
        for _ in range(POWER_STEPS):
            direction = _scaled(direction, 1 / max(_norm(direction), 1e-30))
            sides = []
            for sign in (1.0, -1.0):
                self._move(direction, sign * length)
                sides.append([g.float().clone() for g in self.gradient(generator.manual_seed(self.seed))])
            difference = [(above - below) / (2 * length) for above, below in zip(*sides, strict=True)]
            curvature = sum(float((a * b).sum()) for a, b in zip(difference, direction, strict=True))
            direction = difference
        # A loss that is flat, or curved downwards alone, pulls no chain back: anything goes, within reason.
        return max(curvature, SMALLEST_CURVATURE) if math.isfinite(curvature) else 1 / SMALLEST_CURVATURE

    def _random(self, generator: torch.Generator) -> list[Tensor]:
        shapes = [displacement.shape for displacement in self.position.displacement]
        return [torch.randn(shape, generator=generator, device=self.device) for shape in shapes]

    def _move(self, direction: list[Tensor], length: float) -> None:
        for displacement, part in zip(self.position.displacement, direction, strict=True):
            displacement.copy_(part).mul_(length)
        self.position.publish()


def _first_below(value_of: Callable[[float], float], target: float, smallest: float, largest: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten at which a falling function is at most the target, by bisection."""
    steps = [rounded(10 ** (k / 3)) for k in range(round(3 * math.log10(smallest)), round(3 * math.log10(largest)) + 1)]
    low, high = -1, len(steps) - 1  # above the target at `low`, below at `high`, both taken for granted
    while high - low > 1:
        middle = (low + high) // 2
        if value_of(steps[middle]) <= target:
            high = middle
        else:
            low = middle
    return steps[high]


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


def _scaled(tensors: list[Tensor], factor: float) -> list[Tensor]:
    return [tensor * factor for tensor in tensors]


def _pilot_traces(
    settings: ChainSettings, problem: Problem, train: Examples, measured: Examples, metric: Metric | None
) -> Tensor:
    """(chains, draws, examples) losses."""
    workbench = Workbench(settings, problem.task, problem.model, train, measured, metric)
    return torch.stack(
        [
            torch.stack([losses.clone() for losses in workbench.draws(problem.seed, FIRST_PILOT_CHAIN + chain)])
            for chain in range(PILOT_CHAINS)
        ]
    )


def _effective_share(traces: Tensor) -> float:
    """Of the pilot chains' draws, how many are worth an independent one: the median over training examples."""
    chosen = diagnosed_examples(traces.shape[2]).to(traces.device)
    sizes = effective_sample_size(traces[:, :, chosen].cpu().numpy())
    sizes = sizes[np.isfinite(sizes)]
    share = float(np.median(sizes)) / (PILOT_CHAINS * PILOT_DRAWS) if len(sizes) else 0.0
    return min(max(share, LEAST_SHARE), 1.0)
