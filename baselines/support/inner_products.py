"""Every query's gradient times every attributed example's, in blocks that fit: GradSim, kfac, and BIF's linear part.

    inner_products(problem, gradients, batch_size, "gradsim")                    # minus g_query . g_train
    inner_products(problem, gradients, batch_size, "kfac", weights=1 / h)        # minus sum_k g_query,k g_train,k / h_k

The smaller of the two sets is held, as much of it as fits at once, and the other streams past it: each block of scores
is one matrix product, on a GPU of several batches and in bfloat16 (`baselines/support/row_kernels.py`). What is
finished is kept as the work goes on, and resumed. The attributed examples' gradients may come from a file
(`baselines/support/kept_rows.py`).
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from baselines.method import Attribution, Problem
from baselines.support.kept_rows import KEPT_ROWS, KeptRows
from baselines.support.memory import free_bytes
from baselines.support.pieces import HAS_TRITON
from baselines.support.transfer import resident, to_host
from retrain.examples import Batch, Examples

# Of the free memory, for the gradients held, for those that stream past, and for a batch of these.
HELD_SHARE, STREAM_SHARE, BATCH_SHARE = 0.5, 0.15, 0.1
ROWS_A_PRODUCT = 2048  # on a GPU, which a product of one batch leaves half idle
MOST_SUMMED = 2**31 - 1  # terms of one matrix product, and steps from row to row: cuBLAS takes no more
SUMMED_AT_ONCE = 2**27  # of longer rows


class Rows(Protocol):
    """Per-example gradients, one a row."""

    dimension: int

    def __call__(self, batch: Batch, out: Tensor | None = None) -> Tensor: ...


@torch.no_grad()
def inner_products(
    problem: Problem,
    gradients: Rows,
    batch_size: int,
    description: str,
    weights: Tensor | None = None,
    of_queries: Rows | None = None,
    work_name: str = "inner_products",
) -> Attribution:
    """Minus the (weighted) inner product of every query's and attributed example's gradient; the scale is the norm.

    Queries have the rows `of_queries` where these are others. What is unfinished is saved under `work_name`.
    """
    device, dimension = problem.device, gradients.dimension
    queries, attributed = resident(problem.queries, device), resident(problem.attributed, device)
    holds_train = len(attributed) < len(queries)
    held, streaming = (attributed, queries) if holds_train else (queries, attributed)
    kept: KeptRows | None = problem.shared.get(KEPT_ROWS)
    kept = None if kept is None else kept.open(len(attributed), dimension)
    known = None if kept is None else kept.scale
    dtype = torch.bfloat16 if _rounds(device) else torch.float32

    if (saved := problem.work.load(work_name)) is not None:
        arrays, record = saved
        # Blocks of another size would be the same numbers in other roundings: what was begun is finished as begun.
        sizes, done = record["sizes"], record["done"]
        scores, scale = (torch.from_numpy(arrays[name].copy()).to(device) for name in ("scores", "scale"))
    else:
        sizes, done = _sizes(len(held), batch_size, dimension, device, dtype), 0
        scores = torch.zeros(len(held), len(streaming), device=device)
        scale = torch.zeros(len(attributed), device=device)
    at_once, together, batch_size = sizes

    def rows_of(examples: Examples, start: int, stop: int, out: Tensor) -> Tensor:
        rows = gradients if of_queries is None or examples is attributed else of_queries
        if kept is None or examples is not attributed:
            return rows(_batch(examples, start, stop, device), out=out)
        return kept.rows(start, stop, out, lambda: rows(_batch(examples, start, stop, device), out=out))

    if dtype == torch.bfloat16:
        from baselines.support.row_kernels import rounded  # which needs triton

        batch, roots = torch.empty(batch_size, dimension, device=device), None if weights is None else weights.sqrt()

    def rows_between(examples: Examples, start: int, stop: int, out: Tensor, measured: bool) -> Tensor:
        """Made batch by batch, with their norms where these are wanted; one batch from a file as it lies there.

        Where they are rounded, both sides have the weights' roots.
        """
        for begin in range(start, stop, batch_size):
            end = min(begin + batch_size, stop)
            place = out[begin - start : end - start]
            if dtype == torch.bfloat16:
                norms = rounded(rows_of(examples, begin, end, batch[: end - begin]), roots, place)
                if measured:
                    scale[begin:end] = norms
                continue
            rows = rows_of(examples, begin, end, place)
            if measured:
                scale[begin:end] = _norms(rows, weights)
            if (begin, end) == (start, stop):
                return rows
            if rows.data_ptr() != place.data_ptr():
                place.copy_(rows)
        return out[: stop - start]

    block: Tensor | None = None
    buffer = torch.empty(min(together, len(streaming)), dimension, device=device, dtype=dtype)
    steps = [(first, start) for first in range(0, len(held), at_once) for start in range(0, len(streaming), together)]
    for number, (first, start) in enumerate(problem.progress(steps[done:], description=description), done):
        if block is None or start == 0:
            last = min(first + at_once, len(held))
            block = None  # given back before the next is made
            block = torch.empty(last - first, dimension, device=device, dtype=dtype)
            rows = rows_between(held, first, last, block, holds_train and known is None)
            if rows.data_ptr() != block.data_ptr():
                block.copy_(rows)
            if weights is not None and dtype == torch.float32:
                block *= weights
        stop = min(start + together, len(streaming))
        rows = rows_between(streaming, start, stop, buffer, not holds_train and first == 0 and known is None)
        scores[first : first + len(block), start:stop] = -_products(block, rows)
        if problem.work.due():
            so_far = {"scores": scores.cpu().numpy(), "scale": scale.cpu().numpy()}
            problem.work.save(work_name, so_far, {"sizes": sizes, "done": number + 1})
    found = to_host(scores.T.contiguous() if holds_train else scores)
    return Attribution(scores=found, train_scale=scale.cpu() if known is None else known)


def _rounds(device: torch.device) -> bool:
    """Whether factors are bfloat16: not where every bit of float32 is wanted."""
    return device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32 and HAS_TRITON


def _sizes(
    num_held: int, batch_size: int, dimension: int, device: torch.device, dtype: torch.dtype
) -> tuple[int, int, int]:
    """How many rows are held at once, how many stream past in one product, and how many are made at a time."""
    room = free_bytes(device) / (dtype.itemsize * dimension)
    batch_size = parts_that_fit(batch_size, BATCH_SHARE * room * dtype.itemsize / 4)
    most = parts_that_fit(ROWS_A_PRODUCT, STREAM_SHARE * room) if device.type == "cuda" else batch_size
    together = max(1, most // batch_size) * batch_size
    return parts_that_fit(num_held, HELD_SHARE * room - batch_size - together), together, batch_size


def _norms(rows: Tensor, weights: Tensor | None) -> Tensor:
    squares = rows.square().sum(1) if weights is None else _products(rows.square(), weights[None])[:, 0]
    return squares.clamp(min=0).sqrt()


def held_bytes(num_train: int, num_queries: int, dimension: int) -> int:
    """The least that `inner_products` can do with: one gradient held and one streaming, and the scores twice."""
    return 4 * (4 * dimension + 2 * num_train * num_queries)


def parts_that_fit(wanted: int, room: float) -> int:
    """As many of them as there is room for: all, a half, a quarter, ..., so that a little more or less memory free
    does not change how sums are cut."""
    parts = 1
    while parts < wanted and math.ceil(wanted / parts) > room:
        parts *= 2
    return math.ceil(wanted / parts)


def _products(left: Tensor, right: Tensor) -> Tensor:
    """left @ right.T, however long their rows are."""
    length = left.shape[1]
    if length > MOST_SUMMED:
        total = torch.zeros(len(left), len(right), device=left.device)
        for start in range(0, length, SUMMED_AT_ONCE):
            columns = slice(start, min(start + SUMMED_AT_ONCE, length))
            total += _products(left[:, columns].contiguous(), right[:, columns].contiguous())
        return total
    if left.dtype == torch.float32:
        return left @ right.T
    return torch.mm(right, left.T, out_dtype=torch.float32).T  # the other way round cuBLAS may take five times as long


def _batch(examples: Examples, start: int, stop: int, device: torch.device) -> Batch:
    return examples.inputs[start:stop].to(device), examples.targets[start:stop].to(device)
