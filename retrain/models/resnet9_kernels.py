"""One Triton kernel for what follows a convolution of the ResNet-9: 2x2 maximum, BatchNorm (eval mode) and GELU.

torch's own three kernels read and write the convolution's output three times over, and take longer than the
convolutions do. This module is imported on CUDA only, when a forward pass needs no gradient.
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

PIXELS_TIMES_CHANNELS = 4096  # elements of the output that one program makes


@triton.jit
def _pool_norm_gelu(  # type: ignore[no-untyped-def]
    inputs,
    outputs,
    scale,
    shift,
    height,
    width,
    out_height,
    out_width,
    num_pixels,
    CHANNELS: tl.constexpr,
    PADDED: tl.constexpr,
    POOL: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """Both tensors are channels-last: a pixel's channels are neighbours in memory."""
    pixel = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, PADDED)
    inside = (pixel < num_pixels)[:, None] & (channel < CHANNELS)[None, :]
    image = pixel // (out_height * out_width)
    row = (pixel // out_width) % out_height
    column = pixel % out_width
    first = ((image * height + row * POOL) * width + column * POOL) * CHANNELS
    source = inputs + first[:, None] + channel[None, :]
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if POOL == 2:
        value = tl.maximum(value, tl.load(source + CHANNELS, mask=inside, other=0.0).to(tl.float32))
        below = source + width * CHANNELS
        value = tl.maximum(value, tl.load(below, mask=inside, other=0.0).to(tl.float32))
        value = tl.maximum(value, tl.load(below + CHANNELS, mask=inside, other=0.0).to(tl.float32))
    factor = tl.load(scale + channel, mask=channel < CHANNELS, other=0.0)
    offset = tl.load(shift + channel, mask=channel < CHANNELS, other=0.0)
    value = value * factor[None, :] + offset[None, :]
    value = 0.5 * value * (1.0 + tl.math.erf(value * 0.7071067811865476))
    target = outputs + pixel[:, None] * CHANNELS + channel[None, :]
    tl.store(target, value.to(outputs.dtype.element_ty), mask=inside)


def pool_norm_gelu(inputs: Tensor, norm: Any, pool: bool) -> Tensor:
    """GELU(norm(max_pool2d(inputs, 2))), without the maximum if not `pool`; (batch, channels, height, width)."""
    batch, channels, height, width = inputs.shape
    if not inputs.is_contiguous(memory_format=torch.channels_last):
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    size = 2 if pool else 1
    outputs = torch.empty(
        (batch, channels, height // size, width // size),
        dtype=inputs.dtype,
        device=inputs.device,
        memory_format=torch.channels_last,
    )
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    shift = norm.bias - norm.running_mean * scale
    num_pixels = batch * outputs.shape[2] * outputs.shape[3]
    padded = triton.next_power_of_2(channels)
    pixels = max(1, PIXELS_TIMES_CHANNELS // padded)
    _pool_norm_gelu[(triton.cdiv(num_pixels, pixels),)](
        inputs,
        outputs,
        scale,
        shift,
        height,
        width,
        outputs.shape[2],
        outputs.shape[3],
        num_pixels,
        CHANNELS=channels,
        PADDED=padded,
        POOL=size,
        PIXELS=pixels,
    )
    return outputs
