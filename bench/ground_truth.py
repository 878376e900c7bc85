"""What is asked of methods, and what really happens: the losses of models retrained on subsets.

An `AttributionProblem` is all that scores depend on beside the method; of one that retrains by itself it also says on
which further subsets. `obtain` is the way to entries that must be there; `ground_truth` assembles a plan's retrains
into arrays, and `base_model` loads the checkpoint that methods look at.
"""

import statistics
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from baselines.method import Bill, Method, Retrained, Size
from retrain.examples import Examples
from retrain.jobs import Unit, run_units
from retrain.outputs import LOSS, output_of
from retrain.reference import FULL, Reference
from retrain.store import ENTRY_FILE, Entry, Store
from retrain.subsets import attributed_indices
from retrain.task import Split, Task
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
    units: Sequence[Unit], store: Store, *, force: bool = False, recent: RecentlyRead | None = None, **job_options: Any
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
    replicates = {subset: range(plan.replicates_of(subset)) for subset in range(plan.num_subsets)}
    complete = [subset for subset, those in replicates.items() if all((one, subset) in found for one in those)]
    num_queries = len(next(iter(found.values()))) if complete else 0
    losses = np.zeros((plan.replicates, len(complete), num_queries), dtype=np.float32)
    present = np.zeros(losses.shape[:2], dtype=bool)
    for position, subset in enumerate(complete):
        for replicate in replicates[subset]:
            losses[replicate, position] = found[replicate, subset]
            present[replicate, position] = True
    attributed = plan.attributed(task)
    return GroundTruth(plan.masks(task)[complete], losses, present, np.array(complete, dtype=int), {}, attributed)


def base_model(task: Task, seed: int, store: Store, device: str, number: int = 0) -> tuple[nn.Module, Entry]:
    (entry,) = obtain([checkpoint_unit(task, seed, number, device)], store).values()
    return checkpoint_of(task, entry, choose_device(device)), entry


# ---- what methods are asked ----

EXTRA_RETRAINS = RecentlyRead()  # the methods of a run learn from the same retrains


@dataclass(frozen=True, kw_only=True)
class AttributionProblem:
    """Everything a method's scores depend on beside the method: what is attributed to what."""

    task: Task
    seed: int
    alpha_attribution: float
    split: Split = "report"
    max_queries: int | tuple[int, ...] | None = None  # the first so many of the split, or these of the task's queries
    of_train: bool = False  # the attributed examples take the queries' place
    checkpoint: int = 0  # which base model is looked at: 0, or a further one trained like it
    extra_retrain_plan: Plan | None = None  # the further subsets that a method asks for which retrains by itself
    output: str = LOSS  # of the queries: retrain/outputs.py
    reference: Reference | None = None  # the models that are looked at in the base models' place

    def of(self, method: Method, plan: Plan, reference: str = FULL) -> "AttributionProblem":
        """As this method is asked it where that plan's subsets are to be predicted.

        Further subsets are drawn and retrained on like the plan's own, in a stream that nobody is judged on.
        """
        asked = self
        if reference != FULL and method.uses_model:
            asked = replace(self, reference=Reference.like(reference, plan))
        count, alpha = method.extra_retrains()
        if not count:
            return asked
        drawn = replace(plan, num_subsets=count, alpha=alpha or plan.alpha, stream="learn")
        return replace(asked, extra_retrain_plan=replace(drawn, replicates=1, replicated_subsets=None))

    def model_unit(self, device: str, further: int = 0) -> Unit:
        """Of the model that is looked at, or of one that many further on."""
        number = self.checkpoint + further
        if self.reference is None:
            return checkpoint_unit(self.task, self.seed, number, device)
        return self.reference.unit(self.task, number, device)

    @cached_property
    def train(self) -> Examples:
        """What the model was trained on."""
        whole = self.task.train_data
        return whole if self.reference is None else whole.select(self.reference.indices(self.task, self.checkpoint))

    @cached_property
    def queries(self) -> Examples:
        asked = self.task.train_data if self.of_train else self.task.query_data
        return asked.select(self.query_indices())

    def attributed_indices(self) -> np.ndarray:
        return attributed_indices(self.seed, self.alpha_attribution, len(self.task.train_data))

    def query_indices(self) -> np.ndarray:
        """Into the task's queries, or its training examples."""
        if self.of_train:
            return self.attributed_indices()
        if isinstance(self.max_queries, tuple):
            return np.array(self.max_queries)
        return self.task.query_indices(self.split)[: self.max_queries]

    def config(self) -> dict[str, Any]:
        config = {
            "task": self.task.scoring_config,
            "seed": self.seed,
            "alpha_attribution": self.alpha_attribution,
            "split": self.split,
            "num_queries": len(self.query_indices()),
        }
        if self.of_train:
            config["of_train"] = True
        if self.output != LOSS:
            config["output"] = self.output
        if isinstance(self.max_queries, tuple):
            config["chosen"] = list(self.max_queries)
        if self.checkpoint:
            config["checkpoint_number"] = self.checkpoint
        if self.extra_retrain_plan is not None:  # how models are retrained decides such scores, too
            config["extra_retrain_plan"] = {"task": self.task.config, **vars(self.extra_retrain_plan)}
        return {**config, **self.reference_config()}

    def reference_config(self) -> dict[str, Any]:
        """What a fit depends on as well: the examples that the model was trained on."""
        if self.reference is None:
            return {}
        return {"reference": self.reference.config(self.task, self.checkpoint)}

    def plain_data(self) -> dict[str, Any]:
        """What a worker needs, beside the task, to ask the same."""
        names = ("seed", "alpha_attribution", "split", "max_queries", "of_train", "checkpoint", "output")
        plans = {"extra_retrain_plan": self.extra_retrain_plan, "reference": self.reference}
        plain = {name: None if value is None else dict(vars(value)) for name, value in plans.items()}
        return {name: getattr(self, name) for name in names} | plain

    @classmethod
    def from_plain_data(cls, task: Task, content: Mapping[str, Any]) -> "AttributionProblem":
        known = dict(content)
        for name, kind in {"extra_retrain_plan": Plan, "reference": Reference}.items():
            known[name] = None if known[name] is None else kind(**known[name])
        if isinstance(known["max_queries"], list):
            known["max_queries"] = tuple(known["max_queries"])
        return cls(task=task, **known)

    def size(self, device: str) -> Size:
        """Known before anything is trained."""
        model = self.task.build_model(0)
        return Size(
            num_train=len(self.task.train_data),
            num_attributed=len(self.attributed_indices()),
            num_queries=len(self.query_indices()),
            num_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
            device=choose_device(device),
        )


def largest_plans(questions: Iterable[AttributionProblem]) -> list[AttributionProblem]:
    """Of those that learn from the beginnings of one plan, the one that learns from the most of it."""
    most: dict[Any, AttributionProblem] = {}
    for question in questions:
        if question.extra_retrain_plan is not None:
            plan = replace(question.extra_retrain_plan, num_subsets=0)
            known = most.get(plan)
            if known is None or known.extra_retrain_plan.num_subsets < question.extra_retrain_plan.num_subsets:  # type: ignore[union-attr]
                most[plan] = question
    return list(most.values())


def extra_retrain_units(question: AttributionProblem, device: str) -> list[Unit]:
    plan = question.extra_retrain_plan
    return [] if plan is None else retrain_units(question.task, plan, device)


def seconds_of(retrains: Sequence[Mapping[str, Any]]) -> float:
    """Of all these records; each process's first retrain, which waited for its start, counts as the others' median."""
    usual = [record.get("seconds", 0.0) for record in retrains if not record.get("first")]
    first = [record.get("seconds", 0.0) for record in retrains if record.get("first")]
    return sum(usual) + (statistics.median(usual) * len(first) if usual else sum(first))


def obtain_extra_retrains(question: AttributionProblem, store: Store, device: str, bill: Bill) -> Retrained:
    """The retrained models that the question's method learns from, made where they are missing."""
    plan = question.extra_retrain_plan
    assert plan is not None
    with bill.charge_recorded_cost():
        name = f"{question.task.name} further retrains, alpha {plan.alpha:g}, seed {plan.seed}"
        units = extra_retrain_units(question, device)
        entries = list(obtain(units, store, name=name, progress=True, recent=EXTRA_RETRAINS).values())
        found = assemble(question.task, plan, entries)
        if missing := plan.num_subsets - len(found.subsets):
            raise UnitsFailedError(f"{missing} of {plan.num_subsets} further retrains are missing; run the same again")
        bill.add(seconds_of([entry.record for entry in entries]))
    return Retrained(found.masks, found.of_output(question.output).losses[0][:, question.query_indices()])
