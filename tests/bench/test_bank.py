"""The bank: recorded LDS comes out again from ranks alone, and scores from elsewhere stand beside recorded ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import metrics
from bench.bank import main as bank
from bench.lds import main as lds
from bench.leaderboard import rows
from bench.recorded import doubled_ranks, read_recorded
from bench.results import load_results
from bench.schemas import RUN_RECORD, read_checked
from bench.truth_folder import read_truth

ROOT = Path(__file__).resolve().parents[2]
BANKS = sorted(path.parent for path in (ROOT / "results" / "bank").glob("*/recorded.json"))
LOGISTIC = "retrain.logistic:LogisticDigits"


def test_ranks_are_all_that_lds_needs() -> None:
    generator = np.random.default_rng(0)
    truth, prediction = generator.normal(size=(40, 9)), generator.normal(size=(40, 9)).round(1)  # with ties
    prediction[3, 2] = np.nan
    ranks = doubled_ranks(prediction)
    assert ranks.dtype == np.uint8
    whole, kept = (metrics.linear_datamodelling_score(truth, one) for one in (prediction, ranks))
    assert kept.lds == pytest.approx(whole.lds, abs=1e-12)
    assert (kept.ci_low, kept.num_undefined) == (pytest.approx(whole.ci_low, abs=1e-12), 1)


def test_there_is_a_bank_to_compete_on() -> None:
    assert {path.name.split("-")[0] for path in BANKS} >= {"digits", "tinylm"}


@pytest.mark.parametrize("folder", BANKS, ids=lambda path: path.name)
def test_from_the_bank_alone_recorded_lds_come_out_again(folder: Path) -> None:
    """Equal to 1e-6 to what the bank recorded, and to the run in results/ of the same ground truth and settings."""
    truth = read_truth(folder)
    recorded = read_recorded(folder, truth.record["arrays_sha256"])
    assert recorded is not None
    losses, found = truth.mean(), {}
    for (label, normalised), ranks in recorded.ranks.items():
        row = recorded.row(label, normalised)
        assert row is not None
        found[label, normalised] = metrics.linear_datamodelling_score(losses, ranks).lds
        assert found[label, normalised] == pytest.approx(row["lds"], abs=1e-6), label
    where = {name: truth.record[name] for name in ("protocol", "alpha", "alpha_attribution", "seed")}
    task = truth.record["task"]["name"]
    frame = load_results(ROOT / "results" / task).rows
    for label in ("gradsim", "ekfac"):
        same = frame[(frame["label"] == label) & (frame["task"] == task) & ~frame["normalised"].astype(bool)]
        for name, value in where.items():
            same = same[same[name] == value]
        assert len(same), f"{label} is in the records of {task}"
        assert same["lds"].iloc[0] == pytest.approx(found[label, False], abs=1e-6), label


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of our own, a bank of it, and our score matrices as somebody else's."""
    folder = tmp_path_factory.mktemp("bank")
    task = ["--task", LOGISTIC, "--set", f"{LOGISTIC}.num_train=60", "--settings", "default", "--cluster", "inline"]
    task += ["--methods", "gradsim", "kfac", "random", "--cache", str(folder / "cache"), "--queries", "20"]
    plan = ["--alpha", "0.5", "--subsets", "20", "--replicates", "1"]
    assert lds([*task, *plan, "--out", str(folder / "runs")]) == 0
    assert bank(["make", *task, *plan, "--out", str(folder / "banks")]) == 0
    assert bank(["scores", *task, "--out", str(folder / "scores"), "--scores", "raw"]) == 0
    (made,) = (folder / "banks").iterdir()
    return {"folder": folder, "bank": made}


def test_scores_from_elsewhere_stand_beside_recorded_ones(
    world: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder: Path = world["folder"]
    (file,) = (folder / "scores").glob("kfac-raw-logistic-*-queries-seed-1-share-1.npy")
    ours = np.load(file)
    np.save(folder / "mine.npy", -ours)  # another library: positive is helpful
    words = ["--ground-truth", str(world["bank"]), "--scores", str(folder / "mine.npy"), "--scores-are", "helpfulness"]
    assert lds([*words, "--out", str(folder / "runs")]) == 0
    printed = capsys.readouterr().out
    assert "kfac (recorded)" in printed
    assert "mine - gradsim" in printed
    record = next(
        found
        for path in (folder / "runs").glob("*/run.json")
        if (found := read_checked(path, RUN_RECORD)).get("kind") == "given scores"
    )
    mine = {pair["against"]: pair for pair in record["pairs"] if pair["label"] == "mine"}
    assert set(mine) == {"gradsim", "kfac", "random"}
    assert mine["kfac"]["difference"] == pytest.approx(0.0, abs=1e-12)
    board = [row for row in rows(folder / "runs") if row.scores == "raw"]
    (column,) = {row.column for row in board}
    found = {row.label: row for row in board}
    assert set(found) == {"mine", "gradsim", "kfac", "random"}, f"all in the one column {column}"
    assert found["mine"].value == pytest.approx(found["kfac"].value, abs=1e-9)
    assert found["mine"].rank == found["kfac"].rank, "a paired difference of nothing is a tie"
    assert found["random"].rank == "4"


def test_check_finds_an_edited_bank(world: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    copy = tmp_path / "bank"
    copy.mkdir()
    for path in world["bank"].iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert bank(["check", str(copy)]) == 0
    record = json.loads((copy / "recorded.json").read_text())
    record["rows"][0]["lds"] += 1e-3
    (copy / "recorded.json").write_text(json.dumps(record))
    assert bank(["check", str(copy)]) == 1
    assert "differs" in capsys.readouterr().out
    record["truth_sha256"] = "0" * 64
    (copy / "recorded.json").write_text(json.dumps(record))
    assert bank(["check", str(copy)]) == 2
    assert "belongs to another ground truth" in capsys.readouterr().err
