"""magic: the exact gradient of every query's loss in every training example's weight, through the whole training.

    python -m bench.lds --task digits --alpha 0.99 --initialisation replayed --methods magic ekfac --queries 20

The base model's training is replayed in float32 (`retrain/replays`: initial weights, order and augmentation as they
were) and differentiated backwards, step by step: with lambda_T the gradient of the query's loss in the last state,
lambda_t = (d state_{t+1} / d state_t)^T lambda_{t+1}, and an example's score is the sum of
lambda_{t+1}^T d state_{t+1} / d weight over the steps that it took part in. Nothing is approximated but the change of
weight from 1 to 0, which is taken to be small: no Hessian, no convergence, no damping.

Weights are those of the replay: an example of weight 0 is struck out of its batches. What is predicted is a replay of
the same training (`--initialisation replayed`); for a training in another order the answer is another one, and
`--checkpoints K` averages over several.

The derivative of a chaotic training is huge and says nothing about finite changes: `growth` in the diagnostics is how
many times longer the parameters' part of lambda_0 is than that of lambda_T (the largest of the queries'; 1 is harmless,
a million is hopeless).

The training is replayed in whole float32; its derivative, of which three digits are enough, may be rounded as
convolutions are by default on a GPU. States are kept as far as memory goes, and otherwise computed again from the
nearest one kept. Queries are differentiated `query_batch_size` at a time, and finished ones are saved.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from baselines.method import Attribution, Method, Problem, Size, batch_size_option
from baselines.support.memory import free_bytes
from retrain.backends import without_onednn
from retrain.errors import UsageError
from retrain.replays import replay_of, why_not_replayed
from retrain.replays.replay import PARAMETERS, Replay, TrainingState, steps_of
from retrain.subsets import checkpoint_seeds
from retrain.task import Task, mean_over_tokens

TRAINED_ON = ("everything", "attributed")
STATES_SHARE = 0.3  # of the free memory, for states that are kept


@dataclass(frozen=True, kw_only=True)
class Magic(Method):
    paper: ClassVar[str] = "Ilyas and Engstrom 2025, MAGIC: Near-optimal data attribution for deep learning"

    # What the differentiated training looks at: what the base model did, or, as retrainings do where only a part of
    # the training set is attributed, that part alone.
    trained_on: str = "everything"
    query_batch_size: int = batch_size_option(25)

    def __post_init__(self) -> None:
        if self.trained_on not in TRAINED_ON:
            raise ValueError(f'trained_on is "{self.trained_on}"; available: {", ".join(TRAINED_ON)}')

    def skip(self, task: Task) -> str | None:
        return why_not_replayed(task)

    def memory_bytes(self, size: Size) -> int:
        """A few states; for every query of a batch as much as two; the scores."""
        states = 4 * 3 * size.num_parameters * (4 + 2 * self.query_batch_size)
        return states + 8 * size.num_train * size.num_queries

    def score(self, problem: Problem, state: Any) -> Attribution:
        if problem.pool is not None:
            raise UsageError(
                "magic differentiates the base training; it has no scores at --reference subset or attributed"
            )
        everything = np.arange(len(problem.train))
        trained = everything if self.trained_on == "everything" else np.sort(problem.attributed_indices)
        seeds = checkpoint_seeds(problem.seed, problem.checkpoint_number)
        replay = replay_of(problem.task, trained, **seeds, device=problem.device)
        saved = problem.work.load("magic")
        rows = [] if saved is None else [torch.from_numpy(saved[0]["scores"].copy())]
        growth = [] if saved is None else list(saved[1]["growth"])
        starts = range(len(rows[0]) if rows else 0, len(problem.queries), self.query_batch_size)
        with without_onednn():
            path = TrainingPath(replay, problem.progress)
            for number, start in enumerate(starts, 1):
                asked = problem.queries.select(range(len(problem.queries))[start : start + self.query_batch_size])

                def losses(last: TrainingState, asked: Any = asked) -> Tensor:
                    inputs, targets = asked.inputs.to(problem.device), asked.targets.to(problem.device)
                    found = problem.task.loss_function.per_example(replay.outputs(last, inputs), targets)
                    return mean_over_tokens(found)

                def bar(steps: range, number: int = number) -> Iterable:
                    what = f"magic: {number} of {len(starts)} batches of queries, backwards"
                    return problem.progress(steps, total=len(steps), description=what)

                effects, grown = metagradient(path, losses, bar)
                rows.append(effects.cpu())
                growth += grown
                if problem.work.due():
                    problem.work.save("magic", {"scores": torch.cat(rows).numpy()}, {"growth": growth})
            difference = _difference(problem, replay, path.last)
        places = np.searchsorted(trained, problem.attributed_indices)
        scores = torch.cat(rows)[:, torch.from_numpy(places)].contiguous()
        diagnostics = {"steps": replay.num_steps, "growth": max(growth), "replay_differs_by": difference}
        return Attribution(scores=scores, train_scale=torch.ones(scores.shape[1]), diagnostics=diagnostics)


def _difference(problem: Problem, replay: Replay, last: TrainingState) -> float:
    """The largest difference of a query's loss between the replayed model and the base model."""
    some = problem.queries.select(range(min(len(problem.queries), 500)))
    replayed, base = (problem.task.losses(model, some, problem.device) for model in (replay.model(last), problem.model))
    return float((replayed - base).abs().max())


class TrainingPath:
    """Every state of a training at weights of one, from as many as are kept."""

    def __init__(self, replay: Replay, progress: Callable[..., Iterable]):
        self.replay = replay
        start = replay.start()
        room = STATES_SHARE * free_bytes(replay.device) / sum(value.nbytes for value in start.values())
        # All of them, or one every so many steps, and then as many again while a stretch is gone through.
        self.every = 1
        while replay.num_steps / self.every + (self.every if self.every > 1 else 0) > room and self.every < 1024:
            self.every *= 2
        self.kept = {0: start}
        description = "magic: the base training"
        states = progress(enumerate(steps_of(replay), 1), total=replay.num_steps, description=description)
        for number, state in states:
            if number % self.every == 0:
                self.kept[number] = state
            self.last = state

    def backwards(self) -> Iterable[tuple[int, TrainingState]]:
        """(step, the state before it), from the last step to the first."""
        stretch: list[TrainingState] = []
        for step in reversed(range(self.replay.num_steps)):
            first = step - step % self.every
            if not stretch:
                steps = range(first, step)
                stretch = [self.kept[first], *steps_of(self.replay, steps=steps, state=self.kept[first])]
            yield step, stretch.pop()


def metagradient(
    path: TrainingPath,
    losses: Callable[[TrainingState], Tensor],
    progress: Callable[[range], Iterable] = lambda steps: steps,
) -> tuple[Tensor, list[float]]:
    """(q, n): the slope of each of the q losses of the last state in the weight of each example, and its growth."""
    replay = path.replay
    last = {name: value.detach().requires_grad_() for name, value in path.last.items()}
    with torch.enable_grad():
        values = losses(last)
    adjoint = _pulled_back([values], list(last.values()), [torch.eye(len(values), device=replay.device)])
    found = torch.zeros(len(values), replay.num_examples, device=replay.device)
    names = list(last)
    began = _lengths(adjoint, names)
    backwards = iter(path.backwards())
    for _ in progress(range(replay.num_steps)):
        step, before = next(backwards)
        members = replay.members(step)
        state = {name: before[name].detach().requires_grad_() for name in names}
        weights = torch.ones(len(members), device=replay.device, requires_grad=True)
        with torch.enable_grad():
            after = replay.advance(state, step, weights)
        moved = [(after[name], slope) for name, slope in zip(names, adjoint) if after[name].requires_grad]
        *adjoint, effect = _pulled_back([v for v, _ in moved], [*state.values(), weights], [s for _, s in moved])
        found.index_add_(1, members, effect)
    growth = (_lengths(adjoint, names) / began.clamp(min=1e-30)).tolist()
    if not torch.isfinite(found).all():
        raise FloatingPointError(
            "the training's derivative overflows: it is chaotic; a lower learning rate makes it smooth"
        )
    return found, growth


def _pulled_back(outputs: list[Tensor], inputs: list[Tensor], slopes: list[Tensor]) -> list[Tensor]:
    """For each of q cotangents, a row of every slope, the product with the Jacobian: (q, ...) for each input."""
    found = torch.autograd.grad(outputs, inputs, slopes, is_grads_batched=True, allow_unused=True)
    count = len(slopes[0])
    return [
        torch.zeros(count, *value.shape, device=value.device) if slope is None else slope.detach()
        for value, slope in zip(inputs, found)
    ]


def _lengths(adjoint: list[Tensor], names: list[str]) -> Tensor:
    """(q,): the norm of each query's cotangent of the parameters; an optimizer's moments are in other units."""
    of_parameters = [part for part, name in zip(adjoint, names, strict=True) if name.startswith(PARAMETERS)]
    return torch.stack([part.flatten(1).square().sum(1) for part in of_parameters]).sum(0).sqrt()
