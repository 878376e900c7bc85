"""The retrains behind counterfactuals: sets of examples to leave out go in, the queries' losses come out."""

from collections.abc import Iterable

import numpy as np

from bench.ground_truth import UnitsFailedError, obtain
from bench.runner import Session
from retrain.jobs import Unit
from retrain.removal import RemovalPlan, removal_units, stacked

_CONTROL_STREAM = 31
RemovalSet = tuple[np.ndarray, int]  # positions removed, how often retrained
NOTHING = np.array([], dtype=int)


class RemovalRetrainer:
    """One seed and share of an experiment: who may be removed, who is looked at, and the models retrained so far."""

    def __init__(self, session: Session, seed: int, share: float):
        self.session, self.task = session, session.task
        asked = session.experiment
        self.plan = RemovalPlan(
            seed=seed,
            alpha_attribution=share,
            split=asked.query_split,  # type: ignore[arg-type]
            max_queries=asked.queries,  # type: ignore[arg-type]
            initialisation=asked.initialisation,  # type: ignore[arg-type]
        )
        self.attributed = self.plan.attributed(self.task)
        self.queries = self.plan.query_indices(self.task)
        self.num_attributed = len(self.attributed)
        self.seconds = 0.0  # of all retrains, whoever made them
        self.num_retrains = 0

    def size_of(self, share: float) -> int:
        """How many examples that share is: one at least."""
        return max(1, round(share * self.num_attributed))

    def retrain(self, wanted: Iterable[RemovalSet], what: str, margins: bool = False) -> list[dict[str, np.ndarray]]:
        """losses, and margins where asked for, each (replicates, q), of every set in order.

        All of it is one batch of jobs, by size: on a GPU, trainings on as many examples share captured graphs.
        """
        execution, store = self.session.execution, self.session.store
        asked = list(wanted)
        sets = [(removed, range(replicates)) for removed, replicates in asked]
        made = iter(removal_units(self.task, self.plan, sets, execution.device, margins))
        units: list[list[Unit]] = [[next(made) for _ in range(replicates)] for _, replicates in asked]
        in_order = sorted((unit for some in units for unit in some), key=lambda unit: unit.config["num_removed"])
        name = f"{self.task.name} {what}, seed {self.plan.seed}"
        jobs = {"name": name, "progress": execution.progress, **execution.jobs}
        entries = obtain(in_order, store, force=execution.force, **jobs)
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

    def labels(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the attributed examples and of the queries."""
        train, queries = self.task.train_data.targets, self.task.query_data.targets
        return train.numpy()[self.attributed], queries.numpy()[self.queries]

    def random_orders(self, count: int) -> list[np.ndarray]:
        """Random orders of the attributed examples, (n,) each; the first k of one are nested in k."""
        seed, n = self.plan.seed, self.num_attributed
        return [np.random.default_rng([_CONTROL_STREAM, seed, number]).permutation(n) for number in range(count)]
