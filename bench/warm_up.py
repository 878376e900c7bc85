"""A method on a small version of a question before it is timed: libraries load, kernels are compiled and chosen."""

import contextlib
from dataclasses import replace

import numpy as np

from baselines.method import Method, Problem
from bench.measure import measure

WARM_UP_QUERIES = 64  # and as many attributed examples


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
    )
