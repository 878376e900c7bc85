"""Triton kernels for the ResNet-9 in training; `resnet9_kernels` has those for looking at a trained one.

Each part below begins with what it replaces. Sums are joined in a fixed order, so that the same batch gives the same
bits. As in `resnet9_kernels`, everything is channels-last, and another batch size compiles nothing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# ---- what follows a convolution ----
#
# torch pools, takes moments, norms and applies GELU in kernels of their own, and half of a training step goes to them.
# Here it is two passes over memory, with a tiny kernel between them where the programs' sums meet: `_pool_and_moments`
# takes maxima and moments, `_join_moments` makes the norm's coefficients of them, `_norm_gelu` applies those.


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
    inputs, pooled, choices, moments, num_pixels,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr, POOL: tl.constexpr,
    PIXELS: tl.constexpr,
):  # fmt: skip
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
    moments, coefficients, norm_weight, norm_bias, running_mean, running_variance, momentum, eps, num_rows,
    num_pixels,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
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
    pooled, outputs, coefficients, num_pixels,
    CHANNELS: tl.constexpr, PADDED: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
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
        inputs, pooled, choices, moments, num_pixels,
        HEIGHT=height, WIDTH=width, POOL=size, **shape, num_warps=POOL_CUT.num_warps,
    )  # fmt: skip
    coefficients = inputs.new_empty((4, channels), dtype=torch.float32)
    _join_moments[(triton.cdiv(channels, CHANNELS_JOINED),)](
        moments, coefficients, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.momentum, norm.eps,
        programs, num_pixels,
        CHANNELS=channels, PIXELS=shape["PIXELS"], BLOCK=CHANNELS_JOINED, ROWS=ROWS_JOINED, num_warps=JOIN_WARPS,
    )  # fmt: skip
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


# ---- the way back through it ----
#
# As on the way there, two passes over memory and a tiny kernel between them: `_gradient_sums` and `_join_sums` find how
# the batch's statistics answer to a change, `_spread_gradient` puts each gradient where its maximum came from. Its
# place was kept for that, a byte each, and the convolution's output, four times as many numbers, was not.


SUMS_CUT = Cut(elements=1024, num_warps=2, most_programs=528)
SPREAD_CUT = Cut(elements=512, num_warps=2)


@triton.jit(do_not_specialize=["num_pixels"])
def _gradient_sums(  # type: ignore[no-untyped-def]
    pooled, output_gradient, coefficients, sums, num_pixels,
    CHANNELS: tl.constexpr, PADDED: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
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
    sums, coefficients, gradients, num_rows, num_pixels,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
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
    pooled, choices, output_gradient, input_gradient, coefficients, gradients, num_pixels,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr, POOL: tl.constexpr,
    PIXELS: tl.constexpr,
):  # fmt: skip
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
        sums, coefficients, gradients, programs, num_pixels,
        CHANNELS=channels, BLOCK=CHANNELS_JOINED, ROWS=ROWS_JOINED, num_warps=JOIN_WARPS,
    )  # fmt: skip
    return gradients


def spread_gradient(
    pooled: Tensor, choices: Tensor, output_gradient: Tensor, coefficients: Tensor, gradients: Tensor,
    shape: tuple[int, int, int, int], size: int,
) -> Tensor:  # fmt: skip
    """The gradient of the convolution's output, which has this shape."""
    input_gradient = empty_channels_last(shape, pooled.dtype, pooled.device)
    num_pixels, sizes = tile_sizes(pooled, SPREAD_CUT)
    _spread_gradient[(triton.cdiv(num_pixels, sizes["PIXELS"]),)](
        pooled, choices, output_gradient, input_gradient, coefficients, gradients, num_pixels,
        HEIGHT=shape[2], WIDTH=shape[3], POOL=size, **sizes, num_warps=SPREAD_CUT.num_warps,
    )  # fmt: skip
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


# ---- what the network reads ----
#
# By torch's kernels every batch is gathered, convolved, given its bias and put through GELU, each a way through memory;
# here a pixel is read from the images that lie on the device, wherever shift and flip say, and the result written once.


PIXELS_WHITENED, WHITENING_WARPS = 256, 4
FILTERS_AT_A_TIME = 8  # a thread then has whole pixels, and writes sixteen bytes


# A batch begins anywhere in its epoch's plan: whether at a multiple of 16 bytes is not specialised on either.
@triton.jit(do_not_specialize=["plan", "num_pixels", "plan_stride"])
def _whitened(  # type: ignore[no-untyped-def]
    images, plan, table, filters, bias, outputs, num_pixels, plan_stride,
    SIZE: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr, KERNEL: tl.constexpr, BLOCK: tl.constexpr,
    PIXELS: tl.constexpr,
):  # fmt: skip
    """A program makes PIXELS pixels of `outputs` (batch, size, size, CHANNELS); `filters` is (KERNEL, KERNEL, PARTS,
    CHANNELS), `images` (n, SIZE, SIZE, PARTS). `plan` and `table` are those of `TrainingImages.augmented`."""
    OUT_SIZE: tl.constexpr = SIZE - KERNEL + 1
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    there = pixel < num_pixels
    member = pixel // (OUT_SIZE * OUT_SIZE)
    image = tl.load(plan + member, mask=there, other=0)
    rows = table + tl.load(plan + plan_stride + member, mask=there, other=0) * SIZE + pixel // OUT_SIZE % OUT_SIZE
    columns = table + tl.load(plan + 2 * plan_stride + member, mask=there, other=0) * SIZE + pixel % OUT_SIZE
    for block in tl.static_range(0, CHANNELS, BLOCK):
        channel = block + tl.arange(0, BLOCK)
        total = tl.zeros([PIXELS, BLOCK], tl.float32)
        for down in tl.static_range(KERNEL):
            row = tl.load(rows + down, mask=there, other=0)
            for right in tl.static_range(KERNEL):
                column = tl.load(columns + right, mask=there, other=0)
                source = images + ((image * SIZE + row) * SIZE + column) * PARTS
                for part in tl.static_range(PARTS):
                    value = tl.load(source + part, mask=there, other=0.0).to(tl.float32)
                    place = ((down * KERNEL + right) * PARTS + part) * CHANNELS + channel
                    total += value[:, None] * tl.load(filters + place, mask=channel < CHANNELS, other=0.0)[None, :]
        total += tl.load(bias + channel, mask=channel < CHANNELS, other=0.0)[None, :]
        # The convolution's output has the outputs' precision, as cuDNN's has.
        value = total.to(outputs.dtype.element_ty).to(tl.float32)
        share, _ = normal_share_and_density(value)
        target = outputs + pixel.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        inside = there[:, None] & (channel < CHANNELS)[None, :]
        tl.store(target, (value * share).to(outputs.dtype.element_ty), mask=inside)


def filters_for(whiten: nn.Conv2d, dtype: torch.dtype) -> Tensor:
    """The filters as `whitened_batch` takes them: rounded to the dtype of the images."""
    return whiten.weight.detach().to(dtype).float().permute(2, 3, 1, 0).contiguous()


def whitened_batch(images: Tensor, plan: Tensor, table: Tensor, filters: Tensor, bias: Tensor) -> Tensor:
    """GELU(whitening of the augmented batch): (batch, channels, size, size), channels-last, of the images' dtype.

    `images` is (n, size, size, channels) and contiguous; `plan` (3, batch) says which images, and which rows of `table`
    say what pixels are read of each; `filters` are from `filters_for`.
    """
    size, parts = images.shape[2:]
    kernel, _, _, channels = filters.shape
    batch, out_size = plan.shape[1], size - kernel + 1
    assert all(tensor.is_contiguous() for tensor in (images, table, filters, plan[0]))
    shape = (batch, channels, out_size, out_size)
    outputs = torch.empty(shape, dtype=images.dtype, device=images.device, memory_format=torch.channels_last)
    num_pixels = batch * out_size * out_size
    _whitened[(triton.cdiv(num_pixels, PIXELS_WHITENED),)](
        images, plan, table, filters, bias, outputs, num_pixels, plan.stride(0),
        SIZE=size, PARTS=parts, CHANNELS=channels, KERNEL=kernel, BLOCK=FILTERS_AT_A_TIME, PIXELS=PIXELS_WHITENED,
        num_warps=WHITENING_WARPS,
    )  # fmt: skip
    return outputs


# ---- the end of the network ----
#
# Training needs the loss's gradients and never its value. With torch's kernels that is some thirty tiny ones, one after
# another; no image needs another one, so here one kernel takes each of them there and back.


HEAD_PROGRAMS, HEAD_WARPS = 528, 4  # each leaves one gradient of the head to be added up
COLUMNS_SUMMED, ROWS_SUMMED, SUM_WARPS = 8, 512, 4


@triton.jit(do_not_specialize=["members", "num_images"])  # members: see _whitened
def _head_gradients(  # type: ignore[no-untyped-def]
    hidden, weights, members, labels, hidden_gradient, weight_gradients, scale, smoothing, num_images,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr, CLASSES: tl.constexpr,
    PADDED_CLASSES: tl.constexpr,
):  # fmt: skip
    """`hidden` is (num_images, PIXELS, CHANNELS), `weight_gradients` (programs, CLASSES, CHANNELS)."""
    channel, label = tl.arange(0, PADDED), tl.arange(0, PADDED_CLASSES)
    inside, real = channel < CHANNELS, label < CLASSES
    table = label[:, None] * CHANNELS + channel[None, :]
    both = real[:, None] & inside[None, :]
    weight = tl.load(weights + table, mask=both, other=0.0)
    weight_gradient = tl.zeros([PADDED_CLASSES, PADDED], tl.float32)
    for image in range(tl.program_id(0), num_images, tl.num_programs(0)):
        start = (image + tl.zeros([PADDED], tl.int64)) * (PIXELS * CHANNELS) + channel
        right = tl.load(labels + tl.load(members + image))
        largest = tl.load(hidden + start, mask=inside, other=0.0).to(tl.float32)
        choice = tl.zeros([PADDED], tl.int32)
        for pixel in tl.static_range(1, PIXELS):
            value = tl.load(hidden + start + pixel * CHANNELS, mask=inside, other=0.0).to(tl.float32)
            choice = tl.where(value > largest, pixel, choice)
            largest = tl.maximum(value, largest)
        logits = scale * tl.sum(weight * largest[None, :], axis=1)
        logits = tl.where(real, logits, float("-inf"))
        shares = tl.exp(logits - tl.max(logits, axis=0))
        shares = shares / tl.sum(shares, axis=0)
        wanted = tl.where(label == right, 1.0 - smoothing, 0.0) + smoothing / CLASSES
        gradient = tl.where(real, scale * (shares - wanted), 0.0)
        weight_gradient += gradient[:, None] * largest[None, :]
        back = tl.sum(weight * gradient[:, None], axis=0).to(hidden_gradient.dtype.element_ty)
        for pixel in tl.static_range(PIXELS):
            target = hidden_gradient + start + pixel * CHANNELS
            tl.store(target, tl.where(choice == pixel, back, tl.zeros_like(back)), mask=inside)
    own = weight_gradients + tl.program_id(0).to(tl.int64) * (CLASSES * CHANNELS) + table
    tl.store(own, weight_gradient, mask=both)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_of_rows(rows, total, num_rows, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    found = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_rows, ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < num_rows)[:, None] & inside[None, :]
        place = rows + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        found += tl.sum(tl.load(place, mask=there, other=0.0), axis=0)
    tl.store(total + column, found, mask=inside)


def head_gradients(
    hidden: Tensor, weight: Tensor, members: Tensor, labels: Tensor, scale: float, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Of `hidden` (batch, channels, height, width) and of the head's float32 `weight` (classes, channels).

    The loss is the summed cross-entropy, smoothed, of scale * weight @ (maximum over the pixels), all in float32; the
    labels are `labels[members]`.
    """
    hidden = hidden.contiguous(memory_format=torch.channels_last)
    batch, channels, height, width = hidden.shape
    assert all(tensor.is_contiguous() for tensor in (weight, members, labels))
    hidden_gradient = torch.empty_like(hidden)
    programs = min(batch, HEAD_PROGRAMS)
    rows = weight.new_empty((programs, *weight.shape))
    _head_gradients[(programs,)](
        hidden, weight, members, labels, hidden_gradient, rows, scale, smoothing, batch,
        PIXELS=height * width, CHANNELS=channels, PADDED=triton.next_power_of_2(channels), CLASSES=len(weight),
        PADDED_CLASSES=triton.next_power_of_2(len(weight)), num_warps=HEAD_WARPS,
    )  # fmt: skip
    weight_gradient = torch.empty_like(weight)
    _sum_of_rows[(triton.cdiv(weight.numel(), COLUMNS_SUMMED),)](
        rows, weight_gradient, programs,
        COLUMNS=weight.numel(), BLOCK=COLUMNS_SUMMED, ROWS=ROWS_SUMMED, num_warps=SUM_WARPS,
    )  # fmt: skip
    return hidden_gradient, weight_gradient


# ---- the update of the parameters ----
#
# SGD with Nesterov momentum, all parameters at once. The convolutions' weights also exist in the precision that
# convolutions compute in; the kernel writes both, so that nothing is cast on the way into or out of a convolution.


ELEMENTS_UPDATED, UPDATE_WARPS = 1024, 4


class Rates(NamedTuple):
    """Of a group of parameters: its step at the full learning rate, and how much of a weight joins its gradient."""

    step_size: float
    decay: float


@triton.jit(do_not_specialize=["factor"])  # one of a training's factors, wherever it lies in memory
def _update(  # type: ignore[no-untyped-def]
    parameters, momenta, gradients, copies, factor, momentum, bias_step, bias_decay, other_step, other_decay,
    SIZES: tl.constexpr, NUM_BIASES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
    parameters: Sequence[Tensor], momenta: Sequence[Tensor], gradients: Sequence[Tensor], copies: Sequence[Tensor],
    factor: Tensor, momentum: float, num_biases: int, biases: Rates, others: Rates,
) -> None:  # fmt: skip
    """One step of all `parameters`, of which the first `num_biases` are biases; `factor` () scales both groups' steps.

    A gradient may be of lower precision; `copies[i]` gets the new `parameters[i]`, rounded, or is that very tensor.
    """
    for one, *beside in zip(parameters, momenta, gradients, copies, strict=True):
        assert all(tensor.stride() == one.stride() for tensor in beside), "laid out differently in memory"
    sizes = tuple(one.numel() for one in parameters)
    _update[(sum(triton.cdiv(size, ELEMENTS_UPDATED) for size in sizes),)](
        tuple(parameters), tuple(momenta), tuple(gradients), tuple(copies), factor, momentum, *biases, *others,
        SIZES=sizes, NUM_BIASES=num_biases, BLOCK=ELEMENTS_UPDATED, num_warps=UPDATE_WARPS,
    )  # fmt: skip
