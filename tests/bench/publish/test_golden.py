"""What is rendered from the committed records stays as it is, to the last digit, whatever moves in the code.

tests/golden/publish.json holds digests. One that changes on purpose is changed there in the same commit, with a reason.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench.records import Results, edited_since, load_results, read_record
from bench.schema import AnswersRecord, RunRecord
from bench.tables import RunRows, show

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "results"
GOLDEN = json.loads((ROOT / "tests" / "golden" / "publish.json").read_text())
NUMBERS = (
    "lds", "ci_low", "ci_high", "ceiling", "spread", "lds_across_queries", "fit_seconds", "score_seconds", "p_value",
    "difference",
)  # fmt: skip


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plain(one: dict[str, Any]) -> dict[str, Any]:
    defaults = {"label": one.get("method"), "settings": "", "origin": "default"} if "method" in one else {}
    return defaults | {key: math.nan if value is None and key in NUMBERS else value for key, value in one.items()}


@pytest.mark.parametrize("name", GOLDEN["lds_tables"])
def test_the_lds_table_of_every_record(name: str) -> None:
    path = RESULTS / name
    if not path.is_file():
        pytest.skip("the record is not here any more")
    record = read_record(path, RunRecord)
    # Pairs of several seeds follow the one rule of bench/publish/compare.py, which has tests of its own.
    pairs = record.get("pairs", []) if len({row["seed"] for row in record["rows"]}) == 1 else []
    out = RunRows(
        rows=list(map(plain, record["rows"])), ceilings=list(map(plain, record["ceilings"])),
        pairs=list(map(plain, pairs)), diagnostics=record.get("diagnostics", []),
    )  # fmt: skip
    text = show(out, record.get("description", ""), record["rows"][0]["protocol"], wide=True)
    assert digest(text) == GOLDEN["lds_tables"][name]


@pytest.fixture(scope="module")
def committed() -> Results:
    return load_results(RESULTS)


def test_every_committed_record_loads_and_gives_the_frames_that_it_gave(committed: Results) -> None:
    golden = json.loads((ROOT / "tests" / "golden" / "records.json").read_text())
    assert committed.problems == []
    text = committed.text(wide=True)
    assert all(f"run {run}" in text for run in committed.records)
    assert sorted(committed.records) == golden["records"]
    for name in ("rows", "pairs"):
        rendered = getattr(committed, name).to_csv(index=False)
        assert hashlib.sha256(rendered.encode()).hexdigest() == golden[name]
    for path in sorted(RESULTS.rglob("answers.json")):
        assert not edited_since(read_record(path, AnswersRecord)), path
