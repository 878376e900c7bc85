"""The only clock and the only memory meter of the suite, so that every method is measured alike.

Every stage of a method (its fit, a part, its scores) is seeded by itself, so that a stage that comes from the cache
changes nothing about the next; it is timed with the device synchronised, and its peak memory taken over what was there
before.
"""

import contextlib
import ctypes
import gc
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from baselines.method import Attribution, Method, Problem

Answer = TypeVar("Answer")


@dataclass
class Cost:
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    threads: int = 0


def metered(work: Callable[[], Answer], seed: int, device: torch.device, threads: int = 0) -> tuple[Answer, Cost]:
    """Runs one stage: seeded, on so many CPU threads (0: torch's own number), and what it cost."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  (libraries draw from the global generator)
    # Every method alike: float32 products in TensorFloat-32, where the GPU has it.
    torch.set_float32_matmul_precision("high")
    with cpu_threads(threads), _peak_memory(device) as peak, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries' own making, and nothing the user can act on
        start = now(device)
        made = work()
        cost = Cost(seconds=now(device) - start, threads=torch.get_num_threads())
    cost.peak_memory_bytes = peak[0]
    return made, cost


def measure(method: Method, problem: Problem) -> tuple[Attribution, dict[str, Any]]:
    """Fit and score in one go; seconds of each and the peak of memory added."""
    threads = problem.task.cpu_threads
    state, fitted = metered(lambda: method.fit(problem), problem.seed, problem.device, threads)
    attribution, scored = metered(lambda: method.score(problem, state), problem.seed, problem.device, threads)
    return attribution, {
        "fit_seconds": fitted.seconds,
        "score_seconds": scored.seconds,
        "peak_memory_bytes": max(fitted.peak_memory_bytes, scored.peak_memory_bytes),
        "threads": scored.threads,
    }


@contextlib.contextmanager
def cpu_threads(wanted: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@lru_cache(maxsize=1)
def _freeze_once() -> None:
    """What was imported by the first stage stays: a collection need not go through it before every stage."""
    gc.freeze()


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def _peak_memory(device: torch.device) -> Iterator[list[int]]:
    """The most memory in use during the block beyond what was in use before: GPU allocations, or resident memory."""
    peak = [0]
    _freeze_once()
    gc.collect()  # what the last stage left in circles would count as there before, and be given back meanwhile
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak[0] = torch.cuda.max_memory_allocated(device) - before
        return
    # What the last method freed goes back first: glibc keeps it, and the next one's use of it would not show. (torch on
    # aarch64 has an allocator of its own, which only MIMALLOC_PURGE_DELAY=0 in the environment makes do the same.)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    # Linux forgets the old high-water mark when told to; elsewhere only a new record shows.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = resident_peak()
    yield peak
    peak[0] = max(0, resident_peak() - before)


def resident_peak() -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
