"""Everything that bench.scaling prints: a sweep's rows, estimates, predictions against measurements, who is cheaper."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from bench.scaling import suite
from bench.scaling.estimate import (
    PAPER_FITTED,
    RIVALS,
    Crossing,
    Estimate,
    Estimator,
    crossing_in,
    first_of_each,
    held_out,
    ratio_ends,
)
from bench.scaling.rows import (
    Row,
    fit_sizes_of,
    is_of,
    method_label,
    scores_were_measured,
    setting_of,
    shape_of,
    total_of,
)
from bench.scaling.suite import SUITE, Configuration, Setting
from bench.tables import bytes_text, duration, markdown_table, table

DEVICE_MEMORY = {"NVIDIA H200": 139 * 2**30}  # of the devices whose rates ship with the package
LIBRARY_FITTED = 100_000  # kronfluence's default covariance_max_examples and lambda_max_examples; ours lifts them
MEASURED_FITTED = 400
FITTING_SETS = {
    MEASURED_FITTED: "the training set",
    LIBRARY_FITTED: "kronfluence's default cap",
    PAPER_FITTED: "the paper's Pile sample",
}
PROJECTED, ESTIMATED = " \\*", " ~"  # marks in a page: from smaller runs of the same model; from other models


def too_large(found: Sequence[Estimate], device: str) -> list[Estimate]:
    """Those that the device has no memory for, where that is known."""
    room = DEVICE_MEMORY.get(device)
    return [one for one in found if room and one.peak_memory_bytes > room]


def _interval(low: float, high: float) -> str:
    return f"[{duration(low)}, {duration(high)}]"


def _rounded(value: float | None) -> str:
    """Two digits: no crossing is known better."""
    return "?" if value is None else f"{float(f'{value:.2g}'):,.0f}"


def _count(value: float | None) -> str:
    return f"{value:,.0f}" if value else "-"


def _setting_text(setting: Setting) -> str:
    sizes = f"{setting.train} training sequences, {setting.queries} queries, {setting.tokens} tokens"
    return f"{sizes}, {setting.draws:,} draws"


# ---- a sweep ----


def show_rows(rows: Sequence[Row]) -> str:
    """At most 100 columns; scaling.csv has every part of the seconds and where projections come from."""
    header = ["model", "method", "fitted on", "queries", "fit + score", "95 % interval", "peak memory", "disk"]
    lines: list[list[str]] = []
    notes: dict[str, None] = {}
    for row in rows:
        name = [row["model"], method_label(row["method"]), _count(row["fit_examples"]), f"{row['queries']:,.0f}"]
        if row["error"]:
            lines.append(name + ["-"] * (len(header) - len(name)))
            notes[f"{row['model']} {row['method']}: {row['error']}"] = None
            continue
        ends = _interval(row["seconds_low"], row["seconds_high"]) if row["projected"] else ""
        seconds = duration(total_of(row)) + (" *" if row["projected"] else "  ")
        disk = bytes_text(row["disk_bytes"]) if row["disk_bytes"] else "-"
        lines.append([*name, seconds, ends, bytes_text(row["peak_memory_bytes"]), disk])
    text = table(header, lines, left=2)
    if any(row["projected"] for row in rows):
        text += "\n* projected from smaller sizes; scaling.csv says from which"
    return "\n".join([text, *notes])


def progress_line(row: Row) -> str:
    fitted = f" fitted on {row['fit_examples']:,.0f}" if row["fit_examples"] else ""
    kind = f"projected from {row['projected_from']}" if row["projected"] else "measured"
    came = row["error"] or f"{duration(total_of(row))}, {kind}"
    return f"{row['model']} {row['method']}{fitted}, {row['queries']:,.0f} queries: {came}"


# ---- an estimate ----


def estimate_text(
    device: str, estimator: Estimator, shape: Configuration, setting: Setting, found: Sequence[Estimate], source: str
) -> str:
    """The question, a line a method, what does not fit, EK-FAC's fitting sets against BIF, and their crossings."""
    header = ["method", "fitted on", "fit + score", "95 % interval", "peak memory", "disk", "models measured"]
    rows = [
        [
            method_label(one.method),
            _count(one.fit_examples),
            duration(one.seconds),
            _interval(one.seconds_low, one.seconds_high),
            "unknown" if math.isnan(one.peak_memory_bytes) else bytes_text(one.peak_memory_bytes),
            bytes_text(one.disk_bytes) if one.disk_bytes else "-",
            f"{one.num_models}" + (" +" if one.beyond or one.unmeasured else ""),
        ]
        for one in found
    ]
    sizes = ["model size"] if any(one.beyond for one in found) else []
    outside = dict.fromkeys([*sizes, *(words for one in found for words in one.unmeasured)])
    note = f"\n+ beyond what was measured in {', '.join(outside)}" if outside else ""
    parts = [
        f"{shape.name} ({shape.num_parameters:,} parameters), {_setting_text(setting)} for BIF\n"
        f"{device}, predicted from {source}",
        table(header, rows) + note,
    ]
    unfit = {one.method: one for one in too_large(found, device)}
    if unfit:
        names = [f"{method_label(name)} ({bytes_text(one.peak_memory_bytes)})" for name, one in unfit.items()]
        parts.append(f"does not fit one {device} ({bytes_text(DEVICE_MEMORY[device])}): {', '.join(names)}")
    if set(RIVALS) <= {one.method for one in found} - set(unfit):
        # How many draws were timed at this shape, or at the closest size.
        draws = [row for row in estimator.of("bif") if row["timed_draws"]]
        away = [(abs(math.log(row["parameters"] / shape.num_parameters)), row["queries"]) for row in draws]
        timed = draws[away.index(min(away))]["timed_draws"] if draws else math.nan
        header, rows = fitting_set_table(estimator, shape, setting)
        parts.append(
            f"{table(header, rows, left=(3, 4))}\nBIF's seconds: {timed:,.0f} of {setting.draws:,} draws timed"
        )
        crossing = crossing_in(estimator, shape, setting, "fit_examples")
        said = [f"{setting.queries:,} queries: {crossing_text(crossing, 'fitting sequences')}"]
        for count in sorted({one.fit_examples for one in found if one.fit_examples}):
            crossing = crossing_in(estimator, shape, replace(setting, fit_examples=count), "queries")
            said.append(f"{count:,} fitting sequences: {crossing_text(crossing, 'queries')}")
        parts.append("\n".join(said))
    return "\n\n".join(parts)


def fitting_set_table(
    estimator: Estimator, shape: Configuration, setting: Setting
) -> tuple[list[str], list[list[str]]]:
    """Header and lines: BIF's seconds over EK-FAC's at the three fitting sets that matter, and how each is known."""
    header = ["EK-FAC fitted on", "BIF / EK-FAC", "95 % interval", "cheaper", "EK-FAC's fit is"]
    own = [row for row in estimator.of("ekfac") if is_of(row, shape) and fit_sizes_of(row)]
    sizes = sorted({size for row in own for size in fit_sizes_of(row)})
    depth = max((int(row["depth"] or shape.layers) for row in own), default=0)
    lines = []
    for count, words in FITTING_SETS.items():
        asked = replace(setting, fit_examples=count)
        bif, ekfac = (estimator.estimate(method, shape, asked) for method in RIVALS)
        known = "from other models alone"
        if own:
            known = "measured" if count in sizes else f"extrapolated from {sizes[0]:,} to {sizes[-1]:,}"
            known += f", in {depth} of {shape.layers} blocks" if depth < shape.layers else ""
        dearer, cheaper = (ekfac, bif) if ekfac.seconds > bif.seconds else (bif, ekfac)
        ratio = dearer.seconds / cheaper.seconds
        who = f"{method_label(cheaper.method)} {f'{ratio:,.0f}' if ratio >= 10 else f'{ratio:.1f}'}x"
        undecided = "not decided: " if ratio_ends(dearer, cheaper)[0] < 1 else ""
        cells = [f"{value:.2g}" for value in (bif.seconds / ekfac.seconds, *ratio_ends(bif, ekfac))]
        lines.append([f"{count:,} ({words})", cells[0], f"[{cells[1]}, {cells[2]}]", undecided + who, known])
    return header, lines


def crossing_text(one: Crossing, what: str) -> str:
    """A sentence; also where there is none."""
    names, places = [method_label(name) for name in one.cheaper], [_rounded(value) for value in one.values]
    if not places:
        return f"{names[0]} is cheaper at any number of {what}{'' if one.sure else ' (unsure at some)'}"
    if len(places) > 1:
        below = ", ".join(f"{name} below {place}" for name, place in zip(names, places))
        return f"cheaper is {below}, {names[-1]} above, {what} (by the estimates alone, without their intervals)"
    ends = [f"{word} {_rounded(end)}" for word, end in (("from", one.low), ("to", one.high)) if end is not None]
    return f"{names[1]} is cheaper above {places[0]} {what} (unsure {' '.join(ends) or 'throughout'})"


# ---- predictions against measurements ----


def show_held_out(found: Sequence[dict[str, Any]]) -> str:
    """At most 100 columns."""
    header = ["model", "method", "fitted on", "queries", "predicted", "95 % interval", "came out", "off"]
    rows = [
        [
            row["model"] + (" +" if row["beyond"] else ""),
            row["method"].rpartition(":")[2],
            _count(row["fit_examples"]),
            f"{row['queries']:,}",
            duration(row["predicted_seconds"]),
            _interval(row["seconds_low"], row["seconds_high"]),
            duration(row["measured_seconds"]) + (" *" if row["projected"] else "  "),
            f"{100 * row['seconds_off']:+.0f} %" + ("  " if row["inside"] else " !"),
        ]
        for row in found
    ]
    lines = [table(header, rows, left=2)]
    if any(row["projected"] for row in found):
        lines.append("* projected from smaller sizes")
    if any(row["beyond"] for row in found):
        lines.append("+ smaller or larger than every model it is predicted from")
    outside = sum(not row["inside"] for row in found)
    lines.append(f"{len(found) - outside} of {len(found)} inside their interval" + (" (!: outside)" if outside else ""))
    return "\n".join(lines)


# ---- who is cheaper: the tables of results/scaling ----

VERDICT_MODEL = "2.8b"
TABLE_SETS = (400, 2_000, 10_000, LIBRARY_FITTED, PAPER_FITTED)


def verdict_text(device: str, estimator: Estimator) -> str:
    """Markdown; * stands at what is projected from smaller runs of the same model, ~ at what other models say."""
    all_bif = estimator.of("bif")
    fewest = min(row["queries"] for row in all_bif)
    bif = [row for row in all_bif if row["queries"] == fewest]
    setting = setting_of(bif[0])
    parts = [
        f"At {VERDICT_MODEL} on one {device}, {_setting_text(setting)}:",
        markdown_table(*fitting_set_table(estimator, SUITE[VERDICT_MODEL], setting)),
        _model_table(device, estimator, bif, setting),
        "\\* projected from smaller runs of the same model; ~ estimated from other models, or by arithmetic; "
        "a / b: the same run made again (of several, the one farthest off).",
        *_more_queries(device, estimator, setting),
        _break_even(estimator, bif, setting),
    ]
    everything = held_out(estimator)
    for method in RIVALS:  # how far off each model is when it is predicted from the others alone
        checked = [one for one in everything if one["method"] == method]
        if inner := [one for one in checked if not one["beyond"]]:
            worst = max(inner, key=lambda one: abs(one["seconds_off"]))
            inside, models = sum(one["inside"] for one in checked), {one["model"] for one in checked}
            parts.append(
                f"{method_label(method)}, each model predicted from the others: {inside} of {len(checked)} rows of "
                f"{len(models)} models are inside their 95 % interval; between measured sizes at most "
                f"{abs(100 * worst['seconds_off']):.0f} % off ({worst['model']})."
            )
    return "\n\n".join(parts)


def _seconds(row: Row) -> str:
    return duration(total_of(row)) + (f" / {duration(row['again_seconds'])}" if row["again_seconds"] else "")


def _cell(row: Row) -> str:
    return _seconds(row) + (PROJECTED if row["projected"] else "")


def _model_table(device: str, estimator: Estimator, bif: list[Row], setting: Setting) -> str:
    """A column a model that BIF was run at, and a line a quantity."""
    chains = {row["model"]: row for row in bif}
    models = [shape for shape in SUITE.values() if shape.name in chains]
    ekfac = {shape.name: [row for row in estimator.of("ekfac") if row["model"] == shape.name] for shape in models}
    fits = {row["model"]: row for row in first_of_each(estimator.of("ekfac"))}

    def of_bif(name: str, form: Callable[[float], str]) -> list[str]:
        values = [chains[shape.name][name] for shape in models]
        return [form(value) if value else "" for value in values]

    def over_floor(shape: Configuration, flops: Callable[[Configuration, int], float]) -> str:
        """What EK-FAC takes for a fitting sequence over the FLOP of its two passes at the matrix product's peak."""
        row = fits.get(shape.name)
        if not row or not row["fit_seconds_per_example"] or not row["peak_flops"]:
            return ""
        floor = suite.covariance_flops(shape, int(row["tokens"])) + flops(shape, int(row["tokens"]))
        return f"{row['fit_seconds_per_example'] * row['peak_flops'] / floor:.0f}x"

    def fitted(shape: Configuration, count: int) -> str:
        own = [row for row in ekfac[shape.name] if (row["fit_examples"], row["queries"]) == (count, setting.queries)]
        predicted = estimator.estimate("ekfac", shape, replace(setting, fit_examples=count))
        if own or too_large([predicted], device):
            return _cell(own[0]) if own else "does not fit"
        return duration(predicted.seconds) + (PROJECTED if ekfac[shape.name] else ESTIMATED)

    def size(shape: Configuration, column: str) -> str:
        own = [row for row in ekfac[shape.name] if row[column]]
        if not own:
            return bytes_text(getattr(estimator.estimate("ekfac", shape, setting), column)) + ESTIMATED
        return bytes_text(own[0][column]) + (PROJECTED if (own[0]["depth"] or shape.layers) < shape.layers else "")

    passes = {"its arithmetic floor": suite.least_lambda_flops, "kronfluence's own products": suite.lambda_flops}
    lines = [
        [f"BIF, {setting.draws:,} draws", *(_cell(chains[shape.name]) for shape in models)],
        ["a draw over its arithmetic floor", *of_bif("floor_ratio", lambda value: f"{value:.1f}x")],
        ["draws that were timed", *of_bif("timed_draws", lambda value: f"{value:.0f}")],
        ["BIF, peak memory", *of_bif("peak_memory_bytes", bytes_text)],
        *(
            [f"a fitting sequence of EK-FAC over {words}", *(over_floor(shape, flops) for shape in models)]
            for words, flops in passes.items()
        ),
        *([f"EK-FAC fitted on {count:,}", *(fitted(shape, count) for shape in models)] for count in TABLE_SETS),
        ["EK-FAC, peak memory", *(size(shape, "peak_memory_bytes") for shape in models)],
        ["EK-FAC, disk", *(size(shape, "disk_bytes") for shape in models)],
    ]
    for method in estimator.methods():  # a line for each further method and fitting set, where it was measured
        rows = [row for row in estimator.of(method) if row["queries"] == setting.queries and method not in RIVALS]
        for count in dict.fromkeys(row["fit_examples"] for row in rows):
            own = {row["model"]: _cell(row) for row in rows if row["fit_examples"] == count}
            words = f" fitted on {count:,.0f}" if count else ""
            lines.append([f"{method_label(method)}{words}", *(own.get(shape.name, "") for shape in models)])
    return markdown_table(["", *(shape.name for shape in models)], lines).replace("|  |", "| |", 1)


def _more_queries(device: str, estimator: Estimator, setting: Setting) -> list[str]:
    """What more queries take, of the models that were measured with several numbers of them."""
    counts = sorted({int(row["queries"]) for row in estimator.of("bif")})
    measured = [model for model, _ in {(row["model"], row["queries"]) for row in estimator.of("bif")}]
    several = [shape for shape in SUITE.values() if measured.count(shape.name) > 1]

    def cell(method: str, shape: Configuration, count: int) -> str:
        own = [
            row for row in estimator.of(method)
            if (row["model"], row["queries"]) == (shape.name, count) and row["fit_examples"] in (None, MEASURED_FITTED)
        ]  # fmt: skip
        predicted = estimator.estimate(method, shape, replace(setting, queries=count, fit_examples=MEASURED_FITTED))
        interval = _interval(predicted.seconds_low, predicted.seconds_high)
        if not own:
            fits = not too_large([predicted], device)
            return f"{duration(predicted.seconds)} {interval}{ESTIMATED}" if fits else "does not fit"
        if scores_were_measured(own[0]) and not 0 < (own[0]["depth"] or 0) < own[0]["layers"]:
            return _cell(own[0])
        # Projected by a line in the queries or from fewer blocks: with the estimate's interval.
        return f"{_seconds(own[0])} {interval}{PROJECTED}"

    lines = []
    for shape in several:
        for method in RIVALS:
            words = f" fitted on {MEASURED_FITTED:,}" if method == "ekfac" else ""
            name = f"{shape.name}, {method_label(method)}{words}"
            lines.append([name, *(cell(method, shape, count) for count in counts)])
    return [markdown_table(["queries", *(f"{count:,}" for count in counts)], lines)] if lines else []


def _break_even(estimator: Estimator, bif: list[Row], setting: Setting) -> str:
    """The fitting set at which the two cost the same, of every model that both were run at."""
    both = {row["model"] for row in estimator.of("ekfac")}
    found, others = [], []
    for row in (row for row in bif if row["model"] in both):
        crossing = crossing_in(estimator, shape_of(row), setting, "fit_examples")
        if len(crossing.values) == 1:
            ends = f"[{_rounded(crossing.low)}, {_rounded(crossing.high)}]"
            found.append(f"{row['model']} {_rounded(crossing.values[0])} {ends}")
        else:
            others.append(row["model"])
    if not found:
        return "At no fitting set do the two cost the same."
    text = f"Fitting sequences at which the two cost the same, {setting.queries} queries: {', '.join(found)}."
    return text + (f" At none, or at several: {', '.join(others)}." if others else "")
