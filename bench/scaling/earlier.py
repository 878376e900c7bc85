"""A sweep writes its table after every point, over whatever table is there: another run's is kept until it has all of
that one's numbers."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.records import another_runs
from bench.scaling.merge import ROW_KEY
from retrain.safe_files import read_json


def set_aside(out: Path, run_id: str) -> Path | None:
    """Another run's table in `out`, copied to its own id's name; None where there is none."""
    record = another_runs(out / "scaling.json", run_id)
    try:
        numbers = record is not None and any(not row["error"] for row in record["rows"])
    except (KeyError, TypeError):
        return None
    if record is None or not numbers:
        return None
    name = record["run_id"]
    for ending in ("json", "csv"):
        if (out / f"scaling.{ending}").is_file():
            shutil.copyfile(out / f"scaling.{ending}", out / f"scaling.{name}.{ending}")
    return out / f"scaling.{name}.json"


def settle(kept: Path | None, rows: Sequence[dict[str, Any]]) -> str:
    """Takes the copy away where `rows` have all of its numbers; else says where it is."""
    if kept is None or not kept.exists():  # or somebody took it away meanwhile
        return ""
    if _with_numbers(read_json(kept)["rows"]) <= _with_numbers(rows):
        for path in (kept, kept.with_suffix(".csv")):
            path.unlink(missing_ok=True)
        return ""
    return f"another run's table was there and is kept as {kept}"


def _with_numbers(rows: Sequence[dict[str, Any]]) -> set[tuple[Any, ...]]:
    return {tuple(row[name] for name in ROW_KEY) for row in rows if not row["error"]}
