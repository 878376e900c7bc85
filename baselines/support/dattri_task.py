"""Our tasks as dattri sees them, and its inner-product attributors used without repeating work.

`BaseInnerProductAttributor.attribute` transforms every query (a conjugate-gradient solve, say) once for each batch of
training examples. `dattri_scores` calls the same attributor's own functions once a query, and multiplies; a test holds
it against `attribute`. What dattri calls influence is g_train^T H^-1 g_query, train x test: here it is turned round and
its sign flipped.
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from baselines.method import Attribution, Problem
from baselines.support.copies import detached_copy
from baselines.support.memory import free_bytes
from retrain.examples import Columns, Examples
from retrain.losses import mean_over_tokens

HELD_REPRESENTATIONS = 0.25  # of the free memory, for the training examples' representations
INSTALL_DATTRI = "dattri is not installed: pip install dattri"


def dattri_missing() -> str | None:
    """Why none of its methods can run, or None."""
    return INSTALL_DATTRI if importlib.util.find_spec("dattri") is None else None


def dattri_task(problem: Problem, weights: dict[str, Tensor] | None = None, *, single: bool = False) -> Any:
    """dattri's AttributionTask: the mean loss over a batch, at the base model or at these weights.

    TracInAttributor hands over `single` examples without a batch axis, all others batches of one.
    """
    from dattri.task import AttributionTask

    model = detached_copy(problem.model)
    for parameter in model.parameters():  # vmap knows no other layout, and a trained network may have one
        parameter.data = parameter.data.contiguous()
    loss = problem.task.loss_function
    names = problem.train.inputs.keys() if isinstance(problem.train.inputs, Columns) else None

    def mean_loss(parameters: dict[str, Tensor], data: tuple[Tensor, ...]) -> Tensor:
        *tensors, targets = (part[None] for part in data) if single else data
        inputs = tensors[0] if names is None else Columns(dict(zip(names, tensors, strict=True)))
        outputs = torch.func.functional_call(model, parameters, (inputs,))
        return mean_over_tokens(loss.per_example(outputs, targets)).mean()

    return AttributionTask(mean_loss, model, [weights or model.state_dict()])


def dattri_loader(examples: Examples, batch_size: int) -> Any:
    """A DataLoader in order, of batches [inputs ..., targets]."""
    from torch.utils.data import DataLoader, TensorDataset

    inputs = examples.inputs
    tensors = [inputs[name] for name in inputs.keys()] if isinstance(inputs, Columns) else [inputs]  # noqa: SIM118
    return DataLoader(TensorDataset(*tensors, examples.targets), batch_size=min(batch_size, len(examples)))


@torch.no_grad()
def dattri_scores(
    problem: Problem, attributor: Any, *, batch_size: int, query_batch_size: int, description: str
) -> tuple[Tensor, Tensor]:
    """(scores (q, n), the norms (n,) of the training examples' representations); rows are saved as they are made.

    dattri differentiates by torch.func, which autograd's own recording is no part of; left on, it would keep every
    step of an iteration until the batch is done.
    """

    def batches(examples: Examples, size: int) -> Iterator[tuple[Tensor, ...]]:
        for batch in dattri_loader(examples, size):
            yield tuple(part.to(problem.device).unsqueeze(0) for part in batch)

    def train_representations() -> Iterator[Tensor]:
        for data in batches(problem.attributed, batch_size):
            made = attributor.transform_train_rep(0, attributor.generate_train_rep(ckpt_idx=0, data=data))
            yield made.detach()

    first = next(train_representations())
    room = HELD_REPRESENTATIONS * free_bytes(problem.device)
    held = list(train_representations()) if first[0].nbytes * len(problem.attributed) < room else None
    norms = torch.cat([part.norm(dim=1).cpu() for part in (held or train_representations())])
    saved = problem.work.load(description)
    rows = [] if saved is None else [torch.from_numpy(saved[0]["scores"].copy())]
    done = len(rows[0]) if rows else 0
    waiting = problem.queries.select(range(done, len(problem.queries)))
    total = -(-len(waiting) // query_batch_size)
    parts = batches(waiting, query_batch_size) if total else iter(())
    for data in problem.progress(parts, total=total, description=f"{description}: queries"):
        query = attributor.transform_test_rep(0, attributor.generate_test_rep(ckpt_idx=0, data=data)).detach()
        rows.append(torch.cat([-(query @ part.T).cpu() for part in (held or train_representations())], dim=1))
        if problem.work.due():
            problem.work.save(description, {"scores": torch.cat(rows).numpy()}, {})
    return torch.cat(rows).float(), norms


def held_representations(num_train: int, num_queries: int, dimension: int, batch: int) -> int:
    """Bytes: gradients of a batch with their derivatives, one of the others at least, and the scores twice."""
    return 4 * (3 * batch * dimension + 2 * num_train * num_queries)


def finite_or_refuse(attribution: Attribution, reason: str) -> Attribution:
    if not torch.isfinite(attribution.scores).all():
        raise FloatingPointError(reason)
    return attribution


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """dattri draws progress bars of its own on stderr, over the harness's."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield
