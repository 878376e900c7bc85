"""The outputs of a query that can be measured in place of its loss, of one label each: functions of the loss alone.

    output_of(losses, "margin")        # minus the margin log p / (1 - p), p the probability of the correct class
    output_of(losses, "probability")   # minus p
    output_slope(losses, "margin")     # d output / d loss: a method's attributions, gradients of the loss, times this

The signs are the loss's: an example that helps lowers each of them, its score is negative, and LDS is positive for a
method that works. Retrained models are the same for all, so none needs retrains of its own.
"""

import torch
from torch import Tensor

LOSS = "loss"
OUTPUTS = (LOSS, "margin", "probability")
SMALLEST_LOSS = 2**-24  # below it a float32 loss says nothing of 1 - p


def output_of(losses: Tensor, output: str) -> Tensor:
    """Of the same shape; an increasing function of the loss -log p."""
    if output == LOSS:
        return losses
    if output == "probability":
        return -torch.exp(-losses)
    losses = losses.clamp(min=SMALLEST_LOSS)
    return losses + torch.log(-torch.expm1(-losses))


def output_slope(losses: Tensor, output: str) -> Tensor:
    if output == LOSS:
        return torch.ones_like(losses)
    if output == "probability":
        return torch.exp(-losses)
    return -1 / torch.expm1(-losses.clamp(min=SMALLEST_LOSS))
