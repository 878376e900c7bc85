"""Any method over several base models: `--checkpoints 1 2 5` has a row for each number, the scores' mean over models.

Model 0 is the base model, the others are trained like it from seeds of their own. Each model's scores are an entry of
their own in the cache, so that five models reuse what one, and two, have made; the budget of a row is what all of them
cost, the training of the further models included.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bench.scoring import MethodFailedError, Prediction, Scorer
from bench.variants import Variant, changed_origin
from retrain.jobs import Unit
from retrain.train import Plan, checkpoint_unit


def with_models(variants: Sequence[Variant], numbers: Sequence[int]) -> list[Variant]:
    """Each variant for each number of models; one that a record describes with its number stays as it is."""
    found: dict[tuple[str, str], Variant] = {}
    for variant in variants:
        for number in (variant.models,) if variant.models > 1 else numbers:
            label, origin = variant.label, variant.origin
            if number > 1 and variant.models != number:
                label += f"{',' if '@' in label else '@'}models={number}"
                origin = changed_origin(origin)
            found.setdefault((label, variant.rows), replace(variant, models=number, label=label, origin=origin))
    return list(found.values())


class Ensemble:
    """The scorers of one method at several base models, as if they were one."""

    def __init__(self, members: Sequence[Scorer]):
        self.members = members
        self.question, self.store = members[0].question, members[0].store

    @classmethod
    def of(cls, scorer: Scorer, number: int) -> "Scorer | Ensemble":
        if number == 1:
            return scorer
        others = [
            Scorer(
                replace(scorer.question, checkpoint=k),
                scorer.method,
                scorer.store,
                scorer.device_name,
                scorer.keep_scores,
            )
            for k in range(1, number)
        ]
        return cls([scorer, *others])

    @staticmethod
    def first(scorer: "Scorer | Ensemble") -> Scorer:
        """The base model's own."""
        return scorer.members[0] if isinstance(scorer, Ensemble) else scorer

    def part_units(self) -> list[Unit]:
        return [unit for member in self.members for unit in member.part_units()]

    def forget(self, plans: Sequence[Plan]) -> None:
        for member in self.members:
            member.forget(plans)

    def missing(self, plans: Sequence[Plan]) -> list[Unit]:
        return [unit for member in self.members for unit in member.missing(plans)]

    def cached(self, plans: Sequence[Plan]) -> bool:
        return all(self._trained(member) and member.cached(plans) for member in self.members)

    def _trained(self, member: Scorer) -> bool:
        asked = member.question
        unit = checkpoint_unit(asked.task, asked.seed, asked.checkpoint, member.device_name)
        return self.store.has(unit.kind, unit.config)

    def predictions(self, plans: Sequence[Plan]) -> list[Prediction]:
        """One a plan: what the mean of the models' scores predicts."""
        each = [member.predictions(plans) for member in self.members]
        trained = sum(member.base[1].record.get("seconds", 0.0) for member in self.members[1:])
        return [mean_prediction(of_plan, trained) for of_plan in zip(*each, strict=True)]


def mean_prediction(members: Sequence[Prediction], further_seconds: float) -> Prediction:
    """Of the sum over a subset's members, which is linear in the scores; costs add up, and memory does not."""
    records = [member.record for member in members]
    record = dict(records[0])
    record["fit_seconds"] = sum(one["fit_seconds"] for one in records) + further_seconds
    record["score_seconds"] = sum(one["score_seconds"] for one in records)
    record["peak_memory_bytes"] = max(one["peak_memory_bytes"] for one in records)
    record["num_scores_not_finite"] = sum(one.get("num_scores_not_finite") or 0 for one in records)
    record["diagnostics"] = {"models": len(members), **records[0].get("diagnostics", {})}
    names = set(members[0].components)
    if any(set(member.components) != names for member in members):
        raise MethodFailedError("the base models' scores have different parts")
    components = {name: mean_prediction([m.components[name] for m in members], further_seconds) for name in names}
    scaled = [member.normalised for member in members]
    normalised = None if any(one is None for one in scaled) else _mean(scaled)
    return Prediction(_mean([member.raw for member in members]), normalised, record, components)


def _mean(arrays: Sequence[Any]) -> np.ndarray:
    return np.mean(np.stack(arrays), axis=0)
