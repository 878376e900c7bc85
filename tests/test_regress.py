"""The gate: what it must catch, what it must let pass, and how it says so. `tests/gate_trials.py` counts how often."""

import json
import math
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import regress
from bench.regress import Check, Reference, Sample, judge, mean_lds, noise, standardised, suspicious, tolerance

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


class World:
    """A noisy method on a linear problem, run as often as one likes."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self.masks = np.stack([generator.permutation(NUM_TRAIN) < 20 for _ in range(NUM_SUBSETS)])
        self.signal = generator.normal(size=(NUM_QUERIES, NUM_TRAIN))
        self.losses = self.masks @ self.signal.T + generator.normal(size=(NUM_SUBSETS, NUM_QUERIES))
        rows = [standardised(self.scores(1000 + seed)) for seed in range(12)]
        samples = [self.sample(self.scores(1000 + seed)) for seed in range(12)]
        total = np.sum(rows, axis=0)
        values = {
            "agreement": [regress.agreement(row, total - row) for row in rows],
            "lds": [sample.lds for sample in samples],
            "lds_normalised": [sample.lds_normalised for sample in samples],
            "zeros": [0.0] * 12,
            "cost": [10.0] * 12,
            "seconds": [1.0] * 12,
        }
        record = {
            "values": values, "seeds": list(range(12)), "prediction_seed": 3, "diagnostics": {"num_draws": 400},
        }  # fmt: skip
        self.reference = Reference(record, total / 12, samples[3].prediction)

    def scores(self, seed: int, level: float = 0.3) -> np.ndarray:
        return self.signal + level * np.random.default_rng([seed, 1]).normal(size=self.signal.shape)

    def sample(self, scores: np.ndarray, **changes: Any) -> Sample:
        prediction = self.masks @ scores.T
        made = Sample(
            prediction=prediction,
            rows=scores,
            lds=mean_lds(self.losses, np.nan_to_num(prediction)),
            lds_normalised=mean_lds(self.losses, np.nan_to_num(prediction)),
            zeros=float((scores == 0).mean()),
            num_not_finite=int((~np.isfinite(scores)).sum()),
            cost=10.0,
            seconds=1.0,
            diagnostics={"num_draws": 400},
        )
        return replace(made, **changes)

    def failed(self, *samples: Sample) -> set[str]:
        return {check.name for check in judge(samples, self.reference, self.losses) if not check.passed}


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def test_an_unchanged_method_passes(world: World) -> None:
    assert [seed for seed in range(40) if world.failed(world.sample(world.scores(seed)))] == []


def test_broken_scores_are_caught(world: World) -> None:
    for seed in range(20):
        generator, scores = np.random.default_rng([seed, 2]), world.scores(seed)
        assert "agreement" in world.failed(world.sample(-scores))
        assert "agreement" in world.failed(world.sample(scores[:, generator.permutation(NUM_TRAIN)]))
        assert "zeros" in world.failed(world.sample(scores * (generator.random(scores.shape) >= 0.1)))
        assert "lds" in world.failed(world.sample(world.scores(seed, level=3.0)))


def test_twice_the_noise_is_caught(world: World) -> None:
    for seed in range(20):
        samples = [world.sample(world.scores(seed + 100 * run, level=0.3 * math.sqrt(2))) for run in range(3)]
        assert suspicious(samples[0], world.reference)
        assert "agreement" in world.failed(*samples)


def test_fewer_draws_than_recorded_are_caught(world: World) -> None:
    half = world.sample(world.scores(0), diagnostics={"num_draws": 200})
    assert world.failed(half) == {"draws"}
    assert world.failed(world.sample(world.scores(0), diagnostics={})) == {"draws"}


def test_scores_that_are_not_finite_are_caught(world: World) -> None:
    scores = world.scores(0)
    scores[3, 4] = np.nan
    assert world.failed(world.sample(scores)) == {"finite"}


def test_a_lost_train_scale_is_caught(world: World) -> None:
    assert world.failed(world.sample(world.scores(0), lds_normalised=None)) == {"lds-normalised"}


def test_cost_is_timed_again_before_it_is_an_alarm(world: World) -> None:
    class Busy:
        def __init__(self, again: float):
            self.again, self.calls = again, 0

        def attribute(self, method: Any, seed: int) -> tuple[None, float, float]:
            self.calls += 1
            return None, 40.0, self.again

    slow = world.sample(world.scores(0), cost=25.0, seconds=40.0)
    for again, passed, calls in ((11.0, True, 1), (24.0, False, regress.COST_REPEATS)):
        busy: Any = Busy(again)
        check = regress.judge_cost(busy, None, 0, slow, world.reference)  # type: ignore[arg-type]
        assert check.passed is passed
        assert busy.calls == calls
    brief = world.sample(world.scores(0), cost=25.0, seconds=2.0)
    assert regress.judge_cost(Busy(24.0), None, 0, brief, world.reference).passed  # type: ignore[arg-type]
    fine: Any = Busy(99.0)
    assert regress.judge_cost(fine, None, 0, world.sample(world.scores(0), cost=19.0), world.reference).passed  # type: ignore[arg-type]
    assert fine.calls == 0


def test_the_tolerance_is_a_prediction_limit() -> None:
    """Of many baselines of twelve seeds, the share of new values outside is the tail asked for."""
    generator = np.random.default_rng(0)
    values = generator.normal(size=(4000, 12))
    outside = [
        new < block.mean() - tolerance(block, 0.0, tail=0.05) for block, new in zip(values, generator.normal(size=4000))
    ]
    assert np.mean(outside) == pytest.approx(0.05, abs=0.012)
    assert tolerance([1.0, 1.0], floor=0.02) == 0.02
    assert tolerance([1.0], floor=0.02) == 0.02
    assert noise([0.9])[0] - noise([0.95])[0] == pytest.approx(math.log(2))


# ---- the command, on the recorded baseline ----


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, with methods of their own."""
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_gate_passes_and_writes_its_reports(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "--tasks",
        "digits",
        "--methods",
        "gradsim",
        "--junit",
        "gate.xml",
        "--summary",
        "summary.md",
        "--seed",
        "5",
    ]
    assert regress.main(command) == 0
    said = capsys.readouterr().out
    assert "passed (1 methods" in said
    suite = ElementTree.fromstring((mine / "gate.xml").read_text())[0]
    assert suite.get("failures") == "0"
    assert {case.get("name") for case in suite} == {"finite", "zeros", "agreement", "lds", "lds-normalised", "cost"}
    assert "| digits | `gradsim` | pass |" in (mine / "summary.md").read_text()


def test_reports_that_cannot_be_written_come_after_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    verdict = regress.Verdict("digits", "bif", [Check("lds", 0.0, -0.02, True, "")], [], 1.0)
    monkeypatch.setattr(regress, "compare", lambda *_: [verdict])
    assert regress.main(["--junit", str(tmp_path / "absent" / "gate.xml"), "--summary", str(tmp_path / "s.md")]) == 1
    captured = capsys.readouterr()
    assert "passed (1 methods" in captured.out
    assert captured.err.endswith("gate.xml cannot be written: No such file or directory\n")
    assert (tmp_path / "s.md").exists()


def test_broken_methods_fail_with_the_reason(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["Flipped", "Transposed", "Raising"]
    methods = [word for name in names for word in ("--method", f"broken:{name}")]
    command = [*methods, "--tasks", "digits", "--against", "gradsim", "--junit", "gate.xml", "--json"]
    assert regress.main(command) == 1
    verdicts = {verdict["method"]: verdict for verdict in json.loads(capsys.readouterr().out)}
    assert not any(verdict["passed"] for verdict in verdicts.values())
    flipped = {check["name"]: check for check in verdicts["broken:Flipped"]["checks"]}
    assert "the sign is flipped" in flipped["agreement"]["note"]
    assert not flipped["lds"]["passed"]
    assert "they are transposed" in verdicts["broken:Transposed"]["error"]
    assert verdicts["broken:Raising"]["error"] == "RuntimeError: no luck"
    suite = ElementTree.fromstring((mine / "gate.xml").read_text())[0]
    assert int(suite.get("failures", "0")) >= 4


def test_what_is_missing_or_damaged_is_one_line(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = mine / "damaged"
    shutil.copytree(regress.default_baseline(), damaged)
    (damaged / "digits-gradsim.safetensors").write_bytes(b"nothing")
    for arguments, text in (
        (["--baseline", "nowhere"], "no baseline in nowhere; `python -m bench.regress --update --baseline nowhere`"),
        (["--method", "broken:Flipped"], "no baseline of broken:Flipped on digits"),
        (["--method", "broken:Nobody"], 'cannot import method "broken:Nobody"'),
        (["--baseline", str(damaged), "--tasks", "digits", "--methods", "gradsim"], "digits-gradsim.safetensors"),
    ):
        assert regress.main(arguments) == 2
        said = capsys.readouterr().err
        assert text in said
        assert said.count("\n") == 1


def test_changed_versions_are_a_warning(world: World) -> None:
    found = regress.changes(
        {"torch": "2.6", "numpy": "2.0", "python": "3.10"}, {"torch": "2.7", "numpy": "2.0"}, "version of"
    )
    assert found == ["version of torch: '2.6' in the baseline, '2.7' now"]
    verdict = regress.Verdict("digits", "bif", [Check("lds", 0.0, -0.02, True, "")], found, 1.0)
    assert verdict.passed
    assert "warning: version of torch" in regress.markdown([verdict])
    assert "version of torch" in regress.junit([verdict])


def test_an_option_that_is_younger_than_the_baseline_is_no_change_at_its_default() -> None:
    now = {"draws": 50, "localiser": "isotropic", "shrinkage": True}
    found = regress.changes({"draws": 50}, now, "option", {"draws": 100, "localiser": "isotropic", "shrinkage": False})
    assert found == ["option shrinkage: None in the baseline, True now"]


def test_the_recorded_baseline_is_small_and_sound() -> None:
    folder = Path(regress.default_baseline())
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1_500_000
    for name in regress.GATED_METHODS:
        record = regress.read_reference(folder, "digits", name).record
        assert len(record["seeds"]) >= 10
        assert min(record["values"]["lds"]) > 0.1
