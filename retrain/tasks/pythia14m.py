"""The paper's language experiment: Pythia-14M, finetuned for an epoch on parts of Wikipedia (appendix:llm_lds_scores).

    python -m bench.lds --task pythia14m --alpha 0.5 --text attribution.jsonl.xz --eval-text eval.jsonl.xz
    python -m bench.lds --task pythia14m --alpha 0.5 --model FOLDER --text FILE.jsonl.zst --set pythia14m.num_train=512
    python -m retrain.tasks.pythia14m --benchmark --model FOLDER --text FILE         # seconds, tokens/s, memory

4,096 training and 256 query sequences of 1,024 tokens: documents joined with the end-of-text token and wrapped. A
sequence predicts its 1,023 later tokens; what is measured is the mean of their losses, and the losses themselves are
`task.loss`. With one text file the queries are wrapped from the documents behind those of the training sequences; with
`eval_text` from that file. A document that came before is left out, so none is in both.

The model is EleutherAI/pythia-14m at step 45,000 unless `--model PATH_OR_NAME[@revision]` names another, and the text
is what the Pile's validation and test files have of Wikipedia unless `--text` does (a file, or one of a hub dataset:
hf://datasets/OWNER/NAME/FILE). Training is AdamW on float32 weights, computing in bf16 on a GPU. Retrained models are
measured in tf32: a finetuning moves a weight about as far as bf16 can tell apart, and the differences between subsets
are smaller still.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import count, islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from retrain.data.text import read_documents, token_ids, wrap_tokens
from retrain.errors import UsageError
from retrain.examples import Batch, Examples, Indices
from retrain.models.causal_lm import LANGUAGE_PRECISIONS, CausalLM, language_dtype
from retrain.models.lm_training import Finetuner, Finetuning, batches
from retrain.models.pretrained import (
    check_vocabulary,
    hub_snapshot,
    is_local,
    load_language_model,
    load_tokenizer,
    split_revision,
)
from retrain.plugins import build
from retrain.subsets import masks
from retrain.task import Task, mean_over_tokens, not_in_key

DEFAULT_MODEL = "EleutherAI/pythia-14m@step45000"
HUB = "hf://datasets/"  # OWNER/NAME/FILE[@revision] on the hub
# The Pile without what its authors were asked to remove; 338 MB each.
PILE_TRAIN = f"{HUB}monology/pile-uncopyrighted/val.jsonl.zst"
PILE_EVAL = f"{HUB}monology/pile-uncopyrighted/test.jsonl.zst"
PILE_PART = {"meta.pile_set_name": "Wikipedia (en)"}


@dataclass(frozen=True, kw_only=True)
class Pythia14M(Task):
    """The module's text has the data and the training; all sizes can be set."""

    version: ClassVar[int] = 1
    libraries: ClassVar[tuple[str, ...]] = ("transformers",)  # whose model it trains
    pretrained: ClassVar[bool] = True
    protocols: ClassVar[tuple[str, ...]] = ("finetune",)
    default_replicates: ClassVar[int] = 1
    eval_batch_size: ClassVar[int] = 64
    method_settings: ClassVar[dict[str, dict[str, Any]]] = {
        "bif": {"minibatch": 128, "gradient": "difference", "batch_size": 256},
        "bif_cv": {"minibatch": 128, "gradient": "difference", "batch_size": 256, "gradient_batch_size": 16},
        # 14 M numbers a gradient, and 206 MB of float32 logits a sequence.
        "trak": {"projection": 1024, "projector": "sketch", "batch_size": 16},
        # kronfluence goes through the training sequences once for every batch of queries.
        "ekfac": {"query_batch_size": 256, "train_batch_size": 64, "fit_batch_size": 64},
        "gradsim": {"batch_size": 16},
        "kfac": {"fit_batch_size": 16, "batch_size": 16},
    }  # fmt: skip

    length: int = 1024
    num_train: int = 4096
    num_queries: int = 256
    epochs: int = 1
    batch_size: int = 256
    learning_rate: float = 3e-5
    weight_decay: float = 0.01
    precision: str = "bfloat16"  # of forward and backward passes on CUDA; weights and the optimizer are float32
    measure_precision: str = "tf32"  # of the losses of retrained models on CUDA: bfloat16, tf32 or float32

    model: str = not_in_key(DEFAULT_MODEL)  # its weights' fingerprint is in the key
    text: str = not_in_key("")  # its tokens' fingerprint is
    eval_text: str = not_in_key("")
    text_field: str = not_in_key("text")
    micro_batch: int = not_in_key(256)
    allow_download: bool = not_in_key(True)
    capture: bool = not_in_key(True)  # CUDA graphs: faster, the same steps
    compiled: bool = not_in_key(False)  # torch.compile for training on CUDA: faster after half a minute, the same steps

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("precision", "measure_precision"):
            if getattr(self, name) not in LANGUAGE_PRECISIONS:
                raise ValueError(f'{name} is "{getattr(self, name)}"; available: {", ".join(LANGUAGE_PRECISIONS)}')
        if self.length < 2 or min(self.num_train, self.num_queries) < 1:
            raise ValueError("length must be at least 2, num_train and num_queries at least 1")
        self._recipe  # noqa: B018  (checks its own values)

    def __getstate__(self) -> dict[str, Any]:
        """Workers get the configuration; data, device memory and CUDA graphs they make for themselves."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    # ---- data ----

    @cached_property
    def _sequences(self) -> tuple[Tensor, Tensor]:
        """Training and query sequences, (num_train, length) and (num_queries, length)."""
        model, tokenizer = self._pretrained, load_tokenizer(self.model, allow_download=self.allow_download)
        check_vocabulary(tokenizer, model, self.model)
        most = getattr(model.transformer.config, "max_position_embeddings", None)
        if most is not None and self.length - 1 > most:
            raise UsageError(f'length is {self.length}; the model "{self.model}" takes at most {most + 1} tokens')
        train_documents, eval_documents = self._documents()
        seen: dict[bytes, None] = {}
        numbers = count()
        pieces: Iterator[np.ndarray] = (
            piece for piece, _ in zip(token_ids(_new(train_documents, seen), tokenizer), numbers)
        )
        train = wrap_tokens(pieces, self.length, self.num_train, "the training text")
        if eval_documents is not None:
            # The tokenizer reads ahead, so more documents were seen than are trained on.
            trained_on = dict.fromkeys(islice(seen, next(numbers)))
            pieces = token_ids(_new(eval_documents, trained_on), tokenizer)
        return train, wrap_tokens(pieces, self.length, self.num_queries, "the text left for queries")

    def _documents(self) -> tuple[Iterator[str], Iterator[str] | None]:
        """Of the training text, and of the queries' own where they have one."""
        if self.eval_text and not self.text:
            raise UsageError("eval_text came without text; pass --text FILE.jsonl[.xz|.gz|.zst] too")
        part = {} if self.text else PILE_PART
        names = (self.text, self.eval_text) if self.text else (PILE_TRAIN, PILE_EVAL)
        train, evaluation = (
            read_documents(local_text(name, self.allow_download), field=self.text_field, where=part) if name else None
            for name in names
        )
        assert train is not None
        return train, evaluation

    def load_train_data(self) -> Examples:
        return next_token_examples(self._sequences[0])

    def load_query_data(self) -> Examples:
        return next_token_examples(self._sequences[1])

    # ---- the model and its training ----

    @property
    def _pretrained(self) -> CausalLM:
        """On the CPU, shared: never trained in place."""
        return _load_model(self.model, self.allow_download)

    @property
    def is_stand_in(self) -> bool:
        """Whether the weights are something else than EleutherAI's, as far as their name tells."""
        return not names_eleutherai(self.model)

    @property
    def description(self) -> str:
        path, revision = split_revision(self.model)
        name = (
            Path(path).expanduser().resolve().name
            if is_local(self.model)
            else f"{path}{f' at {revision}' if revision else ''}"
        )
        if self.is_stand_in:
            name = f"{name} (a stand-in, not EleutherAI's weights)" if "stand-in" in name else f"stand-in model {name}"
        return f"{self.num_train:,} sequences of {self.length:,} tokens, {name}"

    def build_model(self, seed: int) -> nn.Module:
        """The pretrained model, where finetuning starts: the same for every seed."""
        import copy

        return copy.deepcopy(self._pretrained)

    @property
    def _recipe(self) -> Finetuning:
        return Finetuning(
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            epochs=self.epochs,
            micro_batch=self.micro_batch,
        )

    @cached_property
    def _finetuners(self) -> dict[str, tuple[Finetuner, dict[str, Tensor]]]:
        return {}

    def _finetuner(self, device: torch.device) -> tuple[Finetuner, dict[str, Tensor]]:
        """What trains on this device, and the weights every training starts from."""
        if str(device) not in self._finetuners:
            engine = Finetuner(
                self.build_model(0), self.train_data, self._recipe, device,
                precision=self.precision, capture=self.capture, compiled=self.compiled and device.type == "cuda",
            )  # fmt: skip
            start = {name: value.detach().clone() for name, value in engine.model.state_dict().items()}
            self._finetuners[str(device)] = (engine, start)
        return self._finetuners[str(device)]

    def train(self, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        chosen = np.asarray(indices, dtype=np.int64)
        n = len(self.train_data)
        if chosen.ndim != 1 or len(chosen) == 0 or chosen.min() < 0 or chosen.max() >= n:
            raise ValueError(f"indices must be a list of at least one position from 0 to {n - 1}")
        engine, start = self._finetuner(torch.device(device))
        engine.load(start)
        engine.run(batches(chosen, self._recipe, order_seed), self._recipe.num_steps(len(chosen)))
        return engine.model_copy()

    def release_device(self) -> None:
        """Give back the memory that trainings keep on devices."""
        self._finetuners.clear()

    # ---- measurement ----

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """(batch, length - 1) float32: in `precision` on a GPU, differentiable in the weights."""
        return self._losses_in(self.precision, model, batch)

    def _losses_in(self, precision: str, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        if not isinstance(model, CausalLM):  # a wrapper, say, that decides its precision itself
            return super().loss(model, batch)
        return model.token_losses(inputs, targets, language_dtype(precision, model, inputs.device))

    @torch.no_grad()
    def losses(self, model: nn.Module, examples: Examples, device: torch.device) -> Tensor:
        """(len(examples),) float32 on the CPU, in `measure_precision` on a GPU."""
        model.eval()
        with tf32_products(self.measure_precision == "tf32" and torch.device(device).type == "cuda"):
            parts = [
                mean_over_tokens(self._losses_in(self.measure_precision, model, (i.to(device), t.to(device))))
                for i, t in examples.batches(self.eval_batch_size)
            ]
        return torch.cat(parts).float().cpu()


def local_text(name: str, allow_download: bool = True) -> Path:
    """The file itself, or a hub dataset's: hf://datasets/OWNER/NAME/FILE[@revision]."""
    if not name.startswith(HUB):
        return Path(name)
    path, _, revision = name.removeprefix(HUB).partition("@")
    owner, _, rest = path.partition("/")
    dataset, _, file = rest.partition("/")
    if not file:
        raise UsageError(f'the text is "{name}"; expected {HUB}OWNER/NAME/FILE.jsonl[.xz|.gz|.zst][@revision]')
    found = Path(hub_snapshot(f"{owner}/{dataset}", revision or None, [file], "dataset", allow_download)) / file
    if not found.is_file():
        raise UsageError(
            f'the hub\'s dataset "{owner}/{dataset}" has no file "{file}"; look at its page for those it has'
        )
    return found


def next_token_examples(sequences: Tensor) -> Examples:
    """Every token but the last, and what follows each."""
    return Examples(sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous())


@contextmanager
def tf32_products(allowed: bool) -> Iterator[None]:
    """Matrix products of float32 on tensor cores, with 11 bits of each factor, or not."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def names_eleutherai(name: str) -> bool:
    """A name on the hub, the hub's own cache folder, or a config that says where it comes from."""
    path, _ = split_revision(name)
    if not is_local(name):
        return path.startswith("EleutherAI/")
    folder = Path(path).expanduser().resolve()
    if "stand-in" in folder.name:
        return False
    if any(part.startswith("models--EleutherAI--") for part in folder.parts):
        return True
    try:
        return str(json.loads((folder / "config.json").read_text()).get("_name_or_path", "")).startswith("EleutherAI/")
    except (OSError, ValueError):
        return False


def _new(documents: Iterable[str], seen: dict[bytes, None]) -> Iterator[str]:
    """Each document the first time it comes; `seen` has their digests in order."""
    for document in documents:
        digest = hashlib.sha256(document.encode(errors="surrogatepass")).digest()
        if digest not in seen:
            seen[digest] = None
            yield document


@lru_cache(maxsize=2)
def _load_model(name: str, allow_download: bool) -> CausalLM:
    return load_language_model(name, allow_download=allow_download)


# ---- seconds, tokens a second and memory, in one command ----


def benchmark_pythia14m(
    task: Pythia14M, device: torch.device, *, num_finetunes: int, alpha: float = 0.5
) -> dict[str, Any]:
    """Print, and return, what the task's issue asks to be shown. Timings begin after a warm-up of their own."""
    on_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_cuda else "CPU"
    print(f"device {name}, torch {torch.__version__}: {task.description}", flush=True)
    predicted = task.length - 1
    chosen = [np.flatnonzero(mask) for mask in masks(1, num_finetunes, alpha, len(task.train_data))]

    def synchronised() -> float:
        if on_cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    started = time.perf_counter()
    before = task.losses(task.build_model(0).to(device), task.query_data, device)
    for warm_up in range(2):
        model = task.train(chosen[0], init_seed=0, order_seed=warm_up, device=device)
        task.losses(model, task.query_data, device)
    print(f"set-up and two warm-up finetunes: {synchronised() - started:.1f} s", flush=True)
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)

    training = measuring = 0.0
    after = []
    for number, subset in enumerate(chosen):
        start = synchronised()
        model = task.train(subset, init_seed=0, order_seed=number, device=device)
        middle = synchronised()
        after.append(task.losses(model, task.query_data, device))
        training, measuring = training + middle - start, measuring + synchronised() - middle
    tokens = sum(len(subset) for subset in chosen) * task.epochs * predicted
    measured_in = task.measure_precision if on_cuda else "float32"
    scaled = 100 / num_finetunes * (training + measuring)
    said = "" if num_finetunes == 100 else f" ({scaled:.1f} s for 100, scaled from {num_finetunes})"
    print(
        f"{num_finetunes} finetunes on {len(chosen[0]):,} x {task.length:,} tokens with the losses of "
        f"{len(task.query_data):,} queries: {training + measuring:.1f} s{said}; training {training:.1f} s "
        f"({tokens / training / 1e6:.4g} M tokens/s), measuring {measuring:.1f} s in {measured_in}",
        flush=True,
    )
    losses = torch.stack(after)
    print(
        f"mean query loss {before.mean():.4f} before, {losses.mean():.4f} after; spread over subsets "
        f"{losses.std(0).mean():.2e}; {int((~losses.isfinite()).sum())} not finite; "
        f"captured batch sizes {sorted(task._finetuner(device)[0].graphs) or 'none'}",
        flush=True,
    )
    forward = _forward_rate(task, model, device, synchronised)
    precision = task.precision if on_cuda else "float32"
    print(f"forward with token losses, {precision}: {forward / 1e6:.4g} M tokens/s", flush=True)
    if on_cuda:
        print(f"peak memory {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB", flush=True)
    return {
        "seconds": training + measuring,
        "seconds_of_100": scaled,
        "training_tokens_per_second": tokens / training,
        "forward_tokens_per_second": forward,
        "loss_before": float(before.mean()),
        "loss_after": float(losses.mean()),
    }


@torch.no_grad()
def _forward_rate(task: Pythia14M, model: nn.Module, device: torch.device, synchronised: Any) -> float:
    """Tokens a second of the losses of every training sequence, as BIF takes them: weights cast once beforehand."""
    assert isinstance(model, CausalLM)
    model = model.to(language_dtype(task.precision, model, device) or torch.float32)
    if task.compiled and device.type == "cuda":
        model = model.compiled()
    data = task.train_data.to(device)
    first = (data.inputs[:256], data.targets[:256])
    for _ in range(2):
        task.loss(model, first)
    start, repeats = synchronised(), 5 if device.type == "cuda" else 1
    for _ in range(repeats):
        for batch in data.batches(256):
            task.loss(model, batch)
    return repeats * data.inputs.numel() / (synchronised() - start)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m retrain.tasks.pythia14m", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--benchmark",
        action="store_true",
        required=True,
        help="time finetuning, measuring and the forward pass",
    )
    add("--model", default=DEFAULT_MODEL, help="PATH_OR_NAME[@revision] (default: %(default)s)")
    add("--text", default="", help="FILE.jsonl[.xz|.gz|.zst]")
    add("--eval-text", default="", help="the queries' own text file")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    add("--finetunes", type=int, default=100, help="finetunes that are timed (default: %(default)s)")
    add("--no-capture", action="store_true", help="do without CUDA graphs, for comparison")
    add("--compile", action="store_true", help="torch.compile for training and for the forward pass")
    add("--set", action="append", default=[], metavar="OPTION=VALUE", help="option of the task, e.g. num_train=512")
    options = parser.parse_args(arguments)
    try:
        settings: dict[str, Any] = {}
        for setting in options.set:
            name, equals, value = setting.partition("=")
            if not equals:
                raise UsageError(f'--set takes OPTION=VALUE, for example --set num_train=512, not "{setting}"')
            settings[name] = value
        task = build(
            Pythia14M,
            {"model": options.model, "text": options.text, "eval_text": options.eval_text} | settings
            | {"capture": not options.no_capture, "compiled": options.compile},
        )  # fmt: skip
        benchmark_pythia14m(task, torch.device(options.device), num_finetunes=options.finetunes)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    from retrain.tasks.pythia14m import main as main_by_its_real_name  # a task's name is its module's, not __main__

    sys.exit(main_by_its_real_name())
