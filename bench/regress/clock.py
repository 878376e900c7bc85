"""What a method costs, whatever else the machine is doing: seconds in units of calibration kernels.

Two kernels make a slice: the task's own forward and backward pass (arithmetic), and a walk over more memory than caches
hold. Slices run before and after the method and, where it reports progress, in between; their own time is not the
method's. Processor time does not count what others take of a core, and the kernels feel what they do to its caches, its
memory and its clock.

A slow method and a busy machine both make wall time long; what the machine itself says tells them apart: processor time
that went to others or to a hypervisor, and kernels that had to wait.
"""

import contextlib
import copy
import os
import resource
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
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


# ---- what the machine says ----


@dataclass(frozen=True)
class Moment:
    """The clocks at one moment; differences of two are what happened between."""

    wall: float
    own_cpu: float
    all_cpu: float | None  # seconds that all cores were busy since the machine started, this process included
    stolen: float | None

    @classmethod
    def now(cls) -> "Moment":
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        own = time.process_time() + children.ru_utime + children.ru_stime
        busy, stolen = _processor_seconds()
        return cls(time.perf_counter(), own, busy, stolen)


def _processor_seconds() -> tuple[float | None, float | None]:
    """(busy, stolen) of all cores, from Linux; None elsewhere."""
    try:
        line = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        user, nice, system, _, _, interrupt, soft_interrupt, stolen = (float(text) for text in line[1:9])
    except (OSError, ValueError):
        return None, None
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + interrupt + soft_interrupt) / ticks, stolen / ticks


def why_busy(start: Moment, end: Moment, before: "Slices", after: "Slices", everything: "Slices") -> str:
    """One reason for which a timing between these moments is not to be trusted, or nothing."""
    wall, cores = max(end.wall - start.wall, 1e-9), os.cpu_count() or 1
    if start.all_cpu is not None and end.all_cpu is not None:
        others = (end.all_cpu - start.all_cpu - (end.own_cpu - start.own_cpu)) / wall
        if others > OTHERS_SHARE * cores:
            return f"others used {others:.1f} of {cores} cores"
    elif os.getloadavg()[0] > 1 + OTHERS_SHARE * cores:
        return f"the load is {os.getloadavg()[0]:.1f} on {cores} cores"
    if start.stolen is not None and end.stolen is not None and end.stolen - start.stolen > STOLEN_SHARE * wall:
        return f"the hypervisor took {100 * (end.stolen - start.stolen) / wall:.0f} % of a core"
    waiting = everything.total("wall") / max(everything.total("cpu"), 1e-9)
    if waiting > WAITING_RATIO:
        return f"the calibration had to wait: {waiting:.2f} times its processor time"
    for kernel in KERNELS:
        drift = after.median("cpu", kernel) / before.median("cpu", kernel)
        if not 1 / DRIFT_RATIO < drift < DRIFT_RATIO:
            return f"the calibration ({kernel}) took {drift:.2f} times as long after as before"
    return ""


# ---- calibration ----


@dataclass
class Slices:
    """Seconds of calibration kernels."""

    wall: dict[str, list[float]] = field(default_factory=lambda: {kernel: [] for kernel in KERNELS})
    cpu: dict[str, list[float]] = field(default_factory=lambda: {kernel: [] for kernel in KERNELS})

    def total(self, clock: str) -> float:
        return sum(sum(values) for values in getattr(self, clock).values())

    def median(self, clock: str, kernel: str) -> float:
        return float(np.median(getattr(self, clock)[kernel]))

    def __add__(self, other: "Slices") -> "Slices":
        return Slices(
            {kernel: self.wall[kernel] + other.wall[kernel] for kernel in KERNELS},
            {kernel: self.cpu[kernel] + other.cpu[kernel] for kernel in KERNELS},
        )


class Calibration:
    """The kernels of one task: fixed amounts of what methods are made of."""

    def __init__(self, task: Task, model: Any):
        examples = task.train_data.select(range(min(TRAINING_BATCH, len(task.train_data))))
        self.task, self.batch = task, (examples.inputs, examples.targets)
        self.model = copy.deepcopy(model).eval()  # a method may have hooks on its own in the middle of a run
        self.source = np.ones(MEMORY_NUMBERS, dtype=np.float32)
        self.target = np.zeros_like(self.source)
        self.run(Slices(), 2)  # the first pays for set-up

    def run(self, slices: Slices, count: int = 1) -> Slices:
        for _ in range(count):
            for kernel, work in zip(KERNELS, (self._train, self._walk), strict=True):
                wall, cpu = time.perf_counter(), time.process_time()
                work()
                slices.wall[kernel].append(time.perf_counter() - wall)
                slices.cpu[kernel].append(time.process_time() - cpu)
        return slices

    def _train(self) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            torch.autograd.grad(self.task.example_loss(self.model, self.batch).mean(), parameters, allow_unused=True)

    def _walk(self) -> None:
        np.add(self.source, 1, out=self.target)


# ---- timing a method ----


class Clock:
    """Times a method's fit and score, with slices of calibration before, between and after."""

    def __init__(self, calibration: Calibration):
        self.calibration = calibration
        self.before, self.during, self.after = Slices(), Slices(), Slices()
        self.seconds = self.cpu_seconds = 0.0
        self._last_slice = 0.0

    def progress(self, items: Iterable[_Item], total: int | None = None, description: str = "") -> Iterator[_Item]:
        """Given to the method as its `Problem.progress`: a slice now and then."""
        for item in items:
            yield item
            if time.perf_counter() - self._last_slice > SECONDS_BETWEEN:
                self.calibration.run(self.during)
                self._last_slice = time.perf_counter()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The method's time, without that of the slices in it."""
        start, wall, cpu = Moment.now(), self.during.total("wall"), self.during.total("cpu")
        self._last_slice = start.wall
        try:
            yield
        finally:
            end = Moment.now()
            self.seconds += end.wall - start.wall - (self.during.total("wall") - wall)
            self.cpu_seconds += end.own_cpu - start.own_cpu - (self.during.total("cpu") - cpu)

    def time(self, method: Method, problem: Problem) -> tuple[Attribution, Timing]:
        """problem: one whose `progress` is this clock's."""
        start = Moment.now()
        self.calibration.run(self.before, SLICES_AROUND)
        attribution, _ = measure(_Clocked(method, self), problem)  # type: ignore[arg-type]
        self.calibration.run(self.after, SLICES_AROUND)
        end = Moment.now()
        slices = self.before + self.during + self.after
        timing = Timing(
            seconds=self.seconds,
            cpu_seconds=self.cpu_seconds,
            kernel_seconds={kernel: slices.median("wall", kernel) for kernel in KERNELS},
            kernel_cpu_seconds={kernel: slices.median("cpu", kernel) for kernel in KERNELS},
            busy=why_busy(start, end, self.before, self.after, slices),
        )
        return attribution, timing


class _Clocked:
    """A method whose fit and score are timed by this clock as well."""

    def __init__(self, method: Method, clock: Clock):
        self._method, self._clock = method, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def fit(self, problem: Problem) -> Any:
        with self._clock.running():
            return self._method.fit(problem)

    def score(self, problem: Problem, state: Any) -> Attribution:
        with self._clock.running():
            return self._method.score(problem, state)
