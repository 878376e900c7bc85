"""The GoogLeNet task on made-up images and weights: no download, and one clear line for whatever is missing."""

from pathlib import Path

import numpy as np
import pytest
import torch

from retrain.errors import UsageError
from retrain.tasks import load_task


@pytest.fixture
def folder(images: Path) -> Path:
    return images


def test_it_trains_its_last_layer(folder: Path) -> None:
    task = load_task("googlenet", data_dir=str(folder), model=str(folder / "weights.pth"), size=64, epochs=40)
    assert len(task.train_data) == 30
    assert task.class_names == ("cat", "dog")
    assert len(task.query_data) == 16
    assert task.train_data.inputs.shape[1:] == task.image_shape() == (3, 64, 64)
    device = torch.device("cpu")
    before = task.build_model(1)
    model = task.train(np.arange(30), init_seed=1, order_seed=2, device=device)
    again = task.train(np.arange(30), init_seed=1, order_seed=2, device=device)
    assert torch.equal(model.fc.weight, again.fc.weight)  # type: ignore[union-attr]
    assert torch.equal(model.conv1.conv.weight, before.conv1.conv.weight)  # type: ignore[union-attr]
    assert task.losses(model, task.train_data, device).mean() < task.losses(before, task.train_data, device).mean()
    assert "weights" in task.config


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"data_dir": ""}, "needs --data-dir with the folders train/<class> and val/<class>"),
        ({"data_dir": "/nowhere"}, '"/nowhere/train" is no folder'),
    ],
)
def test_missing_data_is_one_line(folder: Path, options: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text) as error:
        _ = load_task("googlenet", **options).train_data
    assert "\n" not in str(error.value)


def test_unusable_weights_are_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchvision.models import GoogLeNet_Weights

    (tmp_path / "text.pth").write_text("no weights")
    torch.save({"fc.weight": torch.zeros(2)}, tmp_path / "other.pth")
    for name in ("text.pth", "other.pth", "absent.pth"):
        task = load_task("googlenet", data_dir=str(folder), model=str(tmp_path / name), size=64)
        with pytest.raises(UsageError) as error:
            task.build_model(0)
        assert "\n" not in str(error.value)

    def offline(*arguments: object, **options: object) -> None:
        raise OSError("no network")

    def announce(*arguments: object, **options: object) -> dict[str, torch.Tensor]:
        print("Downloading: ...")
        return {}

    monkeypatch.setattr(GoogLeNet_Weights, "get_state_dict", announce)
    assert load_task("googlenet", data_dir=str(folder), size=64)._pretrained == {}  # type: ignore[attr-defined]
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "Downloading: ...\n"), "stdout is for --json"
    monkeypatch.setattr(GoogLeNet_Weights, "get_state_dict", offline)
    with pytest.raises(UsageError, match=r"cannot be downloaded \(no network\); give a file of them with --model"):
        load_task("googlenet", data_dir=str(folder), size=64).build_model(0)
