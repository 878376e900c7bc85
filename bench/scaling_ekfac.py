"""EK-FAC as the paper's scaling comparison runs it: kronfluence with its extreme-memory-reduction arguments.

The same translation as `baselines/ekfac.py`, with factors and activations in the model's own precision, activations
offloaded to the host, lambda summed example by example, and scores computed in four partitions of the modules. No
handicap: the model is used as it is, without a copy, and self-influence is not computed. The parts of the fit are
called one by one so that each has its own seconds; together they are exactly kronfluence's `fit_all_factors`.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from baselines.ekfac import EKFAC, _language_loss, tracked_modules
from baselines.method import Attribution, Problem, batch_size_option
from bench.runner import _now
from retrain.task import Task

PARTITIONS = 4  # kronfluence's own default of extreme_reduce_memory_score_arguments
QUERY_SHARE = 0.25  # of the free memory, for one batch's preconditioned query gradients


@dataclass(frozen=True, kw_only=True)
class LowMemoryEKFAC(EKFAC):
    fit_examples: int = 0  # factors are fitted on this many training sequences; 0: all
    damping: float | None = 1e-8  # kronfluence's own, and the paper's
    self_influence: bool = False
    fit_batch_size: int = batch_size_option(32)
    query_batch_size: int = batch_size_option(32)
    train_batch_size: int = batch_size_option(32)
    phases: dict[str, float] = field(default_factory=dict, metadata={"key": False})  # seconds of the last fit's parts

    def _arguments(self, dtype: torch.dtype, examples: int) -> Any:
        from kronfluence.utils.common.factor_arguments import extreme_reduce_memory_factor_arguments

        arguments = extreme_reduce_memory_factor_arguments(strategy=self.strategy, dtype=dtype)
        arguments.covariance_max_examples = arguments.lambda_max_examples = examples
        if dtype == torch.float32:
            arguments.amp_dtype = None  # autocast knows only the half precisions
        return arguments

    def fit(self, problem: Problem) -> Any:
        from kronfluence.analyzer import Analyzer, prepare_model

        logging.getLogger("kronfluence").setLevel(logging.ERROR)
        model = nn.Sequential(problem.model)
        task = translate(problem.task, tracked_modules(model))
        analyzer = Analyzer(
            analysis_name="ekfac",
            model=prepare_model(model, task),
            task=task,
            cpu=problem.device.type == "cpu",
            output_dir=str(problem.scratch),
            disable_tqdm=True,
        )
        self.phases.clear()
        self.phases.update(self.fit_factors(analyzer, problem, self.fit_examples or len(problem.train)))
        return analyzer

    def fit_factors(self, analyzer: Any, problem: Problem, examples: int, eigen: bool = True) -> dict[str, float]:
        """Seconds of covariance, eigendecomposition and lambda; without `eigen`, those already there are used."""
        arguments = self._arguments(next(problem.model.parameters()).dtype, examples)
        shared = {"factors_name": "factors", "factor_args": arguments, "overwrite_output_dir": True}
        data = {"dataset": problem.train, "per_device_batch_size": min(self.fit_batch_size, examples)}
        start = _now(problem.device)
        analyzer.fit_covariance_matrices(**shared, **data)
        covariance = _now(problem.device)
        if eigen:
            analyzer.perform_eigendecomposition(**shared)
        decomposed = _now(problem.device)
        analyzer.fit_lambda_matrices(**shared, **data)
        end = _now(problem.device)
        return {"covariance": covariance - start, "eigen": decomposed - covariance, "lambda": end - decomposed}

    def score(self, problem: Problem, state: Any) -> Attribution:
        from kronfluence.utils.common.score_arguments import extreme_reduce_memory_score_arguments

        dtype = next(problem.model.parameters()).dtype
        arguments = extreme_reduce_memory_score_arguments(
            damping_factor=self.damping, module_partitions=min(PARTITIONS, len(tracked_modules_of(state))), dtype=dtype
        )
        if dtype == torch.float32:
            arguments.amp_dtype = None
        state.compute_pairwise_scores(
            scores_name="scores",
            factors_name="factors",
            query_dataset=problem.queries,
            train_dataset=problem.attributed,
            per_device_query_batch_size=self._queries_at_once(problem, state),
            per_device_train_batch_size=min(self.train_batch_size, len(problem.attributed)),
            score_args=arguments,
            overwrite_output_dir=True,
        )
        return Attribution(scores=-state.load_pairwise_scores("scores")["all_modules"].float())

    def _queries_at_once(self, problem: Problem, state: Any) -> int:
        """As many as leave room: each holds a preconditioned gradient of a partition's weights."""
        from baselines.support.memory import free_bytes

        weights = sum(module.original_module.weight.numel() for module in tracked_modules_of(state))
        each = weights * next(problem.model.parameters()).element_size() / PARTITIONS
        room = int(QUERY_SHARE * free_bytes(problem.device) / each)
        return max(1, min(self.query_batch_size, len(problem.queries), room))


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
