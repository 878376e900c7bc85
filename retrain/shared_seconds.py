"""Seconds of what runs side by side on one device: each moment is divided among those that are at work in it.

with SHARED.measured() as seconds:
    ...
seconds()       # the shares of everybody add up to the time during which anybody was at work
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SharedSeconds:
    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._lock = clock, threading.Lock()
        self._at_work, self._share, self._since = 0, 0.0, 0.0

    def _arrive(self, change: int) -> float:
        """Count somebody in or out; what one who was there all along would have been given so far."""
        with self._lock:
            now = self._clock()
            if self._at_work:
                self._share += (now - self._since) / self._at_work
            self._at_work, self._since = self._at_work + change, now
            return self._share

    @contextmanager
    def measured(self) -> Iterator[Callable[[], float]]:
        start = end = self._arrive(+1)
        try:
            yield lambda: end - start
        finally:
            end = self._arrive(-1)


SHARED = SharedSeconds()  # a process works on one device
