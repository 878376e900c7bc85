"""Examples: inputs and targets that share their first dimension, the only form in which data travels here.

    Examples(images, labels)
    Examples({"input_ids": ids, "attention_mask": mask}, labels)     # several tensors: the model gets them as Columns

A model is called as model(inputs), whatever inputs are: one with several takes them apart itself, self.bert(**inputs).
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

Indices = Sequence[int] | np.ndarray | Tensor


class Columns:
    """Several tensors by name that share their first dimension, and are sliced, moved and joined as one tensor would.

    `columns["input_ids"]` is a tensor, `columns[:5]` the first five examples, `len(columns)` the number of examples,
    and `**columns` hands the tensors to a function by their names.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        if not tensors or not all(isinstance(name, str) and isinstance(t, Tensor) for name, t in tensors.items()):
            kinds = ", ".join(f"{name}: {type(t).__name__}" for name, t in tensors.items()) or "nothing"
            raise ValueError(f"inputs are {{{kinds}}}; expected tensors by name")
        lengths = {name: len(tensor) for name, tensor in tensors.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"inputs have {lengths} rows; expected as many of each")
        self._tensors = dict(tensors)

    def keys(self) -> list[str]:
        return list(self._tensors)

    def __getitem__(self, key: Any) -> Any:
        """A tensor by its name; otherwise what indexing every tensor gives (of an int: each without its first axis)."""
        if isinstance(key, str):
            return self._tensors[key]
        if isinstance(key, int):
            return {name: tensor[key] for name, tensor in self._tensors.items()}
        return self._each(lambda tensor: tensor[key])

    def get(self, name: str) -> Tensor | None:
        return self._tensors.get(name)

    def __len__(self) -> int:
        return len(next(iter(self._tensors.values())))

    def __repr__(self) -> str:
        return f"Columns({', '.join(f'{name}: {tuple(tensor.shape)}' for name, tensor in self._tensors.items())})"

    @property
    def device(self) -> torch.device:
        return next(iter(self._tensors.values())).device

    def to(self, device: torch.device | str, **options: Any) -> "Columns":
        """On the device; never in another type, because ids and masks are no floating-point numbers."""
        return self._each(lambda tensor: tensor.to(device, **options))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def _each(self, function: Callable[[Tensor], Tensor]) -> "Columns":
        return Columns({name: function(tensor) for name, tensor in self._tensors.items()})

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch.cat joins them tensor by tensor; nothing else knows what to do with several tensors."""
        if function is not torch.cat or kwargs or len(args) != 1:
            return NotImplemented
        parts = list(args[0])
        return cls({name: torch.cat([part[name] for part in parts]) for name in parts[0]._tensors})


Inputs = Tensor | Columns
Batch = tuple[Any, Tensor]  # inputs (batch, ...), or Columns of them; targets (batch,) or (batch, tokens)


@dataclass(frozen=True, eq=False)
class Examples:
    """A map-style dataset (torch's DataLoader takes it as it is) that is also sliced and moved as a whole."""

    inputs: Any  # (n, ...), or Columns; a mapping of tensors becomes Columns
    targets: Tensor  # (n,) class labels or real values, or (n, tokens)
    groups: Tensor | None = None  # (n,) int: the kind of each, such as its topic, where no label says it

    def __post_init__(self) -> None:
        if isinstance(self.inputs, Mapping):
            object.__setattr__(self, "inputs", Columns(self.inputs))
        if isinstance(self.inputs, tuple | list):
            raise ValueError(
                f"inputs are a {type(self.inputs).__name__} of {len(self.inputs)}; expected a tensor, or several by "
                'name: {"input_ids": ..., "attention_mask": ...}'
            )
        if len(self.inputs) != len(self.targets):
            raise ValueError(
                f"{len(self.inputs)} inputs came with {len(self.targets)} targets; expected one target an input"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        return self.inputs[index], self.targets[index]

    def select(self, indices: Indices) -> "Examples":
        chosen = torch.as_tensor(indices, dtype=torch.long, device=self.targets.device)
        groups = None if self.groups is None else self.groups[chosen]
        return Examples(self.inputs[chosen], self.targets[chosen], groups)

    def to(self, device: torch.device | str) -> "Examples":
        groups = None if self.groups is None else self.groups.to(device)
        return Examples(self.inputs.to(device), self.targets.to(device), groups)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """In order, every example once; the last batch may be smaller."""
        for start in range(0, len(self), batch_size):
            yield self.inputs[start : start + batch_size], self.targets[start : start + batch_size]

    @property
    def nbytes(self) -> int:
        return self.inputs.nbytes + self.targets.nbytes

    @cached_property
    def fingerprint(self) -> str:
        """Of every byte, in order: two sets of examples share it only if they are the same."""
        self.__dict__["_writes_seen"] = self._writes()
        return self._digest()

    def was_changed(self) -> bool:
        """Whether they are others than when the fingerprint was taken; looked at only where torch counted a write."""
        if self.__dict__.get("_writes_seen", writes := self._writes()) == writes:
            return False
        self.__dict__["_writes_seen"] = writes
        return self._digest() != self.fingerprint

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for name, tensor in self._named():
            array = np.ascontiguousarray(tensor.cpu().numpy())
            digest.update(f"{name}{array.dtype.str}{array.shape}".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()[:20]

    def _writes(self) -> list[int]:
        return [0 if tensor.is_inference() else tensor._version for tensor in self.tensors()]

    def _named(self) -> list[tuple[str, Tensor]]:
        several = isinstance(self.inputs, Columns)
        named = [(name, self.inputs[name]) for name in sorted(self.inputs.keys())] if several else [("", self.inputs)]
        return [*named, ("", self.targets), *([] if self.groups is None else [("groups", self.groups)])]

    def tensors(self) -> list[Tensor]:
        """Every tensor that holds the data: the inputs in the order of their names, the targets, and any groups."""
        return [tensor for _, tensor in self._named()]
