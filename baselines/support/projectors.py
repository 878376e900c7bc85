"""Random projections (batch, dimension) -> (batch, projection) of gradients, as traker calls them.

Squared norms come out `projection` times too large, as with traker's matrices of unit entries. All are drawn from
(seed, model_id), so that features of one model belong together and those of two do not.
"""

import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baselines.support.memory import free_bytes

KEPT_SHARE = 0.25  # of the free memory, for a whole dense matrix
_SKETCH_STREAM = 31


def make_projector(kind: str, dimension: int, projection: int, seed: int, device: torch.device) -> Any:
    """None: traker's own choice, its CUDA kernels where they are installed."""
    if projection >= dimension:
        return Unprojected(dimension)
    if kind == "sketch":
        return Sketch(dimension, projection, seed, device)
    if device.type == "cuda" and importlib.util.find_spec("fast_jl") is not None:
        return None
    return _dense(dimension, projection, seed, device)


class Unprojected:
    """As many numbers as there are parameters: the gradients themselves."""

    proj_type = "none"

    def __init__(self, dimension: int):
        self.grad_dim = self.proj_dim = dimension

    def free_memory(self) -> None:
        return None

    def project(self, grads: Tensor, model_id: int) -> Tensor:
        return grads * self.grad_dim**0.5


class Sketch:
    """One entry +-1 a parameter: adding parameters up in buckets, in one pass over the gradients.

    Inner products are unbiased with the variance of a dense Gaussian projection (Charikar et al. 2002). Every bucket
    gets equally many parameters, in a random order: adding up then is a gather and a sum over the last axis. Drawn on
    the CPU, so that it is the same on every device.
    """

    proj_type = "sketch"

    def __init__(self, dimension: int, projection: int, seed: int, device: torch.device):
        self.grad_dim, self.proj_dim, self.seed, self.device = dimension, projection, seed, device
        self._drawn_for: int | None = None
        self.free_memory()

    def free_memory(self) -> None:
        self.order = self.signs = torch.empty(0)
        self._drawn_for = None

    def _draw(self, model_id: int) -> None:
        seed = int(np.random.SeedSequence([self.seed, model_id, _SKETCH_STREAM]).generate_state(1)[0])
        generator = torch.Generator().manual_seed(seed)
        padded = -(-self.grad_dim // self.proj_dim) * self.proj_dim
        order = torch.randperm(padded, generator=generator)
        signs = torch.randint(0, 2, (padded,), generator=generator).float().mul_(2).sub_(1)
        signs[order >= self.grad_dim] = 0  # the padding
        signs *= self.proj_dim**0.5
        self.order = order.clamp(max=self.grad_dim - 1).to(self.device)
        self.signs, self._drawn_for = signs.to(self.device), model_id

    def project(self, grads: Tensor, model_id: int) -> Tensor:
        if self._drawn_for != model_id:
            self._draw(model_id)
        gathered = grads.index_select(1, self.order).mul_(self.signs)
        return gathered.view(len(grads), self.proj_dim, -1).sum(2)


def _dense(dimension: int, projection: int, seed: int, device: torch.device) -> Any:
    """traker's own matrices, drawn block by block; all blocks are kept where they fit, not drawn for every batch."""
    from trak.projectors import BasicProjector, ProjectionType

    class Kept(BasicProjector):
        _matrix: Tensor | None = None
        model_id: int

        def free_memory(self) -> None:
            self._matrix = None
            self.proj_matrix, self.proj_matrix_available = torch.empty(0), False

        def project(self, grads: Tensor, model_id: int) -> Tensor:
            fits = 4 * self.grad_dim * self.proj_dim <= KEPT_SHARE * free_bytes(device) or self._matrix is not None
            if not fits and self.num_blocks > 1:
                return super().project(grads, model_id)
            if model_id != self.model_id:
                self.model_id, self._matrix = model_id, None
                self.get_generator_states()
            if self._matrix is None:
                self._matrix = torch.empty(self.grad_dim, self.num_blocks * self.block_size, device=device)
                for block, state in enumerate(self.generator_states):
                    self.generate_sketch_matrix(state)
                    self._matrix[:, block * self.block_size : (block + 1) * self.block_size] = self.proj_matrix
            return grads @ self._matrix[:, : self.proj_dim]

    # Normal on the CPU and signs on a GPU, as traker chooses them.
    kind = ProjectionType.normal if device.type == "cpu" else ProjectionType.rademacher
    return Kept(dimension, projection, seed, kind, device)  # type: ignore[arg-type]
