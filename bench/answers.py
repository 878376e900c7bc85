"""What a question beside LDS comes to: rows of one shape, paired differences, and a record that says how.

Removal, mislabelled examples, calibration and leave-one-out differ in what they measure; a reader of their records need
not know. A row is one number of one method: `metric`, `at` (the share that was removed, the k of a precision; null
where there is one number), `value` with its interval, and whether more of it is better. `ground` is what decides the
truth it was held against: rows of records with different grounds are never compared.

    python -m bench.evaluations removal --task digits      # writes runs/<run_id>/answers.json
    tda-bench publish leaderboard --results runs      # reads every one of them
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from bench.methods import Variant
from bench.records import DISTRIBUTIONS, provenance, run_id_of, save_record, versions
from bench.schema import AnswersRecord
from retrain.safe_files import one_line
from retrain.task import Task

ANSWERS_FILE = "answers.json"
TOPS = (0.01, 0.05)  # of which a precision is told, beside the share of the labels that was flipped


def amount_asked(record: Mapping[str, Any], at: float | None) -> float | None:
    """The share that was asked for, where `at` is what came of it in whole examples: seeds differ by one or two."""
    if at is None:
        return None
    config = record["config"]
    asked = config.get("shares") or ([*TOPS, config["share"]] if "share" in config else [])
    nearest = min(asked, key=lambda share: abs(share - at), default=at)
    return nearest if abs(nearest - at) <= 0.1 * nearest else at


@dataclass
class MetricResult:
    """What a run of such a question found, as plain data."""

    question: str  # removal, mislabelled, calibration, leave-one-out
    task: Task
    variants: Sequence[Variant]
    asked: Mapping[str, Any]  # the options of the run, as they stand in the record
    ground: Mapping[str, Any]  # what decides the truth beside the task
    truth: str  # the same in a few words, for a caption
    device: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    detail: dict[str, Any] = field(default_factory=dict)  # what else the question's own tables and figures show
    skipped: dict[str, str] = field(default_factory=dict)  # label -> why
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was asked for beyond what there is; said, and not recorded
    seconds: float = 0.0
    run_id: str = ""

    def config(self) -> dict[str, Any]:
        return {
            "task": self.task.config,
            "methods": [variant.describe() for variant in self.variants],
            **self.asked,
            "versions": {name: version for name, version in versions().items() if name in DISTRIBUTIONS},
        }

    def assign_run_id(self) -> None:
        """Its id: of what was asked, by which code, and of what came out."""
        if self.run_id:
            return
        self.run_id = run_id_of(self.question, self.config(), self.ground, self.rows, self.pairs, self.detail)
        for row in [*self.rows, *self.pairs]:
            row["run_id"] = self.run_id

    def frame(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows)

    def save(self, out: str | Path, command: str = "") -> Path:
        """Writes answers.json, and its rows and pairs as CSV, to a folder of the run's own: see `save_record`."""
        self.assign_run_id()
        record = {
            "run_id": self.run_id,
            "question": self.question,
            "command": command,
            "description": one_line(self.task.description, 2000),
            "truth": one_line(self.truth, 2000),
            "ground": dict(self.ground),
            "config": self.config(),
            **provenance(self.device),
            "seconds": round(self.seconds, 2),
            **{name: getattr(self, name) for name in ("rows", "pairs", "detail", "skipped", "problems")},
        }
        path = Path(out) / self.run_id / ANSWERS_FILE
        tables = {"pairs.csv": pd.DataFrame(self.pairs), "answers.csv": self.frame()}
        return save_record(path, record, AnswersRecord, tables)
