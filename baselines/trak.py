"""trak: Tracing with the Randomly-projected After Kernel, computed by traker; one checkpoint or an ensemble.

traker's extension points are used: per-example gradients come from `baselines/support/gradients.py` (the same numbers
as its own vmap, faster), projections from `baselines/support/projectors.py`, and the model output is the task's own
(`retrain/losses.py`), so that classification, regression and next-token prediction need no code here. The kernel is
fitted on the whole training set.

Its inverse needs a ridge: without one the smallest eigenvalues, which are noise, decide. The ridge is a share of the
kernel's mean eigenvalue (trace over rank), so that one number suits any model; an absolute one can be given, and
`library_settings` have traker's 0. With a ridge a projection may exceed the number of training examples, and more is
better; one that reaches the number of parameters is left out. Without a ridge one above the rank is reduced to a
quarter of the examples. Diagnostics say what was used.

traker's score is the predicted rise of the query's model output f (the margin); the loss falls as f rises, so the
query's slope d loss / d f, which is negative, turns it into a change of loss. traker rescales the inverse kernel by its
mean absolute entry: scores are in arbitrary units, which no rank notices.
"""

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from baselines.method import Attribution, Method, Problem, Size, batch_size_option
from baselines.support.copies import detached_copy
from baselines.support.gradients import PerExampleGradients, trainable_parameters
from baselines.support.projectors import make_projector
from retrain.errors import UsageError
from retrain.examples import Examples

PROJECTORS = ("dense", "sketch")
KERNEL = ("mean_eigenvalue", "ridge")  # what is told of one
SMALLEST_REDUCED = 16  # what is left of a projection without a ridge


@dataclass
class Features:
    """traker with every training example's features, the checkpoints' weights, and what the kernels came to."""

    traker: Any
    weights: list[dict[str, Tensor]]
    kernels: list[dict[str, float]] = field(default_factory=list)


@dataclass
class Kept:
    """What new queries need of it, without traker: each model's features times its inverse kernel, and the rest."""

    features: list[Tensor]  # (train, projection)
    loss_slopes: Tensor  # (train, 1): the mean over models of traker's Q
    scale: Tensor  # (train,)
    kernels: list[dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class TRAK(Method):
    version: ClassVar[int] = 2
    libraries: ClassVar[tuple[str, ...]] = ("traker",)
    paper: ClassVar[str] = "Park et al. 2023, TRAK: Attributing model behavior at scale"
    grid: ClassVar[Sequence[Mapping[str, tuple[Any, ...]]]] = (
        {"relative_ridge": (10.0, 0.1, 1.0, 100.0, 1000.0), "checkpoints": (1, 2, 4)},
        {"relative_ridge": (10.0, 100.0), "projection": (4096, 512)},
    )
    library_settings: ClassVar[dict[str, Any]] = {"projection": 2048, "ridge": 0.0, "projector": "dense"}

    projection: int = 2048  # dimension of the random projection
    checkpoints: int = 1  # how many independently trained models are averaged
    ridge: float | None = None  # added to the kernel's diagonal; None: relative_ridge of the kernel's mean eigenvalue
    relative_ridge: float = 10.0
    projector: str = "sketch"  # or "dense", traker's own: as accurate, and far slower for millions of parameters
    batch_size: int = batch_size_option(250)

    def __post_init__(self) -> None:
        for name in ("projection", "checkpoints"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        for name in ("ridge", "relative_ridge"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise ValueError(f"{name} is {value!r}; expected a number that is not negative")
        if self.projector not in PROJECTORS:
            raise ValueError(f'projector is "{self.projector}"; available: {", ".join(PROJECTORS)}')

    @property
    def _ridged(self) -> bool:
        return bool(self.relative_ridge if self.ridge is None else self.ridge)

    @property
    def fit_config(self) -> dict[str, Any]:
        """Features serve every ridge; without any they may be fewer."""
        others = {name: value for name, value in self.config.items() if name not in ("ridge", "relative_ridge")}
        return {**others, "ridged": self._ridged}

    def memory_bytes(self, size: Size) -> int:
        """Gradients (in float64 too), features; the kernel and its inverse; scores of the whole training set twice."""
        p = self.projection  # as asked for: more than there are parameters is a mistake, not a plan
        smaller = min(p, size.num_train)
        features = 20 * size.num_train * p + 24 * smaller * smaller
        return features + 8 * size.num_train * size.num_queries + 4 * size.num_parameters * (self.checkpoints + 2)

    def _projection(self, num_train: int, dimension: int) -> int:
        """What of it makes sense here."""
        if self._ridged or self.projection <= min(num_train, dimension):
            return min(self.projection, dimension)
        if dimension <= num_train:
            return dimension
        reduced = num_train // 4
        if reduced < SMALLEST_REDUCED:
            raise UsageError(
                f"trak without a ridge inverts a kernel of rank {num_train} at most, from {num_train} training "
                "examples; expected more of them, or a ridge: --set trak.relative_ridge=10"
            )
        return reduced

    def make_projector(self, dimension: int, projection: int, problem: Problem) -> Any:
        return make_projector(self.projector, dimension, projection, problem.seed, problem.device)

    # ---- features ----

    def fit(self, problem: Problem) -> Features:
        features = self._empty(problem)
        for model_id, weights in enumerate(features.weights):
            features.traker.load_checkpoint(weights, model_id=model_id)
            self._featurize(problem, features.traker, model_id)
        return self._finished(features)

    def _empty(self, problem: Problem) -> Features:
        if self.checkpoints > 1 and problem.checkpoint is None:
            raise UsageError("trak.checkpoints is above 1, but this problem offers no further checkpoints")
        weights = [problem.model.state_dict()]
        weights += [problem.checkpoint(k).state_dict() for k in range(1, self.checkpoints) if problem.checkpoint]
        return Features(_make_traker(self, problem), weights)

    @staticmethod
    def _featurized(problem: Problem) -> Examples:
        """The training set; of a model that was trained on some of the attributed examples, all of these."""
        return problem.train if problem.pool is None else problem.attributed

    def _featurize(self, problem: Problem, traker: Any, model_id: int) -> None:
        """Batch after batch; what is new is saved now and again, and an earlier attempt's taken as it is."""
        store = traker.saver.current_store
        examples = self._featurized(problem)
        done, count = 0, len(examples)
        while (saved := problem.work.load(f"features-{model_id}-{done}")) is not None:
            arrays, record = saved
            _put(store, slice(done, record["end"]), arrays)
            done = record["end"]
        unsaved = done
        starts = range(done, count, self.batch_size)
        for start in problem.progress(starts, total=len(starts), description=f"trak: features {model_id + 1}"):
            stop = min(start + self.batch_size, count)
            inputs, targets = examples.inputs[start:stop], examples.targets[start:stop]
            batch = (inputs.to(problem.device), targets.to(problem.device))
            traker.featurize(batch=batch, inds=np.arange(start, stop))
            if problem.work.due():
                kept = {name: np.array(store[name][unsaved:stop]) for name in ("grads", "out_to_loss")}
                problem.work.save(f"features-{model_id}-{unsaved}", kept, {"end": stop})
                unsaved = stop
        traker.saver.serialize_current_model_id_metadata()

    def _finished(self, features: Features) -> Features:
        with _quiet():
            features.traker.finalize_features()
        features.kernels = features.traker.score_computer.kernels
        return features

    def pack_fit(self, state: Features) -> Mapping[str, Tensor]:
        arrays: dict[str, Tensor] = {}
        for model_id in range(len(state.weights)):
            state.traker.saver.load_current_store(model_id)
            store = state.traker.saver.current_store
            arrays |= {f"{name}|{model_id}": _tensor(store[name]) for name in ("grads", "out_to_loss")}
        return arrays

    def pack_answer(self, state: Features) -> Mapping[str, Tensor]:
        """As `Kept` has it, for the ridge that was chosen; a dense projection is traker's own."""
        if self.projector == "dense":
            return self.pack_fit(state)
        arrays, slopes = {"scale": self._train_scale(state.traker)}, torch.zeros(())
        for model_id, kernel in enumerate(state.kernels):
            state.traker.saver.load_current_store(model_id)
            arrays[f"features|{model_id}"] = _tensor(state.traker.saver.current_store["features"])
            arrays[f"kernel|{model_id}"] = torch.tensor([kernel[name] for name in KERNEL], dtype=torch.float64)
            slopes = slopes + _tensor(state.traker.saver.current_store["out_to_loss"])
        return {**arrays, "loss_slopes": slopes / len(state.kernels)}

    def unpack_fit(self, problem: Problem, arrays: Mapping[str, Tensor]) -> Features | Kept:
        if "loss_slopes" in arrays:
            kernels = [dict(zip(KERNEL, arrays[f"kernel|{k}"].tolist(), strict=True)) for k in range(self.checkpoints)]
            kept = [arrays[f"features|{k}"] for k in range(self.checkpoints)]
            return Kept(kept, arrays["loss_slopes"], arrays["scale"], kernels)
        features = self._empty(problem)
        for model_id, weights in enumerate(features.weights):
            features.traker.load_checkpoint(weights, model_id=model_id)
            own = {name: arrays[f"{name}|{model_id}"].numpy() for name in ("grads", "out_to_loss")}
            _put(features.traker.saver.current_store, slice(None), own)
            features.traker.saver.serialize_current_model_id_metadata()
        return self._finished(features)

    # ---- scores ----

    def score(self, problem: Problem, state: Features | Kept) -> Attribution:
        by_train, scale, projection = (self._kept_scores if isinstance(state, Kept) else self._scores)(problem, state)
        with torch.no_grad():
            slopes = torch.cat(
                [
                    problem.task.loss_function.output_slope(problem.model(inputs), targets).cpu()
                    for inputs, targets in self._batches(problem, problem.queries, "trak: slopes")
                ]
            )
        chosen = torch.as_tensor(problem.attributed_indices if problem.pool is None else range(len(by_train)))
        scores = by_train[chosen].T.float() * slopes[:, None].float()
        diagnostics = {"projection": projection, "kernels": state.kernels}
        return Attribution(scores=scores.contiguous(), train_scale=scale[chosen], diagnostics=diagnostics)

    def _scores(self, problem: Problem, state: Any) -> tuple[Tensor, Tensor, int]:
        """(train, q), each training example's scale, and the projection's dimension."""
        traker = state.traker
        for model_id, weights in enumerate(state.weights):
            traker.start_scoring_checkpoint("queries", weights, model_id=model_id, num_targets=len(problem.queries))
            for inputs, targets in self._batches(problem, problem.queries, f"trak: queries {model_id + 1}"):
                traker.score(batch=(inputs, targets), num_samples=len(inputs))
        with _quiet():
            by_train = torch.from_numpy(traker.finalize_scores(exp_name="queries").copy())
        return by_train, self._train_scale(traker), traker.proj_dim

    @torch.no_grad()
    def _kept_scores(self, problem: Problem, state: Any) -> tuple[Tensor, Tensor, int]:
        """The same, as traker adds them up."""
        total = torch.zeros(len(state.loss_slopes), len(problem.queries))
        for model_id, features in enumerate(state.features):
            further = model_id and problem.checkpoint is not None
            model = problem.checkpoint(model_id) if further else problem.model  # type: ignore[misc]
            gradients = PerExampleGradients(model, problem.task.loss_function.model_output)
            projector = self.make_projector(gradients.dimension, features.shape[1], problem)
            rows = [
                projector.project(gradients(batch), model_id) / gradients.dimension**0.5
                for batch in self._batches(problem, problem.queries, f"trak: queries {model_id + 1}")
            ]
            total += (features.to(problem.device) @ torch.cat(rows).T).cpu()
        return total / len(state.features) * state.loss_slopes, state.scale, state.features[0].shape[1]

    def _train_scale(self, traker: Any) -> Tensor:
        """sqrt of each training example's kernel norm times its weight Q: the scale of its column of scores."""
        norms = weights = torch.zeros(())
        for model_id in traker.saver.model_ids:
            traker.saver.load_current_store(model_id)
            store = traker.saver.current_store
            norms = norms + (_tensor(store["grads"]) * _tensor(store["features"])).sum(1).clamp(min=0).sqrt()
            weights = weights + _tensor(store["out_to_loss"]).flatten().abs()
        return norms * weights / self.checkpoints**2

    def _batches(self, problem: Problem, examples: Examples, description: str) -> Iterator[tuple[Any, Tensor]]:
        total = -(-len(examples) // self.batch_size)
        batches = examples.batches(self.batch_size)
        for inputs, targets in problem.progress(batches, total=total, description=description):
            yield inputs.to(problem.device), targets.to(problem.device)


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(array)).float()


def _put(store: Mapping[str, np.ndarray], place: slice, arrays: Mapping[str, np.ndarray]) -> None:
    for name, values in arrays.items():
        store[name][place] = values
    store["is_featurized"][place] = 1


def _make_traker(method: TRAK, problem: Problem) -> Any:
    from trak import TRAKer
    from trak.gradient_computers import AbstractGradientComputer
    from trak.modelout_functions import AbstractModelOutput

    loss = problem.task.loss_function
    model = detached_copy(problem.model)
    names = list(trainable_parameters(model))
    dimension = sum(model.get_parameter(name).numel() for name in names)
    projection = method._projection(len(problem.train), dimension)

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

    return TRAKer(
        model=model,
        task=ModelOutput(),
        projector=method.make_projector(dimension, projection, problem),
        train_set_size=len(method._featurized(problem)),
        save_dir=str(problem.scratch / "trak"),
        device=str(problem.device),  # traker compares it with the text "cpu"
        gradient_computer=GradientComputer,
        score_computer=_kernel(method, problem),
        proj_dim=projection,
        use_half_precision=False,
        projector_seed=problem.seed,
        grad_wrt=names,
        logging_level=logging.CRITICAL,
    )


def _kernel(method: TRAK, problem: Problem) -> Any:
    """traker's inverse kernel, with a ridge."""
    from trak.score_computers import BasicScoreComputer

    class Kernel(BasicScoreComputer):
        """X (X^T X + ridge)^-1 in float64: rounding must not decide what the smallest eigenvalues are."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.kernels: list[dict[str, float]] = []

        def own(self, grads: Tensor) -> Tensor:
            """Of the examples that the checkpoint whose turn it is was trained on: the kernel is theirs."""
            if problem.pool is None:
                return grads
            return grads[torch.from_numpy(problem.own_examples(len(self.kernels))).to(grads.device)]

        def get_xtx(self, grads: Tensor) -> Tensor:
            """Of the shorter side: X^T X, or X X^T, which has the same eigenvalues other than 0."""
            wide = self.own(grads).to(self.device, torch.float64)
            return wide @ wide.T if len(wide) < wide.shape[1] else wide.T @ wide

        def get_x_xtx_inv(self, grads: Tensor, xtx: Tensor) -> Tensor:
            own = self.own(grads)
            mean = float(xtx.trace()) / len(xtx)
            ridge = method.relative_ridge * mean if method.ridge is None else method.ridge
            self.kernels.append({"mean_eigenvalue": mean, "ridge": ridge})
            inverse = torch.linalg.inv(xtx + ridge * torch.eye(len(xtx), dtype=xtx.dtype, device=xtx.device))
            size = inverse.abs().mean()
            if len(own) < own.shape[1] and len(own) < len(grads):
                # Examples outside the kernel: X (O^T O + r)^-1 is (X - X O^T (O O^T + r)^-1 O) / r, O being its own.
                wide, kernel = grads.to(self.device, torch.float64), own.to(self.device, torch.float64)
                return ((wide - wide @ kernel.T @ inverse @ kernel) / (ridge * size)).to(self.dtype)
            inverse = (inverse / size).to(self.dtype)
            grads = grads.to(self.device)
            return inverse @ grads if len(own) < own.shape[1] else grads @ inverse

    return Kernel


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """traker draws its own progress bars on stderr, over the harness's."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield
