"""The problem of the scaling comparison: training sequences and prompt-completion queries of equal length.

A query's loss is the mean over its completion's tokens; the prompt and the padding behind a short completion are not
counted (targets of -100). Attention is causal and padding stands at the end, so padding changes no counted loss. The
weighting happens in the loss function, so BIF, EK-FAC, GradSim and TRAK all see the same loss.

Only cost is measured here, so text is optional: without it training sequences are random tokens, and without a
tokenizer every byte is a token. The record says which.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from retrain.errors import UsageError
from retrain.examples import Batch, Examples, Indices
from retrain.losses import CrossEntropy, Loss
from retrain.safe_files import SafeFileError, read_json
from retrain.task import Task

OWN_QUERIES = Path(__file__).with_name("queries.json")
NOT_COUNTED = -100  # torch's own ignore_index
TRAINABLE = r"\.(attention|mlp)\."  # every method looks at these alone
SAMPLED = r"\.(attention|mlp)\..*weight$"  # the paper's weight restriction for this comparison


class CompletionLoss(CrossEntropy):
    """Cross-entropy whose mean over all positions is the mean over the counted ones."""

    @staticmethod
    def weights(targets: Tensor) -> Tensor:
        """(batch, tokens): zero where a token is not counted, else positions / counted positions."""
        counted = targets != NOT_COUNTED
        return counted * (targets.shape[-1] / counted.sum(-1, keepdim=True).clamp(min=1))

    def per_example(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().per_example(outputs, targets.clamp(min=0)) * self.weights(targets)

    def model_output(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (self._margins(outputs.float(), targets.clamp(min=0)) * self.weights(targets)).mean(-1)

    def output_slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        margins = self._margins(outputs.float(), targets.clamp(min=0))
        return (-torch.sigmoid(-margins) * self.weights(targets)).mean(-1)


@dataclass(frozen=True, kw_only=True, eq=False)
class ScalingTask(Task):
    """Examples that are already there and a model that is never retrained: only the loss is asked of it."""

    loss_function: ClassVar[Loss] = CompletionLoss()
    protocols: ClassVar[tuple[str, ...]] = ("none",)
    eval_batch_size: ClassVar[int] = 64

    train_examples: Examples = field(repr=False)
    query_examples: Examples = field(repr=False)

    @property
    def description(self) -> str:
        return "scaling across the Pythia suite"

    def load_train_data(self) -> Examples:
        return self.train_examples

    def load_query_data(self) -> Examples:
        return self.query_examples

    def build_model(self, seed: int) -> nn.Module:
        raise UsageError("bench.scaling builds its models itself; its task only holds the examples and the loss")

    def train(self, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        raise UsageError("bench.scaling measures cost and never retrains; use bench.lds for retraining experiments")

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        token_losses: Any = getattr(model, "token_losses", None)
        if token_losses is not None:  # the model's own, which need not hold the logits of a whole batch
            return token_losses(inputs, targets.clamp(min=0)) * CompletionLoss.weights(targets)
        return super().loss(model, batch)


# ---- where tokens come from ----


class ByteTokenizer:
    """Every byte is a token: for shapes that are measured without the tokenizer's files."""

    name = "bytes"

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary

    def encode(self, text: str) -> list[int]:
        return [byte % self.vocabulary for byte in text.encode()]


def open_tokenizer(name: str | None, vocabulary: int) -> Any:
    """The named tokenizer, or one of bytes."""
    if not name:
        return ByteTokenizer(vocabulary)
    from retrain.models.pretrained import load_tokenizer

    return load_tokenizer(name)


def load_queries(path: str | None) -> list[tuple[str, str]]:
    """(prompt, completion) pairs of a JSON file; without one, the 18 of our own."""
    source = Path(path) if path else OWN_QUERIES
    try:
        content = read_json(source, follow_links=True)
    except SafeFileError as error:
        raise UsageError(f"--queries: {error}") from None
    try:
        pairs = [(str(entry["prompt"]), str(entry["completion"])) for entry in content]
    except (TypeError, KeyError):
        raise UsageError(
            f'--queries {source}: expected a JSON list of {{"prompt": ..., "completion": ...}}, for example '
            f"{OWN_QUERIES}"
        ) from None
    if not pairs or any(not completion for _, completion in pairs):
        raise UsageError(f"--queries {source}: expected at least one pair, and a completion in each")
    return pairs


def repeated(pairs: Sequence[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    """So many queries: these, from the start again where they are too few, since cost does not depend on the words."""
    return [pairs[index % len(pairs)] for index in range(count)]


def query_examples(pairs: Sequence[tuple[str, str]], tokenizer: Any, tokens: int) -> Examples:
    """Inputs and next tokens, (q, tokens); what does not fit is cut from the prompt's start, then the completion."""
    inputs = torch.zeros(len(pairs), tokens, dtype=torch.long)
    targets = torch.full((len(pairs), tokens), NOT_COUNTED, dtype=torch.long)
    for row, (prompt, completion) in enumerate(pairs):
        answer = list(tokenizer.encode(completion))[:tokens]
        question = list(tokenizer.encode(prompt))[-(tokens + 1 - len(answer)) :] or [0]  # something to predict from
        sequence = torch.tensor(question + answer)
        inputs[row, : len(sequence) - 1] = sequence[:-1]
        targets[row, len(question) - 1 : len(sequence) - 1] = sequence[len(question) :]
    return Examples(inputs, targets)


def train_examples(
    count: int, tokens: int, vocabulary: int, *, text: str | None, tokenizer: Any, seed: int, least: int | None = None
) -> Examples:
    """(count, tokens) inputs and next tokens: of the text, or random.

    The text must have `least` documents (default: `count`) long enough for a sequence each. What is wanted beyond them,
    to fit on, is cut from the rest of the documents, and taken from the start again where that is too little.
    """
    least = count if least is None else min(least, count)
    if text is None:
        chosen = np.random.default_rng([seed, 31]).integers(0, vocabulary, size=(count, tokens + 1))
        sequences = torch.from_numpy(chosen)
    else:
        pieces = list(_pieces(text, tokenizer, tokens + 1, count))
        if len(pieces) < least:
            raise UsageError(
                f"--text {text} has {len(pieces)} sequences of more than {tokens} tokens; expected {least}: give a "
                "larger file, or a smaller --train"
            )
        sequences = torch.tensor([pieces[index % len(pieces)] for index in range(count)])
    return Examples(sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous())


def _pieces(text: str, tokenizer: Any, length: int, count: int) -> Iterator[list[int]]:
    """At most so many: one of each document, as in the paper, then what is left of them, a document after the other."""
    from retrain.data.text import read_documents

    found, rests = 0, []
    for document in read_documents(text):
        words = list(tokenizer.encode(document))
        if len(words) >= length:  # shorter documents are passed over
            yield words[:length]
            found += 1
            rests.append(words[length:])
        if found == count:
            return
    for rest in rests:
        for start in range(0, len(rest) - length + 1, length):
            yield rest[start : start + length]
            found += 1
            if found == count:
                return
