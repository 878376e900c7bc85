"""A method on a small version of a question before it is timed: libraries load, kernels are compiled and chosen."""

import contextlib
import json
from dataclasses import replace

import numpy as np

from baselines.method import Method, Problem, no_progress
from bench.measure import measure

WARM_UP_QUERIES = 64  # and as many attributed examples
# Methods that a small version of the question makes short; others retrain, or ask other methods, whatever its size.
QUICK_WHEN_SMALL = frozenset({"bif", "ekfac", "kfac", "trak", "gradsim"})
SLOW_AT_FIRST = frozenset({"cuda"})  # devices whose kernels are compiled and loaded when they are first needed

_warm: set[tuple[str, str]] = set()  # (task, method and settings) that this process has run


def warm_up_once(method: Method, problem: Problem) -> None:
    """Else the first of a process may pay for all: on an H200 EK-FAC took 4 to 8 s more, BIF's pilot 4.6 for 0.2."""
    known = (problem.task.name, json.dumps(method.config, sort_keys=True, default=str))
    if problem.device.type in SLOW_AT_FIRST and method.name in QUICK_WHEN_SMALL and known not in _warm:
        _warm.add(known)
        warm_up(method, problem)


def warm_up(method: Method, problem: Problem) -> None:
    small = small_version(problem)
    small.scratch.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(Exception):  # few examples are too few for some settings; what is wrong shows when timed
        measure(replace(method, **method.warm_up), small)


def small_version(problem: Problem) -> Problem:
    """The same question about a few examples. TRAK and EK-FAC still fit on what they are given, so it is cut too."""
    few = min(4 * WARM_UP_QUERIES, len(problem.train))
    return replace(
        problem,
        train=problem.train.select(range(few)),
        attributed_indices=np.arange(min(WARM_UP_QUERIES, few)),
        queries=problem.queries.select(range(min(WARM_UP_QUERIES, len(problem.queries)))),
        scratch=problem.scratch / "warm-up",
        progress=no_progress,
    )
