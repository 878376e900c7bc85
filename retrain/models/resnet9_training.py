"""Trains many small ResNet-9s one after another on data that never leaves the device.

    engine = Engine(model, TrainingImages(images, labels, 2, device, "bfloat16"), recipe)      # once
    engine.load(start)                                          # for every training: weights, statistics, momenta
    engine.run(indices, epochs, schedule, rng)
    trained = engine.model_copy()

The recipe is that of "94% on CIFAR-10 in 3.29 seconds" (Jordan, 2024), the one the paper adopts: SGD with Nesterov
momentum and decoupled hyperparameters, a loss summed over the batch, larger steps for the biases of BatchNorm,
alternating flips and small translations, and lookahead on long trainings.

Launching kernels costs more than running them when batches are small, so on CUDA the whole step (augmentation, forward,
backward, update) is captured in one CUDA graph per batch size and replayed; the same Python function runs as it is on
the CPU, for batch sizes that are rare, and wherever capturing fails. All randomness is drawn on the CPU from a numpy
generator, so that it is the same on every device.
"""

import copy
import importlib.util
import itertools
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrain.backends import captured_graph, deterministic_convolutions
from retrain.models.resnet9 import ConvGroup, ResNet9

# A batch size is captured once it has run this many times as it is: those runs also warm the libraries up.
CAPTURE_AFTER = 12
MAX_GRAPHS = 16
LOOKAHEAD_EVERY = 5
LOOKAHEAD_DECAY = 0.95**LOOKAHEAD_EVERY

HAS_TRITON = importlib.util.find_spec("triton") is not None
PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Schedule = Callable[[int], np.ndarray]  # number of steps -> the learning rate's share of its maximum at each of them


@dataclass(frozen=True)
class Recipe:
    """The paper's table of training hyperparameters (tab:training_hyperparameters), in Jordan's decoupled units.

    `learning_rate` is per 1,024 examples and `weight_decay` per step of them, both divided by the momentum's
    amplification: changing one of batch size, momentum or weight decay leaves the others well chosen.
    """

    batch_size: int = 1024
    learning_rate: float = 10.0
    momentum: float = 0.85
    weight_decay: float = 0.0153
    bias_scaler: float = 64.0
    label_smoothing: float = 0.2
    max_shift: int = 2  # pixels of translation, with reflected borders
    flip: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.learning_rate <= 0 or not 0 <= self.momentum < 1 or self.max_shift < 0:
            raise ValueError(f"batch_size and learning_rate must be positive, momentum in [0, 1), no shift < 0: {self}")

    @property
    def kilostep_scale(self) -> float:
        return 1024 * (1 + 1 / (1 - self.momentum))

    @property
    def step_size(self) -> float:
        """The rate of torch's SGD for a loss summed over the batch."""
        return self.learning_rate / self.kilostep_scale

    @property
    def step_decay(self) -> float:
        """The share of a weight that is taken off in one step at the full learning rate."""
        return self.weight_decay * self.batch_size / self.kilostep_scale


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """What convolutions compute in: the CPU has no fast half precision, so there it is always float32."""
    return PRECISIONS[precision] if device.type == "cuda" else torch.float32


def logits_in(dtype: torch.dtype, model: ResNet9, images: Tensor) -> Tensor:
    """Logits (batch, classes) in float32, with convolutions in `dtype` on float32 weights.

    The head stays in float32: it costs nothing, and bf16 logits would round losses to about two digits.
    """
    if dtype == torch.float32:
        return model(images)
    # The cast of a weight is never reused within a step, and a cache of casts must not outlive a capture.
    with torch.autocast(images.device.type, dtype, cache_enabled=False):
        features = model.features(images)
    return model.head(features.float()) * model.scale


def logits_of_whitened(dtype: torch.dtype, model: ResNet9, bordered: Tensor) -> Tensor:
    """As `logits_in`, from `with_border(model.whitened(images))`; on CUDA in eval mode by fused kernels."""
    if dtype == torch.float32:
        return model.head(model.features_of_whitened(_without_border(bordered))) * model.scale
    if HAS_TRITON and bordered.is_cuda and not model.training and not _trains_scales(model):
        features = _fused_features(dtype, model, bordered)
    else:
        with torch.autocast(bordered.device.type, dtype, cache_enabled=False):
            features = model.features_of_whitened(_without_border(bordered))
    return model.head(features.float()) * model.scale


def with_border(whitened: Tensor) -> Tensor:
    """Whitened images with a row of zeros above and a column on the left, as a convolution would pad them.

    The zeros below and on the right are left out: where a 2x2 maximum follows and the size is odd (CIFAR-10: 31x31,
    32x32 with the border), it never reads what they would contribute to.
    """
    return F.pad(whitened, (1, 0, 1, 0))


def _without_border(bordered: Tensor) -> Tensor:
    return bordered[:, :, 1:, 1:]


def _trains_scales(model: ResNet9) -> bool:
    """Whether a gradient is wanted that the fused kernels do not give: that of a BatchNorm's weight."""
    norms = (module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    return torch.is_grad_enabled() and any(norm.weight.requires_grad for norm in norms)


def _fused_features(dtype: torch.dtype, model: ResNet9, bordered: Tensor) -> Tensor:
    """(batch, widths[-1]) in `dtype`: `model.features_of_whitened`, by the kernels of `resnet9_kernels`."""
    from retrain.models import resnet9_kernels as kernels

    fuse_convolutions = not torch.is_grad_enabled()  # the gradient needs the convolutions' outputs
    hidden = bordered
    for number, group in enumerate(model.groups):
        assert isinstance(group, ConvGroup)
        pool = isinstance(group.pool, nn.MaxPool2d)
        first, second = _cast(group.conv1, dtype), _cast(group.conv2, dtype)
        if number == 0 and fuse_convolutions and kernels.covers_pooled(hidden, group.conv1, pool):
            hidden = kernels.pooled_convolution(hidden, first, group.norm1)
        elif number == 0:
            hidden = kernels.pool_norm_gelu(_convolved_with_border(hidden, first, pool), group.norm1, pool)
        else:
            hidden = kernels.pool_norm_gelu(F.conv2d(hidden, first, padding=1), group.norm1, pool)
        if fuse_convolutions and kernels.covers_plain(hidden, group.conv2, False):
            hidden = kernels.plain_convolution(hidden, second, group.norm2)
        else:
            hidden = kernels.pool_norm_gelu(F.conv2d(hidden, second, padding=1), group.norm2, False)
    # Of equal maxima the first gets the gradient, as in the unfused network; without one, amax is the faster.
    return hidden.amax(dim=(2, 3)) if fuse_convolutions else model.flatten(model.pool(hidden))


def _convolved_with_border(bordered: Tensor, weight: Tensor, pool: bool) -> Tensor:
    """What the 2x2 maximum reads of the convolution, or all of it where there is none."""
    if pool and bordered.shape[2] % 2 == 0 and bordered.shape[3] % 2 == 0:
        return F.conv2d(bordered, weight)
    return F.conv2d(_without_border(bordered), weight, padding=1)


def _cast(convolution: nn.Conv2d, dtype: torch.dtype) -> Tensor:
    return convolution.weight.to(dtype, memory_format=torch.channels_last)


def constant(num_steps: int) -> np.ndarray:
    return np.ones(num_steps)


def linear_rise(num_steps: int) -> np.ndarray:
    """From almost nothing to 1 at the last step."""
    return np.arange(1, num_steps + 1) / num_steps


def falling(num_steps: int, end: float = 0.07) -> np.ndarray:
    """From 1 towards `end`: the second part of the triangle."""
    return 1 + (end - 1) * np.arange(num_steps) / max(num_steps, 1)


def triangle(num_steps: int, start: float = 0.2, end: float = 0.07, peak: float = 0.23) -> np.ndarray:
    """From `start` up to 1 at `peak` of the training, then down towards `end`."""
    peak_step = int(peak * num_steps)
    rise = start + (1 - start) * np.arange(peak_step) / max(peak_step, 1)
    return np.concatenate([rise, falling(num_steps - peak_step, end)])


def batch_bounds(num_examples: int, batch_size: int) -> list[tuple[int, int]]:
    """The fewest batches of at most `batch_size`, as equal as can be: every example is used, and no batch is tiny.

    Only two sizes appear, so that two captured graphs serve every training on as many examples.
    """
    num_batches = math.ceil(num_examples / batch_size)
    edges = [i * num_examples // num_batches for i in range(num_batches + 1)]
    return list(itertools.pairwise(edges))


@dataclass(frozen=True)
class State:
    """A model's parameters and statistics, and the optimizer's momenta, in the engine's order; on the device."""

    tensors: list[Tensor]
    momenta: list[Tensor]


class TrainingImages:
    """The images on a device, read by any number of engines."""

    def __init__(self, images: Tensor, labels: Tensor, max_shift: int, device: torch.device, precision: str):
        """`images` is (n, channels, size, size) float32, normalised; `labels` is (n,)."""
        self.device, self.dtype = device, compute_dtype(precision, device)
        # Channels innermost: gathering pixels then yields batches that are channels-last at no cost.
        self.images = images.to(device, self.dtype).permute(0, 2, 3, 1).contiguous()
        self.labels = labels.to(device)
        self.pixel_table = torch.from_numpy(pixel_table(images.shape[-1], max_shift)).to(device)

    def augmented(self, plan: Tensor) -> tuple[Tensor, Tensor]:
        """A batch (n, channels, size, size) and its labels; `plan` (3, n): which images, rows and columns are read."""
        chosen, rows, columns = plan[0], self.pixel_table[plan[1]], self.pixel_table[plan[2]]
        batch = self.images[chosen[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        return batch, self.labels[chosen]


class FusedStep:
    """One step of training by kernels of our own, around cuDNN's convolutions; on CUDA only.

    step.read_weights()         # whenever they were changed by anybody else
    step(plan, factor)

    It holds copies of the convolutions' weights in the precision that they compute in, as the update leaves them.
    """

    def __init__(self, engine: "Engine"):
        from retrain.models import resnet9_training_kernels as kernels  # which needs triton

        self.kernels, self.engine, self.model, self.data = kernels, engine, engine.model, engine.data
        self.filters = kernels.filters_for(self.model.whiten, self.data.dtype)
        self.copies = [
            p.detach().to(self.data.dtype, memory_format=torch.channels_last).requires_grad_() if p.dim() == 4 else p
            for p in engine.parameters
        ]
        self.copy_of = {id(p): copy for p, copy in zip(engine.parameters, self.copies, strict=True)}

    @torch.no_grad()
    def read_weights(self) -> None:
        """Bring the copies up to date."""
        kept = [(copy, p) for copy, p in zip(self.copies, self.engine.parameters, strict=True) if copy is not p]
        torch._foreach_copy_([copy for copy, _ in kept], [p.detach() for _, p in kept])
        self.filters.copy_(self.kernels.filters_for(self.model.whiten, self.data.dtype))

    def __call__(self, plan: Tensor, factor: Tensor) -> None:
        """`plan` is (3, batch), `factor` () scales the learning rate."""
        model, data, engine, recipe = self.model, self.data, self.engine, self.engine.recipe
        bias = model.whiten.bias
        assert bias is not None
        whitened = self.kernels.whitened_batch(data.images, plan, data.pixel_table, self.filters, bias.detach())
        hidden = self.last_hidden(whitened)
        hidden_gradient, head_gradient = self.kernels.head_gradients(
            hidden.detach(), model.head.weight.detach(), plan[0], data.labels, model.scale, recipe.label_smoothing
        )
        wanted = [copy for copy in self.copies if copy is not model.head.weight]
        found = iter(torch.autograd.grad(hidden, wanted, hidden_gradient))
        gradients = [head_gradient if copy is model.head.weight else next(found) for copy in self.copies]
        bias_step = recipe.step_size * recipe.bias_scaler
        self.kernels.update_parameters(
            engine.parameters, engine.momenta,
            [_laid_out_as(p, gradient) for p, gradient in zip(engine.parameters, gradients, strict=True)],
            self.copies, factor, recipe.momentum, engine.num_biases,
            # Decay acts on the weights at step_decay a step whatever the group's rate, hence the division.
            self.kernels.Rates(bias_step, recipe.step_decay / bias_step),
            self.kernels.Rates(recipe.step_size, recipe.step_decay / recipe.step_size),
        )  # fmt: skip

    def last_hidden(self, whitened: Tensor) -> Tensor:
        """What the last group makes of a batch: (batch, widths[-1], height, width)."""
        hidden = whitened
        for group in self.model.groups:
            assert isinstance(group, ConvGroup)
            pool = isinstance(group.pool, nn.MaxPool2d)
            hidden = self.kernels.trained_pool_norm_gelu(self._convolved(hidden, group.conv1), group.norm1, pool)
            hidden = self.kernels.trained_pool_norm_gelu(self._convolved(hidden, group.conv2), group.norm2, False)
        return hidden

    def _convolved(self, hidden: Tensor, convolution: nn.Conv2d) -> Tensor:
        return F.conv2d(hidden, self.copy_of[id(convolution.weight)], padding=1)


def _laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


class Engine:
    """One model's worth of memory on a device, in which any number of trainings happen one after another.

    A training names its examples by their position among the images. Everything happens on the stream that is current.
    """

    def __init__(
        self, model: ResNet9, data: TrainingImages, recipe: Recipe, *, capture: bool = True, fused: bool = True
    ):
        """`fused`: on CUDA in half precision, by kernels of our own."""
        self.recipe, self.data, self.device, self.dtype = recipe, data, data.device, data.dtype
        self.model = model.to(self.device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        # Jordan's two groups: the biases of BatchNorm take larger steps and, per unit of them, less decay.
        biases = [p for name, p in named if "norm" in name]
        others = [p for name, p in named if "norm" not in name]
        self.parameters: list[Tensor] = [*biases, *others]
        self.num_biases = len(biases)
        self.momenta = [torch.zeros_like(p) for p in self.parameters]
        # Frozen weights never change during training, but two starts may differ in them, so they travel too.
        frozen = [p for p in model.parameters() if not p.requires_grad]
        self.statistics = [b for b in model.buffers() if b.is_floating_point()]
        counters = [b for b in model.buffers() if not b.is_floating_point()]
        self.tensors: list[Tensor] = [*self.parameters, *frozen, *self.statistics, *counters]

        on_cuda = self.device.type == "cuda"
        covered = on_cuda and HAS_TRITON and self.dtype != torch.float32 and not _trains_scales(model)
        self.fused_step = FusedStep(self) if fused and covered else None
        self.stream = torch.cuda.Stream(self.device) if on_cuda else None  # for trainings that threads order
        self.capturing = capture and on_cuda
        self.graphs: OrderedDict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = OrderedDict()
        self.times_seen: Counter[int] = Counter()
        # One pool for all graphs of an engine: nothing in it outlives a replay, so their memory can overlap.
        self.graph_pool = torch.cuda.graph_pool_handle() if self.capturing else None
        self.quiet: Callable[[], None] = lambda: None  # waits until nobody else speaks to the device

    # ---- states ----

    @torch.no_grad()
    def state(self) -> State:
        """A copy of where the training stands."""
        return State([t.detach().clone() for t in self.tensors], [m.clone() for m in self.momenta])

    @torch.no_grad()
    def fresh_state(self, model: nn.Module) -> State:
        """The state of a training that starts from another model of the same architecture, with no momentum."""
        names = {id(t): name for name, t in [*self.model.named_parameters(), *self.model.named_buffers()]}
        given = dict(model.named_parameters()) | dict(model.named_buffers())
        tensors = [torch.empty_like(t).copy_(given[names[id(t)]]) for t in self.tensors]
        return State(tensors, [torch.zeros_like(m) for m in self.momenta])

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Go to a state, in place: captured graphs keep pointing at the same memory."""
        torch._foreach_copy_([*self.tensors, *self.momenta], [*state.tensors, *state.momenta])

    def model_copy(self) -> nn.Module:
        """The trained model in eval mode, independent of the engine."""
        return copy.deepcopy(self.model).eval()

    # ---- training ----

    def num_steps(self, num_examples: int, num_epochs: int) -> int:
        return num_epochs * len(batch_bounds(num_examples, self.recipe.batch_size))

    def run(
        self,
        indices: np.ndarray,
        num_epochs: int,
        schedule: Schedule,
        rng: np.random.Generator,
        *,
        num_steps: int | None = None,
        lookahead: bool = False,
    ) -> None:
        """Train on `images[indices]` for `num_epochs`, or for `num_steps` (through the epochs that takes)."""
        bounds = batch_bounds(len(indices), self.recipe.batch_size)
        num_steps = num_epochs * len(bounds) if num_steps is None else num_steps
        num_epochs = math.ceil(num_steps / len(bounds))
        plan = self._sent(augmentation_plan(self.recipe, indices, num_epochs, rng))  # (epochs, 3, n)
        factors = self._sent(schedule(num_steps).astype(np.float32))
        slow = [t.detach().clone() for t in self._averaged()] if lookahead else []
        self._weights_were_changed()
        with deterministic_convolutions():
            for step in range(num_steps):
                epoch, batch = divmod(step, len(bounds))
                start, stop = bounds[batch]
                self._advance(plan[epoch, :, start:stop], factors[step])
                if lookahead and (step + 1) % LOOKAHEAD_EVERY == 0:
                    self._look_ahead(slow, LOOKAHEAD_DECAY * ((step + 1) / num_steps) ** 3)
            if lookahead:
                self._look_ahead(slow, 1.0)

    def _sent(self, array: np.ndarray) -> Tensor:
        """On the device, without waiting for what it still has to do."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _advance(self, plan: Tensor, factor: Tensor) -> None:
        """One step of training, by replaying a graph where there is one for this batch size."""
        size = plan.shape[1]
        if self.capturing and size in self.graphs:
            graph, static_plan, static_factor = self.graphs[size]
            self.graphs.move_to_end(size)
            static_plan.copy_(plan)
            static_factor.copy_(factor)
            graph.replay()
            return
        # Also where a capture follows: a thread that comes to cuBLAS for the first time cannot do so while capturing.
        self._step(plan, factor)
        self.times_seen[size] += 1
        if self.capturing and self.times_seen[size] > CAPTURE_AFTER:
            self._capture(plan, factor)

    def _capture(self, plan: Tensor, factor: Tensor) -> None:
        """Record `_step` for this batch size. Recording runs nothing, so the weights stay as they are."""
        while len(self.graphs) >= MAX_GRAPHS:  # never all of them: a pool that lost its last graph cannot be used again
            size, _ = self.graphs.popitem(last=False)
            self.times_seen[size] = 0  # it earns its graph again, or else many sizes would only push each other out
        static_plan, static_factor = plan.clone(), factor.clone()
        graph = self.recorded(lambda: self._step(static_plan, static_factor))
        if graph is not None:
            self.graphs[plan.shape[1]] = (graph, static_plan, static_factor)

    def recorded(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """A graph of `work`; None where that fails, and then nothing more is captured: the pool would refuse it."""
        self.quiet()
        graph = captured_graph(work, self.device, pool=self.graph_pool, capture_error_mode="thread_local")
        if graph is None:
            self.capturing = False
            self.graphs.clear()
        return graph

    def _step(self, plan: Tensor, factor: Tensor) -> None:
        """Augment, forward, backward, update; `plan` is (3, batch), `factor` () scales the learning rate.

        Nothing here waits for the device or depends on values, so that it can be captured.
        """
        if self.fused_step is not None:
            self.fused_step(plan, factor)
            return
        batch, labels = self.data.augmented(plan)
        logits = logits_in(self.dtype, self.model, batch)
        loss = F.cross_entropy(logits, labels, label_smoothing=self.recipe.label_smoothing, reduction="sum")
        gradients = list(torch.autograd.grad(loss, self.parameters))
        self._update(gradients, factor)

    @torch.no_grad()
    def _update(self, gradients: list[Tensor], factor: Tensor) -> None:
        """SGD with Nesterov momentum, all parameters of a group in a handful of kernels. Uses `gradients` up."""
        recipe, split = self.recipe, self.num_biases
        for group, scaler in ((slice(0, split), recipe.bias_scaler), (slice(split, None), 1.0)):
            step_size = recipe.step_size * scaler
            parameters, momenta, updates = self.parameters[group], self.momenta[group], gradients[group]
            # Decay acts on the weights at step_decay a step whatever the group's rate, hence the division.
            torch._foreach_add_(updates, parameters, alpha=recipe.step_decay / step_size)
            torch._foreach_mul_(momenta, recipe.momentum)
            torch._foreach_add_(momenta, updates)
            torch._foreach_add_(updates, momenta, alpha=recipe.momentum)
            torch._foreach_mul_(updates, factor * step_size)
            torch._foreach_sub_(parameters, updates)

    def _averaged(self) -> list[Tensor]:
        return [*self.parameters, *self.statistics]

    @torch.no_grad()
    def _look_ahead(self, slow: list[Tensor], decay: float) -> None:
        """Move the slow weights towards the fast ones, and put the fast ones there."""
        fast = self._averaged()
        torch._foreach_lerp_(slow, fast, 1 - decay)
        torch._foreach_copy_(fast, slow)
        self._weights_were_changed()

    def _weights_were_changed(self) -> None:
        """By something other than a step."""
        if self.fused_step is not None:
            self.fused_step.read_weights()


def augmentation_plan(recipe: Recipe, indices: np.ndarray, num_epochs: int, rng: np.random.Generator) -> np.ndarray:
    """For every epoch and example: its position, and which rows and columns of it are read; (epochs, 3, n)."""
    num_shifts, n = 2 * recipe.max_shift + 1, len(indices)
    plan = np.empty((num_epochs, 3, n), dtype=np.int64)
    flipped = rng.integers(0, 2, n) if recipe.flip else np.zeros(n, dtype=np.int64)
    for epoch in range(num_epochs):
        order = rng.permutation(n)
        plan[epoch, 0] = np.asarray(indices)[order]
        plan[epoch, 1] = rng.integers(0, num_shifts, n)
        # Alternating flip: an image is seen from either side equally often.
        flips = flipped ^ (epoch % 2) if recipe.flip else flipped
        plan[epoch, 2] = rng.integers(0, num_shifts, n) + num_shifts * flips[order]
    return plan


def pixel_table(size: int, max_shift: int) -> np.ndarray:
    """Row k: which pixels are read under shift k - max_shift; rows from 2 * max_shift + 1 on: the same, flipped.

    Borders are reflected. (2 * (2 * max_shift + 1), size) int64.
    """
    shifted = np.arange(size) + np.arange(-max_shift, max_shift + 1)[:, None]
    reflected = size - 1 - np.abs(size - 1 - np.abs(shifted))
    return np.concatenate([reflected, size - 1 - reflected]).astype(np.int64)


# ---- one training after another on a GPU that never waits for the host, and what each makes of the queries ----


CAPTURE_PASS_AFTER = 2  # passes as they are, which compile the kernels and warm the libraries up


class SharedEngine:
    """An engine that any number of threads order trainings from; at most `at_most` are ordered and not yet done.

    While the host writes one result, the device should compute the next. So threads take turns to give all orders of a
    training at once, which takes two milliseconds, and each then waits for its own result. All orders go to one stream:
    two trainings that share the device push each other's activations out of its cache.
    """

    def __init__(self, make: Callable[[], Engine], at_most: int):
        self._make, self._left = make, threading.Semaphore(at_most)
        # A capture hears whatever any thread says to the device. So orders are given by one thread at a time, and
        # who captures waits, with the orders in hand, until those that have given theirs have their results.
        self._ordering, self._state, self._num_waiting = threading.Lock(), threading.Condition(), 0

    @cached_property
    def engine(self) -> Engine:
        """Itself for trainings one after another, on whatever stream is current."""
        engine = self._make()
        engine.quiet = self._quiet
        return engine

    def result_of(self, work: Callable[[Engine], Tensor]) -> Tensor:
        """What `work` has the engine compute, on the CPU; may be called by any number of threads."""
        with self._left:
            with self._ordering:
                engine = self.engine
                assert engine.stream is not None
                engine.stream.wait_stream(torch.cuda.current_stream(engine.device))  # where it was made or last used
                try:
                    with torch.cuda.stream(engine.stream):
                        result = work(engine)
                        # Copied in turn, before the next training overwrites it.
                        copied = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
                        copied.copy_(result, non_blocking=True)
                        done = torch.cuda.Event(blocking=True)
                        done.record()
                except BaseException:
                    engine.stream.synchronize()
                    raise
                self._count(+1)
            try:
                done.synchronize()
            finally:
                self._count(-1)
        return copied.clone()

    def _count(self, change: int) -> None:
        with self._state:
            self._num_waiting += change
            self._state.notify_all()

    def _quiet(self) -> None:
        """Called by who holds the orders."""
        with self._state:
            self._state.wait_for(lambda: self._num_waiting == 0)


class LossesOf:
    """Losses of fixed examples under an engine's weights as they stand, in eval mode, always into the same memory."""

    def __init__(self, engine: Engine, losses: Callable[[nn.Module], Tensor]):
        """`losses` is (model in eval mode) -> (examples,); nothing in it may wait for the device."""
        self._engine, self._losses, self._times_seen = engine, losses, 0
        self._model = sharing_weights(engine.model).eval()
        self._captured: tuple[torch.cuda.CUDAGraph, Tensor] | None = None

    @torch.no_grad()
    def now(self) -> Tensor:
        """(examples,); the next call, or the next training, may overwrite it."""
        if self._captured is not None:
            graph, losses = self._captured
            graph.replay()
            return losses
        with deterministic_convolutions():
            losses = self._losses(self._model)  # before a capture, too: see Engine._advance
            self._times_seen += 1
            if self._engine.capturing and self._times_seen > CAPTURE_PASS_AFTER:
                again: list[Tensor] = []
                recorded = self._engine.recorded(lambda: again.append(self._losses(self._model)))
                self._captured = None if recorded is None else (recorded, again[0])
        return losses


def sharing_weights(model: nn.Module) -> nn.Module:
    """A module with a mode of its own and the very same tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, memo={id(tensor): tensor for tensor in tensors})
