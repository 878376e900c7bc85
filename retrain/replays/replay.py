"""A training run as a chain of pure functions: run again with a weight for every example, or differentiated in them.

    replay = replay_of(task, indices, init_seed=..., order_seed=..., device=...)
    state = run(replay, weights)            # weights (n,): 1 keeps an example, 0 strikes it out of its batches
    replay.model(state)                     # the trained model, in eval mode

At weights of one it is the task's own training on these examples, step by step, in float32. An example of weight 0 is
struck out of every batch that it was in: of the mean loss and of BatchNorm's statistics alike, so that what remains is
what training on smaller batches would do. Everything else (initial weights, order, augmentation, number of steps)
stays: the only difference between two such runs is the data. In between, both depend smoothly on the weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from retrain.examples import Batch

State = dict[str, Tensor]  # everything that a step reads and writes: parameters, statistics, the optimizer's own
PARAMETERS, STATISTICS = "parameter/", "statistic/"  # what the names of a model's own tensors begin with


class Replay(ABC):
    """What a task offers whose training can be replayed; positions are into the examples it is trained on."""

    num_steps: int
    num_examples: int
    device: torch.device

    @abstractmethod
    def start(self) -> State:
        """Before the first step."""

    @abstractmethod
    def members(self, step: int) -> Tensor:
        """(batch,) positions of the examples that the step looks at."""

    @abstractmethod
    def advance(self, state: State, step: int, weights: Tensor) -> State:
        """The state after a step, differentiable in the state before and in the weights (batch,) of its members."""

    @abstractmethod
    def learning_rate(self, step: int) -> float:
        """What the step's gradient is multiplied by, momentum aside."""

    @abstractmethod
    def skeleton(self) -> nn.Module:
        """A model of this kind in eval mode, whose own weights do not matter."""

    def weights_of(self, state: State) -> dict[str, Tensor]:
        """The model's parameters and statistics by their own names."""
        kinds = (PARAMETERS, STATISTICS)
        return {
            name.removeprefix(kind): value for kind in kinds for name, value in state.items() if name.startswith(kind)
        }

    def model(self, state: State) -> nn.Module:
        model = self.skeleton()
        missing = model.load_state_dict({n: v.detach() for n, v in self.weights_of(state).items()}, strict=False)
        assert not missing.unexpected_keys, missing
        return model.to(self.device).eval()

    def outputs(self, state: State, inputs: Batch) -> Tensor:
        """Of the model in eval mode, differentiable in the state."""
        return torch.func.functional_call(self._evaluated(), self.weights_of(state), (inputs,))

    def _evaluated(self) -> nn.Module:
        if not hasattr(self, "_kept_skeleton"):
            self._kept_skeleton = self.skeleton().to(self.device).eval()
        return self._kept_skeleton


def steps_of(
    replay: Replay,
    weights: Tensor | None = None,
    steps: Iterable[int] | None = None,
    state: State | None = None,
) -> Iterable[State]:
    """The state after each step; by default from the start, through all steps, at weights of one."""
    state = replay.start() if state is None else state
    for step in range(replay.num_steps) if steps is None else steps:
        members = replay.members(step)
        own = torch.ones(len(members), device=replay.device) if weights is None else weights[members]
        state = {name: value.detach() for name, value in replay.advance(state, step, own).items()}
        yield state


def run(
    replay: Replay,
    weights: Tensor | None = None,
    progress: Callable[[Iterable[State]], Iterable[State]] = lambda states: states,
) -> State:
    """The last state."""
    state = replay.start()
    for state in progress(steps_of(replay, weights)):  # noqa: B007
        pass
    return state


# ---- pieces that replays share ----


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """The mean loss of the examples that are left; (batch,) both."""
    return (losses * weights).sum() / weights.sum()


def gradients(loss: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of every parameter, by the names in the state; differentiable themselves."""
    names = [name for name in state if name.startswith(PARAMETERS)]
    found = torch.autograd.grad(loss, [state[name] for name in names], create_graph=True, allow_unused=True)
    return {n: torch.zeros_like(state[n]) if g is None else g for n, g in zip(names, found)}


def attached(state: State) -> State:
    """The state with parameters that gradients can be taken of, whether or not anybody differentiates the whole."""
    return {
        name: value.detach().requires_grad_() if name.startswith(PARAMETERS) and not value.requires_grad else value
        for name, value in state.items()
    }


class WeightedBatchNorm2d(nn.Module):
    """BatchNorm2d in training whose statistics are those of the examples that are left, and can be differentiated.

    `weights` (batch,) are set before a pass; `collected` has the new running statistics after it.
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
        scaled = centred * (variance + self.eps).rsqrt()
        return scaled * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


def with_weighted_norms(model: nn.Module) -> tuple[nn.Module, dict[str, WeightedBatchNorm2d]]:
    """The model (changed) and its normalisations by name."""
    norms = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            parent, _, leaf = name.rpartition(".")
            norms[name] = WeightedBatchNorm2d(module)
            setattr(model.get_submodule(parent), leaf, norms[name])
    return model, norms


def initial_state(model: nn.Module, device: torch.device, optimizer: Iterable[str]) -> State:
    """A model's own tensors, and for each trained one zeros for everything that the optimizer keeps of it."""
    state: State = {}
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
