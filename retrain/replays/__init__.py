"""Which tasks' trainings can be replayed, and how: ResNet-9 with momentum (digits, CIFAR-10), tinylm with AdamW.

A task of one's own offers it by a method `replay(indices, *, init_seed, order_seed, device)` that returns a `Replay`.
Those of the suite's tasks lie here and not in the tasks' files: how a training is replayed decides nothing about the
ordinary ground truth, whose keys hold the tasks' source.

Order, augmentation, learning rates and lookahead are the tasks' own. What differs is precision (float32; CIFAR-10's
convolutions are bfloat16 on a GPU) and the order of sums. A replay holds one state at a time.
"""

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrain.errors import UsageError
from retrain.examples import Indices
from retrain.models.lm_training import Finetuning, batches
from retrain.models.resnet9 import ResNet9
from retrain.models.resnet9_training import (
    LOOKAHEAD_DECAY,
    LOOKAHEAD_EVERY,
    augmentation_plan,
    batch_bounds,
    pixel_table,
    triangle,
)
from retrain.replays.replay import (
    PARAMETERS,
    STATISTICS,
    Replay,
    TrainingState,
    attached,
    differentiable,
    gradients,
    initial_state,
    weighted_mean,
)
from retrain.source import source_fingerprint
from retrain.task import Task
from retrain.tasks import cifar10 as cifar10_module
from retrain.tasks.cifar10 import Cifar10, normalised_images
from retrain.tasks.digits import Digits
from retrain.tasks.tinylm import TinyLM

MOMENTUM = "momentum"
SLOW = "slow/"  # the slow weights of lookahead
FIRST, SECOND = "first", "second"  # AdamW's moments
BETAS, EPSILON = (0.9, 0.999), 1e-8  # torch's own


@dataclass(frozen=True)
class MomentumStep:
    """One step of SGD with Nesterov momentum, as plain numbers."""

    members: Tensor  # (batch,) positions
    rate: float
    lookahead: float | None = None  # the share of the slow weights that is kept, after the step


class ResNet9Replay(Replay):
    """Of a loss that is the mean over the batch, or with `summed` that times the batch's (weighted) size."""

    def __init__(
        self,
        model: ResNet9,
        labels: Tensor,
        steps: Sequence[MomentumStep],
        *,
        momentum: float,
        label_smoothing: float,
        device: torch.device,
        summed: bool = False,
    ):
        self.device = torch.device(device)
        self._initial, self.labels, self.steps = model, labels.to(self.device), steps
        self.num_steps, self.num_examples = len(steps), len(labels)
        self.momentum, self.label_smoothing, self.summed = momentum, label_smoothing, summed
        self.lookahead = any(step.lookahead is not None for step in steps)
        self._training, self._norms = differentiable(self.skeleton().train())

    def images(self, step: int) -> Tensor:
        """The step's batch as the network sees it: (batch, channels, size, size)."""
        raise NotImplementedError

    def decay_and_scale(self, name: str) -> tuple[float, float]:
        """(what of a parameter is added to its gradient, what its rate is multiplied by)."""
        raise NotImplementedError

    def skeleton(self) -> nn.Module:
        return copy.deepcopy(self._initial).to(self.device).eval()

    def start(self) -> TrainingState:
        state = initial_state(self._initial, self.device, [MOMENTUM])
        slow = (PARAMETERS, STATISTICS) if self.lookahead else ()
        return state | {SLOW + name: value.clone() for name, value in state.items() if name.startswith(slow)}

    def members(self, step: int) -> Tensor:
        return self.steps[step].members

    def learning_rate(self, step: int) -> float:
        return self.steps[step].rate

    def step_size(self, step: int) -> float:
        summed = len(self.steps[step].members) if self.summed else 1
        return self.steps[step].rate * summed / (1 - self.momentum)

    def advance(self, state: TrainingState, step: int, weights: Tensor) -> TrainingState:
        if not weights.any():  # nothing is left of this batch
            return state
        plan, after = self.steps[step], dict(state)
        with torch.enable_grad():
            inner = attached(state)
            for norm in self._norms.values():
                norm.weights = weights
            logits = torch.func.functional_call(self._training, self.weights_of(inner), (self.images(step),))
            losses = F.cross_entropy(
                logits, self.labels[plan.members], label_smoothing=self.label_smoothing, reduction="none"
            )
            mean = weighted_mean(losses, weights)
            found = gradients(mean * weights.sum() if self.summed else mean, inner, weights.requires_grad)
        for path, norm in self._norms.items():
            for name, value in norm.collected.items():
                after[f"{STATISTICS}{path}.{name}"] = value
            norm.weights, norm.collected = None, {}
        for name, gradient in found.items():
            plain = name.removeprefix(PARAMETERS)
            decay, scale = self.decay_and_scale(plain)
            gradient = gradient + decay * inner[name]
            momentum = self.momentum * state[f"{MOMENTUM}/{plain}"] + gradient
            after[f"{MOMENTUM}/{plain}"] = momentum
            after[name] = inner[name] - plan.rate * scale * (gradient + self.momentum * momentum)
        if plan.lookahead is not None:
            for name in [name for name in state if name.startswith(SLOW)]:
                fast = name.removeprefix(SLOW)
                after[name] = after[fast] = torch.lerp(after[fast], state[name], plan.lookahead)
        return after


class DigitsReplay(ResNet9Replay):
    def __init__(self, task: Digits, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device):
        data = task.train_data.select(indices)
        steps = [MomentumStep(chosen.to(device), rate) for chosen, rate in task.steps(len(data), order_seed)]
        model: Any = task.build_model(init_seed)
        smoothing = task.label_smoothing
        super().__init__(model, data.targets, steps, momentum=task.momentum, label_smoothing=smoothing, device=device)
        self.pixels = data.inputs.to(device)
        self.decay = task.weight_decay

    def images(self, step: int) -> Tensor:
        return self.pixels[self.steps[step].members]

    def decay_and_scale(self, name: str) -> tuple[float, float]:
        return self.decay, 1.0


class Cifar10Replay(ResNet9Replay):
    def __init__(self, task: Cifar10, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device):
        recipe, chosen = task._recipe, task._official(indices)
        bounds = batch_bounds(len(chosen), recipe.batch_size)
        num_steps = task.epochs * len(bounds)
        rng = np.random.default_rng([cifar10_module._ORDER_STREAM, order_seed])
        plan = torch.from_numpy(augmentation_plan(recipe, np.arange(len(chosen)), task.epochs, rng)).to(device)
        lookahead = 0 < task.lookahead_from <= num_steps
        self.recipe, steps, self.windows = recipe, [], []
        for step, factor in enumerate(triangle(num_steps)):
            epoch, batch = divmod(step, len(bounds))
            window = plan[epoch, :, slice(*bounds[batch])]  # (3, batch)
            decay = None
            if lookahead and (step + 1) % LOOKAHEAD_EVERY == 0:
                decay = LOOKAHEAD_DECAY * ((step + 1) / num_steps) ** 3
            if lookahead and step == num_steps - 1 and decay is None:
                decay = 1.0  # in the end the slow weights count, and steps since the last average are thrown away
            steps.append(MomentumStep(window[0], float(np.float32(factor)) * recipe.step_size, decay))
            self.windows.append((window[1], window[2]))
        data, official = task.cifar10, torch.from_numpy(chosen)
        super().__init__(
            task.build_model(init_seed), data.train_labels[official], steps, momentum=recipe.momentum,
            label_smoothing=recipe.label_smoothing, device=device, summed=True,
        )  # fmt: skip
        self.pixels = normalised_images(data.train_images[official]).to(device).permute(0, 2, 3, 1).contiguous()
        self.table = torch.from_numpy(pixel_table(self.pixels.shape[1], recipe.max_shift)).to(device)

    def images(self, step: int) -> Tensor:
        rows, columns = (self.table[part] for part in self.windows[step])
        chosen = self.steps[step].members
        return self.pixels[chosen[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)

    def decay_and_scale(self, name: str) -> tuple[float, float]:
        scale = self.recipe.bias_scaler if "norm" in name else 1.0
        return self.recipe.step_decay / (self.recipe.step_size * scale), scale


class TinyLMReplay(Replay):
    """AdamW with a linear decay.

    Its step divides by the root of a mean square, whose slope is infinite where a parameter has had no gradient at all
    (a letter that no sequence has): there the root's slope is taken as 0, as the parameter does not move.
    """

    gradient_steps = False

    def __init__(self, task: TinyLM, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device):
        self.device = torch.device(device)
        self.task, self.init_seed = task, init_seed
        recipe = Finetuning(task.batch_size, task.learning_rate, task.weight_decay, task.epochs, task.batch_size)
        self.recipe, self.num_examples = recipe, len(indices)
        positions = torch.arange(len(indices))
        self._members = [chosen.to(self.device) for chosen in batches(positions, recipe, order_seed)]
        self.num_steps = len(self._members)
        self.examples = task.train_data.select(indices).to(self.device)
        self._training = self.skeleton()

    def skeleton(self) -> nn.Module:
        return self.task.build_model(self.init_seed).to(self.device).eval()

    def start(self) -> TrainingState:
        return initial_state(self.skeleton(), self.device, [FIRST, SECOND])

    def members(self, step: int) -> Tensor:
        return self._members[step]

    def learning_rate(self, step: int) -> float:
        return self.recipe.learning_rate * (1 - step / self.num_steps)

    def advance(self, state: TrainingState, step: int, weights: Tensor) -> TrainingState:
        if not weights.any():
            return state
        rate, chosen, after = self.learning_rate(step), self._members[step], dict(state)
        with torch.enable_grad():
            inner = attached(state)
            logits = torch.func.functional_call(self._training, self.weights_of(inner), (self.examples.inputs[chosen],))
            targets = self.examples.targets[chosen]
            losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            found = gradients(weighted_mean(losses.view_as(targets).mean(1), weights), inner, weights.requires_grad)
        corrections = [1 - beta ** (step + 1) for beta in BETAS]
        for name, gradient in found.items():
            plain = name.removeprefix(PARAMETERS)
            first = BETAS[0] * state[f"{FIRST}/{plain}"] + (1 - BETAS[0]) * gradient
            second = BETAS[1] * state[f"{SECOND}/{plain}"] + (1 - BETAS[1]) * gradient.square()
            after[f"{FIRST}/{plain}"], after[f"{SECOND}/{plain}"] = first, second
            moved = second > 0
            root = torch.where(moved, second, 1.0).sqrt() / corrections[1] ** 0.5
            update = torch.where(moved, first / corrections[0] / (root + EPSILON), 0.0)
            after[name] = inner[name] * (1 - rate * self.recipe.weight_decay) - rate * update
        return after


# ---- which task has which ----

REPLAYS: dict[str, Any] = {
    "cifar10": Cifar10Replay,
    "digits": DigitsReplay,
    "smooth_digits": DigitsReplay,
    "tinylm": TinyLMReplay,
}


def why_not_replayed(task: Task) -> str | None:
    """Why there is no replay of this task's training, or None."""
    if hasattr(task, "replay"):
        return None
    own = type(task).__module__.startswith("retrain.tasks.")  # not a subclass of somebody else
    if not own or task.name not in REPLAYS:
        return f"the training of task {task.name} cannot be replayed step by step; see retrain/replays"
    if isinstance(task, Cifar10) and task.protocol != "scratch":
        return f"CIFAR-10's protocol {task.protocol} begins with a warm-up that is not replayed; take scratch"
    return None


def replay_of(task: Any, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> Replay:
    """The task's training on these examples."""
    if reason := why_not_replayed(task):
        raise UsageError(reason)
    make = task.replay if hasattr(task, "replay") else functools.partial(REPLAYS[task.name], task)
    return make(indices, init_seed=init_seed, order_seed=order_seed, device=device)


def replay_source(task: Task) -> str:
    """A fingerprint of the code that replays: part of the key of what it made."""
    return source_fingerprint("retrain.replays", "retrain.replays.train", type(task).__module__)
