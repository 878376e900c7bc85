"""Triton kernels for the ResNet-9 in training: the way back through what follows a convolution.

As on the way there, two passes over memory and a tiny kernel between them: `_gradient_sums` and `_join_sums` find how
the batch's statistics answer to a change, `_spread_gradient` puts each gradient where its maximum came from. The place
of the maximum was kept for that, a byte each, and the convolution's output, four times as many numbers, was not.
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from retrain.models.resnet9_training_kernels import (
    CHANNELS_JOINED,
    JOIN_WARPS,
    ROWS_JOINED,
    Cut,
    empty_channels_last,
    normal_share_and_density,
    normed_gelu,
    pooled_with_statistics,
    table_row,
    tile_mask,
    tile_sizes,
)

# For an H200, as in `resnet9_training_kernels`.
SUMS_CUT = Cut(elements=1024, num_warps=2, most_programs=528)
SPREAD_CUT = Cut(elements=512, num_warps=2)


@triton.jit(do_not_specialize=["num_pixels"])
def _gradient_sums(  # type: ignore[no-untyped-def]
    pooled,
    output_gradient,
    coefficients,
    sums,
    num_pixels,
    CHANNELS: tl.constexpr,
    PADDED: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """`sums` (programs, 2, CHANNELS): over a program's pixels, of the normed values' gradients, and of those times the
    standardised values."""
    channel = tl.arange(0, PADDED)
    mean, factor = table_row(coefficients, 0, channel, CHANNELS), table_row(coefficients, 1, channel, CHANNELS)
    bias, scale = table_row(coefficients, 2, channel, CHANNELS), table_row(coefficients, 3, channel, CHANNELS)
    plain = tl.zeros([PIXELS, PADDED], tl.float32)
    weighted = tl.zeros([PIXELS, PADDED], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_pixels, PIXELS), tl.num_programs(0)):
        pixel = tile * PIXELS + tl.arange(0, PIXELS)
        inside = tile_mask(pixel, num_pixels, channel, CHANNELS, PADDED)
        place = pixel.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        value = tl.load(pooled + place, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(output_gradient + place, mask=inside, other=0.0).to(tl.float32)
        centred = value - mean[None, :]
        normed = centred * factor[None, :] + bias[None, :]
        share, density = normal_share_and_density(normed)
        gradient = upstream * (share + normed * density)
        plain += gradient
        weighted += gradient * centred
    rows = sums + tl.program_id(0).to(tl.int64) * (2 * CHANNELS) + channel
    tl.store(rows, tl.sum(plain, axis=0), mask=channel < CHANNELS)
    tl.store(rows + CHANNELS, tl.sum(weighted, axis=0) * scale, mask=channel < CHANNELS)


@triton.jit(do_not_specialize=["num_rows", "num_pixels"])
def _join_sums(  # type: ignore[no-untyped-def]
    sums,
    coefficients,
    gradients,
    num_rows,
    num_pixels,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """`gradients` (3, CHANNELS): of the norm's bias, and how the batch's statistics answer to a value of the batch:

    its gradient is factor * (that of its normed value) + slope * (value - mean) + constant."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    plain = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_rows, ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < num_rows)[:, None] & inside[None, :]
        place = sums + row.to(tl.int64)[:, None] * (2 * CHANNELS) + channel[None, :]
        plain += tl.sum(tl.load(place, mask=there, other=0.0), axis=0)
        weighted += tl.sum(tl.load(place + CHANNELS, mask=there, other=0.0), axis=0)
    factor, scale = table_row(coefficients, 1, channel, CHANNELS), table_row(coefficients, 3, channel, CHANNELS)
    tl.store(gradients + channel, plain, mask=inside)
    tl.store(gradients + CHANNELS + channel, -factor * scale * weighted / num_pixels, mask=inside)
    tl.store(gradients + 2 * CHANNELS + channel, -factor * plain / num_pixels, mask=inside)


@triton.jit(do_not_specialize=["num_pixels"])
def _spread_gradient(  # type: ignore[no-untyped-def]
    pooled,
    choices,
    output_gradient,
    input_gradient,
    coefficients,
    gradients,
    num_pixels,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED: tl.constexpr,
    POOL: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """Who has an outermost maximum also clears the row or column beside it that no maximum reads."""
    OUT_HEIGHT: tl.constexpr = HEIGHT // POOL
    OUT_WIDTH: tl.constexpr = WIDTH // POOL
    pixel = (tl.num_programs(0) - 1 - tl.program_id(0)) * PIXELS + tl.arange(0, PIXELS)  # as in _norm_gelu
    channel = tl.arange(0, PADDED)
    inside = tile_mask(pixel, num_pixels, channel, CHANNELS, PADDED)
    place = pixel.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    value = tl.load(pooled + place, mask=inside, other=0.0).to(tl.float32)
    upstream = tl.load(output_gradient + place, mask=inside, other=0.0).to(tl.float32)
    mean, factor = table_row(coefficients, 0, channel, CHANNELS), table_row(coefficients, 1, channel, CHANNELS)
    slope, constant = table_row(gradients, 1, channel, CHANNELS), table_row(gradients, 2, channel, CHANNELS)
    centred = value - mean[None, :]
    normed = centred * factor[None, :] + table_row(coefficients, 2, channel, CHANNELS)[None, :]
    share, density = normal_share_and_density(normed)
    gradient = upstream * (share + normed * density) * factor[None, :] + (centred * slope[None, :] + constant[None, :])
    gradient = gradient.to(input_gradient.dtype.element_ty)
    if POOL == 1:
        tl.store(input_gradient + place, gradient, mask=inside)
    else:
        choice = tl.load(choices + place, mask=inside, other=0)
        image = (pixel // (OUT_HEIGHT * OUT_WIDTH)).to(tl.int64)
        row, column = pixel // OUT_WIDTH % OUT_HEIGHT, pixel % OUT_WIDTH
        first = image * (HEIGHT * WIDTH * CHANNELS) + (row * 2 * WIDTH + column * 2) * CHANNELS
        target = input_gradient + first[:, None] + channel[None, :]
        below = target + WIDTH * CHANNELS
        zero = tl.zeros_like(gradient)
        tl.store(target, tl.where(choice == 0, gradient, zero), mask=inside)
        tl.store(target + CHANNELS, tl.where(choice == 1, gradient, zero), mask=inside)
        tl.store(below, tl.where(choice == 2, gradient, zero), mask=inside)
        tl.store(below + CHANNELS, tl.where(choice == 3, gradient, zero), mask=inside)
        last_column = inside & (column == OUT_WIDTH - 1)[:, None]
        last_row = inside & (row == OUT_HEIGHT - 1)[:, None]
        if WIDTH % 2 == 1:
            tl.store(target + 2 * CHANNELS, zero, mask=last_column)
            tl.store(below + 2 * CHANNELS, zero, mask=last_column)
        if HEIGHT % 2 == 1:
            tl.store(target + 2 * WIDTH * CHANNELS, zero, mask=last_row)
            tl.store(below + (WIDTH + 1) * CHANNELS, zero, mask=last_row)
        if WIDTH % 2 == 1 and HEIGHT % 2 == 1:
            tl.store(below + (WIDTH + 2) * CHANNELS, zero, mask=last_column & last_row)


def summed_gradients(pooled: Tensor, output_gradient: Tensor, coefficients: Tensor) -> Tensor:
    """(3, channels): see `_join_sums`."""
    channels = pooled.shape[1]
    num_pixels, shape = tile_sizes(pooled, SUMS_CUT)
    programs = min(triton.cdiv(num_pixels, shape["PIXELS"]), SUMS_CUT.most_programs)
    sums = pooled.new_empty((programs, 2, channels), dtype=torch.float32)
    _gradient_sums[(programs,)](
        pooled, output_gradient, coefficients, sums, num_pixels, **shape, num_warps=SUMS_CUT.num_warps
    )
    gradients = pooled.new_empty((3, channels), dtype=torch.float32)
    _join_sums[(triton.cdiv(channels, CHANNELS_JOINED),)](
        sums,
        coefficients,
        gradients,
        programs,
        num_pixels,
        CHANNELS=channels,
        BLOCK=CHANNELS_JOINED,
        ROWS=ROWS_JOINED,
        num_warps=JOIN_WARPS,
    )
    return gradients


def spread_gradient(
    pooled: Tensor,
    choices: Tensor,
    output_gradient: Tensor,
    coefficients: Tensor,
    gradients: Tensor,
    shape: tuple[int, int, int, int],
    size: int,
) -> Tensor:
    """The gradient of the convolution's output, which has this shape."""
    input_gradient = empty_channels_last(shape, pooled.dtype, pooled.device)
    num_pixels, sizes = tile_sizes(pooled, SPREAD_CUT)
    _spread_gradient[(triton.cdiv(num_pixels, sizes["PIXELS"]),)](
        pooled,
        choices,
        output_gradient,
        input_gradient,
        coefficients,
        gradients,
        num_pixels,
        HEIGHT=shape[2],
        WIDTH=shape[3],
        POOL=size,
        **sizes,
        num_warps=SPREAD_CUT.num_warps,
    )
    return input_gradient


class _TrainedPoolNormGelu(torch.autograd.Function):
    """Keeps the maxima, where they came from, and what the norm made of the batch."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, norm_bias: Tensor, norm: nn.BatchNorm2d, pool: bool) -> Tensor:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
        pooled, choices, coefficients = pooled_with_statistics(inputs, norm, 2 if pool else 1)
        ctx.save_for_backward(pooled, choices, coefficients)
        ctx.shape, ctx.size = inputs.shape, 2 if pool else 1
        return normed_gelu(pooled, coefficients)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        pooled, choices, coefficients = ctx.saved_tensors
        output_gradient = output_gradient.contiguous(memory_format=torch.channels_last)
        gradients = summed_gradients(pooled, output_gradient, coefficients)
        spread = spread_gradient(pooled, choices, output_gradient, coefficients, gradients, ctx.shape, ctx.size)
        return spread, gradients[0], None, None


def trained_pool_norm_gelu(inputs: Tensor, norm: nn.BatchNorm2d, pool: bool) -> Tensor:
    """GELU(norm(max_pool2d(inputs, 2))) in training mode, without the maximum if not `pool`.

    Differentiable in the inputs and in the norm's bias; the norm's weight is taken as fixed, its running mean and
    variance are updated. `num_batches_tracked`, which a norm with a momentum never reads, is not.
    """
    return _TrainedPoolNormGelu.apply(inputs, norm.bias, norm, pool)
