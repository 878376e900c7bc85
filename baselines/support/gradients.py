"""Per-example gradients of a scalar of each example (its loss, or TRAK's model output), exactly and fast.

    gradients = PerExampleGradients(model, task.loss_function.per_example)
    gradients((inputs, targets))          # (batch, d) float32

Layers whose weight gradient is an outer product over positions (linear, convolution, embedding, normalisation) get
theirs from one ordinary backward pass: hooks keep the layer's input and output gradient, and a batched matrix product
gives every example's own weight gradient. A backward pass of the summed loss is enough because no layer mixes
examples in eval mode. A parameter that several layers share has the sum of theirs. Where a layer is of any other
kind, or sees something else than one row an example (position embeddings), the whole model falls back to `vmap(grad)`.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrain.examples import Batch
from retrain.losses import mean_over_tokens

Function = Callable[[Tensor, Tensor], Tensor]  # outputs, targets -> (batch,) or (batch, tokens)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


# Each rule: (module, its input, gradient of its output) -> {parameter name: (batch, *shape)}


def _linear(module: Any, inputs: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    inputs, gradient = inputs.flatten(1, -2), gradient.flatten(1, -2)  # (batch, positions, features)
    return {"weight": gradient.transpose(1, 2) @ inputs, "bias": gradient.sum(1)}


def _linear_vector(module: Any, inputs: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    return {"weight": gradient[:, :, None] * inputs[:, None, :], "bias": gradient}


def _convolution(module: Any, inputs: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    weight = gradient.flatten(2) @ _patches(module, inputs).transpose(1, 2)
    return {"weight": weight.reshape(len(inputs), *module.weight.shape), "bias": gradient.flatten(2).sum(2)}


def _patches(module: Any, inputs: Tensor) -> Tensor:
    """(batch, in_channels * kernel, positions), in the order of the weight's own flattening."""
    if isinstance(module.padding, str):
        raise NotImplementedError("string padding")
    return F.unfold(inputs, module.kernel_size, module.dilation, module.padding, module.stride)


def _batch_norm(module: Any, inputs: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    shape = (1, -1) + (1,) * (inputs.dim() - 2)
    normalised = (inputs - module.running_mean.view(shape)) * (module.running_var.view(shape) + module.eps).rsqrt()
    positions = tuple(range(2, inputs.dim()))
    weight, bias = gradient * normalised, gradient
    return (
        {"weight": weight.sum(positions), "bias": bias.sum(positions)}
        if positions
        else {"weight": weight, "bias": bias}
    )


def _layer_norm(module: Any, inputs: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    normalised = F.layer_norm(inputs, module.normalized_shape, eps=module.eps)
    positions = tuple(range(1, inputs.dim() - len(module.normalized_shape)))
    weight, bias = gradient * normalised, gradient
    return (
        {"weight": weight.sum(positions), "bias": bias.sum(positions)}
        if positions
        else {"weight": weight, "bias": bias}
    )


def _embedding(module: Any, inputs: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    weight = gradient.new_zeros(len(inputs), *module.weight.shape)
    if module.padding_idx is not None:
        gradient = gradient * (inputs != module.padding_idx).unsqueeze(-1)
    index = inputs.flatten(1)[:, :, None].expand(-1, -1, gradient.shape[-1])
    return {"weight": weight.scatter_add_(1, index, gradient.flatten(1, -2))}


def _rule(module: nn.Module, inputs: Tensor) -> Callable[..., dict[str, Tensor]] | None:
    if type(module) is nn.Linear:
        return _linear_vector if inputs.dim() == 2 else _linear
    if type(module) is nn.Conv2d and module.groups == 1 and module.padding_mode == "zeros":
        return None if isinstance(module.padding, str) else _convolution
    if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d) and not module.training and module.track_running_stats:
        return _batch_norm
    if type(module) is nn.LayerNorm:
        return _layer_norm
    if type(module) is nn.Embedding and not module.scale_grad_by_freq and module.max_norm is None:
        return _embedding
    return None


def _owners(model: nn.Module, names: list[str]) -> dict[str, tuple[nn.Module, dict[str, str]]]:
    """Module name -> (module, {its own name of a wanted parameter: the name it was wanted by})."""
    wanted = {id(model.get_parameter(name)): name for name in names}
    owners: dict[str, tuple[nn.Module, dict[str, str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in wanted:
            path, _, leaf = name.rpartition(".")
            owners.setdefault(path, (model.get_submodule(path), {}))[1][leaf] = wanted[id(parameter)]
    return owners


class _Unsupported(Exception):
    pass


class PerExampleGradients:
    """Per-example gradients over chosen parameters, flattened and joined in the order of `names`."""

    def __init__(self, model: nn.Module, function: Function, names: list[str] | None = None):
        self.model, self.function = model, function
        self.names = list(trainable_parameters(model)) if names is None else names
        self.dimension = sum(model.get_parameter(name).numel() for name in self.names)
        self._owners = _owners(model, self.names)
        self._use_hooks = True

    def __call__(self, batch: Batch) -> Tensor:
        """(batch, dimension) float32."""
        if self._use_hooks:
            try:
                return self._by_hooks(batch)
            except _Unsupported:
                self._use_hooks = False
        return self._by_vmap(batch)

    def sides(self, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Both factors of every gradient that is a sum of outer products, by the weight's name.

        (examples x positions, outputs) gradients of a layer's outputs, and (examples x positions, inputs) of what it
        read, in the order of the weight's rows and columns. Linear and convolution layers only, not those that share
        their weight, and none of them where the model's gradients cannot be had from hooks.
        """
        try:
            tensors = self._layer_tensors(batch)
        except _Unsupported:
            return {}
        users = Counter(name for _, leaves in self._owners.values() for name in leaves.values())
        found = {}
        for path, (inputs, gradient) in tensors.items():
            module, leaves = self._owners[path]
            if "weight" not in leaves or _rule(module, inputs) not in (_linear, _linear_vector, _convolution):
                continue
            name = leaves["weight"]
            if users[name] > 1:
                continue
            if _rule(module, inputs) is _convolution:
                inputs = _patches(module, inputs).transpose(1, 2)
                gradient = gradient.flatten(2).transpose(1, 2)
            found[name] = gradient.flatten(0, -2).float(), inputs.flatten(0, -2).float()
        return found

    def _by_hooks(self, batch: Batch) -> Tensor:
        parts: dict[str, Tensor] = {}
        for path, (inputs, gradient) in self._layer_tensors(batch).items():
            module, leaves = self._owners[path]
            rule = _rule(module, inputs)
            assert rule is not None
            by_leaf = rule(module, inputs, gradient)
            for leaf, name in leaves.items():
                part = by_leaf[leaf].flatten(1)
                parts[name] = parts[name] + part if name in parts else part
        return torch.cat([parts[name] for name in self.names], dim=1).float()

    def _layer_tensors(self, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """By module: what it read, and the gradient of the summed values in what it gave."""
        inputs_of: dict[str, Tensor] = {}
        outputs_of: dict[str, Tensor] = {}
        handles = []
        for path, (module, _) in self._owners.items():

            def keep(module: nn.Module, inputs: Any, output: Any, path: str = path) -> None:
                # One that runs twice, on more than one tensor, or on what examples share has no outer product each.
                if path in inputs_of or not isinstance(output, Tensor) or _rule(module, inputs[0]) is None:
                    raise _Unsupported
                if inputs[0].dim() < 2 or len(inputs[0]) != len(batch[0]):
                    raise _Unsupported
                inputs_of[path], outputs_of[path] = inputs[0].detach(), output

            handles.append(module.register_forward_hook(keep))
        try:
            with torch.enable_grad():
                values = mean_over_tokens(self.function(self.model(batch[0]), batch[1]))
                paths = list(outputs_of)
                if len(paths) < len(self._owners):
                    raise _Unsupported
                gradients = torch.autograd.grad(values.sum(), [outputs_of[path] for path in paths])
        finally:
            for handle in handles:
                handle.remove()
        return {path: (inputs_of[path], gradient) for path, gradient in zip(paths, gradients)}

    def _by_vmap(self, batch: Batch) -> Tensor:
        frozen = {name: value.detach() for name, value in self.model.named_parameters()}
        buffers = dict(self.model.named_buffers())
        wanted = {name: frozen[name] for name in self.names}

        def value_of(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
            outputs = torch.func.functional_call(self.model, (frozen | parameters, buffers), (inputs[None],))
            return mean_over_tokens(self.function(outputs, targets[None])).sum()

        gradients = torch.func.vmap(torch.func.grad(value_of), in_dims=(None, 0, 0))(wanted, *batch)
        return torch.cat([gradients[name].flatten(1) for name in self.names], dim=1).float()
