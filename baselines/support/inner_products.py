"""Every query's gradient times every attributed example's, in blocks that fit: GradSim, kfac, and BIF's linear part.

    inner_products(problem, gradients, batch_size, "gradsim")                    # minus g_query . g_train
    inner_products(problem, gradients, batch_size, "kfac", weights=1 / h)        # minus sum_k g_query,k g_train,k / h_k

The smaller of the two sets is held, as much of it as fits at once, and the other streams past it: each block of scores
is one matrix product. What is finished is kept as the work goes on, and resumed. The attributed examples' gradients may
come from a file (`baselines/support/kept_rows.py`).
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from baselines.method import Attribution, Problem
from baselines.support.kept_rows import KEPT_ROWS, KeptRows
from baselines.support.memory import free_bytes
from retrain.examples import Batch, Examples

HELD_SHARE, BATCH_SHARE = 0.5, 0.1  # of the free memory, for the gradients held and for a batch of streaming ones
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
    queries, attributed = problem.queries, problem.attributed
    holds_train = len(attributed) < len(queries)
    held, streaming = (attributed, queries) if holds_train else (queries, attributed)
    kept: KeptRows | None = problem.shared.get(KEPT_ROWS)
    kept = None if kept is None else kept.open(len(attributed), dimension)

    def rows_of(examples: Examples, start: int, stop: int, out: Tensor) -> Tensor:
        rows = gradients if of_queries is None or examples is attributed else of_queries
        if kept is None or examples is not attributed:
            return rows(_batch(examples, start, stop, device), out=out)
        return kept.rows(start, stop, out, lambda: rows(_batch(examples, start, stop, device), out=out))

    if (saved := problem.work.load(work_name)) is not None:
        arrays, record = saved
        # Blocks of another size would be the same numbers in other roundings: what was begun is finished as begun.
        at_once, batch_size, done = record["at_once"], record["batch_size"], record["done"]
        scores, scale = torch.from_numpy(arrays["scores"].copy()), torch.from_numpy(arrays["scale"].copy())
    else:
        room = free_bytes(device) / (4 * dimension)
        batch_size = parts_that_fit(batch_size, BATCH_SHARE * room)
        at_once, done = parts_that_fit(len(held), HELD_SHARE * room - 2 * batch_size), 0
        scores, scale = torch.zeros(len(held), len(streaming)), torch.zeros(len(attributed))
    known = None if kept is None else kept.scale
    scale = scale if known is None else known

    block: Tensor | None = None
    buffer = torch.empty(min(batch_size, len(streaming)), dimension, device=device)
    steps = [(first, start) for first in range(0, len(held), at_once) for start in range(0, len(streaming), batch_size)]
    for number, (first, start) in enumerate(problem.progress(steps[done:], description=description), done):
        if block is None or start == 0:
            last = min(first + at_once, len(held))
            block = None  # given back before the next is made
            block = torch.empty(last - first, dimension, device=device)
            for begin in range(first, last, batch_size):
                end = min(begin + batch_size, last)
                place = block[begin - first : end - first]
                rows = rows_of(held, begin, end, place)
                if rows.data_ptr() != place.data_ptr():
                    place.copy_(rows)
                if holds_train and known is None:
                    scale[begin:end] = _norms(rows, weights)
            if weights is not None:
                block *= weights
        stop = min(start + batch_size, len(streaming))
        rows = rows_of(streaming, start, stop, buffer[: stop - start])
        scores[first : first + len(block), start:stop] = -_products(block, rows).cpu()
        if not holds_train and first == 0 and known is None:
            scale[start:stop] = _norms(rows, weights)
        if problem.work.due():
            sizes = {"at_once": at_once, "batch_size": batch_size, "done": number + 1}
            problem.work.save(work_name, {"scores": scores.numpy(), "scale": scale.numpy()}, sizes)
    return Attribution(scores=scores.T.contiguous() if holds_train else scores, train_scale=scale)


def _norms(rows: Tensor, weights: Tensor | None) -> Tensor:
    squares = rows.square().sum(1) if weights is None else _products(rows.square(), weights[None])[:, 0]
    return squares.clamp(min=0).sqrt().cpu()


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
    if length <= MOST_SUMMED:
        return left @ right.T
    total = left.new_zeros(len(left), len(right))
    for start in range(0, length, SUMMED_AT_ONCE):
        columns = slice(start, min(start + SUMMED_AT_ONCE, length))
        total += left[:, columns].contiguous() @ right[:, columns].contiguous().T
    return total


def _batch(examples: Examples, start: int, stop: int, device: torch.device) -> Batch:
    return examples.inputs[start:stop].to(device), examples.targets[start:stop].to(device)
