"""Lines within a point and curves across models: how measured seconds become seconds at another size. Numpy alone.

- within a point, seconds are a line in what is repeated (draws, fitting sequences, blocks of a model): `fit_line`;
- a score's seconds are a base, a part a training sequence, a part a query and a part a pair: `bilinear`;
- across models, a cost per unit of work changes smoothly with size: `Curve`, straight between neighbours in log-log;
  or a cost is a sum of kinds of work, each at one price: `Law`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

# What a timing is off by before its own residuals are seen, and how many residuals that counts for: two or three sizes
# leave none or one, which by itself says nothing or anything.
USUAL_NOISE, USUAL_FREEDOM = 0.05, 4
LEAST_NOISE = 0.003  # a clock is no better than this
LINEAR_WITHIN = 0.10  # the largest relative residual at which a line is believed
UNKNOWN_ERROR = 0.25  # of a curve through too few models to leave one out
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # by degrees of freedom
FEW_MISSES = 2  # one says no more than that
GROWTH, MOST_GROWTH = 0.05, 0.5  # what a curve's error grows by, in log, a factor of e beyond the measured sizes


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t; few errors say little about the next one. 0: of the normal distribution."""
    if 1 <= freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    return 1.96 + (2.6 / freedom if freedom > 0 else 0.0)


# ---- lines within a point ----


@dataclass(frozen=True)
class Fit:
    """A sum of columns, each times a weight that is not negative, by least squares on relative errors."""

    weights: np.ndarray
    residual: float  # the largest, relative
    noise: float  # relative standard deviation of one measurement
    covariance: np.ndarray  # of the weights, for unit noise
    floor: float  # a value's own noise is at least that of this
    num_values: int

    def spread(self, columns: Sequence[float]) -> float:
        """Standard deviation of a prediction."""
        at = np.array(columns)
        return self.noise * math.sqrt(float(at @ self.covariance @ at) + float(at @ self.weights) ** 2 + self.floor**2)


def _fit(columns: list[np.ndarray], value: np.ndarray, least: float, jitter: float, rank: int | None = None) -> dict:
    """Fields of a `Fit`. Timing noise grows with the time, so every value counts by its relative error.

    least: the last weight is at least this. jitter: seconds that any value is off by however short it is, so that two
    short ones do not make a steep line. rank: how many weights count against the values; those above zero if None.
    """
    design, floor = np.stack(columns, axis=1), jitter / USUAL_NOISE
    scale = np.maximum(np.hypot(value, floor), 1e-12)
    weights = nonnegative(design, value - least * design[:, -1], scale)
    weights[-1] += least
    misses, design = design @ weights - value, design / scale[:, None]
    used = weights > 0
    covariance = np.zeros((len(weights), len(weights)))
    covariance[np.ix_(used, used)] = np.linalg.pinv(design[:, used].T @ design[:, used])
    freedom = max(0, len(value) - (int(used.sum()) if rank is None else rank))
    squares = USUAL_FREEDOM * USUAL_NOISE**2 + float(np.square(misses / scale).sum())
    return {
        "weights": weights, "covariance": covariance, "floor": floor, "num_values": len(value),
        "residual": float(np.abs(misses / np.maximum(np.abs(value), 1e-12)).max()),
        "noise": math.sqrt(squares / (USUAL_FREEDOM + freedom)),
    }  # fmt: skip


class Line(Fit):
    """value = intercept + slope * size."""

    @property
    def intercept(self) -> float:
        return float(self.weights[0])

    @property
    def slope(self) -> float:
        return float(self.weights[1])

    def at(self, size: float) -> float:
        return self.intercept + self.slope * size

    def interval(self, size: float) -> tuple[float, float]:
        """95 % prediction interval; Student's t on the sizes beyond two and what is usual."""
        value, spread = self.at(size), student(self.num_values - 2 + USUAL_FREEDOM) * self.spread([1.0, size])
        return max(0.0, value - spread), value + spread


def fit_line(sizes: Sequence[float], values: Sequence[float], least: float = 0.0, jitter: float = 0.0) -> Line:
    """Through at least two sizes. What nothing costs is not negative, and one more costs at least `least`."""
    x, y = np.asarray(sizes, float), np.asarray(values, float)
    if len(np.unique(x)) < 2:
        raise ValueError(f"a line needs two sizes or more, not {sorted(set(sizes))}")
    return Line(**_fit([np.ones_like(x), x], y, least, jitter, rank=2))


class BlockPlane(Fit):
    """value = base + blocks * (fixed + each * count): blocks are all alike, and so are sequences."""

    def at(self, blocks: float, count: float) -> float:
        base, fixed, each = self.weights.tolist()
        return base + blocks * (fixed + each * count)

    def deviation(self, blocks: float, count: float) -> float:
        return self.spread([1.0, blocks, blocks * count]) * student(USUAL_FREEDOM) / student(0)


def fit_blocks(points: Sequence[tuple[float, float, float]], least: float = 0.0, jitter: float = 0.0) -> BlockPlane:
    """Through (blocks, count, value), at least two of them; a block and count cost at least `least`.

    One count does not tell what is fixed from what each takes: all of it is then each's, so that more costs more.
    """
    blocks, count, value = np.asarray(points, float).T
    fixed_is_known = len(np.unique(count)) > 1
    return BlockPlane(**_fit([np.ones_like(blocks), blocks * fixed_is_known, blocks * count], value, least, jitter))


def bilinear(points: Sequence[tuple[float, float, float]]) -> tuple[float, ...]:
    """(first, second, value) -> (base, per first, per second, per pair), none negative."""
    first, second, value = np.asarray(points, float).T
    columns = np.stack([np.ones_like(first), first, second, first * second], axis=1)
    return tuple(nonnegative(columns, value, np.maximum(value, 1e-12)).tolist())


def bilinear_at(parts: Sequence[float], first: float, second: float) -> float:
    base, per_first, per_second, per_pair = parts
    return base + per_first * first + per_second * second + per_pair * first * second


def nonnegative(columns: np.ndarray, value: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Weights of the columns, none negative, that give the values best; errors count over `scale`."""
    from scipy.optimize import nnls

    design = columns / scale[:, None]
    sizes = np.linalg.norm(design, axis=0)
    sizes[sizes == 0] = 1.0  # a column that is left out
    return nnls(design / sizes, value / scale)[0] / sizes


# ---- across models ----


class AcrossModels:
    """How far off a prediction at another size is: what the others miss each measured model by, near that size."""

    x: np.ndarray  # log of the sizes, in order
    repeats: Sequence[tuple[float, float]] = ()  # (log size, distance from their mean) of further runs of one size

    def _miss(self, i: int) -> float:
        """In log: model i as the others would have it."""
        raise NotImplementedError

    @cached_property
    def misses(self) -> list[float]:
        return [self._miss(i) for i in range(len(self.x))] if len(self.x) > 2 else []

    def deviation(self, size: float) -> float:
        """One standard deviation, in log, of a prediction at `size`: the misses near it, widened for being few."""
        at, beyond = math.log(size), 0.0
        if len(self.x) and not self.x[0] <= at <= self.x[-1]:
            # Beyond an end the error grows by a factor of e: twice as the end is missed by the others.
            end, beside = (0, 1) if at < self.x[0] else (-1, -2)
            growth = UNKNOWN_ERROR
            if self.misses and self.x[end] != self.x[beside]:
                rate = abs(self.misses[end]) / abs(float(self.x[end] - self.x[beside]))
                growth = min(max(GROWTH, 2 * rate), MOST_GROWTH)
            beyond = growth * abs(at - float(self.x[end]))
        inner = [(float(place), miss) for place, miss in zip(self.x[1:-1], self.misses[1:-1])] + list(self.repeats)
        if not inner:
            return math.hypot(UNKNOWN_ERROR, beyond)
        # A model of a few million parameters waits for its kernels to start: that says little about one of billions.
        weights = np.exp([-abs(at - place) for place, _ in inner])
        squares = np.square([miss for _, miss in inner])
        near = math.sqrt(float(weights @ squares / weights.sum()))
        if len(inner) < FEW_MISSES:  # Student's quantile of one miss would say that anything may be
            return math.hypot(max(near, UNKNOWN_ERROR), beyond)
        return math.hypot(near * student(len(inner)) / student(0), beyond)


class Curve(AcrossModels):
    """A positive cost against size: straight lines in log-log between neighbours, and beyond the ends."""

    def __init__(self, sizes: Sequence[float], costs: Sequence[float]):
        together: dict[float, list[float]] = {}
        for size, cost in zip(sizes, costs):
            if size > 0 and cost > 0 and math.isfinite(cost):
                together.setdefault(float(size), []).append(math.log(cost))
        self.x = np.log(np.array(sorted(together)))
        self.y = np.array([float(np.mean(together[size])) for size in sorted(together)])
        # Models of one size differ by what the machine does from run to run.
        self.repeats = [
            (math.log(size), value - float(np.mean(values)))
            for size, values in together.items()
            for value in values[1:]
        ]

    def at(self, size: float) -> float:
        return float(np.exp(self._log_at(self.x, self.y, math.log(size))))

    @staticmethod
    def _log_at(x: np.ndarray, y: np.ndarray, at: float) -> float:
        if len(x) < 2:
            return float(y[0]) if len(x) else math.nan
        if x[0] <= at <= x[-1]:
            return float(np.interp(at, x, y))
        i, j, anchor = (0, 1, 0) if at < x[0] else (-2, -1, -1)
        return float(y[anchor] + (y[j] - y[i]) / (x[j] - x[i]) * (at - x[anchor]))

    def _miss(self, i: int) -> float:
        return self._log_at(np.delete(self.x, i), np.delete(self.y, i), float(self.x[i])) - float(self.y[i])


class Law(AcrossModels):
    """A cost that is a sum of kinds of work, each at one price, times what models of about that size are over it.

    Two kinds are enough to go from a model that waits for its kernels to start to one that is bound by arithmetic,
    where a curve would draw one slope on into the other.
    """

    def __init__(self, sizes: Sequence[float], work: Sequence[Sequence[float]], costs: Sequence[float]):
        known = sorted((size, tuple(kinds), cost) for size, kinds, cost in zip(sizes, work, costs) if cost > 0)
        self.x = np.log(np.array([size for size, _, _ in known]))
        self.work = np.array([kinds for _, kinds, _ in known], float)
        self.costs = np.array([cost for _, _, cost in known], float)
        self.prices = nonnegative(self.work, self.costs, self.costs) if known else np.zeros(0)
        self.over = np.log(self.costs / (self.work @ self.prices)) if known else np.zeros(0)

    def at(self, size: float, work: Sequence[float]) -> float:
        if not len(self.x):
            return math.nan
        weights = np.exp(-np.abs(self.x - math.log(size)))
        return float(np.asarray(work, float) @ self.prices * math.exp(weights @ self.over / weights.sum()))

    def _miss(self, i: int) -> float:
        sizes, work, costs = (
            np.delete(values, i, axis=0).tolist() for values in (np.exp(self.x), self.work, self.costs)
        )
        law = Law(sizes, work, costs)
        return math.log(law.at(math.exp(self.x[i]), self.work[i].tolist()) / float(self.costs[i]))


_curve, _law = lru_cache(maxsize=4096)(Curve), lru_cache(maxsize=4096)(Law)


def curve_through(sizes: Sequence[float], costs: Sequence[float]) -> Curve:
    """The same curve for the same numbers: what it misses is worked out once."""
    return _curve(tuple(sizes), tuple(costs))


def law_through(sizes: Sequence[float], work: Sequence[tuple[float, ...]], costs: Sequence[float]) -> Law:
    return _law(tuple(sizes), tuple(work), tuple(costs))
