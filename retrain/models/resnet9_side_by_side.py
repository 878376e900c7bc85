"""Several ResNet-9s in training at once on one GPU, and what each makes of the queries in one captured pass.

A training on a few hundred images leaves most of a large GPU idle, and while the host writes one result the device
could compute the next. So each thread has an engine and a stream to itself: it gives the device all of its orders at
once, which takes a millisecond, and waits for that stream alone.

    def work(engine):
        engine.load(start)
        engine.run(indices, epochs, schedule, rng)
        return losses_of(engine).now()

    engines.result_of(work)         # from any thread
"""

import copy
import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from retrain.models.resnet9_training import Engine, deterministic_convolutions

CAPTURE_PASS_AFTER = 2  # passes as they are, which compile the kernels and warm the libraries up


class Engines:
    """As many engines as are in use at once, made when they are needed and kept; at most `at_most`."""

    def __init__(self, make: Callable[[], Engine], at_most: int):
        self._make, self._left = make, threading.Semaphore(at_most)
        self._free: list[Engine] = []
        # A capture hears whatever any thread says to the device. So orders are given by one thread at a time, and
        # who captures waits, with the orders in hand, until those that have given theirs have their results.
        self._ordering, self._state, self._num_waiting = threading.Lock(), threading.Condition(), 0

    def first(self) -> Engine:
        """One for trainings one after another, while nobody borrows any; on whatever stream is current."""
        if not self._free:
            self._free.append(self._new())
        return self._free[0]

    def result_of(self, work: Callable[[Engine], Tensor]) -> Tensor:
        """What `work` has an engine compute, on the CPU; may be called by any number of threads."""
        with self._left:
            with self._ordering:
                engine = self._free.pop() if self._free else self._new()
                assert engine.stream is not None
                engine.stream.wait_stream(torch.cuda.current_stream(engine.device))  # where it was made or last used
                try:
                    with torch.cuda.stream(engine.stream):
                        result = work(engine)
                except BaseException:
                    engine.stream.synchronize()
                    self._free.append(engine)
                    raise
                self._count(+1)
            try:
                with torch.cuda.stream(engine.stream):
                    return result.cpu()
            finally:
                self._count(-1)
                self._free.append(engine)

    def _count(self, change: int) -> None:
        with self._state:
            self._num_waiting += change
            self._state.notify_all()

    def _quiet(self) -> None:
        """Called by who holds the orders."""
        with self._state:
            self._state.wait_for(lambda: self._num_waiting == 0)

    def _new(self) -> Engine:
        engine = self._make()
        engine.quiet = self._quiet
        return engine


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
