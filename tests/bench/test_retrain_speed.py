"""The command that times retraining: both ways train the same models, and its record says how it was made."""

import json

import numpy as np
import pytest

from bench.speed import main, mean_correlation


def test_both_ways_give_the_same_losses_where_nothing_is_faster(tmp_path, capsys):
    words = ["retrain", "--task", "digits", "--set", "digits.epochs=1", "--set", "digits.num_train=200"]
    words += ["--alpha", "0.1", "--subsets", "10", "--repeats", "2"]
    assert main([*words, "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    assert "retrains/s" in capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "retrain_speed.json").read_text())
    (row,) = record["rows"]
    assert row["same_again"]
    assert row["difference_from_plain"] == 0
    assert row["correlation_with_plain"] == pytest.approx(1)
    assert row["difference_of_replicates"] > 0
    assert row["num_retrains"] == 20
    assert record["code"]
    assert record["command"].startswith("python -m bench.speed retrain --task digits")


def test_correlation_of_known_orders():
    first = np.array([[1.0, 5.0], [2.0, 4.0], [3.0, 3.0]])
    assert mean_correlation(first, first) == pytest.approx(1)
    assert mean_correlation(first, -first) == pytest.approx(-1)
    assert mean_correlation(first, np.array([[1.0, 5.0], [3.0, 4.0], [2.0, 3.0]])) == pytest.approx(0.75)


def test_errors_are_one_line(tmp_path, capsys):
    assert main(["retrain", "--task", "cifar10", "--alpha", "0.1", "--data-dir", str(tmp_path), "--device", "cpu"]) == 2
    error = capsys.readouterr().err.splitlines()
    assert "holds neither" in error[0]
