"""Mislabelled examples: flip a share of the labels, retrain the base model, and look for them by self-influence.

    python -m bench.mislabel                                       # the embedded task, a tenth of the labels flipped
    python -m bench.mislabel --share 0.05 --seeds 1 2 3 --methods ekfac gradsim trak bif
    python -m bench.mislabel --task cifar10 --protocol scratch --data-dir DIR

An example with a wrong label is learnt against all the others, and so bears on itself more than most. Every method that
has a self-influence ranks the attributed examples by it; the area under the ROC curve (AUC) and the precision among the
top ones say how well the flipped labels come first. Two controls: the example's own loss at the same model, which costs
one forward pass, and random numbers. Methods without a self-influence are named and passed over.

Intervals are over examples, for the one base model of each seed; how much another base model would change stands in the
difference between seeds.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.answers import TOPS, Answers
from bench.attributions import answering_session, attributions
from bench.experiment import Execution, Experiment, Session
from bench.ground_truth import base_model
from bench.metrics.detection import area_under_curve, auc_difference, precision_at, precision_draws, resampled
from bench.question_command import add_question_arguments, answer_command, finish
from bench.sizes import num_attributed
from bench.tables import interval, number, table
from bench.translate import asked_for, execution_of
from retrain.command import Parser, check_out, fraction
from retrain.errors import UsageError
from retrain.mislabelled import Mislabelled, flipped_labels
from retrain.subsets import attributed_indices
from retrain.train import choose_device

OWN_LOSS, RANDOM_ORDER = "own loss", "random order"
FEW_QUERIES = 5  # self-influence asks for none, but methods want some
_RANDOM_STREAM = 42


@dataclass(frozen=True, kw_only=True)
class Mislabelling:
    """What is asked: an experiment whose task gets wrong labels, of each seed its own."""

    experiment: Experiment
    share: float = 0.1

    def of_seed(self, seed: int) -> Experiment:
        asked = self.experiment
        options = {
            "of": asked.task, "of_options": json.dumps(dict(asked.task_options), default=str), "share": self.share,
            "flip_seed": seed,
        }  # fmt: skip
        task = "retrain.mislabelled:Mislabelled"
        return replace(asked, task=task, task_options=options, seeds=(seed,), queries=FEW_QUERIES)


def run_mislabelling(mislabelling: Mislabelling, execution: Execution) -> Answers:
    started = time.perf_counter()
    out: Answers | None = None
    for seed in mislabelling.experiment.seeds:
        session = answering_session(mislabelling.of_seed(seed), execution)
        task = session.task
        assert isinstance(task, Mislabelled)
        if out is None:
            _check_share(mislabelling, session)
        scored = attributions(session)
        if out is None:
            out = Answers(
                question="mislabelled",
                task=task.clean,
                variants=[variant for variant in session.active if variant.rows in ("both", "raw")],
                asked={"experiment": mislabelling.experiment.to_json(), "share": mislabelling.share},
                ground={"share": mislabelling.share},
                truth=_words(session, mislabelling.share),
                device=session.device(),
                skipped=dict(session.skipped),
                notes=session.notes,
            )
        for block, found in scored.items():
            rankings: dict[str, tuple[Mapping[str, Any], np.ndarray]] = {}
            for one in found:
                own = one.self_influence()
                if one.variant.rows not in ("both", "raw"):
                    continue
                if own is None:
                    out.skipped[one.variant.label] = "it has no self-influence: its examples have no scale of their own"
                else:
                    rankings[one.variant.label] = one.told(), own
            rankings |= _controls(session, block)
            _add_rows(out, session, block, rankings)
        out.problems += session.out.problems
    assert out is not None
    out.seconds = time.perf_counter() - started
    return out


def _check_share(mislabelling: Mislabelling, session: Session) -> None:
    """Of every seed, before the first is trained: some labels are wrong and some right, or there is nothing to find."""
    n, share = num_attributed(session), session.blocks[0][1]
    num_train = len(session.task.train_data)
    for seed in mislabelling.experiment.seeds:
        wrong = flipped_labels(num_train, mislabelling.share, seed)[attributed_indices(seed, share, num_train)].sum()
        if not 2 <= wrong <= n - 2:
            raise UsageError(
                f"--share {mislabelling.share:g} flips {wrong} of {n:,} attributed labels (seed {seed}); expected two "
                "or more that are wrong, and two that are right: take another --share, or attribute more"
            )


def _words(session: Session, share: float) -> str:
    n = len(session.question(*session.blocks[0]).attributed_indices())
    return f"{100 * share:g} % of the labels flipped, {n:,} attributed examples"


def _controls(session: Session, block: tuple[int, float]) -> dict[str, tuple[Mapping[str, Any], np.ndarray]]:
    seed, _ = block
    task, device = session.task, choose_device(session.execution.device)
    examples = task.train_data.select(session.question(*block).attributed_indices())
    model, _ = base_model(task, seed, session.store, session.execution.device)
    losses = task.losses(model, examples, device).double().numpy()
    random = np.random.default_rng([_RANDOM_STREAM, seed]).random(len(examples))
    return {
        label: ({"method": label, "label": label, "settings": "", "origin": "control"}, values)
        for label, values in ((OWN_LOSS, losses), (RANDOM_ORDER, random))
    }


def _add_rows(
    out: Answers,
    session: Session,
    block: tuple[int, float],
    rankings: Mapping[str, tuple[Mapping[str, Any], np.ndarray]],
) -> None:
    task = session.task
    assert isinstance(task, Mislabelled)
    seed, share = block
    known = task.flipped[session.question(*block).attributed_indices()]
    where = {"task": task.name, "protocol": task.protocol, "alpha_attribution": share, "seed": seed}
    common = {"normalised": False, "num_queries": len(known), "num_undefined": 0}
    areas = {label: area_under_curve(known, values) for label, (_, values) in rankings.items()}
    for label, (told, _) in rankings.items():
        area = areas[label]
        ends = {"value": area.auc, "ci_low": area.ci_low, "ci_high": area.ci_high}
        out.rows.append(where | dict(told) | {"metric": "mislabel AUC", "at": None, "higher": True} | ends | common)
    for a, b in itertools.combinations(rankings, 2):
        out.pairs.append(
            where
            | {"metric": "mislabel AUC", "at": None, "normalised": False, "label": a, "against": b}
            | _difference(auc_difference(areas[a], areas[b]))
        )
    for top in sorted({*TOPS, float(known.mean())}):
        k = max(1, round(top * len(known)))
        draws = {label: precision_draws(known, values, k, seed=seed) for label, (_, values) in rankings.items()}
        precise = {label: precision_at(known, values, k) for label, (_, values) in rankings.items()}
        place = {"metric": "mislabel precision", "at": k / len(known), "size": k}
        for label, (told, _) in rankings.items():
            found = resampled(precise[label], draws[label])
            ends = {"value": found.value, "ci_low": found.ci_low, "ci_high": found.ci_high}
            out.rows.append(where | dict(told) | place | {"higher": True} | ends | common)
        for a, b in itertools.combinations(rankings, 2):
            out.pairs.append(
                where
                | place
                | {"normalised": False, "label": a, "against": b}
                | _difference(resampled(precise[a] - precise[b], draws[a] - draws[b]))
            )
    out.detail.setdefault("flipped", {})[f"seed {seed}, share {share:g}"] = int(known.sum())


def _difference(found: Any) -> dict[str, Any]:
    ends = {"difference": found.value, "ci_low": found.ci_low, "ci_high": found.ci_high}
    return {**ends, "p_value": found.p_value, "num_undefined": 0}


def show_mislabelled(out: Answers) -> str:
    parts = []
    for seed, share in sorted({(row["seed"], row["alpha_attribution"]) for row in out.rows}):
        here = [row for row in out.rows if (row["seed"], row["alpha_attribution"]) == (seed, share)]
        areas = sorted((row for row in here if row["metric"] == "mislabel AUC"), key=lambda row: -row["value"])
        precise = {(row["label"], row["size"]): row for row in here if row["metric"] == "mislabel precision"}
        sizes = sorted({size for _, size in precise})
        header = ["ranked by", "AUC", "95 % interval", *(f"precision, top {size}" for size in sizes), "seconds"]
        lines = []
        for row in areas:
            seconds = None if "fit_seconds" not in row else row["fit_seconds"] + row["score_seconds"]
            cells = [precise[row["label"], size] for size in sizes]
            lines.append(
                [row["label"], number(row["value"]), interval(row["ci_low"], row["ci_high"])]
                + [f"{number(cell['value'], 2)} {interval(cell['ci_low'], cell['ci_high'], 2)}" for cell in cells]
                + [number(seconds, 1)]
            )
        flipped = out.detail["flipped"][f"seed {seed}, share {share:g}"]
        words = f"{out.task.description}, protocol {out.task.protocol}: {out.truth} ({flipped} of them flipped)"
        chance = number(flipped / areas[0]["num_queries"], 2)
        legend = (
            f"AUC: 0.5 by chance; precision: the flipped share of the top ones, {chance} by chance; 95 % intervals "
            "over examples; seconds:\nof the method's fit and scores, the scores of some queries among them"
        )
        parts.append(f"{words}; seed {seed}\n{table(header, lines)}\n{legend}")
    pairs = [
        pair for pair in out.pairs if pair["metric"] == "mislabel AUC" and OWN_LOSS in (pair["label"], pair["against"])
    ]
    lines = [
        [
            f"{pair['label']} - {pair['against']}",
            str(pair["seed"]),
            f"{pair['difference']:+.3f}",
            f"[{pair['ci_low']:+.3f}, {pair['ci_high']:+.3f}]",
            f"{pair['p_value']:.2g}",
        ]
        for pair in pairs
    ]
    parts.append(table(["paired difference", "seed", "AUC", "95 % interval", "p"], lines, left=1))
    return "\n\n".join(parts)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.mislabel", description="Find flipped labels by self-influence.")
    add_question_arguments(parser, queries=False)  # examples are held against themselves
    parser.add_argument("--share", type=fraction, default=0.1, help="of the labels that are flipped (default: 0.1)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return answer_command(make_parser(), argv, _run)


def _run(arguments: argparse.Namespace, command: str, prog: str) -> int:
    check_out(arguments.out)
    out = run_mislabelling(
        Mislabelling(experiment=Experiment(**asked_for(arguments)), share=arguments.share), execution_of(arguments)
    )
    return finish(out, show_mislabelled(out), arguments.out, command, prog)


if __name__ == "__main__":
    sys.exit(main())
