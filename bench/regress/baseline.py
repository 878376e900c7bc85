"""What the gate compares with: files of a folder, for a task the weights and retrained losses, for a method its scores.

The suite's own baseline is data of this package, so that the gate works wherever the package is installed; recording
(`python -m bench.regress --update`) writes another folder, or this one in a checkout.
"""

import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import metrics
from bench.records import code_commit, code_fingerprint, versions, without_nan
from retrain.errors import UsageError
from retrain.safe_files import read_json, read_safetensors, whole_file, write_safetensors, write_whole
from retrain.store import Store, canonical_json

if TYPE_CHECKING:
    from retrain.task import Task

BASELINE_FORMAT = "tda-bench gate 2"
PACKAGED = Path(__file__).resolve().parent / "baseline"

NUM_SUBSETS, NUM_REPLICATES, ALPHA = 100, 2, 0.1
MAX_QUERIES = 200  # of the task's baseline


@dataclass(frozen=True)
class TaskBaseline:
    """The task's side of a baseline."""

    record: dict[str, Any]
    losses: np.ndarray  # (subsets, queries), averaged over replicates
    masks: np.ndarray  # (subsets, n) bool
    weights: dict[str, np.ndarray]  # the base model's
    queries: np.ndarray  # (queries,) into the task's queries


@dataclass(frozen=True)
class MethodBaseline:
    """The method's side of a baseline."""

    record: dict[str, Any]
    scores: np.ndarray  # (reference queries, reference examples): rows standardised, averaged over seeds
    prediction: np.ndarray  # (subsets, queries) of the seed whose LDS is the median

    @property
    def values(self) -> dict[str, list[Any]]:
        """One value a recorded seed."""
        return self.record["values"]


def baseline_name(task: str, label: str) -> str:
    """The name of a method's files. Signs that tell variants apart stay: ekfac@damping=1e-4 is not 1e4."""
    return f"{task}-" + re.sub(r"[^A-Za-z0-9_.@=,+-]+", "-", label).strip("-")


# ---- files ----


def write_baseline(folder: Path, name: str, record: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """name.safetensors, then name.json, which holds the checksum of the first: readers see a whole pair or none."""
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / f"{name}.safetensors") as file:
        digest = write_safetensors(file, arrays)
    write_whole(
        folder / f"{name}.json",
        json.dumps({"format": BASELINE_FORMAT, "arrays_sha256": digest, **without_nan(record)}, indent=1) + "\n",
    )


def read_baseline(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    record = read_json(folder / f"{name}.json")
    if not isinstance(record, dict) or record.get("format") != BASELINE_FORMAT:
        raise UsageError(
            f'{folder / name}.json is no baseline of this gate; expected "format": "{BASELINE_FORMAT}"; record it '
            "again with --update"
        )
    digest = hashlib.sha256()
    arrays = read_safetensors(folder / f"{name}.safetensors", digest=digest)
    if digest.hexdigest() != record["arrays_sha256"]:
        raise UsageError(
            f"{folder / name}.safetensors does not match the checksum in {name}.json; record it again with --update"
        )
    return record, arrays


# ---- a task's ----


def read_task_baseline(folder: Path, task: "Task") -> TaskBaseline | None:
    from retrain.subsets import masks

    if not (folder / f"{task.name}.json").exists():
        return None
    record, arrays = read_baseline(folder, task.name)
    plan = record["plan"]
    kept = masks(plan["seed"], plan["num_subsets"], plan["alpha"], len(task.train_data))
    weights = {name.removeprefix("weights."): value for name, value in arrays.items() if name.startswith("weights.")}
    return TaskBaseline(record, arrays["losses"], kept, weights, arrays["queries"])


def known_task_baseline(folder: Path, task: "Task") -> TaskBaseline | None:
    """Recorded in the folder, or else in this package: then it is copied, and nothing is retrained."""
    for place in (folder, PACKAGED):
        try:
            found = read_task_baseline(place, task)
        except UsageError:  # of an older gate: recorded again
            continue
        if found is not None and found.record["task"] == json.loads(canonical_json(task.config)):
            if place != folder:
                folder.mkdir(parents=True, exist_ok=True)
                for ending in (".safetensors", ".json"):
                    shutil.copyfile(place / f"{task.name}{ending}", folder / f"{task.name}{ending}")
            return found
    return None


def record_task(folder: Path, task: "Task", store: Store) -> TaskBaseline:
    """Retrains where the store does not have it, and records the result."""
    from bench.ground_truth import base_model, ground_truth
    from bench.scoring import AttributionProblem
    from retrain.units import Plan

    plan = Plan(alpha=ALPHA, alpha_attribution=1.0, seed=1, num_subsets=NUM_SUBSETS, replicates=NUM_REPLICATES)
    found = ground_truth(task, plan, store, "cpu")
    _, entry = base_model(task, plan.seed, store, "cpu")
    question = AttributionProblem(task=task, seed=plan.seed, alpha_attribution=1.0, max_queries=MAX_QUERIES)
    queries = question.query_indices()
    losses = found.losses[:, :, queries]
    record = {
        "task": json.loads(canonical_json(task.config)),
        "plan": {"alpha": ALPHA, "seed": plan.seed, "num_subsets": NUM_SUBSETS, "replicates": NUM_REPLICATES},
        "ceiling": metrics.noise_ceiling(losses).ceiling,
        **made_by(),
    }
    arrays = {"losses": losses.mean(axis=0).astype(np.float32), "queries": queries.astype(np.int64)}
    arrays |= {f"weights.{name}": np.asarray(value) for name, value in entry.arrays.items()}
    write_baseline(folder, task.name, record, arrays)
    return TaskBaseline(record, arrays["losses"], found.masks, dict(entry.arrays), queries)


# ---- a method's ----


def has_method_baseline(folder: Path, task: str, label: str) -> bool:
    return (folder / f"{baseline_name(task, label)}.json").exists()


def read_method_baseline(folder: Path, task: str, label: str) -> MethodBaseline:
    if not has_method_baseline(folder, task, label):
        raise UsageError(
            f"no baseline of {label} on {task} in {folder}; write it with --update, or name one with --against"
        )
    record, arrays = read_baseline(folder, baseline_name(task, label))
    return MethodBaseline(record, arrays["scores"].astype(np.float32), arrays["prediction"])


def made_by() -> dict[str, Any]:
    return {"versions": versions(), "commit": code_commit(), "code": code_fingerprint()}
