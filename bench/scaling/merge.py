"""One scaling table from several sweeps of one machine, made again from the points they stored: nothing is measured.

    python -m bench.scaling --merge runs/a/scaling.json runs/b/scaling.json --out results/scaling

For a campaign in parts, a sweep that was cut off and finished by another, and rows by today's arithmetic from
yesterday's measurements. The records must agree in versions, and the points of a method in its options and its cost-
relevant code, so that they could have come from one sweep. Where a row is in several, a measured one counts before a
projected one, the faster before the slower, and any before one without numbers; a whole run keeps how far fewer
blocks were off, and what the same run took another time. With --methods, only their points: where one method of a
sweep was measured again with newer code, the rest of it is still good.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.scaling.ekfac_rows import fit_sizes_of
from bench.scaling.methods import FORMER_AXES, PRIVATE_FIELDS
from bench.scaling.row_values import named_configuration, total_of
from bench.scaling.rows import make_rows
from retrain.errors import UsageError
from retrain.safe_files import SafeFileError, read_json

SAME_FIELDS = ("train", "tokens", "chains", "device_name", "dtype", "text_digest", "query_digest")
WHOLE_PEAKS = 3  # before this version a point of EK-FAC took its peaks at the end of a part, not during it
DEVICE_PEAKS = ("peak_memory_bytes", "peak_reserved_bytes")
ROW_KEY = ("model", "method", "device", "train", "queries", "tokens", "draws", "fit_examples")


def read_records(
    paths: Sequence[str], fit_sets: Sequence[int] = (), methods: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The sweeps' records, each point with its specification; `fit_sets` are rows that are asked of EK-FAC besides,
    `methods` the only ones whose points are taken."""
    records = []
    for path in paths:
        try:
            record = read_json(path, follow_links=True)
            points = [point for point in record["points"] if not methods or point["method"] in methods]
            record["points"] = [_with_specification(record, point, fit_sets) for point in points]
            record["versions"]
        except (SafeFileError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is no scaling.json of python -m bench.scaling: {_what(error)}") from None
        if not points:
            raise UsageError(f"{path} has no point" + (f" of {', '.join(methods)}" if methods else ""))
        records.append(record)
    found = {point["method"] for record in records for point in record["points"]}
    if missing := [method for method in methods if method not in found]:
        raise UsageError(f"--methods {' '.join(missing)}: no point of it; there are {', '.join(sorted(found))}")
    _check(paths, records)
    return records


def _what(error: Exception) -> str:
    """A missing field by its name; of anything else what it says."""
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _with_specification(record: dict[str, Any], point: dict[str, Any], fit_sets: Sequence[int]) -> dict[str, Any]:
    """A record of before points had their own has one setting for all of them, and one fingerprint of the code."""
    spec = point.get("spec")
    rows = {(row["model"], row["method"]): row for row in record["rows"]}
    own = rows.get((point["model"], point["method"]), {})
    if spec is None:
        method = point["method"]
        spec = {
            **{name: value for name, value in record["setting"].items() if name not in PRIVATE_FIELDS},
            "configuration": asdict(named_configuration(point["model"])),
            "model": point["model"],
            "method": method,
            "axis": FORMER_AXES.get(method, "train"),
            "options": record["options"][method],
            "weights_name": own["weights"],
        }
        spec |= {"fit_sets": [spec["fit_examples"]], "query_counts": [spec["queries"]]}
    if spec["axis"] == "layers" and fit_sets:
        spec = {**spec, "fit_sets": sorted({*spec["fit_sets"], *fit_sets})}
    if spec["axis"] == "layers" and point.get("version", 2) < WHOLE_PEAKS:
        point = {**point, "rungs": [{**rung, **dict.fromkeys(DEVICE_PEAKS)} for rung in point.get("rungs", [])]}
    code = point.get("cost_code") or record.get("cost_code")
    run_id = point.get("run_id") or own.get("run_id") or record["run_id"]  # a merged record has several
    return {**point, "spec": spec, "cost_code": code, "run_id": run_id}


def _check(paths: Sequence[str], records: Sequence[dict[str, Any]]) -> None:
    first_of: dict[str, tuple[str, dict[str, Any]]] = {}
    for path, record in zip(paths, records, strict=True):
        if record["versions"] != records[0]["versions"]:
            raise UsageError(
                f"{path} differs from {paths[0]} in versions: {record['versions']} against {records[0]['versions']}; "
                "merge neither"
            )
        for point in record["points"]:
            where, other = first_of.setdefault(point["method"], (path, point))
            pairs = [("cost_code", point["cost_code"], other["cost_code"])]
            pairs.append(("options", _options(point["spec"]), _options(other["spec"])))
            pairs += [(name, point["spec"].get(name), other["spec"].get(name)) for name in SAME_FIELDS]
            for name, ours, theirs in pairs:
                if ours != theirs:
                    raise UsageError(
                        f"{path} differs from {where} in {point['method']}'s {name}: {ours} against {theirs}; merge "
                        "sweeps of one setting and one version of the code"
                    )


def _options(spec: dict[str, Any]) -> dict[str, Any]:
    """Without batch sizes, which depend on the model."""
    return {name: value for name, value in spec["options"].items() if not name.endswith("batch_size")}


def merged_rows(records: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows, smallest model first, each with the id of the sweep that measured it; and the points."""
    made: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        for point in record["points"]:
            try:
                rows = make_rows(point["spec"], point, point.get("peak_flops"))
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
                name = f"{point['model']} {point['method']}"
                raise UsageError(f"the point {name} is damaged: {type(error).__name__}, {_what(error)}") from None
            for row in rows:
                row["run_id"] = point["run_id"]
                made.setdefault(tuple(row[name] for name in ROW_KEY), []).append(row)
    order = {"bif": 0, "ekfac": 1}
    best = sorted(
        map(_best_of, made.values()),
        key=lambda row: (
            row["parameters"], order.get(row["method"], 2), row["method"], row["queries"], row["fit_examples"] or 0,
        ),
    )  # fmt: skip
    return best, [point for record in records for point in record["points"]]


def _best_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row that counts, whatever order the sweeps are given in, with what the others say of it."""
    kept, *others = sorted(rows, key=lambda row: (_rank(row), row["run_id"]))
    return kept | _held_out([kept, *others]) | _made_again(kept, others)


def _held_out(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The worst check of any run of a row: one that another run replaces still says how far a projection may be off."""
    checks = [{name: row[name] for name in ("held_out", "held_out_error")} for row in rows if row["held_out"]]
    checks += [found for whole in rows for part in rows if (found := _held_out_depth(whole, part))]
    return max(checks, key=lambda check: abs(check["held_out_error"]), default={})


def _held_out_depth(whole: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """A whole run as fewer blocks of the same model would have projected it, where both were run as they stand."""
    depths = [one["depth"] or 0 for one in (whole, part)]
    if whole["error"] or whole["projected"] or not _was_run(part) or not depths[0] > depths[1] > 0:
        return {}
    seconds = [total_of(one) for one in (whole, part)]
    origin = str(part["projected_from"]).partition(" of ")[0]
    names = {"covariance": "covariance_seconds", "eigen": "eigen_seconds", "lambda": "lambda_seconds",
             "scores": "score_seconds"}  # fmt: skip
    parts = ", ".join(f"{words} {100 * (part[name] / whole[name] - 1):+.0f} %" for words, name in names.items())
    text = f"{depths[0]} layers from {origin} ({parts})"
    return {"held_out": text, "held_out_error": seconds[1] / seconds[0] - 1}


def _made_again(kept: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of another run that went equally deep and had this very fitting set: of several, the one that differs
    most. A point that two sweeps took from one cache has the same seconds and is no second run."""
    if not _was_run(kept):
        return {"again_seconds": None}
    own = total_of(kept)
    again = [total_of(row) for row in others if row["depth"] == kept["depth"] and _was_run(row)]
    differ = [seconds for seconds in again if seconds != own]
    return {"again_seconds": max(differ, key=lambda seconds: abs(math.log(seconds / own)), default=None)}


def _was_run(row: dict[str, Any]) -> bool:
    """Whether this very setting was run, if only in fewer blocks, rather than reached by a line through others."""
    origin = str(row["projected_from"])
    in_fewer_blocks = origin.partition(";")[0].endswith(" layers") and not ("fitting" in origin or "queries" in origin)
    return not row["error"] and (not row["projected"] or in_fewer_blocks)


def _rank(row: dict[str, Any]) -> tuple[float, ...]:
    """Smaller is better: with numbers, measured, deeper, from more draws; of whole runs the faster, as what disturbs a
    run only adds to it; of projections the one from larger fitting sets and more of them."""
    sizes = fit_sizes_of(row)
    first = (bool(row["error"]), bool(row["projected"]), -(row["depth"] or 0), -(row["timed_draws"] or 0))
    whole = not row["error"] and not row["projected"]
    return *first, total_of(row) if whole else 0.0, -max(sizes, default=0), -len(sizes)
