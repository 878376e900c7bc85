"""BIF approaches the damped influence function: distance against draws and against n_beta, with the theory's slopes.

From the record of `bench.limit` on a regular model, limit.json.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes

import bench.schema as schema
from bench.publish.plots.frame import MOST_NAMES, Drawing, Label, bars_at, finish, handles_of, logarithmic, panel_row
from bench.publish.plots.style import INK, QUIET, look
from bench.records import Results

GUIDE: dict[str, Any] = {"color": QUIET, "linestyle": (0, (1, 1.5)), "linewidth": 1.0}


def draw_limit(results: Results) -> Iterator[Drawing]:
    for _, record in results.read("limit.json", schema.LimitRecord):
        exact, sampled = record["exact"], record["sampled"]
        n_betas = sorted({one["n_beta"] for one in sampled})
        shades = colormaps["viridis"](np.linspace(0.05, 0.8, len(n_betas)))
        figure, (left, right) = panel_row(2, 2.8)
        labels = []
        for n_beta, colour in zip(n_betas, shades, strict=True):
            mine = sorted((one for one in sampled if one["n_beta"] == n_beta), key=lambda one: one["draws"])
            shape = {"color": colour, "marker": "o", "markersize": 3, "label": f"n_beta {n_beta:g}"}
            distances(left, "draws", mine, shape)
            for known in exact:
                if known["n_beta"] == n_beta:
                    left.axhline(known["distance"], color=colour, linewidth=0.7, linestyle=(0, (4, 2)))
        sharpest = [one for one in sampled if one["n_beta"] == n_betas[-1]]
        guide(left, [one["draws"] for one in sharpest], [one["distance"] for one in sharpest], -0.5)
        most = max(one["draws"] for one in sampled)
        longest = sorted((one for one in sampled if one["draws"] == most), key=lambda one: one["n_beta"])
        shape = look("bif") | {"linestyle": "none", "label": "_"}
        distances(right, "n_beta", longest, shape)
        labels.append(Label(right, longest[-1]["n_beta"], longest[-1]["distance"], f"{most:,} draws", shape["color"]))
        known_at, heights = [one["n_beta"] for one in exact], [one["distance"] for one in exact]
        right.plot(known_at, heights, color=INK, marker="D", markersize=3, linewidth=0.9, label="_exact")
        labels.append(Label(right, known_at[-1], heights[-1], "by quadrature, no chain"))
        guide(right, known_at, heights, -1.0)
        left.set_xlabel("draws")
        right.set_xlabel("n_beta")
        left.set_ylabel("relative distance to the damped IF")
        logarithmic(left, "x")
        logarithmic(right, "x", known_at)
        for axis in (left, right):
            logarithmic(axis, "y")
        yield _framed(record, figure, handles_of([left])[:MOST_NAMES], labels)


def _framed(record: dict[str, Any], figure: Any, names: list[tuple[Any, str]], labels: list[Label]) -> Drawing:
    slopes, config = record["slopes"], record["config"]
    title = f"{record['description']}: BIF approaches the damped influence function"
    told = (
        f"Dotted: the theory's slopes, {slopes['draws']['theory']:g} in draws and {slopes['n_beta']['theory']:g} in "
        f"n_beta; measured {slopes['draws']['measured']:.2f} (at the largest n_beta) and "
        f"{slopes['n_beta']['measured']:.2f}. Dashed: the limit of each n_beta, by quadrature."
    )
    seeds, regression = config["seeds"], config["regression"]
    counted = (
        f"n: {len(seeds)} seed{'s' * (len(seeds) > 1)}, {regression['copies']:,} independent chains of "
        f"{config['draws_of_a_copy']} draws; a point is the root mean square over disjoint groups of chains."
    )
    chain = (
        f"Settings. {config['sampler']}, {config['gradient']}, damping gamma / n_beta = {config['damping']:g}, "
        f"step {config['step_times_precision']:g} of the largest precision, thinning {config['thinning']}, burn-in "
        f"{config['burn_in']} draws; the step adds {config['step_times_precision'] / 4:.1%} to the variance."
    )
    about = [f"raw scores, x n_beta, {regression['num_train']} training examples, {regression['num_queries']} queries"]
    finish(figure, title, about, [f"{told} {counted}", chain], names, labels)
    caption = (
        f"Relative distance of n_beta BIF to the damped influence function, against draws and against n_beta; "
        f"{record['description']}. {told} {counted} {chain}"
    )
    facts = {"task": ["logistic regression"], "method": ["bif"], "scores": ["raw"]}
    return Drawing("limit-logistic-regression", title, caption, [record["run_id"]], figure, facts)


def distances(axis: Axes, against: str, found: list[dict[str, Any]], shape: dict[str, Any]) -> None:
    bars_at(axis, [(one[against], one["distance"], one["low"], one["high"]) for one in found], shape)


def guide(axis: Axes, x: list[float], y: list[float], slope: float) -> None:
    """The theory's slope, through the middle of the points in log-log."""
    ends = np.array([min(x), max(x)], dtype=float)
    middle = np.exp(np.mean(np.log(y)) - slope * np.mean(np.log(x)))
    axis.plot(ends, middle * ends**slope, zorder=0, label="_guide", **GUIDE)
