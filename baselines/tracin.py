"""tracin: gradients' inner products, summed over snapshots of the base training times its learning rates, by dattri.

    pip install dattri                     # optional: without it the method is skipped, with this line

The base model's training is looked at after equal numbers of steps (`baselines/support/snapshots.py`). A snapshot
counts with the mean learning rate of the steps since the one before. dattri projects gradients to 512 numbers unless
told otherwise, by a dictionary that its calls share and change; here none is shared, and `projection=0`, the default,
projects nothing. It makes the queries' gradients anew for every batch of training examples: these come in the largest
batches that fit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from baselines.method import Attribution, Method, Problem, Size, batch_size_option
from baselines.support.dattri_task import dattri_loader, dattri_missing, dattri_task, without_bars
from baselines.support.inner_products import parts_that_fit
from baselines.support.memory import free_bytes
from baselines.support.snapshots import snapshots
from retrain.replays import why_not_replayed
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

        found = snapshots(problem, self.snapshots, "tracin")
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
        for number, one in problem.progress(waiting, total=len(waiting), description="tracin: snapshots"):
            attributor = TracInAttributor(
                dattri_task(problem, one.weights, single=True),
                weight_list=torch.tensor([one.rate]),
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
            diagnostics={"snapshots": len(found), "rates": [one.rate for one in found]},
        )

    def _projector(self, problem: Problem) -> dict[str, Any] | None:
        if not self.projection:
            return None
        made = {"proj_dim": self.projection, "proj_max_batch_size": 32, "proj_seed": problem.seed}
        return {**made, "device": str(problem.device)}
