"""What a run would cost, and which method answers the question most cheaply, in words. Nothing is run.

    python -m bench.scaling --estimate --model 2.8b --train 400 --queries 18 --draws 2000 --fit-examples 1000000

Everything comes from the rows of a measured scaling.csv; without --from, those that ship with the package.
"""

import csv
import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd

from bench.scaling.costs import Setting
from bench.scaling.crossover import Crossing, Several, Throughout, crossing_in, crossing_in_parameters
from bench.scaling.fits import Estimate, Estimator
from bench.scaling.lines import Curve
from bench.scaling.row_values import total_of
from bench.tables import bytes_text, duration, table
from retrain.errors import UsageError
from retrain.models.pythia_suite import Configuration
from retrain.safe_files import SafeFileError, one_line, read_text

RATES = Path(__file__).with_name("rates.csv")  # what ships with the package
NEEDED_COLUMNS = (
    "model", "parameters", "method", "fit_seconds", "score_seconds", "peak_memory_bytes", "device", "train", "queries",
    "tokens", "token_parameters",
)  # fmt: skip
SIZE_COLUMNS = ("parameters", "train", "queries", "tokens", "token_parameters")  # every row has them
# What a method's own estimate rests on, in every row that was measured.
_BIF_COLUMNS = ("seconds_per_draw", "minibatch")
_EKFAC_COLUMNS = ("fit_examples", "eigen_seconds", "eigen_cost", "covariance_per_example", "lambda_per_example")
OWN_COLUMNS = {"bif": _BIF_COLUMNS, "bif_tokens": _BIF_COLUMNS, "ekfac": _EKFAC_COLUMNS}
PAPER_FITTED = 1_000_000  # sequences of the Pile that the paper fits EK-FAC on (sec:appendix-scaling)
METHOD_LABELS = {
    "bif": "BIF",
    "ekfac": "EK-FAC",
    "gradsim": "GradSim",
    "trak": "TRAK",
    "bif_tokens": "BIF, every token",
}
RIVALS = ("bif", "ekfac")
DEVICE_MEMORY = {"NVIDIA H200": 139 * 2**30}  # of the devices whose rates ship with the package


def method_label(method: str) -> str:
    return METHOD_LABELS.get(method, method.rpartition(":")[2])


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a scaling.csv; empty cells are None."""
    if not Path(path).exists():
        command = f"python -m bench.scaling --out {Path(path).parent}"
        raise UsageError(f"{path} is not there; measure first: {command}")
    try:
        text = read_text(path, follow_links=True)
        frame = pd.read_csv(io.StringIO(text))
    except (SafeFileError, ValueError) as error:
        raise UsageError(f"{path} is no readable CSV ({error}); give the scaling.csv of a sweep with --from") from None
    for line, cells in enumerate(csv.reader(io.StringIO(text)), 1):
        if cells and len(cells) < len(frame.columns):
            raise UsageError(
                f"{path}, line {line}: {len(cells)} of {len(frame.columns)} cells; it was cut off, or damaged"
            )
    if missing := [name for name in NEEDED_COLUMNS if name not in frame]:
        raise UsageError(f"{path} lacks the columns {', '.join(missing)}; expected the scaling.csv of bench.scaling")
    for name in (*SIZE_COLUMNS, "fit_seconds", "score_seconds"):
        _check_numbers(path, frame, name, frame[name].notna() | (name in SIZE_COLUMNS))
    measured = frame["score_seconds"].notna() & (frame["error"].isna() if "error" in frame else True)
    for method, names in OWN_COLUMNS.items():
        for name in names:
            _check_numbers(path, frame, name, measured & (frame["method"] == method))
    return [
        {name: None if value is None or pd.isna(value) else value for name, value in row.items()}
        for row in frame.to_dict("records")
    ]


def _check_numbers(path: str | Path, frame: pd.DataFrame, name: str, needed: pd.Series) -> None:
    """Refuses a word or a gap in these rows of a column."""
    column = frame.get(name, pd.Series(math.nan, frame.index))
    wrong = pd.to_numeric(column, errors="coerce").isna() & needed
    if wrong.any():
        row = int(wrong.to_numpy().argmax())
        came = "empty" if pd.isna(column[row]) else f'"{one_line(str(column[row]), 40)}"'
        raise UsageError(f"{path}, line {row + 2}: {name} is {came}; expected a number")


def by_device(rows: Sequence[dict[str, Any]]) -> dict[str, Estimator]:
    """Seconds of different machines are never mixed."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(str(row["device"]), []).append(row)
    return {device: found for device, group in groups.items() if (found := Estimator(group)).rows}


def estimates(
    estimator: Estimator,
    configuration: Configuration,
    setting: Setting,
    fit_sets: Sequence[int],
    methods: Sequence[str] | None,
) -> list[Estimate]:
    """One a method; of a method that is fitted, one a fitting set."""
    found = []
    for method in methods or estimator.methods():
        if method not in estimator.methods():
            raise UsageError(
                f'no measured row of "{method}"; measured: {", ".join(estimator.methods())}. Measure it with --methods '
                f"{method} --out FOLDER, and give FOLDER/scaling.csv with --from"
            )
        sizes = fit_sets if estimator.fitted(method) else fit_sets[:1]
        found += [estimator.estimate(method, configuration, replace(setting, fit_examples=size)) for size in sizes]
    return found


def describe_question(configuration: Configuration, setting: Setting) -> str:
    return (
        f"{configuration.name} ({configuration.num_parameters:,} parameters), {setting.train:,} training sequences, "
        f"{setting.queries:,} queries,\n{setting.tokens:,} tokens; {setting.draws:,} draws for BIF"
    )


def show_estimates(found: Sequence[Estimate]) -> str:
    header = ["method", "fitted on", "fit + score", "95 % interval", "peak memory", "disk", "models measured"]
    rows = [
        [
            method_label(one.method),
            f"{one.fit_examples:,}" if one.fit_examples else "-",
            duration(one.seconds),
            f"[{duration(one.seconds_low)}, {duration(one.seconds_high)}]",
            "unknown" if math.isnan(one.peak_memory_bytes) else bytes_text(one.peak_memory_bytes),
            bytes_text(one.disk_bytes) if one.disk_bytes else "-",
            f"{one.num_models}" + (" +" if one.beyond or one.unmeasured else ""),
        ]
        for one in found
    ]
    sizes = ["model size"] if any(one.beyond for one in found) else []
    outside = dict.fromkeys([*sizes, *(words for one in found for words in one.unmeasured)])
    return table(header, rows) + (f"\n+ beyond what was measured in {', '.join(outside)}" if outside else "")


def too_large(found: Sequence[Estimate], device: str) -> list[Estimate]:
    """Those that the device has no memory for, where that is known."""
    room = DEVICE_MEMORY.get(device)
    return [one for one in found if room and one.peak_memory_bytes > room]


def cheapest(found: Sequence[Estimate], device: str = "") -> str:
    """One line: the cheapest method, at each fitting set where there are several, and whether that is sure.

    BIF with every token's loss is BIF with more to say, and no rival of it. What does not fit the device is none
    either, and a line of its own says so.
    """
    unfit = too_large(found, device)
    lines = []
    if unfit:
        names = dict.fromkeys(f"{method_label(one.method)} ({bytes_text(one.peak_memory_bytes)})" for one in unfit)
        room = bytes_text(DEVICE_MEMORY[device])
        lines.append(f"does not fit one {device} ({room}): {', '.join(names)}")
    found = [one for one in found if one not in unfit]
    found = [one for one in found if one.method != "bif_tokens"] or found
    if len({one.method for one in found}) > 1:
        lines.append(_cheapest(found))
    elif found and unfit:
        one = found[0]
        lines.append(f"left: {method_label(one.method)}, {duration(one.seconds)}, {_room(one)}")
    return "\n".join(lines)


def _cheapest(found: Sequence[Estimate]) -> str:
    sizes: list[int | None] = [*sorted({one.fit_examples for one in found if one.fit_examples})]
    sizes = sizes or [None]
    winners: dict[str, list[str]] = {}
    text = ""
    for size in sizes:
        here = sorted((one for one in found if one.fit_examples in (None, size)), key=lambda one: one.seconds)
        first, rest = here[0], here[1:]
        unsure = bool(rest) and rest[0].seconds_low <= first.seconds_high
        doubts = ["unsure: intervals overlap"] if unsure else []
        doubts += ["its memory is not known"] if math.isnan(first.peak_memory_bytes) else []
        name = method_label(first.method) + (f" ({'; '.join(doubts)})" if doubts else "")
        winners.setdefault(name, []).append(f"{size:,}" if size else "")
        text = ", ".join(filter(None, [name, duration(first.seconds), _room(first)]))
        if rest:
            ratio = rest[0].seconds / first.seconds
            times = f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.1f}"
            text += f"; {method_label(rest[0].method)} takes {times} times as long"
    if len(sizes) == 1:
        return f"cheapest: {text}"
    where = "; ".join(f"{name} with {' or '.join(sets)}" for name, sets in winners.items())
    return f"cheapest: {where} fitting sequences"


def _room(one: Estimate) -> str:
    sizes = {"memory": one.peak_memory_bytes, "disk": one.disk_bytes}
    return " and ".join(f"{bytes_text(size)} of {what}" for what, size in sizes.items() if size > 0)


def crossovers(
    estimator: Estimator, configuration: Configuration | None, setting: Setting
) -> list[tuple[str, Crossing]]:
    """Where BIF and EK-FAC cost the same, in fitting sequences and queries of one model, and in model size."""
    if not set(RIVALS) <= set(estimator.methods()):
        return []
    found: list[tuple[str, Crossing]] = []
    if configuration is not None:
        for axis in ("fit_examples", "queries"):
            found.append((axis, crossing_in(estimator, configuration, setting, axis, RIVALS)))
    if min(len({row["model"] for row in estimator.of(method)}) for method in RIVALS) > 1:
        found.append(("parameters", crossing_in_parameters(estimator, setting, RIVALS)))
    return found


def show_crossovers(found: Sequence[tuple[str, Crossing]], setting: Setting, model: str) -> list[str]:
    """Sentences; also where there is none."""
    words = {"fit_examples": "fitting sequences", "queries": "queries", "parameters": "parameters"}
    others = {
        "fit_examples": f"{model}, {setting.queries:,} queries",
        "queries": f"{model}, {setting.fit_examples:,} fitting sequences",
        "parameters": f"{setting.queries:,} queries, {setting.fit_examples:,} fitting sequences",
    }
    lines = []
    for axis, crossing in found:
        if isinstance(crossing, Throughout):
            where = (
                f"at any number of {words[axis]}"
                if axis != "parameters"
                else "at every size of the suite where it fits"
            )
            unsure = "" if crossing.sure else " (unsure at some)"
            lines.append(f"{others[axis]}: {method_label(crossing.cheaper)} is cheaper {where}{unsure}")
            continue
        if isinstance(crossing, Several):
            lines.append(
                f"{others[axis]}: {_in_turn(crossing)} {words[axis]} (by the estimates alone, without their intervals)"
            )
            continue
        above = method_label(crossing.cheaper_above)
        ends = [
            f"{word} {_rounded(end, axis)}"
            for word, end in (("from", crossing.low), ("to", crossing.high))
            if end is not None
        ]
        lines.append(
            f"{others[axis]}: {above} is cheaper above {_rounded(crossing.value, axis)} {words[axis]} "
            f"(unsure {' '.join(ends) or 'throughout'})"
        )
    return lines


def _in_turn(crossing: Several) -> str:
    """Who is cheaper from the least to the most."""
    places = [_rounded(value, crossing.axis) for value in crossing.values]
    names = [method_label(name) for name in (crossing.first, crossing.second)]
    found = [f"{names[0]} is cheaper below {places[0]}"]
    for k, (low, high) in enumerate(itertools.pairwise(places)):
        found.append(f"{names[(k + 1) % 2]} from {low} to {high}")
    return ", ".join([*found, f"{names[len(places) % 2]} above {places[-1]}"])


def _rounded(value: float, axis: str) -> str:
    """Two digits: no crossing is known better."""
    rounded = float(f"{value:.2g}")
    if axis != "parameters":
        return f"{rounded:,.0f}"
    return f"{rounded / 1e9:g} B" if rounded >= 1e9 else f"{rounded / 1e6:g} M"


def slopes(estimator: Estimator) -> dict[str, dict[str, float | None]]:
    """Method (and fitting set) -> power of the number of parameters that seconds, memory and disk grow with."""
    found: dict[str, dict[str, float | None]] = {}
    for method in estimator.methods():
        for fit in sorted({row.get("fit_examples") or 0 for row in estimator.of(method)}):
            rows = [row for row in estimator.of(method) if (row.get("fit_examples") or 0) == fit]
            queries = min(row["queries"] for row in rows)
            rows = [row for row in rows if row["queries"] == queries]
            sizes = [row["parameters"] for row in rows]
            curves = {
                "seconds": Curve(sizes, [total_of(row) for row in rows]),
                "peak_memory_bytes": Curve(sizes, [row["peak_memory_bytes"] or 0 for row in rows]),
                "disk_bytes": Curve(sizes, [row.get("disk_bytes") or 0 for row in rows]),
            }
            name = f"{method}, {fit:.0f} fitting sequences" if fit else method
            found[name] = {name: curve.slope if len(curve) > 1 else None for name, curve in curves.items()}
    return found


def as_plain(found: Sequence[Estimate], device: str) -> list[dict[str, Any]]:
    return [{"device": device, **asdict(one)} for one in found]
