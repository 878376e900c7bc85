"""The two passes that a chain repeats: every loss, and a minibatch gradient, at weights that change in place.

On CUDA what is repeated is captured once as a CUDA graph (all batches of the losses in one; a gradient with the step
that follows it, by `baselines/bif/engine.py`) and replayed at every draw: the weights are swapped in place, nothing is
launched kernel by kernel and nothing is read back to the host. The same functions run as they are on the CPU, and
wherever capturing fails.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from baselines.support.curvature import Metric
from retrain.examples import Examples
from retrain.task import Task

logger = logging.getLogger("tda-bench")

WARM_UP_RUNS = 2  # before a capture: libraries choose their kernels and allocate their workspaces then


class Captured:
    """A function without arguments, replayed as a CUDA graph; it must always read and write the same tensors.

    What it draws from `generators` is what it would draw without a graph. It runs a few times before the capture.
    """

    def __init__(self, function: Callable[[], None], device: torch.device, generators: Sequence[torch.Generator] = ()):
        self._device = device
        self._graph = _capture(function, device, generators) if device.type == "cuda" else None
        self._function = function if self._graph is None else None  # with a graph whoever owns both is freed at once

    @property
    def has_graph(self) -> bool:
        return self._graph is not None

    def __call__(self) -> None:
        if self._function is not None:
            self._function()
        elif self._graph is not None:
            with torch.cuda.device(self._device):
                self._graph.replay()


def _capture(
    function: Callable[[], None], device: torch.device, generators: Sequence[torch.Generator]
) -> "torch.cuda.CUDAGraph | None":
    with torch.cuda.device(device):  # a capture is of the current device's work, whatever tensors it is given
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                function()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            for generator in generators:
                graph.register_generator_state(generator)
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
        self._losses = torch.empty(len(examples), device=examples.targets.device)
        self._run = Captured(self._measure, examples.targets.device)

    @torch.no_grad()
    def _measure(self) -> None:
        start = 0
        for batch in self.examples.batches(self.batch_size):
            self._losses[start : start + len(batch[1])] = self.task.example_loss(self.model, batch)
            start += len(batch[1])

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
        device = train.targets.device
        self._chosen = torch.arange(self.size, device=device)
        self._gradient = [torch.zeros_like(parameter) for parameter in parameters]

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
            device = self.train.targets.device
            self._chosen.copy_(torch.randperm(len(self.train), generator=generator, device=device)[: self.size])
        self._compute()
        return self._gradient
