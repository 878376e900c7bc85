"""What is added to a layer's curvature before it is inverted: a number, or a share of the layer's mean eigenvalue."""

import math

from torch import Tensor


def check_damping(damping: float | None, relative_damping: float) -> None:
    for name, value in (("damping", damping), ("relative_damping", relative_damping)):
        if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise ValueError(f"{name} is {value!r}; expected a number that is not negative")
    if damping is None and relative_damping == 0:
        raise ValueError("relative_damping is 0, which damps nothing; expected a share such as 0.1, or a damping")


def damped(eigenvalues: Tensor, damping: float | None, relative_damping: float) -> Tensor:
    """The eigenvalues of one layer with its damping; in float64 until it is added, so that 1e-8 counts."""
    wide = eigenvalues.double()
    added = relative_damping * wide.mean() if damping is None else damping
    # A layer without any curvature or damping moves nothing: its gradients are zero, and so are its scores.
    return (wide + added).clamp(min=1e-30).float()
