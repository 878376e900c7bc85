"""The cache knows the code: an edit is another key, a comment is not."""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest

import bench.experiment  # noqa: F401 what children need and would import each on its own
from bench.cli import lds_main as main
from retrain.source import source_files, source_fingerprint
from retrain.tasks import load_task

ROOT = Path(__file__).resolve().parents[2]
PLANTED = "tests.helpers.planted:Planted"

HELPER = "def factor():\n    return -1.0\n"
METHOD = '''"""Residuals, of a user."""

from dataclasses import dataclass

import torch

from baselines.method import Attribution, Method
from signs import factor


@dataclass(frozen=True, kw_only=True)
class Residuals(Method):
    def score(self, problem, state):
        model = problem.model
        with torch.no_grad():
            both = (problem.queries, problem.attributed)
            query, train = (one.targets.float() - model(one.inputs).flatten() for one in both)
        scores = factor() * torch.outer(query, train) * (problem.queries.inputs @ problem.attributed.inputs.T)
        return Attribution(scores=scores)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "signs.py").write_text(HELPER)
    (tmp_path / "residuals.py").write_text(METHOD)
    return tmp_path


def in_a_child(work: Callable[[], object], folder: Path) -> str:
    """What a process of its own prints; forked, as one that imports torch anew takes seconds."""

    def child() -> None:
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        with (folder / "printed").open("w") as file, contextlib.redirect_stdout(file):
            sys.exit(work())

    process = get_context("fork").Process(target=child)
    process.start()
    process.join(600)
    assert process.exitcode == 0
    return (folder / "printed").read_text()


def measured(folder: Path, *words: str, method: str = "residuals.py") -> dict:
    """The row of one run."""
    command = [
        "--task", PLANTED, "--alpha", "0.5", "--subsets", "12", "--replicates", "1", "--methods", method,
        "--cache", str(folder / "cache"), "--out", str(folder / "runs"), "--cluster", "inline", "--device", "cpu",
        "--json", *words,
    ]  # fmt: skip
    return json.loads(in_a_child(lambda: main(command), folder))[0]


def test_an_edited_method_is_scored_again_and_a_comment_is_not(folder: Path) -> None:
    first = measured(folder)
    assert first["lds"] > 0.3
    (folder / "residuals.py").write_text(METHOD.replace("model = problem.model", "model = (problem.model)  # the base"))
    assert measured(folder) == first, "comments and formatting may change freely: even the seconds are the first run's"
    (folder / "signs.py").write_text(HELPER.replace("-1.0", "1.0"))
    turned = measured(folder)
    assert turned["lds"] == pytest.approx(-first["lds"], abs=1e-6), "a helper that it imports counts as its own"
    assert turned["run_id"] != first["run_id"]


def test_two_files_of_one_name_share_nothing(folder: Path) -> None:
    other = folder / "elsewhere"
    other.mkdir()
    (other / "signs.py").write_text(HELPER)
    (other / "residuals.py").write_text(METHOD.replace("factor() *", "-factor() *"))
    first = measured(folder)
    second = measured(folder, method="elsewhere/residuals.py")
    assert second["lds"] == pytest.approx(-first["lds"], abs=1e-6)


def test_an_edited_task_is_retrained(tmp_path: Path) -> None:
    text = (ROOT / "tests" / "helpers" / "planted.py").read_text()
    found = []
    for edit in (text, text.replace('"""', '"""\n', 1), text.replace("ridge", "ridge_", 1) + "\nX = 1\n"):
        (tmp_path / "mine.py").write_text(edit)
        found.append(in_a_child(lambda: print(load_task(str(tmp_path / "mine.py")).config["source"]), tmp_path))
    assert len(found[0].strip()) == 16
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_what_counts_and_what_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("")
    (tmp_path / "own_package" / "helper.py").write_text("import json\n")
    (tmp_path / "own_package" / "plugin.py").write_text(
        "import numpy as np\nfrom . import helper\n\n"
        "def f():\n    from baselines.support.gradients import PerExampleGradients\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    counted = set(source_files("own_package.plugin"))
    assert {"own_package.plugin", "own_package.helper", "baselines.support.gradients"} <= counted
    assert not any(name.startswith(("numpy", "json", "torch")) for name in counted)
    assert not {"retrain.store", "retrain.plugins", "baselines.method"} & counted, "these change no number"


def test_every_method_and_task_of_ours_has_a_source() -> None:
    for path in [*(ROOT / "baselines").glob("*.py"), *(ROOT / "retrain" / "tasks").glob("*.py")]:
        if path.stem not in ("__init__", "method"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            assert name in source_files(name)
            assert len(source_fingerprint(name)) == 16
