"""A Triton kernel for the whole update of a ResNet-9 in training: SGD with Nesterov momentum, all parameters at once.

The convolutions' weights also exist in the precision that convolutions compute in; the kernel writes both, so that
nothing is cast on the way into or out of a convolution.
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

ELEMENTS_UPDATED, UPDATE_WARPS = 1024, 4


class Rates(NamedTuple):
    """Of a group of parameters: its step at the full learning rate, and how much of a weight joins its gradient."""

    step_size: float
    decay: float


@triton.jit(do_not_specialize=["factor"])  # one of a training's factors, wherever it lies in memory
def _update(  # type: ignore[no-untyped-def]
    parameters,
    momenta,
    gradients,
    copies,
    factor,
    momentum,
    bias_step,
    bias_decay,
    other_step,
    other_decay,
    SIZES: tl.constexpr,
    NUM_BIASES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tuples of tensors; each program has a piece of one of them. A copy may be its parameter itself."""
    program = tl.program_id(0)
    start = 0
    for i in tl.static_range(len(parameters)):
        stop = start + (SIZES[i] + BLOCK - 1) // BLOCK
        if (program >= start) & (program < stop):
            place = (program - start) * BLOCK + tl.arange(0, BLOCK)
            inside = place < SIZES[i]
            step_size = bias_step if i < NUM_BIASES else other_step
            decay = bias_decay if i < NUM_BIASES else other_decay
            weight = tl.load(parameters[i] + place, mask=inside)
            change = tl.load(gradients[i] + place, mask=inside).to(tl.float32) + decay * weight
            speed = momentum * tl.load(momenta[i] + place, mask=inside) + change
            weight -= tl.load(factor) * step_size * (change + momentum * speed)
            tl.store(momenta[i] + place, speed, mask=inside)
            tl.store(parameters[i] + place, weight, mask=inside)
            tl.store(copies[i] + place, weight.to(copies[i].dtype.element_ty), mask=inside)
        start = stop


def update_parameters(
    parameters: Sequence[Tensor],
    momenta: Sequence[Tensor],
    gradients: Sequence[Tensor],
    copies: Sequence[Tensor],
    factor: Tensor,
    momentum: float,
    num_biases: int,
    biases: Rates,
    others: Rates,
) -> None:
    """One step of all `parameters`, of which the first `num_biases` are biases; `factor` () scales both groups' steps.

    A gradient may be of lower precision; `copies[i]` gets the new `parameters[i]`, rounded, or is that very tensor.
    """
    for one, *beside in zip(parameters, momenta, gradients, copies, strict=True):
        assert all(tensor.stride() == one.stride() for tensor in beside), "laid out differently in memory"
    sizes = tuple(one.numel() for one in parameters)
    _update[(sum(triton.cdiv(size, ELEMENTS_UPDATED) for size in sizes),)](
        tuple(parameters),
        tuple(momenta),
        tuple(gradients),
        tuple(copies),
        factor,
        momentum,
        *biases,
        *others,
        SIZES=sizes,
        NUM_BIASES=num_biases,
        BLOCK=ELEMENTS_UPDATED,
        num_warps=UPDATE_WARPS,
    )
