"""Agreement between methods: known overlaps, a method with itself, and with nobody."""

from pathlib import Path

import numpy as np
import pytest

from bench.evaluations import groups_of
from bench.evaluations.__main__ import main
from bench.evaluations.agreement import MATRIX, matrix_of, overlap
from bench.records import read_record
from bench.schema import AnswersRecord

DUPLICATES = "tests.helpers.removal_tasks:WithDuplicates"


def test_overlap_on_known_orders() -> None:
    first = np.array([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]])
    second = np.array([[1, 0, 4, 3, 2], [0, 1, 2, 3, 4]])
    np.testing.assert_allclose(overlap(first, second, 2), [1.0, 0.0])
    np.testing.assert_allclose(overlap(first, second, 3), [2 / 3, 1 / 3])


def test_two_labels_of_one_method_agree_wholly_and_random_with_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "agreement", "--task", DUPLICATES, "--methods", "gradsim", "again=gradsim", "random", "--settings", "default",
    ]  # fmt: skip
    words += ["--cluster", "inline", "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "runs")]
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
