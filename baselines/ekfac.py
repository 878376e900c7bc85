"""ekfac: eigenvalue-corrected Kronecker-factored influence functions, computed by kronfluence.

True Fisher with sampled labels, factors fitted on the whole training set, summed losses. kronfluence scores
+g_query^T H^-1 g_train, so the sign is flipped here. It wraps linear and convolution layers only; a frozen layer and a
language model's output head are left out. Damping is kronfluence's own heuristic, a tenth of each layer's mean
eigenvalue; its default, and the paper's, is 1e-8 (`library_settings`).

The fit runs block by block (eight batches each), and what it has is saved as it goes: killed, it goes on where it was,
to the same bits, because the labels of a batch are seeded by its place. What is fitted serves any queries and damping.

A language model's losses go from its last hidden states past the logits, and its sampled labels come chunk by chunk: at
1,024 tokens and a vocabulary of 50,304 a sequence has 206 MB of logits. `token_scores` splits a training sequence's
score over its tokens, as kronfluence does: token t has what its own outer product of activation and gradient adds.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from baselines.method import Attribution, Method, Problem, Size, batch_size_option
from baselines.support.copies import detached_copy
from baselines.support.curvature import SIDES, SIZES, seeded_labels
from baselines.support.damping import check_damping
from baselines.support.inner_products import parts_that_fit
from baselines.support.kronfluence_layers import check_examples_apart, tracked_modules
from baselines.support.memory import free_bytes
from retrain.examples import Columns, Examples
from retrain.losses import keep_ignored
from retrain.models.causal_lm import CausalLM, sample_tokens
from retrain.models.fused_cross_entropy import linear_cross_entropy
from retrain.task import Task, mean_over_tokens

STRATEGIES = ("ekfac", "kfac", "diagonal", "identity")
HEURISTIC = 0.1  # kronfluence's share of the mean eigenvalue where it is given no damping
BATCHES_TOGETHER = 8  # between two looks at whether to save: kronfluence's factors come to the CPU after each
BATCHES_TOGETHER_ON_GPU = 64
QUERY_GRADIENTS_SHARE = 0.25  # of the free memory, for the preconditioned gradients of a batch of queries
SECONDS_TOGETHER = 15.0  # so long may one call to kronfluence take: what is saved is saved between two of them

Factors = dict[str, dict[str, Tensor]]  # kind -> module -> tensor, as kronfluence has them


@dataclass
class FittedFactors:
    """What kronfluence computes with: a wrapped copy of the model, the task's translation, and the factors."""

    model: nn.Module
    task: Any
    process: "OneProcess"
    arguments: Any
    factors: Factors


class Pace:
    """How many batches to give to kronfluence at once, by how long the last ones took.

    It changes no number: the batches themselves stay what they are. The first guess differs by device, because
    training batches that are not given at once cost the queries' gradients again.
    """

    def __init__(self, device: torch.device) -> None:
        self.batches = BATCHES_TOGETHER if device.type == "cpu" else BATCHES_TOGETHER_ON_GPU

    @contextlib.contextmanager
    def of(self, batches: int) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.batches = max(1, int(batches * SECONDS_TOGETHER / max(time.monotonic() - began, 1e-3)))


@dataclass
class OneProcess:
    """kronfluence's view of where it runs. Its own is one for the whole process and never changes its device."""

    device: torch.device
    num_processes: int = 1
    process_index: int = 0
    use_distributed: bool = False
    is_main_process: bool = True

    def wait_for_everyone(self) -> None:
        return None


@dataclass
class Loader:
    """Batches in order, as kronfluence's functions take them: (targets, inputs, position of the first)."""

    dataset: Examples
    batch_size: int
    first: int = 0
    last: int | None = None

    def _starts(self) -> range:
        return range(self.first, len(self.dataset) if self.last is None else self.last, self.batch_size)

    def __len__(self) -> int:
        return len(self._starts())

    def __iter__(self) -> Iterator[tuple[Tensor, Any, int]]:
        for start in self._starts():
            chosen = slice(start, start + self.batch_size)
            yield self.dataset.targets[chosen], self.dataset.inputs[chosen], start


@dataclass(frozen=True, kw_only=True)
class EKFAC(Method):
    version: ClassVar[int] = 2
    libraries: ClassVar[tuple[str, ...]] = ("kronfluence",)
    paper: ClassVar[str] = "Grosse et al. 2023, Studying large language model generalization with influence functions"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"relative_damping": (0.1, 1e-4, 1e-3, 0.01, 0.03, 0.3, 1.0, 10.0)}
    library_settings: ClassVar[dict[str, Any]] = {"damping": 1e-8}
    paper_settings: ClassVar[dict[str, Any]] = {"damping": 1e-8}  # appendix:lds-results

    strategy: str = "ekfac"  # any of kronfluence's
    damping: float | None = None  # added to every eigenvalue; None: relative_damping of each layer's mean eigenvalue
    relative_damping: float = HEURISTIC
    self_influence: bool = True  # also compute each training example's own influence, for normalised scores
    fit_batch_size: int = batch_size_option(500)
    query_batch_size: int = batch_size_option(500)
    train_batch_size: int = batch_size_option(500)

    def __post_init__(self) -> None:
        check_damping(self.damping, self.relative_damping)
        if self.strategy not in STRATEGIES:
            raise ValueError(f'strategy is "{self.strategy}"; available: {", ".join(STRATEGIES)}')
        if self.strategy == "kfac" and self.damping is None and self.relative_damping != HEURISTIC:
            raise ValueError(
                f"relative_damping is {self.relative_damping}; strategy kfac takes {HEURISTIC} or a damping"
            )

    @property
    def config(self) -> dict[str, Any]:
        """Labels are sampled batch by batch, so another batch size of the fit is another sample, with another key."""
        default = type(self).__dataclass_fields__["fit_batch_size"].default
        other = {} if self.fit_batch_size == default else {"fit_batch_size": self.fit_batch_size}
        return super().config | other

    @property
    def fit_config(self) -> dict[str, Any]:
        """A fit serves every damping."""
        of_scores = ("damping", "relative_damping", "self_influence")
        return {name: value for name, value in self.config.items() if name not in of_scores}

    def skip(self, task: Task) -> str | None:
        if not tracked_modules(task.build_model(0)):
            return "the model has no trainable linear or convolution layer"
        return None

    def memory_bytes(self, size: Size) -> int:
        """A copy of the model, factors (four times as much, about), a query's gradient, and the scores twice."""
        return 4 * (7 * size.num_parameters + 2 * size.num_attributed * size.num_queries)

    # ---- the fit ----

    def _wrapped(self, problem: Problem, factors: Factors) -> FittedFactors:
        from kronfluence.analyzer import prepare_model
        from kronfluence.arguments import FactorArguments

        logging.getLogger("kronfluence").setLevel(logging.ERROR)
        # kronfluence replaces modules inside their parent, so the model itself must not be one of them.
        model = nn.Sequential(detached_copy(problem.model))
        task = _translate(problem.task, tracked_modules(model), problem.seed)
        arguments = FactorArguments(strategy=self.strategy, covariance_max_examples=None, lambda_max_examples=None)
        prepared = prepare_model(model, task).to(problem.device)
        return FittedFactors(prepared, task, OneProcess(problem.device), arguments, factors)

    def fit(self, problem: Problem) -> FittedFactors:
        from kronfluence.factor.config import FactorConfig
        from kronfluence.factor.covariance import fit_covariance_matrices_with_loader
        from kronfluence.factor.eigen import fit_lambda_matrices_with_loader, perform_eigendecomposition

        if len(problem.train) > 1:
            check_examples_apart(problem.model, problem.train.inputs[:2].to(problem.device))
        fitted = self._wrapped(problem, {})
        needs = FactorConfig.CONFIGS[self.strategy]
        stages = [SIDES] * needs.requires_covariance_matrices + [SIZES] * needs.requires_lambda_matrices
        shared = {"model": fitted.model, "state": fitted.process, "factor_args": fitted.arguments, "disable_tqdm": True}
        stage_done, next_start, sums, basis = self._resumed(problem)
        num_batches = _num_batches(problem.train, self.fit_batch_size)

        for stage in stages:
            if stage < stage_done:
                continue
            if stage == SIZES and needs.requires_eigendecomposition_for_lambda and not basis:
                basis = perform_eigendecomposition(covariance_factors=sums, **shared)
                sums = {}
            fitted.task.stage = stage
            first = next_start if stage == stage_done else 0

            def one(loader: Loader, stage: int = stage, basis: Factors = basis) -> Factors:
                if stage == SIDES:
                    return fit_covariance_matrices_with_loader(task=fitted.task, loader=loader, **shared)[1]
                of_basis = {"eigen_factors": basis} if basis else {}
                return fit_lambda_matrices_with_loader(task=fitted.task, loader=loader, **of_basis, **shared)[1]

            what = "ekfac: eigenvalues" if stage == SIZES else "ekfac: covariances"
            with fitted.task.ticking(problem, num_batches, what):
                sums = self._add_up(problem, stage, first, sums, basis, one)
        if needs.requires_eigendecomposition and not basis:
            basis, sums = perform_eigendecomposition(covariance_factors=sums, **shared), {}
        fitted.factors = basis | sums
        return fitted

    def _add_up(
        self, problem: Problem, stage: int, first: int, sums: Factors, basis: Factors, one: Callable[[Loader], Factors]
    ) -> Factors:
        """kronfluence's factors are sums over examples: those of each block are added, and saved now and again."""
        size = min(self.fit_batch_size, len(problem.train))
        step = BATCHES_TOGETHER * size
        for start in range(first, len(problem.train), step):
            last = min(start + step, len(problem.train))
            new = one(Loader(problem.train, size, start, last))
            for kind, by_module in new.items():
                for module, value in by_module.items():
                    old = sums.setdefault(kind, {}).get(module)
                    sums[kind][module] = value if old is None else old.add_(value)
            if problem.work.due():
                arrays = {f"{part}|{name}": value.numpy() for part, factors in (("sums", sums), ("basis", basis))
                          for name, value in _flattened(factors).items()}  # fmt: skip
                problem.work.save("factors", arrays, {"stage": stage, "next": last})
        return sums

    def _resumed(self, problem: Problem) -> tuple[int, int, Factors, Factors]:
        """The stage that an earlier attempt was at, where it was there, its sums, and the basis if it had one."""
        saved = problem.work.load("factors")
        if saved is None:
            return SIDES, 0, {}, {}
        arrays, record = saved
        parts: dict[str, dict[str, Tensor]] = {"sums": {}, "basis": {}}
        for name, value in arrays.items():
            part, _, rest = name.partition("|")
            parts[part][rest] = torch.from_numpy(np.array(value))
        return record["stage"], record["next"], _nested(parts["sums"]), _nested(parts["basis"])

    def pack_fit(self, state: FittedFactors) -> Mapping[str, Tensor] | None:
        return _flattened(state.factors) or None

    def unpack_fit(self, problem: Problem, arrays: Mapping[str, Tensor]) -> FittedFactors:
        return self._wrapped(problem, _nested(arrays))

    # ---- scores ----

    def _damped(self, factors: Factors) -> tuple[Factors, float | None]:
        """The factors to invert and the damping to tell kronfluence; of another share than its own, already added."""
        if self.damping is not None or self.relative_damping == HEURISTIC or "lambda_matrix" not in factors:
            return factors, self.damping
        shifted = {
            module: (value.double() + self.relative_damping * value.double().mean()).to(value.dtype)
            for module, value in factors["lambda_matrix"].items()
        }
        return factors | {"lambda_matrix": shifted}, 0.0

    def _pairwise(
        self, problem: Problem, state: FittedFactors, queries: Examples, train: Examples, **options: Any
    ) -> Tensor:
        from kronfluence.arguments import ScoreArguments
        from kronfluence.score.pairwise import compute_pairwise_scores_with_loaders

        factors, damping = self._damped(state.factors)
        room = (
            QUERY_GRADIENTS_SHARE * free_bytes(problem.device) / (4 * sum(p.numel() for p in state.model.parameters()))
        )
        query_batch_size = min(parts_that_fit(self.query_batch_size, room), len(queries))
        found = compute_pairwise_scores_with_loaders(
            loaded_factors=factors,
            model=state.model,
            state=state.process,  # type: ignore[arg-type]
            task=state.task,
            query_loader=Loader(queries, query_batch_size),  # type: ignore[arg-type]
            per_device_query_batch_size=query_batch_size,
            train_loader=Loader(train, min(self.train_batch_size, len(train))),  # type: ignore[arg-type]
            score_args=ScoreArguments(damping_factor=damping, **options),
            factor_args=state.arguments,
            tracked_module_names=None,
            disable_tqdm=True,
        )
        return -found["all_modules"].float()

    def score(self, problem: Problem, state: FittedFactors) -> Attribution:
        from kronfluence.arguments import ScoreArguments
        from kronfluence.score.self import compute_self_scores_with_loaders

        num_train_batches = _num_batches(problem.attributed, self.train_batch_size)
        total = _num_batches(problem.queries, self.query_batch_size) * (1 + num_train_batches)
        saved = problem.work.load("pairwise")
        kept = {} if saved is None else {name: [torch.from_numpy(value.copy())] for name, value in saved[0].items()}
        # Whole rows of the scores, the beginning of those of the next batch of queries, and self-influences.
        parts, row, own = (kept.get(name, []) for name in ("scores", "row", "own"))
        pace = Pace(problem.device)

        def save_if_due() -> None:
            if problem.work.due():
                found = {"scores": (parts, 0), "row": (row, 1), "own": (own, 0)}
                arrays = {name: torch.cat(pieces, dim).numpy() for name, (pieces, dim) in found.items() if pieces}
                problem.work.save("pairwise", arrays, {})

        with state.task.ticking(problem, total, "ekfac: scores"):
            while (first := sum(len(part) for part in parts)) < len(problem.queries):
                column = sum(part.shape[1] for part in row)
                several = 1 if column else max(1, pace.batches // num_train_batches)
                last = min(first + several * self.query_batch_size, len(problem.queries))
                last_column = min(column + pace.batches * self.train_batch_size, len(problem.attributed))
                queries, train = problem.queries.select(range(first, last)), range(column, last_column)
                with pace.of(_num_batches(queries, self.query_batch_size) * -(-len(train) // self.train_batch_size)):
                    row.append(self._pairwise(problem, state, queries, problem.attributed.select(train)))
                if last_column == len(problem.attributed):
                    parts.append(torch.cat(row, 1))
                    row.clear()
                save_if_due()
        used = self.damping if self.damping is not None else f"{self.relative_damping:g} of each layer's mean"
        diagnostics = {"damping": "none" if self.strategy == "identity" else used}
        if not self.self_influence:
            return Attribution(scores=torch.cat(parts), diagnostics=diagnostics)
        factors, damping = self._damped(state.factors)
        pace = Pace(problem.device)
        with state.task.ticking(problem, num_train_batches, "ekfac: self-influence"):
            while (first := sum(len(part) for part in own)) < len(problem.attributed):
                last = min(first + pace.batches * self.train_batch_size, len(problem.attributed))
                loader: Any = Loader(problem.attributed, self.train_batch_size, first, last)
                with pace.of(len(loader)):
                    found = compute_self_scores_with_loaders(
                        loaded_factors=factors,
                        model=state.model,
                        state=state.process,  # type: ignore[arg-type]
                        task=state.task,
                        train_loader=loader,
                        score_args=ScoreArguments(damping_factor=damping),
                        factor_args=state.arguments,
                        tracked_module_names=None,
                        disable_tqdm=True,
                    )
                own.append(found["all_modules"].float())
                save_if_due()
        scale = torch.cat(own).clamp(min=0).sqrt()
        return Attribution(scores=torch.cat(parts), train_scale=scale, diagnostics=diagnostics)

    def token_scores(self, problem: Problem, state: FittedFactors, train: Examples | None = None) -> Tensor:
        """(q, n, tokens) float32: the part of each training token in the scores, whose sum over tokens they are.

        `state` is what `fit` gave; `train` are the training sequences to look at, by default the attributed ones.
        """
        train = problem.attributed if train is None else train
        return self._pairwise(problem, state, problem.queries, train, compute_per_token_scores=True)


def _num_batches(examples: Examples, batch_size: int) -> int:
    return -(-len(examples) // batch_size)


def _flattened(factors: Factors) -> dict[str, Tensor]:
    return {f"{kind}|{module}": value for kind, values in factors.items() for module, value in values.items()}


def _nested(arrays: Mapping[str, Tensor]) -> Factors:
    factors: Factors = {}
    for name, value in arrays.items():
        kind, _, module = name.partition("|")
        factors.setdefault(kind, {})[module] = value
    return factors


# ---- the task, as kronfluence sees it ----


def _translate(task: Task, names: list[str], seed: int) -> Any:
    from kronfluence.task import Task as KronfluenceTask

    class Translation(KronfluenceTask):
        stage = SIDES
        _ticks: Iterator[Any] = iter(())

        @contextlib.contextmanager
        def ticking(self, problem: Problem, total: int, description: str) -> Iterator[None]:
            """A progress bar over the batches: kronfluence asks for the loss of each of them once."""
            self._ticks = iter(problem.progress(range(total), total=total, description=description))
            next(self._ticks, None)
            try:
                yield
                list(self._ticks)  # closes the bar
            finally:
                self._ticks = iter(())

        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            next(self._ticks, None)
            targets, inputs, start = batch
            inner = model[0] if isinstance(model, nn.Sequential) else model
            drawing = seeded_labels(targets.device, seed, self.stage, start) if sample else contextlib.nullcontext()
            if isinstance(inner, CausalLM) and inner.has_plain_head:
                with drawing:
                    return _language_loss(inner, inputs, None if sample else targets)
            outputs = model(inputs)
            if sample:
                with drawing, torch.no_grad():
                    targets = keep_ignored(task.loss_function.sample_targets(outputs).to(targets.dtype), targets)
            # Summed over the batch: a mean would shrink every gradient by the batch size.
            return mean_over_tokens(task.loss_function.per_example(outputs, targets)).sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch=batch, model=model)

        def get_influence_tracked_modules(self) -> list[str]:
            return names

        def get_attention_mask(self, batch: Any) -> Tensor | None:
            """Padding is no activation."""
            return batch[1].get("attention_mask") if isinstance(batch[1], Columns) else None

    return Translation()


def _language_loss(model: CausalLM, inputs: Tensor, targets: Tensor | None) -> Tensor:
    """Sum over sequences of the mean loss of their tokens; without targets, of sampled ones."""
    weight = model.head.weight
    hidden = model.hidden_states(inputs).flatten(0, 1).to(weight.dtype)
    chosen = sample_tokens(hidden, weight) if targets is None else targets.flatten()
    return linear_cross_entropy(hidden, weight, chosen).view(inputs.shape).mean(1).sum()
