"""README is a door: short, and every command and Python block in it runs, in a smaller size."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import bench
from bench import cli
from bench.regress import PACKAGED, read_task_baseline
from retrain.tasks import load_task

ROOT = Path(bench.__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.M | re.S)
PYTHON = [text for language, text in BLOCKS if language == "python"]
LINES = [
    line.split("  #")[0].split(" # ")[0].strip()
    for language, text in BLOCKS
    if language == "bash"
    for line in text.splitlines()
]
PROSE = re.sub(r"^```.*?^```", "", README, flags=re.M | re.S)
INLINE = re.findall(r"`((?:python -m|tda-bench|make) [^`]+)`", PROSE)
TASK = ["--set", "digits.epochs=1", "--set", "digits.num_train=80"]
PLAN = ["--subsets", "5", "--replicates", "1", "--cluster", "inline"]
QUERIES = ["--queries", "10"]
FEW_DRAWS = [
    word for option in ("draws=5", "gamma=1e4", "n_beta=10", "step_size=1e-4") for word in ("--set", f"bif.{option}")
]
SMALLER = {
    "lds": [*TASK, *PLAN, *QUERIES],
    "tune": [*TASK, *PLAN, *QUERIES, "--tries", "2"],
    "speed": [*TASK, *QUERIES, "--repeats", "1"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder, with the files that README's commands name."""
    path = tmp_path_factory.mktemp("readme")
    (method,) = (text for text in PYTHON if "class Residuals" in text)
    (path / "residuals.py").write_text(method)
    return path


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TDA_BENCH_CACHE", str(folder / "cache"))
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


def smaller(command: str) -> list[str]:
    """The words of a command of README, for bench.cli. Nothing imports bench.lds: it would hide the function `lds`."""
    words = shlex.split(command)
    words = words[1:] if words[0] == "tda-bench" else [words[2].removeprefix("bench."), *words[3:]]
    if "--ground-truth" not in words:
        words += SMALLER.get(words[0], [])
        words += FEW_DRAWS if words[0] == "lds" and not {"--methods", "--experiment"} & set(words) else []
    return words


def run(command: str) -> int:
    if command.startswith("make "):
        done = subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
        print(done.stdout, done.stderr)
        return done.returncode
    try:
        return cli.main(smaller(command)) or 0
    except SystemExit as stopped:  # --help
        return int(stopped.code or 0)


@pytest.mark.parametrize("command", [line for line in LINES if "bench.regress" not in line])  # the gate: see below
def test_commands_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_the_notebook_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (script,) = (text for text in PYTHON if "import Experiment" in text)
    assert len(script.splitlines()) <= 15
    shorter = script.replace("subsets=20", 'subsets=5, task_options={"epochs": 1, "num_train": 80}')
    assert shorter != script
    exec(compile(shorter, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "ceiling" in out
    assert "gradsim" in out
    assert (folder / "front.png").stat().st_size > 1000


@pytest.mark.parametrize("command", INLINE)
def test_commands_in_the_text_run(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if command.endswith("..."):
        assert smaller(command)[0] in cli.COMMANDS
        return
    if not list(folder.glob("one/*/run.json")):
        assert run("python -m bench.lds --alpha 0.1 --methods gradsim random --out one") == 0
    (record,) = folder.glob("one/*/run.json")
    command = command.replace("--experiment FILE", f"--experiment {record}").replace("--results runs", "--results one")
    if "--ground-truth DIR" in command:
        words = ["export", "--task", "digits", "--alpha", "0.1", *PLAN, *TASK, "--out", "truth"]
        assert cli.main(["truth", *words]) == 0
        queries = len(load_task("digits", num_train=80).query_indices("report"))
        np.save("scores.npy", np.random.default_rng(0).normal(size=(queries, 80)))
        command = command.replace("--ground-truth DIR", "--ground-truth truth")
    assert run(command) == 0, capsys.readouterr().err


def test_the_gate_of_the_example(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded, and passed; fewer seeds than a user's baseline has."""
    record, check = (line for line in LINES if line.startswith("python -m bench.regress"))
    (folder / "gate").mkdir()
    for name in ("digits.json", "digits.safetensors"):
        shutil.copy(PACKAGED / name, folder / "gate")
    # The ground truth that ships, whatever code made it, instead of a minute of retraining.
    monkeypatch.setattr("bench.regress.known_task_baseline", read_task_baseline)
    monkeypatch.setattr("bench.regress.BASELINE_SEEDS", 3)
    assert run(record) == 0, capsys.readouterr().err
    assert run(check) == 0, capsys.readouterr()
    assert (folder / "gate.xml").exists()


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
