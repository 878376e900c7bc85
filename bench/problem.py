"""AttributionProblem: what a method is asked, and the retrained models that it may learn from before it answers.

A question is what scores depend on beside the method. One for a method that retrains by itself also says on which
further subsets: they are units of the same store as the ground truth, of a stream of their own.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from baselines.method import Bill, Method, Retrained, Size
from bench.ground_truth import RecentlyRead, UnitsFailedError, assemble, obtain
from retrain.examples import Examples
from retrain.jobs import Unit
from retrain.outputs import LOSS
from retrain.reference import FULL, Reference
from retrain.store import Store
from retrain.subsets import attributed_indices
from retrain.task import Split, Task
from retrain.units import Plan, checkpoint_unit, choose_device, retrain_units

EXTRA_RETRAINS = RecentlyRead()  # the methods of a run learn from the same retrains


@dataclass(frozen=True, kw_only=True)
class AttributionProblem:
    """Everything a method's scores depend on beside the method: what is attributed to what."""

    task: Task
    seed: int
    alpha_attribution: float
    split: Split = "report"
    max_queries: int | tuple[int, ...] | None = None  # the first so many of the split, or these of the task's queries
    of_train: bool = False  # the attributed examples take the queries' place
    checkpoint: int = 0  # which base model is looked at: 0, or a further one trained like it
    extra_retrain_plan: Plan | None = None  # the further subsets that a method asks for which retrains by itself
    output: str = LOSS  # of the queries: retrain/outputs.py
    reference: Reference | None = None  # the models that are looked at in the base models' place

    def of(self, method: Method, plan: Plan, reference: str = FULL) -> "AttributionProblem":
        """As this method is asked it where that plan's subsets are to be predicted.

        Further subsets are drawn and retrained on like the plan's own, in a stream that nobody is judged on.
        """
        asked = self
        if reference != FULL and method.uses_model:
            asked = replace(self, reference=Reference.like(reference, plan))
        count, alpha = method.extra_retrains()
        if not count:
            return asked
        drawn = replace(plan, num_subsets=count, alpha=alpha or plan.alpha, stream="learn")
        return replace(asked, extra_retrain_plan=replace(drawn, replicates=1, replicated_subsets=None))

    def model_unit(self, device: str, further: int = 0) -> Unit:
        """Of the model that is looked at, or of one that many further on."""
        number = self.checkpoint + further
        if self.reference is None:
            return checkpoint_unit(self.task, self.seed, number, device)
        return self.reference.unit(self.task, number, device)

    @cached_property
    def train(self) -> Examples:
        """What the model was trained on."""
        whole = self.task.train_data
        return whole if self.reference is None else whole.select(self.reference.indices(self.task, self.checkpoint))

    @cached_property
    def queries(self) -> Examples:
        asked = self.task.train_data if self.of_train else self.task.query_data
        return asked.select(self.query_indices())

    def attributed_indices(self) -> np.ndarray:
        return attributed_indices(self.seed, self.alpha_attribution, len(self.task.train_data))

    def query_indices(self) -> np.ndarray:
        """Into the task's queries, or its training examples."""
        if self.of_train:
            return self.attributed_indices()
        if isinstance(self.max_queries, tuple):
            return np.array(self.max_queries)
        return self.task.query_indices(self.split)[: self.max_queries]

    def config(self) -> dict[str, Any]:
        config = {
            "task": self.task.scoring_config,
            "seed": self.seed,
            "alpha_attribution": self.alpha_attribution,
            "split": self.split,
            "num_queries": len(self.query_indices()),
        }
        if self.of_train:
            config["of_train"] = True
        if self.output != LOSS:
            config["output"] = self.output
        if isinstance(self.max_queries, tuple):
            config["chosen"] = list(self.max_queries)
        if self.checkpoint:
            config["checkpoint_number"] = self.checkpoint
        if self.extra_retrain_plan is not None:  # how models are retrained decides such scores, too
            config["extra_retrain_plan"] = {"task": self.task.config, **vars(self.extra_retrain_plan)}
        return {**config, **self.reference_config()}

    def reference_config(self) -> dict[str, Any]:
        """What a fit depends on as well: the examples that the model was trained on."""
        if self.reference is None:
            return {}
        return {"reference": self.reference.config(self.task, self.checkpoint)}

    def plain_data(self) -> dict[str, Any]:
        """What a worker needs, beside the task, to ask the same."""
        names = ("seed", "alpha_attribution", "split", "max_queries", "of_train", "checkpoint", "output")
        learns = None if self.extra_retrain_plan is None else dict(vars(self.extra_retrain_plan))
        reference = None if self.reference is None else dict(vars(self.reference))
        return {**{name: getattr(self, name) for name in names}, "extra_retrain_plan": learns, "reference": reference}

    @classmethod
    def from_plain_data(cls, task: Task, content: Mapping[str, Any]) -> "AttributionProblem":
        learns, reference = content["extra_retrain_plan"], content["reference"]
        plans: dict[str, Any] = {"extra_retrain_plan": None if learns is None else Plan(**learns)}
        if isinstance(content["max_queries"], list):
            plans["max_queries"] = tuple(content["max_queries"])
        return cls(
            task=task, **{**content, **plans, "reference": None if reference is None else Reference(**reference)}
        )

    def size(self, device: str) -> Size:
        """Known before anything is trained."""
        model = self.task.build_model(0)
        return Size(
            num_train=len(self.task.train_data),
            num_attributed=len(self.attributed_indices()),
            num_queries=len(self.query_indices()),
            num_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
            device=choose_device(device),
        )


def largest_plans(questions: Iterable[AttributionProblem]) -> list[AttributionProblem]:
    """Of those that learn from the beginnings of one plan, the one that learns from the most of it."""
    most: dict[Any, AttributionProblem] = {}
    for question in questions:
        if question.extra_retrain_plan is not None:
            plan = replace(question.extra_retrain_plan, num_subsets=0)
            known = most.get(plan)
            if known is None or known.extra_retrain_plan.num_subsets < question.extra_retrain_plan.num_subsets:  # type: ignore[union-attr]
                most[plan] = question
    return list(most.values())


def extra_retrain_units(question: AttributionProblem, device: str) -> list[Unit]:
    return (
        [] if question.extra_retrain_plan is None else retrain_units(question.task, question.extra_retrain_plan, device)
    )


def seconds_of(retrains: Sequence[Mapping[str, Any]]) -> float:
    """Of all these records; each process's first retrain, which waited for its start, counts as the others' median."""
    usual = [record.get("seconds", 0.0) for record in retrains if not record.get("first")]
    first = [record.get("seconds", 0.0) for record in retrains if record.get("first")]
    return sum(usual) + (statistics.median(usual) * len(first) if usual else sum(first))


def obtain_extra_retrains(question: AttributionProblem, store: Store, device: str, bill: Bill) -> Retrained:
    """The retrained models that the question's method learns from, made where they are missing."""
    plan = question.extra_retrain_plan
    assert plan is not None
    with bill.charge_recorded_cost():
        name = f"{question.task.name} further retrains, alpha {plan.alpha:g}, seed {plan.seed}"
        units = extra_retrain_units(question, device)
        entries = list(obtain(units, store, name=name, progress=True, recent=EXTRA_RETRAINS).values())
        found = assemble(question.task, plan, entries)
        if missing := plan.num_subsets - len(found.subsets):
            raise UnitsFailedError(f"{missing} of {plan.num_subsets} further retrains are missing; run the same again")
        bill.add(seconds_of([entry.record for entry in entries]))
    return Retrained(found.masks, found.of_output(question.output).losses[0][:, question.query_indices()])
