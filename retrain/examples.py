"""Examples: inputs and targets that share their first dimension, the only form in which data travels here."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]  # inputs (batch, ...), targets (batch,) or (batch, tokens)
Indices = Sequence[int] | np.ndarray | Tensor


@dataclass(frozen=True, eq=False)
class Examples:
    """A map-style dataset (torch's DataLoader takes it as it is) that is also sliced and moved as a whole."""

    inputs: Tensor  # (n, ...)
    targets: Tensor  # (n,) class labels or real values, or (n, tokens)

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ValueError(
                f"{len(self.inputs)} inputs came with {len(self.targets)} targets; expected one target an input"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Batch:
        return self.inputs[index], self.targets[index]

    def select(self, indices: Indices) -> "Examples":
        chosen = torch.as_tensor(indices, dtype=torch.long, device=self.inputs.device)
        return Examples(self.inputs[chosen], self.targets[chosen])

    def to(self, device: torch.device | str) -> "Examples":
        return Examples(self.inputs.to(device), self.targets.to(device))

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """In order, every example once; the last batch may be smaller."""
        for start in range(0, len(self), batch_size):
            yield self.inputs[start : start + batch_size], self.targets[start : start + batch_size]

    @cached_property
    def fingerprint(self) -> str:
        """Of every byte, in order: two sets of examples share it only if they are the same."""
        digest = hashlib.sha256()
        for tensor in (self.inputs, self.targets):
            array = np.ascontiguousarray(tensor.cpu().numpy())
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()[:20]
