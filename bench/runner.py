"""One experiment from beginning to end: build the problem, retrain, score, measure, return a Result.

    from bench import Experiment, run
    result = run(Experiment(task="digits", alpha=(0.1,), methods=("ekfac", "ekfac@damping=1e-4")))
    print(result)                  # the tables of `python -m bench.lds`
    result.frame()                 # a pandas DataFrame, a row a method, seed and alpha

Everything finished is kept, so an interrupted run goes on where it was. A method that fails is reported, and the others
go on.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from baselines.method import Method, Size
from baselines.support.memory import free_bytes
from bench.experiment import Execution, Experiment
from bench.ground_truth import (
    EXTRA_RETRAINS,
    AttributionProblem,
    GroundTruth,
    assemble,
    extra_retrain_units,
    largest_plans,
    make_units,
    obtain,
)
from bench.measure import cpu_threads, now
from bench.methods import Variant, build_variants, with_models
from bench.metrics import MINIMUM_SUBSETS
from bench.records import DISTRIBUTIONS, provenance, run_id_of, save_record, version_told, versions
from bench.rows import COLUMNS, PAIR_COLUMNS, add_rows
from bench.schema import RunRecord
from bench.scoring import ONCE, Ensemble, Prediction, Scorer, clear_worker_context
from bench.tables import RunRows, duration, show
from retrain.errors import UsageError
from retrain.jobs import Report, Unit, run_units
from retrain.outputs import LOSS
from retrain.progress import progress_counter
from retrain.reference import FULL
from retrain.resume import read_progress
from retrain.safe_files import one_line, write_whole
from retrain.store import Store
from retrain.task import Task, classifies
from retrain.units import Plan, checkpoint_unit, choose_device, describe_device, retrain_units

logger = logging.getLogger("tda-bench")
# Of an experiment: what a record's config describes otherwise.
DESCRIBED = ("task", "methods", "checkpoints", "reference")
WORTH_SAYING = 30.0  # seconds of retraining
Block = tuple[int, float]  # a seed, and the share of the training set that is attributed


def run(experiment: Experiment, execution: Execution | None = None) -> Result:
    """Builds the problem, retrains, scores and measures; what is in the cache is not made again."""
    started = time.perf_counter()
    session = Session(experiment, execution or Execution(), control=True)
    session.report_skipped()
    seconds, words = retraining_time(session)
    if seconds > WORTH_SAYING:
        logger.info("%s", words)
    truths = session.retrain()
    predictions = session.score()
    for block in session.blocks:
        queries = session.question(*block).query_indices()
        for position, plan in enumerate(session.plans(*block)):
            truth = truths[plan.seed, plan.alpha_attribution, plan.alpha]
            if len(truth.subsets) >= MINIMUM_SUBSETS:
                of_plan = [(variant, found[position]) for variant, found in predictions[block]]
                add_rows(session.out, session.task, plan, truth, queries, of_plan, session.extra_ground_truth(plan))
    known = (experiment, session.task, session.variants, session.out, session.skipped)
    return Result(*known, time.perf_counter() - started, session.device(), session.notes)


class Session:
    """An experiment with its task, methods and store at hand, and the steps of a run: `retrain` and `score`."""

    def __init__(self, experiment: Experiment, execution: Execution, control: bool = False):
        """control: on a task with classes, `same_class` is among the methods whether it was asked for or not."""
        self.experiment, self.execution = experiment, execution
        self.task = experiment.build_task()
        if experiment.output != LOSS and not classifies(self.task):
            raise UsageError(f"output {experiment.output} is of one label a query, which {self.task.name} has not")
        tuned_at = (experiment.reference, tuple(experiment.alpha))
        asked = build_variants(experiment.methods, self.task, experiment.options, experiment.settings, tuned_at)
        self.variants = with_models(asked, experiment.checkpoints, experiment.reference)
        if control and classifies(self.task) and not any(one.method.name == "same_class" for one in self.variants):
            self.variants += build_variants(["same_class"], self.task, {}, "default")
        self.store = Store(execution.cache)
        self.out, self.skipped, self.tracebacks = RunRows(), dict[str, str](), dict[str, str]()
        self.blocks: list[Block] = list(itertools.product(experiment.seeds, experiment.shares(self.task)))
        self.active: list[Variant] = []
        # A method that cannot run here, or would not fit in memory, is named before anything is computed.
        for variant in self.variants:
            method = variant.method
            if reason := method.skip(self.task):
                self.skipped[variant.label] = reason
            elif reason := refuse_if_too_large(method, self.question(*self.blocks[0]).size(execution.device)):
                self.out.problems.append(f"{variant.label} was not started: {reason}")
            else:
                self.active.append(variant)
        self.notes = self._notes()

    def _notes(self) -> list[str]:
        """One line for each option that asks for more than there is, and for each method edited since its record."""
        asked, notes = self.experiment, []
        count = len(self.task.query_indices(asked.query_split))  # type: ignore[arg-type]
        if isinstance(asked.queries, int) and asked.queries > count:
            notes.append(f"--queries {asked.queries}: there are {count} ({asked.query_split}), and all are used")
        if asked.replicated_subsets is not None and asked.replicated_subsets > asked.subsets:
            replicated = f"--replicated-subsets {asked.replicated_subsets}"
            notes.append(f"{replicated}: there are {asked.subsets} subsets, and all are replicated")
        described = {one["label"]: one for one in asked.methods if isinstance(one, Mapping)}
        for variant in self.active:
            if described.get(variant.label, {}).get("source") not in (None, variant.method.source):
                notes.append(f"{variant.label}: its code was edited since that record, so its scores may differ")
        return notes

    def report_skipped(self) -> None:
        """Who will not run is said before the hours of retraining, and not only below the table."""
        reasons = [*self.out.problems, *(f"{label} is skipped: {reason}" for label, reason in self.skipped.items())]
        if reasons and not self.active:
            raise UsageError("no method is left to run: " + "; ".join(reasons))
        for problem in self.out.problems:
            logger.warning("%s", problem)

    def device(self) -> str:
        """The device's name."""
        return describe_device(choose_device(self.execution.device))

    # ---- what is asked ----

    def plans(self, seed: int, share: float) -> list[Plan]:
        return self.experiment.plans(self.task, seed, share)

    def question(self, seed: int, share: float) -> AttributionProblem:
        return AttributionProblem(
            task=self.task,
            seed=seed,
            alpha_attribution=share,
            split=self.experiment.query_split,  # type: ignore[arg-type]
            max_queries=self.experiment.queries,  # type: ignore[arg-type]
            output=self.experiment.output,
        )

    def scorer(self, variant: Variant, seed: int, share: float) -> Scorer:
        """Of the first alpha, where a method's scores depend on it, and of the base model."""
        return self.scorers(variant, seed, share)[0][0].members[0]

    def scorers(self, variant: Variant, seed: int, share: float) -> list[tuple[Ensemble, list[Plan]]]:
        """With the plans that each answers for: one for all, or one an alpha for a method that retrains by itself."""
        question, found = self.question(seed, share), dict[str, tuple[Ensemble, list[Plan]]]()
        for plan in self.plans(seed, share):
            asked = question.of(variant.method, plan, variant.reference)
            made = Scorer(asked, variant.method, self.store, self.execution.device, self.execution.keep_scores)
            alike = str((asked.extra_retrain_plan, asked.reference))
            found.setdefault(alike, (Ensemble(made, variant.models), []))[1].append(plan)
        return list(found.values())

    def base_units(self, seeds: Sequence[int]) -> list[Unit]:
        numbers = range(max([1, *(one.models for one in self.variants if one.reference == FULL)]))
        return [checkpoint_unit(self.task, seed, number, self.execution.device) for seed in seeds for number in numbers]

    def retrains(self) -> dict[tuple[int, float, float], list[Unit]]:
        """(seed, share, alpha) -> units."""
        return {
            (*block, plan.alpha): retrain_units(self.task, plan, self.execution.device)
            for block in self.blocks
            for plan in self.plans(*block)
        }

    def further(self, variants: Sequence[Variant]) -> list[Unit]:
        """What methods retrain by themselves; those who ask for the same subsets share them."""
        scorers = [scorer for block in self.blocks for v in variants for scorer, _ in self.scorers(v, *block)]
        asked = largest_plans(scorer.question for scorer in scorers)
        return [unit for question in asked for unit in extra_retrain_units(question, self.execution.device)]

    def reference_units(self, blocks: Sequence[Block]) -> list[Unit]:
        """The models that methods look at, other than base models."""
        scorers = [one for variant in self.active for block in blocks for one, _ in self.scorers(variant, *block)]
        looked_at = [member.question for scorer in scorers for member in scorer.members]
        units = [one.model_unit(self.execution.device) for one in looked_at if one.reference is not None]
        return list({unit.key: unit for unit in units}.values())

    # ---- retraining ----

    def retrain(self) -> dict[tuple[int, float, float], GroundTruth]:
        """The ground truth of every plan; all of it is one batch of jobs, so that no worker waits between seeds."""
        by_plan = self.retrains()
        units = [*self.base_units(self.experiment.seeds), *(unit for some in by_plan.values() for unit in some)]
        force, jobs = self.execution.force, self.execution.job_options
        entries = obtain(units, self.store, force=force, **jobs(f"{self.task.name} ground truth"))
        others = {"further retrains": self.further(self.active), "reference models": self.reference_units(self.blocks)}
        for what, some in others.items():
            if some:
                make_units(some, self.store, force=force, **jobs(f"{self.task.name} {what}"))
        found = {}
        for block in self.blocks:
            for plan in self.plans(*block):
                place = (*block, plan.alpha)
                keys = [unit.key for unit in by_plan[place]]
                truth = assemble(self.task, plan, [entries[key] for key in keys if key in entries])
                if missing := plan.num_subsets - len(truth.subsets):
                    self.out.problems.append(
                        f"{missing} of {plan.num_subsets} subsets are missing at alpha {plan.alpha:g}, seed "
                        f"{plan.seed}; the same command without --collect makes them"
                    )
                found[place] = truth.of_output(self.experiment.output)
        return found

    def extra_ground_truth(self, plan: Plan) -> GroundTruth | None:
        """What methods of this run retrained on at the plan's alpha, as far as it is there."""
        question = self.question(plan.seed, plan.alpha_attribution)
        asked = [question.of(variant.method, plan).extra_retrain_plan for variant in self.active]
        alike = [one for one in asked if one is not None and one.alpha == plan.alpha]
        if not alike:
            return None
        most = max(alike, key=lambda one: one.num_subsets)
        units = retrain_units(self.task, most, self.execution.device)
        found = [entry for unit in units if (entry := EXTRA_RETRAINS.read(self.store, unit))]
        return assemble(self.task, most, found).of_output(self.experiment.output) if found else None

    # ---- scoring ----

    def score(self) -> dict[Block, list[tuple[Variant, list[Prediction]]]]:
        """Every variant's predictions, one a plan. One that fails is reported, and the others go on."""
        redo = self.execution.force or self.execution.rescore
        waiting: list[tuple[Block, Variant, list[tuple[Ensemble, list[Plan], list[Unit]]]]] = []
        for block in self.blocks:
            looked_at = [*self.base_units(block[:1]), *self.reference_units([block])]
            if not all(self.store.has_key(unit.kind, unit.key) for unit in looked_at):  # only --collect
                self.out.problems.append(f"seed {block[0]} has no model to look at yet; nothing was scored")
                continue
            for variant in self.active:
                work = []
                for scorer, plans in self.scorers(variant, *block):
                    for member in scorer.members if redo else ():
                        member.forget(plans)
                    units = [unit for member in scorer.members for unit in member.missing(plans)]
                    work.append((scorer, plans, units))
                waiting.append((block, variant, work))
        todo = [(scorer, units) for _, _, some in waiting for scorer, _, units in some if units]
        failed = self._make([scorer for scorer, _ in todo], [unit for _, units in todo for unit in units])
        found: dict[Block, list[tuple[Variant, list[Prediction]]]] = {block: [] for block in self.blocks}
        for block, variant, some in waiting:
            made = [one for work in some for one in self._predictions(variant, *work, failed)]
            if len(made) == len(self.experiment.alpha):
                found[block].append((variant, made))
        return found

    def _make(self, scorers: Sequence[Ensemble], units: list[Unit]) -> dict[str, str]:
        """Key -> reason of what failed. Where several work at once, parts first: they can be made anywhere."""
        jobs: dict[str, Any] = {**ONCE, **self.execution.scoring_jobs()}
        name, failed = f"{self.task.name} scores", dict[str, str]()
        inline = jobs.get("cluster", "inline") == "inline"
        parts = [] if inline or jobs.get("jobs") == 1 else [unit for one in scorers for unit in one.part_units()]
        try:
            for phase, some in ((f"{name}, parts", parts), (name, units)):
                if some:
                    report = self._run_phase(phase, some, inline, jobs)
                    failed |= report.failed
                    self.tracebacks |= report.tracebacks
        finally:
            clear_worker_context()
        return failed

    def _run_phase(self, phase: str, units: list[Unit], inline: bool, jobs: Mapping[str, Any]) -> Report:
        """In this process methods show their own progress; that of workers is read from where they write it."""
        if inline or not self.execution.progress:
            return run_units(units, self.store, name=phase, progress=self.execution.progress, **jobs)

        def say() -> str:
            return "; ".join(filter(None, (read_progress(self.store, unit.kind, unit.key) for unit in units)))

        with progress_counter(True, phase, say) as progress:
            return run_units(units, self.store, name=phase, progress=progress, **jobs)

    def _predictions(
        self, variant: Variant, scorer: Ensemble, plans: list[Plan], units: list[Unit], failed: Mapping[str, str]
    ) -> list[Prediction]:
        """One a plan; none, and a word about it, where something is missing."""
        keys = [unit.key for unit in [*units, *scorer.part_units()]]
        if key := next((key for key in keys if key in failed), None):
            first, *rest = map(str.strip, failed[key].splitlines())
            # Where the traceback is; or the traceback itself, where its file could not be written: no line for people.
            inside = any(line.startswith(("Traceback", "File ")) for line in rest)
            reason = "; ".join([first, *([] if inside else rest)])
            self.out.problems.append(f"{variant.label} failed: {reason}")
            if traceback := self.tracebacks.get(key) or ("\n".join(rest) if inside else ""):
                self.out.tracebacks[variant.label] = traceback
            return []
        question = scorer.question
        if not all(self.store.has_key(unit.kind, unit.key) for unit in units):
            self.out.problems.append(f"{variant.label} has no scores yet for seed {question.seed}; nothing was started")
            return []
        predictions = scorer.predictions(plans)
        record = predictions[0].record
        if not_finite := record.get("num_scores_not_finite"):
            self.out.problems.append(
                f"{variant.label} gave {not_finite} scores that are not finite; the queries they touch are undefined"
            )
        if record.get("diagnostics"):
            where = {"seed": question.seed, "alpha_attribution": question.alpha_attribution}
            named = {"method": variant.method.name, "label": variant.label}
            self.out.diagnostics.append({**named, **where, **record["diagnostics"]})
        return predictions


# ---- what a run would compute ----


def refuse_if_too_large(method: Method, size: Size) -> str | None:
    """Why this method would run out of memory on a problem of this size, or None."""
    needed, free = method.memory_bytes(size), free_bytes(size.device)
    if needed <= free:
        return None
    return (
        f"{method.name} needs {needed / 2**30:.1f} GiB at once for {size.num_attributed:,} training examples and "
        f"{size.num_queries:,} queries, and {free / 2**30:.1f} GiB are free on {size.device}; take fewer queries "
        "(--queries) or a smaller --alpha-attribution"
    )


def dry_run(experiment: Experiment, execution: Execution | None = None) -> str:
    """What a run would compute, and with `force` or `rescore` what it would do again."""
    execution = execution or Execution()
    session = Session(experiment, execution, control=True)
    store, force = session.store, execution.force
    lines = []
    for seed in experiment.seeds:
        base = checkpoint_unit(session.task, seed, 0, execution.device)
        is_trained = store.has(base.kind, base.config)
        lines.append(f"seed {seed}: base model {_state(is_trained, force, 'to train')}")
        for share in experiment.shares(session.task):
            for plan in session.plans(seed, share):
                units = retrain_units(session.task, plan, execution.device)
                done = sum(store.has_key(unit.kind, unit.key) for unit in units)
                todo = f"{len(units)} to do, of which {done} again" if force and done else f"{len(units) - done} to do"
                lines.append(f"  alpha {plan.alpha:g} of {share:g}: {done} of {len(units)} retrains cached, {todo}")
            for variant in session.active:
                scorers = session.scorers(variant, seed, share) if is_trained else []
                members = [(member, plans) for scorer, plans in scorers for member in scorer.members]
                cached = is_trained and all(member.cached(plans) for member, plans in members)
                which = f" ({variant.settings})" if variant.rows != "both" else ""  # raw and normalised have their own
                lines.append(f"  {variant.label}{which}: {_state(cached, force or execution.rescore, 'to score')}")
    if references := session.reference_units(session.blocks):
        done = sum(store.has_key(unit.kind, unit.key) for unit in references)
        lines.append(f"reference models that methods look at: {done} of {len(references)} trained")
    if further := {unit.key for unit in session.further(session.active)}:
        done = len(store.present(("retrain", key) for key in further))
        lines.append(f"further retrains that methods ask for: {done} of {len(further)} cached")
    lines += [f"  {label}: skipped, {reason}" for label, reason in session.skipped.items()]
    lines += filter(None, [retraining_time(session)[1], *(f"  {problem}" for problem in session.out.problems)])
    return "\n".join([*session.notes, *lines])


def retraining_time(session: Session) -> tuple[float, str]:
    """About how long the retraining takes: by the base model's training where there is one, else by one batch."""
    execution, device = session.execution, choose_device(session.execution.device)
    wanted = [*(unit for units in session.retrains().values() for unit in units), *session.further(session.active)]
    present = set() if execution.force else {key for _, key in session.store.present((u.kind, u.key) for u in wanted)}
    missing = {unit.key: unit.config for unit in wanted if unit.key not in present}
    full = sum(config["alpha"] * config["alpha_attribution"] for config in missing.values())
    is_there, each = _base_training(session)
    at_once = 1
    if execution.jobs.get("cluster") == "local":
        at_once = execution.jobs.get("jobs") or (os.cpu_count() or 1 if device.type == "cpu" else 1)
    if not missing or not each or execution.jobs.get("cluster") == "slurm":
        return 0.0, ""
    seconds = each * (full + (not is_there)) / at_once
    asked = {one.label: len({unit.key for unit in session.further([one])} & missing.keys()) for one in session.active}
    own = "".join(f", {count} of them for {label} alone" for label, count in asked.items() if count)
    words = f"about {duration(seconds)} to retrain {len(missing)} models{own}, {at_once} at once; scoring comes on top"
    return seconds, words


def _base_training(session: Session) -> tuple[bool, float]:
    """Whether the first base model is there, and the seconds of a training on everything, from it or from two steps."""
    task, device = session.task, choose_device(session.execution.device)
    base = checkpoint_unit(task, session.blocks[0][0], 0, session.execution.device)
    if (entry := session.store.read(base.kind, base.config)) is not None:
        return True, entry.record["seconds"]
    few = task.train_data.select(range(min(64, len(task.train_data))))
    try:
        with torch.random.fork_rng(), cpu_threads(1 if device.type == "cpu" else 0):
            model, batch = task.build_model(0).to(device).train(), few.to(device)
            for _ in range(2):
                start = now(device)
                task.example_loss(model, (batch.inputs, batch.targets)).mean().backward()
            steps = len(task.train_data) / len(few) * getattr(task, "epochs", 0)  # 0 of a task that does not say
            return False, (now(device) - start) * steps
    except Exception:  # an estimate is not worth a failure; the training itself will say what is wrong
        return False, 0.0


def _state(cached: bool, again: bool, todo: str) -> str:
    return todo if not cached else f"{todo} again" if again else "cached"


@dataclass
class Result:
    """What a run came to. `problems` are what went wrong; the rows that could be made are there all the same."""

    experiment: Experiment  # what was asked
    task: Task  # as it was built
    variants: list[Variant]  # the methods, each with its options
    out: RunRows  # rows, pairs, ceilings, diagnostics and problems as plain data
    skipped: dict[str, str]  # label -> why the method cannot run here
    seconds: float  # of the whole run
    device: str  # its name
    notes: list[str] = field(default_factory=list)  # options that asked for more than there is, edited methods
    run_id: str = ""  # of what was asked and what came out, so that no two results share one; the record's folder

    def __post_init__(self) -> None:
        self.run_id = run_id_of(self.config(), self.out.rows, self.out.pairs, self.out.ceilings)
        for row in [*self.out.rows, *self.out.pairs]:
            row["run_id"] = self.run_id

    def frame(self) -> pd.DataFrame:
        """A row for every method, seed, alpha and kind of score; the columns are those of lds.csv."""
        return pd.DataFrame(self.out.rows, columns=COLUMNS)

    def pairs(self) -> pd.DataFrame:
        """The paired difference of every two methods on the same subsets and queries."""
        return pd.DataFrame(self.out.pairs, columns=PAIR_COLUMNS)

    @property
    def problems(self) -> list[str]:
        """A line for everything that went wrong."""
        return self.out.problems

    def __str__(self) -> str:
        return self.text()

    def text(self, wide: bool = False) -> str:
        """The tables that the command prints; `wide` has normalised scores and more columns."""
        version = one_line(self.task.versioned_name, 200)
        told = version_told({"task_version": version, "config": {"output": self.experiment.output}})
        return show(self.out, self.task.description, self.task.protocol, told, wide)

    def config(self) -> dict[str, Any]:
        """What decided the numbers."""
        return {
            "task": self.task.config,
            "methods": [variant.describe() for variant in self.variants],
            **{name: value for name, value in self.experiment.to_json().items() if name not in DESCRIBED},
            "alpha_attribution": list(self.experiment.shares(self.task)),
            "replicates": self.experiment.replicates or self.task.default_replicates,
            "versions": {name: version for name, version in versions().items() if name in DISTRIBUTIONS},
        }

    def save(self, out: str | Path, command: str = "") -> Path:
        """Writes run.json, lds.csv and pairs.csv to a folder of the run's own: see `save_record`."""
        folder = Path(out) / self.run_id
        folder.mkdir(parents=True, exist_ok=True)
        if self.out.tracebacks:
            lines = [f"{label} failed\n{text}\n" for label, text in self.out.tracebacks.items()]
            write_whole(folder / "failures.log", "\n".join(lines))
        record = {
            "run_id": self.run_id,
            "command": command,
            "description": one_line(self.task.description, 2000),
            "task_version": one_line(self.task.versioned_name, 200),
            "experiment": self.experiment.to_json(),
            "config": self.config(),
            **provenance(self.device),
            "seconds": round(self.seconds, 2),
            **{name: getattr(self.out, name) for name in ("rows", "ceilings", "pairs", "diagnostics")},
            "skipped": self.skipped,
            "problems": self.out.problems,
        }
        tables = {"pairs.csv": self.pairs(), "lds.csv": self.frame()}
        return save_record(folder / "run.json", record, RunRecord, tables)
