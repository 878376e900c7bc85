"""Removal: leave out what a method calls most helpful, retrain, and see what becomes of the query.

    python -m bench.evaluations removal                                       # the embedded task: removal curves
    python -m bench.evaluations removal --methods ekfac gradsim --shares 0.01 0.1 --replicates 5
    python -m bench.evaluations removal --brittleness                         # and how little flips each prediction

For every query, method and size k, the k examples of the most negative score are left out of the attributed ones and a
model is retrained on the rest, `--replicates` times. The change is the query's loss then, less its loss with nothing
removed (`--reference` models). Two controls are removed alike: random examples, and random ones of the query's own
class; a method that cannot beat the second has found the class and no more. Retrains are units of the store: kept,
resumed, spread over a cluster, and shared by methods that name the same examples.
"""

import argparse
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.arguments import at_least, fraction
from bench.evaluations import (
    SCORE_CHOICES,
    MetricResult,
    ScoredMethod,
    ScoreKind,
    SeedAndShare,
    add_shared_arguments,
    best_first,
    control_columns,
    difference,
    groups_of,
    heading,
    measured,
    new_answers,
    num_attributed,
    orders_of,
    pairs_of,
    place_of,
    score_matrices,
    score_methods,
    scoring_session,
    sizes_of,
)
from bench.experiment import Experiment, asked_for, execution_of
from bench.ground_truth import UnitsFailedError, obtain
from bench.metrics.removal import Shared, mean_change
from bench.records import without_nan
from bench.runner import Session
from bench.tables import table, tables
from retrain.errors import UsageError
from retrain.jobs import Unit
from retrain.removal import RemovalPlan, removal_units, stacked
from retrain.task import classifies

RANDOM_REMOVAL, SAME_CLASS, BRITTLENESS = "random removal", "same-class removal", "brittleness"
MOST_NUMBERS = 100_000  # of the queries' own changes in a record
SHARES = (0.001, 0.01, 0.05, 0.1, 0.2)
# Of brittleness: from one in a thousand to a fifth, by about 1.4 each.
SMALLEST_SHARES = (
    0.001, 0.0014, 0.002, 0.0028, 0.004, 0.0056, 0.008, 0.011, 0.016, 0.022, 0.032, 0.045, 0.063, 0.089, 0.13, 0.2,
)  # fmt: skip
NUM_QUERIES = 100
CONTROLS = 10  # random sets of every size, and of every class and size
_CONTROL_STREAM = 31
RemovalSet = tuple[np.ndarray, int]  # positions removed, how often retrained
NOTHING = np.array([], dtype=int)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared_arguments(parser)
    add = parser.add_argument
    shares = " ".join(f"{share:g}" for share in SHARES)
    add("--shares", nargs="+", type=fraction, help=f"of the attributed examples that are removed (default: {shares})")
    add("--replicates", dest="times", type=at_least(1), default=3, help="retrains of every set (default: %(default)s)")
    unchanged = "models with nothing removed (default: %(default)s)"
    add("--reference", dest="unchanged", type=at_least(2), default=20, help=unchanged)
    add("--brittleness", action="store_true", help="also find the smallest share that flips each prediction")


# ---- the retrains ----


class RemovalRetrainer:
    """One seed and share of an experiment: sets of examples to leave out go in, the queries' losses come out."""

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
        self.seconds = 0.0  # of all retrains, whoever made them
        self.num_retrains = 0

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
            here = [entries[unit.key] for unit in some if unit.key in entries]
            if len(here) < len(some):
                raise UnitsFailedError(
                    f"{len(some) - len(here)} of {len(some)} retrains of one set are missing; the same command without "
                    "--collect makes them"
                )
            found.append({array: stacked(here, array) for array in here[0].arrays})
        return found

    def labels(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the attributed examples and of the queries."""
        train, queries = self.task.train_data.targets, self.task.query_data.targets
        return train.numpy()[self.attributed], queries.numpy()[self.queries]

    def random_orders(self, count: int) -> list[np.ndarray]:
        """Random orders of the attributed examples, (n,) each; the first k of one are nested in k."""
        seed, n = self.plan.seed, len(self.attributed)
        return [np.random.default_rng([_CONTROL_STREAM, seed, number]).permutation(n) for number in range(count)]


# ---- removal curves ----


@dataclass(frozen=True)
class Arm:
    """What was removed for every query at one size: the queries' own losses, and the models that they share."""

    losses: np.ndarray  # (q,) mean over models; NaN where there is none
    shared: tuple[Shared, ...] = field(default=())

    def shared_by(self, change: np.ndarray) -> list[Shared]:
        """Its shared models, with the queries that are defined on both sides."""
        kept = [(one, np.isfinite(change[one.queries])) for one in self.shared]
        return [Shared(one.queries[here], one.values[:, here]) for one, here in kept if here.any()]


Curves = dict[tuple[str, bool], tuple[Mapping[str, Any], dict[int, Arm]]]  # (label, normalised) -> columns, size -> arm
Group = tuple[np.ndarray, range]  # queries, and the sets that were removed for them


def evaluate(arguments: argparse.Namespace) -> MetricResult:
    experiment = Experiment(**{"queries": NUM_QUERIES, **asked_for(arguments)})
    session = scoring_session(experiment, execution_of(arguments))
    shares, kinds = tuple(dict.fromkeys(arguments.shares or ())), SCORE_CHOICES[arguments.scores]
    n = num_attributed(session)
    sizes = sizes_of(shares, SHARES, n)
    if arguments.brittleness and not classifies(session.task):
        raise UsageError(
            f"--brittleness needs a classification; {session.task.name} has no prediction that could flip: leave it out"
        )
    scored = score_methods(session)
    retrainers = {block: RemovalRetrainer(session, *block) for block in session.blocks}
    num_queries = len(retrainers[session.blocks[0]].queries)
    names = ("query_split", "queries", "initialisation")
    retrains = {"replicates": arguments.times, "reference": arguments.unchanged}
    a_set = "one retrain" if arguments.times == 1 else f"{arguments.times} retrains"
    out = new_answers(
        session,
        "removal",
        {**retrains, "controls": CONTROLS, "scores": arguments.scores, "brittleness": arguments.brittleness,
         "shares": list(shares or SHARES)},
        {**{name: getattr(experiment, name) for name in names}, **retrains}
        | {"num_queries": num_queries, "num_attributed": n},
        f"{num_queries} queries, {a_set} a set, {arguments.unchanged} with nothing removed, {n:,} attributed examples",
    )  # fmt: skip
    for block, retrainer in retrainers.items():
        here = scored.get(block, [])
        _add_rows(out, retrainer, block, *_curves(retrainer, here, kinds, sizes, arguments.times, arguments.unchanged))
        if arguments.brittleness:
            _add_brittleness(out, retrainer, block, here, kinds, arguments.times, arguments.unchanged)
    out.detail["num_retrains"] = sum(one.num_retrains for one in retrainers.values())
    out.detail["retrain_seconds"] = round(sum(one.seconds for one in retrainers.values()), 2)
    return out


def _curves(
    retrainer: RemovalRetrainer, scored: Sequence[ScoredMethod], kinds: Sequence[ScoreKind], sizes: Sequence[int],
    times: int, unchanged: int,
) -> tuple[Curves, Arm]:  # fmt: skip
    """Every method's and control's arms, and the models with nothing removed: one batch of jobs."""
    wanted: list[RemovalSet] = []

    def ask(queries: Any, sets: Sequence[RemovalSet]) -> Group:
        wanted.extend(sets)
        return np.atleast_1d(queries), range(len(wanted) - len(sets), len(wanted))

    everybody = np.arange(len(retrainer.queries))
    nothing = ask(everybody, [(NOTHING, unchanged)])
    methods: dict[tuple[str, bool], tuple[Mapping[str, Any], dict[int, list[Group]]]] = {}
    for one, normalised, scores in score_matrices(scored, kinds):
        orders = orders_of(scores)
        own = {size: [ask(query, [(order[:size], times)]) for query, order in enumerate(orders)] for size in sizes}
        methods[one.variant.label, normalised] = one.columns(), own
    random_orders = retrainer.random_orders(CONTROLS)
    controls = {
        RANDOM_REMOVAL: {size: [ask(everybody, [(order[:size], 1) for order in random_orders])] for size in sizes}
    }
    if classifies(retrainer.task):
        train_labels, query_labels = retrainer.labels()
        by_class = controls[SAME_CLASS] = {}
        for size, label in itertools.product(sizes, np.unique(query_labels).tolist()):
            members = [order[train_labels[order] == label][:size] for order in random_orders]
            if len(members[0]) == size:  # a class may have fewer than that
                group = ask(np.flatnonzero(query_labels == label), [(some, 1) for some in members])
                by_class.setdefault(size, []).append(group)
    losses = [one["losses"] for one in retrainer.retrain(wanted, "removals")]  # (replicates, q) each

    def arm(groups: Sequence[Group], shared: bool) -> Arm:
        """Queries without a group are undefined; shared: a group's queries were measured on the same models."""
        own, models = np.full(len(everybody), np.nan), []
        for queries, numbers in groups:
            values = np.concatenate([losses[number] for number in numbers]).astype(np.float64)[:, queries]
            own[queries] = values.mean(axis=0)
            models.append(Shared(queries, values))
        return Arm(own, tuple(models) if shared else ())

    curves: Curves = {
        key: (columns, {size: arm(groups, shared=False) for size, groups in own.items()})
        for key, (columns, own) in methods.items()
    }
    for label, by_size in controls.items():
        arms = {size: arm(groups, shared=True) for size, groups in by_size.items()}
        curves |= {(label, kind == "normalised"): (control_columns(label), arms) for kind in kinds}
    return curves, arm([nothing], shared=True)


def _add_rows(
    out: MetricResult, retrainer: RemovalRetrainer, block: SeedAndShare, curves: Curves, reference: Arm
) -> None:
    where = place_of(retrainer.task, block)
    own: dict[str, list[list[float]]] = {}

    def at(size: int) -> dict[str, Any]:
        return {"metric": "removal", "at": size / len(retrainer.attributed), "size": size}

    for (label, normalised), (columns, arms) in curves.items():
        for size, arm in arms.items():
            change = arm.losses - reference.losses
            found = mean_change(change, (*arm.shared_by(change), *reference.shared_by(change)))
            median = float(np.nanmedian(change)) if np.isfinite(change).any() else math.nan
            known = {"normalised": normalised, "higher": True, "median": median}
            out.rows.append(where | dict(columns) | at(size) | known | measured(found.mean, found))
            name = f"{label}, normalised" if normalised else label
            own.setdefault(name, []).append([round(float(value), 6) for value in change])
    for names, (_, first), (_, second) in pairs_of(curves):
        if {names["label"], names["against"]} <= {RANDOM_REMOVAL, SAME_CLASS}:
            continue
        for size in sorted(set(first) & set(second)):
            gap = first[size].losses - second[size].losses
            found = mean_change(gap, (*first[size].shared_by(gap), *second[size].shared_by(gap)))
            out.pairs.append(where | at(size) | names | difference(found.mean, found))
    if sum(len(values) for lists in own.values() for values in lists) <= MOST_NUMBERS:
        out.detail.setdefault("changes", {})[f"seed {block[0]}, share {block[1]:g}"] = without_nan(own)
    out.detail["reference_loss"] = float(reference.losses.mean())


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


def _add_brittleness(
    out: MetricResult, retrainer: RemovalRetrainer, block: SeedAndShare, scored: Sequence[ScoredMethod],
    kinds: Sequence[ScoreKind], times: int, unchanged: int,
) -> None:  # fmt: skip
    """Adds rows, pairs and every query's share."""
    (nothing,) = retrainer.retrain([(NOTHING, unchanged)], "margins", margins=True)
    right = np.flatnonzero(nothing["margins"].mean(axis=0) > 0)
    if len(right) < 2:
        out.problems.append(
            f"{len(right)} of {len(retrainer.queries)} queries are right with nothing removed; "
            "brittleness needs at least two: take more --queries (the removal curves above are whole)"
        )
        return
    n, where = len(retrainer.attributed), place_of(retrainer.task, block)
    sizes = sorted({max(1, round(share * n)) for share in SMALLEST_SHARES})
    searches = {
        (one.variant.label, normalised): (one, Bisection(orders_of(scores)[right], right, len(sizes)))
        for one, normalised, scores in score_matrices(scored, kinds)
    }
    _search([search for _, search in searches.values()], retrainer, sizes, times)
    logs: dict[tuple[str, bool], np.ndarray] = {}
    detail: dict[str, Any] = {"queries": right.tolist(), "largest_size": sizes[-1], "sizes": {}}
    for (label, normalised), (one, search) in searches.items():
        flips = search.high < len(sizes)
        found = np.array(sizes)[np.minimum(search.high, len(sizes) - 1)]
        logs[label, normalised] = np.log10(found / n)
        mean = mean_change(logs[label, normalised])
        detail["sizes"][f"{label}, normalised" if normalised else label] = [
            int(size) if flip else None for size, flip in zip(found, flips)
        ]
        unflipped = int((~flips).sum())
        out.rows.append(
            where | one.columns() | {"metric": BRITTLENESS, "at": None, "normalised": normalised, "higher": False}
            | {"value": 10**mean.mean, "ci_low": 10**mean.ci_low, "ci_high": 10**mean.ci_high}
            | {"num_queries": len(right), "num_undefined": 0, "num_unflipped": unflipped}
            | {"note": f"{unflipped} of {len(right)} never flipped" if unflipped else ""}
        )  # fmt: skip
    for names, first, second in pairs_of(logs):
        change = mean_change(first - second)
        what = {"metric": BRITTLENESS, "at": None, "unit": "log10 of the share"}
        out.pairs.append(where | what | names | difference(change.mean, change))
    out.detail.setdefault(BRITTLENESS, {})[f"seed {block[0]}, share {block[1]:g}"] = detail


def _search(searches: Sequence[Bisection], retrainer: RemovalRetrainer, sizes: Sequence[int], times: int) -> None:
    """Round by round; a round of all methods and queries is one batch of jobs."""
    most = 2 + math.ceil(math.log2(len(sizes)))
    for number in itertools.count(1):
        places = [search.next_places() for search in searches]
        asked = [np.flatnonzero(here >= 0) for here in places]
        wanted: list[RemovalSet] = [
            (search.orders[query][: sizes[here[query]]], times)
            for search, here, queries in zip(searches, places, asked)
            for query in queries
        ]
        if not wanted:
            return
        found = iter(retrainer.retrain(wanted, f"bisection, round {number} of at most {most}", margins=True))
        for search, here, queries in zip(searches, places, asked):
            flipped = np.zeros(len(here), dtype=bool)
            for query in queries:
                flipped[query] = next(found)["margins"][:, search.queries[query]].mean() < 0
            search.learn(here, flipped)


# ---- the tables ----


def show(out: MetricResult) -> str:
    """One table a seed and kind of score: a line a method, a column a share; then who differs from the controls."""
    parts = []
    kinds = ("seed", "alpha_attribution", "normalised")
    all_pairs = groups_of(out.pairs, *kinds)
    for kind, here in sorted(groups_of(out.rows, *kinds).items()):
        curves = [row for row in here if row["metric"] == "removal"]
        sizes = dict(sorted({row["size"]: f"{row['size']} ({100 * row['at']:.2g} %)" for row in curves}.items()))
        cells = {(row["label"], row["size"]): row for row in curves}
        last = {row["label"]: best_first(row) for row in curves if row["size"] == max(sizes)}
        order = {row["label"]: last.get(row["label"], math.inf) for row in curves}
        labels = sorted(order, key=order.__getitem__)
        lines = [[label, *(change_cell(cells.get((label, size))) for size in sizes)] for label in labels]
        told = f"change of a query's loss when its most helpful examples are left out;\n{out.truth}"
        text = (
            f"{heading(out, told, kind[0], kind[2])}; mean over queries with its 95 % interval\n"
            f"{tables(['removed', *sizes.values()], lines)}\n{RANDOM_REMOVAL}: sets drawn at random"
        )
        if classifies(out.task):
            text += f"; {SAME_CLASS}: drawn from the query's own class"
            if len({size for label, size in cells if label == SAME_CLASS}) < len(sizes):
                text += f"\n{SAME_CLASS} ends where no query's class has so many examples"
        if any(row["num_undefined"] for row in curves if row["label"] == SAME_CLASS):
            text += "\nundefined: queries whose class has fewer examples than are removed"
        parts.append(text)
        # The largest size at which there is the most to compare: a class may have fewer examples than the largest.
        compared = max(sizes, key=lambda size: (sum((label, size) in cells for label in labels), size))
        pairs = [pair for pair in all_pairs.get(kind, ()) if pair.get("size") == compared]
        if pairs:
            header = [f"paired difference, {compared} removed", "loss", "95 % interval", "p"]
            parts.append(table(header, [_pair_line(pair) for pair in pairs]))
        if flips := [row for row in here if row["metric"] == BRITTLENESS]:
            parts.append(show_brittleness(flips))
    return "\n\n".join(parts)


def change_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    undefined = f" ({row['num_undefined']} undefined)" if row["num_undefined"] else ""
    return f"{row['value']:+.3f} {_signed_interval(row)}{undefined}"


def _pair_line(pair: dict[str, Any]) -> list[str]:
    undefined = f" ({pair['num_undefined']} undefined)" if pair["num_undefined"] else ""
    p_value = f"{pair['p_value']:.2g}" if math.isfinite(pair["p_value"]) else "-"
    names = f"{pair['label']} - {pair['against']}{undefined}"
    return [names, f"{pair['difference']:+.3f}", _signed_interval(pair), p_value]


def _signed_interval(row: dict[str, Any]) -> str:
    low, high = (f"{end:+.3f}" if math.isfinite(end) else "-" for end in (row["ci_low"], row["ci_high"]))
    return f"[{low}, {high}]"


def show_brittleness(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in sorted(rows, key=lambda row: row["value"]):
        flipped = row["num_queries"] - row["num_unflipped"]
        share = f"{'>= ' if row['num_unflipped'] else ''}{100 * row['value']:.2f} %"
        interval = f"[{100 * row['ci_low']:.2f}, {100 * row['ci_high']:.2f}]" if flipped else "-"
        lines.append([row["label"], share, interval, f"{flipped} of {row['num_queries']}"])
    legend = (
        "geometric mean over the queries that are right with nothing removed; one that the largest size does not flip "
        "counts\nas if it did: >= is a lower bound"
    )
    return f"{table(['brittleness', 'share that flips', '95 % interval', 'flipped'], lines)}\n{legend}"
