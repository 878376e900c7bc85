"""A record of `bench.agreement` of the shape that it writes, made up: for tests of figures."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

LABELS = ("bif", "ekfac", "gradsim", "random")


def write_agreement(folder: Path) -> Path:
    where = {"task": "digits", "protocol": "scratch", "alpha_attribution": 1.0, "seed": 1, "normalised": False}
    cells: list[dict[str, Any]] = []
    for metric, at in (("Spearman", None), ("overlap", 0.01), ("overlap", 0.1)):
        for number, (label, against) in enumerate(combinations(LABELS, 2)):
            value = 0.0 if against == "random" else 0.9 - 0.1 * number
            ends = {"value": value, "ci_low": value - 0.02, "ci_high": value + 0.02}
            known = {"label": label, "against": against, "metric": metric, "at": at, "num_queries": 50}
            cells.append(where | known | ends | {"num_undefined": 0})
    record = {
        "run_id": "agree0000001", "question": "agreement", "truth": "50 queries, 1,200 attributed examples",
        "device": "CPU x86_64", "description": "digits", "ground": {}, "rows": [], "pairs": [],
        "config": {
            "task": {"name": "digits", "protocol": "scratch"},
            "methods": [{"name": label, "label": label} for label in LABELS],
        },
        "detail": {"cells": cells},
    }  # fmt: skip
    folder.mkdir(parents=True)
    path = folder / "answers.json"
    path.write_text(json.dumps(record))
    return path
