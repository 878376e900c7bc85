"""Ground truth of others: their signs and conventions, files of kronfluence and bergson, nothing in which ever runs."""

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.cli import lds_main
from bench.publish.leaderboard import rows
from bench.records import read_record
from bench.schema import RunRecord
from bench.truth import score_files
from bench.truth.__main__ import main as truth_main
from bench.truth.folder import one_array, read_truth
from retrain.errors import UsageError

NUM_SUBSETS, NUM_TRAIN, NUM_QUERIES = 40, 30, 7


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records go to ./runs."""
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))


@pytest.fixture
def world(tmp_path: Path) -> dict[str, Any]:
    """Losses that follow the scores: keeping an example adds its score to the query's loss."""
    generator = np.random.default_rng(0)
    masks = np.stack([generator.permutation(NUM_TRAIN) < 10 for _ in range(NUM_SUBSETS)])
    scores = generator.normal(size=(NUM_QUERIES, NUM_TRAIN))
    losses = masks @ scores.T + 0.1 * generator.normal(size=(NUM_SUBSETS, NUM_QUERIES))
    np.save(tmp_path / "scores.npy", scores)
    return {"masks": masks, "scores": scores, "losses": losses, "folder": tmp_path}


def save(world: dict[str, Any], name: str, array: np.ndarray) -> str:
    path = world["folder"] / name
    np.save(path, array)
    return str(path)


def run_import(world: dict[str, Any], *arguments: str) -> Path:
    out = world["folder"] / "truth"
    assert truth_main(["import", *arguments, "--out", str(out)]) == 0
    return out


def sources(world: dict[str, Any]) -> dict[str, list[str]]:
    masks, losses = world["masks"], world["losses"]
    left_out = [np.flatnonzero(~row).tolist() for row in masks]
    subsets = world["folder"] / "subsets.json"
    subsets.write_text(json.dumps(left_out))
    kept = save(world, "indices.npy", np.stack([np.flatnonzero(row) for row in masks]))
    train = ["--num-train", str(NUM_TRAIN)]
    minus = save(world, "minus.npy", -losses)
    return {
        "trak": ["trak", save(world, "masks.npy", masks.astype(np.int64)), minus],
        "dattri": ["dattri", kept, minus, *train],
        "arrays": ["arrays", save(world, "kept.npy", masks), save(world, "plain.npy", losses)],
        "bergson": ["bergson", str(subsets), save(world, "losses.npy", losses), *train],
    }


@pytest.mark.parametrize("source", ["arrays", "trak", "dattri", "bergson"])
def test_each_source_comes_out_the_same(world: dict[str, Any], source: str) -> None:
    arguments = sources(world)[source]
    out = run_import(world, *arguments)
    found = read_truth(out)
    np.testing.assert_array_equal(found.masks, world["masks"])
    np.testing.assert_allclose(found.losses[0], world["losses"], rtol=1e-6)
    rows = score_files(read_truth(out), [str(world["folder"] / "scores.npy")])["rows"]
    assert rows[0]["lds"] > 0.95
    assert found.record["source"] == source
    if source == "bergson":  # also as a table of numbered subsets
        lists = json.loads(Path(arguments[1]).read_text())
        table = {str(k): ids for k, ids in reversed(list(enumerate(lists)))}
        Path(arguments[1]).write_text(json.dumps(table))
        out = run_import(world, *arguments)
        np.testing.assert_array_equal(read_truth(out).masks, world["masks"])


def test_the_conventions_matter(world: dict[str, Any]) -> None:
    """Taken with the wrong sign, or left-out ids for kept ones, the same files give a negative score."""
    arguments = sources(world)
    score = [str(world["folder"] / "scores.npy")]
    out = run_import(world, "arrays", *arguments["trak"][1:])
    assert score_files(read_truth(out), score)["rows"][0]["lds"] < -0.95
    as_if_kept = save(world, "left-out.npy", np.stack([np.flatnonzero(~row) for row in world["masks"]]))
    train = ["--num-train", str(NUM_TRAIN)]
    out = run_import(world, "dattri", as_if_kept, arguments["dattri"][2], *train)
    assert score_files(read_truth(out), score)["rows"][0]["lds"] < -0.95
    out = run_import(world, *arguments["bergson"])
    assert score_files(read_truth(out), score, "helpfulness")["rows"][0]["lds"] < -0.95


def spoilt(array: np.ndarray, place: tuple[int, int], value: float) -> np.ndarray:
    array = array.copy() if np.isnan(value) else array.astype(np.int64)
    array[place] = value
    return array


BAD_ARRAYS = [
    (lambda m: m.T, lambda v: v, "masks have 30"),
    (lambda m: m, lambda v: v.T, "looks transposed"),
    (lambda m: m[:NUM_TRAIN].T, lambda v: v[:NUM_TRAIN], "looks transposed"),  # square
    (lambda m: m, lambda v: v[:-1], "39 subsets"),
    (lambda m: m, lambda v: spoilt(v, (3, 2), np.nan), "replicate 0, subset 3, query 2"),
    (lambda m: spoilt(m, (0, 0), 2), lambda v: v, "holds 2"),
    (lambda m: m[:2], lambda v: v[:2], "2 subsets"),
    (lambda m: m, lambda v: v.astype(object), "no sound .npy"),
]


def test_bad_arrays_are_refused_in_one_line(world: dict[str, Any], refused: Callable[..., str]) -> None:
    out = world["folder"] / "truth"
    for masks, margins, text in BAD_ARRAYS:
        masks_file = save(world, "masks.npy", masks(world["masks"]))
        margins_file = save(world, "margins.npy", margins(-world["losses"]))
        assert text in refused(truth_main, ["import", "trak", masks_file, margins_file, "--out", str(out)])
    assert not (out / "truth.json").exists()


def test_bad_lists_what_is_missing_and_what_was_edited_are_refused_in_one_line(
    world: dict[str, Any], refused: Callable[..., str]
) -> None:
    arguments, out = sources(world)["bergson"], ["--out", str(world["folder"] / "truth")]
    assert "/nowhere.npy: does not exist" in refused(truth_main, ["import", "trak", "/nowhere.npy", "m.npy", *out])
    assert "needs --num-train" in refused(truth_main, ["import", *arguments[:-2], *out])
    lists = {"example 99": [[0, 99]] * 5, "example 1": [[1, 1]] * 5, "subsets.json": {"first": [1]}}
    for text, ids in lists.items():
        Path(arguments[1]).write_text(json.dumps(ids))
        assert text in refused(truth_main, ["import", *arguments, *out])
    place = run_import(world, *sources(world)["trak"])
    data = bytearray((place / "truth.safetensors").read_bytes())
    data[-1] ^= 1
    (place / "truth.safetensors").write_bytes(bytes(data))
    assert "does not match its checksum" in refused(truth_main, ["check", str(place)])


def test_lds_scores_a_file(world: dict[str, Any], capsys: Any, refused: Callable[..., str]) -> None:
    out = run_import(world, *sources(world)["trak"])
    capsys.readouterr()
    command = ["--ground-truth", str(out), "--scores", str(world["folder"] / "scores.npy")]
    assert lds_main([*command, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["num_subsets"] == NUM_SUBSETS
    assert row["lds"] > 0.95
    assert lds_main(command) == 0
    (record,) = Path("runs").glob("*/run.json")
    assert read_record(record, RunRecord)["rows"][0]["lds"] == row["lds"]
    (board,) = rows("runs")
    assert (board.label, board.metric, board.rank, board.protocol) == ("scores", "lds", "1", "given")
    assert board.task.startswith("trak ")
    transposed = save(world, "transposed.npy", world["scores"].T)
    assert "it is transposed" in refused(lds_main, ["--ground-truth", str(out), "--scores", transposed])
    holes = save(world, "holes.npy", spoilt(world["scores"], (0, 0), np.nan))
    assert "holds 1 scores that are NaN" in refused(lds_main, ["--ground-truth", str(out), "--scores", holes, "--json"])
    more = ["--alpha", "0.1", "--subsets=4"]
    assert "--alpha, --subsets cannot be used with --ground-truth" in refused(lds_main, [*command, *more])
    flat = world["scores"].copy()
    flat[:2] = 1.0
    assert lds_main(["--ground-truth", str(out), "--scores", save(world, "flat.npy", flat), "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)[0]["num_undefined"] == 2
    assert "undefined for 2 queries" in captured.err


def test_ours_goes_out_and_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exported from the cache of a small digits run, and scored against its own mean effect."""
    out = tmp_path / "exported"
    command = ["export", "--task", "digits", "--alpha", "0.05", "--subsets", "4", "--replicates", "2"]
    command += ["--device", "cpu", "--cluster", "inline", "--cache", str(tmp_path / "cache"), "--out", str(out)]
    assert truth_main([*command, "--collect"]) == 2
    assert "4 of 4 subsets are not in" in capsys.readouterr().err
    assert truth_main(command) == 0
    found = read_truth(out)
    assert found.losses.shape[:2] == (2, 4)
    assert found.masks.sum(axis=1).tolist() == [60] * 4
    assert found.train_indices is not None
    assert len(found.query_indices) == found.losses.shape[2]
    assert found.record["task"]["name"] == "digits"


class Evil:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


@pytest.fixture
def kronfluence(tmp_path: Path) -> dict[str, np.ndarray]:
    """As kronfluence's examples/wikitext/files: int8 masks and float32 losses, numpy arrays behind torch.save."""
    generator = np.random.default_rng(0)
    masks = np.stack([generator.permutation(12) < 6 for _ in range(20)]).astype(np.int8)
    scores = generator.normal(size=(5, 12)).astype(np.float32)
    losses = (masks @ scores.T + 100).astype(np.float32)
    for name, array in (("masks", masks), ("losses", losses)):
        torch.save(array, tmp_path / f"{name}.pt")
    return {"masks": masks, "losses": losses, "scores": scores}


def bergson_folder(folder: Path, scores: np.ndarray, **changed: Any) -> Path:
    """(queries, train) as bergson's memory map has it: a row an example, score and flag side by side, aligned to 8."""
    count, rows = scores.shape
    names = [f"{kind}_{k}" for k in range(count) for kind in ("score", "written")]
    offsets = [8 * k + extra for k in range(count) for extra in (0, 4)]
    dtype = {"names": names, "formats": ["float32", "bool"] * count, "offsets": offsets, "itemsize": 8 * count}
    values = np.zeros(rows, dtype=np.dtype(dtype))  # type: ignore[call-overload]
    for k in range(count):
        values[f"score_{k}"], values[f"written_{k}"] = scores[k], True
    if changed.pop("unfinished", False):
        values["written_1"][3] = False
    folder.mkdir()
    values.tofile(folder / "scores.bin")
    info = {"attribute_tokens": False, "num_items": rows, "num_rows": rows, "num_scores": count, "dtype": dtype}
    (folder / "info.json").write_text(json.dumps(info | changed))
    return folder


def test_kronfluences_files_become_a_ground_truth_and_bergsons_folder_is_judged(
    tmp_path: Path, kronfluence: dict[str, np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / f"{name}.pt") for name in ("masks", "losses")]
    assert truth_main(["import", "kronfluence", *files, "--out", str(tmp_path / "truth")]) == 0
    found = read_truth(tmp_path / "truth")
    np.testing.assert_array_equal(found.masks, kronfluence["masks"].astype(bool))
    np.testing.assert_array_equal(found.losses[0], kronfluence["losses"])
    folder = bergson_folder(tmp_path / "scores", -kronfluence["scores"])  # higher is better there
    capsys.readouterr()
    command = ["--ground-truth", str(tmp_path / "truth"), "--scores", str(folder), "--scores-are", "helpfulness"]
    assert lds_main([*command, "--json", "--out", str(tmp_path / "runs")]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["lds"] == pytest.approx(1.0)


def test_tensors_and_whole_score_folders_are_read_as_they_are(tmp_path: Path) -> None:
    for array in (np.eye(3, dtype=bool), np.arange(6.0).reshape(2, 3), np.arange(4, dtype=np.int64)):
        for value in (array, torch.from_numpy(array)):
            torch.save(value, tmp_path / "one.pt")
            found = one_array(str(tmp_path / "one.pt"), "any")
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array)
    scores = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(one_array(str(bergson_folder(tmp_path / "sound", scores)), "scores"), scores)
    object_dtype = {"names": ["score_0", "written_0"], "formats": ["O", "bool"], "offsets": [0, 8], "itemsize": 16}
    bad: dict[str, tuple[dict[str, Any], str]] = {
        "unfinished": ({"unfinished": True}, "lacks 1 of 8 scores"),
        "tokens": ({"attribute_tokens": True}, "scores of tokens"),
        "short": ({"num_rows": 5}, "expected the 5"),
        "objects": ({"num_scores": 1, "dtype": object_dtype}, "other fields"),
        "more": ({"num_scores": 3}, "other fields"),
    }
    for name, (changed, words) in bad.items():
        with pytest.raises(UsageError, match=words):
            one_array(str(bergson_folder(tmp_path / name, scores, **changed)), "scores")


def test_nothing_in_a_torch_file_runs(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    hostile: dict[str, Any] = {
        "alone": Evil(marker), "in a list": [np.zeros(2), Evil(marker)], "in an array": np.array([Evil(marker)] * 2),
        "a model": torch.nn.Linear(1, 1), "a list": [1, 2], "a table": {"losses": torch.zeros(2)},
        "words": np.array(["a"]),
    }  # fmt: skip
    for name, value in hostile.items():
        torch.save(value, tmp_path / "hostile.pt")
        with pytest.raises(UsageError, match="expected one tensor or array") as error:
            one_array(str(tmp_path / "hostile.pt"), "losses")
        assert "\n" not in str(error.value), name
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil(marker)))
    (tmp_path / "cut.pt").write_bytes((tmp_path / "hostile.pt").read_bytes()[:-90])
    with zipfile.ZipFile(tmp_path / "zip.pt", "w") as packed:
        packed.writestr("archive/data.pkl", pickle.dumps(Evil(marker), protocol=2))
        packed.writestr("archive/version", "3\n")
    for name in ("plain.pt", "cut.pt", "zip.pt", "missing.pt"):
        with pytest.raises(UsageError, match="was not read"):
            one_array(str(tmp_path / name), "losses")
    assert not marker.exists()
