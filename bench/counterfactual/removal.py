"""Removal curves: the change of each query's loss against how many of its most helpful examples are left out."""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.answers import Answers
from bench.attributions import SCORE_CHOICES, Answered, ScoreKind, SeedAndShare, answering_session, attributions
from bench.counterfactual.brittleness import brittleness
from bench.counterfactual.laboratory import Arm, Laboratory, Wanted, class_arm, orders_of, own_arm, shared_arm
from bench.experiment import Execution, Experiment
from bench.metrics.removal import MeanChange, Shared, mean_change
from bench.records import without_nan
from bench.sizes import num_attributed, sizes_of
from retrain.errors import UsageError
from retrain.removal import classifies

RANDOM_REMOVAL, SAME_CLASS = "random removal", "same-class removal"
MOST_NUMBERS = 100_000  # of the queries' own changes in a record
SHARES = (0.001, 0.01, 0.05, 0.1, 0.2)


@dataclass(frozen=True, kw_only=True)
class Removal:
    """What is asked, beside the experiment's task, methods, seeds and queries."""

    experiment: Experiment
    shares: Sequence[float] = ()  # of the attributed examples; empty: SHARES, of each one example at least
    replicates: int = 3  # retrains of every query's set
    reference: int = 20  # models with nothing removed
    controls: int = 10  # random sets of every size; of every class and size for the second control
    scores: str = "raw"  # whose order is removed: raw, normalised or both
    brittleness: bool = False

    def __post_init__(self) -> None:
        if wrong := [share for share in self.shares if not 0 < share < 1]:
            raise UsageError(f"shares holds {wrong[0]:g}; expected fractions of the attributed examples, such as 0.01")
        for name, least in (("replicates", 1), ("reference", 2), ("controls", 2)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} is {getattr(self, name)}; expected at least {least}")
        if self.scores not in SCORE_CHOICES:
            raise UsageError(f'scores is "{self.scores}"; available: {", ".join(SCORE_CHOICES)}')

    def asked(self) -> dict[str, Any]:
        return {
            "experiment": self.experiment.to_json(),
            **{name: getattr(self, name) for name in ("replicates", "reference", "controls", "scores", "brittleness")},
            "shares": list(self.shares or SHARES),
        }


@dataclass(frozen=True)
class RemovalCurve:
    """One method's, or one control's, arms by size."""

    label: str
    kind: ScoreKind
    told: Mapping[str, Any]
    arms: dict[int, Arm]


def run_removal(removal: Removal, execution: Execution) -> Answers:
    started = time.perf_counter()
    session = answering_session(removal.experiment, execution)
    sizes = sizes_of("--shares", removal.shares, SHARES, num_attributed(session))
    if removal.brittleness and not classifies(session.task):
        raise UsageError(
            f"--brittleness needs a classification; {session.task.name} has no prediction that could flip: leave it out"
        )
    scored = attributions(session)
    labs = {block: Laboratory(session, *block) for block in session.blocks}
    first = labs[session.blocks[0]]
    out = Answers(
        question="removal",
        task=session.task,
        variants=session.active,
        asked=removal.asked(),
        ground=_ground(removal, first),
        truth=_truth_words(removal, first),
        device=session.device(),
        skipped=session.skipped,
        notes=session.notes,
    )
    for block, lab in labs.items():
        curves, reference = _curves(removal, lab, scored.get(block, []), sizes)
        _add_rows(out, lab, block, curves, reference)
        if removal.brittleness:
            asked = (kinds_of(removal), removal.reference, removal.replicates)
            brittleness(out, lab, block, scored.get(block, []), *asked)
    out.detail["num_retrains"] = sum(lab.num_retrains for lab in labs.values())
    out.detail["retrain_seconds"] = round(sum(lab.seconds for lab in labs.values()), 2)
    out.problems += session.out.problems
    out.seconds = time.perf_counter() - started
    return out


def kinds_of(removal: Removal) -> tuple[ScoreKind, ...]:
    return SCORE_CHOICES[removal.scores]  # type: ignore[return-value]


def _ground(removal: Removal, lab: Laboratory) -> dict[str, Any]:
    """What decides the losses that a row rests on; the shares stand in the rows, methods are series."""
    experiment = removal.experiment
    names = ("query_split", "queries", "initialisation")
    return {
        **{name: getattr(experiment, name) for name in names},
        **{name: getattr(removal, name) for name in ("replicates", "reference")},
        "num_queries": len(lab.queries),
        "num_attributed": lab.num_attributed,
    }


def _truth_words(removal: Removal, lab: Laboratory) -> str:
    return (
        f"{len(lab.queries)} queries, {times(removal.replicates)} a set, {removal.reference} with nothing removed, "
        f"{lab.num_attributed:,} attributed examples"
    )


def times(count: int) -> str:
    return "one retrain" if count == 1 else f"{count} retrains"


def _curves(
    removal: Removal, lab: Laboratory, scored: Sequence[Answered], sizes: Sequence[int]
) -> tuple[list[RemovalCurve], Arm]:
    """Every method's and control's arms, and the models with nothing removed: one campaign."""
    wanted: list[Wanted] = [(np.array([], dtype=int), removal.reference)]
    places: list[tuple[str, ScoreKind, Mapping[str, Any], int, range]] = []

    def ask(label: str, kind: ScoreKind, told: Mapping[str, Any], size: int, sets: Sequence[Wanted]) -> None:
        places.append((label, kind, told, size, range(len(wanted), len(wanted) + len(sets))))
        wanted.extend(sets)

    for one, kind in itertools.product(scored, kinds_of(removal)):
        if (scores := one.scores(kind)) is not None:
            orders = orders_of(scores)
            for size in sizes:
                ask(one.variant.label, kind, one.told(), size, [(order[:size], removal.replicates) for order in orders])
    random_orders = lab.random_orders(removal.controls)
    at_random: dict[int, range] = {}
    for size in sizes:
        at_random[size] = range(len(wanted), len(wanted) + removal.controls)
        wanted.extend((order[:size], 1) for order in random_orders)
    by_class: dict[int, dict[int, range]] = {}
    if classifies(lab.task):
        train_labels, query_labels = lab.labels()
        for size, label in itertools.product(sizes, np.unique(query_labels).tolist()):
            members = [order[train_labels[order] == label][:size] for order in random_orders]
            if len(members[0]) == size:  # a class may have fewer than that
                by_class.setdefault(size, {})[label] = range(len(wanted), len(wanted) + len(members))
                wanted.extend((some, 1) for some in members)
    found = lab.retrain(wanted, "removals")
    curves: dict[tuple[str, ScoreKind], RemovalCurve] = {}
    for label, kind, told, size, place in places:
        curve = curves.setdefault((label, kind), RemovalCurve(label, kind, told, {}))
        curve.arms[size] = own_arm([found[number] for number in place])
    controls = {RANDOM_REMOVAL: {size: shared_arm([found[i] for i in place]) for size, place in at_random.items()}}
    if by_class:
        controls[SAME_CLASS] = {
            size: class_arm({label: [found[i] for i in place] for label, place in some.items()}, query_labels)
            for size, some in by_class.items()
        }
    for (label, arms), kind in itertools.product(controls.items(), kinds_of(removal)):
        curves[label, kind] = RemovalCurve(label, kind, control(label), arms)
    return list(curves.values()), shared_arm(found[:1])


def control(label: str) -> dict[str, Any]:
    return {"method": label, "label": label, "settings": "", "origin": "control"}


def where_of(lab: Laboratory, block: SeedAndShare) -> dict[str, Any]:
    seed, share = block
    return {"task": lab.task.name, "protocol": lab.task.protocol, "alpha_attribution": share, "seed": seed}


def ends_of(found: MeanChange) -> dict[str, Any]:
    return {"ci_low": found.ci_low, "ci_high": found.ci_high, "num_undefined": found.num_undefined}


def _add_rows(
    out: Answers, lab: Laboratory, block: SeedAndShare, curves: Sequence[RemovalCurve], reference: Arm
) -> None:
    where = where_of(lab, block)
    own: dict[str, list[list[float]]] = {}
    for curve in curves:
        for size, arm in curve.arms.items():
            change = arm.losses - reference.losses
            found = mean_change(change, (*_of(arm, change), *_of(reference, change)))
            place = {
                "metric": "removal",
                "at": _share(size, lab),
                "size": size,
                "normalised": curve.kind == "normalised",
            }
            out.rows.append(
                where | dict(curve.told) | place
                | {"value": found.mean, **ends_of(found), "higher": True, "num_queries": found.num_queries}
                | {"median": float(np.nanmedian(change)) if np.isfinite(change).any() else math.nan}
            )  # fmt: skip
            own.setdefault(_name(curve), []).append([round(float(value), 6) for value in change])
    for first, second in itertools.combinations(curves, 2):
        if first.kind != second.kind or {first.label, second.label} <= {RANDOM_REMOVAL, SAME_CLASS}:
            continue
        for size in sorted(set(first.arms) & set(second.arms)):
            a, b = first.arms[size], second.arms[size]
            difference = a.losses - b.losses
            found = mean_change(difference, (*_of(a, difference), *_of(b, difference)))
            out.pairs.append(
                where
                | {"metric": "removal", "at": _share(size, lab), "size": size}
                | {"normalised": first.kind == "normalised", "label": first.label, "against": second.label}
                | {"difference": found.mean, **ends_of(found), "p_value": found.p_value}
            )
    if sum(len(values) for lists in own.values() for values in lists) <= MOST_NUMBERS:
        out.detail.setdefault("changes", {})[f"seed {block[0]}, share {block[1]:g}"] = without_nan(own)
    out.detail["reference_loss"] = float(reference.losses.mean())


def _name(curve: RemovalCurve) -> str:
    return f"{curve.label}, normalised" if curve.kind == "normalised" else curve.label


def _share(size: int, lab: Laboratory) -> float:
    return size / lab.num_attributed


def _of(arm: Arm, change: np.ndarray) -> list[Shared]:
    """An arm's shared models, with the queries that are defined on both sides."""
    kept = []
    for one in arm.shared:
        defined = np.isfinite(change[one.queries])
        if defined.any():
            kept.append(Shared(one.queries[defined], one.values[:, defined]))
    return kept
