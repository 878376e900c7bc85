"""trak: Tracing with the Randomly-projected After Kernel, computed by traker; one checkpoint or an ensemble.

traker's two extension points are used: per-example gradients come from `baselines/support/gradients.py` (the same
numbers as its own vmap, faster), and the model output is the task's own (`retrain/losses.py`), so that classification,
regression and next-token prediction need no code here. The kernel is fitted on the whole training set.

A dense projection of 14 million numbers is drawn anew for every batch and takes longer than the gradients. The `sketch`
projector instead gives each parameter a random sign and one of `projection` buckets, and adds up: inner products are
unbiased with the variance of a dense Gaussian projection (Charikar et al. 2002), for one pass over the gradients.

traker's score is the predicted rise of the query's model output f (the margin); the loss falls as f rises, so the
query's slope d loss / d f, which is negative, turns it into a change of loss. traker rescales the inverse kernel by its
mean absolute entry: scores are in arbitrary units, which no rank notices.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from baselines.method import Attribution, Method, Problem, batch_size_option
from baselines.support.copies import detached_copy
from baselines.support.gradients import PerExampleGradients, trainable_parameters
from retrain.errors import UsageError
from retrain.examples import Examples

SMALLEST_PROJECTION = 101  # traker's BasicProjector crashes on a single block
PROJECTORS = ("dense", "sketch")
_SKETCH_STREAM = 31


@dataclass(frozen=True, kw_only=True)
class TRAK(Method):
    version: ClassVar[int] = 1
    libraries: ClassVar[tuple[str, ...]] = ("traker",)

    projection: int = 2048  # dimension of the random projection
    checkpoints: int = 1  # how many independently trained models are averaged
    ridge: float = 0.0  # added to the kernel's diagonal
    projector: str = "dense"  # traker's own, or "sketch" for millions of parameters
    batch_size: int = batch_size_option(250)

    def __post_init__(self) -> None:
        if self.projection < SMALLEST_PROJECTION:
            raise ValueError(f"projection is {self.projection}; traker needs at least {SMALLEST_PROJECTION}")
        if self.checkpoints < 1:
            raise ValueError(f"checkpoints is {self.checkpoints}; expected at least 1")
        if self.projector not in PROJECTORS:
            raise ValueError(f'projector is "{self.projector}"; available: {", ".join(PROJECTORS)}')

    @property
    def config(self) -> dict[str, Any]:
        """The dense projector is not named, so that scores from before there was another keep their key."""
        return {k: v for k, v in super().config.items() if (k, v) != ("projector", "dense")}

    def fit(self, problem: Problem) -> Any:
        if self.checkpoints > 1 and problem.checkpoint is None:
            raise UsageError("trak.checkpoints is above 1, but this problem offers no further checkpoints")
        rank = min(len(problem.train), sum(p.numel() for p in trainable_parameters(problem.model).values()))
        if self.projection > rank and self.ridge == 0:
            raise RuntimeError(
                f"trak.projection is {self.projection}, but {len(problem.train):,} training examples and the model's "
                f"trainable parameters give a kernel of rank {rank:,} at most, which has no inverse; take a smaller "
                "--set trak.projection=..., or add to its diagonal with --set trak.ridge=..."
            )
        states = [problem.model.state_dict()]
        states += [problem.checkpoint(k).state_dict() for k in range(1, self.checkpoints) if problem.checkpoint]
        traker = _make_traker(self, problem)
        for model_id, weights in enumerate(states):
            traker.load_checkpoint(weights, model_id=model_id)
            for inputs, targets in self._batches(problem, problem.train, f"trak: features {model_id + 1}"):
                traker.featurize(batch=(inputs, targets), num_samples=len(inputs))
        with _quiet():
            traker.finalize_features()
        return traker, states

    def score(self, problem: Problem, state: Any) -> Attribution:
        traker, states = state
        for model_id, weights in enumerate(states):
            traker.start_scoring_checkpoint("queries", weights, model_id=model_id, num_targets=len(problem.queries))
            for inputs, targets in self._batches(problem, problem.queries, f"trak: queries {model_id + 1}"):
                traker.score(batch=(inputs, targets), num_samples=len(inputs))
        with _quiet():
            by_train = torch.from_numpy(traker.finalize_scores(exp_name="queries").copy())  # (train, q)
        scale = self._train_scale(traker)
        with torch.no_grad():
            slopes = torch.cat(
                [
                    problem.task.loss_function.output_slope(problem.model(inputs), targets).cpu()
                    for inputs, targets in self._batches(problem, problem.queries, "trak: slopes")
                ]
            )
        chosen = torch.as_tensor(problem.attributed_indices)
        scores = by_train[chosen].T.float() * slopes[:, None].float()
        return Attribution(scores=scores.contiguous(), train_scale=scale[chosen])

    def _train_scale(self, traker: Any) -> Tensor:
        """sqrt of each training example's kernel norm times its weight Q: the scale of its column of scores."""
        norms = weights = torch.zeros(())
        for model_id in traker.saver.model_ids:
            traker.saver.load_current_store(model_id)
            store = traker.saver.current_store
            grads, features = (
                torch.from_numpy(store["grads"][:]).float(),
                torch.from_numpy(store["features"][:]).float(),
            )
            norms = norms + (grads * features).sum(1).clamp(min=0).sqrt()
            weights = weights + torch.from_numpy(store["out_to_loss"][:]).float().flatten().abs()
        return norms * weights / self.checkpoints**2

    def _batches(self, problem: Problem, examples: Examples, description: str) -> Iterator[tuple[Tensor, Tensor]]:
        total = -(-len(examples) // self.batch_size)
        for inputs, targets in problem.progress(
            examples.batches(self.batch_size), total=total, description=description
        ):
            yield inputs.to(problem.device), targets.to(problem.device)


def _make_traker(method: TRAK, problem: Problem) -> Any:
    from trak import TRAKer
    from trak.gradient_computers import AbstractGradientComputer
    from trak.modelout_functions import AbstractModelOutput

    loss = problem.task.loss_function
    model = detached_copy(problem.model)
    names = list(trainable_parameters(model))

    class ModelOutput(AbstractModelOutput):
        def __init__(self) -> None:
            super().__init__()

        def get_output(self, model: Any, weights: Any, buffers: Any, inputs: Tensor, targets: Tensor) -> Tensor:
            outputs = torch.func.functional_call(model, (weights, buffers), (inputs[None],))
            return loss.model_output(outputs, targets[None]).squeeze(0)

        @torch.no_grad()
        def get_out_to_loss_grad(self, model: Any, weights: Any, buffers: Any, batch: Any) -> Tensor:
            inputs, targets = batch
            outputs = torch.func.functional_call(model, (weights, buffers), (inputs,))
            return -loss.output_slope(outputs, targets)[:, None]

    class GradientComputer(AbstractGradientComputer):
        def __init__(self, model: Any, task: Any, grad_dim: Any, dtype: Any, device: Any, grad_wrt: Any = None) -> None:
            super().__init__(model, task, grad_dim, dtype, device)
            self.load_model_params(model)

        def load_model_params(self, model: Any) -> None:
            self.weights, self.buffers = dict(model.named_parameters()), dict(model.named_buffers())
            self.gradients = PerExampleGradients(model, loss.model_output, names)

        def compute_per_sample_grad(self, batch: Any) -> Tensor:
            return self.gradients(tuple(batch))  # type: ignore[arg-type]

        def compute_loss_grad(self, batch: Any) -> Tensor:
            return self.modelout_fn.get_out_to_loss_grad(self.model, self.weights, self.buffers, batch)

    dimension = sum(model.get_parameter(name).numel() for name in names)
    return TRAKer(
        model=model,
        task=ModelOutput(),
        projector=Sketch(dimension, method.projection, problem.seed, problem.device)
        if method.projector == "sketch"
        else None,
        train_set_size=len(problem.train),
        save_dir=str(problem.scratch / "trak"),
        device=str(problem.device),  # traker compares it with the text "cpu"
        gradient_computer=GradientComputer,
        proj_dim=method.projection,
        use_half_precision=False,
        projector_seed=problem.seed,
        grad_wrt=names,
        lambda_reg=method.ridge,
        logging_level=logging.CRITICAL,
    )


class Sketch:
    """traker's view of a random projection (batch, dimension) -> (batch, projection) with one entry +-1 a parameter.

    Every bucket gets equally many parameters, in a random order: adding up then is a gather and a sum over the last
    axis. Drawn on the CPU, so that it is the same on every device. As with traker's +-1 matrices, squared norms come
    out `projection` times too large.
    """

    proj_type = "sketch"

    def __init__(self, dimension: int, projection: int, seed: int, device: torch.device):
        self.grad_dim, self.proj_dim, self.seed, self.device = dimension, projection, seed, device
        self._drawn_for: int | None = None
        self.free_memory()

    def free_memory(self) -> None:
        self.order = self.signs = torch.empty(0)
        self._drawn_for = None

    def _draw(self, model_id: int) -> None:
        seed = int(np.random.SeedSequence([self.seed, model_id, _SKETCH_STREAM]).generate_state(1)[0])
        generator = torch.Generator().manual_seed(seed)
        padded = -(-self.grad_dim // self.proj_dim) * self.proj_dim
        order = torch.randperm(padded, generator=generator)
        signs = torch.randint(0, 2, (padded,), generator=generator).float().mul_(2).sub_(1)
        signs[order >= self.grad_dim] = 0  # the padding
        signs *= self.proj_dim**0.5
        self.order = order.clamp(max=self.grad_dim - 1).to(self.device)
        self.signs, self._drawn_for = signs.to(self.device), model_id

    def project(self, grads: Tensor, model_id: int) -> Tensor:
        if self._drawn_for != model_id:
            self._draw(model_id)
        gathered = grads.index_select(1, self.order).mul_(self.signs)
        return gathered.view(len(grads), self.proj_dim, -1).sum(2)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """traker draws its own progress bars on stderr, over the harness's."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield
