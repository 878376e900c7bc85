"""What a chain does over and over: measure every loss, and take a minibatch gradient, at weights that change in place.

    workbench = Workbench(method, task, checkpoint, train, measured)      # examples on the device
    for losses in workbench.draws(seed, chain): ...                       # (examples,) float32 at each draw

On CUDA each is captured once as a CUDA graph (all batches of the forward pass in one) and replayed at every draw: the
weights are swapped in place, nothing is launched kernel by kernel and nothing is read back to the host. The same
functions run as they are on the CPU, and wherever capturing fails.
"""

import copy
import logging
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from baselines.bif.sampler import SAMPLERS, Position
from baselines.support.curvature import Metric
from baselines.support.gradients import trainable_parameters
from retrain.errors import UsageError
from retrain.examples import Examples
from retrain.task import Task

if TYPE_CHECKING:
    from baselines.bif.method import BIF

logger = logging.getLogger("tda-bench")

GRADIENTS = ("minibatch", "difference")
DISPLACEMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MINIBATCH_STREAM, _NOISE_STREAM = 11, 12
# Above this many bytes of sampled parameters each one is moved as soon as its gradient is there, so that the whole
# gradient is never held; below, one captured pass is faster.
STEP_IN_BACKWARD_BYTES = 2**30

WARM_UP_RUNS = 2  # before a capture: libraries choose their kernels and allocate their workspaces then


class Captured:
    """A function without arguments, replayed as a CUDA graph; it must always read and write the same tensors."""

    def __init__(self, function: Callable[[], None], device: torch.device):
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._graph = _capture(function, device)

    def __call__(self) -> None:
        if self._graph is None:
            self._function()
        else:
            self._graph.replay()


def _capture(function: Callable[[], None], device: torch.device) -> "torch.cuda.CUDAGraph | None":
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_RUNS):
            function()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            function()
    except RuntimeError as error:
        torch.cuda.synchronize(device)
        logger.warning("bif runs without CUDA graphs, more slowly: %s", str(error).splitlines()[0])
        return None
    return graph


class Measured:
    """Every example's loss at the model's present weights."""

    def __init__(self, task: Task, model: nn.Module, examples: Examples, batch_size: int):
        self.task, self.model, self.examples, self.batch_size = task, model, examples, batch_size
        self._losses = torch.empty(len(examples), device=examples.inputs.device)
        self._run = Captured(self._measure, examples.inputs.device)

    @torch.no_grad()
    def _measure(self) -> None:
        start = 0
        for batch in self.examples.batches(self.batch_size):
            self._losses[start : start + len(batch[0])] = self.task.example_loss(self.model, batch)
            start += len(batch[0])

    def __call__(self) -> Tensor:
        """(examples,) float32; the next call overwrites it."""
        self._run()
        return self._losses


class Gradient:
    """`scale` times the gradient of a minibatch's mean loss, in the parameters' own order.

    Minibatches are drawn from all of `train` without replacement; where the minibatch is as large, it is all of it.
    With an `origin` (the model at the checkpoint, its parameters in the same order), the gradient of the same minibatch
    there is taken off: what is left is what the displacement changed. That removes the checkpoint's own slope, and
    nearly all of the noise of drawing a minibatch while the displacement is small. With a `metric` the gradient is in
    its coordinates.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        parameters: list[nn.Parameter],
        train: Examples,
        minibatch: int,
        scale: float,
        origin: tuple[nn.Module, list[nn.Parameter]] | None = None,
        metric: Metric | None = None,
    ):
        self.task, self.train, self.scale, self.metric = task, train, scale, metric
        self.places = [(model, parameters)] if origin is None else [(model, parameters), origin]
        self.size = min(minibatch, len(train))
        device = train.inputs.device
        self._chosen = torch.arange(self.size, device=device)
        self._gradient = [torch.zeros_like(parameter) for parameter in parameters]
        self._run = Captured(self._compute, device)

    def _compute(self) -> None:
        if self.size < len(self.train):
            batch = (self.train.inputs[self._chosen], self.train.targets[self._chosen])
        else:
            batch = (self.train.inputs, self.train.targets)
        for number, (model, parameters) in enumerate(self.places):
            with torch.enable_grad():
                loss = self.task.example_loss(model, batch).mean() * self.scale
                found = torch.autograd.grad(loss, parameters)
            if number == 0:
                torch._foreach_copy_(self._gradient, found)
            else:
                torch._foreach_sub_(self._gradient, found)
        if self.metric is not None:
            torch._foreach_copy_(self._gradient, self.metric.of_gradient(self._gradient))

    def __call__(self, generator: torch.Generator) -> list[Tensor]:
        """The next call overwrites what this one gave."""
        if self.size < len(self.train):
            device = self.train.inputs.device
            self._chosen.copy_(torch.randperm(len(self.train), generator=generator, device=device)[: self.size])
        self._run()
        return self._gradient


class Workbench:
    """One copy of the model with its captured passes, which the chains use one after another."""

    def __init__(
        self,
        method: "BIF",
        task: Task,
        checkpoint: nn.Module,
        train: Examples,
        measured: Examples,
        metric: Metric | None = None,
    ):
        self.method, self.task, self.train = method, task, train
        self.device = train.inputs.device
        self.model, self.sampled = _copy_to_sample(checkpoint, method.parameters)
        anchor = [checkpoint.get_parameter(name).data for name in self.sampled]
        weights = [parameter.data for parameter in self.sampled.values()]
        dtype = DISPLACEMENTS[method.displacement]
        num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
        self.losses = Measured(task, self.model, measured, method.batch_size)
        plain = method.gradient == "minibatch" and not method.control_variate and metric is None
        self._in_backward = plain and num_bytes > STEP_IN_BACKWARD_BYTES
        if self._in_backward:
            self.positions = [Position([weight], [start], dtype) for weight, start in zip(weights, anchor, strict=True)]
        else:
            self.positions = [Position(weights, anchor, dtype, metric=metric)]
            origin = None
            if method.gradient == "difference":
                at_checkpoint, same = _copy_to_sample(checkpoint, method.parameters)
                origin = (at_checkpoint, list(same.values()))
            parameters = list(self.sampled.values())
            self.gradient = Gradient(
                task, self.model, parameters, train, method.minibatch, method.n_beta, origin, metric
            )
        if method.control_variate:
            shadow, moved = _copy_to_sample(checkpoint, method.parameters)
            shadow_weights = [parameter.data for parameter in moved.values()]
            self.positions[0].shadow = Position(shadow_weights, anchor, dtype, metric=metric)
            self.shadow_losses = Measured(task, shadow, measured, method.batch_size)

    def draws(self, seed: int, chain: int, ticks: Iterator | None = None) -> Iterator[Tensor]:
        """Each draw's losses after burn-in, overwritten by the next; a function of (seed, chain) alone."""
        noise = torch.Generator(self.device).manual_seed(_seed(seed, chain, _NOISE_STREAM))
        minibatches = torch.Generator(self.device).manual_seed(_seed(seed, chain, _MINIBATCH_STREAM))
        for position in self.positions:
            position.reset()
        for draw in range(self.method.burn_in + self.method.draws):
            if draw:  # nothing looks at where a chain goes after its last draw
                for _ in range(self.method.thinning):
                    self._step(minibatches, noise)
            next(ticks or iter(()), None)
            if draw >= self.method.burn_in:
                yield self.losses()

    def _step(self, minibatches: torch.Generator, noise: torch.Generator) -> None:
        method, step = self.method, SAMPLERS[self.method.sampler]
        if not self._in_backward:
            step(self.positions[0], self.gradient(minibatches), method.gamma, method.step_size, noise)
            return

        def move(position: Position) -> Callable[[Tensor], None]:
            def hook(parameter: Tensor) -> None:
                assert parameter.grad is not None
                step(position, [parameter.grad], method.gamma, method.step_size, noise)
                parameter.grad = None

            return hook

        handles = [
            parameter.register_post_accumulate_grad_hook(move(position))
            for parameter, position in zip(self.sampled.values(), self.positions, strict=True)
        ]
        try:
            size = min(method.minibatch, len(self.train))
            chosen = torch.randperm(len(self.train), generator=minibatches, device=self.device)[:size]
            batch = (self.train.inputs[chosen], self.train.targets[chosen])
            with torch.enable_grad():
                (self.task.example_loss(self.model, batch).mean() * method.n_beta).backward()
        finally:
            for handle in handles:
                handle.remove()


def sampled_names(model: nn.Module, pattern: str) -> list[str]:
    """The trainable parameters whose names the regular expression finds; all of them if it is empty."""
    names = [name for name in trainable_parameters(model) if re.search(pattern, name)]
    if not names:
        raise UsageError(f'bif.parameters is "{pattern}", which no trainable parameter\'s name matches')
    return names


def _copy_to_sample(checkpoint: nn.Module, pattern: str) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """A copy in eval mode and its sampled parameters by name: only those require gradients, and only those are new."""
    chosen = sampled_names(checkpoint, pattern)
    fixed: dict[int, object] = {
        id(parameter): nn.Parameter(parameter.data, requires_grad=False)
        for name, parameter in checkpoint.named_parameters()
        if name not in chosen
    }
    model = copy.deepcopy(checkpoint, fixed).eval()
    return model, {name: model.get_parameter(name) for name in chosen}


def _seed(seed: int, chain: int, stream: int) -> int:
    return int(np.random.SeedSequence([seed, chain, stream]).generate_state(1, np.uint64)[0] >> 1)
