"""Per-example gradients of a scalar of each example (its loss, or TRAK's model output), exactly and fast.

    gradients = PerExampleGradients(model, task.loss_function.per_example)
    gradients((inputs, targets))          # (batch, d) float32

Layers whose weight gradient is an outer product over positions (linear, convolution, embedding, normalisation) get
theirs from one ordinary backward pass: hooks keep the layer's input and output gradient, and a batched matrix product
gives every example's own weight gradient. A backward pass of the summed loss is enough because no layer mixes
examples in eval mode. A parameter that several layers share has the sum of theirs; a layer that runs once for all
examples (position embeddings) gets its output repeated, so that each example has a gradient of its own.

Where a layer is of any other kind, or sees something else than one row an example, the whole model falls back to
`vmap(grad)`; and where vmap cannot follow the model (control flow that looks at values, as for attention masks), to one
backward pass an example.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baselines.support.pieces import Outer, Piece, Scattered, Whole, patches
from retrain.errors import UsageError
from retrain.examples import Batch, Columns
from retrain.losses import mean_over_tokens

Function = Callable[[Tensor, Tensor], Tensor]  # outputs, targets -> (batch,) or (batch, tokens)
# From the model's outputs, the targets to differentiate at and what to multiply each example's gradient by.
Labels = Callable[[Tensor], Iterable[tuple[Tensor, Tensor | None]]]


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def matching_parameters(model: nn.Module, pattern: str, method: str) -> list[str]:
    """Names of the trainable parameters that the regular expression finds; all of them if it is empty."""
    try:
        names = [name for name in trainable_parameters(model) if re.search(pattern, name)]
    except re.error as error:
        raise UsageError(f'{method}.parameters is "{pattern}", which is no regular expression: {error}') from None
    if not names:
        raise UsageError(f'{method}.parameters is "{pattern}", which no trainable parameter\'s name matches')
    return names


# Each rule: (module, its input, gradient of its output, which parameter) -> Piece


def _linear(module: Any, inputs: Tensor, gradient: Tensor, leaf: str) -> Piece:
    # (batch, features) counts as one position.
    inputs, gradient = (
        values[:, None] if values.dim() == 2 else values.flatten(1, -2) for values in (inputs, gradient)
    )
    return Outer(gradient, inputs) if leaf == "weight" else Whole(gradient.sum(1)[:, :, None])


def _convolution(module: Any, inputs: Tensor, gradient: Tensor, leaf: str) -> Piece:
    if leaf == "bias":
        return Whole(gradient.flatten(2).sum(2, keepdim=True))
    return Outer(gradient.flatten(2).transpose(1, 2), patches(module, inputs))


def _batch_norm(module: Any, inputs: Tensor, gradient: Tensor, leaf: str) -> Piece:
    if leaf == "weight":
        shape = (1, -1) + (1,) * (inputs.dim() - 2)
        gradient = gradient * (inputs - module.running_mean.view(shape))
        gradient = gradient * (module.running_var.view(shape) + module.eps).rsqrt()
    return Whole(gradient.reshape(*gradient.shape[:2], -1).sum(2, keepdim=True))


def _layer_norm(module: Any, inputs: Tensor, gradient: Tensor, leaf: str) -> Piece:
    if leaf == "weight":
        gradient = gradient * F.layer_norm(inputs, module.normalized_shape, eps=module.eps)
    size = int(torch.Size(module.normalized_shape).numel())
    return Whole(gradient.reshape(len(gradient), -1, size).sum(1)[:, :, None])


def _rms_norm(module: Any, inputs: Tensor, gradient: Tensor, leaf: str) -> Piece:
    """Of whatever is affine in its weight, number by number: transformers has dozens of classes of it."""
    one, none = (
        torch.func.functional_call(module, {leaf: value}, (inputs,))
        for value in (torch.ones_like(module.weight), torch.zeros_like(module.weight))
    )
    return Whole((gradient * (one - none)).reshape(len(gradient), -1, len(module.weight)).sum(1)[:, :, None])


def _embedding(module: Any, inputs: Tensor, gradient: Tensor, leaf: str) -> Piece:
    if module.padding_idx is not None:
        gradient = gradient * (inputs != module.padding_idx).unsqueeze(-1)
    return Scattered(gradient.flatten(1, -2), inputs.flatten(1), len(module.weight))


def _rule(module: nn.Module) -> Callable[..., Piece] | None:
    if type(module) is nn.Linear:
        return _linear
    if type(module) is nn.Conv2d and module.groups == 1 and module.padding_mode == "zeros":
        return None if isinstance(module.padding, str) else _convolution
    if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d) and not module.training and module.track_running_stats:
        return _batch_norm
    if type(module) is nn.LayerNorm:
        return _layer_norm
    if type(module).__name__.endswith("RMSNorm") and [name for name, _ in module.named_parameters()] == ["weight"]:
        return _rms_norm
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
    """Per-example gradients over chosen parameters, flattened and joined in the order of `names`.

    With `join_biases` a layer's bias is one more column of its weight: what `groups` holds, in that order.
    """

    def __init__(
        self, model: nn.Module, function: Function, names: list[str] | None = None, *, join_biases: bool = False
    ):
        self.model, self.function = model, function
        self.names = list(trainable_parameters(model)) if names is None else names
        self.dimension = sum(model.get_parameter(name).numel() for name in self.names)
        self._owners = _owners(model, self.names)
        self._users = Counter(name for _, leaves in self._owners.values() for name in leaves.values())
        self.groups = self._joined_groups() if join_biases else [(name,) for name in self.names]
        self.way = "hooks"  # then "vmap", then "loop"
        self._repeated_is_checked = False

    def __call__(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        """(batch, dimension) float32, written to `out` where there is one."""
        inputs, targets = batch
        (pieces,) = self.each(inputs, lambda _: [(targets, None)])
        if out is None:
            out = torch.empty(len(targets), self.dimension, device=targets.device)
        return write_rows(pieces, [(None, None)] * len(pieces), out)

    def each(self, inputs: Any, labels: Labels) -> Iterator[list[Piece]]:
        """For each of the labels that the outputs call for: a piece a group, from one forward pass where hooks do."""
        if self.way == "hooks":
            try:
                yield from self._by_hooks(inputs, labels)
                return
            except _Unsupported:
                self.way = "vmap"
        with torch.no_grad():
            chosen = list(labels(self.model(inputs)))
        for targets, weights in chosen:
            rows = self._rows((inputs, targets))
            rows = rows if weights is None else rows * weights[:, None]
            shapes = [self.model.get_parameter(name).shape for name in self.names]
            parts = rows.split([shape.numel() for shape in shapes], dim=1)
            yield self._grouped({name: Whole(self._as_matrices(name, part)) for name, part in zip(self.names, parts)})

    def _as_matrices(self, name: str, rows: Tensor) -> Tensor:
        """(batch, rows, columns): the outputs and inputs of a linear or convolution weight, anything else a vector."""
        layers = [module for module, leaves in self._owners.values() if leaves.get("weight") == name]
        matrix = any(type(module) in (nn.Linear, nn.Conv2d) for module in layers)
        return rows.reshape(len(rows), len(self.model.get_parameter(name)), -1) if matrix else rows[:, :, None]

    # ---- groups ----

    def _joined_groups(self) -> list[tuple[str, ...]]:
        joined = {
            leaves["weight"]: leaves["bias"]
            for module, leaves in self._owners.values()
            if type(module) in (nn.Linear, nn.Conv2d)
            and "weight" in leaves
            and "bias" in leaves
            and self._users[leaves["weight"]] == self._users[leaves["bias"]] == 1
        }
        alone = [name for name in self.names if name not in joined.values()]
        return [(name, joined[name]) if name in joined else (name,) for name in alone]

    def _grouped(self, by_name: dict[str, Piece]) -> list[Piece]:
        found: list[Piece] = []
        for group in self.groups:
            weight = by_name[group[0]]
            if len(group) == 1:
                found.append(weight)
            elif isinstance(weight, Outer):
                found.append(weight.with_bias())
            else:
                found.append(Whole(torch.cat([weight.matrices(), by_name[group[1]].matrices()], dim=2)))
        return found

    # ---- by hooks ----

    def _by_hooks(self, inputs: Any, labels: Labels) -> Iterator[list[Piece]]:
        batch = len(inputs)
        if isinstance(inputs, Tensor) and inputs.is_cuda and inputs.dim() == 4:  # as cuDNN convolves them
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        read: dict[str, Tensor] = {}
        given: dict[str, Tensor] = {}
        repeated: list[str] = []
        joined = {group[1] for group in self.groups if len(group) == 2}  # their weights' pieces have them

        def keep(path: str) -> Callable[..., Tensor | None]:
            def hook(module: nn.Module, arguments: Any, output: Any) -> Tensor | None:
                # One that runs twice, on several tensors, or on what is no row an example has no outer product each.
                if path in read or not arguments or not isinstance(output, Tensor) or _rule(module) is None:
                    raise _Unsupported
                own = arguments[0]
                if own.dim() < 2 or len(own) not in (1, batch):
                    raise _Unsupported
                if len(own) != batch:
                    repeated.append(path)
                    own, output = own.expand(batch, *own.shape[1:]), output.expand(batch, *output.shape[1:])
                read[path], given[path] = own.detach(), output
                return output if path in repeated else None

            return hook

        handles = [module.register_forward_hook(keep(path)) for path, (module, _) in self._owners.items()]
        try:
            with torch.enable_grad():
                outputs = self.model(inputs)
        finally:
            for handle in handles:
                handle.remove()
        if len(read) < len(self._owners):
            raise _Unsupported
        if repeated and not self._repeated_is_checked:
            self._check_repeated(inputs, outputs)
        paths = list(read)
        chosen = list(labels(outputs.detach()))
        for number, (targets, weights) in enumerate(chosen):
            with torch.enable_grad():
                values = mean_over_tokens(self.function(outputs, targets))
                values = values if weights is None else values * weights
                found = torch.autograd.grad(
                    values.sum(),
                    [given[path] for path in paths],
                    retain_graph=number < len(chosen) - 1,
                    allow_unused=True,
                )
            by_name: dict[str, Piece] = {}
            for path, gradient in zip(paths, found):
                module, leaves = self._owners[path]
                rule = _rule(module)
                assert rule is not None
                gradient = torch.zeros_like(given[path]) if gradient is None else gradient
                for leaf, name in leaves.items():
                    if name in joined:
                        continue
                    piece = rule(module, read[path], gradient, leaf)
                    by_name[name] = self._sum(name, by_name[name], piece) if name in by_name else piece
            yield self._grouped(by_name)

    def _check_repeated(self, inputs: Any, outputs: Tensor) -> None:
        """That the model takes a repeated layer's output as it takes the one for all: it broadcast it, as it should."""
        with torch.no_grad():
            expected = self.model(inputs)
        if expected.shape != outputs.shape or not torch.allclose(expected, outputs, rtol=1e-2, atol=1e-3):
            raise _Unsupported
        self._repeated_is_checked = True

    def _sum(self, name: str, one: Piece, other: Piece) -> Piece:
        return Whole(self._as_matrices(name, one.matrices().flatten(1) + other.matrices().flatten(1)))

    # ---- where hooks do not ----

    def _rows(self, batch: Batch) -> Tensor:
        if self.way == "vmap":
            try:
                return self._by_vmap(batch)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # vmap fails in many ways; what is wrong with the model itself shows in the loop as well
                self.way = "loop"
        return self._by_loop(batch)

    def _by_vmap(self, batch: Batch) -> Tensor:
        frozen = {name: value.detach() for name, value in self.model.named_parameters()}
        buffers = dict(self.model.named_buffers())
        wanted = {name: frozen[name] for name in self.names}
        several = isinstance(batch[0], Columns)

        def value_of(parameters: dict[str, Tensor], inputs: Any, targets: Tensor) -> Tensor:
            row = Columns({name: value[None] for name, value in inputs.items()}) if several else inputs[None]
            outputs = torch.func.functional_call(self.model, (frozen | parameters, buffers), (row,))
            return mean_over_tokens(self.function(outputs, targets[None])).sum()

        inputs = dict(**batch[0]) if several else batch[0]
        gradients = torch.func.vmap(torch.func.grad(value_of), in_dims=(None, 0, 0))(wanted, inputs, batch[1])
        return torch.cat([gradients[name].flatten(1) for name in self.names], dim=1).float()

    def _by_loop(self, batch: Batch) -> Tensor:
        """One backward pass an example: slow, and right for whatever autograd can differentiate."""
        inputs, targets = batch
        parameters = [self.model.get_parameter(name) for name in self.names]
        rows = torch.empty(len(targets), self.dimension, device=parameters[0].device)
        for k in range(len(targets)):
            with torch.enable_grad():
                value = mean_over_tokens(self.function(self.model(inputs[k : k + 1]), targets[k : k + 1])).sum()
                found = torch.autograd.grad(value, parameters, allow_unused=True)
            parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found)]
            torch.cat([part.flatten().float() for part in parts], out=rows[k])
        return rows


Basis = tuple[Tensor | None, Tensor | None]  # eigenvectors of a piece's rows and of its columns; None: its own axes


def write_rows(pieces: list[Piece], bases: list[Basis], out: Tensor) -> Tensor:
    """Every piece in its basis, one after another, into `out` (batch, dimension) float32."""
    start = 0
    for piece, (left, right) in zip(pieces, bases, strict=True):
        rows, columns = piece.shape
        piece.matrices(left, right, out=out[:, start : start + rows * columns].unflatten(1, (rows, columns)))
        start += rows * columns
    return out
