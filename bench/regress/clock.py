"""What a method costs, whatever else the machine is doing: seconds in units of calibration kernels.

Two kernels make a slice: the task's own forward and backward pass (arithmetic), and a walk over more memory than caches
hold. Slices run before and after the method and, where it reports progress, in between; their own time is not the
method's. Processor time does not count what others take of a core, and the kernels feel what they do to its caches, its
memory and its clock.

A slow method and a busy machine both make wall time long; what the machine itself says tells them apart: processor time
that went to others or to a hypervisor, and kernels that had to wait.
"""

import copy
import math
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch

from baselines.method import Attribution, Method, Problem
from bench.measure import measure
from retrain.task import Task

_Item = TypeVar("_Item")

KERNELS = ("training", "memory")
TRAINING_BATCH = 200
MEMORY_NUMBERS = 8 << 20  # float32, read once and written once
SLICES_AROUND = 5  # before, and as many after
SECONDS_BETWEEN = 1.0  # of the method's own, from slice to slice

OTHERS_SHARE = 0.25  # of all cores: with more than this in others' hands the machine is busy
STOLEN_SHARE = 0.05  # of a core, by the hypervisor
WAITING_RATIO = 1.15  # wall over processor seconds of the kernels, which never wait by themselves
DRIFT_RATIO = 1.5  # between the kernels before and after


@dataclass(frozen=True)
class Timing:
    """One run of one method."""

    seconds: float
    cpu_seconds: float  # of this process, all its threads, and of children it waited for
    kernel_seconds: dict[str, float]  # of each kernel, the median over slices
    kernel_cpu_seconds: dict[str, float]
    busy: str = ""  # why the machine counts as busy; empty where it was quiet

    def costs(self) -> dict[str, float]:
        """The method's cost in units of each kernel, by both clocks."""
        return {f"{kernel} wall": self.seconds / self.kernel_seconds[kernel] for kernel in KERNELS} | {
            f"{kernel} cpu": self.cpu_seconds / self.kernel_cpu_seconds[kernel] for kernel in KERNELS
        }


def clocks() -> np.ndarray:
    """Seconds: wall, own processor time (with children), that of all cores, and stolen; NaN where nobody says."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time() + children.ru_utime + children.ru_stime
    busy = stolen = math.nan
    try:  # Linux, since the machine started
        line = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        user, nice, system, _, _, interrupt, soft_interrupt, stolen = (float(text) for text in line[1:9])
        busy = user + nice + system + interrupt + soft_interrupt
    except (OSError, ValueError):
        pass
    ticks = os.sysconf("SC_CLK_TCK")
    return np.array([time.perf_counter(), own, busy / ticks, stolen / ticks])


def why_busy(passed: np.ndarray, before: np.ndarray, slices: np.ndarray, after: np.ndarray) -> str:
    """One reason for which a timing is not to be trusted, or nothing.

    passed: by each of the `clocks`; slices: all of them, (slices, kernels, wall and processor seconds), as the first
    and last ones are.
    """
    (wall, own, all_cores, stolen), cores = passed, os.cpu_count() or 1
    if (others := (all_cores - own) / wall) > OTHERS_SHARE * cores:
        return f"others used {others:.1f} of {cores} cores"
    if stolen > STOLEN_SHARE * wall:
        return f"the hypervisor took {100 * stolen / wall:.0f} % of a core"
    took, worked = slices.sum(axis=(0, 1))
    if took > WAITING_RATIO * worked:
        return f"the calibration had to wait: {took / worked:.2f} times its processor time"
    drifts = np.median(after, axis=0)[:, 1] / np.median(before, axis=0)[:, 1]
    for kernel, drift in zip(KERNELS, drifts, strict=True):
        if not 1 / DRIFT_RATIO < drift < DRIFT_RATIO:
            return f"the calibration ({kernel}) took {drift:.2f} times as long after as before"
    return ""


class Calibration:
    """The kernels of one task: fixed amounts of what methods are made of."""

    def __init__(self, task: Task, model: Any):
        examples = task.train_data.select(range(min(TRAINING_BATCH, len(task.train_data))))
        self.task, self.batch = task, (examples.inputs, examples.targets)
        self.model = copy.deepcopy(model).eval()  # a method may have hooks on its own in the middle of a run
        self.source = np.ones(MEMORY_NUMBERS, dtype=np.float32)
        self.target = np.zeros_like(self.source)
        self.run(2)  # the first pays for set-up

    def run(self, count: int = 1) -> np.ndarray:
        """(count, kernels, 2) wall and processor seconds."""
        found = []
        for _ in range(count):
            for work in (self._train, self._walk):
                wall, cpu = time.perf_counter(), time.process_time()
                work()
                found.append((time.perf_counter() - wall, time.process_time() - cpu))
        return np.array(found).reshape(count, len(KERNELS), 2)

    def _train(self) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            torch.autograd.grad(self.task.example_loss(self.model, self.batch).mean(), parameters, allow_unused=True)

    def _walk(self) -> None:
        np.add(self.source, 1, out=self.target)


class Clock:
    """Times a method's fit and score, with slices of calibration before, between and after."""

    def __init__(self, calibration: Calibration):
        self.calibration = calibration
        self.during: list[np.ndarray] = []
        self.spent = np.zeros(2)  # wall and processor seconds of the method
        self._last_slice = 0.0

    def progress(self, items: Iterable[_Item], total: int | None = None, description: str = "") -> Iterator[_Item]:
        """Given to the method as its `Problem.progress`: a slice now and then."""
        for item in items:
            yield item
            if time.perf_counter() - self._last_slice > SECONDS_BETWEEN:
                self.during.append(self.calibration.run())
                self._last_slice = time.perf_counter()

    def timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same work; its time, without that of the slices in it, is the method's."""

        def run(*arguments: Any) -> Any:
            start, count = clocks(), len(self.during)
            self._last_slice = start[0]
            try:
                return work(*arguments)
            finally:
                self.spent += (clocks() - start)[:2] - sum(one.sum(axis=(0, 1)) for one in self.during[count:])

        return run

    def time(self, method: Method, problem: Problem) -> tuple[Attribution, Timing]:
        """problem: one whose `progress` is this clock's."""
        start = clocks()
        before = self.calibration.run(SLICES_AROUND)
        stages: Any = SimpleNamespace(fit=self.timed(method.fit), score=self.timed(method.score))
        attribution, _ = measure(stages, problem)
        after = self.calibration.run(SLICES_AROUND)
        slices = np.concatenate([before, *self.during, after])
        wall, cpu = np.median(slices, axis=0).T.tolist()
        busy = why_busy(clocks() - start, before, slices, after)
        spent_wall, spent_cpu = self.spent.tolist()
        return attribution, Timing(spent_wall, spent_cpu, dict(zip(KERNELS, wall)), dict(zip(KERNELS, cpu)), busy)
