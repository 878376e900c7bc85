"""The two losses of this suite, each with what an attribution method may ask of it beyond its value.

EK-FAC samples targets from the model's own predictive distribution; TRAK needs a scalar model output and the slope of
the loss in it. Both follow from the loss, so they live beside it and an adapter never has to know the task.
"""

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # a target that does not count (padding), as torch's cross-entropy has it


def mean_over_tokens(values: Tensor) -> Tensor:
    """(batch,) from (batch,) or (batch, tokens), whose ignored tokens are zeros that count in the mean."""
    return values if values.dim() == 1 else values.flatten(1).mean(1)


def keep_ignored(sampled: Tensor, targets: Tensor) -> Tensor:
    """Sampled labels, but none where the true target does not count."""
    return sampled if targets.is_floating_point() else sampled.masked_fill(targets == IGNORED, IGNORED)


class Loss(Protocol):
    """What a task's loss offers. `outputs` come from the model; shapes are given for a batch."""

    def per_example(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood up to a constant: (batch,), or (batch, tokens) for sequences."""
        ...

    def sample_targets(self, outputs: Tensor) -> Tensor:
        """Targets drawn from the model's predictive distribution, from torch's global (seeded) generator."""
        ...

    def model_output(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """TRAK's scalar model output f, (batch,)."""
        ...

    def output_slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """d loss / d f of TRAK's scalar, (batch,)."""
        ...


class CrossEntropy:
    """Classification, (batch, classes) with labels (batch,), or next-token prediction, (batch, tokens, vocabulary).

    A target of -100 is ignored: its loss is 0.
    """

    def per_example(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs.float().flatten(0, -2), targets.flatten(), reduction="none")
        return losses.reshape(targets.shape)

    def sample_targets(self, outputs: Tensor) -> Tensor:
        probabilities = outputs.detach().float().softmax(-1)
        drawn = torch.multinomial(probabilities.flatten(0, -2), num_samples=1)
        return drawn.reshape(outputs.shape[:-1])

    def all_targets(self, outputs: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Every class (batch,) with its probability (batch,): what `sample_targets` draws from; not for sequences."""
        probabilities = outputs.detach().float().softmax(-1)
        for label in range(probabilities.shape[-1]):
            share = probabilities[:, label]
            yield torch.full_like(share, label, dtype=torch.long), share

    def _margins(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """log p / (1 - p) of the correct class."""
        index = targets.clamp(min=0).unsqueeze(-1)
        correct = outputs.gather(-1, index).squeeze(-1)
        others = outputs.scatter(-1, index, -torch.inf)
        return correct - others.logsumexp(-1)

    def model_output(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # A sequence's output is the mean of its tokens' margins, as its loss is the mean of its tokens' losses.
        return mean_over_tokens(self._margins(outputs, targets) * (targets != IGNORED))

    def output_slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # loss = log(1 + exp(-f)), so d loss / d f = -(1 - p); a sequence takes the mean over its tokens.
        return mean_over_tokens(-torch.sigmoid(-self._margins(outputs, targets)) * (targets != IGNORED))


class SquaredError:
    """Half the squared error of one real output, (batch, 1) or (batch,): a Gaussian likelihood of unit variance."""

    def per_example(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (outputs.reshape(targets.shape) - targets).square()

    def sample_targets(self, outputs: Tensor) -> Tensor:
        means = outputs.detach().reshape(len(outputs))
        return means + torch.randn_like(means)

    def all_targets(self, outputs: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """One target at a distance of one stands for them all: the Fisher is that of its gradient."""
        means = outputs.detach().reshape(len(outputs))
        yield means - 1, torch.ones_like(means)

    def model_output(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.reshape(targets.shape)

    def output_slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.reshape(targets.shape) - targets
