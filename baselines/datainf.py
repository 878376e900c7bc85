"""datainf: influence with the mean of single examples' inverses, not the inverse of their mean, by dattri.

    pip install dattri                     # optional: without it the method is skipped, with this line

Layer by layer, (1/n) sum_i (g_i g_i^T + damping)^-1 stands for the inverse of the empirical Fisher, which has a closed
form. Proposed for the small adapters of language models: every training example's gradient is held at once, so a model
of millions of parameters is refused by its memory. The paper's damping is a tenth of a layer's mean squared gradient;
dattri takes one number for all layers, and its default of 0 divides by zero: `damping` is a number here, or by default
`relative_damping` of the mean squared gradient over all layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from baselines.method import Attribution, Method, Problem, Size, batch_size_option
from baselines.support.damping import check_damping
from baselines.support.dattri_task import (
    dattri_loader,
    dattri_missing,
    dattri_scores,
    dattri_task,
    finite_or_refuse,
    without_bars,
)
from retrain.task import Task


@dataclass(frozen=True, kw_only=True)
class DataInf(Method):
    libraries: ClassVar[tuple[str, ...]] = ("dattri",)
    paper: ClassVar[str] = "Kwon et al. 2024, DataInf: Efficiently estimating data influence in LoRA-tuned LLMs"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"relative_damping": (0.1, 1e-3, 0.01, 1.0, 10.0, 100.0, 1000.0)}

    damping: float | None = None  # None: relative_damping of the mean squared gradient
    relative_damping: float = 0.1
    query_batch_size: int = batch_size_option(20)
    batch_size: int = batch_size_option(100)

    def __post_init__(self) -> None:
        check_damping(self.damping, self.relative_damping)

    def skip(self, task: Task) -> str | None:
        return dattri_missing()

    def memory_bytes(self, size: Size) -> int:
        """Every training example's gradient; for a batch of queries, a product with each of as many of them."""
        held = size.num_train + size.num_attributed + (self.query_batch_size + 2) * self.query_batch_size
        return 4 * (held * size.num_parameters + 2 * size.num_attributed * size.num_queries)

    def score(self, problem: Problem, state: Any) -> Attribution:
        from dattri.algorithm import IFAttributorDataInf

        attributor = IFAttributorDataInf(dattri_task(problem), device=str(problem.device))
        with without_bars():
            attributor.cache(dattri_loader(problem.train, self.batch_size))
        gradients = attributor._cached_train_reps[0]
        used = self.damping
        if used is None:
            used = self.relative_damping * float(gradients.detach().square().mean())
        attributor.regularization = used
        scores, norms = dattri_scores(
            problem,
            attributor,
            batch_size=self.batch_size,
            query_batch_size=self.query_batch_size,
            description="datainf",
        )
        found = Attribution(scores=scores, train_scale=norms, diagnostics={"damping": used})
        return finite_or_refuse(found, f"scores are not finite at damping {used:g}; take a larger one")
