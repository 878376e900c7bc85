"""TRAK for billions of parameters: the same features and kernel, and a projection that is drawn on the device.

The suite's own sketch (baselines/support/projectors.py) draws an order of all parameters on the CPU, the same on every
device; for billions that alone takes minutes, twice. Here runs of `projection` parameters are turned by a random shift,
signed, and added up: any two parameters of different runs meet in one place with the same chance as in any sketch, two
of one run never, and nothing as large as the model is kept.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from baselines.method import Problem
from baselines.trak import TRAK

SLICE = 2**24  # parameters that are signed at once
_STREAM = 37


class ShiftedSketch:
    """As traker calls it; squared norms come out `projection` times too large, as with its own matrices."""

    proj_type = "sketch"

    def __init__(self, dimension: int, projection: int, seed: int, device: torch.device):
        self.grad_dim, self.proj_dim, self.seed, self.device = dimension, projection, seed, device

    def free_memory(self) -> None:
        return None

    def project(self, grads: Tensor, model_id: int) -> Tensor:
        """Drawn again at every call: that takes less time than reading the gradients."""
        seed = int(np.random.SeedSequence([self.seed, model_id, _STREAM]).generate_state(1)[0])
        generator = torch.Generator(self.device).manual_seed(seed)
        width, batch = self.proj_dim, len(grads)
        out = torch.zeros(batch, width, device=self.device)
        places = torch.arange(width, device=self.device)
        for piece in grads.split(max(1, SLICE // width) * width, dim=1):
            runs = -(-piece.shape[1] // width)
            shifts = torch.randint(0, width, (runs, 1), generator=generator, device=self.device)
            signs = torch.randint(0, 2, (runs, width), generator=generator, device=self.device, dtype=torch.int8)
            turned = ((places + shifts) % width).expand(batch, runs, width)
            signed = pad(piece, (0, runs * width - piece.shape[1])).view(batch, runs, width) * (2 * signs - 1)
            out += signed.gather(2, turned).sum(1)
        return out * width**0.5


@dataclass(frozen=True, kw_only=True)
class LargeTRAK(TRAK):
    def make_projector(self, dimension: int, projection: int, problem: Problem) -> Any:
        return ShiftedSketch(dimension, projection, problem.seed, problem.device)
