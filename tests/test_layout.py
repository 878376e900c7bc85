"""The shape of the house: imports go bench -> baselines -> retrain, and the metrics know no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN = {"retrain": {"baselines", "bench"}, "baselines": {"bench"}}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_imports_never_go_back(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        assert not imported(path) & FORBIDDEN[package], path


def test_nothing_imports_the_tests() -> None:
    for package in ("bench", "baselines", "retrain"):
        for path in (ROOT / package).rglob("*.py"):
            assert "tests" not in imported(path), path


def test_metrics_need_no_torch() -> None:
    assert not imported(ROOT / "bench" / "metrics.py") & {"torch", "baselines", "retrain"}


def test_listing_tasks_and_methods_imports_none_of_them() -> None:
    code = (
        "import sys; from baselines.method import available_methods; from retrain.tasks import available_tasks;"
        "print(available_methods(), available_tasks());"
        "heavy = {'kronfluence', 'trak', 'transformers', 'sklearn'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "'bif', 'bif_cv', 'bif_devinterp', 'ekfac', 'gradsim', 'random', 'trak'" in done.stdout


def test_torchvision_imports_beside_whatever_torch_is_here() -> None:
    code = "import retrain, torchvision; from transformers import GPTNeoXForCausalLM; print('fine')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip().endswith("fine"), done.stderr
