"""Limits on seconds that hold on a slow or busy machine: they grow with what plain Python takes beside them."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

USUAL = 0.02  # seconds of `_plain_python` on a fast core


def _plain_python() -> float:
    start, found = time.process_time(), {}
    for number in range(200_000):
        found[number] = number + 1
    return time.process_time() - start


def _spent(children: bool) -> float:
    """Not the seconds that others keep the machine busy."""
    times = os.times()
    return times.children_user + times.children_system if children else time.process_time()


@contextmanager
def at_most(seconds: float, *, children: bool = False) -> Iterator[None]:
    """What is within takes less of a core than `seconds`, or as much longer as this machine is slower: of this process,
    or of the children it waits for."""
    before, start = _plain_python(), _spent(children)
    yield
    spent = _spent(children) - start
    slower = max(1.0, before / USUAL, _plain_python() / USUAL)
    assert spent < seconds * slower, f"{spent:.2f} s; expected {seconds:g} s x {slower:.1f} for this machine"
