"""Training examples' gradients kept in a file, for methods whose scores are inner products (`inner_products`).

problem.shared[KEPT_ROWS] = KeptRows(path)      # the first scoring writes them, every later one reads them
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from retrain.errors import UsageError

SCALE = "scale.npy"  # beside the rows
KEPT_ROWS = "kept rows"  # of `Problem.shared`


class KeptRows:
    """(examples, dimension) float32, as they are made: in what basis is the method's own affair."""

    def __init__(self, path: Path, most_bytes: float = float("inf")):
        self.path, self.most_bytes = path, most_bytes
        self.written = path.exists()
        self._rows: np.ndarray | None = None
        self._scale = path.with_name(SCALE)

    @classmethod
    def fresh(cls, path: Path, most_bytes: float) -> "KeptRows":
        """In the place of whatever lies there."""
        for old in (path, path.with_name(SCALE)):
            old.unlink(missing_ok=True)
        return cls(path, most_bytes)

    @property
    def scale(self) -> Tensor | None:
        """(examples,): the norms of the rows in the method's own metric, where they are kept too."""
        return torch.from_numpy(np.load(self._scale, allow_pickle=False)) if self._scale.exists() else None

    def keep_scale(self, scale: Tensor) -> None:
        np.save(self._scale, scale.numpy())

    def open(self, num_examples: int, dimension: int) -> "KeptRows | None":
        """None where they are too large to keep: they are then computed."""
        if self.written:
            self._rows = np.load(self.path, mmap_mode="c", allow_pickle=False)  # what is written stays in memory
            if self._rows.shape != (num_examples, dimension) or self._rows.dtype != np.float32:
                raise UsageError(
                    f"{self.path} holds {self._rows.dtype} of shape {self._rows.shape}; expected float32 of shape "
                    f"{(num_examples, dimension)}"
                )
        elif 4 * num_examples * dimension > self.most_bytes:
            return None
        else:
            shape = (num_examples, dimension)
            self._rows = np.lib.format.open_memmap(self.path, mode="w+", dtype=np.float32, shape=shape)
        return self

    def rows(self, start: int, stop: int, out: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """Those of these examples; in `out`, or on the CPU as they lie in the file."""
        assert self._rows is not None
        if not self.written:
            self._rows[start:stop] = make().cpu().numpy()
            return out
        kept = torch.from_numpy(self._rows[start:stop])
        return kept if out.device.type == "cpu" else out.copy_(kept)
