"""BIF with the paper's own observables: at every draw the loss of every token is recorded, not of every sequence.

The covariance is of every counted query token with every training token: (query tokens) x (training tokens) numbers in
place of queries x sequences, held as running sums. Draws are those of `bif` with the same options and seed, and the
forward passes are the same: what is added is the sums. A sequence's loss is the mean over its tokens, so the means of
the sums are `bif`'s scores; a test holds that.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from baselines.bif.covariance import StreamingCovariance
from baselines.bif.diagnostics import judge_chain
from baselines.bif.engine import Measured, Workbench
from baselines.bif.method import BIF
from baselines.method import Attribution, Problem
from baselines.support.memory import free_bytes
from bench.scaling.problem import NOT_COUNTED, CompletionLoss
from retrain.errors import UsageError
from retrain.examples import Examples
from retrain.task import Task

DRAWS_AT_ONCE = 16  # draws whose token losses are held before they join the sums
SUMS_HELD = 3  # of the present chain, of all chains, and the product that joins a block of draws


@dataclass(frozen=True, kw_only=True)
class TokenBIF(BIF):
    def score(self, problem: Problem, state: Any) -> Attribution:
        train = problem.task.resident(problem.train, problem.device)
        queries = problem.task.resident(problem.queries, problem.device)
        attributed = train.select(problem.attributed_indices)
        measured = Examples(
            torch.cat([attributed.inputs, queries.inputs]), torch.cat([attributed.targets, queries.targets])
        )
        counted = measured.targets != NOT_COUNTED
        num_train = int(counted[: len(attributed)].sum())
        num_queries = int(counted[len(attributed) :].sum())
        needed = self._check_room(num_train, num_queries, problem.device)

        total_draws = self.chains * (self.burn_in + self.draws)
        ticks = iter(problem.progress(range(total_draws), total=total_draws, description="bif: token draws"))
        workbench = Workbench(self, problem.task, problem.model, train, measured, None)
        workbench.losses = TokenLosses(problem.task, workbench.model, measured, self.batch_size)
        chosen = counted.flatten().nonzero()[:, 0]  # training tokens first
        start = workbench.losses().flatten()[chosen]  # sums are of the change, which is small
        sums = StreamingCovariance(num_queries, num_train, problem.device)
        held = torch.empty(min(DRAWS_AT_ONCE, self.draws), num_train + num_queries, device=problem.device)
        start_loss = float(start[:num_train].mean())
        verdicts, traces = [], []
        for chain in range(self.chains):
            chain_sums = StreamingCovariance(num_queries, num_train, problem.device)
            trace = torch.empty(self.draws, device=problem.device)
            filled = 0
            for draw, losses in enumerate(workbench.draws(problem.seed, chain, ticks)):
                torch.sub(losses.flatten()[chosen], start, out=held[filled])
                trace[draw] = held[filled, :num_train].mean() + start_loss
                filled += 1
                if filled == len(held) or draw == self.draws - 1:
                    chain_sums.update(held[:filled, num_train:], held[:filled, :num_train])
                    filled = 0
            traces.append(trace.cpu().numpy())
            verdicts.append(judge_chain(chain, traces[-1], start_loss, self.divergence_limit))
            if verdicts[-1].healthy:
                sums.add_chain(chain_sums, self.centring)  # type: ignore[arg-type]
        list(ticks)  # closes the progress bar
        del workbench
        if sum(verdict.healthy for verdict in verdicts) < self.min_chains:
            raise FloatingPointError("; ".join(f"chain {v.chain}: {v.reason}" for v in verdicts if not v.healthy))
        cross, _, _ = sums.finish(self.centring)  # type: ignore[arg-type]
        scores = _sequence_means(cross, counted[: len(attributed)], counted[len(attributed) :])
        kept = {"token_pairs": cross.numel(), "token_bytes": cross.numel() * 4, "planned_bytes": needed}
        return Attribution(scores=-scores.cpu(), diagnostics=kept)

    def _check_room(self, num_train: int, num_queries: int, device: torch.device) -> int:
        needed, free = 4 * SUMS_HELD * num_train * num_queries, free_bytes(device)
        if needed > free:
            raise UsageError(
                f"out of memory: covariances of {num_queries:,} query tokens with {num_train:,} training tokens take "
                f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free; take fewer queries or sequences"
            )
        return needed


class TokenLosses(Measured):
    """Every token's loss at the model's present weights: (examples, tokens) float32, 0 where a token is not counted."""

    def __init__(self, task: Task, model: nn.Module, examples: Examples, batch_size: int):
        self._tokens = torch.zeros(examples.targets.shape, device=examples.targets.device)
        super().__init__(task, model, examples, batch_size)

    @torch.no_grad()
    def _measure(self) -> None:
        start = 0
        for inputs, targets in self.examples.batches(self.batch_size):
            weights = CompletionLoss.weights(targets)  # the task's losses are weighted for a mean over all positions
            losses = self.task.loss(self.model, (inputs, targets)) / weights.clamp(min=1e-12)
            self._tokens[start : start + len(targets)] = torch.where(weights > 0, losses, 0.0)
            start += len(targets)

    def __call__(self) -> Tensor:
        """The next call overwrites it."""
        super().__call__()
        return self._tokens


def _sequence_means(cross: Tensor, train_counted: Tensor, query_counted: Tensor) -> Tensor:
    """(q, n): the mean of each pair's block of (query tokens, training tokens)."""
    spans = [counted.sum(-1) for counted in (query_counted, train_counted)]
    rows, columns = (torch.repeat_interleave(torch.arange(len(span), device=span.device), span) for span in spans)
    by_train = torch.zeros(len(cross), len(spans[1]), device=cross.device).index_add_(1, columns, cross)
    by_both = torch.zeros(len(spans[0]), len(spans[1]), device=cross.device).index_add_(0, rows, by_train)
    return by_both / spans[0][:, None] / spans[1]
