"""What a run would cost, from measured rows, with an interval; and where two methods cost the same. No torch is run.

    estimator = by_device(read_rows(RATES))["NVIDIA H200"]
    estimator.estimate("ekfac", SUITE["2.8b"], Setting(train=400, queries=18, tokens=150, draws=2000, fit_examples=400))

A method's seconds are a sum of parts: BIF's draws go by their FLOP, logits and attention; EK-FAC's eigendecompositions
by the cubes of its widths, its two passes over the fitting set by their FLOP, its scores by sequences, queries and
pairs; another method by its own curve. Each part is work that arithmetic knows, times a pace that changes smoothly with
the model's size (`Curve`), or at a price for each kind of it (`Law`). How far off a model's pace is when it is
predicted from the others gives the interval; what the rows leave unknown widens it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.scaling import suite
from bench.scaling.lines import UNKNOWN_ERROR, bilinear_at, curve_through, fit_line, law_through
from bench.scaling.rows import (
    Row,
    fit_sizes_of,
    is_of,
    score_parts,
    scores_were_measured,
    setting_of,
    shape_of,
    total_of,
)
from bench.scaling.suite import Configuration, Setting
from bench.tables import grouped

RIVALS = ("bif", "ekfac")
BIF_LIKE = ("bif", "bif_tokens")
KEEPS_FEATURES = ("trak",)  # each example goes through once, however many there are on the other side
PAPER_FITTED = 1_000_000  # sequences of the Pile that the paper fits EK-FAC on (sec:appendix-scaling)
LAW_MODELS = 6  # so many tell the four kinds of a draw's work apart
# Errors, all in log.
LEAST_DEVIATION = 0.03  # no run repeats itself better
LENGTH_ERROR = 0.10  # a factor of two in tokens: attention and the size of matrices do not go in proportion
FEW_MODELS_ERROR = 0.35  # a factor of e in size beyond the one or two models that were measured
SETTING_ERROR = 0.03  # a factor of two in sequences and queries beyond those measured
ONE_SIZE_ERROR = 0.15  # of a fitting sequence, where one fitting set does not tell it from what is fixed
FIXED_ERROR = 0.5  # of what the two passes take beside their sequences; at least, where it was not measured
OWN_QUERY_ERROR = 0.4  # of further queries in a model that was measured with them: 410m twice, and its depth
OTHER_QUERY_ERROR = 1.2  # at least, in one that was not: 14m, 410m and 2.8b, each from the others
QUERY_ERROR = 0.25  # a factor of two in EK-FAC's queries beyond those measured: 14m at 1,800 from 180

WorkKinds = Callable[[Configuration, Setting], tuple[float, ...]]


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


@dataclass(frozen=True)
class CostPart:
    seconds: float
    deviation: float  # one standard deviation, in log


def ratio_ends(first: Estimate, second: Estimate) -> tuple[float, float]:
    """95 % interval of the first's seconds over the second's, their errors taken as independent."""
    deviation = math.hypot(math.log(first.seconds_high / first.seconds), math.log(second.seconds_high / second.seconds))
    ratio = first.seconds / second.seconds
    return ratio * math.exp(-deviation), ratio * math.exp(deviation)


def by_device(rows: Sequence[Row]) -> dict[str, "Estimator"]:
    """Seconds of different machines are never mixed."""
    groups = grouped(rows, lambda row: str(row["device"]))
    return {device: found for device, group in groups.items() if (found := Estimator(group)).rows}


class Estimator:
    """Predicts the cost of a run from the rows of scaling.csv of one device; rows with an error are passed over."""

    def __init__(self, rows: Sequence[Row]):
        self.rows = [row for row in rows if not row["error"] and row["score_seconds"] is not None]
        self._known: dict[tuple[str, Configuration, Setting], Estimate] = {}
        by_size = sorted(self.rows, key=lambda row: row["parameters"])
        self._by_method: dict[str, list[Row]] = grouped(by_size, lambda row: row["method"])

    def methods(self) -> list[str]:
        return list(dict.fromkeys(row["method"] for row in self.rows))

    def of(self, method: str) -> list[Row]:
        """Its rows, smallest model first."""
        return self._by_method.get(method, [])

    def fitted(self, method: str) -> bool:
        """Whether its rows name a fitting set."""
        return any(row["fit_examples"] for row in self.of(method))

    def without(self, model: str) -> "Estimator":
        return Estimator([row for row in self.rows if row["model"] != model])

    def estimate(self, method: str, shape: Configuration, setting: Setting) -> Estimate:
        """What the whole run of a method would take; kept, as crossings ask for the same many times."""
        if not self.fitted(method):
            setting = replace(setting, fit_examples=0)
        key = (method, shape, setting)
        if key not in self._known:
            self._known[key] = self._estimate(*key)
        return self._known[key]

    def _estimate(self, method: str, shape: Configuration, setting: Setting) -> Estimate:
        rows = self.of(method)
        if not rows:
            raise ValueError(f"no measured row of {method}")
        if method in BIF_LIKE:
            # Every token's loss is of the same draws: what BIF is known to take, times what the tokens add.
            parts = _bif_parts(self.of("bif") or rows, rows, shape, setting)
        elif method == "ekfac":
            parts = _ekfac_parts(rows, shape, setting)
        else:
            parts = _other_parts(rows, shape, setting)
        seconds = sum(part.seconds for part in parts)
        # What one part is off by the others may be too (one machine, one library): their deviations add up.
        together = math.log1p(sum(part.seconds * math.expm1(part.deviation) for part in parts) / seconds)
        length = LENGTH_ERROR * min(abs(math.log2(setting.tokens / row["tokens"])) for row in rows)
        size, sizes = shape.num_parameters, sorted({row["parameters"] for row in rows})
        # One or two models say little of a larger or smaller one.
        away = math.log(max(sizes[0] / size, size / sizes[-1], 1.0)) if len(sizes) <= 2 else 0.0
        said, own = _said_deviations(rows, shape, setting)
        deviation = max(math.hypot(max(together, LEAST_DEVIATION), said, length, FEW_MODELS_ERROR * away), own)
        return Estimate(
            method, seconds, seconds * math.exp(-1.96 * deviation), seconds * math.exp(1.96 * deviation),
            peak_memory_bytes=_memory(rows, shape, setting), disk_bytes=_disk(rows, shape, setting),
            num_models=len({row["model"] for row in rows}), beyond=not sizes[0] <= size <= sizes[-1],
            fit_examples=setting.fit_examples if self.fitted(method) else None,
            unmeasured=_unmeasured(rows, shape, setting),
        )  # fmt: skip


# ---- which rows an estimate is from ----


def _first_a_model(rows: Iterable[Row]) -> list[Row]:
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(row["model"], row)
    return list(found.values())


def first_of_each(rows: list[Row]) -> list[Row]:
    """A row a model: of the deepest point with the largest fitting set, the one that rests on least projection."""

    def rank(row: Row) -> tuple[float, ...]:
        sizes = fit_sizes_of(row)
        return len(sizes) < 2, -(row["depth"] or 0), -max(sizes, default=0), row["fit_examples"] or 0, row["queries"]

    return _first_a_model(sorted(rows, key=rank))


def _closest_work(rows: list[Row], setting: Setting) -> list[Row]:
    """A row a model: the one whose sequences and queries are closest to those asked for."""
    wanted = setting.train + setting.queries
    return _first_a_model(sorted(rows, key=lambda row: abs(math.log((row["train"] + row["queries"]) / wanted))))


def _distance(rows: list[Row], setting: Setting) -> float:
    """What sequences and queries other than the measured ones add to the deviation."""
    wanted = setting.train + setting.queries
    return SETTING_ERROR * min(abs(math.log2(wanted / (row["train"] + row["queries"]))) for row in rows)


def _by_law(
    rows: list[Row],
    costs: Sequence[float],
    kinds: WorkKinds,
    shape: Configuration,
    setting: Setting,
    size: Callable[[Configuration], float] = lambda shape: float(shape.hidden),
) -> CostPart:
    """A cost by its kinds of work, times what the model was over the law where it was measured itself: a longer
    sequence takes more of some kinds of work than of others."""
    work = [kinds(shape_of(row), setting_of(row)) for row in rows]
    law = law_through([size(shape_of(row)) for row in rows], work, costs)
    at, asked = size(shape), kinds(shape, setting)
    seconds = law.at(at, asked)
    for row, known, cost in zip(rows, work, costs):
        if is_of(row, shape) and cost > 0:
            seconds = cost * seconds / law.at(at, known)
            break
    return CostPart(seconds, law.deviation(at))


def _launched(flops: Callable[[Configuration, int], float]) -> WorkKinds:
    """Small models wait for each block's kernels to start, large ones for arithmetic."""
    return lambda shape, setting: (float(shape.layers), flops(shape, setting.tokens))


# ---- BIF's seconds ----


def _bif_parts(all_rows: list[Row], rows: list[Row], shape: Configuration, setting: Setting) -> list[CostPart]:
    """Setup plus draws x FLOP x seconds a FLOP, the last across models.

    That is from rows of one number of sequences and queries, that of the most models. What a FLOP takes in `rows` at
    another number, over that, is straight between the models that have both, and between the numbers.
    """

    def pace_of(row: Row) -> float:
        sizes = (int(row[name]) for name in ("train", "queries", "minibatch", "tokens"))
        return row["seconds_per_draw"] / suite.draw_flops(row["token_parameters"], *sizes)

    groups, own = _by_work(all_rows), _by_work(rows)
    wanted, d = setting.train + setting.queries, shape.num_token_parameters
    closest = min(own, key=lambda work: abs(math.log(work / wanted)))
    base = groups[max(groups, key=lambda work: (len(groups[work]), work == closest))]
    paces = {row["model"]: pace_of(row) for row in base}
    sizes = [row["token_parameters"] for row in base]
    if len(paces) < LAW_MODELS:  # seconds a FLOP by size, or by the kinds of work that enough models tell apart
        curve = curve_through(sizes, list(paces.values()))
        pace, deviation = curve.at(d), curve.deviation(d)
    else:
        a_draw = [row["seconds_per_draw"] for row in base]
        found = _by_law(base, a_draw, suite.draw_work, shape, setting, lambda shape: shape.num_token_parameters)
        pace, deviation = found.seconds / suite.draw_work(shape, setting)[0], found.deviation
    setup = curve_through(sizes, [max(row["setup_seconds"] or 0.0, 1e-3) for row in base])
    overs: dict[int, float] = {}
    spread = 0.0
    for work in sorted(own):
        both = [row for row in own[work] if row["model"] in paces]
        if both:
            places = [row["token_parameters"] for row in both]
            ratios = [math.log(pace_of(row) / paces[row["model"]]) for row in both]
            overs[work] = float(np.interp(math.log(d), np.log(places), ratios))
            if work == closest and d not in places:
                spread = float(np.std(ratios))
    over = math.exp(float(np.interp(math.log(wanted), np.log(list(overs)), list(overs.values())))) if overs else 1.0
    flops = suite.draw_flops(d, setting.train, setting.queries, setting.minibatch, setting.tokens)
    deviation = math.hypot(deviation, spread, _distance(own[closest] if closest in overs else base, setting))
    return [CostPart(setup.at(d), 0.5), CostPart(setting.draws * flops * pace * over, deviation)]


def _by_work(rows: list[Row]) -> dict[int, list[Row]]:
    """Number of sequences and queries -> its rows, smallest model first; of several, that of the most timed draws."""
    longest: dict[tuple[Any, ...], Row] = {}
    for row in sorted(rows, key=lambda row: -(row["timed_draws"] or 0.0)):
        longest.setdefault((row["model"], row["train"], row["queries"]), row)
    by_size = sorted(longest.values(), key=lambda row: row["parameters"])
    return grouped(by_size, lambda row: int(row["train"] + row["queries"]))


# ---- EK-FAC's seconds ----


def _ekfac_parts(rows: list[Row], shape: Configuration, setting: Setting) -> list[CostPart]:
    """Eigendecompositions by cubes, two passes over the fitting sequences, what is fixed, and scores."""
    known = first_of_each(rows)
    own = [row for row in known if is_of(row, shape)]
    one_size = all(len(fit_sizes_of(row)) < 2 for row in known)
    unsplit = ONE_SIZE_ERROR if one_size and setting.fit_examples > known[0]["fit_examples"] else 0.0
    # An eigendecomposition's pace is the model's own where it was measured, else by the width of its matrices.
    paces = [row["eigen_seconds"] / row["eigen_cost"] for row in known]
    curve, width = curve_through([shape_of(row).hidden for row in known], paces), shape.hidden
    pace = own[0]["eigen_seconds"] / own[0]["eigen_cost"] if own else curve.at(width)
    parts = [CostPart(pace * shape.eigen_cost, curve.deviation(width))]
    for name, flops in (("covariance", suite.covariance_flops), ("lambda", suite.lambda_flops)):
        each = _by_law(known, [row[f"{name}_per_example"] for row in known], _launched(flops), shape, setting)
        parts.append(CostPart(each.seconds * setting.fit_examples, math.hypot(each.deviation, unsplit)))
    fixed = [(row["covariance_base"] or 0.0) + (row["lambda_base"] or 0.0) for row in known]
    if any(fixed):  # the passes' start, a block at a time, and their factors
        written = _launched(lambda shape, tokens: float(shape.factor_bytes()))
        each = _by_law(known, [max(seconds, 1e-3) for seconds in fixed], written, shape, setting)
        parts.append(replace(each, deviation=FIXED_ERROR if own else max(each.deviation, FIXED_ERROR)))
    parts += _score_parts(rows, shape, setting)
    return [part for part in parts if part.seconds > 0]


def _score_parts(rows: list[Row], shape: Configuration, setting: Setting) -> list[CostPart]:
    """By each model's own sequences, queries and pairs, with a law across models.

    Half of few queries say little of what further ones take: beyond the number that most models were measured at, that
    is taken from the models that were measured at more, where there are two to tell a small one from a large one. Each
    factor of two beyond what a model was itself measured at widens the interval.
    """
    measured = [row for row in rows if scores_were_measured(row)] or rows
    fewest = [row["queries"] for row in _first_a_model(sorted(measured, key=lambda row: row["queries"]))]
    usual = int(max(set(fewest), key=lambda count: (fewest.count(count), -count)))
    most = _first_a_model(sorted(measured, key=lambda row: (-row["queries"], row["fit_examples"] or 0)))
    most.sort(key=lambda row: row["parameters"])
    many = [row for row in most if row["queries"] > usual and score_parts(row)]
    queries = min(setting.queries, usual) if len(many) > 1 else setting.queries
    # The run that the fit is from has its scores; one in fewer blocks says what further queries take.
    deepest = first_of_each(sorted(measured, key=lambda row: abs(row["queries"] - usual)))
    spans = [score_span(row, setting.train, queries) for row in deepest]
    usually = [score_span(row, int(row["train"]), usual)[0] for row in deepest]
    costs = [math.sqrt(low * high) for low, high in spans]
    known = _at_length(deepest, costs, usually, shape, setting)
    unknown = max(math.log(high / low) / 2 for low, high in spans) / 1.96
    parts = [replace(known, deviation=math.hypot(known.deviation, unknown))]
    if setting.queries > queries:
        costs = [_further_queries(rows, row, usual, setting) for row in many]
        usually = [_further_queries(rows, row, usual, setting_of(row)) for row in many]
        each = _at_length(many, costs, usually, shape, setting)
        own = [row["queries"] for row in many if is_of(row, shape)]
        reach = own[0] if own else min(row["queries"] for row in many)
        beyond = QUERY_ERROR * max(0.0, math.log2(setting.queries / reach))
        across = OWN_QUERY_ERROR if own else max(each.deviation, OTHER_QUERY_ERROR)
        parts.append(replace(each, deviation=math.hypot(across, beyond)))
    return parts


def _at_length(
    rows: list[Row], costs: list[float], usually: list[float], shape: Configuration, setting: Setting
) -> CostPart:
    """Scores by their law at the length that was measured, times what another length does to the usual ones: by a law
    of its own, fewer would be launches alone, which no shorter sequence makes cheaper, and so dearer than more."""
    kinds = _launched(lambda shape, tokens: float(shape.num_token_parameters * tokens))
    as_measured = replace(setting, tokens=int(rows[0]["tokens"]))
    found = _by_law(rows, costs, kinds, shape, as_measured)
    if setting.tokens == as_measured.tokens:
        return found
    longer, same = (_by_law(rows, usually, kinds, shape, one).seconds for one in (setting, as_measured))
    return replace(found, seconds=found.seconds * longer / max(same, 1e-12))


def _further_queries(rows: list[Row], last: Row, usual: int, setting: Setting) -> float:
    """Seconds of the queries beyond the usual number in one model: straight between those it was measured at."""
    by_count = {
        int(row["queries"]): float(row["score_seconds"])
        for row in rows
        if all(row[name] == last[name] for name in ("model", "fit_examples", "run_id"))
        and row["queries"] > usual
        and scores_were_measured(row)
    }
    base = score_span(last, int(last["train"]), usual)[0]
    counts, seconds = [usual, *sorted(by_count)], [base, *(by_count[count] for count in sorted(by_count))]
    slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
    total = float(np.interp(setting.queries, counts, seconds)) + slope * max(0, setting.queries - counts[-1])
    more = last["score_per_query"] + last["score_per_pair"] * setting.train
    fewer = last["score_per_query"] + last["score_per_pair"] * int(last["train"])
    return max(total - base, 1e-9) * (more / fewer if fewer else 1.0)


def score_span(row: Row, train: int, queries: int) -> tuple[float, float]:
    """EK-FAC's scoring at other numbers of sequences and queries: between these seconds.

    From the row's own coefficients where there are any. Otherwise it may grow with the sequences and queries, or with
    their pairs.
    """
    if parts := score_parts(row):
        return (seconds := bilinear_at(parts, train, queries)), seconds
    by_sum, by_pairs = _growths(row, train, queries)
    ends = [row["score_seconds"] * by_sum, row["score_seconds"] * by_pairs]
    return min(ends), max(ends)


def _growths(row: Row, train: int, queries: int) -> tuple[float, float]:
    """How many times as many sequences and queries there are, and pairs of them."""
    by_sum = (train + queries) / (row["train"] + row["queries"])
    return by_sum, train * queries / (row["train"] * row["queries"])


# ---- seconds of another method ----


def _other_parts(rows: list[Row], shape: Configuration, setting: Setting) -> list[CostPart]:
    """In proportion to tokens and parameters; of a fitted method that is its scores, beside its fit."""
    known = _closest_work(rows, setting)
    fitted = any(row["fit_examples"] for row in known)
    own = any(is_of(row, shape) for row in known)
    deviation = _distance(known, setting)
    d, sizes = shape.num_token_parameters, [row["token_parameters"] for row in known]
    paces = []
    for row, size in zip(known, sizes):
        here = (row["score_seconds"] if fitted else total_of(row)) * setting.tokens / row["tokens"]
        by_sum, by_pairs = _growths(row, setting.train, setting.queries)
        if row["method"] in KEEPS_FEATURES:
            by_pairs = by_sum
        # Gradients that do not fit at once are taken again for every block of the other side's: between the two.
        paces.append(here * math.sqrt(by_sum * by_pairs) / size)
        deviation = max(deviation, abs(math.log(by_pairs / by_sum)) / 2 / 1.96)
    pace = curve_through(sizes, paces)
    parts = [CostPart(pace.at(d) * d, deviation if own else math.hypot(pace.deviation(d), deviation))]
    if fitted:  # kernels' start and eigendecompositions, and the fitting sequences
        fixed = []
        for row in known:
            each = _a_fitting_sequence(rows, shape_of(row), setting_of(row))
            fixed.append(max(row["fit_seconds"] - row["fit_examples"] * each.seconds, 1e-3))
        decomposed = _launched(lambda shape, tokens: shape.eigen_cost)
        rest = _by_law(known, fixed, decomposed, shape, setting)
        each = _a_fitting_sequence(rows, shape, setting)
        parts.append(replace(rest, deviation=0.0) if own else rest)
        parts.append(replace(each, seconds=each.seconds * setting.fit_examples))
    return parts


def _a_fitting_sequence(rows: list[Row], shape: Configuration, setting: Setting) -> CostPart:
    """Of another method than kronfluence's, from the models that were run with two fitting sets; where none was, all of
    a fit goes by them."""
    known, slopes = first_of_each(rows), []
    for row in known:
        same = [other for other in rows if all(other[name] == row[name] for name in ("model", "train", "queries"))]
        sizes = {other["fit_examples"]: other["fit_seconds"] for other in same}
        slopes.append(fit_line(list(sizes), list(sizes.values())).slope if len(sizes) > 1 else 0.0)
    if split := any(slopes):
        known, slopes = [row for row, slope in zip(known, slopes) if slope], [slope for slope in slopes if slope]
    else:
        slopes = [row["fit_seconds"] / row["fit_examples"] for row in known]
    passes = suite.covariance_flops, suite.least_lambda_flops
    kinds = _launched(lambda shape, tokens: sum(flops(shape, tokens) for flops in passes))
    each = _by_law(known, slopes, kinds, shape, setting)
    error = max(each.deviation, UNKNOWN_ERROR) if split else math.hypot(each.deviation, ONE_SIZE_ERROR)
    return replace(each, deviation=error)


# ---- what rows say of themselves, memory and disk ----


def _unmeasured(rows: list[Row], shape: Configuration, setting: Setting) -> tuple[str, ...]:
    """What lies beyond the model's own runs; where it has none, beyond those of any model."""
    own = [row for row in rows if is_of(row, shape)] or rows
    words = {"train": "training sequences", "fit_examples": "fitting sequences"}
    found = []
    for name in ("train", "queries", "tokens", "draws", "fit_examples"):
        known = [row for row in own if name != "queries" or scores_were_measured(row)]
        measured = {int(row[name]) for row in known if row[name]}
        if name == "fit_examples":
            measured = {size for row in own for size in fit_sizes_of(row)} or measured
        asked = getattr(setting, name)
        if measured and asked and not min(measured) <= asked <= max(measured):
            ends = " to ".join(f"{end:,}" for end in sorted({min(measured), max(measured)}))
            found.append(f"{words.get(name, name)} (measured: {ends})")
    return tuple(found)


def _said_deviations(rows: list[Row], shape: Configuration, setting: Setting) -> tuple[float, float]:
    """Standard deviations that rows state: half the median width of their intervals, and the model's own.

    Its own are of the rows closest to the setting, straight between fitting sets.
    """
    widths = [
        math.log(row["seconds_high"] / total_of(row)) / 1.96
        for row in first_of_each(rows)
        if row["seconds_high"] and row["seconds_high"] > total_of(row) > 0
    ]

    def distance(row: Row) -> float:
        pairs = [(row[name], getattr(setting, name)) for name in ("train", "queries", "tokens", "draws")]
        return sum(abs(math.log(own / asked)) for own, asked in pairs if own and asked)

    found: dict[float, float] = {}
    for row in sorted((row for row in rows if is_of(row, shape)), key=distance):
        low, high, width = row["seconds_low"], row["seconds_high"], 0.0
        if high:  # an interval that reaches to zero has one end to go by
            width = math.log(high / low) / 2 if low else math.log(high / total_of(row))
        found.setdefault(math.log(row["fit_examples"] or 1.0), width / 1.96)
    places = sorted(found)
    asked = math.log(max(setting.fit_examples, 1))
    own = float(np.interp(asked, places, [found[place] for place in places])) if found else 0.0
    return float(np.median(widths)) if widths else 0.0, own


def _memory(rows: list[Row], shape: Configuration, setting: Setting) -> float:
    """What arithmetic says of BIF and EK-FAC times what was measured over it; others by the curve of their peaks, and
    unknown beyond it."""
    method, number_bytes = rows[0]["method"], 4 if rows[-1]["dtype"] == "float32" else 2

    def arithmetic(shape: Configuration, one: Setting) -> float:
        if method in BIF_LIKE:
            return suite.chain_bytes(shape, one.minibatch, one.tokens, number_bytes)
        return suite.ekfac_needs(shape, one.tokens, number_bytes).memory_bytes if method == "ekfac" else 1.0

    known = _closest_work([row for row in rows if row["peak_memory_bytes"] is not None], setting)
    wanted = arithmetic(shape, setting)
    by_arithmetic = method in (*BIF_LIKE, "ekfac")
    if not known:
        return wanted if by_arithmetic else math.nan
    over = [row["peak_memory_bytes"] / arithmetic(shape_of(row), setting_of(row)) for row in known]
    # Beyond the measured sizes as at their end: what is over arithmetic comes to an end as models grow.
    sizes = [row["parameters"] for row in known]
    size = min(max(shape.num_parameters, min(sizes)), max(sizes))
    asked = setting.train, setting.queries, setting.tokens
    as_measured = all((row["train"], row["queries"], row["tokens"]) == asked for row in known)
    if not by_arithmetic and (size != shape.num_parameters or not as_measured):
        return math.nan  # kfac and GradSim hold as many gradients as there is room for: other sizes say nothing
    return curve_through(sizes, over).at(size) * wanted


def _disk(rows: list[Row], shape: Configuration, setting: Setting) -> float:
    """EK-FAC by the theory of its factors times what was measured over it; others, which write something of every
    training sequence, by the curve."""
    known = [row for row in rows if row["disk_bytes"]]
    if not known:
        return 0.0
    of, units = "train", setting.train
    if all(row["factor_bytes"] for row in known):
        of, units = "factor_bytes", shape.factor_bytes(4 if known[-1]["dtype"] == "float32" else 2)
    over = curve_through([row["parameters"] for row in known], [row["disk_bytes"] / row[of] for row in known])
    return over.at(shape.num_parameters) * units


# ---- predictions against what they did not see ----

LEAST_MODELS = 3  # so many must be left to predict one from


def held_out(estimator: Estimator, fresh: Estimator | None = None) -> list[dict[str, Any]]:
    """Every row as the rows of the other models predict it, if it says what scores take; or, with
    `fresh`, every row of that other sweep as this one's rows predict it."""
    found = []
    for row in fresh.rows if fresh else filter(scores_were_measured, estimator.rows):
        others = estimator if fresh else estimator.without(row["model"])
        num_models = len({other["model"] for other in others.of(row["method"])})
        if num_models < (1 if fresh else LEAST_MODELS):
            continue
        one = others.estimate(row["method"], shape_of(row), setting_of(row))
        seconds, peak = total_of(row), row["peak_memory_bytes"]
        found.append({
            **{name: row[name] for name in ("model", "method", "fit_examples", "queries", "projected")},
            "predicted_seconds": one.seconds, "seconds_low": one.seconds_low, "seconds_high": one.seconds_high,
            "measured_seconds": seconds, "seconds_off": one.seconds / seconds - 1,
            "inside": one.seconds_low <= seconds <= one.seconds_high, "beyond": one.beyond,
            "memory_off": one.peak_memory_bytes / peak - 1 if peak else None,
        })  # fmt: skip
    return found


# ---- where two methods cost the same ----

PLACES = 40  # places looked at, evenly in log
RANGES = {"fit_examples": (10.0, 1e8), "queries": (1.0, 1e6)}


@dataclass(frozen=True)
class Crossing:
    """Where two methods cost the same, within the range that was looked at.

    `cheaper` is the better buy below the first of `values`, between any two, and above the last. Of a single value, it
    is surely so beyond `low` and `high` (None: there is no such end); `sure`: no intervals overlap anywhere.
    """

    axis: str  # fit_examples or queries
    cheaper: tuple[str, ...]
    values: tuple[float, ...]
    low: float | None = None
    high: float | None = None
    sure: bool = False


def crossing_in(estimator: Estimator, shape: Configuration, setting: Setting, axis: str) -> Crossing:
    """In fitting sequences or queries of one model: both are estimated at each place, with their intervals."""
    grid = np.geomspace(*RANGES[axis], PLACES)
    asked = [replace(setting, **{axis: max(1, round(float(x)))}) for x in grid]
    found = [[estimator.estimate(name, shape, one) for one in asked] for name in RIVALS]
    first, second = np.log([[(e.seconds, e.seconds_low, e.seconds_high) for e in one] for one in found])
    gap = first[:, 0] - second[:, 0]
    # How far the intervals are apart, in log: negative where they overlap.
    apart = np.maximum(second[:, 1] - first[:, 2], first[:, 1] - second[:, 2])

    def zero(values: np.ndarray, i: int, otherwise: float) -> float:
        """Where they cross zero between i and i + 1, straight in log; where both are above, the crossing itself."""
        if values[i] * values[i + 1] > 0:
            return otherwise
        share = values[i] / (values[i] - values[i + 1])
        return float(np.exp(np.log(grid[i]) + share * np.log(grid[i + 1] / grid[i])))

    changes = np.nonzero(gap[:-1] * gap[1:] < 0)[0]
    values = tuple(zero(gap, int(i), float(grid[i])) for i in changes)
    turns = RIVALS if gap[0] < 0 else RIVALS[::-1]
    cheaper = tuple(turns[k % 2] for k in range(len(values) + 1))
    if len(values) != 1:
        return Crossing(axis, cheaper, values, sure=bool((apart > 0).all()))
    i = int(changes[0])
    below, above = np.nonzero(apart[: i + 1] > 0)[0], np.nonzero(apart[i + 1 :] > 0)[0]
    low = zero(apart, int(below[-1]), values[0]) if len(below) else None
    high = zero(apart, i + int(above[0]), values[0]) if len(above) else None
    return Crossing(axis, cheaper, values, low, high)
