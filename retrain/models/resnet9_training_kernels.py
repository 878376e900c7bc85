"""Triton kernels for the ResNet-9 in training: what follows a convolution, by the statistics of the batch.

torch pools, takes moments, norms and applies GELU in kernels of their own, and half of a training step goes to them.
Here it is two passes over memory, with a tiny kernel between them where the programs' sums meet: `_pool_and_moments`
takes maxima and moments, `_join_moments` makes the norm's coefficients of them, `_norm_gelu` applies those. Sums
are joined in a fixed order, so that the same batch gives the same bits. As in `resnet9_kernels`, everything is
channels-last, and another batch size compiles nothing. `resnet9_gradient_kernels` is the way back.
"""

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor, nn


class Cut(NamedTuple):
    """How a pass is cut up: elements that a program takes at a time, its warps, and the most programs that sum."""

    elements: int
    num_warps: int
    most_programs: int = 0


# For an H200: enough programs that every multiprocessor has reads under way, few enough that their sums join at once.
POOL_CUT = Cut(elements=512, num_warps=4, most_programs=512)
NORM_CUT = Cut(elements=2048, num_warps=4)
CHANNELS_JOINED, ROWS_JOINED, JOIN_WARPS = 4, 1024, 4

ROOT_OF_TWO_PI_INVERSE = tl.constexpr(0.3989422804014327)
MINUS_HALF_LOG2_OF_E = tl.constexpr(-0.7213475204444817)


@triton.jit
def normal_share_and_density(value):  # type: ignore[no-untyped-def]
    """The normal distribution's function and its density; GELU is value * share, its slope share + value * density.

    Abramowitz and Stegun's 26.2.17, off by 7.5e-8 at most: half the work of erf, which would limit these kernels, and
    its exponential is the density's.
    """
    # Constants last: Triton 3.7's interpreter takes one times a tensor for another constant.
    density = tl.exp2(value * value * MINUS_HALF_LOG2_OF_E) * ROOT_OF_TWO_PI_INVERSE
    above_one = 1.0 + 0.2316419 * tl.abs(value)
    t = tl.rsqrt(above_one * above_one)  # its reciprocal; a division minds ranges that it never comes to
    series = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    tail = density * series
    return tl.where(value < 0, tail, 1.0 - tail), density


@triton.jit
def tile_mask(pixel, num_pixels, channel, CHANNELS: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which elements of a tile exist; a mask over pixels alone, which is cheaper, where no channel is made up."""
    inside = (pixel < num_pixels)[:, None]
    if CHANNELS < PADDED:
        inside = inside & (channel < CHANNELS)[None, :]
    return inside


@triton.jit
def table_row(table, number, channel, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row of a table (rows, CHANNELS)."""
    return tl.load(table + number * CHANNELS + channel, mask=channel < CHANNELS, other=0.0)


@triton.jit(do_not_specialize=["num_pixels"])
def _pool_and_moments(  # type: ignore[no-untyped-def]
    inputs,
    pooled,
    choices,
    moments,
    num_pixels,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED: tl.constexpr,
    POOL: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """`moments` (programs, 2, CHANNELS): mean and squared deviations. Where POOL is 2, `pooled` gets the maxima and
    `choices` which of the four, row by row, each is; the first of equal ones, as torch has it."""
    OUT_HEIGHT: tl.constexpr = HEIGHT // POOL
    OUT_WIDTH: tl.constexpr = WIDTH // POOL
    program = tl.program_id(0)
    channel = tl.arange(0, PADDED)
    # Deviations are measured from a value of the channel's own, so that a mean far from 0 cancels nothing.
    start = program * PIXELS
    start_place = (start // OUT_WIDTH % OUT_HEIGHT * POOL * WIDTH + start % OUT_WIDTH * POOL) * CHANNELS
    start_image = (start // (OUT_HEIGHT * OUT_WIDTH)).to(tl.int64) * (HEIGHT * WIDTH * CHANNELS)
    pivot = tl.load(inputs + start_image + start_place + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)
    total = tl.zeros([PIXELS, PADDED], tl.float32)
    squares = tl.zeros([PIXELS, PADDED], tl.float32)
    count = 0
    for tile in range(program, tl.cdiv(num_pixels, PIXELS), tl.num_programs(0)):
        pixel = tile * PIXELS + tl.arange(0, PIXELS)
        inside = tile_mask(pixel, num_pixels, channel, CHANNELS, PADDED)
        image = (pixel // (OUT_HEIGHT * OUT_WIDTH)).to(tl.int64)
        row, column = pixel // OUT_WIDTH % OUT_HEIGHT, pixel % OUT_WIDTH
        first = image * (HEIGHT * WIDTH * CHANNELS) + (row * POOL * WIDTH + column * POOL) * CHANNELS
        source = inputs + first[:, None] + channel[None, :]
        value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        if POOL == 2:
            first_value = value
            below = source + WIDTH * CHANNELS
            second_value = tl.load(source + CHANNELS, mask=inside, other=0.0).to(tl.float32)
            third_value = tl.load(below, mask=inside, other=0.0).to(tl.float32)
            fourth_value = tl.load(below + CHANNELS, mask=inside, other=0.0).to(tl.float32)
            value = tl.maximum(tl.maximum(first_value, second_value), tl.maximum(third_value, fourth_value))
            choice = tl.where(third_value == value, 2, 3)
            choice = tl.where(second_value == value, 1, choice)
            choice = tl.where(first_value == value, 0, choice)
            place = pixel.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
            tl.store(pooled + place, value.to(pooled.dtype.element_ty), mask=inside)
            tl.store(choices + place, choice.to(tl.uint8), mask=inside)
        shifted = tl.where(inside, value - pivot[None, :], 0.0)
        total += shifted
        squares += shifted * shifted
        count += tl.minimum(num_pixels - tile * PIXELS, PIXELS)
    shift = tl.sum(total, axis=0)
    mean_shift = shift / count
    deviations = tl.maximum(tl.sum(squares, axis=0) - shift * mean_shift, 0.0)
    rows = moments + program.to(tl.int64) * (2 * CHANNELS) + channel
    tl.store(rows, pivot + mean_shift, mask=channel < CHANNELS)
    tl.store(rows + CHANNELS, deviations, mask=channel < CHANNELS)


@triton.jit(do_not_specialize=["num_rows", "num_pixels"])
def _join_moments(  # type: ignore[no-untyped-def]
    moments,
    coefficients,
    norm_weight,
    norm_bias,
    running_mean,
    running_variance,
    momentum,
    eps,
    num_rows,
    num_pixels,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """`coefficients` (4, CHANNELS): mean, factor and bias of the norm, (value - mean) * factor + bias; and its scale,
    1 / standard deviation.

    The running statistics move towards the batch's.
    """
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    pivot = tl.load(moments + channel, mask=inside, other=0.0)
    shift_sum = tl.zeros([BLOCK], tl.float32)
    deviations = tl.zeros([BLOCK], tl.float32)
    num_tiles = tl.cdiv(num_pixels, PIXELS)
    for start in range(0, num_rows, ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < num_rows)[:, None] & inside[None, :]
        # A program's tiles are whole, except perhaps the last tile of all.
        count = (num_tiles // num_rows + (row < num_tiles % num_rows).to(tl.int32)) * PIXELS
        count = tl.where(row == (num_tiles - 1) % num_rows, count - (num_tiles * PIXELS - num_pixels), count)
        place = moments + row.to(tl.int64)[:, None] * (2 * CHANNELS) + channel[None, :]
        shift = tl.where(there, tl.load(place, mask=there, other=0.0) - pivot[None, :], 0.0)
        weighted = count.to(tl.float32)[:, None] * shift
        shift_sum += tl.sum(weighted, axis=0)
        deviations += tl.sum(tl.load(place + CHANNELS, mask=there, other=0.0) + weighted * shift, axis=0)
    mean_shift = shift_sum / num_pixels
    mean = pivot + mean_shift
    deviations = tl.maximum(deviations - shift_sum * mean_shift, 0.0)
    scale = 1.0 / tl.sqrt(deviations / num_pixels + eps)
    factor = tl.load(norm_weight + channel, mask=inside, other=0.0) * scale
    tl.store(coefficients + channel, mean, mask=inside)
    tl.store(coefficients + CHANNELS + channel, factor, mask=inside)
    tl.store(coefficients + 2 * CHANNELS + channel, tl.load(norm_bias + channel, mask=inside), mask=inside)
    tl.store(coefficients + 3 * CHANNELS + channel, scale, mask=inside)
    old_mean = tl.load(running_mean + channel, mask=inside)
    tl.store(running_mean + channel, old_mean + momentum * (mean - old_mean), mask=inside)
    old_variance = tl.load(running_variance + channel, mask=inside)
    unbiased = deviations / (num_pixels - 1)
    tl.store(running_variance + channel, old_variance + momentum * (unbiased - old_variance), mask=inside)


@triton.jit(do_not_specialize=["num_pixels"])
def _norm_gelu(  # type: ignore[no-untyped-def]
    pooled,
    outputs,
    coefficients,
    num_pixels,
    CHANNELS: tl.constexpr,
    PADDED: tl.constexpr,
    PIXELS: tl.constexpr,
):
    # From the end: what the pass before touched last is still in the cache.
    pixel = (tl.num_programs(0) - 1 - tl.program_id(0)) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, PADDED)
    inside = tile_mask(pixel, num_pixels, channel, CHANNELS, PADDED)
    place = pixel.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    value = tl.load(pooled + place, mask=inside, other=0.0).to(tl.float32)
    mean, factor = table_row(coefficients, 0, channel, CHANNELS), table_row(coefficients, 1, channel, CHANNELS)
    normed = (value - mean[None, :]) * factor[None, :] + table_row(coefficients, 2, channel, CHANNELS)[None, :]
    share, _ = normal_share_and_density(normed)
    tl.store(outputs + place, (normed * share).to(outputs.dtype.element_ty), mask=inside)


def pooled_with_statistics(inputs: Tensor, norm: nn.BatchNorm2d, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The maxima and their places (the inputs themselves where there are none), and the norm's coefficients."""
    batch, channels, height, width = inputs.shape
    pooled, choices = inputs, inputs
    if size == 2:
        pooled = empty_channels_last((batch, channels, height // 2, width // 2), inputs.dtype, inputs.device)
        choices = torch.empty_like(pooled, dtype=torch.uint8)
    num_pixels, shape = tile_sizes(pooled, POOL_CUT)
    programs = min(triton.cdiv(num_pixels, shape["PIXELS"]), POOL_CUT.most_programs)
    moments = inputs.new_empty((programs, 2, channels), dtype=torch.float32)
    _pool_and_moments[(programs,)](
        inputs,
        pooled,
        choices,
        moments,
        num_pixels,
        HEIGHT=height,
        WIDTH=width,
        POOL=size,
        **shape,
        num_warps=POOL_CUT.num_warps,
    )
    coefficients = inputs.new_empty((4, channels), dtype=torch.float32)
    _join_moments[(triton.cdiv(channels, CHANNELS_JOINED),)](
        moments,
        coefficients,
        norm.weight,
        norm.bias,
        norm.running_mean,
        norm.running_var,
        norm.momentum,
        norm.eps,
        programs,
        num_pixels,
        CHANNELS=channels,
        PIXELS=shape["PIXELS"],
        BLOCK=CHANNELS_JOINED,
        ROWS=ROWS_JOINED,
        num_warps=JOIN_WARPS,
    )
    return pooled, choices, coefficients


def normed_gelu(pooled: Tensor, coefficients: Tensor) -> Tensor:
    outputs = torch.empty_like(pooled)
    num_pixels, shape = tile_sizes(pooled, NORM_CUT)
    grid = (triton.cdiv(num_pixels, shape["PIXELS"]),)
    _norm_gelu[grid](pooled, outputs, coefficients, num_pixels, **shape, num_warps=NORM_CUT.num_warps)
    return outputs


def tile_sizes(pooled: Tensor, cut: Cut) -> tuple[int, dict[str, int]]:
    """Number of pixels; channels, those as a power of two, and pixels at a time."""
    channels = pooled.shape[1]
    padded = triton.next_power_of_2(channels)
    num_pixels = pooled.shape[0] * pooled.shape[2] * pooled.shape[3]
    return num_pixels, {"CHANNELS": channels, "PADDED": padded, "PIXELS": max(1, cut.elements // padded)}


def empty_channels_last(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device, memory_format=torch.channels_last)
