"""The commands of questions beside LDS: what cannot be is refused in one line, before anything is trained."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bench import agreement, bank, calibration, leave_one_out, mislabel, retrain_speed
from bench.counterfactual.command import main as counterfactual

LOGISTIC = "retrain.logistic:LogisticDigits"
PLANTED = "tests.helpers.removal_tasks:WithDuplicates"  # 60 examples
Main = Callable[[list[str]], int]


def said(main: Main, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    return code, capsys.readouterr().err


def words(place: Path, *more: str) -> list[str]:
    found = ["--task", PLANTED, "--methods", "gradsim", "random", "--settings", "default", "--cluster", "inline"]
    return [*found, "--cache", str(place / "cache"), "--out", str(place / "runs"), "--device", "cpu", *more]


def entries(place: Path) -> list[Path]:
    return [path for path in (place / "cache").rglob("*") if path.suffix == ".safetensors"]


@pytest.mark.parametrize(
    ("main", "more", "line"),
    [
        (counterfactual, ["--shares", "0.1", "0.001"], "--shares 0.001 of 60 attributed examples is none of them"),
        (counterfactual, ["--shares", "0.995"], "--shares 0.995 of 60 attributed examples is all of them"),
        (counterfactual, ["--alpha-attribution", "0.01"], "of 1 attributed examples is all of them"),
        (counterfactual, ["--alpha-attribution", "0.5", "1"], "--alpha-attribution 0.5 1: takes one value here"),
        (counterfactual, ["--task", "tinylm", "--brittleness"], "tinylm has no prediction that could flip"),
        (mislabel.main, ["--share", "0.001"], "--share 0.001 flips 1 of 60 attributed labels (seed 1)"),
        (mislabel.main, ["--alpha-attribution", "0.2", "--seeds", "1", "5"], "flips 1 of 12 attributed labels"),
        (mislabel.main, ["--share", "0.99"], "--share 0.99 flips 59 of 60"),
        (mislabel.main, ["--task", "tinylm"], "has no class labels that could be wrong"),
        (agreement.main, ["--tops", "0.001"], "--tops 0.001 of 60 attributed examples is none of them"),
        (agreement.main, ["--tops", "0.999"], "--tops 0.999 of 60 attributed examples is all of them"),
        (agreement.main, ["--alpha-attribution", "0.02"], "1 attributed examples; a correlation across them needs 3"),
        (agreement.main, ["--methods", "gradsim"], "agreement is between two methods"),
        (leave_one_out.main, ["--alpha-attribution", "0.03"], "2 attributed examples; a correlation across"),
        (leave_one_out.main, ["--alpha-attribution", "0.1", "1"], "takes one value here"),
    ],
)  # fmt: skip
def test_it_is_refused_before_anything_is_trained(
    main: Main, more: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = said(main, words(tmp_path, *more), capsys)
    assert (code, error.count("\n")) == (2, 1), error
    assert line in error
    assert entries(tmp_path) == []


def test_no_alpha_is_timed_where_one_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, error = said(retrain_speed.main, ["--task", PLANTED, "--alpha", "0.5", "0.001", "--device", "cpu"], capsys)
    assert (code, error.count("\n")) == (2, 1), error
    assert "alpha 0.001 of 60 attributed examples keeps none" in error


def test_the_defaults_are_of_one_example_at_least(tmp_path: Path) -> None:
    """A thousandth of 60 examples, which nobody asked for, is one of them."""
    assert agreement.main(words(tmp_path, "--queries", "3")) == 0


def test_more_than_there_is_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = words(tmp_path, "--queries", "5000")
    assert agreement.main(asked) == 0
    assert "--queries 5000: there are 8 (report), and all are used\n" in capsys.readouterr().err
    assert calibration.main([*asked, "--alpha", "0.5", "--subsets", "4"]) == 0
    assert "--queries 5000: there are 8" in capsys.readouterr().err
    assert bank.main(["scores", *asked]) == 0
    assert "--queries 5000: there are 8" in capsys.readouterr().err
    small = ["--set", f"{PLANTED}.num_train=6", "--replicates", "1", "--examples", "100"]
    assert leave_one_out.main(words(tmp_path, *small)) == 0
    assert "--examples 100: there are 6 attributed examples, and all are left out\n" in capsys.readouterr().err
