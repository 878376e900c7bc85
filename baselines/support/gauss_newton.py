"""Products with the Gauss-Newton matrix of the mean training loss, for many vectors at once.

    product = GaussNewton(model, loss, names, examples, device, batch_size)
    product(vectors)                # (k, dimension), one a row: (1/n) sum_i J_i^T H_i J_i v, by one pass over the data

J_i is the outputs' Jacobian in the parameters and H_i the loss's Hessian in the outputs, both of one example. A batch
of examples is one forward pass with tangents (J v, by forward-mode differentiation), H's product, and one backward pass
(J^T); on a GPU the k vectors run side by side.

`FisherProduct` has the same matrix from per-example gradients instead, in the eigenvectors of kfac's blocks: a batch is
two matrix products for all vectors together. Its labels are sampled from the model, or all of them by their
probability, which is the matrix itself. On a GPU this is the faster way for images and a few hundred vectors.
"""

from functools import partial

import torch
from torch import Tensor, nn

from baselines.support.curvature import GradientsInBasis, check_exact, labels_for, seeded_labels
from baselines.support.gradients import write_rows
from baselines.support.second_derivatives import twice_differentiable
from retrain.examples import Examples, Indices
from retrain.losses import Loss, mean_over_tokens


class GaussNewton:
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
    """Where labels are sampled, those of one `stream` stay the same from product to product."""

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
