"""The kronecker localiser: coordinates in which a Gaussian shaped like the loss is round; fitted, kept, read back."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from baselines.method import Problem
from baselines.support.curvature import Block, Metric, fit_curvature
from baselines.support.gradients import PerExampleGradients

_KEPT = ("eigenvalues", "left", "right")  # of a block


def fit_localiser(
    gradients: PerExampleGradients, problem: Problem, damping: float, fit_examples: int, batch_size: int
) -> Metric:
    """From the curvature on random training examples (0: all) and sampled labels."""
    torch.manual_seed(problem.seed)  # as the harness does: per-token scores come without it
    count = min(fit_examples or len(problem.train), len(problem.train))
    chosen = np.random.default_rng(problem.seed).permutation(len(problem.train))[:count]
    loss, examples = problem.task.loss_function, problem.train.select(chosen)
    blocks = fit_curvature(gradients, loss, examples, batch_size, problem.device, problem.progress)
    return Metric(blocks, damping)


def packed_localiser(metric: Metric) -> dict[str, Tensor]:
    return {
        f"{number}.{name}": value.cpu()
        for number, block in enumerate(metric.blocks)
        for name in _KEPT
        if (value := getattr(block, name)) is not None
    }


def unpacked_localiser(
    arrays: Mapping[str, Tensor], shapes: Sequence[torch.Size], damping: float, device: torch.device
) -> Metric:
    """`shapes` are the sampled parameters', in their order."""
    blocks = []
    for number, shape in enumerate(shapes):
        kept = {name: arrays[f"{number}.{name}"].to(device) for name in _KEPT if f"{number}.{name}" in arrays}
        blocks.append(Block(shape, **kept))
    return Metric(blocks, damping)
