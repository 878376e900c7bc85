"""Are scores in units of loss? Slope and R2 of predicted against actual losses, on the ground truth of `bench.lds`.

    python -m bench.evaluations calibration --alpha 0.1            # the embedded task; nothing is retrained twice

A score predicts by how much a query's loss changes when an example is included. LDS asks whether the ranks are right;
this asks whether the numbers are: `bench/metrics/calibration.py` says how. A slope of 1e-4 means that scores are 10,000
times too large to be read as changes of loss, which is how influence functions come that leave out the number of
examples.
"""

import argparse
from typing import Any

import bench.evaluations as evaluations
from bench.evaluations import MetricResult, groups_of, measured
from bench.experiment import execution_of, experiment_of
from bench.metrics import MINIMUM_SUBSETS
from bench.metrics.calibration import UnitsOfLoss, calibration, reachable_share
from bench.runner import Session
from bench.tables import short_number

# Statistic -> its name in rows. Only the last is ranked: a slope is best at 1, and without rescaling R2 says the same.
CALIBRATION_METRICS = {"slope": "calibration slope", "r2": "calibration R2", "r2_rescaled": "calibration R2 rescaled"}


SLOPES = (
    "slope: actual change of loss per predicted one, 1 where scores are in units of loss; R2: of predictions as they "
    "are; rescaled: times the slope"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    evaluations.add_shared_arguments(parser, subsets=True)


def evaluate(arguments: argparse.Namespace) -> MetricResult:
    experiment = experiment_of(arguments)
    session = Session(experiment, execution_of(arguments))
    session.report_skipped()
    truths, predictions = session.retrain(), session.score()
    plan = session.plans(*session.blocks[0])[0]
    some = plan.replicated_subsets if plan.replicates > 1 else None
    replicated = f" x {plan.replicates}" if some is None else f", {some} of them x {plan.replicates}"
    num_queries = len(session.question(*session.blocks[0]).query_indices())
    names = ("subsets", "scheme", "stream", "replicated_subsets", "initialisation", "query_split", "queries")
    out = MetricResult.of(
        session,
        "calibration",
        {"scores": arguments.scores},
        {**{name: getattr(experiment, name) for name in names}, "replicates": plan.replicates},
        f"{plan.num_subsets} subsets{replicated}, {num_queries:,} queries",
    )
    for block in session.blocks:
        queries = session.question(*block).query_indices()
        for position, plan in enumerate(session.plans(*block)):
            truth = truths[block[0], block[1], plan.alpha]
            if len(truth.subsets) < MINIMUM_SUBSETS:
                continue
            where = evaluations.place_of(session.task, block) | {"at": plan.alpha}
            losses = truth.mean()[:, queries]
            found: dict[tuple[str, bool], UnitsOfLoss] = {}
            for variant, made in predictions[block]:
                columns = where | evaluations.method_columns(variant, made[position].record)
                for normalised in evaluations.kinds_of(variant, arguments.scores):
                    values = made[position].normalised if normalised else made[position].raw
                    if values is not None:
                        one = found[variant.label, normalised] = calibration(losses, values[truth.subsets])
                        out.rows += calibration_rows(columns, one, normalised)
            for name in ("r2", "r2_rescaled"):
                values_of = {key: getattr(one, name) for key, one in found.items()}
                metric = {"metric": CALIBRATION_METRICS[name]}
                out.add_pairs(where | metric, values_of, lambda first, second: first.minus(second))
            place = f"seed {block[0]}, share {block[1]:g}, alpha {plan.alpha:g}"
            reachable = out.detail.setdefault("reachable", {})
            reachable[place] = reachable_share(truth.losses[:, :, queries], truth.present)
    return out


def calibration_rows(columns: dict[str, Any], found: UnitsOfLoss, normalised: bool) -> list[dict[str, Any]]:
    """One a statistic; the median of the queries' own slopes beside the slope."""
    rows = []
    counts = {"num_queries": found.num_queries, "num_undefined": found.num_undefined}
    for name, metric in CALIBRATION_METRICS.items():
        value = getattr(found, name)
        row = columns | {"metric": metric, "normalised": normalised, "higher": True, "ranked": name == "r2_rescaled"}
        rows.append(row | measured(value.value, value) | counts)
    rows[0]["median"] = found.median_slope
    return rows


def show(out: MetricResult) -> str:
    """The share of R2 that can be reached ends the heading, an alpha each."""
    about: dict[tuple[int, float], str] = {}
    for seed, share, alpha in groups_of(out.rows, "seed", "alpha_attribution", "at"):
        reachable = out.detail["reachable"][f"seed {seed}, share {share:g}, alpha {alpha:g}"]
        told = f"reachable R2 {short_number(reachable)} at alpha {alpha:g}"
        about[seed, share] = ", ".join(filter(None, [about.get((seed, share), ""), told]))
    return evaluations.show(out, SLOPES, about)
