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
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from baselines.kfac import KFAC
from baselines.method import Attribution, Problem, Size, batch_size_option
from baselines.support.curvature import Block, GradientsInBasis, check_exact, labels_for, seeded_labels
from baselines.support.gradients import PerExampleGradients, write_rows
from baselines.support.inner_products import held_bytes, parts_that_fit
from baselines.support.memory import free_bytes
from baselines.support.second_derivatives import twice_differentiable
from retrain.examples import Examples, Indices
from retrain.losses import Loss, mean_over_tokens

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

    def __init__(self, blocks: list[Block], groups: Sequence[tuple[str, ...]], product: "GaussNewton", damping: float):
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


# ---- products with the Gauss-Newton matrix ----


class GaussNewton:
    """Products with the Gauss-Newton matrix of the mean training loss, for many vectors at once.

        product = GaussNewton(model, loss, names, examples, device, batch_size)
        product(vectors)            # (k, dimension), one a row: (1/n) sum_i J_i^T H_i J_i v, by one pass over the data

    J_i is the outputs' Jacobian in the parameters and H_i the loss's Hessian in the outputs, both of one example. A
    batch of examples is one forward pass with tangents (J v, by forward-mode differentiation), H's product, and one
    backward pass (J^T); on a GPU the k vectors run side by side.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, names: list[str], examples: Examples, device: torch.device, batch_size: int
    ):
        self.model, self.loss, self.examples, self.device = model, loss, examples, device
        self.batch_size = batch_size
        self.names = names
        self.parameters = {name: model.get_parameter(name).detach() for name in names}
        self.others = {n: v.detach() for n, v in model.named_parameters() if n not in self.parameters}
        self.others |= dict(model.named_buffers())
        self.sizes = [self.parameters[name].numel() for name in names]

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        parts = vector.split(self.sizes)
        return {name: part.view_as(self.parameters[name]) for name, part in zip(self.names, parts)}

    @torch.no_grad()
    def __call__(self, vectors: Tensor, chosen: Indices | None = None, stream: int = 0) -> Tensor:
        """Of the mean over these examples; None: over all."""
        examples = self.examples if chosen is None else self.examples.select(chosen)
        total = torch.zeros_like(vectors)
        with twice_differentiable():
            for inputs, targets in examples.batches(self.batch_size):
                inputs, targets = inputs.to(self.device), targets.to(self.device)
                total += self._batch(vectors, inputs, targets)
        return total / len(examples)

    def _batch(self, vectors: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        def outputs_of(parameters: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(self.model, {**self.others, **parameters}, (inputs,))

        def slope(outputs: Tensor) -> Tensor:
            return torch.func.grad(lambda o: mean_over_tokens(self.loss.per_example(o, targets)).sum())(outputs)

        outputs, pull_back = torch.func.vjp(outputs_of, self.parameters)  # type: ignore[misc]

        def one(vector: Tensor) -> Tensor:
            tangent = torch.func.jvp(outputs_of, (self.parameters,), (self.split(vector),))[1]
            curved = torch.func.jvp(slope, (outputs.detach(),), (tangent,))[1]
            (found,) = pull_back(curved)
            return torch.cat([found[name].flatten() for name in self.names])

        if vectors.is_cuda:
            return torch.func.vmap(one)(vectors)
        # A convolution with weights of its own for each vector has no fast kernel on a CPU: a third of the time.
        return torch.stack([one(vector) for vector in vectors])


class FisherProduct:
    """The same matrix from per-example gradients, in the eigenvectors of kfac's blocks.

    A batch is two matrix products for all vectors together: on a GPU the faster way for images and a few hundred
    vectors. Labels are sampled from the model, or all of them count by their probability, which is the matrix itself.
    Where they are sampled, those of one `stream` stay the same from product to product.
    """

    def __init__(
        self,
        gradients: GradientsInBasis,
        loss: Loss,
        examples: Examples,
        device: torch.device,
        batch_size: int,
        *,
        seed: int,
        exact: bool,
    ):
        if exact:
            check_exact(loss, examples)
        self.gradients, self.loss, self.examples, self.device = gradients, loss, examples, device
        self.batch_size, self.seed, self.exact = batch_size, seed, exact

    @torch.no_grad()
    def __call__(self, vectors: Tensor, chosen: Indices | None = None, stream: int = 0) -> Tensor:
        examples = self.examples if chosen is None else self.examples.select(chosen)
        total = torch.zeros_like(vectors)
        buffer = torch.empty(min(self.batch_size, len(examples)), vectors.shape[1], device=self.device)
        for start, (inputs, targets) in zip(
            range(0, len(examples), self.batch_size), examples.batches(self.batch_size), strict=True
        ):
            inputs, targets = inputs.to(self.device), targets.to(self.device)
            seeded = partial(seeded_labels, self.device, self.seed, stream, start)
            labels = labels_for(self.loss, targets, self.exact, seeded)
            for pieces in self.gradients.gradients.each(inputs, labels):
                rows = write_rows(pieces, [block.basis for block in self.gradients.blocks], buffer[: len(targets)])
                total.addmm_(vectors @ rows.T, rows)
        # The mean of a sequence's token losses has tokens times the second moment of its gradients.
        return total * (examples.targets[0].numel() / len(examples))
