"""The Python API's functions about one method, one checkpoint, one picture; `bench/__init__.py` exports them."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from baselines.method import Attribution, Method, Problem, checked_answer
from bench.arguments import check_device
from bench.experiment import Execution, Experiment
from bench.ground_truth import base_model
from bench.inspect import Influential, influential
from bench.measure import measure
from bench.methods import build_variants
from bench.runner import Result, Session
from retrain.errors import UsageError
from retrain.progress import progress_bar
from retrain.store import Store
from retrain.task import Task
from retrain.tasks import load_task
from retrain.units import choose_device


@dataclass(frozen=True, eq=False)
class Scores:
    """A method's scores with their indices; `np.asarray(scores)` and `scores[j, i]` are the plain numbers.

    `values[j, i]` is the predicted change of the loss of query `queries[j]` when training example `train[i]` is
    included: helpful examples are negative.
    """

    values: np.ndarray  # (queries, training examples) float32
    queries: np.ndarray  # (queries,) indices into the task's query data
    train: np.ndarray  # (training examples,) indices into the task's training data
    method: str  # its name, with the options that were asked for
    normalised: bool  # whether they are divided by each training example's own scale
    seconds: float  # that the method took, whoever ran it first
    task: Task = field(repr=False)  # whose examples they are of

    @property
    def shape(self) -> tuple[int, ...]:
        """(queries, training examples)."""
        return self.values.shape

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values, dtype=dtype) if copy or dtype else self.values

    def __getitem__(self, key: Any) -> Any:
        return self.values[key]

    def __len__(self) -> int:
        return len(self.values)

    def __str__(self) -> str:
        kind = "normalised" if self.normalised else "raw"
        sizes = f"{len(self.queries)} queries x {len(self.train)} training examples"
        return f"{self.method} on {self.task.name}: {kind} scores of {sizes}, in {self.seconds:.1f} s"

    def frame(self) -> pd.DataFrame:
        """A row a query, a column a training example, under their indices."""
        return pd.DataFrame(self.values, index=pd.Index(self.queries, name="query"), columns=self.train)

    def top(self, k: int = 10, queries: Sequence[int] | None = None, beside: Sequence["Scores"] = ()) -> Influential:
        """The k most helpful and k most harmful training examples of these queries (default: the first three).

        beside: other methods' scores of the same task, shown side by side.
        """
        return influential([self, *beside], k, self.queries[:3] if queries is None else queries)


def scores(
    method: str,
    task: str | Task = "digits",
    *,
    queries: int | Sequence[int] | None = None,
    normalised: bool = False,
    seed: int = 1,
    execution: Execution | None = None,
    **asked: Any,
) -> Scores:
    """A method's scores of all queries with all training examples.

    method: spelled as on the command line ("ekfac@damping=1e-4"). task: a name or a file, whose base model is trained
    and whose scores are kept in the cache; or a Task object such as OwnModel, which is scored at once and not kept.
    queries: only the first so many, or these indices (default: all). normalised: divided by each training example's own
    scale. `asked`: further fields of Experiment (alpha_attribution, query_split, task_options, options, settings).
    """
    execution = execution or Execution()
    check_device(execution.device)
    if isinstance(queries, str):
        raise UsageError(f'queries is "{queries}"; expected a number of them, a list of indices, or None for all')
    if isinstance(task, Task):
        if asked:
            raise UsageError(f"{sorted(asked)[0]} is for tasks that are named; expected queries, normalised and seed")
        return _scored_now(method, task, queries, normalised, seed, execution)
    if unknown := sorted(set(asked) - {one.name for one in fields(Experiment)}):
        names = "alpha_attribution, query_split, task_options, options, settings"
        raise UsageError(f"scores has no option {unknown[0]}; available: queries, normalised, seed, execution, {names}")
    asked = {"alpha": (0.5,), "query_split": "all", "queries": queries, **asked}
    session = Session(Experiment(task=task, methods=(method,), seeds=(seed,), **asked), execution)
    if not session.active:
        reasons = [*session.skipped.values(), *session.out.problems]
        raise RuntimeError(f"{method} cannot run on {task}: {reasons[0]}")
    found, problems = scored(session, normalised)
    if not found:
        raise RuntimeError(problems[0])
    return found[0]


def scored(session: Session, normalised: bool) -> tuple[list[Scores], list[str]]:
    """Every method's scores, from the cache or computed and kept there; and a line about each that has none."""
    kind, problems = "normalised" if normalised else "raw", [f"{m}: {why}" for m, why in session.skipped.items()]
    found: list[Scores] = []
    (block,) = session.blocks
    for variant in session.active:
        if variant.rows not in ("both", kind):
            continue
        scorer = session.scorer(variant, *block)
        indices = scorer.question.query_indices(), scorer.question.attributed_indices()
        _check_queries(indices[0], session.task)
        attribution, record = scorer.scores(progress=True, name=f"{session.task.name} {variant.label}")
        seconds = record["fit_seconds"] + record["score_seconds"]
        try:
            found.append(_labelled(attribution, variant.label, session.task, indices, normalised, seconds))
        except UsageError as error:
            problems.append(str(error))
    return found, problems


def _scored_now(
    method: str, task: Task, queries: int | Sequence[int] | None, normalised: bool, seed: int, execution: Execution
) -> Scores:
    """Of a task that is an object: nothing could rebuild it in another process, so nothing is kept."""
    variants = build_variants([method], task, {}, "default")
    device = choose_device(execution.device)
    chosen = np.arange(len(task.query_data))
    chosen = chosen[:queries] if queries is None or isinstance(queries, int) else np.asarray(queries, dtype=int)
    _check_queries(chosen, task)
    if reason := variants[0].method.skip(task):
        raise UsageError(f"{method} cannot run on {task.name}: {reason}")
    attributed = np.arange(len(task.train_data))
    model = task.train_base(init_seed=seed, order_seed=seed, device=device)

    def answer(asked: Method, of_train: bool = False) -> Attribution:
        examples = task.train_data if of_train else task.query_data.select(chosen)
        with tempfile.TemporaryDirectory(prefix="tda-bench-scores-") as scratch:
            problem = Problem(
                task=task, model=model, train=task.train_data, attributed_indices=attributed, queries=examples,
                seed=seed, device=device, scratch=Path(scratch), scores_of=answer, progress=progress_bar,
            )  # fmt: skip
            made, record = measure(asked, problem)
        costs.append(record["fit_seconds"] + record["score_seconds"])
        return checked_answer(made, asked, len(examples), len(attributed))

    costs: list[float] = []
    made = answer(variants[0].method)
    return _labelled(made, variants[0].label, task, (chosen, attributed), normalised, costs[-1])


def _check_queries(chosen: np.ndarray, task: Task) -> None:
    if len(wrong := [int(one) for one in chosen if not 0 <= one < len(task.query_data)]):
        raise UsageError(f"there is no query {wrong[0]}; task {task.name} has 0 to {len(task.query_data) - 1}")


def _labelled(
    attribution: Attribution,
    method: str,
    task: Task,
    indices: tuple[np.ndarray, np.ndarray],
    normalised: bool,
    seconds: float,
) -> Scores:
    scaled = attribution.normalised() if normalised else attribution.scores
    if scaled is None:
        raise UsageError(f"{method} has no normalised scores: its answer has no train_scale; take the raw ones")
    return Scores(scaled.numpy(), *indices, method, normalised, seconds, task)


def load_checkpoint(
    task: str = "digits", *, seed: int = 1, number: int = 0, execution: Execution | None = None, **task_options: Any
) -> nn.Module:
    """The base model that methods look at, in eval mode; trained now if it is not cached.

    `number` above 0 gives further checkpoints, trained alike from other seeds.
    """
    execution = execution or Execution()
    return base_model(load_task(task, **task_options), seed, Store(execution.cache), execution.device, number)[0]


def plot(source: Result | str | Path, kind: str = "front") -> Any:
    """A matplotlib figure of a run, or of a folder of records; `kind` is one of `tda-bench publish figures --list`.

    Where the results allow several figures of that kind (several tasks, say), the first is given.
    """
    from bench.publish.plots import draw_figures

    return draw_figures(source, kind)
