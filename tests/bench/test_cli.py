"""The console script: every command under one name, what there is to choose from, and --traceback."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import cache
from bench.cli import COMMANDS, OLD_COMMANDS, lds_main, main
from bench.records import read_record
from bench.schema import RunRecord
from bench.truth import __main__ as truth
from retrain import progress

ROOT = Path(__file__).resolve().parents[2]


def test_it_lists_methods_and_tasks_with_options_defaults_and_papers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "methods"]) == 0
    out = capsys.readouterr().out
    for words in ("ekfac: ", "damping = ", "paper: ", "batch_size = 250  (changes no number)"):
        assert words in out
    assert main(["list", "tasks", "cifar10"]) == 0
    out = capsys.readouterr().out
    assert "protocols: paper, scratch" in out
    assert "digits" not in out
    assert main(["list", "tasks", "nowhere"]) == 2
    assert main(["list", "methods", "ekfac"]) == 0


def test_every_command_has_a_main_and_old_and_misspelt_names_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    for words, code, said in (
        (["--version"], 0, "tda-bench 0."), (["--help"], 0, " "), (["ldss"], 2, "did you mean lds?"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as stop:
            main(words)
        printed = capsys.readouterr()
        assert stop.value.code == code
        assert said in printed.out + printed.err
    for place, _ in COMMANDS.values():
        module, _, function = place.partition(":")
        assert callable(getattr(importlib.import_module(module), function or "main"))
    for name, today in OLD_COMMANDS.items():
        assert main([name, "--alpha", "0.1"]) == 2
        assert today in capsys.readouterr().err
        assert today.split()[0] in COMMANDS
        assert name not in COMMANDS


def test_a_bench_folder_of_the_users_is_no_obstacle(tmp_path: Path) -> None:
    """`python -m bench.lds` would find theirs; the script does not."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").write_text("raise SystemExit('the wrong bench')\n")
    code = "from bench.cli import main; main(['cache', 'status'])"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TDA_BENCH_CACHE": str(tmp_path / "cache")}
    (tmp_path / "cache").mkdir()
    done = subprocess.run(
        [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", "-c", code],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "no batch in" in done.stdout, done.stderr


def test_a_slip_is_one_line_that_says_what_was_meant(refused: Callable[..., str]) -> None:
    assert '"nan" is no number of days' in refused(cache.main, ["prune", "--older-than", "nan"])
    assert "did you mean prune?" in refused(cache.main, ["prnue"])
    export = ["export", "--alpha", "0.1", "--out", "/dev/null/x"]
    assert '--out "/dev/null/x" cannot be made' in refused(truth.main, export)


def test_in_a_log_a_bar_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in progress.bar(range(3), desc="outer"):
        for _ in progress.bar(range(1000), desc="inner", leave=False):
            pass
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["outer", *["inner"] * 6, "outer"]
    assert not any(mark in "".join(lines) for mark in ("\x1b", "\r"))


TASK = ["--task", "digits", "--set", "digits.num_train=40", "--set", "digits.epochs=1", "--alpha", "0.5"]
TASK += ["--device", "cpu", "--replicates", "1", "--subsets", "10", "--cluster", "inline"]

METHOD = '''"""Goes wrong."""
from dataclasses import dataclass
from baselines.method import Method

def deeper():
    raise ValueError("nothing\\n\\x1b[2Jtoday")

@dataclass(frozen=True, kw_only=True)
class Wrong(Method):
    grid = {"knob": (1, 2)}
    knob: int = 1

    def WHERE
        return deeper()
'''
KEPT = """
    def pack_fit(self, state):
        return {}

    def unpack_fit(self, problem, packed):
        return None

    def score(self, problem, state):
        return None
"""
WHERE = {"score": "score(self, problem, state):", "fit": "fit(self, problem):", "skip": "skip(self, task):"}


def words_of(tmp_path: Path, *wrong: str) -> list[str]:
    """The words of a run of methods that go wrong at these places."""
    words = [*TASK, "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "runs"), "--methods", "random"]
    for where in wrong:
        path = tmp_path / f"wrong_{where}.py"
        path.write_text(METHOD.replace("WHERE", WHERE[where]) + (KEPT if where != "score" else ""))
        words.append(str(path))
    return words


def test_a_methods_traceback_is_printed_where_it_is_asked_for(tmp_path: Path, capsys: Any) -> None:
    words = words_of(tmp_path, "score", "fit")
    assert lds_main(words) == 1
    said = capsys.readouterr().err
    problems = [line for line in said.splitlines() if " failed: " in line]
    assert len(problems) == 2
    for line, name in zip(problems, ("score", "fit"), strict=True):
        assert f"wrong_{name} failed: ValueError: nothing" in line
        assert line.count(f"wrong_{name}.py:6)") == 1
        log = Path(line.split("the traceback is in ")[1])
        assert "in deeper" in log.read_text(), "also of a fit, which fails in a unit of its own"
    assert "Traceback" not in said
    assert lds_main([*words, "--traceback"]) == 1
    said = capsys.readouterr().err
    for name in ("score", "fit"):
        assert f'wrong_{name}.py", line 14, in {name}' in said
    assert said.count("in deeper") == 2
    assert "\\x1b" in said
    assert "\x1b[2J" not in said
    # Beside the record, whether it was asked for or not.
    (record,) = (tmp_path / "runs").glob("*/run.json")
    told = (record.parent / "failures.log").read_text()
    assert all(f"wrong_{name} failed\n" in told for name in ("score", "fit"))
    assert {row["method"] for row in read_record(record, RunRecord)["rows"]} == {"random", "same_class"}


def test_what_a_method_raises_outside_its_units_is_one_line_too(tmp_path: Path, capsys: Any) -> None:
    words = words_of(tmp_path, "skip")
    assert lds_main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m bench.lds: ValueError: nothing")
    assert line.endswith("wrong_skip.py:6); --traceback shows it whole")
    with pytest.raises(ValueError, match="nothing"):
        lds_main([*words, "--traceback"])
