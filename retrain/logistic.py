"""A logistic regression on small digits, fitted exactly: what leaving an example out does is known to the last digit.

    python -m bench.evaluations leave_one_out --task retrain.logistic:LogisticDigits

scikit-learn's digits averaged to 4x4 pixels, one linear layer, cross-entropy summed over the examples plus a fixed
ridge, minimised by Newton's method in float64. Neither initial weights nor order play a part: retraining has no noise,
the ceiling of every question is 1, and influence functions are exact but for the step from a derivative to a removal.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from retrain.examples import Examples, Indices
from retrain.task import Task

CLASSES, SIDE = 10, 4
_SHUFFLE = 0  # as the task digits shuffles them


@dataclass(frozen=True, kw_only=True)
class LogisticDigits(Task):
    """`exact` minimises the sum of losses plus ridge / 2 times the squared weights."""

    version: ClassVar[int] = 1
    protocols: ClassVar[tuple[str, ...]] = ("exact",)
    cpu_threads: ClassVar[int] = 1

    num_train: int = 300
    num_queries: int = 125
    ridge: float = 1.0
    tolerance: float = 1e-9  # of the objective's gradient

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_train < 2 or self.num_queries < 5 or self.num_train + self.num_queries > 1797:
            raise ValueError(
                f"num_train is {self.num_train} and num_queries {self.num_queries}; expected two and five or more, "
                "1,797 images in all"
            )
        if not self.ridge > 0:
            raise ValueError(f"ridge is {self.ridge}; expected more than 0, or separable classes have no minimum")

    @cached_property
    def _images_and_labels(self) -> tuple[Tensor, Tensor]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = np.random.default_rng(_SHUFFLE).permutation(len(digits.target))
        images = torch.from_numpy(digits.images[order]).float().unfold(1, 2, 2).unfold(2, 2, 2).mean((3, 4)) / 16
        return (images - images.mean()).flatten(1) / images.std(), torch.from_numpy(digits.target[order]).long()

    def load_train_data(self) -> Examples:
        images, labels = self._images_and_labels
        return Examples(images[: self.num_train], labels[: self.num_train])

    def load_query_data(self) -> Examples:
        images, labels = self._images_and_labels
        chosen = slice(self.num_train, self.num_train + self.num_queries)
        return Examples(images[chosen], labels[chosen])

    def build_model(self, seed: int) -> nn.Linear:
        model = nn.Linear(SIDE * SIDE, CLASSES)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        return model

    def train(self, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        data = self.train_data.select(indices)
        inputs = torch.cat([data.inputs, torch.ones(len(data), 1)], dim=1).double()
        weights = newton(inputs, data.targets, self.ridge, self.tolerance)
        model = self.build_model(init_seed)
        with torch.no_grad():
            model.weight.copy_(weights[:, :-1])
            model.bias.copy_(weights[:, -1])
        return model.to(device).eval()


def newton(inputs: Tensor, targets: Tensor, ridge: float, tolerance: float) -> Tensor:
    """(classes, features): the minimiser of summed cross-entropy + ridge / 2 |weights|^2; strictly convex."""
    features = inputs.shape[1]
    onehot = torch.eye(CLASSES, dtype=torch.float64)[targets]
    weights = torch.zeros(CLASSES, features, dtype=torch.float64)

    def objective(at: Tensor) -> Tensor:
        logits = inputs @ at.T
        return (logits.logsumexp(1) - logits.gather(1, targets[:, None])[:, 0]).sum() + 0.5 * ridge * at.square().sum()

    for _ in range(100):
        probabilities = (inputs @ weights.T).softmax(1)
        gradient = (probabilities - onehot).T @ inputs + ridge * weights
        if float(gradient.abs().max()) < tolerance:
            return weights
        root = probabilities.sqrt()
        # The Hessian of every example is (diag(p) - p p^T) x (input input^T).
        outer = torch.einsum("nc,nf->ncf", probabilities, inputs).flatten(1)
        hessian = -outer.T @ outer + ridge * torch.eye(CLASSES * features, dtype=torch.float64)
        for label in range(CLASSES):
            scaled = root[:, label, None] * inputs
            place = slice(label * features, (label + 1) * features)
            hessian[place, place] += scaled.T @ scaled
        step = torch.linalg.solve(hessian, gradient.flatten()).reshape(CLASSES, features)
        length, before = 1.0, float(objective(weights))
        while float(objective(weights - length * step)) > before + 1e-12 * abs(before) and length > 1e-6:
            length *= 0.5
        weights = weights - length * step
    raise RuntimeError(f"Newton's method did not reach a gradient of {tolerance:g} in 100 steps; raise the ridge")
