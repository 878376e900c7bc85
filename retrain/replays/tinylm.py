"""The tiny language model's finetuning, replayed: AdamW with a linear decay.

Adam's step divides by the root of a mean square, whose slope is infinite where a parameter has had no gradient at all
(a letter that no sequence has): there the root's slope is taken as 0, as the parameter does not move.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrain.examples import Indices
from retrain.models.lm_training import Finetuning, batches
from retrain.replays.replay import PARAMETERS, Replay, TrainingState, attached, gradients, initial_state, weighted_mean
from retrain.tasks.tinylm import TinyLM

FIRST, SECOND = "first", "second"  # moments
BETAS, EPSILON = (0.9, 0.999), 1e-8  # torch's own


class TinyLMReplay(Replay):
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
