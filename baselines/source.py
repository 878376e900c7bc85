"""source: the base training unrolled in a few segments, in each of which curvature and gradients stand still.

The training is looked at after equal numbers of steps, and cut into segments of as many such checkpoints. A segment has
the mean Fisher information H of its checkpoints (kfac's, eigenvalue-corrected), each example's mean gradient, and the
distance t that its steps go along a gradient, momentum included. Including an example moves the weights by

    -(1 - exp(-t H)) H^-1 g       in a segment, of which every later one leaves       exp(-t H)

and a query's loss by its gradient at the base model times the sum of that. Where a segment is long and H is large it is
influence; where it is short, TracIn. There is no damping: the training's own length is one. Weight decay, larger steps
for some parameters and averages of weights are left out. A training by Adam is refused: its steps follow no gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from baselines.method import Attribution, Method, Problem, Size, batch_size_option
from baselines.support.copies import detached_copy
from baselines.support.curvature import Block, GradientsInBasis, fit_curvature, packed_blocks, unpacked_blocks
from baselines.support.gradients import PerExampleGradients, matching_parameters
from baselines.support.inner_products import held_bytes, inner_products
from baselines.support.snapshots import snapshots
from retrain.examples import Batch
from retrain.replays import REPLAYS, why_not_replayed
from retrain.task import Task


@dataclass
class Segment:
    distance: float
    weights: list[dict[str, Tensor]]  # of its checkpoints
    blocks: list[Block]

    def decay(self) -> list[Tensor]:
        """exp(-t H), a block each."""
        return [torch.exp(-self.distance * block.eigenvalues.double()).float() for block in self.blocks]

    def response(self) -> Tensor:
        """(1 - exp(-t H)) / H, which is t where H is 0; all blocks in a row."""
        values = torch.cat([block.eigenvalues.double().flatten() for block in self.blocks])
        scaled = (self.distance * values).clamp(min=1e-30)
        return (self.distance * -torch.expm1(-scaled) / scaled).float()


@dataclass(frozen=True, kw_only=True)
class Source(Method):
    version: ClassVar[int] = 1
    paper: ClassVar[str] = "Bae et al. 2024, Training data attribution via approximate unrolled differentiation"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"step_scale": (1.0, 0.1, 0.01, 10.0), "segments": (3, 1)}
    library_settings: ClassVar[dict[str, Any]] = {"segments": 3, "checkpoints": 6, "step_scale": 1.0}

    segments: int = 3
    checkpoints: int = 6  # in all, the base model included
    step_scale: float = 1.0  # what the training's own step sizes are multiplied by
    parameters: str = ""  # regular expression: only parameters whose name it finds; empty: every trainable one
    labels: str = "sampled"  # or "exact", as in kfac
    fit_batch_size: int = 500
    batch_size: int = batch_size_option(500)

    def __post_init__(self) -> None:
        if not 1 <= self.segments <= self.checkpoints or self.step_scale <= 0:
            raise ValueError(
                f"segments is {self.segments}, checkpoints {self.checkpoints} and step_scale {self.step_scale}; "
                "expected at least 1 segment, no more of them than checkpoints, and more than 0"
            )
        if self.labels not in ("sampled", "exact"):
            raise ValueError(f'labels is "{self.labels}"; available: sampled, exact')

    @property
    def fit_config(self) -> dict[str, Any]:
        return {name: value for name, value in self.config.items() if name != "step_scale"}

    def skip(self, task: Task) -> str | None:
        if reason := why_not_replayed(task):
            return reason
        if not getattr(REPLAYS.get(task.name), "gradient_steps", True):
            return f"the training of task {task.name} is Adam's, whose steps are along no gradient"
        return None

    def memory_bytes(self, size: Size) -> int:
        held = held_bytes(size.num_attributed, size.num_queries, size.num_parameters)
        return 4 * (self.checkpoints + 4 * self.segments) * size.num_parameters + held

    def _gradients(self, problem: Problem, model: nn.Module) -> PerExampleGradients:
        names = matching_parameters(model, self.parameters, "source")
        return PerExampleGradients(model, problem.task.loss_function.per_example, names, join_biases=True)

    def _at(self, problem: Problem, segment: Segment) -> list[PerExampleGradients]:
        found = []
        for weights in segment.weights:
            model = detached_copy(problem.model)
            model.load_state_dict(weights)
            found.append(self._gradients(problem, model))
        return found

    def fit(self, problem: Problem) -> list[Segment]:
        """The segments, in the order of the training."""
        taken = snapshots(problem, self.checkpoints, "source")
        found = []
        for number, chosen in enumerate(np.array_split(np.arange(len(taken)), min(self.segments, len(taken)))):
            ones = [taken[k] for k in chosen]
            segment = Segment(sum(one.distance for one in ones), [one.weights for one in ones], [])
            segment.blocks = fit_curvature(
                self._at(problem, segment),
                problem.task.loss_function,
                problem.train,
                self.fit_batch_size,
                problem.device,
                problem.progress,
                seed=problem.seed,
                exact=self.labels == "exact",
                description=f"source: segment {number + 1}",
            )
            found.append(segment)
        return found

    @torch.no_grad()
    def score(self, problem: Problem, state: list[Segment]) -> Attribution:
        # A segment's rows are its own: those that a store keeps for a method would be the last one's.
        asked = replace(problem, shared={})
        scaled = [replace(segment, distance=self.step_scale * segment.distance) for segment in state]
        at_end = GradientsInBasis(self._gradients(problem, problem.model), scaled[-1].blocks)
        scores, squares = torch.zeros(len(problem.queries), len(problem.attributed)), torch.zeros(())
        for number, segment in enumerate(scaled):
            one = inner_products(
                asked,
                MeanGradients(self._at(problem, segment), segment.blocks),
                self.batch_size,
                f"source: segment {number + 1}",
                segment.response(),
                of_queries=PulledBack(at_end, scaled[number:]),
                work_name=f"segment {number}",
            )
            assert one.train_scale is not None
            scores, squares = scores + one.scores, squares + one.train_scale.square()
        told = {
            "distances": [segment.distance for segment in scaled],
            "checkpoints": sum(len(s.weights) for s in state),
        }
        return Attribution(scores=scores, train_scale=squares.sqrt(), diagnostics=told)

    def pack_fit(self, state: list[Segment]) -> Mapping[str, Tensor]:
        arrays = {"distances": torch.tensor([segment.distance for segment in state], dtype=torch.float64)}
        for number, segment in enumerate(state):
            arrays |= {f"{number}/blocks/{name}": value for name, value in packed_blocks(segment.blocks).items()}
            for k, weights in enumerate(segment.weights):
                arrays |= {f"{number}/weights {k}/{name}": value.cpu() for name, value in weights.items()}
        return arrays

    def unpack_fit(self, problem: Problem, arrays: Mapping[str, Tensor]) -> list[Segment]:
        def within(start: str) -> dict[str, Tensor]:
            return {name.removeprefix(start): value for name, value in arrays.items() if name.startswith(start)}

        found = []
        for number, distance in enumerate(arrays["distances"].tolist()):
            blocks = unpacked_blocks(within(f"{number}/blocks/"), problem.device)
            weights = [w for k in range(self.checkpoints) if (w := within(f"{number}/weights {k}/"))]
            found.append(Segment(distance, weights, blocks))
        return found


class MeanGradients:
    """Each training example's gradient, the mean over a segment's checkpoints, in the segment's eigenvectors."""

    def __init__(self, gradients: list[PerExampleGradients], blocks: list[Block]):
        self.each = [GradientsInBasis(one, blocks) for one in gradients]
        self.dimension = self.each[0].dimension

    def __call__(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        rows = self.each[0](batch, out)
        for number, one in enumerate(self.each[1:], 2):
            rows += (one(batch) - rows) / number
        return rows


class PulledBack:
    """Queries' gradients at the base model, pulled back to the end of the first segment, in its eigenvectors."""

    def __init__(self, at_end: GradientsInBasis, segments: list[Segment]):
        self.at_end, self.segments = at_end, segments
        self.dimension = at_end.dimension

    def __call__(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        rows = self.at_end(batch, out)
        sizes = [block.eigenvalues.numel() for block in self.segments[-1].blocks]
        for earlier, later in zip(self.segments[-2::-1], self.segments[:0:-1]):
            turned = zip(rows.split(sizes, dim=1), later.blocks, earlier.blocks, later.decay())
            for part, old, new, decay in turned:
                values = old.from_basis(decay * part.reshape(len(rows), *decay.shape))
                part.copy_(new.to_basis(values).flatten(1))
        return rows
