"""One scaling table from several sweeps of one machine, made again from the points they stored: nothing is measured.

    python -m bench.scaling --merge runs/a/scaling.json runs/b/scaling.json --out results/scaling

For a sweep that was cut off and finished by another, and for rows by today's arithmetic from yesterday's measurements.
The records must agree in setting, options, versions, device and cost-relevant code, so that their points could have
come from one sweep; where a point is in several, the first that worked counts.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.scaling_rows import make_row
from retrain.errors import UsageError
from retrain.models.pythia_suite import suite_configuration

# A budget or a text's folder may differ between sweeps of one campaign; these may not.
SAME = ("options", "versions", "cost_code")
SETTING_MAY_DIFFER = ("text", "tokenizer", "query_file")


def read_records(paths: Sequence[str]) -> list[dict[str, Any]]:
    records = []
    for path in paths:
        try:
            records.append(json.loads(Path(path).read_text()))
            records[-1]["points"], records[-1]["setting"]
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(f"{path} is no scaling.json of python -m bench.scaling: {error!r}") from None
    for path, record in zip(paths[1:], records[1:], strict=True):
        for name in SAME:
            ours, theirs = records[0][name], record[name]
            if name == "options":  # one sweep may have run fewer methods
                common = ours.keys() & theirs.keys()
                ours, theirs = ({key: options[key] for key in common} for options in (ours, theirs))
            if ours != theirs:
                raise UsageError(f"{path} differs from {paths[0]} in {name}: {theirs} against {ours}; merge neither")
        for name, value in records[0]["setting"].items():
            if name not in SETTING_MAY_DIFFER and record["setting"][name] != value:
                raise UsageError(
                    f"{path} was measured with {name} {record['setting'][name]}, {paths[0]} with {value}; "
                    "merge sweeps of one setting"
                )
    return records


def merged_rows(records: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and their points, smallest model first, each with the id of the sweep that measured it."""
    best: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {}
    for record in records:
        weights = {(row["model"], row["method"]): row["weights"] for row in record["rows"]}
        for point in record["points"]:
            name = (point["model"], point["method"])
            spec = {
                **record["setting"],
                "configuration": asdict(suite_configuration(point["model"])),
                "method": point["method"],
                "options": record["options"][point["method"]],
                "weights_name": weights[name],
            }
            row = make_row(spec, point, point.get("peak_flops")) | {"run_id": record["run_id"]}
            if name not in best or (best[name][0]["error"] and not row["error"]):
                best[name] = (row, point)
    order = {"bif": 0, "ekfac": 1}
    found = sorted(best.values(), key=lambda pair: (pair[0]["parameters"], order.get(pair[0]["method"], 2)))
    return [row for row, _ in found], [point for _, point in found]
