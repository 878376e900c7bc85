"""Hugging Face models as a task has them: model(inputs) is logits, whatever transformers wraps them in.

model = wrapped(AutoModelForSequenceClassification.from_pretrained(folder))
model(Columns({"input_ids": ids, "attention_mask": mask}))           # logits (batch, classes)
wrapped(AutoModelForCausalLM.from_pretrained(folder))(ids)           # logits (batch, tokens, vocabulary)
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from retrain.examples import Columns
from retrain.models.causal_lm import CausalLM

# What goes through a transformer at once: the activations and gradients of hundreds of texts would fill a machine.
METHOD_BATCHES = {
    "ekfac": {"query_batch_size": 64, "train_batch_size": 32, "fit_batch_size": 32},
    "gradsim": {"batch_size": 16},
    "kfac": {"batch_size": 16, "fit_batch_size": 16},
    "shampoo": {"batch_size": 16, "fit_batch_size": 16},
    "trak": {"batch_size": 16},
}


class Logits(nn.Module):
    """A transformers model whose output is its logits alone: what a task's loss takes.

    Where it comes to the same, the attention mask is handed over as what is added to the attention's logits. From a
    mask of zeros and ones transformers would make it by way of a question that has no answer under vmap.
    """

    def __init__(self, transformer: nn.Module):
        super().__init__()
        self.transformer = transformer
        self.adds_mask = self._may_add_mask()

    def forward(self, inputs: Any) -> Tensor:
        if not isinstance(inputs, Columns | Mapping):
            return self.transformer(inputs).logits
        named = {name: inputs[name] for name in inputs.keys()}  # noqa: SIM118
        if self.adds_mask and "attention_mask" in named:
            named["attention_mask"] = _added(named["attention_mask"])
        return self.transformer(**named).logits

    @torch.no_grad()
    def _may_add_mask(self) -> bool:
        """Tried on two short sequences, one of them padded; never where tokens see only those before them."""
        ids, mask = torch.tensor([[1, 2, 3, 4]] * 2), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
        before = self.transformer.training
        self.transformer.eval()
        try:
            body: Any = self.transformer.base_model
            firsts = [body(input_ids=one).last_hidden_state[:, 0] for one in (ids, ids + torch.tensor([0, 0, 0, 1]))]
            if torch.equal(*firsts):
                return False
            expected = self.transformer(input_ids=ids, attention_mask=mask).logits
            found = self.transformer(input_ids=ids, attention_mask=_added(mask)).logits
            return bool(torch.allclose(expected, found, rtol=1e-4, atol=1e-5))
        except Exception:  # whatever an architecture has against it
            return False
        finally:
            self.transformer.train(before)


def _added(mask: Tensor) -> Tensor:
    """(batch, 1, 1, tokens): 0 where a token is seen, and a very negative number where it is padding."""
    return (1.0 - mask[:, None, None, :].float()) * torch.finfo(torch.float32).min


def is_transformer(model: nn.Module) -> bool:
    """Whether it comes from transformers as it is; nothing is imported to find out."""
    return any(cls.__module__ == "transformers.modeling_utils" for cls in type(model).__mro__)


def wrapped(model: nn.Module) -> nn.Module:
    """The model as a task has it; one that is no transformers model is given back as it is."""
    if not is_transformer(model):
        return model
    if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        return CausalLM(model)
    if hasattr(model, "set_attn_implementation"):  # methods take gradients example by example, which this one allows
        model.set_attn_implementation("eager")  # type: ignore[operator]
    return Logits(model)


def tokenized(tokenizer: Any, texts: list[str], length: int | None = None) -> dict[str, torch.Tensor]:
    """Ids and attention mask, padded on the right to the longest; longer texts are cut at `length` tokens."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    found = tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
    return {name: found[name] for name in ("input_ids", "attention_mask")}
