"""BIF approaches the damped influence function: distance against draws and against n_beta, with the theory's slopes.

`python -m bench.figures --only limit`, from the record of `bench.evaluations limit` on a regular model.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes

from bench import schema
from bench.figures.drawing import Drawing, frame, logarithmic, panel_row
from bench.publish.plots.style import INK, QUIET, PaperSize
from bench.records import Results

EXACT: dict[str, Any] = {"color": INK, "marker": "D", "linestyle": "-", "linewidth": 0.9}
GUIDE: dict[str, Any] = {"color": QUIET, "linestyle": (0, (1, 1.5)), "linewidth": 1.0}


def draw_limit(results: Results, size: PaperSize) -> Iterator[Drawing]:
    for _, record in results.read("limit.json", schema.LimitRecord):
        if not results.shows("bif"):
            continue
        exact, sampled = record["exact"], record["sampled"]
        n_betas = sorted({one["n_beta"] for one in sampled})
        shades = colormaps["viridis"](np.linspace(0.05, 0.85, len(n_betas)))
        figure, (left, right) = panel_row(2, size, height=2.5)
        for n_beta, colour in zip(n_betas, shades, strict=True):
            mine = sorted((one for one in sampled if one["n_beta"] == n_beta), key=lambda one: one["draws"])
            label = f"BIF, n_beta {n_beta:g}"
            distance_points(
                left, [one["draws"] for one in mine], mine, {"color": colour, "marker": "o", "label": label}
            )
            for known in exact:
                if known["n_beta"] == n_beta:
                    left.axhline(known["distance"], color=colour, linewidth=0.7, linestyle=(0, (4, 2)))
        left.plot([], [], color=QUIET, linewidth=0.7, linestyle=(0, (4, 2)), label="its limit, by quadrature")
        sharpest = [one for one in sampled if one["n_beta"] == n_betas[-1]]
        guide(left, [one["draws"] for one in sharpest], [one["distance"] for one in sharpest], -0.5, "slope \u22121/2")
        most = max(one["draws"] for one in sampled)
        longest = sorted((one for one in sampled if one["draws"] == most), key=lambda one: one["n_beta"])
        shape = {"color": "#0072b2", "marker": "s", "linestyle": "none", "label": f"BIF, {most:,} draws"}
        distance_points(right, [one["n_beta"] for one in longest], longest, shape)
        known_at, distances = [one["n_beta"] for one in exact], [one["distance"] for one in exact]
        right.plot(known_at, distances, label="BIF by quadrature: no chain", **EXACT)
        guide(right, known_at, distances, -1.0, "slope \u22121")
        left.set_xlabel("draws")
        right.set_xlabel("n_beta")
        left.set_ylabel("relative distance to the damped IF")
        for axis, values in ((left, None), (right, known_at)):
            logarithmic(axis, "x", values)
            logarithmic(axis, "y")
        slopes = record["slopes"]
        config = record["config"]
        title = f"{record['description']}: BIF approaches the damped influence function"
        measured = (
            f"Slopes: {slopes['draws']['measured']:.2f} in draws at the largest n_beta ({slopes['draws']['theory']:g} "
            f"in theory), {slopes['n_beta']['measured']:.2f} in n_beta ({slopes['n_beta']['theory']:g} in theory)."
        )
        chain = (
            f"Settings. {config['sampler']}, {config['gradient']}, damping gamma / n_beta = {config['damping']:g}, "
            f"step {config['step_times_precision']:g} of the largest precision, thinning {config['thinning']}, burn-in "
            f"{config['burn_in']} draws; the step adds {config['step_times_precision'] / 4:.1%} to the variance."
        )
        seeds = config["seeds"]
        counted = (
            f"n: {len(seeds)} seed{'s' * (len(seeds) > 1)}, {config['regression']['copies']:,} independent chains of "
            f"{config['draws_of_a_copy']} draws; a point is the root mean square over disjoint groups of chains."
        )
        limits = ["its limit, by quadrature", "slope \u22121/2", f"BIF, {most:,} draws", "BIF by quadrature: no chain"]
        order = [*(f"BIF, n_beta {n_beta:g}" for n_beta in n_betas), *limits, "slope \u22121"]
        about = ["raw scores, x n_beta", f"{config['regression']['num_train']} training examples, "
                 f"{config['regression']['num_queries']} queries"]  # fmt: skip
        frame(figure, size, title, about, [f"{measured} {counted}", chain], [left, right], order=order)
        caption = (
            f"Relative distance of n_beta BIF to the damped influence function, against draws and against n_beta; "
            f"{record['description']}. {measured} {counted} {chain}"
        )
        facts = {"task": ["logistic regression"], "method": ["bif"], "scores": ["raw"]}
        yield Drawing("limit-logistic-regression", title, caption, [record["run_id"]], figure, facts=facts)


def distance_points(axis: Axes, x: list[float], found: list[dict[str, Any]], shape: dict[str, Any]) -> None:
    y = np.array([one["distance"] for one in found])
    ends = [y - np.array([one["low"] for one in found]), np.array([one["high"] for one in found]) - y]
    bars = np.maximum(0, ends) if np.any(np.array(ends) > 0) else None
    axis.errorbar(x, y, yerr=bars, capsize=1.5, elinewidth=0.8, **shape)


def guide(axis: Axes, x: list[float], y: list[float], slope: float, label: str) -> None:
    """The theory's slope, through the middle of the points in log-log."""
    ends = np.array([min(x), max(x)], dtype=float)
    middle = np.exp(np.mean(np.log(y)) - slope * np.mean(np.log(x)))
    axis.plot(ends, middle * ends**slope, label=label, zorder=0, **GUIDE)
