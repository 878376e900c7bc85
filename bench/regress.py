"""The gate: has an attribution method become worse, or dearer, than its recorded baseline? Exit 1 if so.

    python -m bench.regress                                          # every method with a baseline, under 4 minutes
    python -m bench.regress --method mypkg.mymodule:MyMethod --baseline gate --update     # record a method of yours
    python -m bench.regress --method mypkg.mymodule:MyMethod --baseline gate              # and gate it from then on

A baseline holds, for an embedded task, the base model's weights and the retrained losses (so the gate never retrains)
and, for each method, the scores of several seeds. A run scores every method anew, with a seed of its own, at the same
weights, and makes these checks:

- `finite`: no score is NaN or infinite.
- `zeros`: the share of scores that are exactly 0 is at most ZERO_MARGIN above the baseline's. A zero is what a lost
  example looks like.
- `agreement`: correlation with the baseline's scores averaged over its seeds, mean over queries. LDS forgives a noisy
  method much; this does not: one minus the agreement is the method's own noise, which half the draws nearly double; a
  flipped sign makes it negative, shuffled indices make it 0. A run that looks noisier than the
  baseline's by SUSPICION spreads, but not beyond all chance, is repeated MORE_RUNS times, and the mean of all decides.
- `draws`: where a method reports how many posterior draws it made, at least DRAWS_SHARE of the baseline's.
- `lds`: the paired bootstrap's interval of (new - baseline) must not lie below minus the margin, which is LDS_MARGIN or
  what seeds alone explain, whichever is larger.
- `lds-normalised`: the same for train-normalised scores, by the spread between seeds.
- `cost`: seconds over those of a calibration kernel timed before and after in the same run, at most COST_RATIO times
  the baseline's. On a miss the method is timed up to COST_REPEATS times more and the smallest value counts; and what
  takes less than COST_SLACK seconds beyond the baseline is never a miss. So a busy machine is no alarm.

What seeds explain is Student's prediction limit for one more value, at TAIL probability a check. Changed versions or
options are a warning, not a failure. `--junit FILE` writes JUnit XML; in a GitHub workflow the table also goes to the
step summary.
"""

import argparse
import dataclasses
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape, quoteattr

import numpy as np
from scipy import stats

from bench import metrics
from bench.record import code_commit, versions, why_unwritten
from bench.tables import number, table
from retrain.command import Parser, at_least, options_of
from retrain.errors import UsageError, error_line
from retrain.progress import bar, close_bars
from retrain.safe_files import SafeFileError, read_json, read_safetensors, whole_file, write_safetensors, write_whole
from retrain.store import Store, StoreError, canonical_json, default_cache

if TYPE_CHECKING:
    from baselines.method import Attribution, Method
    from retrain.task import Task

GATED_TASKS = ("digits", "tinylm")
GATED_METHODS = ("bif", "ekfac", "trak", "gradsim")
FORMAT = "tda-bench gate 1"

TAIL = 2e-4  # chance that an unchanged method misses one check; about forty checks a run make 1 % a run
AGREEMENT_FLOOR = 0.01  # what another processor or library version may move, even for a method without randomness
SUSPICION, MORE_RUNS = 2.0, 2
DRAWS_SHARE = 0.9
LDS_MARGIN = 0.02  # a smaller drop is no reason to stop anyone
ZERO_MARGIN = 0.01
COST_RATIO = 2.0
COST_REPEATS = 3
COST_SLACK = 3.0  # seconds: memory that a shared machine hands out slowly costs a short method as much as its work

NUM_SUBSETS, NUM_REPLICATES, ALPHA = 100, 2, 0.1
MAX_QUERIES = 200  # queries of the gate's truth
REFERENCE_QUERIES, REFERENCE_EXAMPLES = 48, 1000  # of each method's kept scores
CALIBRATION_STEPS, CALIBRATION_BATCH = 12, 200


# ---- what is recorded ----


@dataclass(frozen=True)
class Truth:
    """The task's side of a baseline."""

    record: dict[str, Any]
    losses: np.ndarray  # (subsets, queries), averaged over replicates
    masks: np.ndarray  # (subsets, n) bool
    weights: dict[str, np.ndarray]  # the base model's
    queries: np.ndarray  # (queries,) into the task's queries


@dataclass(frozen=True)
class Reference:
    """The method's side of a baseline."""

    record: dict[str, Any]
    scores: np.ndarray  # (reference queries, reference examples): rows standardised, averaged over seeds
    prediction: np.ndarray  # (subsets, queries) of the seed whose LDS is the median


@dataclass
class Sample:
    """One run of one method, reduced to what the gate compares."""

    prediction: np.ndarray  # (subsets, queries)
    rows: np.ndarray  # (reference queries, reference examples)
    lds: float
    lds_normalised: float | None
    zeros: float
    num_not_finite: int
    cost: float  # seconds over the calibration kernel's
    seconds: float
    diagnostics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    name: str
    value: float
    limit: float
    passed: bool
    note: str

    def relation(self) -> str:
        return "<=" if self.name in ("finite", "zeros", "cost") else ">="


@dataclass
class Verdict:
    """What the gate says of one method on one task."""

    task: str
    method: str
    checks: list[Check]
    warnings: list[str]
    seconds: float
    error: str = ""

    @property
    def passed(self) -> bool:
        return not self.error and all(check.passed for check in self.checks)


def slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-")


def evenly(count: int, at_most: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(count, at_most)).round().astype(int))


def write_pair(folder: Path, name: str, record: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """name.safetensors, then name.json, which holds the checksum of the first: readers see a whole pair or none."""
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / f"{name}.safetensors") as file:
        digest = write_safetensors(file, arrays)
    write_whole(
        folder / f"{name}.json",
        json.dumps({"format": FORMAT, "arrays_sha256": digest, **record}, indent=1) + "\n",
    )


def read_pair(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    import hashlib

    record = read_json(folder / f"{name}.json")
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UsageError(f'{folder / name}.json is no baseline of this gate; expected "format": "{FORMAT}"')
    digest = hashlib.sha256()
    arrays = read_safetensors(folder / f"{name}.safetensors", digest=digest)
    if digest.hexdigest() != record["arrays_sha256"]:
        raise UsageError(
            f"{folder / name}.safetensors does not match the checksum in {name}.json; record it again with --update"
        )
    return record, arrays


def read_truth(folder: Path, task: "Task") -> Truth | None:
    from retrain.subsets import masks

    if not (folder / f"{task.name}.json").exists():
        return None
    record, arrays = read_pair(folder, task.name)
    plan = record["plan"]
    kept = masks(plan["seed"], plan["num_subsets"], plan["alpha"], len(task.train_data))
    weights = {name.removeprefix("weights."): value for name, value in arrays.items() if name.startswith("weights.")}
    return Truth(record, arrays["losses"], kept, weights, arrays["queries"])


def make_truth(folder: Path, task: "Task", store: Store) -> Truth:
    """Retrains where the cache does not have it, and records the result."""
    from bench.runner import Question, base_model, ground_truth
    from retrain.train import Plan

    plan = Plan(alpha=ALPHA, alpha_attribution=1.0, seed=1, num_subsets=NUM_SUBSETS, replicates=NUM_REPLICATES)
    found = ground_truth(task, plan, store, "cpu")
    _, entry = base_model(task, plan.seed, store, "cpu")
    question = Question(task=task, seed=plan.seed, alpha_attribution=1.0, max_queries=MAX_QUERIES)
    queries = question.query_indices()
    losses = found.losses[:, :, queries]
    record = {
        "task": json.loads(canonical_json(task.config)),
        "plan": {"alpha": ALPHA, "seed": plan.seed, "num_subsets": NUM_SUBSETS, "replicates": NUM_REPLICATES},
        "ceiling": metrics.noise_ceiling(losses).ceiling,
        "versions": versions(),
        "commit": code_commit(),
    }
    arrays = {"losses": losses.mean(axis=0).astype(np.float32), "queries": queries.astype(np.int64)}
    arrays |= {f"weights.{name}": np.asarray(value) for name, value in entry.arrays.items()}
    write_pair(folder, task.name, record, arrays)
    return Truth(record, arrays["losses"], found.masks, dict(entry.arrays), queries)


# ---- one run of one method ----


class Bench:
    """A task at its recorded weights, ready to run methods on one thread, so that the number of cores is no matter."""

    def __init__(self, task: "Task", truth: Truth):
        import torch

        if task.config["data"] != truth.record["task"]["data"]:
            raise UsageError(
                f"the data of task {task.name} are not those of the baseline; record it again with --update, or leave "
                "it out with --tasks"
            )
        self.task, self.truth, self.warm = task, truth, False
        self.device = torch.device("cpu")
        self.model = task.build_model(0)
        weights = {name: torch.from_numpy(np.array(value)) for name, value in truth.weights.items()}
        try:
            self.model.load_state_dict(weights)
        except RuntimeError:
            raise UsageError(
                f"the recorded weights do not fit the model of task {task.name}, which has changed; "
                "record its baseline again with --update"
            ) from None
        self.model.eval()
        n, q = len(task.train_data), len(truth.queries)
        self.reference_queries, self.reference_examples = evenly(q, REFERENCE_QUERIES), evenly(n, REFERENCE_EXAMPLES)

    def calibrate(self) -> float:
        """Seconds of a fixed amount of the task's own arithmetic, forward and backward: what methods are made of."""
        examples = self.task.train_data.select(range(min(CALIBRATION_BATCH, len(self.task.train_data))))
        batch = (examples.inputs, examples.targets)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        import torch

        start = time.perf_counter()
        for _ in range(CALIBRATION_STEPS):
            torch.autograd.grad(self.task.example_loss(self.model, batch).mean(), parameters, allow_unused=True)
        return time.perf_counter() - start

    def attribute(self, method: "Method", seed: int) -> tuple["Attribution", float, float]:
        """The attribution, its seconds, and its cost in units of the calibration kernel."""
        from baselines.method import Problem
        from bench.runner import measure
        from retrain.train import one_thread

        with tempfile.TemporaryDirectory(prefix="tda-bench-gate-") as scratch, one_thread(self.device):
            problem = Problem(
                task=self.task,
                model=self.model,
                train=self.task.train_data,
                attributed_indices=np.arange(len(self.task.train_data)),
                queries=self.task.query_data.select(self.truth.queries),
                seed=seed,
                device=self.device,
                scratch=Path(scratch),
            )
            if not self.warm:
                self.calibrate()  # the first call pays for set-up
                self.warm = True
            before = self.calibrate()
            attribution, cost = measure(method, problem)
            kernel = 0.5 * (before + self.calibrate())
        seconds = cost["fit_seconds"] + cost["score_seconds"]
        return attribution, seconds, seconds / kernel

    def sample(self, method: "Method", seed: int) -> Sample:
        attribution, seconds, cost = self.attribute(method, seed)
        return self.reduce(attribution, seconds, cost)

    def reduce(self, attribution: "Attribution", seconds: float, cost: float) -> Sample:
        scores = attribution.scores.float().numpy()
        q, n = len(self.truth.queries), self.truth.masks.shape[1]
        if scores.shape != (q, n):
            hint = "; they are transposed" if scores.shape == (n, q) else ""
            raise UsageError(
                f"the scores have shape {scores.shape}; expected {(q, n)}: queries x training examples{hint}"
            )
        masks = self.truth.masks.astype(np.float32)
        scaled = attribution.normalised()
        prediction = masks @ scores.T
        normalised = None
        if scaled is not None:
            normalised = mean_lds(self.truth.losses, masks @ scaled.float().numpy().T)
        return Sample(
            prediction=prediction,
            rows=scores[np.ix_(self.reference_queries, self.reference_examples)],
            lds=mean_lds(self.truth.losses, prediction),
            lds_normalised=normalised,
            zeros=float((scores == 0).mean()),
            num_not_finite=int((~np.isfinite(scores)).sum()),
            cost=cost,
            seconds=seconds,
            diagnostics={k: v for k, v in attribution.diagnostics.items() if isinstance(v, int | float | str)},
        )


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


def noise(agreements: Sequence[float]) -> np.ndarray:
    """The logarithm of one minus the agreement: twice the noise is as far from once at any level of it."""
    return np.log(np.maximum(1 - np.asarray(agreements, dtype=float), 1e-4))


# ---- recording ----


def record_method(
    bench: Bench, method: "Method", num_seeds: int, first_seed: int = 1000
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Runs the method with several seeds; the gate's own runs use others."""
    seeds = bar(range(num_seeds), desc=f"{bench.task.name} {method.name}", unit="seed", leave=False)
    samples = [bench.sample(method, first_seed + k) for k in seeds]
    if bad := sum(sample.num_not_finite for sample in samples):
        raise UsageError(f"{method.name} gave {bad} scores that are not finite; a baseline needs finite ones")
    rows = [standardised(sample.rows) for sample in samples]
    total = np.sum(rows, axis=0)
    values: dict[str, list[float]] = {
        # Each seed against the mean of the others, as a later run is against the mean of all.
        "agreement": [agreement(row, total - row) for row in rows],
        "lds": [sample.lds for sample in samples],
        "lds_normalised": [sample.lds_normalised for sample in samples if sample.lds_normalised is not None],
        "zeros": [sample.zeros for sample in samples],
        "cost": [sample.cost for sample in samples],
        "seconds": [sample.seconds for sample in samples],
    }
    middle = int(np.argsort(values["lds"])[len(samples) // 2])
    prediction = samples[middle].prediction.astype(np.float32)
    record = {
        "method": json.loads(canonical_json(method.config)),
        "task": bench.task.name,
        "seeds": [first_seed + k for k in range(num_seeds)],
        "prediction_seed": first_seed + middle,
        "values": values,
        "per_query_lds": metrics.spearman_per_column(bench.truth.losses, prediction).round(4).tolist(),
        "diagnostics": samples[middle].diagnostics,
        "versions": versions(),
        "commit": code_commit(),
    }
    arrays = {"scores": (total / len(rows)).astype(np.float16), "prediction": prediction}
    return record, arrays


# ---- judging ----


def tolerance(values: Sequence[float] | np.ndarray, floor: float, tail: float = TAIL, runs: int = 1) -> float:
    """How far from the baseline's mean the mean of so many new runs may fall: Student's prediction limit.

    Never less than the floor.
    """
    if len(values) < 2:
        return floor
    spread = float(np.std(values, ddof=1)) * math.sqrt(1 / runs + 1 / len(values))
    return max(floor, float(stats.t.isf(tail, len(values) - 1)) * spread)


def suspicious(sample: Sample, reference: Reference) -> bool:
    """Whether the scores look noisier than the baseline's, though perhaps by chance."""
    values = reference.record["values"]["agreement"]
    found = agreement(sample.rows, reference.scores)
    spread = float(np.std(noise(values), ddof=1)) if len(values) > 1 else 0.0
    limit = 1 - math.exp(float(noise(values).mean()) + SUSPICION * spread)
    return not found >= min(limit, float(np.mean(values)) - AGREEMENT_FLOOR / 4)


def judge(samples: Sequence[Sample], reference: Reference, losses: np.ndarray) -> list[Check]:
    """Every check but cost. Agreement is of all the runs, the others of the first."""
    values, sample = reference.record["values"], samples[0]
    not_finite = sum(sample.num_not_finite for sample in samples)
    checks = [Check("finite", not_finite, 0, not_finite == 0, "scores that are NaN or infinite")]
    if not_finite:
        return checks
    zeros = float(np.mean(values["zeros"])) + ZERO_MARGIN
    checks.append(Check("zeros", sample.zeros, zeros, sample.zeros <= zeros, "share of scores that are exactly 0"))
    checks.append(judge_agreement(samples, reference))
    if check := judge_draws(sample, reference):
        checks.append(check)

    pair = metrics.paired_difference(losses, sample.prediction, reference.prediction)
    margin = tolerance(values["lds"], LDS_MARGIN)
    usual = float(np.mean(values["lds"]))
    # The recorded prediction is one seed's; it may lie above the mean of the seeds by a little.
    offset = values["lds"][reference.record["seeds"].index(reference.record["prediction_seed"])] - usual
    upper = pair.ci_high + offset if math.isfinite(pair.ci_high) else sample.lds - usual
    note = f"LDS {sample.lds:.3f}, baseline {usual:.3f}; the difference is at most {upper:+.3f} (95 %)"
    checks.append(Check("lds", upper, -margin, upper >= -margin, note))

    if values["lds_normalised"]:
        least = float(np.mean(values["lds_normalised"])) - tolerance(values["lds_normalised"], LDS_MARGIN)
        value = -1.0 if sample.lds_normalised is None else sample.lds_normalised
        note = (
            "train-normalised LDS" if sample.lds_normalised is not None else "the method no longer gives a train scale"
        )
        checks.append(Check("lds-normalised", value, least, value >= least, note))
    return checks


def judge_agreement(samples: Sequence[Sample], reference: Reference) -> Check:
    values = reference.record["values"]["agreement"]
    found = [agreement(sample.rows, reference.scores) for sample in samples]
    mean = 1 - math.exp(float(noise(found).mean()))
    limit = 1 - math.exp(float(noise(values).mean()) + tolerance(noise(values), 0.0, runs=len(samples)))
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


def judge_draws(sample: Sample, reference: Reference) -> Check | None:
    before, now = (found.get("num_draws") for found in (reference.record["diagnostics"], sample.diagnostics))
    if not before:
        return None
    return Check(
        "draws", now or 0, DRAWS_SHARE * before, (now or 0) >= DRAWS_SHARE * before, "posterior draws it reports"
    )


def judge_cost(
    bench: Bench, method: "Method", seed: int, sample: Sample, reference: Reference, again: bool = True
) -> Check:
    usual = float(np.median(reference.record["values"]["cost"]))
    limit = COST_RATIO * usual
    cost, seconds = sample.cost, sample.seconds

    def dear() -> bool:
        return cost > limit and seconds * (1 - usual / cost) > COST_SLACK

    for _ in range(COST_REPEATS if again else 0):
        if not dear():
            break
        _, seconds_again, cost_again = bench.attribute(method, seed)
        if cost_again < cost:
            cost, seconds = cost_again, seconds_again
    note = f"{seconds:.1f} s here, {cost / usual:.2f} times the baseline's in units of the calibration kernel"
    if cost > limit and not dear():
        note += f"; passed, because that is less than {COST_SLACK:g} s more"
    return Check("cost", cost / usual, COST_RATIO, not dear(), note)


def changes(
    record: dict[str, Any], now: dict[str, Any], label: str, defaults: dict[str, Any] | None = None
) -> list[str]:
    """What differs. What the baseline has no word of, because it is younger, is no change at its default."""
    unchanged = {name for name, value in (defaults or {}).items() if name not in record and now.get(name) == value}
    return [
        f"{label} {name}: {record.get(name)!r} in the baseline, {now.get(name)!r} now"
        for name in sorted({*record, *now} - unchanged - {"python", "name"})
        if record.get(name) != now.get(name)
    ]


def run_as_often_as_needed(bench: Bench, method: "Method", reference: Reference, seed: int) -> list[Sample]:
    """Once; and if that looks noisy, but not beyond all chance, some more times with seeds of their own."""
    samples = [bench.sample(method, seed)]
    if suspicious(samples[0], reference) and judge_agreement(samples, reference).passed:
        samples += [bench.sample(method, derived_seed(seed, run)) for run in range(1, MORE_RUNS + 1)]
    return samples


def derived_seed(seed: int, run: int) -> int:
    return int(np.random.SeedSequence([seed, run, 77]).generate_state(1)[0])


def gate(bench: Bench, method: "Method", reference: Reference, seed: int) -> Verdict:
    """Runs a method and judges it; whatever the method raises is a failed verdict, not the end of the gate."""
    start = time.perf_counter()
    notes = changes(reference.record["versions"], versions(), "version of", versions())
    defaults = {option.name: option.default for option in dataclasses.fields(method)}
    notes += changes(reference.record["method"], json.loads(canonical_json(method.config)), "option", defaults)
    notes += changes(
        {k: v for k, v in bench.truth.record["task"].items() if k != "data"},
        {k: v for k, v in json.loads(canonical_json(bench.task.config)).items() if k != "data"},
        f"{bench.task.name}'s",
    )
    verdict = Verdict(bench.task.name, method.name, [], notes, 0.0)
    try:
        samples = run_as_often_as_needed(bench, method, reference, seed)
        verdict.checks = judge(samples, reference, bench.truth.losses)
        verdict.checks.append(judge_cost(bench, method, seed, samples[0], reference))
    except Exception as error:
        verdict.error = error_line(error)
    verdict.seconds = time.perf_counter() - start
    return verdict


# ---- what the user reads ----


def show(verdicts: Sequence[Verdict]) -> str:
    header = ["task", "method", "check", "verdict", "value", "limit"]
    rows, notes = [], ["what it is", "----------"]
    for verdict in verdicts:
        if verdict.error:
            rows.append([verdict.task, verdict.method, "run", "FAIL", "-", "-"])
            notes.append(verdict.error)
        for check in verdict.checks:
            limit = f"{check.relation()} {number(check.limit)}"
            state = "pass" if check.passed else "FAIL"
            rows.append([verdict.task, verdict.method, check.name, state, number(check.value), limit])
            notes.append(check.note)
    if not rows:
        return "nothing was gated"
    lines = table(header, rows, left=4).splitlines()
    width = max(len(line) for line in lines)
    return "\n".join(f"{line.ljust(width)}  {note}" for line, note in zip(lines, notes, strict=True))


def markdown(verdicts: Sequence[Verdict]) -> str:
    """For the GitHub step summary: one line a method, and the failed checks under it."""
    lines = [
        "### tda-bench gate",
        "",
        "| task | method | verdict | seconds | checks |",
        "| --- | --- | --- | --- | --- |",
    ]
    for verdict in verdicts:
        cells = [
            f"{c.name} {number(c.value)} ({c.relation()} {number(c.limit)})" + ("" if c.passed else " **FAIL**")
            for c in verdict.checks
        ]
        text = verdict.error or "; ".join(cells)
        lines.append(
            f"| {verdict.task} | `{verdict.method}` | {'pass' if verdict.passed else '**FAIL**'} "
            f"| {verdict.seconds:.0f} | {text.replace('|', '/')} |"
        )
    for verdict in verdicts:
        lines += [f"- `{verdict.method}` on {verdict.task}, warning: {text}" for text in verdict.warnings]
        lines += [f"- `{verdict.method}` on {verdict.task}, {c.name}: {c.note}" for c in verdict.checks if not c.passed]
    return "\n".join(lines) + "\n"


def junit(verdicts: Sequence[Verdict]) -> str:
    """One test case a check; the first carries the seconds and the warnings."""
    cases, failures = [], 0
    for verdict in verdicts:
        where = f"classname={quoteattr(f'{verdict.task}.{verdict.method}')}"
        seconds, notes = verdict.seconds, "".join(f"<system-out>{escape(t)}</system-out>" for t in verdict.warnings)
        failed = {
            c.name: f"{number(c.value)}, expected {c.relation()} {number(c.limit)}: {c.note}" for c in verdict.checks
        }
        failed = {check.name: failed[check.name] for check in verdict.checks if not check.passed}
        names = [check.name for check in verdict.checks]
        if verdict.error:
            names, failed = ["run", *names], {"run": verdict.error, **failed}
        for name in names:
            body = f"<failure message={quoteattr(failed[name])}/>" if name in failed else ""
            failures += name in failed
            cases.append(f'  <testcase {where} name="{name}" time="{seconds:.3f}">{body}{notes}</testcase>')
            seconds, notes = 0.0, ""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<testsuites><testsuite name="bench.regress" tests="{len(cases)}" failures="{failures}" errors="0">\n'
        + "\n".join(cases)
        + "\n</testsuite></testsuites>\n"
    )


# ---- the command ----


def default_baseline() -> str:
    return str(Path(__file__).resolve().parent.parent / "results" / "regress")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.regress", description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--tasks", nargs="+", help="embedded tasks (default: those with a baseline; with --update, digits)")
    add("--methods", nargs="+", help="methods of this suite (default: those with a baseline)")
    add("--method", action="append", default=[], metavar="PACKAGE.MODULE:CLASS", help="gate a method of yours instead")
    add("--against", metavar="NAME", help="compare with the baseline of another name, for example bif")
    add("--baseline", default=default_baseline(), help="folder of baselines (default: %(default)s)")
    add("--update", action="store_true", help="write the baseline instead of comparing with it")
    add("--baseline-seeds", type=at_least(3), default=12, help="runs that show the spread, for --update (default: 12)")
    add("--seed", type=at_least(0), default=0, help="seed of this run's methods (default: 0)")
    add("--set", action="append", default=[], metavar="NAME.OPTION=VALUE", help="option of a method")
    add("--cache", default=default_cache(), help="where --update keeps its retrained models (default: %(default)s)")
    add("--junit", metavar="FILE", help="write JUnit XML")
    add("--summary", metavar="FILE", default=os.environ.get("GITHUB_STEP_SUMMARY"), help="append Markdown to this file")
    add("--json", action="store_true", help="print the verdicts as JSON")
    return parser


def chosen_tasks(arguments: argparse.Namespace, folder: Path) -> list[str]:
    from retrain.tasks import available_tasks

    if arguments.tasks:
        return list(dict.fromkeys(arguments.tasks))
    present = [name for name in GATED_TASKS if name in available_tasks() and (folder / f"{name}.json").exists()]
    if present:
        return present
    if arguments.update:
        return ["digits"]
    raise UsageError(f"no baseline in {folder}; `python -m bench.regress --update --baseline {folder}` writes one")


def chosen_methods(arguments: argparse.Namespace, folder: Path, task: "Task") -> list["Method"]:
    from baselines.method import load_method

    if arguments.method or arguments.methods:
        names = [*arguments.method, *(arguments.methods or [])]
    elif arguments.update:
        names = list(GATED_METHODS)
    else:
        names = [name for name in GATED_METHODS if (folder / f"{task.name}-{slug(name)}.json").exists()]
        if not names:
            raise UsageError(f"{folder} has no baseline of a method on {task.name}; write one with --update")
    methods = []
    for name in dict.fromkeys(names):
        options: dict[str, Any] = {**task.method_settings.get(name, {}), **options_of(name, arguments.set)}
        methods.append(load_method(name, **options))
    return methods


def read_reference(folder: Path, task: str, name: str) -> Reference:
    file_name = f"{task}-{slug(name)}"
    if not (folder / f"{file_name}.json").exists():
        raise UsageError(
            f"no baseline of {name} on {task} in {folder}; write it with --update, or name one with --against"
        )
    record, arrays = read_pair(folder, file_name)
    return Reference(record, arrays["scores"].astype(np.float32), arrays["prediction"])


def known_truth(folder: Path, task: "Task") -> Truth | None:
    """Recorded in the folder, or else in this repository: then it is copied, and nothing is retrained."""
    for place in (folder, Path(default_baseline())):
        truth = read_truth(place, task)
        if truth is not None and truth.record["task"] == json.loads(canonical_json(task.config)):
            if place != folder:
                folder.mkdir(parents=True, exist_ok=True)
                for ending in (".safetensors", ".json"):
                    shutil.copyfile(place / f"{task.name}{ending}", folder / f"{task.name}{ending}")
            return truth
    return None


def update(arguments: argparse.Namespace, folder: Path) -> int:
    from retrain.tasks import load_task

    for name in chosen_tasks(arguments, folder):
        task = load_task(name)
        truth = known_truth(folder, task) or make_truth(folder, task, Store(arguments.cache))
        bench = Bench(task, truth)
        for method in chosen_methods(arguments, folder, task):
            start = time.perf_counter()
            record, arrays = record_method(bench, method, arguments.baseline_seeds)
            values = record["values"]
            print(
                f"{task.name} {method.name}: LDS {np.mean(values['lds']):.3f} +- {np.std(values['lds'], ddof=1):.3f}, "
                f"agreement {np.mean(values['agreement']):.3f} +- {np.std(values['agreement'], ddof=1):.3f} "
                f"({arguments.baseline_seeds} seeds, {time.perf_counter() - start:.0f} s)",
                flush=True,
            )
            pair = f"{task.name}-{slug(method.name)}"
            if unwritten := why_unwritten(partial(write_pair, folder, pair, record, arrays), folder / f"{pair}.json"):
                print(f"python -m bench.regress: {unwritten}", file=sys.stderr)
                return 1
    return 0


def compare(arguments: argparse.Namespace, folder: Path) -> list[Verdict]:
    from retrain.tasks import load_task

    runs = []
    for name in chosen_tasks(arguments, folder):
        task = load_task(name)
        truth = read_truth(folder, task)
        if truth is None:
            raise UsageError(f"no baseline of task {name} in {folder}; write it with --update")
        bench = Bench(task, truth)
        for method in chosen_methods(arguments, folder, task):
            runs.append((bench, method, read_reference(folder, task.name, arguments.against or method.name)))
    turns = bar(runs, desc="methods", unit="method", leave=False)
    return [gate(bench, method, reference, arguments.seed) for bench, method, reference in turns]


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(sys.argv[1:] if argv is None else list(argv))
    warnings.simplefilter("ignore")
    # A method of the user's lives in the folder the command is called from.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    folder = Path(arguments.baseline)
    try:
        if arguments.update:
            return update(arguments, folder)
        verdicts = compare(arguments, folder)
    except (UsageError, StoreError, SafeFileError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{parser.prog}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        close_bars()
        print(f"{parser.prog}: interrupted" + ("; finished methods are kept" * arguments.update), file=sys.stderr)
        return 130
    unwritten = []
    if arguments.junit:
        unwritten.append(why_unwritten(lambda: Path(arguments.junit).write_text(junit(verdicts)), arguments.junit))
    if arguments.summary:
        unwritten.append(why_unwritten(lambda: append(arguments.summary, markdown(verdicts)), arguments.summary))
    if arguments.json:
        print(json.dumps([asdict(verdict) | {"passed": verdict.passed} for verdict in verdicts], indent=1))
    else:
        print(show(verdicts))
        for verdict in verdicts:
            for text in verdict.warnings:
                print(f"warning, {verdict.method} on {verdict.task}: {text}")
        failed = [f"{verdict.method} on {verdict.task}" for verdict in verdicts if not verdict.passed]
        seconds = sum(verdict.seconds for verdict in verdicts)
        print(f"\n{'FAILED: ' + ', '.join(failed) if failed else 'passed'} ({len(verdicts)} methods, {seconds:.0f} s)")
    for problem in filter(None, unwritten):
        print(f"{parser.prog}: {problem}", file=sys.stderr)
    return 0 if all(verdict.passed for verdict in verdicts) and not any(unwritten) else 1


def append(path: str, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


if __name__ == "__main__":
    sys.exit(main())
