"""One step of training of a ResNet-9 by kernels of our own, around cuDNN's convolutions. Imported on CUDA only.

step = FusedStep(model, data, recipe, parameters, momenta, num_biases)
step.read_weights()         # whenever they were changed by anybody else
step(plan, factor)
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrain.models.resnet9 import ConvGroup, ResNet9
from retrain.models.resnet9_gradient_kernels import trained_pool_norm_gelu
from retrain.models.resnet9_head_kernel import head_gradients
from retrain.models.resnet9_input_kernel import filters_for, whitened_batch
from retrain.models.resnet9_update_kernel import Rates, update_parameters

if TYPE_CHECKING:
    from retrain.models.resnet9_training import Recipe, TrainingImages


class FusedStep:
    """Holds copies of the convolutions' weights in the precision that they compute in, as the update leaves them."""

    def __init__(
        self,
        model: ResNet9,
        data: "TrainingImages",
        recipe: "Recipe",
        parameters: Sequence[Tensor],
        momenta: Sequence[Tensor],
        num_biases: int,
    ):
        """`parameters`: the biases of norms first, of which there are `num_biases`; `momenta` go with them."""
        self.model, self.data, self.recipe = model, data, recipe
        self.parameters, self.momenta, self.num_biases = parameters, momenta, num_biases
        self.filters = filters_for(model.whiten, data.dtype)
        self.copies = [self._copy(p) if p.dim() == 4 else p for p in parameters]
        self.copy_of = {id(p): copy for p, copy in zip(parameters, self.copies, strict=True)}

    def _copy(self, weight: Tensor) -> Tensor:
        copy = weight.detach().to(self.data.dtype, memory_format=torch.channels_last)
        return copy.requires_grad_()

    @torch.no_grad()
    def read_weights(self) -> None:
        """Bring the copies up to date."""
        kept = [(copy, p) for copy, p in zip(self.copies, self.parameters, strict=True) if copy is not p]
        torch._foreach_copy_([copy for copy, _ in kept], [p.detach() for _, p in kept])
        self.filters.copy_(filters_for(self.model.whiten, self.data.dtype))

    def __call__(self, plan: Tensor, factor: Tensor) -> None:
        """`plan` is (3, batch), `factor` () scales the learning rate."""
        model, data, recipe = self.model, self.data, self.recipe
        bias = model.whiten.bias
        assert bias is not None
        whitened = whitened_batch(data.images, plan, data.pixel_table, self.filters, bias.detach())
        hidden = self.last_hidden(whitened)
        hidden_gradient, head_gradient = head_gradients(
            hidden.detach(), model.head.weight.detach(), plan[0], data.labels, model.scale, recipe.label_smoothing
        )
        wanted = [copy for copy in self.copies if copy is not model.head.weight]
        found = iter(torch.autograd.grad(hidden, wanted, hidden_gradient))
        gradients = [head_gradient if copy is model.head.weight else next(found) for copy in self.copies]
        bias_step = recipe.step_size * recipe.bias_scaler
        update_parameters(
            self.parameters,
            self.momenta,
            [_laid_out_as(p, gradient) for p, gradient in zip(self.parameters, gradients, strict=True)],
            self.copies,
            factor,
            recipe.momentum,
            self.num_biases,
            # Decay acts on the weights at step_decay a step whatever the group's rate, hence the division.
            Rates(bias_step, recipe.step_decay / bias_step),
            Rates(recipe.step_size, recipe.step_decay / recipe.step_size),
        )

    def last_hidden(self, whitened: Tensor) -> Tensor:
        """What the last group makes of a batch: (batch, widths[-1], height, width)."""
        hidden = whitened
        for group in self.model.groups:
            assert isinstance(group, ConvGroup)
            pool = isinstance(group.pool, nn.MaxPool2d)
            hidden = trained_pool_norm_gelu(self._convolved(hidden, group.conv1), group.norm1, pool)
            hidden = trained_pool_norm_gelu(self._convolved(hidden, group.conv2), group.norm2, False)
        return hidden

    def _convolved(self, hidden: Tensor, convolution: nn.Conv2d) -> Tensor:
        return F.conv2d(hidden, self.copy_of[id(convolution.weight)], padding=1)


def _laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
