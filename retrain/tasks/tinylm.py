"""The embedded language task: a tiny GPT-NeoX on the text of Python's own help, byte by byte.

    python -m bench.lds --task tinylm --alpha 0.5

The `language` task in small, through the same code: a pretrained model is finetuned on subsets of sequences with AdamW
and a linear decay (no dropout, so only the order is random), and what is measured is each sequence's mean loss over its
tokens (per-token losses are there too). The text is `pydoc_data.topics`, which every
Python carries; its wording differs a little between Python versions, and so does the data's fingerprint.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from retrain.backends import without_onednn
from retrain.examples import Batch, Examples, Indices
from retrain.models.causal_lm import CausalLM, language_dtype, next_tokens
from retrain.models.lm_training import Finetuner, Finetuning, batches
from retrain.task import Task

VOCABULARY = 128  # ASCII; anything else is byte 0


@dataclass(frozen=True, kw_only=True)
class TinyLM(Task):
    """Pretrained on most of the text, finetuned on `num_train` other sequences; queries are others again."""

    version: ClassVar[int] = 1
    libraries: ClassVar[tuple[str, ...]] = ("transformers",)  # whose model it trains
    protocols: ClassVar[tuple[str, ...]] = ("finetune",)
    default_replicates: ClassVar[int] = 2
    cpu_threads: ClassVar[int] = 1
    precision: ClassVar[str] = "float32"  # everywhere: nothing here is large enough to gain from less
    method_settings: ClassVar[dict[str, dict[str, Any]]] = {"bif": {"minibatch": 32}}

    length: int = 32
    num_train: int = 300
    num_queries: int = 150
    hidden: int = 32
    layers: int = 2
    heads: int = 4
    pretraining_steps: int = 250
    pretraining_rate: float = 4e-3
    epochs: int = 2
    batch_size: int = 15
    learning_rate: float = 2e-3
    weight_decay: float = 0.01

    @cached_property
    def _sequences(self) -> Tensor:
        """(sequences, length + 1) tokens, in a fixed random order: neighbours in the text land in different parts."""
        from pydoc_data.topics import topics

        text = "\n\n".join(topics[name] for name in sorted(topics)).encode("ascii", errors="replace")
        tokens = np.frombuffer(text, dtype=np.uint8)
        width = self.length + 1
        sequences = tokens[: len(tokens) // width * width].reshape(-1, width)
        order = np.random.default_rng(0).permutation(len(sequences))
        return torch.from_numpy(sequences[order].astype(np.int64))

    def _examples(self, first: int, last: int | None) -> Examples:
        return next_tokens(self._sequences[first:last])

    def load_train_data(self) -> Examples:
        return self._examples(0, self.num_train)

    def load_query_data(self) -> Examples:
        return self._examples(self.num_train, self.num_train + self.num_queries)

    def build_model(self, seed: int) -> nn.Module:
        """The pretrained model: where finetuning starts."""
        model = _untrained(self, seed)
        model.load_state_dict(_pretrained_weights(self, seed))
        return model

    def train(self, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        engine = self._finetuner(torch.device(device))
        engine.load(_pretrained_weights(self, init_seed))
        with without_onednn():
            engine.run(batches(indices, engine.recipe, order_seed), engine.recipe.num_steps(len(indices)))
        return engine.model_copy()

    @cached_property
    def _finetuners(self) -> dict[str, Finetuner]:
        return {}

    def _finetuner(self, device: torch.device) -> Finetuner:
        """What trains on this device, run after run."""
        if str(device) not in self._finetuners:
            recipe = Finetuning(self.batch_size, self.learning_rate, self.weight_decay, self.epochs, self.batch_size)
            self._finetuners[str(device)] = Finetuner(
                _untrained(self, 0), self.train_data, recipe, device, precision=self.precision
            )
        return self._finetuners[str(device)]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """(batch, length) float32, without holding all logits."""
        inputs, targets = batch
        if not isinstance(model, CausalLM):
            return super().loss(model, batch)
        return model.token_losses(inputs, targets, language_dtype(self.precision, model, inputs.device))


def _untrained(task: TinyLM, seed: int) -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    configuration = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=task.hidden,
        num_hidden_layers=task.layers,
        num_attention_heads=task.heads,
        intermediate_size=4 * task.hidden,
        max_position_embeddings=task.length,
        bos_token_id=0,
        eos_token_id=0,
    )
    # The plain implementation: the fused one does not run under vmap with a mask, and gains nothing at this size.
    configuration._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):  # transformers initialises from the global generator
        torch.manual_seed(seed)
        return CausalLM(GPTNeoXForCausalLM(configuration)).eval()


@lru_cache(maxsize=8)
def _pretrained_weights(task: TinyLM, seed: int) -> dict[str, Tensor]:
    """A pure function of the configuration and the seed; a few seconds, once a process."""
    model = _untrained(task, seed)
    data = task._examples(task.num_train + task.num_queries, None)
    generator = torch.Generator().manual_seed(seed)
    chosen = (torch.randint(len(data), (32,), generator=generator) for _ in range(task.pretraining_steps))
    recipe = Finetuning(32, task.pretraining_rate, task.weight_decay)
    engine = Finetuner(model, data, recipe, torch.device("cpu"), precision=task.precision)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same sums whatever the number of cores
    try:
        with without_onednn():
            engine.run(chosen, task.pretraining_steps)
    finally:
        torch.set_num_threads(threads)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
