"""The settings that `bench.tune` chose: a file a task and protocol, with the record of the choice in it.

Files lie in `bench/tuned_settings/` and ship with the package; `$TDA_BENCH_TUNED` names a folder of one's own that is
looked into first. Methods that were tuned later have a file of their own, named as the first and something more
(`digits-scratch-rivals.json`); the first that names a method counts.
"""

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from retrain.errors import UsageError
from retrain.safe_files import SafeFileError, read_json
from retrain.task import Task

TUNED_WITH_US = Path(__file__).parent / "tuned_settings"
OWN_FOLDER = "TDA_BENCH_TUNED"
TUNED_FORMAT = "tda-bench tuned settings 1"


def tuned_folders() -> list[Path]:
    own = os.environ.get(OWN_FOLDER)
    if own and not Path(own).is_dir():
        raise UsageError(f"{OWN_FOLDER} is {own}, which is no folder; give the --out of a `python -m bench.tune`")
    return [*([Path(own)] if own else []), TUNED_WITH_US]


def tuned_file(task: Task) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", f"{task.name}-{task.protocol}").strip("-") + ".json"


def tuned_settings(task: Task, method: str) -> dict[str, dict[str, Any]] | None:
    """{"raw": options, "normalised": options} of a method on a task, or None where nobody chose any."""
    first = Path(tuned_file(task))
    for folder in tuned_folders():
        later = sorted(folder.glob(f"{first.stem}-*.json"))  # of this task, or of one with a longer name
        for path in [folder / first, *later]:
            if not path.is_file():
                continue
            content = _read(path, path.stat().st_mtime_ns)
            if path in later and (content.get("task"), content.get("protocol")) != (task.name, task.protocol):
                continue
            found = content["methods"].get(method)
            if found is not None:
                return {kind: found[kind]["options"] for kind in ("raw", "normalised")}
    return None


@lru_cache(maxsize=64)
def _read(path: Path, stamp: int) -> dict[str, Any]:
    content = read_json(path)
    if (
        not isinstance(content, dict)
        or content.get("format") != TUNED_FORMAT
        or not isinstance(content.get("methods"), dict)
    ):
        raise SafeFileError(path, f'is no file of tuned settings; expected "format": "{TUNED_FORMAT}"')
    return content
