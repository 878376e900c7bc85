"""A tiny GPT-NeoX and its tokenizer on disk, made on the fly: what the language tests load in place of Pythia.

And a tiny BERT with padded sentences: a model of several inputs.
"""

import json
import random
from pathlib import Path

import torch
from torch import nn

from retrain.examples import Columns, Examples

WORDS = [f"w{number}" for number in range(50)]
END = "<|endoftext|>"


def save_model(folder: Path, *, seed: int = 0, vocabulary: int = 64, **settings) -> Path:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    configuration = GPTNeoXConfig(
        **{
            "vocab_size": vocabulary, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 32, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0,
        }
        | settings
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPTNeoXForCausalLM(configuration)
        for parameter in model.parameters():  # so that biases and norms are tested too
            parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, extra: int = 0) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [END, *WORDS, *(f"extra{number}" for number in range(extra))]
    tokenizer = Tokenizer(models.WordLevel({word: position for position, word in enumerate(words)}, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, unk_token=END).save_pretrained(folder)
    return folder


def save_both(folder: Path, **settings) -> Path:
    return save_tokenizer(save_model(folder, **settings))


def write_text(path: Path, num_documents: int, *, seed: int = 0, words: int = 20) -> Path:
    chooser = random.Random(seed)
    with open(path, "w") as file:
        for _ in range(num_documents):
            file.write(json.dumps({"text": " ".join(chooser.choices(WORDS, k=words))}) + "\n")
    return path


def save_bert(folder: Path) -> Path:
    """A classifier of two classes with its tokenizer, which pads."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    words = [END, *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    settings = {"pad_token": END, "unk_token": END, "eos_token": END, "model_max_length": 16}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings).save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        configuration = BertConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=16, pad_token_id=0, num_labels=2,
        )  # fmt: skip
        BertForSequenceClassification(configuration).save_pretrained(folder)
    return folder


class SentenceClassifier(nn.Module):
    """A Hugging Face encoder as a task's model: Columns of ids and masks in, logits (batch, classes) out."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder

    def forward(self, inputs: Columns) -> torch.Tensor:
        return self.encoder(**inputs).logits


def tiny_bert(seed: int = 0) -> SentenceClassifier:
    """Made on the spot, with an attention that looks at its mask's values as transformers has it."""
    from transformers import BertConfig, BertForSequenceClassification

    configuration = BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=10, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = BertForSequenceClassification(configuration)
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
    return SentenceClassifier(model).eval()


def sentences(count: int, length: int = 7) -> Examples:
    """Of one to `length` words, padded; what they are about is in their first word."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 30, (count, length), generator=generator)
    lengths = torch.randint(1, length + 1, (count, 1), generator=generator)
    mask = (torch.arange(length) < lengths).long()
    return Examples({"input_ids": ids * mask, "attention_mask": mask}, ids[:, 0] % 3)
