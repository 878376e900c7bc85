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


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """On a GPU: whole float32 (cuDNN's default rounds to ten bits), summed in an order that is always the same."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = before
