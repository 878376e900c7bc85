"""The digits with a training that depends smoothly on its data, for methods that differentiate it.

    python -m bench.lds --task smooth_digits --alpha 0.99 --initialisation replayed --methods magic ekfac

The digits task's gradient jumps wherever a maximum moves from one pixel to the next, and its learning rate magnifies
whatever differs: after 160 steps a change of one weight by a millionth is as large as the weights. Here pooling takes
means, and learning rates are a fifth. Ilyas and Engstrom (2025) ask the same of a training ("metasmoothness").
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from retrain.tasks.digits import Digits


@dataclass(frozen=True, kw_only=True)
class SmoothDigits(Digits):
    """As `Digits`, with mean pooling and a lower learning rate."""

    version: ClassVar[int] = 1

    learning_rate: float = 0.2

    def build_model(self, seed: int) -> nn.Module:
        model = super().build_model(seed)
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.MaxPool2d):
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, nn.AvgPool2d(module.kernel_size))
        return model
