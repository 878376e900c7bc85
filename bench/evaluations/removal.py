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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.answers import MetricResult
from bench.arguments import at_least, fraction
from bench.evaluations.common import (
    SCORE_CHOICES,
    ScoredMethod,
    ScoreKind,
    SeedAndShare,
    add_shared_arguments,
    control_columns,
    ends_of,
    new_answers,
    num_attributed,
    orders_of,
    pairs_of,
    place_of,
    score_matrices,
    score_methods,
    scores_words,
    scoring_session,
    sizes_of,
)
from bench.evaluations.retrainer import NOTHING, RemovalRetrainer, RemovalSet
from bench.experiment import Execution, Experiment, asked_for, execution_of
from bench.metrics.removal import Shared, mean_change
from bench.records import without_nan
from bench.tables import table, tables
from retrain.errors import UsageError
from retrain.task import classifies

RANDOM_REMOVAL, SAME_CLASS = "random removal", "same-class removal"
MOST_NUMBERS = 100_000  # of the queries' own changes in a record
SHARES = (0.001, 0.01, 0.05, 0.1, 0.2)
NUM_QUERIES = 100
CONTROLS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared_arguments(parser)
    add = parser.add_argument
    shares = " ".join(f"{share:g}" for share in SHARES)
    add("--shares", nargs="+", type=fraction, help=f"of the attributed examples that are removed (default: {shares})")
    add("--replicates", type=at_least(1), default=3, help="retrains of every set (default: %(default)s)")
    add("--reference", type=at_least(2), default=20, help="models with nothing removed (default: %(default)s)")
    add("--brittleness", action="store_true", help="also find the smallest share that flips each prediction")


def evaluate(arguments: argparse.Namespace) -> MetricResult:
    asked = asked_for(argparse.Namespace(**{**vars(arguments), "replicates": None, "reference": None}))
    names = ("replicates", "reference", "scores", "brittleness")
    return removal(
        Experiment(**{"queries": NUM_QUERIES, **asked}),
        execution_of(arguments),
        shares=tuple(dict.fromkeys(arguments.shares or ())),
        **{name: getattr(arguments, name) for name in names},
    )


@dataclass(frozen=True)
class Arm:
    """What was removed for every query at one size: the queries' own losses, and the models that they share."""

    losses: np.ndarray  # (q,) mean over models; NaN where there is none
    shared: tuple[Shared, ...] = field(default=())

    def shared_by(self, change: np.ndarray) -> list[Shared]:
        """Its shared models, with the queries that are defined on both sides."""
        kept = []
        for one in self.shared:
            defined = np.isfinite(change[one.queries])
            if defined.any():
                kept.append(Shared(one.queries[defined], one.values[:, defined]))
        return kept


Curves = dict[tuple[str, bool], tuple[Mapping[str, Any], dict[int, Arm]]]  # (label, normalised) -> columns, size -> arm


def removal(
    experiment: Experiment,
    execution: Execution,
    *,
    shares: Sequence[float] = (),  # of the attributed examples; empty: SHARES, of each one example at least
    replicates: int = 3,  # retrains of every query's set
    reference: int = 20,  # models with nothing removed
    controls: int = CONTROLS,  # random sets of every size; of every class and size for the second control
    scores: str = "raw",  # whose order is removed
    brittleness: bool = False,
) -> MetricResult:
    session = scoring_session(experiment, execution)
    kinds, sizes = SCORE_CHOICES[scores], sizes_of("--shares", shares, SHARES, num_attributed(session))
    if brittleness and not classifies(session.task):
        raise UsageError(
            f"--brittleness needs a classification; {session.task.name} has no prediction that could flip: leave it out"
        )
    scored = score_methods(session)
    retrainers = {block: RemovalRetrainer(session, *block) for block in session.blocks}
    first = retrainers[session.blocks[0]]
    names = ("query_split", "queries", "initialisation")
    sizes_known = {"num_queries": len(first.queries), "num_attributed": first.num_attributed}
    out = new_answers(
        session,
        "removal",
        {"replicates": replicates, "reference": reference, "controls": controls, "scores": scores,
         "brittleness": brittleness, "shares": list(shares or SHARES)},
        {**{name: getattr(experiment, name) for name in names}, "replicates": replicates, "reference": reference}
        | sizes_known,
        f"{len(first.queries)} queries, {'one retrain' if replicates == 1 else f'{replicates} retrains'} a set, "
        f"{reference} with nothing removed, {first.num_attributed:,} attributed examples",
    )  # fmt: skip
    for block, retrainer in retrainers.items():
        here = scored.get(block, [])
        _add_rows(out, retrainer, block, *_curves(retrainer, here, kinds, sizes, replicates, reference, controls))
        if brittleness:
            add_brittleness(out, retrainer, block, here, kinds, reference, replicates)
    out.detail["num_retrains"] = sum(one.num_retrains for one in retrainers.values())
    out.detail["retrain_seconds"] = round(sum(one.seconds for one in retrainers.values()), 2)
    out.problems += session.out.problems
    return out


def _curves(
    retrainer: RemovalRetrainer, scored: Sequence[ScoredMethod], kinds: Sequence[Any], sizes: Sequence[int],
    replicates: int, reference: int, controls: int,
) -> tuple[Curves, Arm]:  # fmt: skip
    """Every method's and control's arms, and the models with nothing removed: one batch of jobs."""
    wanted: list[RemovalSet] = [(NOTHING, reference)]

    def ask(sets: Sequence[RemovalSet]) -> range:
        wanted.extend(sets)
        return range(len(wanted) - len(sets), len(wanted))

    methods: dict[tuple[str, bool], tuple[Mapping[str, Any], dict[int, range]]] = {}
    for one, normalised, scores in score_matrices(scored, kinds):
        orders = orders_of(scores)
        places = {size: ask([(order[:size], replicates) for order in orders]) for size in sizes}
        methods[one.variant.label, normalised] = one.columns(), places
    random_orders = retrainer.random_orders(controls)
    at_random = {size: ask([(order[:size], 1) for order in random_orders]) for size in sizes}
    by_class: dict[int, dict[int, range]] = {}
    if classifies(retrainer.task):
        train_labels, query_labels = retrainer.labels()
        for size, label in itertools.product(sizes, np.unique(query_labels).tolist()):
            members = [order[train_labels[order] == label][:size] for order in random_orders]
            if len(members[0]) == size:  # a class may have fewer than that
                by_class.setdefault(size, {})[label] = ask([(some, 1) for some in members])
    losses = [one["losses"] for one in retrainer.retrain(wanted, "removals")]  # (replicates, q) each

    def own_arm(place: range) -> Arm:
        """Of sets that belong to one query each, in the queries' order."""
        return Arm(np.array([losses[number][:, query].mean() for query, number in enumerate(place)]))

    def shared_arm(place: range) -> Arm:
        """Of models that every query was measured on."""
        models = np.concatenate([losses[number] for number in place]).astype(np.float64)
        return Arm(models.mean(axis=0), (Shared(np.arange(models.shape[1]), models),))

    def class_arm(places: dict[int, range]) -> Arm:
        """Of sets that belong to a class each; a class without any leaves its queries undefined."""
        own, shared = np.full(len(query_labels), np.nan), []
        for label, place in places.items():
            queries = np.flatnonzero(query_labels == label)
            models = np.concatenate([losses[number] for number in place]).astype(np.float64)[:, queries]
            own[queries] = models.mean(axis=0)
            shared.append(Shared(queries, models))
        return Arm(own, tuple(shared))

    curves: Curves = {
        key: (columns, {size: own_arm(place) for size, place in places.items()})
        for key, (columns, places) in methods.items()
    }
    arms = {RANDOM_REMOVAL: {size: shared_arm(place) for size, place in at_random.items()}}
    if by_class:
        arms[SAME_CLASS] = {size: class_arm(places) for size, places in by_class.items()}
    for (label, some), kind in itertools.product(arms.items(), kinds):
        curves[label, kind == "normalised"] = control_columns(label), some
    return curves, shared_arm(range(1))


def _add_rows(
    out: MetricResult, retrainer: RemovalRetrainer, block: SeedAndShare, curves: Curves, reference: Arm
) -> None:
    where = place_of(retrainer.task, block)
    own: dict[str, list[list[float]]] = {}

    def at(size: int) -> dict[str, Any]:
        return {"metric": "removal", "at": size / retrainer.num_attributed, "size": size}

    for (label, normalised), (columns, arms) in curves.items():
        for size, arm in arms.items():
            change = arm.losses - reference.losses
            found = mean_change(change, (*arm.shared_by(change), *reference.shared_by(change)))
            numbers = {"value": found.mean, **ends_of(found), "num_undefined": found.num_undefined, "higher": True}
            numbers["num_queries"] = found.num_queries
            numbers["median"] = float(np.nanmedian(change)) if np.isfinite(change).any() else math.nan
            out.rows.append(where | dict(columns) | at(size) | {"normalised": normalised} | numbers)
            name = f"{label}, normalised" if normalised else label
            own.setdefault(name, []).append([round(float(value), 6) for value in change])
    for names, (_, first), (_, second) in pairs_of(curves):
        if {names["label"], names["against"]} <= {RANDOM_REMOVAL, SAME_CLASS}:
            continue
        for size in sorted(set(first) & set(second)):
            difference = first[size].losses - second[size].losses
            shared = (*first[size].shared_by(difference), *second[size].shared_by(difference))
            found = mean_change(difference, shared)
            numbers = {"difference": found.mean, **ends_of(found), "num_undefined": found.num_undefined}
            out.pairs.append(where | at(size) | names | numbers | {"p_value": found.p_value})
    if sum(len(values) for lists in own.values() for values in lists) <= MOST_NUMBERS:
        out.detail.setdefault("changes", {})[f"seed {block[0]}, share {block[1]:g}"] = without_nan(own)
    out.detail["reference_loss"] = float(reference.losses.mean())


# ---- the tables ----


def show(out: MetricResult) -> str:
    """One table a seed and kind of score: a line a method, a column a share; then who differs from the controls."""
    parts = []
    kinds = ("seed", "alpha_attribution", "normalised")
    for kind in sorted({tuple(row[name] for name in kinds) for row in out.rows}):
        here = [row for row in out.rows if tuple(row[name] for name in kinds) == kind]
        curves = [row for row in here if row["metric"] == "removal"]
        sizes = {row["size"]: f"{row['size']} ({100 * row['at']:.2g} %)" for row in curves}
        sizes = dict(sorted(sizes.items()))
        cells = {(row["label"], row["size"]): row for row in curves}

        def at_the_largest(label: str, cells: Any = cells, size: int = max(sizes)) -> float:
            row = cells.get((label, size))
            return -1e30 if row is None or row["value"] != row["value"] else row["value"]

        labels = sorted({row["label"] for row in curves}, key=lambda label: -at_the_largest(label))
        lines = [[label, *(change_cell(cells.get((label, size))) for size in sizes)] for label in labels]
        text = (
            f"{out.task.description}, protocol {out.task.protocol}: change of a query's loss when its most helpful "
            f"examples are left out,\nmean over queries with its 95 % interval; {out.truth};\n"
            f"{scores_words(kind[2])}, seed {kind[0]}\n{tables(['removed', *sizes.values()], lines)}\n"
            f"{RANDOM_REMOVAL}: sets drawn at random"
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
        pairs = [pair for pair in out.pairs if pair["metric"] == "removal" and pair["size"] == compared]
        pairs = [pair for pair in pairs if tuple(pair[name] for name in kinds) == kind]
        if lines := [_pair_line(pair) for pair in pairs]:
            parts.append(table([f"paired difference, {compared} removed", "loss", "95 % interval", "p"], lines))
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


# From one in a thousand to a fifth, by about 1.4 each.
SMALLEST_SHARES = (
    0.001, 0.0014, 0.002, 0.0028, 0.004, 0.0056, 0.008, 0.011, 0.016, 0.022, 0.032, 0.045, 0.063, 0.089, 0.13, 0.2,
)  # fmt: skip
BRITTLENESS = "brittleness"


class Bisection:
    """One method's search for every query at once: `low` does not flip, `high` does; both are places on the grid."""

    def __init__(self, orders: np.ndarray, queries: np.ndarray, num_sizes: int):
        self.orders, self.queries, self.num_sizes = orders, queries, num_sizes
        self.low = np.full(len(queries), -1)  # nothing removed: right
        self.high = np.full(len(queries), num_sizes)  # beyond the grid: unknown
        self.first = True

    def next_places(self) -> np.ndarray:
        """The place to try for each query; the largest size first, -1 where the search is over."""
        if self.first:
            return np.full(len(self.queries), self.num_sizes - 1)
        over = (self.high - self.low <= 1) | (self.high == self.num_sizes)
        return np.where(over, -1, (self.low + self.high) // 2)

    def learn(self, places: np.ndarray, flipped: np.ndarray) -> None:
        tried = places >= 0
        self.high = np.where(tried & flipped, places, self.high)
        self.low = np.where(tried & ~flipped, places, self.low)
        self.first = False


def add_brittleness(
    out: MetricResult,
    retrainer: RemovalRetrainer,
    block: SeedAndShare,
    scored: Sequence[ScoredMethod],
    kinds: Sequence[ScoreKind],
    reference: int,
    replicates: int,
) -> None:
    """Adds rows, pairs and every query's share."""
    (nothing,) = retrainer.retrain([(NOTHING, reference)], "margins", margins=True)
    right = np.flatnonzero(nothing["margins"].mean(axis=0) > 0)
    if len(right) < 2:
        out.problems.append(
            f"{len(right)} of {len(retrainer.queries)} queries are right with nothing removed; "
            "brittleness needs at least two: take more --queries (the removal curves above are whole)"
        )
        return
    sizes = sorted({retrainer.size_of(share) for share in SMALLEST_SHARES})
    searches = {
        (one.variant.label, normalised): (one, Bisection(orders_of(scores)[right], right, len(sizes)))
        for one, normalised, scores in score_matrices(scored, kinds)
    }
    _search([search for _, search in searches.values()], retrainer, sizes, replicates)
    where = place_of(retrainer.task, block)
    logs: dict[tuple[str, bool], np.ndarray] = {}
    detail: dict[str, Any] = {"queries": right.tolist(), "largest_size": sizes[-1], "sizes": {}}
    for (label, normalised), (one, search) in searches.items():
        flips = search.high < len(sizes)
        found = np.array(sizes)[np.minimum(search.high, len(sizes) - 1)]
        logs[label, normalised] = np.log10(found / retrainer.num_attributed)
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
        out.pairs.append(
            where | {"metric": BRITTLENESS, "at": None} | names
            | {"difference": change.mean, **ends_of(change), "num_undefined": 0}
            | {"p_value": change.p_value, "unit": "log10 of the share"}
        )  # fmt: skip
    out.detail.setdefault(BRITTLENESS, {})[f"seed {block[0]}, share {block[1]:g}"] = detail


def _search(searches: Sequence[Bisection], retrainer: RemovalRetrainer, sizes: Sequence[int], replicates: int) -> None:
    """Round by round; a round of all methods and queries is one batch of jobs."""
    most = 2 + math.ceil(math.log2(len(sizes)))
    for number in itertools.count(1):
        places = [search.next_places() for search in searches]
        wanted: list[RemovalSet] = [
            (search.orders[query][: sizes[place]], replicates)
            for search, here in zip(searches, places)
            for query, place in enumerate(here)
            if place >= 0
        ]
        if not wanted:
            return
        found = iter(retrainer.retrain(wanted, f"bisection, round {number} of at most {most}", margins=True))
        for search, here in zip(searches, places):
            flipped = np.zeros(len(here), dtype=bool)
            for query, place in enumerate(here):
                if place >= 0:
                    flipped[query] = next(found)["margins"][:, search.queries[query]].mean() < 0
            search.learn(here, flipped)


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
