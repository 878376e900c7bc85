"""What a run would cost, and where EK-FAC becomes the better buy, in words: `python -m bench.scaling --estimate`.

Everything comes from the rows of a measured scaling.csv; nothing is run.
"""

import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from bench.scaling_fits import Crossover, Curve, Estimator, Setting, crossover_parameters, crossover_queries
from bench.tables import bytes_text, duration, table
from retrain.errors import UsageError
from retrain.models.pythia_suite import SUITE, Configuration
from retrain.safe_files import SafeFileError, read_text

NEEDED = ("model", "parameters", "method", "score_seconds", "peak_memory_bytes", "device", "train", "token_parameters")


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a scaling.csv; empty cells are None."""
    if not Path(path).exists():
        command = f"python -m bench.scaling --out {Path(path).parent}"
        raise UsageError(f"{path} is not there; measure first: {command}")
    try:
        frame = pd.read_csv(io.StringIO(read_text(path, follow_links=True)))
    except (SafeFileError, ValueError) as error:
        raise UsageError(f"{path} is no readable CSV ({error}); give the scaling.csv of a sweep with --from") from None
    if missing := [name for name in NEEDED if name not in frame]:
        raise UsageError(f"{path} lacks the columns {', '.join(missing)}; expected the scaling.csv of bench.scaling")
    return [
        {name: None if value is None or pd.isna(value) else value for name, value in row.items()}
        for row in frame.to_dict("records")
    ]


def by_device(rows: Sequence[dict[str, Any]]) -> dict[str, Estimator]:
    """Seconds of different machines are never mixed."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(str(row["device"]), []).append(row)
    return {device: found for device, group in groups.items() if (found := Estimator(group)).rows}


def estimates(
    estimators: dict[str, Estimator], configuration: Configuration, setting: Setting, methods: Sequence[str] | None
) -> list[dict[str, Any]]:
    found = []
    for device, estimator in estimators.items():
        for method in methods or estimator.methods():
            if method not in estimator.methods():
                raise UsageError(
                    f'no measured row of "{method}" on {device}; measured: {", ".join(estimator.methods())}'
                )
            found.append({"device": device, **asdict(estimator.estimate(method, configuration, setting))})
    return found


def show_estimates(
    found: Sequence[dict[str, Any]], configuration: Configuration, setting: Setting, source: str | Path
) -> str:
    lines = [
        f"{configuration.name} ({configuration.num_parameters:,} parameters), {setting.train} training sequences, "
        f"{setting.queries} queries, {setting.tokens} tokens; {setting.draws} draws for BIF, "
        f"{setting.fit_examples} fitting examples for EK-FAC; predicted from {source}"
    ]
    for device in dict.fromkeys(row["device"] for row in found):
        rows = [
            [
                row["method"],
                duration(row["seconds"]),
                f"[{duration(row['seconds_low'])}, {duration(row['seconds_high'])}]",
                bytes_text(row["peak_memory_bytes"]),
                bytes_text(row["disk_bytes"]) if row["disk_bytes"] else "-",
                f"{row['num_rows']}" + (", extrapolated" if row["beyond"] else ""),
            ]
            for row in found
            if row["device"] == device
        ]
        header = ["method", "fit + score", "95 % interval", "peak memory", "disk", "models measured"]
        lines.append(f"\n{device}\n{table(header, rows)}")
    return "\n".join(lines)


def against(estimators: dict[str, Estimator], fresh: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was predicted beside what came out, for every row of a sweep that the estimates do not know."""
    found = []
    for device, measured in by_device(fresh).items():
        for row in measured.rows:
            configuration, estimator = configuration_of(row), estimators.get(device)
            if configuration is None or estimator is None or row["method"] not in estimator.methods():
                continue
            setting = Setting(
                train=int(row["train"]), queries=int(row["queries"]), tokens=int(row["tokens"]),
                draws=int(row.get("draws") or 0), fit_examples=int(row.get("fit_examples") or row["train"]),
                minibatch=int(row.get("minibatch") or 32),
            )  # fmt: skip
            estimate = estimator.estimate(row["method"], configuration, setting)
            seconds = (row.get("fit_seconds") or 0.0) + row["score_seconds"]
            found.append(
                {
                    "device": device,
                    "model": row["model"],
                    "method": row["method"],
                    "predicted_seconds": estimate.seconds,
                    "measured_seconds": seconds,
                    "seconds_off": estimate.seconds / seconds - 1,
                    "memory_off": estimate.peak_memory_bytes / row["peak_memory_bytes"] - 1,
                    "projected": bool(row["projected"]),
                }
            )
    return found


def show_against(found: Sequence[dict[str, Any]]) -> str:
    header = ["model", "method", "predicted", "measured", "off", "memory off"]
    rows = [
        [
            row["model"],
            row["method"],
            duration(row["predicted_seconds"]),
            duration(row["measured_seconds"]) + (" *" if row["projected"] else "  "),
            f"{100 * row['seconds_off']:+.0f} %",
            f"{100 * row['memory_off']:+.0f} %",
        ]
        for row in found
    ]
    text = table(header, rows, left=2)
    return text + ("\n* projected from smaller sizes" if any(row["projected"] for row in found) else "")


def crossovers(estimator: Estimator) -> list[Crossover]:
    """In parameters at the measured setting, and in queries for every measured model."""
    both = {"bif", "ekfac"}
    if not both <= set(estimator.methods()):
        return []
    found = crossover_parameters(estimator)
    models = {method: {row["model"] for row in estimator.of(method)} for method in both}
    for row in estimator.of("bif"):
        if row["model"] not in models["ekfac"]:
            continue
        partner = next(other for other in estimator.of("ekfac") if other["model"] == row["model"])
        setting = Setting(
            train=int(row["train"]), queries=int(row["queries"]), tokens=int(row["tokens"]), draws=int(row["draws"]),
            fit_examples=int(partner["fit_examples"]), minibatch=int(row["minibatch"]),
        )  # fmt: skip
        configuration = configuration_of(row)
        if configuration is not None:
            found += crossover_queries(estimator, configuration, setting)
    return found


def configuration_of(row: dict[str, Any]) -> Configuration | None:
    """Of a row's model, where it is one of the suite."""
    found = SUITE.get(str(row["model"]))
    return found if found is not None and found.num_parameters == int(row["parameters"]) else None


def show_crossovers(estimator: Estimator, found: Sequence[Crossover]) -> str:
    """Sentences; also where there is none."""
    if not {"bif", "ekfac"} <= set(estimator.methods()):
        return ""
    lines = []
    sizes = [crossover for crossover in found if crossover.axis == "parameters"]
    for crossover in sizes:
        where = ", beyond the measured sizes" if crossover.beyond else ""
        cheaper, other = ("EK-FAC", "BIF") if crossover.cheaper_above == "ekfac" else ("BIF", "EK-FAC")
        ends = [f"{end:,.0f}" if end else word for end, word in ((crossover.low, "0"), (crossover.high, "no end"))]
        lines.append(
            f"above {crossover.value:,.0f} parameters {cheaper} costs fewer seconds than {other}{where} (95 % of the "
            f"crossings that the rows' intervals allow: {ends[0]} to {ends[1]})"
        )
    if not sizes and min(len(estimator.of(method)) for method in ("bif", "ekfac")) > 1:
        lines.append("in parameters, the seconds of BIF and EK-FAC do not cross")
    for row in estimator.of("bif"):
        if row["model"] not in {other["model"] for other in estimator.of("ekfac")} or configuration_of(row) is None:
            continue
        here = [crossover for crossover in found if crossover.axis == "queries" and crossover.model == row["model"]]
        if here:
            cheaper = "EK-FAC" if here[-1].cheaper_above == "ekfac" else "BIF"
            lines.append(f"{row['model']}: from {here[-1].value:,.0f} queries on {cheaper} is the better buy")
        else:
            partner = next(other for other in estimator.of("ekfac") if other["model"] == row["model"])
            measured = partner.get("score_per_query") not in (None, "")
            only = f"{partner['queries']:.0f} queries, the only number measured"
            where = "any number of queries" if measured else only
            lines.append(f"{row['model']}: {_cheaper(estimator, row)} is the better buy at {where}")
    return "\n".join(lines)


def _cheaper(estimator: Estimator, row: dict[str, Any]) -> str:
    partner = next(other for other in estimator.of("ekfac") if other["model"] == row["model"])
    seconds = [(line.get("fit_seconds") or 0) + line["score_seconds"] for line in (row, partner)]
    return "BIF" if seconds[0] <= seconds[1] else "EK-FAC"


def slopes(estimator: Estimator) -> dict[str, dict[str, float | None]]:
    """Method -> power of the number of parameters that seconds, memory and disk grow with."""
    found: dict[str, dict[str, float | None]] = {}
    for method in estimator.methods():
        rows = estimator.of(method)
        sizes = [row["parameters"] for row in rows]
        curves = {
            "seconds": Curve(sizes, [(row.get("fit_seconds") or 0) + row["score_seconds"] for row in rows]),
            "peak_memory_bytes": Curve(sizes, [row["peak_memory_bytes"] or 0 for row in rows]),
            "disk_bytes": Curve(sizes, [row.get("disk_bytes") or 0 for row in rows]),
        }
        found[method] = {name: curve.slope if len(curve) > 1 else None for name, curve in curves.items()}
    return found
