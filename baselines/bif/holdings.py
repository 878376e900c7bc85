"""What BIF will hold at once, from sizes alone: known before a model is trained, and before a chain is started."""

import logging
from dataclasses import dataclass

import torch

from baselines.bif.collect import BLOCK, DIAGNOSED_EXAMPLES
from baselines.bif.engine import STEP_IN_BACKWARD_BYTES
from baselines.bif.settings import ChainSettings
from baselines.support.memory import free_bytes
from retrain.errors import UsageError

logger = logging.getLogger("tda-bench")

# Tensors a parameter beside its own copy, at the worst moment of a step: what is kept of it, its gradient twice (as it
# came, and as it is held), or the drift or noise in its place.
STEP_TENSORS = {"sgld": 3, "sghmc": 4, "rmsprop_sgld": 5}


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """How losses are collected, and the bytes of it."""

    streaming: bool  # covariances are summed as the draws come
    num_bytes: int  # with all chains in one process
    by_sums: int
    by_traces: int


def holdings(
    settings: ChainSettings, draws: int, num_train: int, num_queries: int, *, shrinkage: bool, keep_traces: bool
) -> Holdings:
    """Kept traces or running sums, whichever is smaller: a function of sizes alone, so that every process agrees.

    Kept traces cost draws x (n + q) numbers, one more chain of them while they are centred, and the scores; running
    sums cost twice the scores, whatever the number of draws, and a few hundred bytes a draw to judge the chains by. A
    control variate doubles that and adds the linear part; shrinkage holds the sum of the chains' differences, and the
    two that it compares.
    """
    scores, draw = 4 * num_train * (num_queries + num_train * settings.train_covariance), 4 * (num_train + num_queries)
    copies = 2 if settings.control_variate else 1  # a chain and its shadow
    extra = (1 if settings.control_variate else 0) + (3 if shrinkage else 0)
    judged = settings.chains * draws * 4 * (1 + min(DIAGNOSED_EXAMPLES, num_train + num_queries))
    by_traces = (copies * settings.chains + 1) * draws * draw + (copies + extra) * scores + judged
    by_traces += settings.chains * draws * draw if keep_traces else 0
    by_sums = (2 * copies + extra) * scores + (copies + 2) * min(BLOCK, draws) * draw + copies * judged
    streaming = by_sums < by_traces and not keep_traces
    return Holdings(
        streaming=streaming,
        num_bytes=by_sums if streaming else by_traces,
        by_sums=by_sums,
        by_traces=by_traces,
    )


def merging_bytes(held: Holdings, settings: ChainSettings, num_train: int, num_queries: int) -> int:
    """With chains from files, on the CPU: all of them are there at once. (Traces are anyhow.)"""
    copies = 2 if settings.control_variate else 1
    rows = num_queries + num_train * settings.train_covariance
    return held.num_bytes + (copies * (settings.chains - 1) * 4 * num_train * rows if held.streaming else 0)


def model_bytes(settings: ChainSettings, num_parameters: int, localised: bool) -> int:
    """Of the model's copies and what a step makes of them; activations, which depend on the model, come on top.

    A model too large to hold its gradient at once is taken to be in bfloat16, as nobody runs it otherwise.
    """
    of_displacement = 2 if settings.displacement == "bfloat16" else 4
    plain = settings.gradient == "minibatch" and not settings.control_variate and not localised
    if plain and 4 * num_parameters > STEP_IN_BACKWARD_BYTES:
        carried = {"sgld": 1, "sghmc": 2, "rmsprop_sgld": 2}[settings.sampler]
        return num_parameters * (2 + carried * of_displacement)
    models = 1 + (settings.gradient == "difference") + settings.control_variate
    steps = STEP_TENSORS[settings.sampler] - 1 + (2 if localised else 0)
    displacements = 1 + settings.control_variate
    return num_parameters * (4 * (models + steps) + of_displacement * displacements)


def check_memory(held: Holdings, what: str, device: torch.device) -> None:
    """Refuses what cannot fit, before a chain is started."""
    free = free_bytes(device)
    how = "running sums" if held.streaming else "loss traces"
    if held.num_bytes > free:
        traces_are_kept = not held.streaming and held.by_sums < min(free, held.by_traces)
        smaller = "--set bif.keep_traces=false" if traces_are_kept else "fewer queries (--queries)"
        raise UsageError(
            f"bif needs {held.num_bytes / 2**30:.1f} GiB for {what} as {how} and scores, and {free / 2**30:.1f} GiB "
            f"are free; take {smaller}"
        )
    logger.info(
        "bif: %.2f GiB for %s as %s, beside the model; %.1f GiB free", held.num_bytes / 2**30, what, how, free / 2**30
    )
