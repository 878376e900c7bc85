"""Weights that somebody else's code wrote: a state dict as a mapping, a .safetensors file, or what torch.save wrote."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrain.errors import UsageError
from retrain.examples import Indices, shuffled_batches
from retrain.losses import IGNORED, CrossEntropy, Loss, SquaredError
from retrain.task import Task, classifies


def load_state(model: nn.Module, state: Any, where: str = "the state dict") -> None:
    """Weights into a model: a mapping, or the file of one."""
    if not isinstance(state, Mapping):
        where, state = f'"{state}"', read_state(str(state))
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise UsageError(f"{where} does not fit the model: {reason}") from None


def read_state(path: str) -> dict[str, Tensor]:
    """The state dict in a file; one that is nested under "state_dict" or "model" is found. Nothing is unpickled."""
    try:
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file

            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UsageError(f'"{path}": there is no such file; expected one of weights, .pt or .safetensors') from None
    except Exception as error:  # torch's unpickler refuses what is not a plain state dict in its own ways
        raise UsageError(
            f'"{path}" is no state dict ({type(error).__name__}); write one with torch.save(model.state_dict(), path)'
        ) from None
    for name in ("state_dict", "model_state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(name), Mapping):
            found = found[name]
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UsageError(f'"{path}" holds a {type(found).__name__}; expected a state dict: tensors by name')
    return dict(found)


def refuse_labels(loss: Loss, outputs: Tensor, targets: Tensor, what: str, names: Sequence[str] = ()) -> None:
    """Labels that the model has no output for; outputs: of one example."""
    if isinstance(loss, SquaredError) and outputs[0].numel() != 1:
        raise UsageError(
            f"the labels of {what} are real numbers, so the loss is squared error and the model needs one output, not "
            f"{outputs[0].numel()}; give whole numbers for classes"
        )
    if not isinstance(loss, CrossEntropy) or outputs.dim() < 2:
        return
    if targets.dim() != outputs.dim() - 1:
        raise UsageError(
            f"the labels of {what} have the shape {tuple(targets.shape)}; expected one whole number an example, which "
            "argmax(1) makes of one-hot rows"
        )
    classes, counted = outputs.shape[-1], targets[targets != IGNORED]
    if len(counted) and not 0 <= int(counted.min()) <= int(counted.max()) < classes:
        raise UsageError(
            f"the labels of {what} are {int(counted.min())} to {int(counted.max())}; expected whole numbers from 0, "
            f"below the model's {classes} outputs"
        )
    if names and len(names) != classes:
        raise UsageError(
            f"{len(names)} classes are named, but the model has {classes} outputs; expected a name for each"
        )


def trained_by_adamw(
    task: Any, model: nn.Module, indices: Indices, order_seed: int, device: torch.device, **options: Any
) -> nn.Module:
    """The model after `task.epochs` over these examples, in batches of `task.batch_size`, in the mode it came in."""
    data, model = task.train_data.select(indices).to(device), model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for rows in shuffled_batches(len(data), task.batch_size, task.epochs, order_seed):
        loss = task.example_loss(model, (data.inputs[rows], data.targets[rows])).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def refuse_other_order(task: Task, model: nn.Module, device: torch.device) -> None:
    """A trained classifier that is wrong about nearly all of its training data has its labels in another order."""
    if not classifies(task):
        return
    outputs = [model(inputs.to(device)).cpu() for inputs, _ in task.train_data.batches(task.eval_batch_size)]
    classes, targets = outputs[0].shape[-1], task.train_data.targets
    if int(targets.max()) >= classes:
        raise UsageError(f"the model has {classes} outputs, and a label is number {int(targets.max())}, counted from 0")
    right = float((torch.cat(outputs).argmax(-1) == targets).float().mean())
    if len(targets) >= 20 and right < 0.5 / classes:
        order = ", ".join(task.class_names) or "that of the numbers"
        raise UsageError(
            f"the model is right about {right:.0%} of its training data; are its outputs in the order of the labels "
            f"({order})? Give their order: --set {task.name}.classes=A,B"
        )
