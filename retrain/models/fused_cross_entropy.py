"""Cross-entropy of a linear head that never holds the logits, the largest tensor of a small language model by far.

    losses = linear_cross_entropy(hidden, weight, targets)       # (tokens,) float32
    python -m retrain.models.fused_cross_entropy                 # on a GPU: seconds and errors of every tile size

Pythia-14M at 256 x 1,024 tokens has 26 GB of bf16 logits and 14 M weights, so writing and reading logits takes most of
a plain step. On CUDA one Triton kernel walks over tiles of the vocabulary, keeps a running log-sum-exp, and stores two
numbers a token. The backward pass recomputes the logits: another kernel writes their gradient for a chunk of tokens,
and two matrix products finish it. Elsewhere the same is done by torch, chunk by chunk. Nothing waits for the device,
so all of it can be captured in a CUDA graph. Products are of the inputs' precision and summed in float32.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
FLOAT32_TILES = Tiles(128, 64, 128, 8, 2)  # four bytes a number: half as many fit into shared memory


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(hidden @ weight.T)[targets], (tokens,) float32.

    From hidden (tokens, width), weight (vocabulary, width) and targets (tokens,); differentiable once in the first two.
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
        return _LinearCrossEntropy.apply(hidden, weight, targets)


def uses_triton(hidden: Tensor) -> bool:
    """On CUDA, unless every bit of float32 is wanted: cuBLAS is faster at that."""
    exact = hidden.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    return hidden.is_cuda and not exact and _kernels() is not None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        hidden, weight = hidden.contiguous(), weight.contiguous()
        logsumexp, chosen = (_triton_forward if uses_triton(hidden) else _torch_forward)(hidden, weight, targets)
        ctx.save_for_backward(hidden, weight, targets, logsumexp)
        return logsumexp - chosen

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight, targets, logsumexp = ctx.saved_tensors
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        hidden_gradient = torch.empty_like(hidden) if for_hidden else None
        # Chunks are added up in float32, whatever the precision of each.
        weight_gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if for_weight else None
        logits_gradient = _triton_logits_gradient if uses_triton(hidden) else _torch_logits_gradient
        for part in _chunks(len(hidden), len(weight), CHUNK_LOGITS if hidden.is_cuda else CHUNK_LOGITS // 16):
            slope = logits_gradient(hidden[part], weight, targets[part], logsumexp[part], gradient[part].float())
            if hidden_gradient is not None:
                torch.mm(slope, weight, out=hidden_gradient[part])
            if weight_gradient is not None:
                weight_gradient += slope.T @ hidden[part]
        return hidden_gradient, None if weight_gradient is None else weight_gradient.to(weight.dtype), None


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
    chosen = torch.empty(num_tokens, device=hidden.device)
    _kernels().log_sum_exp[(token_tiles, splits)](
        hidden, weight, targets, partial, chosen, num_tokens, vocabulary, width, per_split,
        TOKENS=tiles.tokens, VOCABULARY=tiles.vocabulary, WIDTH=_width_step(width, tiles),
        ONE_STEP=width <= _width_step(width, tiles), EVEN_VOCABULARY=vocabulary % tiles.vocabulary == 0,
        EVEN_WIDTH=width % _width_step(width, tiles) == 0, PRECISION=_product_precision(hidden),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return (partial[0] if splits == 1 else partial.logsumexp(0)), chosen


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


def _width_step(width: int, tiles: Tiles) -> int:
    """A power of two, at least 16: what a tensor core takes."""
    return min(tiles.width, max(16, 1 << (width - 1).bit_length()))


# ---- seconds and errors, in one command ----


def _benchmark(num_tokens: int, vocabulary: int, width: int, repeats: int) -> None:
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {num_tokens:,} x {width} x {vocabulary:,}")
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    hidden, weight = random(num_tokens, width).bfloat16(), (random(vocabulary, width) * 0.2).bfloat16()
    targets = torch.randint(vocabulary, (num_tokens,), device=device, generator=generator)
    gradient = torch.full((num_tokens,), 1 / num_tokens, device=device)
    expected = torch.cat(
        [
            F.cross_entropy(_float_logits(h, weight), t, reduction="none")
            for h, t in zip(hidden.split(4096), targets.split(4096))
        ]
    )
    part = slice(0, min(num_tokens, CHUNK_LOGITS // vocabulary))

    def seconds(call: Any) -> float:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / repeats

    choices = [
        Tiles(tokens, entries, 128, warps, stages)
        for tokens, entries in ((128, 128), (128, 64), (64, 128), (128, 256), (256, 128), (64, 256))
        for warps in (4, 8)
        for stages in (1, 2, 3)
    ]
    for tiles in choices:
        try:
            logsumexp, chosen = _triton_forward(hidden, weight, targets, tiles)
            error = float((logsumexp - chosen - expected).abs().max())
            ahead = seconds(lambda tiles=tiles: _triton_forward(hidden, weight, targets, tiles))
            given = (hidden[part], weight, targets[part], logsumexp[part], gradient[part], tiles)
            back = seconds(lambda given=given: _triton_logits_gradient(*given))
        except Exception as error_found:  # a tile too large for this GPU's shared memory
            print(f"{tiles}: {str(error_found).splitlines()[0][:100]}")
            continue
        rate, back_rate = num_tokens / ahead / 1e6, (part.stop - part.start) / back / 1e6
        print(f"{tiles}: forward {rate:6.1f} M tokens/s, logits gradient {back_rate:6.1f}, largest error {error:.1e}")
    inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()

    def both() -> None:
        torch.autograd.grad(linear_cross_entropy(*inputs, targets).mean(), inputs)

    print(f"forward and backward: {num_tokens / seconds(both) / 1e6:.1f} M tokens/s with {TILES}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m retrain.models.fused_cross_entropy", description=__doc__)
    parser.add_argument("--tokens", type=int, default=64 * 1023, help="default: %(default)s")
    parser.add_argument("--vocabulary", type=int, default=50304, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=10, help="default: %(default)s")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no CUDA GPU here to time", file=sys.stderr)
        return 2
    _benchmark(options.tokens, options.vocabulary, options.width, options.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
