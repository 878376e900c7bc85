"""How much memory there is to use: of a GPU, of the system, and of the cgroups that this process is in."""

import contextlib
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch

UNLIMITED = 2**60  # version 1 writes "no limit" as a number that no machine has
# Pages the kernel gives back when somebody needs them: they are in a cgroup's usage, and free for all that.
RECLAIMABLE = {2: ("inactive_file", "active_file", "slab_reclaimable"), 1: ("total_inactive_file", "total_active_file")}
LIMIT_AND_USAGE = {2: ("memory.max", "memory.current"), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes")}


def free_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """Free memory of the device; for the CPU what system and cgroups (Slurm's --mem, a container) leave of it."""
    if device.type == "cuda":
        return _not_ours(device) - torch.cuda.memory_allocated(device)
    return min([_system_free_bytes(root), *cgroup_free_bytes(root)])


@lru_cache
def _not_ours(device: torch.device) -> int:
    """What others left of the GPU when this process first asked: the driver takes a third of a second to say so."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def _system_free_bytes(root: Path) -> int:
    """What the system calls available, or 4 GiB where it does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 4 << 30


def cgroup_free_bytes(root: Path = Path("/")) -> list[int]:
    """What each limited cgroup that this process is in has left, its parents included."""
    return [left for version, folder in _cgroups(root) if (left := _left(version, folder)) is not None]


def _cgroups(root: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of this process's memory cgroups, from its own up to the mount."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounted = root / "sys/fs/cgroup"
    for line in lines:  # "0::/path" is version 2, "4:memory:/path" version 1
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            version, tops = 2, [mounted, mounted / "unified"]
        elif "memory" in controllers.split(","):
            version, tops = 1, [mounted / "memory"]
        else:
            continue
        for top in tops:
            # A container may see its own cgroup as the mount itself, under a path that only its host has.
            own = Path(os.path.normpath("/" + path.lstrip("/"))).relative_to("/")
            for folder in (top / own, *(top / parent for parent in own.parents)):
                yield version, folder


def _left(version: int, folder: Path) -> int | None:
    """The limit less what is used and cannot be reclaimed; None where there is no limit, or no such cgroup."""
    limit_file, usage_file = LIMIT_AND_USAGE[version]
    try:
        limit = int((folder / limit_file).read_text())
        usage = int((folder / usage_file).read_text())
    except (OSError, ValueError):  # "max": no limit
        return None
    if limit >= UNLIMITED:
        return None
    with contextlib.suppress(OSError, ValueError):
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        usage -= sum(int(counts.get(name, 0)) for name in RECLAIMABLE[version])
    return max(0, limit - max(0, usage))
