"""The parts that a method's seconds are a sum of, each with how far off it may be. No torch.

BIF's draws go by their FLOP, logits and attention; EK-FAC's eigendecompositions by the cubes of its widths, its two
passes over the fitting sequences by their FLOP, its scores by sequences, queries and pairs; another method by its own
curve.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.scaling.costs import Setting, covariance_flops, draw_flops, draw_work, lambda_flops, least_lambda_flops
from bench.scaling.ekfac_rows import ONE_SIZE_ERROR, SCORE_PARTS, fit_sizes_of, scores_were_measured
from bench.scaling.lines import UNKNOWN_ERROR, Law, curve_through, fit_line, law_through
from bench.scaling.row_values import configuration_of, number_of, same_shape, setting_of, shape_of, total_of
from retrain.models.pythia_suite import Configuration

SETTING_ERROR = 0.03  # in log, a factor of two in sequences and queries beyond those measured
FIXED_ERROR = 0.5  # in log, of what the two passes take beside their sequences; at least, where it was not measured
OWN_QUERY_ERROR = 0.4  # in log, of further queries in a model that was measured with them: 410m twice, and its depth
OTHER_QUERY_ERROR = 1.2  # in log, at least, in one that was not: 14m, 410m and 2.8b, each from the others
QUERY_ERROR = 0.25  # in log, a factor of two in EK-FAC's queries beyond those measured: 14m at 1,800 from 180
KEEPS_FEATURES = ("trak",)  # each example goes through once, however many there are on the other side
LAW_MODELS = 6  # so many tell the four kinds of a draw's work apart


@dataclass(frozen=True)
class CostPart:
    seconds: float
    deviation: float  # one standard deviation, in log


def first_of_each(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a model: of the deepest point with the largest fitting set, the one that rests on least projection."""

    def rank(row: dict[str, Any]) -> tuple[float, ...]:
        sizes = fit_sizes_of(row)
        depth = number_of(row.get("depth")) or 0
        return len(sizes) < 2, -depth, -max(sizes, default=0), row.get("fit_examples") or 0, row["queries"]

    found: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=rank):
        found.setdefault(row["model"], row)
    return list(found.values())


def closest_work(rows: list[dict[str, Any]], setting: Setting) -> list[dict[str, Any]]:
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


def bif_parts(
    all_rows: list[dict[str, Any]], rows: list[dict[str, Any]], configuration: Configuration, setting: Setting
) -> list[CostPart]:
    """Setup plus draws x FLOP x seconds a FLOP, the last across models.

    That is from rows of one number of sequences and queries, that of the most models. What a FLOP takes in `rows` at
    another number, over that, is straight between the models that have both, and between the numbers.
    """
    groups, own = _by_work(all_rows), _by_work(rows)
    wanted = setting.train + setting.queries
    closest = min(own, key=lambda work: abs(math.log(work / wanted)))
    base = groups[max(groups, key=lambda work: (len(groups[work]), work == closest))]
    paces = {row["model"]: row["seconds_per_draw"] / _row_flops(row) for row in base}
    pace = _pace_of_a_draw(base, list(paces.values()), configuration, setting)
    sizes = [row["token_parameters"] for row in base]
    setup = curve_through(sizes, [max(number_of(row.get("setup_seconds")) or 0.0, 1e-3) for row in base])
    d = configuration.num_token_parameters
    overs: dict[int, float] = {}
    spread = 0.0
    for work in sorted(own):
        both = [
            (row["token_parameters"], math.log(row["seconds_per_draw"] / _row_flops(row) / paces[row["model"]]))
            for row in own[work]
            if row["model"] in paces
        ]
        if both:
            places, ratios = zip(*both)
            overs[work] = float(np.interp(math.log(d), np.log(places), ratios))
            if work == closest and d not in places:
                spread = float(np.std(ratios))
    over = math.exp(float(np.interp(math.log(wanted), np.log(list(overs)), list(overs.values())))) if overs else 1.0
    flops = draw_flops(d, setting.train, setting.queries, setting.minibatch, setting.tokens)
    deviation = math.hypot(pace.deviation, spread, _distance(own[closest] if closest in overs else base, setting))
    return [CostPart(setup.at(d), 0.5), CostPart(setting.draws * flops * pace.seconds * over, deviation)]


def _pace_of_a_draw(
    rows: list[dict[str, Any]], paces: list[float], configuration: Configuration, setting: Setting
) -> CostPart:
    """Seconds a FLOP by the kinds of work, where there are models enough to tell them apart, or by size; times what the
    model itself is over that where it was measured."""
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
    seconds = _at_own_level(law, d, asked, [same_shape(shape, configuration) for shape in shapes])
    return CostPart(seconds / asked[0], law.deviation(d))


def _at_own_level(law: Law, size: float, asked: tuple[float, ...], own: Sequence[bool]) -> float:
    """What the law says, times what the model was over it where it was measured (`own`): a longer sequence takes more
    of some kinds of work than of others."""
    for work, cost, is_own in zip(law.given_work, law.given_costs, own):
        if is_own and cost > 0:
            return cost * law.at(size, asked) / law.at(size, work)
    return law.at(size, asked)


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


def ekfac_parts(rows: list[dict[str, Any]], configuration: Configuration, setting: Setting) -> list[CostPart]:
    """Eigendecompositions by cubes, two passes over the fitting sequences, what is fixed, and scores."""
    known = first_of_each(rows)
    one_size = all("," not in str(row.get("fit_sizes") or row["fit_examples"]) for row in known)
    unsplit = ONE_SIZE_ERROR if one_size and setting.fit_examples > known[0]["fit_examples"] else 0.0
    eigen = _by_width(known, [row["eigen_seconds"] / row["eigen_cost"] for row in known], configuration)
    parts = [replace(eigen, seconds=eigen.seconds * configuration.eigen_cost)]
    for name, flops in (("covariance", covariance_flops), ("lambda", lambda_flops)):
        each = _by_law(known, [row[f"{name}_per_example"] for row in known], _launched(flops), configuration, setting)
        parts.append(CostPart(each.seconds * setting.fit_examples, math.hypot(each.deviation, unsplit)))
    fixed = [(row.get("covariance_base") or 0.0) + (row.get("lambda_base") or 0.0) for row in known]
    if any(fixed):
        each = _by_law(known, [max(seconds, 1e-3) for seconds in fixed], _written, configuration, setting)
        own = any(same_shape(configuration_of(row), configuration) for row in known)
        parts.append(replace(each, deviation=FIXED_ERROR if own else max(each.deviation, FIXED_ERROR)))
    parts += _score_parts(rows, configuration, setting)
    return [part for part in parts if part.seconds > 0]


def _written(shape: Configuration, tokens: int) -> tuple[float, ...]:
    """What the passes take however few sequences there are: their start, a block at a time, and their factors."""
    return float(shape.layers), float(shape.factor_bytes())


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
    """A cost by its kinds of work, at the model's own level where it was measured."""
    shapes = [(shape_of(row), int(row["tokens"])) for row in rows]
    law = law_through(
        tuple(float(shape.hidden) for shape, _ in shapes), tuple(kinds(*shape) for shape in shapes), tuple(costs)
    )
    own = [same_shape(configuration_of(row), configuration) for row in rows]
    width, work = configuration.hidden, kinds(configuration, setting.tokens)
    return CostPart(_at_own_level(law, width, work, own), law.deviation(width))


def _own(rows: list[dict[str, Any]], paces: list[float], configuration: Configuration) -> float | None:
    return next(
        (pace for row, pace in zip(rows, paces) if same_shape(configuration_of(row), configuration) and pace > 0), None
    )


def _score_parts(rows: list[dict[str, Any]], configuration: Configuration, setting: Setting) -> list[CostPart]:
    """By each model's own sequences, queries and pairs, with a law across models.

    Half of few queries say little of what further ones take: beyond the number that most models were measured at, that
    is taken from the models that were measured at more, where there are two to tell a small one from a large one. Each
    factor of two beyond what a model was itself measured at widens the interval.
    """
    measured = [row for row in rows if scores_were_measured(row)] or rows
    fewest = [min(int(row["queries"]) for row in measured if row["model"] == model) for model in _models(measured)]
    usual = max(set(fewest), key=lambda count: (fewest.count(count), -count))
    many = [row for row in _most_queries(measured) if row["queries"] > usual and _has_score_parts(row)]
    queries = min(setting.queries, usual) if len(many) > 1 else setting.queries
    # The run that the fit is from has its scores; one in fewer blocks says what further queries take.
    deepest = first_of_each(sorted(measured, key=lambda row: abs(row["queries"] - usual)))
    spans = [score_span(row, setting.train, queries) for row in deepest]
    usually = [score_span(row, int(row["train"]), usual)[0] for row in deepest]
    costs = [math.sqrt(low * high) for low, high in spans]
    known = _at_length(deepest, costs, usually, configuration, setting)
    unknown = max(math.log(high / low) / 2 for low, high in spans) / 1.96
    parts = [replace(known, deviation=math.hypot(known.deviation, unknown))]
    if setting.queries > queries:
        costs = [_further_queries(rows, row, usual, setting) for row in many]
        measured_at = [replace(setting, train=int(row["train"]), queries=int(row["queries"])) for row in many]
        usually = [_further_queries(rows, row, usual, one) for row, one in zip(many, measured_at)]
        each = _at_length(many, costs, usually, configuration, setting)
        own = [row["queries"] for row in many if same_shape(configuration_of(row), configuration)]
        reach = own[0] if own else min(row["queries"] for row in many)
        beyond = QUERY_ERROR * max(0.0, math.log2(setting.queries / reach))
        across = OWN_QUERY_ERROR if own else max(each.deviation, OTHER_QUERY_ERROR)
        parts.append(replace(each, deviation=math.hypot(across, beyond)))
    return parts


def _at_length(
    rows: list[dict[str, Any]],
    costs: list[float],
    usually: list[float],
    configuration: Configuration,
    setting: Setting,
) -> CostPart:
    """Scores by their law at the length that was measured, times what another length does to the usual ones: by a law
    of its own, fewer would be launches alone, which no shorter sequence makes cheaper, and so dearer than more."""
    tokens = int(rows[0]["tokens"])
    kinds, as_measured = _launched(_token_work), replace(setting, tokens=tokens)
    found = _by_law(rows, costs, kinds, configuration, as_measured)
    if setting.tokens == tokens:
        return found
    longer, same = (_by_law(rows, usually, kinds, configuration, one).seconds for one in (setting, as_measured))
    return replace(found, seconds=found.seconds * longer / max(same, 1e-12))


def _further_queries(rows: list[dict[str, Any]], last: dict[str, Any], usual: int, setting: Setting) -> float:
    """Seconds of the queries beyond the usual number in one model: straight between those it was measured at."""
    same = [
        row
        for row in rows
        if all(row.get(name) == last.get(name) for name in ("model", "fit_examples", "run_id"))
        and row["queries"] > usual
        and scores_were_measured(row)
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


def _models(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows))


def _most_queries(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a model, the one with the most queries."""
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: (-row["queries"], row["fit_examples"] or 0)):
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


def other_parts(rows: list[dict[str, Any]], configuration: Configuration, setting: Setting) -> list[CostPart]:
    """In proportion to tokens and parameters; of a fitted method that is its scores, beside its fit."""
    known = closest_work(rows, setting)
    fitted = any(number_of(row.get("fit_examples")) for row in known)
    own = any(same_shape(configuration_of(row), configuration) for row in known)
    deviation = _distance(known, setting)
    d, sizes = configuration.num_token_parameters, [row["token_parameters"] for row in known]
    seconds = []
    for row in known:
        here = (float(row["score_seconds"]) if fitted else total_of(row)) * setting.tokens / row["tokens"]
        by_sum = (setting.train + setting.queries) / (row["train"] + row["queries"])
        by_pairs = setting.train * setting.queries / (row["train"] * row["queries"])
        if row["method"] in KEEPS_FEATURES:
            by_pairs = by_sum
        # Gradients that do not fit at once are taken again for every block of the other side's: between the two.
        seconds.append(here * math.sqrt(by_sum * by_pairs))
        deviation = max(deviation, abs(math.log(by_pairs / by_sum)) / 2 / 1.96)
    pace = curve_through(sizes, [one / size for one, size in zip(seconds, sizes)])
    parts = [CostPart(pace.at(d) * d, deviation if own else math.hypot(pace.deviation(d), deviation))]
    if fitted:
        fixed = []
        for row in known:
            each = _a_fitting_sequence(rows, shape_of(row), setting_of(row))
            fixed.append(max(float(row["fit_seconds"]) - row["fit_examples"] * each.seconds, 1e-3))
        rest = _by_law(known, fixed, _decomposed, configuration, setting)
        each = _a_fitting_sequence(rows, configuration, setting)
        parts += [
            replace(rest, deviation=0.0) if own else rest,
            replace(each, seconds=each.seconds * setting.fit_examples),
        ]
    return parts


def _decomposed(shape: Configuration, tokens: int) -> tuple[float, ...]:
    """Kernels' start and eigendecompositions."""
    return float(shape.layers), float(shape.eigen_cost)


def _a_fitting_sequence(rows: list[dict[str, Any]], configuration: Configuration, setting: Setting) -> CostPart:
    """Of another method than kronfluence's, from the models that were run with two fitting sets; where none was, all of
    a fit goes by them."""
    slopes, known = [], []
    for row in first_of_each(rows):
        same = [other for other in rows if all(other[name] == row[name] for name in ("model", "train", "queries"))]
        sizes = {other["fit_examples"]: float(other["fit_seconds"]) for other in same}
        slope = fit_line(list(sizes), list(sizes.values())).slope if len(sizes) > 1 else 0.0
        if slope > 0:
            slopes.append(slope)
            known.append(row)
    kinds = _launched(lambda shape, tokens: covariance_flops(shape, tokens) + least_lambda_flops(shape, tokens))
    if slopes:
        each = _by_law(known, slopes, kinds, configuration, setting)
        return replace(each, deviation=max(each.deviation, UNKNOWN_ERROR))
    known = first_of_each(rows)
    each = _by_law(known, [row["fit_seconds"] / row["fit_examples"] for row in known], kinds, configuration, setting)
    return replace(each, deviation=math.hypot(each.deviation, ONE_SIZE_ERROR))
