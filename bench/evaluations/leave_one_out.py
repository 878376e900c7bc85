"""Leave-one-out: the loss of every query with one example left out, against what methods predict, one at a time.

    python -m bench.evaluations leave_one_out                         # a logistic regression, where it is exact
    python -m bench.evaluations leave_one_out --task digits --alpha-attribution 0.1   # most of it is noise

Each attributed example is left out by itself and a model retrained, `--replicates` times. The score is Spearman's
correlation across examples of actual and predicted loss, mean over queries: LDS with subsets that lack one example,
with the same interval and the same noise ceiling. Where scores are in units of loss the slope beside it is 1.

On the logistic regression retraining has no noise, and the ceiling is 1. On a network the change from one example is
small beside the difference between two trainings; the ceiling says by how much, and no method can be judged beyond it.
"""

import argparse
import math

import numpy as np

import bench.evaluations as evaluations
from bench.arguments import at_least
from bench.evaluations import MetricResult, measured
from bench.evaluations.calibration import SLOPES, calibration_rows
from bench.evaluations.removal import RemovalRetrainer
from bench.metrics import MINIMUM_SUBSETS, linear_datamodelling_score, noise_ceiling, paired_difference
from bench.metrics.calibration import calibration
from bench.tables import interval, number
from retrain.errors import UsageError

LEAVE_ONE_OUT = "leave-one-out Spearman"
PREFIX = "leave-one-out "
EXACT_TASK = "retrain.logistic:LogisticDigits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    evaluations.add_shared_arguments(parser)
    add = parser.add_argument
    times = "retrains of every example's absence (default: %(default)s)"
    add("--replicates", dest="times", type=at_least(1), default=2, help=times)
    add("--examples", type=at_least(3), help="leave out only the first so many attributed examples (default: all)")


def evaluate(arguments: argparse.Namespace) -> MetricResult:
    if arguments.task == "auto":
        arguments.task = EXACT_TASK
    if arguments.examples is not None and len(arguments.seeds or ()) > 1:
        raise UsageError("--examples takes the first of each seed's own attributed examples; run one --seed at a time")
    session = evaluations.session_of(arguments)
    n = evaluations.num_attributed(session, needed=MINIMUM_SUBSETS)
    count, times = min(arguments.examples or n, n), arguments.times
    if arguments.examples is not None and arguments.examples > n:
        session.notes.append(f"--examples {arguments.examples}: there are {n} attributed examples; all are left out")
    scored = evaluations.score_methods(session)
    retrainers = {block: RemovalRetrainer(session, *block) for block in session.blocks}
    num_queries = len(retrainers[session.blocks[0]].queries)
    names = ("query_split", "queries", "initialisation")
    known = {"replicates": times, "examples": count, "num_attributed": n}
    out = MetricResult.of(
        session,
        "leave-one-out",
        {"replicates": times, "examples": arguments.examples},
        {**{name: getattr(session.experiment, name) for name in names}, **known},
        f"{count} examples left out one by one x {times}, {num_queries} queries",
    )
    for block, retrainer in retrainers.items():
        where, at = evaluations.place_of(session.task, block), {"metric": LEAVE_ONE_OUT, "at": None}
        losses = retrainer.retrain([(np.array([i]), times) for i in range(count)], "leave-one-out")
        replicates = np.stack([one["losses"] for one in losses], axis=1).astype(np.float64)  # (R, examples, queries)
        truth = replicates.mean(axis=0)
        # Where retraining has no noise its replicates are the same, and there is nothing to estimate.
        exact = times > 1 and bool((replicates == replicates[:1]).all())
        ceiling = dict.fromkeys(("ceiling", "ci_low", "ci_high"), 1.0 if exact else math.nan)
        if times > 1 and not exact:
            noise = noise_ceiling(replicates)
            ceiling = {name: getattr(noise, name) for name in ceiling}
        out.detail.setdefault("ceilings", []).append(where | ceiling | {"exact": exact})
        predicted: dict[tuple[str, bool], np.ndarray] = {}
        for one, normalised, scores in evaluations.score_matrices(scored.get(block, []), arguments.scores):
            # Leaving out is the opposite of including.
            prediction = predicted[one.variant.label, normalised] = -scores[:, :count].T.astype(np.float64)
            lds = linear_datamodelling_score(truth, prediction)
            kind = {"normalised": normalised, "higher": True, "ceiling": ceiling["ceiling"]}
            out.rows.append(where | one.columns | at | kind | measured(lds.lds, lds))
            rows = calibration_rows(where | one.columns | {"at": None}, calibration(truth, prediction), normalised)
            out.rows += [row | {"metric": PREFIX + row["metric"]} for row in rows]
        out.add_pairs(where | at, predicted, lambda first, second: paired_difference(truth, first, second))  # noqa: B023
    return out


def show(out: MetricResult) -> str:
    about = {}
    for one in out.detail["ceilings"]:
        noise = f"noise ceiling {number(one['ceiling'])} {interval(one['ci_low'], one['ci_high'])}"
        told = "exact: retraining has no noise" if one["exact"] else noise
        about[one["seed"], one["alpha_attribution"]] = told
    return evaluations.show(out, f"Spearman: across the examples that were left out; {SLOPES}", about)
