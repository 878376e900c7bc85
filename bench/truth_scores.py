"""The LDS of given scores against a given ground truth: `bench.lds --ground-truth DIR --scores FILE...`

A score file (.npy, .npz, .safetensors) holds (num_queries, num_train): the predicted change of the query loss when the
example is included, so helpful examples are negative; `--scores-are helpfulness` takes the other sign.
"""

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.ground_truth import GroundTruth
from bench.record import command_line, provenance, why_unwritten, without_nan, write_json
from bench.rows import PAIR_COLUMNS, compute_metrics, why_undefined
from bench.summary import ceiling_text, pairs_text, share_text
from bench.tables import interval, number, table
from bench.truth_folder import one_array, read_truth
from retrain.command import RUNS, Parser, check_out, guarded
from retrain.errors import UsageError
from retrain.safe_files import write_whole
from retrain.store import canonical_json

SCORES_ARE = ("loss-change", "helpfulness")  # a positive score: the loss rises, or falls, with the example


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
    """The files' names without their endings; with their folder where two are called alike."""
    stems = [Path(path).stem for path in paths]
    return [f"{Path(path).parent.name}/{stem}" if stems.count(stem) > 1 else stem for path, stem in zip(paths, stems)]


def score_files(truth: GroundTruth, paths: Sequence[str], sign: str = SCORES_ARE[0]) -> dict[str, Any]:
    """Rows, pairs and ceiling of score files, in the columns of bench.lds as far as they apply."""
    losses = truth.mean()
    made = {
        (label, False): truth.masks.astype(np.float64) @ read_scores(path, truth, sign).T
        for label, path in zip(labels_of(paths), paths, strict=True)
    }
    keys = list(made)
    pairs = [(a, b) for number_, a in enumerate(keys) for b in keys[number_ + 1 :]]
    ceiling, results, differences = compute_metrics(truth.losses, truth.present, losses, made, pairs)
    where = {"alpha": truth.record.get("alpha", math.nan), "alpha_attribution": math.nan, "normalised": False}
    rows = []
    for (label, _), result in results.items():
        numbers = ("num_subsets", "num_queries", "num_undefined", "lds", "ci_low", "ci_high")
        rows.append(
            {"label": label, **where}
            | {name: getattr(result, name) for name in numbers}
            | {"lds_across_queries": result.across_queries}
            | {"ceiling": ceiling.ceiling, "ceiling_low": ceiling.ci_low, "ceiling_high": ceiling.ci_high}
        )
        if result.num_undefined:
            undefined = np.isnan(result.per_query)
            rows[-1]["reason"] = why_undefined(losses[:, undefined], made[label, False][:, undefined])
    compared = ("num_subsets", "num_queries", "num_undefined", "difference", "ci_low", "ci_high", "p_value")
    return {
        "rows": rows,
        "pairs": [
            {"label": a[0], "against": b[0], **where} | {name: getattr(pair, name) for name in compared}
            for (a, b), pair in differences.items()
        ],
        "ceilings": [
            {name: getattr(ceiling, name) for name in ("ceiling", "ci_low", "ci_high", "reliability")}
            | {"num_subsets_replicated": ceiling.num_subsets_replicated, "num_replicates": len(truth.losses)}
        ],
    }


def make_parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="The LDS of given scores against a given ground truth.")
    add = parser.add_argument
    add("--ground-truth", required=True, metavar="DIR", help="folder made by bench.truth")
    add("--scores", required=True, nargs="+", metavar="FILE", help="(num_queries, num_train) arrays")
    add("--scores-are", choices=SCORES_ARE, default=SCORES_ARE[0], help="their sign (default: %(default)s)")
    add("--out", default=RUNS, help="where the record goes (default: %(default)s)")
    add("--json", action="store_true", help="print rows as a JSON list")
    return parser


def scores_command(argv: Sequence[str], lds_parser: Parser) -> int:
    prog = lds_parser.prog
    parser = make_parser(prog)
    given = dict.fromkeys(word.partition("=")[0] for word in argv)
    if "--ground-truth" not in given:
        parser.exit(2, f"{prog}: --scores needs --ground-truth FOLDER, made by python -m bench.truth\n")
    taken = parser.known_options()
    if foreign := [name for name in given if name in lds_parser.known_options() and name not in taken]:
        options = ", ".join(name for name in taken if name.startswith("--"))
        parser.exit(2, f"{prog}: {', '.join(foreign)} cannot be used with --ground-truth; its options are {options}\n")
    arguments = parser.parse_args(argv)
    return guarded(prog, lambda: _score(arguments, command_line("bench.lds", argv), prog))


def _score(arguments: argparse.Namespace, command: str, prog: str) -> int:
    check_out(arguments.out)
    truth = read_truth(arguments.ground_truth)
    found = score_files(truth, arguments.scores, arguments.scores_are)
    problems = []
    for row in found["rows"]:
        if reason := row.pop("reason", ""):
            many = "every query" if row["num_undefined"] == row["num_queries"] else f"{row['num_undefined']} queries"
            problems.append(f"LDS of {row['label']} is undefined for {many}: {reason}")
    place, unwritten = save_scores(found, truth, command, Path(arguments.out))
    for problem in [*problems, *([unwritten] if unwritten else [])]:
        print(f"{prog}: {problem}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(without_nan(found["rows"]), indent=1))
    else:
        print(show_scores(found, truth))
        print("" if unwritten else f"\nrecord: {place}")
    return 1 if problems or unwritten else 0


def save_scores(found: dict[str, Any], truth: GroundTruth, command: str, out: Path) -> tuple[Path, str]:
    """(where the record is, why it could not be written)"""
    known = {name: truth.record.get(name) for name in ("source", "task", "alpha", "arrays_sha256")}
    run_id = hashlib.sha256(canonical_json(without_nan([known, found]), "result").encode()).hexdigest()[:12]
    folder = out / f"given-{run_id}"
    record = {"run_id": run_id, "kind": "given scores", "command": command, "truth": truth.record, **found}

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "lds.csv", pd.DataFrame(found["rows"]).to_csv(index=False))
        if found["pairs"]:
            write_whole(folder / "pairs.csv", pd.DataFrame(found["pairs"], columns=PAIR_COLUMNS).to_csv(index=False))
        write_json(folder / "scores.json", {**record, **provenance()})

    return folder / "scores.json", why_unwritten(write, folder)


def show_scores(found: dict[str, Any], truth: GroundTruth) -> str:
    replicates, subsets, queries = truth.losses.shape
    header = ["scores", "LDS", "95 % interval", "of ceiling", "undefined", "across queries"]
    lines = [
        [
            row["label"],
            number(row["lds"]),
            interval(row["ci_low"], row["ci_high"]),
            share_text(row["lds"], row["ceiling"]),
            str(row["num_undefined"]),
            number(row["lds_across_queries"]),
        ]
        for row in sorted(found["rows"], key=lambda row: -row["lds"] if math.isfinite(row["lds"]) else math.inf)
    ]
    words = (
        f"{truth.record.get('source', 'ground truth')}: {subsets} subsets x {replicates} replicate(s) of "
        f"{truth.masks.shape[1]} training examples, {queries} queries; {ceiling_text(found['ceilings'])}"
    )
    pairs = [{**pair, "alpha": 0.0, "alpha_attribution": 0.0} for pair in found["pairs"]]
    return "\n".join(part for part in (words, table(header, lines), pairs_text(pairs, 0.0, 0.0)) if part)
