"""Methods as units of work: scores that are claimed, resumed, spread like retrains, and kept.

A method's answer to a question falls into entries of the store: its fit where it can be kept (reused for other
queries), its parts where it has some (BIF's chains, each made anywhere), its scores, and what they predict for each
plan of subsets. Two drivers on one cache share the work; a kill costs what was not saved since (`retrain/resume.py`).
Raw outputs are stored; metrics are computed from them afterwards.
"""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from baselines.method import (
    TRAIN_COVARIANCE,
    Attribution,
    Bill,
    Method,
    Problem,
    checked_answer,
    load_method,
    no_progress,
)
from bench.ground_truth import AttributionProblem, RecentlyRead, obtain, obtain_extra_retrains, stamp_of
from bench.measure import Cost, measure, metered
from bench.prediction import subset_sums
from retrain.errors import UsageError
from retrain.jobs import Unit, run_units
from retrain.outputs import LOSS, output_slope
from retrain.plugins import plugin_reference
from retrain.progress import progress_bar
from retrain.reference import SUBSET, Reference
from retrain.resume import ResumeState, progress_to_file
from retrain.source import code_fingerprint, source_fingerprint
from retrain.store import ENTRY_FILE, Entry, Store
from retrain.task import Task
from retrain.units import (
    Plan,
    check_task,
    checkpoint_fingerprint,
    checkpoint_of,
    choose_device,
    describe_device,
    task_from,
    task_specification,
)

KEEP_SCORES = {"auto": 2**30, "always": 2**62, "never": 0}  # largest score matrix kept, in bytes
ONCE: dict[str, Any] = {"retry_errors": False, "same_failures": 0}  # a method that raises would raise again
DIVERGED = "diverged"  # the name under which a method that ran away leaves its loss traces
MAX_FIT_BYTES = 2 * 2**30  # a larger fit is not kept
WARM_UP_QUERIES = 64  # and as many attributed examples
# Methods that a small version of the question makes short; others retrain, or ask other methods, whatever its size.
QUICK_WHEN_SMALL = frozenset(
    {"bif", "bif_gaussian", "ekfac", "kfac", "shampoo", "logra", "trackstar", "trak", "gradsim"}
)
SLOW_AT_FIRST = frozenset({"cuda"})  # devices whose kernels are compiled and loaded when they are first needed

MAX_PLANS = 8  # whose masks are kept

_fingerprints: dict[Any, str] = {}
_masks: dict[tuple[Plan, int], tuple[Task, np.ndarray]] = {}  # with its task, so that the id stays its own
MODELS = RecentlyRead()  # every method of a run looks at the same
_warm: set[tuple[str, str]] = set()  # (task, method and settings) that this process has run


class MethodFailedError(RuntimeError):
    """A method raised or gave no usable scores; the message is one line."""


@dataclass(frozen=True)
class Prediction:
    """What a method predicts for every subset and query, and what that cost."""

    raw: np.ndarray  # (subsets, queries): sum of scores over the subset's members
    normalised: np.ndarray | None  # the same from train-normalised scores
    record: dict[str, Any]  # seconds, memory, diagnostics, device
    components: dict[str, "Prediction"] = field(default_factory=dict)  # what it is made of, each by itself


# ---- one method on one question ----


class Scorer:
    """The entries of one method's answer to one question: their keys, their units, and what is in them."""

    def __init__(
        self, question: AttributionProblem, method: Method, store: Store, device: str, keep_scores: str = "auto"
    ):
        self.question, self.method, self.store, self.device_name = question, method, store, device
        self.device = choose_device(device)
        self.keep_scores = keep_scores
        self.keeps_fit = type(method).pack_fit is not Method.pack_fit

    @cached_property
    def checkpoint(self) -> Entry:
        """Of the model that is looked at, trained where it is missing."""
        return entry_of_model(self.question, self.store, self.device_name)

    @cached_property
    def model(self) -> nn.Module:
        return checkpoint_of(self.question.task, self.checkpoint, self.device)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The key of the scores: the question, the checkpoint's own weights, the method, its code and libraries."""
        return {**self.question.config(), **self._made_by(self.method.config)}

    def _made_by(self, method_config: dict[str, Any]) -> dict[str, Any]:
        return {
            "checkpoint": _fingerprint_of(self.checkpoint),
            "method": method_config,
            "source": self.method.source,
            "harness": source_fingerprint("bench.measure"),
            "versions": self.method.versions,
        }

    @cached_property
    def fit_config(self) -> dict[str, Any]:
        """The key of a kept fit: nothing of the queries, nor of what is attributed."""
        asked = self.question
        known = {"task": asked.task.scoring_config, "seed": asked.seed, **asked.reference_config()}
        return {**known, **self._made_by(self.method.fit_config)}

    def plan_config(self, plan: Plan) -> dict[str, Any]:
        names = ("alpha", "scheme", "num_subsets", "stream")
        # With the code that draws subsets and sums over them: neither is any method's.
        made_by = {"summed_by": source_fingerprint("bench.prediction", "retrain.subsets")}
        return {**self.config, "plan_seed": plan.seed, **{name: getattr(plan, name) for name in names}, **made_by}

    def unit(self, kind: str, config: dict[str, Any], plans: Sequence[Plan] = (), part: int = 0) -> Unit:
        """Of a kind that `make_fit`, `make_part` and `make_scores` make: fit, part or scores."""
        question, method = self.question, self.method
        payload = {
            "task": task_specification(question.task),
            "keep_scores": self.keep_scores,
            "question": question.plain_data(),
            "method": plain_method(method),
            "plans": list(map(asdict, plans)),
            "part": part,
            "device": self.device_name,
            "driver": os.getpid(),  # whose terminal shows a bar; in any other process progress goes to a file
        }
        plain = json.loads(json.dumps(payload))
        return Unit(kind=kind, config=config, call=f"bench.scoring:make_{kind}", payload=plain)

    def part_units(self) -> list[Unit]:
        """Empty for a method that scores in one piece."""
        parts = range(self.method.num_parts())
        return [self.unit("part", {**self.config, "part": k}, part=k) for k in parts] if len(parts) > 1 else []

    # ---- what is there ----

    def cached(self, plans: Sequence[Plan]) -> bool:
        """Whether nothing would have to be computed."""
        unit = self.question.model_unit(self.device_name)
        if not self.store.has(unit.kind, unit.config):
            return False
        has_scores = self.stored_scores() is not None
        return has_scores or all(self.store.has("predictions", self.plan_config(plan)) for plan in plans)

    def stored_scores(self) -> Attribution | None:
        entry = self.store.read("scores", self.config)
        return None if entry is None or "scores" not in entry.arrays else attribution_of(entry)

    def forget(self, plans: Sequence[Plan], *, fits: bool = True) -> None:
        """Removes what this method made, so that it is made again."""
        gone = [(unit.kind, unit.config) for unit in self.part_units()] + [("scores", self.config)]
        gone += [("predictions", self.plan_config(plan)) for plan in plans]
        gone += [("fit", self.fit_config)] if fits and self.keeps_fit else []
        for kind, config in gone:
            self.store.remove_key(kind, self.store.key(kind, config))

    def missing(self, plans: Sequence[Plan]) -> list[Unit]:
        """The unit that must be done; empty when everything is there."""
        found = [self._stored_prediction(plan) for plan in plans]
        entry = self.store.read("scores", self.config)
        flawed = any(one is not None and one.record.get("num_scores_not_finite") for one in (entry, *found))
        kept = entry is not None and "scores" in entry.arrays
        if not flawed and (kept or (None not in found and (plans or entry is not None))):
            return []
        if entry is not None:  # not finite: evidence, not a result; or too large to have been kept, and asked for anew
            self.forget(plans, fits=False)
        return [self.unit("scores", self.config, plans)]

    def predictions(self, plans: Sequence[Plan]) -> list[Prediction]:
        """One a plan, from the store; `missing` says what has to be made first."""
        found = [self._stored_prediction(plan) for plan in plans]
        entry = self.store.read("scores", self.config) if None in found else None
        if entry is not None and "scores" not in entry.arrays:  # another run's, too large to keep: for its own plans
            obtain(self.missing(plans), self.store, **ONCE)
            found = [self._stored_prediction(plan) for plan in plans]
        if None in found:
            entry = self.store.read("scores", self.config)
            if entry is None or "scores" not in entry.arrays:
                raise MethodFailedError(f"{self.method.name} left no scores in the cache")
            attribution = attribution_of(entry)
            found = [
                made or self.keep_prediction(plan, attribution, entry.record)
                for made, plan in zip(found, plans, strict=True)
            ]
        return [prediction for prediction in found if prediction is not None]

    def scores(self, **jobs: Any) -> tuple[Attribution, dict[str, Any]]:
        """The whole matrix, made where it is missing or was too large to have been kept, and the record of its cost."""
        entry, self.keep_scores = self.store.read("scores", self.config), "always"
        if entry is not None and "scores" not in entry.arrays:
            self.forget((), fits=False)
        self.make((), **jobs)
        entry = self.store.read("scores", self.config)
        if entry is None:
            raise MethodFailedError(f"{self.method.name} left no scores in the cache")
        return attribution_of(entry), entry.record

    def divergence(self) -> tuple[str, np.ndarray]:
        """Why an earlier attempt at these scores ran away, and its mean losses (chains, draws); else empty."""
        left = ResumeState.of(self.store, "scores", self.store.key("scores", self.config)).load(DIVERGED)
        return ("", np.empty((0, 0))) if left is None else (left[1].get("reason", ""), left[0]["mean_losses"])

    def make(self, plans: Sequence[Plan], **jobs: Any) -> list[Prediction]:
        """The predictions, made where they are missing; raises what the method raises."""
        if units := self.missing(plans):
            obtain(units, self.store, **ONCE, **jobs)
        return self.predictions(plans)

    def _stored_prediction(self, plan: Plan) -> Prediction | None:
        entry = self.store.read("predictions", self.plan_config(plan))
        return None if entry is None else prediction_of(entry.arrays, entry.record)

    def keep_prediction(self, plan: Plan, attribution: Attribution, record: Mapping[str, Any]) -> Prediction:
        masks = _masks_of(plan, self.question.task)
        arrays: dict[str, np.ndarray] = {}
        for place, one in [("", attribution), *((f"{name}/", part) for name, part in attribution.components.items())]:
            for kind, scores in (("raw", one.scores), ("normalised", one.normalised())):
                if scores is not None:
                    wide = scores.float() if scores.dtype == torch.bfloat16 else scores  # which numpy does not have
                    arrays[f"{place}{kind}"] = subset_sums(masks, wide.numpy())
        self.store.write("predictions", self.plan_config(plan), arrays, record)
        return prediction_of(arrays, dict(record))


class Ensemble:
    """The scorers of one method at one or several models, as if they were one; the first is of the base model."""

    def __init__(self, scorer: Scorer, number: int):
        questions = [replace(scorer.question, checkpoint=k) for k in range(1, number)]
        known = (scorer.method, scorer.store, scorer.device_name, scorer.keep_scores)
        self.members = [scorer, *(Scorer(question, *known) for question in questions)]
        self.question = scorer.question

    def part_units(self) -> list[Unit]:
        return [unit for member in self.members for unit in member.part_units()]

    def predictions(self, plans: Sequence[Plan]) -> list[Prediction]:
        """One a plan: what the mean of the models' scores predicts."""
        if len(self.members) == 1:
            return self.members[0].predictions(plans)
        each = [member.predictions(plans) for member in self.members]
        # A reference model's training is in its own scores' seconds; of base models, the first costs a method nothing.
        further = self.members[1:] if self.question.reference is None else []
        trained = sum(member.checkpoint.record.get("seconds", 0.0) for member in further)
        return [mean_prediction(of_plan, trained) for of_plan in zip(*each, strict=True)]


def mean_prediction(members: Sequence[Prediction], further_seconds: float) -> Prediction:
    """Of the sum over a subset's members, which is linear in the scores; costs add up, and memory does not."""
    records = [member.record for member in members]
    record = dict(records[0])
    record["fit_seconds"] = sum(one["fit_seconds"] for one in records) + further_seconds
    record["score_seconds"] = sum(one["score_seconds"] for one in records)
    record["peak_memory_bytes"] = max(one["peak_memory_bytes"] for one in records)
    record["num_scores_not_finite"] = sum(one.get("num_scores_not_finite") or 0 for one in records)
    record["diagnostics"] = {"models": len(members), **records[0].get("diagnostics", {})}
    names = set(members[0].components)
    if any(set(member.components) != names for member in members):
        raise MethodFailedError("the base models' scores have different parts")
    components = {name: mean_prediction([m.components[name] for m in members], further_seconds) for name in names}
    scaled = [member.normalised for member in members if member.normalised is not None]
    normalised = np.mean(scaled, axis=0) if len(scaled) == len(members) else None
    return Prediction(np.mean([member.raw for member in members], axis=0), normalised, record, components)


def prediction_of(arrays: Mapping[str, np.ndarray], record: dict[str, Any]) -> Prediction:
    names = [name.removesuffix("/raw") for name in arrays if name.endswith("/raw")]
    components = {name: Prediction(arrays[f"{name}/raw"], arrays.get(f"{name}/normalised"), record) for name in names}
    return Prediction(arrays["raw"], arrays.get("normalised"), record, components)


def attribution_of(entry: Entry) -> Attribution:
    """The one way from stored scores to arrays."""

    def one(place: str, **known: Any) -> Attribution:
        scale = entry.arrays.get(f"{place}train_scale")
        return Attribution(
            scores=torch.from_numpy(np.array(entry.arrays[f"{place}scores"])),
            train_scale=None if scale is None else torch.from_numpy(np.array(scale)),
            **known,
        )

    names = [name.removesuffix("/scores") for name in entry.arrays if name.endswith("/scores")]
    components = {name: one(f"{name}/") for name in names}
    covariance = entry.arrays.get(TRAIN_COVARIANCE)
    arrays = {} if covariance is None else {TRAIN_COVARIANCE: torch.from_numpy(np.array(covariance))}
    return one("", diagnostics=entry.record.get("diagnostics", {}), components=components, arrays=arrays)


def arrays_of(attribution: Attribution) -> dict[str, np.ndarray]:
    """The way back: what `attribution_of` reads."""
    arrays = {}
    for place, one in [("", attribution), *((f"{name}/", part) for name, part in attribution.components.items())]:
        arrays[f"{place}scores"] = one.scores.numpy()
        if one.train_scale is not None:
            arrays[f"{place}train_scale"] = one.train_scale.numpy()
    return arrays


def as_arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: value.detach().cpu().contiguous().numpy() for name, value in tensors.items()}


def as_tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Copies, which may be written to."""
    return {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}


# ---- the units' work, in whatever process ----


def entry_of_model(question: AttributionProblem, store: Store, device_name: str, further: int = 0) -> Entry:
    """Of the model that is looked at, or of one that many further on, trained where it is missing."""
    unit = question.model_unit(device_name, further)
    if (found := MODELS.read(store, unit)) is not None:
        return found
    (entry,) = obtain([unit], store, recent=MODELS).values()
    return entry


def _masks_of(plan: Plan, task: Task) -> np.ndarray:
    """Drawn once for all methods of a plan."""
    known = plan, id(task)
    if known not in _masks:
        while len(_masks) >= MAX_PLANS:
            del _masks[next(iter(_masks))]
        _masks[known] = task, plan.masks(task)
    return _masks[known][1]


def _fingerprint_of(entry: Entry) -> str:
    """Taken once of weights that are still the file's."""
    known = (entry.path, stamp_of(entry.path / ENTRY_FILE))
    if known not in _fingerprints:
        _fingerprints[known] = checkpoint_fingerprint(entry)
    return _fingerprints[known]


def problem_of(
    question: AttributionProblem, model: nn.Module, store: Store, device_name: str, scratch: Path
) -> Problem:
    """The question as a method is asked it, at this checkpoint."""
    bill = Bill()

    def checkpoint(number: int) -> nn.Module:
        """A further model costs its training, whoever trained it first."""
        with bill.charge_recorded_cost():
            entry = entry_of_model(question, store, device_name, number)
            bill.add(entry.record.get("seconds", 0.0))
            return checkpoint_of(question.task, entry, choose_device(device_name))

    fitted: set[tuple[Method, int]] = set()

    def scores_of(method: Method, of_train: bool = False, further: int = 0) -> Attribution:
        at = replace(question, checkpoint=question.checkpoint + further)
        output = LOSS if of_train else question.output  # of training examples it is their loss that matters
        asked = replace(at, extra_retrain_plan=None, of_train=of_train, output=output)
        scorer = Scorer(asked, method, store, device_name)
        return _scores_of(scorer, bill, fitted, _is_learnt_from(at))

    asked, known = (question, store, device_name, bill), dict[str, Any]()
    if (reference := question.reference) is not None:
        known = {
            "pool": question.task.train_data,
            "trained_on": lambda further: reference.indices(question.task, question.checkpoint + further),
            "training_seeds": reference.seeds(question.checkpoint),
        }
    return Problem(
        task=question.task, model=model, train=question.train, attributed_indices=question.attributed_indices(),
        queries=question.queries, output=question.output, seed=question.seed, device=choose_device(device_name),
        scratch=scratch, checkpoint_number=question.checkpoint, checkpoint=checkpoint, scores_of=scores_of,
        retrained=partial(obtain_extra_retrains, *asked) if question.extra_retrain_plan else None,
        bill=bill, progress=progress_bar, **known,
    )  # fmt: skip


def _scores_of(scorer: Scorer, bill: Bill, fitted: set[tuple[Method, int]], learnt: bool) -> Attribution:
    """Scores that are there, or made like any method's, for what they cost whoever made them.

    A fit that is kept serves every question, and is paid for once.
    """
    with bill.charge_recorded_cost():
        attribution, record = scorer.scores()
        clear_worker_context()
        number = scorer.question.checkpoint
        trained = record.get("reference_seconds", 0.0)
        kept = scorer.keeps_fit and (scorer.method, number) in fitted
        fit_seconds = 0.0 if kept else record["fit_seconds"] - trained
        # A model is paid for once; one that is among the retrains that are learnt from, with these; as for a method's
        # own further checkpoints, the first base model costs nothing.
        if not learnt and number not in {known for _, known in fitted}:
            further = scorer.question.reference is None and number
            fit_seconds += scorer.checkpoint.record.get("seconds", 0.0) if further else trained
        fitted.add((scorer.method, number))
        bill.add(fit_seconds + record["score_seconds"], record["peak_memory_bytes"])
        return attribution


def _is_learnt_from(question: AttributionProblem) -> bool:
    """Whether the reference model is one of the retrains that the method learns from."""
    reference, plan = question.reference, question.extra_retrain_plan
    if reference is None or plan is None or question.checkpoint >= plan.num_subsets:
        return False
    return Reference.like(SUBSET, plan) == reference


def warm_up_once(method: Method, problem: Problem) -> None:
    """Else the first of a process may pay for all: on an H200 EK-FAC took 4 to 8 s more, BIF's pilot 4.6 for 0.2."""
    # A decimal number (a damping, a step) changes no kernel.
    options = {name: value for name, value in method.config.items() if not isinstance(value, float)}
    known = (problem.task.name, json.dumps(options, sort_keys=True, default=str))
    if problem.device.type in SLOW_AT_FIRST and method.name in QUICK_WHEN_SMALL and known not in _warm:
        _warm.add(known)
        warm_up(method, problem)


def warm_up(method: Method, problem: Problem) -> None:
    """The same question about a few examples. TRAK and EK-FAC still fit on what they are given, so it is cut too."""
    few = min(4 * WARM_UP_QUERIES, len(problem.train))
    small = replace(
        problem,
        train=problem.train.select(range(few)),
        attributed_indices=np.arange(min(WARM_UP_QUERIES, few)),
        pool=None,
        trained_on=None,
        queries=problem.queries.select(range(min(WARM_UP_QUERIES, len(problem.queries)))),
        scratch=problem.scratch / "warm-up",
        progress=no_progress,
    )
    small.scratch.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(Exception):  # few examples are too few for some settings; what is wrong shows when timed
        measure(replace(method, **method.warm_up), small)


# ---- what a process does for a unit ----


class WorkerContext:
    """What a process needs to work on one method's units; kept from unit to unit of the same method."""

    def __init__(self, store: Store, payload: Mapping[str, Any]):
        question = AttributionProblem.from_plain_data(task_from(payload["task"]), payload["question"])
        method = method_again(**payload["method"])
        self.scorer = Scorer(question, method, store, payload["device"], payload["keep_scores"])
        self.fitted: tuple[Any, Cost] | None = None
        self.kept_fit: Entry | None = None
        self.shared: dict[str, Any] = {}
        with store.scratch() as scratch:
            warm_up_once(method, problem_of(question, self.scorer.model, store, payload["device"], scratch))

    def problem(self, unit: Unit, scratch: Path) -> Problem:
        scorer = self.scorer
        problem = problem_of(scorer.question, scorer.model, scorer.store, scorer.device_name, scratch)
        work = ResumeState.of(scorer.store, unit.kind, unit.key)
        progress = problem.progress if os.getpid() == unit.payload["driver"] else progress_to_file(work)
        return replace(problem, work=work, shared=self.shared, progress=progress)

    def check_unchanged(self) -> None:
        """Before anything is kept: a module that was imported late may have been edited meanwhile."""
        method = self.scorer.method
        refuse_edited(method, method.current_source(), method.source)
        check_task(self.scorer.question.task)

    def fit(self, problem: Problem) -> tuple[Any, Cost]:
        """The method's fit, from the store where it can be kept, and what it cost whoever made it."""
        if self.fitted is None:
            scorer, method = self.scorer, self.scorer.method
            entry = scorer.store.read("fit", scorer.fit_config) if scorer.keeps_fit else None
            if scorer.keeps_fit and entry is None:
                # Claimed: whoever else needs it waits.
                report = run_units([scorer.unit("fit", scorer.fit_config)], scorer.store, **ONCE)
                if report.failed:
                    ((key, reason),) = report.failed.items()
                    raise MethodFailedError(reason.splitlines()[0]) from report.traceback_of(key)
                entry = self.kept_fit or scorer.store.read("fit", scorer.fit_config)
            if entry is not None and "too_large" not in entry.record:
                names = ("seconds", "peak_memory_bytes", "threads")
                self.fitted = (
                    method.unpack_fit(problem, as_tensors(entry.arrays)),
                    Cost(**{name: entry.record[name] for name in names}),
                )
                problem.bill.seconds = 0.0  # what the fit had from elsewhere is in its cost
            else:
                self.fitted = run_stage(method, problem, lambda: method.fit(problem))
            self.kept_fit = None
        return self.fitted


def plain_method(method: Method) -> dict[str, Any]:
    """What another process needs to have the same method."""
    options = {f.name: getattr(method, f.name) for f in fields(method)}
    return {"name": plugin_reference(type(method)), "options": options, "source": method.source}


def method_again(name: str, options: Mapping[str, Any], source: str) -> Method:
    """Of what `plain_method` says; refused where its code is another now."""
    method = load_method(name, **{one: tuple(v) if isinstance(v, list) else v for one, v in options.items()})
    refuse_edited(method, method.source, source)
    return method


def refuse_edited(method: Method, source: str, expected: str) -> None:
    if source != expected:
        raise UsageError(
            f"the code or a declared file of method {method.name} was edited while this run was going on; "
            "run the same command again"
        )


_contexts: dict[str, WorkerContext] = {}


def worker_context(store: Store, unit: Unit) -> WorkerContext:
    name = json.dumps([str(store.root), unit.payload["task"], unit.payload["question"], unit.payload["method"]])
    if name not in _contexts:
        _contexts.clear()  # one at a time: it holds a model and what the method shares between its parts
        _contexts[name] = WorkerContext(store, unit.payload)
    return _contexts[name]


def clear_worker_context() -> None:
    """Frees what the last method held."""
    _contexts.clear()
    _copies.clear()


_copies = WeakTensorKeyDictionary()  # tensor -> its copy, for as long as the tensor lives and a run goes on


class Snapshot:
    """Copies of what a method is given, to see whether it came back as it was, and to put it back where it did not.

    The copies are compared, and not torch's counts of changes, which know nothing of writes through numpy or `.data`.
    What a stage leaves is as it was, so the next one's copies are the same: CIFAR-10's 700 MB are copied once.
    """

    def __init__(self, problem: Problem):
        task = problem.task
        given = {
            "the training examples": [*task.train_data.tensors(), *problem.train.tensors()],
            "the queries": [*task.query_data.tensors(), *problem.queries.tensors()],
            "the indices of the attributed examples": [torch.from_numpy(problem.attributed_indices)],
            "the model": list(problem.model.state_dict().values()),
        }
        named = {id(tensor): (what, tensor) for what, tensors in given.items() for tensor in tensors}
        # Held here as well: a method that asks another one clears what a process keeps.
        for _, tensor in named.values():
            if tensor not in _copies:
                _copies[tensor] = tensor.detach().clone()
        self.copies = [(what, tensor, _copies[tensor]) for what, tensor in named.values()]

    def put_back(self) -> list[str]:
        """What was changed; it is as before now."""
        changed = []
        for what, tensor, copy in self.copies:
            same_kind = tensor.shape == copy.shape and tensor.dtype == copy.dtype
            if same_kind and (torch.equal(tensor, copy) or torch.allclose(tensor, copy, 0, 0, equal_nan=True)):
                continue
            changed.append(what)
            with torch.no_grad():
                tensor.copy_(copy) if tensor.shape == copy.shape else tensor.set_(copy.clone())
        return list(dict.fromkeys(changed))


def run_stage(method: Method, problem: Problem, work: Any) -> tuple[Any, Cost]:
    """One stage and its cost, with what earlier attempts at it took that it went on from."""
    before = Snapshot(problem)
    problem.work.start_clock()
    try:
        made, cost = metered(work, problem.seed, problem.device, problem.task.cpu_threads)
    except UsageError as error:  # this method cannot do with its settings; the others can
        raise MethodFailedError(str(error)) from error
    finally:
        changed = before.put_back()
    if changed:
        problem.work.clear()
        raise MethodFailedError(f"{method.name} changed {' and '.join(changed)}; expected them untouched")
    bill = problem.bill
    cost.seconds = max(0.0, cost.seconds + problem.work.earlier_seconds + bill.seconds)
    cost.peak_memory_bytes = max(cost.peak_memory_bytes, bill.peak_memory_bytes)
    bill.seconds, bill.peak_memory_bytes = 0.0, 0
    return made, cost


def make_fit(store: Store, unit: Unit) -> None:
    context = worker_context(store, unit)
    with store.scratch() as scratch:
        problem = context.problem(unit, scratch)
        state, cost = run_stage(context.scorer.method, problem, lambda: context.scorer.method.fit(problem))
        packed = context.scorer.method.pack_fit(state) or {}
    arrays = as_arrays(packed)
    record: dict[str, Any] = {**vars(cost), "device": describe_device(problem.device), "code": code_fingerprint()}
    if not packed or sum(array.nbytes for array in arrays.values()) > MAX_FIT_BYTES:
        arrays, record = {}, {**record, "too_large": True}
        context.fitted = state, cost
    context.check_unchanged()
    context.kept_fit = store.write(unit.kind, unit.config, arrays, record)


def make_part(store: Store, unit: Unit) -> None:
    context = worker_context(store, unit)
    with store.scratch() as scratch:
        problem = context.problem(unit, scratch)
        state, _ = context.fit(problem)
        method, part = context.scorer.method, unit.payload["part"]
        made, cost = run_stage(method, problem, lambda: method.score_part(problem, state, part))
    context.check_unchanged()
    store.write(unit.kind, unit.config, as_arrays(made), {**vars(cost), "code": code_fingerprint()})


def make_scores(store: Store, unit: Unit) -> None:
    context = worker_context(store, unit)
    scorer, method = context.scorer, context.scorer.method
    # Parts that another process made, or was to make; in one process a method runs through by itself, and faster.
    units = scorer.part_units()
    apart = any(store.has(part.kind, part.config) for part in units)
    parts = obtain(units, store, **ONCE) if apart else {}
    with store.scratch() as scratch:
        problem = context.problem(unit, scratch)
        _ = problem.attributed  # chosen before the clock starts: 6 ms of a method's 200 on an H200, and not its doing
        state, fitted = context.fit(problem)
        if parts:
            in_order = sorted(parts.values(), key=lambda entry: entry.config["part"])
            pieces = [as_tensors(entry.arrays) for entry in in_order]
            work = lambda: method.merge(problem, state, pieces)  # noqa: E731
        else:
            work = lambda: method.score(problem, state)  # noqa: E731
        try:
            attribution, cost = run_stage(method, problem, work)
        except FloatingPointError as error:
            if (traces := getattr(error, "mean_losses", None)) is not None:  # for whoever asks where the chains went
                problem.work.save(DIVERGED, {"mean_losses": np.asarray(traces)}, {"reason": str(error)})
            raise
    attribution = checked_answer(attribution, method, len(problem.queries), len(problem.attributed_indices))
    if problem.output != LOSS and not method.knows_output:
        losses = problem.task.losses(problem.model, problem.queries, problem.device)
        attribution = attribution.scaled(output_slope(losses, problem.output))
    # A look at the sum is enough where all are finite, ten times faster than asking each.
    all_finite = torch.isfinite(attribution.scores.sum(dtype=torch.float64))
    # A reference model is made for the method, whoever asked for it first; the base model is there anyway. Where a
    # method retrains by itself, the one that it asks about the model has the bill.
    pays = scorer.question.reference is not None and scorer.question.extra_retrain_plan is None
    trained = scorer.checkpoint.record["seconds"] if pays else 0.0
    record = {
        **({"reference_seconds": trained} if pays else {}),
        "fit_seconds": fitted.seconds + trained,
        "score_seconds": cost.seconds + sum(entry.record["seconds"] for entry in parts.values()),
        "peak_memory_bytes": max(
            [fitted.peak_memory_bytes, cost.peak_memory_bytes, *(e.record["peak_memory_bytes"] for e in parts.values())]
        ),
        "threads": cost.threads,
        "device": describe_device(problem.device),
        "code": code_fingerprint(),
        "diagnostics": attribution.diagnostics,
        "num_scores_not_finite": 0 if all_finite else int((~torch.isfinite(attribution.scores)).sum()),
    }
    context.check_unchanged()
    for plan in unit.payload["plans"]:
        scorer.keep_prediction(Plan(**plan), attribution, record)
    arrays = {name: value.numpy() for name, value in attribution.arrays.items()}
    if attribution.scores.numel() * 4 <= KEEP_SCORES[scorer.keep_scores]:
        arrays |= arrays_of(attribution)
    store.write(unit.kind, unit.config, arrays, record)
    for part in parts.values():  # what they were for is there
        store.remove_key(part.kind, part.key)
