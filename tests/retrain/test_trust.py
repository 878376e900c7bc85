"""What a key must know: data, code, files, weights and libraries that change between two runs, or during one."""

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

import bench.experiment  # noqa: F401 what children need and would import each on its own
from bench.cli import lds_main as main
from retrain import source
from retrain.errors import UsageError
from retrain.jobs import run_units
from retrain.store import Store
from retrain.tasks import load_task
from retrain.units import Plan, retrain_units

ROOT = Path(__file__).resolve().parents[2]
PLANTED = "tests.helpers.planted:Planted"
PLAN = Plan(alpha=0.5, alpha_attribution=1.0, seed=1, num_subsets=3)

HELPER = "def factor():\n    return -1.0\n"
METHOD = '''"""Residuals, of a user."""
import json
from dataclasses import dataclass
from pathlib import Path
import numpy
import torch
from baselines.method import Attribution, Method
HERE = Path(__file__).parent

@dataclass(frozen=True, kw_only=True)
class Residuals(Method):
    files = ("table.json",)

    def score(self, problem, state):
        model = problem.model
        with torch.no_grad():
            both = (problem.queries, problem.attributed)
            query, train = (one.targets.float() - model(one.inputs).flatten() for one in both)
        scores = FACTOR * torch.outer(query, train) * (problem.queries.inputs @ problem.attributed.inputs.T)
        return Attribution(scores=scores)
'''
TASK = '''"""Planted data from a table of the user's, and first weights from a file."""
from dataclasses import dataclass
from pathlib import Path
import numpy as np
import torch
from retrain.examples import Examples
from tests.helpers.planted import Planted
HERE = Path(__file__).parent

@dataclass(frozen=True, kw_only=True)
class Table(Planted):
    def load_train_data(self):
        rows = np.loadtxt(HERE / "train.csv", delimiter=",", dtype=np.float32)
        return Examples(torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, -1].copy()))

    def build_model(self, seed):
        model = super().build_model(seed)
        model.load_state_dict(torch.load(HERE / "first.pt", weights_only=True))
        return model
'''


def method_folder(folder: Path, factor: str) -> Path:
    text = METHOD.replace("FACTOR", factor)
    if factor == "factor()":
        text = text.replace("import torch\n", "import torch\nfrom signs import factor\n", 1)
    folder.mkdir(exist_ok=True)
    (folder / "residuals.py").write_text(text)
    (folder / "table.json").write_text(json.dumps({"sign": -1.0}))
    (folder / "signs.py").write_text(HELPER)
    return folder


@pytest.fixture
def task_folder(tmp_path: Path) -> Path:
    (tmp_path / "table.py").write_text(TASK)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(60, 5, generator=generator).numpy()
    (tmp_path / "train.csv").write_text("\n".join(",".join(f"{value:.4f}" for value in row) for row in rows))
    torch.save({"weight": torch.randn(1, 4, generator=generator), "bias": torch.zeros(1)}, tmp_path / "first.pt")
    return tmp_path


def in_a_child(work: Callable[[], object], folder: Path) -> tuple[int, str, str]:
    """Exit code, output and errors of a process of its own; forked, as one that imports torch anew takes seconds."""

    def child() -> None:
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        with open("out", "w") as out, open("err", "w") as err, redirect_stdout(out), redirect_stderr(err):
            sys.exit(work())

    process = get_context("fork").Process(target=child)
    process.start()
    process.join(600)
    return process.exitcode, (folder / "out").read_text(), (folder / "err").read_text()


def attribute(folder: Path, method: str = "residuals.py") -> tuple[int, str, str]:
    command = [
        "--task", PLANTED, "--alpha", "0.5", "--subsets", "12", "--replicates", "1", "--methods", method, "--json",
        "--cache", "cache", "--out", "runs", "--cluster", "inline", "--device", "cpu",
    ]  # fmt: skip
    return in_a_child(lambda: main(command), folder)


def row(folder: Path, method: str = "residuals.py") -> dict:
    code, out, err = attribute(folder, method)
    assert code == 0, err
    return json.loads(out)[0]


def entries(folder: Path, kind: str) -> list[str]:
    return [info.key for info in Store(folder / "cache").entries(kind)]


def as_version(monkeypatch: pytest.MonkeyPatch, distribution: str, version: str) -> None:
    known = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == distribution else known(name))
    for function in vars(source).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


# ---- what counts ----
def test_an_edited_method_is_scored_again_and_a_comment_is_not(tmp_path: Path) -> None:
    text = (method_folder(tmp_path, "factor()") / "residuals.py").read_text()
    first = row(tmp_path)
    assert first["lds"] > 0.3
    edited = text.replace("model = problem.model", "model = (problem.model)  # the base")
    (tmp_path / "residuals.py").write_text(edited)
    assert row(tmp_path) == first, "comments and formatting may change freely: even the seconds are the first run's"
    (tmp_path / "signs.py").write_text(HELPER.replace("-1.0", "1.0"))
    turned = row(tmp_path)
    assert turned["lds"] == pytest.approx(-first["lds"], abs=1e-6), "a helper that it imports counts as its own"
    assert turned["run_id"] != first["run_id"]
    method_folder(tmp_path / "elsewhere", "-1.0")
    assert row(tmp_path, method="elsewhere/residuals.py")["lds"] == first["lds"], "two files of one name share nothing"
    assert len(entries(tmp_path, "scores")) == 3


def test_an_edited_task_is_retrained(tmp_path: Path) -> None:
    text = (ROOT / "tests" / "helpers" / "planted.py").read_text()
    found = []
    for edit in (text, text.replace('"""', '"""\n', 1), text.replace("ridge", "ridge_", 1) + "\nX = 1\n"):
        (tmp_path / "mine.py").write_text(edit)
        found.append(in_a_child(lambda: print(load_task(str(tmp_path / "mine.py")).config["source"]), tmp_path)[1])
    assert len(found[0].strip()) == 16
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_what_counts_and_what_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = "def f():\n    from baselines.support.gradients import PerExampleGradients\n"
    files = {"__init__": "", "helper": "import json\n", "plugin": f"import numpy as np\nfrom . import helper\n\n{late}"}
    (tmp_path / "own_package").mkdir()
    for name, text in files.items():
        (tmp_path / "own_package" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    counted = set(source.source_files("own_package.plugin"))
    assert {"own_package.plugin", "own_package.helper", "baselines.support.gradients"} <= counted
    assert not any(name.startswith(("numpy", "json", "torch")) for name in counted)
    assert not {"retrain.store", "retrain.plugins", "baselines.method"} & counted, "these change no number"


# ---- changed between two runs ----
def test_a_declared_file_and_the_version_of_what_a_plug_in_imports_are_part_of_the_key(tmp_path, monkeypatch) -> None:
    method_folder(tmp_path, 'json.loads((HERE / "table.json").read_text())["sign"]')
    assert attribute(tmp_path)[0] == 0
    assert len(entries(tmp_path, "scores")) == 1
    (tmp_path / "table.json").write_text(json.dumps({"sign": 1.0}))
    assert attribute(tmp_path)[0] == 0
    assert len(entries(tmp_path, "scores")) == 2, "the scores of the old table must not be served for the new one"
    as_version(monkeypatch, "numpy", "99.1.0")
    assert attribute(tmp_path)[0] == 0
    assert len(entries(tmp_path, "scores")) == 3
    (tmp_path / "table.json").unlink()
    code, _, printed = attribute(tmp_path)
    assert code == 2
    assert "table.json" in printed
    task = load_task("tinylm")  # a retrain of it depends on transformers
    before = retrain_units(task, PLAN, "cpu")[0]
    as_version(monkeypatch, "transformers", "99.1.0")
    assert before.key != retrain_units(task, PLAN, "cpu")[0].key


def test_given_weights_are_part_of_the_key_of_a_task_that_does_not_say_pretrained(task_folder: Path) -> None:
    before = load_task(str(task_folder / "table.py")).config
    assert load_task(str(task_folder / "table.py")).config == before
    torch.save({"weight": torch.ones(1, 4).cumsum(1), "bias": torch.zeros(1)}, task_folder / "first.pt")
    assert load_task(str(task_folder / "table.py")).config != before
    assert "weights" not in load_task(PLANTED).config, "zeros are nobody's"


# ---- changed during a run ----
@pytest.mark.parametrize("what", ["data", "data in memory", "weights", "code"])
def test_what_a_task_is_made_of_may_not_change_while_units_run(task_folder: Path, what: str) -> None:
    """The later worker finds other data than the key says, or training writes into them: nothing of it is kept."""
    if what == "data in memory":
        train = "    def train(self, *args, **options):\n        self.train_data.inputs.mul_(2)\n"
        (task_folder / "table.py").write_text(f"{TASK}\n{train}        return super().train(*args, **options)\n")
    task = load_task(str(task_folder / "table.py"))
    units = retrain_units(task, PLAN, "cpu")
    store = Store(task_folder / "cache")
    if what == "data":
        text = (task_folder / "train.csv").read_text()
        (task_folder / "train.csv").write_text(text.replace("-", ""))
    elif what == "weights":
        torch.save({"weight": torch.ones(1, 4).cumsum(1), "bias": torch.zeros(1)}, task_folder / "first.pt")
    elif what == "code":
        (task_folder / "table.py").write_text(TASK.replace("super().build_model(seed)", "super().build_model(0)"))
    with pytest.raises(UsageError, match="data" if what == "data in memory" else "changed while"):
        run_units(units, store)
    assert list(store.entries("retrain")) == []
    assert len(run_units(retrain_units(load_task(PLANTED), PLAN, "cpu"), store).done) == 3


def test_a_helper_that_is_imported_late_and_edited_meanwhile_is_refused(tmp_path: Path) -> None:
    """The method's own `score` stands in for somebody who edits the file before it is imported."""
    edit = '__import__("pathlib").Path("signs.py").write_text("def factor():\\n    return 1.0\\n")'
    method_folder(tmp_path, "late()")
    text = (tmp_path / "residuals.py").read_text()
    late = f"def late():\n    {edit}\n    from signs import factor\n\n    return factor()\n"
    (tmp_path / "residuals.py").write_text(f"{text}\n\n{late}")
    code, _, printed = attribute(tmp_path)
    assert code == 2
    assert "was edited while" in printed
    assert entries(tmp_path, "scores") == []
    assert entries(tmp_path, "predictions") == []


# ---- where libraries may lie ----
@pytest.mark.parametrize("place", ["home/.local/lib/site-packages", "usr/local/lib/dist-packages", "opt/filled"])
def test_an_installed_library_is_never_read(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user site, Debian's dist-packages, a folder that a .pth names and pip filled."""
    name = f"library_in_{Path(place).name.replace('-', '_')}"
    package = tmp_path / place / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"import json\nfrom {name}.part import value\n")
    (package / "part.py").write_text("value = 1\n")
    (package.parent / "beside.py").write_text("value = 1\n")
    described = package.parent / f"{name}-3.1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.1\n")
    (described / "top_level.txt").write_text(f"{name}\n")
    own = tmp_path / f"plugin_{name}.py"
    own.write_text(f"import {name}\nimport own_{name}\nfrom {name} import part\n")
    (tmp_path / f"own_{name}.py").write_text(f"import {name}.part\n")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.syspath_prepend(str(tmp_path))
    source._distributions.cache_clear()
    try:
        assert set(source.source_files(own.stem)) == {own.stem, f"own_{name}"}
        assert source.imported_versions(own.stem) == {name: "3.1"}
    finally:
        source._distributions.cache_clear()
