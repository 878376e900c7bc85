"""The commands of questions beside LDS: what cannot be is refused in one line, before anything is trained."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.arguments import run_cli
from bench.evaluations.__main__ import main as evaluate
from bench.publish.__main__ import main as publish
from bench.truth.__main__ import main as truth

PLANTED = "tests.helpers.removal_tasks:WithDuplicates"  # 60 examples
Main = Callable[[list[str]], int]


def evaluation(*words: str) -> Main:
    return lambda arguments: evaluate([*words, *arguments])


removal, mislabel, agreement = evaluation("removal"), evaluation("mislabel"), evaluation("agreement")
leave_one_out, limit = evaluation("leave_one_out"), evaluation("limit")
calibration = evaluation("calibration", "--alpha", "0.5")


def words(place: Path, *more: str) -> list[str]:
    found = ["--task", PLANTED, "--methods", "gradsim", "random", "--settings", "default", "--cluster", "inline"]
    return [*found, "--cache", str(place / "cache"), "--out", str(place / "runs"), "--device", "cpu", *more]


def entries(place: Path) -> list[Path]:
    return [path for path in (place / "cache").rglob("*") if path.suffix == ".safetensors"]


@pytest.mark.parametrize(
    ("main", "more", "line"),
    [
        (removal, ["--shares", "0.1", "0.001"], "--shares 0.001 of 60 attributed examples is none of them"),
        (removal, ["--shares", "0.995"], "--shares 0.995 of 60 attributed examples is all of them"),
        (removal, ["--alpha-attribution", "0.01"], "of 1 attributed examples is all of them"),
        (removal, ["--alpha-attribution", "0.5", "1"], "--alpha-attribution 0.5 1: takes one value here"),
        (removal, ["--task", "tinylm", "--set", "tinylm.pretraining_steps=2", "--brittleness"], "that could flip"),
        (mislabel, ["--shares", "0.001"], "--shares 0.001 flips 1 of 60 attributed labels (seed 1)"),
        (mislabel, ["--alpha-attribution", "0.2", "--seeds", "1", "5"], "flips 1 of 12 attributed labels"),
        (mislabel, ["--shares", "0.99"], "--shares 0.99 flips 59 of 60"),
        (mislabel, ["--task", "tinylm"], "has no class labels that could be wrong"),
        (agreement, ["--shares", "0.001"], "--shares 0.001 of 60 attributed examples is none of them"),
        (agreement, ["--shares", "0.999"], "--shares 0.999 of 60 attributed examples is all of them"),
        (agreement, ["--alpha-attribution", "0.02"], "1 attributed examples; a correlation across them needs 3"),
        (agreement, ["--methods", "gradsim"], "agreement is between two methods"),
        (leave_one_out, ["--alpha-attribution", "0.03"], "2 attributed examples; a correlation across"),
        (leave_one_out, ["--alpha-attribution", "0.1", "1"], "takes one value here"),
        # Who retrains must say what its subsets keep.
        (removal, ["--methods", "datamodel@retrains=20", "random"], "say it as datamodel@alpha=0.9"),
        (mislabel, ["--methods", "datamodel@retrains=20", "random"], "say it as datamodel@alpha=0.9"),
    ],
)  # fmt: skip
def test_it_is_refused_before_anything_is_trained(
    main: Main, more: list[str], line: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    assert line in refused(main, words(tmp_path, *more))
    assert entries(tmp_path) == []


def bank(arguments: list[str]) -> int:
    return truth(["bank", *arguments, "--alpha", "0.5", "--subsets", "4"])


SLIPS = [
    (["--metod", "ekfac"], "unrecognized arguments: --metod ekfac"),
    (["--methods", "ekfca"], 'unknown method "ekfca"; available: '),
    (["--device", "gpu"], 'unknown device "gpu"; expected auto, cpu, cuda, or cuda:N'),
    (["--out", "FILE"], "cannot be made: File exists"),
    (["--cache", "/dev/null/x"], "the cache folder /dev/null/x cannot be used (Not a directory)"),
]
OTHER_SLIPS = [
    (calibration, ["--alpha", "abc"], '"abc" is no number; expected a fraction such as 0.1'),
    (calibration, ["--alpha", "2"], "2 is out of range; expected a fraction above 0 and below 1"),
    (limit, ["--out", "FILE"], "cannot be made: File exists"),
    (publish, ["leaderboard", "--results", "EMPTY"], "holds no rows; run `tda-bench lds"),
    (publish, ["report", "--results", "FILE"], "is no folder of results"),
    (truth, ["check", "EMPTY"], "has no truth.json; expected a folder made by `tda-bench truth"),
]


def test_a_slip_is_one_line(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no folder")
    places = {"EMPTY": str(tmp_path / "empty"), "FILE": str(tmp_path / "file")}
    of_all = [(main, words(tmp_path, *slip), line) for main in (removal, calibration, bank) for slip, line in SLIPS]
    for main, arguments, line in [*of_all, *OTHER_SLIPS]:
        assert line in refused(main, [places.get(word, word) for word in arguments]), arguments
    assert entries(tmp_path) == []


def test_a_mistake_of_ours_is_no_line() -> None:
    def mistaken() -> int:
        raise KeyError("a mistake of ours")

    with pytest.raises(KeyError):
        run_cli("prog", mistaken)


def test_a_folder_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("runs") and access(path, mode))
    assert refused(agreement, words(tmp_path)).strip().endswith('runs" cannot be written to; give another folder')
    assert not entries(tmp_path)
    monkeypatch.undo()
    # A thousandth of 60 examples, which nobody asked for, is one of them.
    assert agreement(words(tmp_path, "--queries", "3")) == 0
