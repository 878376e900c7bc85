"""The code behind every cache key, pinned: a move or an edit that gives retrains or scores another key is seen here.

    python -m tests.test_golden_keys        # writes tests/golden_keys.json anew, where new keys are meant

Of each embedded task and each method it has the modules whose source is in the key; of each pair a hash of that source
and of the settings. Data, trained weights and library versions are in real keys too, and differ between machines.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from baselines.method import available_methods, load_method
from retrain.plugins import UsageError
from retrain.source import source_files, source_fingerprint
from retrain.store import canonical_json
from retrain.tasks import load_task

FILE = Path(__file__).with_name("golden_keys.json")
TASKS = ("digits", "smooth_digits", "tinylm")
HARNESS = {"measured": ("bench.measure",), "summed": ("bench.prediction", "retrain.subsets")}


def keys() -> dict[str, Any]:
    tasks = {name: load_task(name) for name in TASKS}
    harness = {name: source_fingerprint(*modules) for name, modules in HARNESS.items()}
    found: dict[str, Any] = {
        "tasks": {name: list(source_files(*task.key_modules())) for name, task in tasks.items()},
        "harness": {name: list(source_files(*modules)) for name, modules in HARNESS.items()},
        "methods": {},
        "keys": {},
    }
    for name in available_methods():
        try:
            method = load_method(name)
        except UsageError:  # an optional library is not installed
            continue
        found["methods"][name] = list(source_files(*method.key_modules()))
        for task_name, task in tasks.items():
            settings = load_method(name, **task.method_settings.get(name, {})).config
            held = {"task": task.source, "method": method.source, "settings": settings, **harness}
            digest = hashlib.sha256(canonical_json(held).encode()).hexdigest()[:20]
            found["keys"][f"{task_name} {name}"] = digest
    return found


@pytest.mark.parametrize("part", ["tasks", "harness", "methods", "keys"])
def test_keys_are_those_that_were_meant(part: str) -> None:
    pinned, now = json.loads(FILE.read_text())[part], keys()[part]
    changed = sorted(name for name in now if now[name] != pinned.get(name))
    assert not changed, f"other keys for {changed}; if that is meant: python -m tests.test_golden_keys"
    assert set(now) <= set(pinned)


def test_a_control_of_thirty_lines_depends_on_little() -> None:
    assert len(source_files(*load_method("same_class").key_modules())) <= 6


if __name__ == "__main__":
    FILE.write_text(json.dumps(keys(), indent=1, sort_keys=True) + "\n")
