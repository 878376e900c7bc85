"""Predictions held against what they did not see: every model from the others' rows, and rows of another sweep.

python -m bench.scaling --check                       # the rates that ship with the package
python -m bench.scaling --check --from FILE.csv
python -m bench.scaling --estimate --against FILE.csv
"""

from collections.abc import Sequence
from typing import Any

from bench.scaling.ekfac_rows import scores_were_measured
from bench.scaling.fits import Estimator
from bench.scaling.row_values import configuration_of, has_peak, number_of, setting_of, total_of
from bench.tables import duration, table

LEAST_MODELS = 3  # so many must be left to predict one from


def against(estimators: dict[str, Estimator], fresh: dict[str, Estimator]) -> list[dict[str, Any]]:
    """What was predicted beside what came out, for every row of a sweep that the estimates do not know."""
    found = []
    for device, measured in fresh.items():
        known = estimators.get(device)
        for row in measured.rows if known else []:
            if known is not None and row["method"] in known.methods() and configuration_of(row) is not None:
                same = any(_same_run(row, other) for other in known.rows)
                found.append({"device": device, **_held(known, row), "known": same})
    return found


def _same_run(row: dict[str, Any], other: dict[str, Any]) -> bool:
    names = ("run_id", "model", "method", "fit_examples", "queries", "fit_seconds", "score_seconds")
    return all(row.get(name) == other.get(name) for name in names)


def each_from_the_others(estimator: Estimator) -> list[dict[str, Any]]:
    """Every row of a suite's model predicted from the rows of the other models, if it says what scores take."""
    found = []
    for row in filter(scores_were_measured, estimator.rows):
        others = estimator.without(row["model"])
        models = {other["model"] for other in others.of(row["method"])}
        if len(models) >= LEAST_MODELS and configuration_of(row) is not None:
            found.append(_held(others, row))
    return found


def _held(estimator: Estimator, row: dict[str, Any]) -> dict[str, Any]:
    configuration = configuration_of(row)
    assert configuration is not None
    estimate = estimator.estimate(row["method"], configuration, setting_of(row))
    seconds = total_of(row)
    return {
        "model": row["model"],
        "method": row["method"],
        "fit_examples": number_of(row.get("fit_examples")),
        "queries": int(row["queries"]),
        "predicted_seconds": estimate.seconds,
        "seconds_low": estimate.seconds_low,
        "seconds_high": estimate.seconds_high,
        "measured_seconds": seconds,
        "seconds_off": estimate.seconds / seconds - 1,
        "inside": estimate.seconds_low <= seconds <= estimate.seconds_high,
        "beyond": estimate.beyond,
        "memory_off": estimate.peak_memory_bytes / row["peak_memory_bytes"] - 1 if has_peak(row) else None,
        "projected": str(row.get("projected")) == "True",
    }


def show_held_out(found: Sequence[dict[str, Any]], wide: bool = False) -> str:
    """At most 100 columns; with `wide`, also the memory's miss."""
    header = ["model", "method", "fitted on", "queries", "predicted", "95 % interval", "came out", "off"]
    rows = [
        [
            row["model"] + (" +" if row["beyond"] else ""),
            row["method"].rpartition(":")[2],
            f"{row['fit_examples']:,.0f}" if row["fit_examples"] else "-",
            f"{row['queries']:,}",
            duration(row["predicted_seconds"]),
            f"[{duration(row['seconds_low'])}, {duration(row['seconds_high'])}]",
            duration(row["measured_seconds"]) + (" *" if row["projected"] else "  "),
            f"{100 * row['seconds_off']:+.0f} %" + ("  " if row["inside"] else " !"),
            *(["-" if row["memory_off"] is None else f"{100 * row['memory_off']:+.0f} %"] if wide else []),
        ]
        for row in found
    ]
    lines = [table([*header, *(["memory off"] if wide else [])], rows, left=2)]
    if any(row["projected"] for row in found):
        lines.append("* projected from smaller sizes")
    if any(row["beyond"] for row in found):
        lines.append("+ smaller or larger than every model it is predicted from")
    outside = sum(not row["inside"] for row in found)
    lines.append(f"{len(found) - outside} of {len(found)} inside their interval" + (" (!: outside)" if outside else ""))
    return "\n".join(lines)


def show_own_checks(rows: Sequence[dict[str, Any]]) -> str:
    """What the points say of themselves: the largest measured size from the smaller ones, and the same run again."""
    lines = [
        [row["model"], row["method"], str(row["held_out"]), f"{100 * row['held_out_error']:+.1f} %"]
        for row in rows
        if row.get("held_out") and number_of(row.get("held_out_error")) is not None
    ]
    again = [
        [row["model"], row["method"], f"the same run again, {_asked(row)}", f"{100 * off:+.1f} %"]
        for row, off in repeats(rows)
    ]
    return table(["model", "method", "within its point", "off"], lines + again, left=3) if lines + again else ""


def repeats(rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    """Rows that were measured whole twice, and how much longer the other run took, relative."""
    made = [(row, number_of(row.get("again_seconds"))) for row in rows]
    return [(row, seconds / total_of(row) - 1) for row, seconds in made if seconds]


def _asked(row: dict[str, Any]) -> str:
    fitted = number_of(row.get("fit_examples"))
    return f"fitted on {fitted:.0f}" if fitted else f"{int(row['queries'])} queries"
