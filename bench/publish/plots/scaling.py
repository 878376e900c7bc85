"""Seconds, memory and disk against model size (paper: fig:benchmark_big_ek-fac), and who is cheaper where.

Filled markers were measured, hollow ones projected, with their interval. EK-FAC has a line for each of a few fitting
sets, since that is what decides its seconds.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patheffects import withStroke

import bench.schema as schema
from bench.identity import file_slug
from bench.publish.plots.frame import MOST_NAMES, Drawing, finish, handles_of, logarithmic, panels, seconds_axis
from bench.publish.plots.style import INK, in_order, look
from bench.records import Results
from bench.scaling.estimate import PAPER_FITTED, RIVALS, Estimator, ratio_ends
from bench.scaling.rows import COLUMNS, method_label, read_rows, scores_were_measured, setting_of
from bench.scaling.suite import SUITE, Setting
from bench.tables import duration
from retrain.errors import UsageError
from retrain.safe_files import SafeFileError, conforms, read_text

PANELS = {  # column -> its unit, title
    "seconds": (1.0, "time (fit + score)"),
    "peak_memory_bytes": (2.0**30, "peak memory, GiB"),
    "disk_bytes": (2.0**30, "written by the fit, GiB"),
}
NUMBERS = ("parameters", "fit_seconds", "score_seconds", "seconds_low", "seconds_high", "peak_memory_bytes",
           "disk_bytes", "fit_examples", "depth", "layers")  # fmt: skip
LAW = "#8a8f98"
FIT_LINES = (400, 10_000, 1_000_000)  # fitting sets with a line of their own: small, middle, the paper's
FADED = (1.0, 0.7, 0.45)
FEW_AND_MANY = (18, 1800)  # queries of the two panels
FITTING_SETS = (400, PAPER_FITTED)  # the vertical axis, from the small one to the paper's
PAPER_MODEL = "2.8b"
RATIO_LEVELS = (0.1, 1.0, 10.0, 100.0, 1000.0)


def draw_scaling(results: Results) -> Iterator[Drawing]:
    for path in results.files("scaling.csv"):
        try:
            read_text(path)  # refuses a link, which the reader of rows follows
            everything = pd.DataFrame(read_rows(path), columns=COLUMNS)
        except (SafeFileError, UsageError) as error:
            results.note(str(error))
            continue
        for device, whole in everything.groupby("device", sort=True):
            group = usable(whole)
            if group["model"].nunique() < 2:
                continue  # one size is no scaling; its numbers are in the table
            runs = sorted({run for run in group["run_id"].dropna() if conforms(run, schema.Id)})
            folder = file_slug(path.parent.name)
            stem = "-".join(["scaling", *([folder] if folder != "scaling" else []), file_slug(str(device))])
            yield against_size(group, whole, str(device), stem, runs)
            if can_draw(whole):
                figure, axes = panels(2, 2.7)
                told = draw_cheaper(axes, whole)
                title = "Who is cheaper, BIF or EK-FAC: model size x fitting set"
                yield finish(
                    figure, f"{stem}-cheaper", title, [str(device)], [told], runs, {"method": ["bif", "ekfac"]}
                )


def against_size(group: pd.DataFrame, whole: pd.DataFrame, device: str, stem: str, runs: list[str]) -> Drawing:
    shown = [name for name in PANELS if (group[name] > 0).any()]
    figure, axes = panels(len(shown), 2.5, share_y=False)
    for axis, column in zip(axes, shown, strict=True):
        draw_panel(axis, group, column)
        logarithmic(axis, "x")
        (seconds_axis if column == "seconds" else logarithmic)(axis, "y")
        models = group.drop_duplicates("parameters")
        if len(models) <= 3:  # too narrow a range for round numbers
            axis.set_xticks(models["parameters"], models["model"])
        axis.set_xlabel("parameters")
        axis.set_title(PANELS[column][1])
    title, told = "Seconds, peak memory and disk against model size", explain(group, whole)
    facts = {"method": sorted(set(group["method"]))}
    return finish(figure, stem, title, [device], told, runs, facts, handles_of(axes)[:MOST_NAMES])


# ---- seconds, memory and disk against model size ----


def usable(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with numbers at the fewest queries, with fit and score added up."""
    rows = rows[rows["error"].isna()]
    rows = rows.assign(**{name: rows[name].astype(float) for name in NUMBERS}, projected=rows["projected"].astype(bool))
    rows["seconds"] = rows["fit_seconds"].fillna(0) + rows["score_seconds"]
    return rows[rows["queries"] == rows["queries"].min()].sort_values("parameters", kind="stable")


def blocks_of(rows: pd.DataFrame, method: str, column: str) -> list[tuple[str, pd.DataFrame]]:
    """(label's end, rows) of each line of a method: one a fitting set for seconds, else one."""
    block = rows[(rows["method"] == method) & (rows[column] > 0)]
    if not _is_fitted(block):
        return [("", block)] if len(block) else []
    if column != "seconds":
        return [("", block.sort_values(["parameters", "fit_examples"]).drop_duplicates("model"))]
    present = sorted(block["fit_examples"].dropna().unique())
    wanted = [count for count in FIT_LINES if count in present] or present[:1]
    return [(f", fitted on {count:,.0f}", block[block["fit_examples"] == count]) for count in wanted]


def _is_fitted(block: pd.DataFrame) -> bool:
    return bool(block["fit_examples"].notna().any())


def _projected(block: pd.DataFrame, column: str) -> pd.Series:
    """Of memory and disk: a few draws hold as much as all of them, fewer blocks hold less, and what a method without a
    fit writes is of every sequence."""
    if column == "seconds" or (column == "disk_bytes" and not _is_fitted(block)):
        return block["projected"]
    return block["depth"] < block["layers"]


def draw_panel(axis: Axes, rows: pd.DataFrame, column: str) -> None:
    """One line a method and fitting set."""
    unit = PANELS[column][0]
    for method in in_order(rows["method"]):
        shape = look(method)
        for number, (ending, block) in enumerate(blocks_of(rows, method, column)):
            faded: dict[str, Any] = {"alpha": FADED[min(number, len(FADED) - 1)]}
            x, y = block["parameters"].to_numpy(float), block[column].to_numpy(float) / unit
            axis.plot(x, y, **(shape | {"marker": None, "label": "_"}), **faded)
            mark = {"color": shape["color"], "marker": shape["marker"], "linestyle": "none", **faded}
            projected = _projected(block, column).to_numpy(bool)
            axis.plot(x[~projected], y[~projected], **mark, zorder=3)
            axis.plot(x[projected], y[projected], **mark, markerfacecolor="white", zorder=3)
            # The legend's, with line and marker, hollow where nothing was measured.
            hollow = {"markerfacecolor": "white"} if block["projected"].all() else {}
            if column == "seconds" or not _is_fitted(block):
                axis.plot([], [], **(shape | {"label": shape["label"] + ending} | hollow), **faded)
            if column == "seconds" and projected.any():
                ends = block[projected & block["seconds_low"].notna().to_numpy()]
                # An interval that reaches zero has no end on this axis: it is cut at a tenth of its value.
                lows = np.maximum(ends["seconds_low"], ends["seconds"] / 10)
                axis.vlines(
                    ends["parameters"], lows, ends["seconds_high"], color=shape["color"], linewidth=0.8, **faded
                )
    axis.set_yscale("log")


def explain(rows: pd.DataFrame, everything: pd.DataFrame) -> list[str]:
    """The caption's facts: setting, what is projected, what failed."""
    first: dict[str, Any] = rows.iloc[0].to_dict()
    draws = rows["draws"].dropna().tolist()
    fits = [ending.removeprefix(", fitted on ") for ending, _ in blocks_of(rows, "ekfac", "seconds") if ending]
    parts = [
        f"{first['train']:.0f} training sequences, {first['queries']:.0f} queries, {first['tokens']:.0f} tokens"
        + (f", {draws[0]:,.0f} draws" if draws else "")
        + (f"; EK-FAC fitted on {', '.join(fits)} sequences (the paper: 1,000,000)" if fits else "")
        + f"; weights: {', '.join(sorted(map(str, set(rows['weights']))))}."
    ]
    if rows["projected"].any():
        parts.append("Hollow: projected from smaller runs, bars the 95 % interval, cut at a tenth of the value.")
    failed = everything[everything["error"].notna()].to_dict("records")
    names = dict.fromkeys(f"{row['model']} {row['method']}: {row['error']}" for row in failed)
    return [*parts, *([f"Without numbers: {'; '.join(names)}."] if names else [])]


# ---- who is cheaper where ----


def can_draw(rows: pd.DataFrame) -> bool:
    """Whether these rows say enough of both methods: what one fitting sequence takes, at several sizes."""
    known = rows[rows["error"].isna()]
    return all(known.loc[known["method"] == method, "model"].nunique() > 1 for method in RIVALS)


def draw_cheaper(axes: Sequence[Axes], rows: pd.DataFrame, queries: Sequence[int] = FEW_AND_MANY) -> str:
    """A panel a number of queries: EK-FAC's seconds over BIF's, model size x fitting set; the caption's facts.

    `rows` are those of scaling.csv of one device. Blue: BIF is cheaper; orange: EK-FAC. Pale between dashes: their
    intervals overlap. The star is the paper's own point; right of the dotted line one of the two was not run.
    """
    estimator = Estimator(rows.astype(object).where(rows.notna(), None).to_dict("records"))
    few = min(estimator.of("bif"), key=lambda row: row["queries"])  # what the sweep was about
    base = replace(setting_of(few), fit_examples=FITTING_SETS[0])
    fits = np.geomspace(*FITTING_SETS, 25)
    largest = min(max(row["parameters"] for row in estimator.of(method)) for method in RIVALS)
    colours = LinearSegmentedColormap.from_list("cheaper", [look("ekfac")["color"], "#ffffff", look("bif")["color"]])
    facts = []
    for axis, count in zip(axes, queries, strict=True):
        sizes, ratio, apart = _ratios(estimator, replace(base, queries=count), fits)
        axis.pcolormesh(sizes, fits, ratio, cmap=colours, vmin=-3, vmax=3, shading="gouraud", rasterized=True, zorder=0)
        axis.contourf(sizes, fits, apart, levels=[-99, 0], colors="#ffffff", alpha=0.5, zorder=1)
        axis.contour(sizes, fits, apart, levels=[0], colors=LAW, linestyles="dashed", linewidths=0.6)
        axis.contour(
            sizes, fits, ratio, levels=np.log10(RATIO_LEVELS), colors=INK, linestyles="solid",
            linewidths=[1.6 if level == 1 else 0.6 for level in RATIO_LEVELS],
        )  # fmt: skip
        _label_levels(axis, sizes, fits, ratio)
        axis.axvline(largest, color=LAW, linestyle=(0, (1, 1)), linewidth=0.9)
        axis.plot(
            [SUITE[PAPER_MODEL].num_parameters], [FITTING_SETS[1]], marker="*", color=INK, markersize=8, clip_on=False,
            zorder=5, linestyle="none",
        )  # fmt: skip
        for hollow, points in measured_fits(estimator.of("ekfac"), count).items():
            face = "white" if hollow else INK
            mark: dict[str, Any] = {"marker": "o", "markersize": 3.5, "linestyle": "none", "markeredgewidth": 0.7}
            if points:
                axis.plot(*np.array(points).T, color=INK, markerfacecolor=face, clip_on=False, zorder=4, **mark)
        halo: dict[str, Any] = {
            "transform": axis.transAxes,
            "path_effects": [withStroke(linewidth=2, foreground="white")],
        }
        axis.text(0.03, 0.96, "BIF is cheaper", va="top", **halo)
        axis.text(0.03, 0.05, "EK-FAC is cheaper", **halo)
        axis.set(xscale="log", yscale="log", xlabel="parameters", title=f"{count:,} queries")
        axis.grid(False)
        logarithmic(axis, "x")
        logarithmic(axis, "y")
        facts.append(_paper_fact(estimator, replace(base, queries=count)))
        if count > base.queries:
            facts.append(f"Run with that many: {'; '.join(_run_with(estimator, name, count) for name in RIVALS)}.")
    unseen = [method_label(name) for name in RIVALS if max(row["parameters"] for row in estimator.of(name)) == largest]
    axes[0].set_ylabel("sequences EK-FAC is fitted on")
    return (
        "Seconds of EK-FAC over those of BIF (contours), "
        f"{base.train} training sequences, {base.tokens} tokens, {base.draws:,} draws. Blue: BIF is cheaper; orange: "
        "EK-FAC is. Pale, between dashes: the intervals overlap. Dots: EK-FAC measured, hollow on some of the layers; "
        "the rest is estimated, and BIF's seconds are those of a few of its draws. Star: the paper's own point, 2.8b "
        f"fitted on 1,000,000 sequences. Not run right of the dotted line: {', '.join(unseen)}. "
        f"{' '.join(facts)}"
    )


def measured_fits(rows: Sequence[dict[str, Any]], queries: int) -> dict[bool, list[tuple[float, float]]]:
    """(parameters, fitting set) where EK-FAC was run with so many queries: whole, or (True) on some of the layers."""
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for row in rows:
        low, high = FITTING_SETS
        extrapolated = row["projected"] and "fitting sequences" in (row["projected_from"] or "")
        if row["queries"] == queries and low <= (row["fit_examples"] or 0) <= high and not extrapolated:
            found[row["projected"]].append((row["parameters"], row["fit_examples"]))
    return found


def _run_with(estimator: Estimator, method: str, queries: int) -> str:
    """The models that the method was run at with so many queries or more."""
    rows = [row for row in estimator.of(method) if row["queries"] >= queries and scores_were_measured(row)]
    return f"{method_label(method)} at {', '.join(dict.fromkeys(row['model'] for row in rows)) or 'no size'}"


def _label_levels(axis: Axes, sizes: np.ndarray, fits: np.ndarray, ratio: np.ndarray) -> None:
    """Each contour's factor, above it at three quarters of the panel's width."""
    column = int(0.75 * len(sizes))
    for level in RATIO_LEVELS:
        at = math.log10(level)
        if ratio[0, column] < at < 0.97 * ratio[-1, column]:
            height = math.exp(float(np.interp(at, ratio[:, column], np.log(fits))))
            axis.text(sizes[column], 1.08 * height, f"{level:g}x", fontsize=6, ha="center", va="bottom")


def _ratios(estimator: Estimator, setting: Setting, fits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sizes, and (fitting sets, sizes): EK-FAC's seconds over BIF's in powers of ten; how far the intervals are apart.

    Estimated at the suite's models, straight between them in log-log; negative where intervals overlap.
    """
    known = np.array([math.log(configuration.num_parameters) for configuration in SUITE.values()])
    sizes = np.linspace(known[0], known[-1], 4 * len(known))
    ratio, apart = np.empty((len(fits), len(sizes))), np.empty((len(fits), len(sizes)))
    bif = [estimator.estimate("bif", configuration, setting) for configuration in SUITE.values()]
    for line, count in enumerate(fits):
        asked = replace(setting, fit_examples=round(float(count)))
        ekfac = [estimator.estimate("ekfac", configuration, asked) for configuration in SUITE.values()]
        here = [math.log10(one.seconds / other.seconds) for one, other in zip(ekfac, bif)]
        gaps = [
            max(math.log(one.seconds_low / other.seconds_high), math.log(other.seconds_low / one.seconds_high))
            for one, other in zip(ekfac, bif)
        ]
        ratio[line], apart[line] = np.interp(sizes, known, here), np.interp(sizes, known, gaps)
    return np.exp(sizes), ratio, apart


def _paper_fact(estimator: Estimator, setting: Setting) -> str:
    at = replace(setting, fit_examples=FITTING_SETS[1])
    bif, ekfac = (estimator.estimate(method, SUITE[PAPER_MODEL], at) for method in RIVALS)
    low, high = ratio_ends(ekfac, bif)
    return (
        f"At the star, with {setting.queries:,} queries, EK-FAC takes {duration(ekfac.seconds)} and BIF "
        f"{duration(bif.seconds)}: {ekfac.seconds / bif.seconds:,.0f} times as long ({low:,.0f} to {high:,.0f})."
    )
