"""README's add-a-method example, copied into an empty folder: it runs, it is recorded, and it is gated."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import regress

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MAX_LINES = 25


def example_from(text: str) -> str:
    """The first Python block after the heading that contains "Add a method"."""
    heading = re.search(r"^#+ .*Add a method.*$", text, re.M | re.I)
    assert heading, 'README.md has no heading with "Add a method"'
    block = re.search(r"^```python\n(.*?)^```", text[heading.end() :], re.M | re.S)
    assert block, 'README.md has no ```python block after "Add a method"'
    return block.group(1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "residuals.py").write_text(example_from(README.read_text()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    return tmp_path


def forget_module() -> None:
    """So that the next import reads the file again."""
    sys.modules.pop("residuals", None)


def test_it_is_short(folder: Path) -> None:
    assert len((folder / "residuals.py").read_text().splitlines()) <= MAX_LINES


def test_it_is_measured_beside_the_others(folder: Path) -> None:
    command = ["--task", "digits", "--alpha", "0.05", "--subsets", "4", "--replicates", "1", "--queries", "50"]
    command += ["--methods", "residuals:Residuals", "random", "--cache", "cache", "--out", "runs"]
    command += ["--set", "digits.epochs=1", "--set", "digits.num_train=300"]  # a moment instead of half a minute
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-m", "bench.lds", *command], env=environment, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr
    assert "residuals:Residuals" in found.stdout
    assert list(folder.glob("runs/*/run.json"))


def test_it_is_gated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gate = ["--method", "residuals:Residuals", "--baseline", "gate"]
    forget_module()
    assert regress.main([*gate, "--update", "--baseline-seeds", "3", "--cache", "cache"]) == 0
    assert regress.main([*gate, "--junit", "gate.xml"]) == 0
    assert (folder / "gate.xml").exists()
    source = folder / "residuals.py"
    text = source.read_text()
    assert text.count("-queries @ train.T") == 1
    source.write_text(text.replace("-queries @ train.T", "queries @ train.T"))
    forget_module()
    capsys.readouterr()
    assert regress.main(gate) == 1
    assert "the sign is flipped" in capsys.readouterr().out
    forget_module()
