"""The gate: has an attribution method become worse, or dearer, than its recorded baseline? Exit 1 if so.

    python -m bench.regress                                          # the suite's own methods, about a minute
    python -m bench.regress --methods ekfac=ekfac@damping=1e-4                             # a variant of one
    python -m bench.regress --methods mypkg.mymodule:MyMethod --baseline gate --update     # record a method of yours
    python -m bench.regress --methods mypkg.mymodule:MyMethod --baseline gate              # and gate it from then on

A baseline holds, for an embedded task, the base model's weights and the retrained losses (so the gate never retrains)
and, for each method, the scores of several seeds; the suite's own is in the package. A run scores every method anew,
with a seed of its own, at the same weights, and makes these checks:

- `finite`: no score is NaN or infinite.
- `zeros`: the share of scores that are exactly 0 is at most ZERO_MARGIN above the baseline's. A zero is what a lost
  example looks like.
- `agreement`: correlation with the baseline's scores averaged over its seeds, mean over queries. LDS forgives a noisy
  method much; this does not: one minus the agreement is the method's own noise, which half the draws nearly double; a
  flipped sign makes it negative, shuffled indices make it 0. A run that looks noisier than the baseline's by SUSPICION
  spreads, but not beyond all chance, is repeated MORE_RUNS times, and the mean of all decides.
- `draws`: where a method reports how many posterior draws it made, at least DRAWS_SHARE of the baseline's.
- `lds`: the run's LDS, with what chance may have cost it (half of the paired 95 % interval of new - baseline), at least
  the baseline's mean LDS less a margin, which is LDS_MARGIN or what seeds alone explain, whichever is larger. On both
  sides an undefined query counts as 0.
- `lds-normalised`: the same for train-normalised scores, by the spread between seeds.
- `cost`: processor seconds of fit and score (children counted, waiting not), at most COST_RATIO times what the baseline
  would take here today, and at least COST_SLACK seconds beyond it. What it would take is recorded in units of a kernel,
  the task's own forward and backward pass, which runs before and after the method in the same thread. On a miss the
  method is timed up to COST_REPEATS times more, and the cheapest counts. A miss where the kernel had to wait is a
  warning: the machine was busy. `--cost warn` makes every miss a warning.

What seeds explain is Student's prediction limit for one more value, at TAIL probability a check. Changed versions are a
warning, not a failure. `--junit FILE` writes JUnit XML. The limits are constants of this file.
"""

import argparse
import copy
import json
import math
import re
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch

import bench.metrics as metrics
from baselines.method import Attribution, Method, Problem, checked_answer
from bench.arguments import Parser, at_least, run_cli
from bench.ground_truth import base_model, ground_truth
from bench.measure import measure
from bench.methods import build_variants, parse_method_spec
from bench.metrics.intervals import t_quantile
from bench.prediction import subset_sums
from bench.records import provenance, read_pair, try_write, versions, write_pair
from bench.scoring import AttributionProblem, as_tensors
from bench.tables import number, table
from retrain.errors import UsageError, error_line
from retrain.jobs.tracker import blamed, shortened
from retrain.progress import bar
from retrain.store import Store, canonical_json, default_cache
from retrain.subsets import masks
from retrain.task import Task
from retrain.tasks import load_task
from retrain.train import one_thread
from retrain.units import Plan

BASELINE_FORMAT = "tda-bench gate 2"
PACKAGED = Path(__file__).resolve().parent / "baseline"
NUM_SUBSETS, NUM_REPLICATES, ALPHA = 100, 2, 0.1
MAX_QUERIES = 200  # of the task's baseline
REFERENCE_QUERIES, REFERENCE_EXAMPLES = 48, 1000  # of each method's kept scores
FIRST_RECORDED_SEED = 1000  # the gate's own runs use others

TAIL = 2e-4  # chance that an unchanged method misses one check; about forty checks a run make 1 % a run
AGREEMENT_FLOOR = 0.01  # what another processor or library version may move, even for a method without randomness
SUSPICION, MORE_RUNS = 2.0, 2
DRAWS_SHARE = 0.9
LDS_MARGIN = 0.02  # a smaller drop is no reason to stop anyone
ZERO_MARGIN = 0.01
COST_RATIO = 2.0
COST_REPEATS = 3
COST_SLACK = 0.3  # processor seconds beyond the baseline that stop nobody, however short the method
QUIET_TIMINGS = 3  # of a baseline, to be its measure by themselves
KERNEL_BATCH, KERNEL_RUNS = 200, 5  # examples of the kernel; so often before the method, and as often after
WAITING_RATIO = 1.15  # wall over processor seconds of the kernel, which never waits by itself

GATED_TASKS = ("digits", "tinylm")
# BIF with numbers of its own: a gate wants the same draws each time, not the pilot's choice.
GATED_METHODS = ("bif=bif@gamma=1e4,n_beta=1000,step_size=1e-4,draws=100", "ekfac", "kfac", "trak", "gradsim")
BASELINE_SEEDS = 12  # runs of --update, which show the spread
PROGRAM = "python -m bench.regress"
AGAIN = "; record it again with --update"


# ---- baselines as files ----


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


def read_task_baseline(folder: Path, task: Task) -> TaskBaseline | None:
    if not (folder / f"{task.name}.json").exists():
        return None
    record, arrays = read_pair(folder / task.name, BASELINE_FORMAT, advice=AGAIN)
    plan = record["plan"]
    kept = masks(plan["seed"], plan["num_subsets"], plan["alpha"], len(task.train_data))
    weights = {name.removeprefix("weights."): value for name, value in arrays.items() if name.startswith("weights.")}
    return TaskBaseline(record, arrays["losses"], kept, weights, arrays["queries"])


def known_task_baseline(folder: Path, task: Task) -> TaskBaseline | None:
    """Recorded in the folder, or else in this package: then it is copied, and nothing is retrained."""
    for place in (folder, PACKAGED):
        try:
            found = read_task_baseline(place, task)
        except UsageError:  # of an older gate: recorded again
            continue
        # As for gating: the code that retrained them may be older, and nobody retrains 200 models for that.
        known, now = (found.record["task"] if found else {}, json.loads(canonical_json(task.config)))
        if found is not None and known | {"source": ""} == now | {"source": ""}:
            folder.mkdir(parents=True, exist_ok=True)
            for ending in (".safetensors", ".json") if place != folder else ():
                shutil.copyfile(place / f"{task.name}{ending}", folder / f"{task.name}{ending}")
            return found
    return None


def record_task(folder: Path, task: Task, store: Store) -> TaskBaseline:
    """Retrains where the store does not have it, and records the result."""
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
    }
    arrays = {"losses": losses.mean(axis=0).astype(np.float32), "queries": queries.astype(np.int64)}
    arrays |= {f"weights.{name}": np.asarray(value) for name, value in entry.arrays.items()}
    write_pair(folder / task.name, BASELINE_FORMAT, arrays, record | provenance())
    return TaskBaseline(record, arrays["losses"], found.masks, dict(entry.arrays), queries)


def has_method_baseline(folder: Path, task: str, label: str) -> bool:
    return (folder / f"{baseline_name(task, label)}.json").exists()


def read_method_baseline(folder: Path, task: str, label: str) -> MethodBaseline:
    if not has_method_baseline(folder, task, label):
        raise UsageError(f"no baseline of {label} on {task} in {folder}; write it with --update")
    record, arrays = read_pair(folder / baseline_name(task, label), BASELINE_FORMAT, advice=AGAIN)
    return MethodBaseline(record, arrays["scores"].astype(np.float32), arrays["prediction"])


# ---- one run of a method ----


@dataclass(frozen=True)
class Timing:
    """Processor seconds of one run of one method, and of one run of the kernel beside it."""

    cpu_seconds: float
    kernel: float
    busy: str = ""  # why the machine counts as busy; empty where it was quiet

    def as_recorded(self) -> dict[str, Any]:
        return {"cpu_seconds": self.cpu_seconds, "kernel_cpu_seconds": {"training": self.kernel}, "busy": self.busy}


@dataclass
class Sample:
    """What one run of a method came to."""

    prediction: np.ndarray  # (subsets, queries)
    rows: np.ndarray  # (reference queries, reference examples)
    lds: float
    lds_normalised: float | None
    zeros: float
    num_not_finite: int
    timing: Timing
    diagnostics: dict[str, Any] = field(default_factory=dict)


def processor_seconds() -> float:
    """Of this process and its children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class GateRunner:
    """A task at its recorded weights, ready to run methods on one thread, so that the number of cores is no matter."""

    def __init__(self, task: Task, recorded: TaskBaseline):
        if task.config["data"] != recorded.record["task"]["data"]:
            raise UsageError(
                f"the data of task {task.name} are not those of the baseline; record it again with --update, or leave "
                "it out with --task"
            )
        self.task, self.recorded = task, recorded
        self.device = torch.device("cpu")
        self.model = task.build_model(0)
        try:
            self.model.load_state_dict(as_tensors(recorded.weights))
        except RuntimeError:
            raise UsageError(
                f"the recorded weights do not fit the model of task {task.name}, which has changed; "
                "record its baseline again with --update"
            ) from None
        self.model.eval()
        n, q = len(task.train_data), len(recorded.queries)
        self.reference_queries, self.reference_examples = _evenly(q, REFERENCE_QUERIES), _evenly(n, REFERENCE_EXAMPLES)
        examples = task.train_data.select(range(min(KERNEL_BATCH, n)))
        self.batch, self.kernel_model = (examples.inputs, examples.targets), copy.deepcopy(self.model)

    def kernel_runs(self) -> list[tuple[float, float]]:
        """Wall and processor seconds of each; the first pays for set-up and does not count."""
        found = []
        parameters = [p for p in self.kernel_model.parameters() if p.requires_grad]
        for _ in range(KERNEL_RUNS + 1):
            start, cpu = time.perf_counter(), processor_seconds()
            losses = self.task.example_loss(self.kernel_model, self.batch)
            torch.autograd.grad(losses.mean(), parameters, allow_unused=True)
            found.append((time.perf_counter() - start, processor_seconds() - cpu))
        return found[1:]

    def attribute(self, method: Method, seed: int) -> tuple[Attribution, Timing]:
        spent = 0.0

        def timed(work: Callable[..., Any], *arguments: Any) -> Any:
            nonlocal spent
            start = processor_seconds()
            try:
                return work(*arguments)
            finally:
                spent += processor_seconds() - start

        stages: Any = SimpleNamespace(fit=partial(timed, method.fit), score=partial(timed, method.score))
        with tempfile.TemporaryDirectory(prefix="tda-bench-gate-") as scratch, one_thread(self.device):
            torch.set_num_threads(self.task.cpu_threads or 1)  # the kernel gets as many as the method
            problem = Problem(
                task=self.task, model=self.model, train=self.task.train_data,
                attributed_indices=np.arange(len(self.task.train_data)),
                queries=self.task.query_data.select(self.recorded.queries), seed=seed, device=self.device,
                scratch=Path(scratch),
            )  # fmt: skip
            before = self.kernel_runs()
            answer, _ = measure(stages, problem)
            runs = np.array([*before, *self.kernel_runs()])
        answer = checked_answer(answer, method, len(problem.queries), len(problem.attributed_indices))
        waited = float(runs[:, 0].sum() / runs[:, 1].sum())
        busy = f"the calibration took {waited:.2f} times its processor time" if waited > WAITING_RATIO else ""
        return answer, Timing(spent, float(np.median(runs[:, 1])), busy)

    def sample(self, method: Method, seed: int) -> Sample:
        attribution, timing = self.attribute(method, seed)
        scores, scaled, losses = attribution.scores.numpy(), attribution.normalised(), self.recorded.losses
        prediction = subset_sums(self.recorded.masks, scores)
        normalised = None if scaled is None else mean_lds(losses, subset_sums(self.recorded.masks, scaled.numpy()))
        return Sample(
            prediction=prediction,
            rows=scores[np.ix_(self.reference_queries, self.reference_examples)],
            lds=mean_lds(losses, prediction),
            lds_normalised=normalised,
            zeros=float((scores == 0).mean()),
            num_not_finite=int((~np.isfinite(scores)).sum()),
            timing=timing,
            diagnostics={k: v for k, v in attribution.diagnostics.items() if isinstance(v, int | float | str)},
        )


def _evenly(count: int, at_most: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(count, at_most)).round().astype(int))


def mean_lds(truth: np.ndarray, prediction: np.ndarray) -> float:
    """An undefined query counts as 0: a method cannot gain by having no opinion."""
    return float(np.nan_to_num(metrics.spearman_per_column(truth, prediction)).mean())


def standardised(rows: np.ndarray) -> np.ndarray:
    centred = rows - rows.mean(axis=1, keepdims=True)
    spread = centred.std(axis=1, keepdims=True)
    return centred / np.where(spread > 0, spread, 1)


def agreement(rows: np.ndarray, reference: np.ndarray) -> float:
    """Mean over queries of the correlation across training examples; both (queries, examples)."""
    return float((standardised(rows) * standardised(reference)).mean())


def noise_level(agreements: Sequence[float]) -> np.ndarray:
    """The logarithm of one minus the agreement: twice the noise is as far from once at any level of it."""
    return np.log(np.maximum(1 - np.asarray(agreements, dtype=float), 1e-4))


def record_method(runner: GateRunner, method: Method, num_seeds: int) -> MethodBaseline:
    """Runs the method with several seeds."""
    seeds = range(FIRST_RECORDED_SEED, FIRST_RECORDED_SEED + num_seeds)
    shown = bar(seeds, desc=f"{runner.task.name} {method.name}", unit="seed", leave=False)
    samples = [runner.sample(method, seed) for seed in shown]
    if bad := sum(sample.num_not_finite for sample in samples):
        raise UsageError(f"{method.name} gave {bad} scores that are not finite; a baseline needs finite ones")
    rows = [standardised(sample.rows) for sample in samples]
    total = np.sum(rows, axis=0)
    values: dict[str, list[Any]] = {
        # Each seed against the mean of the others, as a later run is against the mean of all.
        "agreement": [agreement(row, total - row) for row in rows],
        "lds": [sample.lds for sample in samples],
        "lds_normalised": [sample.lds_normalised for sample in samples if sample.lds_normalised is not None],
        "zeros": [sample.zeros for sample in samples],
        "timing": [sample.timing.as_recorded() for sample in samples],
    }
    middle = int(np.argsort(values["lds"])[len(samples) // 2])
    prediction = samples[middle].prediction.astype(np.float32)
    record = {
        "method": json.loads(canonical_json(method.config)),
        "task": runner.task.name,
        "seeds": list(seeds),
        "prediction_seed": seeds[middle],
        "values": values,
        "per_query_lds": metrics.spearman_per_column(runner.recorded.losses, prediction).round(4).tolist(),
        "diagnostics": samples[middle].diagnostics,
        **provenance(),
    }
    return MethodBaseline(record, (total / len(rows)).astype(np.float16), prediction)


# ---- checks ----


@dataclass(frozen=True)
class Check:
    """A value of this run and the limit that it is held against, both of one quantity."""

    name: str
    value: float
    limit: float
    passed: bool
    note: str
    warning: str = ""  # a miss that is no failure, and why

    @property
    def failure(self) -> str:
        """What is expected; of a run that raised, what it raised. Empty where it passed."""
        if self.passed or self.name == "run":
            return "" if self.passed else self.note
        return f"{number(self.value)}, expected {self.relation} {number(self.limit)}: {self.note}"

    @property
    def relation(self) -> str:
        return "<=" if self.name in ("finite", "zeros", "cost") else ">="

    @property
    def state(self) -> str:
        return "FAIL" if not self.passed else "warn" if self.warning else "pass"


def tolerance(values: Sequence[float] | np.ndarray, floor: float, tail: float = TAIL, runs: int = 1) -> float:
    """How far from the baseline's mean the mean of so many new runs may fall: Student's prediction limit.

    Never less than the floor.
    """
    if len(values) < 2:
        return floor
    spread = float(np.std(values, ddof=1)) * math.sqrt(1 / runs + 1 / len(values))
    return max(floor, -t_quantile(tail, len(values) - 1) * spread)


def suspicious(sample: Sample, reference: MethodBaseline) -> bool:
    """Whether the scores look noisier than the baseline's, though perhaps by chance."""
    values = reference.values["agreement"]
    found = agreement(sample.rows, reference.scores)
    spread = float(np.std(noise_level(values), ddof=1)) if len(values) > 1 else 0.0
    limit = 1 - math.exp(float(noise_level(values).mean()) + SUSPICION * spread)
    return not found >= min(limit, float(np.mean(values)) - AGREEMENT_FLOOR / 4)


def judge_scores(samples: Sequence[Sample], reference: MethodBaseline, losses: np.ndarray) -> list[Check]:
    """Every check but cost. Agreement is of all the runs, the others of the first."""
    values, sample = reference.values, samples[0]
    not_finite = sum(sample.num_not_finite for sample in samples)
    checks = [Check("finite", not_finite, 0, not_finite == 0, "scores that are NaN or infinite")]
    if not_finite:
        return checks
    zeros = float(np.mean(values["zeros"])) + ZERO_MARGIN
    checks.append(Check("zeros", sample.zeros, zeros, sample.zeros <= zeros, "share of scores that are exactly 0"))
    checks.append(judge_agreement(samples, reference))
    if before := reference.record["diagnostics"].get("num_draws"):
        draws, least = sample.diagnostics.get("num_draws") or 0, DRAWS_SHARE * before
        checks.append(Check("draws", draws, least, draws >= least, "posterior draws it reports"))

    pair = metrics.paired_difference(losses, sample.prediction, reference.prediction)
    reach = pair.ci_high - pair.difference if math.isfinite(pair.ci_high) else 0.0
    usual, most = float(np.mean(values["lds"])), sample.lds + reach
    least = usual - tolerance(values["lds"], LDS_MARGIN)
    note = f"LDS {sample.lds:.3f}, baseline {usual:.3f}; at most {most:.3f} by the paired 95 % interval"
    checks.append(Check("lds", most, least, most >= least, note))

    if values["lds_normalised"]:
        least = float(np.mean(values["lds_normalised"])) - tolerance(values["lds_normalised"], LDS_MARGIN)
        lost = sample.lds_normalised is None
        value = -1.0 if sample.lds_normalised is None else sample.lds_normalised
        note = "the method no longer gives a train scale" if lost else "train-normalised LDS"
        checks.append(Check("lds-normalised", value, least, value >= least, note))
    return checks


def judge_agreement(samples: Sequence[Sample], reference: MethodBaseline) -> Check:
    values = reference.values["agreement"]
    found = [agreement(sample.rows, reference.scores) for sample in samples]
    mean = 1 - math.exp(float(noise_level(found).mean()))
    limit = 1 - math.exp(float(noise_level(values).mean()) + tolerance(noise_level(values), 0.0, runs=len(samples)))
    limit = min(limit, float(np.mean(values)) - AGREEMENT_FLOOR)
    note = f"correlation with the baseline's scores, usually {np.mean(values):.3f}; {len(samples)} run(s)"
    if mean < limit:
        if mean < -0.5 * limit:
            note += ": the sign is flipped"
        elif abs(mean) < 0.1:
            note += ": none left; are the training examples in another order?"
        else:
            note += ": noisier or different scores"
    return Check("agreement", mean, limit, mean >= limit, note)


def usual_cost(reference: MethodBaseline) -> float:
    """The baseline's processor seconds in units of the kernel: the median of its quiet timings, where it has some."""
    timings = reference.values["timing"]  # older baselines have another kernel, too
    quiet = [timing for timing in timings if not timing["busy"]]
    counted = quiet if len(quiet) >= QUIET_TIMINGS else timings
    return float(np.median([one["cpu_seconds"] / one["kernel_cpu_seconds"]["training"] for one in counted]))


def judge_cost(first: Timing, reference: MethodBaseline, again: Callable[[], Timing], only_warn: bool = False) -> Check:
    """Whether the method has become dearer. A timing on a busy machine can clear it, but never convict it."""
    usual, timings = usual_cost(reference), [first]

    def limit(one: Timing) -> float:
        return max(COST_RATIO * usual * one.kernel, usual * one.kernel + COST_SLACK)

    while (dear := timings[-1].cpu_seconds > limit(timings[-1])) and len(timings) <= COST_REPEATS:
        timings.append(again())
    quiet = [one for one in timings if not one.busy]
    shown = min(quiet or timings, key=lambda one: one.cpu_seconds / limit(one)) if dear else timings[-1]
    note = f"processor seconds; the baseline's would be {usual * shown.kernel:.2f} here; {len(timings)} timings"
    warning = ""
    if dear and not quiet:
        warning = f"the machine was busy ({shown.busy}); run it again on a quiet one"
    elif dear and only_warn:
        warning = "dearer than the baseline (--cost warn)"
    return Check("cost", shown.cpu_seconds, limit(shown), not dear or bool(warning), note, warning)


@dataclass
class Verdict:
    """What the gate says of one method on one task."""

    task: str
    method: str
    checks: list[Check] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def gate(
    runner: GateRunner, label: str, method: Method, reference: MethodBaseline, seed: int, only_warn: bool
) -> Verdict:
    """Runs a method and judges it; whatever the method raises is a failed verdict, not the end of the gate."""
    start, verdict = time.perf_counter(), Verdict(runner.task.name, label)
    changed = [name for name, version in versions().items() if reference.record["versions"].get(name) != version]
    if changed := [name for name in changed if name != "python"]:
        verdict.warnings.append(f"other versions than the baseline's: {', '.join(changed)}")
    try:
        samples = [runner.sample(method, seed)]
        if suspicious(samples[0], reference) and judge_agreement(samples, reference).passed:
            # Noisy, but not beyond all chance: some more runs, with seeds of their own.
            for run in range(1, MORE_RUNS + 1):
                more = int(np.random.SeedSequence([seed, run, 77]).generate_state(1)[0])
                samples.append(runner.sample(method, more))
        verdict.checks = judge_scores(samples, reference, runner.recorded.losses)
        check = judge_cost(samples[0].timing, reference, lambda: runner.attribute(method, seed)[1], only_warn)
        verdict.checks.append(check)
        if check.warning:
            verdict.warnings.append(f"cost: {check.warning}; {check.note}")
    except Exception as error:
        file, line = blamed(error)
        verdict.checks = [Check("run", math.nan, math.nan, False, f"{error_line(error)} ({shortened(file)}:{line})")]
    verdict.seconds = time.perf_counter() - start
    return verdict


def make_parser() -> argparse.ArgumentParser:
    about = "The gate: has an attribution method become worse, or dearer, than its recorded baseline? Exit 1 if so."
    parser = Parser(prog=PROGRAM, description=about)
    add = parser.add_argument
    add("--task", nargs="+", help="embedded tasks (default: those with a baseline; to --update, digits)")
    methods = "METHOD, METHOD@OPTION=VALUE,... or LABEL=METHOD@...; mine.py or package.module:Class for one of yours"
    add("--methods", nargs="+", metavar="METHOD", help=f"{methods} (default: the suite's own with a baseline)")
    add("--baseline", metavar="DIR", help="folder of baselines (default: the suite's own, in the package)")
    add("--update", action="store_true", help="write the baseline instead of comparing with it")
    add("--seed", type=at_least(0), default=0, help="seed of this run's methods (default: 0)")
    dearer = "what a dearer method is (default: fail; a busy machine only ever warns)"
    add("--cost", choices=("fail", "warn"), default="fail", help=dearer)
    add("--cache", default=default_cache(), help="where --update keeps its retrained models (default: %(default)s)")
    add("--junit", metavar="FILE", help="write JUnit XML")
    return parser


def chosen_tasks(arguments: argparse.Namespace, folder: Path) -> list[str]:
    present = [name for name in GATED_TASKS if (folder / f"{name}.json").exists()]
    chosen = arguments.task or present or (["digits"] if arguments.update else [])
    if not chosen:
        own = f" --methods {' '.join(arguments.methods)}" if arguments.methods else ""
        raise UsageError(f"no baseline in {folder}; `{PROGRAM}{own} --update --baseline {folder}` writes one")
    return list(dict.fromkeys(chosen))


def chosen_methods(arguments: argparse.Namespace, folder: Path, task: Task) -> list[tuple[str, Method]]:
    """Labels of baselines and the methods behind them; `bench/methods.py` has the spelling."""
    own = {parse_method_spec(name).label or name: name for name in GATED_METHODS}  # "bif" is that of the baseline
    recorded = [name for label, name in own.items() if has_method_baseline(folder, task.name, label)]
    names = [own.get(name, name) for name in arguments.methods or ()] or (
        GATED_METHODS if arguments.update else recorded
    )
    if not names:
        raise UsageError(f"{folder} has no baseline of the suite's methods on {task.name}; name yours with --methods")
    variants = build_variants(list(dict.fromkeys(names)), task, {}, "default")
    return [(variant.label, variant.method) for variant in variants]


def update(arguments: argparse.Namespace, folder: Path) -> int:
    for name in chosen_tasks(arguments, folder):
        task = load_task(name)
        try:
            recorded = known_task_baseline(folder, task) or record_task(folder, task, Store(arguments.cache))
        except OSError as error:
            raise UsageError(f"{error.filename or folder} cannot be written: {error.strerror}") from None
        runner = GateRunner(task, recorded)
        for label, method in chosen_methods(arguments, folder, task):
            start = time.perf_counter()
            found = record_method(runner, method, BASELINE_SEEDS)
            lds, agreements = (np.asarray(found.values[name]) for name in ("lds", "agreement"))
            told = f"LDS {lds.mean():.3f} +- {lds.std(ddof=1):.3f}, agreement {agreements.mean():.3f} +- "
            told += f"{agreements.std(ddof=1):.3f} ({BASELINE_SEEDS} seeds, {time.perf_counter() - start:.0f} s)"
            print(f"{task.name} {label}: {told}", flush=True)
            busy = [timing["busy"] for timing in found.values["timing"] if timing["busy"]]
            if len(lds) - len(busy) < QUIET_TIMINGS:
                print(f"warning, {label} on {task.name}: its cost was recorded on a busy machine ({busy[0]})")
            arrays = {"scores": found.scores, "prediction": found.prediction}
            write_pair(folder / baseline_name(task.name, label), BASELINE_FORMAT, arrays, found.record)
    return 0


def gate_all(arguments: argparse.Namespace, folder: Path) -> int:
    """Judges every method that was asked for, prints the table, and then writes the JUnit file."""
    runs, only_warn = [], arguments.cost == "warn"
    for name in chosen_tasks(arguments, folder):
        task = load_task(name)
        recorded = read_task_baseline(folder, task)
        if recorded is None:
            raise UsageError(f"no baseline of task {name} in {folder}; write it with --update")
        runner = GateRunner(task, recorded)
        for label, method in chosen_methods(arguments, folder, task):
            runs.append((runner, label, method, read_method_baseline(folder, task.name, label)))
    verdicts = [
        gate(runner, label, method, recorded, arguments.seed, only_warn)
        for runner, label, method, recorded in bar(runs, desc="methods", unit="method", leave=False)
    ]
    print(verdict_table(verdicts))
    write = lambda: ElementTree.ElementTree(junit(verdicts)).write(arguments.junit)  # noqa: E731
    if unwritten := try_write(write, arguments.junit) if arguments.junit else "":
        print(f"{PROGRAM}: {unwritten}", file=sys.stderr)
    return 0 if all(verdict.passed for verdict in verdicts) and not unwritten else 1


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    warnings.simplefilter("ignore")

    def work() -> int:
        if arguments.update and not arguments.baseline and not (PACKAGED.parents[2] / "pyproject.toml").exists():
            raise UsageError("--update would write into the installed package; name a folder with --baseline DIR")
        folder = Path(arguments.baseline or PACKAGED)
        return update(arguments, folder) if arguments.update else gate_all(arguments, folder)

    kept = "finished methods are kept" if arguments.update else "nothing was judged"
    return run_cli(PROGRAM, work, interrupted=kept)


def verdict_table(verdicts: Sequence[Verdict]) -> str:
    """A line a check; below, what is behind those that did not pass, warnings, and the verdict on all."""
    rows, notes = [], []
    for verdict in verdicts:
        where = f"{verdict.method} on {verdict.task}"
        for check in verdict.checks:
            limit = "-" if check.name == "run" else f"{check.relation} {number(check.limit)}"
            rows.append([verdict.task, verdict.method, check.name, check.state, number(check.value), limit])
        notes += [f"{check.name} of {where}: {check.note}" for check in verdict.checks if not check.passed]
    notes += [f"warning, {one.method} on {one.task}: {text}" for one in verdicts for text in one.warnings]
    failed = [f"{verdict.method} on {verdict.task}" for verdict in verdicts if not verdict.passed]
    what = f"FAILED: {', '.join(failed)}" if failed else "passed"
    end = f"{what} ({len(verdicts)} methods, {sum(verdict.seconds for verdict in verdicts):.0f} s)"
    header = ["task", "method", "check", "verdict", "value", "limit"]
    return "\n".join([table(header, rows, left=4), "", *notes, end])


def junit(verdicts: Sequence[Verdict]) -> ElementTree.Element:
    """One test case a check; the first of a method carries its seconds and warnings."""
    suites = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(suites, "testsuite", name="bench.regress")
    for verdict in verdicts:
        for check in verdict.checks:
            is_first = check is verdict.checks[0]
            about = {"classname": f"{verdict.task}.{verdict.method}", "name": check.name}
            case = ElementTree.SubElement(suite, "testcase", about, time=f"{verdict.seconds * is_first:.3f}")
            if check.failure:
                ElementTree.SubElement(case, "failure", message=check.failure)
            for text in verdict.warnings if is_first else ():
                ElementTree.SubElement(case, "system-out").text = text
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(len(suite.findall(".//failure"))))
    return suites
