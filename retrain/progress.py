"""Progress bars with ETA on stderr: tqdm's on a terminal; elsewhere a line now and again."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

MOMENT = 2.0  # seconds without a bar
WATCH_SECONDS = 1.0
LOG_SECONDS = 10.0  # between the frames of a progress bar that nobody watches

Progress = Callable[[int, int], None]  # called with (number done, number of all)


def bar(items: Iterable[Any] | None = None, **options: Any) -> Any:
    """A progress bar with ETA on stderr: tqdm's on a terminal; elsewhere a line at most every LOG_SECONDS."""
    from tqdm import tqdm

    if sys.stderr.isatty():
        return tqdm(items, file=sys.stderr, dynamic_ncols=True, **options)
    # Below another bar, tqdm would move the cursor, and a bar that is not left behind would be wiped out with blanks.
    calm = {"mininterval": LOG_SECONDS, "maxinterval": LOG_SECONDS, "position": 0, "leave": True}
    return tqdm(items, file=_Lines(), **{**options, **calm})


def progress_bar(items: Iterable, total: int | None = None, description: str = "") -> Iterator[Any]:
    """A bar over `items`, shown only for what takes longer than a moment, be it the first of them alone."""
    shown = bar(items, total=total, desc=description, delay=MOMENT, leave=False)

    def show() -> None:
        shown.delay = 0  # or tqdm would take it for one that was never shown
        shown.refresh()

    timer = threading.Timer(MOMENT, show)
    timer.daemon = True
    timer.start()
    try:
        yield from shown
    finally:
        timer.cancel()


class _Lines:
    """stderr as a log: every frame of a bar is a line, once."""

    last = ""

    def write(self, text: str) -> None:
        frame = text.strip()
        if frame and frame != self.last:
            sys.stderr.write(f"{frame}\n")
            self.last = frame

    def flush(self) -> None:
        sys.stderr.flush()

    @property
    def encoding(self) -> str:
        return sys.stderr.encoding


def close_bars() -> None:
    """Before last words, so that they stand on a line of their own."""
    from tqdm import tqdm

    for one in list(getattr(tqdm, "_instances", [])):
        one.close()


@contextlib.contextmanager
def beside_bars() -> Iterator[None]:
    """What is printed inside stands above the bars that go on."""
    from tqdm import tqdm

    with tqdm.external_write_mode(file=sys.stderr):
        yield


@contextlib.contextmanager
def progress_counter(progress: bool | Progress, name: str, say: Callable[[], str] | None = None) -> Iterator[Progress]:
    """A function to call with (done, all): the caller's own, a bar's, or one that does nothing.

    say: what the bar also shows, asked once a second: how far the units in progress are.
    """
    if callable(progress):
        yield progress
        return
    made: list[Any] = []
    stop = threading.Event()

    def show(num_done: int, num_total: int) -> None:
        if progress and not made:
            # What was there before the run says nothing about its speed.
            made.append(bar(desc=name or None, total=num_total, initial=num_done, unit="unit", smoothing=0.1))
        for one in made:
            one.update(num_done - one.n)

    def ask() -> None:
        while not stop.wait(WATCH_SECONDS):
            if made and say is not None and (words := say()):
                made[0].set_postfix_str(words, refresh=sys.stderr.isatty())

    thread = threading.Thread(target=ask, name="watching", daemon=True)
    if say is not None:
        thread.start()
    try:
        yield show
    finally:
        stop.set()
        if say is not None:
            thread.join()
        for one in made:
            one.close()
