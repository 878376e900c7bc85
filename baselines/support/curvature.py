"""The loss's curvature as a Kronecker-factored picture, and coordinates in which a Gaussian of that shape is round.

    blocks = fit_curvature(gradients, loss, train, ...)           # gradients: PerExampleGradients; a block a group
    GradientsInBasis(gradients, blocks)((inputs, targets))        # (batch, dimension), in the blocks' eigenvectors
    metric = Metric(blocks, damping=0.1)
    metric.to_weights(coordinates), metric.of_gradient(gradient)  # a tensor a parameter, in the parameters' order

The curvature is the Fisher information with labels sampled from the model (for cross-entropy the Gauss-Newton matrix
in expectation; with `exact` every label counts with its probability instead), eigenvalue-corrected as EK-FAC's: a
linear or convolution weight has eigenvectors on its output and on its input side, an embedding on its output side, and
the eigenvalues are the mean squares of per-example gradients in that basis. A small parameter of any other kind (a
bias) has its whole matrix; a side or a parameter too large for that stays in its own axes.

With eigenvectors Q and eigenvalues h, a displacement is Q s z, s = (1 + h / damping)^-1/2. An isotropic Gaussian of
precision gamma in the coordinates z has precision gamma (1 + H / damping) in the weights: gamma where the loss is flat,
more where it is curved.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baselines.support.gradients import Basis, Labels, PerExampleGradients, write_rows
from baselines.support.pieces import Outer
from baselines.support.transfer import resident
from retrain.errors import UsageError
from retrain.examples import Batch, Examples
from retrain.losses import Loss, keep_ignored
from retrain.resume import NullResumeState, ResumeState

logger = logging.getLogger("tda-bench")

SIDES, SIZES = 0, 1  # the two passes of a fit, which draw labels of their own
DECOMPOSED_AT_ONCE = 6
_LABEL_STREAM = 41


@dataclass
class Block:
    """One group of parameters as a matrix: eigenvectors (columns) of either side, None for the axes themselves."""

    shape: torch.Size
    eigenvalues: Tensor  # (rows, columns)
    left: Tensor | None = None  # (rows, rows)
    right: Tensor | None = None  # (columns, columns)

    @property
    def basis(self) -> Basis:
        return self.left, self.right

    def to_basis(self, values: Tensor) -> Tensor:
        """(..., rows, columns) from the parameter's axes into the eigenvectors' basis."""
        if self.left is not None:
            values = self.left.T @ values
        return values if self.right is None else values @ self.right

    def from_basis(self, values: Tensor) -> Tensor:
        if self.left is not None:
            values = self.left @ values
        return values if self.right is None else values @ self.right.T


def packed_blocks(blocks: list[Block]) -> dict[str, Tensor]:
    """As arrays to keep."""
    parts = [(k, name, getattr(b, name)) for k, b in enumerate(blocks) for name in ("eigenvalues", "left", "right")]
    return {f"{k}.{name}": value.cpu() for k, name, value in parts if value is not None}


def unpacked_blocks(arrays: Mapping[str, Tensor], device: torch.device) -> list[Block]:
    moved = {name: value.to(device) for name, value in arrays.items()}
    numbers = sorted({int(name.partition(".")[0]) for name in moved})
    return [
        Block(size.shape, size, moved.get(f"{k}.left"), moved.get(f"{k}.right"))
        for k in numbers
        for size in [moved[f"{k}.eigenvalues"]]
    ]


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


class GradientsInBasis:
    """Per-example gradients in the blocks' eigenvectors: a metric that they diagonalise is a weight a number."""

    def __init__(self, gradients: PerExampleGradients, blocks: list[Block]):
        self.gradients, self.blocks = gradients, blocks
        self.dimension = sum(block.eigenvalues.numel() for block in blocks)

    def __call__(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        """(batch, dimension) float32, written to `out` where there is one."""
        inputs, targets = batch
        if out is None:
            out = torch.empty(len(targets), self.dimension, device=targets.device)
        (pieces,) = self.gradients.each(inputs, lambda _: [(targets, None)])
        return write_rows(pieces, [block.basis for block in self.blocks], out)


class GradientsInMetric(GradientsInBasis):
    """Per-example gradients in a metric's coordinates: their inner products are g^T (1 + H / damping)^-1 g'."""

    def __init__(self, gradients: PerExampleGradients, metric: Metric):
        super().__init__(gradients, metric.blocks)
        self.metric = metric

    def __call__(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        rows = super().__call__(batch, out)
        for scale, part in zip(self.metric.scales, rows.split(self.metric.sizes, dim=1), strict=True):
            part *= scale.flatten()
        return rows


# ---- labels ----


@contextlib.contextmanager
def seeded_labels(device: torch.device, seed: int, stage: int, start: int) -> Iterator[None]:
    """Labels drawn here depend on the seed, the pass and the batch's first example: a resumed fit draws the same."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int(np.random.SeedSequence([seed, stage, start, _LABEL_STREAM]).generate_state(1)[0]))
        yield


def check_exact(loss: Loss, examples: Examples) -> None:
    """Refuses what has no list of all labels."""
    if not hasattr(loss, "all_targets"):
        raise UsageError(f"the loss {type(loss).__name__} has no all_targets, so only labels=sampled works here")
    if examples.targets.dim() != 1:
        raise UsageError("labels=exact goes through every label of an example; of sequences take labels=sampled")


def labels_for(loss: Loss, targets: Tensor, exact: bool, seeded: Callable[[], Any]) -> Labels:
    def choose(outputs: Tensor) -> Iterable[tuple[Tensor, Tensor | None]]:
        if exact:
            return [(label, share.sqrt()) for label, share in loss.all_targets(outputs)]  # type: ignore[attr-defined]
        with seeded():
            return [(keep_ignored(loss.sample_targets(outputs).to(targets.dtype), targets), None)]

    return choose


# ---- the fit ----


@dataclass
class _Sums:
    """What the passes add up, one of each a group."""

    left: list[Tensor | None]
    right: list[Tensor | None]
    sizes: list[Tensor]

    def arrays(self) -> dict[str, np.ndarray]:
        parts = [(name, k, value) for name in ("left", "right", "sizes") for k, value in enumerate(getattr(self, name))]
        return {f"{name}.{k}": value.cpu().numpy() for name, k, value in parts if value is not None}

    @classmethod
    def of(cls, arrays: dict[str, np.ndarray], count: int, device: torch.device) -> "_Sums":
        def get(name: str, k: int) -> Tensor | None:
            value = arrays.get(f"{name}.{k}")
            return None if value is None else torch.from_numpy(np.array(value)).to(device)

        sizes = [size for k in range(count) if (size := get("sizes", k)) is not None]
        return cls([get("left", k) for k in range(count)], [get("right", k) for k in range(count)], sizes)


@torch.no_grad()
def fit_curvature(
    gradients: PerExampleGradients | Sequence[PerExampleGradients],
    loss: Loss,
    examples: Examples,
    batch_size: int,
    device: torch.device,
    progress: Callable[..., Iterable] = lambda items, **_: items,
    *,
    seed: int | None = None,
    exact: bool = False,
    token_scale: bool = True,
    gradient_sides: bool = False,
    work: ResumeState | None = None,
    description: str = "curvature",
) -> list[Block]:
    """One block a group of `gradients`, in their order; of several models, of their mean curvature.

    Two passes: the sides' second moments, then the eigenvalues in their common basis. Labels are drawn batch by batch,
    each from a stream of its own where there is a `seed`, otherwise from torch's global generator. Both passes resume
    from `work`. Without `token_scale` a sequence's curvature is the second moment of its gradients, as kronfluence has
    it; the mean of its tokens' losses has tokens times as much, because their labels are independent. With
    `gradient_sides` the sides are Shampoo's, the second moments of whole gradients instead of their factors'.
    """
    if exact:
        check_exact(loss, examples)
    work = NullResumeState() if work is None else work
    models = [gradients] if isinstance(gradients, PerExampleGradients) else list(gradients)
    stage, first, sums, groups = SIDES, 0, _Sums([], [], []), models[0].groups
    if seed is not None and (saved := work.load("curvature")) is not None:
        stage, first = saved[1]["stage"], saved[1]["next"]
        sums = _Sums.of(saved[0], len(groups), device)
    examples = resident(examples, device)
    starts = range(0, len(examples), batch_size)
    while stage <= SIZES:
        if stage == SIZES and not sums.sizes:
            found = _all_eigenvectors([*sums.left, *sums.right], device)
            sums.left, sums.right = found[: len(groups)], found[len(groups) :]
        what = "its size" if stage == SIZES else "its sides"
        for start in progress([s for s in starts if s >= first], description=f"{description}: {what}"):
            chosen = slice(start, start + batch_size)
            inputs, targets = examples.inputs[chosen].to(device), examples.targets[chosen].to(device)

            def seeded(stage: int = stage, start: int = start) -> Any:
                return contextlib.nullcontext() if seed is None else seeded_labels(device, seed, stage, start)

            for model in models:
                for number, pieces in enumerate(model.each(inputs, labels_for(loss, targets, exact, seeded))):
                    if stage == SIDES:
                        _add_sides(sums, pieces, number, gradient_sides)
                    else:
                        _add_sizes(sums, pieces)
            if seed is not None and work.due():
                work.save("curvature", sums.arrays(), {"stage": stage, "next": start + batch_size})
        stage, first = stage + 1, 0
    scale = (examples.targets[0].numel() if token_scale else 1) / (len(examples) * len(models))
    blocks = []
    for group, size, left, right in zip(groups, sums.sizes, sums.left, sums.right, strict=True):
        shape = models[0].model.get_parameter(group[0]).shape if len(group) == 1 else size.shape
        blocks.append(Block(shape, size * scale, left, right))
    return blocks


def _add_sides(sums: _Sums, pieces: list[Any], number: int, gradient_sides: bool) -> None:
    if not sums.left and not any(isinstance(piece, Outer) for piece in pieces):
        logger.warning("curvature: no layer's gradients come as outer products; its sides are those of the products")
    for k, piece in enumerate(pieces):
        left, right = piece.gradient_moments() if gradient_sides else piece.moments(columns_too=number == 0)
        if len(sums.left) == k:
            sums.left.append(left)
            sums.right.append(right)
        else:
            for sides, new in ((sums.left, left), (sums.right, right)):
                old = sides[k]
                if old is not None and new is not None:
                    old += new


def _add_sizes(sums: _Sums, pieces: list[Any]) -> None:
    for k, piece in enumerate(pieces):
        new = piece.squares(sums.left[k], sums.right[k])
        if len(sums.sizes) == k:
            sums.sizes.append(new)
        else:
            sums.sizes[k] += new


def _all_eigenvectors(moments: list[Tensor | None], device: torch.device) -> list[Tensor | None]:
    """Several at once on a GPU: one decomposition leaves most of it idle."""
    if device.type != "cuda":
        return [_eigenvectors(moment) for moment in moments]
    ours = torch.cuda.current_stream(device)

    def beside(moment: Tensor | None) -> Tensor | None:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(ours)
        with torch.cuda.stream(stream):
            found = _eigenvectors(moment)
        stream.synchronize()
        assert found is not None
        found.record_stream(ours)
        return found

    torch.linalg.eigh(torch.ones(1, 1, device=device))  # torch loads its library once, and not in several threads
    longest_first = sorted((-len(moment), k) for k, moment in enumerate(moments) if moment is not None)
    with ThreadPoolExecutor(DECOMPOSED_AT_ONCE) as pool:
        found = dict(zip([k for _, k in longest_first], pool.map(beside, [moments[k] for _, k in longest_first])))
    return [found.get(k) for k in range(len(moments))]


def _eigenvectors(moment: Tensor | None) -> Tensor | None:
    if moment is None:
        return None
    try:
        found = torch.linalg.eigh(moment).eigenvectors
    except torch.linalg.LinAlgError:  # of nearly equal eigenvalues, in float32
        found = torch.linalg.eigh(moment.double()).eigenvectors.float()
    return found.contiguous()  # as a kept one comes back: another layout would be other roundings
