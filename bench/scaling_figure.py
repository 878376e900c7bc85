"""The panels of the scaling figure: seconds, peak memory and disk against model size, a line a method.

`python -m bench.figures --only scaling` draws it (paper: fig:benchmark_big_ek-fac). Filled markers were measured,
hollow ones projected, with their interval; thin grey lines are the paper's laws, each moved to touch its method.
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from bench.scaling_fits import Curve, draw_flops
from bench.style import in_order, look

PANELS = (("seconds", 1.0), ("peak_memory_bytes", 2.0**30), ("disk_bytes", 2.0**30))
LAW = "#8a8f98"
LAWS = {"bif": ("draws (n + q) d", (0, (1, 1))), "ekfac": (r"$\Sigma$ d_in³ + d_out³", (0, (4, 1, 1, 1)))}


def usable(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with numbers, with fit and score added up."""
    if "error" in rows:
        rows = rows[rows["error"].isna() | (rows["error"] == "")]
    rows = rows.assign(seconds=rows["fit_seconds"].fillna(0) + rows["score_seconds"])
    rows["projected"] = rows["projected"].map(lambda value: str(value) == "True") if "projected" in rows else False
    return rows.sort_values("parameters")


def draw_panel(axis: Axes, rows: pd.DataFrame, column: str, unit: float) -> None:
    """One line a method; its slope in log-log, beside the method's mark, in the corner."""
    slopes: list[tuple[str, str]] = []
    methods = in_order(rows["method"])
    for method in methods:
        shape = look(method, methods)
        block = rows[(rows["method"] == method) & (rows[column] > 0)]
        if not len(block):
            continue
        x, y = block["parameters"].to_numpy(float), block[column].to_numpy(float) / unit
        axis.plot(x, y, **(shape | {"marker": None, "label": "_"}))
        mark = {"color": shape["color"], "marker": shape["marker"], "linestyle": "none"}
        projected = block["projected"].to_numpy(bool)
        axis.plot(x[~projected], y[~projected], **mark, zorder=3)
        axis.plot(x[projected], y[projected], **mark, markerfacecolor="white", zorder=3)
        # The legend's, with line and marker, hollow where nothing was measured.
        axis.plot([], [], **(shape | ({"markerfacecolor": "white"} if projected.all() else {})))
        if column == "seconds" and "seconds_low" in block and projected.any():
            ends = block[projected & block["seconds_low"].notna().to_numpy()]
            # An interval that reaches zero has no end on this axis: it is cut at a tenth of its value.
            lows = np.maximum(ends["seconds_low"], ends["seconds"] / 10)
            axis.vlines(ends["parameters"], lows, ends["seconds_high"], color=shape["color"], linewidth=0.8)
        if len(block) > 1:
            slopes.append((f"{shape['label']} slope {Curve(x, y).slope:.2f}", shape["color"]))
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * (high / low) ** (0.08 * len(slopes)))  # room for the words
    for position, (text, colour) in enumerate(slopes):
        axis.text(0.03, 0.97 - 0.075 * position, text, transform=axis.transAxes, va="top", fontsize=6, color=colour)


def draw_laws(axis: Axes, rows: pd.DataFrame) -> list[str]:
    """O(draws (n + q) d) through BIF's largest model, sum of cubes through EK-FAC's; whose were drawn."""
    drawn = []
    for method, (name, dash) in LAWS.items():
        block = rows[(rows["method"] == method) & (rows["seconds"] > 0)]
        law = law_of(block, method)
        if law is None or len(block) < 2:
            continue
        x = block["parameters"].to_numpy(float)
        y = law / law[-1] * block["seconds"].to_numpy(float)[-1]
        axis.plot(x, y, color=LAW, linestyle=dash, linewidth=0.9, zorder=0, label=name)
        drawn.append(method)
    return drawn


def law_of(block: pd.DataFrame, method: str) -> np.ndarray | None:
    if method == "ekfac":
        known = "eigen_cost" in block and block["eigen_cost"].notna().all()
        return block["eigen_cost"].to_numpy(float) if known else None
    needed = ["token_parameters", "train", "queries", "minibatch", "tokens", "draws"]
    if not all(name in block and block[name].notna().all() for name in needed):
        return None
    return np.array([row["draws"] * draw_flops(*(row[name] for name in needed[:-1])) for _, row in block.iterrows()])


def marks(rows: pd.DataFrame) -> str:
    """What the markers of these rows mean."""
    hollow = "Hollow: projected from smaller runs, bars the 95 % interval." if rows["projected"].any() else ""
    filled = "" if rows["projected"].all() else "Filled: measured."
    return f"{hollow} {filled}".strip()


def explain(rows: pd.DataFrame, everything: pd.DataFrame, laws: list[str]) -> str:
    """The caption's facts: setting, what is projected, what failed, what the grey lines are."""
    parts = []
    first: dict[str, Any] = rows.iloc[0].to_dict()
    if {"train", "queries", "tokens"} <= set(rows):
        draws = rows["draws"].dropna() if "draws" in rows else pd.Series(dtype=float)
        parts.append(
            f"{first['train']:.0f} training sequences, {first['queries']:.0f} queries, {first['tokens']:.0f} tokens"
            + (f", {draws.iloc[0]:,.0f} draws" if len(draws) else "")
            + (f"; weights: {', '.join(sorted(map(str, set(rows['weights']))))}" if "weights" in rows else "")
            + "."
        )
    parts.append(marks(rows))
    if "seconds_low" in rows and (rows["seconds_low"] < rows["seconds"] / 10).any():
        parts.append("A bar that reaches zero is cut at a tenth of its value.")
    if laws:
        parts.append("Grey: the paper's laws, each through the largest model of the method it is for.")
    failed = everything[~everything.index.isin(rows.index)]
    if len(failed):
        names = "; ".join(f"{row['model']} {row['method']}: {row['error']}" for _, row in failed.iterrows())
        parts.append(f"Without numbers: {names}.")
    return " ".join(parts)
