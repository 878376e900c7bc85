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

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from baselines.support.gradients import PerExampleGradients
from retrain.examples import Examples
from retrain.losses import Loss

logger = logging.getLogger("tda-bench")

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
        return [
            block.from_basis(scale * values.reshape(scale.shape)).reshape(block.shape)
            for block, scale, values in zip(self.blocks, self.scales, coordinates, strict=True)
        ]

    def of_gradient(self, gradient: list[Tensor]) -> list[Tensor]:
        """The gradient in the coordinates, from that in the weights."""
        return [
            (scale * block.to_basis(values.float().reshape(scale.shape))).reshape(block.shape)
            for block, scale, values in zip(self.blocks, self.scales, gradient, strict=True)
        ]

    def of_rows(self, rows: Tensor) -> Tensor:
        """As `of_gradient`, for (batch, dimension) gradients, one a row, in place."""
        for block, scale, part in zip(self.blocks, self.scales, rows.split(self.sizes, dim=1), strict=True):
            part.copy_((scale * block.to_basis(part.reshape(len(rows), *scale.shape))).flatten(1))
        return rows


class GradientsInMetric:
    """Per-example gradients in a metric's coordinates: their inner products are g^T (1 + H / damping)^-1 g'."""

    def __init__(self, gradients: PerExampleGradients, metric: Metric):
        self.gradients, self.metric, self.dimension = gradients, metric, gradients.dimension

    def __call__(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.metric.of_rows(self.gradients(batch))


@torch.no_grad()
def fit_curvature(
    gradients: PerExampleGradients,
    loss: Loss,
    examples: Examples,
    batch_size: int,
    device: torch.device,
    progress: Callable[..., Iterable] = lambda items, **_: items,
) -> list[Block]:
    """One block a parameter, in the order of `gradients.names`; labels come from torch's global (seeded) generator.

    Two passes: the sides' second moments, then the eigenvalues in their common basis.
    """
    batches = [(inputs.to(device), targets.to(device)) for inputs, targets in examples.batches(batch_size)]
    sides = _second_moments(gradients, loss, progress(batches, description="bif: curvature, its sides"))
    blocks = []
    if not any(right is not None for side in sides.values() for right in side.moments[1:]):
        logger.warning("curvature: no layer's gradients come as outer products, so no parameter has Kronecker factors")
    for name in gradients.names:
        parameter = gradients.model.get_parameter(name)
        left, right = (None if side is None else torch.linalg.eigh(side).eigenvectors for side in sides[name].moments)
        eigenvalues = torch.zeros(parameter.numel(), device=device).view(sides[name].shape)
        blocks.append(Block(parameter.shape, eigenvalues, left, right))
    for batch in progress(batches, description="bif: curvature, its size"):
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


@dataclass
class _Sides:
    """A parameter as a matrix of this shape, and its sides' summed outer products; None where a side keeps its axes."""

    shape: tuple[int, int]
    moments: list[Tensor | None]

    def add(self, moments: list[Tensor | None]) -> None:
        self.moments = [
            None if old is None or new is None else old + new for old, new in zip(self.moments, moments, strict=True)
        ]


def _second_moments(
    gradients: PerExampleGradients, loss: Loss, batches: Iterable[tuple[Tensor, Tensor]]
) -> dict[str, _Sides]:
    """By parameter. A layer's weight is a matrix, of outputs by inputs; everything else is one long vector."""
    found: dict[str, _Sides] = {}
    sizes = {name: gradients.model.get_parameter(name).numel() for name in gradients.names}
    for batch in batches:
        batch = _with_sampled_labels(gradients, loss, batch)
        matrices = gradients.sides(batch)
        new = {
            name: _Sides((outputs.shape[1], inputs.shape[1]), [_second_moment(outputs), _second_moment(inputs)])
            for name, (outputs, inputs) in matrices.items()
        }
        vectors = [name for name in gradients.names if name not in matrices]
        small = [name for name in vectors if sizes[name] <= LARGEST_DENSE]
        new |= {name: _Sides((sizes[name], 1), [None, None]) for name in vectors}
        if small:
            rows = PerExampleGradients(gradients.model, gradients.function, small)(batch)
            for name, part in zip(small, rows.split([sizes[name] for name in small], dim=1), strict=True):
                new[name].moments[0] = _second_moment(part)
        for name, sides in new.items():
            if name in found:
                found[name].add(sides.moments)
            else:
                found[name] = sides
    return found


def _second_moment(vectors: Tensor) -> Tensor | None:
    """(size, size) from (count, size); None above the largest size."""
    return vectors.T @ vectors if vectors.shape[1] <= LARGEST_SIDE else None
