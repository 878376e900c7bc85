"""logra: influence functions on gradients that are projected side by side, layer by layer, on this suite's own kernels.

A linear or convolution layer's gradient G becomes P_out G P_in, at most `side` x `side` numbers, by fixed random
matrices that never meet the whole gradient: positions are projected before they are multiplied out. Scores are
-g_query^T (H + damping)^-1 g_train, H being each layer's whole second moment of the projected training gradients at
their own labels. Layers that are no larger keep their own axes, so that a small network is exact.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from baselines.method import Attribution, Method, Problem, Size, batch_size_option
from baselines.support.damping import check_damping, damped
from baselines.support.gradients import Basis, PerExampleGradients, matching_parameters
from baselines.support.inner_products import held_bytes, inner_products
from baselines.support.kronfluence_layers import tracked_modules, tracked_parameters
from baselines.support.pieces import Piece
from retrain.errors import UsageError
from retrain.examples import Batch, Examples
from retrain.task import Task

_STREAM = 71
Eigen = list[tuple[Tensor, ...]]  # eigenvalues and eigenvectors, a pair a layer


@dataclass(frozen=True, kw_only=True)
class LoGra(Method):
    version: ClassVar[int] = 1
    paper: ClassVar[str] = (
        "Choe et al. 2024, What is your data worth to GPT? LLM-scale data valuation with influence functions"
    )
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "relative_damping": (0.1, 1e-3, 0.01, 1.0, 10.0, 100.0),
        "side": (32, 16, 64),
    }

    side: int = 32  # most rows and columns of a layer's projected gradient
    damping: float | None = None  # None: relative_damping of each layer's mean eigenvalue
    relative_damping: float = 0.1
    parameters: str = ""  # regular expression: only parameters whose name it finds
    batch_size: int = batch_size_option(500)

    def __post_init__(self) -> None:
        check_damping(self.damping, self.relative_damping)
        if self.side < 1:
            raise ValueError(f"side is {self.side}; expected at least 1")

    @property
    def fit_config(self) -> dict[str, Any]:
        """A fit serves every damping."""
        return {name: value for name, value in self.config.items() if name not in ("damping", "relative_damping")}

    def skip(self, task: Task) -> str | None:
        found = tracked_modules(task.build_model(0))
        return None if found else "the model has no trainable linear or convolution layer"

    def memory_bytes(self, size: Size) -> int:
        """Of at most a hundred layers: their second moments twice, and the scores."""
        projected = min(100 * self.side**2, size.num_parameters)
        return 8 * projected * min(self.side**2, projected) + held_bytes(
            size.num_attributed, size.num_queries, projected
        )

    def _rows(self, problem: Problem, **turned: Any) -> "ProjectedGradients":
        wanted = set(tracked_parameters(problem.model))
        names = [name for name in matching_parameters(problem.model, self.parameters, self.name) if name in wanted]
        if not names:
            raise UsageError(f'{self.name}.parameters is "{self.parameters}", which matches no linear or convolution')
        gradients = PerExampleGradients(problem.model, problem.task.loss_function.per_example, names, join_biases=True)
        return ProjectedGradients(gradients, self.side, problem.seed, problem.device, **turned)

    def _mean(self, problem: Problem, examples: Examples, of_batch: Callable[[Batch], list[Tensor]]) -> list[Tensor]:
        """The mean over the examples of what `of_batch` sums over a batch, layer by layer."""
        sums: list[Tensor] = []
        batches, total = examples.batches(self.batch_size), -(-len(examples) // self.batch_size)
        for inputs, targets in problem.progress(batches, total=total, description=f"{self.name}: second moments"):
            new = of_batch((inputs.to(problem.device), targets.to(problem.device)))
            sums = [old + one for old, one in zip(sums, new, strict=True)] if sums else new
        return [one / len(examples) for one in sums]

    @torch.no_grad()
    def fit(self, problem: Problem) -> Eigen:
        """(eigenvalues, eigenvectors) of each layer's second moment."""
        return [
            tuple(torch.linalg.eigh(one)) for one in self._mean(problem, problem.train, self._rows(problem).moments)
        ]

    def score(self, problem: Problem, state: Eigen) -> Attribution:
        return self._score(problem, state)

    def _score(self, problem: Problem, eigen: Eigen, **turned: Any) -> Attribution:
        rows = self._rows(problem, eigenvectors=[vectors for _, vectors in eigen], **turned)
        inverse = [damped(values.clamp(min=0), self.damping, self.relative_damping).reciprocal() for values, _ in eigen]
        found = inner_products(problem, rows, self.batch_size, self.name, torch.cat(inverse))
        diagnostics = {"layers": len(eigen), "projection": rows.dimension, "gradients_by": rows.gradients.way}
        return Attribution(scores=found.scores, train_scale=found.train_scale, diagnostics=diagnostics)

    def pack_fit(self, state: Eigen) -> Mapping[str, Tensor]:
        return {
            f"{k}.{name}": value for k, pair in enumerate(state) for name, value in zip(("values", "vectors"), pair)
        }

    def unpack_fit(self, problem: Problem, arrays: Mapping[str, Tensor]) -> Eigen:
        moved = {name: value.to(problem.device) for name, value in arrays.items()}
        return [(moved[f"{k}.values"], moved[f"{k}.vectors"]) for k in range(len(moved) // 2)]


class ProjectedGradients:
    """Per-example gradients with both sides projected; in the eigenvectors of each layer's second moment, if given."""

    def __init__(
        self,
        gradients: PerExampleGradients,
        side: int,
        seed: int,
        device: torch.device,
        eigenvectors: list[Tensor] | None = None,
        turn: Callable[[int, Piece], Piece] | None = None,
    ):
        self.gradients, self.eigenvectors, self.turn = gradients, eigenvectors, turn
        self.bases: list[Basis] = []
        self.dimension = 0
        for number, group in enumerate(gradients.groups):
            shape = gradients.model.get_parameter(group[0]).shape
            sizes = (shape[0], shape[1:].numel() + len(group) - 1)
            limits = (side * side, 1) if sizes[1] == 1 else (side, side)  # a bias alone has no columns
            left, right = (
                _projection(size, limit, [seed, number, which, _STREAM], device)
                for which, (size, limit) in enumerate(zip(sizes, limits, strict=True))
            )
            self.bases.append((left, right))
            self.dimension += min(sizes[0], limits[0]) * min(sizes[1], limits[1])

    def pieces(self, batch: Batch) -> list[Piece]:
        inputs, targets = batch
        (pieces,) = self.gradients.each(inputs, lambda _: [(targets, None)])
        return pieces

    def moments(self, batch: Batch) -> list[Tensor]:
        """(projected, projected) of each layer, summed over the batch."""
        return [part.T @ part for part in self.parts(batch)]

    def parts(self, batch: Batch) -> list[Tensor]:
        """(batch, projected) of each layer."""
        pieces = self.pieces(batch)
        turned = pieces if self.turn is None else [self.turn(k, piece) for k, piece in enumerate(pieces)]
        found = [piece.matrices(*basis).flatten(1) for piece, basis in zip(turned, self.bases, strict=True)]
        if self.eigenvectors is None:
            return found
        return [part @ vectors for part, vectors in zip(found, self.eigenvectors, strict=True)]

    def __call__(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        rows = torch.cat(self.parts(batch), dim=1)
        return rows if out is None else out.copy_(rows)


def _projection(size: int, limit: int, seed: list[int], device: torch.device) -> Tensor | None:
    """(size, limit), whose products keep inner products in expectation; None where the axes themselves are as few."""
    if size <= limit:
        return None
    drawn = np.random.default_rng(seed).standard_normal((size, limit), dtype=np.float32)
    return torch.from_numpy(drawn / limit**0.5).to(device)
