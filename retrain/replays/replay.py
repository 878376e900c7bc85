"""A training run as a chain of pure functions: run again with a weight for every example, or differentiated in them.

    replay = replay_of(task, indices, init_seed=..., order_seed=..., device=...)
    state = run_replay(replay, weights)          # weights (n,): 1 keeps an example, 0 strikes it out of its batches
    replay.model(state)                     # the trained model, in eval mode

At weights of one it is the task's own training on these examples, step by step, in float32. An example of weight 0 is
struck out of every batch that it was in: of the mean loss and of BatchNorm's statistics alike, so that what remains is
what training on smaller batches would do. Everything else (initial weights, order, augmentation, number of steps)
stays: the only difference between two such runs is the data. In between, both depend smoothly on the weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from retrain.backends import exact_convolutions

# Everything that a step reads and writes: parameters, statistics, the optimizer's own.
TrainingState = dict[str, Tensor]
EQUAL_MAXIMA = 1e-4  # of the mean size of a layer's values: maxima that are closer than this count as equal
PARAMETERS, STATISTICS = "parameter/", "statistic/"  # what the names of a model's own tensors begin with


class Replay(ABC):
    """What a task offers whose training can be replayed; positions are into the examples it is trained on."""

    gradient_steps: ClassVar[bool] = True  # along the gradient, momentum aside: Adam's are not
    num_steps: int
    num_examples: int
    device: torch.device

    @abstractmethod
    def start(self) -> TrainingState:
        """Before the first step."""

    @abstractmethod
    def members(self, step: int) -> Tensor:
        """(batch,) positions of the examples that the step looks at."""

    @abstractmethod
    def advance(self, state: TrainingState, step: int, weights: Tensor) -> TrainingState:
        """The state after a step, differentiable in the state before and in the weights (batch,) of its members."""

    @abstractmethod
    def learning_rate(self, step: int) -> float:
        """What the step's gradient is multiplied by, momentum aside."""

    def step_size(self, step: int) -> float:
        """How far the step goes along the mean loss's gradient, in the end: momentum included."""
        return self.learning_rate(step)

    @abstractmethod
    def skeleton(self) -> nn.Module:
        """A model of this kind in eval mode, whose own weights do not matter."""

    def weights_of(self, state: TrainingState) -> dict[str, Tensor]:
        """The model's parameters and statistics by their own names."""
        kinds = (PARAMETERS, STATISTICS)
        return {
            name.removeprefix(kind): value for kind in kinds for name, value in state.items() if name.startswith(kind)
        }

    def model(self, state: TrainingState) -> nn.Module:
        model = self.skeleton()
        missing = model.load_state_dict({n: v.detach() for n, v in self.weights_of(state).items()}, strict=False)
        assert not missing.unexpected_keys, missing
        return model.to(self.device).eval()

    def outputs(self, state: TrainingState, inputs: Any) -> Tensor:
        """Of the model in eval mode, differentiable in the state."""
        return torch.func.functional_call(self._evaluated, self.weights_of(state), (inputs,))

    @cached_property
    def _evaluated(self) -> nn.Module:
        """torch's own BatchNorm is not differentiable in its statistics."""
        return differentiable(self.skeleton())[0].to(self.device).eval()


def steps_of(
    replay: Replay,
    weights: Tensor | None = None,
    steps: Iterable[int] | None = None,
    state: TrainingState | None = None,
) -> Iterable[TrainingState]:
    """The state after each step; by default from the start, through all steps, at weights of one."""
    state = replay.start() if state is None else state
    for step in range(replay.num_steps) if steps is None else steps:
        members = replay.members(step)
        own = torch.ones(len(members), device=replay.device) if weights is None else weights[members]
        # Two trainings on nearly the same examples differ by little: rounding must not drown it.
        with exact_convolutions():
            state = {name: value.detach() for name, value in replay.advance(state, step, own).items()}
        yield state


def run_replay(
    replay: Replay,
    weights: Tensor | None = None,
    progress: Callable[[Iterable[TrainingState]], Iterable[TrainingState]] = lambda states: states,
) -> TrainingState:
    """The last state."""
    state = replay.start()
    for state in progress(steps_of(replay, weights)):  # noqa: B007
        pass
    return state


# ---- pieces that replays share ----


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """The mean loss of the examples that are left; (batch,) both."""
    return (losses * weights).sum() / weights.sum()


def gradients(loss: Tensor, state: Mapping[str, Tensor], again: bool) -> dict[str, Tensor]:
    """Of every parameter, by the names in the state; differentiable themselves where somebody asks for that."""
    names = [name for name in state if name.startswith(PARAMETERS)]
    found = torch.autograd.grad(loss, [state[name] for name in names], create_graph=again, allow_unused=True)
    return {n: torch.zeros_like(state[n]) if g is None else g for n, g in zip(names, found)}


def attached(state: TrainingState) -> TrainingState:
    """The state with parameters that gradients can be taken of, whether or not anybody differentiates the whole."""
    return {
        name: value.detach().requires_grad_() if name.startswith(PARAMETERS) and not value.requires_grad else value
        for name, value in state.items()
    }


class WeightedBatchNorm2d(nn.Module):
    """BatchNorm2d whose statistics are those of the examples that are left, and can be differentiated.

    In training `weights` (batch,) are set before a pass, and `collected` has the new running statistics after it.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, original: nn.BatchNorm2d):
        super().__init__()
        self.weight, self.bias = original.weight, original.bias
        self.register_buffer("running_mean", original.running_mean)
        self.register_buffer("running_var", original.running_var)
        assert original.momentum is not None
        self.eps, self.momentum = original.eps, original.momentum
        self.weights: Tensor | None = None
        self.collected: dict[str, Tensor] = {}

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return self._scaled(inputs - self.running_mean.view(1, -1, 1, 1), self.running_var.view(1, -1, 1, 1))
        assert self.weights is not None
        positions = inputs.shape[2] * inputs.shape[3]
        shares = (self.weights / (self.weights.sum() * positions)).view(-1, 1, 1, 1)
        mean = (inputs * shares).sum((0, 2, 3), keepdim=True)
        centred = inputs - mean
        variance = (centred.square() * shares).sum((0, 2, 3), keepdim=True)
        count = self.weights.sum() * positions
        kept = 1 - self.momentum
        # torch's running variance is the unbiased one
        self.collected = {
            "running_mean": kept * self.running_mean + self.momentum * mean.flatten(),
            "running_var": kept * self.running_var + self.momentum * variance.flatten() * (count / (count - 1)),
        }
        return self._scaled(centred, variance)

    def _scaled(self, centred: Tensor, variance: Tensor) -> Tensor:
        scaled = centred * (variance + self.eps).rsqrt()
        return scaled * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


class FirstMaximum(nn.Module):
    """MaxPool2d where of maxima that are equal but for rounding the first gets the gradient.

    A network that starts as the identity has many (every patch of a blank background), and which of them is largest
    would be decided by the last bit: the training would jump wherever a weight changes anything at all.
    """

    def __init__(self, original: nn.MaxPool2d):
        super().__init__()
        self.size = int(original.kernel_size)  # type: ignore[arg-type]
        if original.stride != original.kernel_size or original.padding or original.ceil_mode:
            raise ValueError(f"{original} has overlapping or padded windows; expected plain ones")

    def forward(self, inputs: Tensor) -> Tensor:
        size = self.size
        high, wide = inputs.shape[2] // size, inputs.shape[3] // size
        cut = inputs[:, :, : high * size, : wide * size].unflatten(2, (high, size)).unflatten(4, (wide, size))
        windows = cut.transpose(3, 4).flatten(4)  # (batch, channels, high, wide, size * size)
        with torch.no_grad():
            largest = windows.amax(-1, keepdim=True)
            equal = windows >= largest - EQUAL_MAXIMA * inputs.abs().mean()
            first = (equal * torch.arange(size * size, 0, -1, device=inputs.device)).argmax(-1, keepdim=True)
        return windows.gather(-1, first).squeeze(-1)


def differentiable(model: nn.Module) -> tuple[nn.Module, dict[str, WeightedBatchNorm2d]]:
    """The model with layers of these kinds in place of torch's, and its normalisations by name."""
    norms = {}
    for name, module in list(model.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if isinstance(module, nn.BatchNorm2d):
            norms[name] = WeightedBatchNorm2d(module)
            setattr(model.get_submodule(parent), leaf, norms[name])
        elif isinstance(module, nn.MaxPool2d):
            setattr(model.get_submodule(parent), leaf, FirstMaximum(module))
    return model, norms


def initial_state(model: nn.Module, device: torch.device, optimizer: Iterable[str]) -> TrainingState:
    """A model's own tensors, and for each trained one zeros for everything that the optimizer keeps of it."""
    state: TrainingState = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            state[PARAMETERS + name] = parameter.detach().clone().to(device)
    for kind in optimizer:
        for name, value in list(state.items()):
            if name.startswith(PARAMETERS):
                state[f"{kind}/{name.removeprefix(PARAMETERS)}"] = torch.zeros_like(value)
    for name, value in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            state[STATISTICS + name] = value.detach().clone().to(device)
    return state
