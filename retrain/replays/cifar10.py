"""CIFAR-10's training under protocol `scratch`, replayed in float32.

The order, flips and translations of every image, the learning rates and lookahead are the engine's own; only the
precision of the convolutions (the task's default on a GPU is bfloat16) and the order of sums differ. Like every replay
it holds one state at a time: two megabytes of weights, as many momenta, and the slow weights of lookahead.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrain.examples import Indices
from retrain.models.resnet9_training import (
    LOOKAHEAD_DECAY,
    LOOKAHEAD_EVERY,
    Engine,
    batch_bounds,
    pixel_table,
    triangle,
)
from retrain.replays.resnet9 import MomentumStep, ResNet9Replay
from retrain.tasks import cifar10 as task_module
from retrain.tasks.cifar10 import Cifar10, normalised_images


class Cifar10Replay(ResNet9Replay):
    @staticmethod
    def why_not(task: Cifar10) -> str | None:
        if task.protocol != "scratch":
            return f"CIFAR-10's protocol {task.protocol} begins with a warm-up that is not replayed; take scratch"
        return None

    def __init__(self, task: Cifar10, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device):
        recipe, chosen = task._recipe, task._official(indices)
        bounds = batch_bounds(len(chosen), recipe.batch_size)
        num_steps = task.epochs * len(bounds)
        rng = np.random.default_rng([task_module._ORDER_STREAM, order_seed])
        positions = np.arange(len(chosen))
        planner: Any = SimpleNamespace(recipe=recipe)
        plan = torch.from_numpy(Engine._plan(planner, positions, task.epochs, rng)).to(device)  # (epochs, 3, n)
        lookahead = 0 < task.lookahead_from <= num_steps
        self.recipe, steps, self.windows = recipe, [], []
        for step, factor in enumerate(triangle(num_steps)):
            epoch, batch = divmod(step, len(bounds))
            window = plan[epoch, :, slice(*bounds[batch])]
            decay = None
            if lookahead and (step + 1) % LOOKAHEAD_EVERY == 0:
                decay = LOOKAHEAD_DECAY * ((step + 1) / num_steps) ** 3
            if lookahead and step == num_steps - 1 and decay is None:
                decay = 1.0  # in the end the slow weights count, and steps since the last average are thrown away
            steps.append(MomentumStep(window[0], float(np.float32(factor)) * recipe.step_size, decay))
            self.windows.append((window[1], window[2]))
        settings: dict[str, Any] = {
            "momentum": recipe.momentum,
            "label_smoothing": recipe.label_smoothing,
            "summed": True,
        }
        data = task.cifar10
        official = torch.from_numpy(np.asarray(chosen))
        super().__init__(task.build_model(init_seed), data.train_labels[official], steps, device=device, **settings)
        self.pixels = normalised_images(data.train_images[official]).to(device).permute(0, 2, 3, 1).contiguous()
        self.table = torch.from_numpy(pixel_table(self.pixels.shape[1], recipe.max_shift)).to(device)

    def images(self, step: int) -> Tensor:
        rows, columns = (self.table[part] for part in self.windows[step])
        chosen = self.steps[step].members
        return self.pixels[chosen[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)

    def decay_and_scale(self, name: str) -> tuple[float, float]:
        scale = self.recipe.bias_scaler if "norm" in name else 1.0
        return self.recipe.step_decay / (self.recipe.step_size * scale), scale
