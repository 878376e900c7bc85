"""What follows from measured costs: projections, arithmetic floors, estimates and crossovers. Pure numpy, no torch.

Three laws are used, each where it holds by construction:

- within a point, seconds are a line in what is repeated (draws, fitting examples, blocks of a model): `fit_line`;
- across models, a cost per unit of work changes smoothly with size: `Curve`, straight between neighbours in log-log;
- BIF costs draws x (2 d (n + q) + 6 d m) tokens FLOP, with d the parameters that multiply tokens: `draw_flops`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrain.models.pythia_suite import Configuration

TWO_SIZES_NOISE = 0.05  # relative noise assumed where two sizes leave no residual to judge by
LEAST_NOISE = 0.003  # a clock is no better than this
LINEAR_WITHIN = 0.10  # the largest relative residual at which a line is believed
UNKNOWN_ERROR = 0.25  # of a curve through too few models to leave one out
SEARCH_BEYOND = 100.0  # crossovers are searched to this factor beyond the measured sizes, and marked there


# ---- a line within a point ----


@dataclass(frozen=True)
class Line:
    """value = intercept + slope * size, by least squares on relative errors."""

    intercept: float
    slope: float
    sizes: tuple[float, ...]
    residual: float  # the largest, relative
    noise: float  # relative standard deviation of one measurement
    covariance: tuple[tuple[float, float], tuple[float, float]]  # of (intercept, slope), for unit noise

    @property
    def linear(self) -> bool:
        return self.residual <= LINEAR_WITHIN

    def at(self, size: float) -> float:
        return self.intercept + self.slope * size

    def interval(self, size: float) -> tuple[float, float]:
        """95 % prediction interval; Student's t on the sizes beyond two."""
        from scipy import stats

        freedom = len(self.sizes) - 2
        quantile = float(stats.t.ppf(0.975, freedom)) if freedom else 1.96
        at = np.array([1.0, size])
        value = self.at(size)
        spread = quantile * self.noise * math.sqrt(float(at @ np.array(self.covariance) @ at) + value**2)
        return max(0.0, value - spread), value + spread


def fit_line(sizes: Sequence[float], values: Sequence[float]) -> Line:
    """Through at least two sizes; timing noise grows with the time, so every value counts by its relative error.

    What nothing costs is not negative: a line that would start below zero goes through zero instead.
    """
    x, y = np.asarray(sizes, float), np.asarray(values, float)
    if len(np.unique(x)) < 2:
        raise ValueError(f"a line needs two sizes or more, not {sorted(set(sizes))}")
    scale = np.maximum(np.abs(y), 1e-12)
    design = np.stack([np.ones_like(x), x], axis=1) / scale[:, None]
    inverse = np.linalg.inv(design.T @ design)
    intercept, slope = inverse @ design.T @ (y / scale)
    if intercept < 0:
        rate = design[:, 1]
        intercept, slope = 0.0, float(rate @ (y / scale) / (rate @ rate))
        inverse = np.array([[0.0, 0.0], [0.0, 1 / float(rate @ rate)]])
    errors = (intercept + slope * x - y) / scale
    freedom = len(x) - 2
    noise = (
        max(LEAST_NOISE, math.sqrt(float(errors @ errors) / freedom))
        if freedom
        else max(TWO_SIZES_NOISE, float(np.abs(errors).max()))
    )
    return Line(
        float(intercept), float(slope), tuple(x.tolist()), float(np.abs(errors).max()), noise,
        ((inverse[0, 0], inverse[0, 1]), (inverse[1, 0], inverse[1, 1])),
    )  # fmt: skip


def bilinear(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, float, float]:
    """(first, second, value) -> (base, per first, per second, per pair), none negative: v = b + p f + r s + t f s."""
    from scipy.optimize import nnls

    first, second, value = np.asarray(points, float).T
    scale = np.maximum(np.abs(value), 1e-12)
    design = np.stack([np.ones_like(first), first, second, first * second], axis=1) / scale[:, None]
    sizes = np.linalg.norm(design, axis=0)
    found, _ = nnls(design / sizes, value / scale)
    base, per_first, per_second, per_pair = (found / sizes).tolist()
    return base, per_first, per_second, per_pair


# ---- the arithmetic floor ----


def draw_flops(token_parameters: float, train: int, queries: int, minibatch: int, tokens: int) -> float:
    """One draw of BIF: a forward pass over every sequence (2 d a token), a gradient of the minibatch (6 d a token)."""
    return token_parameters * tokens * (2.0 * (train + queries) + 6.0 * min(minibatch, train))


# ---- a curve across models ----


class Curve:
    """A positive cost against size: straight lines in log-log between neighbours, and beyond the ends."""

    def __init__(self, sizes: Sequence[float], costs: Sequence[float]):
        together: dict[float, list[float]] = {}
        for size, cost in zip(sizes, costs):
            if size > 0 and cost > 0 and math.isfinite(cost):
                together.setdefault(float(size), []).append(math.log(cost))
        self.x = np.log(np.array(sorted(together)))
        self.y = np.array([float(np.mean(together[size])) for size in sorted(together)])

    def __len__(self) -> int:
        return len(self.x)

    def at(self, size: float) -> float:
        return float(np.exp(_extended(self.x, self.y, math.log(size))))

    @property
    def slope(self) -> float:
        """Of one line through everything."""
        return float(np.polyfit(self.x, self.y, 1)[0]) if len(self.x) > 1 else math.nan

    @property
    def error(self) -> float:
        """Root mean square error, in log, of each inner model predicted from the others."""
        if len(self.x) < 3:
            return UNKNOWN_ERROR
        inner = range(1, len(self.x) - 1)
        errors = [
            _extended(np.delete(self.x, i), np.delete(self.y, i), float(self.x[i])) - float(self.y[i]) for i in inner
        ]
        return float(np.sqrt(np.mean(np.square(errors))))


def _extended(x: np.ndarray, y: np.ndarray, at: float) -> float:
    if len(x) == 0:
        return math.nan
    if len(x) == 1:
        return float(y[0])
    if x[0] <= at <= x[-1]:
        return float(np.interp(at, x, y))
    i, j = (0, 1) if at < x[0] else (-2, -1)
    anchor = 0 if at < x[0] else -1
    return float(y[anchor] + (y[j] - y[i]) / (x[j] - x[i]) * (at - x[anchor]))


# ---- estimates ----


@dataclass(frozen=True)
class Setting:
    """What is asked of a method, beside the model."""

    train: int
    queries: int
    tokens: int
    draws: int
    fit_examples: int
    minibatch: int = 32


@dataclass(frozen=True)
class Estimate:
    method: str
    seconds: float
    seconds_low: float
    seconds_high: float
    peak_memory_bytes: float
    disk_bytes: float
    num_rows: int
    beyond: bool  # larger or smaller than every measured model


class Estimator:
    """Predicts the cost of a run from the rows of scaling.csv of one device; rows with an error are passed over."""

    def __init__(self, rows: Sequence[dict[str, Any]]):
        self.rows = [row for row in rows if not row.get("error") and _number(row.get("score_seconds")) is not None]

    def methods(self) -> list[str]:
        return list(dict.fromkeys(row["method"] for row in self.rows))

    def of(self, method: str) -> list[dict[str, Any]]:
        return sorted((row for row in self.rows if row["method"] == method), key=lambda row: row["parameters"])

    def estimate(self, method: str, configuration: Configuration, setting: Setting) -> Estimate:
        rows = self.of(method)
        if not rows:
            raise ValueError(f"no measured row of {method}")
        law: Callable[..., tuple[float, float]] = {"bif": _bif_seconds, "ekfac": _ekfac_seconds}.get(
            method, _other_seconds
        )
        seconds, error = law(rows, configuration, setting)
        own = [
            (row["seconds_high"] - row["seconds_low"]) / (2 * 1.96 * _total(row))
            for row in rows
            if _number(row.get("seconds_high")) and _number(row.get("seconds_low")) is not None and _total(row) > 0
        ]
        spread = 1.96 * math.hypot(max(error, 0.03), float(np.median(own)) if own else 0.0)
        sizes = [row["parameters"] for row in rows]
        memory = Curve(sizes, [row["peak_memory_bytes"] for row in rows]).at(configuration.num_parameters)
        return Estimate(
            method=method,
            seconds=seconds,
            seconds_low=seconds * math.exp(-spread),
            seconds_high=seconds * math.exp(spread),
            peak_memory_bytes=memory,
            disk_bytes=_disk(rows, configuration),
            num_rows=len(rows),
            beyond=not min(sizes) <= configuration.num_parameters <= max(sizes),
        )


def _number(value: Any) -> float | None:
    return None if value is None or value == "" or not math.isfinite(float(value)) else float(value)


def _total(row: dict[str, Any]) -> float:
    return (_number(row.get("fit_seconds")) or 0.0) + (_number(row.get("score_seconds")) or 0.0)


def _row_flops(row: dict[str, Any]) -> float:
    return draw_flops(
        row["token_parameters"], int(row["train"]), int(row["queries"]), int(row["minibatch"]), int(row["tokens"])
    )


def _bif_seconds(rows: list[dict[str, Any]], configuration: Configuration, setting: Setting) -> tuple[float, float]:
    """Setup plus draws x FLOP x seconds a FLOP, the last from the curve across models."""
    sizes = [row["token_parameters"] for row in rows]
    pace = Curve(sizes, [row["seconds_per_draw"] / _row_flops(row) for row in rows])
    setup = Curve(sizes, [max(_number(row.get("setup_seconds")) or 0.0, 1e-3) for row in rows])
    d = configuration.num_token_parameters
    flops = draw_flops(d, setting.train, setting.queries, setting.minibatch, setting.tokens)
    return setup.at(d) + setting.draws * flops * pace.at(d), pace.error


def _ekfac_seconds(rows: list[dict[str, Any]], configuration: Configuration, setting: Setting) -> tuple[float, float]:
    """Eigendecompositions by sum of cubes, fitting by example, scoring by sequences, queries and pairs."""
    d = configuration.num_token_parameters
    sizes = [row["token_parameters"] for row in rows]
    eigen = Curve([row["eigen_cost"] for row in rows], [row["eigen_seconds"] for row in rows])
    example = Curve(sizes, [row["fit_seconds_per_example"] / row["tokens"] for row in rows])
    rest = Curve(
        sizes,
        [
            max(
                row["fit_seconds"] - row["eigen_seconds"] - row["fit_seconds_per_example"] * row["fit_examples"],
                1e-3,
            )
            for row in rows
        ],
    )
    score = Curve(sizes, [max(row["score_seconds"], 1e-6) for row in rows])
    # How scoring depends on sequences and queries, as measured on the model nearest in size.
    nearest = min(rows, key=lambda row: abs(math.log(row["token_parameters"] / d)))
    change = score_seconds(nearest, setting.train, setting.queries) / max(
        score_seconds(nearest, int(nearest["train"]), int(nearest["queries"])), 1e-9
    )
    parts = {
        "eigen": (eigen.at(configuration.eigen_cost), eigen.error),
        "examples": (example.at(d) * setting.tokens * setting.fit_examples, example.error),
        "rest": (rest.at(d), 0.0),
        "score": (score.at(d) * change * setting.tokens / nearest["tokens"], score.error),
    }
    total = sum(value for value, _ in parts.values())
    error = math.sqrt(sum((value * error) ** 2 for value, error in parts.values())) / total
    return total, error


def score_seconds(row: dict[str, Any], train: int, queries: int) -> float:
    """EK-FAC's scoring at other numbers of sequences and queries, from the row's own coefficients."""
    values = [_number(row.get(name)) for name in ("score_base", "score_per_train", "score_per_query", "score_per_pair")]
    if None in values or not any(values):
        return float(row["score_seconds"]) * (train + queries) / (row["train"] + row["queries"])
    base, per_train, per_query, per_pair = (float(value or 0.0) for value in values)
    return base + per_train * train + per_query * queries + per_pair * train * queries


def _other_seconds(rows: list[dict[str, Any]], configuration: Configuration, setting: Setting) -> tuple[float, float]:
    """In proportion to the tokens of all sequences."""
    curve = Curve(
        [row["token_parameters"] for row in rows],
        [_total(row) / ((row["train"] + row["queries"]) * row["tokens"]) for row in rows],
    )
    work = (setting.train + setting.queries) * setting.tokens
    return curve.at(configuration.num_token_parameters) * work, curve.error


def _disk(rows: list[dict[str, Any]], configuration: Configuration) -> float:
    """EK-FAC by the theory of its factors times what was measured over it; others by the curve."""
    known = [row for row in rows if (_number(row.get("disk_bytes")) or 0) > 0]
    if not known:
        return 0.0
    sizes = [row["parameters"] for row in known]
    if all(_number(row.get("factor_bytes")) for row in known):
        over = Curve(sizes, [row["disk_bytes"] / row["factor_bytes"] for row in known])
        number_bytes = 4 if known[-1].get("dtype") == "float32" else 2
        return over.at(configuration.num_parameters) * configuration.factor_bytes(number_bytes)
    return Curve(sizes, [row["disk_bytes"] for row in known]).at(configuration.num_parameters)


# ---- where one method becomes the better buy ----


@dataclass(frozen=True)
class Crossover:
    """At `value`, the two cost the same; above it `cheaper_above` is the better buy.

    `low` and `high` hold 95 % of what the crossing would be if the rows' seconds were elsewhere in their intervals;
    None where that has no end: in more than one of forty such draws the curves do not cross there at all.
    """

    axis: str  # parameters, or queries
    value: float
    cheaper_above: str
    beyond: bool  # outside what was measured
    model: str = ""
    low: float | None = None
    high: float | None = None


def crossings(
    first: Callable[[float], float], second: Callable[[float], float], low: float, high: float
) -> list[tuple[float, bool]]:
    """Where first(x) = second(x) between low and high, and whether the second is cheaper above; log grid, bisection."""
    grid = np.geomspace(low, high, 400)
    difference = [math.log(max(first(x), 1e-30)) - math.log(max(second(x), 1e-30)) for x in grid]
    found = []
    for i in range(len(grid) - 1):
        if difference[i] == 0 or difference[i] * difference[i + 1] < 0:
            a, b = float(grid[i]), float(grid[i + 1])
            sign = difference[i] or -difference[i + 1]
            for _ in range(60):
                middle = math.sqrt(a * b)
                here = math.log(max(first(middle), 1e-30)) - math.log(max(second(middle), 1e-30))
                a, b = (middle, b) if here * sign > 0 else (a, middle)
            found.append((math.sqrt(a * b), difference[i + 1] > 0))
    return found


def crossover_parameters(estimator: Estimator, first: str = "bif", second: str = "ekfac") -> list[Crossover]:
    """In model size, at the rows' own setting."""
    curves: dict[str, Curve] = {}
    for method in (first, second):
        rows = estimator.of(method)
        curves[method] = Curve([row["parameters"] for row in rows], [_total(row) for row in rows])
        if len(curves[method]) < 2:
            return []
    measured = [math.exp(value) for curve in curves.values() for value in (curve.x[0], curve.x[-1])]
    low, high = max(measured[0], measured[2]), min(measured[1], measured[3])
    if low >= high:
        return []
    found = []
    for value, second_above in crossings(
        curves[first].at, curves[second].at, low / SEARCH_BEYOND, high * SEARCH_BEYOND
    ):
        cheaper, dearer = (second, first) if second_above else (first, second)
        spread = _crossing_spread(estimator, cheaper, dearer, value, low / SEARCH_BEYOND, high * SEARCH_BEYOND)
        found.append(Crossover("parameters", value, cheaper, not low <= value <= high, "", *spread))
    return found


def _crossing_spread(
    estimator: Estimator, cheaper: str, dearer: str, value: float, low: float, high: float, num_draws: int = 2000
) -> tuple[float | None, float | None]:
    """Where 95 % of the crossings nearest to `value` lie when every row's seconds are drawn from its interval.

    Only crossings of the same direction count: above them `cheaper` is cheaper.
    """
    grid = np.linspace(math.log(low), math.log(high), 400)
    rng = np.random.default_rng(0)
    difference: np.ndarray | float = 0.0
    for method, sign in ((cheaper, 1.0), (dearer, -1.0)):
        rows = estimator.of(method)
        # Rows of one size are drawn apart and averaged, as `Curve` does.
        sizes = sorted({float(row["parameters"]) for row in rows})
        draws = np.zeros((num_draws, len(sizes)))
        for column, size in enumerate(sizes):
            same = [row for row in rows if row["parameters"] == size]
            for row in same:
                deviations = _log_deviation(row) * rng.normal(size=num_draws)
                draws[:, column] += (math.log(_total(row)) + deviations) / len(same)
        x = np.log(sizes)
        difference = difference + sign * np.stack([_extended_many(x, y, grid) for y in draws])
    assert isinstance(difference, np.ndarray)
    changes = np.diff(np.sign(difference), axis=1) < 0
    places = 0.5 * (grid[:-1] + grid[1:])
    distance = np.where(changes, np.abs(places - math.log(value)), np.inf)
    nearest = np.exp(places[distance.argmin(axis=1)])
    # A draw without a crossing counts as one beyond the end at which the crossing was looked for.
    nearest[~changes.any(axis=1)] = np.inf if value > math.sqrt(low * high) else 0.0
    ends = np.quantile(nearest, [0.025, 0.975], method="nearest")
    return tuple(float(end) if 0 < end < math.inf else None for end in ends)  # type: ignore[return-value]


def _log_deviation(row: dict[str, Any]) -> float:
    """One standard deviation of a row's seconds, in log, from its 95 % interval; a clock's where it has none."""
    total, high = _total(row), _number(row.get("seconds_high"))
    return max(LEAST_NOISE, math.log(high / total) / 1.96) if high and high > total else LEAST_NOISE


def _extended_many(x: np.ndarray, y: np.ndarray, at: np.ndarray) -> np.ndarray:
    """`_extended` at many places."""
    values = np.interp(at, x, y)
    for side, (i, j, anchor) in ((at < x[0], (0, 1, 0)), (at > x[-1], (-2, -1, -1))):
        values[side] = y[anchor] + (y[j] - y[i]) / (x[j] - x[i]) * (at[side] - x[anchor])
    return values


def crossover_queries(
    estimator: Estimator, configuration: Configuration, setting: Setting, first: str = "bif", second: str = "ekfac"
) -> list[Crossover]:
    """In the number of queries, for one model."""
    from dataclasses import replace

    def seconds(method: str) -> Callable[[float], float]:
        return lambda queries: (
            estimator.estimate(method, configuration, replace(setting, queries=max(1, round(queries)))).seconds
        )

    if not {first, second} <= set(estimator.methods()):
        return []
    measured = max(int(row["queries"]) for row in estimator.rows)
    return [
        Crossover("queries", max(1, round(value)), second if above else first, value > measured, configuration.name)
        for value, above in crossings(seconds(first), seconds(second), 1.0, 1e7)
    ]
