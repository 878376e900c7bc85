"""One parameter's per-example gradients as the layer gives them: outer products, not yet multiplied out.

    piece.matrices(left, right)     # (batch, rows, columns): left^T G right of every example's gradient G
    piece.moments()                 # sums over examples and positions of the outer products of either side: K-FAC's
    piece.gradient_moments()        # sums over examples of G G^T and G^T G: Shampoo's
    piece.squares(left, right)      # (rows, columns): the sum over examples of the squares of `matrices`

A linear layer's gradient of one example is the sum over positions of (gradient of its output) x (its input). Rotated
into a basis it costs least when a side with fewer positions than the other side has entries is turned before the
product: 49 positions and 256 x 2304 numbers make that six times cheaper than turning the product.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
LARGEST_SIDE = 8192  # of a matrix whose eigenvectors are computed
LARGEST_DENSE = 1024  # numbers of a parameter without Kronecker structure that gets its whole matrix

Moments = tuple[Tensor | None, Tensor | None]  # of the rows' and of the columns' side; None: it keeps its own axes


class Piece(Protocol):
    @property
    def shape(self) -> tuple[int, int]: ...
    def matrices(self, left: Tensor | None = None, right: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """(batch, rows, columns) float32, written to `out` where there is one."""
        ...

    def moments(self, columns_too: bool = True) -> Moments: ...
    def gradient_moments(self) -> Moments: ...
    def squares(self, left: Tensor | None, right: Tensor | None) -> Tensor: ...


@dataclass
class Outer:
    """A weight that a layer applies at every position: rows are its outputs, columns its inputs."""

    gradient: Tensor  # (batch, positions, rows)
    inputs: Tensor  # (batch, positions, columns)

    @property
    def shape(self) -> tuple[int, int]:
        return self.gradient.shape[-1], self.inputs.shape[-1]

    def with_bias(self) -> "Outer":
        """The bias as one more column, whose input is always one."""
        return Outer(self.gradient, F.pad(self.inputs, (0, 1), value=1.0))

    def _sides(self, left: Tensor | None, right: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Both sides, turned where that is cheaper now, and what is left to turn afterwards."""
        gradient, inputs = self.gradient, self.inputs
        positions, (rows, columns) = gradient.shape[1], self.shape
        if left is not None and positions <= columns:
            gradient, left = gradient.float() @ left, None
        if right is not None and positions <= rows:
            inputs, right = inputs.float() @ right, None
        return gradient, inputs, left, right

    def matrices(self, left: Tensor | None = None, right: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        gradient, inputs, left, right = self._sides(left, right)
        direct = out if left is None and right is None and gradient.dtype == inputs.dtype == torch.float32 else None
        if gradient.shape[1] == 1:
            found = torch.mul(gradient.transpose(1, 2), inputs, out=direct)
        else:
            found = torch.bmm(gradient.transpose(1, 2), inputs.to(gradient.dtype), out=direct)
        return found if direct is not None else _finished(found, left, right, out)

    def moments(self, columns_too: bool = True) -> Moments:
        return _second_moment(self.gradient), _second_moment(self.inputs) if columns_too else None

    def gradient_moments(self) -> Moments:
        """By the positions' inner products where these are few, at the cost of `moments`: G^T G = X^T (D D^T) X."""
        if 2 * self.gradient.shape[1] > min(self.shape):
            return Whole(self.matrices()).gradient_moments()
        gradient, inputs = self.gradient.float(), self.inputs.float()
        products = [side @ side.transpose(1, 2) for side in (inputs, gradient)]
        return _second_moment(gradient, products[0]), _second_moment(inputs, products[1])

    def squares(self, left: Tensor | None, right: Tensor | None) -> Tensor:
        if self.gradient.shape[1] == 1:
            gradient, inputs, _, _ = self._sides(left, right)
            return gradient[:, 0].float().square().T @ inputs[:, 0].float().square()
        return _sum_of_squares(self.matrices(left, right))


@dataclass
class Scattered:
    """An embedding: each position adds its gradient to the row that it looked up. Rows keep their own axes."""

    gradient: Tensor  # (batch, positions, columns)
    index: Tensor  # (batch, positions)
    rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.gradient.shape[-1]

    def matrices(self, left: Tensor | None = None, right: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        gradient = self.gradient.float()
        gradient = gradient if right is None else gradient @ right
        if out is None:
            out = gradient.new_empty(len(gradient), *self.shape)
        return out.zero_().scatter_add_(1, self.index[:, :, None].expand_as(gradient), gradient)

    def moments(self, columns_too: bool = True) -> Moments:
        return None, _second_moment(self.gradient)

    def gradient_moments(self) -> Moments:
        return None, _second_moment(self.gradient.float(), (self.index[:, :, None] == self.index[:, None]).float())

    def squares(self, left: Tensor | None, right: Tensor | None) -> Tensor:
        return _sum_of_squares(self.matrices(left, right))


@dataclass
class Whole:
    """Any other parameter, multiplied out: a vector (columns = 1), or a matrix where the layer is one."""

    values: Tensor  # (batch, rows, columns)

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[1], self.values.shape[2]

    def matrices(self, left: Tensor | None = None, right: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return _finished(self.values, left, right, out)

    def moments(self, columns_too: bool = True) -> Moments:
        values = self.values.float()
        if values.shape[2] == 1:
            return (_second_moment(values.transpose(1, 2)) if values.shape[1] <= LARGEST_DENSE else None), None
        return _second_moment(values.transpose(1, 2)), _second_moment(values)

    def gradient_moments(self) -> Moments:
        return self.moments()

    def squares(self, left: Tensor | None, right: Tensor | None) -> Tensor:
        return _sum_of_squares(self.matrices(left, right))


def _finished(values: Tensor, left: Tensor | None, right: Tensor | None, out: Tensor | None) -> Tensor:
    values = values.float()
    if left is not None:
        values = left.T @ values
    if right is not None:
        values = values @ right
    return values if out is None else out.copy_(values)


def _second_moment(vectors: Tensor, between: Tensor | None = None) -> Tensor | None:
    """(size, size) from (..., size), summed; None above the largest size. `between` weighs pairs of positions."""
    size = vectors.shape[-1]
    if size > LARGEST_SIDE:
        return None
    others = vectors if between is None else between @ vectors
    return vectors.reshape(-1, size).float().T @ others.reshape(-1, size).float()


def _sum_of_squares(matrices: Tensor) -> Tensor:
    if matrices.device.type == "cuda":
        return torch.linalg.vector_norm(matrices, dim=0).square()  # one pass over them
    return matrices.square().sum(0)


# ---- a layer's own pieces ----


def patches(module: Any, inputs: Tensor) -> Tensor:
    """(batch, positions, in_channels * kernel) of a convolution, in the order of the weight's own flattening."""
    if inputs.is_cuda and HAS_TRITON:  # torch's unfold starts a kernel an image there
        from baselines.support import row_kernels

        return row_kernels.patches(module, inputs)
    return F.unfold(inputs, module.kernel_size, module.dilation, module.padding, module.stride).transpose(1, 2)
