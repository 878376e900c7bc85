"""Evaluations beside LDS, each a module here: removal, mislabel, calibration, leave_one_out, agreement, limit.

    python -m bench.evaluations removal --task digits       # or: tda-bench evaluate removal --task digits

Here is what they share: arguments, every method's score matrix, and the result with its rows and pairs. Scores are the
store's entries that `bench.lds` makes too: whoever has run one command does not score again for another.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import bench.arguments as options
from baselines.method import Attribution
from bench.experiment import Execution, Experiment, asked_for, execution_of
from bench.ground_truth import make_units, obtain
from bench.methods import Variant
from bench.metrics import MINIMUM_SUBSETS
from bench.records import ANSWERS_FILE, DISTRIBUTIONS, provenance, run_id_of, save_record, versions
from bench.runner import Session
from bench.schema import AnswersRecord
from bench.tables import SCORE_KINDS, grouped, number, short_number, table, tables
from retrain.errors import UsageError
from retrain.safe_files import one_line
from retrain.task import Task

Block = tuple[int, float]  # seed, share of the training set that is attributed


def add_shared_arguments(parser: argparse.ArgumentParser, queries: bool = True, subsets: bool = False) -> None:
    """Task, methods, queries, seeds, where it runs and where records go.

    queries: whether there are any; subsets: whether models are retrained on subsets, as for LDS.
    """
    options.add_task_arguments(parser)
    options.add_method_arguments(parser)
    if queries:
        options.add_query_arguments(parser)
        add_scores_argument(parser)
    options.add_plan_arguments(parser, MINIMUM_SUBSETS) if subsets else options.add_block_arguments(parser)
    parser.add_argument("--out", default=options.RUNS, help="where records go, a folder each (default: %(default)s)")
    options.add_cluster_arguments(parser)


def add_scores_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scores", choices=SCORE_KINDS, default="raw", help="which scores (default: %(default)s)")


@dataclass
class MetricResult:
    """What an evaluation found, as plain data.

    A row is one number of one method: `metric`, `at` (the share that was removed, the k of a precision; null where
    there is one number), `value` with its interval, and whether more of it is better. `ground` is what decides the
    truth it was held against: rows of records with different grounds are never compared.
    """

    question: str  # removal, mislabelled, calibration, leave-one-out, agreement
    task: Task
    variants: Sequence[Variant]
    asked: Mapping[str, Any]  # the options of the run, as they stand in the record
    ground: Mapping[str, Any]  # what decides the truth beside the task
    truth: str  # the same in a few words, for a caption
    device: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    detail: dict[str, Any] = field(default_factory=dict)  # what else the evaluation's own tables show
    skipped: dict[str, str] = field(default_factory=dict)  # label -> why
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was asked for beyond what there is; said, and not recorded
    seconds: float = 0.0
    run_id: str = ""

    @classmethod
    def of(
        cls, session: Session, question: str, asked: Mapping[str, Any], ground: Mapping[str, Any], truth: str
    ) -> "MetricResult":
        """An empty one. The session's problems are the result's, those that are yet to come among them."""
        options = {"experiment": session.experiment.to_json(), **asked}
        return cls(
            question, session.task, session.active, options, ground, truth, session.device(), skipped=session.skipped,
            problems=session.out.problems, notes=session.notes,
        )  # fmt: skip

    def add_pairs(
        self, columns: Mapping[str, Any], values: Mapping[tuple[str, bool], Any], compare: Callable[[Any, Any], Any]
    ) -> None:
        """A pair for every two methods; `compare` gives the difference of their values with its interval."""
        for names, first, second in pairs_of(values):
            gap = compare(first, second)
            number = gap.difference if hasattr(gap, "difference") else gap.value
            ends = {"ci_low": gap.ci_low, "ci_high": gap.ci_high, "p_value": gap.p_value}
            undefined = {"num_undefined": getattr(gap, "num_undefined", 0)}
            self.pairs.append({**columns, **names, "difference": number, **ends, **undefined})

    def config(self) -> dict[str, Any]:
        return {
            "task": self.task.config,
            "methods": [variant.describe() for variant in self.variants],
            **self.asked,
            "versions": {name: version for name, version in versions().items() if name in DISTRIBUTIONS},
        }

    def assign_run_id(self) -> None:
        """Its id: of what was asked, by which code, and of what came out."""
        if not self.run_id:
            self.run_id = run_id_of(self.question, self.config(), self.ground, self.rows, self.pairs, self.detail)
            for row in [*self.rows, *self.pairs]:
                row["run_id"] = self.run_id

    def save(self, out: str | Path, command: str = "") -> Path:
        """Writes answers.json, and its rows and pairs as CSV, to a folder of the run's own: see `save_record`."""
        self.assign_run_id()
        record = {
            "run_id": self.run_id,
            "question": self.question,
            "command": command,
            "description": one_line(self.task.description, 2000),
            "truth": one_line(self.truth, 2000),
            "ground": dict(self.ground),
            "config": self.config(),
            **provenance(self.device),
            "seconds": round(self.seconds, 2),
            **{name: getattr(self, name) for name in ("rows", "pairs", "detail", "skipped", "problems")},
        }
        tables = {"pairs.csv": pd.DataFrame(self.pairs), "answers.csv": pd.DataFrame(self.rows)}
        return save_record(Path(out) / self.run_id / ANSWERS_FILE, record, AnswersRecord, tables)

    def heading(self, told: str, seed: int, normalised: bool | None = None) -> str:
        """A table's first lines; normalised: None where no scores are ranked."""
        kind = {None: "", False: ", raw scores", True: ", train-normalised scores"}[normalised]
        return f"{self.task.description}, protocol {self.task.protocol}: {told}, seed {seed}{kind}"


def place_of(task: Task, block: Block) -> dict[str, Any]:
    """What every row and pair of a block has in common."""
    return {"task": task.name, "protocol": task.protocol, "alpha_attribution": block[1], "seed": block[0]}


def method_columns(variant: Variant, record: Mapping[str, Any]) -> dict[str, Any]:
    """What stands in every row of a method; record: of its scores."""
    costs = {name: record[name] for name in ("fit_seconds", "score_seconds", "peak_memory_bytes", "device")}
    named = {"method": variant.method.name, "label": variant.label, "settings": variant.settings}
    return named | {"origin": variant.origin} | costs


def control_columns(label: str) -> dict[str, Any]:
    return {"method": label, "label": label, "settings": "", "origin": "control"}


def measured(value: float, found: Any) -> dict[str, Any]:
    """A row's number: `found` has its interval, and may have counts of queries."""
    counts = {name: getattr(found, name) for name in ("num_queries", "num_undefined") if hasattr(found, name)}
    return {"value": value, "ci_low": found.ci_low, "ci_high": found.ci_high, **counts}


def pairs_of(values: Mapping[tuple[str, bool], Any]) -> Iterator[tuple[dict[str, Any], Any, Any]]:
    """Every two methods with the same kind of scores, by (label, whether normalised): the pair's names, both values."""
    for (a, kind), (b, other) in itertools.combinations(values, 2):
        if kind == other:
            yield {"normalised": kind, "label": a, "against": b}, values[a, kind], values[b, kind]


def groups_of(rows: Iterable[dict[str, Any]], *names: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Rows by their values of these names, in order of first appearance."""
    return grouped(rows, lambda row: tuple(row[name] for name in names))


def best_first(row: Mapping[str, Any]) -> float:
    """For sorting: what is undefined comes last."""
    return -row["value"] if math.isfinite(row["value"]) else math.inf


def show(out: MetricResult, legend: str, about: Mapping[tuple[int, float], str] | None = None) -> str:
    """A table a seed, share and kind of scores: a line a method, a column a metric; then the best against each.

    about: (seed, share) -> what ends the heading.
    """
    kinds, parts = ("seed", "alpha_attribution", "normalised"), []
    pairs = groups_of(out.pairs, *kinds)
    for kind, rows in sorted(groups_of(out.rows, *kinds).items()):
        columns = groups_of(rows, "metric", "at")
        ranked = next(metric for (metric, _), some in columns.items() if some[0].get("ranked", True))
        # Where the metric has several places, the last of those that most methods have.
        most = max(len(some) for (metric, _), some in columns.items() if metric == ranked)
        *_, place = [one for one, some in columns.items() if one[0] == ranked and len(some) == most]
        order = {row["label"]: best_first(row) for row in columns[place]}
        lines = []
        for (label,), own in sorted(groups_of(rows, "label").items(), key=lambda one: order.get(one[0][0], math.inf)):
            cells = {(row["metric"], row["at"]): cell_of(row) for row in own}
            seconds = [number(own[0]["fit_seconds"] + own[0]["score_seconds"], 1) if "fit_seconds" in own[0] else "-"]
            lines.append([label, *(cells.get(column, "-") for column in columns), *seconds])
        names = [metric if at is None else f"{metric} {at:.3g}" for metric, at in columns]
        told = "; ".join(filter(None, [out.heading(out.truth, kind[0], kind[2]), (about or {}).get(kind[:2], "")]))
        parts.append(f"{told}\n{tables(['', *names, 'seconds'], lines)}\n{legend}")
        here = [pair for pair in pairs.get(kind, ()) if (pair["metric"], pair["at"]) == place]
        if some := [pair for pair in here if lines[0][0] in (pair["label"], pair["against"])]:
            parts.append(pairs_table("paired difference", place[0], some))
    return "\n\n".join(parts)


def cell_of(row: Mapping[str, Any]) -> str:
    """0.17 [-0.081, 0.421] (2 undefined)"""
    value, low, high = (short_number(row[name]) for name in ("value", "ci_low", "ci_high"))
    undefined = f"{row['num_undefined']} undefined" if row["num_undefined"] else ""
    notes = ", ".join(filter(None, [undefined, row.get("note", "")]))
    return f"{value} [{low}, {high}]" + (f" ({notes})" if notes else "")


def pairs_table(title: str, quantity: str, pairs: Iterable[dict[str, Any]]) -> str:
    """A line a pair: the first less the second."""
    lines = []
    for pair in pairs:
        undefined = f" ({pair['num_undefined']} undefined)" if pair["num_undefined"] else ""
        low, high, p_value = (short_number(pair[name]) for name in ("ci_low", "ci_high", "p_value"))
        names = f"{pair['label']} - {pair['against']}{undefined}"
        lines.append([names, str(pair["seed"]), short_number(pair["difference"]), f"[{low}, {high}]", p_value])
    return table([title, "seed", quantity, "95 % interval", "p"], lines)


def kinds_of(variant: Variant, scores: str) -> list[bool]:
    """Whether normalised, of the kinds of scores that --scores asks for and the variant stands for."""
    return [kind for kind in SCORE_KINDS[scores] if kind in SCORE_KINDS[variant.rows]]


@dataclass(frozen=True, eq=False)
class ScoredMethod:
    """A method with its scores for one seed and share."""

    variant: Variant
    attribution: Attribution
    columns: dict[str, Any]  # what stands in every row of it

    def self_influence(self) -> np.ndarray | None:
        """(n,): how much each attributed example bears on its own loss; None where the method has no such thing.

        A method declares it by the scale of its examples: `Attribution.train_scale` is its square root (GradSim: the
        gradient's norm; EK-FAC and kfac: the norm in the inverse curvature; TRAK: in its kernel; BIF: the standard
        deviation of the example's own loss). A scale that is the same for all, or none, declares none.
        """
        scale = self.attribution.train_scale
        if scale is None or len(torch.unique(scale)) < 2:
            return None
        return scale.double().square().numpy()


def session_of(arguments: argparse.Namespace, has_alpha: bool = False, **defaults: Any) -> Session:
    """What the command line asks for; `defaults` are of an Experiment, `has_alpha` that it names the share kept."""
    return scoring_session(Experiment(**{**defaults, **asked_for(arguments)}), execution_of(arguments), has_alpha)


def scoring_session(experiment: Experiment, execution: Execution, has_alpha: bool = False) -> Session:
    """A session that keeps score matrices whatever their size."""
    session = Session(experiment, replace(execution, keep_scores="always"))
    for variant in session.active:
        count, kept = variant.method.extra_retrains()
        if count and not kept and not has_alpha:
            raise UsageError(
                f"{variant.label} retrains by itself, and nothing here says which share of the examples its subsets "
                f"keep; say it as {variant.method.name}@alpha=0.9"
            )
    session.report_skipped()
    return session


def score_methods(session: Session) -> dict[Block, list[ScoredMethod]]:
    """Every block's methods with their scores; one that fails is among the session's problems."""
    jobs, name = session.execution.job_options, session.task.name
    obtain(session.base_units(session.experiment.seeds), session.store, **jobs(f"{name} base models"))
    if further := session.further(session.active):
        make_units(further, session.store, **jobs(f"{name} further retrains"))
    for block, variant in itertools.product(session.blocks, session.active):
        for scorer, plans in session.scorers(variant, *block):
            own = scorer.members[0]  # evaluations are about the base model alone
            entry = session.store.read("scores", own.config)
            if entry is not None and "scores" not in entry.arrays:  # a run that did not keep the matrix
                own.forget(plans, fits=False)
    found: dict[Block, list[ScoredMethod]] = {}
    for block, made in session.score().items():
        found[block] = []
        for variant, _ in made:
            attribution, record = session.scorer(variant, *block).scores()
            found[block].append(ScoredMethod(variant, attribution, method_columns(variant, record)))
    return found


def score_matrices(methods: Iterable[ScoredMethod], scores: str) -> Iterator[tuple[ScoredMethod, bool, np.ndarray]]:
    """(method, whether normalised, its (queries, n) scores), of all that have such scores.

    A score is the predicted change of the query's loss when the example is included.
    """
    for one in methods:
        for normalised in kinds_of(one.variant, scores):
            found = one.attribution.normalised() if normalised else one.attribution.scores
            if found is not None:
                yield one, normalised, found.numpy()


def orders_of(scores: np.ndarray) -> np.ndarray:
    """(q, n) positions, most helpful first: helpful examples have negative scores. Ties keep the data's order."""
    return np.argsort(scores, axis=1, kind="stable")


# ---- how many of the examples a share is; none of them, or all, is refused before any work ----


def num_attributed(session: Session, needed: int = 1) -> int:
    """Of an evaluation about one set of attributed examples; refused where they are fewer than needed."""
    if len(session.blocks) > len(session.experiment.seeds):
        shares = " ".join(f"{one:g}" for one in session.experiment.alpha_attribution)
        raise UsageError(f"--alpha-attribution {shares}: takes one value here; run the command for each")
    n = len(session.question(*session.blocks[0]).attributed_indices())
    if n < needed:
        why = f"a correlation across them needs {needed}: attribute more (--alpha-attribution)"
        raise UsageError(f"{n} attributed examples; {why}")
    return n


def sizes_of(asked: Sequence[float], default: Sequence[float], n: int) -> list[int]:
    """How many examples each of --shares is, smallest first. Of the default's, one at least; never all of them."""
    for one in asked:
        if round(one * n) < 1:
            raise UsageError(f"--shares {one:g} of {n:,} attributed examples is none of them; take {1 / n:.2g} or more")
    sizes = sorted({max(1, round(one * n)) for one in asked or default})
    if sizes[-1] >= n:
        raise UsageError(
            f"--shares {max(asked or default):g} of {n:,} attributed examples is all of them; expected fewer: take a "
            "smaller share, or attribute more (--alpha-attribution)"
        )
    return sizes
