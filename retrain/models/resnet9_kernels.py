"""Triton kernels for the ResNet-9 in eval mode: a convolution's 2x2 maximum, BatchNorm and GELU in one pass.

torch's own kernels read and write the convolution's output three times over, and take longer than the convolutions do.
`pool_norm_gelu` follows any convolution, with gradients too. The two convolutions of the first group have so few
channels that memory limits them, so `pooled_convolution` and `plain_convolution` do all of it without ever writing the
convolution's output. This module is imported on CUDA only. Everything is channels-last: a pixel's channels are
neighbours in memory. Sizes that change with the batch are not specialised on: another batch compiles nothing.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Tile(NamedTuple):
    """How a kernel that convolves is cut up: the output pixels of one program, and what Triton is told about it."""

    pixels: int
    num_warps: int
    num_stages: int


# Cut for an H200's shared memory and registers.
POOLED_TILE = Tile(pixels=64, num_warps=4, num_stages=1)
POOLED_PROGRAMS = 2  # on each multiprocessor, as many as fit: one computes while the other reads
PLAIN_TILE = Tile(pixels=128, num_warps=4, num_stages=3)
PIXELS_TIMES_CHANNELS = 4096  # elements of the output that one program of pool_norm_gelu makes
CELLS_TIMES_CHANNELS = 4096  # and those of the pooled gradient that one program of its backward pass reads
BACKWARD_WARPS = 8

WHITENED_CHANNELS, FIRST_WIDTH = 24, 64  # what the kernels that convolve are written for
ROOT_HALF = tl.constexpr(0.7071067811865476)
ROOT_TWO_PI = tl.constexpr(2.5066282746310002)


# A BatchNorm's weight, bias, mean, variance and epsilon.
NormArguments = tuple[Tensor, Tensor, Tensor | None, Tensor | None, float]


@triton.jit
def factor_and_offset(norm_weight, norm_bias, norm_mean, norm_variance, eps, channel, inside):  # type: ignore[no-untyped-def]
    """BatchNorm in eval mode is value * factor + offset."""
    variance = tl.load(norm_variance + channel, mask=inside, other=1.0)
    factor = tl.load(norm_weight + channel, mask=inside, other=0.0) / tl.sqrt(variance + eps)
    mean = tl.load(norm_mean + channel, mask=inside, other=0.0)
    return factor, tl.load(norm_bias + channel, mask=inside, other=0.0) - mean * factor


@triton.jit
def gelu(value):  # type: ignore[no-untyped-def]
    return 0.5 * value * (1.0 + tl.math.erf(value * ROOT_HALF))


# ---- after a convolution of any shape ----


@triton.jit(do_not_specialize=["num_pixels"])
def _pool_norm_gelu(  # type: ignore[no-untyped-def]
    inputs, outputs, norm_weight, norm_bias, norm_mean, norm_variance, eps, num_pixels,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr, POOL: tl.constexpr,
    PIXELS: tl.constexpr,
):  # fmt: skip
    """A program makes PIXELS pixels of the output; CHANNELS is rounded up to PADDED, a power of two."""
    OUT_HEIGHT: tl.constexpr = HEIGHT // POOL
    OUT_WIDTH: tl.constexpr = WIDTH // POOL
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, PADDED)
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
    factor, offset = factor_and_offset(
        norm_weight, norm_bias, norm_mean, norm_variance, eps, channel, channel < CHANNELS
    )
    value = gelu(value * factor[None, :] + offset[None, :])
    target = outputs + pixel.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(target, value.to(outputs.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_cells"])
def _pool_norm_gelu_backward(  # type: ignore[no-untyped-def]
    inputs, output_gradient, input_gradient, bias_gradient, norm_weight, norm_bias, norm_mean, norm_variance, eps,
    num_cells,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr, POOL: tl.constexpr,
    CELLS: tl.constexpr,
):  # fmt: skip
    """A cell is what one pixel of the output comes from, or the rest of a row or column that no maximum reads.

    `bias_gradient` is (programs, CHANNELS): each program's own sum over its cells.
    """
    OUT_HEIGHT: tl.constexpr = HEIGHT // POOL
    OUT_WIDTH: tl.constexpr = WIDTH // POOL
    CELL_ROWS: tl.constexpr = (HEIGHT + POOL - 1) // POOL
    CELL_COLUMNS: tl.constexpr = (WIDTH + POOL - 1) // POOL
    cell = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    channel = tl.arange(0, PADDED)
    image = (cell // (CELL_ROWS * CELL_COLUMNS)).to(tl.int64)
    row, column = cell // CELL_COLUMNS % CELL_ROWS, cell % CELL_COLUMNS
    exists = (cell < num_cells)[:, None] & (channel < CHANNELS)[None, :]
    whole = exists & (row < OUT_HEIGHT)[:, None] & (column < OUT_WIDTH)[:, None]

    first = image * (HEIGHT * WIDTH * CHANNELS) + (row * POOL * WIDTH + column * POOL) * CHANNELS
    place = first[:, None] + channel[None, :]
    source = inputs + place
    value = tl.load(source, mask=whole, other=0.0).to(tl.float32)
    if POOL == 2:
        first_value = value
        second_value = tl.load(source + CHANNELS, mask=whole, other=0.0).to(tl.float32)
        third_value = tl.load(source + WIDTH * CHANNELS, mask=whole, other=0.0).to(tl.float32)
        fourth_value = tl.load(source + (WIDTH + 1) * CHANNELS, mask=whole, other=0.0).to(tl.float32)
        value = tl.maximum(tl.maximum(first_value, second_value), tl.maximum(third_value, fourth_value))

    factor, offset = factor_and_offset(
        norm_weight, norm_bias, norm_mean, norm_variance, eps, channel, channel < CHANNELS
    )
    normed = value * factor[None, :] + offset[None, :]
    share = 0.5 * (1.0 + tl.math.erf(normed * ROOT_HALF))  # the normal distribution function, GELU's x's factor
    slope = share + normed * tl.exp(-0.5 * normed * normed) / ROOT_TWO_PI
    out_pixel = image * (OUT_HEIGHT * OUT_WIDTH) + row * OUT_WIDTH + column
    upstream = output_gradient + out_pixel[:, None] * CHANNELS + channel[None, :]
    normed_gradient = tl.load(upstream, mask=whole, other=0.0).to(tl.float32) * slope
    partial = bias_gradient + tl.program_id(0).to(tl.int64) * CHANNELS + channel
    tl.store(partial, tl.sum(normed_gradient, axis=0), mask=channel < CHANNELS)

    gradient = (normed_gradient * factor[None, :]).to(input_gradient.dtype.element_ty)
    target = input_gradient + place
    if POOL == 1:
        tl.store(target, gradient, mask=exists)
    else:  # to the first of equal maxima, row by row, as torch does
        in_first = first_value == value
        in_second = (second_value == value) & ~in_first
        in_third = (third_value == value) & ~in_first & ~in_second
        in_fourth = ~(in_first | in_second | in_third)
        zero = tl.zeros_like(gradient)
        has_right = exists & (column * 2 + 1 < WIDTH)[:, None]
        has_below = exists & (row * 2 + 1 < HEIGHT)[:, None]
        tl.store(target, tl.where(in_first, gradient, zero), mask=exists)
        tl.store(target + CHANNELS, tl.where(in_second, gradient, zero), mask=has_right)
        tl.store(target + WIDTH * CHANNELS, tl.where(in_third, gradient, zero), mask=has_below)
        tl.store(target + (WIDTH + 1) * CHANNELS, tl.where(in_fourth, gradient, zero), mask=has_right & has_below)


class _PoolNormGelu(torch.autograd.Function):
    """Keeps the convolution's output alone: all else is computed again, in registers, on the way back."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, norm_bias: Tensor, norm: nn.BatchNorm2d, pool: bool) -> Tensor:
        inputs = _channels_last(inputs)
        ctx.save_for_backward(inputs)
        ctx.norm, ctx.size = _arguments(norm), 2 if pool else 1
        return pooled_normed(inputs, ctx.norm, ctx.size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (inputs,) = ctx.saved_tensors
        input_gradient, bias_gradient = _pool_norm_gelu_gradient(inputs, output_gradient, ctx.norm, ctx.size)
        return input_gradient, bias_gradient, None, None


def _pool_norm_gelu_gradient(
    inputs: Tensor, output_gradient: Tensor, norm: NormArguments, size: int
) -> tuple[Tensor, Tensor]:
    """Of the inputs and of the norm's bias."""
    batch, channels, height, width = inputs.shape
    input_gradient = torch.empty_like(inputs)
    num_cells = batch * triton.cdiv(height, size) * triton.cdiv(width, size)
    padded = triton.next_power_of_2(channels)
    cells = max(1, CELLS_TIMES_CHANNELS // padded)
    num_programs = triton.cdiv(num_cells, cells)
    # Sums over a program's cells are added up afterwards: adding them in place would depend on who comes first.
    partial = inputs.new_empty((num_programs, channels), dtype=torch.float32)
    _pool_norm_gelu_backward[(num_programs,)](
        inputs, _channels_last(output_gradient), input_gradient, partial, *norm, num_cells,
        HEIGHT=height, WIDTH=width, CHANNELS=channels, PADDED=padded, POOL=size, CELLS=cells,
        num_warps=BACKWARD_WARPS,
    )  # fmt: skip
    return input_gradient, partial.sum(0)


def pool_norm_gelu(inputs: Tensor, norm: nn.BatchNorm2d, pool: bool) -> Tensor:
    """GELU(norm(max_pool2d(inputs, 2))), without the maximum if not `pool`; (batch, channels, height, width).

    Differentiable in the inputs and in the norm's bias; the norm's weight and statistics are taken as fixed.
    """
    if torch.is_grad_enabled():
        return _PoolNormGelu.apply(inputs, norm.bias, norm, pool)
    return pooled_normed(_channels_last(inputs), _arguments(norm), 2 if pool else 1)


def pooled_normed(inputs: Tensor, norm: NormArguments, size: int) -> Tensor:
    """GELU(norm(maximum)) of channels-last `inputs`, by given statistics."""
    batch, channels, height, width = inputs.shape
    outputs = _empty((batch, channels, height // size, width // size), inputs)
    num_pixels = batch * outputs.shape[2] * outputs.shape[3]
    padded = triton.next_power_of_2(channels)
    pixels = max(1, PIXELS_TIMES_CHANNELS // padded)
    _pool_norm_gelu[(triton.cdiv(num_pixels, pixels),)](
        inputs, outputs, *norm, num_pixels,
        HEIGHT=height, WIDTH=width, CHANNELS=channels, PADDED=padded, POOL=size, PIXELS=pixels,
    )  # fmt: skip
    return outputs


# ---- the first group, convolutions and all ----


@triton.jit(do_not_specialize=["num_pixels"])
def _pooled_convolution(  # type: ignore[no-untyped-def]
    inputs, weights, outputs, norm_weight, norm_bias, norm_mean, norm_variance, eps, num_pixels,
    SIZE: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    PIXELS: tl.constexpr,
):  # fmt: skip
    """A program makes PIXELS pooled pixels, each the maximum of 2x2 positions of the convolution, and then PIXELS more.

    `inputs` (images, SIZE, SIZE, IN) have a border of zeros above and on the left. The two positions in a row together
    read 4 neighbouring pixels from each of 3 rows: 4 * IN = NEAR + FAR numbers in one piece, two powers of two.
    `weights` (OUT, 2, 3, 4, IN) has both positions' filters, each with zeros for the pixel that only the other one
    reads; a program reads them once for all of its tiles.
    """
    OUT_SIZE: tl.constexpr = SIZE // 2 - 1
    ROW: tl.constexpr = SIZE * IN
    near, far, output = tl.arange(0, NEAR), NEAR + tl.arange(0, FAR), tl.arange(0, OUT)
    filters = weights + tl.arange(0, 2 * OUT)[None, :] * (12 * IN)
    near_filters_0 = tl.load(filters + near[:, None])
    near_filters_1 = tl.load(filters + 4 * IN + near[:, None])
    near_filters_2 = tl.load(filters + 8 * IN + near[:, None])
    far_filters_0 = tl.load(filters + far[:, None])
    far_filters_1 = tl.load(filters + 4 * IN + far[:, None])
    far_filters_2 = tl.load(filters + 8 * IN + far[:, None])
    factor, offset = factor_and_offset(norm_weight, norm_bias, norm_mean, norm_variance, eps, output, output < OUT)

    for tile in range(tl.program_id(0), tl.cdiv(num_pixels, PIXELS), tl.num_programs(0)):
        wanted = tile * PIXELS + tl.arange(0, PIXELS)
        pixel = tl.minimum(wanted, num_pixels - 1)  # past the end the last one is computed again, and not stored
        image = (pixel // (OUT_SIZE * OUT_SIZE)).to(tl.int64)
        row, column = pixel // OUT_SIZE % OUT_SIZE, pixel % OUT_SIZE
        first = image * (SIZE * ROW) + (row * 2 * SIZE + column * 2) * IN
        near_source = inputs + first[:, None] + near[None, :]
        far_source = inputs + first[:, None] + far[None, :]
        upper = tl.zeros([PIXELS, 2 * OUT], tl.float32)  # both positions of the upper row, and of the lower one
        lower = tl.zeros([PIXELS, 2 * OUT], tl.float32)
        # Two rows at a time: reading all four at once needs more shared memory than leaves room for a second program.
        near_0, near_1 = tl.load(near_source), tl.load(near_source + ROW)
        far_0, far_1 = tl.load(far_source), tl.load(far_source + ROW)
        upper = tl.dot(near_0, near_filters_0, upper)
        upper = tl.dot(far_0, far_filters_0, upper)
        upper = tl.dot(near_1, near_filters_1, upper)
        upper = tl.dot(far_1, far_filters_1, upper)
        lower = tl.dot(near_1, near_filters_0, lower)
        lower = tl.dot(far_1, far_filters_0, lower)
        near_2, near_3 = tl.load(near_source + 2 * ROW), tl.load(near_source + 3 * ROW)
        far_2, far_3 = tl.load(far_source + 2 * ROW), tl.load(far_source + 3 * ROW)
        upper = tl.dot(near_2, near_filters_2, upper)
        upper = tl.dot(far_2, far_filters_2, upper)
        lower = tl.dot(near_2, near_filters_1, lower)
        lower = tl.dot(far_2, far_filters_1, lower)
        lower = tl.dot(near_3, near_filters_2, lower)
        lower = tl.dot(far_3, far_filters_2, lower)
        left, right = tl.split(tl.reshape(tl.maximum(upper, lower), [PIXELS, OUT, 2]))
        value = gelu(tl.maximum(left, right) * factor[None, :] + offset[None, :])
        target = outputs + wanted.to(tl.int64)[:, None] * OUT + output[None, :]
        tl.store(target, value.to(outputs.dtype.element_ty), mask=(wanted < num_pixels)[:, None])


@triton.jit(do_not_specialize=["num_pixels"])
def _plain_convolution(  # type: ignore[no-untyped-def]
    inputs, weights, outputs, norm_weight, norm_bias, norm_mean, norm_variance, eps, num_pixels,
    SIZE: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """A program makes PIXELS pixels: `inputs` (images, SIZE, SIZE, IN), `weights` (OUT, 3, 3, IN)."""
    wanted = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    pixel = tl.minimum(wanted, num_pixels - 1)  # past the end the last one is computed again, and not stored
    row, column = pixel // SIZE % SIZE, pixel % SIZE
    channel, output = tl.arange(0, IN), tl.arange(0, OUT)
    source = inputs + pixel.to(tl.int64)[:, None] * IN + channel[None, :]
    filters = weights + channel[:, None] + output[None, :] * (9 * IN)

    total = tl.zeros([PIXELS, OUT], tl.float32)
    for tap in range(9):
        down, right = tap // 3 - 1, tap % 3 - 1
        inside = (row + down >= 0) & (row + down < SIZE) & (column + right >= 0) & (column + right < SIZE)
        # Through the L1 cache, which asynchronous copies avoid unless told so: the nine taps read nearly the same.
        place = source + (down * SIZE + right) * IN
        read = tl.load(place, mask=inside[:, None], other=0.0, cache_modifier=".ca")
        total = tl.dot(read, tl.load(filters + tap * IN, cache_modifier=".ca"), total)

    factor, offset = factor_and_offset(norm_weight, norm_bias, norm_mean, norm_variance, eps, output, output < OUT)
    value = gelu(total * factor[None, :] + offset[None, :])
    target = outputs + wanted.to(tl.int64)[:, None] * OUT + output[None, :]
    tl.store(target, value.to(outputs.dtype.element_ty), mask=(wanted < num_pixels)[:, None])


def covers_pooled(bordered: Tensor, convolution: nn.Conv2d, pool: bool) -> bool:
    """Whether `pooled_convolution` takes this; bordered images of even size lack nothing that the maximum reads."""
    channels = (convolution.in_channels, convolution.out_channels)
    even = bordered.shape[2] == bordered.shape[3] and bordered.shape[2] % 2 == 0
    return pool and even and channels == (WHITENED_CHANNELS, FIRST_WIDTH)


def covers_plain(inputs: Tensor, convolution: nn.Conv2d, pool: bool) -> bool:
    """Whether `plain_convolution` takes this."""
    channels = (convolution.in_channels, convolution.out_channels)
    square = inputs.shape[2] == inputs.shape[3]
    return not pool and square and channels == (FIRST_WIDTH, FIRST_WIDTH)


def pooled_convolution(bordered: Tensor, weight: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """GELU(norm(max_pool2d(conv2d(bordered, weight), 2))), without gradients; see `covers_pooled`.

    `bordered` is (batch, 24, size, size) with zeros in its first row and column, `weight` (64, 24, 3, 3), both of the
    dtype to multiply in; sums are float32.
    """
    batch, in_channels, size, _ = bordered.shape
    out_channels, out_size = len(weight), size // 2 - 1
    outputs = _empty((batch, out_channels, out_size, out_size), bordered)
    filters = weight.permute(0, 2, 3, 1)  # (out, row, column, in)
    both = torch.stack((F.pad(filters, (0, 0, 0, 1)), F.pad(filters, (0, 0, 1, 0))), dim=1)
    num_pixels = batch * out_size * out_size
    _pooled_convolution[(min(triton.cdiv(num_pixels, POOLED_TILE.pixels), _most_programs(bordered.device)),)](
        _channels_last(bordered), both.contiguous(), outputs, *_arguments(norm), num_pixels,
        SIZE=size, IN=in_channels, OUT=out_channels, NEAR=64, FAR=4 * in_channels - 64, PIXELS=POOLED_TILE.pixels,
        num_warps=POOLED_TILE.num_warps, num_stages=POOLED_TILE.num_stages,
    )  # fmt: skip
    return outputs


def plain_convolution(inputs: Tensor, weight: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """GELU(norm(conv2d(inputs, weight, padding=1))), without gradients; see `covers_plain`.

    `inputs` is (batch, 64, size, size), `weight` (64, 64, 3, 3), both of the dtype to multiply in; sums are float32.
    """
    batch, in_channels, size, _ = inputs.shape
    outputs = _empty((batch, len(weight), size, size), inputs)
    num_pixels = batch * size * size
    _plain_convolution[(triton.cdiv(num_pixels, PLAIN_TILE.pixels),)](
        _channels_last(inputs), _channels_last(weight), outputs, *_arguments(norm), num_pixels,
        SIZE=size, IN=in_channels, OUT=len(weight), PIXELS=PLAIN_TILE.pixels, num_warps=PLAIN_TILE.num_warps,
        num_stages=PLAIN_TILE.num_stages,
    )  # fmt: skip
    return outputs


def _most_programs(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 2
    return POOLED_PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count


def _arguments(norm: nn.BatchNorm2d) -> NormArguments:
    return norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def _empty(shape: tuple[int, int, int, int], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)
