"""Per-token BIF: how every token of a training sequence bears on every token of a query, for chosen pairs.

    scores = token_bif(method, problem, pairs=[(0, 17), (3, 250)])       # (query, training sequence), into the problem
    scores.covariance[0]                                                 # (query tokens, training tokens)

The paper's BIF(z_i,s ; z_j,s') = -Cov(loss_i,s, loss_j,s') over the draws of the very chains that `bif` runs with these
options and this seed. A sequence's loss is the mean over its tokens, and a covariance is linear in both: the average of
a pair's matrix over its tokens is the sequence-level score (implementation A, `scores.sequence`) to rounding.

Nothing of a draw is kept but sums: a pair costs a few times (query tokens x training tokens) numbers, whatever the
number of draws. Pairs that do not fit into memory together are done a block at a time; the chains are functions of the
seed, so each block sees the same draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baselines.bif.covariance import StreamingCovariance, covariance
from baselines.bif.diagnostics import ChainHealth, dropped_chains, judge_chain, require_healthy
from baselines.bif.engine import Workbench
from baselines.bif.method import BIF
from baselines.method import Problem
from baselines.support.curvature import Metric
from baselines.support.memory import free_bytes
from retrain.errors import UsageError
from retrain.examples import Examples

Pair = tuple[int, int]  # (query, training sequence): positions in the problem's queries and attributed sequences
DRAWS_TOGETHER = 16  # draws whose token losses are held before they are added to the sums
MATRICES_A_PAIR = 4  # this chain's sums, those of the chains before, and two while they are joined
SHARE_OF_MEMORY = 0.6  # of what is free; the model and its gradients need the rest


@dataclass(frozen=True)
class TokenScores:
    """Signs as everywhere: negative where the training token helps the query token."""

    pairs: list[Pair]
    covariance: list[Tensor]  # (query tokens, training tokens) float32 each, on the CPU
    correlation: list[Tensor]  # the same, over both tokens' standard deviations
    sequence: Tensor  # (pairs,): sequence-level scores from the same draws
    sequence_correlation: Tensor
    diagnostics: dict[str, Any]


def pair_bytes(num_tokens: int) -> int:
    return 4 * MATRICES_A_PAIR * num_tokens * num_tokens


def token_bif(method: BIF, problem: Problem, pairs: Sequence[Pair], block: int | None = None) -> TokenScores:
    """`block` pairs are held at a time: by default as many as fit."""
    _check(problem, pairs)
    if method.control_variate:
        raise UsageError("tokens' covariances are sampled whole; take bif.control_variate=false")
    num_tokens = problem.train.targets.shape[1]
    free = free_bytes(problem.device)
    fixed = 4 * DRAWS_TOGETHER * num_tokens * 2 * len(pairs)
    fitting = int((SHARE_OF_MEMORY * free - fixed) // pair_bytes(num_tokens))
    if fitting < 1:
        raise UsageError(
            f"per-token bif needs {(fixed + pair_bytes(num_tokens)) / 2**30:.2f} GiB for {len(pairs)} pairs of "
            f"{num_tokens} tokens, one matrix at a time, and {SHARE_OF_MEMORY * free / 2**30:.2f} GiB of the "
            f"{free / 2**30:.2f} GiB free may be used; take fewer pairs or shorter sequences"
        )
    block = min(fitting, len(pairs)) if block is None else block
    blocks = [pairs[start : start + block] for start in range(0, len(pairs), block)]
    fitted = method.fit(problem)
    method = fitted.method  # with every number chosen
    total = len(blocks) * method.chains * (method.burn_in + method.draws)
    ticks = iter(problem.progress(range(total), total=total, description="bif: token draws"))
    parts = [_one_block(method, problem, fitted.metric, chosen, ticks) for chosen in blocks]
    list(ticks)  # closes the progress bar
    needed = fixed + block * pair_bytes(num_tokens)
    return TokenScores(
        pairs=list(pairs),
        covariance=[matrix for part in parts for matrix in part.covariance],
        correlation=[matrix for part in parts for matrix in part.correlation],
        sequence=torch.cat([part.sequence for part in parts]),
        sequence_correlation=torch.cat([part.sequence_correlation for part in parts]),
        diagnostics={
            **parts[0].diagnostics,
            **({} if fitted.pilot is None else {"pilot": fitted.pilot.shown()}),
            "blocks": len(blocks),
            "planned_bytes": needed,
        },
    )


def _check(problem: Problem, pairs: Sequence[Pair]) -> None:
    if problem.train.targets.dim() != 2:
        raise UsageError(f"task {problem.task.name} has no tokens: per-token scores are for sequences")
    if not pairs:
        raise UsageError("no pair was given; expected at least one (query, training sequence)")
    for query, train in pairs:
        if not (0 <= query < len(problem.queries) and 0 <= train < len(problem.attributed_indices)):
            raise UsageError(
                f"pair {query}:{train} is out of range; expected a query below {len(problem.queries)} and a training "
                f"sequence below {len(problem.attributed_indices)}"
            )


def _one_block(method: BIF, problem: Problem, metric: Metric | None, pairs: Sequence[Pair], ticks: Any) -> TokenScores:
    task, device = problem.task, problem.device
    queries, trains = sorted({query for query, _ in pairs}), sorted({train for _, train in pairs})
    chosen = [problem.queries.select(queries), problem.attributed.select(trains)]
    measured = Examples(*(torch.cat([getattr(c, name) for c in chosen]) for name in ("inputs", "targets"))).to(device)
    row = {("query", q): k for k, q in enumerate(queries)} | {
        ("train", i): len(queries) + k for k, i in enumerate(trains)
    }
    places = [(row["query", query], row["train", train]) for query, train in pairs]

    start = _token_losses(task, problem.model, measured, method.batch_size)  # what is summed is small: the change
    num_tokens = start.shape[1]
    start_mean = float(start[len(queries) :].mean())
    workbench = Workbench(method, task, problem.model, problem.train.to(device), measured, metric)
    totals = [StreamingCovariance(num_tokens, num_tokens, device) for _ in pairs]
    held = torch.empty(DRAWS_TOGETHER, *start.shape, device=device)
    verdicts: list[ChainHealth] = []
    sequence_traces, num_healthy = [], 0
    mean_losses = []
    for chain in range(method.chains):
        sums = [StreamingCovariance(num_tokens, num_tokens, device) for _ in pairs]
        trace = torch.empty(method.draws, len(measured), dtype=torch.float64, device=device)
        count = 0
        for draw, _ in enumerate(workbench.draws(problem.seed, chain, ticks)):
            held[count] = _token_losses(task, workbench.model, measured, method.batch_size) - start
            trace[draw] = held[count].double().mean(1)
            count += 1
            if count == DRAWS_TOGETHER or draw == method.draws - 1:
                for own, (query, train) in zip(sums, places, strict=True):
                    own.update(held[:count, query], held[:count, train])
                count = 0
        mean_losses.append(start_mean + trace[:, len(queries) :].mean(1).cpu().numpy())
        verdicts.append(judge_chain(chain, mean_losses[-1], start_mean, method.divergence_limit))
        if verdicts[-1].healthy:
            num_healthy += 1
            sequence_traces.append(trace)
            for total, own in zip(totals, sums, strict=True):
                total.add_chain(own, method.centring)  # type: ignore[arg-type]
    require_healthy(verdicts, method.min_chains, np.stack(mean_losses), "bif", method.divergence_hint())

    diagnostics = {"num_draws": num_healthy * method.draws, "dropped_chains": dropped_chains(verdicts)}
    return _scores_of(method, pairs, places, totals, torch.stack(sequence_traces), len(queries), diagnostics)


def _scores_of(
    method: BIF,
    pairs: Sequence[Pair],
    places: list[tuple[int, int]],
    totals: list[StreamingCovariance],
    traces: Tensor,
    num_queries: int,
    diagnostics: dict[str, Any],
) -> TokenScores:
    """From the chains' sums, a pair each, and the sequences' traces (chains, draws, sequences), queries first."""
    cross, query_scale, train_scale = covariance(
        traces[..., :num_queries],
        traces[..., num_queries:],
        method.centring,  # type: ignore[arg-type]
    )
    scaled = cross / _nonzero(query_scale)[:, None] / _nonzero(train_scale)
    at = [(query, train - num_queries) for query, train in places]
    covariances, correlations = [], []
    for total in totals:
        matrix, of_query, of_train = total.finish(method.centring)  # type: ignore[arg-type]
        covariances.append(-matrix.cpu())
        correlations.append(-(matrix / _nonzero(of_query)[:, None] / _nonzero(of_train)).cpu())
    return TokenScores(
        pairs=list(pairs),
        covariance=covariances,
        correlation=correlations,
        sequence=-torch.stack([cross[place] for place in at]).cpu(),
        sequence_correlation=-torch.stack([scaled[place] for place in at]).cpu(),
        diagnostics=diagnostics,
    )


def _nonzero(scale: Tensor) -> Tensor:
    """A token whose loss never moves has no covariance either: dividing by one keeps it zero."""
    return torch.where(scale > 0, scale, torch.ones_like(scale))


@torch.no_grad()
def _token_losses(task: Any, model: Any, examples: Examples, batch_size: int) -> Tensor:
    """(examples, tokens) float32."""
    return torch.cat([task.loss(model, batch).float() for batch in examples.batches(batch_size)])
