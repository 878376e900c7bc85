"""The gate: what it must catch, what it must let pass, and how it says so."""

import math
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bench.regress as gate
from bench.regress import COST_REPEATS, PACKAGED, MethodBaseline, Sample, Timing, judge_cost, main, mean_lds, tolerance
from retrain.tasks import load_task

NUM_SUBSETS, NUM_QUERIES, NUM_TRAIN = 60, 40, 200
BROKEN = """
from baselines.gradsim import GradSim
from baselines.method import Attribution, Method
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Flipped(GradSim):
    def score(self, problem, state):
        found = super().score(problem, state)
        return replace(found, scores=-found.scores)


@dataclass(frozen=True, kw_only=True)
class Transposed(GradSim):
    def score(self, problem, state):
        return Attribution(scores=super().score(problem, state).scores.T)


@dataclass(frozen=True, kw_only=True)
class Raising(Method):
    def score(self, problem, state):
        raise RuntimeError("no luck")
"""


def timing(cost: float = 10.0, seconds: float = 40.0, busy: str = "") -> Timing:
    """Of a method that costs so many runs of the kernel."""
    return Timing(seconds, seconds / cost, busy)


class World:
    """A noisy method on a linear problem, run as often as one likes."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self.masks = np.stack([generator.permutation(NUM_TRAIN) < 20 for _ in range(NUM_SUBSETS)])
        self.signal = generator.normal(size=(NUM_QUERIES, NUM_TRAIN))
        self.losses = self.masks @ self.signal.T + generator.normal(size=(NUM_SUBSETS, NUM_QUERIES))
        samples = [self.sample(self.scores(1000 + seed)) for seed in range(12)]
        rows = [gate.standardised(sample.rows) for sample in samples]
        total = np.sum(rows, axis=0)
        values = {
            "agreement": [gate.agreement(row, total - row) for row in rows],
            "lds": [sample.lds for sample in samples],
            "lds_normalised": [sample.lds_normalised for sample in samples],
            "zeros": [0.0] * 12,
            "timing": [timing().as_recorded()] * 12,
        }
        record = {"values": values, "seeds": list(range(12)), "prediction_seed": 3, "diagnostics": {"num_draws": 400}}
        self.reference = MethodBaseline(record, total / 12, samples[3].prediction)

    def scores(self, seed: int, level: float = 0.3) -> np.ndarray:
        return self.signal + level * np.random.default_rng([seed, 1]).normal(size=self.signal.shape)

    def sample(self, scores: np.ndarray, **changes: Any) -> Sample:
        prediction = self.masks @ scores.T
        lds = mean_lds(self.losses, np.nan_to_num(prediction))
        made = Sample(
            prediction=prediction, rows=scores, lds=lds, lds_normalised=lds, zeros=float((scores == 0).mean()),
            num_not_finite=int((~np.isfinite(scores)).sum()), timing=timing(), diagnostics={"num_draws": 400},
        )  # fmt: skip
        return replace(made, **changes)

    def failed(self, *samples: Sample) -> set[str]:
        return {check.name for check in gate.judge_scores(samples, self.reference, self.losses) if not check.passed}


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def test_an_unchanged_method_passes_and_broken_scores_are_caught(world: World) -> None:
    assert [seed for seed in range(40) if world.failed(world.sample(world.scores(seed)))] == []
    for seed in range(20):
        generator, scores = np.random.default_rng([seed, 2]), world.scores(seed)
        assert "agreement" in world.failed(world.sample(-scores))
        assert "agreement" in world.failed(world.sample(scores[:, generator.permutation(NUM_TRAIN)]))
        assert "zeros" in world.failed(world.sample(scores * (generator.random(scores.shape) >= 0.1)))
        assert "lds" in world.failed(world.sample(world.scores(seed, level=3.0)))
    for seed in range(20):  # twice the noise, in three runs
        samples = [world.sample(world.scores(seed + 100 * run, level=0.3 * math.sqrt(2))) for run in range(3)]
        assert gate.suspicious(samples[0], world.reference)
        assert "agreement" in world.failed(*samples)


def test_each_check_catches_its_own(world: World) -> None:
    scores = world.scores(0)
    for diagnostics in ({"num_draws": 200}, {}):
        assert world.failed(world.sample(scores, diagnostics=diagnostics)) == {"draws"}
    assert world.failed(world.sample(scores, lds_normalised=None)) == {"lds-normalised"}
    # Undefined queries are left out of the paired interval; they count as 0 on both sides of the comparison.
    silent = np.where(np.arange(NUM_QUERIES)[:, None] < NUM_QUERIES // 2, 0.5, scores)
    assert "lds" in world.failed(world.sample(silent))
    scores[3, 4] = np.nan
    assert world.failed(world.sample(scores)) == {"finite"}


class Stopwatch:
    """Gives these timings, one at a time."""

    def __init__(self, *timings: Timing):
        self.timings, self.calls = timings, 0

    def __call__(self) -> Timing:
        self.calls += 1
        return self.timings[min(self.calls, len(self.timings)) - 1]


def test_cost_is_timed_again_before_it_is_an_alarm(world: World) -> None:
    for again, state, calls in ((11.0, "pass", 1), (24.0, "FAIL", COST_REPEATS)):
        stopwatch = Stopwatch(timing(again))
        check = judge_cost(timing(25.0), world.reference, stopwatch)
        assert (check.passed, check.state, stopwatch.calls) == (state == "pass", state, calls)
    fine = Stopwatch()
    assert judge_cost(timing(19.0), world.reference, fine).passed
    brief = judge_cost(timing(25.0, seconds=0.4), world.reference, fine)
    assert brief.passed, "0.24 seconds beyond the baseline stop nobody"
    assert brief.value < brief.limit
    assert fine.calls == 0
    dear = judge_cost(timing(25.0), world.reference, Stopwatch(timing(25.0)))
    assert (dear.value, dear.limit) == (pytest.approx(40.0), pytest.approx(2 * 16.0)), "seconds on both sides"
    assert judge_cost(timing(25.0), world.reference, Stopwatch(timing(25.0)), only_warn=True).state == "warn"


def test_a_busy_machine_is_a_warning_and_never_a_failure(world: World) -> None:
    busy = timing(25.0, busy="the calibration took 1.9 times its processor time")
    check = judge_cost(busy, world.reference, Stopwatch(busy))
    assert (check.passed, check.state) == (True, "warn")
    assert "1.9 times" in check.warning
    # One quiet timing among them is enough to convict, and one fine timing to clear, whatever the others were.
    assert judge_cost(busy, world.reference, Stopwatch(busy, timing(25.0), busy)).state == "FAIL"
    assert judge_cost(timing(25.0), world.reference, Stopwatch(busy, timing(12.0, busy="x"))).state == "pass"
    # Of the baseline's own timings, busy ones do not count where there are quiet ones.
    timings = [timing(30.0, busy="x")] * 9 + [timing(10.0)] * 3
    record = {**world.reference.record, "values": {"timing": [one.as_recorded() for one in timings]}}
    assert gate.usual_cost(replace(world.reference, record=record)) == pytest.approx(10.0)


def test_the_tolerance_is_a_prediction_limit() -> None:
    """Of many baselines of twelve seeds, the share of new values outside is the tail asked for."""
    generator = np.random.default_rng(0)
    values = generator.normal(size=(4000, 12))
    outside = [
        new < block.mean() - tolerance(block, 0.0, tail=0.05) for block, new in zip(values, generator.normal(size=4000))
    ]
    assert np.mean(outside) == pytest.approx(0.05, abs=0.012)
    assert tolerance([1.0, 1.0], floor=0.02) == tolerance([1.0], floor=0.02) == 0.02
    assert gate.noise_level([0.9])[0] - gate.noise_level([0.95])[0] == pytest.approx(math.log(2))


# ---- the command, on the recorded baseline ----


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, with methods of their own."""
    (tmp_path / "broken.py").write_text(BROKEN)
    shutil.copytree(PACKAGED, tmp_path / "gate")
    for own in ("flipped", "transposed", "raising", "slow"):  # held against what gradsim does
        for kind in ("json", "safetensors"):
            shutil.copyfile(PACKAGED / f"digits-gradsim.{kind}", tmp_path / "gate" / f"digits-{own}.{kind}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_gate_passes_and_writes_its_report(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--task", "digits", "--methods", "gradsim", "--junit", "gate.xml", "--seed", "5"]) == 0
    said = capsys.readouterr().out
    assert "passed (1 methods" in said
    suite = ElementTree.fromstring((mine / "gate.xml").read_text())[0]
    assert suite.get("failures") == "0"
    assert {case.get("name") for case in suite} == {"finite", "zeros", "agreement", "lds", "lds-normalised", "cost"}


def test_broken_methods_fail_with_the_reason(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods = [f"{name.lower()}=broken:{name}" for name in ("Flipped", "Transposed", "Raising")]
    command = ["--methods", *methods, "--task", "digits", "--baseline", "gate", "--junit", "gate.xml"]
    assert main(command) == 1
    assert "FAILED: flipped on digits, transposed on digits, raising on digits" in capsys.readouterr().out
    failures = {
        (case.get("classname"), case.get("name")): failure.get("message", "")
        for case in ElementTree.fromstring((mine / "gate.xml").read_text())[0]
        for failure in case.findall("failure")
    }
    assert "the sign is flipped" in failures["digits.flipped", "agreement"]
    assert ("digits.flipped", "lds") in failures
    assert "they are transposed" in failures["digits.transposed", "run"]
    assert re.fullmatch(r"RuntimeError: no luck \(.*broken\.py:\d+\)", failures["digits.raising", "run"])


def test_what_is_missing_damaged_or_old_is_one_line(mine: Path, refused: Callable[..., str], monkeypatch: Any) -> None:
    damaged, old = (shutil.copytree(PACKAGED, mine / name) for name in ("damaged", "old"))
    (damaged / "digits-gradsim.safetensors").write_bytes(b"nothing")
    earlier = (old / "digits.json").read_text().replace(gate.BASELINE_FORMAT, "tda-bench gate 1")
    (old / "digits.json").write_text(earlier)
    for arguments, text in (
        (["--baseline", "nowhere"], "no baseline in nowhere; "),
        (["--methods", "broken:Flipped"], "no baseline of broken:Flipped on digits"),
        (["--methods", "broken:Nobody"], '"broken:Nobody": the module broken has no class Nobody'),
        (["--baseline", str(damaged), "--task", "digits", "--methods", "gradsim"], "digits-gradsim.safetensors"),
        (["--baseline", "old"], "record it again with --update"),
    ):
        assert text in refused(main, arguments)
    monkeypatch.setattr(gate, "PACKAGED", mine / "site-packages" / "bench" / "regress" / "baseline")
    assert "name a folder with --baseline DIR" in refused(main, ["--update"])


def test_a_slow_method_fails_and_a_label_names_what_its_baseline_is_of(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.regress.WAITING_RATIO", 1e9)
    monkeypatch.setattr("bench.regress.COST_REPEATS", 0)
    slow = ["--methods", "slow=tests.helpers.bad_methods:Slow@times=12", "--task", "digits", "--baseline", "gate"]
    assert main(slow) == 1
    states = {line.split()[2]: line.split()[3] for line in capsys.readouterr().out.splitlines() if "slow" in line}
    assert (states["lds"], states["cost"]) == ("pass", "FAIL")
    asked = gate.make_parser().parse_args(["--methods", "bif"])
    chosen = gate.chosen_methods(asked, PACKAGED, load_task("digits"))
    assert [(label, method.config["draws"]) for label, method in chosen] == [("bif", 100)]


def test_the_recorded_baseline_is_small_and_sound() -> None:
    assert sum(path.stat().st_size for path in PACKAGED.iterdir()) < 1_500_000
    for name in gate.GATED_METHODS:
        reference = gate.read_method_baseline(PACKAGED, "digits", gate.parse_method_spec(name).label or name)
        assert len(reference.record["seeds"]) >= 10
        assert min(reference.values["lds"]) > 0.1
        assert gate.usual_cost(reference) > 0
