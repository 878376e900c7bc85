"""What recorded methods predict for a ground truth, small enough to commit: whoever has scores is held against them.

Beside the two files of a ground truth (`bench/truth_folder.py`), a bank has

- `recorded.safetensors`: `<label>/raw` and `<label>/normalised`, each (num_subsets, num_queries): the rank across
  subsets of what the method predicted for each query, doubled, so that ties are whole numbers. LDS and its paired
  differences are functions of these ranks: nothing is lost, at a fifth of the bytes.
- `recorded.json`: the methods' settings, the rows of the run they are from, and the checksum.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import schemas
from bench.metrics import average_ranks
from bench.record import write_json
from retrain.errors import UsageError
from retrain.safe_files import read_json, read_safetensors, whole_file, write_safetensors
from retrain.schema import ListOf, Text, check

RECORDED_FORMAT = "tda-bench recorded predictions 1"
RECORDED = {
    "format": schemas.NAME,
    "arrays_sha256": Text("[0-9a-f]{64}"),
    "truth_sha256": Text("[0-9a-f]{64}"),
    "methods": ListOf({"name": schemas.NAME, "label": schemas.NAME, "rows": schemas.NAME, **schemas.REST}, 0, 1000),
    "rows": ListOf({"label": schemas.NAME, "method": schemas.NAME, **schemas.REST}, 0, 1000),
    **schemas.REST,
}


@dataclass(frozen=True)
class Recorded:
    """Predictions by (label, normalised), their methods' descriptions and the rows that they had."""

    ranks: Mapping[tuple[str, bool], np.ndarray]  # (subsets, queries)
    methods: list[dict[str, Any]]
    rows: list[dict[str, Any]]

    def row(self, label: str, normalised: bool) -> dict[str, Any] | None:
        return next((r for r in self.rows if (r["label"], r["normalised"]) == (label, normalised)), None)


def doubled_ranks(prediction: np.ndarray) -> np.ndarray:
    """(subsets, queries) unsigned; all 0, and so undefined, for a query with a prediction that is not finite."""
    finite = np.isfinite(prediction).all(axis=0)
    ranks = np.zeros(prediction.shape)
    if finite.any():
        ranks[:, finite] = 2 * average_ranks(prediction[:, finite].astype(np.float64))
    return ranks.astype(np.uint8 if 2 * len(prediction) < 2**8 else np.uint16)


def write_recorded(
    folder: Path, predictions: Mapping[tuple[str, bool], np.ndarray], told: Mapping[str, Any], truth_sha256: str
) -> None:
    arrays = {
        f"{label}/{'normalised' if normalised else 'raw'}": doubled_ranks(values)
        for (label, normalised), values in predictions.items()
    }
    with whole_file(folder / "recorded.safetensors") as file:
        digest = write_safetensors(file, arrays)
    content = {"format": RECORDED_FORMAT, "arrays_sha256": digest, "truth_sha256": truth_sha256, **told}
    write_json(folder / "recorded.json", content)


def read_recorded(folder: str | Path, truth_sha256: str) -> Recorded | None:
    """None where the ground truth comes without; refused where it belongs to another one."""
    folder = Path(folder)
    if not (folder / "recorded.json").exists():
        return None
    record = read_json(folder / "recorded.json")
    if not isinstance(record, dict) or record.get("format") != RECORDED_FORMAT:
        raise UsageError(f'{folder / "recorded.json"} has another format; expected "{RECORDED_FORMAT}"')
    check(record, RECORDED, folder / "recorded.json")
    if record["truth_sha256"] != truth_sha256:
        raise UsageError(f"{folder / 'recorded.json'} belongs to another ground truth than the one beside it")
    digest = hashlib.sha256()
    arrays = read_safetensors(folder / "recorded.safetensors", digest=digest)
    if digest.hexdigest() != record["arrays_sha256"]:
        raise UsageError(f"{folder / 'recorded.safetensors'} does not match its checksum in recorded.json")
    ranks = {}
    for name, values in arrays.items():
        label, _, kind = name.rpartition("/")
        ranks[label, kind == "normalised"] = values.astype(np.float64)
    return Recorded(ranks, list(record["methods"]), list(record["rows"]))
