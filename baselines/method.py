"""Method: the one interface of every attribution method.

A method is one file in `baselines/` (or a folder with a `method.py`); the file's name is its name on the command
line. It only translates: the harness (`bench/scoring.py`, `bench/measure.py`) seeds it, times it, meters its memory and
stores its scores.

**Sign.** `scores[j, i]` is the predicted change of query j's loss when training example i is *included*, the paper's
d phi / d beta_i: helpful examples are negative. Hence `masks @ scores.T` predicts the retrained losses, and LDS is
positive for a method that works.
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from baselines.support.attribution import Attribution
from retrain import plugins
from retrain.examples import Examples
from retrain.outputs import LOSS
from retrain.resume import NullResumeState, ResumeState
from retrain.source import KeyedPlugin
from retrain.task import Task

Item = TypeVar("Item")
# In `Attribution.arrays`, of methods that have it at no cost: how alike any two attributed examples are in what
# including them does, (n, n); of others their scores as queries say so.
TRAIN_COVARIANCE = "train_covariance"


def no_progress(items: Iterable[Item], total: int | None = None, description: str = "") -> Iterable[Item]:
    return items


@dataclass(frozen=True, eq=False)
class Retrained:
    """What became of the queries after retraining on further subsets of the attributed examples."""

    masks: np.ndarray  # (m, n) bool: which attributed examples each subset keeps
    losses: np.ndarray  # (m, q) float32: the queries' losses


@dataclass
class Bill:
    """What a stage had from elsewhere: it costs what it cost whoever made it, cached or not.

    The stage's clock goes on meanwhile; `seconds` is what has to be added to it, and may be negative.
    """

    seconds: float = 0.0
    peak_memory_bytes: int = 0

    @contextlib.contextmanager
    def charge_recorded_cost(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds -= time.perf_counter() - start

    def add(self, seconds: float, peak_memory_bytes: int = 0) -> None:
        self.seconds += seconds
        self.peak_memory_bytes = max(self.peak_memory_bytes, peak_memory_bytes)


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """What a method is asked: which of these training examples matter to these queries, at this checkpoint?"""

    task: Task
    model: nn.Module  # the base checkpoint, in eval mode on `device`; it comes back untouched
    train: Examples  # everything the model was trained on: to fit curvature, to draw minibatches
    attributed_indices: np.ndarray  # (n,) which of `train`, or of `pool`, are scored, in the order of the scores
    queries: Examples  # the q queries
    seed: int
    device: torch.device
    scratch: Path  # an empty folder for what a library insists on writing; removed afterwards
    # Where the model is no base model but was trained on some of the attributed examples (retrain/reference.py): the
    # whole training set, and which of it checkpoint k was trained on, k counted from this model, and from which seeds.
    pool: Examples | None = None
    trained_on: Callable[[int], np.ndarray] | None = None
    training_seeds: Mapping[str, int] = field(default_factory=dict)
    output: str = LOSS  # of the queries: what is to be predicted in place of their loss (retrain/outputs.py)
    checkpoint_number: int = 0  # which of the checkpoints `model` is: 0 is the base model, others differ in every seed
    work: ResumeState = field(
        default_factory=NullResumeState
    )  # what an earlier attempt at the same unit had; see retrain/resume.py
    # Further checkpoints, trained like the base model from other seeds; trained and kept when first asked for.
    checkpoint: Callable[[int], nn.Module] | None = None
    # Models retrained on the subsets that `Method.extra_retrains` asks for, of a stream that nobody is judged on.
    retrained: Callable[[], Retrained] | None = None
    # Another method's answer to the same question; with `of_train=True` about the attributed examples as if they were
    # the queries. All of these are made and kept when first asked for.
    scores_of: Callable[..., Attribution] | None = None
    bill: Bill = field(default_factory=Bill)
    progress: Callable[..., Iterable] = no_progress  # progress(iterable, total=..., description=...)
    shared: dict[str, Any] = field(
        default_factory=dict
    )  # what parts made in one process may share, e.g. captured passes

    @cached_property
    def attributed(self) -> Examples:
        """The n training examples to score."""
        return (self.train if self.pool is None else self.pool).select(self.attributed_indices)

    def own_examples(self, checkpoint: int = 0) -> np.ndarray:
        """(n,) bool: which of the attributed examples this checkpoint was trained on."""
        if self.trained_on is None:
            return np.ones(len(self.attributed_indices), dtype=bool)
        return np.isin(self.attributed_indices, self.trained_on(checkpoint))


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a problem is, known before anything is trained: what `Method.memory_bytes` judges by."""

    num_train: int  # the whole training set
    num_attributed: int
    num_queries: int
    num_parameters: int  # trainable ones
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class Method(KeyedPlugin, ABC):
    """Its fields are its options (`--set method.option=value`) and part of the cache key.

    A field whose metadata says {"key": False} (a batch size) cannot change the scores and stays out of the key.
    """

    version: ClassVar[int] = 1  # raised when its scores would change
    paper: ClassVar[str] = ""  # who proposed it
    # Whether it answers in `problem.output`. Others answer in the loss, linearly in a query's gradient, and the harness
    # multiplies each query's scores by the output's slope in its loss.
    knows_output: ClassVar[bool] = False
    library_settings: ClassVar[Mapping[str, Any]] = {}  # options with which the library behind it runs by default
    paper_settings: ClassVar[Mapping[str, Any]] = {}  # options that Kreer et al. give
    warm_up: ClassVar[Mapping[str, Any]] = {}  # options that make it short without changing what it runs
    # What `bench.tune` may try: option -> values, crossed; the first of each is the default. Or a list of such grids.
    grid: ClassVar[Mapping[str, tuple[Any, ...]] | Sequence[Mapping[str, tuple[Any, ...]]]] = {}

    @property
    def uses_model(self) -> bool:
        """False: its scores depend on the data alone, whichever model is looked at."""
        return True

    def skip(self, task: Task) -> str | None:
        """Why it cannot run on this task, or None."""
        return None

    def settings_in_paper(self, task: Task) -> Mapping[str, Any]:
        """The options that Kreer et al. give for a task like this one; by default those of every task."""
        return self.paper_settings

    def memory_bytes(self, size: Size) -> int:
        """The most it will hold at once beside the model and the data; 0 where it adapts to what there is."""
        return 0

    def with_train_covariance(self) -> "Method | None":
        """Itself, so set that its answer has TRAIN_COVARIANCE at no further cost; None where that cannot be."""
        return None

    def extra_retrains(self) -> tuple[int, float]:
        """How many further subsets `problem.retrained` is to have, and the share they keep (0: the asked one)."""
        return 0, 0.0

    def fit(self, problem: Problem) -> Any:
        """Whatever depends on the training set but not on the queries; BIF and GradSim have nothing to fit."""
        return None

    @abstractmethod
    def score(self, problem: Problem, state: Any) -> Attribution:
        """The answer: a score for every query with every attributed example; a bare (q, n) tensor is taken, too."""

    # ---- what survives: kept fits, and scores in parts ----

    def pack_fit(self, state: Any) -> Mapping[str, Tensor] | None:
        """What `fit` made, as arrays to keep and use again for other queries; None: it is made anew each time."""
        return None

    def pack_answer(self, state: Any) -> Mapping[str, Tensor] | None:
        """The same for new queries at these very settings: more than `pack_fit`, where that leaves work undone."""
        return self.pack_fit(state)

    def unpack_fit(self, problem: Problem, arrays: Mapping[str, Tensor]) -> Any:
        """The state that these arrays are, as if `fit` had just made it."""
        raise NotImplementedError

    def num_parts(self) -> int:
        """How many pieces `score` falls into that can be made anywhere, in any order (BIF: its chains); 1: none."""
        return 1

    def score_part(self, problem: Problem, state: Any, part: int) -> Mapping[str, Tensor]:
        """One piece, on the CPU; the same bits whoever makes it beside how many others."""
        raise NotImplementedError

    def merge(self, problem: Problem, state: Any, parts: Sequence[Mapping[str, Tensor]]) -> Attribution:
        """The scores, from every piece in order; `score` of such a method does exactly this."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        return plugins.plugin_name(type(self))

    def key_modules(self) -> tuple[str, ...]:
        return (type(self).__module__, "baselines.support.attribution")

    @property
    def fit_config(self) -> dict[str, Any]:
        """What a kept fit depends on: its key. A method whose scores alone use an option (a damping) leaves it out."""
        return self.config

    @property
    def config(self) -> dict[str, Any]:
        in_key = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata.get("key", True)}
        return {"name": self.name, "version": self.version, **in_key}


class AnswerError(RuntimeError):
    """What a method returned is no answer; the message is one line, and the place that is blamed its `score`."""

    place: tuple[str, int]


def checked_answer(answer: Any, method: Method, num_queries: int, num_train: int) -> Attribution:
    """A method's answer as an Attribution on the CPU; the scores alone may come as a tensor or an array."""
    try:
        return _checked(answer, method.name, num_queries, num_train)
    except AnswerError as error:
        code = type(method).score.__code__
        error.place = code.co_filename, code.co_firstlineno
        raise


def _checked(answer: Any, name: str, num_queries: int, num_train: int) -> Attribution:
    expected = f"expected ({num_queries}, {num_train}): queries x training examples"
    if answer is None:
        raise AnswerError(f"{name} returned nothing; {expected} (is its last line `return Attribution(scores=...)`?)")
    if not isinstance(answer, Attribution):
        if not isinstance(answer, Tensor | np.ndarray):
            raise AnswerError(f"{name} returned a {type(answer).__name__}; {expected}, as a tensor or an Attribution")
        answer = Attribution(scores=answer)  # type: ignore[arg-type]
    scores = _numbers(answer.scores, f"{name} gave scores", expected)
    if tuple(scores.shape) != (num_queries, num_train):
        hint = "; they are transposed" if tuple(scores.shape) == (num_train, num_queries) else ""
        raise AnswerError(f"{name} gave scores of shape {tuple(scores.shape)}; {expected}{hint}")
    scale = answer.train_scale
    if scale is not None:
        meant = f"expected ({num_train},): one scale a training example, at least 0"
        scale = _numbers(scale, f"{name} gave a train_scale", meant)
        if tuple(scale.shape) != (num_train,):
            raise AnswerError(f"{name} gave a train_scale of shape {tuple(scale.shape)}; {meant}")
        if not bool((scale >= 0).all()):
            raise AnswerError(f"{name} gave a train_scale that holds {float(scale.min()):g}; {meant}")
    parts = {key: _checked(one, f"{name}: {key}", num_queries, num_train) for key, one in answer.components.items()}
    return replace(answer, scores=scores, train_scale=scale, components=parts)


def _numbers(values: Any, what: str, expected: str) -> Tensor:
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        values = torch.from_numpy(np.ascontiguousarray(values))
    if not isinstance(values, Tensor):
        kind = f"{values.dtype} array" if isinstance(values, np.ndarray) else type(values).__name__
        raise AnswerError(f"{what} that are a {kind}; {expected}, as a tensor of numbers")
    if values.is_complex():
        raise AnswerError(f"{what} of complex numbers; {expected}, of real ones")
    wide = values.dtype in (torch.float32, torch.float64)
    return (values if wide else values.float()).detach().cpu()


def batch_size_option(default: int) -> Any:
    """A batch size that changes speed and memory, never the scores: tested for every method."""
    return field(default=default, metadata={"key": False})


def available_methods() -> list[str]:
    return list(plugins.available("baselines", "method"))


def load_method(name: str, **options: Any) -> Method:
    """The method of that name (or `package.module:Class`), with these options; text values are parsed."""
    method = plugins.build(plugins.find("baselines", "method", Method, name), options)  # type: ignore[type-abstract]
    for option in fields(method):
        if option.name.endswith("batch_size") and getattr(method, option.name) < 1:
            raise plugins.UsageError(f"{name}.{option.name} is {getattr(method, option.name)}; expected at least 1")
    return method
