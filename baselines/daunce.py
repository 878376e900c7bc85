"""daunce: the covariance of training and query losses over models that are finetuned on a perturbed loss.

Each model starts at the base model, with a random share of the training set, and goes down the mean of

    (L_i(w) - L_i)^2 - r_i (df_i)^T dL_i/df,     r_i uniform in [-rho, rho], drawn once a model

L_i is the loss at the base model, dL_i/df its slope in the outputs there, and df_i what the outputs have moved by.
Scores are minus the covariance over models. With F the second moment of the losses' gradients, they tend to a share of
-g_query^T F^-1 g_train where finetunes are long, and of -g_query^T F g_train where they are short. So `steps` and
`step_size` decide how much of F is inverted; and F is the share's, so that a small share knows few directions.

`objective=hessian` has L_i(w) in place of the square, and 1 + r_i in place of r_i. Long finetunes then tend to
-g_query^T H^-1 F H^-1 g_train. Both are objectives of the authors' code, whose command for CIFAR-10 takes `fisher` with
the settings here: 117 steps are its one epoch of 15,000 images. What departs from it: no augmentation; normalisations
as in evaluation; losses in the covariance, where its example shows margins; and rho is 1 there. Between models that
stay near the base model rho moves no rank. With 1 and few examples they run away: nothing bounds `fisher` from below.
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
OBJECTIVES = ("fisher", "hessian")
_STREAM = 81


@dataclass(frozen=True, kw_only=True)
class Daunce(Method):
    version: ClassVar[int] = 2
    knows_output: ClassVar[bool] = True
    paper: ClassVar[str] = "Pan et al. 2025, Daunce: data attribution through uncertainty estimation"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "step_size": (0.03, 0.1, 0.01),
        "share": (0.3, 1.0),
    }
    library_settings: ClassVar[dict[str, Any]] = {"step_size": 0.03, "steps": 117, "rho": 1.0}
    warm_up: ClassVar[dict[str, Any]] = {"models": 2}

    models: int = 100
    share: float = 0.3  # of the training set, drawn anew for each model
    objective: str = "fisher"  # or "hessian"
    rho: float = 0.1  # how strong the perturbation is
    steps: int = 117  # as many whatever the size of the data: an epoch of a small set would hardly move
    step_size: float = 0.03  # at first; it falls to 0 as a cosine does
    momentum: float = 0.9
    minibatch: int = 128
    batch_size: int = batch_size_option(1000)  # of the examples whose losses are taken

    def __post_init__(self) -> None:
        if self.models < 2 or min(self.steps, self.minibatch) < 1:
            raise ValueError(
                f"models is {self.models}, steps {self.steps} and minibatch {self.minibatch}; expected at least 2, 1 "
                "and 1"
            )
        if not 0 < self.share <= 1 or min(self.step_size, self.rho) <= 0 or not 0 <= self.momentum < 1:
            raise ValueError(
                f"share is {self.share}, step_size {self.step_size}, rho {self.rho} and momentum {self.momentum}; "
                "expected a share, more than 0 twice, and less than 1"
            )
        if self.objective not in OBJECTIVES:
            raise ValueError(f'objective is "{self.objective}"; available: {", ".join(OBJECTIVES)}')

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
        """Which training examples a model is finetuned on, the 1 + r of each, and what its order is drawn from."""
        rng = np.random.default_rng([problem.seed, number, _STREAM])
        count = max(1, round(self.share * len(problem.train)))
        chosen = rng.permutation(len(problem.train))[:count]
        return chosen, torch.from_numpy(1 + self.rho * (2 * rng.random(count, dtype=np.float32) - 1)), rng

    def perturbed(self, problem: Problem, number: int) -> nn.Module:
        """That many-th model, finetuned."""
        chosen, factors, rng = self.drawn(problem, number)
        examples, factors = problem.train.select(chosen).to(problem.device), factors.to(problem.device)
        model = detached_copy(problem.model)
        weights = list(trainable_parameters(model).values())
        optimizer = torch.optim.SGD(weights, lr=self.step_size, momentum=self.momentum)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(cosine, total=self.steps))
        waiting: list[Tensor] = []
        for _ in range(self.steps):
            waiting = waiting or list(torch.from_numpy(rng.permutation(len(examples))).split(self.minibatch))
            members = waiting.pop(0).to(problem.device)
            batch = (examples.inputs[members], examples.targets[members])
            asked = (problem.task.loss_function, model, problem.model, batch, factors[members])
            loss = objective(*asked, squared=self.objective == "fisher")
            for weight, slope in zip(weights, torch.autograd.grad(loss, weights, allow_unused=True), strict=True):
                weight.grad = slope
            optimizer.step()
            schedule.step()
        return model.requires_grad_(False)


def cosine(step: int, total: int) -> float:
    return (1 + math.cos(math.pi * step / total)) / 2


def objective(loss: Loss, model: nn.Module, base: nn.Module, batch: Batch, factors: Tensor, *, squared: bool) -> Tensor:
    """The perturbed loss's mean over the batch; factors (batch,) are the 1 + r."""
    inputs, targets = batch
    with torch.no_grad():
        before = base(inputs)
    with torch.enable_grad():
        before = before.detach().requires_grad_()
        at_base = mean_over_tokens(loss.per_example(before, targets))
        (slope,) = torch.autograd.grad(at_base.sum(), before)
        outputs = model(inputs)
        moved = ((outputs - before.detach()) * slope).flatten(1).sum(1)
        now = mean_over_tokens(loss.per_example(outputs, targets))
        if squared:
            return ((now - at_base.detach()).square() - (factors - 1) * moved).mean()
        return (now - factors * moved).mean()
