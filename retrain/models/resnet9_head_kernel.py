"""Triton kernels for the end of the ResNet-9 in training: maximum, head, loss, and the way back to the last group.

Training needs the loss's gradients and never its value. With torch's kernels that is some thirty tiny ones, one after
another; no image needs another one, so here one kernel takes each of them there and back.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

HEAD_PROGRAMS, HEAD_WARPS = 528, 4  # each leaves one gradient of the head to be added up
COLUMNS_SUMMED, ROWS_SUMMED, SUM_WARPS = 8, 512, 4


@triton.jit(do_not_specialize=["members", "num_images"])  # members: see resnet9_input_kernel
def _head_gradients(  # type: ignore[no-untyped-def]
    hidden,
    weights,
    members,
    labels,
    hidden_gradient,
    weight_gradients,
    scale,
    smoothing,
    num_images,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED: tl.constexpr,
    CLASSES: tl.constexpr,
    PADDED_CLASSES: tl.constexpr,
):
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
        hidden,
        weight,
        members,
        labels,
        hidden_gradient,
        rows,
        scale,
        smoothing,
        batch,
        PIXELS=height * width,
        CHANNELS=channels,
        PADDED=triton.next_power_of_2(channels),
        CLASSES=len(weight),
        PADDED_CLASSES=triton.next_power_of_2(len(weight)),
        num_warps=HEAD_WARPS,
    )
    weight_gradient = torch.empty_like(weight)
    _sum_of_rows[(triton.cdiv(weight.numel(), COLUMNS_SUMMED),)](
        rows,
        weight_gradient,
        programs,
        COLUMNS=weight.numel(),
        BLOCK=COLUMNS_SUMMED,
        ROWS=ROWS_SUMMED,
        num_warps=SUM_WARPS,
    )
    return hidden_gradient, weight_gradient
