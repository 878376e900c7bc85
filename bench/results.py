"""Reads committed results: every `run.json` under a folder becomes rows of one table, each with its record's path.

`bench.figures` and `bench.report` start here. Nothing is recomputed, and a damaged record is named and passed over.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from bench.lds import COLUMNS
from retrain.safe_files import SafeFileError, read_json

EXPERIMENT = ["name", "task", "protocol", "method", "normalised", "alpha", "alpha_attribution", "seed"]
EXTRA = ["name", "spread", "device", "machine", "num_replicates", "description", "record", "finished"]


@dataclass
class Results:
    """What a results folder holds."""

    folder: Path
    rows: pd.DataFrame  # COLUMNS and EXTRA, one row an EXPERIMENT
    pairs: pd.DataFrame
    records: dict[str, dict[str, Any]] = field(default_factory=dict)  # run_id -> run.json
    problems: list[str] = field(default_factory=list)

    def files(self, name: str) -> list[Path]:
        """Every file of that name, in order of its path."""
        return sorted(path for path in self.folder.rglob(name) if path.is_file())

    def read(self, name: str) -> list[tuple[Path, Any]]:
        """Every JSON file of that name with its content; an unreadable one becomes a problem."""
        found = []
        for path in self.files(name):
            try:
                found.append((path, read_json(path)))
            except SafeFileError as error:
                self.problems.append(str(error))
        return found


def load_results(folder: str | Path) -> Results:
    results = Results(Path(folder), pd.DataFrame(columns=[*COLUMNS, *EXTRA]), pd.DataFrame())
    rows: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    for path, record in results.read("run.json"):
        try:
            if record["config"].get("query_split", "report") == "tune":
                continue  # settings are chosen on these; they are never reported
            context = _context(path, record, results.folder)
            replicates = {_where(c): c.get("num_replicates") for c in record["ceilings"]}
            settings = {m["name"]: json.dumps(m, sort_keys=True) for m in record["config"].get("methods", [])}
            for row in record["rows"]:
                context["name"] = _name(path.relative_to(results.folder), row["task"])
                known = {"num_replicates": replicates.get(_where(row)), "settings": settings.get(row["method"], "")}
                rows.append({**context, **row, **known})
            pairs += record.get("pairs", [])
            results.records[record["run_id"]] = {**record, "path": context["record"]}
        except (KeyError, TypeError, AttributeError) as error:
            results.problems.append(f"{path}: is no record of bench.lds ({type(error).__name__}: {error})")
    if rows:
        frame = pd.DataFrame(rows)
        for name in (*COLUMNS, *EXTRA):
            if name not in frame:
                frame[name] = None
        for name in (
            "lds",
            "ci_low",
            "ci_high",
            "ceiling",
            "spread",
            "fit_seconds",
            "score_seconds",
            "lds_across_queries",
        ):
            frame[name] = pd.to_numeric(frame[name])
        frame["seconds"] = frame["fit_seconds"] + frame["score_seconds"]
        # The same experiment in two runs: the one with more subsets, then more queries, then the later one.
        frame = frame.sort_values([*EXPERIMENT, "num_subsets", "num_queries", "finished"], kind="stable")
        results.rows = frame.drop_duplicates(EXPERIMENT, keep="last").reset_index(drop=True)
    results.pairs = pd.DataFrame(pairs)
    return results


def _context(path: Path, record: dict[str, Any], folder: Path) -> dict[str, Any]:
    machine = record.get("machine", {})
    return {
        "description": record.get("description", ""),
        "record": path.relative_to(folder).as_posix(),
        "finished": record.get("finished", ""),
        "machine": f"{record['device']}, {machine.get('cores')} cores"
        if "CPU" in record["device"]
        else record["device"],
        "device": record["device"],
    }


def _name(path: Path, task: str) -> str:
    """What the row's figures are called: its task, or the folder of runs if that is named after the task.

    Runs in `cifar10` and in `cifar10-bif` then stay apart: their ground truths may differ in replicates or queries, and
    methods are compared on one ground truth only.
    """
    folder = path.parts[-3] if len(path.parts) > 2 else ""
    return folder if folder.startswith(f"{task}-") else task


def _where(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("task", "protocol", "alpha", "alpha_attribution", "seed"))


def setting_text(value: Any) -> str:
    """A swept option's value as people write it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value) or '""'
    return f"{value:g}"
