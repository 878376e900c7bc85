"""What really happens: the losses of models retrained on subsets, from the store or by retraining.

`obtain` is the way to entries that must be there; `ground_truth` assembles a plan's retrains into arrays, and
`base_model` loads the checkpoint that methods look at.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from retrain.jobs import Unit, run_units
from retrain.outputs import LOSS, output_of
from retrain.store import ENTRY_FILE, Entry, Store
from retrain.task import Task
from retrain.units import Plan, checkpoint_of, checkpoint_unit, choose_device, retrain_units

MAX_ROUNDS = 3  # how often damaged entries are made again before giving up


class UnitsFailedError(RuntimeError):
    """Work that was asked for could not be done; the message is the first failure's, in one line."""


@dataclass(frozen=True)
class GroundTruth:
    """Checked arrays: whose they are, ours or another's, no longer matters."""

    masks: np.ndarray  # (subsets, n) bool: which training examples were kept
    losses: np.ndarray  # (replicates, subsets, queries) float32, or another output; zeros where not `present`
    present: np.ndarray  # (replicates, subsets) bool: which retrains there are
    subsets: np.ndarray  # which of the plan's subsets these are; all of them unless --collect found some missing
    record: dict[str, Any] = field(default_factory=dict)  # where it came from
    train_indices: np.ndarray | None = None  # (n,) into the data set, where known
    query_indices: np.ndarray | None = None  # (queries,)

    @classmethod
    def of_arrays(cls, masks: np.ndarray, losses: np.ndarray, **known: Any) -> "GroundTruth":
        """Of complete ones."""
        present = np.ones(losses.shape[:2], dtype=bool)
        return cls(masks, losses, present, np.arange(len(masks)), **known)

    def of_output(self, output: str) -> "GroundTruth":
        """The same retrains, measured by another output of the queries."""
        if output == LOSS:
            return self
        measured = output_of(torch.from_numpy(self.losses), output).numpy() * self.present[:, :, None]
        return replace(self, losses=measured)

    def mean(self) -> np.ndarray:
        """(subsets, queries): averaged over replicates."""
        return self.losses.sum(axis=0) / self.present.sum(axis=0)[:, None]


def make_units(units: Sequence[Unit], store: Store, *, force: bool = False, **job_options: Any) -> None:
    """Does what is missing, and raises the first failure. Nothing is read: thousands of losses may be there."""
    by_key = {unit.key: unit for unit in units}
    if force:
        for key, unit in by_key.items():
            store.remove_key(unit.kind, key)
    report = run_units(list(by_key.values()), store, **job_options)
    if report.failed:
        key, reason = next(iter(report.failed.items()))
        many = f"{len(report.failed)} of {len(by_key)} units failed; the first: " if len(by_key) > 1 else ""
        message = many + "; ".join(map(str.strip, reason.splitlines()))
        raise UnitsFailedError(message) from report.traceback_of(key)


class RecentlyRead:
    """Entries as they were read and verified, for as long as their files stay as they are; the last GiB of them.

    Whoever asks gets the same arrays, which nobody can write to.
    """

    def __init__(self, most_bytes: int = 2**30):
        self.most_bytes, self.num_bytes = most_bytes, 0
        self._found: OrderedDict[Path, tuple[tuple[int, int], Entry]] = OrderedDict()

    def read(self, store: Store, unit: Unit) -> Entry | None:
        place = store.place(unit.kind, unit.key)
        stamp = stamp_of(place / ENTRY_FILE)
        if stamp is not None and place in self._found and self._found[place][0] == stamp:
            self._found.move_to_end(place)
            return self._found[place][1]
        self._forget(place)
        entry = store.read(unit.kind, unit.config)
        if entry is not None and stamp is not None:
            for array in entry.arrays.values():
                array.setflags(write=False)
            self._found[place] = (stamp, entry)
            self.num_bytes += _array_bytes(entry)
            while self.num_bytes > self.most_bytes:
                self._forget(next(iter(self._found)))
        return entry

    def _forget(self, place: Path) -> None:
        if place in self._found:
            self.num_bytes -= _array_bytes(self._found.pop(place)[1])


def stamp_of(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _array_bytes(entry: Entry) -> int:
    return sum(array.nbytes for array in entry.arrays.values())


def obtain(
    units: Sequence[Unit],
    store: Store,
    *,
    force: bool = False,
    recent: RecentlyRead | None = None,
    **job_options: Any,
) -> dict[str, Entry]:
    """Every unit's verified entry by key, computing what is missing or damaged. Missing ones are left out (collect)."""
    recent = RecentlyRead(0) if recent is None else recent
    by_key = {unit.key: unit for unit in units}
    entries: dict[str, Entry] = {}
    for turn in range(MAX_ROUNDS):
        missing = [unit for key, unit in by_key.items() if key not in entries]
        if not missing:
            break
        make_units(missing, store, force=force and turn == 0, **job_options)
        # Reading verifies; what is damaged is quarantined, comes back as None and goes into the next round.
        for key, unit in by_key.items():
            if key not in entries and (entry := recent.read(store, unit)) is not None:
                entries[key] = entry
        if job_options.get("collect"):
            break
    return entries


def ground_truth(task: Task, plan: Plan, store: Store, device: str, *, force: bool = False, **jobs: Any) -> GroundTruth:
    units = retrain_units(task, plan, device)
    name = jobs.pop("name", f"{task.name} retrains, alpha {plan.alpha:g}, seed {plan.seed}")
    entries = obtain(units, store, force=force, name=name, progress=jobs.pop("progress", True), **jobs)
    return assemble(task, plan, list(entries.values()))


def assemble(task: Task, plan: Plan, entries: Sequence[Entry]) -> GroundTruth:
    """A plan's retrains as arrays, each at the place of its number; subsets that lack one are left out."""
    found = {(entry.config["replicate"], entry.config["subset"]): entry.arrays["losses"] for entry in entries}
    complete = [
        subset
        for subset in range(plan.num_subsets)
        if all((replicate, subset) in found for replicate in range(plan.replicates_of(subset)))
    ]
    num_queries = len(next(iter(found.values()))) if complete else 0
    losses = np.zeros((plan.replicates, len(complete), num_queries), dtype=np.float32)
    present = np.zeros(losses.shape[:2], dtype=bool)
    for position, subset in enumerate(complete):
        for replicate in range(plan.replicates_of(subset)):
            losses[replicate, position] = found[replicate, subset]
            present[replicate, position] = True
    attributed = plan.attributed(task)
    return GroundTruth(plan.masks(task)[complete], losses, present, np.array(complete, dtype=int), {}, attributed)


def base_model(
    task: Task, seed: int, store: Store, device: str, number: int = 0, force: bool = False
) -> tuple[nn.Module, Entry]:
    unit = checkpoint_unit(task, seed, number, device)
    (entry,) = obtain([unit], store, force=force).values()
    return checkpoint_of(task, entry, choose_device(device)), entry
