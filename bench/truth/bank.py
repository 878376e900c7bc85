"""A bank to compete on: ground truth, recorded methods' predictions and the checkpoint, without a GPU or a retrain.

    python -m bench.lds --ground-truth results/bank/digits-scratch-alpha-0.1-seed-1 --scores mine.npy
    python -m bench.truth check results/bank/*                                    # recorded LDS, again from the bank
    python -m bench.truth scores --task digits --methods ekfac gradsim --out DIR  # our score matrices, as .npy
    python -m bench.truth bank --task digits --alpha 0.1 --methods ekfac kfac trak gradsim random --out results/bank

The first command is all that whoever has scores needs, from any library: LDS with its interval, the noise ceiling,
paired differences to every recorded method, a record like any other, and with it a row of the leaderboard.

`bank` takes what the cache of `bench.lds` has and computes what it lacks. CIFAR-10's bank, on a GPU:

    python -m bench.truth bank --task cifar10 --protocol scratch --data-dir DIR --alpha 0.1 0.5 --queries 2000
        --replicates 2 --replicated-subsets 25 --checkpoint --out results/bank --methods ekfac trak gradsim repsim
        ekfac-library=ekfac@damping=1e-8 bif-long=bif@gamma=1e4,draws=1500 random

Losses are float32: in float16 some of a query's hundred losses tie, and LDS moves in its fourth digit.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.evaluations.common import SCORE_CHOICES, score_matrices, score_methods, scoring_session
from bench.experiment import Execution, Experiment
from bench.ground_truth import GroundTruth, base_model
from bench.identity import file_slug
from bench.metrics import linear_datamodelling_score
from bench.records import provenance, read_recorded, write_json, write_recorded
from bench.rows import add_rows
from bench.runner import Session
from bench.tables import bytes_text, number, table
from bench.truth.folder import of_ours, write_truth
from retrain.errors import UsageError
from retrain.safe_files import whole_file, write_safetensors

CHECKPOINT_FILE = "checkpoint.safetensors"
SAME_LDS = 1e-6  # what a recorded LDS and the one made again from the bank may differ by


def make_bank(experiment: Experiment, execution: Execution, out: Path, scores: str, checkpoint: bool) -> list[Path]:
    """A folder for every seed, share and alpha."""
    session = Session(experiment, execution)
    session.report_skipped()
    for note in session.notes:
        print(note, file=sys.stderr)
    truths, predictions = session.retrain(), session.score()
    if session.out.problems:
        raise UsageError(f"nothing was written: {session.out.problems[0]}")
    task, made = session.task, list[Path]()
    kept_in: dict[int, Path] = {}  # the checkpoint of a seed, which all its banks share
    for seed, share in session.blocks:
        queries = session.question(seed, share).query_indices()
        for position, plan in enumerate(session.plans(seed, share)):
            found = truths[seed, share, plan.alpha]
            here = [(variant, some[position]) for variant, some in predictions[seed, share]]
            session.out.rows.clear()
            add_rows(session.out, task, plan, found, queries, here)
            asked = {"query_split": experiment.query_split, "queries": experiment.queries}
            truth = of_ours(found, task, plan, queries, **asked, commit=provenance()["commit"])
            more = f"-share-{share:g}" if share != task.default_alpha_attribution else ""
            folder = out / f"{file_slug(f'{task.name}-{task.protocol}')}-alpha-{plan.alpha:g}-seed-{seed}{more}"
            _write_predictions(folder, session, here, SCORE_CHOICES[scores], truth.subsets, write_truth(folder, truth))
            if checkpoint:
                _write_checkpoint(folder, session, seed, beside=kept_in.setdefault(seed, folder))
            made.append(folder)
    return made


def _write_predictions(
    folder: Path, session: Session, here: Sequence[Any], kinds: Sequence[str], subsets: np.ndarray, truth_sha256: str
) -> None:
    kept: dict[tuple[str, bool], np.ndarray] = {}
    for variant, prediction in here:
        for kind in kinds:
            values = prediction.normalised if kind == "normalised" else prediction.raw
            if values is not None and variant.rows in ("both", kind):
                kept[variant.label, kind == "normalised"] = values[subsets]
    rows = [row for row in session.out.rows if (row["label"], row["normalised"]) in kept]
    methods = [variant.describe() for variant, _ in here if variant.label in {label for label, _ in kept}]
    told = {"methods": methods, "rows": rows, **provenance(session.device())}
    write_recorded(folder, kept, told, truth_sha256)


def _write_checkpoint(folder: Path, session: Session, seed: int, beside: Path) -> None:
    """In float16, which halves it; whoever wants other scores than from the very bits trains it again."""
    if folder != beside:
        return write_json(folder / "checkpoint.json", {"seed": seed, "file": f"../{beside.name}/{CHECKPOINT_FILE}"})
    _, entry = base_model(session.task, seed, session.store, session.execution.device)
    arrays = {
        name: value.astype(np.float16) if value.dtype == np.float32 else value for name, value in entry.arrays.items()
    }
    with whole_file(folder / CHECKPOINT_FILE) as file:
        digest = write_safetensors(file, arrays)
    told = {"seed": seed, "file": CHECKPOINT_FILE, "arrays_sha256": digest, "record": entry.record}
    write_json(folder / "checkpoint.json", told)


def check_bank(folder: Path, truth: GroundTruth) -> tuple[str, bool]:
    """(recorded LDS beside what the files alone give, whether all are the same); no table where none is recorded."""
    recorded = read_recorded(folder, truth.record["arrays_sha256"])
    if recorded is None:
        return "", True
    losses, lines, same = truth.mean(), [], True
    for (label, normalised), ranks in recorded.ranks.items():
        row = recorded.row(label, normalised)
        again = linear_datamodelling_score(losses, ranks).lds
        before = np.nan if row is None or row["lds"] is None else float(row["lds"])
        alike = bool(abs(again - before) <= SAME_LDS) or (np.isnan(again) and np.isnan(before))
        same &= alike
        kind = "normalised" if normalised else "raw"
        lines.append([label, kind, number(before, 7), number(again, 7), "same" if alike else "differs"])
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    header = ["method", "scores", "recorded", "from the bank", f"within {SAME_LDS:g}"]
    return f"{bytes_text(size)}\n{table(header, lines, left=2)}", same


def export_scores(experiment: Experiment, execution: Execution, out: Path, scores: str) -> list[Path]:
    """Every method's matrix in a file of its own, and scores.json, which says what rows and columns are."""
    session = scoring_session(experiment, execution, has_alpha=True)
    for note in session.notes:
        print(note, file=sys.stderr)
    made: list[Path] = []
    told: dict[str, Mapping[str, Any]] = {}
    for (seed, share), found in score_methods(session).items():
        question = session.question(seed, share)
        for one, normalised, values in score_matrices(found, SCORE_CHOICES[scores]):
            kind = "normalised" if normalised else "raw"
            place = f"{session.task.name}-{session.task.protocol}-{len(values)}-queries-seed-{seed}-share-{share:g}"
            path = out / f"{file_slug(one.variant.label)}-{kind}-{file_slug(place)}.npy"
            with whole_file(path) as file:
                np.save(file, values, allow_pickle=False)
            made.append(path)
            told[path.name] = one.columns() | {"kind": kind, "seed": seed, "alpha_attribution": share}
        told[f"seed {seed}, share {share:g}"] = {
            "rows_are_queries": question.query_indices().tolist(),
            "columns_are_training_examples": question.attributed_indices().tolist(),
        }
    sign = "the predicted change of the query's loss when the example is included: helpful examples are negative"
    write_json(out / "scores.json", {"sign": sign, "task": session.task.config, "files": told, **provenance()})
    if session.out.problems:
        raise UsageError(f"{len(made)} matrices are written; {session.out.problems[0]}")
    return made
