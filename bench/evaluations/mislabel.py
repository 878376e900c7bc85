"""Mislabelled examples: flip a share of the labels, retrain the base model, and look for them by self-influence.

    python -m bench.evaluations mislabel                           # the embedded task, a tenth of the labels flipped
    python -m bench.evaluations mislabel --shares 0.05 --seeds 1 2 3 --methods ekfac gradsim trak bif

An example with a wrong label is learnt against all the others, and so bears on itself more than most. Every method that
has a self-influence ranks the attributed examples by it; the area under the ROC curve (AUC) and the precision among the
top ones say how well the flipped labels come first. Two controls: the example's own loss at the same model, which costs
one forward pass, and random numbers. Methods without a self-influence are named and passed over.

Intervals are over examples, for the one base model of each seed; how much another base model would change stands in the
difference between seeds.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

import bench.evaluations as evaluations
from bench.arguments import fraction
from bench.evaluations import Block, MetricResult, ScoredMethod, groups_of, measured
from bench.experiment import Experiment, asked_for, execution_of
from bench.ground_truth import base_model
from bench.metrics.detection import area_under_curve, auc_difference, precision_at, precision_draws, resampled
from bench.records import TOPS
from bench.runner import Session
from retrain.errors import UsageError
from retrain.mislabelled import Mislabelled, flipped_labels
from retrain.subsets import attributed_indices
from retrain.units import choose_device

OWN_LOSS, RANDOM_ORDER = "own loss", "random order"
FEW_QUERIES = 5  # self-influence asks for none, but methods want some
AUC, PRECISION = "mislabel AUC", "mislabel precision"
_RANDOM_STREAM = 42


def add_arguments(parser: argparse.ArgumentParser) -> None:
    evaluations.add_shared_arguments(parser, queries=False)  # examples are held against themselves
    told = "of the labels that are flipped (default: 0.1)"
    parser.add_argument("--shares", dest="share", metavar="SHARE", type=fraction, default=0.1, help=told)


def evaluate(arguments: argparse.Namespace) -> MetricResult:
    """Each seed's task gets wrong labels of its own."""
    experiment, share = Experiment(**asked_for(arguments)), arguments.share
    options = {"of": experiment.task, "of_options": json.dumps(dict(experiment.task_options), default=str)}
    out: MetricResult | None = None
    for seed in experiment.seeds:
        flipped = {**options, "share": share, "flip_seed": seed}
        own = replace(experiment, task="retrain.mislabelled:Mislabelled", task_options=flipped, seeds=(seed,))
        session = evaluations.scoring_session(replace(own, queries=FEW_QUERIES), execution_of(arguments))
        assert isinstance(session.task, Mislabelled)
        if out is None:
            n = evaluations.num_attributed(session)
            _check_share(experiment.seeds, share, session, n)
            words = f"{100 * share:g} % of the labels flipped, {n:,} attributed examples"
            out = MetricResult.of(session, "mislabelled", {}, {"share": share}, words)
            out.asked = {"experiment": experiment.to_json(), "share": share}
            out.task, out.problems = session.task.clean, []
            out.variants = [variant for variant in session.active if variant.rows != "normalised"]
        for block, methods in evaluations.score_methods(session).items():
            _add_rows(out, session, block, [one for one in methods if one.variant.rows != "normalised"])
        out.problems += session.out.problems
    assert out is not None
    return out


def _check_share(seeds: Any, share: float, session: Session, n: int) -> None:
    """Of every seed, before the first is trained: some labels are wrong and some right, or there is nothing to find."""
    num_train, attributed = len(session.task.train_data), session.blocks[0][1]
    for seed in seeds:
        wrong = flipped_labels(num_train, share, seed)[attributed_indices(seed, attributed, num_train)].sum()
        if not 2 <= wrong <= n - 2:
            raise UsageError(
                f"--shares {share:g} flips {wrong} of {n:,} attributed labels (seed {seed}); expected two or more that "
                "are wrong, and two that are right: take another --shares, or attribute more"
            )


def _add_rows(out: MetricResult, session: Session, block: Block, methods: list[ScoredMethod]) -> None:
    """AUC, and precision among the top ones, of every method with a self-influence and of the two controls."""
    task, seed = session.task, block[0]
    assert isinstance(task, Mislabelled)
    columns: dict[str, Mapping[str, Any]] = {}
    rankings: dict[tuple[str, bool], np.ndarray] = {}  # (label, False) -> (n,): higher is looked at first
    for one in methods:
        if (influence := one.self_influence()) is None:
            out.skipped[one.variant.label] = "it has no self-influence: its examples have no scale of their own"
        else:
            columns[one.variant.label], rankings[one.variant.label, False] = one.columns, influence
    attributed = session.question(*block).attributed_indices()
    model, _ = base_model(task, seed, session.store, session.execution.device)
    losses = task.losses(model, task.train_data.select(attributed), choose_device(session.execution.device))
    rankings[OWN_LOSS, False] = losses.double().numpy()
    rankings[RANDOM_ORDER, False] = np.random.default_rng([_RANDOM_STREAM, seed]).random(len(attributed))
    columns |= {label: evaluations.control_columns(label) for label in (OWN_LOSS, RANDOM_ORDER)}

    known, where = task.flipped[attributed], evaluations.place_of(task, block)
    common = {"normalised": False, "num_queries": len(known), "num_undefined": 0, "higher": True}
    areas = {key: area_under_curve(known, values) for key, values in rankings.items()}
    at: dict[str, Any] = {"metric": AUC, "at": None}
    for (label, _), area in areas.items():
        out.rows.append(where | dict(columns[label]) | at | measured(area.auc, area) | common)
    out.add_pairs(where | at, areas, auc_difference)
    for top in sorted({*TOPS, float(known.mean())}):
        k = max(1, round(top * len(known)))
        at = {"metric": PRECISION, "at": k / len(known), "size": k}
        precise = {
            key: (precision_at(known, values, k), precision_draws(known, values, k, seed=seed))
            for key, values in rankings.items()
        }
        for (label, _), drawn in precise.items():
            found = resampled(*drawn)
            out.rows.append(where | dict(columns[label]) | at | measured(found.value, found) | common)
        out.add_pairs(where | at, precise, lambda a, b: resampled(a[0] - b[0], a[1] - b[1]))
    out.detail.setdefault("flipped", {})[f"seed {seed}, share {block[1]:g}"] = int(known.sum())


def show(out: MetricResult) -> str:
    about = {}
    for seed, share in groups_of(out.rows, "seed", "alpha_attribution"):
        about[seed, share] = f"{out.detail['flipped'][f'seed {seed}, share {share:g}']} of them flipped"
    legend = (
        "AUC: of self-influence, 0.5 by chance; precision: the flipped share of so large a top; 95 % intervals over "
        "examples; seconds: of\nthe method's fit and scores, the scores of some queries among them"
    )
    return evaluations.show(out, legend, about)
