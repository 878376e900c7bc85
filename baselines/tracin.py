"""tracin: gradients' inner products, summed over snapshots of the base training times its learning rates, by dattri.

    pip install dattri                     # optional: without it the method is skipped, with this line

The base model's training is run again (`retrain/replays`: same initial weights, same order) and looked at after equal
numbers of steps; the last snapshot is the base model itself. A snapshot counts with the mean learning rate of the steps
since the one before. dattri projects gradients to 512 numbers unless told otherwise, by a dictionary that its calls
share and change; here none is shared, and `projection=0`, the default, projects nothing. It makes the queries'
gradients anew for every batch of training examples: these come in the largest batches that fit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from baselines.method import Attribution, Method, Problem, Size, batch_size_option
from baselines.support.dattri_task import dattri_loader, dattri_missing, dattri_task, without_bars
from baselines.support.inner_products import parts_that_fit
from baselines.support.memory import free_bytes
from retrain.backends import without_onednn
from retrain.replays import replay_of, why_not_replayed
from retrain.replays.replay import steps_of
from retrain.seeds import checkpoint_seeds
from retrain.task import Task

GRADIENTS_SHARE = 0.2  # of the free memory, for the training examples' gradients


@dataclass(frozen=True, kw_only=True)
class TracIn(Method):
    libraries: ClassVar[tuple[str, ...]] = ("dattri",)
    paper: ClassVar[str] = "Pruthi et al. 2020, Estimating training data influence by tracing gradient descent"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"snapshots": (5, 1, 10), "cosine": (False, True)}
    library_settings: ClassVar[dict[str, Any]] = {"projection": 512}

    snapshots: int = 5  # of the training, the base model included
    cosine: bool = False  # gradients of length one (dattri's normalized_grad)
    projection: int = 0  # numbers that a gradient is projected to; 0: none
    batch_size: int = batch_size_option(2000)
    query_batch_size: int = batch_size_option(250)

    def __post_init__(self) -> None:
        if self.snapshots < 1 or self.projection < 0:
            raise ValueError(
                f"snapshots is {self.snapshots} and projection {self.projection}; expected at least 1 and at least 0"
            )

    def skip(self, task: Task) -> str | None:
        return dattri_missing() or why_not_replayed(task)

    def memory_bytes(self, size: Size) -> int:
        return 4 * (3 * self.query_batch_size * size.num_parameters + 4 * size.num_attributed * size.num_queries)

    def score(self, problem: Problem, state: Any) -> Attribution:
        from dattri.algorithm import TracInAttributor

        found = self._snapshots(problem)
        room = GRADIENTS_SHARE * free_bytes(problem.device)
        numbers = sum(parameter.numel() for parameter in problem.model.parameters() if parameter.requires_grad)
        train = dattri_loader(problem.attributed, parts_that_fit(self.batch_size, room / (4 * numbers)))
        queries = dattri_loader(problem.queries, self.query_batch_size)
        scores = torch.zeros(len(problem.attributed), len(problem.queries))
        squares, done = torch.zeros(len(problem.attributed)), 0
        if (saved := problem.work.load("tracin")) is not None:
            scores, squares = (torch.from_numpy(saved[0][name].copy()) for name in ("scores", "squares"))
            done = saved[1]["done"]
        waiting = list(enumerate(found))[done:]
        for number, (weights, rate) in problem.progress(waiting, total=len(waiting), description="tracin: snapshots"):
            attributor = TracInAttributor(
                dattri_task(problem, weights, single=True),
                weight_list=torch.tensor([rate]),
                normalized_grad=self.cosine,
                device=str(problem.device),
            )
            attributor.projector_kwargs = self._projector(problem)
            with without_bars():
                scores += attributor.attribute(train, queries).cpu()
                squares += attributor.self_attribute(train).cpu()
            if problem.work.due():
                arrays = {"scores": scores.numpy(), "squares": squares.numpy()}
                problem.work.save("tracin", arrays, {"done": number + 1})
        return Attribution(
            scores=-scores.T.contiguous(),
            train_scale=squares.clamp(min=0).sqrt(),
            diagnostics={"snapshots": len(found), "rates": [rate for _, rate in found]},
        )

    def _projector(self, problem: Problem) -> dict[str, Any] | None:
        if not self.projection:
            return None
        made = {"proj_dim": self.projection, "proj_max_batch_size": 32, "proj_seed": problem.seed}
        return {**made, "device": str(problem.device)}

    def _snapshots(self, problem: Problem) -> list[tuple[dict[str, Tensor], float]]:
        """(a model's state, the learning rate it counts with), in order; the last is the base model."""
        base = problem.model.state_dict()
        seeds = problem.training_seeds or checkpoint_seeds(problem.seed, problem.checkpoint_number)
        trained = range(len(problem.train)) if problem.trained_on is None else problem.trained_on(0)
        replay = replay_of(problem.task, trained, **seeds, device=problem.device)
        number = min(self.snapshots, replay.num_steps)
        ends = [round((k + 1) * replay.num_steps / number) for k in range(number)]
        rates = [replay.learning_rate(step) for step in range(replay.num_steps)]
        found, before = [], 0
        with without_onednn():
            states = problem.progress(
                enumerate(steps_of(replay, steps=range(ends[-2] if number > 1 else 0)), 1),
                total=ends[-2] if number > 1 else 0,
                description="tracin: the base training",
            )
            for step, state in states:
                if step in ends:
                    weights = {name: value.clone() for name, value in replay.weights_of(state).items()}
                    found.append(({**base, **weights}, sum(rates[before:step]) / (step - before)))
                    before = step
        return [*found, (base, sum(rates[before:]) / len(rates[before:]))]
