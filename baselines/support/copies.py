"""Copies of a model for libraries that change what they are given."""

import copy

from torch import nn


def detached_copy(model: nn.Module) -> nn.Module:
    """A deep copy, so that whatever happens to it, the model comes back untouched."""
    return copy.deepcopy(model).eval()
