"""Tuning, sweeps and budgets: as many tries for all, on queries and subsets never reported; divergence survived."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn

import bench.tune as tuning
from baselines.method import load_method
from bench import Execution, Experiment, run, schema, scoring
from bench.methods import TUNED_FORMAT, settings_of, tuned_settings
from bench.tune import Tried, beyond, choose, clearly_behind, main, settings_to_try, trak_projections, tune_method
from retrain import subsets
from retrain.errors import UsageError
from retrain.safe_files import read_checked
from retrain.store import Store
from retrain.tasks import load_task
from retrain.tasks.digits import Digits

PLANTED = "tests.helpers.planted:Planted"


@pytest.fixture(autouse=True)
def nothing_beyond_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "FURTHER", 0)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    return [
        "--task", PLANTED, "--alpha", "0.5", "--subsets", "20", "--replicates", "1", "--cluster", "inline",
        "--device", "cpu", "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "tune"),
    ]  # fmt: skip


def test_it_keeps_the_grid_and_its_choice_is_used(arguments: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    command = [*arguments, "--methods", "ekfac", "--tries", "3"]
    assert main(command) == 0
    record = json.loads((tmp_path / "tune" / "tune.json").read_text())
    assert (record["split"], record["stream"]) == ("tune", "tune")
    assert record["code"]
    found = record["methods"]["ekfac"]
    tried, chosen = [cell["options"] for cell in found["grid"]], found["chosen"]["raw"]["options"]
    assert (len(tried), tried[0]) == (3, {}), "the defaults are tried first"
    assert chosen in tried
    monkeypatch.setenv("TDA_BENCH_TUNED", str(tmp_path / "tune"))
    execution = Execution(device="cpu", cache=str(tmp_path / "cache"), progress=False)
    result = run(Experiment(task=PLANTED, alpha=0.5, subsets=12, replicates=1, methods="ekfac"), execution)
    assert set(result.frame()["label"]) == {"ekfac"}
    assert result.out.rows[0]["origin"] == "tuned"
    assert all(getattr(result.variants[0].method, name) == value for name, value in chosen.items())


def test_what_would_choose_nothing_is_refused_before_anything_is_made(
    arguments: list[str], tmp_path: Path, refused: Callable[..., str]
) -> None:
    for extra, words in (
        (["ekfac", "--set", "ekfac.damping=1"], "--set fixes all that ekfac would be tuned in (damping)"),
        (["random"], "random declares no grid"),
        (["ekfac", "--set", "ekfac.nosuch=1"], 'no option "nosuch"'),
        (["ekfac@damping=1"], '"ekfac@damping=1" is a variant'),
    ):
        assert words in refused(main, [*arguments, "--methods", *extra])
    assert not (tmp_path / "tune").exists()


def test_no_reported_query_and_no_reported_subset_is_seen(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever subset is drawn and whatever query is asked about."""
    streams, asked = set(), set()
    true_mask, true_problem = subsets.mask, scoring.problem_of

    def mask(*words: Any, **named: Any) -> np.ndarray:
        streams.add(words[5] if len(words) > 5 else named.get("stream", "report"))
        return true_mask(*words, **named)

    def problem(question: Any, *words: Any) -> Any:
        asked.update(question.query_indices().tolist())
        return true_problem(question, *words)

    monkeypatch.setattr(subsets, "mask", mask)
    monkeypatch.setattr(scoring, "problem_of", problem)
    assert main([*arguments, "--methods", "ekfac", "--tries", "2"]) == 0
    assert streams == {"tune"}, "no reported subset was looked at"
    assert asked
    assert not asked & set(load_task(PLANTED).query_indices("report").tolist())
    entries = [info.path / "entry.json" for info in Store(tmp_path / "cache").entries("retrain")]
    assert {json.loads(path.read_text())["config"]["stream"] for path in entries} == {"tune"}
    for seed in range(3):
        drawn = [subsets.masks(seed, 100, 0.1, 500, stream=stream) for stream in ("report", "tune", "learn")]
        assert len({tuple(row) for masks in drawn for row in masks}) == 300


def test_ties_within_the_paired_interval_go_to_the_cheaper() -> None:
    generator = np.random.default_rng(0)
    losses = generator.normal(size=(60, 40))

    def tried(noise: float, seconds: float, score: float) -> Tried:
        made = losses + noise * generator.normal(size=losses.shape)
        return Tried({"noise": noise}, seconds, predictions={"raw": [made], "normalised": []}, lds={"raw": score})

    best, tie, behind = tried(1.0, 10.0, 0.7), tried(1.0, 1.0, 0.695), tried(1.5, 0.1, 0.692)
    broken = Tried({}, lds={"raw": None})
    assert clearly_behind([behind, best, tie], best, [(losses, None)], "raw") == [True, False, False]
    truths = [(losses, None)]
    chosen = choose([best, behind, broken, tie], truths, "raw")
    assert (chosen["seconds"], chosen["num_ties"]) == (1.0, 2)
    tie.seconds = 9.5  # a clock cannot tell it from 10: the better one is taken
    assert choose([best, behind, broken, tie], truths, "raw")["lds"] == best.lds["raw"]
    assert choose([broken], truths, "raw") is None
    alone = choose([best], truths, "raw")
    assert (alone["options"], alone["num_ties"]) == (best.options, 1)
    few = losses[:, :1]  # one query decides nothing: what is far behind is no tie all the same
    wide = [
        Tried({"n": n}, cost, predictions={"raw": [few + noise * made[:, :1]], "normalised": []}, lds={"raw": score})
        for n, (noise, cost, score) in enumerate(((1.0, 9.0, 0.5), (1.1, 1.0, 0.495), (1.2, 0.1, 0.48)))
        for made in [generator.normal(size=losses.shape)]
    ]
    assert choose(wide, [(few, None)], "raw")["options"] == {"n": 1}


def test_settings_are_tried_once_and_what_is_fixed_is_not_tuned(arguments: list[str], tmp_path: Path) -> None:
    for method, fixed in ((load_method("ekfac"), ()), (load_method("bif", draws=25), ("draws",))):
        found = list(settings_to_try(method, 1, fixed))
        assert found[0] == {}, "the defaults are tried first"
        assert found == list(settings_to_try(method, 1, fixed))
        assert len({json.dumps(one, sort_keys=True) for one in found}) == len(found), "every setting once"
    assert not any("draws" in options for options in found)
    assert {"gamma": 1e4, "n_beta": 200.0, "step_size": 1e-5} in found, "the rest of a setting is still tried"
    assert main([*arguments, "--methods", "trak", "--set", "trak.projection=128", "--tries", "2"]) == 0
    tuned = json.loads((tmp_path / "tune" / "tune.json").read_text())["methods"]["trak"]
    assert tuned["fixed"] == {"projection": 128}
    assert all("projection" not in cell["options"] for cell in tuned["grid"])


def test_beyond_the_edge_lies_ten_times_or_a_tenth_all_else_equal() -> None:
    trak = load_method("trak")  # relative_ridge 10, projection 2048
    tried: list[dict[str, object]] = [{}, {"relative_ridge": 1.0}, {"relative_ridge": 100.0}]
    assert list(beyond(trak, {"relative_ridge": 100.0}, tried)) == [{"relative_ridge": 1000.0}]
    assert list(beyond(trak, {"relative_ridge": 1.0}, tried)) == [{"relative_ridge": 0.1}]
    assert list(beyond(trak, {}, tried)) == [], "it has neighbours on both sides"
    # A whole number is a budget, and another projection's ridges say nothing about this one's.
    wider = {"relative_ridge": 10.0, "projection": 4096}
    assert list(beyond(trak, wider, [*tried, wider])) == []
    both = [*tried, wider, {"relative_ridge": 1.0, "projection": 4096}]
    assert list(beyond(trak, wider, both)) == [{"relative_ridge": 100.0, "projection": 4096}]
    # 0 leaves gamma to the pilot: it has no tenth.
    bif = load_method("bif")
    assert list(beyond(bif, {}, [{}, {"gamma": 1e4}])) == []


class _Rising:
    """A grid whose best damping is far outside the grid."""

    seed, options, plans = 1, {}, (None,)
    prepare = scorer = within = staticmethod(lambda *_: None)
    losses = staticmethod(lambda *_: np.zeros((4, 2)))
    method = staticmethod(load_method)


@pytest.mark.parametrize(("further", "reached"), [(0, 10.0), (2, 1000.0), (9, 10000.0)])
def test_the_best_is_followed_beyond_the_grid(further: int, reached: float, monkeypatch: pytest.MonkeyPatch) -> None:

    def try_settings(blocks: object, name: str, options: dict[str, float]) -> Tried:
        score = 1.0 - 0.1 * abs(np.log10(options.get("relative_damping", 0.1) / 1e4))  # its peak is at 1e4
        nothing = {kind: [np.zeros((4, 2))] for kind in ("raw", "normalised")}
        return Tried(options, 1.0, predictions=nothing, lds={"raw": score, "normalised": score})

    monkeypatch.setattr(tuning, "try_settings", try_settings)
    monkeypatch.setattr(tuning, "clearly_behind", lambda others, *words: [True] * len(others))
    monkeypatch.setattr(tuning, "FURTHER", further)
    found = tune_method([_Rising()], "ekfac", 8)
    assert found["chosen"]["raw"]["options"] == {"relative_damping": reached}
    assert found["num_beyond"] == min(further, 4), "it stops one step behind the peak"
    assert len(found["grid"]) == 8 + found["num_beyond"]


def test_several_jobs_try_settings_at_once_to_the_same_end(arguments: list[str], tmp_path: Path) -> None:
    """A setting that fails in a worker is a cell with its reason, as it is in one process, and is not run again."""
    words = [*arguments, "--methods", "bif", "--set", "bif.draws=20", "--tries", "4"]
    found = {}
    for name, cluster in (("inline", ["inline"]), ("local", ["local", "--jobs", "2"])):
        own = ["--cache", str(tmp_path / name), "--out", str(tmp_path / f"{name}-tune"), "--cluster", *cluster]
        if name == "local":  # how retrains are spread over workers is not the question
            shutil.copytree(tmp_path / "inline" / "retrain", tmp_path / "local" / "retrain")
        assert main([*words, *own]) == 0
        grid = json.loads((tmp_path / f"{name}-tune" / "tune.json").read_text())["methods"]["bif"]["grid"]
        found[name] = [{key: value for key, value in cell.items() if key not in ("seconds", "reason")} for cell in grid]
        found[f"{name} reasons"] = [cell.get("reason", "").split(" (")[0] for cell in grid]
    assert found["local"] == found["inline"]
    assert found["local reasons"] == found["inline reasons"]
    campaigns = [json.loads(path.read_text()) for path in (tmp_path / "local" / ".jobs").glob("*/batch.json")]
    assert any(campaign["name"].endswith("settings") and campaign["num_units"] == 4 for campaign in campaigns)


def test_a_later_file_adds_methods_and_changes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`digits-scratch-rivals.json` beside `digits-scratch.json`; `digits-scratch-long.json` is another protocol's."""

    def write(name: str, protocol: str, **options: dict) -> None:
        chosen = {name: {"raw": {"options": some}, "normalised": {"options": some}} for name, some in options.items()}
        content = {"format": TUNED_FORMAT, "task": "digits", "protocol": protocol, "methods": chosen}
        (tmp_path / name).write_text(json.dumps(content))

    write("digits-scratch.json", "scratch", ekfac={"damping": 1.0})
    write("digits-scratch-long.json", "scratch-long", if_cg={"damping": 2.0})
    write("digits-scratch-rivals.json", "scratch", if_cg={"damping": 3.0}, ekfac={"damping": 4.0})
    monkeypatch.setenv("TDA_BENCH_TUNED", str(tmp_path))
    for method, damping in (("ekfac", 1.0), ("if_cg", 3.0)):
        assert tuned_settings(Digits(), method) == {"raw": {"damping": damping}, "normalised": {"damping": damping}}


def test_a_task_with_groups_is_tuned_within_them_for_one_alpha_at_the_models_asked_for(
    arguments: list[str], tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = "retrain.logistic:LogisticDigits"
    words = [*arguments, "--task", task, "--methods", "kfac", "--tries", "3", "--reference", "subset", "--alpha"]
    assert "one --alpha at a time" in refused(main, [*words, "0.3", "0.5"])
    assert main([*words, "0.3"]) == 0
    (path,) = (tmp_path / "tune").glob("*-subset-alpha-0.3.json")
    tuned = json.loads(path.read_text())
    assert (tuned["reference"], tuned["chosen_by"], tuned["alphas"]) == ("subset", "lds_within_groups", [0.3])
    monkeypatch.setenv("TDA_BENCH_TUNED", str(tmp_path / "tune"))
    kfac, loaded = load_method("kfac"), load_task(task)
    origin, chosen = settings_of(kfac, loaded, "tuned", ("subset", (0.3,)))
    assert origin == "tuned"
    assert chosen["raw"] == tuned["methods"]["kfac"]["raw"]["options"]
    with pytest.raises(UsageError, match="no tuned settings of kfac"):
        settings_of(kfac, loaded, "tuned", ("subset", (0.5,)))


PLANTED = "tests.helpers.planted:Planted"


def sweep(arguments: list[str], extra: list[str]) -> int:
    """A budget where no grid is named, else a sweep."""
    of_bif = ["--set", "bif.n_beta=200", "--set", "bif.draws=40", "--set", "bif.minibatch=50"]
    return main(["sweep" if "--grid" in extra else "budget", *arguments, *of_bif, *extra])


def test_a_sweep_marks_diverged_cells_and_reports_the_best_on_other_queries(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(arguments, ["--grid", "gamma=1,10", "step_size=0.004,1.0"]) == 0
    result = json.loads((tmp_path / "tune" / "sweep.json").read_text())
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


def test_a_sweep_without_any_score_says_so_after_its_table(arguments: list[str], capsys: Any, monkeypatch: Any) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bench.records.write_json", full)
    assert sweep(arguments, ["--grid", "step_size=1.0"]) == 1
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
    assert sweep(arguments, command) == 1
    (path,) = (tmp_path / "tune").glob("*.json")
    before = json.loads(path.read_text())
    if cells := before.get("cells"):  # with losses beyond what floats of a record may hold
        read_checked(path, schema.SweepRecord)
        assert not any(str(tmp_path) in cell["reason"] for cell in cells), "no place of this machine"
    monkeypatch.setattr(BIF, "score", None)
    assert sweep(arguments, command) == 1
    assert json.loads(path.read_text())["run_id"] == before["run_id"], "the same words, and so the same record"


def test_budget_curves_use_one_runs_traces(arguments: list[str], tmp_path: Path) -> None:
    assert sweep(arguments, ["--set", "bif.gamma=1", "--set", "bif.step_size=0.004", "--set", "trak.ridge=0.001"]) == 0
    result = json.loads((tmp_path / "tune" / "budget.json").read_text())
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
    assert sweep(arguments, ["--methods", *variants, "wild=bif@step_size=1000,gamma=1"]) == 1
    assert "no curve of wild: " in capsys.readouterr().err
    result = json.loads((tmp_path / "tune" / "budget.json").read_text())
    curves = {(curve["label"], curve["normalised"]): curve["points"] for curve in result["curves"]}
    assert {label for label, _ in curves} == {variants[0], "short"}
    assert list(result["failed"]) == ["wild"]
    assert [point["value"] for point in curves[variants[0], False]] == [20, 48, 100, 160], "round numbers, and all"
    assert [point["value"] for point in curves["short", True]] == [20, 40]
    assert all(curve["method"] == "bif" for curve in result["curves"])


def test_trak_is_drawn_at_the_projections_that_it_takes_as_they_are() -> None:
    model = nn.Linear(1100, 1, bias=False)
    cells = SimpleNamespace(scorer=lambda _: SimpleNamespace(model=model), task=SimpleNamespace(train_data=range(300)))
    for projection, options, expected in (
        (1000, {"relative_ridge": 1.0}, [128, 512, 1000]),
        (1000, {"ridge": 0.0}, [128]),
        (200, {"ridge": 0.0}, [128, 200]),
        (4096, {"relative_ridge": 1.0}, [128, 512]),
    ):
        assert trak_projections(cells, load_method("trak", projection=projection, **options)) == expected


WOULD_BE_IGNORED = [
    (["--grid", "gama=1"], "available"),
    (["--methods", "bif", "--set", "bif.n_beta=many"], "bif.n_beta is 'many'; expected"),
    (["--grid", "gamma=1e3,1e4", "--set", "bif.n_beta=many"], "bif.n_beta is 'many'; expected"),
    (["--grid", "gamma=1,2", "--set", "bif.gamma=5"], "gamma is swept"),
    (["--grid", "gamma=1", "--set", "ekfac.damping=1"], '--set names "ekfac", which is neither the task'),
    (["--methods", "bif", "ekfac"], 'has "ekfac"; expected variants of bif or trak'),
    (["--methods", "ekfac@damping=1", "--grid", "damping=1"], 'one method here, not "ekfac@damping=1"'),
    (["--methods", "ekfac", "--set", "ekfac.damping=1", "--grid", "relative_damping=1"], "damping is swept"),
]


def test_what_would_be_ignored_or_cannot_run_is_refused_before_anything_is_retrained(
    arguments: list[str], refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.runner.Session.retrain", lambda _: pytest.fail("retrained"))
    for extra, words in WOULD_BE_IGNORED:
        assert words in refused(lambda extra: sweep(arguments, extra), extra)
    monkeypatch.setattr("baselines.gradsim.GradSim.skip", lambda *_: "the moon is full")
    command = ["sweep", *arguments, "--methods", "gradsim"]
    assert "--grid OPTION=V1,V2 is needed for gradsim" in refused(main, command)
    assert "the moon is full" in refused(main, [*command, "--grid", "batch_size=10"])


def test_another_runs_record_is_kept_and_failed_cells_are_named(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, out = ["--grid", "gamma=1", "--set"], tmp_path / "tune"
    assert sweep(arguments, [*command, "bif.step_size=0.004"]) == 0
    first = json.loads((out / "sweep.json").read_text())["run_id"]
    assert sweep(arguments, [*command, "bif.step_size=0.004"]) == 0
    assert [path.name for path in out.glob("*.json")] == ["sweep.json"], "the same run again"
    assert sweep(arguments, [*command, "bif.step_size=1.0"]) == 1
    assert "no LDS at gamma 1: " in capsys.readouterr().err
    assert json.loads((out / f"sweep.{first}.json").read_text())["run_id"] == first
