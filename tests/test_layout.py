"""The shape of the house: where imports go, and what is taken from elsewhere."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("bench", "baselines", "retrain")
FORBIDDEN = {"retrain": {"baselines", "bench", "tests"}, "baselines": {"bench", "tests"}, "bench": {"tests"}}


@cache
def files() -> dict[str, Path]:
    """Module -> file."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> set[str]:
    """Every module that a file imports, inside functions too; a name that may be a module of its own is among them."""
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def for_types_only(path: Path) -> set[str]:
    """What is imported under TYPE_CHECKING: nothing at run time."""
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for inner in ast.walk(node):
                if isinstance(inner, ast.ImportFrom) and inner.module:
                    names |= {inner.module} | {f"{inner.module}.{alias.name}" for alias in inner.names}
    return names


def graph() -> dict[str, set[str]]:
    """Module -> modules of ours that it imports; a package's own `__init__` does not count as importing from it."""
    modules = files()
    return {
        name: {other for other in imported(path) - for_types_only(path) if other in modules and other != name}
        for name, path in modules.items()
    }


def without_circles(edges: dict[str, set[str]]) -> bool:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None
    return True


def test_no_import_goes_in_a_circle() -> None:
    assert without_circles(graph())
    # In what a key may hold, not even for types: what one module means would depend on the other.
    typed = {name: imported(path) & set(files()) - {name} for name, path in files().items()}
    keyed = {name: others for name, others in typed.items() if name.startswith(("retrain.", "baselines."))}
    assert without_circles({name: others & set(keyed) for name, others in keyed.items()})


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_never_go_back(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        assert not {name.split(".")[0] for name in imported(path)} & FORBIDDEN[package], path


def test_every_module_says_what_it_does_and_metrics_need_no_torch() -> None:
    for module, path in files().items():
        if path.name != "__init__.py" or path.read_text().strip():
            assert ast.get_docstring(parsed(path)), module
    for path in (ROOT / "bench" / "metrics").glob("*.py"):
        assert not {name.split(".")[0] for name in imported(path)} & {"torch", "baselines", "retrain"}, path


def test_what_a_fresh_process_imports() -> None:
    """The API is lazy, a list of tasks and methods imports none of them, and torchvision goes with any torch."""
    code = (
        "import sys, bench, bench.metrics; assert not {'torch', 'scipy.stats'} & set(sys.modules); "
        "assert len(bench.__all__) == 11; bench.run; assert callable(bench.lds); "
        "from baselines.method import available_methods; from retrain.tasks import available_tasks; "
        "assert {'ekfac', 'ekfac_cg', 'gradsim'} < set(available_methods()) and 'digits' in available_tasks(); "
        "heavy = {'kronfluence', 'trak', 'transformers', 'sklearn'} & set(sys.modules); assert not heavy, heavy; "
        "import retrain, torchvision; from transformers import GPTNeoXForCausalLM"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_no_module_hides_a_function_of_the_api() -> None:
    """A submodule that is imported becomes the package's attribute; `bench.lds` is a command, and never imported."""
    import bench

    hiding = {f"bench.{name}" for name in bench.__all__} & set(files())
    assert hiding == {"bench.lds"}
    for path in files().values():
        assert not hiding & imported(path) or path.name == "__init__.py", path


def test_workflow_actions_are_pinned_by_commit_and_may_only_read() -> None:
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text()
        used = re.findall(r"uses:\s*(\S+)", text)
        assert used
        assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name) for name in used), used
        assert re.search(r"^permissions:\n  contents: read$", text, re.MULTILINE)


def test_constraints_are_exact_versions_and_the_text_of_others_has_its_licence() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.partition(";")[0].strip() for line in lines if line and not line.startswith("#")]
    assert pins
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9A-Za-z.]*", pin) for pin in pins)
    assert "torch==2.13.0" in pins  # without +cpu: it also matches a wheel that has it
    assert "CC BY-SA" in (ROOT / "results" / "pythia14m" / "examples" / "LICENSE.md").read_text()
