"""An Experiment is a value: what is asked, apart from how it runs and from what comes back.

    from bench import Experiment, run
    result = run(Experiment(task="digits", alpha=(0.1,), methods=("ekfac", "ekfac@damping=1e-4")))
    print(result)                  # the tables of `python -m bench.lds`
    result.frame()                 # a pandas DataFrame, a row a method, seed and alpha

It stands in every record, and is read from a file: TOML with the same names, or a `run.json`, which is the same run
again, settings included. `run` retrains on random subsets, scores with every method and measures LDS; everything
finished is kept, so an interrupted run goes on where it was.
"""

import hashlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pandas as pd

from bench.arguments import DEFAULT_METHODS, SPLITS
from bench.ground_truth import GroundTruth, assemble, make_units, obtain
from bench.methods import SETTINGS, Variant, build_variants, with_models
from bench.metrics import MINIMUM_SUBSETS
from bench.problem import LEARNT_FROM, AttributionProblem, further_units, most_of_each
from bench.records import DISTRIBUTIONS, RUN_AGAIN, provenance, timestamp, versions, without_nan, write_json
from bench.rows import COLUMNS, PAIR_COLUMNS, RunRows, add_rows
from bench.scoring import ONCE, Ensemble, Prediction, Scorer, clear_worker_context
from bench.tables import show
from retrain.errors import UsageError
from retrain.jobs import Report, Unit, run_units
from retrain.progress import watching
from retrain.safe_files import write_whole
from retrain.seeds import STARTS
from retrain.store import Store, canonical_json, default_cache
from retrain.subsets import SCHEMES, STREAMS
from retrain.task import Task
from retrain.tasks import load_task
from retrain.units import Plan, checkpoint_unit, choose_device, describe_device, retrain_units
from retrain.work import told

logger = logging.getLogger("tda-bench")
DESCRIBED = ("task", "methods", "checkpoints")  # of an experiment: what a record's config describes otherwise


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is asked. Every list makes one experiment more: seeds x shares x alphas, each with every method."""

    task: str = "digits"  # a file of retrain/tasks, a file of yours, or package.module:Class
    task_options: Mapping[str, Any] = field(default_factory=dict)
    # As bench/methods.py spells them, or as a record describes them (a mapping: name, label, options).
    methods: Sequence[str | Mapping[str, Any]] = DEFAULT_METHODS
    settings: str = "auto"  # tuned, library, paper or default; auto: tuned where the task has been tuned
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # method -> option -> value, of all variants
    alpha: Sequence[float] = (0.1,)  # alpha_retrain: share of the attributed examples that each subset keeps
    alpha_attribution: Sequence[float] = ()  # share of the training set that is attributed; empty: the task's
    seeds: Sequence[int] = (1,)
    subsets: int = 100
    scheme: str = "fixed"  # or "bernoulli"
    stream: str = "report"  # which subsets: those that are reported, or those that settings are chosen on
    replicates: int | None = None  # retrains per subset, for the noise ceiling; None: the task's
    replicated_subsets: int | None = None  # only the first so many are replicated
    initialisation: str = "shared"  # or "fresh", "replayed": see retrain/seeds.py
    query_split: str = "report"
    queries: int | None = None  # only the first so many of the split
    checkpoints: Sequence[int] = (1,)  # base models that each method's scores are averaged over, a row a number

    def __post_init__(self) -> None:
        for name in ("methods", "alpha", "alpha_attribution", "seeds", "checkpoints"):
            given = getattr(self, name)
            values = (given,) if isinstance(given, str | int | float | Mapping) else tuple(given)
            object.__setattr__(self, name, tuple(dict.fromkeys(values)) if name != "methods" else values)
        for name, choices in (
            ("settings", SETTINGS), ("scheme", SCHEMES), ("stream", tuple(STREAMS)), ("query_split", SPLITS),
            ("initialisation", STARTS),
        ):  # fmt: skip
            if getattr(self, name) not in choices:
                raise UsageError(f'{name} is "{getattr(self, name)}"; available: {", ".join(choices)}')
        for name, highest in (("alpha", _BELOW_ONE), ("alpha_attribution", 1.0)):
            for value in getattr(self, name):
                _check(name, value, (int, float), _ABOVE_ZERO, highest, "a fraction")
        for name, least in (("seeds", 0), ("checkpoints", 1)):
            for value in getattr(self, name):
                _check(name, value, int, least, 10**18 - 1, f"whole numbers from {least} on, of at most 18 digits")
        for name, least in (
            ("subsets", MINIMUM_SUBSETS), ("replicates", 1), ("replicated_subsets", MINIMUM_SUBSETS), ("queries", 1),
        ):  # fmt: skip
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), int, least, math.inf, f"at least {least}")
        for name, tables in (
            ("task_options", [self.task_options]),
            ("options", [self.options, *_values(self.options)]),
        ):
            if wrong := [one for one in tables if not isinstance(one, Mapping)]:
                raise UsageError(f"{name} holds {repr(wrong[0])[:40]}; expected a table of options")
        if not self.methods or not self.alpha or not self.seeds:
            raise UsageError("an experiment needs at least one method, one alpha and one seed")

    def to_json(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def build_task(self) -> Task:
        return load_task(self.task, **self.task_options)


def _values(table: Any) -> list[Any]:
    return list(table.values()) if isinstance(table, Mapping) else []


_ABOVE_ZERO, _BELOW_ONE = math.ulp(0.0), 1 - 2**-53


def _check(name: str, value: Any, kind: Any, low: float, high: float, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise UsageError(f"{name} is {repr(value)[:40]}; expected a number: {expected}")
    if not low <= value <= high:
        raise UsageError(f"{name} is {str(value)[:40]}; expected {expected}")


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How it runs: where, on what, and what is done again. None of it changes a number."""

    device: str = "auto"
    cache: str = field(default_factory=default_cache)
    jobs: Mapping[str, Any] = field(default_factory=dict)  # cluster, jobs, gpus_per_job, slurm, timeout_min, collect
    keep_scores: str = "auto"  # cache score matrices: always, never, or up to 1 GiB
    force: bool = False  # retrain and score again, whatever is cached
    rescore: bool = False  # score again, and keep the retrains
    progress: bool = True

    def scoring_jobs(self) -> dict[str, Any]:
        """Methods run one at a time on a CPU unless --jobs says otherwise: beside each other they would slow down."""
        jobs = dict(self.jobs)
        if jobs.get("cluster") == "local" and jobs.get("jobs") is None and choose_device(self.device).type == "cpu":
            jobs["jobs"] = 1
        return jobs


# ---- what comes back ----


@dataclass
class Result:
    """What a run came to. `problems` are what went wrong; the rows that could be made are there all the same."""

    experiment: Experiment
    task: Task
    variants: list[Variant]
    out: RunRows
    skipped: dict[str, str]
    seconds: float
    device: str
    notes: list[str] = field(default_factory=list)
    run_id: str = ""

    def frame(self) -> pd.DataFrame:
        """A row for every method, seed, alpha and kind of score; the columns are those of lds.csv."""
        return pd.DataFrame(self.out.rows, columns=COLUMNS)

    def pairs(self) -> pd.DataFrame:
        """The paired difference of every two methods on the same subsets and queries."""
        return pd.DataFrame(self.out.pairs, columns=PAIR_COLUMNS)

    @property
    def problems(self) -> list[str]:
        return self.out.problems

    def __str__(self) -> str:
        return show(self.out, self.task.description, self.task.protocol)

    def text(self, wide: bool = False) -> str:
        return show(self.out, self.task.description, self.task.protocol, wide)

    def config(self) -> dict[str, Any]:
        """What decided the numbers."""
        return {
            "task": self.task.config,
            "methods": [variant.describe() for variant in self.variants],
            **{name: value for name, value in self.experiment.to_json().items() if name not in DESCRIBED},
            "alpha_attribution": list(shares_of(self.experiment, self.task)),
            "replicates": self.experiment.replicates or self.task.default_replicates,
            "versions": {name: version for name, version in versions().items() if name in DISTRIBUTIONS},
        }

    def name_it(self) -> None:
        """Its id: of what was asked, by which code, and of what came out, so that no two results share one."""
        found = without_nan([self.config(), self.out.rows, self.out.pairs, self.out.ceilings])
        self.run_id = hashlib.sha256(canonical_json(found, "result").encode()).hexdigest()[:12]
        for row in [*self.out.rows, *self.out.pairs]:
            row["run_id"] = self.run_id

    def save(self, out: str | Path, command: str = "") -> Path:
        """Writes run.json, lds.csv and pairs.csv to a folder of the run's own; a record that is there stays."""
        folder = Path(out) / self.run_id
        path = folder / "run.json"
        folder.mkdir(parents=True, exist_ok=True)
        if self.out.tracebacks:
            told = [f"{label} failed\n{text}\n" for label, text in self.out.tracebacks.items()]
            write_whole(folder / "failures.log", "\n".join(told))
        if path.exists():
            write_whole(folder / RUN_AGAIN, timestamp())  # what was run last counts where two results contradict
            return path
        if self.out.pairs:
            write_whole(folder / "pairs.csv", self.pairs().to_csv(index=False))
        write_whole(folder / "lds.csv", self.frame().to_csv(index=False))
        record = {
            "run_id": self.run_id,
            "command": command,
            "description": self.task.description,
            "experiment": self.experiment.to_json(),
            "config": self.config(),
            **provenance(self.device),
            "seconds": round(self.seconds, 2),
            **{name: getattr(self.out, name) for name in ("rows", "ceilings", "pairs", "diagnostics")},
            "skipped": self.skipped,
            "problems": self.out.problems,
        }
        write_json(path, record)  # last: where it is, the others are
        return path


# ---- running ----


def shares_of(experiment: Experiment, task: Task) -> Sequence[float]:
    return experiment.alpha_attribution or (task.default_alpha_attribution,)


def plans_of(experiment: Experiment, task: Task, seed: int, alpha_attribution: float) -> list[Plan]:
    """One an alpha."""
    return [
        Plan(
            alpha=alpha,
            alpha_attribution=alpha_attribution,
            seed=seed,
            num_subsets=experiment.subsets,
            replicates=experiment.replicates or task.default_replicates,
            scheme=experiment.scheme,  # type: ignore[arg-type]
            replicated_subsets=experiment.replicated_subsets,
            initialisation=experiment.initialisation,  # type: ignore[arg-type]
            stream=experiment.stream,  # type: ignore[arg-type]
        )
        for alpha in experiment.alpha
    ]


class Session:
    """An experiment with its task, methods and store at hand: what `run` and the dry run have in common."""

    def __init__(self, experiment: Experiment, execution: Execution):
        self.experiment, self.execution = experiment, execution
        self.task = experiment.build_task()
        asked = build_variants(experiment.methods, self.task, experiment.options, experiment.settings)
        self.variants = with_models(asked, experiment.checkpoints)
        self.store = Store(execution.cache)
        self.out, self.skipped, self.tracebacks = RunRows(), dict[str, str](), dict[str, str]()
        self.blocks = [(seed, share) for seed in experiment.seeds for share in shares_of(experiment, self.task)]
        self.active = [variant for variant in self.variants if not self._passed_over(variant)]
        self.notes = [*self._what_is_too_many(), *self._edited_since()]

    def _passed_over(self, variant: Variant) -> bool:
        """A method that cannot run here, or would not fit in memory, is named before anything is computed."""
        from baselines.support.memory import refuse_if_too_large

        if reason := variant.method.skip(self.task):
            self.skipped[variant.label] = reason
            return True
        for seed, share in self.blocks[:1]:
            if reason := refuse_if_too_large(variant.method, self.question(seed, share).size(self.execution.device)):
                self.out.problems.append(f"{variant.label} was not started: {reason}")
                return True
        return False

    def say_who_is_missing(self) -> None:
        """Who will not run is said before the hours of retraining, and not only below the table."""
        reasons = [*self.out.problems, *(f"{label} is skipped: {reason}" for label, reason in self.skipped.items())]
        if reasons and not self.active:
            raise UsageError("no method is left to run: " + "; ".join(reasons))
        for problem in self.out.problems:
            logger.warning("%s", problem)

    def _what_is_too_many(self) -> list[str]:
        """One line for each option that asks for more than there is, of which all is taken."""
        asked, notes = self.experiment, []
        count = len(self.task.query_indices(asked.query_split))  # type: ignore[arg-type]
        if asked.queries is not None and asked.queries > count:
            notes.append(f"--queries {asked.queries}: there are {count} ({asked.query_split}), and all are used")
        if asked.replicated_subsets is not None and asked.replicated_subsets > asked.subsets:
            replicated = f"--replicated-subsets {asked.replicated_subsets}"
            notes.append(f"{replicated}: there are {asked.subsets} subsets, and all are replicated")
        return notes

    def _edited_since(self) -> list[str]:
        """One line for each method of a record whose code is not what the record had."""
        described = {one["label"]: one for one in self.experiment.methods if isinstance(one, Mapping)}
        return [
            f"{variant.label}: its code was edited since that record, so its scores may differ"
            for variant in self.active
            if described.get(variant.label, {}).get("source") not in (None, variant.method.source)
        ]

    def device(self) -> str:
        """The device's name."""
        return describe_device(choose_device(self.execution.device))

    def plans(self, seed: int, share: float) -> list[Plan]:
        return plans_of(self.experiment, self.task, seed, share)

    def question(self, seed: int, share: float) -> AttributionProblem:
        return AttributionProblem(
            task=self.task,
            seed=seed,
            alpha_attribution=share,
            split=self.experiment.query_split,  # type: ignore[arg-type]
            max_queries=self.experiment.queries,
        )

    def scorer(self, variant: Variant, seed: int, share: float) -> Scorer:
        """Of the first alpha, where a method's scores depend on it, and of the base model."""
        return Ensemble.first(self.scorers(variant, seed, share)[0][0])

    def scorers(self, variant: Variant, seed: int, share: float) -> list[tuple[Scorer | Ensemble, list[Plan]]]:
        """With the plans that each answers for: one for all, or one an alpha for a method that retrains by itself."""
        question, found = self.question(seed, share), dict[str, tuple[Scorer | Ensemble, list[Plan]]]()
        for plan in self.plans(seed, share):
            asked = question.of(variant.method, plan)
            made = Scorer(asked, variant.method, self.store, self.execution.device, self.execution.keep_scores)
            found.setdefault(str(asked.learns_from), (Ensemble.of(made, variant.models), []))[1].append(plan)
        return list(found.values())

    def base_units(self, seeds: Sequence[int]) -> list[Unit]:
        numbers = range(max(variant.models for variant in self.variants))
        return [checkpoint_unit(self.task, seed, number, self.execution.device) for seed in seeds for number in numbers]

    def retrains(self) -> dict[tuple[int, float, float], list[Unit]]:
        """(seed, share, alpha) -> units."""
        return {
            (seed, share, plan.alpha): retrain_units(self.task, plan, self.execution.device)
            for seed, share in self.blocks
            for plan in self.plans(seed, share)
        }

    def further(self, variants: Sequence[Variant]) -> list[Unit]:
        """What methods retrain by themselves; those who ask for the same subsets share them."""
        asked = [
            scorer.question
            for seed, share in self.blocks
            for variant in variants
            for scorer, _ in self.scorers(variant, seed, share)
        ]
        return [unit for question in most_of_each(asked) for unit in further_units(question, self.execution.device)]

    # ---- the three steps ----

    def retrain(self) -> dict[tuple[int, float, float], GroundTruth]:
        """The ground truth of every plan; all of it is one campaign, so that no worker waits between seeds."""
        by_plan = self.retrains()
        units = [*self.base_units(self.experiment.seeds), *(unit for some in by_plan.values() for unit in some)]
        jobs = {"name": f"{self.task.name} ground truth", "progress": self.execution.progress, **self.execution.jobs}
        entries = obtain(units, self.store, force=self.execution.force, **jobs)
        if further := self.further(self.active):
            learnt = {**jobs, "name": f"{self.task.name} further retrains"}
            make_units(further, self.store, force=self.execution.force, **learnt)
        found = {}
        for seed, share in self.blocks:
            for plan in self.plans(seed, share):
                keys = [self.store.key(unit.kind, unit.config) for unit in by_plan[seed, share, plan.alpha]]
                truth = assemble(self.task, plan, [entries[key] for key in keys if key in entries])
                if missing := plan.num_subsets - len(truth.subsets):
                    self.out.problems.append(
                        f"{missing} of {plan.num_subsets} subsets are missing at alpha {plan.alpha:g}, seed {seed}; "
                        "the same command without --collect makes them"
                    )
                found[seed, share, plan.alpha] = truth
        return found

    def score(self) -> dict[tuple[int, float], list[tuple[Variant, list[Prediction]]]]:
        """Every variant's predictions, one a plan. One that fails is reported, and the others go on."""
        redo = self.execution.force or self.execution.rescore
        waiting: list[tuple[Variant, list[tuple[Scorer | Ensemble, list[Plan], list[Unit]]]]] = []
        for seed, share in self.blocks:
            if not all(self.store.has(unit.kind, unit.config) for unit in self.base_units([seed])):  # only --collect
                self.out.problems.append(f"seed {seed} has no base model yet; nothing was scored")
                continue
            for variant in self.active:
                scorers = self.scorers(variant, seed, share)
                for scorer, plans in scorers if redo else []:
                    scorer.forget(plans)
                waiting.append((variant, [(scorer, plans, scorer.missing(plans)) for scorer, plans in scorers]))
        todo = [(scorer, units) for _, some in waiting for scorer, _, units in some if units]
        failed = self._make([scorer for scorer, _ in todo], [unit for _, units in todo for unit in units])
        found: dict[tuple[int, float], list[tuple[Variant, list[Prediction]]]] = {block: [] for block in self.blocks}
        for variant, some in waiting:
            made = [
                prediction
                for scorer, plans, units in some
                for prediction in self._made(variant, scorer, plans, units, failed)
            ]
            question = some[0][0].question
            if len(made) == len(self.experiment.alpha):
                found[question.seed, question.alpha_attribution].append((variant, made))
        return found

    def _made(
        self, variant: Variant, scorer: Any, plans: list[Plan], units: list[Unit], failed: Mapping[str, str]
    ) -> list[Prediction]:
        """One a plan; none, and a word about it, where something is missing."""
        keys = {self.store.key(unit.kind, unit.config): unit.kind for unit in [*units, *scorer.part_units()]}
        if key := next((key for key in keys if key in failed), None):
            reason = "; ".join(map(str.strip, failed[key].splitlines()))
            self.out.problems.append(f"{variant.label} failed: {reason}")
            if told := self.tracebacks.get(key):
                self.out.tracebacks[variant.label] = told
            return []
        if not all(self.store.has(unit.kind, unit.config) for unit in units):
            self.out.problems.append(
                f"{variant.label} has no scores yet for seed {scorer.question.seed}; nothing was started"
            )
            return []
        predictions = scorer.predictions(plans)
        self._note(variant, scorer, predictions[0])
        return predictions

    def _make(self, scorers: Sequence[Any], units: list[Unit]) -> dict[str, str]:
        """Key -> reason of what failed. Where several work at once, parts first: they can be made anywhere."""
        jobs: dict[str, Any] = {**ONCE, **self.execution.scoring_jobs()}
        name, failed = f"{self.task.name} scores", dict[str, str]()
        cluster = jobs.get("cluster", "inline")
        try:
            if cluster == "inline":
                return self._failed(run_units(units, self.store, name=name, progress=self.execution.progress, **jobs))
            parts = [unit for scorer in scorers for unit in scorer.part_units()] if jobs.get("jobs") != 1 else []
            for phase, some in ((f"{name}, parts", parts), (name, units)):
                if some:
                    failed |= self._run_elsewhere(phase, some, jobs)
            return failed
        finally:
            clear_worker_context()

    def _run_elsewhere(self, name: str, units: list[Unit], jobs: dict[str, Any]) -> dict[str, str]:
        keys = [(unit.kind, self.store.key(unit.kind, unit.config)) for unit in units]
        if not self.execution.progress:
            return self._failed(run_units(units, self.store, name=name, **jobs))
        with watching(name, lambda: "; ".join(filter(None, (told(self.store, *key) for key in keys)))) as progress:
            return self._failed(run_units(units, self.store, name=name, progress=progress, **jobs))

    def _failed(self, report: Report) -> dict[str, str]:
        self.tracebacks |= report.tracebacks
        return report.failed

    def _note(self, variant: Variant, scorer: Any, prediction: Prediction) -> None:
        if not_finite := prediction.record.get("num_scores_not_finite"):
            self.out.problems.append(
                f"{variant.label} gave {not_finite} scores that are not finite; the queries they touch are undefined"
            )
        if prediction.record.get("diagnostics"):
            where = {"seed": scorer.question.seed, "alpha_attribution": scorer.question.alpha_attribution}
            named = {"method": variant.method.name, "label": variant.label}
            self.out.diagnostics.append({**named, **where, **prediction.record["diagnostics"]})

    def measure(self, truths: Mapping[tuple[int, float, float], GroundTruth], predictions: Mapping[Any, Any]) -> None:
        for seed, share in self.blocks:
            queries = self.question(seed, share).query_indices()
            for position, plan in enumerate(self.plans(seed, share)):
                truth = truths[seed, share, plan.alpha]
                if len(truth.subsets) >= MINIMUM_SUBSETS:
                    here = [(variant, found[position]) for variant, found in predictions[seed, share]]
                    add_rows(self.out, self.task, plan, truth, queries, here, self._further_truth(seed, share, plan))

    def _further_truth(self, seed: int, share: float, plan: Plan) -> GroundTruth | None:
        """What methods of this run retrained on at the plan's alpha, as far as it is there."""
        asked = [self.question(seed, share).of(variant.method, plan).learns_from for variant in self.active]
        alike = [one for one in asked if one is not None and one.alpha == plan.alpha]
        if not alike:
            return None
        most = max(alike, key=lambda one: one.num_subsets)
        units = retrain_units(self.task, most, self.execution.device)
        found = [entry for unit in units if (entry := LEARNT_FROM.read(self.store, unit))]
        return assemble(self.task, most, found) if found else None


def run(experiment: Experiment, execution: Execution | None = None) -> Result:
    """Makes what is missing, and measures."""
    execution = execution or Execution()
    started = time.perf_counter()
    session = Session(experiment, execution)
    session.say_who_is_missing()
    truths = session.retrain()
    session.measure(truths, session.score())
    seconds, where = time.perf_counter() - started, session.device()
    told = (session.variants, session.out, session.skipped)
    result = Result(experiment, session.task, *told, seconds, where, session.notes)
    result.name_it()
    return result
