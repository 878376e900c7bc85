"""Calibration, leave-one-out and agreement: slope 1 on a linear problem, exact influence, and known overlaps."""

from pathlib import Path

import numpy as np
import pytest

from bench.evaluations import groups_of
from bench.evaluations.__main__ import main
from bench.evaluations.agreement import MATRIX, matrix_of, overlap
from bench.evaluations.leave_one_out import LEAVE_ONE_OUT
from bench.metrics.calibration import calibration, reachable_share
from bench.publish.leaderboard import rows
from bench.records import read_record
from bench.schema import AnswersRecord

LOGISTIC = "retrain.logistic:LogisticDigits"


def linear_problem(noise: float = 0.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(truth, prediction): losses that are sums of known effects over subsets, and what these effects predict."""
    generator = np.random.default_rng(seed)
    masks, effects = generator.random((60, 100)) < 0.5, generator.normal(size=(20, 100))
    prediction = masks @ effects.T
    return 3.0 + prediction + noise * generator.normal(size=prediction.shape), prediction


def test_slope_is_one_on_a_linear_problem_and_units_and_noise_do_what_they_must() -> None:
    found = calibration(*linear_problem())
    for one in (found.slope, found.r2, found.r2_rescaled):
        assert one.value == pytest.approx(1.0)
        assert (one.ci_low, one.ci_high) == pytest.approx((1.0, 1.0), abs=1e-6)
    assert found.median_slope == pytest.approx(1.0)
    truth, prediction = linear_problem(noise=2.0)
    plain, large = calibration(truth, prediction), calibration(truth, 1e4 * prediction)
    assert large.slope.value == pytest.approx(1e-4 * plain.slope.value)
    assert large.r2_rescaled.value == pytest.approx(plain.r2_rescaled.value)
    assert large.r2.value < -1e7
    generator = np.random.default_rng(2)
    truth, prediction = linear_problem()
    replicates = truth + 5.0 * generator.normal(size=(2, *truth.shape))
    found = calibration(replicates.mean(axis=0), prediction)
    assert found.slope.ci_low < 1.0 < found.slope.ci_high
    signal = prediction.var(axis=0, ddof=1).mean()
    assert reachable_share(replicates) == pytest.approx(signal / (signal + 12.5), abs=0.03)
    assert found.r2.value == pytest.approx(reachable_share(replicates), abs=0.05)
    assert np.isnan(reachable_share(truth[None]))


def test_intervals_of_the_slope_cover() -> None:
    """Queries differ in their own slopes, subsets in an error that all queries share: both count."""
    generator, inside = np.random.default_rng(4), 0
    for _ in range(200):
        x = generator.normal(size=(40, 25))
        own = 1.0 + 0.5 * generator.normal(size=25)
        y = own * x + 0.5 * generator.normal(size=(40, 1)) * np.sign(x) + generator.normal(size=x.shape)
        found = calibration(y, x).slope
        inside += found.ci_low <= 1.0 <= found.ci_high
    assert inside / 200 >= 0.90


def test_leave_one_out_is_exact_on_a_logistic_regression(tmp_path: Path) -> None:
    """No noise; with a ridge that no example moves far, the true curvature says what happens, in units of loss."""
    options = [f"{LOGISTIC}.{option}" for option in ("num_train=40", "num_queries=15", "ridge=100.0")]
    words = ["leave_one_out", *(word for option in options for word in ("--set", option)), "--settings", "default"]
    exact = "exact=tests.helpers.exact_influence:ExactInfluence"
    words += ["--cluster", "inline", "--methods", exact, "kfac", "random"]
    assert main([*words, "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "runs")]) == 0
    (path,) = (tmp_path / "runs").glob("*/answers.json")
    record = read_record(path, AnswersRecord)
    assert record["question"] == "leave-one-out"
    (ceiling,) = record["detail"]["ceilings"]
    assert (ceiling["exact"], ceiling["ceiling"]) == (True, 1.0)
    found = {(row["label"], row["metric"]): row for row in record["rows"]}
    assert found["exact", LEAVE_ONE_OUT]["value"] > 0.98
    assert found["exact", "leave-one-out calibration slope"]["value"] == pytest.approx(1.0, abs=0.15)
    assert found["exact", "leave-one-out calibration R2"]["value"] > 0.95
    assert 0.4 < found["kfac", LEAVE_ONE_OUT]["value"] < found["exact", LEAVE_ONE_OUT]["value"]
    assert abs(found["random", LEAVE_ONE_OUT]["value"]) < 0.2
    board = {row.label: row for row in rows(tmp_path / "runs") if row.metric == LEAVE_ONE_OUT}
    assert [board[label].rank for label in ("exact", "kfac", "random")] == ["1", "2", "3"]
    assert not [row for row in rows(tmp_path / "runs") if "slope" in row.metric], "a slope is best at 1: not ranked"


def test_the_command_uses_the_ground_truth_of_lds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["calibration", "--task", LOGISTIC, "--set", f"{LOGISTIC}.num_train=60", "--settings", "default"]
    words += ["--cluster", "inline", "--methods", "gradsim", "random", "--alpha", "0.5", "--subsets", "12"]
    words += ["--queries", "10", "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "runs")]
    assert main(words) == 0
    assert "reachable R2" in capsys.readouterr().out
    (path,) = (tmp_path / "runs").glob("*/answers.json")
    assert {row["at"] for row in read_record(path, AnswersRecord)["rows"]} == {0.5}


def test_overlap_on_known_orders() -> None:
    first = np.array([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]])
    second = np.array([[1, 0, 4, 3, 2], [0, 1, 2, 3, 4]])
    np.testing.assert_allclose(overlap(first, second, 2), [1.0, 0.0])
    np.testing.assert_allclose(overlap(first, second, 3), [2 / 3, 1 / 3])


def test_two_labels_of_one_method_agree_wholly_and_random_with_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["agreement", "--task", "tests.helpers.removal_tasks:WithDuplicates", "--settings", "default"]
    words += ["--methods", "gradsim", "again=gradsim", "random", "--cluster", "inline"]
    words += ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "runs")]
    assert main(words) == 0
    assert "overlap of the top 6" in capsys.readouterr().out
    (path,) = (tmp_path / "runs").glob("*/answers.json")
    cells = read_record(path, AnswersRecord)["detail"]["cells"]
    for (*_, metric, _), some in groups_of(cells, *MATRIX).items():
        labels, matrix = matrix_of(some)
        assert labels == ["gradsim", "again", "random"]
        assert matrix[0, 1] == pytest.approx(1.0)
        assert matrix[0, 2] == matrix[2, 0]
        assert abs(matrix[0, 2]) < (0.3 if metric == "Spearman" else 0.5)
