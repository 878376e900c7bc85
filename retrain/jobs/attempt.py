"""One attempt at one unit: claim it, do it, and say what it came to.

A failure is told in two parts. The reason is for people: its first line has the exception, its message, and the file
and line in the code of whoever wrote the task or method; the second has the path of a log with the whole traceback.
`error` and `place` are for programs: the same pair from several units is a bug and not bad luck (`book.py`). A unit
that fails because one that it needs failed is told as that one was: `Told` carries its traceback on.
"""

from __future__ import annotations

import contextlib
import os
import re
import sysconfig
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.errors import UsageError, error_line
from retrain.jobs.campaign import Campaign
from retrain.jobs.claims import Claims, Holder
from retrain.jobs.unit import Unit
from retrain.safe_files import SafeFileError, one_line, open_plain
from retrain.store import PASSING, PassingStoreError, Store, UnwritableStoreError
from retrain.work import Work

LOG_LINES = 15
LOG_HEAD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", re.MULTILINE)  # before each traceback of a log
MAX_TRACEBACK = 200_000
MAX_LOG = 2**40
PACKAGES = Path(__file__).resolve().parents[2]  # where retrain, baselines and bench are
LIBRARIES = tuple({os.path.realpath(path) for name, path in sysconfig.get_paths().items() if "lib" in name})


@dataclass(frozen=True)
class Attempt:
    """What one attempt at a unit came to.

    status: done; found (it was done already); busy (another process has it); failed; unfinished (it was stopped, and
    what it saved is further than before); fatal (stop everything); refused (its last holder died, once too often).
    """

    status: str
    seconds: float = 0.0
    reason: str = ""
    error: str = ""
    place: str = ""

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> Attempt:
        """The one that failed or died by what a log says of it; people read it, so no line may pass for another."""
        reason = "\n".join(one_line(line, 1000) for line in event.get("reason", "").split("\n"))
        return cls("failed", 0.0, reason, event.get("error", ""), event.get("place", ""))


def do_unit(
    store: Store, claims: Claims, key: str, unit: Unit, take_over: Callable[[Holder], str] | None = None
) -> Attempt:
    """Do one unit unless it is done or another process is at it.

    take_over: called when the unit was held by a process that died; a reason it returns is why not to try once more.
    """
    try:
        if store.has_key(unit.kind, key):
            return Attempt("found")
        claim = claims.take(unit.kind, key)
    except PassingStoreError as error:
        return Attempt("failed", reason=str(error))
    except OSError as error:
        if error.errno in PASSING:
            return Attempt("failed", reason=f"the unit could not be claimed ({error})")
        return Attempt("fatal", reason=str(store.unwritable(error)), error=UnwritableStoreError.__name__)
    if claim is None:
        return Attempt("busy")
    with claim:
        start = time.perf_counter()
        try:
            if store.has_key(unit.kind, key):
                Work.of(store, unit.kind, key).clear()
                return Attempt("found")
            if take_over is not None and claim.previous is not None:
                refusal = take_over(claim.previous)
                if refusal:
                    return Attempt("refused", reason=refusal)
            if store.key(unit.kind, unit.config) != key:
                return Attempt("failed", reason=f"{unit.kind} {key} is listed under a key that is not its own")
            function = unit.function()
            start = time.perf_counter()
            function(store, unit)
            seconds = time.perf_counter() - start
            if not store.has_key(unit.kind, key):
                reason = f"{unit.call} returned without writing its entry to the store"
                return Attempt("failed", reason=reason, error="nothing written", place=unit.call)
        except (UsageError, UnwritableStoreError) as error:
            return Attempt("fatal", reason=str(error), error=type(error).__name__)
        except Exception as error:
            return failure(error, Campaign(store, claims.campaign) if claims.campaign else None, unit, key)
        Work.of(store, unit.kind, key).clear()
        return Attempt("done", seconds)


class Told(Exception):
    """The traceback of a unit that failed, as the cause of what fails with it."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0].strip()}\n"""'


# -- failures ---------------------------------------------------------------------------------------------------------


def failure(error: Exception, campaign: Campaign | None, unit: Unit, key: str) -> Attempt:
    """An exception as an attempt that failed; its traceback goes to a log of the campaign."""
    # Of one that needed another the place is the other's, which its message names.
    needed = isinstance(error.__cause__, Told)
    file, line = ("", 0) if needed else blamed(error)
    place = f"{file}:{line}" if file else ""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))[-MAX_TRACEBACK:]
    words = str(error).split("\n")[0] if needed else error_line(error, 500)
    first = one_line(words, 600) + (f" ({one_line(shortened(file))}:{line})" if file else "")
    log = _log_traceback(text, campaign, unit, key)
    if log is not None:
        lines = [first, f"    the traceback is in {log}"]
    else:
        lines = [first, *indented(text.strip().splitlines()[-LOG_LINES:])]
    name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    return Attempt("failed", reason=_utf8("\n".join(lines)), error=_utf8(name)[:200], place=_utf8(place)[:5000])


def blamed(error: BaseException) -> tuple[str, int]:
    """(file, line) of the innermost call in a task's or method's code; else in ours; else wherever it was raised."""
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno or 0
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    for ours in (_is_plugin, _is_no_library):
        for file, line in reversed(frames):
            if ours(file):
                return file, line
    return frames[-1] if frames else ("", 0)


def _is_plugin(file: str) -> bool:
    """Whether a file is somebody's task or method: outside this suite and every library, or where its own are."""
    path = os.path.realpath(file)
    if not path.startswith(f"{PACKAGES}{os.sep}"):
        return _is_no_library(file)
    parts = Path(path).relative_to(PACKAGES).parts
    if parts[0] in ("retrain", "baselines", "bench"):
        return parts[0] == "baselines" or parts[:2] == ("retrain", "tasks")
    return _is_no_library(file)


def _is_no_library(file: str) -> bool:
    if file.startswith("<"):
        return False
    path = os.path.realpath(file)
    if path.startswith(tuple(f"{PACKAGES}{os.sep}{name}{os.sep}" for name in ("retrain", "baselines", "bench"))):
        return True  # also where it was installed among the libraries
    parts = Path(path).parts
    return not path.startswith(LIBRARIES) and not {"site-packages", "dist-packages"} & set(parts)


def shortened(file: str) -> str:
    """A file as one would type it from here."""
    with contextlib.suppress(ValueError, OSError):
        relative = os.path.relpath(file)
        if not relative.startswith(os.pardir):
            return relative
    return file


def _log_of(campaign: Campaign, unit: Unit, key: str) -> Path:
    return campaign.folder / "failures" / f"{unit.kind}.{key}.log"


def last_traceback(campaign: Campaign, unit: Unit, key: str) -> str:
    """The traceback of a unit's latest failure, line by line printable; empty where its log has none."""
    try:
        with open_plain(_log_of(campaign, unit, key), MAX_LOG) as (file, size):
            file.seek(max(0, size - MAX_TRACEBACK))
            text = file.read(MAX_TRACEBACK).decode("utf-8", "replace")
    except (OSError, SafeFileError):
        return ""
    heads = [match.start() for match in LOG_HEAD.finditer(text)]
    lines = text[heads[-1] if heads else 0 :].strip().split("\n")[1 if heads else 0 :]
    return "\n".join(one_line(line, 2000) for line in lines)


def _log_traceback(text: str, campaign: Campaign | None, unit: Unit, key: str) -> Path | None:
    if campaign is None:
        return None
    try:
        campaign.subfolder("failures")
        path = _log_of(campaign, unit, key)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(path, flags, 0o644), "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {Holder.this_process()}\n{text}\n")
    except OSError:
        return None
    return path


def _utf8(text: str) -> str:
    """Text that any log takes: a message may hold bytes that are no characters."""
    return text.encode("utf-8", "backslashreplace").decode()


def tail(path: Path, offset: int = 0, lines: int = LOG_LINES) -> list[str]:
    """The last lines of a log from `offset` on, indented; empty when there is none."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(offset, size - 8192))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return indented([line[:400] for line in text.strip().splitlines()[-lines:]])


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
