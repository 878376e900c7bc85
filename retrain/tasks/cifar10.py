"""The paper's image experiment: CIFAR-10 and a ResNet-9 of 1,972,792 parameters (appendix:lds-results).

    python -m bench.lds --task cifar10 --alpha 0.1 0.3 0.5 0.7 --data-dir DIR
    python -m retrain.tasks.cifar10 --benchmark --data-dir DIR      # seconds, accuracy and replicate correlation

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

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from retrain.data.cifar10 import CIFAR10, FINGERPRINT, NUM_CLASSES, load_cifar10
from retrain.errors import UsageError
from retrain.examples import Batch, Examples, Indices
from retrain.models.resnet9 import ResNet9, whitening_weight
from retrain.models.resnet9_training import (
    PRECISIONS,
    Engine,
    Recipe,
    State,
    compute_dtype,
    constant,
    deterministic_convolutions,
    falling,
    linear_rise,
    logits_in,
    logits_of_whitened,
    triangle,
    with_border,
)
from retrain.subsets import attributed_indices, masks
from retrain.task import Task, not_in_key

# Of the training images' channels, as everybody rounds them.
CHANNEL_MEAN = (0.4914, 0.4822, 0.4465)
CHANNEL_STD = (0.2470, 0.2435, 0.2616)

# Separate streams for separate purposes: a seed shared by name must not give correlated draws.
_WARMUP_SPLIT_STREAM = 11
_WARMUP_ORDER_STREAM = 12
_ORDER_STREAM = 13

MAX_STARTS = 8  # states kept on a device, 16 MB each
READINGS = {"epoch_rate": ("constant", "falling"), "warmup_keeps": ("all", "optimizer")}  # the usual one first


@dataclass(frozen=True, kw_only=True)
class Cifar10(Task):
    """47,500 training images, 10,000 queries; the module's text has the protocols."""

    version: ClassVar[int] = 1
    protocols: ClassVar[tuple[str, ...]] = ("paper", "scratch")
    default_alpha_attribution: ClassVar[float] = 0.1
    losses_batch_size: ClassVar[int] = 2500
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

    data_dir: str | Path | None = not_in_key(None)
    cache_dir: str | Path | None = not_in_key(None)
    allow_download: bool = not_in_key(True)
    check_fingerprint: bool = not_in_key(True)  # the data's fingerprint is in the key either way
    capture: bool = not_in_key(True)  # CUDA graphs: faster, the same steps

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision not in PRECISIONS:
            raise ValueError(f'precision is "{self.precision}"; available: {", ".join(PRECISIONS)}')
        for name, choices in READINGS.items():
            if getattr(self, name) not in choices:
                raise ValueError(f'{name} is "{getattr(self, name)}"; available: {", ".join(choices)}')
            if self.protocol != "paper" and getattr(self, name) != choices[0]:
                raise ValueError(f"{name} is an option of protocol paper; the protocol is {self.protocol}")
        if min(self.num_warmup, self.warmup_steps, self.epochs) < 1:
            raise ValueError("num_warmup, warmup_steps and epochs must be at least 1")
        self._recipe  # noqa: B018  (checks its own values)

    def __getstate__(self) -> dict[str, Any]:
        """Workers get the configuration; data, device memory and CUDA graphs they make for themselves."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @cached_property
    def config(self) -> dict[str, Any]:
        """A reading is named where it is not the usual one, so that older records are of the same ground truth."""
        usual = [name for name, choices in READINGS.items() if getattr(self, name) == choices[0]]
        return {name: value for name, value in super().config.items() if name not in usual}

    # ---- data ----

    @property
    def cifar10(self) -> CIFAR10:
        """The official images; loaded once a process, whatever the number of tasks."""
        data = _load(self.data_dir, self.allow_download, self.cache_dir, self.check_fingerprint)
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
        return Recipe(
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            bias_scaler=self.bias_scaler,
            label_smoothing=self.label_smoothing,
            max_shift=self.max_shift,
            flip=self.flip,
        )

    @cached_property
    def _whitening(self) -> Tensor:
        return whitening_weight(normalised_images(self.cifar10.train_images[torch.from_numpy(self.warmup_indices)]))

    def build_model(self, seed: int) -> ResNet9:
        model = ResNet9(num_classes=NUM_CLASSES, widths=self.widths, generator=torch.Generator().manual_seed(seed))
        model.set_whitening(self._whitening)
        return model

    def train(self, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        if self.protocol == "scratch":
            return self._from_scratch(indices, init_seed, order_seed, device)
        engine = self._engine(device)
        engine.load(self._start(init_seed, device, warmed=True))
        schedule = falling if self.epoch_rate == "falling" else constant
        engine.run(self._official(indices), 1, schedule, np.random.default_rng([_ORDER_STREAM, order_seed]))
        return engine.model_copy()

    def train_base(self, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        """8 epochs on all n images, under either protocol: both are compared with the same checkpoint."""
        return self._from_scratch(np.arange(len(self.train_indices)), init_seed, order_seed, device)

    def _from_scratch(self, indices: Indices, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        engine, chosen = self._engine(device), self._official(indices)
        engine.load(self._start(init_seed, device, warmed=False))
        num_steps = engine.num_steps(len(chosen), self.epochs)
        rng = np.random.default_rng([_ORDER_STREAM, order_seed])
        engine.run(chosen, self.epochs, triangle, rng, lookahead=0 < self.lookahead_from <= num_steps)
        return engine.model_copy()

    def _official(self, indices: Indices) -> np.ndarray:
        """Official positions of training examples; refuses here what would be an unreadable failure on a GPU."""
        chosen = np.asarray(indices, dtype=np.int64)
        n = len(self.train_indices)
        if chosen.ndim != 1 or len(chosen) == 0 or chosen.min() < 0 or chosen.max() >= n:
            raise ValueError(f"indices must be a list of at least one position from 0 to {n - 1}")
        return self.train_indices[chosen]

    @cached_property
    def _engines(self) -> dict[str, Engine]:
        return {}

    @cached_property
    def _starts(self) -> dict[tuple[str, int, bool], State]:
        return {}

    def _engine(self, device: torch.device) -> Engine:
        device = torch.device(device)
        if str(device) not in self._engines:
            data = self.cifar10
            self._engines[str(device)] = Engine(
                self.build_model(0),
                normalised_images(data.train_images),
                data.train_labels,
                self._recipe,
                device,
                precision=self.precision,
                capture=self.capture,
            )
        return self._engines[str(device)]

    def _start(self, init_seed: int, device: torch.device, warmed: bool) -> State:
        """Where every training of this seed begins; computed once."""
        key = (str(torch.device(device)), init_seed, warmed)
        if key not in self._starts:
            engine = self._engine(device)
            start = engine.fresh_state(self.build_model(init_seed))
            if warmed:
                engine.load(start)
                rng = np.random.default_rng([_WARMUP_ORDER_STREAM, init_seed])
                engine.run(self.warmup_indices, 0, linear_rise, rng, num_steps=self.warmup_steps)
                kept = engine.state()
                start = State(start.tensors, kept.momenta) if self.warmup_keeps == "optimizer" else kept
            while len(self._starts) >= MAX_STARTS:
                del self._starts[next(iter(self._starts))]
            self._starts[key] = start
        return self._starts[key]

    def release_device(self) -> None:
        """Give back the memory that trainings and losses keep on devices (about 1 GB and the graphs' own)."""
        self._engines.clear()
        self._starts.clear()
        self._resident.clear()

    # ---- measurement ----

    @cached_property
    def _resident(self) -> "WeakKeyDictionary[Examples, tuple[str, Tensor, Tensor]]":
        return WeakKeyDictionary()

    @torch.no_grad()
    def logits(self, model: nn.Module, examples: Examples, device: torch.device) -> Tensor:
        """(len(examples), classes) float32 on `device`, in eval mode. Examples stay on the device while they live."""
        device = torch.device(device)
        dtype = compute_dtype(self.precision, device)
        where, inputs, _ = self._resident.get(examples, ("", torch.empty(0), torch.empty(0)))
        if where != str(device):
            inputs = examples.inputs.to(device, dtype).contiguous(memory_format=torch.channels_last)
            self._resident[examples] = (str(device), inputs, examples.targets.to(device))
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
        return self.loss_function.per_example(logits, self._resident[examples][2]).float().cpu()

    def accuracy(self, model: nn.Module, device: torch.device) -> float:
        """Share of the queries that are classified correctly, without test-time augmentation."""
        logits = self.logits(model, self.query_data, device)
        return (logits.argmax(1).cpu() == self.query_data.targets).float().mean().item()


def normalised_images(images: Tensor) -> Tensor:
    """float32 with about mean 0 and standard deviation 1, from uint8 (n, 3, height, width)."""
    mean = torch.tensor(CHANNEL_MEAN, device=images.device).view(1, 3, 1, 1)
    std = torch.tensor(CHANNEL_STD, device=images.device).view(1, 3, 1, 1)
    return images.float().div_(255).sub_(mean).div_(std)


@lru_cache(maxsize=2)
def _load(
    data_dir: str | Path | None, allow_download: bool, cache_dir: str | Path | None, check_fingerprint: bool
) -> CIFAR10:
    return load_cifar10(data_dir, allow_download, cache_dir, FINGERPRINT if check_fingerprint else None)


# ---- seconds and agreement, in one command ---------------------------------------------------------------------------


def retrained_losses(
    task: Cifar10, subsets: Sequence[np.ndarray], *, init_seed: int, order_seed: int, device: torch.device
) -> tuple[np.ndarray, float]:
    """Every query's loss after retraining on each subset, (subsets, queries); and the seconds that took in all."""
    start = time.perf_counter()
    rows = []
    for number, subset in enumerate(subsets):
        model = task.train(subset, init_seed=init_seed, order_seed=order_seed * 1_000_003 + number, device=device)
        rows.append(task.losses(model, task.query_data, device).numpy())  # on the CPU, hence synchronised
    return np.stack(rows), time.perf_counter() - start


def replicate_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Mean over queries of Spearman's correlation across subsets; both are (subsets, queries)."""

    def standardised_ranks(losses: np.ndarray) -> np.ndarray:
        ranks = losses.argsort(0).argsort(0).astype(np.float64)  # losses are real numbers: ties do not matter
        ranks -= ranks.mean(0)
        return ranks / np.linalg.norm(ranks, axis=0)

    return float((standardised_ranks(first) * standardised_ranks(second)).sum(0).mean())


def benchmark_cifar10(
    task: Cifar10,
    device: torch.device,
    *,
    num_retrains: int = 100,
    seeds: Sequence[int] = (1, 2, 3, 4, 42),
    alphas: Sequence[float] = (0.1, 0.5),
    alpha_attribution: float = 0.1,
) -> dict[str, Any]:
    """Print, and return, what the CIFAR-10 issue asks to be shown. Timings begin after a warm-up of their own."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"device {name}, torch {torch.__version__}, data {task.cifar10.source}, {task.description}", flush=True)
    results: dict[str, Any] = {}

    start = time.perf_counter()
    task.accuracy(task.train_base(init_seed=0, order_seed=0, device=device), device)
    print(f"first base model, with all set-up: {time.perf_counter() - start:.2f} s", flush=True)
    seconds, accuracies = [], []
    for seed in seeds:
        start = time.perf_counter()
        model = task.train_base(init_seed=seed, order_seed=seed, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
        accuracies.append(task.accuracy(model, device))
    results["base_seconds"], results["base_accuracies"] = seconds, accuracies
    print(
        f"base model, {task.epochs} epochs on {len(task.train_indices):,}: median {statistics.median(seconds):.2f} s; "
        f"test accuracy mean {statistics.mean(accuracies):.4f} of {len(seeds)} seeds "
        f"({', '.join(f'{a:.4f}' for a in accuracies)})",
        flush=True,
    )

    seed, n = seeds[0], len(task.train_indices)
    attributed = attributed_indices(seed, alpha_attribution, n)
    for protocol in Cifar10.protocols:
        # The same engine, graphs and data under either protocol: only `train` looks at the name.
        other = with_protocol(task, protocol)
        for alpha in alphas:
            subsets = [attributed[kept] for kept in masks(seed, num_retrains, alpha, len(attributed))]
            retrained_losses(other, subsets[: min(16, num_retrains)], init_seed=seed, order_seed=0, device=device)
            runs = [
                retrained_losses(other, subsets, init_seed=seed, order_seed=order_seed, device=device)
                for order_seed in (1, 2, 3)
            ]
            (first, _), (second, _), _ = runs
            took = statistics.median(s for _, s in runs)
            agreement = replicate_correlation(first, second)
            bad = sum(int((~np.isfinite(losses)).sum()) for losses, _ in runs)
            results[f"{protocol} {alpha}"] = {
                "seconds": took,
                "replicate_correlation": agreement,
                "num_not_finite": bad,
            }
            print(
                f"{protocol}, alpha {alpha}: {num_retrains} retrains on {len(subsets[0]):,} images with the losses of "
                f"{len(task.query_data):,} queries: median {took:.2f} s of 3 "
                f"({', '.join(f'{s:.2f}' for _, s in runs)}); mean loss {first.mean():.3f}; "
                f"replicate correlation {agreement:.3f}; {bad} losses not finite",
                flush=True,
            )
    for where, engine in task._engines.items():
        print(f"{where}: captured batch sizes {sorted(engine.graphs) or 'none'}", flush=True)
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB", flush=True)
    return results


def with_protocol(task: Cifar10, protocol: str) -> Cifar10:
    """The same task under another protocol, sharing what it holds on devices and the data it has loaded."""
    other = Cifar10(**{**task.__getstate__(), "protocol": protocol})
    shared = ("train_data", "query_data", "train_indices", "warmup_indices", "_whitening", "_engines", "_starts")
    for name in (*shared, "_resident"):
        other.__dict__[name] = getattr(task, name)
    return other


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m retrain.tasks.cifar10", description=__doc__.splitlines()[0])
    parser.add_argument("--benchmark", action="store_true", required=True, help="time training and print agreement")
    parser.add_argument("--data-dir", help="folder with cifar-10-batches-py or the WebP pieces")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--retrains", type=int, default=100, help="retrains a timing (default: %(default)s)")
    parser.add_argument("--no-capture", action="store_true", help="do without CUDA graphs, for comparison")
    parser.add_argument("--any-images", action="store_true", help="accept images that are not CIFAR-10 as published")
    options = parser.parse_args(arguments)
    try:
        task = Cifar10(
            data_dir=options.data_dir, capture=not options.no_capture, check_fingerprint=not options.any_images
        )
        benchmark_cifar10(task, torch.device(options.device), num_retrains=options.retrains)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    from retrain.tasks.cifar10 import main as main_by_its_real_name  # a task's name is its module's, not __main__

    sys.exit(main_by_its_real_name())
