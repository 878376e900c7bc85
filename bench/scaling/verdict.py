"""Who is cheaper, in a table and sentences with their numbers: the part of a page that rows decide.

python -m bench.scaling --verdict                                  # as Markdown, from the package's rates
python -m bench.scaling --verdict results/scaling/README.md        # written between the page's two markers
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.scaling.cost_parts import first_of_each
from bench.scaling.costs import Setting, covariance_flops, lambda_flops, least_lambda_flops
from bench.scaling.crossover import Crossover, crossing_in
from bench.scaling.ekfac_rows import scores_were_measured
from bench.scaling.estimate import PAPER_FITTED, RIVALS, method_label, too_large
from bench.scaling.fits import Estimate, Estimator, ratio_ends
from bench.scaling.held_out import each_from_the_others, repeats
from bench.scaling.row_values import configuration_of, number_of, setting_of, total_of
from bench.tables import bytes_text, duration
from retrain.errors import UsageError
from retrain.models.pythia_suite import SUITE, Configuration
from retrain.safe_files import SafeFileError, read_text, write_whole

BEGIN, END = "<!-- made by python -m bench.scaling --verdict -->", "<!-- end of what is made -->"
VERDICT_MODEL = "2.8b"
VERDICT_SETS = (PAPER_FITTED, 10_000, 400)
TABLE_SETS = (400, 2_000, 10_000, PAPER_FITTED)


def verdict_text(device: str, estimator: Estimator) -> str:
    """Markdown; * stands at what is projected from smaller runs of the same model, ~ at what other models say."""
    bif = _few_queries(estimator)
    setting = setting_of(bif[0])
    parts = [
        _verdict(device, estimator, setting),
        _table(device, estimator, bif, setting),
        *_more_queries(device, estimator, setting),
        _break_even(estimator, bif, setting),
    ]
    return "\n\n".join([*parts, _checks(estimator, setting)])


def verdict_sentence(device: str, estimator: Estimator) -> str:
    """The verdict in a line, its setting first."""
    setting = setting_of(_few_queries(estimator)[0])
    found = []
    for count in VERDICT_SETS:
        asked = replace(setting, fit_examples=count)
        bif, ekfac = (estimator.estimate(method, SUITE[VERDICT_MODEL], asked) for method in RIVALS)
        words = f"fitted on {count:,} sequences, as in the paper" if count == PAPER_FITTED else f"on {count:,}"
        found.append(f"{words}: {_who(ekfac, bif)}")
    return (
        f"EK-FAC against BIF at {VERDICT_MODEL} on one {device} ({_setting(setting)}), projected from "
        f"{_measured_at(estimator)}: {'; '.join(found)}."
    )


def _measured_at(estimator: Estimator) -> str:
    """What was run at the verdict's model."""
    rows = [row for row in estimator.of("ekfac") if row["model"] == VERDICT_MODEL]
    chains = _few_queries(estimator)
    own = next((row for row in chains if row["model"] == VERDICT_MODEL), chains[-1])
    timed = number_of(own.get("timed_draws")) or 0
    if not rows:
        return f"smaller models and {timed:.0f} draws"
    layers = SUITE[VERDICT_MODEL].layers
    depth = int(number_of(rows[0].get("depth")) or layers)
    blocks = "" if depth >= layers else f" in {depth} of {layers} layers"
    sets = " and ".join(str(rows[0]["fit_sizes"]).rsplit(", ", 1))
    return f"fits of {sets} sequences{blocks} and {timed:.0f} draws"


def _few_queries(estimator: Estimator) -> list[dict[str, Any]]:
    fewest = min(row["queries"] for row in estimator.of("bif"))
    return [row for row in estimator.of("bif") if row["queries"] == fewest]


def _setting(setting: Setting) -> str:
    return (
        f"{setting.train} training sequences, {setting.queries} queries, {setting.tokens} tokens, "
        f"{setting.draws:,} draws"
    )


def _verdict(device: str, estimator: Estimator, setting: Setting) -> str:
    lines = [
        f"At {VERDICT_MODEL} on one {device}, {_setting(setting)}:",
        "",
        "| EK-FAC fitted on | EK-FAC | BIF | verdict |",
        "| --- | --- | --- | --- |",
    ]
    for count in VERDICT_SETS:
        asked = replace(setting, fit_examples=count)
        bif, ekfac = (estimator.estimate(method, SUITE[VERDICT_MODEL], asked) for method in RIVALS)
        paper = " (the paper)" if count == PAPER_FITTED else ""
        told = [_with_interval(one) + _of_others(estimator, one.method) for one in (ekfac, bif)]
        lines.append(f"| {count:,}{paper} | {' | '.join(told)} | {_who(ekfac, bif)} |")
    return "\n".join(lines)


def _of_others(estimator: Estimator, method: str) -> str:
    """The mark of what rests on other models alone."""
    return "" if any(row["model"] == VERDICT_MODEL for row in estimator.of(method)) else " ~"


def _with_interval(one: Estimate) -> str:
    return f"{duration(one.seconds)} [{duration(one.seconds_low)}, {duration(one.seconds_high)}]"


def _who(ekfac: Estimate, bif: Estimate) -> str:
    dearer, cheaper = (ekfac, bif) if ekfac.seconds > bif.seconds else (bif, ekfac)
    low, high = ratio_ends(dearer, cheaper)
    name = "BIF" if cheaper is bif else "EK-FAC"
    text = f"{name} {_times(dearer.seconds / cheaper.seconds)}x cheaper [{_times(low)}, {_times(high)}]"
    return f"not decided: {text}" if low < 1 else text


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.1f}"


def _table(device: str, estimator: Estimator, bif: list[dict[str, Any]], setting: Setting) -> str:
    models = [configuration for configuration in SUITE.values() if any(r["model"] == configuration.name for r in bif)]
    rows = {row["model"]: row for row in bif}
    lines = ["| | " + " | ".join(model.name for model in models) + " |", "| --- |" + " --- |" * len(models)]
    lines.append(f"| BIF, {setting.draws:,} draws | " + " | ".join(_cell(rows[m.name]) for m in models) + " |")
    floors = [number_of(rows[model.name].get("floor_ratio")) for model in models]
    lines.append("| a draw over its arithmetic floor | " + " | ".join(f"{f:.1f}x" if f else "" for f in floors) + " |")
    timed = [number_of(rows[model.name].get("timed_draws")) for model in models]
    lines.append("| draws that were timed | " + " | ".join(f"{t:.0f}" if t else "" for t in timed) + " |")
    peaks = [bytes_text(rows[model.name]["peak_memory_bytes"]) for model in models]
    lines.append("| BIF, peak memory | " + " | ".join(peaks) + " |")
    for words, flops in (("its arithmetic floor", least_lambda_flops), ("kronfluence's own products", lambda_flops)):
        paces = [_over_floor(estimator, model.name, flops) for model in models]
        lines.append(
            f"| a fitting sequence of EK-FAC over {words} | "
            + " | ".join(f"{pace:.0f}x" if pace else "" for pace in paces)
            + " |"
        )
    for count in TABLE_SETS:
        cells = []
        for model in models:
            own = [r for r in estimator.of("ekfac") if r["model"] == model.name and r["fit_examples"] == count]
            own = [row for row in own if row["queries"] == setting.queries]
            predicted = estimator.estimate("ekfac", model, replace(setting, fit_examples=count))
            told = f"{duration(predicted.seconds)} ~" if not too_large([predicted], device) else "does not fit"
            cells.append(_cell(own[0]) if own else told)
        lines.append(f"| EK-FAC fitted on {count:,} | " + " | ".join(cells) + " |")
    for name, column in (("peak memory", "peak_memory_bytes"), ("disk", "disk_bytes")):
        cells = []
        for model in models:
            own = [row for row in estimator.of("ekfac") if row["model"] == model.name and number_of(row.get(column))]
            predicted = estimator.estimate("ekfac", model, setting)
            value = own[0][column] if own else getattr(predicted, column)
            shallow = bool(own) and (number_of(own[0].get("depth")) or model.layers) < model.layers
            cells.append(bytes_text(value) + (" \\*" if shallow else "" if own else " ~"))
        lines.append(f"| EK-FAC, {name} | " + " | ".join(cells) + " |")
    lines += _other_methods(estimator, models, setting)
    return "\n".join(
        [
            *lines,
            "",
            "\\* projected from smaller runs of the same model; ~ estimated from other models, or by arithmetic; "
            "a / b: the same run made again (of several, the one farthest off).",
        ]
    )


def _other_methods(estimator: Estimator, models: list[Configuration], setting: Setting) -> list[str]:
    """A line for each further method and fitting set, where it was measured."""
    lines = []
    for method in estimator.methods():
        rows = [row for row in estimator.of(method) if row["queries"] == setting.queries and method not in RIVALS]
        for count in dict.fromkeys(number_of(row.get("fit_examples")) for row in rows):
            own = {row["model"]: _cell(row) for row in rows if number_of(row.get("fit_examples")) == count}
            fitted = f" fitted on {count:,.0f}" if count else ""
            cells = " | ".join(own.get(model.name, "") for model in models)
            lines.append(f"| {method_label(method)}{fitted} | {cells} |")
    return lines


def _more_queries(device: str, estimator: Estimator, setting: Setting) -> list[str]:
    """What more queries take, of the models that were measured with several numbers of them."""
    counts = sorted({int(row["queries"]) for row in estimator.of("bif")})
    several = [
        model
        for model in SUITE.values()
        if len({row["queries"] for row in estimator.of("bif") if row["model"] == model.name}) > 1
    ]
    if not several:
        return []
    fitted = min(VERDICT_SETS)
    lines = ["| queries | " + " | ".join(f"{count:,}" for count in counts) + " |", "| --- |" + " --- |" * len(counts)]
    for model in several:
        for method in RIVALS:
            cells = []
            for count in counts:
                asked = replace(setting, queries=count, fit_examples=fitted)
                own = [r for r in estimator.of(method) if r["model"] == model.name and r["queries"] == count]
                own = [row for row in own if number_of(row.get("fit_examples")) in (None, fitted)]
                predicted = estimator.estimate(method, model, asked)
                told = f"{_with_interval(predicted)} ~" if not too_large([predicted], device) else "does not fit"
                cells.append(_queries_cell(own[0], predicted) if own else told)
            words = f" fitted on {fitted:,}" if method == "ekfac" else ""
            lines.append(f"| {model.name}, {method_label(method)}{words} | {' | '.join(cells)} |")
    return ["\n".join(lines)]


def _over_floor(
    estimator: Estimator, model: str, flops_of_lambda: Callable[[Configuration, int], float]
) -> float | None:
    """What EK-FAC takes for a fitting sequence over the FLOP of its two passes at the matrix product's peak."""
    for row in first_of_each(estimator.of("ekfac")):
        each, peak = number_of(row.get("fit_seconds_per_example")), number_of(row.get("peak_flops"))
        if row["model"] == model and each and peak:
            shape, tokens = SUITE[model], int(row["tokens"])
            return each * peak / (covariance_flops(shape, tokens) + flops_of_lambda(shape, tokens))
    return None


def _queries_cell(row: dict[str, Any], predicted: Estimate) -> str:
    """With the estimate's interval, where the row is projected by a line in the queries or from fewer blocks."""
    blocks = number_of(row.get("depth")) or 0
    if scores_were_measured(row) and not 0 < blocks < row["layers"]:
        return _cell(row)
    ends = ", ".join(duration(end) for end in (predicted.seconds_low, predicted.seconds_high))
    return f"{duration(total_of(row))}{_again(row)} [{ends}] \\*"


def _cell(row: dict[str, Any]) -> str:
    return duration(total_of(row)) + _again(row) + (" \\*" if str(row["projected"]) == "True" else "")


def _again(row: dict[str, Any]) -> str:
    seconds = number_of(row.get("again_seconds"))
    return f" / {duration(seconds)}" if seconds else ""


def _break_even(estimator: Estimator, bif: list[dict[str, Any]], setting: Setting) -> str:
    both = {row["model"] for row in estimator.of("ekfac")}
    found, others = [], []
    for row in bif:
        configuration = configuration_of(row)
        if configuration is None or row["model"] not in both:
            continue
        crossing = crossing_in(estimator, configuration, setting, "fit_examples", RIVALS)
        if isinstance(crossing, Crossover):
            ends = ", ".join(_rounded(end) for end in (crossing.low, crossing.high))
            found.append(f"{row['model']} {_rounded(crossing.value)} [{ends}]")
        else:
            others.append(row["model"])
    if not found:
        return "At no fitting set do the two cost the same."
    text = f"Fitting sequences at which the two cost the same, {setting.queries} queries: {', '.join(found)}."
    return text + (f" At none, or at several: {', '.join(others)}." if others else "")


def _rounded(count: float | None) -> str:
    """To two digits; unknown where no end was found."""
    return "?" if count is None else f"{float(f'{count:.2g}'):,.0f}"


def _checks(estimator: Estimator, setting: Setting) -> str:
    """How far off each model is when it is predicted from the others alone, and a run from the same run."""
    lines = []
    everything = each_from_the_others(estimator)
    for method in RIVALS:
        checked = [one for one in everything if one["method"] == method]
        inner = [one for one in checked if not one["beyond"]]
        if not inner:
            continue
        inside = sum(one["inside"] for one in checked)
        ends = [
            f"the {word} ({model}) "
            + ", ".join(_off(one, setting.queries) for one in checked if one["model"] == model and _told(one))
            for word, model in (
                ("smallest", min(checked, key=_size)["model"]),
                ("largest", max(checked, key=_size)["model"]),
            )
        ]
        lines.append(
            f"{method_label(method)}, each model from the others: {_worst(inner, setting.queries)}; {'; '.join(ends)}; "
            f"{inside} of {len(checked)} rows of {len({one['model'] for one in checked})} models inside their 95 % "
            "interval."
        )
    again = repeats(estimator.of("ekfac"))
    if again:
        off = [f"{_run_of(row, setting.queries)} {100 * more:+.0f} %" for row, more in again]
        lines.append(f"EK-FAC, the same run made again: {', '.join(off)}.")
    return "\n".join(lines)


def _worst(checked: list[dict[str, Any]], few: int) -> str:
    """The largest miss between measured sizes: of runs, of projected fitting sets, and of more queries."""
    kinds = {
        "": [one for one in checked if one["queries"] == few and not (one["fit_examples"] and one["projected"])],
        " where the fitting set is projected too": [
            one for one in checked if one["queries"] == few and one["fit_examples"] and one["projected"]
        ],
        f" with more than {few} queries": [one for one in checked if one["queries"] != few],
    }
    found = []
    for words, those in kinds.items():
        if those:
            worst = max(those, key=lambda one: abs(one["seconds_off"]))
            found.append(f"at most {abs(100 * worst['seconds_off']):.0f} % off{words} ({worst['model']})")
    return "between measured sizes " + ", ".join(found)


def _told(one: dict[str, Any]) -> bool:
    return one["fit_examples"] is None or one["fit_examples"] in VERDICT_SETS


def _off(one: dict[str, Any], few: int) -> str:
    fitted = f"fitted on {one['fit_examples']:,.0f}" if one["fit_examples"] else ""
    queries = f"with {one['queries']:,} queries" if not fitted or one["queries"] != few else ""
    where = " ".join(filter(None, [fitted, queries]))
    return f"{100 * one['seconds_off']:+.0f} % {where}" + (" \\*" if one["projected"] else "")


def _run_of(row: dict[str, Any], few: int) -> str:
    shape = configuration_of(row)
    depth = int(number_of(row.get("depth")) or 0)
    said = [f"{depth} of {shape.layers} blocks"] if shape is not None and 0 < depth < shape.layers else []
    said += [f"{row['queries']:,} queries"] if row["queries"] != few else []
    return f"{row['model']} on {row['fit_examples']:,.0f}" + (f" ({', '.join(said)})" if said else "")


def _size(one: dict[str, Any]) -> int:
    return SUITE[one["model"]].num_parameters


def write_verdict(path: Path, text: str) -> None:
    """Replaces what is between the page's markers."""
    try:
        page = read_text(path, follow_links=True)
    except SafeFileError as error:
        raise UsageError(f"--verdict {path}: {error}") from None
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise UsageError(f"--verdict {path}: expected one line {BEGIN} and, below it, one {END}")
    before, _, rest = page.partition(BEGIN)
    write_whole(path, f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")
