"""Finetunes one language model many times over, on sequences that never leave the device.

    finetuner = Finetuner(model, examples, recipe, device)      # once
    finetuner.load(weights)                                     # for every run: back to the start, in place
    finetuner.run(batches(len(chosen), recipe, order_seed, chosen), num_steps)
    trained = finetuner.model_copy()

AdamW on float32 weights with a linear decay to zero; on CUDA the forward and backward pass run on a bf16 copy of them
that is made anew each step. There, a whole step (gather, forward, backward, update) is captured in a CUDA graph for
each batch size that keeps coming back, and replayed; the same Python function runs as it is on the CPU, for sizes that
are rare, and wherever capturing fails. The order of examples is drawn on the CPU: it is the same on every device.
"""

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from retrain.backends import captured_graph
from retrain.examples import Examples, Indices, shuffled_batches
from retrain.models.causal_lm import CausalLM, language_dtype

CAPTURE_BATCH_AFTER = 3  # runs of a batch size as it is before it is captured: those also warm the libraries up
MAX_BATCH_GRAPHS = 4


@dataclass(frozen=True)
class Finetuning:
    """AdamW's settings. `micro_batch` sequences at a time go through the model; it changes memory, not the steps."""

    batch_size: int = 256
    learning_rate: float = 3e-5
    weight_decay: float = 0.01
    epochs: int = 1
    micro_batch: int = 256

    def __post_init__(self) -> None:
        if min(self.batch_size, self.epochs, self.micro_batch) < 1 or self.learning_rate <= 0 or self.weight_decay < 0:
            raise ValueError(f"sizes, epochs and learning_rate must be positive, and no decay negative: {self}")

    def num_steps(self, num_examples: int) -> int:
        return self.epochs * -(-num_examples // self.batch_size)


def batches(indices: Indices, recipe: Finetuning, order_seed: int) -> Iterator[Tensor]:
    """Positions of each step's examples: every one once an epoch, in an order of its own; the last may be smaller."""
    chosen = torch.as_tensor(indices, dtype=torch.long)
    for places in shuffled_batches(len(chosen), recipe.batch_size, recipe.epochs, order_seed):
        yield chosen[places]


class Finetuner:
    """One model's worth of memory on a device, in which any number of runs happen one after another."""

    def __init__(
        self,
        model: nn.Module,
        examples: Examples,
        recipe: Finetuning,
        device: torch.device,
        *,
        precision: str = "bfloat16",
        capture: bool = True,
    ):
        self.recipe, self.device = recipe, torch.device(device)
        # Without dropout (EleutherAI's models have none): its noise would be neither seeded nor the data's doing.
        self.model = model.to(self.device).eval()
        self.examples = examples.to(self.device)
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        dtype = language_dtype(precision, model, self.device)
        # What computes: the model itself, or a copy of it in a narrower type.
        self.working = self.model
        if dtype is not None and any(parameter.dtype != dtype for parameter in self.parameters):
            self.working = copy.deepcopy(model).to(dtype)
        self.working_parameters: list[Tensor] = [p for p in self.working.parameters() if p.requires_grad]
        on_cuda = self.device.type == "cuda"
        # A captured step reads its learning rate from the device.
        self.rate = torch.zeros((), device=self.device)
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=self.rate if on_cuda else recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            fused=True if on_cuda else None,
            capturable=on_cuda,
        )
        # Steps outside of a graph are meant: without this the optimizer warns of them.
        self.optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]
        self.capturing = capture and on_cuda
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.times_seen: Counter[int] = Counter()
        self.graph_pool = torch.cuda.graph_pool_handle() if self.capturing else None

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Back to these weights with an optimizer that has seen nothing; in place, as captured graphs need it."""
        here = self.model.state_dict(keep_vars=True)
        if here.keys() != weights.keys():
            raise ValueError(f"weights have {len(weights)} entries; expected the model's own {len(here)}")
        working = self.working.state_dict(keep_vars=True)
        for name, tensor in here.items():
            tensor.copy_(weights[name])
            working[name].copy_(tensor)  # what is frozen as well, which no step does
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()

    def model_copy(self) -> nn.Module:
        """The trained model in eval mode, independent of the finetuner."""
        for parameter in self.parameters:
            parameter.grad = None
        return copy.deepcopy(self.model).eval()

    def run(self, steps: Iterator[Tensor], num_steps: int) -> None:
        """One step for each batch of positions; the learning rate falls linearly from its start to zero."""
        for number, chosen in enumerate(steps):
            rate = self.recipe.learning_rate * (1 - number / num_steps)
            if self.device.type == "cuda":
                self.rate.fill_(rate)
            else:
                self.optimizer.param_groups[0]["lr"] = rate
            self._advance(chosen.to(self.device, non_blocking=True))

    def _advance(self, chosen: Tensor) -> None:
        """One step, by replaying a graph where there is one for this batch size."""
        size = len(chosen)
        if self.capturing and size not in self.graphs:
            if self.times_seen[size] >= CAPTURE_BATCH_AFTER and len(self.graphs) < MAX_BATCH_GRAPHS:
                self._capture(chosen)
            self.times_seen[size] += 1
        if self.capturing and size in self.graphs:
            graph, static_chosen = self.graphs[size]
            static_chosen.copy_(chosen)
            graph.replay()
        else:
            self._step(chosen)

    def _capture(self, chosen: Tensor) -> None:
        """Record `_step` for this batch size. Recording runs nothing, so the weights stay as they are."""
        static_chosen = chosen.clone()
        torch.cuda.empty_cache()  # the graphs' pool is separate memory: give back what eager steps reserved
        # One pool for all graphs: nothing in it outlives a replay, so their memory can overlap.
        graph = captured_graph(lambda: self._step(static_chosen), self.device, pool=self.graph_pool)
        if graph is None:
            self.capturing = False
            self.graphs.clear()
        else:
            self.graphs[len(chosen)] = (graph, static_chosen)

    def _step(self, chosen: Tensor) -> None:
        """Forward, backward, update; `chosen` is (batch,). Nothing here waits for the device or depends on values."""
        if self.working is not self.model:
            with torch.no_grad():
                torch._foreach_copy_(self.working_parameters, self.parameters)
        gradients: list[Tensor] = []
        for part in chosen.split(self.recipe.micro_batch):
            loss = self._mean_loss(part)
            if len(part) < len(chosen):
                loss = loss * (len(part) / len(chosen))
            found = torch.autograd.grad(loss, self.working_parameters)
            if gradients:
                torch._foreach_add_(gradients, found)
            else:
                gradients = [gradient.to(p.dtype) for p, gradient in zip(self.parameters, found)]
        for parameter, gradient in zip(self.parameters, gradients):
            parameter.grad = gradient
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None

    def _mean_loss(self, chosen: Tensor) -> Tensor:
        inputs, targets = self.examples.inputs[chosen], self.examples.targets[chosen]
        if isinstance(self.working, CausalLM):
            return self.working.token_losses(inputs, targets).mean()
        return nn.functional.cross_entropy(self.working(inputs).flatten(0, 1).float(), targets.flatten())
