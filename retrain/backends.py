"""Switches of torch's backends that tasks share."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


@contextmanager
def switched(backend: Any, **values: bool) -> Iterator[None]:
    """These attributes of a backend, for a while."""
    before = {name: getattr(backend, name) for name in values}
    try:
        for name, value in values.items():
            setattr(backend, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(backend, name, value)


def without_onednn() -> AbstractContextManager[None]:
    """Plain CPU kernels: oneDNN's set-up for each call costs more than it saves on very small tensors."""
    return switched(torch.backends.mkldnn, enabled=False)  # `mkldnn.flags` would warn about GPUs that nobody asked for


def exact_convolutions() -> AbstractContextManager[None]:
    """On a GPU: whole float32 (cuDNN's default rounds to ten bits), summed in an order that is always the same."""
    return switched(torch.backends.cudnn, allow_tf32=False, deterministic=True)


def deterministic_convolutions() -> AbstractContextManager[None]:
    """cuDNN sums in a fixed order: the same seeds give the same model again on the same kind of device."""
    return switched(torch.backends.cudnn, deterministic=True)


def captured_graph(work: Callable[[], None], device: torch.device, **options: Any) -> torch.cuda.CUDAGraph | None:
    """A CUDA graph of `work`, which does not run; None, and a line on stderr, where capturing fails."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    try:
        with torch.cuda.graph(graph, **options):
            work()
    except RuntimeError as error:
        torch.cuda.set_stream(stream)  # a capture that fails at its end leaves its own stream current
        print(f"CUDA graphs are off, training goes on without: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    return graph
