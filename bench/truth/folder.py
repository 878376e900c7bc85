"""A ground truth as a folder of two files, without pickle: whoever has one can score methods without retraining.

- `truth.safetensors`: `masks` (num_subsets, num_train) bool, True where the example was *kept*; `losses`
  (num_replicates, num_subsets, num_queries) float32, larger is worse; where only some subsets were retrained on more
  than once, `losses` has the first replicate of all, `further_losses` the other replicates of those that
  `further_subsets` names; and, where known, `train_indices` (num_train,) and `query_indices` (num_queries,) into the
  data set they came from. (`present` (num_replicates, num_subsets), beside whole `losses`, is read as well.)
- `truth.json`: what it is, where it came from, how values were turned into losses, and the checksum of the arrays.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from bench import metrics
from bench.ground_truth import GroundTruth
from bench.records import write_json
from bench.schema import TruthRecord
from retrain.errors import UsageError
from retrain.safe_files import read_arrays, read_json, read_safetensors, validate, whole_file, write_safetensors
from retrain.source import code_fingerprint
from retrain.task import Task
from retrain.units import Plan

TRUTH_FORMAT = "tda-bench ground truth 1"


# ---- checking ----


def as_masks(values: np.ndarray, where: str) -> np.ndarray:
    """(num_subsets, num_train) bool."""
    if values.ndim != 2:
        raise UsageError(f"{where} has shape {values.shape}; expected (num_subsets, num_train)")
    if values.dtype.kind not in "bfiu":
        raise UsageError(f"{where} has dtype {values.dtype}; expected 0 and 1")
    if values.dtype != bool and not np.isin(values, (0, 1)).all():
        strange = values[~np.isin(values, (0, 1))].flat[0]
        raise UsageError(f"{where} holds {strange:g}; expected 0 (left out) and 1 (kept) only")
    masks = values.astype(bool)
    if masks.shape[0] < metrics.MINIMUM_SUBSETS:
        raise UsageError(f"{where} has {masks.shape[0]} subsets; at least {metrics.MINIMUM_SUBSETS} are needed")
    kept = masks.sum(axis=1)
    if (kept == 0).any() or (kept == masks.shape[1]).any():
        bad = int(np.flatnonzero((kept == 0) | (kept == masks.shape[1]))[0])
        raise UsageError(
            f"{where}: subset {bad} keeps {kept[bad]} of {masks.shape[1]} examples; expected some kept, some not"
        )
    return masks


def as_values(values: np.ndarray, where: str, num_subsets: int, num_train: int) -> np.ndarray:
    """(num_replicates, num_subsets, num_queries) float32, finite."""
    if values.dtype.kind not in "fiu":
        raise UsageError(f"{where} has dtype {values.dtype}; expected numbers")
    if values.ndim == 2:
        values = values[None]
    if values.ndim != 3:
        raise UsageError(
            f"{where} has shape {values.shape}; expected (num_subsets, num_queries) or "
            "(num_replicates, num_subsets, num_queries)"
        )
    if values.shape[1] != num_subsets:
        hint = ""
        if values.shape[2] == num_subsets:
            hint = "; it looks transposed: rows must be subsets and columns queries"
        elif num_train == values.shape[1]:
            hint = "; the masks look transposed: rows must be subsets and columns training examples"
        raise UsageError(
            f"{where} has {values.shape[1]} subsets (shape {values.shape}), but the masks have {num_subsets} "
            f"(shape ({num_subsets}, {num_train})); expected the same number{hint}"
        )
    if not values.size:
        raise UsageError(f"{where} has shape {values.shape}; expected at least one replicate, one subset and one query")
    if bad := int((~np.isfinite(values)).sum()):
        first = np.argwhere(~np.isfinite(values))[0]
        raise UsageError(
            f"{where} holds {bad} values that are NaN or infinite, the first at replicate {first[0]}, subset "
            f"{first[1]}, query {first[2]}; expected finite ones: leave that query or that subset out"
        )
    return values.astype(np.float32)


def check_orientation(masks: np.ndarray, where: str) -> None:
    """Square masks hide a transposition; subsets of one size show it."""
    rows, columns = masks.sum(axis=1), masks.sum(axis=0)
    if len(set(columns.tolist())) == 1 and len(set(rows.tolist())) > 1:
        raise UsageError(
            f"{where} (shape {masks.shape}) has equal numbers of ones in columns but not in rows; it looks transposed: "
            "expected rows to be subsets and columns training examples"
        )


# ---- the folder ----


def write_truth(folder: Path, truth: GroundTruth) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {"masks": truth.masks, "losses": truth.losses.astype(np.float32)}
    if not truth.present.all():
        further = np.flatnonzero(truth.present[1])
        if (truth.present[1:] == truth.present[1]).all():  # the same subsets every time, and no room for the others
            arrays |= {"losses": arrays["losses"][:1], "further_losses": arrays["losses"][1:, further]}
            arrays["further_subsets"] = further.astype(np.int64)
        else:
            arrays["present"] = truth.present
    if truth.train_indices is not None:
        arrays["train_indices"] = truth.train_indices.astype(np.int64)
    if truth.query_indices is not None:
        arrays["query_indices"] = truth.query_indices.astype(np.int64)
    with whole_file(folder / "truth.safetensors") as file:
        digest = write_safetensors(file, arrays)
    num_replicates, num_subsets, num_queries = truth.losses.shape
    sizes = {
        "num_subsets": num_subsets, "num_train": truth.masks.shape[1], "num_queries": num_queries,
        "num_replicates": num_replicates,
    }  # fmt: skip
    content = {"format": TRUTH_FORMAT, **sizes, **truth.record, "arrays_sha256": digest}
    write_json(folder / "truth.json", content)


def truth_record(task: Task, plan: Plan) -> dict[str, Any]:
    """What is known of a ground truth of ours: with it, scores from anywhere are held against our own runs."""
    names = (
        "alpha", "alpha_attribution", "seed", "scheme", "initialisation", "stream", "replicates", "replicated_subsets",
    )  # fmt: skip
    return {
        "source": "tda-bench",
        "task": task.config,
        "protocol": task.protocol,
        **{name: getattr(plan, name) for name in names},
        "values": "losses, larger is worse",
        "masks": "kept examples",
        "code": code_fingerprint(),
    }


def read_truth(folder: str | Path) -> GroundTruth:
    """Verified: the checksum, every shape, and that nothing is NaN."""
    folder = Path(folder)
    if not (folder / "truth.json").exists():
        raise UsageError(
            f"{folder} has no truth.json; expected a folder made by `python -m bench.truth export` or `... import`"
        )
    record = read_json(folder / "truth.json")
    if not isinstance(record, dict) or record.get("format") != TRUTH_FORMAT:
        raise UsageError(
            f'{folder / "truth.json"} is no ground truth of this suite; expected "format": "{TRUTH_FORMAT}"'
        )
    validate(record, TruthRecord, folder / "truth.json")
    digest = hashlib.sha256()
    arrays = read_safetensors(folder / "truth.safetensors", digest=digest)
    if digest.hexdigest() != record.get("arrays_sha256"):
        raise UsageError(
            f"{folder / 'truth.safetensors'} does not match its checksum in truth.json (edited or damaged)"
        )
    if missing := {"masks", "losses"} - set(arrays):
        raise UsageError(f"{folder / 'truth.safetensors'} lacks {', '.join(sorted(missing))}")
    masks = as_masks(arrays["masks"], "masks")
    losses = as_values(arrays["losses"], "losses", *masks.shape)
    present = arrays.get("present", np.ones(losses.shape[:2], dtype=bool))
    if "further_losses" in arrays:
        losses, present = _with_further(losses, arrays, folder)
    if present.dtype != bool or present.shape != losses.shape[:2] or not present[0].all():
        raise UsageError(
            f"{folder / 'truth.safetensors'}: present must say for every replicate and subset whether it is"
        )
    indices = {name: arrays[name] for name in ("train_indices", "query_indices") if name in arrays}
    return GroundTruth(masks, losses, present, np.arange(len(masks)), record, **indices)


def _with_further(losses: np.ndarray, arrays: dict[str, np.ndarray], folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Losses and `present` of all replicates; where a subset has none, 0."""
    further, subsets = arrays["further_losses"], arrays.get("further_subsets", np.array([]))
    num_subsets, num_queries = losses.shape[1:]
    if (
        len(losses) != 1
        or further.shape[1:] != (len(subsets), num_queries)
        or subsets.dtype.kind not in "iu"
        or len(set(subsets.tolist())) != len(subsets)
        or (len(subsets) and not 0 <= subsets.min() <= subsets.max() < num_subsets)
    ):
        raise UsageError(
            f"{folder / 'truth.safetensors'}: further_losses has shape {further.shape}; expected (num_replicates - 1, "
            f"{len(subsets)}, {num_queries}), and further_subsets to name {len(subsets)} of {num_subsets} subsets"
        )
    whole = np.zeros((1 + len(further), num_subsets, num_queries), dtype=np.float32)
    present = np.zeros(whole.shape[:2], dtype=bool)
    whole[0], present[0] = losses[0], True
    whole[1:, subsets] = as_values(further, "further_losses", len(subsets), 0)
    present[1:, subsets] = True
    return whole, present


def one_array(path: str, wanted: str) -> np.ndarray:
    """The array of a .npy, .npz or .safetensors file: the one called `wanted`, or the only one there is."""
    arrays = read_arrays(path, follow_links=True)
    if wanted in arrays:
        return arrays[wanted]
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    raise UsageError(f'{path} holds {", ".join(sorted(arrays)) or "nothing"}; expected an array named "{wanted}"')
