"""A causal language model as a plain map from tokens to logits, or to the losses of given targets without the logits.

    model = CausalLM(GPTNeoXForCausalLM(...))
    model(tokens)                                   # logits (batch, length, vocabulary)
    model.token_losses(tokens, targets)             # (batch, length) float32; the logits are never all there

GPT-NeoX (Pythia) and Llama with scaled-dot-product attention run through forward passes of their own over the very same
modules: no mask, no cache, a quarter of the host's work, and safe to capture in a CUDA graph. Everything else runs as
transformers has it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrain.examples import Examples
from retrain.losses import IGNORED
from retrain.models.fused_cross_entropy import linear_cross_entropy

LANGUAGE_PRECISIONS = {"bfloat16": torch.bfloat16, "tf32": torch.float32, "float32": torch.float32}


class CausalLM(nn.Module):
    """tokens (batch, length) -> logits (batch, length, vocabulary).

    No attention mask is passed: sequences are full, and a mask would keep scaled-dot-product attention from its fused
    kernels and from running under vmap.
    """

    def __init__(self, transformer: nn.Module):
        super().__init__()
        self.transformer = transformer
        # Whether the logits are the head's product with the last hidden states and nothing else; see `check_head`.
        self.has_plain_head = isinstance(self.head, nn.Linear) and self.head.bias is None

    @property
    def head(self) -> Any:
        return self.transformer.get_output_embeddings()  # type: ignore[operator]

    @property
    def vocabulary(self) -> int:
        return int(self.transformer.config.vocab_size)  # type: ignore[union-attr, arg-type]

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (batch, length, vocabulary); with targets (batch, length) their losses instead, float32."""
        if targets is None:
            if _direct_pass(self.transformer) is not None:
                return self.head(self.hidden_states(tokens))
            return self.transformer(input_ids=tokens, use_cache=False).logits
        if not self.has_plain_head:
            logits = self.transformer(input_ids=tokens, use_cache=False).logits
            return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        weight = self.head.weight
        hidden = self.hidden_states(tokens).flatten(0, 1).to(weight.dtype)
        return linear_cross_entropy(hidden, weight, targets.flatten()).view_as(targets)

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """(batch, length, width): what the head sees."""
        body, direct = self.transformer.base_model, _direct_pass(self.transformer)
        if direct is not None:
            return direct(body, tokens)
        return body(input_ids=tokens, use_cache=False).last_hidden_state  # type: ignore[operator]

    def token_losses(self, tokens: Tensor, targets: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """(batch, length) float32, differentiable in the parameters.

        With another `dtype` than the parameters' own, each is cast once for this call and everything computes in it;
        gradients arrive at the parameters as they are.
        """
        parameters = dict(self.named_parameters())
        if dtype is None or all(parameter.dtype == dtype for parameter in parameters.values()):
            return self(tokens, targets)
        cast = {name: parameter.to(dtype) for name, parameter in parameters.items()}
        return torch.func.functional_call(self, cast, (tokens, targets))

    def _apply(self, fn: Any, recurse: bool = True) -> "CausalLM":
        """`model.to(torch.bfloat16)` is for weights: rotary frequencies rounded to bf16 would be off by whole turns."""
        before = {name: buffer for name, buffer in self.named_buffers() if buffer.is_floating_point()}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            path, _, leaf = name.rpartition(".")
            owner = self.get_submodule(path)
            after = owner._buffers[leaf]
            if after is not None and after.dtype != buffer.dtype:
                owner._buffers[leaf] = buffer.to(after.device)
        return self

    @torch.no_grad()
    def check_head(self) -> None:
        """Some architectures scale or cap their logits after the head; find out on a few tokens, once."""
        if self.has_plain_head:
            device = self.head.weight.device
            tokens = torch.arange(8, device=device)[None] % self.vocabulary
            expected = self.transformer(input_ids=tokens, use_cache=False).logits.float()
            found = self.head(self.hidden_states(tokens)).float()
            scale = float(expected.abs().max()) + 1e-6
            self.has_plain_head = bool((expected - found).abs().max() <= 0.05 * scale)


def next_tokens(ids: Tensor, mask: Tensor | None = None, groups: Tensor | None = None) -> Examples:
    """Sequences (n, tokens), padded on the right, as a causal language model learns them: each token from those before.

    Targets of padding do not count. No mask is needed: what is to the right is not seen.
    """
    targets = ids[:, 1:].clone()
    if mask is not None:
        if (mask[:, 1:] > mask[:, :-1]).any():
            raise ValueError('sequences are padded on the left; set tokenizer.padding_side = "right"')
        targets[mask[:, 1:] == 0] = IGNORED
    return Examples(ids[:, :-1].contiguous(), targets.contiguous(), groups)


SAMPLED_LOGITS = 2**28  # held at once in float32, with as many probabilities


@torch.no_grad()
def sample_tokens(hidden: Tensor, weight: Tensor) -> Tensor:
    """(tokens,): drawn from softmax(hidden @ weight.T), chunk by chunk, from torch's global (seeded) generator."""
    rows = max(1, SAMPLED_LOGITS // len(weight))
    drawn = [
        torch.multinomial(F.linear(part, weight).float().softmax(-1), num_samples=1).squeeze(1)
        for part in hidden.split(rows)
    ]
    return torch.cat(drawn)


def language_dtype(precision: str, model: nn.Module, device: torch.device) -> torch.dtype | None:
    """What a language model computes in: `precision` on CUDA, its own on the CPU or where it already is narrow."""
    narrow = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in model.parameters())
    return None if narrow or device.type != "cuda" else LANGUAGE_PRECISIONS[precision]


def _direct_pass(transformer: nn.Module) -> Callable[[Any, Tensor], Tensor] | None:
    config: Any = transformer.config
    dropout = config.attention_dropout or getattr(config, "hidden_dropout", 0) if config.model_type in DIRECT else 1
    return None if dropout or config._attn_implementation != "sdpa" else DIRECT[config.model_type]


def _neox_hidden_states(body: Any, tokens: Tensor) -> Tensor:
    """GPTNeoXModel's forward pass through its own modules, so that hooks on them see what they always see."""
    hidden = body.embed_in(tokens)
    batch, length, width = hidden.shape
    positions = torch.arange(length, device=tokens.device)[None]
    # (1, length, rotated) each; one axis more for the heads and one for queries beside keys
    cosine, sine = (part[:, :, None, None] for part in body.rotary_emb(hidden, position_ids=positions))
    rotated = cosine.shape[-1]
    for layer in body.layers:
        attention = layer.attention
        heads = width // attention.head_size
        together = attention.query_key_value(layer.input_layernorm(hidden))
        together = together.view(batch, length, heads, 3, attention.head_size)
        cosine, sine = cosine.to(together.dtype), sine.to(together.dtype)  # they differ under autocast
        turning, staying = together[..., :2, :rotated], together[..., :2, rotated:]
        first, second = turning.chunk(2, dim=-1)
        turned = turning * cosine + torch.cat((-second, first), dim=-1) * sine
        if torch.is_grad_enabled():
            query, key = torch.cat((turned, staying), dim=-1).unbind(3)
        else:
            turning.copy_(turned)  # in place: a copy of all queries and keys less
            query, key = together[..., 0, :], together[..., 1, :]
        query, key, value = (part.transpose(1, 2) for part in (query, key, together[..., 2, :]))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=attention.scaling)
        attended = attention.dense(mixed.transpose(1, 2).reshape(batch, length, width))
        if layer.use_parallel_residual:
            hidden = layer.mlp(layer.post_attention_layernorm(hidden)) + attended + hidden
        else:
            hidden = attended + hidden
            hidden = layer.mlp(layer.post_attention_layernorm(hidden)) + hidden
    return body.final_layer_norm(hidden)


def _llama_hidden_states(body: Any, tokens: Tensor) -> Tensor:
    """LlamaModel's forward pass, likewise."""
    hidden = body.embed_tokens(tokens)
    batch, length, _ = hidden.shape
    positions = torch.arange(length, device=tokens.device)[None]
    cosine, sine = (part[:, None] for part in body.rotary_emb(hidden, position_ids=positions))  # one axis for the heads
    for layer in body.layers:
        attention, seen = layer.self_attn, layer.input_layernorm(hidden)
        query, key, value = (
            projection(seen).view(batch, length, -1, attention.head_dim).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cosine, sine = cosine.to(query.dtype), sine.to(query.dtype)
        query, key = (
            part * cosine + torch.cat((-part.chunk(2, dim=-1)[1], part.chunk(2, dim=-1)[0]), dim=-1) * sine
            for part in (query, key)
        )
        shared = query.shape[1] // key.shape[1]  # so many query heads look at one key
        key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=attention.scaling)
        hidden = hidden + attention.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return body.norm(hidden)


DIRECT = {"gpt_neox": _neox_hidden_states, "llama": _llama_hidden_states}
