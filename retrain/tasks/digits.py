"""The embedded image task: scikit-learn's 1,797 handwritten 8x8 digits and a narrow ResNet-9.

    python -m bench.lds --task digits --alpha 0.1

Nothing is downloaded, and one retrain takes a fraction of a second on one core. The network and its training are the
CIFAR-10 task's in small: whitening convolution, three groups, BatchNorm with bias only, SGD with Nesterov momentum,
label smoothing, a triangular learning rate. There is no augmentation: 8x8 pixels leave no room for it.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrain.backends import without_onednn
from retrain.examples import Examples, Indices, shuffled_batches
from retrain.models.resnet9 import ResNet9, whitening_weight
from retrain.task import Task

NUM_IMAGES = 1797


@dataclass(frozen=True, kw_only=True)
class Digits(Task):
    """digits: scikit-learn's 1,797 handwritten 8x8 digits and a narrow ResNet-9

    1,200 training images; the other 597 are queries. `scratch` retrains from the base model's initial weights.
    """

    preset: ClassVar[str] = "digits"
    version: ClassVar[int] = 1
    default_replicates: ClassVar[int] = 2
    cpu_threads: ClassVar[int] = 1
    method_settings: ClassVar[dict[str, dict[str, Any]]] = {
        "bif": {"minibatch": 64}  # the default of 1,024 is nearly all of the training set
    }

    num_train: int = 1200
    widths: tuple[int, ...] = (8, 16, 16)
    epochs: int = 10
    batch_size: int = 30
    learning_rate: float = 1.0
    momentum: float = 0.85
    weight_decay: float = 1e-3
    label_smoothing: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.num_train <= NUM_IMAGES - 5:
            raise ValueError(
                f"num_train is {self.num_train}; expected 1 to {NUM_IMAGES - 5}: the rest of the {NUM_IMAGES:,} images "
                "are queries, and every fifth of those is for tuning"
            )
        if self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}; expected at least 1")

    @cached_property
    def _images_and_labels(self) -> tuple[Tensor, Tensor]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        # scikit-learn's order follows the writers; a fixed shuffle makes queries and training images alike.
        order = np.random.default_rng(0).permutation(len(digits.target))
        images = torch.from_numpy(digits.images[order]).float()[:, None] / 16
        return (images - images.mean()) / images.std(), torch.from_numpy(digits.target[order]).long()

    def load_train_data(self) -> Examples:
        images, labels = self._images_and_labels
        return Examples(images[: self.num_train], labels[: self.num_train])

    def load_query_data(self) -> Examples:
        images, labels = self._images_and_labels
        return Examples(images[self.num_train :], labels[self.num_train :])

    def image_shape(self) -> tuple[int, int, int]:
        return (1, 8, 8)

    @cached_property
    def _whitening(self) -> Tensor:
        return whitening_weight(self.train_data.inputs)

    def build_model(self, seed: int) -> nn.Module:
        model = ResNet9(in_channels=1, image_size=8, widths=self.widths, generator=torch.Generator().manual_seed(seed))
        model.set_whitening(self._whitening)
        return model

    def train(self, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        model = self.build_model(init_seed).to(device).train()
        data = self.train_data.select(indices).to(device)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(
            parameters, lr=0.0, momentum=self.momentum, weight_decay=self.weight_decay, nesterov=True
        )
        with without_onednn():  # half the time, on batches this small
            for chosen, rate in self.steps(len(data), order_seed):
                optimizer.param_groups[0]["lr"] = rate
                chosen = chosen.to(device)
                outputs = model(data.inputs[chosen])
                loss = F.cross_entropy(outputs, data.targets[chosen], label_smoothing=self.label_smoothing)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
        return model.eval()

    def steps(self, count: int, order_seed: int) -> list[tuple[Tensor, float]]:
        """Of a training on so many examples: each step's positions among them, and its learning rate."""
        batches = list(shuffled_batches(count, self.batch_size, self.epochs, order_seed))
        shares = (rise_and_fall((step + 1) / (len(batches) + 1)) for step in range(len(batches)))
        return [(chosen, self.learning_rate * share) for chosen, share in zip(batches, shares, strict=True)]


def rise_and_fall(progress: float, peak: float = 0.23) -> float:
    """The learning rate's share of its maximum: up to 1 at `peak` of the training, then down to 0."""
    return progress / peak if progress < peak else (1 - progress) / (1 - peak)


@dataclass(frozen=True, kw_only=True)
class SmoothDigits(Digits):
    """smooth_digits: The digits with a training that depends smoothly on its data, for methods that differentiate it

    The digits' gradient jumps wherever a maximum moves from one pixel to the next, and their learning rate magnifies
    whatever differs: after 160 steps a change of one weight by a millionth is as large as the weights. Here pooling
    takes means, and learning rates are a fifth. Ilyas and Engstrom (2025) call this "metasmoothness".
    """

    preset: ClassVar[str] = "smooth_digits"

    learning_rate: float = 0.2

    def build_model(self, seed: int) -> nn.Module:
        model = super().build_model(seed)
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.MaxPool2d):
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, nn.AvgPool2d(module.kernel_size))
        return model
