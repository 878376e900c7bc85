"""Which layers kronfluence looks at: shared by the adapter to it and by what is compared with it."""

from torch import nn

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


def tracked_parameters(model: nn.Module) -> list[str]:
    """Their weights and biases, in the model's order."""
    tracked = set(tracked_modules(model))
    return [name for name, _ in model.named_parameters() if name.rpartition(".")[0] in tracked]
