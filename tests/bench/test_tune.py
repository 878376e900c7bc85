"""Tuning: as many tries for all, on queries and subsets that are never reported, ties to the cheaper."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench import Execution, Experiment, run
from bench.tune import Tried, choose, clearly_behind, main, settings_to_try
from retrain import subsets
from retrain.store import Store

PLANTED = "tests.helpers.planted:Planted"


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    return [
        "--task", PLANTED, "--alpha", "0.5", "--subsets", "20", "--replicates", "1", "--cluster", "inline",
        "--device", "cpu", "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "tune"),
    ]  # fmt: skip


def test_it_keeps_the_grid_and_its_choice_is_used(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*arguments, "--methods", "ekfac", "--tries", "3"]) == 0
    record = json.loads((tmp_path / "tune" / "tune.json").read_text())
    found = record["methods"]["ekfac"]
    assert len(found["grid"]) == 3
    assert found["grid"][0]["options"] == {}, "the defaults are tried first"
    assert (record["split"], record["stream"]) == ("tune", "tune")
    assert record["code"]
    chosen = found["chosen"]["raw"]["options"]
    assert chosen in [cell["options"] for cell in found["grid"]]
    monkeypatch.setenv("TDA_BENCH_TUNED", str(tmp_path / "tune"))
    execution = Execution(device="cpu", cache=str(tmp_path / "cache"), progress=False)
    result = run(Experiment(task=PLANTED, alpha=0.5, subsets=12, replicates=1, methods="ekfac"), execution)
    assert set(result.frame()["label"]) == {"ekfac"}
    assert result.out.rows[0]["origin"] == "tuned"
    assert all(getattr(result.variants[0].method, name) == value for name, value in chosen.items())


def test_no_reported_query_and_no_reported_subset_is_seen(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reported subsets are poisoned and reported queries are counted."""
    from bench import scoring

    streams, asked = [], []
    true_mask, true_problem = subsets.mask, scoring.problem_of

    def mask(*words: object, **named: object) -> np.ndarray:
        stream = words[5] if len(words) > 5 else named.get("stream", "report")
        assert stream == "tune", "a reported subset was looked at"
        streams.append(stream)
        return true_mask(*words, **named)  # type: ignore[arg-type]

    def problem(question: object, *words: object) -> object:
        asked.append(question.query_indices())  # type: ignore[attr-defined]
        return true_problem(question, *words)  # type: ignore[arg-type]

    monkeypatch.setattr(subsets, "mask", mask)
    monkeypatch.setattr(scoring, "problem_of", problem)
    assert main([*arguments, "--methods", "ekfac", "--tries", "2"]) == 0
    from retrain.tasks import load_task

    reported = set(load_task(PLANTED).query_indices("report").tolist())
    assert streams
    assert asked
    assert all(not reported & set(queries.tolist()) for queries in asked)
    configs = [
        json.loads((info.path / "entry.json").read_text())["config"]
        for info in Store(tmp_path / "cache").entries("retrain")
    ]
    assert {config["stream"] for config in configs} == {"tune"}


def test_streams_of_subsets_are_disjoint() -> None:
    for seed in range(3):
        report = {tuple(row) for row in subsets.masks(seed, 100, 0.1, 500, stream="report")}
        tune = {tuple(row) for row in subsets.masks(seed, 100, 0.1, 500, stream="tune")}
        learn = {tuple(row) for row in subsets.masks(seed, 100, 0.1, 500, stream="learn")}
        assert not report & tune
        assert not (report | tune) & learn


def test_ties_within_the_paired_interval_go_to_the_cheaper() -> None:
    generator = np.random.default_rng(0)
    losses = generator.normal(size=(60, 40))

    def tried(noise: float, seconds: float) -> Tried:
        made = losses + noise * generator.normal(size=losses.shape)
        score = float(np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(losses.T, made.T)]))
        return Tried({"noise": noise}, seconds, predictions={"raw": [made], "normalised": []}, lds={"raw": score})

    best, tie, behind, broken = tried(1.0, 10.0), tried(1.0, 1.0), tried(3.0, 0.1), Tried({}, lds={"raw": None})
    ordered = max((best, tie), key=lambda one: one.lds["raw"] or 0)
    assert clearly_behind(behind, ordered, [losses], "raw")
    chosen = choose([best, behind, broken, tie], [losses], "raw")
    assert chosen is not None
    assert chosen["seconds"] == 1.0
    assert chosen["num_ties"] == 2
    assert choose([broken], [losses], "raw") is None


def test_every_setting_is_tried_once_and_the_defaults_first() -> None:
    from baselines.method import load_method

    method = load_method("ekfac")
    found = list(settings_to_try(method, 1))
    assert found[0] == {}
    assert found == list(settings_to_try(method, 1))
    assert len({json.dumps(one, sort_keys=True) for one in found}) == len(found)


def test_a_method_without_a_grid_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--methods", "random"]) == 2
    assert "declares no grid" in capsys.readouterr().err
