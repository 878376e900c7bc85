"""Every committed record loads, and what `load_results` gives of them stays the same to the last byte."""

import hashlib
import json
from pathlib import Path

import pandas as pd
import pytest

from bench import load_results

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "records.json"


def digest(frame: pd.DataFrame) -> str:
    return hashlib.sha256(frame.to_csv(index=False).encode()).hexdigest()


@pytest.fixture(scope="module")
def committed():
    return load_results(ROOT / "results")


def test_every_committed_record_loads(committed) -> None:
    assert committed.problems == []
    assert sorted(committed.records) == json.loads(GOLDEN.read_text())["records"]


@pytest.mark.parametrize("name", ["rows", "timed", "pairs"])
def test_frames_of_the_committed_records_are_unchanged(committed, name: str) -> None:
    assert digest(getattr(committed, name)) == json.loads(GOLDEN.read_text())[name]
