"""A Triton kernel for what the ResNet-9 reads in training: augmented images, whitened, after GELU.

By torch's kernels every batch is gathered, convolved, given its bias and put through GELU, each a way through memory;
here a pixel is read from the images that lie on the device, wherever shift and flip say, and the result written once.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor, nn

from retrain.models.resnet9_training_kernels import normal_share_and_density

PIXELS_WHITENED, WHITENING_WARPS = 256, 4
FILTERS_AT_A_TIME = 8  # a thread then has whole pixels, and writes sixteen bytes


# A batch begins anywhere in its epoch's plan: whether at a multiple of 16 bytes is not specialised on either.
@triton.jit(do_not_specialize=["plan", "num_pixels", "plan_stride"])
def _whitened(  # type: ignore[no-untyped-def]
    images,
    plan,
    table,
    filters,
    bias,
    outputs,
    num_pixels,
    plan_stride,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    BLOCK: tl.constexpr,
    PIXELS: tl.constexpr,
):
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
        images,
        plan,
        table,
        filters,
        bias,
        outputs,
        num_pixels,
        plan.stride(0),
        SIZE=size,
        PARTS=parts,
        CHANNELS=channels,
        KERNEL=kernel,
        BLOCK=FILTERS_AT_A_TIME,
        PIXELS=PIXELS_WHITENED,
        num_warps=WHITENING_WARPS,
    )
    return outputs
