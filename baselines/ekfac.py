"""ekfac: eigenvalue-corrected Kronecker-factored influence functions, computed by kronfluence.

kronfluence's documented settings: true Fisher with sampled labels, factors fitted on the whole training set, summed
losses, damping 1e-8 (the paper's). It scores +g_query^T H^-1 g_train, so the sign is flipped here. It wraps linear and
convolution layers only; a frozen layer and a language model's output head are left out.

A language model's losses go from its last hidden states past the logits, and its sampled labels come chunk by chunk: at
1,024 tokens and a vocabulary of 50,304 a sequence has 206 MB of logits. `token_scores` splits a training sequence's
score over its tokens, as kronfluence does: token t has what its own outer product of activation and gradient adds.
"""

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from baselines.method import Attribution, Method, Problem, batch_size_option
from baselines.support.copies import detached_copy
from retrain.examples import Examples
from retrain.models.causal_lm import CausalLM, sample_tokens
from retrain.models.fused_cross_entropy import linear_cross_entropy
from retrain.task import Task, mean_over_tokens

OUTPUT_HEADS = ("lm_head", "embed_out")  # transformers 5, and before
STRATEGIES = ("ekfac", "kfac", "diagonal", "identity")
FIT_PASSES = {"ekfac": 2}  # over the training set; one for the other strategies


def tracked_modules(model: nn.Module) -> list[str]:
    """Trainable linear and convolution layers, without a language model's output head."""
    return [
        name
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, nn.Conv2d)
        and module.weight.requires_grad
        and name.rpartition(".")[2] not in OUTPUT_HEADS
    ]


@dataclass(frozen=True, kw_only=True)
class EKFAC(Method):
    version: ClassVar[int] = 1
    libraries: ClassVar[tuple[str, ...]] = ("kronfluence",)

    strategy: str = "ekfac"  # any of kronfluence's
    damping: float = 1e-8
    self_influence: bool = True  # also compute each training example's own influence, for normalised scores
    fit_batch_size: int = batch_size_option(500)
    query_batch_size: int = batch_size_option(500)
    train_batch_size: int = batch_size_option(500)

    def __post_init__(self) -> None:
        if not 0 <= self.damping < math.inf:
            raise ValueError(f"damping is {self.damping}; expected a number that is not negative")
        if self.strategy not in STRATEGIES:
            raise ValueError(f'strategy is "{self.strategy}"; available: {", ".join(STRATEGIES)}')

    @property
    def config(self) -> dict[str, Any]:
        """Labels are sampled batch by batch, so another batch size of the fit is another sample, with another key."""
        default = type(self).__dataclass_fields__["fit_batch_size"].default
        other = {} if self.fit_batch_size == default else {"fit_batch_size": self.fit_batch_size}
        return super().config | other

    def skip(self, task: Task) -> str | None:
        if not tracked_modules(task.build_model(0)):
            return "the model has no trainable linear or convolution layer"
        return None

    def fit(self, problem: Problem) -> Any:
        from kronfluence.analyzer import Analyzer, prepare_model
        from kronfluence.arguments import FactorArguments

        logging.getLogger("kronfluence").setLevel(logging.ERROR)
        # kronfluence replaces modules inside their parent, so the model itself must not be one of them.
        model = nn.Sequential(detached_copy(problem.model))
        task = _translate(problem.task, tracked_modules(model))
        model = prepare_model(model, task)
        analyzer = Analyzer(
            analysis_name="ekfac",
            model=model,
            task=task,
            cpu=problem.device.type == "cpu",
            output_dir=str(problem.scratch),
            disable_tqdm=True,
        )
        arguments = FactorArguments(strategy=self.strategy, covariance_max_examples=None, lambda_max_examples=None)
        if self.strategy != "identity":
            total = FIT_PASSES.get(self.strategy, 1) * _num_batches(problem.train, self.fit_batch_size)
            with task.ticking(problem, total, "ekfac: fit"):
                analyzer.fit_all_factors(
                    factors_name="factors",
                    dataset=problem.train,
                    per_device_batch_size=min(self.fit_batch_size, len(problem.train)),
                    factor_args=arguments,
                    overwrite_output_dir=True,
                )
        else:
            analyzer.fit_all_factors(factors_name="factors", dataset=problem.train, factor_args=arguments)
        return analyzer

    def score(self, problem: Problem, state: Any) -> Attribution:
        from kronfluence.arguments import ScoreArguments

        arguments = ScoreArguments(damping_factor=self.damping)
        num_train_batches = _num_batches(problem.attributed, self.train_batch_size)
        total = _num_batches(problem.queries, self.query_batch_size) * (1 + num_train_batches)
        with state.task.ticking(problem, total, "ekfac: scores"):
            state.compute_pairwise_scores(
                scores_name="scores",
                factors_name="factors",
                query_dataset=problem.queries,
                train_dataset=problem.attributed,
                per_device_query_batch_size=min(self.query_batch_size, len(problem.queries)),
                per_device_train_batch_size=min(self.train_batch_size, len(problem.attributed)),
                score_args=arguments,
                overwrite_output_dir=True,
            )
        scores = -state.load_pairwise_scores("scores")["all_modules"].float()
        if not self.self_influence:
            return Attribution(scores=scores)
        with state.task.ticking(problem, num_train_batches, "ekfac: self-influence"):
            state.compute_self_scores(
                scores_name="self",
                factors_name="factors",
                train_dataset=problem.attributed,
                per_device_train_batch_size=min(self.train_batch_size, len(problem.attributed)),
                score_args=arguments,
                overwrite_output_dir=True,
            )
        own = state.load_self_scores("self")["all_modules"].float()
        return Attribution(scores=scores, train_scale=own.clamp(min=0).sqrt())

    def token_scores(self, problem: Problem, state: Any, train: Examples | None = None) -> Tensor:
        """(q, n, tokens) float32: the part of each training token in the scores, whose sum over tokens they are.

        `state` is what `fit` gave; `train` are the training sequences to look at, by default the attributed ones.
        """
        from kronfluence.arguments import ScoreArguments

        train = problem.attributed if train is None else train
        state.compute_pairwise_scores(
            scores_name="token_scores",
            factors_name="factors",
            query_dataset=problem.queries,
            train_dataset=train,
            per_device_query_batch_size=min(self.query_batch_size, len(problem.queries)),
            per_device_train_batch_size=min(self.train_batch_size, len(train)),
            score_args=ScoreArguments(damping_factor=self.damping, compute_per_token_scores=True),
            overwrite_output_dir=True,
        )
        return -state.load_pairwise_scores("token_scores")["all_modules"].float()


def _num_batches(examples: Examples, batch_size: int) -> int:
    return -(-len(examples) // batch_size)


def _translate(task: Task, names: list[str]) -> Any:
    """kronfluence's view of a task."""
    from kronfluence.task import Task as KronfluenceTask

    class Translation(KronfluenceTask):
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
            inputs, targets = batch
            inner = model[0] if isinstance(model, nn.Sequential) else model
            if isinstance(inner, CausalLM) and inner.has_plain_head:
                return _language_loss(inner, inputs, None if sample else targets)
            outputs = model(inputs)
            if sample:
                with torch.no_grad():
                    targets = task.loss_function.sample_targets(outputs)
            # Summed over the batch: a mean would shrink every gradient by the batch size.
            return mean_over_tokens(task.loss_function.per_example(outputs, targets)).sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch=batch, model=model)

        def get_influence_tracked_modules(self) -> list[str]:
            return names

    return Translation()


def _language_loss(model: CausalLM, inputs: Tensor, targets: Tensor | None) -> Tensor:
    """Sum over sequences of the mean loss of their tokens; without targets, of sampled ones."""
    weight = model.head.weight
    hidden = model.hidden_states(inputs).flatten(0, 1).to(weight.dtype)
    chosen = sample_tokens(hidden, weight) if targets is None else targets.flatten()
    return linear_cross_entropy(hidden, weight, chosen).view(inputs.shape).mean(1).sum()
