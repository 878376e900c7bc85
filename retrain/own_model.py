"""A model and data that are here already, as a task: enough for `scores` and `inspect`, without any training.

    from bench import OwnModel, scores
    task = OwnModel(model, train=(inputs, labels), queries=(new_inputs, new_labels))
    print(scores("ekfac", task).top(10))

To judge methods, models must be retrained: that takes a task of its own with a `train` (bench/OWN_DATA.md).
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from retrain.errors import UsageError, error_line
from retrain.examples import Columns, Examples
from retrain.losses import CrossEntropy, Loss, SquaredError
from retrain.models.causal_lm import next_tokens
from retrain.models.huggingface import METHOD_BATCHES, is_transformer, wrapped
from retrain.models.weights import load_state, refuse_labels
from retrain.task import Task


@dataclass(frozen=True, kw_only=True, init=False, eq=False)
class OwnModel(Task):
    """A trained model with the data it was trained on and the queries to explain.

    model: a torch module, or a Hugging Face classifier or causal language model as it is. A copy in float32 and in eval
    mode is looked at. state: its weights where the model does not have them yet: a state dict, or a file of one.
    train, queries: (inputs, targets), a torch or Hugging Face data set, a mapping with "labels", or Examples; tensors,
    numpy arrays or pandas frames. loss: "cross_entropy" or "squared_error" (default: by the kind of the targets), or an
    object like those of retrain/losses.py. texts, query_texts: what people read of each example. class_names: of the
    labels. image_shape: (channels, height, width) of inputs that are pictures. tokenizer: decodes ids of tokens.
    """

    protocols: ClassVar[tuple[str, ...]] = ("given",)
    pretrained: ClassVar[bool] = True
    given: ClassVar[Any] = None  # what it was made of, an instance's own

    def __init__(
        self,
        model: nn.Module,
        train: Any,
        queries: Any,
        *,
        loss: str | Loss | None = None,
        state: Any = None,
        name: str = "own",
        texts: Sequence[str] | None = None,
        query_texts: Sequence[str] | None = None,
        class_names: Sequence[str] = (),
        image_shape: tuple[int, int, int] | None = None,
        tokenizer: Any = None,
    ):
        if not isinstance(model, nn.Module):
            raise UsageError(f"the model is a {type(model).__name__}; expected a torch.nn.Module")
        model = copy.deepcopy(model)
        if state is not None:
            load_state(model, state)
        language = is_transformer(model) and type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        names = columns_of(train)
        if names and (columns := columns_of(queries)) and columns != names:
            queries = (in_order(queries[0], names), *queries[1:])
        given = SimpleNamespace(
            model=wrapped(model.float().eval().cpu()), train=train, queries=queries, name=name, language=language,
            image_shape=image_shape, texts={"train": texts, "queries": query_texts},
        )  # fmt: skip
        attributes = {
            "given": given, "protocol": "given", "tokenizer": tokenizer, "feature_names": tuple(map(str, names)),
            "class_names": tuple(class_names), "loss_function": as_loss(loss, targets_of(train)),
            "method_settings": METHOD_BATCHES if is_transformer(model) else {},
        }  # fmt: skip
        for attribute, value in attributes.items():
            object.__setattr__(self, attribute, value)
        self._try()

    @torch.no_grad()
    def _try(self) -> None:
        """An example goes through the model and its loss, so that what does not fit is said before an hour's work."""
        for what, examples in (("the training examples", self.train_data), ("the queries", self.query_data)):
            one = examples.select([0])
            try:
                outputs = self.given.model(one.inputs)
                refuse_labels(self.loss_function, outputs, examples.targets, what, self.class_names)
                losses = self.losses(self.given.model, one, torch.device("cpu"))
            except UsageError:
                raise
            except Exception as error:
                raise UsageError(
                    f"the model does not take the first of {what}; expected inputs that model(inputs) takes, with "
                    f"their targets, not {_shape(one.inputs)} and {_shape(one.targets)}: {error_line(error, 200)}"
                ) from error
            if losses.shape != (1,) or not torch.isfinite(losses).all():
                raise UsageError(f"the loss of the first of {what} is {losses.tolist()}; expected one finite number")
        for what, examples in (("train", self.train_data), ("queries", self.query_data)):
            texts = self.given.texts[what]
            if texts is not None and len(texts) != len(examples):
                raise UsageError(f"{len(texts)} texts came for {len(examples)} {what}; expected one an example")
        shape, inputs = self.given.image_shape, self.train_data.inputs
        if shape and (isinstance(inputs, Columns) or math.prod(shape) != inputs[0].numel()):
            raise UsageError(f"image_shape is {shape} and the first input {_shape(inputs[:1])}; expected its own shape")

    @property
    def name(self) -> str:
        return self.given.name

    def load_train_data(self) -> Any:
        return self._as_examples(self.given.train)

    def load_query_data(self) -> Any:
        return self._as_examples(self.given.queries)

    def _as_examples(self, data: Any) -> Any:
        if self.given.language and isinstance(data, Mapping) and "labels" not in data:
            return next_tokens(data["input_ids"], data.get("attention_mask"))
        return data

    def build_model(self, seed: int) -> nn.Module:
        return copy.deepcopy(self.given.model)

    def image_shape(self) -> tuple[int, int, int] | None:
        return self.given.image_shape

    def text_of(self, examples: Examples, index: int) -> str:
        texts = self.given.texts["train" if examples is self.train_data else "queries"]
        return "" if texts is None else str(texts[index])


def columns_of(data: Any) -> list[Any]:
    """Of a pair whose inputs are a frame."""
    return list(getattr(data[0], "columns", ())) if isinstance(data, tuple) and len(data) else []


def in_order(frame: Any, names: list[Any]) -> Any:
    """The frame with these columns, which are all that it has."""
    missing, more = [n for n in names if n not in frame.columns], [n for n in frame.columns if n not in names]
    if missing or more:
        said = f'no column "{missing[0]}"' if missing else f'a column "{more[0]}"'
        raise UsageError(f"the queries have {said}; expected those of the training data: {', '.join(map(str, names))}")
    return frame[names]


def targets_of(data: Any) -> Tensor | None:
    """Of a pair, which loss they stand for; None of anything else."""
    try:
        return Examples.of(data).targets
    except ValueError:
        return None


LOSSES: dict[str, type] = {"cross_entropy": CrossEntropy, "squared_error": SquaredError}


def as_loss(loss: str | Loss | None, targets: Tensor | None) -> Loss:
    """By its name, or by the kind of the targets: real numbers are values, whole ones labels."""
    if loss is None:
        return SquaredError() if targets is not None and targets.is_floating_point() else CrossEntropy()
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise UsageError(f'loss is "{loss}"; available: {", ".join(LOSSES)}, or an object like those')
        return LOSSES[loss]()
    if isinstance(loss, nn.CrossEntropyLoss | nn.MSELoss):
        return CrossEntropy() if isinstance(loss, nn.CrossEntropyLoss) else SquaredError()
    if not hasattr(loss, "per_example"):
        raise UsageError(
            f"loss is a {type(loss).__name__}; expected {', '.join(LOSSES)}, or an object with what those of "
            "retrain/losses.py have"
        )
    return loss


def _shape(values: Any) -> str:
    return repr(values) if isinstance(values, Columns) else f"{tuple(values.shape)} {str(values.dtype)[6:]}"
