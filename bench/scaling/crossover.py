"""Where one method becomes the better buy than another: in fitting sequences, in queries, in model size.

At each place both are estimated with their intervals. The crossing is where the two are the same; between `low` and
`high` their intervals overlap, so that the rows do not say which is cheaper.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from bench.scaling.costs import Setting
from bench.scaling.fits import Estimate, Estimator
from bench.scaling.lines import Curve
from retrain.models.pythia_suite import SUITE, Configuration

PLACES = 40  # places looked at, evenly in log
RANGES = {"fit_examples": (10.0, 1e8), "queries": (1.0, 1e6), "parameters": (1.4e7, 1.2e10)}


@dataclass(frozen=True)
class Crossover:
    """At `value` the two cost the same; above it `cheaper_above` is the better buy, and beyond `low` to `high` surely.

    None where there is no such end within the range that was looked at.
    """

    axis: str  # fit_examples, queries or parameters
    value: float
    cheaper_above: str
    low: float | None
    high: float | None
    model: str = ""


@dataclass(frozen=True)
class Throughout:
    """No crossing within the range: `cheaper` is the better buy everywhere; `sure` where no intervals overlap."""

    axis: str
    cheaper: str
    sure: bool


@dataclass(frozen=True)
class Several:
    """The better buy changes at every one of `values`; `first` is that below all of them, `second` that above it."""

    axis: str
    values: tuple[float, ...]
    first: str
    second: str


Crossing = Crossover | Throughout | Several
Ends = tuple[float, float, float]  # seconds, and their interval


def crossover(
    first: Callable[[float], Ends], second: Callable[[float], Ends], axis: str, names: tuple[str, str], model: str = ""
) -> Crossing:
    """Where the better buy changes, if it does."""
    low, high = RANGES[axis]
    grid = np.geomspace(low, high, PLACES)
    at = [(first(float(x)), second(float(x))) for x in grid]
    gap = np.array([math.log(a[0] / b[0]) for a, b in at])
    # How far the intervals are apart, in log: negative where they overlap.
    apart = np.array([max(math.log(b[1] / a[2]), math.log(a[1] / b[2])) for a, b in at])
    changes = np.nonzero(np.sign(gap[:-1]) * np.sign(gap[1:]) < 0)[0]
    if not len(changes):
        return Throughout(axis, names[0] if gap[0] < 0 else names[1], bool((apart > 0).all()))
    values = [_zero(grid, gap, int(change), float(grid[change])) for change in changes]
    if len(values) > 1:
        below, above_it = names if gap[changes[0]] < 0 else names[::-1]
        return Several(axis, tuple(values), below, above_it)
    i, value = int(changes[0]), values[0]
    surely_below, surely_above = np.nonzero(apart[: i + 1] > 0)[0], np.nonzero(apart[i + 1 :] > 0)[0]
    return Crossover(
        axis=axis,
        value=value,
        cheaper_above=names[1] if gap[i] < 0 < gap[i + 1] else names[0],
        low=_zero(grid, apart, int(surely_below[-1]), value) if len(surely_below) else None,
        high=_zero(grid, apart, i + int(surely_above[0]), value) if len(surely_above) else None,
        model=model,
    )


def _zero(grid: np.ndarray, values: np.ndarray, i: int, otherwise: float) -> float:
    """Where the values cross zero between i and i + 1, straight in log; where both are above, the crossing itself."""
    if values[i] * values[i + 1] > 0:
        return otherwise
    share = values[i] / (values[i] - values[i + 1])
    return float(np.exp(np.log(grid[i]) + share * np.log(grid[i + 1] / grid[i])))


def _ends(estimate: Estimate) -> Ends:
    return estimate.seconds, estimate.seconds_low, estimate.seconds_high


def crossing_in(
    estimator: Estimator, configuration: Configuration, setting: Setting, axis: str, names: tuple[str, str]
) -> Crossing:
    """In fitting sequences or queries, for one model."""

    def seconds(method: str) -> Callable[[float], Ends]:
        return lambda x: _ends(estimator.estimate(method, configuration, replace(setting, **{axis: max(1, round(x))})))

    return crossover(seconds(names[0]), seconds(names[1]), axis, names, configuration.name)


def crossing_in_parameters(estimator: Estimator, setting: Setting, names: tuple[str, str]) -> Crossing:
    """Across the suite's models, straight between them in log-log."""

    def seconds(method: str) -> Callable[[float], Ends]:
        found = [_ends(estimator.estimate(method, configuration, setting)) for configuration in SUITE.values()]
        sizes = [configuration.num_parameters for configuration in SUITE.values()]
        curves = [Curve(sizes, list(values)) for values in zip(*found)]
        return lambda x: (curves[0].at(x), curves[1].at(x), curves[2].at(x))

    return crossover(seconds(names[0]), seconds(names[1]), "parameters", names)
