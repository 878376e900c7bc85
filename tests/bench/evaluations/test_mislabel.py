"""Mislabelled examples: AUC and precision on planted cases, a poisoned label that is found first."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from bench.evaluations import score_methods, scoring_session
from bench.evaluations.__main__ import main
from bench.evaluations.mislabel import OWN_LOSS, RANDOM_ORDER
from bench.experiment import Execution, Experiment
from bench.metrics.detection import area_under_curve, auc_difference, precision_at, precision_draws, resampled
from bench.publish.leaderboard import rows
from bench.records import read_record
from bench.schema import AnswersRecord
from retrain.errors import UsageError
from retrain.tasks import load_task
from retrain.units import task_from, task_specification
from tests.helpers.made_up import CIFAR10_WARMUP, cifar10_folder

LOGISTIC = "retrain.logistic:LogisticDigits"


def test_auc_and_precision_at_k_on_planted_cases() -> None:
    known = np.array([True, True, False, False, False, False])
    assert area_under_curve(known, [9, 8, 1, 2, 3, 4]).auc == 1.0
    assert area_under_curve(known, [1, 2, 3, 4, 5, 6]).auc == 0.0
    assert area_under_curve(known, [1, 1, 1, 1, 1, 1]).auc == 0.5
    assert area_under_curve(known, [5, 2, 1, 3, 4, 0]).auc == pytest.approx((4 + 2) / 8)
    generator = np.random.default_rng(3)
    mask, score = generator.random(200) < 0.3, generator.normal(size=200)
    expected = stats.mannwhitneyu(score[mask], score[~mask]).statistic / (mask.sum() * (~mask).sum())
    assert area_under_curve(mask, score).auc == pytest.approx(float(expected))
    known = np.array([True, True, True, False, False, False, False, False])
    assert precision_at(known, [9, 8, 1, 7, 0, 0, 0, 0], 2) == 1.0
    assert precision_at(known, [9, 8, 1, 7, 0, 0, 0, 0], 3) == pytest.approx(2 / 3)
    assert precision_at(known, np.zeros(8), 4) == pytest.approx(3 / 8), "nothing but ties: the share that is known"
    draws = precision_draws(known, [9, 8, 1, 7, 0, 0, 0, 0], 2)
    np.testing.assert_array_equal(draws, precision_draws(known, [9, 8, 1, 7, 0, 0, 0, 0], 2))
    found = resampled(1.0, draws)
    assert found.ci_low < 1.0 == found.ci_high
    with pytest.raises(ValueError, match="two of each kind"):
        area_under_curve(np.array([True, False, False]), [1, 2, 3])


def test_intervals_of_auc_and_of_differences_cover() -> None:
    """Two normals a distance apart: the true AUC is known, and two noisy copies of one score differ by nothing."""
    generator, inside, same = np.random.default_rng(11), 0, 0
    known = np.arange(150) < 40
    truth = float(stats.norm.cdf(1.2 / np.sqrt(2)))
    for _ in range(200):
        score = generator.normal(size=150) + 1.2 * known
        area = area_under_curve(known, score)
        inside += area.ci_low <= truth <= area.ci_high
        first, second = (area_under_curve(known, score + generator.normal(size=150)) for _ in range(2))
        pair = auc_difference(first, second)
        same += pair.ci_low <= 0 <= pair.ci_high
    assert 0.92 <= inside / 200 <= 0.99
    assert 0.92 <= same / 200 <= 0.99


def test_wrong_labels_reach_training_and_every_key() -> None:
    task = load_task("retrain.mislabelled:Mislabelled", of=LOGISTIC, of_options='{"num_train": 50}', share=0.2)
    clean = load_task(LOGISTIC, num_train=50)
    differ = (task.train_data.targets != clean.train_data.targets).numpy()
    np.testing.assert_array_equal(differ, task.flipped)
    assert differ.sum() == 10
    assert (task.query_data.targets == clean.query_data.targets).all()
    assert task.name == clean.name
    assert task.config != clean.config
    assert task.data_fingerprint != clean.data_fingerprint
    assert task_from(task_specification(task)).config == task.config, "another process builds the same"
    device = torch.device("cpu")
    wrong, right = (one.train(np.arange(50), init_seed=1, order_seed=1, device=device) for one in (task, clean))
    assert not torch.equal(wrong.weight, right.weight)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no class labels"):
        load_task("retrain.mislabelled:Mislabelled", of="tinylm")


def scored(task: str, folder: Path, *methods: str) -> list[Any]:
    experiment = Experiment(task=f"tests.helpers.removal_tasks:{task}", methods=methods, queries=4, settings="default")
    ((_, found),) = score_methods(scoring_session(experiment, Execution(cache=str(folder), progress=False))).items()
    return found


def test_a_poisoned_label_is_found_first_by_influence_on_oneself(tmp_path: Path) -> None:
    """One label of 120 is wrong: every method's self-influence puts it first."""
    found = scored("WithPoison", tmp_path, "gradsim", "kfac", "trak")
    assert [int(one.self_influence().argmax()) for one in found] == [14] * 3
    # Asked about training examples as queries, minus the score of each with itself.
    for one in scored("WithDuplicates", tmp_path, "gradsim", "kfac"):
        own, scores = one.self_influence(), one.attribution.scores
        for copy in range(4):  # training example j is query j, label and all
            assert -float(scores[copy, copy]) == pytest.approx(own[copy], rel=2e-3), one.variant.label


def test_the_command_ranks_methods_beside_the_controls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["mislabel", "--task", LOGISTIC, "--set", f"{LOGISTIC}.num_train=120", "--settings", "default"]
    words += ["--cluster", "inline", "--methods", "gradsim", "random", "--cache", str(tmp_path / "cache"), "--out"]
    words += [str(tmp_path / "runs")]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "skipped random: it has no self-influence" in printed.err
    (path,) = (tmp_path / "runs").glob("*/answers.json")
    record = read_record(path, AnswersRecord)
    values = {row["label"]: row["value"] for row in record["rows"] if row["metric"] == "mislabel AUC"}
    assert set(values) == {"gradsim", OWN_LOSS, RANDOM_ORDER}
    assert values["gradsim"] > 0.85
    board = {row.label: row for row in rows(tmp_path / "runs") if row.metric == "mislabel AUC"}
    assert board[RANDOM_ORDER].rank == "3"


def test_wrong_labels_reach_cifar10s_own_training(tmp_path: Path) -> None:
    """It trains on labels in the official order, which no example carries."""
    folder = cifar10_folder(tmp_path)
    options = {"data_dir": str(folder), "check_fingerprint": False, "widths": [4, 8, 8], "num_warmup": CIFAR10_WARMUP}
    options["protocol"] = "scratch"
    task = load_task("retrain.mislabelled:Mislabelled", of="cifar10", of_options=json.dumps(options))
    inside: Any = task.inside
    labels = inside.cifar10.train_labels[torch.from_numpy(inside.train_indices)]
    assert torch.equal(labels, task.train_data.targets)
    warmup = torch.from_numpy(inside.warmup_indices)
    clean: Any = task.clean
    assert torch.equal(inside.cifar10.train_labels[warmup], clean.cifar10.train_labels[warmup])
    assert int((task.train_data.targets != task.clean.train_data.targets).sum()) == int(task.flipped.sum())
    assert task.name == "cifar10"
