"""How much memory there is to use."""

import os
from typing import Any

import torch


def free_bytes(device: torch.device) -> int:
    """Free memory of the device; for the CPU what the system calls available, or 4 GiB where it does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + reusable
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 4 << 30


def refuse_if_too_large(method: Any, size: Any) -> str | None:
    """Why a method would not fit, before anything is computed; None where it does or says nothing of itself."""
    needed, free = method.memory_bytes(size), free_bytes(size.device)
    if needed <= free:
        return None
    return f"it would hold {needed / 2**30:.1f} GiB at once, and {free / 2**30:.1f} GiB are free"
