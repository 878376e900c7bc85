"""A sweep writes its table after every point, over whatever table is there: another run's is kept until it has all of
that one's numbers."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.scaling.merge import ROW_KEY
from retrain.safe_files import SafeFileError, read_json


def set_aside(out: Path, run_id: str) -> Path | None:
    """Another run's table in `out`, copied to its own id's name; None where there is none."""
    try:
        record = read_json(out / "scaling.json", follow_links=True)
        name = str(record["run_id"])
        numbers = any(not row["error"] for row in record["rows"])
    except (OSError, SafeFileError, KeyError, TypeError):
        return None
    if name == run_id or not numbers or not re.fullmatch("[0-9a-f]{12}", name):
        return None
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
