"""Examples: inputs and targets that share their first dimension, the only form in which data travels here.

    Examples(images, labels)
    Examples({"input_ids": ids, "attention_mask": mask}, labels)     # several tensors: the model gets them as Columns
    Examples.of(dataset)                                             # a torch data set, a pair, a mapping with "labels"

Numpy arrays and pandas frames are taken like tensors. A model is called as model(inputs), whatever inputs are: one with
several takes them apart itself, self.bert(**inputs).
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

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


def _plain(values: Any, what: str) -> Tensor:
    """Numbers of any kind as a tensor without a gradient."""
    if not isinstance(values, Tensor):
        try:
            array = values.to_numpy() if hasattr(values, "to_numpy") else np.asarray(values)
        except ValueError:
            raise ValueError(f"{what} have rows of different lengths; pad them to one length") from None
        if array.dtype == object and hasattr(values, "dtypes"):  # a frame of several kinds of columns
            with contextlib.suppress(ValueError, TypeError):
                array = array.astype(np.float64)
        if array.dtype.kind not in "biuf":
            _refuse_text(values, array, what)
        values = torch.from_numpy(np.array(array))
    return values.detach() if values.requires_grad else values


def _in_float32(values: Any) -> Any:
    """A tensor or Columns, itself where there is nothing to do."""
    if isinstance(values, Columns):
        made = {name: _in_float32(values[name]) for name in values.keys()}  # noqa: SIM118
        return values if all(made[name] is values[name] for name in made) else Columns(made)
    return values.float() if values.is_floating_point() else values


def _refuse_text(values: Any, array: np.ndarray, what: str) -> None:
    """Names the column, where there are columns."""
    where = ""
    for name, column in values.items() if hasattr(values, "columns") else ():
        if column.to_numpy().dtype.kind not in "biuf":
            where, array = f' in the column "{name}"', column.to_numpy()
            break
    first = f'"{str(array.reshape(-1)[0])[:40]}"' if array.size else "nothing"
    advice = "pandas.factorize numbers labels" if what == "targets" else "pandas.get_dummies makes columns of numbers"
    raise ValueError(f"{what} hold {first}{where}; expected numbers ({advice})")


def positions(indices: Indices, n: int) -> np.ndarray:
    """Which of n training examples; refuses here what would be an unreadable failure on a GPU."""
    chosen = np.asarray(indices, dtype=np.int64)
    if chosen.ndim != 1 or len(chosen) == 0 or chosen.min() < 0 or chosen.max() >= n:
        raise ValueError(f"indices must be a list of at least one position from 0 to {n - 1}")
    return chosen


def shuffled_batches(count: int, batch_size: int, epochs: int, order_seed: int) -> Iterator[Tensor]:
    """Positions (batch,) among so many examples: every one once an epoch, in a new order; the last may be smaller."""
    generator = torch.Generator().manual_seed(order_seed)
    for _ in range(epochs):
        yield from torch.randperm(count, generator=generator).split(batch_size)


LABELS = ("labels", "label", "targets", "target", "y")  # of a mapping: which of its entries are the targets
Batch = tuple[Any, Tensor]  # inputs (batch, ...), or Columns of them; targets (batch,) or (batch, tokens)


@dataclass(frozen=True, eq=False)
class Examples:
    """A map-style dataset (torch's DataLoader takes it as it is) that is also sliced and moved as a whole."""

    inputs: Any  # (n, ...), or Columns; a mapping of tensors becomes Columns
    targets: Tensor  # (n,) class labels or real values, or (n, tokens)
    groups: Tensor | None = None  # (n,) int: the kind of each, such as its topic, where no label says it

    def __post_init__(self) -> None:
        inputs, targets = self.inputs, _plain(self.targets, "targets")
        if isinstance(inputs, tuple | list):
            raise ValueError(
                f"inputs are a {type(inputs).__name__} of {len(inputs)}; expected a tensor, or several by "
                'name: {"input_ids": ..., "attention_mask": ...}'
            )
        if isinstance(inputs, Mapping):
            inputs = Columns({name: _plain(values, name) for name, values in inputs.items()})
        elif not isinstance(inputs, Columns):
            inputs = _plain(inputs, "inputs")
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "targets", targets)
        if len(self.inputs) != len(self.targets):
            raise ValueError(
                f"{len(self.inputs)} inputs came with {len(self.targets)} targets; expected one target an input"
            )

    @classmethod
    def of(cls, data: Any) -> "Examples":
        """Of (inputs, targets), of a mapping with "labels", or of a data set whose items are one of the two.

        Real numbers become float32 and labels int64, which models and losses expect.
        """
        if isinstance(data, Examples):
            inputs, targets = _in_float32(data.inputs), _in_float32(data.targets)
            if not targets.is_floating_point() and targets.dtype != torch.long:
                targets = targets.long()
            if targets.dim() == 2 and targets.shape[1] == 1 and not isinstance(inputs, Columns) and inputs.dim() == 2:
                targets = targets.squeeze(1)  # a frame of one column
            return data if inputs is data.inputs and targets is data.targets else cls(inputs, targets)
        if isinstance(data, tuple) and len(data) == 2:
            return cls.of(cls(*data))
        if isinstance(data, Mapping):
            name = next((one for one in LABELS if one in data), None)
            if name is None:
                raise ValueError(
                    f'the data hold {", ".join(map(str, data))}; expected one more that is called "labels"'
                )
            return cls.of(cls({key: values for key, values in data.items() if key != name}, data[name]))
        if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not hasattr(data, "shape"):
            rows = [data[k] for k in range(len(data))]
            if rows and isinstance(rows[0], Mapping):  # Hugging Face's keep the texts beside their numbers
                rows = [{name: value for name, value in row.items() if not isinstance(value, str)} for row in rows]
            if rows and isinstance(rows[0], Mapping | tuple | list) and len(rows[0]) >= 2:
                made = default_collate(rows)
                return cls.of(made if isinstance(made, Mapping) else tuple(made))
        raise ValueError(
            f"the data are a {type(data).__name__}; expected (inputs, targets), a data set of such pairs, or Examples"
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
