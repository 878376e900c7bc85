"""A chain's state, and finished parts, in `problem.work`: a kill costs about a minute, and saving a tenth of the time.

States hold tensors of any device, bfloat16 included, as plain arrays; the record says which settings they belong to.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrain.resume import SAVE_SECONDS, NullResumeState, ResumeState

logger = logging.getLogger("tda-bench")

# Hashing and writing this much takes some ten seconds. A state that is larger (a billion parameters' displacement, or
# running sums of a billion pairs) would cost more than it saves: such a chain starts again.
LARGEST_STATE_BYTES = 4 * 2**30
SHARE_OF_TIME = 0.1  # spent on saving, at most
_BFLOAT16 = ":bfloat16"  # numpy has no such type: kept as the same bits


class Saver:
    """What the parts of one scoring have so far. Nothing is written where nobody would resume (`NullResumeState`)."""

    def __init__(self, work: ResumeState, settings: Mapping[str, Any]):
        self._work, self._settings = work, dict(settings)
        self._cost, self._saved = 0.0, time.monotonic()
        self._unsaved: dict[str, Mapping[str, Tensor]] = {}  # finished parts that were not worth a file by themselves
        self._unsaved_seconds = 0.0
        self._told = False

    def load(self, name: str) -> tuple[dict[str, Tensor], int | None] | None:
        """(tensors on the CPU, draws taken; None for a finished part), if an earlier attempt left this."""
        found = self._work.load(name)
        if found is None or found[1].get("settings") != self._settings:
            return None
        arrays, record = found
        return {key.removesuffix(_BFLOAT16): _tensor(key, array) for key, array in arrays.items()}, record["taken"]

    def progress(self, name: str, taken: int, state: Callable[[], Mapping[str, Tensor]]) -> None:
        """Saves a part under way, if it is time to."""
        if self._work.due() and time.monotonic() - self._saved >= self._cost / SHARE_OF_TIME:
            self._save(name, state(), taken)

    def finished(self, name: str, part: Mapping[str, Tensor], seconds: float) -> None:
        """Saves a whole part; where that and others like it would be made again in less than a save's interval, with
        the next that is saved."""
        self._unsaved[name] = part
        self._unsaved_seconds += seconds
        if self._unsaved_seconds >= SAVE_SECONDS:
            self._save_finished()

    def _save_finished(self) -> None:
        parts, self._unsaved, self._unsaved_seconds = self._unsaved, {}, 0.0
        for name, part in parts.items():
            self._write(name, part, None)

    def _save(self, name: str, tensors: Mapping[str, Tensor], taken: int | None) -> None:
        # A state's seconds are those of all that came before it: what did must not be made, and charged, again.
        self._save_finished()
        self._write(name, tensors, taken)

    def _write(self, name: str, tensors: Mapping[str, Tensor], taken: int | None) -> None:
        if isinstance(self._work, NullResumeState):
            return
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if num_bytes > LARGEST_STATE_BYTES:
            if not self._told:
                logger.info("bif: a state of %.1f GiB is not saved; interrupted, it is lost", num_bytes / 2**30)
            self._told = True
            return
        start = time.monotonic()
        record = {"taken": taken, "settings": self._settings}
        self._work.save(name, dict(_array(key, tensor) for key, tensor in tensors.items()), record)
        self._saved = time.monotonic()
        self._cost = self._saved - start


def _array(key: str, tensor: Tensor) -> tuple[str, np.ndarray]:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return key + _BFLOAT16, tensor.contiguous().view(torch.int16).numpy()
    return key, tensor.numpy()


def _tensor(key: str, array: np.ndarray) -> Tensor:
    tensor = torch.from_numpy(np.array(array))
    return tensor.view(torch.bfloat16) if key.endswith(_BFLOAT16) else tensor
