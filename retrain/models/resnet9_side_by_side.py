"""One ResNet-9 after another on one GPU that never waits for the host, and what each makes of the queries.

While the host writes one result, the device should compute the next. So threads take turns to give all orders of a
training at once, which takes two milliseconds, and each then waits for its own result while the device goes on to the
orders of the next. All orders go to one stream: two trainings that share the device push each other's activations out
of its cache, and are slower than one after the other.

    def work(engine):
        engine.load(start)
        engine.run(indices, epochs, schedule, rng)
        return losses_of(engine).now()

    shared.result_of(work)          # from any thread
"""

import copy
import threading
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor, nn

from retrain.models.resnet9_training import Engine, deterministic_convolutions

CAPTURE_PASS_AFTER = 2  # passes as they are, which compile the kernels and warm the libraries up


class SharedEngine:
    """An engine that any number of threads order trainings from; at most `at_most` are ordered and not yet done."""

    def __init__(self, make: Callable[[], Engine], at_most: int):
        self._make, self._left = make, threading.Semaphore(at_most)
        # A capture hears whatever any thread says to the device. So orders are given by one thread at a time, and
        # who captures waits, with the orders in hand, until those that have given theirs have their results.
        self._ordering, self._state, self._num_waiting = threading.Lock(), threading.Condition(), 0

    @cached_property
    def engine(self) -> Engine:
        """Itself for trainings one after another, on whatever stream is current."""
        engine = self._make()
        engine.quiet = self._quiet
        return engine

    def result_of(self, work: Callable[[Engine], Tensor]) -> Tensor:
        """What `work` has the engine compute, on the CPU; may be called by any number of threads."""
        with self._left:
            with self._ordering:
                engine = self.engine
                assert engine.stream is not None
                engine.stream.wait_stream(torch.cuda.current_stream(engine.device))  # where it was made or last used
                try:
                    with torch.cuda.stream(engine.stream):
                        result = work(engine)
                        # Copied in turn, before the next training overwrites it.
                        copied = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
                        copied.copy_(result, non_blocking=True)
                        done = torch.cuda.Event(blocking=True)
                        done.record()
                except BaseException:
                    engine.stream.synchronize()
                    raise
                self._count(+1)
            try:
                done.synchronize()
            finally:
                self._count(-1)
        return copied.clone()

    def _count(self, change: int) -> None:
        with self._state:
            self._num_waiting += change
            self._state.notify_all()

    def _quiet(self) -> None:
        """Called by who holds the orders."""
        with self._state:
            self._state.wait_for(lambda: self._num_waiting == 0)


class LossesOf:
    """Losses of fixed examples under an engine's weights as they stand, in eval mode, always into the same memory."""

    def __init__(self, engine: Engine, losses: Callable[[nn.Module], Tensor]):
        """`losses` is (model in eval mode) -> (examples,); nothing in it may wait for the device."""
        self._engine, self._losses, self._times_seen = engine, losses, 0
        self._model = sharing_weights(engine.model).eval()
        self._captured: tuple[torch.cuda.CUDAGraph, Tensor] | None = None

    @torch.no_grad()
    def now(self) -> Tensor:
        """(examples,); the next call, or the next training, may overwrite it."""
        if self._captured is not None:
            graph, losses = self._captured
            graph.replay()
            return losses
        with deterministic_convolutions():
            losses = self._losses(self._model)  # before a capture, too: see Engine._advance
            self._times_seen += 1
            if self._engine.capturing and self._times_seen > CAPTURE_PASS_AFTER:
                again: list[Tensor] = []
                recorded = self._engine.recorded(lambda: again.append(self._losses(self._model)))
                self._captured = None if recorded is None else (recorded, again[0])
        return losses


def sharing_weights(model: nn.Module) -> nn.Module:
    """A module with a mode of its own and the very same tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, memo={id(tensor): tensor for tensor in tensors})
