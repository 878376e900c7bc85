"""Triton kernels for the ResNet-9 in training: what follows a convolution, by the statistics of the batch.

torch pools, takes moments, norms and applies GELU in kernels of their own, and half of a training step goes to them,
most of it to the maximum's way back. Here it is three passes forward and two back, each over memory once. A program
keeps the moments of its own pixels; they are joined in a fixed order, so that the same batch gives the same bits. As
in `resnet9_kernels`, everything is channels-last, and another batch size compiles nothing.
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from retrain.models.resnet9_kernels import (
    ROOT_HALF,
    ROOT_TWO_PI,
    NormArguments,
    factor_and_offset,
    pool_norm_gelu_gradient,
    pooled_normed,
)

ELEMENTS_AT_A_TIME = 4096  # elements that a program reads at a time
MOST_PROGRAMS = 528  # four on each multiprocessor of an H200; each leaves one row of moments to be joined
CHANNELS_JOINED, ROWS_JOINED = 16, 64


@triton.jit(do_not_specialize=["num_pixels"])
def _pool_and_moments(  # type: ignore[no-untyped-def]
    inputs,
    pooled,
    moments,
    num_pixels,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED: tl.constexpr,
    POOL: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """`pooled` gets the maxima, where POOL is 2; `moments` (programs, 3, CHANNELS) count, mean, squared deviations."""
    OUT_HEIGHT: tl.constexpr = HEIGHT // POOL
    OUT_WIDTH: tl.constexpr = WIDTH // POOL
    channel = tl.arange(0, PADDED)
    count = 0.0
    mean = tl.zeros([PADDED], tl.float32)
    deviations = tl.zeros([PADDED], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_pixels, PIXELS), tl.num_programs(0)):
        pixel = tile * PIXELS + tl.arange(0, PIXELS)
        inside = (pixel < num_pixels)[:, None] & (channel < CHANNELS)[None, :]
        image = (pixel // (OUT_HEIGHT * OUT_WIDTH)).to(tl.int64)
        row, column = pixel // OUT_WIDTH % OUT_HEIGHT, pixel % OUT_WIDTH
        first = image * (HEIGHT * WIDTH * CHANNELS) + (row * POOL * WIDTH + column * POOL) * CHANNELS
        source = inputs + first[:, None] + channel[None, :]
        value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        if POOL == 2:
            value = tl.maximum(value, tl.load(source + CHANNELS, mask=inside, other=0.0).to(tl.float32))
            below = source + WIDTH * CHANNELS
            value = tl.maximum(value, tl.load(below, mask=inside, other=0.0).to(tl.float32))
            value = tl.maximum(value, tl.load(below + CHANNELS, mask=inside, other=0.0).to(tl.float32))
            target = pooled + pixel.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
            tl.store(target, value.to(pooled.dtype.element_ty), mask=inside)
        new = tl.minimum(num_pixels - tile * PIXELS, PIXELS).to(tl.float32)
        new_mean = tl.sum(value, axis=0) / new  # what is outside was read as 0
        difference = tl.where(inside, value - new_mean[None, :], 0.0)
        shift = new_mean - mean
        deviations += tl.sum(difference * difference, axis=0) + shift * shift * (count * new / (count + new))
        mean += shift * (new / (count + new))
        count += new
    rows = moments + tl.program_id(0).to(tl.int64) * (3 * CHANNELS) + channel
    tl.store(rows, tl.zeros([PADDED], tl.float32) + count, mask=channel < CHANNELS)
    tl.store(rows + CHANNELS, mean, mask=channel < CHANNELS)
    tl.store(rows + 2 * CHANNELS, deviations, mask=channel < CHANNELS)


@triton.jit(do_not_specialize=["num_rows", "num_pixels"])
def _join_moments(  # type: ignore[no-untyped-def]
    moments,
    statistics,
    running_mean,
    running_variance,
    momentum,
    num_rows,
    num_pixels,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """`statistics` (2, CHANNELS) gets the batch's mean and biased variance; the running ones move towards them."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_rows, ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < num_rows)[:, None] & inside[None, :]
        place = moments + row.to(tl.int64)[:, None] * (3 * CHANNELS) + channel[None, :]
        count = tl.load(place, mask=there, other=0.0)
        total += tl.sum(count * tl.load(place + CHANNELS, mask=there, other=0.0), axis=0)
    mean = total / num_pixels
    deviations = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_rows, ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < num_rows)[:, None] & inside[None, :]
        place = moments + row.to(tl.int64)[:, None] * (3 * CHANNELS) + channel[None, :]
        count = tl.load(place, mask=there, other=0.0)
        shift = tl.load(place + CHANNELS, mask=there, other=0.0) - mean[None, :]
        own = tl.load(place + 2 * CHANNELS, mask=there, other=0.0)
        deviations += tl.sum(own + count * shift * shift, axis=0)
    tl.store(statistics + channel, mean, mask=inside)
    tl.store(statistics + CHANNELS + channel, deviations / num_pixels, mask=inside)
    old_mean = tl.load(running_mean + channel, mask=inside)
    tl.store(running_mean + channel, old_mean + momentum * (mean - old_mean), mask=inside)
    old_variance = tl.load(running_variance + channel, mask=inside)
    unbiased = deviations / (num_pixels - 1)
    tl.store(running_variance + channel, old_variance + momentum * (unbiased - old_variance), mask=inside)


@triton.jit(do_not_specialize=["num_pixels"])
def _gradient_sums(  # type: ignore[no-untyped-def]
    pooled,
    output_gradient,
    sums,
    norm_weight,
    norm_bias,
    norm_mean,
    norm_variance,
    eps,
    num_pixels,
    CHANNELS: tl.constexpr,
    PADDED: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """`sums` (programs, 2, CHANNELS): over a program's pixels, of the normed values' gradients, plain and weighted."""
    channel = tl.arange(0, PADDED)
    inside = channel < CHANNELS
    factor, offset = factor_and_offset(norm_weight, norm_bias, norm_mean, norm_variance, eps, channel, inside)
    mean = tl.load(norm_mean + channel, mask=inside, other=0.0)
    scale = 1.0 / tl.sqrt(tl.load(norm_variance + channel, mask=inside, other=1.0) + eps)
    plain = tl.zeros([PADDED], tl.float32)
    weighted = tl.zeros([PADDED], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_pixels, PIXELS), tl.num_programs(0)):
        pixel = tile * PIXELS + tl.arange(0, PIXELS)
        there = (pixel < num_pixels)[:, None] & inside[None, :]
        place = pixel.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        value = tl.load(pooled + place, mask=there, other=0.0).to(tl.float32)
        normed = value * factor[None, :] + offset[None, :]
        share = 0.5 * (1.0 + tl.math.erf(normed * ROOT_HALF))
        slope = share + normed * tl.exp(-0.5 * normed * normed) / ROOT_TWO_PI
        gradient = tl.load(output_gradient + place, mask=there, other=0.0).to(tl.float32) * slope
        plain += tl.sum(gradient, axis=0)
        weighted += tl.sum(gradient * (value - mean[None, :]) * scale[None, :], axis=0)
    rows = sums + tl.program_id(0).to(tl.int64) * (2 * CHANNELS) + channel
    tl.store(rows, plain, mask=inside)
    tl.store(rows + CHANNELS, weighted, mask=inside)


class _TrainedPoolNormGelu(torch.autograd.Function):
    """Keeps the convolution's output, its maxima and the batch's statistics."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, norm_bias: Tensor, norm: nn.BatchNorm2d, pool: bool) -> Tensor:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
        pooled, statistics = _pooled_and_statistics(inputs, norm, 2 if pool else 1)
        ctx.save_for_backward(inputs, pooled)
        ctx.arguments = (norm.weight, norm.bias, statistics[0], statistics[1], norm.eps)
        ctx.size = 2 if pool else 1
        return pooled_normed(pooled, ctx.arguments, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs, pooled = ctx.saved_tensors
        output_gradient = output_gradient.contiguous(memory_format=torch.channels_last)
        sums = _summed_gradients(pooled, output_gradient, ctx.arguments)
        gradients = pool_norm_gelu_gradient(inputs, output_gradient, ctx.arguments, ctx.size, sums)
        return *gradients, None, None


def _pooled_and_statistics(inputs: Tensor, norm: nn.BatchNorm2d, size: int) -> tuple[Tensor, Tensor]:
    """The maxima (the inputs themselves where there are none) and the batch's mean and variance (2, channels)."""
    batch, channels, height, width = inputs.shape
    shape = (batch, channels, height // size, width // size)
    pooled = inputs if size == 1 else torch.empty(
        shape, dtype=inputs.dtype, device=inputs.device, memory_format=torch.channels_last
    )  # fmt: skip
    num_pixels, padded, pixels, programs = _cut(pooled)
    moments = inputs.new_empty((programs, 3, channels), dtype=torch.float32)
    _pool_and_moments[(programs,)](
        inputs,
        pooled,
        moments,
        num_pixels,
        HEIGHT=height,
        WIDTH=width,
        CHANNELS=channels,
        PADDED=padded,
        POOL=size,
        PIXELS=pixels,
    )
    statistics = inputs.new_empty((2, channels), dtype=torch.float32)
    _join_moments[(triton.cdiv(channels, CHANNELS_JOINED),)](
        moments,
        statistics,
        norm.running_mean,
        norm.running_var,
        norm.momentum,
        programs,
        num_pixels,
        CHANNELS=channels,
        BLOCK=CHANNELS_JOINED,
        ROWS=ROWS_JOINED,
    )
    return pooled, statistics


def _summed_gradients(pooled: Tensor, output_gradient: Tensor, norm: NormArguments) -> Tensor:
    """(2, channels): see `_gradient_sums`."""
    num_pixels, padded, pixels, programs = _cut(pooled)
    sums = pooled.new_empty((programs, 2, pooled.shape[1]), dtype=torch.float32)
    _gradient_sums[(programs,)](
        pooled,
        output_gradient,
        sums,
        *norm,
        num_pixels,
        CHANNELS=pooled.shape[1],
        PADDED=padded,
        PIXELS=pixels,
    )
    return sums.sum(0)


def _cut(pooled: Tensor) -> tuple[int, int, int, int]:
    """Number of pixels, channels as a power of two, pixels at a time, programs."""
    num_pixels = pooled.shape[0] * pooled.shape[2] * pooled.shape[3]
    padded = triton.next_power_of_2(pooled.shape[1])
    pixels = max(1, ELEMENTS_AT_A_TIME // padded)
    return num_pixels, padded, pixels, min(triton.cdiv(num_pixels, pixels), MOST_PROGRAMS)


def trained_pool_norm_gelu(inputs: Tensor, norm: nn.BatchNorm2d, pool: bool) -> Tensor:
    """GELU(norm(max_pool2d(inputs, 2))) in training mode, without the maximum if not `pool`.

    Differentiable in the inputs and in the norm's bias; the norm's weight is taken as fixed, its running mean and
    variance are updated. `num_batches_tracked`, which a norm with a momentum never reads, is not.
    """
    return _TrainedPoolNormGelu.apply(inputs, norm.bias, norm, pool)
