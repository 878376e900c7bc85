"""How numbers are written for people: digits, bytes, durations and aligned columns, alike in every command."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def short_number(value: float | None) -> str:
    """Three digits that count, of any size; thousands as people write them: -11,200."""
    if value is None or not math.isfinite(value):
        return "-"
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if 1000 <= abs(rounded) < 1e7 else f"{value:.3g}"


def interval(low: float | None, high: float | None, digits: int = 3) -> str:
    return f"[{number(low, digits)}, {number(high, digits)}]"


def bytes_text(num_bytes: float | None) -> str:
    if num_bytes is None or not math.isfinite(num_bytes):
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit in ("B", "KiB", "MiB") else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def duration(seconds: float | None) -> str:
    """Three digits below two minutes, then the two largest units."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if round(seconds) < 3600:
        return "{} min {:02d} s".format(*divmod(round(seconds), 60))
    if round(seconds / 60) < 24 * 60:
        return "{} h {:02d} min".format(*divmod(round(seconds / 60), 60))
    return "{:,} d {} h".format(*divmod(round(seconds / 3600), 24))


def setting_text(value: Any) -> str:
    """An option's value as people write it; an empty pattern of parameters takes all of them."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value) or "all"
    return f"{value:g}"


RELATIVE = "relative_"


def relative_of(options: Iterable[str]) -> set[str]:
    """What these options take the place of when given: a damping that of `relative_damping`."""
    return {f"{RELATIVE}{option}" for option in options}


def in_place_of(options: Iterable[str]) -> set[str]:
    """These, and what they take the place of: a damping that of `relative_damping`, and the other way round."""
    given = set(options)
    return given | relative_of(given) | {option.removeprefix(RELATIVE) for option in given}


def acting(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without the relative options that do nothing because the absolute one is given."""
    idle = relative_of(name for name, value in options.items() if value is not None)
    return {name: value for name, value in options.items() if name not in idle}


MAX_WIDTH = 160  # of a table that has as many columns as somebody asked for


def tables(header: Sequence[str], rows: Sequence[Sequence[str]], width: int = MAX_WIDTH) -> str:
    """One table, or, where it were too wide, several below each other: each has the first column and some others."""
    columns = [max(len(line[i]) for line in [header, *rows]) + 2 for i in range(len(header))]
    parts: list[list[int]] = [[]]
    for i in range(1, len(header)):
        if parts[-1] and columns[0] + sum(columns[j] for j in parts[-1]) + columns[i] - 2 > width:
            parts.append([])
        parts[-1].append(i)
    chosen = [[0, *part] for part in parts]
    return "\n\n".join(table([header[i] for i in some], [[row[i] for i in some] for row in rows]) for some in chosen)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int | Sequence[int] = 1) -> str:
    """Columns aligned; the first `left` (or the columns of these numbers) to the left, the others to the right."""
    lefts = set(range(left) if isinstance(left, int) else left)
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    lines = []
    for line in [header, ["-" * width for width in widths], *rows]:
        cells = [
            cell.ljust(w) if i in lefts else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
