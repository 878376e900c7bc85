"""A task of one's own: a Hugging Face classifier, finetuned on sentences of different lengths.

    python -m bench.lds --task tests/helpers/huggingface_task.py --model FOLDER --text sentences.jsonl --alpha 0.5

`sentences.jsonl` has a {"text": ..., "label": 0} a line; every fifth line is a query. Sentences are padded,
and the attention mask travels with the ids: inputs of several tensors are a mapping that the model takes apart.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from retrain.errors import UsageError
from retrain.examples import Examples, Indices
from retrain.task import Task, not_in_key


class Classifier(nn.Module):
    """A transformers model whose output is its logits: what `Task.loss` takes."""

    def __init__(self, transformer: nn.Module):
        super().__init__()
        self.transformer = transformer

    def forward(self, inputs: Any) -> torch.Tensor:
        return self.transformer(**inputs).logits


@dataclass(frozen=True, kw_only=True)
class Sentences(Task):
    pretrained: ClassVar[bool] = True

    epochs: int = 2
    batch_size: int = 16
    learning_rate: float = 5e-4

    model: str = not_in_key("")  # its weights are in the key, wherever they came from
    text: str | Path = not_in_key("")

    @cached_property
    def _lines(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in Path(self.text).read_text().splitlines()]
        except (OSError, ValueError) as error:
            raise UsageError(
                f'--text "{self.text}" cannot be read ({error}); expected one JSON object a line'
            ) from None

    @cached_property
    def _examples(self) -> Examples:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.model, trust_remote_code=False)
        texts = [line["text"] for line in self._lines]
        found = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        inputs = {name: found[name] for name in ("input_ids", "attention_mask")}
        return Examples(inputs, torch.tensor([line["label"] for line in self._lines]))

    def load_train_data(self) -> Examples:
        return self._examples.select([k for k in range(len(self._examples)) if k % 5])

    def load_query_data(self) -> Examples:
        return self._examples.select(range(0, len(self._examples), 5))

    def build_model(self, seed: int) -> nn.Module:
        from transformers import AutoModelForSequenceClassification

        transformer = AutoModelForSequenceClassification.from_pretrained(
            self.model, trust_remote_code=False, attn_implementation="eager", hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return Classifier(transformer).eval()

    def train(self, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        model = self.build_model(init_seed).to(device).train()
        data = self.train_data.select(indices).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.learning_rate)
        generator = torch.Generator().manual_seed(order_seed)
        for _ in range(self.epochs):
            for rows in torch.randperm(len(data), generator=generator).split(self.batch_size):
                batch = data.select(rows)
                loss = F.cross_entropy(model(batch.inputs), batch.targets)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
        return model.eval()
