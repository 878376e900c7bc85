"""What the gate makes of a run: checks with a value, a limit and a reason, and a verdict on the method."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bench import metrics
from bench.metrics.intervals import t_quantile
from bench.records import versions
from bench.regress.baseline import MethodBaseline
from bench.regress.clock import KERNELS, Timing
from bench.regress.sample import Rig, Sample, agreement, noise_level
from retrain.errors import error_line
from retrain.store import canonical_json

if TYPE_CHECKING:
    from baselines.method import Method

TAIL = 2e-4  # chance that an unchanged method misses one check; about forty checks a run make 1 % a run
AGREEMENT_FLOOR = 0.01  # what another processor or library version may move, even for a method without randomness
SUSPICION, MORE_RUNS = 2.0, 2
DRAWS_SHARE = 0.9
LDS_MARGIN = 0.02  # a smaller drop is no reason to stop anyone
ZERO_MARGIN = 0.01
COST_RATIO = 2.0
COST_REPEATS = 3
COST_SLACK = 0.3  # seconds: less is no reason to stop anyone, however short the method
QUIET_TIMINGS = 3  # of a baseline, to be its measure by themselves

CostMode = Literal["fail", "warn"]


@dataclass(frozen=True)
class Check:
    name: str
    value: float
    limit: float
    passed: bool
    note: str
    warning: str = ""  # a miss that is no failure, and why

    @property
    def relation(self) -> str:
        return "<=" if self.name in ("finite", "zeros", "cost") else ">="

    @property
    def state(self) -> str:
        return "FAIL" if not self.passed else "warn" if self.warning else "pass"


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


# ---- scores ----


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


def judge_draws(sample: Sample, reference: MethodBaseline) -> Check | None:
    before, now = (found.get("num_draws") for found in (reference.record["diagnostics"], sample.diagnostics))
    if not before:
        return None
    return Check(
        "draws", now or 0, DRAWS_SHARE * before, (now or 0) >= DRAWS_SHARE * before, "posterior draws it reports"
    )


# ---- cost ----


def usual_costs(reference: MethodBaseline) -> dict[str, float]:
    """The baseline's cost by each clock in units of each kernel: the median of its quiet timings, where it has some."""
    timings = [Timing(**timing) for timing in reference.values["timing"]]
    quiet = [timing for timing in timings if not timing.busy]
    costs = [timing.costs() for timing in (quiet if len(quiet) >= QUIET_TIMINGS else timings)]
    return {name: float(np.median([cost[name] for cost in costs])) for name in costs[0]}


@dataclass(frozen=True)
class RelativeCost:
    """A timing against the baseline's; each clock by the kernel that excuses most, as work is of both kinds."""

    timing: Timing
    cpu: float
    wall: float

    @classmethod
    def of(cls, timing: Timing, usual: dict[str, float]) -> "RelativeCost":
        ratios = {name: cost / usual[name] for name, cost in timing.costs().items()}
        return cls(timing, *(min(ratios[f"{kernel} {clock}"] for kernel in KERNELS) for clock in ("cpu", "wall")))

    @property
    def ratio(self) -> float:
        return max(self.cpu, self.wall)

    @property
    def dear(self) -> bool:
        """By either clock: a method that waits costs no processor time."""
        clocks = ((self.cpu, self.timing.cpu_seconds), (self.wall, self.timing.seconds))
        return any(ratio > COST_RATIO and seconds * (1 - 1 / ratio) > COST_SLACK for ratio, seconds in clocks)

    def text(self) -> str:
        return (
            f"{self.timing.cpu_seconds:.1f} s of processor time ({self.cpu:.2f} times the baseline's, calibrated), "
            f"{self.timing.seconds:.1f} s in all ({self.wall:.2f} times)"
        )


def judge_cost(first: Timing, reference: MethodBaseline, again: Callable[[], Timing], mode: CostMode = "fail") -> Check:
    """Whether the method has become dearer. A timing on a busy machine can clear it, but never convict it."""
    usual = usual_costs(reference)
    found = [RelativeCost.of(first, usual)]
    while found[-1].dear and len(found) <= COST_REPEATS:
        found.append(RelativeCost.of(again(), usual))
    last = found[-1]
    if not last.dear:
        note = last.text()
        if last.ratio > COST_RATIO:
            note += f"; passed, because that is less than {COST_SLACK:g} s more"
        return Check("cost", last.ratio, COST_RATIO, True, note)
    quiet = [one for one in found if not one.timing.busy]
    best = min(quiet or found, key=lambda one: one.ratio)
    warning = ""
    if not quiet:
        warning = f"the machine was busy ({best.timing.busy}); run it again on a quiet one"
    elif mode == "warn":
        warning = "dearer than the baseline (--cost warn)"
    note = f"{best.text()}, {len(found)} timings, {len(quiet)} of them on a quiet machine"
    return Check("cost", best.ratio, COST_RATIO, bool(warning), note, warning)


# ---- the whole ----


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


def what_changed(rig: Rig, method: "Method", reference: MethodBaseline) -> list[str]:
    defaults = {option.name: option.default for option in dataclasses.fields(method)}
    before, now = rig.recorded.record["task"], json.loads(canonical_json(rig.task.config))
    return [
        *changes(reference.record["versions"], versions(), "version of", versions()),
        *changes(reference.record["method"], json.loads(canonical_json(method.config)), "option", defaults),
        *changes(
            {k: v for k, v in before.items() if k != "data"},
            {k: v for k, v in now.items() if k != "data"},
            f"{rig.task.name}'s",
        ),
    ]


def run_as_often_as_needed(rig: Rig, method: "Method", reference: MethodBaseline, seed: int) -> list[Sample]:
    """Once; and if that looks noisy, but not beyond all chance, some more times with seeds of their own."""
    return with_more_runs([rig.sample(method, seed)], rig, method, reference, seed)


def with_more_runs(
    samples: list[Sample], rig: Rig, method: "Method", reference: MethodBaseline, seed: int
) -> list[Sample]:
    if suspicious(samples[0], reference) and judge_agreement(samples, reference).passed:
        samples = samples + [rig.sample(method, seed_of_run(seed, run)) for run in range(1, MORE_RUNS + 1)]
    return samples


def seed_of_run(seed: int, run: int) -> int:
    return int(np.random.SeedSequence([seed, run, 77]).generate_state(1)[0])


def gate(
    rig: Rig, label: str, method: "Method", reference: MethodBaseline, seed: int, cost: CostMode = "fail"
) -> Verdict:
    """Runs a method and judges it; whatever the method raises is a failed verdict, not the end of the gate."""
    start = time.perf_counter()
    verdict = Verdict(rig.task.name, label, [], what_changed(rig, method, reference), 0.0)
    try:
        samples = run_as_often_as_needed(rig, method, reference, seed)
        verdict.checks = judge_scores(samples, reference, rig.recorded.losses)
        check = judge_cost(samples[0].timing, reference, lambda: rig.attribute(method, seed)[1], cost)
        verdict.checks.append(check)
        if check.warning:
            verdict.warnings.append(f"cost: {check.warning}; {check.note}")
    except Exception as error:
        verdict.error = error_line(error)
    verdict.seconds = time.perf_counter() - start
    return verdict
