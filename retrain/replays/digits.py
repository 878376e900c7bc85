"""The digits task's training, replayed."""

from typing import Any

import torch
from torch import Tensor

from retrain.examples import Indices
from retrain.replays.resnet9 import MomentumStep, ResNet9Replay
from retrain.tasks.digits import Digits, rise_and_fall


class DigitsReplay(ResNet9Replay):
    def __init__(self, task: Digits, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device):
        data = task.train_data.select(indices)
        generator = torch.Generator().manual_seed(order_seed)
        starts = range(0, len(data), task.batch_size)
        num_steps = task.epochs * len(starts)
        steps: list[MomentumStep] = []
        for _ in range(task.epochs):
            order = torch.randperm(len(data), generator=generator).to(device)
            for start in starts:
                rate = task.learning_rate * rise_and_fall((len(steps) + 1) / (num_steps + 1))
                steps.append(MomentumStep(order[start : start + task.batch_size], rate))
        model: Any = task.build_model(init_seed)
        settings: dict[str, Any] = {"momentum": task.momentum, "label_smoothing": task.label_smoothing}
        super().__init__(model, data.targets, steps, device=device, **settings)
        self.pixels = data.inputs.to(device)
        self.decay = task.weight_decay

    def images(self, step: int) -> Tensor:
        return self.pixels[self.steps[step].members]

    def decay_and_scale(self, name: str) -> tuple[float, float]:
        return self.decay, 1.0
