"""What a run would cost, from measured rows: every axis, with an interval. No torch.

Each method is a sum of parts, and each part is work that arithmetic knows times a pace that changes smoothly with the
model's size (`Curve`), or at a price for each kind of it (`Law`): BIF's draws by their FLOP, logits and attention;
EK-FAC's eigendecompositions by the cubes of its widths, its two passes over the fitting sequences by their FLOP, its
scores by sequences, queries and pairs. How far off the pace of a model is when it is predicted from the others gives
the interval; what the rows leave unknown (scores at another number of queries, sequences of another length) widens it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.scaling.costs import Setting, chain_bytes, covariance_flops, draw_flops, draw_work, ekfac_needs, lambda_flops
from bench.scaling.ekfac_rows import ONE_SIZE_ERROR, SCORE_PARTS, fit_sizes_of, scores_were_measured
from bench.scaling.lines import curve_through, fit_line, law_through
from retrain.models.pythia_suite import SUITE, Configuration

LEAST_DEVIATION = 0.03  # in log: no run repeats itself better
LENGTH_ERROR = 0.10  # in log, a factor of two in tokens: attention and the size of matrices do not go in proportion
SETTING_ERROR = 0.03  # in log, a factor of two in sequences and queries beyond those measured
QUERY_ERROR = 0.25  # in log, a factor of two in EK-FAC's queries beyond those measured: 14m at 1,800 from 180
LAW_MODELS = 6  # so many tell the four kinds of a draw's work apart
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


@dataclass(frozen=True)
class CostPart:
    seconds: float
    deviation: float  # one standard deviation, in log


def number_of(value: Any) -> float | None:
    return None if value is None or value == "" or not math.isfinite(float(value)) else float(value)


def total_of(row: dict[str, Any]) -> float:
    return (number_of(row.get("fit_seconds")) or 0.0) + (number_of(row.get("score_seconds")) or 0.0)


def configuration_of(row: dict[str, Any]) -> Configuration | None:
    """Of a row's model, where it is one of the suite."""
    found = SUITE.get(str(row["model"]))
    return found if found is not None and found.num_parameters == int(row["parameters"]) else None


def setting_of(row: dict[str, Any]) -> Setting:
    """What was asked of the run that a row is about."""
    return Setting(
        train=int(row["train"]), queries=int(row["queries"]), tokens=int(row["tokens"]),
        draws=int(number_of(row.get("draws")) or 0),
        fit_examples=int(number_of(row.get("fit_examples")) or row["train"]),
        minibatch=int(number_of(row.get("minibatch")) or 32),
    )  # fmt: skip


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
            parts = _bif_parts(self.of("bif") or rows, rows, configuration, setting)
        elif method == "ekfac":
            parts = _ekfac_parts(rows, configuration, setting)
        else:
            parts = _other_parts(rows, configuration, setting)
        seconds = sum(part.seconds for part in parts)
        # What one part is off by the others may be too (one machine, one library): their deviations add up.
        together = math.log1p(sum(part.seconds * math.expm1(part.deviation) for part in parts) / seconds)
        length = LENGTH_ERROR * min(abs(math.log2(setting.tokens / row["tokens"])) for row in rows)
        deviation = math.hypot(max(together, LEAST_DEVIATION), _median_deviation(rows), length)
        deviation = max(deviation, _own_deviation(rows, configuration, setting))
        sizes = [row["parameters"] for row in rows]
        return Estimate(
            method=method,
            seconds=seconds,
            seconds_low=seconds * math.exp(-1.96 * deviation),
            seconds_high=seconds * math.exp(1.96 * deviation),
            peak_memory_bytes=_memory(rows, configuration, setting),
            disk_bytes=_disk(rows, configuration),
            num_models=len({row["model"] for row in rows}),
            beyond=not min(sizes) <= configuration.num_parameters <= max(sizes),
            fit_examples=setting.fit_examples if self.fitted(method) else None,
            unmeasured=_unmeasured(rows, configuration, setting),
        )


def _unmeasured(rows: list[dict[str, Any]], configuration: Configuration, setting: Setting) -> tuple[str, ...]:
    """What lies beyond the model's own runs; where it has none, beyond those of any model."""
    own = [row for row in rows if configuration_of(row) == configuration]
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
        for row in _first_of_each(rows)
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
    for row in sorted((row for row in rows if configuration_of(row) == configuration), key=distance):
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


def _first_of_each(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a model: of the deepest point with the largest fitting set, the one that rests on least projection."""

    def rank(row: dict[str, Any]) -> tuple[float, ...]:
        sizes = fit_sizes_of(row)
        depth = number_of(row.get("depth")) or 0
        return len(sizes) < 2, -depth, -max(sizes, default=0), row.get("fit_examples") or 0, row["queries"]

    found: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=rank):
        found.setdefault(row["model"], row)
    return list(found.values())


def _closest_work(rows: list[dict[str, Any]], setting: Setting) -> list[dict[str, Any]]:
    """A row a model: the one whose sequences and queries are closest to those asked for."""
    wanted = setting.train + setting.queries
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: abs(math.log((row["train"] + row["queries"]) / wanted))):
        found.setdefault(row["model"], row)
    return list(found.values())


def _distance(rows: list[dict[str, Any]], setting: Setting) -> float:
    """What sequences and queries other than the measured ones add to the deviation."""
    wanted = setting.train + setting.queries
    return SETTING_ERROR * min(abs(math.log2(wanted / (row["train"] + row["queries"]))) for row in rows)


def _bif_parts(
    all_rows: list[dict[str, Any]], rows: list[dict[str, Any]], configuration: Configuration, setting: Setting
) -> list[CostPart]:
    """Setup plus draws x FLOP x seconds a FLOP, the last from the curve across models.

    The curve is through rows of one number of sequences and queries, that of the most models. What a FLOP takes in
    `rows` at the number closest to the one asked for, over that, is straight between the models that have both.
    """
    groups, own = _by_work(all_rows), _by_work(rows)
    wanted = setting.train + setting.queries
    closest = min(own, key=lambda work: abs(math.log(work / wanted)))
    most = max(groups, key=lambda work: (len(groups[work]), work == closest))
    base = groups[most]
    paces = {row["model"]: row["seconds_per_draw"] / _row_flops(row) for row in base}
    pace = _pace_of_a_draw(base, list(paces.values()), configuration, setting)
    sizes = [row["token_parameters"] for row in base]
    setup = curve_through(sizes, [max(number_of(row.get("setup_seconds")) or 0.0, 1e-3) for row in base])
    both = [
        (row["token_parameters"], math.log(row["seconds_per_draw"] / _row_flops(row) / paces[row["model"]]))
        for row in own[closest]
        if row["model"] in paces
    ]
    d = configuration.num_token_parameters
    over, spread = 1.0, 0.0
    if both:
        places, ratios = zip(*both)
        over = math.exp(float(np.interp(math.log(d), np.log(places), ratios)))
        spread = 0.0 if d in places else float(np.std(ratios))
    flops = draw_flops(d, setting.train, setting.queries, setting.minibatch, setting.tokens)
    deviation = math.hypot(pace.deviation, spread, _distance(own[closest] if both else base, setting))
    return [CostPart(setup.at(d), 0.5), CostPart(setting.draws * flops * pace.seconds * over, deviation)]


def _pace_of_a_draw(
    rows: list[dict[str, Any]], paces: list[float], configuration: Configuration, setting: Setting
) -> CostPart:
    """Seconds a FLOP: the model's own where it was measured; else by the kinds of work, where there are models enough
    to tell them apart, or by size."""
    d = configuration.num_token_parameters
    sizes = [row["token_parameters"] for row in rows]
    shapes = [configuration_of(row) for row in rows]
    measured = [(shape, row) for shape, row in zip(shapes, rows) if shape is not None]
    if len(measured) < len(rows) or len({shape.name for shape, _ in measured}) < LAW_MODELS:
        curve = curve_through(sizes, paces)
        return CostPart(curve.at(d), curve.deviation(d))
    work = [draw_work(shape, setting_of(row)) for shape, row in measured]
    law = law_through(tuple(sizes), tuple(work), tuple(row["seconds_per_draw"] for row in rows))
    asked = draw_work(configuration, setting)
    own = _own(rows, paces, configuration)
    return CostPart(law.at(d, asked) / asked[0] if own is None else own, law.deviation(d))


def _by_work(rows: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Rows of each number of sequences and queries, smallest model first."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in _timed_longest(rows):
        found.setdefault(int(row["train"] + row["queries"]), []).append(row)
    return found


def _timed_longest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a model and number of sequences and queries: the one of the most timed draws."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: -(number_of(row.get("timed_draws")) or 0.0)):
        found.setdefault((row["model"], row["train"], row["queries"]), row)
    return sorted(found.values(), key=lambda row: row["parameters"])


def _row_flops(row: dict[str, Any]) -> float:
    return draw_flops(
        row["token_parameters"], int(row["train"]), int(row["queries"]), int(row["minibatch"]), int(row["tokens"])
    )


def _ekfac_parts(rows: list[dict[str, Any]], configuration: Configuration, setting: Setting) -> list[CostPart]:
    """Eigendecompositions by cubes, two passes over the fitting sequences, what is fixed by bytes, and scores."""
    known = _first_of_each(rows)
    shapes = [shape_of(row) for row in known]
    one_size = all("," not in str(row.get("fit_sizes") or row["fit_examples"]) for row in known)
    unsplit = ONE_SIZE_ERROR if one_size and setting.fit_examples > known[0]["fit_examples"] else 0.0
    eigen = _by_width(known, [row["eigen_seconds"] / row["eigen_cost"] for row in known], configuration)
    parts = [replace(eigen, seconds=eigen.seconds * configuration.eigen_cost)]
    for name, flops in (("covariance", covariance_flops), ("lambda", lambda_flops)):
        each = _by_law(known, [row[f"{name}_per_example"] for row in known], _launched(flops), configuration, setting)
        parts.append(CostPart(each.seconds * setting.fit_examples, math.hypot(each.deviation, unsplit)))
    fixed = [(row.get("covariance_base") or 0.0) + (row.get("lambda_base") or 0.0) for row in known]
    if any(fixed):
        pace = _by_width(known, [max(v, 1e-3) / shape.factor_bytes() for v, shape in zip(fixed, shapes)], configuration)
        parts.append(CostPart(pace.seconds * configuration.factor_bytes(), 0.5))
    parts += _score_parts(rows, configuration, setting)
    return [part for part in parts if part.seconds > 0]


def _by_width(rows: list[dict[str, Any]], paces: list[float], configuration: Configuration) -> CostPart:
    """A pace of EK-FAC's: the model's own where it was measured, else by the width of its matrices."""
    width = configuration.hidden
    curve = curve_through([shape_of(row).hidden for row in rows], paces)
    own = _own(rows, paces, configuration)
    return CostPart(curve.at(width) if own is None else own, curve.deviation(width))


WorkKinds = Callable[[Configuration, int], tuple[float, ...]]


def _launched(flops: Callable[[Configuration, int], float]) -> WorkKinds:
    """Small models wait for each block's kernels to start, large ones for arithmetic."""
    return lambda shape, tokens: (float(shape.layers), flops(shape, tokens))


def _by_law(
    rows: list[dict[str, Any]], costs: list[float], kinds: WorkKinds, configuration: Configuration, setting: Setting
) -> CostPart:
    """A cost of EK-FAC's: the model's own where it was measured at that length, else by its kinds of work."""
    shapes = [(shape_of(row), int(row["tokens"])) for row in rows]
    law = law_through(
        tuple(float(shape.hidden) for shape, _ in shapes), tuple(kinds(*shape) for shape in shapes), tuple(costs)
    )
    width, work = configuration.hidden, kinds(configuration, setting.tokens)
    own = _own(rows, [cost / sum(kinds(*shape)) for cost, shape in zip(costs, shapes)], configuration)
    return CostPart(law.at(width, work) if own is None else own * sum(work), law.deviation(width))


def _own(rows: list[dict[str, Any]], paces: list[float], configuration: Configuration) -> float | None:
    return next((pace for row, pace in zip(rows, paces) if configuration_of(row) == configuration and pace > 0), None)


def shape_of(row: dict[str, Any]) -> Configuration:
    """What EK-FAC's costs depend on: of the suite's model, or of a row's own width and depth."""
    found = configuration_of(row)
    if found is not None:
        return found
    hidden = int(row["hidden"])
    return Configuration(
        name=str(row["model"]), hidden=hidden, layers=int(row["layers"]), heads=1, intermediate=4 * hidden
    )


def _score_parts(rows: list[dict[str, Any]], configuration: Configuration, setting: Setting) -> list[CostPart]:
    """By each model's own sequences, queries and pairs, with a law across models.

    Half of few queries say little of what further ones take: beyond the number that most models were measured at, that
    is taken from the models that were measured at more, where there are two to tell a small one from a large one. Each
    factor of two beyond what a model was itself measured at widens the interval.
    """
    most = _most_queries(rows)
    counts = [int(row["queries"]) for row in most]
    usual = max(set(counts), key=lambda count: (counts.count(count), -count))
    many = [row for row in most if row["queries"] > usual and scores_were_measured(row) and _has_score_parts(row)]
    queries = min(setting.queries, usual) if len(many) > 1 else setting.queries
    spans = [score_span(row, setting.train, queries) for row in most]
    known = _by_law(
        most, [math.sqrt(low * high) for low, high in spans], _launched(_token_work), configuration, setting
    )
    unknown = max(math.log(high / low) / 2 for low, high in spans) / 1.96
    parts = [replace(known, deviation=math.hypot(known.deviation, unknown))]
    if setting.queries > queries:
        costs = [_further_queries(rows, row, usual, setting) for row in many]
        each = _by_law(many, costs, _launched(_token_work), configuration, setting)
        own = [row["queries"] for row in many if configuration_of(row) == configuration]
        reach = own[0] if own else min(row["queries"] for row in many)
        beyond = QUERY_ERROR * max(0.0, math.log2(setting.queries / reach))
        parts.append(replace(each, deviation=math.hypot(each.deviation, beyond)))
    return parts


def _further_queries(rows: list[dict[str, Any]], last: dict[str, Any], usual: int, setting: Setting) -> float:
    """Seconds of the queries beyond the usual number in one model: straight between those it was measured at."""
    same = [
        row for row in rows if row["model"] == last["model"] and row["queries"] > usual and scores_were_measured(row)
    ]
    by_count = {int(row["queries"]): float(row["score_seconds"]) for row in same}
    base = score_span(last, int(last["train"]), usual)[0]
    counts, seconds = [usual, *sorted(by_count)], [base, *(by_count[count] for count in sorted(by_count))]
    slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
    total = float(np.interp(setting.queries, counts, seconds)) + slope * max(0, setting.queries - counts[-1])
    more = last["score_per_query"] + last["score_per_pair"] * setting.train
    fewer = last["score_per_query"] + last["score_per_pair"] * int(last["train"])
    return max(total - base, 1e-9) * (more / fewer if fewer else 1.0)


def _has_score_parts(row: dict[str, Any]) -> bool:
    values = [number_of(row.get(name)) for name in SCORE_PARTS]
    return None not in values and any(values)


def _most_queries(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a model: of those whose scores were measured at their number of queries, the one with the most."""
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: (not scores_were_measured(row), -row["queries"], row["fit_examples"] or 0)):
        found.setdefault(row["model"], row)
    return sorted(found.values(), key=lambda row: row["parameters"])


def _token_work(shape: Configuration, tokens: int) -> float:
    return float(shape.num_token_parameters * tokens)


def score_span(row: dict[str, Any], train: int, queries: int) -> tuple[float, float]:
    """EK-FAC's scoring at other numbers of sequences and queries: between these seconds.

    From the row's own coefficients where there are any. Otherwise it may grow with the sequences and queries, or with
    their pairs.
    """
    if _has_score_parts(row):
        base, per_train, per_query, per_pair = (float(row[name]) for name in SCORE_PARTS)
        seconds = base + per_train * train + per_query * queries + per_pair * train * queries
        return seconds, seconds
    by_sum = (train + queries) / (row["train"] + row["queries"])
    by_pairs = train * queries / (row["train"] * row["queries"])
    ends = [float(row["score_seconds"]) * by_sum, float(row["score_seconds"]) * by_pairs]
    return min(ends), max(ends)


def _other_parts(rows: list[dict[str, Any]], configuration: Configuration, setting: Setting) -> list[CostPart]:
    """In proportion to tokens and parameters; of a fitted method, by its own line in the fitting sequences."""
    known = _closest_work(rows, setting)
    wanted, d = (setting.train + setting.queries) * setting.tokens, configuration.num_token_parameters
    seconds, deviation = [], _distance(known, setting)
    for row in known:
        sizes = {r["fit_examples"]: total_of(r) for r in rows if r["model"] == row["model"] and r.get("fit_examples")}
        here = total_of(row)
        if len(sizes) > 1:
            here = fit_line(list(sizes), list(sizes.values())).at(setting.fit_examples)
        elif sizes and setting.fit_examples != row["fit_examples"]:
            here *= max(1.0, setting.fit_examples / row["fit_examples"])
            deviation = math.hypot(deviation, ONE_SIZE_ERROR)
        seconds.append(here * wanted / ((row["train"] + row["queries"]) * row["tokens"]))
    parameters = [row["token_parameters"] for row in known]
    pace = curve_through(parameters, [value / size for value, size in zip(seconds, parameters)])
    return [CostPart(pace.at(d) * d, math.hypot(pace.deviation(d), deviation))]


def has_peak(row: dict[str, Any]) -> bool:
    """Whether a row's memory was measured."""
    return number_of(row.get("peak_memory_bytes")) is not None


def _memory(rows: list[dict[str, Any]], configuration: Configuration, setting: Setting) -> float:
    """What arithmetic says of BIF and EK-FAC times what was measured over it; others by the curve of their peaks."""
    method, number_bytes = rows[0]["method"], 4 if rows[-1].get("dtype") == "float32" else 2
    known = _closest_work([row for row in rows if has_peak(row)], setting)
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
    if not known:
        return wanted if method in (*BIF_LIKE, "ekfac") else math.nan
    # Beyond the measured sizes as at their end: what is over arithmetic comes to an end as models grow.
    size = min(max(configuration.num_parameters, min(sizes)), max(sizes))
    return curve_through(sizes, over).at(size) * (
        wanted if method in (*BIF_LIKE, "ekfac") else configuration.num_parameters / size
    )


def _disk(rows: list[dict[str, Any]], configuration: Configuration) -> float:
    """EK-FAC by the theory of its factors times what was measured over it; others by the curve."""
    known = [row for row in rows if (number_of(row.get("disk_bytes")) or 0) > 0]
    if not known:
        return 0.0
    sizes = [row["parameters"] for row in known]
    if all(number_of(row.get("factor_bytes")) for row in known):
        over = curve_through(sizes, [row["disk_bytes"] / row["factor_bytes"] for row in known])
        number_bytes = 4 if known[-1].get("dtype") == "float32" else 2
        return over.at(configuration.num_parameters) * configuration.factor_bytes(number_bytes)
    return curve_through(sizes, [row["disk_bytes"] for row in known]).at(configuration.num_parameters)
