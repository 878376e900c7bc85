"""Which layers kronfluence looks at: shared by the adapter to it and by what is compared with it."""

from typing import Any

import torch
from torch import nn

from retrain.errors import UsageError

OUTPUT_HEADS = ("lm_head", "embed_out")  # transformers 5, and before


def tracked_modules(model: nn.Module) -> list[str]:
    """Trainable linear and convolution layers, without a language model's output head."""
    return [
        name
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, nn.Conv2d)
        and module.weight.requires_grad
        and name.rpartition(".")[2] not in OUTPUT_HEADS
    ]


@torch.no_grad()
def check_examples_apart(model: nn.Module, two: Any) -> None:
    """Refuses a model that joins examples and positions into one axis (OPT), where kronfluence sees no examples."""
    joined: list[str] = []

    def watch(name: str) -> Any:
        return lambda module, arguments: joined.extend([name] * (len(arguments[0]) != 2))

    handles = [model.get_submodule(name).register_forward_pre_hook(watch(name)) for name in tracked_modules(model)]
    try:
        getattr(model, "hidden_states", model)(two)  # a language model's head would give all logits
    finally:
        for handle in handles:
            handle.remove()
    if joined:
        raise UsageError(
            f"ekfac: the layer {joined[0]} gets all examples joined into one axis, where kronfluence cannot tell them "
            "apart; take kfac"
        )


def tracked_parameters(model: nn.Module) -> list[str]:
    """Their weights and biases, in the model's order."""
    tracked = set(tracked_modules(model))
    return [name for name, _ in model.named_parameters() if name.rpartition(".")[0] in tracked]
