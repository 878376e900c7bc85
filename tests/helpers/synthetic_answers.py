"""Records of `bench.evaluations` agreement and removal, of the shape that they write, made up, for tests."""

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


def write_removal(folder: Path) -> Path:
    rows = []
    for label, step in (("bif", 0.4), ("ekfac", 0.3), ("random removal", 0.0)):
        for number, at in enumerate((0.01, 0.05, 0.2)):
            value = number * step
            place = {"metric": "removal", "at": at, "size": round(1200 * at), "normalised": False, "higher": True}
            known = {"task": "digits", "protocol": "scratch", "alpha_attribution": 1.0, "seed": 1, **place}
            told = {"method": label, "label": label, "origin": "control" if step == 0 else "tuned"}
            told["settings"] = "" if label != "ekfac" else "damping=0.1"
            ends = {"value": value, "ci_low": value - 0.1, "ci_high": value + 0.1}
            missing = 20 if step == 0 and at == 0.2 else 0
            rows.append(known | told | ends | {"num_queries": 50, "num_undefined": missing})
    record = {
        "run_id": "remove000001", "question": "removal", "truth": "50 queries, one retrain a set",
        "device": "CPU x86_64", "description": "digits", "ground": {}, "rows": rows, "pairs": [],
        "config": {"task": {"name": "digits", "protocol": "scratch"}, "shares": [0.01, 0.05, 0.2]},
    }  # fmt: skip
    folder.mkdir(parents=True)
    path = folder / "answers.json"
    path.write_text(json.dumps(record))
    return path
