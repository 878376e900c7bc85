"""EK-FAC as the paper's scaling comparison runs it: kronfluence with its extreme-memory-reduction arguments.

The same translation as `baselines/ekfac.py`, with factors and activations in the model's own precision, activations
offloaded to the host, lambda summed example by example, and scores computed in four partitions of the modules. No
handicap: the model is used as it is, without a copy, self-influence is not computed, and as many queries are scored in
one pass over the training sequences as there is room for. The parts of the fit are called one by one, so that each has
its own seconds and is kept when a later one is cut short; together they are exactly kronfluence's `fit_all_factors`.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from baselines.ekfac import _language_loss, tracked_modules
from baselines.method import Attribution, Method, Problem, batch_size_option
from baselines.support.memory import free_bytes
from bench.scaling.costs import FIT_BATCH
from retrain.examples import Examples
from retrain.task import Task

PARTITIONS = 4  # kronfluence's own default of extreme_reduce_memory_score_arguments
GRADIENT_SHARE = 0.25  # of the free memory, for the preconditioned query gradients of one pass
FACTORS, SCORES = "factors", "scores"


@dataclass(frozen=True, kw_only=True)
class LowMemoryEKFAC(Method):
    strategy: str = "ekfac"  # any of kronfluence's
    damping: float = 1e-8  # kronfluence's own, and the paper's
    fit_examples: int = 0  # factors are fitted on this many training sequences; 0: all
    fit_batch_size: int = batch_size_option(FIT_BATCH)
    query_batch_size: int = batch_size_option(FIT_BATCH)
    train_batch_size: int = batch_size_option(FIT_BATCH)

    def fit(self, problem: Problem) -> Any:
        analyzer = self.analyzer(problem)
        count = self.fit_examples or len(problem.train)
        self.fit_covariance(analyzer, problem.train, count)
        self.decompose(analyzer, count)
        self.fit_lambda(analyzer, problem.train, count)
        return analyzer

    # ---- the parts of a fit; each reads what the one before wrote ----

    def analyzer(self, problem: Problem) -> Any:
        from kronfluence.analyzer import Analyzer, prepare_model

        logging.getLogger("kronfluence").setLevel(logging.ERROR)
        model = nn.Sequential(problem.model)
        task = translate(problem.task, tracked_modules(model))
        return Analyzer(
            analysis_name="ekfac",
            model=prepare_model(model, task),
            task=task,
            cpu=problem.device.type == "cpu",
            output_dir=str(problem.scratch),
            disable_tqdm=True,
        )

    def fit_covariance(self, analyzer: Any, data: Examples, count: int) -> None:
        analyzer.fit_covariance_matrices(**self._shared(analyzer, count), **self._data(data, count))

    def decompose(self, analyzer: Any, count: int) -> None:
        analyzer.perform_eigendecomposition(**self._shared(analyzer, count))

    def fit_lambda(self, analyzer: Any, data: Examples, count: int) -> None:
        analyzer.fit_lambda_matrices(**self._shared(analyzer, count), **self._data(data, count))

    def _data(self, data: Examples, count: int) -> dict[str, Any]:
        return {"dataset": data, "per_device_batch_size": min(self.fit_batch_size, count)}

    def _shared(self, analyzer: Any, count: int) -> dict[str, Any]:
        from kronfluence.utils.common.factor_arguments import extreme_reduce_memory_factor_arguments

        dtype = next(analyzer.model.parameters()).dtype
        arguments = extreme_reduce_memory_factor_arguments(strategy=self.strategy, dtype=dtype)
        arguments.covariance_max_examples = arguments.lambda_max_examples = count
        if dtype == torch.float32:
            arguments.amp_dtype = None  # autocast knows only the half precisions
        return {"factors_name": FACTORS, "factor_args": arguments, "overwrite_output_dir": True}

    # ---- scores ----

    def score(self, problem: Problem, state: Any) -> Attribution:
        from kronfluence.utils.common.score_arguments import extreme_reduce_memory_score_arguments

        dtype = next(problem.model.parameters()).dtype
        arguments = extreme_reduce_memory_score_arguments(
            damping_factor=self.damping, module_partitions=min(PARTITIONS, len(tracked_modules_of(state))), dtype=dtype
        )
        if dtype == torch.float32:
            arguments.amp_dtype = None
        together = self._queries_together(problem, state)
        batch_size = min(self.query_batch_size, together)
        arguments.query_gradient_accumulation_steps = max(1, together // batch_size)
        state.compute_pairwise_scores(
            scores_name=SCORES,
            factors_name=FACTORS,
            query_dataset=problem.queries,
            train_dataset=problem.attributed,
            per_device_query_batch_size=batch_size,
            per_device_train_batch_size=min(self.train_batch_size, len(problem.attributed)),
            score_args=arguments,
            overwrite_output_dir=True,
        )
        return Attribution(scores=-state.load_pairwise_scores(SCORES)["all_modules"].float())

    def _queries_together(self, problem: Problem, state: Any) -> int:
        """As many as leave room: each holds a preconditioned gradient of a partition's weights."""
        weights = sum(module.original_module.weight.numel() for module in tracked_modules_of(state))
        each = weights * next(problem.model.parameters()).element_size() / PARTITIONS
        room = int(GRADIENT_SHARE * free_bytes(problem.device) / each)
        return max(1, min(len(problem.queries), room))


def translate(task: Task, names: list[str]) -> Any:
    """kronfluence's view of the task: its own loss, which leaves out a query's prompt; sampled labels for the fit."""
    from kronfluence.task import Task as KronfluenceTask

    class Translation(KronfluenceTask):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            language_model = model[0]  # type: ignore[index]
            if sample:
                return _language_loss(language_model, batch[0], None)
            return task.example_loss(language_model, tuple(batch)).sum()  # type: ignore[arg-type]

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch=batch, model=model)

        def get_influence_tracked_modules(self) -> list[str]:
            return names

    return Translation()


def tracked_modules_of(analyzer: Any) -> list[Any]:
    from kronfluence.module.tracked_module import TrackedModule

    return [module for module in analyzer.model.modules() if isinstance(module, TrackedModule)]
