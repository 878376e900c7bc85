"""A causal language model as a plain map from tokens to logits, around a transformers model."""

from typing import Any

from torch import Tensor, nn


class CausalLM(nn.Module):
    """tokens (batch, length) -> logits (batch, length, vocabulary).

    No attention mask is passed: sequences are full, and a mask would keep scaled-dot-product attention from running
    under vmap.
    """

    def __init__(self, transformer: nn.Module):
        super().__init__()
        self.transformer = transformer

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Any = self.transformer(input_ids=tokens, use_cache=False)
        return outputs.logits
