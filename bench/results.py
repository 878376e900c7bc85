"""Reads committed results: every `run.json` under a folder becomes rows of one table, each with its record's path.

`bench.figures` and `bench.report` start here. Nothing is recomputed, and a damaged record is named and passed over.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from bench.metrics import mean_and_standard_error
from bench.rows import COLUMNS
from retrain.safe_files import SafeFileError, read_json

EXPERIMENT = ["name", "task", "protocol", "method", "normalised", "alpha", "alpha_attribution", "seed"]
EXTRA = [
    "name", "spread", "device", "machine", "num_replicates", "description", "record", "finished", "ceiling_from",
    "ceiling_subsets",
]  # fmt: skip
GROUND_TRUTH = ("task", "scheme", "query_split", "queries")  # of a record's config: what its reliability depends on
MANY_SEEDS = 5


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
    measured: dict[str, list[dict[str, Any]]] = {}
    for path, record in results.read("run.json"):
        try:
            if record["config"].get("query_split", "report") == "tune":
                continue  # settings are chosen on these; they are never reported
            context = _context(path, record, results.folder)
            replicates = {_where(c): c.get("num_replicates") for c in record["ceilings"]}
            settings = {m["name"]: json.dumps(m, sort_keys=True) for m in record["config"].get("methods", [])}
            truth = json.dumps([record["config"].get(name) for name in GROUND_TRUTH], sort_keys=True)
            for ceiling in record["ceilings"]:
                if ceiling.get("reliability") is not None and ceiling.get("num_replicates"):
                    known = {"run_id": record["run_id"], "finished": context["finished"]}
                    measured.setdefault(_key(truth, ceiling), []).append({**ceiling, **known})
            for row in record["rows"]:
                context["name"] = _name(path.relative_to(results.folder), row["task"])
                known = {"num_replicates": replicates.get(_where(row)), "settings": settings.get(row["method"], "")}
                rows.append({**context, **row, **known, "truth": truth})
            pairs += record.get("pairs", [])
            results.records[record["run_id"]] = {**record, "path": context["record"]}
        except (KeyError, TypeError, AttributeError) as error:
            results.problems.append(f"{path}: is no record of bench.lds ({type(error).__name__}: {error})")
    if rows:
        for row in rows:
            _find_ceiling(row, measured.get(_key(row.pop("truth"), row), []))
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


def _key(truth: str, row: dict[str, Any]) -> str:
    return json.dumps([truth, *_where(row)])


def _find_ceiling(row: dict[str, Any], measured: list[dict[str, Any]]) -> None:
    """Gives a row without replicates the ceiling of the same ground truth in a record that has them.

    The two may differ in how many subsets and replicates they have, and in nothing else. With m replicates the variance
    of retraining's noise, in units of the signal's, is m (1 / reliability - 1): with the row's own number of replicates
    the reliability follows, and the ceiling is its square root (see bench.metrics).
    """
    if row.get("ceiling") is not None or not row["num_replicates"] or not measured:
        return
    best = max(measured, key=lambda c: (c.get("num_subsets_replicated", 0), c["num_replicates"], c["finished"]))
    row |= {"ceiling": 0.0, "ceiling_from": best["run_id"], "ceiling_subsets": best.get("num_subsets_replicated")}
    if best["reliability"] > 0:
        noise = best["num_replicates"] * (1 / best["reliability"] - 1)
        row["ceiling"] = math.sqrt(1 / (1 + noise / row["num_replicates"]))


def over_seeds(cell: pd.DataFrame) -> tuple[float, float, float]:
    """Mean LDS of one experiment, and the two ends of its bar.

    From MANY_SEEDS seeds on, one standard error to each side. Fewer say little of their own spread, and two that happen
    to agree would look certain: there the bar goes from the lowest to the highest end of the seeds' 95 % intervals.
    """
    mean, error = mean_and_standard_error(cell["lds"].to_numpy())
    if len(cell) >= MANY_SEEDS:
        return mean, mean - error, mean + error
    return mean, float(cell["ci_low"].min()), float(cell["ci_high"].max())


def bars_of(seeds: set[int]) -> str:
    """What the bars of `over_seeds` are, for experiments of that many seeds."""
    few, many = sorted(n for n in seeds if n < MANY_SEEDS), sorted(n for n in seeds if n >= MANY_SEEDS)
    parts = [f"standard error over {' or '.join(map(str, many))} seeds"] if many else []
    if few == [1]:
        parts.append(f"95 % interval{' where there is one seed' if many else ' of the one seed'}")
    elif few:
        where = f"with {' or '.join(map(str, few))}, " if many else ""
        whose = "their" if many else f"the {' or '.join(map(str, few))} seeds'"
        parts.append(f"{where}lowest to highest end of {whose} 95 % intervals")
    return "; ".join(parts)
