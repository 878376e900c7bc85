"""Leave-one-out: the loss of every query with one example left out, against what methods predict, one at a time.

    python -m bench.leave_one_out                                             # a logistic regression, where it is exact
    python -m bench.leave_one_out --task digits --alpha-attribution 0.1       # where retraining's noise is most of it

Each attributed example is left out by itself and a model retrained, `--replicates` times. The score is Spearman's
correlation across examples of actual and predicted loss, mean over queries: LDS with subsets that lack one example,
with the same interval and the same noise ceiling. Where scores are in units of loss the slope beside it is 1.

On the logistic regression retraining has no noise, and the ceiling is 1. On a network the change from one example is
small beside the difference between two trainings; the ceiling says by how much, and no method can be judged beyond it.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.answers import Answers
from bench.attributions import SCORE_CHOICES, SeedAndShare, answering_session, attributions
from bench.calibration import CALIBRATION_METRICS, calibration_rows, calibration_table
from bench.counterfactual.laboratory import Laboratory
from bench.counterfactual.removal import where_of
from bench.experiment import Execution, Experiment
from bench.metrics import linear_datamodelling_score, noise_ceiling, paired_difference
from bench.metrics.calibration import calibration
from bench.question_command import add_question_arguments, answer_command, finish
from bench.sizes import enough_to_correlate
from bench.tables import interval, number, table
from bench.translate import asked_for, execution_of
from retrain.command import Parser, at_least, check_out
from retrain.errors import UsageError

LEAVE_ONE_OUT = "leave-one-out Spearman"
EXACT_TASK = "retrain.logistic:LogisticDigits"


@dataclass(frozen=True, kw_only=True)
class LeaveOneOut:
    """What is asked, beside the experiment's task, methods, seeds and queries."""

    experiment: Experiment
    replicates: int = 2
    examples: int | None = None  # only the first so many attributed examples are left out
    scores: str = "raw"


def run_leave_one_out(asked: LeaveOneOut, execution: Execution) -> Answers:
    started = time.perf_counter()
    session = answering_session(asked.experiment, execution)
    n = enough_to_correlate(session)
    if asked.examples is not None and asked.examples > n:
        session.notes.append(f"--examples {asked.examples}: there are {n} attributed examples, and all are left out")
    count = min(asked.examples or n, n)
    scored = attributions(session)
    labs = {block: Laboratory(session, *block) for block in session.blocks}
    first = labs[session.blocks[0]]
    names = ("query_split", "queries", "initialisation")
    out = Answers(
        question="leave-one-out",
        task=session.task,
        variants=session.active,
        asked={"experiment": asked.experiment.to_json(), "replicates": asked.replicates, "examples": asked.examples},
        ground={
            **{name: getattr(asked.experiment, name) for name in names},
            "replicates": asked.replicates, "examples": count, "num_attributed": n,
        },
        truth=f"{count} examples left out one by one x {asked.replicates}, {len(first.queries)} queries",
        device=session.device(),
        skipped=session.skipped,
        notes=session.notes,
    )  # fmt: skip
    for block, lab in labs.items():
        found = lab.retrain([(np.array([i]), asked.replicates) for i in range(count)], "leave-one-out")
        replicates = np.stack([one["losses"] for one in found], axis=1).astype(np.float64)  # (R, examples, queries)
        _add_rows(out, lab, block, replicates, {
            (one.variant.label, kind == "normalised"): (one, -scores[:, :count].T.astype(np.float64))
            for one, kind in itertools.product(scored.get(block, []), SCORE_CHOICES[asked.scores])
            if (scores := one.scores(kind)) is not None  # type: ignore[arg-type]
        })  # fmt: skip
    out.problems += session.out.problems
    out.seconds = time.perf_counter() - started
    return out


def _add_rows(out: Answers, lab: Laboratory, block: SeedAndShare, replicates: np.ndarray, made: dict[Any, Any]) -> None:
    where, truth = where_of(lab, block), replicates.mean(axis=0)
    # Where retraining has no noise its replicates are the same, and there is nothing to estimate.
    exact = len(replicates) > 1 and bool((replicates == replicates[:1]).all())
    ceiling = 1.0 if exact else math.nan
    ends = (1.0, 1.0) if exact else (math.nan, math.nan)
    if len(replicates) > 1 and not exact:
        noise = noise_ceiling(replicates)
        ceiling, ends = noise.ceiling, (noise.ci_low, noise.ci_high)
    out.detail.setdefault("ceilings", []).append(
        where | {"ceiling": ceiling, "ci_low": ends[0], "ci_high": ends[1], "exact": exact}
    )
    for (_, normalised), (one, prediction) in made.items():
        found = linear_datamodelling_score(truth, prediction)
        out.rows.append(
            where | one.told()
            | {"metric": LEAVE_ONE_OUT, "at": None, "normalised": normalised, "higher": True, "value": found.lds}
            | {"ci_low": found.ci_low, "ci_high": found.ci_high, "num_queries": found.num_queries}
            | {"num_undefined": found.num_undefined, "ceiling": ceiling}
        )  # fmt: skip
        rows = calibration_rows(where | one.told() | {"at": None}, calibration(truth, prediction), normalised)
        out.rows += [row | {"metric": f"leave-one-out {row['metric']}"} for row in rows]
    for (a, kind), (b, other) in itertools.combinations(made, 2):
        if kind == other:
            pair = paired_difference(truth, made[a, kind][1], made[b, kind][1])
            out.pairs.append(
                where
                | {"metric": LEAVE_ONE_OUT, "at": None, "normalised": kind, "label": a, "against": b}
                | {"difference": pair.difference, "ci_low": pair.ci_low, "ci_high": pair.ci_high}
                | {"p_value": pair.p_value, "num_undefined": pair.num_undefined}
            )


def _by_value(row: dict[str, Any]) -> float:
    """Best first, and what is undefined last."""
    return -row["value"] if math.isfinite(row["value"]) else math.inf


def show_leave_one_out(out: Answers) -> str:
    parts = []
    for ceiling in out.detail["ceilings"]:
        keys = ("seed", "alpha_attribution")
        for normalised in (False, True):
            here = [
                row
                for row in out.rows
                if all(row[key] == ceiling[key] for key in keys) and row["normalised"] == normalised
            ]
            ranked = sorted((row for row in here if row["metric"] == LEAVE_ONE_OUT), key=_by_value)
            if not ranked:
                continue
            known = "exact: retraining has no noise" if ceiling["exact"] else (
                f"noise ceiling {number(ceiling['ceiling'])} {interval(ceiling['ci_low'], ceiling['ci_high'])}"
            )  # fmt: skip
            lines = [
                [row["label"], number(row["value"]), interval(row["ci_low"], row["ci_high"]), str(row["num_undefined"])]
                for row in ranked
            ]
            words = (
                f"{out.task.description}, protocol {out.task.protocol}: {out.truth}, seed {ceiling['seed']}, "
                f"{'train-normalised' if normalised else 'raw'} scores; {known}"
            )
            parts.append(f"{words}\n{table(['method', 'Spearman', '95 % interval', 'undefined'], lines)}")
            slopes = [
                row | {"metric": row["metric"].removeprefix("leave-one-out ")}
                for row in here
                if row["metric"].removeprefix("leave-one-out ") in CALIBRATION_METRICS.values()
            ]
            parts.append(f"actual against predicted change\n{calibration_table(slopes)}")
    return "\n\n".join(parts)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.leave_one_out", description="Leave every example out by itself, and retrain.")
    add_question_arguments(parser)
    add = parser.add_argument
    add("--replicates", type=at_least(1), default=2, help="retrains of every example's absence (default: %(default)s)")
    add("--examples", type=at_least(3), help="leave out only the first so many attributed examples (default: all)")
    add("--scores", choices=tuple(SCORE_CHOICES), default="raw", help="which scores (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return answer_command(make_parser(), argv, _run)


def _run(arguments: argparse.Namespace, command: str, prog: str) -> int:
    check_out(arguments.out)
    if arguments.task == "auto":
        arguments.task = EXACT_TASK
    given = argparse.Namespace(**{**vars(arguments), "replicates": None})
    experiment = Experiment(**asked_for(given))
    asked = LeaveOneOut(
        experiment=experiment, replicates=arguments.replicates, examples=arguments.examples, scores=arguments.scores
    )
    if arguments.examples is not None and len(experiment.seeds) > 1:
        raise UsageError("--examples takes the first of each seed's own attributed examples; run one --seed at a time")
    out = run_leave_one_out(asked, execution_of(arguments))
    return finish(out, show_leave_one_out(out), arguments.out, command, prog)


if __name__ == "__main__":
    sys.exit(main())
