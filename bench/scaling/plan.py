"""What measuring would take, before anything is: every point's seconds by the rates that are known.

python -m bench.scaling --dry-run --models 14m 2.8b
python -m bench.scaling --campaign                                # every part of the campaign
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.scaling.costs import Setting, ekfac_needs
from bench.scaling.fits import Estimator
from bench.scaling.sizes import FEW_DRAWS, MOST_FITTED
from bench.tables import duration, table
from retrain.models.pythia_suite import Configuration

START_SECONDS = 12.0  # of a point on a GPU: its context, data and warm-up, as the committed sweep took them
LARGEST_DISK = 64 * 2**30  # of the machine whose rates ship; EK-FAC is refused beyond it


def measuring_seconds(spec: dict[str, Any], estimator: Estimator, budget: float) -> float | None:
    """Of one point with its start; None where no rate is known."""
    method = spec["method"] if spec["method"] in estimator.methods() else spec["method"].partition("_")[0]
    if method not in estimator.methods():
        return None
    configuration = Configuration(**spec["configuration"])
    setting = Setting(
        train=spec["train"], queries=spec["queries"], tokens=spec["tokens"], draws=spec["draws"] or 1,
        fit_examples=spec["fit_examples"] or 1,
    )  # fmt: skip

    def seconds(**changes: int) -> float:
        return estimator.estimate(method, configuration, replace(setting, **changes)).seconds

    whole = seconds()
    if spec["axis"] == "draws":
        one, two = seconds(draws=1), seconds(draws=2)
        each, setup = two - one, 2 * one - two
        timed = spec["timed_draws"] if whole > budget else spec["timed_draws"] + spec["draws"]
        few = spec["timed_draws"] <= FEW_DRAWS * spec["chains"]
        return START_SECONDS + (2 if few else 3) * setup + each * (2 + timed + (0 if few else 2 * spec["chains"]))
    if spec["axis"] == "layers":
        needs = ekfac_needs(configuration.with_layers(max(spec["depths"] or [configuration.layers])), spec["tokens"])
        if needs.disk_bytes > LARGEST_DISK:
            return START_SECONDS  # refused
        return START_SECONDS + _stages_seconds(spec, configuration, seconds, budget)
    return START_SECONDS + min(whole, budget)


def _stages_seconds(spec: dict[str, Any], configuration: Configuration, seconds: Any, budget: float) -> float:
    """The whole run at each depth, then what the budget has room for: fitting sets, halves, queries."""
    layers = configuration.layers
    depths = spec["depths"] or ([1, 2, layers] if 1.2 * seconds() < budget else [1, 2, min(4, layers)])
    share = depths[-1] / layers
    spent = sum(depths) / layers * seconds()
    for count in spec["fit_sets"][1:]:
        more = share * (seconds(fit_examples=count) - seconds(fit_examples=1))
        if count <= MOST_FITTED and spent + more <= budget:
            spent += more
    # The score alone: what is left of a run when twice the fit's and the eigendecompositions' seconds are taken off.
    score = share * (seconds(train=2 * spec["train"]) - seconds())
    if spec["score_parts"] and spent + 2.5 * score <= budget:
        spent += 1.3 * score
    for count in spec["query_counts"][1:]:
        more = share * (seconds(queries=count) - seconds()) + score
        if spent + more <= budget:
            spent += more
    return spent


def show_points(specs: Sequence[dict[str, Any]], estimator: Estimator, budget: float) -> tuple[str, float, int]:
    """A line a point, the seconds of all whose rates are known, and how many have none."""
    lines, total, num_unknown = [], 0.0, 0
    for spec in specs:
        predicted = measuring_seconds(spec, estimator, budget)
        total += predicted or 0.0
        num_unknown += predicted is None
        fits = ", ".join(f"{count:,}" for count in spec["fit_sets"]) if spec["fitted"] else "-"
        counts = ", ".join(f"{count:,}" for count in spec["query_counts"])
        depths = ", ".join(map(str, spec["depths"])) or "-"
        lines.append([spec["model"], spec["method"], fits, counts, depths, duration(predicted)])
    header = ["model", "method", "fitted on", "queries", "depths", "about"]
    return table(header, lines, left=2), total, num_unknown


def about(seconds: float, num_unknown: int) -> str:
    """`about 3 min`, and how many points that leaves out."""
    points = f"{num_unknown} point{'s' * (num_unknown > 1)} without a known rate"
    if not seconds:
        return points
    return f"about {duration(seconds)}" + (f" and {points}" if num_unknown else "")
