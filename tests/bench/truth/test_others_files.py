"""Files of kronfluence (torch.save) and score folders of bergson, in small; what would run code is refused."""

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.cli import lds_main
from bench.truth.__main__ import main
from bench.truth.folder import one_array, read_truth
from retrain.errors import UsageError


class Evil:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


@pytest.fixture
def truth(tmp_path: Path) -> dict[str, np.ndarray]:
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
    tmp_path: Path, truth: dict[str, np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / f"{name}.pt") for name in ("masks", "losses")]
    assert main(["import", "kronfluence", *files, "--out", str(tmp_path / "truth")]) == 0
    found = read_truth(tmp_path / "truth")
    np.testing.assert_array_equal(found.masks, truth["masks"].astype(bool))
    np.testing.assert_array_equal(found.losses[0], truth["losses"])
    folder = bergson_folder(tmp_path / "scores", -truth["scores"])  # higher is better there
    capsys.readouterr()
    command = ["--ground-truth", str(tmp_path / "truth"), "--scores", str(folder), "--scores-are", "helpfulness"]
    assert lds_main([*command, "--json", "--out", str(tmp_path / "runs")]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["lds"] == pytest.approx(1.0)


def test_tensors_and_other_dtypes_are_read_as_they_are(tmp_path: Path) -> None:
    for array in (np.eye(3, dtype=bool), np.arange(6.0).reshape(2, 3), np.arange(4, dtype=np.int64)):
        for value in (array, torch.from_numpy(array)):
            torch.save(value, tmp_path / "one.pt")
            found = one_array(str(tmp_path / "one.pt"), "any")
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array)


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


def test_a_score_folder_that_is_not_whole_is_refused(tmp_path: Path) -> None:
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
