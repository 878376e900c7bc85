"""The sweep's table and what it writes: scaling.csv and scaling.json, whole or not at all."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from bench.records import without_nan
from bench.scaling.estimate import method_label
from bench.scaling.rows import POINT_COLUMNS
from bench.tables import bytes_text, duration, table
from retrain.safe_files import write_whole


def write_table(out: Path, record: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    write_whole(out / "scaling.json", json.dumps(without_nan(record), indent=1) + "\n")
    write_csv(out / "scaling.csv", rows)


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    write_whole(path, pd.DataFrame(list(rows), columns=POINT_COLUMNS).to_csv(index=False))


def show_rows(rows: Sequence[dict[str, Any]], wide: bool = False) -> str:
    """At most 100 columns; with `wide`, every part of the seconds and where projections come from."""
    header = ["model", "method", "fitted on", "queries", "fit + score", "95 % interval", "peak memory", "disk"]
    more = ["load", "fit", "score", "a draw", "x floor", "timed", "held out"]
    lines: list[list[str]] = []
    notes: list[str] = []
    for row in rows:
        name = [
            row["model"], method_label(row["method"]), f"{row['fit_examples']:,.0f}" if row["fit_examples"] else "-",
            f"{row['queries']:,.0f}",
        ]  # fmt: skip
        if row["error"]:
            lines.append(name + ["-"] * (len(header) - len(name) + (len(more) if wide else 0)))
            notes.append(f"{row['model']} {row['method']}: {row['error']}")
            continue
        if wide and row["projected"]:
            notes.append(f"{' '.join(name[:3])}: projected from {row['projected_from']}")
        cells = [
            *name,
            duration(row["fit_seconds"] + row["score_seconds"]) + (" *" if row["projected"] else "  "),
            f"[{duration(row['seconds_low'])}, {duration(row['seconds_high'])}]" if row["projected"] else "",
            bytes_text(row["peak_memory_bytes"]),
            bytes_text(row["disk_bytes"]) if row["disk_bytes"] else "-",
        ]
        if wide:
            cells += _more(row)
        lines.append(cells)
    text = table(header + (more if wide else []), lines, left=2)
    if any(row["projected"] for row in rows):
        text += "\n* projected from smaller sizes" + ("" if wide else "; --wide says from which")
    return "\n".join([text, *dict.fromkeys(notes)])


def _more(row: dict[str, Any]) -> list[str]:
    each, off = row["seconds_per_draw"], row["held_out_error"]
    return [
        duration(row["load_seconds"]),
        duration(row["fit_seconds"]) if row["fit_seconds"] > 1e-3 else "-",
        duration(row["score_seconds"]),
        duration(each) if each else "-",
        f"{row['floor_ratio']:.2f}" if row["floor_ratio"] else "-",
        f"{row['timed_draws']:.0f} draws" if row["timed_draws"] else "-",
        f"{100 * off:+.1f} %" if off is not None else "-",
    ]


def progress_line(row: dict[str, Any], position: int, count: int) -> str:
    fitted = f" fitted on {row['fit_examples']:,.0f}" if row["fit_examples"] else ""
    start = f"[{position}/{count}] {row['model']} {row['method']}{fitted}, {row['queries']:,.0f} queries"
    if row["error"]:
        return f"{start}: {row['error']}"
    kind = f"projected from {row['projected_from']}" if row["projected"] else "measured"
    return f"{start}: {duration(row['fit_seconds'] + row['score_seconds'])}, {kind}"
