"""ekfac_cg: EK-FAC as the preconditioner of conjugate gradients on the exact damped Gauss-Newton matrix.

-g_query^T (G + damping)^-1 g_train over every trainable parameter. The solve starts at EK-FAC's own answer, the kfac
method's Kronecker factors with each layer's share of damping, and each iteration is one pass over the training set with
a product by G, the Gauss-Newton matrix of the mean loss: `iterations` = 0 is kfac, many are the exact solve. All layers
are damped alike in the solve, unlike in kfac: by `damping`, or by `relative_damping` of the mean eigenvalue over all
layers.

`product=jvp` has G by forward and backward differentiation of each vector. `product=gradients` has it from per-example
gradients, for all queries together, at the `labels` that kfac takes: `exact` is G itself, `sampled` the second moment
at one label an example, which stays the same through the solve. Images and hundreds of queries take the latter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from baselines.kfac import KFAC
from baselines.method import Attribution, Problem, Size, batch_size_option
from baselines.support.curvature import Block, GradientsInBasis
from baselines.support.gauss_newton import FisherProduct, GaussNewton
from baselines.support.gradients import PerExampleGradients
from baselines.support.inner_products import held_bytes, parts_that_fit
from baselines.support.memory import free_bytes

SOLVES_SHARE = 0.2  # of the free memory, for the vectors of the solves that run side by side
VECTORS_A_SOLVE = 8
PRODUCTS = ("jvp", "gradients")

Rows = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class EKFACCG(KFAC):
    version: ClassVar[int] = 1
    paper: ClassVar[str] = (
        "Martens and Grosse 2015, Optimizing neural networks with Kronecker-factored approximate curvature (the "
        "preconditioner); Grosse et al. 2023 (its influence functions)"
    )
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "relative_damping": (100.0, 0.1, 1.0, 10.0, 1000.0),
        "iterations": (1, 5),
    }

    # Of the mean over all layers, most of which have hardly any curvature: a share that is right for kfac's layers,
    # each by itself, is too little for a solve that follows every direction.
    relative_damping: float = 100.0
    iterations: int = 1  # of conjugate gradients, for every query
    product: str = "jvp"  # or "gradients"
    query_batch_size: int = batch_size_option(25)
    product_batch_size: int = batch_size_option(250)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.iterations < 0:
            raise ValueError(f"iterations is {self.iterations}; expected 0 or more")
        if self.product not in PRODUCTS:
            raise ValueError(f'product is "{self.product}"; available: {", ".join(PRODUCTS)}')
        if self.layers != "all":
            raise ValueError('layers is "kronfluence"; the exact product is over all of them')

    @property
    def config(self) -> dict[str, Any]:
        """Labels are sampled batch by batch, so another batch size of the product is another sample."""
        default = type(self).__dataclass_fields__["product_batch_size"].default
        other = self.product == "gradients" and self.labels == "sampled" and self.product_batch_size != default
        return super().config | ({"product_batch_size": self.product_batch_size} if other else {})

    @property
    def fit_config(self) -> dict[str, Any]:
        """kfac's own factors, of which every damping and number of iterations makes use."""
        of_kfac = {"name", "version", *KFAC.__dataclass_fields__}
        return {name: value for name, value in super().fit_config.items() if name in of_kfac}

    def memory_bytes(self, size: Size) -> int:
        held = held_bytes(size.num_attributed, size.num_queries, size.num_parameters)
        return (16 + 4 * VECTORS_A_SOLVE) * size.num_parameters + held

    def score(self, problem: Problem, state: list[Block]) -> Attribution:
        damping = self._damping(state)
        plain, product, inverse = self._system(problem, state, damping)
        room = SOLVES_SHARE * free_bytes(problem.device) / (4 * VECTORS_A_SOLVE * plain.dimension)
        size = parts_that_fit(self.query_batch_size, room)
        saved = problem.work.load(self.name)
        rows = [] if saved is None else [torch.from_numpy(saved[0]["scores"].copy())]
        residuals = [] if saved is None else list(saved[1]["residuals"])
        starts = range(len(rows[0]) if rows else 0, len(problem.queries), size)
        for start in problem.progress(starts, total=len(starts), description=f"{self.name}: solves"):
            asked = problem.queries.select(range(start, min(start + size, len(problem.queries))))
            wanted = plain((asked.inputs.to(problem.device), asked.targets.to(problem.device)))
            solved, left = self._solve(product, inverse, wanted, damping, problem)
            residuals += left
            rows.append(torch.cat([-(solved @ part.T).cpu() for part in self._train_rows(problem, plain)], dim=1))
            if problem.work.due():
                problem.work.save(self.name, {"scores": torch.cat(rows).numpy()}, {"residuals": residuals})
        scale = torch.cat([_own(part, inverse).cpu() for part in self._train_rows(problem, plain)])
        median = sorted(residuals)[len(residuals) // 2] if self.iterations else None
        return Attribution(
            scores=torch.cat(rows),
            train_scale=scale if self.self_influence else None,
            diagnostics={"damping": damping, "median_residual": median},
        )

    def _system(self, problem: Problem, state: list[Block], damping: float) -> tuple[Any, Any, Rows]:
        """Per-example gradients, products with G and the preconditioner, all in the same coordinates."""
        gradients, loss = self._gradients(problem), problem.task.loss_function
        asked = (problem.train, problem.device, self.product_batch_size)
        if self.product == "gradients":
            rotated, exact = GradientsInBasis(gradients, state), self.labels == "exact"
            inverse = torch.cat([(b.eigenvalues.double() + damping).reciprocal().float().flatten() for b in state])
            product = FisherProduct(rotated, loss, *asked, seed=problem.seed, exact=exact)
            return rotated, product, lambda rows: rows * inverse
        by_jvp = GaussNewton(problem.model, loss, gradients.names, *asked)
        plain = PerExampleGradients(problem.model, loss.per_example, gradients.names)
        return plain, by_jvp, Preconditioner(state, gradients.groups, by_jvp, damping)

    def _solve(
        self, product: Any, inverse: Rows, wanted: Tensor, damping: float, problem: Problem
    ) -> tuple[Tensor, list[float]]:
        return solve(product, inverse, wanted, damping, self.iterations)

    def _damping(self, blocks: list[Block]) -> float:
        if self.damping is not None:
            return self.damping
        total = sum(float(block.eigenvalues.double().sum()) for block in blocks)
        return self.relative_damping * total / sum(block.eigenvalues.numel() for block in blocks)

    def _train_rows(self, problem: Problem, gradients: Any) -> Any:
        for inputs, targets in problem.attributed.batches(self.batch_size):
            yield gradients((inputs.to(problem.device), targets.to(problem.device)))


def _own(rows: Tensor, inverse: Rows) -> Tensor:
    """Each training example's own influence as the preconditioner has it: an exact one would take a solve each."""
    return (rows * inverse(rows)).sum(1).clamp(min=0).sqrt()


class Preconditioner:
    """(H + damping)^-1 with EK-FAC's H, on rows in the order of the model's own parameters."""

    def __init__(self, blocks: list[Block], groups: Sequence[tuple[str, ...]], product: GaussNewton, damping: float):
        self.blocks, self.groups, self.product = blocks, groups, product
        self.inverses = [(block.eigenvalues.double() + damping).reciprocal().float() for block in blocks]

    def __call__(self, rows: Tensor) -> Tensor:
        named = dict(zip(self.product.names, rows.split(self.product.sizes, dim=1)))
        found: dict[str, Tensor] = {}
        for block, inverse, group in zip(self.blocks, self.inverses, self.groups, strict=True):
            high, wide = inverse.shape
            parts = [named[name] for name in group]
            matrix = (
                parts[0].reshape(-1, high, wide)
                if len(group) == 1
                else torch.cat([parts[0].reshape(-1, high, wide - 1), parts[1][:, :, None]], dim=2)
            )
            solved = block.from_basis(inverse * block.to_basis(matrix))
            if len(group) == 1:
                found[group[0]] = solved.flatten(1)
            else:
                found[group[0]], found[group[1]] = solved[:, :, :-1].flatten(1), solved[:, :, -1]
        return torch.cat([found[name] for name in self.product.names], dim=1)


def solve(product: Any, inverse: Any, wanted: Tensor, damping: float, iterations: int) -> tuple[Tensor, list[float]]:
    """(k, dimension) with (G + damping) x = wanted, a row a system, and each one's last relative residual."""
    found = inverse(wanted)
    if not iterations:
        return found, [float("nan")] * len(wanted)
    residual = wanted - product(found) - damping * found
    preconditioned = inverse(residual)
    direction = preconditioned.clone()
    size = (residual * preconditioned).sum(1, keepdim=True)
    for _ in range(iterations):
        curved = product(direction) + damping * direction
        length = _ratio(size, (direction * curved).sum(1, keepdim=True))
        found = found + length * direction
        residual = residual - length * curved
        preconditioned = inverse(residual)
        before, size = size, (residual * preconditioned).sum(1, keepdim=True)
        direction = preconditioned + _ratio(size, before) * direction
    left = residual.norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-30)
    return found, left.tolist()


def _ratio(top: Tensor, bottom: Tensor) -> Tensor:
    """0 where a system is solved, to rounding."""
    return torch.where(bottom > 0, top / bottom.clamp(min=1e-38), torch.zeros_like(top))
