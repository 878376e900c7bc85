"""The retrains behind every counterfactual: sets of examples in, what became of the queries out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.experiment import Session
from bench.ground_truth import UnitsFailedError, obtain
from bench.metrics.removal import Shared
from retrain.jobs import Unit
from retrain.removal import RemovalPlan, removal_units, stacked

_CONTROL_STREAM = 31
Wanted = tuple[np.ndarray, int]  # positions removed, how often retrained


@dataclass(frozen=True)
class Arm:
    """What was removed for every query at one size: the queries' own losses, and the models that they share."""

    losses: np.ndarray  # (q,) mean over models; NaN where there is none
    shared: tuple[Shared, ...] = field(default=())


class Laboratory:
    """One seed and share of an experiment: who may be removed, who is looked at, and the models retrained so far."""

    def __init__(self, session: Session, seed: int, share: float):
        self.session, self.task = session, session.task
        asked = session.experiment
        self.plan = RemovalPlan(
            seed=seed,
            alpha_attribution=share,
            split=asked.query_split,  # type: ignore[arg-type]
            max_queries=asked.queries,
            initialisation=asked.initialisation,  # type: ignore[arg-type]
        )
        self.attributed = self.plan.attributed(self.task)
        self.queries = self.plan.query_indices(self.task)
        self.seconds = 0.0  # of all retrains, whoever made them
        self.num_retrains = 0

    @property
    def num_attributed(self) -> int:
        return len(self.attributed)

    def size_of(self, share: float) -> int:
        """How many examples that share is: one at least."""
        return max(1, round(share * self.num_attributed))

    def retrain(self, wanted: Iterable[Wanted], what: str, margins: bool = False) -> list[dict[str, np.ndarray]]:
        """losses, and margins where asked for, each (replicates, q), of every set in order.

        All of it is one campaign, by size: on a GPU, trainings on as many examples share captured graphs.
        """
        device, store = self.session.execution.device, self.session.store
        asked = list(wanted)
        sets = [(removed, range(replicates)) for removed, replicates in asked]
        made = iter(removal_units(self.task, self.plan, sets, device, margins))
        units: list[list[Unit]] = [[next(made) for _ in range(replicates)] for _, replicates in asked]
        in_order = sorted((unit for some in units for unit in some), key=lambda unit: unit.config["num_removed"])
        name = f"{self.task.name} {what}, seed {self.plan.seed}"
        jobs = {"name": name, "progress": self.session.execution.progress, **self.session.execution.jobs}
        entries = obtain(in_order, store, force=self.session.execution.force, **jobs)
        self.seconds += sum(entry.record.get("seconds", 0.0) for entry in entries.values())
        self.num_retrains += len(entries)
        found = []
        for some in units:
            keys = [store.key(unit.kind, unit.config) for unit in some]
            if missing := [key for key in keys if key not in entries]:
                raise UnitsFailedError(
                    f"{len(missing)} of {len(keys)} retrains of one set are missing; the same command without "
                    "--collect makes them"
                )
            here = [entries[key] for key in keys]
            found.append({array: stacked(here, array) for array in here[0].arrays})
        return found

    # ---- what is removed ----

    def labels(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the attributed examples and of the queries."""
        train, queries = self.task.train_data.targets, self.task.query_data.targets
        return train.numpy()[self.attributed], queries.numpy()[self.queries]

    def random_orders(self, count: int) -> list[np.ndarray]:
        """Random orders of the attributed examples, (n,) each; the first k of one are nested in k."""
        seed, n = self.plan.seed, self.num_attributed
        return [np.random.default_rng([_CONTROL_STREAM, seed, number]).permutation(n) for number in range(count)]


def orders_of(scores: np.ndarray) -> np.ndarray:
    """(q, n) positions, most helpful first: helpful examples have negative scores. Ties keep the data's order."""
    return np.argsort(scores, axis=1, kind="stable")


def own_arm(found: Sequence[dict[str, np.ndarray]]) -> Arm:
    """Of sets that belong to one query each, in the queries' order."""
    return Arm(np.array([one["losses"][:, query].mean() for query, one in enumerate(found)]))


def shared_arm(found: Sequence[dict[str, np.ndarray]]) -> Arm:
    """Of models that every query was measured on."""
    models = np.concatenate([one["losses"] for one in found]).astype(np.float64)  # (models, q)
    return Arm(models.mean(axis=0), (Shared(np.arange(models.shape[1]), models),))


def class_arm(found: dict[int, Sequence[dict[str, np.ndarray]]], query_labels: np.ndarray) -> Arm:
    """Of sets that belong to a class each; a class without any leaves its queries undefined."""
    losses, shared = np.full(len(query_labels), np.nan), []
    for label, sets in found.items():
        queries = np.flatnonzero(query_labels == label)
        models = np.concatenate([one["losses"] for one in sets]).astype(np.float64)[:, queries]
        losses[queries] = models.mean(axis=0)
        shared.append(Shared(queries, models))
    return Arm(losses, tuple(shared))
