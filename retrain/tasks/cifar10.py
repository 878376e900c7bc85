"""The paper's image experiment: CIFAR-10 and a ResNet-9 of 1,972,792 parameters (appendix:lds-results).

    python -m bench.lds --task cifar10 --alpha 0.1 0.3 0.5 0.7 --data-dir DIR
    python -m bench.speed retrain --task cifar10 --alpha 0.1 0.5 --data-dir DIR      # retrains a second

2,500 of the 50,000 training images, the same for every seed, are set aside for warm-up and for the whitening filters,
which therefore never depend on what is left out; n = 47,500 remain. The 10,000 test images are the queries, and what is
measured is the plain cross-entropy of each, in eval mode.

The base model, which the methods look at, trains for 8 epochs on all n images under either protocol. The protocols say
how a model is retrained on a subset:

- `paper`: a warm-up on the 2,500 images, then one epoch on the subset at the full learning rate of 10. The paper says
  "a short warmup phase on D_warmup to prime the optimizer state" and its table "Warmup steps 100"; this is read as 100
  steps on the warm-up images while the learning rate rises linearly to 10, where it stays. The warm-up depends on the
  initialisation's seed alone, so its weights, statistics and momenta are computed once and reused. Two other readings
  are options: `epoch_rate="falling"` lets the rate of the epoch fall as Jordan's recipe does after its peak, and
  `warmup_keeps="optimizer"` starts from the initial weights with the warmed momenta alone.
- `scratch`: the base model's own training (8 epochs, triangular learning rate) on the subset alone.

A subset is cut into equal batches of at most 1,024, all of it used. The loss is summed over the batch, as in Jordan's
recipe, so smaller batches take proportionally smaller steps.
"""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from retrain.backends import deterministic_convolutions
from retrain.data.cifar10 import CIFAR10, FINGERPRINT, NUM_CLASSES, load_cifar10
from retrain.errors import UsageError
from retrain.examples import Batch, Examples, Indices, positions
from retrain.models.resnet9 import ResNet9, whitening_weight
from retrain.models.resnet9_training import (
    PRECISIONS,
    Engine,
    LossesOf,
    Recipe,
    SharedEngine,
    State,
    TrainingImages,
    compute_dtype,
    constant,
    falling,
    linear_rise,
    logits_in,
    logits_of_whitened,
    triangle,
    with_border,
)
from retrain.task import Task, not_in_key

# Of the training images' channels, as everybody rounds them.
CHANNEL_MEAN = (0.4914, 0.4822, 0.4465)
CHANNEL_STD = (0.2470, 0.2435, 0.2616)

# Separate streams for separate purposes: a seed shared by name must not give correlated draws.
_WARMUP_SPLIT_STREAM = 11
_WARMUP_ORDER_STREAM = 12
_ORDER_STREAM = 13

MAX_STARTS = 8  # states kept on a device, 16 MB each
MAX_ORDERED = 2  # trainings: one that a GPU computes and the next; further threads write what came of theirs
READINGS = {"epoch_rate": ("constant", "falling"), "warmup_keeps": ("all", "optimizer")}  # the usual one first


@dataclass
class OnDevices:
    """What a task keeps on devices for as long as it lives."""

    engines: dict[str, SharedEngine] = field(default_factory=dict)  # by device
    losses_of: dict[Engine, LossesOf] = field(default_factory=dict)
    queries: Examples | None = None  # as `Cifar10.resident` makes them
    starts: dict[tuple[str, int, bool], State] = field(default_factory=dict)  # by device, seed and whether warmed up
    examples: "WeakKeyDictionary[Examples, tuple[str, Tensor, Tensor]]" = field(default_factory=WeakKeyDictionary)


@dataclass(frozen=True, kw_only=True)
class Cifar10(Task):
    """47,500 training images, 10,000 queries; the module's text has the protocols."""

    version: ClassVar[int] = 1
    protocols: ClassVar[tuple[str, ...]] = ("paper", "scratch")
    default_alpha_attribution: ClassVar[float] = 0.1
    losses_batch_size: ClassVar[int] = 2500
    captured_batch_size: ClassVar[int] = 5000
    class_names: ClassVar[tuple[str, ...]] = (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip
    method_settings: ClassVar[dict[str, dict[str, Any]]] = {
        "bif": {"batch_size": 15_000},
        "trak": {"projection": 4096, "batch_size": 1000},
        "ekfac": {"query_batch_size": 2000, "train_batch_size": 500, "fit_batch_size": 1000},
        "kfac": {"fit_batch_size": 1000},  # EK-FAC's, so that both draw the same labels
        "gradsim": {"batch_size": 250},
    }  # fmt: skip

    widths: tuple[int, ...] = (64, 256, 256)
    num_warmup: int = 2500
    warmup_steps: int = 100
    epochs: int = 8
    batch_size: int = 1024
    learning_rate: float = 10.0
    momentum: float = 0.85
    weight_decay: float = 0.0153
    bias_scaler: float = 64.0
    label_smoothing: float = 0.2
    max_shift: int = 2
    flip: bool = True
    # Lookahead throws up to four steps away at the end, so trainings shorter than this go without; 0 turns it off.
    lookahead_from: int = 100
    precision: str = "bfloat16"  # of convolutions, on CUDA; weights and the head are always float32
    epoch_rate: str = "constant"  # or "falling": of the one epoch of protocol `paper`
    warmup_keeps: str = "all"  # or "optimizer": what protocol `paper` starts from after the warm-up
    fused: bool = True  # on CUDA, train by kernels of our own: rounded differently, and faster

    data_dir: str | Path | None = not_in_key(None)
    cache_dir: str | Path | None = not_in_key(None)
    allow_download: bool = not_in_key(True)
    check_fingerprint: bool = not_in_key(True)  # the data's fingerprint is in the key either way
    capture: bool = not_in_key(True)  # CUDA graphs: faster, the same steps
    at_once: int = not_in_key(4)  # threads that retrain on one GPU

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision not in PRECISIONS:
            raise ValueError(f'precision is "{self.precision}"; available: {", ".join(PRECISIONS)}')
        for name, choices in READINGS.items():
            if getattr(self, name) not in choices:
                raise ValueError(f'{name} is "{getattr(self, name)}"; available: {", ".join(choices)}')
            if self.protocol != "paper" and getattr(self, name) != choices[0]:
                raise ValueError(f"{name} is an option of protocol paper; the protocol is {self.protocol}")
        if min(self.num_warmup, self.warmup_steps, self.epochs, self.at_once) < 1:
            raise ValueError("num_warmup, warmup_steps, epochs and at_once must be at least 1")
        self._recipe  # noqa: B018  (checks its own values)

    @cached_property
    def config(self) -> dict[str, Any]:
        """A reading is named where it is not the usual one, so that older records are of the same ground truth."""
        usual = [name for name, choices in READINGS.items() if getattr(self, name) == choices[0]]
        usual += ["fused"] * self.fused
        return {name: value for name, value in super().config.items() if name not in usual}

    # ---- data ----

    @cached_property
    def cifar10(self) -> CIFAR10:
        """The official images; loaded once a process, whatever the number of tasks."""
        expected = FINGERPRINT if self.check_fingerprint else None
        data = _load(self.data_dir, self.allow_download, self.cache_dir, expected)
        if len(data.train_labels) <= self.num_warmup:
            raise UsageError(
                f"{self.num_warmup} of {len(data.train_labels)} training images are asked for as warm-up; "
                "set num_warmup lower"
            )
        return data

    @cached_property
    def warmup_indices(self) -> np.ndarray:
        """Official positions of the images set aside, sorted: the same for every seed."""
        n = len(self.cifar10.train_labels)
        return np.sort(np.random.default_rng([_WARMUP_SPLIT_STREAM]).permutation(n)[: self.num_warmup])

    @cached_property
    def train_indices(self) -> np.ndarray:
        """Official position of each of the n training examples, sorted."""
        return np.setdiff1d(np.arange(len(self.cifar10.train_labels)), self.warmup_indices)

    def load_train_data(self) -> Examples:
        data, chosen = self.cifar10, torch.from_numpy(self.train_indices)
        return Examples(normalised_images(data.train_images[chosen]), data.train_labels[chosen])

    def load_query_data(self) -> Examples:
        return Examples(normalised_images(self.cifar10.test_images), self.cifar10.test_labels)

    def image_shape(self) -> tuple[int, int, int]:
        return (3, 32, 32)

    @property
    def description(self) -> str:
        known = "CIFAR-10" if self.cifar10.fingerprint == FINGERPRINT else "images in place of CIFAR-10"
        return f"{known} ({len(self.train_indices):,} images), ResNet-9"

    @cached_property
    def data_fingerprint(self) -> str:
        """The one that was checked on loading: 584 MB of floats need not be hashed for it."""
        return self.cifar10.fingerprint

    # ---- the model and its training ----

    @property
    def _recipe(self) -> Recipe:
        return Recipe(**{f.name: getattr(self, f.name) for f in fields(Recipe)})

    @cached_property
    def _whitening(self) -> Tensor:
        return whitening_weight(normalised_images(self.cifar10.train_images[torch.from_numpy(self.warmup_indices)]))

    def build_model(self, seed: int) -> ResNet9:
        model = ResNet9(num_classes=NUM_CLASSES, widths=self.widths, generator=torch.Generator().manual_seed(seed))
        model.set_whitening(self._whitening)
        return model

    def train(self, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        return self._trained(self._engine(device), indices, init_seed, order_seed, self.protocol).model_copy()

    def train_base(self, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        """8 epochs on all n images, under either protocol: both are compared with the same checkpoint."""
        everything = np.arange(len(self.train_indices))
        return self._trained(self._engine(device), everything, init_seed, order_seed, "scratch").model_copy()

    def _trained(self, engine: Engine, indices: Indices, init_seed: int, order_seed: int, protocol: str) -> Engine:
        chosen, rng = self._official(indices), np.random.default_rng([_ORDER_STREAM, order_seed])
        engine.load(self._start(init_seed, engine, warmed=protocol == "paper"))
        if protocol == "paper":
            engine.run(chosen, 1, falling if self.epoch_rate == "falling" else constant, rng)
        else:
            lookahead = 0 < self.lookahead_from <= engine.num_steps(len(chosen), self.epochs)
            engine.run(chosen, self.epochs, triangle, rng, lookahead=lookahead)
        return engine

    def plain(self) -> "Cifar10":
        return replace(self, fused=False, at_once=1)

    def trainings_at_once(self, device: torch.device) -> int:
        return self.at_once if torch.device(device).type == "cuda" else 1

    def retrained_losses(self, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> Tensor:
        """On CUDA by the fused kernels that BIF's losses come from, in any number of threads."""
        device = torch.device(device)
        if device.type != "cuda":
            return super().retrained_losses(indices, init_seed=init_seed, order_seed=order_seed, device=device)

        def work(engine: Engine) -> Tensor:
            trained = self._trained(engine, indices, init_seed, order_seed, self.protocol)
            return self._query_losses(trained).now().float()

        return self._shared(device).result_of(work)

    def _query_losses(self, engine: Engine) -> LossesOf:
        held = self._held
        if engine not in held.losses_of:
            if held.queries is None:
                held.queries = self.resident(self.query_data, engine.device)
                torch.cuda.synchronize(engine.device)  # whatever stream reads them next
            queries = held.queries

            def losses(model: nn.Module) -> Tensor:
                return torch.cat([self.loss(model, batch) for batch in queries.batches(self.captured_batch_size)])

            held.losses_of[engine] = LossesOf(engine, losses)
        return held.losses_of[engine]

    def _official(self, indices: Indices) -> np.ndarray:
        """Official positions of training examples."""
        return self.train_indices[positions(indices, len(self.train_indices))]

    @cached_property
    def _held(self) -> OnDevices:
        return OnDevices()

    def _shared(self, device: torch.device) -> SharedEngine:
        def make() -> Engine:
            images, labels = normalised_images(self.cifar10.train_images), self.cifar10.train_labels
            data = TrainingImages(images, labels, self.max_shift, device, self.precision)
            return Engine(self.build_model(0), data, self._recipe, capture=self.capture, fused=self.fused)

        return self._held.engines.setdefault(str(device), SharedEngine(make, MAX_ORDERED))

    def _engine(self, device: torch.device) -> Engine:
        """For trainings one after another."""
        return self._shared(torch.device(device)).engine

    def _start(self, init_seed: int, engine: Engine, warmed: bool) -> State:
        """Where every training of this seed begins; computed once."""
        key = (str(engine.device), init_seed, warmed)
        starts = self._held.starts
        if key not in starts:
            start = engine.fresh_state(self.build_model(init_seed))
            if warmed:
                engine.load(start)
                rng = np.random.default_rng([_WARMUP_ORDER_STREAM, init_seed])
                engine.run(self.warmup_indices, 0, linear_rise, rng, num_steps=self.warmup_steps)
                kept = engine.state()
                start = State(start.tensors, kept.momenta) if self.warmup_keeps == "optimizer" else kept
            if engine.device.type == "cuda":
                torch.cuda.synchronize(engine.device)  # other streams read it, and may still read what is dropped
            while len(starts) >= MAX_STARTS:
                del starts[next(iter(starts))]
            starts[key] = start
        return starts[key]

    # ---- measurement ----

    @torch.no_grad()
    def logits(self, model: nn.Module, examples: Examples, device: torch.device) -> Tensor:
        """(len(examples), classes) float32 on `device`, in eval mode. Examples stay on the device while they live."""
        device = torch.device(device)
        dtype = compute_dtype(self.precision, device)
        where, inputs, _ = self._held.examples.get(examples, ("", torch.empty(0), torch.empty(0)))
        if where != str(device):
            inputs = examples.inputs.to(device, dtype).contiguous(memory_format=torch.channels_last)
            self._held.examples[examples] = (str(device), inputs, examples.targets.to(device))
        model.eval()
        parts = []
        with deterministic_convolutions():
            for batch in inputs.split(self.losses_batch_size):
                if isinstance(model, ResNet9):
                    parts.append(logits_in(dtype, model, batch))
                else:  # a wrapper, say, that decides its precision itself
                    parts.append(model(batch.float()).float())
        return torch.cat(parts)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """(batch,): on a GPU with convolutions in `precision`, differentiable in the float32 weights."""
        inputs, targets = batch
        dtype = compute_dtype(self.precision, inputs.device)
        if isinstance(model, ResNet9) and inputs.shape[1] != model.whiten.in_channels:  # from `resident`
            return self.loss_function.per_example(logits_of_whitened(dtype, model, inputs), targets)
        if dtype == torch.float32 or not isinstance(model, ResNet9):
            return super().loss(model, batch)
        inputs = inputs.to(dtype, memory_format=torch.channels_last)
        return self.loss_function.per_example(logits_in(dtype, model, inputs), targets)

    @torch.no_grad()
    def resident(self, examples: Examples, device: torch.device) -> Examples:
        """Images as the frozen whitening layer leaves them, bordered: the same at all weights, so it runs once."""
        device = torch.device(device)
        dtype = compute_dtype(self.precision, device)
        if dtype == torch.float32:
            return examples.to(device)
        model = self.build_model(0).to(device)
        parts = []
        with torch.autocast(device.type, dtype):
            for images, _ in examples.batches(self.losses_batch_size):
                images = images.to(device).to(dtype, memory_format=torch.channels_last)
                parts.append(with_border(model.whitened(images)))
        bordered = torch.cat(parts).to(dtype, memory_format=torch.channels_last)
        return Examples(bordered, examples.targets.to(device))

    @torch.no_grad()
    def losses(self, model: nn.Module, examples: Examples, device: torch.device) -> Tensor:
        logits = self.logits(model, examples, device)
        return self.loss_function.per_example(logits, self._held.examples[examples][2]).float().cpu()


def normalised_images(images: Tensor) -> Tensor:
    """float32 with about mean 0 and standard deviation 1, from uint8 (n, 3, height, width)."""
    mean = torch.tensor(CHANNEL_MEAN, device=images.device).view(1, 3, 1, 1)
    std = torch.tensor(CHANNEL_STD, device=images.device).view(1, 3, 1, 1)
    return images.float().div_(255).sub_(mean).div_(std)


_load = lru_cache(maxsize=2)(load_cifar10)
