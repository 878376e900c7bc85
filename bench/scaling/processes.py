"""Starts the processes of the points, waits for them no longer than they may take, and says how each ended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.scaling.plan import START_SECONDS
from bench.scaling.specifications import ROOT
from retrain.progress import WATCH_SECONDS, bar

DELAY_SECONDS = 5.0  # a point that ends before needs no bar


class Processes:
    """Starts points; on a GPU the next one's imports run while the present one is measured."""

    def __init__(self, folder: Path, ahead: bool):
        self.folder, self.ahead = folder, ahead
        self.spare: subprocess.Popen[str] | None = None
        self.count = 0

    def _start(self) -> subprocess.Popen[str]:
        self.count += 1
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with open(self.folder / f"stderr-{self.count}", "w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.scaling.point", "--spec", "-"],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, text=True,
                env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
            )  # fmt: skip
        process.errors = Path(errors.name)  # type: ignore[attr-defined]
        return process

    def prepare(self) -> None:
        """Lets the next point import ahead of its turn; on a CPU that would disturb the one being measured."""
        if self.ahead and self.spare is None:
            self.spare = self._start()

    def measure(self, spec: dict[str, Any], limit: float, more: bool) -> dict[str, Any]:
        """The point's result; after `limit` seconds what it had measured until then."""
        process, self.spare = self.spare or self._start(), None
        result = Path(spec["result"])
        try:
            path = result.with_suffix(".spec")
            path.write_text(json.dumps(spec))
            assert process.stdin is not None
            process.stdin.write(f"{path}\n")
            process.stdin.close()
            if more:
                self.prepare()
            ended = _ends_within(limit, process, spec)
        finally:
            end_process(process)
        found: dict[str, Any] = json.loads(result.read_text()) if result.is_file() else {"rungs": []}
        if not ended:
            found["stopped"] = f"stopped after {limit:.0f} s"
        elif not found.get("finished") and not found.get("error"):
            found["error"] = how_it_ended(process.returncode, process.errors)  # type: ignore[attr-defined]
        return found

    def close(self) -> None:
        if self.spare is not None:
            end_process(self.spare)


def _ends_within(limit: float, process: subprocess.Popen[str], spec: dict[str, Any]) -> bool:
    """Waits, and says how long already and how much is measured: a point's own clock must not be disturbed by it."""
    started, most = time.monotonic(), START_SECONDS + spec["budget_seconds"]
    words = f"{spec['configuration']['name']} {spec['method']}"
    form = "{desc} {percentage:3.0f}%|{bar}| {n:.0f} s of about {total:.0f} s{postfix}"
    with bar(desc=words, total=min(most, limit), delay=DELAY_SECONDS, leave=False, bar_format=form) as shown:
        while (passed := time.monotonic() - started) < limit:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=min(WATCH_SECONDS, limit - passed))
                return True
            shown.set_postfix_str(_measured(spec), refresh=False)
            shown.update(min(passed, shown.total) - shown.n)
    return process.poll() is not None


def _measured(spec: dict[str, Any]) -> str:
    """How many sizes are there; nothing before the first."""
    with contextlib.suppress(OSError, ValueError):
        count = len(json.loads(Path(spec["result"]).read_text())["rungs"])
        return f"{count} size{'s' if count > 1 else ''} measured" if count else ""
    return ""


def end_process(process: subprocess.Popen[str]) -> None:
    """The point and whatever it started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def how_it_ended(code: int, errors: Path) -> str:
    if code == -signal.SIGKILL:
        return "the process was killed (signal 9): out of memory, or somebody ended it"
    if code < 0:
        return f"the process was ended by signal {-code}"
    lines = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
    return f"the process exited with {code}" + (f": {lines[-1].strip()[:200]}" if lines else "")
