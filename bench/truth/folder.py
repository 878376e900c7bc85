"""A ground truth as a folder of two files, without pickle: whoever has one can score methods without retraining.

- `truth.safetensors`: `masks` (num_subsets, num_train) bool, True where the example was *kept*; `losses`
  (num_replicates, num_subsets, num_queries) float32, larger is worse; where only some subsets were retrained on more
  than once, `losses` has the first replicate of all, `further_losses` the other replicates of those that
  `further_subsets` names; and, where known, `train_indices` (num_train,) and `query_indices` (num_queries,) into the
  data set they came from.
- `truth.json`: what it is, where it came from, how values were turned into losses, and the checksum of the arrays.
"""

from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

import bench.metrics as metrics
from bench.ground_truth import GroundTruth
from bench.records import read_pair, write_pair
from bench.schema import TruthRecord
from retrain.errors import UsageError
from retrain.safe_files import read_arrays, read_checked
from retrain.source import code_fingerprint
from retrain.task import Task
from retrain.units import Plan

TRUTH_FORMAT = "tda-bench ground truth 1"
PLAN_NAMES = (
    "alpha", "alpha_attribution", "seed", "scheme", "initialisation", "stream", "replicates", "replicated_subsets",
)  # fmt: skip


class ScoreDtype(Struct):
    names: list[str]
    formats: list[str]
    offsets: list[int]
    itemsize: int


class ScoreFolder(Struct):
    """info.json of a score folder of bergson."""

    num_rows: int
    num_scores: int
    dtype: ScoreDtype
    attribute_tokens: bool = False


# ---- checking ----


def as_masks(values: np.ndarray, where: str) -> np.ndarray:
    """(num_subsets, num_train) bool."""
    if values.ndim != 2 or values.dtype.kind not in "bfiu":
        raise UsageError(
            f"{where} has shape {values.shape} and dtype {values.dtype}; expected (num_subsets, num_train) of 0 and 1"
        )
    if not np.isin(values, (0, 1)).all():
        strange = values[~np.isin(values, (0, 1))].flat[0]
        raise UsageError(f"{where} holds {strange:g}; expected 0 (left out) and 1 (kept) only")
    masks = values.astype(bool)
    if masks.shape[0] < metrics.MINIMUM_SUBSETS:
        raise UsageError(f"{where} has {masks.shape[0]} subsets; at least {metrics.MINIMUM_SUBSETS} are needed")
    kept = masks.sum(axis=1)
    for bad in np.flatnonzero((kept == 0) | (kept == masks.shape[1])):
        raise UsageError(
            f"{where}: subset {bad} keeps {kept[bad]} of {masks.shape[1]} examples; expected some kept, some not"
        )
    return masks


def as_values(values: np.ndarray, where: str, num_subsets: int, num_train: int) -> np.ndarray:
    """(num_replicates, num_subsets, num_queries) float32, finite."""
    if values.ndim == 2:
        values = values[None]
    if values.ndim != 3 or not values.size or values.dtype.kind not in "fiu":
        raise UsageError(
            f"{where} has shape {values.shape} and dtype {values.dtype}; expected (num_subsets, num_queries) or "
            "(num_replicates, num_subsets, num_queries) of numbers, and some"
        )
    if values.shape[1] != num_subsets:
        looks = num_subsets in values.shape or num_train in values.shape
        transposed = "; one of them looks transposed" if looks else ""
        raise UsageError(
            f"{where} has {values.shape[1]} subsets (shape {values.shape}), but the masks have {num_subsets} (shape "
            f"({num_subsets}, {num_train})); rows must be subsets, columns queries or training examples{transposed}"
        )
    if len(bad := np.argwhere(~np.isfinite(values))):
        replicate, subset, query = bad[0]
        raise UsageError(
            f"{where} holds {len(bad)} values that are NaN or infinite, the first at replicate {replicate}, subset "
            f"{subset}, query {query}; expected finite ones: leave that query or that subset out"
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


def of_ours(found: GroundTruth, task: Task, plan: Plan, asked: np.ndarray, **known: Any) -> GroundTruth:
    """A run's ground truth for the queries `asked`, with what holds scores from anywhere against our own runs."""
    record = {
        "source": "tda-bench",
        "task": task.config,
        "protocol": task.protocol,
        **{name: getattr(plan, name) for name in PLAN_NAMES},
        "values": "losses, larger is worse",
        "masks": "kept examples",
        "code": code_fingerprint(),
        "description": task.description,
        **known,
    }
    losses = found.losses[:, :, asked]
    return GroundTruth(found.masks, losses, found.present, found.subsets, record, found.train_indices, asked)


def write_truth(folder: Path, truth: GroundTruth) -> str:
    """The checksum of the arrays. Whatever subset has a second replicate has all of them."""
    losses = truth.losses.astype(np.float32)
    arrays = {"masks": truth.masks, "losses": losses}
    if not truth.present.all():
        further = np.flatnonzero(truth.present[1])
        arrays |= {"losses": losses[:1], "further_losses": losses[1:, further], "further_subsets": further}
    indices = {"train_indices": truth.train_indices, "query_indices": truth.query_indices}
    arrays |= {name: values.astype(np.int64) for name, values in indices.items() if values is not None}
    sizes = dict(zip(("num_replicates", "num_subsets", "num_queries"), losses.shape, strict=True))
    known = {**sizes, "num_train": truth.masks.shape[1], **truth.record}
    return write_pair(folder / "truth", TRUTH_FORMAT, arrays, known)


def read_truth(folder: str | Path) -> GroundTruth:
    """Verified: the checksum, every shape, and that nothing is NaN."""
    path = Path(folder) / "truth.safetensors"
    if not path.with_suffix(".json").exists():
        raise UsageError(f"{folder} has no truth.json; expected a folder made by `tda-bench truth` export or import")
    record, arrays = read_pair(Path(folder) / "truth", TRUTH_FORMAT, TruthRecord)
    if missing := {"masks", "losses"} - set(arrays):
        raise UsageError(f"{path} lacks {', '.join(sorted(missing))}")
    masks = as_masks(arrays["masks"], "masks")
    losses = as_values(arrays["losses"], "losses", *masks.shape)
    present = np.ones(losses.shape[:2], dtype=bool)
    if "present" in arrays:
        raise UsageError(f"{path} has the array present of an earlier release; export it again")
    if "further_losses" in arrays:
        losses, present = _with_further(losses, arrays, path)
    indices = {name: arrays[name] for name in ("train_indices", "query_indices") if name in arrays}
    return GroundTruth(masks, losses, present, np.arange(len(masks)), record, **indices)


def _with_further(losses: np.ndarray, arrays: dict[str, np.ndarray], path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Losses and `present` of all replicates; where a subset has none, 0."""
    further, subsets = arrays["further_losses"], arrays.get("further_subsets", np.array([]))
    num_subsets, num_queries = losses.shape[1:]
    if (
        len(losses) != 1
        or further.shape[1:] != (len(subsets), num_queries)
        or subsets.dtype.kind not in "iu"
        or not set(subsets.tolist()) <= set(range(num_subsets))
        or len(set(subsets.tolist())) != len(subsets)
    ):
        raise UsageError(
            f"{path}: further_losses has shape {further.shape}; expected (num_replicates - 1, {len(subsets)}, "
            f"{num_queries}), and further_subsets to name {len(subsets)} of {num_subsets} subsets"
        )
    whole = np.zeros((1 + len(further), num_subsets, num_queries), dtype=np.float32)
    present = np.zeros(whole.shape[:2], dtype=bool)
    whole[0], present[0] = losses[0], True
    whole[1:, subsets] = as_values(further, "further_losses", len(subsets), 0)
    present[1:, subsets] = True
    return whole, present


def one_array(path: str, wanted: str) -> np.ndarray:
    """The array called `wanted` of a file, or the only one there is; a .pt file and a score folder have one."""
    if Path(path).is_dir():
        return bergson_scores(Path(path))
    if path.endswith(".pt"):
        return torch_array(path)
    arrays = read_arrays(path, follow_links=True)
    if wanted in arrays:
        return arrays[wanted]
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    raise UsageError(f'{path} holds {", ".join(sorted(arrays)) or "nothing"}; expected an array named "{wanted}"')


def torch_array(path: str) -> np.ndarray:
    """What torch.save wrote, where it is one tensor or one numpy array of numbers.

    torch's own restricted unpickler reads it: it calls the functions that build an array, and no other.
    """
    import torch

    rebuild = np.zeros(1).__reduce__()[0]
    kinds = (type(np.dtype(kind)) for kind in ("?", "i1", "u1", "i4", "i8", "f2", "f4", "f8"))
    allowed = [np.ndarray, np.dtype, *kinds]
    named = [(rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    try:
        with torch.serialization.safe_globals([*allowed, *named]):  # type: ignore[list-item]
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged or hostile file makes it stumble over
        reason = "it names code to run" if "Unsupported" in str(error) else type(error).__name__
        raise UsageError(f"{path} was not read ({reason}); expected one tensor or array, saved by torch.save") from None
    array = found.numpy() if isinstance(found, torch.Tensor) and found.layout == torch.strided else found
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "bfiu":
        raise UsageError(f"{path} holds {type(found).__name__}; expected one tensor or array of numbers")
    return array


def bergson_scores(folder: Path) -> np.ndarray:
    """(num_queries, num_train) of a score folder of bergson: info.json, and scores.bin with a row an example."""
    info = read_checked(folder / "info.json", ScoreFolder, follow_links=True)
    if info.get("attribute_tokens"):
        raise UsageError(f"{folder} has scores of tokens; expected one score for each query and training example")
    dtype = info["dtype"]
    names = [f"{kind}_{k}" for k in range(info["num_scores"]) for kind in ("score", "written")]
    if dtype["names"] != names or not set(dtype["formats"][::2]) <= {"float16", "float32", "float64"}:
        raise UsageError(
            f"{folder / 'info.json'} has other fields than score_0, written_0, ...; expected bergson's own"
        )
    try:
        kind = np.dtype(dict(dtype))  # type: ignore[call-overload]
        rows = np.fromfile(folder / "scores.bin", dtype=kind)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{folder / 'scores.bin'} cannot be read ({error})") from None
    if len(rows) != info["num_rows"]:
        raise UsageError(f"{folder / 'scores.bin'} has {len(rows)} rows; expected the {info['num_rows']} of info.json")
    if missing := sum(int((~rows[name]).sum()) for name in names[1::2]):
        raise UsageError(f"{folder} lacks {missing} of {len(rows) * info['num_scores']} scores; let bergson finish")
    return np.stack([rows[name] for name in names[::2]]).astype(np.float32)
