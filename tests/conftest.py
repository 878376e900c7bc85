"""Shared fixtures. Tests never download and never need ../shared."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run beside each other; small tensors gain nothing from threads
os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder
