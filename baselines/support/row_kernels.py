"""Triton kernels for per-example gradients as the factors of matrix products. This module is imported on CUDA only."""

from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

BLOCK = 4096  # numbers of a row that one program takes
MOST_COLUMNS = 1024  # and of a patch


def rounded(rows: Tensor, factors: Tensor | None, out: Tensor) -> Tensor:
    """Writes rows * factors to `out` in bfloat16 and gives their norms, those of the numbers before they are rounded.

    A float32 product waits for memory: with factors of half the size it takes half as long. A number keeps 8 of TF32's
    11 bits, but is rounded where TF32 is cut off; and a score is a sum over as many numbers as the model has.
    """
    parts = triton.cdiv(rows.shape[1], BLOCK)
    squares = torch.empty(len(rows), parts, device=rows.device)
    _round[(parts * len(rows),)](
        rows, rows if factors is None else factors, out, squares,
        rows.stride(0), out.stride(0), rows.shape[1], parts, factors is not None, BLOCK, num_warps=8,
    )  # fmt: skip
    return squares.sum(1).sqrt()


@triton.jit
def _round(  # type: ignore[no-untyped-def]
    rows, factors, out, squares, row_stride, out_stride, length, parts, weighted: tl.constexpr, block: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    row, part = program // parts, program % parts
    place = part * block + tl.arange(0, block)
    inside = place < length
    value = tl.load(rows + row * row_stride + place, mask=inside, other=0.0)
    if weighted:
        value *= tl.load(factors + place, mask=inside, other=0.0)
    tl.store(out + row * out_stride + place, value.to(tl.bfloat16), mask=inside)
    tl.store(squares + program, tl.sum(value * value))


def patches(module: Any, inputs: Tensor) -> Tensor:
    """(batch, positions, in_channels * kernel) of a convolution, as `pieces.patches` has them."""
    (high, wide), (down, right) = module.kernel_size, module.stride
    (gap_down, gap_right), (above, beside) = module.dilation, module.padding
    batch, channels, height, width = inputs.shape
    rows = (height + 2 * above - gap_down * (high - 1) - 1) // down + 1
    columns = (width + 2 * beside - gap_right * (wide - 1) - 1) // right + 1
    size = channels * high * wide
    out = inputs.new_empty(batch, rows * columns, size)
    block = min(MOST_COLUMNS, triton.next_power_of_2(size))
    _patch[(batch * rows * columns, triton.cdiv(size, block))](
        inputs, out, *inputs.stride(), height, width, rows, columns, down, right, gap_down, gap_right, above, beside,
        size, high, wide, block, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _patch(  # type: ignore[no-untyped-def]
    images, out, of_image, of_channel, of_row, of_column, height, width, rows, columns, down, right, gap_down,
    gap_right, above, beside, size: tl.constexpr, high: tl.constexpr, wide: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    spot = tl.program_id(0)
    image = (spot // (rows * columns)).to(tl.int64)
    top = spot // columns % rows * down - above
    left = spot % columns * right - beside
    number = tl.program_id(1) * block + tl.arange(0, block)
    row = top + number // wide % high * gap_down
    column = left + number % wide * gap_right
    inside = (number < size) & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    place = number // (high * wide) * of_channel + row * of_row + column * of_column
    value = tl.load(images + image * of_image + place, mask=inside, other=0.0)
    tl.store(out + spot.to(tl.int64) * size + number, value, mask=number < size)
