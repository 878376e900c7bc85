"""Removal curves and brittleness: planted truths on an exact logistic regression, intervals by simulation."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from bench.arguments import Parser
from bench.evaluations import MetricResult, cell_of, removal
from bench.evaluations.__main__ import main
from bench.evaluations.removal import RANDOM_REMOVAL, SAME_CLASS, Bisection
from bench.metrics.removal import Shared, mean_change, shared_variance
from bench.publish.leaderboard import rows
from bench.records import read_record
from bench.schema import AnswersRecord
from retrain.removal import RemovalPlan, removal_units
from retrain.store import Store
from tests.helpers.removal_tasks import WithDuplicates

DUPLICATES = "tests.helpers.removal_tasks:WithDuplicates"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


WORDS = [
    "--task", DUPLICATES, "--queries", "4", "--settings", "default", "--shares", "0.017", "0.1", "--replicates", "1",
    "--cluster", "inline", "--methods", "gradsim", "kfac", "random",
]  # fmt: skip


@pytest.fixture(autouse=True)
def few_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "CONTROLS", 3)
    monkeypatch.setattr(removal, "REFERENCE_MODELS", 2)


def small_removal(cache: str, *more: str) -> MetricResult:
    parser = Parser()
    removal.add_arguments(parser)
    return removal.evaluate(parser.parse_args([*WORDS, "--cache", cache, *more]))


def test_a_duplicate_of_the_query_is_removed_first_and_matters_most(cache: str) -> None:
    """Leaving out the copy raises the query's loss by what leaving out exactly it does: the planted truth.

    By Cauchy and Schwarz no example has a larger train-normalised score than a copy, with any curvature. Raw GradSim
    prefers examples with large gradients, and a copy's own is small once it has been learnt.
    """
    out = small_removal(cache, "--scores", "both")
    task, device, everything = WithDuplicates(), torch.device("cpu"), np.arange(60)

    def losses(kept: np.ndarray) -> np.ndarray:
        model = task.train(kept, init_seed=1, order_seed=0, device=device)
        return task.losses(model, task.query_data, device).numpy()[task.query_indices("report")[:4]]

    truth = np.array([losses(np.delete(everything, j))[j] for j in range(4)]) - losses(everything)
    changes = {(row["label"], row["normalised"]): row for row in out.rows if row["size"] == 1}
    for method in (("gradsim", True), ("kfac", True), ("kfac", False)):
        assert changes[method]["value"] == pytest.approx(truth.mean(), abs=1e-4), "the copy is removed first"
        interval = stats.ttest_1samp(truth, 0.0).confidence_interval()
        assert changes[method]["ci_high"] == pytest.approx(interval.high, abs=2e-3), "of every query its own"
    by = {(row["label"], row["size"]): row["value"] for row in out.rows if not row["normalised"]}
    assert by["kfac", 1] > 10 * abs(by[RANDOM_REMOVAL, 1])
    assert by["kfac", 6] > by["kfac", 1] > by[SAME_CLASS, 1], "more removed hurts more, and the class is not enough"


def test_the_command_pairs_share_the_reference_and_controls_stand_in_every_column(
    cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["removal", *WORDS, "--scores", "both", "--cache", cache, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*/answers.json")
    record = read_record(path, AnswersRecord)
    assert path.parent.name == record["run_id"]
    assert f"run {record['run_id']}" in capsys.readouterr().out
    assert record["command"].startswith("python -m bench.evaluations removal --task")
    assert record["code"]
    pair = next(p for p in record["pairs"] if (p["label"], p["against"], p["size"]) == ("gradsim", "kfac", 6))
    values = {(r["label"], r["size"], r["normalised"]): r["value"] for r in record["rows"]}
    assert pair["difference"] == pytest.approx(values["gradsim", 6, False] - values["kfac", 6, False], abs=1e-6)
    board = [row for row in rows(tmp_path) if row.metric == "removal" and row.at == pytest.approx(0.1)]
    for kind in ("raw", "normalised"):
        here = [row for row in board if row.scores == kind]
        assert {row.label for row in here} >= {"gradsim", "kfac", "random", RANDOM_REMOVAL}
        assert next(row for row in here if row.label == "kfac").rank_best == 1


def test_finished_retrains_are_kept_and_equal_sets_shared(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_removal(cache)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("everything is in the cache")

    monkeypatch.setattr(WithDuplicates, "train", refuse)
    assert small_removal(cache).rows
    task, plan = WithDuplicates(), RemovalPlan(seed=1, alpha_attribution=1.0, max_queries=4)
    sets = [(np.array(some), [0]) for some in ([3, 5], [5, 3])]
    first, second = removal_units(task, plan, sets, "cpu", margins=False)
    store = Store(cache)
    assert store.key(first.kind, first.config) == store.key(second.kind, second.config), "a set has no order"


def test_brittleness_finds_the_smallest_size_that_flips(cache: str) -> None:
    out = small_removal(cache, "--brittleness")
    found = {row["label"]: row for row in out.rows if row["metric"] == "brittleness"}
    assert found["kfac"]["value"] < found["random"]["value"], "chosen sets flip with fewer examples than random ones"
    assert found["random"]["num_unflipped"] >= found["kfac"]["num_unflipped"]
    row: dict[str, Any] = {"value": 0.17, "ci_low": math.nan, "ci_high": 0.421, "num_undefined": 2, "note": "a bound"}
    assert cell_of(row).startswith("0.17 [-, 0.421]")
    assert all(words in cell_of(row) for words in ("2 undefined", "a bound"))


@pytest.mark.parametrize("answer", [0, 1, 5, 9, 10])
def test_bisection_on_a_known_answer(answer: int) -> None:
    """Flips from place `answer` on; 10 is never."""
    search = Bisection(np.zeros((1, 1), dtype=int), np.array([0]), 10)
    rounds = 0
    while (places := search.next_places())[0] >= 0:
        search.learn(places, places >= answer)
        rounds += 1
    assert search.high[0] == answer
    assert rounds <= 5


def test_intervals_of_changes_cover_with_shared_models_and_are_students_without() -> None:
    """Queries, models that all of them share, and noise of each: the true mean is 0."""
    generator = np.random.default_rng(5)
    inside = naive = 0
    for _ in range(300):
        base = generator.normal(size=30) * 0.5
        reference = generator.normal(size=(6, 1)) * 0.5 + generator.normal(size=(6, 30)) * 0.5
        change = base + generator.normal(size=30) * 0.5 - reference.mean(axis=0)
        found = mean_change(change, [Shared(np.arange(30), reference)])
        inside += found.ci_low <= 0 <= found.ci_high
        alone = mean_change(change)
        naive += alone.ci_low <= 0 <= alone.ci_high
    assert 0.90 <= inside / 300 <= 1.0
    assert naive / 300 < 0.85, "without the shared part the interval is too narrow, so the test can tell"
    values = np.array([0.3, -0.1, 0.4, 0.2])
    found, expected = mean_change(values), stats.ttest_1samp(values, 0.0)
    low, high = expected.confidence_interval()
    assert (found.ci_low, found.ci_high, found.p_value) == pytest.approx((low, high, expected.pvalue))
    assert mean_change(np.array([np.nan, 1.0])).num_undefined == 1
    with pytest.raises(ValueError, match="two or more"):
        shared_variance(Shared(np.arange(2), np.zeros((1, 2))), 2)
