"""Switches of torch's backends that tasks share."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_onednn() -> Iterator[None]:
    """Plain CPU kernels: oneDNN's set-up for each call costs more than it saves on very small tensors."""
    before = torch.backends.mkldnn.enabled
    # `mkldnn.flags` would warn about GPUs that nobody asked for.
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before  # type: ignore[assignment]
