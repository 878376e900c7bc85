"""Removal: leave out what a method calls most helpful, retrain, and see what becomes of the query.

    python -m bench.evaluations removal                                       # the embedded task: removal curves
    python -m bench.evaluations removal --methods ekfac gradsim --shares 0.01 0.1 --replicates 5
    python -m bench.evaluations removal --brittleness                         # and how little flips each prediction

For every query, method and size k, the k examples of the most negative score are left out of the attributed ones and a
model is retrained on the rest, `--replicates` times. The change is the query's loss then, less its loss with nothing
removed (REFERENCE_MODELS of them). Two controls are removed alike: random examples, and random ones of the query's own
class; a method that cannot beat the second has found the class and no more. Retrains are units of the store: kept,
resumed, spread over a cluster, and shared by methods that name the same examples.
"""

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import bench.evaluations as evaluations
from bench.arguments import at_least, fraction
from bench.evaluations import Block, MetricResult, ScoredMethod, measured
from bench.ground_truth import UnitsFailedError, obtain
from bench.metrics.removal import Shared, mean_change
from bench.runner import Session
from bench.tables import SCORE_KINDS
from retrain.errors import UsageError
from retrain.removal import RemovalPlan, removal_units, stacked
from retrain.task import classifies

RANDOM_REMOVAL, SAME_CLASS, BRITTLENESS = "random removal", "same-class removal", "brittleness"
SHARES = (0.001, 0.01, 0.05, 0.1, 0.2)
# Of brittleness: from one in a thousand to a fifth, by about 1.4 each.
SMALLEST_SHARES = (
    0.001, 0.0014, 0.002, 0.0028, 0.004, 0.0056, 0.008, 0.011, 0.016, 0.022, 0.032, 0.045, 0.063, 0.089, 0.13, 0.2,
)  # fmt: skip
NUM_QUERIES = 100
REFERENCE_MODELS = 20  # with nothing removed
CONTROLS = 10  # random sets of every size, and of every class and size
_CONTROL_STREAM = 31
RemovalSet = tuple[np.ndarray, int]  # positions removed, how often retrained
NOTHING = np.array([], dtype=int)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    evaluations.add_shared_arguments(parser)
    add = parser.add_argument
    shares = " ".join(f"{share:g}" for share in SHARES)
    add("--shares", nargs="+", type=fraction, help=f"of the attributed examples that are removed (default: {shares})")
    add("--replicates", dest="times", type=at_least(1), default=3, help="retrains of every set (default: %(default)s)")
    add("--brittleness", action="store_true", help="also find the smallest share that flips each prediction")


def evaluate(arguments: argparse.Namespace) -> MetricResult:
    session = evaluations.session_of(arguments, queries=NUM_QUERIES)
    shares, times = tuple(dict.fromkeys(arguments.shares or ())), arguments.times
    n = evaluations.num_attributed(session)
    sizes = evaluations.sizes_of(shares, SHARES, n)
    if arguments.brittleness and not classifies(session.task):
        raise UsageError(
            f"--brittleness needs a classification; {session.task.name} has no prediction that could flip: leave it out"
        )
    scored = evaluations.score_methods(session)
    retrainers = {block: RemovalRetrainer(session, *block) for block in session.blocks}
    num_queries = len(retrainers[session.blocks[0]].queries)
    retrains = {"replicates": times, "reference": REFERENCE_MODELS}
    asked = {name: getattr(session.experiment, name) for name in ("query_split", "queries", "initialisation")}
    options = {name: getattr(arguments, name) for name in ("scores", "brittleness")}
    a_set = "one retrain" if times == 1 else f"{times} retrains"
    out = MetricResult.of(
        session,
        "removal",
        {**retrains, "controls": CONTROLS, **options, "shares": list(shares or SHARES)},
        {**asked, **retrains, "num_queries": num_queries, "num_attributed": n},
        f"{num_queries} queries, {a_set} a set, {REFERENCE_MODELS} with nothing removed, {n:,} attributed examples",
    )
    for block, retrainer in retrainers.items():
        methods = scored.get(block, [])
        add_changes(out, retrainer, block, *removal_curves(retrainer, methods, arguments.scores, sizes, times))
        if arguments.brittleness:
            add_brittleness(out, retrainer, block, methods, arguments.scores, times)
    return out


class RemovalRetrainer:
    """One seed and share of an experiment: sets of examples to leave out go in, the queries' losses come out."""

    def __init__(self, session: Session, seed: int, share: float):
        self.session, self.task, asked = session, session.task, session.experiment
        self.plan = RemovalPlan(
            seed=seed,
            alpha_attribution=share,
            split=asked.query_split,  # type: ignore[arg-type]
            max_queries=asked.queries,  # type: ignore[arg-type]
            initialisation=asked.initialisation,  # type: ignore[arg-type]
        )
        self.attributed = self.plan.attributed(self.task)
        self.queries = self.plan.query_indices(self.task)

    def retrain(self, sets: Sequence[RemovalSet], what: str, margins: bool = False) -> list[dict[str, np.ndarray]]:
        """losses, and margins where asked for, each (replicates, q), of every set in order.

        All of it is one batch of jobs, by size: on a GPU, trainings on as many examples share captured graphs.
        """
        execution = self.session.execution
        wanted = [(removed, range(times)) for removed, times in sets]
        units = removal_units(self.task, self.plan, wanted, execution.device, margins)
        in_order = sorted(units, key=lambda unit: unit.config["num_removed"])
        jobs = execution.job_options(f"{self.task.name} {what}, seed {self.plan.seed}")
        entries = obtain(in_order, self.session.store, **jobs)
        found, rest = [], iter(units)
        for _, times in sets:
            own = [entries[unit.key] for unit in itertools.islice(rest, times) if unit.key in entries]
            if len(own) < times:
                raise UnitsFailedError(
                    f"{times - len(own)} of {times} retrains of one set are missing; the same command without "
                    "--collect makes them"
                )
            found.append({array: stacked(own, array) for array in own[0].arrays})
        return found


# ---- removal curves ----


class Arm:
    """What was removed for every query at one size: the queries' losses, and the models that several of them share."""

    def __init__(self, num_queries: int, is_shared: bool = True):
        self.losses, self.is_shared = np.full(num_queries, np.nan), is_shared  # mean over models; NaN: nothing removed
        self.models: list[Shared] = []

    def add(self, queries: np.ndarray, losses: np.ndarray) -> None:
        """Of some queries: (models, these queries)."""
        self.losses[queries] = losses.mean(axis=0)
        if self.is_shared:
            self.models.append(Shared(queries, losses))

    def shared_by(self, change: np.ndarray) -> list[Shared]:
        """Its shared models, with the queries that are defined on both sides."""
        kept = [(one, np.isfinite(change[one.queries])) for one in self.models]
        return [Shared(one.queries[here], one.values[:, here]) for one, here in kept if here.any()]


Curves = dict[tuple[str, bool], tuple[Mapping[str, Any], dict[int, Arm]]]  # (label, normalised) -> columns, size -> arm


def removal_curves(
    retrainer: RemovalRetrainer, methods: Sequence[ScoredMethod], scores: str, sizes: Sequence[int], times: int
) -> tuple[Curves, Arm]:
    """Every method's and control's arms, and the models with nothing removed: one batch of jobs."""
    num_queries, n = len(retrainer.queries), len(retrainer.attributed)
    everybody, curves = np.arange(num_queries), Curves()
    nothing = Arm(num_queries)
    wanted: list[tuple[Arm, np.ndarray, list[RemovalSet]]] = [(nothing, everybody, [(NOTHING, REFERENCE_MODELS)])]
    for one, normalised, values in evaluations.score_matrices(methods, scores):
        arms = {size: Arm(num_queries, is_shared=False) for size in sizes}
        curves[one.variant.label, normalised] = one.columns, arms
        for query, order in enumerate(evaluations.orders_of(values)):
            wanted += [(arm, np.array([query]), [(order[:size], times)]) for size, arm in arms.items()]

    seeds = ([_CONTROL_STREAM, retrainer.plan.seed, number] for number in range(CONTROLS))
    orders = [np.random.default_rng(seed).permutation(n) for seed in seeds]  # the first k of one are nested in k
    controls = {RANDOM_REMOVAL: {size: Arm(num_queries) for size in sizes}}
    for size, arm in controls[RANDOM_REMOVAL].items():
        wanted.append((arm, everybody, [(order[:size], 1) for order in orders]))
    if classifies(retrainer.task):
        train_labels = retrainer.task.train_data.targets.numpy()[retrainer.attributed]
        query_labels = retrainer.task.query_data.targets.numpy()[retrainer.queries]
        by_size = controls[SAME_CLASS] = dict[int, Arm]()
        for size, label in itertools.product(sizes, np.unique(query_labels).tolist()):
            members = [order[train_labels[order] == label][:size] for order in orders]
            if len(members[0]) == size:  # a class may have fewer than that
                arm = by_size.setdefault(size, Arm(num_queries))
                wanted.append((arm, np.flatnonzero(query_labels == label), [(some, 1) for some in members]))
    for label, kind in itertools.product(controls, SCORE_KINDS[scores]):
        curves[label, kind] = evaluations.control_columns(label), controls[label]

    found = iter(retrainer.retrain([one for _, _, sets in wanted for one in sets], "removals"))
    for arm, queries, sets in wanted:
        losses = np.concatenate([next(found)["losses"] for _ in sets])
        arm.add(queries, losses.astype(np.float64)[:, queries])
    return curves, nothing


def add_changes(out: MetricResult, retrainer: RemovalRetrainer, block: Block, curves: Curves, reference: Arm) -> None:
    where = evaluations.place_of(retrainer.task, block)

    def at(size: int) -> dict[str, Any]:
        return {"metric": "removal", "at": size / len(retrainer.attributed), "size": size}

    for (_, normalised), (columns, arms) in curves.items():
        for size, arm in arms.items():
            change = arm.losses - reference.losses
            found = mean_change(change, (*arm.shared_by(change), *reference.shared_by(change)))
            median = float(np.nanmedian(change)) if np.isfinite(change).any() else math.nan
            kind = {"normalised": normalised, "higher": True, "median": median}
            out.rows.append(where | dict(columns) | at(size) | kind | measured(found.value, found))

    def gap(first: Arm, second: Arm) -> Any:
        change = first.losses - second.losses
        return mean_change(change, (*first.shared_by(change), *second.shared_by(change)))

    for size in sorted({size for _, arms in curves.values() for size in arms}):
        arms_here = {key: arms[size] for key, (_, arms) in curves.items() if size in arms}
        out.add_pairs(where | at(size), arms_here, gap)
    # What the controls differ by says nothing of a method.
    out.pairs = [pair for pair in out.pairs if {pair["label"], pair["against"]} != {RANDOM_REMOVAL, SAME_CLASS}]


# ---- brittleness: the smallest share of the attributed examples that flips a query's prediction, by bisection ----
#
# Sizes lie on a grid, so that methods and queries share trainings on as many examples, and a bisection takes as many
# rounds as the grid has doublings. A query has flipped at a size where its mean margin over replicates is negative.
# That a larger set flips what a smaller one did is assumed, as by Ilyas et al. (2022); where it does not hold, the size
# found is one at which it flips, and perhaps not the smallest.
#
# What is reported is the geometric mean over queries that are right with nothing removed. A query that the largest size
# does not flip counts as if that size had: the mean is a lower bound then, the same for all methods, and the number of
# such queries stands beside it.


class Bisection:
    """One method's search for every query at once: `low` does not flip, `high` does; both are places on the grid."""

    def __init__(self, orders: np.ndarray, queries: np.ndarray, num_sizes: int):
        self.orders, self.queries, self.num_sizes = orders, queries, num_sizes
        self.low = np.full(len(queries), -1)  # nothing removed: right
        self.high = np.full(len(queries), num_sizes)  # beyond the grid: unknown

    def next_places(self) -> np.ndarray:
        """The place to try for each query; the largest size first, -1 where the search is over."""
        untried = self.high - self.low == self.num_sizes + 1
        middle = np.where(self.high - self.low <= 1, -1, (self.low + self.high) // 2)
        return np.where(untried, self.num_sizes - 1, middle)

    def learn(self, places: np.ndarray, flipped: np.ndarray) -> None:
        tried = places >= 0
        self.high = np.where(tried & flipped, places, self.high)
        self.low = np.where(tried & ~flipped, places, self.low)


def add_brittleness(
    out: MetricResult,
    retrainer: RemovalRetrainer,
    block: Block,
    methods: Sequence[ScoredMethod],
    scores: str,
    times: int,
) -> None:
    """Adds rows and pairs."""
    (nothing,) = retrainer.retrain([(NOTHING, REFERENCE_MODELS)], "margins", margins=True)
    right = np.flatnonzero(nothing["margins"].mean(axis=0) > 0)
    if len(right) < 2:
        out.problems.append(
            f"{len(right)} of {len(retrainer.queries)} queries are right with nothing removed; "
            "brittleness needs at least two: take more --queries (the removal curves above are whole)"
        )
        return
    n, where = len(retrainer.attributed), evaluations.place_of(retrainer.task, block)
    sizes = sorted({max(1, round(share * n)) for share in SMALLEST_SHARES})
    searches = [
        (one, normalised, Bisection(evaluations.orders_of(values)[right], right, len(sizes)))
        for one, normalised, values in evaluations.score_matrices(methods, scores)
    ]
    most = 2 + math.ceil(math.log2(len(sizes)))
    for number in itertools.count(1):  # a round of all methods and queries is one batch of jobs
        places = [search.next_places() for _, _, search in searches]
        wanted: list[RemovalSet] = [
            (search.orders[query][: sizes[here[query]]], times)
            for (_, _, search), here in zip(searches, places, strict=True)
            for query in np.flatnonzero(here >= 0)
        ]
        if not wanted:
            break
        made = iter(retrainer.retrain(wanted, f"bisection, round {number} of at most {most}", margins=True))
        for (_, _, search), here in zip(searches, places, strict=True):
            flipped = np.zeros(len(here), dtype=bool)
            for query in np.flatnonzero(here >= 0):
                flipped[query] = next(made)["margins"][:, right[query]].mean() < 0
            search.learn(here, flipped)

    logs: dict[tuple[str, bool], np.ndarray] = {}
    for one, normalised, search in searches:
        found = np.array(sizes)[np.minimum(search.high, len(sizes) - 1)]
        logs[one.variant.label, normalised] = shares = np.log10(found / n)
        mean, unflipped = mean_change(shares), int((search.high == len(sizes)).sum())
        out.rows.append(
            where | one.columns | {"metric": BRITTLENESS, "at": None, "normalised": normalised, "higher": False}
            | {"value": 10**mean.value, "ci_low": 10**mean.ci_low, "ci_high": 10**mean.ci_high}
            | {"num_queries": len(right), "num_undefined": 0, "num_unflipped": unflipped}
            | {"note": f"{unflipped} of {len(right)} never flipped" if unflipped else ""}
        )  # fmt: skip
    what = {"metric": BRITTLENESS, "at": None, "unit": "log10 of the share"}
    out.add_pairs(where | what, logs, lambda first, second: mean_change(first - second))


def show(out: MetricResult) -> str:
    legend = (
        "removal: change of a query's loss when this share of the examples, the most helpful ones, is left out; "
        f"{RANDOM_REMOVAL}: sets drawn\nat random, {SAME_CLASS}: from the query's own class, while it has as many; "
        f"{BRITTLENESS}: the share that flips a prediction, a lower\nbound where some never flipped; means over "
        "queries with 95 % intervals"
    )
    return evaluations.show(out, legend)
