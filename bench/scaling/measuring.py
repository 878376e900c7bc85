"""How a point is timed: the harness's own clock and meter, each draw of a chain, and one piece of work by itself."""

import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from baselines.method import Attribution, Problem
from bench.measure import Cost, metered, now, resident_peak
from retrain.safe_files import folder_bytes

CLOCK_FILE = Path(str(inspect.getsourcefile(metered)))  # seconds belong to the code that took them
PEAK_SIZES = {"cuda": 8192, "cpu": 1024}


class Ticks:
    """Watches a method's own progress to time each draw; on the GPU by events, which wait for nothing."""

    def __init__(self, device: torch.device):
        self.device = device
        self.marks: list[Any] = []

    def __call__(self, items: Iterable, total: int | None = None, description: str = "") -> Iterator:
        for item in items:
            self.mark()
            yield item

    def mark(self) -> None:
        if self.device.type != "cuda":
            self.marks.append(time.perf_counter())
        elif not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)

    def median(self) -> float | None:
        """Seconds between marks; None where there are too few to say."""
        if len(self.marks) < 4:
            return None
        pairs = zip(self.marks[:-1], self.marks[1:])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return float(np.median([a.elapsed_time(b) / 1000 for a, b in pairs]))
        return float(np.median([b - a for a, b in pairs]))


class Watched:
    """A method that also says what its fit left on the disk."""

    def __init__(self, method: Any):
        self.method, self.disk_bytes = method, 0

    def fit(self, problem: Problem) -> Any:
        state = self.method.fit(problem)
        self.disk_bytes = folder_bytes(problem.scratch)
        return state

    def score(self, problem: Problem, state: Any) -> Attribution:
        return self.method.score(problem, state)


@dataclass
class TimedWork:
    """A piece of work as the harness measures it: a fit, and nothing to score."""

    work: Callable[[], Any]

    def fit(self, problem: Problem) -> Any:
        return self.work()

    def score(self, problem: Problem, state: Any) -> Attribution:
        return Attribution(scores=torch.zeros(0, 0))


def measured_run(method: Any, problem: Problem) -> tuple[Attribution, dict[str, Any]]:
    """Fit and score by the harness: seconds of both, and peaks of both that hold the weights too."""
    device = problem.device
    weight_bytes = sum(p.numel() * p.element_size() for p in problem.model.parameters())
    costs: list[Cost] = []
    peaks: list[tuple[int, int | None]] = []
    host_peaks: list[int] = []

    def stage(work: Callable[[], Any]) -> Any:
        made, cost = metered(work, problem.seed, device, problem.task.cpu_threads)
        costs.append(cost)
        host_peaks.append(resident_peak())
        # Each stage starts its own peak, so each is asked before the next begins.
        peaks.append(
            (torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
            if device.type == "cuda"
            else (weight_bytes + cost.peak_memory_bytes, None)
        )
        return made

    state = stage(lambda: method.fit(problem))
    attribution = stage(lambda: method.score(problem, state))
    return attribution, {
        "fit_seconds": costs[0].seconds,
        "score_seconds": costs[1].seconds,
        "threads": costs[1].threads,
        "weight_bytes": weight_bytes,
        "peak_memory_bytes": max(allocated for allocated, _ in peaks),
        "peak_reserved_bytes": max((reserved for _, reserved in peaks if reserved is not None), default=None),
        "host_peak_bytes": max(host_peaks),
    }


def storage_of(folder: Path) -> str | None:
    """The file system a folder is on, as Linux names it (tmpfs is memory); None elsewhere."""
    try:
        lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return None
    place = folder.resolve()
    above = [(len(words[1]), words[2]) for words in lines if place.is_relative_to(words[1])]
    return max(above, key=lambda pair: pair[0])[1] if above else None


def clock(device: torch.device) -> float:
    """Seconds, with everything the device was asked for done."""
    return now(device)


def matmul_peak(device: torch.device) -> dict[str, Any]:
    """FLOP a second of a large square product, the best of several: bfloat16 on a GPU, float32 on a CPU."""
    size = PEAK_SIZES[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    best = float("inf")
    for _ in range(8):
        torch.matmul(a, b, out=out)
    for _ in range(10):
        repeats = 5
        start = clock(device)
        for _ in range(repeats):
            torch.matmul(a, b, out=out)
        best = min(best, (clock(device) - start) / repeats)
    return {"flops": 2.0 * size**3 / best, "size": size, "dtype": str(dtype).removeprefix("torch.")}
