"""kfac: the Kronecker-factored, eigenvalue-corrected influence function (EK-FAC) on this suite's own kernels.

-g_query^T (H + damping)^-1 g_train, deterministic, without chains, over every layer: linear and convolution layers with
their bias as one more column, embeddings, normalisations and heads. H is the Fisher information of the whole training
set (`baselines/support/curvature.py`), diagonal in each layer's own eigenvectors: per-example gradients are turned into
them once, a query's numbers are divided by (eigenvalue + damping), and scores are one matrix product.

`layers=kronfluence` looks at what kronfluence looks at (linear and convolution layers but no output head), and scales
curvature as it does: at equal damping, batches and seed it is kronfluence's EK-FAC, sampled labels included. On
sequences kronfluence's curvature is that of the gradients, smaller by the number of tokens than the mean token loss
has, so that an absolute damping means something else there; a relative one means the same everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from baselines.method import Attribution, Method, Problem, Size, batch_size_option
from baselines.support.curvature import Block, GradientsInBasis, fit_curvature, packed_blocks, unpacked_blocks
from baselines.support.damping import check_damping, damped
from baselines.support.gradients import PerExampleGradients, matching_parameters
from baselines.support.inner_products import held_bytes, inner_products
from baselines.support.kronfluence_layers import tracked_modules, tracked_parameters
from retrain.errors import UsageError
from retrain.task import Task

LAYERS = ("all", "kronfluence")
LABELS = ("sampled", "exact")


@dataclass(frozen=True, kw_only=True)
class KFAC(Method):
    version: ClassVar[int] = 1
    gradient_sides: ClassVar[bool] = False
    paper: ClassVar[str] = "Grosse et al. 2023, Studying large language model generalization with influence functions"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"relative_damping": (0.1, 1e-4, 1e-3, 0.01, 0.03, 0.3, 1.0, 10.0)}

    damping: float | None = None  # added to every eigenvalue; None: relative_damping of each layer's mean eigenvalue
    relative_damping: float = 0.1
    layers: str = "all"  # or "kronfluence"
    parameters: str = ""  # regular expression: only parameters whose name it finds; empty: every trainable one
    labels: str = "sampled"  # or "exact": every class with its probability, for few classes
    fit_examples: int = 0  # training examples, drawn at random, that the curvature is taken from; 0: all
    self_influence: bool = True  # also each training example's own influence, for normalised scores
    fit_batch_size: int = batch_size_option(500)
    batch_size: int = batch_size_option(500)

    def __post_init__(self) -> None:
        check_damping(self.damping, self.relative_damping)
        for name, choices in (("layers", LAYERS), ("labels", LABELS)):
            if getattr(self, name) not in choices:
                raise ValueError(f'{name} is "{getattr(self, name)}"; available: {", ".join(choices)}')
        if self.fit_examples < 0:
            raise ValueError(f"fit_examples is {self.fit_examples}; expected a number of examples, or 0 for all")

    @property
    def config(self) -> dict[str, Any]:
        """Labels are sampled batch by batch, so another batch size of the fit is another sample, with another key."""
        default = type(self).__dataclass_fields__["fit_batch_size"].default
        other = self.labels == "sampled" and self.fit_batch_size != default
        return super().config | ({"fit_batch_size": self.fit_batch_size} if other else {})

    @property
    def fit_config(self) -> dict[str, Any]:
        """A fit serves every damping."""
        of_scores = ("damping", "relative_damping", "self_influence")
        return {name: value for name, value in self.config.items() if name not in of_scores}

    def skip(self, task: Task) -> str | None:
        if self.layers == "kronfluence" and not tracked_modules(task.build_model(0)):
            return "the model has no trainable linear or convolution layer"
        return None

    def memory_bytes(self, size: Size) -> int:
        """Eigenvalues and their inverses; eigenvectors at most as large again twice; and what the scores take."""
        return 16 * size.num_parameters + held_bytes(size.num_attributed, size.num_queries, size.num_parameters)

    def _gradients(self, problem: Problem) -> PerExampleGradients:
        names = matching_parameters(problem.model, self.parameters, self.name)
        if self.layers == "kronfluence":
            tracked = set(tracked_parameters(problem.model))
            names = [name for name in names if name in tracked]
            if not names:
                raise UsageError(
                    f'{self.name}.parameters is "{self.parameters}", which matches none of kronfluence\'s layers'
                )
        function = problem.task.loss_function.per_example
        return PerExampleGradients(problem.model, function, names, join_biases=True)

    def fit(self, problem: Problem) -> list[Block]:
        examples = problem.train
        if 0 < self.fit_examples < len(examples):
            order = np.random.default_rng(problem.seed).permutation(len(examples))
            examples = examples.select(order[: self.fit_examples])
        return fit_curvature(
            self._gradients(problem),
            problem.task.loss_function,
            examples,
            self.fit_batch_size,
            problem.device,
            problem.progress,
            seed=problem.seed,
            exact=self.labels == "exact",
            token_scale=self.layers == "all",
            gradient_sides=self.gradient_sides,
            work=problem.work,
            description=self.name,
        )

    def score(self, problem: Problem, state: list[Block]) -> Attribution:
        inverse = [damped(block.eigenvalues, self.damping, self.relative_damping).reciprocal_() for block in state]
        weights = torch.cat([part.flatten() for part in inverse])
        gradients = GradientsInBasis(self._gradients(problem), state)
        found = inner_products(problem, gradients, self.batch_size, self.name, weights)
        used = self.damping if self.damping is not None else f"{self.relative_damping:g} of each layer's mean"
        diagnostics = {"damping": used, "blocks": len(state), "gradients_by": gradients.gradients.way}
        scale = found.train_scale if self.self_influence else None
        return Attribution(scores=found.scores, train_scale=scale, diagnostics=diagnostics)

    def pack_fit(self, state: list[Block]) -> Mapping[str, Tensor]:
        return packed_blocks(state)

    def unpack_fit(self, problem: Problem, arrays: Mapping[str, Tensor]) -> list[Block]:
        return unpacked_blocks(arrays, problem.device)
