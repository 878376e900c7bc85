"""What a user does next: an edit undone, a name misspelt, a record run again after its method was edited."""

import json
import sys
from pathlib import Path

import pytest

from bench import cache
from bench.cli import lds_main as main
from bench.records import load_results
from bench.tune.__main__ import main as tune
from retrain import plugins, source

METHOD = """
from dataclasses import dataclass
import torch
from baselines.method import Attribution, Method

@dataclass(frozen=True, kw_only=True)
class Mine(Method):
    def score(self, problem, state):
        {line}
        noise = torch.randn(len(problem.queries), len(problem.attributed), generator=torch.Generator().manual_seed(0))
        return Attribution(scores={sign}noise)
"""
SMALL = (
    "--task digits --alpha 0.5 --set digits.num_train=60 --set digits.epochs=1 --subsets 5 --replicates 1 --queries 9"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TDA_BENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path


def write(sign: str, line: str = "pass") -> None:
    """The file, and a process that has not imported it."""
    Path("mine.py").write_text(METHOD.format(sign=sign, line=line))
    for name in [name for name, path in plugins._files.items() if path.name == "mine.py"]:
        del plugins._files[name], sys.modules[name]
    source._first_fingerprint.cache_clear()  # the next module may have the last one's id


def measure(*words: str) -> int:
    return main([*SMALL.split(), "--methods", "mine.py", "--cache", "cache", "--cluster", "inline", *words])


def shown() -> float:
    rows = load_results("runs").rows
    return float(rows[~rows["normalised"].astype(bool) & rows["label"].eq("mine")]["lds"].iloc[0])


def test_an_edit_that_is_undone_is_undone_in_the_figures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(["2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z", "2026-01-01T00:00:02Z"])
    time = ""
    monkeypatch.setattr("bench.records.timestamp", lambda: time)
    found = []
    for sign in ("", "-", ""):
        time = next(times)
        write(sign)
        assert measure() == 0
        found.append(shown())
    assert found[0] == -found[1] == found[2] != 0


def test_a_record_run_again_says_that_its_method_was_edited(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("")
    assert measure() == 0
    (record,) = Path("runs").glob("*/run.json")
    assert main(["--experiment", str(record), "--cache", "cache", "--cluster", "inline"]) == 0
    assert "edited" not in capsys.readouterr().err
    write("-")
    assert main(["--experiment", str(record), "--cache", "cache", "--cluster", "inline"]) == 0
    assert "its code was edited since that record" in capsys.readouterr().err


def test_a_method_that_failed_is_failed_in_the_status(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("", 'raise KeyError("nokey")')
    assert measure() == 1
    found = capsys.readouterr()
    assert "1 went wrong" in found.out
    assert cache.main(["status", "--cache", "cache", "--json"]) == 0
    campaigns = json.loads(capsys.readouterr().out)
    assert max(one["num_failed"] for one in campaigns) == 1


@pytest.mark.parametrize("name", ["gradsm", "random"])
def test_tuning_refuses_a_name_before_it_retrains(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("retrained for nothing")

    monkeypatch.setattr("bench.tune.grid.SettingsGrid.__init__", never)
    assert tune(["--task", "digits", "--alpha", "0.5", "--methods", name, "--cache", "cache"]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "told"),
    [('subsets = "5"', "'5'"), ('alpha = "x"', "'x'"), ("options = {gradsim = 3}", "options")],
)
def test_wrong_kinds_in_a_file_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, told: str
) -> None:
    Path("e.toml").write_text(f'task = "digits"\n{line}\n')
    assert main(["--experiment", "e.toml"]) == 2
    assert told in capsys.readouterr().err
