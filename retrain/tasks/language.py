"""language: a causal language model, finetuned on parts of a text; the loss is a sequence's, or each token's.

    python -m bench.lds --task language --alpha 0.5 --model FOLDER --text FILE.jsonl.xz      # any Hugging Face folder
    python -m bench.lds --task smollm2 --alpha 0.5 --text FILE.jsonl.xz                      # after tda-bench fetch
    python -m bench.lds --task pythia14m --alpha 0.5 --text attribution.jsonl.xz --eval-text eval.jsonl.xz

The presets `pythia14m` (the paper's experiment, appendix:llm_lds_scores), `smollm2` and `stories15m` are the same task
with other defaults. Documents are joined with the end-of-text token and wrapped into sequences of `length` tokens. A
sequence predicts its `length - 1` later tokens; what is measured is the mean of their losses, and the losses themselves
are `task.loss`. With `query_tokens` a query is one token: only its loss counts, over the number of tokens. With one
text file the queries are wrapped from the documents behind those of the training sequences; with `eval_text` from that
file. A document that came before is left out, so none is in both.

`model` is a folder, a name on the hub (NAME[@revision]), a GGUF file, or what `tda-bench fetch` got. The text is what
the Pile's validation and test files have of Wikipedia unless `--text` names a file, or one of a hub dataset
(hf://datasets/OWNER/NAME/FILE). `group_field` names a field of the documents, such as their topic: a sequence belongs
to the group that most of its tokens come from.

Training is AdamW on float32 weights, computing in bf16 on a GPU; `lora_rank` trains adapters of that rank (by peft) and
nothing else. Retrained models are measured in tf32: a finetuning moves a weight about as far as bf16 can tell apart,
and the differences between subsets are smaller still.
"""

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from retrain.backends import switched
from retrain.data.text import Document, Wrapped, read_documents, tokenized, wrap
from retrain.errors import UsageError
from retrain.examples import Batch, Examples, Indices, positions
from retrain.losses import IGNORED
from retrain.models.causal_lm import LANGUAGE_PRECISIONS, CausalLM, language_dtype, next_tokens
from retrain.models.lm_training import Finetuner, Finetuning, batches
from retrain.models.pretrained import (
    check_vocabulary,
    hub_snapshot,
    is_local,
    load_language_model,
    load_tokenizer,
    source_of,
    split_revision,
)
from retrain.task import Task, mean_over_tokens, not_in_key

DEFAULT_MODEL = "EleutherAI/pythia-14m@step45000"
HUB = "hf://datasets/"  # OWNER/NAME/FILE[@revision] on the hub
# The Pile without what its authors were asked to remove; 338 MB each.
PILE_TRAIN = f"{HUB}monology/pile-uncopyrighted/val.jsonl.zst"
PILE_EVAL = f"{HUB}monology/pile-uncopyrighted/test.jsonl.zst"
PILE_PART = {"meta.pile_set_name": "Wikipedia (en)"}


@dataclass(frozen=True, kw_only=True)
class Language(Task):
    """language: a causal language model, finetuned on parts of a text"""

    preset: ClassVar[str] = "language"
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

    length: int = 256
    num_train: int = 1024
    num_queries: int = 256
    epochs: int = 1
    batch_size: int = 32
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    lora_rank: int = 0  # of adapters on every linear layer, which alone are trained; 0: every parameter is
    precision: str = "bfloat16"  # of forward and backward passes on CUDA; weights and the optimizer are float32
    measure_precision: str = "tf32"  # of the losses of retrained models on CUDA: bfloat16, tf32 or float32

    model: str = not_in_key("")  # its weights' fingerprint is in the key
    text: str = not_in_key("")  # its tokens' fingerprint is
    eval_text: str = not_in_key("")
    text_field: str = not_in_key("text")
    query_tokens: int = 0  # a query is one token of a sequence, and so many of each are queries; 0: all of a sequence
    group_field: str = ""  # of a document, such as "meta.pile_set_name"
    micro_batch: int = not_in_key(256)
    allow_download: bool = not_in_key(True)
    capture: bool = not_in_key(True)  # CUDA graphs: faster, the same steps

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("precision", "measure_precision"):
            if getattr(self, name) not in LANGUAGE_PRECISIONS:
                raise ValueError(f'{name} is "{getattr(self, name)}"; available: {", ".join(LANGUAGE_PRECISIONS)}')
        if self.length < 2 or min(self.num_train, self.num_queries) < 1 or self.lora_rank < 0:
            raise ValueError("length must be at least 2, num_train and num_queries at least 1, lora_rank at least 0")
        if not 0 <= self.query_tokens < self.length:
            raise ValueError(f"query_tokens is {self.query_tokens}; expected from 0 to {self.length - 1}, the tokens")
        self._recipe  # noqa: B018  (checks its own values)

    # ---- data ----

    @cached_property
    def _wrapped(self) -> tuple[Wrapped, Wrapped]:
        """Training and query sequences, (num_train, length) and (num_queries, length), with their groups."""
        model, tokenizer = self._pretrained, load_tokenizer(self.model, allow_download=self.allow_download)
        check_vocabulary(tokenizer, model, self.model)
        most = getattr(model.transformer.config, "max_position_embeddings", None)
        if most is not None and self.length - 1 > most:
            raise UsageError(f'length is {self.length}; the model "{self.model}" takes at most {most + 1} tokens')
        train_documents, eval_documents = self._documents()
        seen: dict[bytes, None] = {}
        pieces = tokenized(_new(train_documents, seen), tokenizer)
        train = wrap(pieces, self.length, self.num_train, "the training text")
        if eval_documents is not None:
            # The tokenizer reads ahead, so more documents were seen than are trained on.
            trained_on = dict.fromkeys(islice(seen, train.num_documents))
            pieces = tokenized(_new(eval_documents, trained_on), tokenizer)
        return train, wrap(pieces, self.length, self.num_queries, "the text left for queries")

    def _documents(self) -> tuple[Iterator[Document], Iterator[Document] | None]:
        """Of the training text, and of the queries' own where they have one."""
        if self.eval_text and not self.text:
            raise UsageError("eval_text came without text; pass --text FILE.jsonl[.xz|.gz|.zst] too")
        part = {} if self.text else PILE_PART
        names = (self.text, self.eval_text) if self.text else (PILE_TRAIN, PILE_EVAL)
        options: dict[str, Any] = {"field": self.text_field, "where": part, "group_field": self.group_field}
        train, evaluation = (
            read_documents(local_text(name, self.allow_download), **options) if name else None for name in names
        )
        assert train is not None
        return train, evaluation

    def load_train_data(self) -> Examples:
        return next_tokens(self._wrapped[0].tokens, groups=self._group_codes[0])

    def load_query_data(self) -> Examples:
        whole = next_tokens(self._wrapped[1].tokens, groups=self._group_codes[1])
        if not self.query_tokens:
            return whole
        generator = np.random.default_rng(0)
        chosen = [generator.permutation(self.length - 1)[: self.query_tokens] for _ in range(len(whole))]
        rows = whole.select(np.repeat(np.arange(len(whole)), self.query_tokens))
        alone = torch.full_like(rows.targets, IGNORED)
        places = torch.from_numpy(np.concatenate(chosen))[:, None]
        return Examples(rows.inputs, alone.scatter(1, places, rows.targets.gather(1, places)), rows.groups)

    @property
    def _group_codes(self) -> tuple[Tensor | None, Tensor | None]:
        if not self.group_field:
            return None, None
        train, queries = self._wrapped
        codes = torch.from_numpy(np.unique([*train.groups, *queries.groups], return_inverse=True)[1])
        return codes[: self.num_train], codes[self.num_train :]

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.group_field.rpartition(".")[2] or "group"

    # ---- the model and its training ----

    @property
    def _pretrained(self) -> CausalLM:
        """On the CPU, shared: never trained in place."""
        return _load_model(self.model, allow_download=self.allow_download)

    @property
    def description(self) -> str:
        adapters = f", LoRA of rank {self.lora_rank}" if self.lora_rank else ""
        return f"{self.num_train:,} sequences of {self.length:,} tokens, {self.model_words()}{adapters}"

    def model_words(self) -> str:
        """Whose weights these are, for tables."""
        path, revision = split_revision(self.model)
        if not is_local(self.model):
            return f"{path}{f' at {revision}' if revision else ''}"
        return source_of(self.model) or Path(path).expanduser().resolve().name

    def build_model(self, seed: int) -> nn.Module:
        """The pretrained model, where finetuning starts: the same for every seed."""
        model = copy.deepcopy(self._pretrained)
        return with_adapters(model, self.lora_rank) if self.lora_rank else model

    @property
    def _recipe(self) -> Finetuning:
        return Finetuning(**{field.name: getattr(self, field.name) for field in fields(Finetuning)})

    @cached_property
    def _finetuners(self) -> dict[str, tuple[Finetuner, dict[str, Tensor]]]:
        return {}

    def _finetuner(self, device: torch.device) -> tuple[Finetuner, dict[str, Tensor]]:
        """What trains on this device, and the weights every training starts from."""
        if str(device) not in self._finetuners:
            engine = Finetuner(
                self.build_model(0), self.train_data, self._recipe, device,
                precision=self.precision, capture=self.capture,
            )  # fmt: skip
            start = {name: value.detach().clone() for name, value in engine.model.state_dict().items()}
            self._finetuners[str(device)] = (engine, start)
        return self._finetuners[str(device)]

    def train(self, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        chosen = positions(indices, len(self.train_data))
        engine, start = self._finetuner(torch.device(device))
        engine.load(start)
        engine.run(batches(chosen, self._recipe, order_seed), self._recipe.num_steps(len(chosen)))
        return engine.model_copy()

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
        # In tf32: matrix products of float32 on tensor cores, with 11 bits of each factor.
        allowed = self.measure_precision == "tf32" and torch.device(device).type == "cuda"
        with switched(torch.backends.cuda.matmul, allow_tf32=allowed):
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


def with_adapters(model: CausalLM, rank: int) -> CausalLM:
    """LoRA beside every linear layer but the head, from one seed; all other parameters are frozen."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UsageError("lora_rank needs the package peft: pip install peft") from None

    layers = [
        name
        for name, module in model.transformer.named_modules()
        if isinstance(module, nn.Linear) and module is not model.head
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=layers), model.transformer)
    return model.eval()


def _new(documents: Iterable[Document], seen: dict[bytes, None]) -> Iterator[Document]:
    """Each document the first time it comes; `seen` has their digests in order."""
    for document in documents:
        digest = hashlib.sha256(document.text.encode(errors="surrogatepass")).digest()
        if digest not in seen:
            seen[digest] = None
            yield document


_load_model = lru_cache(maxsize=2)(load_language_model)


# ---- presets ----


@dataclass(frozen=True, kw_only=True)
class Pythia14M(Language):
    """pythia14m: Pythia-14M, finetuned for an epoch on parts of Wikipedia (appendix:llm_lds_scores)"""

    preset: ClassVar[str] = "pythia14m"

    length: int = 1024
    num_train: int = 4096
    batch_size: int = 256
    learning_rate: float = 3e-5
    model: str = not_in_key(DEFAULT_MODEL)

    def model_words(self) -> str:
        """Says so where the weights are something else than EleutherAI's, as far as their name tells."""
        name = super().model_words()
        if names_eleutherai(self.model):
            return name
        return f"{name} (a stand-in, not EleutherAI's weights)" if "stand-in" in name else f"stand-in model {name}"


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


@dataclass(frozen=True, kw_only=True)
class SmolLM2(Language):
    """smollm2: SmolLM2-135M-Instruct, dequantised from Q4_1, finetuned on parts of a text; tda-bench fetch smollm2"""

    preset: ClassVar[str] = "smollm2"
    method_settings: ClassVar[dict[str, dict[str, Any]]] = {
        "bif": {"minibatch": 32, "gradient": "difference", "batch_size": 64},
        "bif_cv": {"minibatch": 32, "gradient": "difference", "batch_size": 64, "gradient_batch_size": 8},
        # 134.5 M numbers a gradient.
        "trak": {"projection": 1024, "projector": "sketch", "batch_size": 8},
        "ekfac": {"query_batch_size": 64, "train_batch_size": 32, "fit_batch_size": 32},
        "gradsim": {"batch_size": 8},
        "kfac": {"fit_batch_size": 8, "batch_size": 8},
        "repsim": {"batch_size": 64},
    }  # fmt: skip

    model: str = not_in_key("smollm2")


@dataclass(frozen=True, kw_only=True)
class Stories15M(Language):
    """stories15m: stories15M (llama2.c) in its own float32, finetuned on parts of a text; tda-bench fetch stories15m"""

    preset: ClassVar[str] = "stories15m"

    length: int = 128
    num_train: int = 256
    num_queries: int = 100
    batch_size: int = 16
    model: str = not_in_key("stories15m")
