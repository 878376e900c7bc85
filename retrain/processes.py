"""Which process is which, here and on other hosts: names for leases and temporary folders, and who still lives.

A process is known by its host, its id and when it began. The host's name holds the pid namespace (two containers may
share a name but not their processes) and the boot (after a restart the same ids are other processes).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import signal
import socket
from pathlib import Path

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def process_name() -> str:
    """`host.pid` of this process, fit for a file's name."""
    return f"{host_name()}.{os.getpid()}"


def host_name() -> str:
    parts = [re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:64] or "host"]
    with contextlib.suppress(OSError):
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return "-".join([*parts, boot_id()]).strip("-")


@functools.cache
def boot_id() -> str:
    """Eight digits that are others after every start of the machine; empty where the system has none."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
    return re.sub(r"[^0-9a-f]", "", text)[:8]


def process_alive(pid: int) -> bool:
    """Whether a process with this id runs on this host (a zombie does not)."""
    if pid < 1:  # to kill() these mean groups of processes
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return not {"Z", "X"} & set(_stat_fields(pid)[:1])


def process_started(pid: int) -> int:
    """When a process began, in clock ticks since boot (0: unknown): tells it from a later one with the same id."""
    fields = _stat_fields(pid)
    return int(fields[19]) if len(fields) > 19 and fields[19].isdigit() else 0


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which may itself hold blanks and brackets."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode("ascii", "replace").split()
    except OSError:
        return []


def die_with(parent: int) -> None:
    """From now on this process is killed when its parent dies, however that dies; at once if it has died already."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
