"""Ground truth as a folder: of others, ours for others, and banks to compete on without a GPU or a retrain.

`python -m bench.truth --help` has the commands, `folder.py` the format. Here is the LDS of anybody's scores against
such a folder: `bench.lds --ground-truth DIR --scores FILE...`

A score file (.npy, .npz, .safetensors) holds (num_queries, num_train): the predicted change of the query loss when the
example is included, so helpful examples are negative; `--scores-are helpfulness` takes the other sign. Where the ground
truth comes with recorded methods (a bank), every file is paired with each of them.

The record is a run.json like any other's, with the rows of the recorded methods beside those of the files, so that
the leaderboard and the report rank them together. A ground truth of others is a task of its own, named by where it
came from.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.arguments import SCORES_ARE, Parser, check_out, report, run_cli
from bench.ground_truth import GroundTruth
from bench.identity import USUAL_GROUND
from bench.prediction import subset_sums
from bench.records import (
    ELSEWHERE,
    GIVEN_SCORES,
    Recorded,
    command_line,
    provenance,
    read_recorded,
    run_id_of,
    save_record,
    try_write,
    without_nan,
)
from bench.rows import (
    CEILING_COLUMNS,
    CEILING_OF_ROW,
    COLUMNS,
    LDS_COLUMNS,
    PAIR_COLUMNS,
    PAIR_NUMBERS,
    columns,
    compute_metrics,
    undefined_reason,
)
from bench.schema import RunRecord
from bench.tables import RunRows, show
from bench.truth.folder import one_array, read_truth
from retrain.errors import UsageError
from retrain.safe_files import one_line

OPTIONS = ("--ground-truth", "--scores", "--scores-are", "--out", "--json")
GIVEN = {"settings": "", "origin": "given"}


def read_scores(path: str, truth: GroundTruth, sign: str) -> np.ndarray:
    """(num_queries, num_train) float64, finite."""
    scores = np.asarray(one_array(path, "scores"), dtype=np.float64)
    expected = (truth.losses.shape[2], truth.masks.shape[1])
    if scores.shape != expected:
        hint = "; it is transposed" if scores.shape == expected[::-1] else ""
        raise UsageError(f"{path} has shape {scores.shape}; expected {expected}, (num_queries, num_train){hint}")
    if bad := int((~np.isfinite(scores)).sum()):
        raise UsageError(f"{path} holds {bad} scores that are NaN or infinite, of {scores.size}; expected finite ones")
    return -scores if sign == "helpfulness" else scores


def labels_of(paths: Sequence[str]) -> list[str]:
    """The files' names without their endings, in one line; with their folder where two are called alike."""
    stems = [one_line(Path(path).stem, 90) for path in paths]
    folders = [one_line(Path(path).parent.name, 90) for path in paths]
    labels = [f"{folder}/{stem}" if stems.count(stem) > 1 else stem for folder, stem in zip(folders, stems)]
    if twice := next((label for label in labels if labels.count(label) > 1), ""):
        raise UsageError(f'two score files are called "{twice}"; give one of them another name')
    return labels


def where_of_truth(truth: GroundTruth) -> dict[str, Any]:
    """task, protocol, alpha, alpha_attribution and seed of every row."""
    known = truth.record
    names = ("protocol", "alpha", "alpha_attribution", "seed")
    if all(known.get(name) is not None for name in ("task", *names)):
        return {"task": known["task"]["name"], **{name: known[name] for name in names}}
    source = one_line(str(known.get("source") or "ground truth"), 150)
    alpha = known.get("alpha") or round(float(truth.masks.mean()), 6)
    task = f"{source} {str(known.get('arrays_sha256', ''))[:6]}".strip()
    return {"task": task, "protocol": "given", "alpha": alpha, "alpha_attribution": 1.0, "seed": 0}


def score_files(
    truth: GroundTruth, paths: Sequence[str], sign: str = SCORES_ARE[0], recorded: Recorded | None = None
) -> dict[str, list[Any]]:
    """Rows, pairs, ceilings, methods and problems of score files; their pairs with every recorded method, too."""
    losses, where, num_replicates = truth.mean(), where_of_truth(truth), len(truth.losses)
    files = dict(zip(labels_of(paths), paths, strict=True))
    made = {(label, False): subset_sums(truth.masks, read_scores(path, truth, sign)) for label, path in files.items()}
    rivals = {} if recorded is None else {key: ranks for key, ranks in recorded.ranks.items() if not key[1]}
    if twice := sorted(set(made) & set(rivals)):
        raise UsageError(f'a recorded method is called "{twice[0][0]}" as well; give the file another name')
    if strange := next((key[0] for key, ranks in rivals.items() if ranks.shape != losses.shape), ""):
        raise UsageError(f'the recorded predictions of "{strange}" have another shape than the losses, {losses.shape}')
    ceiling, results, differences = compute_metrics(truth.losses, truth.present, losses, {**made, **rivals})
    rows, methods, problems = list[dict[str, Any]](), list[dict[str, Any]](), list[str]()
    for (label, path), (key, prediction) in zip(files.items(), made.items(), strict=True):
        result = results[key]
        about = {"method": label, "label": label, **GIVEN, "normalised": False, "num_replicates": num_replicates}
        numbers = columns(result, LDS_COLUMNS) | columns(ceiling, CEILING_OF_ROW)
        rows.append(where | about | numbers | {"note": ""})
        # As a record describes a method: a file's bytes are its settings.
        file = Path(path) / "scores.bin" if Path(path).is_dir() else Path(path)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
        described = {"name": label, "asked": label, "label": label, "rows": "raw", **GIVEN}
        methods.append(described | {"scores_are": sign, "scores_sha256": digest})
        if undefined := result.num_undefined:
            none = np.isnan(result.per_query)
            many = "every query" if undefined == result.num_queries else f"{undefined} queries"
            reason = undefined_reason(losses[:, none], prediction[:, none])
            problems.append(f"LDS of {label} is undefined for {many}: {reason}")
    against = [
        where | {"label": a[0], "against": b[0], "normalised": False} | columns(pair, PAIR_NUMBERS)
        for (a, b), pair in differences.items()
    ]
    ceilings = [where | columns(ceiling, CEILING_COLUMNS) | {"num_replicates": num_replicates}]
    return {"rows": rows, "pairs": against, "ceilings": ceilings, "methods": methods, "problems": problems}


def scores_command(argv: Sequence[str], parser: Parser) -> int:
    """bench.lds with --ground-truth."""
    arguments = parser.parse_args(argv)
    given = dict.fromkeys(word.partition("=")[0] for word in argv)
    if not {"--ground-truth", "--scores"} <= set(given):
        parser.error("--scores needs --ground-truth FOLDER, made by tda-bench truth, and the other way round")
    others = set(parser._option_string_actions) - set(OPTIONS)
    if foreign := [name for name in given if name in others]:
        parser.error(f"{', '.join(foreign)} cannot be used with --ground-truth; its options are {', '.join(OPTIONS)}")

    def work() -> int:
        check_out(arguments.out)
        truth = read_truth(arguments.ground_truth)
        recorded = read_recorded(arguments.ground_truth, str(truth.record.get("arrays_sha256")))
        found = score_files(truth, arguments.scores, arguments.scores_are, recorded)
        place, unwritten = save_scores(found, truth, recorded, command_line("bench.lds", argv), Path(arguments.out))
        if arguments.json:
            print(json.dumps(without_nan(found["rows"]), indent=1))
        else:
            print(show_scores(found, truth, recorded))
            print("" if unwritten else f"\nrecord: {place}")
        return report(parser.prog, [], [*found["problems"], *([unwritten] if unwritten else [])])

    return run_cli(parser.prog, work)


def save_scores(
    found: dict[str, Any], truth: GroundTruth, recorded: Recorded | None, command: str, out: Path
) -> tuple[Path, str]:
    """(where the record is, why it could not be written)"""
    known, where = truth.record, where_of_truth(truth)
    rows = [*found["rows"], *map(dict, _recorded_rows(recorded))]
    run_id = run_id_of(
        {name: known.get(name) for name in ("source", "task", "alpha", "arrays_sha256")},
        {name: found[name] for name in ("rows", "pairs", "ceilings", "methods")},
    )
    for row in [*rows, *found["pairs"]]:
        row["run_id"] = run_id
    # What decided the numbers, under the names of a run of our own: the same ground truth is then the same ground.
    usual = USUAL_GROUND | {"replicated_subsets": None}
    config = {
        "task": known.get("task") or {"name": where["task"], "source": known.get("arrays_sha256", "")},
        "methods": [*found["methods"], *([] if recorded is None else recorded.methods)],
        **{name: known.get(name, value) for name, value in usual.items()},
        "alpha": [where["alpha"]],
        "alpha_attribution": [where["alpha_attribution"]],
        "seeds": [where["seed"]],
        "subsets": len(truth.masks),
        "replicates": len(truth.losses),
    }
    record = {
        "run_id": run_id,
        "kind": GIVEN_SCORES,
        "command": command,
        "description": known.get("description") or f"ground truth of {known.get('source', 'ground truth')}",
        "truth": known,
        "config": config,
        **provenance(ELSEWHERE),
        "rows": rows,
        **{name: found[name] for name in ("pairs", "ceilings")},
        "diagnostics": [],
        "skipped": {},
        "problems": [],
    }
    tables = {
        "lds.csv": pd.DataFrame(rows, columns=COLUMNS),
        "pairs.csv": pd.DataFrame(found["pairs"], columns=PAIR_COLUMNS),
    }
    path = out / run_id / "run.json"
    return path, try_write(lambda: save_record(path, record, RunRecord, tables), path.parent)


def show_scores(found: dict[str, Any], truth: GroundTruth, recorded: Recorded | None = None) -> str:
    """The tables of any run, recorded methods among the rows; pairs are of the files alone."""
    unknown = dict.fromkeys(("fit_seconds", "score_seconds", "peak_memory_bytes"), math.nan)
    rows = [*(unknown | row for row in found["rows"]), *_recorded_rows(recorded)]
    given = {row["label"] for row in found["rows"]}
    pairs = [pair for pair in found["pairs"] if given & {pair["label"], pair["against"]}]
    source = truth.record.get("source", "ground truth")
    description = f"{source}, {truth.masks.shape[1]} training examples"
    return show(RunRows(rows, pairs, found["ceilings"]), description, where_of_truth(truth)["protocol"])


def _recorded_rows(recorded: Recorded | None) -> list[dict[str, Any]]:
    return [] if recorded is None else [row for row in recorded.rows if not row["normalised"]]
