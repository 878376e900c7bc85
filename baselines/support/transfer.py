"""Large tensors between ordinary memory and a GPU, in pieces through pinned memory.

A plain copy reads or writes ordinary memory from one thread, at a tenth of what the bus carries: for CIFAR-10's images
and the scores of 8,000 queries that is as long as twenty draws.
"""

import torch
from torch import Tensor

from baselines.support.memory import free_bytes
from retrain.examples import Examples

RESIDENT_SHARE = 0.1  # of the free memory, for examples that are moved once
PIECE_BYTES = 2**24  # two of them are pinned: one is on the bus while all threads fill or empty the other


def to_host(tensor: Tensor) -> Tensor:
    """As `tensor.cpu()`."""
    if not tensor.is_cuda or not _is_large(tensor):
        return tensor.cpu()
    result = torch.empty(tensor.shape, dtype=tensor.dtype)
    source, target = _pieces(tensor.contiguous()), _pieces(result)
    pinned, copied = _pinned(tensor, tensor.device)

    def send(number: int) -> None:
        pinned[number % 2][: len(source[number])].copy_(source[number], non_blocking=True)
        copied[number % 2].record(torch.cuda.current_stream(tensor.device))

    send(0)
    for number, part in enumerate(target):
        if number + 1 < len(target):
            send(number + 1)
        copied[number % 2].synchronize()
        part.copy_(pinned[number % 2][: len(part)])
    return result


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """As `tensor.to(device)`."""
    if device.type != "cuda" or tensor.is_cuda or not _is_large(tensor) or not tensor.is_contiguous():
        return tensor.to(device)
    result = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    pinned, copied = _pinned(tensor, device)
    for number, (part, target) in enumerate(zip(_pieces(tensor), _pieces(result), strict=True)):
        if number >= 2:
            copied[number % 2].synchronize()
        buffer = pinned[number % 2][: len(part)]
        buffer.copy_(part)
        target.copy_(buffer, non_blocking=True)
        copied[number % 2].record(torch.cuda.current_stream(device))
    return result


def on_device(examples: Examples, device: torch.device) -> Examples:
    """As `examples.to(device)`."""
    if not isinstance(examples.inputs, Tensor):
        return examples.to(device)
    return Examples(to_device(examples.inputs, device), to_device(examples.targets, device))


def resident(examples: Examples, device: torch.device) -> Examples:
    """On the device where there is room for them, and then not batch by batch."""
    return on_device(examples, device) if examples.nbytes < RESIDENT_SHARE * free_bytes(device) else examples


def _is_large(tensor: Tensor) -> bool:
    return tensor.nbytes >= 2 * PIECE_BYTES


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.view(-1).split(PIECE_BYTES // tensor.element_size())


def _pinned(like: Tensor, device: torch.device) -> tuple[list[Tensor], list[torch.cuda.Event]]:
    """Two buffers, and what says of each that its copy is done."""
    piece = PIECE_BYTES // like.element_size()
    with torch.cuda.device(device):
        buffers = [torch.empty(piece, dtype=like.dtype, pin_memory=True) for _ in range(2)]
        return buffers, [torch.cuda.Event() for _ in range(2)]
