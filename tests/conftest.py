"""Shared fixtures. Tests never download, never need ../shared and never see what the user has downloaded or cached."""
# ruff: noqa: E402

import atexit
import gc
import os
import shutil
import tempfile

# A test that finds CIFAR-10 in the user's cache would train on it for hours.
USER_FOLDERS = tempfile.mkdtemp(prefix="tda-bench-tests-")
atexit.register(shutil.rmtree, USER_FOLDERS, ignore_errors=True)
os.environ |= {
    name: f"{USER_FOLDERS}/{name}"
    for name in ("TDA_BENCH_CACHE", "XDG_CACHE_HOME", "XDG_STATE_HOME", "HF_HOME", "TORCH_HOME")
}
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run beside each other; small tensors gain nothing from threads
os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from retrain.store import Store

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def light_garbage_collection() -> None:
    """kronfluence collects garbage at every step: what the imports left behind would be looked through each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image folder and weights for GoogLeNet, made once: its network takes seconds."""
    from tests.helpers.made_up import image_folder

    return image_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(autouse=True)
def damage_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test has just damaged would be waited for: somebody might be copying it into the cache."""
    monkeypatch.setattr("retrain.store.QUIET_SECONDS", 0.0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


@pytest.fixture
def execution(tmp_path: Path) -> object:
    """In this process, on a cache of its own."""
    from bench import Execution

    return Execution(device="cpu", cache=str(tmp_path / "cache"), progress=False)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command says that refuses its words: exit code 2, and one line."""

    def refused(main: Callable[[list[str]], int], words: list[str]) -> str:
        capsys.readouterr()
        try:
            code = main(words)
        except SystemExit as stop:
            code = stop.code  # type: ignore[assignment]
        said = capsys.readouterr().err
        assert (code, said.count("\n")) == (2, 1), said
        assert "Traceback" not in said
        assert "internal error" not in said
        return said

    return refused


@pytest.fixture
def log(tmp_path: Path) -> str:
    """Where the units of `tests/helpers/job_units.py` write what they do."""
    return str(tmp_path / "diary")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers take seconds to import torch, and tests run beside each other already; those of workers ask for them."""
    monkeypatch.setattr("bench.arguments.default_cluster", lambda device: "inline")
