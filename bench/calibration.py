"""Are scores in units of loss? Slope and R2 of predicted against actual losses, on the ground truth of `bench.lds`.

    python -m bench.calibration --alpha 0.1                        # the embedded task; nothing is retrained twice
    python -m bench.calibration --task tinylm --alpha 0.5 --seeds 1 2 3 --methods ekfac kfac gradsim bif

A score predicts by how much a query's loss changes when an example is included. LDS asks whether the ranks are right;
this asks whether the numbers are: `bench/metrics/calibration.py` says how. A slope of 1e-4 means that scores are 10,000
times too large to be read as changes of loss, which is how influence functions come that leave out the number of
examples.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.answers import Answers
from bench.arguments import add_method_arguments, add_query_arguments
from bench.attributions import SCORE_CHOICES
from bench.experiment import Execution, Experiment, Session
from bench.metrics import MINIMUM_SUBSETS
from bench.metrics.calibration import UnitsOfLoss, calibration, reachable_share
from bench.question_command import answer_command, finish
from bench.tables import short_number, table
from bench.translate import execution_of, experiment_of
from retrain.command import (
    RUNS,
    Parser,
    add_cluster_arguments,
    add_plan_arguments,
    add_task_arguments,
    check_out,
)
from retrain.train import Plan

# Statistic -> its name in rows. Only the last is ranked: a slope is best at 1, and without rescaling R2 says the same.
CALIBRATION_METRICS = {
    "slope": "calibration slope",
    "r2": "calibration R2",
    "r2_rescaled": "calibration R2 rescaled",
}
CALIBRATION_LEGEND = (
    "slope: actual change of loss per predicted one, 1 where scores are in units of loss; median: over queries; R2: of "
    "predictions as they\nare; rescaled: times the slope; undefined: queries without a number"
)


def _replicated(plan: Plan) -> str:
    some = plan.replicated_subsets if plan.replicates > 1 else None
    return f" x {plan.replicates}" if some is None else f", {some} of them x {plan.replicates}"


def run_calibration(experiment: Experiment, execution: Execution, scores: str = "raw") -> Answers:
    started = time.perf_counter()
    session = Session(experiment, execution)
    session.say_who_is_missing()
    truths, predictions = session.retrain(), session.score()
    first = session.plans(*session.blocks[0])[0]
    num_queries = len(session.question(*session.blocks[0]).query_indices())
    names = ("subsets", "scheme", "stream", "replicated_subsets", "initialisation", "query_split", "queries")
    out = Answers(
        question="calibration",
        task=session.task,
        variants=session.active,
        asked={"experiment": experiment.to_json(), "scores": scores},
        ground={**{name: getattr(experiment, name) for name in names}, "replicates": first.replicates},
        truth=f"{first.num_subsets} subsets{_replicated(first)}, {num_queries:,} queries",
        device=session.device(),
        skipped=session.skipped,
        notes=session.notes,
    )
    for seed, share in session.blocks:
        queries = session.question(seed, share).query_indices()
        for position, plan in enumerate(session.plans(seed, share)):
            truth = truths[seed, share, plan.alpha]
            if len(truth.subsets) < MINIMUM_SUBSETS:
                continue
            where = {"task": session.task.name, "protocol": session.task.protocol, "alpha_attribution": share}
            where |= {"seed": seed, "at": plan.alpha}
            losses = truth.mean()[:, queries]
            found: dict[tuple[str, bool], UnitsOfLoss] = {}
            for (variant, made), kind in itertools.product(predictions[seed, share], SCORE_CHOICES[scores]):
                prediction = made[position]
                values = prediction.normalised if kind == "normalised" else prediction.raw
                if values is None or variant.rows not in ("both", kind):
                    continue
                one = found[variant.label, kind == "normalised"] = calibration(losses, values[truth.subsets])
                costs = ("fit_seconds", "score_seconds", "peak_memory_bytes", "device")
                told = {"method": variant.method.name, "label": variant.label, "settings": variant.settings}
                told |= {"origin": variant.origin, **{name: prediction.record[name] for name in costs}}
                out.rows += calibration_rows(where | told, one, kind == "normalised")
            out.pairs += calibration_pairs(where, found)
            place = f"seed {seed}, share {share:g}, alpha {plan.alpha:g}"
            reachable = reachable_share(truth.losses[:, :, queries], truth.present)
            out.detail.setdefault("reachable", {})[place] = reachable
            out.detail.setdefault("standard_deviation", {})[place] = float(np.std(losses, axis=0).mean())
    out.problems += session.out.problems
    out.seconds = time.perf_counter() - started
    return out


def calibration_rows(told: dict[str, Any], found: UnitsOfLoss, normalised: bool) -> list[dict[str, Any]]:
    """One a statistic; the median of the queries' own slopes beside the slope."""
    rows = []
    for name, metric in CALIBRATION_METRICS.items():
        number = getattr(found, name)
        row = told | {"metric": metric, "normalised": normalised, "higher": True, "ranked": name == "r2_rescaled"}
        row |= {"value": number.value, "ci_low": number.ci_low, "ci_high": number.ci_high}
        row |= {"num_queries": found.num_queries, "num_undefined": found.num_undefined}
        rows.append(row | ({"median": found.median_slope} if name == "slope" else {}))
    return rows


def calibration_pairs(where: dict[str, Any], found: dict[tuple[str, bool], UnitsOfLoss]) -> list[dict[str, Any]]:
    pairs = []
    for (a, kind), (b, other) in itertools.combinations(found, 2):
        for name in ("r2", "r2_rescaled") if kind == other else ():
            difference = getattr(found[a, kind], name).minus(getattr(found[b, kind], name))
            pair = where | {"metric": CALIBRATION_METRICS[name], "normalised": kind, "label": a, "against": b}
            pair |= {"difference": difference.value, "ci_low": difference.ci_low, "ci_high": difference.ci_high}
            pairs.append(pair | {"p_value": difference.p_value, "num_undefined": 0})
    return pairs


def show_calibration(out: Answers) -> str:
    keys = ("seed", "alpha_attribution", "at", "normalised")
    parts = []
    for group in sorted({tuple(row[key] for key in keys) for row in out.rows}):
        here = [row for row in out.rows if tuple(row[key] for key in keys) == group]
        seed, share, alpha, normalised = group
        reachable = out.detail["reachable"].get(f"seed {seed}, share {share:g}, alpha {alpha:g}")
        words = (
            f"{out.task.description}, protocol {out.task.protocol}: alpha {alpha:g}, {out.truth}, seed {seed}, "
            f"{'train-normalised' if normalised else 'raw'} scores; reachable R2 {short_number(reachable)}"
        )
        parts.append(f"{words}\n{calibration_table(here)}")
    return "\n\n".join(parts)


def calibration_table(rows: Sequence[dict[str, Any]]) -> str:
    by = {(row["label"], row["metric"]): row for row in rows}
    labels = sorted({row["label"] for row in rows}, key=lambda label: -_rescaled(by, label))
    lines = []
    for label in labels:
        found = [by[label, CALIBRATION_METRICS[name]] for name in ("slope", "r2", "r2_rescaled")]
        slope, plain, scaled = (
            [short_number(row["value"]), f"[{short_number(row['ci_low'])}, {short_number(row['ci_high'])}]"]
            for row in found
        )
        median, undefined = short_number(found[0]["median"]), str(found[0]["num_undefined"])
        lines.append([label, *slope, median, *plain, *scaled, undefined])
    ends = "95 % interval"
    header = ["method", "slope", ends, "median slope", "R2", ends, "R2 rescaled", ends, "undefined"]
    return f"{table(header, lines)}\n{CALIBRATION_LEGEND}"


def _rescaled(by: dict[tuple[str, str], dict[str, Any]], label: str) -> float:
    value = by[label, CALIBRATION_METRICS["r2_rescaled"]]["value"]
    return value if value == value else -1e30


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.calibration", description="Slope and R2 of predicted against actual losses.")
    add_task_arguments(parser)
    add_plan_arguments(parser, MINIMUM_SUBSETS, required=False)
    add_method_arguments(parser)
    add_query_arguments(parser)
    add = parser.add_argument
    add("--experiment", metavar="FILE", help="a .toml file or a run.json: what is asked; other options change it")
    add("--scores", choices=tuple(SCORE_CHOICES), default="raw", help="which scores (default: %(default)s)")
    add("--out", default=RUNS, help="where records go, a folder each (default: %(default)s)")
    add_cluster_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return answer_command(make_parser(), argv, _run)


def _run(arguments: argparse.Namespace, command: str, prog: str) -> int:
    check_out(arguments.out)
    out = run_calibration(experiment_of(arguments), execution_of(arguments), arguments.scores)
    return finish(out, show_calibration(out), arguments.out, command, prog)


if __name__ == "__main__":
    sys.exit(main())
