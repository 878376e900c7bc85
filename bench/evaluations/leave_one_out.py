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
from typing import Any

import numpy as np

from bench.arguments import at_least
from bench.evaluations import (
    SCORE_CHOICES,
    MetricResult,
    add_shared_arguments,
    best_first,
    difference,
    groups_of,
    heading,
    measured,
    new_answers,
    num_attributed,
    pairs_of,
    place_of,
    score_matrices,
    score_methods,
    scoring_session,
)
from bench.evaluations.calibration import CALIBRATION_METRICS, calibration_rows, calibration_table
from bench.evaluations.removal import RemovalRetrainer
from bench.experiment import Experiment, asked_for, execution_of
from bench.metrics import MINIMUM_SUBSETS, linear_datamodelling_score, noise_ceiling, paired_difference
from bench.metrics.calibration import calibration
from bench.tables import interval, number, table
from retrain.errors import UsageError

LEAVE_ONE_OUT = "leave-one-out Spearman"
PREFIX = "leave-one-out "
EXACT_TASK = "retrain.logistic:LogisticDigits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared_arguments(parser)
    add = parser.add_argument
    times = "retrains of every example's absence (default: %(default)s)"
    add("--replicates", dest="times", type=at_least(1), default=2, help=times)
    add("--examples", type=at_least(3), help="leave out only the first so many attributed examples (default: all)")


def evaluate(arguments: argparse.Namespace) -> MetricResult:
    if arguments.task == "auto":
        arguments.task = EXACT_TASK
    experiment = Experiment(**asked_for(arguments))
    if arguments.examples is not None and len(experiment.seeds) > 1:
        raise UsageError("--examples takes the first of each seed's own attributed examples; run one --seed at a time")
    session = scoring_session(experiment, execution_of(arguments))
    n = num_attributed(session, needed=MINIMUM_SUBSETS)
    if arguments.examples is not None and arguments.examples > n:
        session.notes.append(
            f"--examples {arguments.examples}: there are {n} attributed examples, and all are left out"
        )
    count, times = min(arguments.examples or n, n), arguments.times
    scored = score_methods(session)
    retrainers = {block: RemovalRetrainer(session, *block) for block in session.blocks}
    num_queries = len(retrainers[session.blocks[0]].queries)
    names = ("query_split", "queries", "initialisation")
    known = {"replicates": times, "examples": count, "num_attributed": n}
    out = new_answers(
        session,
        "leave-one-out",
        {"replicates": times, "examples": arguments.examples},
        {**{name: getattr(experiment, name) for name in names}, **known},
        f"{count} examples left out one by one x {times}, {num_queries} queries",
    )
    for block, retrainer in retrainers.items():
        found = retrainer.retrain([(np.array([i]), times) for i in range(count)], "leave-one-out")
        losses = np.stack([one["losses"] for one in found], axis=1).astype(np.float64)  # (R, examples, queries)
        predicted = {
            (one.variant.label, normalised): (one.columns(), -values[:, :count].T.astype(np.float64))
            for one, normalised, values in score_matrices(scored.get(block, []), SCORE_CHOICES[arguments.scores])
        }
        _add_rows(out, place_of(session.task, block), losses, predicted)
    return out


def _add_rows(out: MetricResult, where: dict[str, Any], replicates: np.ndarray, predicted: dict[Any, Any]) -> None:
    truth = replicates.mean(axis=0)
    # Where retraining has no noise its replicates are the same, and there is nothing to estimate.
    exact = len(replicates) > 1 and bool((replicates == replicates[:1]).all())
    ceiling = dict.fromkeys(("ceiling", "ci_low", "ci_high"), 1.0 if exact else math.nan)
    if not exact and len(replicates) > 1:
        noise = noise_ceiling(replicates)
        ceiling = {"ceiling": noise.ceiling, "ci_low": noise.ci_low, "ci_high": noise.ci_high}
    out.detail.setdefault("ceilings", []).append(where | ceiling | {"exact": exact})
    at = {"metric": LEAVE_ONE_OUT, "at": None}
    for (_, normalised), (columns, prediction) in predicted.items():
        lds = linear_datamodelling_score(truth, prediction)
        kind = {"normalised": normalised, "higher": True, "ceiling": ceiling["ceiling"]}
        out.rows.append(where | columns | at | kind | measured(lds.lds, lds))
        rows = calibration_rows(where | columns | {"at": None}, calibration(truth, prediction), normalised)
        out.rows += [row | {"metric": PREFIX + row["metric"]} for row in rows]
    for names, (_, first), (_, second) in pairs_of(predicted):
        pair = paired_difference(truth, first, second)
        out.pairs.append(where | at | names | difference(pair.difference, pair))


def show(out: MetricResult) -> str:
    parts = []
    ceilings = {(one["seed"], one["alpha_attribution"]): one for one in out.detail["ceilings"]}
    for (*block, normalised), here in sorted(groups_of(out.rows, "seed", "alpha_attribution", "normalised").items()):
        ceiling = ceilings[tuple(block)]
        noise = f"noise ceiling {number(ceiling['ceiling'])} {interval(ceiling['ci_low'], ceiling['ci_high'])}"
        bound = "exact: retraining has no noise" if ceiling["exact"] else noise
        lines = [
            [row["label"], number(row["value"]), interval(row["ci_low"], row["ci_high"]), str(row["num_undefined"])]
            for row in sorted((row for row in here if row["metric"] == LEAVE_ONE_OUT), key=best_first)
        ]
        ranked = table(["method", "Spearman", "95 % interval", "undefined"], lines)
        parts.append(f"{heading(out, out.truth, block[0], normalised)}; {bound}\n{ranked}")
        plain = [row | {"metric": row["metric"].removeprefix(PREFIX)} for row in here]
        slopes = [row for row in plain if row["metric"] in CALIBRATION_METRICS.values()]
        parts.append(f"actual against predicted change\n{calibration_table(slopes)}")
    return "\n\n".join(parts)
