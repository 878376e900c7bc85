"""Texts of one's own with labels, and a Hugging Face classifier: finetuned here, or taken as it is.

    tda-bench inspect --model FOLDER --train train.csv --queries test.csv    # your finetuned model: nothing is trained
    tda-bench lds --task text_classifier --model FOLDER --train train.jsonl --alpha 0.5    # finetuned here on subsets

A file has a row an example with a column `text` and a column `label`. Texts are padded, and the attention mask travels
with the ids. Without a file of queries every fifth row is one.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from retrain.data.rows import LABEL_NAMES, TEXT_NAMES, class_numbers, filled, named_column, read_train_and_queries
from retrain.errors import UsageError, error_line
from retrain.examples import Examples, Indices
from retrain.models.huggingface import METHOD_BATCHES, tokenized, wrapped
from retrain.models.pretrained import model_folder
from retrain.models.weights import refuse_other_order, trained_by_adamw
from retrain.task import Task, not_in_key


@dataclass(frozen=True, kw_only=True)
class TextClassifier(Task):
    """`finetune` trains the whole model on the rows; `given` looks at the model as it is in its folder."""

    protocols: ClassVar[tuple[str, ...]] = ("finetune", "given")
    pretrained: ClassVar[bool] = True
    eval_batch_size: ClassVar[int] = 64
    libraries: ClassVar[tuple[str, ...]] = ("transformers",)
    method_settings: ClassVar[dict[str, dict[str, Any]]] = {"bif": {"minibatch": 32}, **METHOD_BATCHES}

    model: str = not_in_key("")  # a folder, or a name on the hub; its weights are in the key
    train_file: str = not_in_key("")
    query_file: str = not_in_key("")
    text_column: str = ""  # else the one called text, sentence, ...
    target: str = ""  # the label's column; else the one called label, target, ...
    length: int = 128  # longer texts are cut
    epochs: int = 2
    batch_size: int = 16
    learning_rate: float = 5e-5

    # ---- data ----

    @cached_property
    def _rows(self) -> dict[str, tuple[list[str], Any]]:
        """train and queries: texts and labels."""
        found = {}
        frames = read_train_and_queries(self.train_file, self.query_file)
        paths = (self.train_file, self.query_file or self.train_file)
        for name, frame, path in zip(("train", "queries"), frames, paths, strict=True):
            text = named_column(frame, self.text_column, TEXT_NAMES, "text", path, f"{self.name}.text_column")
            label = named_column(frame, self.target, LABEL_NAMES, "label", path, f"{self.name}.target")
            found[name] = [str(one) for one in filled(frame, text, path)], filled(frame, label, path).tolist()
        return found

    @cached_property
    def _classes(self) -> list[Any]:
        """In the order of the model's outputs: by its own names where the labels are these, else sorted."""
        labels = set(self._rows["train"][1])
        names = [str(name) for _, name in sorted((self._config.id2label or {}).items())]
        if labels <= set(names):
            return names
        whole = all(isinstance(one, int) for one in labels)
        return list(range(max(max(labels) + 1, self._config.num_labels))) if whole else sorted(labels)

    @property
    def class_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(map(str, self._classes))

    @cached_property
    def _parts(self) -> dict[str, Examples]:
        """Tokenized together, so that all are of one length."""
        (texts, labels), (query_texts, query_labels) = self._rows["train"], self._rows["queries"]
        numbers = [class_numbers(labels, self._classes, self.train_file)]
        numbers.append(class_numbers(query_labels, self._classes, self.query_file or self.train_file))
        labels_of_all = torch.from_numpy(np.concatenate(numbers))
        whole = Examples(tokenized(self.tokenizer, texts + query_texts, self.length), labels_of_all)
        count = len(texts)
        return {"train": whole.select(range(count)), "queries": whole.select(range(count, len(whole)))}

    def load_train_data(self) -> Examples:
        return self._parts["train"]

    def load_query_data(self) -> Examples:
        return self._parts["queries"]

    def text_of(self, examples: Examples, index: int) -> str:
        return self._rows["train" if examples is self.train_data else "queries"][0][index]

    @property
    def description(self) -> str:
        return f"{Path(self.model).name} on {Path(self.train_file).name}"

    # ---- model ----

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return self._loaded(AutoTokenizer)

    @cached_property
    def _config(self) -> Any:
        from transformers import AutoConfig

        return self._loaded(AutoConfig)

    def _loaded(self, kind: Any, **options: Any) -> Any:
        if not self.model:
            raise UsageError("--model is missing: a Hugging Face folder or name with a model and its tokenizer")
        folder = str(model_folder(self.model))
        try:
            return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
        except Exception as error:  # transformers, safetensors and tokenizers raise whatever they like
            raise UsageError(f'--model "{self.model}" cannot be loaded: {error_line(error, 300)}') from None

    def build_model(self, seed: int) -> nn.Module:
        from transformers import AutoModelForSequenceClassification

        if self.protocol == "given" and self._config.num_labels != len(self._classes):
            outputs, classes = self._config.num_labels, len(self._classes)
            raise UsageError(
                f'--model "{self.model}" has {outputs} outputs, and the labels are {classes}: '
                f"{', '.join(self.class_names[:10])}; finetune it with --protocol finetune"
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # of a head that the folder does not have
            model = self._loaded(
                AutoModelForSequenceClassification, num_labels=len(self._classes), ignore_mismatched_sizes=True
            )
        if model.config.pad_token_id is None:
            model.config.pad_token_id = self.tokenizer.pad_token_id
        return wrapped(model.float()).eval()

    def train_base(self, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        if self.protocol == "given":
            model = self.build_model(init_seed).to(device)
            refuse_other_order(self, model, device)
            return model
        return super().train_base(init_seed=init_seed, order_seed=order_seed, device=device)

    def train(self, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        if self.protocol == "given":
            raise UsageError("--protocol given looks at the model as it is; to judge methods, take --protocol finetune")
        model = self.build_model(init_seed)  # in eval mode: dropout would be random beyond the order
        return trained_by_adamw(self, model, indices, order_seed, device, lr=self.learning_rate)
