"""A chain and what it runs on: one copy of the model with its passes, which chains use one after another.

    workbench = Workbench(settings, task, checkpoint, train, measured)    # examples on the device
    for losses in workbench.draws(seed, chain): ...                       # (examples,) float32 at each draw

A chain is a function of (seed, chain) alone: which chains ran before it, in which process, and how often it was
stopped and taken up again do not change a bit of it.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from baselines.bif.passes import Captured, Gradient, Measured
from baselines.bif.sampler import SAMPLERS, Position
from baselines.bif.settings import DISPLACEMENTS, ChainSettings
from baselines.support.curvature import Metric
from baselines.support.gradients import trainable_parameters
from retrain.errors import UsageError
from retrain.examples import Examples
from retrain.task import Task

_MINIBATCH_STREAM, _NOISE_STREAM = 11, 12
# Above this many bytes of sampled parameters each one is moved as soon as its gradient is there, so that the whole
# gradient is never held; below, one captured pass is faster.
STEP_IN_BACKWARD_BYTES = 2**30


class Workbench:
    def __init__(
        self,
        settings: ChainSettings,
        task: Task,
        checkpoint: nn.Module,
        train: Examples,
        measured: Examples,
        metric: Metric | None = None,
    ):
        if settings.left_to_the_pilot:
            raise ValueError(
                f"{', '.join(settings.left_to_the_pilot)} not chosen yet; take the settings that `fit` gives"
            )
        self.settings, self.task, self.train = settings, task, train
        self.device = train.targets.device
        self.model, self.sampled = copy_to_sample(checkpoint, settings.parameters)
        anchor = [checkpoint.get_parameter(name).data for name in self.sampled]
        weights = [parameter.data for parameter in self.sampled.values()]
        dtype = DISPLACEMENTS[settings.displacement]
        num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
        self.losses = Measured(task, self.model, measured, settings.batch_size)
        self._new_generators()
        plain = settings.gradient == "minibatch" and not settings.control_variate and metric is None
        self._in_backward = plain and num_bytes > STEP_IN_BACKWARD_BYTES
        if self._in_backward:
            self.positions = [Position([weight], [start], dtype) for weight, start in zip(weights, anchor, strict=True)]
        else:
            self.positions = [Position(weights, anchor, dtype, metric=metric)]
            origin = None
            if settings.gradient == "difference":
                at_checkpoint, same = copy_to_sample(checkpoint, settings.parameters)
                origin = (at_checkpoint, list(same.values()))
            parameters = list(self.sampled.values())
            self.gradient = Gradient(
                task, self.model, parameters, train, settings.minibatch, settings.n_beta, origin, metric
            )
        if settings.control_variate:
            shadow, moved = copy_to_sample(checkpoint, settings.parameters)
            shadow_weights = [parameter.data for parameter in moved.values()]
            self.positions[0].shadow = Position(shadow_weights, anchor, dtype, metric=metric)
            self.shadow_losses = Measured(task, shadow, measured, settings.batch_size)
        if not self._in_backward:
            self._whole_step = Captured(self._step, self.device, (self.noise, self.minibatches))
            if not self._whole_step.has_graph:
                self._new_generators()  # a capture that failed may have left them unusable
            self.positions[0].reset()  # capturing has moved it

    def _new_generators(self) -> None:
        """Of every chain in its turn; unseeded."""
        self.noise, self.minibatches = torch.Generator(self.device), torch.Generator(self.device)

    def draws(self, seed: int, chain: int, ticks: Iterator | None = None) -> Iterator[Tensor]:
        """Each draw's losses after burn-in, overwritten by the next."""
        for losses in Chain(self, seed, chain).draws(ticks):
            if losses is not None:
                yield losses

    def step(self) -> None:
        """From one position to the next."""
        if self._in_backward:
            self._step_in_backward()
        else:
            self._whole_step()

    def _step(self) -> None:
        settings, move = self.settings, SAMPLERS[self.settings.sampler]
        move(self.positions[0], self.gradient(self.minibatches), settings.gamma, settings.step_size, self.noise)

    def _step_in_backward(self) -> None:
        settings, step = self.settings, SAMPLERS[self.settings.sampler]

        def move(position: Position) -> Callable[[Tensor], None]:
            def hook(parameter: Tensor) -> None:
                assert parameter.grad is not None
                step(position, [parameter.grad], settings.gamma, settings.step_size, self.noise)
                parameter.grad = None

            return hook

        handles = [
            parameter.register_post_accumulate_grad_hook(move(position))
            for parameter, position in zip(self.sampled.values(), self.positions, strict=True)
        ]
        try:
            size = min(settings.minibatch, len(self.train))
            chosen = torch.randperm(len(self.train), generator=self.minibatches, device=self.device)[:size]
            batch = (self.train.inputs[chosen], self.train.targets[chosen])
            with torch.enable_grad():
                (self.task.example_loss(self.model, batch).mean() * settings.n_beta).backward()
        finally:
            for handle in handles:
                handle.remove()


class Chain:
    """One chain under way, from the checkpoint or from where `restore` puts it. A workbench has one at a time."""

    def __init__(self, workbench: Workbench, seed: int, number: int):
        self.workbench, self.taken = workbench, 0  # draws so far, those of the burn-in included
        self.noise = workbench.noise.manual_seed(_seed(seed, number, _NOISE_STREAM))
        self.minibatches = workbench.minibatches.manual_seed(_seed(seed, number, _MINIBATCH_STREAM))
        for position in workbench.positions:
            position.reset()

    def draws(self, ticks: Iterator | None = None) -> Iterator[Tensor | None]:
        """Each draw's losses, overwritten by the next; None during burn-in, when nothing is measured."""
        settings = self.workbench.settings
        while self.taken < settings.burn_in + settings.draws:
            if self.taken:  # nothing looks at where a chain goes after its last draw
                for _ in range(settings.thinning):
                    self.workbench.step()
            self.taken += 1
            next(ticks or iter(()), None)
            yield self.workbench.losses() if self.taken > settings.burn_in else None

    def state(self) -> dict[str, Tensor]:
        """Where it is, between two draws: the tensors themselves, not copies."""
        state = {"noise": self.noise.get_state(), "minibatches": self.minibatches.get_state()}
        for number, position in enumerate(self.workbench.positions):
            state |= {f"{number}.{name}": value for name, value in position.state().items()}
        return state

    def restore(self, state: Mapping[str, Tensor], taken: int) -> None:
        self.taken = taken
        self.noise.set_state(state["noise"])
        self.minibatches.set_state(state["minibatches"])
        for number, position in enumerate(self.workbench.positions):
            start = f"{number}."
            position.restore({name[len(start) :]: state[name] for name in state if name.startswith(start)})


def sampled_names(model: nn.Module, pattern: str) -> list[str]:
    """The trainable parameters whose names the regular expression finds; all of them if it is empty."""
    names = [name for name in trainable_parameters(model) if re.search(pattern, name)]
    if not names:
        raise UsageError(f'bif.parameters is "{pattern}", which no trainable parameter\'s name matches')
    return names


def copy_to_sample(checkpoint: nn.Module, pattern: str) -> tuple[nn.Module, dict[str, nn.Parameter]]:
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
