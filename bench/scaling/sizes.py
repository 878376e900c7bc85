"""How large the whole run of a point is: what its ladder climbs to."""

from typing import Any

MEMORY = ("peak_memory_bytes", "peak_reserved_bytes", "host_peak_bytes", "disk_bytes")  # columns of a rung
FEW_DRAWS = 8  # a chain: so many are timed at once, without fewer before
MOST_FITTED = 20_000  # a larger fitting set is never measured, only projected


def whole_size(spec: dict[str, Any]) -> dict[str, int]:
    return {
        "draws": spec["draws"],
        "layers": spec["configuration"]["layers"],
        "train": spec["train"],
        "queries": spec["queries"],
        "fit_examples": spec["fit_examples"],
    }
