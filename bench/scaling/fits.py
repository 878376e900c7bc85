"""What a run would cost, from measured rows: every axis, with an interval. No torch.

Each method is a sum of parts (`cost_parts`), and each part is work that arithmetic knows times a pace that changes
smoothly with the model's size (`Curve`), or at a price for each kind of it (`Law`). How far off the pace of a model is
when it is predicted from the others gives the interval; what the rows leave unknown (scores at another number of
queries, sequences of another length) widens it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.scaling.cost_parts import bif_parts, closest_work, ekfac_parts, first_of_each, other_parts
from bench.scaling.costs import Setting, chain_bytes, ekfac_needs
from bench.scaling.ekfac_rows import fit_sizes_of, scores_were_measured
from bench.scaling.lines import curve_through
from bench.scaling.row_values import configuration_of, has_peak, number_of, same_shape, shape_of, total_of
from retrain.models.pythia_suite import Configuration

LEAST_DEVIATION = 0.03  # in log: no run repeats itself better
LENGTH_ERROR = 0.10  # in log, a factor of two in tokens: attention and the size of matrices do not go in proportion
FEW_MODELS_ERROR = 0.35  # in log, a factor of e in size beyond the one or two models that were measured
BIF_LIKE = ("bif", "bif_tokens")


@dataclass(frozen=True)
class Estimate:
    method: str
    seconds: float
    seconds_low: float
    seconds_high: float
    peak_memory_bytes: float
    disk_bytes: float
    num_models: int
    beyond: bool  # larger or smaller than every measured model
    fit_examples: int | None  # of a method that is fitted
    unmeasured: tuple[str, ...] = ()  # what else is asked for that lies outside what was measured, in words


def ratio_ends(first: Estimate, second: Estimate) -> tuple[float, float]:
    """95 % interval of the first's seconds over the second's, their errors taken as independent."""
    deviation = math.hypot(math.log(first.seconds_high / first.seconds), math.log(second.seconds_high / second.seconds))
    ratio = first.seconds / second.seconds
    return ratio * math.exp(-deviation), ratio * math.exp(deviation)


class Estimator:
    """Predicts the cost of a run from the rows of scaling.csv of one device; rows with an error are passed over."""

    def __init__(self, rows: Sequence[dict[str, Any]]):
        self.rows = [row for row in rows if not row.get("error") and number_of(row.get("score_seconds")) is not None]
        self._known: dict[tuple[str, Configuration, Setting], Estimate] = {}
        self._by_method: dict[str, list[dict[str, Any]]] = {}

    def methods(self) -> list[str]:
        return list(dict.fromkeys(row["method"] for row in self.rows))

    def of(self, method: str) -> list[dict[str, Any]]:
        if method not in self._by_method:
            rows = (row for row in self.rows if row["method"] == method)
            self._by_method[method] = sorted(rows, key=lambda row: row["parameters"])
        return self._by_method[method]

    def fitted(self, method: str) -> bool:
        """Whether its rows name a fitting set."""
        return any(number_of(row.get("fit_examples")) for row in self.of(method))

    def without(self, model: str) -> "Estimator":
        return Estimator([row for row in self.rows if row["model"] != model])

    def estimate(self, method: str, configuration: Configuration, setting: Setting) -> Estimate:
        """What the whole run of a method would take; where it crosses another, the same is asked many times."""
        if not self.fitted(method):
            setting = replace(setting, fit_examples=0)
        key = (method, configuration, setting)
        if key not in self._known:
            self._known[key] = self._estimate(*key)
        return self._known[key]

    def _estimate(self, method: str, configuration: Configuration, setting: Setting) -> Estimate:
        rows = self.of(method)
        if not rows:
            raise ValueError(f"no measured row of {method}")
        if method in BIF_LIKE:
            # Every token's loss is of the same draws: what BIF is known to take, times what the tokens add.
            parts = bif_parts(self.of("bif") or rows, rows, configuration, setting)
        elif method == "ekfac":
            parts = ekfac_parts(rows, configuration, setting)
        else:
            parts = other_parts(rows, configuration, setting)
        seconds = sum(part.seconds for part in parts)
        # What one part is off by the others may be too (one machine, one library): their deviations add up.
        together = math.log1p(sum(part.seconds * math.expm1(part.deviation) for part in parts) / seconds)
        length = LENGTH_ERROR * min(abs(math.log2(setting.tokens / row["tokens"])) for row in rows)
        away = _away_from_few(rows, configuration)
        deviation = math.hypot(max(together, LEAST_DEVIATION), _median_deviation(rows), length, away)
        deviation = max(deviation, _own_deviation(rows, configuration, setting))
        sizes = [row["parameters"] for row in rows]
        return Estimate(
            method=method,
            seconds=seconds,
            seconds_low=seconds * math.exp(-1.96 * deviation),
            seconds_high=seconds * math.exp(1.96 * deviation),
            peak_memory_bytes=_memory(rows, configuration, setting),
            disk_bytes=_disk(rows, configuration, setting),
            num_models=len({row["model"] for row in rows}),
            beyond=not min(sizes) <= configuration.num_parameters <= max(sizes),
            fit_examples=setting.fit_examples if self.fitted(method) else None,
            unmeasured=_unmeasured(rows, configuration, setting),
        )


def _away_from_few(rows: list[dict[str, Any]], configuration: Configuration) -> float:
    """What one or two models do not say of a larger or smaller one, in log."""
    sizes = sorted({row["parameters"] for row in rows})
    beyond = max(sizes[0] / configuration.num_parameters, configuration.num_parameters / sizes[-1], 1.0)
    return FEW_MODELS_ERROR * math.log(beyond) if len(sizes) <= 2 else 0.0


def _unmeasured(rows: list[dict[str, Any]], configuration: Configuration, setting: Setting) -> tuple[str, ...]:
    """What lies beyond the model's own runs; where it has none, beyond those of any model."""
    own = [row for row in rows if same_shape(configuration_of(row), configuration)]
    found = []
    for words, name in (
        ("training sequences", "train"), ("queries", "queries"), ("tokens", "tokens"), ("draws", "draws"),
        ("fitting sequences", "fit_examples"),
    ):  # fmt: skip
        those = [value for row in own or rows for value in _run_with(row, name)]
        if those and getattr(setting, name) and not min(those) <= getattr(setting, name) <= max(those):
            low, high = min(those), max(those)
            found.append(f"{words} (measured: {low:,})" if low == high else f"{words} (measured: {low:,} to {high:,})")
    return tuple(found)


def _run_with(row: dict[str, Any], name: str) -> list[int]:
    """The numbers that the run behind a row had; draws are alike, and as many as the row is of."""
    if name == "fit_examples":
        return fit_sizes_of(row) or [int(v) for v in [number_of(row.get(name))] if v]
    if name == "queries" and not scores_were_measured(row):
        return []
    value = number_of(row.get(name))
    return [int(value)] if value else []


def _median_deviation(rows: list[dict[str, Any]]) -> float:
    """What the rows say of themselves: half the median width of their own intervals, as one standard deviation."""
    own = [
        math.log(row["seconds_high"] / total_of(row)) / 1.96
        for row in first_of_each(rows)
        if number_of(row.get("seconds_high")) and row["seconds_high"] > total_of(row) > 0
    ]
    return float(np.median(own)) if own else 0.0


def _own_deviation(rows: list[dict[str, Any]], configuration: Configuration, setting: Setting) -> float:
    """What the model's own rows say of themselves: those closest to the setting, between fitting sets."""

    def distance(row: dict[str, Any]) -> float:
        names = ("train", "queries", "tokens", "draws")
        pairs = [(number_of(row.get(name)), getattr(setting, name)) for name in names]
        return sum(abs(math.log(own / asked)) for own, asked in pairs if own and asked)

    found: dict[float, float] = {}
    for row in sorted((row for row in rows if same_shape(configuration_of(row), configuration)), key=distance):
        low, high = number_of(row.get("seconds_low")), number_of(row.get("seconds_high"))
        place = math.log(number_of(row.get("fit_examples")) or 1.0)
        # An interval that reaches to zero has one end to go by.
        width = (
            math.log(high / low) / 2 if low and high and low > 0 else math.log(high / total_of(row)) if high else 0.0
        )
        found.setdefault(place, width / 1.96)
    places = sorted(found)
    asked = math.log(max(setting.fit_examples, 1))
    return float(np.interp(asked, places, [found[place] for place in places])) if found else 0.0


def _memory(rows: list[dict[str, Any]], configuration: Configuration, setting: Setting) -> float:
    """What arithmetic says of BIF and EK-FAC times what was measured over it; others by the curve of their peaks, and
    unknown beyond it."""
    method, number_bytes = rows[0]["method"], 4 if rows[-1].get("dtype") == "float32" else 2
    known = closest_work([row for row in rows if has_peak(row)], setting)
    sizes = [row["parameters"] for row in known]

    def arithmetic(shape: Configuration, tokens: int, minibatch: int) -> float:
        if method in BIF_LIKE:
            return chain_bytes(shape, minibatch, tokens, number_bytes)
        return ekfac_needs(shape, tokens, number_bytes).memory_bytes if method == "ekfac" else 1.0

    over = [
        row["peak_memory_bytes"]
        / arithmetic(shape_of(row), int(row["tokens"]), int(number_of(row.get("minibatch")) or setting.minibatch))
        for row in known
    ]
    wanted = arithmetic(configuration, setting.tokens, setting.minibatch)
    by_arithmetic = method in (*BIF_LIKE, "ekfac")
    if not known:
        return wanted if by_arithmetic else math.nan
    # Beyond the measured sizes as at their end: what is over arithmetic comes to an end as models grow.
    size = min(max(configuration.num_parameters, min(sizes)), max(sizes))
    as_measured = all(row[name] == getattr(setting, name) for row in known for name in ("train", "queries", "tokens"))
    if not by_arithmetic and (size != configuration.num_parameters or not as_measured):
        return math.nan  # kfac and GradSim hold as many gradients as there is room for: other sizes say nothing
    return curve_through(sizes, over).at(size) * wanted


def _disk(rows: list[dict[str, Any]], configuration: Configuration, setting: Setting) -> float:
    """EK-FAC by the theory of its factors times what was measured over it; others, which write something of every
    training sequence, by the curve."""
    known = [row for row in rows if (number_of(row.get("disk_bytes")) or 0) > 0]
    if not known:
        return 0.0
    sizes = [row["parameters"] for row in known]
    if all(number_of(row.get("factor_bytes")) for row in known):
        over = curve_through(sizes, [row["disk_bytes"] / row["factor_bytes"] for row in known])
        number_bytes = 4 if known[-1].get("dtype") == "float32" else 2
        return over.at(configuration.num_parameters) * configuration.factor_bytes(number_bytes)
    a_sequence = curve_through(sizes, [row["disk_bytes"] / row["train"] for row in known])
    return a_sequence.at(configuration.num_parameters) * setting.train
