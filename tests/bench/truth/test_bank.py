"""The bank: recorded LDS comes out again from ranks alone, and scores from elsewhere stand beside recorded ones."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from bench import metrics
from bench.cli import lds_main as lds
from bench.ground_truth import GroundTruth
from bench.publish.leaderboard import rows
from bench.records import doubled_ranks, load_results, read_record, read_recorded
from bench.schema import RunRecord
from bench.truth.__main__ import main as truth_command
from bench.truth.folder import read_truth, write_truth
from retrain.errors import UsageError
from retrain.logistic import LogisticDigits
from retrain.safe_files import read_safetensors, write_safetensors
from tests.helpers.synthetic_results import edited

ROOT = Path(__file__).resolve().parents[3]
BANKS = sorted(path.parent for path in (ROOT / "results" / "bank").glob("*/recorded.json"))
LOGISTIC = "retrain.logistic:LogisticDigits"


@cache
def records_of(task: str) -> pd.DataFrame:
    return load_results(ROOT / "results" / task).rows


def test_there_is_a_bank_to_compete_on_and_ranks_are_all_that_it_needs() -> None:
    generator = np.random.default_rng(0)
    truth, prediction = generator.normal(size=(40, 9)), generator.normal(size=(40, 9)).round(1)  # with ties
    prediction[3, 2] = np.nan
    ranks = doubled_ranks(prediction)
    assert ranks.dtype == np.uint8
    whole, kept = (metrics.linear_datamodelling_score(truth, one) for one in (prediction, ranks))
    assert kept.lds == pytest.approx(whole.lds, abs=1e-12)
    assert (kept.ci_low, kept.num_undefined) == (pytest.approx(whole.ci_low, abs=1e-12), 1)
    assert {path.name.split("-")[0] for path in BANKS} >= {"digits", "tinylm", "cifar10"}
    kept = (ROOT / "results" / "bank").rglob("*")
    assert sum(path.stat().st_size for path in kept if path.is_file()) < 15e6


def test_a_method_is_verified_on_subsets_that_did_not_exist_before(tmp_path: Path, capsys: Any) -> None:
    asked = ["verify", "gradsim", "--task", LOGISTIC, "--set", f"{LOGISTIC}.num_train=60", "--subsets", "8"]
    seeds = []
    for _ in range(2):
        assert truth_command([*asked, "--cache", str(tmp_path / "cache"), "--out", str(tmp_path)]) == 0
        seeds.append(int(capsys.readouterr().out.split("seed ")[-1].split()[0]))
    runs = load_results(tmp_path)
    assert set(runs.rows["seed"]) == set(seeds)
    assert len(set(seeds)) == 2
    assert {"gradsim", "kfac", "random", "same_class"} == set(runs.rows["label"])


@pytest.mark.parametrize("folder", BANKS, ids=lambda path: path.name)
def test_from_the_bank_alone_recorded_lds_come_out_again(folder: Path) -> None:
    """Equal to 1e-6 to what the bank recorded, and to the run in results/ of the same ground truth and settings.

    Models retrained elsewhere or on another day differ in their last bits, and the ceiling tells so: then LDS is alike.
    """
    truth = read_truth(folder)
    recorded = read_recorded(folder, truth.record["arrays_sha256"])
    losses, found = truth.mean(), {}
    for key, ranks in recorded.ranks.items():
        found[key] = metrics.linear_datamodelling_score(losses, ranks).lds
        assert found[key] == pytest.approx(recorded.row(*key)["lds"], abs=1e-6), key
    where = {name: truth.record[name] for name in ("protocol", "scheme", "alpha", "alpha_attribution", "seed")}
    task = truth.record["task"]["name"]
    frame = records_of(task)
    for label in (name for name in ("gradsim", "ekfac") if (name, False) in recorded.ranks):
        same = frame[(frame["label"] == label) & (frame["task"] == task) & ~frame["normalised"].astype(bool)]
        for name, value in where.items():
            same = same[same[name] == value]
        assert len(same), f"{label} is in the records of {task}"
        ceiling = recorded.row(label, False)["ceiling"]
        of_these_models = same[np.isclose(same["ceiling"], ceiling, rtol=0.0, atol=1e-9)]
        for value in of_these_models["lds"][:1]:
            assert value == pytest.approx(found[label, False], abs=1e-6), label
        if not len(of_these_models):
            assert (same["lds"] - found[label, False]).abs().min() < 0.01, label


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of our own, a bank of it, and our score matrices as somebody else's."""
    folder = tmp_path_factory.mktemp("bank")
    task = ["--task", LOGISTIC, "--set", f"{LOGISTIC}.num_train=60", "--settings", "default", "--cluster", "inline"]
    task += ["--methods", "gradsim", "kfac", "random", "--cache", str(folder / "cache"), "--queries", "20"]
    plan = ["--alpha", "0.5", "--subsets", "20", "--replicates", "1"]
    assert lds([*task, *plan, "--out", str(folder / "runs")]) == 0
    assert truth_command(["bank", *task, *plan, "--out", str(folder / "banks")]) == 0
    assert truth_command(["scores", *task, "--out", str(folder / "scores"), "--scores", "raw"]) == 0
    (made,) = (folder / "banks").iterdir()
    return {"folder": folder, "bank": made, "task": task}


def test_what_two_banks_share_is_kept_once(world: dict[str, Any], tmp_path: Path) -> None:
    """The checkpoint of a seed, and no room for replicates that only some subsets have."""
    plan = ["--alpha", "0.5", "0.3", "--subsets", "20", "--replicates", "2", "--replicated-subsets", "4"]
    assert truth_command(["bank", *world["task"], *plan, "--checkpoint", "--out", str(tmp_path)]) == 0
    folders = sorted(tmp_path.iterdir())
    told = [json.loads((folder / "checkpoint.json").read_text()) for folder in folders]
    files = {(folder / one["file"]).resolve() for folder, one in zip(folders, told, strict=True)}
    assert len(folders) == 2
    assert files == set(tmp_path.resolve().glob("*/checkpoint.safetensors"))
    assert len(files) == 1
    for folder in folders:
        truth = read_truth(folder)
        assert truth.present.sum(axis=1).tolist() == [20, 4]
        arrays = read_safetensors(folder / "truth.safetensors")
        assert arrays["losses"].shape == (1, 20, 20)
        assert np.array_equal(arrays["further_losses"], truth.losses[1:, truth.present[1]])
        assert truth_command(["check", str(folder)]) == 0


def test_a_balanced_bank_has_the_subset_models_that_methods_looked_at(world: dict[str, Any], tmp_path: Path) -> None:
    plan = ["--alpha", "0.5", "--subsets", "20", "--replicates", "1", "--scheme", "balanced", "--checkpoint"]
    methods = ["--methods", "gradsim@reference=subset,models=2", "gradsim"]
    assert truth_command(["bank", *world["task"], *plan, *methods, "--out", str(tmp_path)]) == 0
    (folder,) = tmp_path.iterdir()
    assert folder.name == "logistic-exact-alpha-0.5-seed-1-balanced"
    arrays = read_safetensors(folder / "references.safetensors")
    task, truth = LogisticDigits(num_train=60), read_truth(folder)
    labels = task.train_data.targets.numpy()
    of_models = [arrays[f"subset-{k}/trained_on"] for k in (0, 1)]
    for kept in [*of_models, *(truth.train_indices[mask] for mask in truth.masks)]:
        shares = np.bincount(labels[kept], minlength=10) / np.bincount(labels, minlength=10)
        assert np.abs(shares - 0.5).max() <= 0.5 / np.bincount(labels).min()
    for k in (0, 1):
        model = task.train(arrays[f"subset-{k}/trained_on"], init_seed=0, order_seed=0, device=torch.device("cpu"))
        for name, value in model.state_dict().items():
            np.testing.assert_allclose(arrays[f"subset-{k}/{name}"], value.numpy(), rtol=2e-3, atol=1e-4)


def test_further_losses_that_do_not_fit_are_refused(world: dict[str, Any], tmp_path: Path) -> None:
    truth = read_truth(world["bank"])
    losses = np.concatenate([truth.losses, truth.losses + 1])
    present = np.ones(losses.shape[:2], dtype=bool)
    present[1, 3:] = False
    write_truth(tmp_path, GroundTruth(truth.masks, losses, present, truth.subsets, {}))
    again = read_truth(tmp_path)
    assert np.array_equal(again.present, present)
    assert np.array_equal(again.losses[present], losses[present])
    arrays = read_safetensors(tmp_path / "truth.safetensors")
    for wrong in (np.array([0, 1, 20]), np.array([0, 1, 1]), np.array([0, 1])):
        with (tmp_path / "truth.safetensors").open("wb") as file:
            digest = write_safetensors(file, {**arrays, "further_subsets": wrong})
        with edited(tmp_path / "truth.json") as record:
            record["arrays_sha256"] = digest
        with pytest.raises(UsageError, match="further_losses has shape"):
            read_truth(tmp_path)


def test_scores_from_elsewhere_stand_beside_recorded_ones(world: dict[str, Any], capsys: Any) -> None:
    folder: Path = world["folder"]
    (file,) = (folder / "scores").glob("kfac-raw-logistic-*-queries-seed-1-share-1.npy")
    ours = np.load(file)
    np.save(folder / "mine.npy", -ours)  # another library: positive is helpful
    words = ["--ground-truth", str(world["bank"]), "--scores", str(folder / "mine.npy"), "--scores-are", "helpfulness"]
    assert lds([*words, "--out", str(folder / "runs")]) == 0
    assert "mine - gradsim" in capsys.readouterr().out
    records = [read_record(path, RunRecord) for path in (folder / "runs").glob("*/run.json")]
    (record,) = (one for one in records if one.get("kind") == "given scores")
    mine = {pair["against"]: pair for pair in record["pairs"] if pair["label"] == "mine"}
    assert set(mine) == {"gradsim", "kfac", "random"}
    assert mine["kfac"]["difference"] == pytest.approx(0.0, abs=1e-12)
    board = [row for row in rows(folder / "runs") if (row.scores, row.metric) == ("raw", "lds")]
    (column,) = {row.column for row in board}
    found = {row.label: row for row in board}
    assert set(found) == {"mine", "gradsim", "kfac", "random", "same_class"}, f"all in the one column {column}"
    assert found["mine"].value == pytest.approx(found["kfac"].value, abs=1e-9)
    assert found["mine"].rank[0] == found["kfac"].rank[0] == "1", "a paired difference of nothing is a tie"
    assert found["random"].rank == "5"


def test_check_finds_an_edited_bank(world: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    copy = shutil.copytree(world["bank"], tmp_path / "bank")
    assert truth_command(["check", str(copy)]) == 0
    with edited(copy / "recorded.json") as record:
        record["rows"][0]["lds"] += 1e-3
    assert truth_command(["check", str(copy)]) == 1
    assert "differs" in capsys.readouterr().out
    with edited(copy / "recorded.json") as record:
        record["truth_sha256"] = "0" * 64
    assert truth_command(["check", str(copy)]) == 2
    assert "belongs to another ground truth" in capsys.readouterr().err
