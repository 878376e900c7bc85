"""--traceback: a failing method or task is one line with its place, or the whole traceback where it is asked for."""

from pathlib import Path
from typing import Any

import pytest

from bench.cli import lds_main
from bench.records import read_record
from bench.schema import RunRecord

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
