"""Sweeps and budget curves: every cell on tune queries, divergence survived, nothing sampled twice."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from baselines.method import load_method
from bench import schema
from bench.tune import main, trak_projections
from retrain.safe_files import read_checked

PLANTED = "tests.helpers.planted:Planted"


def run(arguments: list[str], extra: list[str]) -> int:
    """A budget where no grid is named, else a sweep."""
    return main(["sweep" if "--grid" in extra else "budget", *arguments, *extra])


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    return [
        "--task", PLANTED, "--alpha", "0.5", "--subsets", "12", "--cluster", "inline", "--device", "cpu",
        "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out"),
        "--set", "bif.n_beta=200", "--set", "bif.draws=40", "--set", "bif.minibatch=50",
    ]  # fmt: skip


def test_a_sweep_marks_diverged_cells_and_reports_the_best_on_other_queries(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments, ["--grid", "gamma=1,10", "step_size=0.004,1.0"]) == 0
    result = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert result["axes"] == {"gamma": [1.0, 10.0], "step_size": [0.004, 1.0]}
    by_step = {step: [cell for cell in result["cells"] if cell["step_size"] == step] for step in (0.004, 1.0)}
    assert [cell["lds"] for cell in by_step[1.0]] == [None, None]
    assert all("healthy" in cell["reason"] for cell in by_step[1.0])
    assert all(cell["lds"] > 0.3 for cell in by_step[0.004])
    assert all(len(cell["traces"]) == 4 for cell in result["cells"])
    assert result["split"] == "tune"
    best = max(by_step[0.004], key=lambda cell: cell["lds"])
    assert result["best_on_report"]["lds"]["tune"] == best["lds"]
    assert result["best_on_report"]["lds"]["lds"] != best["lds"], "another set of queries"
    assert "NaN" in capsys.readouterr().out


def test_a_sweep_without_any_score_says_so_after_its_table(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bench.tune.write_json", full)
    assert run(arguments, ["--grid", "step_size=1.0"]) == 1
    captured = capsys.readouterr()
    assert "step_size" in captured.out
    assert "sweep.json cannot be written: No space left on device" in captured.err
    assert "no cell has an LDS" in captured.err


@pytest.mark.parametrize("extra", [["--grid", "gamma=1,2"], ["--methods", "bif@gamma=1"]])
def test_what_ran_away_is_not_run_again(
    extra: list[str], arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from baselines.bif.method import BIF

    command = [*extra, "--set", "bif.step_size=1000"]
    assert run(arguments, command) == 1
    (path,) = (tmp_path / "out").glob("*.json")
    before = json.loads(path.read_text())
    if cells := before.get("cells"):  # with losses beyond what floats of a record may hold
        read_checked(path, schema.SweepRecord)
        assert not any(str(tmp_path) in cell["reason"] for cell in cells), "no place of this machine"
    monkeypatch.setattr(BIF, "score", None)
    assert run(arguments, command) == 1
    assert json.loads(path.read_text())["run_id"] == before["run_id"], "the same words, and so the same record"


def test_budget_curves_use_one_runs_traces(arguments: list[str], tmp_path: Path) -> None:
    assert run(arguments, ["--set", "bif.gamma=1", "--set", "bif.step_size=0.004", "--set", "trak.ridge=0.001"]) == 0
    result = json.loads((tmp_path / "out" / "budget.json").read_text())
    raw = next(c for c in result["curves"] if c["method"] == "bif" and not c["normalised"])
    values = [point["value"] for point in raw["points"]]
    assert values == sorted(values)
    assert values[-1] == 160, "4 chains of 40 draws"
    assert raw["points"][-1]["lds"] > 0.3
    # This model has fewer parameters than TRAK's least projection.
    assert {(c["method"], c["axis"]) for c in result["curves"]} == {("bif", "draws"), ("trak", "checkpoints")}


def test_a_budget_has_several_variants_and_one_that_diverges_costs_its_own_curve_alone(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = ["bif@step_size=0.004,gamma=1", "short=bif@step_size=0.004,gamma=1,draws=10,keep_traces=true"]
    assert run(arguments, ["--methods", *variants, "wild=bif@step_size=1000,gamma=1"]) == 1
    assert "no curve of wild: " in capsys.readouterr().err
    result = json.loads((tmp_path / "out" / "budget.json").read_text())
    curves = {(curve["label"], curve["normalised"]): curve["points"] for curve in result["curves"]}
    assert {label for label, _ in curves} == {variants[0], "short"}
    assert list(result["failed"]) == ["wild"]
    assert [point["value"] for point in curves[variants[0], False]] == [20, 48, 100, 160], "round numbers, and all"
    assert [point["value"] for point in curves["short", True]] == [20, 40]
    assert all(curve["method"] == "bif" for curve in result["curves"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"projection": 1000, "relative_ridge": 1.0}, [128, 512, 1000]),
        ({"projection": 1000, "ridge": 0.0}, [128]),
        ({"projection": 200, "ridge": 0.0}, [128, 200]),
        ({"projection": 4096, "relative_ridge": 1.0}, [128, 512]),
    ],
)
def test_trak_is_drawn_at_the_projections_that_it_takes_as_they_are(options: dict, expected: list[int]) -> None:
    model = nn.Linear(1100, 1, bias=False)
    cells = SimpleNamespace(scorer=lambda _: SimpleNamespace(model=model), task=SimpleNamespace(train_data=range(300)))
    assert trak_projections(cells, load_method("trak", **options)) == expected


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--grid", "gama=1"], "available"),
        (["--methods", "bif", "--set", "bif.n_beta=many"], "bif.n_beta is 'many'; expected"),
        (["--grid", "gamma=1e3,1e4", "--set", "bif.n_beta=many"], "bif.n_beta is 'many'; expected"),
        (["--grid", "gamma=1,2", "--set", "bif.gamma=5"], "gamma is swept"),
        (["--grid", "gamma=1", "--set", "ekfac.damping=1"], '--set names "ekfac", which is neither the task'),
        (["--methods", "bif", "ekfac"], 'has "ekfac"; expected variants of bif or trak'),
        (["--methods", "ekfac@damping=1", "--grid", "damping=1"], 'one method here, not "ekfac@damping=1"'),
        (["--methods", "ekfac", "--set", "ekfac.damping=1", "--grid", "relative_damping=1"], "damping is swept"),
    ],
)
def test_what_would_be_ignored_is_refused_before_anything_is_retrained(
    arguments: list[str], extra: list[str], words: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.runner.Session.retrain", lambda _: pytest.fail("retrained"))
    assert words in refused(lambda extra: run(arguments, extra), extra)


def test_a_method_that_cannot_run_is_refused_before_anything_is_retrained(
    arguments: list[str], refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.runner.Session.retrain", lambda _: pytest.fail("retrained"))
    monkeypatch.setattr("baselines.gradsim.GradSim.skip", lambda *_: "the moon is full")
    command = ["sweep", *arguments[: arguments.index("--set")], "--methods", "gradsim"]
    assert "--grid OPTION=V1,V2 is needed for gradsim" in refused(main, command)
    assert "the moon is full" in refused(main, [*command, "--grid", "batch_size=10"])


def test_another_runs_record_is_kept_and_failed_cells_are_named(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, out = ["--grid", "gamma=1", "--set"], tmp_path / "out"
    assert run(arguments, [*command, "bif.step_size=0.004"]) == 0
    first = json.loads((out / "sweep.json").read_text())["run_id"]
    assert run(arguments, [*command, "bif.step_size=0.004"]) == 0
    assert [path.name for path in out.glob("*.json")] == ["sweep.json"], "the same run again"
    assert run(arguments, [*command, "bif.step_size=1.0"]) == 1
    assert "no LDS at gamma 1: " in capsys.readouterr().err
    assert json.loads((out / f"sweep.{first}.json").read_text())["run_id"] == first
