"""Cross-entropy of a linear head that never holds the logits, the largest tensor of a small language model by far.

    losses = linear_cross_entropy(hidden, weight, targets)       # (tokens,) float32

Pythia-14M at 256 x 1,024 tokens has 26 GB of bf16 logits and 14 M weights, so writing and reading logits takes most of
a plain step. On CUDA one Triton kernel walks over tiles of the vocabulary, keeps a running log-sum-exp, and stores two
numbers a token. Where a gradient is wanted and the model is narrow, that kernel also keeps up the slope in the hidden
state, and a second one walks over the tokens for the weight's gradient, as flash attention does both. A wide model
recomputes the logits: a kernel writes their gradient for a chunk of tokens, and two matrix products finish it.
Elsewhere the same is done by torch, chunk by chunk. Nothing waits for the device, so all of it can be captured in a
CUDA graph. Products are of the inputs' precision and summed in float32.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from retrain.losses import IGNORED

# Up to this many logits (128 MB) the plain composition is as good, and can be differentiated twice or put under vmap.
PLAIN_LOGITS = 2**25
CHUNK_LOGITS = 2**30  # of the backward pass: 2 GB in bf16, above which nothing gets faster
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Tiles:
    """How a kernel cuts its work: tokens x vocabulary entries at a time, through the width in steps of `width`."""

    tokens: int = 128
    vocabulary: int = 128
    width: int = 128
    warps: int = 8
    stages: int = 2  # two programs then fit on one multiprocessor, so that one's exponentials hide the other's products


TILES = Tiles()
SLOPE_TILES = Tiles(128, 64, 128, 8, 3)  # as flash attention at a head size of 128
WEIGHT_TILES = Tiles(64, 128, 128, 8, 3)
NARROW = 128  # the largest width that the two kernels of a narrow model take; 0 turns them off
FLOAT32_TILES = Tiles(128, 64, 128, 8, 2)  # four bytes a number: half as many fit into shared memory


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(hidden @ weight.T)[targets], (tokens,) float32.

    From hidden (tokens, width), weight (vocabulary, width) and targets (tokens,); differentiable once in the first two.
    A target of -100 is ignored: its loss is 0.
    A float32 product on CUDA follows `torch.backends.cuda.matmul.allow_tf32`.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or len(targets) != len(hidden):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} do not "
            "fit; expected (tokens, width), (vocabulary, width) and (tokens,)"
        )
    with torch.autocast(hidden.device.type, enabled=False):  # which would round the logits
        if len(hidden) * len(weight) <= PLAIN_LOGITS and hidden.dtype == torch.float32:
            return F.cross_entropy(F.linear(hidden, weight), targets, reduction="none")
        # Within the function the grad mode is off, whatever it was.
        losses = _LinearCrossEntropy.apply(hidden, weight, targets.clamp(min=0), torch.is_grad_enabled())
        return losses * (targets != IGNORED)


def uses_triton(hidden: Tensor) -> bool:
    """On CUDA, unless every bit of float32 is wanted: cuBLAS is faster at that."""
    exact = hidden.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    return hidden.is_cuda and not exact and _kernels() is not None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, differentiable: bool) -> Tensor:
        hidden, weight = hidden.contiguous(), weight.contiguous()
        slope = None
        if differentiable and ctx.needs_input_grad[0] and uses_triton(hidden) and _is_narrow(hidden):
            logsumexp, chosen, slope = _triton_slope(hidden, weight, targets)
        else:
            logsumexp, chosen = (_triton_forward if uses_triton(hidden) else _torch_forward)(hidden, weight, targets)
        ctx.save_for_backward(hidden, weight, targets, logsumexp, slope)
        return logsumexp - chosen

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, targets, logsumexp, slope = ctx.saved_tensors
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        if slope is not None:
            found = _triton_weight_gradient(hidden, weight, targets, logsumexp, gradient) if for_weight else None
            return (slope * gradient[:, None]).to(hidden.dtype), found, None, None
        hidden_gradient = torch.empty_like(hidden) if for_hidden else None
        # Chunks are added up in float32, whatever the precision of each.
        weight_gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if for_weight else None
        logits_gradient = _triton_logits_gradient if uses_triton(hidden) else _torch_logits_gradient
        for part in _chunks(len(hidden), len(weight), CHUNK_LOGITS if hidden.is_cuda else CHUNK_LOGITS // 16):
            by_logit = logits_gradient(hidden[part], weight, targets[part], logsumexp[part], gradient[part].float())
            if hidden_gradient is not None:
                torch.mm(by_logit, weight, out=hidden_gradient[part])
            if weight_gradient is not None:
                weight_gradient += by_logit.T @ hidden[part]
        return hidden_gradient, None if weight_gradient is None else weight_gradient.to(weight.dtype), None, None


def _chunks(num_tokens: int, vocabulary: int, most_logits: int) -> list[slice]:
    """The fewest parts of at most so many logits each, equal but for the last."""
    most = max(1, most_logits // vocabulary)
    count = max(1, -(-num_tokens // most))
    size = -(-num_tokens // count)
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


# ---- torch ----


def _float_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """float32 throughout: logits rounded to bf16 would be off by hundredths of a nat."""
    return hidden.float() @ weight.float().T


def _torch_forward(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens,) log-sum-exp and the target's logit."""
    logsumexp = torch.empty(len(hidden), device=hidden.device)
    chosen = torch.empty_like(logsumexp)
    for part in _chunks(len(hidden), len(weight), CHUNK_LOGITS // 16):
        logits = _float_logits(hidden[part], weight)
        logsumexp[part] = logits.logsumexp(1)
        chosen[part] = logits.gather(1, targets[part, None]).squeeze(1)
    return logsumexp, chosen


def _torch_logits_gradient(
    hidden: Tensor, weight: Tensor, targets: Tensor, logsumexp: Tensor, gradient: Tensor
) -> Tensor:
    """(tokens, vocabulary) in hidden's precision: gradient * (softmax - one-hot)."""
    slope = _float_logits(hidden, weight).sub_(logsumexp[:, None]).exp_()
    slope.scatter_add_(1, targets[:, None], torch.full_like(slope[:, :1], -1.0))
    return slope.mul_(gradient[:, None]).to(hidden.dtype)


# ---- Triton ----


@lru_cache(maxsize=1)
def _kernels() -> Any:
    """The compiled kernels, or None where there is no Triton."""
    try:
        from retrain.models import fused_cross_entropy_kernels
    except ImportError:
        return None
    return fused_cross_entropy_kernels


def _tiles_of(hidden: Tensor) -> Tiles:
    return FLOAT32_TILES if hidden.dtype == torch.float32 else TILES


def _product_precision(hidden: Tensor) -> str:
    """Of a float32 product; others have one of their own."""
    return "ieee" if hidden.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32 else "tf32"


def _num_splits(token_tiles: int, vocabulary_tiles: int, device: torch.device) -> int:
    """Into how many parts the vocabulary is cut, so that few tokens still fill every multiprocessor."""
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return max(1, min(vocabulary_tiles, wanted // max(1, token_tiles)))


def _triton_forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    tiles = tiles or _tiles_of(hidden)
    num_tokens, width = hidden.shape
    vocabulary = len(weight)
    token_tiles, vocabulary_tiles = -(-num_tokens // tiles.tokens), -(-vocabulary // tiles.vocabulary)
    splits = _num_splits(token_tiles, vocabulary_tiles, hidden.device)
    per_split = -(-vocabulary_tiles // splits) * tiles.vocabulary
    splits = -(-vocabulary // per_split)
    partial = torch.empty(splits, num_tokens, device=hidden.device)
    # A target's logit must be rounded as those it is compared with are: large logits would differ by tenths.
    rounded = hidden.dtype == torch.float32
    chosen = torch.empty(splits if rounded else 1, num_tokens, device=hidden.device)
    _kernels().log_sum_exp[(token_tiles, splits)](
        hidden, weight, targets, partial, chosen, num_tokens, vocabulary, width, per_split,
        TOKENS=tiles.tokens, VOCABULARY=tiles.vocabulary, WIDTH=_width_step(width, tiles),
        ONE_STEP=width <= _width_step(width, tiles), EVEN_VOCABULARY=vocabulary % tiles.vocabulary == 0,
        EVEN_WIDTH=width % _width_step(width, tiles) == 0, PRECISION=_product_precision(hidden),
        TARGET_IN_TILE=rounded, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return (partial[0] if splits == 1 else partial.logsumexp(0)), chosen.sum(0)


def _triton_logits_gradient(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    logsumexp: Tensor,
    gradient: Tensor,
    tiles: Tiles | None = None,
) -> Tensor:
    tiles = tiles or _tiles_of(hidden)
    num_tokens, width = hidden.shape
    vocabulary = len(weight)
    slope = torch.empty(num_tokens, vocabulary, dtype=hidden.dtype, device=hidden.device)
    grid = (-(-num_tokens // tiles.tokens), -(-vocabulary // tiles.vocabulary))
    _kernels().logits_gradient[(grid[0] * grid[1],)](
        hidden, weight, targets, logsumexp, gradient, slope, num_tokens, vocabulary, width, grid[1],
        TOKENS=tiles.tokens, VOCABULARY=tiles.vocabulary, WIDTH=_width_step(width, tiles),
        EVEN_WIDTH=width % _width_step(width, tiles) == 0, PRECISION=_product_precision(hidden),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return slope


def _is_narrow(hidden: Tensor) -> bool:
    """Narrow enough for tiles of whole rows, with enough tokens to fill the GPU without splitting the vocabulary."""
    enough = torch.cuda.get_device_properties(hidden.device).multi_processor_count * SLOPE_TILES.tokens
    return hidden.shape[1] <= NARROW and len(hidden) >= enough and hidden.dtype != torch.float32


def _triton_slope(
    hidden: Tensor, weight: Tensor, targets: Tensor, tiles: Tiles = SLOPE_TILES
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens,) log-sum-exp and the target's logit, and d loss / d hidden (tokens, width)."""
    num_tokens, width = hidden.shape
    step = _width_step(width, tiles)
    logsumexp, chosen = torch.empty(2, num_tokens, device=hidden.device).unbind(0)
    slope = torch.empty_like(hidden)
    _kernels().log_sum_exp_with_slope[(-(-num_tokens // tiles.tokens),)](
        hidden, weight, targets, logsumexp, chosen, slope, num_tokens, len(weight), width,
        TOKENS=tiles.tokens, VOCABULARY=tiles.vocabulary, WIDTH=step,
        EVEN_VOCABULARY=len(weight) % tiles.vocabulary == 0, EVEN_WIDTH=width == step,
        PRECISION=_product_precision(hidden), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return logsumexp, chosen, slope


def _triton_weight_gradient(
    hidden: Tensor, weight: Tensor, targets: Tensor, logsumexp: Tensor, gradient: Tensor, tiles: Tiles = WEIGHT_TILES
) -> Tensor:
    """d (sum of gradient * loss) / d weight, in weight's precision."""
    num_tokens, width = hidden.shape
    step = _width_step(width, tiles)
    found = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    _kernels().weight_gradient[(-(-len(weight) // tiles.vocabulary),)](
        hidden, weight, targets, logsumexp, gradient.float().contiguous(), found, num_tokens, len(weight), width,
        TOKENS=tiles.tokens, VOCABULARY=tiles.vocabulary, WIDTH=step, EVEN_WIDTH=width == step,
        PRECISION=_product_precision(hidden), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return found.to(weight.dtype)


def _width_step(width: int, tiles: Tiles) -> int:
    """A power of two, at least 16: what a tensor core takes."""
    return min(tiles.width, max(16, 1 << (width - 1).bit_length()))
