"""What the commands say to slips of the pen, and how their progress looks where nobody watches."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench import cache
from bench.inspect.__main__ import main as inspect_command
from bench.truth import __main__ as truth
from retrain import progress
from retrain.jobs import run as jobs_run
from retrain.jobs import tracker as jobs_tracker
from retrain.store import Store
from tests.helpers.job_units import units


def said(main: Callable[[list[str]], int], arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "arguments", "words"),
    [
        (cache.main, ["prune", "--older-than", "nan"], '"nan" is no number of days; expected 0 or more'),
        (cache.main, ["prune", "--older-than", "-5"], '"-5" is no number of days'),
        (cache.main, ["prune", "--older-than", "inf"], '"inf" is no number of days'),
        (cache.main, ["prune", "--older-thn", "5"], "unknown option --older-thn; did you mean --older-than?"),
        (cache.main, ["list", "--yes"], "unknown option --yes; see --help"),
        (cache.main, ["--cahce", "x"], "unknown option --cahce; did you mean --cache?"),
        (cache.main, ["prnue"], "did you mean prune?"),
        (cache.main, ["status", "--jsno"], "unknown option --jsno; did you mean --json?"),
        (truth.main, ["export", "--alpha", "0.1", "--sed", "1", "--out", "x"], "unknown option --sed; did you mean"),
        (truth.main, ["export", "--alpha", "0.1", "--out", "/dev/null/x"], '--out "/dev/null/x" cannot be made'),
    ],
)
def test_a_slip_is_one_line_that_says_what_was_meant(
    main: Callable[[list[str]], int], arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = said(main, arguments, capsys)
    assert code == 2
    assert words in error
    assert error.count("\n") == 1


def test_nothing_is_pruned_by_a_slip(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write("numbers", {"index": 1}, {"number": np.zeros(1)}, {})
    for days in ("nan", "-1"):
        with pytest.raises(SystemExit):
            cache.main(["prune", "--older-than", days, "--yes", "--cache", str(tmp_path)])
    assert store.has("numbers", {"index": 1})


def test_examples_names_the_command_that_makes_its_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "examples", "--task", "digits", "--methods", "ekfac", "bif", "--set", "bif.draws=5", "--set",
        "ekfac.damping=0.25",
    ]  # fmt: skip
    words += ["--set", "digits.epochs=3", "--device", "cpu", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]
    code, error = said(inspect_command, words, capsys)
    assert code == 2
    assert "--methods ekfac@damping=0.25 --settings default --set digits.epochs=3 --cache" in error


# ---- progress ----


def test_in_a_log_a_bar_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in progress.bar(range(3), desc="outer"):
        for _ in progress.bar(range(1000), desc="inner", leave=False):
            pass
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["outer", *["inner"] * 6, "outer"]
    assert not any(mark in "".join(lines) for mark in ("\x1b", "\r"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_last_words_stand_on_a_line_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(jobs_tracker.logger, "warning", lambda text, *values: terminal.write(text % values + "\n"))

    def interrupted(tracker: jobs_tracker.JobTracker) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs_run, "run_inline", interrupted)
    with pytest.raises(KeyboardInterrupt):
        jobs_run.run_units(units(4), Store(tmp_path), progress=True, name="numbers")
    *_, frame, words = terminal.getvalue().splitlines()
    assert "0/4" in frame
    assert words.startswith("stopped: 0 of 4 units")
