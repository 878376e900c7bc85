"""The loss's curvature as a Kronecker-factored picture, and coordinates in which a Gaussian of that shape is round.

    curvature = fit_curvature(gradients, loss, train, ...)        # gradients: PerExampleGradients
    metric = Metric(curvature, damping=0.1)
    metric.to_weights(coordinates), metric.of_gradient(gradient)  # a tensor a parameter, in the parameters' order
    metric.of_rows(rows)                                          # per-example gradients, (batch, dimension)

The curvature is the Fisher information with labels sampled from the model (for cross-entropy the Gauss-Newton matrix
in expectation), eigenvalue-corrected as EK-FAC's: a linear or convolution weight has eigenvectors on its output and on
its input side, and the eigenvalues are the mean squares of per-example gradients in that basis. A small parameter of
any other kind (a bias) has its whole matrix; a side or a parameter too large for that stays in its own axes.

With eigenvectors Q and eigenvalues h, a displacement is Q s z, s = (1 + h / damping)^-1/2. An isotropic Gaussian of
precision gamma in the coordinates z has precision gamma (1 + H / damping) in the weights: gamma where the loss is flat,
more where it is curved.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from baselines.support.gradients import PerExampleGradients
from retrain.examples import Examples
from retrain.losses import Loss

LARGEST_SIDE = 8192  # of a matrix whose eigenvectors are computed
LARGEST_DENSE = 1024  # numbers of a parameter without Kronecker structure that gets its whole matrix


@dataclass
class Block:
    """One parameter as a matrix: eigenvectors (columns) of either side, None for the axes themselves."""

    shape: torch.Size
    eigenvalues: Tensor  # (rows, columns)
    left: Tensor | None = None  # (rows, rows)
    right: Tensor | None = None  # (columns, columns)

    def to_basis(self, values: Tensor) -> Tensor:
        """(..., rows, columns) from the parameter's axes into the eigenvectors' basis."""
        if self.left is not None:
            values = self.left.T @ values
        return values if self.right is None else values @ self.right

    def from_basis(self, values: Tensor) -> Tensor:
        if self.left is not None:
            values = self.left @ values
        return values if self.right is None else values @ self.right.T


class Metric:
    """Coordinates of the weights in which a Gaussian of precision gamma (1 + H / damping) is isotropic."""

    def __init__(self, blocks: list[Block], damping: float):
        self.blocks = blocks
        self.scales = [(1 + block.eigenvalues / damping).rsqrt() for block in blocks]
        self.sizes = [block.eigenvalues.numel() for block in blocks]

    def to_weights(self, coordinates: list[Tensor]) -> list[Tensor]:
        """Displacements of the weights, from coordinates of the same shapes."""
        with tf32_products():
            return [
                block.from_basis(scale * values.reshape(scale.shape)).reshape(block.shape)
                for block, scale, values in zip(self.blocks, self.scales, coordinates, strict=True)
            ]

    def of_gradient(self, gradient: list[Tensor]) -> list[Tensor]:
        """The gradient in the coordinates, from that in the weights."""
        with tf32_products():
            return [
                (scale * block.to_basis(values.float().reshape(scale.shape))).reshape(block.shape)
                for block, scale, values in zip(self.blocks, self.scales, gradient, strict=True)
            ]

    def of_rows(self, rows: Tensor) -> Tensor:
        """As `of_gradient`, for (batch, dimension) gradients, one a row, in place."""
        with tf32_products():
            for block, scale, part in zip(self.blocks, self.scales, rows.split(self.sizes, dim=1), strict=True):
                part.copy_((scale * block.to_basis(part.reshape(len(rows), *scale.shape))).flatten(1))
        return rows


class GradientsInMetric:
    """Per-example gradients in a metric's coordinates: their inner products are g^T (1 + H / damping)^-1 g'."""

    def __init__(self, gradients: PerExampleGradients, metric: Metric):
        self.gradients, self.metric, self.dimension = gradients, metric, gradients.dimension

    def __call__(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.metric.of_rows(self.gradients(batch))


@contextlib.contextmanager
def tf32_products() -> Iterator[None]:
    """float32 matrix products on a GPU's tensor cores, in TF32: three digits are enough for a change of basis."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@torch.no_grad()
def fit_curvature(
    gradients: PerExampleGradients, loss: Loss, examples: Examples, batch_size: int, device: torch.device
) -> list[Block]:
    """One block a parameter, in the order of `gradients.names`; labels come from torch's global (seeded) generator.

    Two passes: the sides' second moments, then the eigenvalues in their common basis.
    """
    batches = [(inputs.to(device), targets.to(device)) for inputs, targets in examples.batches(batch_size)]
    with tf32_products():
        sides: dict[str, list[Tensor | None]] = {}
        matrices: set[str] = set()
        for batch in batches:
            matrices = _add_second_moments(sides, gradients, _with_sampled_labels(gradients, loss, batch))
        blocks = []
        for name in gradients.names:
            left, right = (None if side is None else torch.linalg.eigh(side).eigenvectors for side in sides[name])
            parameter = gradients.model.get_parameter(name)
            # A layer's weight is a matrix, of outputs by inputs; everything else is one long vector.
            rows_and_columns = (len(parameter), -1) if name in matrices else (-1, 1)
            eigenvalues = torch.zeros(parameter.numel(), device=device).view(rows_and_columns)
            blocks.append(Block(parameter.shape, eigenvalues, left, right))
        for batch in batches:
            rows = gradients(_with_sampled_labels(gradients, loss, batch))
            for block, part in zip(blocks, rows.split([block.eigenvalues.numel() for block in blocks], dim=1)):
                block.eigenvalues += block.to_basis(part.reshape(len(rows), *block.eigenvalues.shape)).square().sum(0)
    # The labels of a sequence's tokens are independent: the mean of its tokens' gradients has 1 / tokens of the
    # curvature of the mean of its tokens' losses.
    tokens = examples.targets[0].numel()
    for block in blocks:
        block.eigenvalues *= tokens / len(examples)
    return blocks


def _with_sampled_labels(
    gradients: PerExampleGradients, loss: Loss, batch: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    return batch[0], loss.sample_targets(gradients.model(batch[0])).to(batch[1].dtype)


def _add_second_moments(
    sides: dict[str, list[Tensor | None]], gradients: PerExampleGradients, batch: tuple[Tensor, Tensor]
) -> set[str]:
    """Adds this batch's to each parameter's [rows x rows, columns x columns], None where a side keeps its axes.

    Returns the names of the parameters that are matrices with two sides; the others are vectors.
    """
    matrices = gradients.sides(batch)
    rows = gradients(batch) if len(matrices) < len(gradients.names) else torch.empty(0)
    start = 0
    for name in gradients.names:
        size = gradients.model.get_parameter(name).numel()
        if name in matrices:
            found = [_second_moment(side, LARGEST_SIDE) for side in matrices[name]]
        else:
            dense = size <= LARGEST_DENSE
            found = [_second_moment(rows[:, start : start + size], LARGEST_DENSE) if dense else None, None]
        start += size
        before = sides.setdefault(name, [None, None])
        sides[name] = [new if old is None or new is None else old + new for old, new in zip(before, found)]
    return set(matrices)


def _second_moment(vectors: Tensor, largest: int) -> Tensor | None:
    """(size, size) from (count, size); None above the largest size."""
    return vectors.T @ vectors if vectors.shape[1] <= largest else None
