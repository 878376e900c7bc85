"""For the paper's influential images: torchvision's GoogLeNet, last layer finetuned, on an image folder.

    python -m bench.lds --task googlenet --data-dir imagenette --model googlenet.pth --alpha 0.5 --methods bif ekfac
    python -m bench.inspect --task googlenet --data-dir imagenette --model googlenet.pth

It is Inception-v1. The folder holds `train/<class>/*.jpg` and `val/<class>/*.jpg`. The weights are a file given by
--model, or torchvision's own, downloaded once. Retraining finetunes the pretrained network's last layer on the subset,
which a laptop can do a hundred times; the methods look at the network whose last layer was finetuned on everything.
"""

import contextlib
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrain.errors import UsageError
from retrain.examples import Examples, Indices, shuffled_batches
from retrain.models.weights import read_state
from retrain.task import Task, not_in_key, weights_digest

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ENDINGS = (".jpg", ".jpeg", ".png", ".webp")


@dataclass(frozen=True, kw_only=True)
class GoogLeNet(Task):
    """Classes are the folders' names in alphabetical order; images are cropped to squares of `size` pixels."""

    version: ClassVar[int] = 1
    protocols: ClassVar[tuple[str, ...]] = ("last-layer",)
    eval_batch_size: ClassVar[int] = 64
    method_settings: ClassVar[dict[str, dict[str, Any]]] = {"bif": {"minibatch": 256}}

    data_dir: str = not_in_key("")
    model: str = not_in_key("")  # a file of weights; the key has the weights themselves
    size: int = 224
    train_per_class: int = 100
    queries_per_class: int = 10
    epochs: int = 5
    batch_size: int = 64
    learning_rate: float = 0.01

    # ---- data ----

    def _folder(self, part: str) -> Path:
        folder = Path(self.data_dir or ".") / part
        if not self.data_dir or not folder.is_dir():
            raise UsageError(
                f'googlenet needs --data-dir with the folders train/<class> and val/<class>; "{folder}" is no folder'
            )
        return folder

    @property
    def class_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self.classes)

    @cached_property
    def classes(self) -> list[str]:
        names = sorted(path.name for path in self._folder("train").iterdir() if path.is_dir())
        if len(names) < 2:
            raise UsageError(f"{self._folder('train')} has {len(names)} folders; expected one a class, two or more")
        return names

    def _load(self, part: str, per_class: int) -> Examples:
        inputs, targets = [], []
        for label, name in enumerate(self.classes):
            files = sorted(path for path in (self._folder(part) / name).glob("*") if path.suffix.lower() in ENDINGS)
            if not files:
                raise UsageError(f"{self._folder(part) / name} has no images; expected {', '.join(ENDINGS)} files")
            inputs += [self._read(path) for path in files[:per_class]]
            targets += [label] * len(files[:per_class])
        return Examples(torch.stack(inputs), torch.tensor(targets))

    def _read(self, path: Path) -> Tensor:
        """(3, size, size): the shorter side scaled to size * 8 / 7, the middle cut out, ImageNet's normalisation."""
        from PIL import Image, UnidentifiedImageError

        try:
            picture = Image.open(path).convert("RGB")
        except (OSError, UnidentifiedImageError) as error:
            raise UsageError(f"{path} cannot be read as an image ({type(error).__name__})") from None
        scale = self.size * 8 / 7 / min(picture.size)
        sides = (max(self.size, round(picture.width * scale)), max(self.size, round(picture.height * scale)))
        picture = picture.resize(sides, Image.Resampling.BILINEAR)
        left, top = (picture.width - self.size) // 2, (picture.height - self.size) // 2
        pixels = np.asarray(picture.crop((left, top, left + self.size, top + self.size)), dtype=np.float32) / 255
        normalised = (pixels - np.array(MEAN, dtype=np.float32)) / np.array(DEVIATION, dtype=np.float32)
        return torch.from_numpy(np.ascontiguousarray(normalised.transpose(2, 0, 1)))

    def load_train_data(self) -> Examples:
        return self._load("train", self.train_per_class)

    def load_query_data(self) -> Examples:
        return self._load("val", self.queries_per_class)

    def given_weights(self) -> str:
        return weights_digest(self._pretrained)  # wherever they came from

    def image_shape(self) -> tuple[int, int, int]:
        return (3, self.size, self.size)

    @property
    def description(self) -> str:
        return f"GoogLeNet on {Path(self.data_dir).name}"

    # ---- model ----

    @cached_property
    def _pretrained(self) -> dict[str, Tensor]:
        if self.model:
            return read_state(self.model)
        from torchvision.models import GoogLeNet_Weights

        try:
            with contextlib.redirect_stdout(sys.stderr):  # where torch announces its download; --json has stdout
                return GoogLeNet_Weights.IMAGENET1K_V1.get_state_dict(progress=False)
        except OSError as error:
            raise UsageError(
                f"torchvision's GoogLeNet weights cannot be downloaded ({error}); give a file of them with --model, "
                f"from {GoogLeNet_Weights.IMAGENET1K_V1.url}"
            ) from None

    def build_model(self, seed: int) -> nn.Module:
        """Pretrained but for its last layer, which is drawn anew for these classes and the only one that is trained."""
        from torchvision.models import googlenet

        left_out = ("aux1.", "aux2.", "fc.")
        weights = {name: value for name, value in self._pretrained.items() if not name.startswith(left_out)}
        with torch.random.fork_rng(devices=[]):  # torchvision draws weights that are replaced at once
            network = googlenet(weights=None, aux_logits=False, init_weights=False, transform_input=False)
            network.fc = nn.Linear(network.fc.in_features, len(self.classes))
        missing, unexpected = network.load_state_dict(weights, strict=False)
        if unexpected or any(not name.startswith("fc.") for name in missing):
            strange = (unexpected or [name for name in missing if not name.startswith("fc.")])[0]
            raise UsageError(f'the weights do not fit torchvision\'s GoogLeNet: "{strange}" is not in both')
        generator = torch.Generator().manual_seed(seed)
        nn.init.trunc_normal_(network.fc.weight, std=0.02, generator=generator)
        nn.init.zeros_(network.fc.bias)
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name.startswith("fc."))
        # Dropout would make training random beyond its order, and the features could not be computed once.
        network.dropout = nn.Identity()
        return network.eval()

    def train(self, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        network: Any = self.build_model(init_seed).to(device)
        chosen = torch.as_tensor(np.asarray(indices), dtype=torch.long)
        features, targets = self._features(device)[chosen].to(device), self.train_data.targets[chosen].to(device)
        optimizer = torch.optim.SGD(network.fc.parameters(), lr=self.learning_rate, momentum=0.9)
        for rows in shuffled_batches(len(features), self.batch_size, self.epochs, order_seed):
            loss = F.cross_entropy(network.fc(features[rows]), targets[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        return network.eval()

    @torch.no_grad()
    def _features(self, device: torch.device) -> Tensor:
        """(train, 1024): what the frozen network sees, computed once; every retraining starts from there."""
        if not hasattr(self, "_kept_features"):
            network: Any = self.build_model(0).to(device)
            network.fc = nn.Identity()
            parts = [network(inputs.to(device)).cpu() for inputs, _ in self.train_data.batches(self.eval_batch_size)]
            object.__setattr__(self, "_kept_features", torch.cat(parts))
        return self._kept_features  # type: ignore[attr-defined]
