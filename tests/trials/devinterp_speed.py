"""Seconds a draw: our BIF against devinterp 2.0.1, in one run, on the same model, sequences and hyperparameters.

    python -m tests.trials.devinterp_speed --model FOLDER --length 1024 --draws 20 --device cuda
    python -m tests.trials.devinterp_speed --pack carry/devinterp          # here: fetch what a bare machine lacks, 6 MB
    python -m tests.trials.devinterp_speed --wheels carry/devinterp ...    # there: nothing is installed

A draw is one SGLD step on a minibatch and the losses of every training and query sequence. Each side runs as its users
run it: ours through `BIF.score` on the pythia14m task, devinterp through its `sample` with its own loss function on the
transformers model. With --precision bfloat16 ours computes in bf16 on float32 weights; devinterp has no such thing, so
its model is bf16 throughout, which is faster than it could soundly be. A run of few draws is subtracted from a run of
many, so that setting up, compiling and the final covariance count on neither side; rounds alternate, and the median is
printed. Without --model the weights are random, of the named architecture: no second depends on them.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baselines.bif.method import BIF
from baselines.bif_devinterp import BIFDevinterp, import_devinterp
from baselines.method import Problem
from retrain.errors import UsageError
from retrain.models.causal_lm import CausalLM
from retrain.models.pretrained import load_language_model
from retrain.tasks.language import Pythia14M

FEW = 2  # draws of the short run
# numcodecs 0.16 carries debugging symbols and is seven times as large; zarr names no upper bound.
WHEELS = (
    "devinterp==2.0.1", "xarray==2026.9.0", "zarr==3.1.6", "numcodecs==0.17.1", "google-crc32c", "donfig",
    "pydantic==2.14.3", "pydantic-core==2.50.4", "annotated-types", "typing-inspection", "typing_extensions",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Timed(Pythia14M):
    """pythia14m on given weights and random tokens: no text and no tokenizer."""

    architecture: str = "pythia-14m"

    @cached_property
    def _sequences(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape = (self.num_train + self.num_queries, self.length)
        tokens = torch.randint(self._pretrained.vocabulary, shape, generator=generator)
        return tokens[: self.num_train], tokens[self.num_train :]

    @cached_property
    def _given(self) -> CausalLM:
        if self.model:
            return load_language_model(self.model, allow_download=False)
        from retrain.models.pythia_suite import build_random, suite_configuration

        model = build_random(suite_configuration(self.architecture), dtype=torch.float32)
        assert isinstance(model, CausalLM)
        return model

    @property
    def _pretrained(self) -> CausalLM:
        return self._given


def time_ours(task: Timed, model: CausalLM, options: dict[str, Any], batch_size: int, device: torch.device) -> Callable:
    problem = Problem(
        task=task,
        model=model.to(device).eval(),
        train=task.train_data,
        attributed_indices=np.arange(task.num_train),
        queries=task.query_data,
        seed=1,
        device=device,
        scratch=Path(tempfile.gettempdir()),
    )

    def run(draws: int) -> None:
        BIF(**options, chains=1, draws=draws, batch_size=batch_size).score(problem, None)

    return run


class Sequences(torch.utils.data.Dataset):
    def __init__(self, tokens: Tensor):
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index]}


def time_devinterp(
    task: Timed, model: CausalLM, options: dict[str, Any], micro_batch: int, device: torch.device, bf16: bool
) -> Callable:
    _, sampling = import_devinterp()
    transformer = model.transformer.to(device, torch.bfloat16 if bf16 else torch.float32).eval()
    train, queries = task._sequences

    def run(draws: int) -> None:
        words = BIFDevinterp(**options, chains=1, draws=draws, micro_batch=micro_batch).sampling_options(len(train))
        size = words["batch_size"]
        for name, count in (("training", len(train)), ("query", len(queries))):
            if count % size:
                raise UsageError(f"{count} {name} sequences are no multiple of devinterp's batch of {size}")
        observables = {
            "train": (Sequences(train), len(train) // size),
            "query": (Sequences(queries), len(queries) // size),
        }
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
            with contextlib.redirect_stderr(nowhere):
                tree = sampling.sample(
                    model=transformer,
                    dataset=Sequences(train),
                    observables=observables,
                    device=str(device),
                    output_path=Path(folder) / "samples.zarr",
                    **words,
                )
            if not np.isfinite(tree["sampling_loss"].values).all():
                raise UsageError("devinterp's chain diverged; a shorter --step-size is needed to time it")

    return run


def seconds(run: Callable[[int], None], draws: int, device: torch.device) -> float:
    synchronise(device)
    start = time.perf_counter()
    run(draws)
    synchronise(device)
    return time.perf_counter() - start


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(arguments: argparse.Namespace) -> float:
    """Prints both, and returns how many times faster ours is."""
    device = torch.device(arguments.device)
    task = Timed(
        model=arguments.model, architecture=arguments.architecture, length=arguments.length,
        num_train=arguments.train, num_queries=arguments.queries, precision=arguments.precision,
    )  # fmt: skip
    options = {
        "sampler": arguments.sampler, "step_size": arguments.step_size, "n_beta": arguments.n_beta,
        "gamma": arguments.gamma, "minibatch": arguments.minibatch,
    }  # fmt: skip
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(
        f"{task.num_train} + {task.num_queries} sequences of {task.length} tokens, minibatch {arguments.minibatch}, "
        f"{arguments.sampler}, {arguments.precision}; {name}, torch {torch.__version__}",
        flush=True,
    )
    bf16 = arguments.precision == "bfloat16" and device.type == "cuda"
    sides = {
        "ours": time_ours(task, task.build_model(0), options, arguments.batch, device),  # type: ignore[arg-type]
        "devinterp": time_devinterp(task, task.build_model(0), options, arguments.micro_batch, device, bf16),  # type: ignore[arg-type]
    }
    for side, run in sides.items():
        print(f"warm-up of {side}: {seconds(run, FEW, device):.2f} s", flush=True)
    found: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(arguments.rounds):
        for side, run in sides.items():
            few, many = (seconds(run, draws, device) for draws in (FEW, FEW + arguments.draws))
            found[side].append((many - few) / arguments.draws)
            print(f"round {number + 1}, {side}: {1000 * found[side][-1]:.2f} ms a draw", flush=True)
    ours, theirs = (statistics.median(found[side]) for side in ("ours", "devinterp"))
    tokens = (task.num_train + task.num_queries) * (task.length - 1)
    for side, value in (("ours", ours), ("devinterp", theirs)):
        print(
            f"{side:>9}: {1000 * value:9.2f} ms a draw (median of {arguments.rounds}), {tokens / value:,.0f} tokens/s"
        )
    print(f"ratio devinterp / ours: {theirs / ours:.2f}")
    return theirs / ours


def pack(folder: Path, python: str) -> None:
    """Wheels for a bare x86-64 machine with torch, transformers, numpy and pandas, which can reach nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [f"--platform={name}_x86_64" for name in ("manylinux2014", "manylinux_2_17", "manylinux_2_28")]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *platforms,
        f"--python-version={python}", f"--dest={folder}", *WHEELS,
    ]  # fmt: skip
    subprocess.run(command, check=True)
    total = sum(path.stat().st_size for path in folder.glob("*.whl"))
    print(f"{len(list(folder.glob('*.whl')))} wheels, {total / 2**20:.1f} MiB, in {folder}")


def unpack(folder: Path) -> None:
    """Wheels are zip files: laid out in a temporary folder behind whatever is installed."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise UsageError(f'"{folder}" holds no wheels; make them with --pack')
    target = tempfile.mkdtemp(prefix="devinterp-")
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    sys.path.append(target)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.trials.devinterp_speed", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", default="", help="folder of a causal language model (default: random weights)")
    add("--architecture", default="pythia-14m", help="of the random weights (default: %(default)s)")
    add("--length", type=int, default=1024, help="tokens a sequence (default: %(default)s)")
    add("--train", type=int, default=512, help="training sequences measured at every draw (default: %(default)s)")
    add("--queries", type=int, default=64, help="query sequences measured at every draw (default: %(default)s)")
    add("--minibatch", type=int, default=64, help="sequences of a gradient step (default: %(default)s)")
    add("--micro-batch", type=int, default=32, help="devinterp: sequences in memory at once (default: %(default)s)")
    add("--batch", type=int, default=256, help="ours: sequences measured at once (default: %(default)s)")
    add("--draws", type=int, default=20, help="timed in each round (default: %(default)s)")
    add("--rounds", type=int, default=3, help="(default: %(default)s)")
    add("--sampler", choices=("sgld", "rmsprop_sgld"), default="sgld")
    add("--step-size", type=float, default=2e-6)
    add("--n-beta", type=float, default=800.0)
    add("--gamma", type=float, default=5e4)
    add("--precision", choices=("bfloat16", "tf32", "float32"), default="bfloat16", help="on CUDA (default: bfloat16)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--wheels", type=Path, help="folder of wheels to take devinterp from")
    add("--pack", type=Path, metavar="FOLDER", help="fetch the wheels a bare machine needs, and stop")
    add("--python", default="3.12", help="with --pack: that machine's Python (default: %(default)s)")
    return parser


def main() -> int:
    arguments = make_parser().parse_args()
    try:
        if arguments.pack:
            pack(arguments.pack, arguments.python)
            return 0
        if arguments.wheels:
            unpack(arguments.wheels)
        if reason := BIFDevinterp().skip(None):  # type: ignore[arg-type]
            raise UsageError(reason)
        compare(arguments)
    except UsageError as error:
        print(f"python -m tests.trials.devinterp_speed: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
