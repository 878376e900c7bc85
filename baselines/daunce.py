"""daunce: the covariance of training and query losses over models that are finetuned on a perturbed loss.

Each model starts at the base model, with a random share of the training set, and goes down the mean of

    L_i(w) - 2 u_i (df_i)^T dL_i/df,     u_i uniform in [0, 1], drawn once a model; df_i what its outputs have moved by

where dL_i/df is the loss's slope in the outputs at the base model. The mean of 2 u is 1, so that the base model stays
the middle, and each model ends where its own weights 2 u_i - 1 of the gradients take it. Scores are minus the
covariance over models: of a quadratic loss g_query^T H^-1 F H^-1 g_train, F the gradients' second moment.

The objective and its settings (share, step size, momentum, minibatch, one epoch, the cosine decay) are those of the
authors' code. What departs from it: no augmentation, and normalisations as in evaluation.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from baselines.bif.covariance import covariance
from baselines.method import Attribution, Method, Problem, Size, batch_size_option
from baselines.support.copies import detached_copy
from baselines.support.gradients import trainable_parameters
from retrain.examples import Batch, Examples
from retrain.losses import Loss, mean_over_tokens
from retrain.outputs import output_of

MODELS_A_PART = 10
_STREAM = 81


@dataclass(frozen=True, kw_only=True)
class Daunce(Method):
    version: ClassVar[int] = 1
    knows_output: ClassVar[bool] = True
    paper: ClassVar[str] = "Pan et al. 2025, Daunce: data attribution through uncertainty estimation"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"step_size": (0.03, 0.003, 0.3), "epochs": (1, 3)}
    library_settings: ClassVar[dict[str, Any]] = {"step_size": 0.03, "epochs": 1}
    warm_up: ClassVar[dict[str, Any]] = {"models": 2}

    models: int = 100
    share: float = 0.3  # of the training set, drawn anew for each model
    epochs: int = 1
    step_size: float = 0.03  # at first; it falls to 0 as a cosine does
    momentum: float = 0.9
    minibatch: int = 128
    batch_size: int = batch_size_option(1000)  # of the examples whose losses are taken

    def __post_init__(self) -> None:
        if self.models < 2 or min(self.epochs, self.minibatch) < 1:
            raise ValueError(
                f"models is {self.models}, epochs {self.epochs} and minibatch {self.minibatch}; expected at least 2, 1 "
                "and 1"
            )
        if not 0 < self.share <= 1 or self.step_size <= 0 or not 0 <= self.momentum < 1:
            raise ValueError(
                f"share is {self.share}, step_size {self.step_size} and momentum {self.momentum}; expected a share, "
                "more than 0, and less than 1"
            )

    def memory_bytes(self, size: Size) -> int:
        """Two models, one's slope and momentum; all models' losses, and the scores."""
        losses = 8 * self.models * (size.num_attributed + size.num_queries)
        return 16 * size.num_parameters + losses + 8 * size.num_attributed * size.num_queries

    def num_parts(self) -> int:
        return -(-self.models // MODELS_A_PART)

    def score_part(self, problem: Problem, state: Any, part: int) -> dict[str, Tensor]:
        """{"losses": (models, q + n)}: the queries' outputs, then the training examples' losses."""
        saved = problem.work.load(f"daunce-{part}")
        rows = [] if saved is None else list(torch.from_numpy(saved[0]["losses"].copy()))
        first = part * MODELS_A_PART
        waiting = range(first + len(rows), min(first + MODELS_A_PART, self.models))
        for number in problem.progress(waiting, total=len(waiting), description="daunce: models"):
            model = self.perturbed(problem, number)
            outputs = output_of(self._losses(problem, model, problem.queries), problem.output)
            rows.append(torch.cat([outputs, self._losses(problem, model, problem.attributed)]))
            if problem.work.due():
                problem.work.save(f"daunce-{part}", {"losses": torch.stack(rows).numpy()}, {})
        return {"losses": torch.stack(rows)}

    def merge(self, problem: Problem, state: Any, parts: Sequence[Mapping[str, Tensor]]) -> Attribution:
        losses = torch.cat([part["losses"] for part in parts])
        losses = losses[torch.isfinite(losses).all(1)].double()
        if len(losses) < 2:
            raise FloatingPointError(
                f"daunce: {self.models - len(losses)} of {self.models} models diverged; take a smaller step_size"
            )
        queries, train = losses.split([len(problem.queries), len(problem.attributed)], dim=1)
        cross, _, scale = covariance(queries[None], train[None], "pooled")
        own = self._losses(problem, problem.model, problem.attributed)
        told = {
            "models": len(losses),
            "diverged": self.models - len(losses),
            "rise": float((train.mean(0) - own).mean()),
        }
        return Attribution(scores=-cross.float(), train_scale=scale.float(), diagnostics=told)

    def score(self, problem: Problem, state: Any) -> Attribution:
        return self.merge(problem, state, [self.score_part(problem, state, part) for part in range(self.num_parts())])

    def _losses(self, problem: Problem, model: nn.Module, examples: Examples) -> Tensor:
        with torch.no_grad():
            batches = (tuple(p.to(problem.device) for p in batch) for batch in examples.batches(self.batch_size))
            return torch.cat([problem.task.example_loss(model, batch).float().cpu() for batch in batches])  # type: ignore[arg-type]

    def drawn(self, problem: Problem, number: int) -> tuple[np.ndarray, Tensor, np.random.Generator]:
        """Which training examples a model is finetuned on, the 2 u of each, and what its order is drawn from."""
        rng = np.random.default_rng([problem.seed, number, _STREAM])
        count = max(1, round(self.share * len(problem.train)))
        chosen = rng.permutation(len(problem.train))[:count]
        return chosen, torch.from_numpy(2 * rng.random(count, dtype=np.float32)), rng

    def perturbed(self, problem: Problem, number: int) -> nn.Module:
        """That many-th model, finetuned."""
        chosen, factors, rng = self.drawn(problem, number)
        examples, factors = problem.train.select(chosen).to(problem.device), factors.to(problem.device)
        model = detached_copy(problem.model)
        weights = list(trainable_parameters(model).values())
        optimizer = torch.optim.SGD(weights, lr=self.step_size, momentum=self.momentum)
        starts = range(0, len(examples), self.minibatch)
        decay = partial(cosine, total=self.epochs * len(starts))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
        for _ in range(self.epochs):
            order = torch.from_numpy(rng.permutation(len(examples))).to(problem.device)
            for start in starts:
                members = order[start : start + self.minibatch]
                batch = (examples.inputs[members], examples.targets[members])
                loss = objective(problem.task.loss_function, model, problem.model, batch, factors[members])
                for weight, slope in zip(weights, torch.autograd.grad(loss, weights, allow_unused=True), strict=True):
                    weight.grad = slope
                optimizer.step()
                schedule.step()
        return model.requires_grad_(False)


def cosine(step: int, total: int) -> float:
    return (1 + math.cos(math.pi * step / total)) / 2


def objective(loss: Loss, model: nn.Module, base: nn.Module, batch: Batch, factors: Tensor) -> Tensor:
    """The perturbed loss's mean over the batch; factors (batch,) are the 2 u."""
    inputs, targets = batch
    with torch.no_grad():
        before = base(inputs)
    with torch.enable_grad():
        before = before.detach().requires_grad_()
        at_base = mean_over_tokens(loss.per_example(before, targets)).sum()
        (slope,) = torch.autograd.grad(at_base, before)
        outputs = model(inputs)
        moved = ((outputs - before.detach()) * slope).flatten(1).sum(1)
        return (mean_over_tokens(loss.per_example(outputs, targets)) - factors * moved).mean()
