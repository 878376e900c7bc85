"""bif: the local Bayesian influence function, minus the posterior covariance of training and query losses.

The paper's alg:sgld: several chains start at the checkpoint and sample the localised posterior; at every draw the loss
of every attributed example and query is recorded; BIF(i, j) = -Cov(loss_i, loss_j) over the draws (eq:bayesian-if).
Minibatches come from the whole training set. `normalised` scores divide by the training example's own standard
deviation; with `query_normalised` too they are the paper's normalised BIF, a correlation.

Chains that diverge are dropped with their reason in the record, and the method fails if too few are left: a covariance
over a chain that ran away is a number about nothing.
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from baselines.bif.covariance import CENTRINGS, covariance
from baselines.bif.diagnostics import ChainHealth, effective_sample_size, judge_chain, split_rhat
from baselines.bif.sampler import SAMPLERS, Position
from baselines.method import Attribution, Method, Problem, batch_size_option
from baselines.support.copies import detached_copy
from baselines.support.gradients import trainable_parameters
from baselines.support.memory import free_bytes
from retrain.examples import Examples
from retrain.plugins import UsageError
from retrain.task import Task

_MINIBATCH_STREAM, _NOISE_STREAM = 11, 12
DIAGNOSED_EXAMPLES = 200  # R-hat and ESS of this many examples' traces stand for all


class DivergedError(FloatingPointError):
    """Too few chains are healthy; `mean_losses` (chains, draws) shows where they went."""

    def __init__(self, message: str, mean_losses: np.ndarray):
        super().__init__(message)
        self.mean_losses = mean_losses


@dataclass(frozen=True, kw_only=True)
class BIF(Method):
    """Defaults are the paper's for the ResNet-9 (tab:bif_hyperparam_summary); a task may recommend its own."""

    version: ClassVar[int] = 1

    sampler: str = "sgld"
    chains: int = 4
    draws: int = 100  # per chain, after burn-in
    burn_in: int = 0  # draws discarded at the start of each chain
    thinning: int = 1  # sampler steps between draws
    step_size: float = 1e-5
    n_beta: float = 200.0  # effective number of samples: the weight of the mean loss
    gamma: float = 10_000.0  # localisation: precision of the Gaussian around the checkpoint
    minibatch: int = 1024
    parameters: str = ""  # regular expression: only parameters whose name it finds are sampled; empty: all trainable
    centring: str = "pooled"  # or "chain": centre within each chain, which ignores differences between them
    query_normalised: bool = False  # also divide by the query's standard deviation: correlations
    divergence_limit: float = 5.0  # nats above the checkpoint's mean loss at which a chain has run away
    min_chains: int = 1  # fewer healthy chains than this is a failure
    keep_traces: bool = False  # store every loss trace beside the scores, for budget curves
    batch_size: int = batch_size_option(5000)

    def __post_init__(self) -> None:
        for name, choices in (("sampler", tuple(SAMPLERS)), ("centring", CENTRINGS)):
            if getattr(self, name) not in choices:
                raise ValueError(f'{name} is "{getattr(self, name)}"; available: {", ".join(choices)}')
        for name in ("chains", "draws", "thinning", "minibatch", "min_chains", "step_size", "n_beta"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a positive number")
        if self.chains * self.draws < 2:
            raise ValueError(f"{self.chains} chains of {self.draws} draws; a covariance needs at least 2 draws")
        if self.burn_in < 0 or self.gamma < 0:
            raise ValueError("burn_in and gamma must not be negative")

    def trace_bytes(self, num_examples: int) -> int:
        return 4 * self.chains * self.draws * num_examples

    def score(self, problem: Problem, state: Any) -> Attribution:
        num_train = len(problem.attributed_indices)
        num_examples = num_train + len(problem.queries)
        needed = 2 * self.trace_bytes(num_examples) + 4 * num_train * len(problem.queries)
        free = free_bytes(problem.device)
        if needed > free:
            raise UsageError(
                f"bif needs {needed / 2**30:.1f} GiB for {self.chains} x {self.draws} draws of {num_examples} losses "
                f"and the {num_train} x {len(problem.queries)} scores, and {free / 2**30:.1f} GiB are free; "
                "take fewer draws (--set bif.draws=...) or fewer queries (--queries)"
            )
        measured = Examples(
            torch.cat([problem.attributed.inputs, problem.queries.inputs]),
            torch.cat([problem.attributed.targets, problem.queries.targets]),
        ).to(problem.device)
        train = problem.train.to(problem.device)

        total = self.chains * (self.burn_in + self.draws)
        ticks = iter(problem.progress(range(total), total=total, description="bif: draws"))
        start_loss = float(problem.task.losses(problem.model, problem.attributed, problem.device).mean())
        traces = []
        for chain in range(self.chains):
            trace = run_chain(self, problem.task, problem.model, train, measured, problem.seed, chain, ticks)
            traces.append(trace)
        list(ticks)  # closes the progress bar
        mean_losses = torch.stack([trace[:, :num_train].mean(1) for trace in traces]).cpu().numpy()
        verdicts = [
            judge_chain(chain, losses, start_loss, self.divergence_limit) for chain, losses in enumerate(mean_losses)
        ]
        healthy = self._healthy(verdicts, mean_losses)
        kept = torch.stack([traces[chain] for chain in healthy])  # (chains, draws, n + q)
        del traces
        cross, query_scale, train_scale = covariance(kept[..., num_train:], kept[..., :num_train], self.centring)  # type: ignore[arg-type]
        if self.query_normalised:
            cross = cross / torch.where(query_scale > 0, query_scale, 1.0)[:, None]
        arrays = {"mean_loss_trace": kept[..., :num_train].mean(-1).cpu()}
        if self.keep_traces:
            arrays["loss_traces"] = kept.cpu()
        return Attribution(
            scores=-cross.cpu(),
            train_scale=train_scale.cpu(),
            diagnostics=_diagnose(kept, num_train, verdicts),
            arrays=arrays,
        )

    def _healthy(self, verdicts: list[ChainHealth], mean_losses: np.ndarray) -> list[int]:
        healthy = [verdict.chain for verdict in verdicts if verdict.healthy]
        if len(healthy) < self.min_chains:
            reasons = "; ".join(f"chain {v.chain}: {v.reason}" for v in verdicts if not v.healthy)
            raise DivergedError(
                f"{len(healthy)} of {self.chains} bif chains are healthy, {self.min_chains} needed ({reasons}); "
                "try a smaller bif.step_size or a larger bif.gamma",
                mean_losses,
            )
        return healthy


def run_chain(
    method: BIF,
    task: Task,
    checkpoint: nn.Module,
    train: Examples,
    measured: Examples,
    seed: int,
    chain: int,
    ticks: Any,
) -> Tensor:
    """One chain's losses, (draws, examples) float32 on the device; a function of (seed, chain) alone."""
    device = train.inputs.device
    model = detached_copy(checkpoint)
    sampled = sampled_parameters(model, method.parameters)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in sampled:
        parameter.requires_grad_(True)
    position = Position([p.data for p in sampled], [p.data.clone() for p in sampled])
    step = SAMPLERS[method.sampler]
    noise = torch.Generator(device).manual_seed(_seed(seed, chain, _NOISE_STREAM))
    minibatches = torch.Generator(device).manual_seed(_seed(seed, chain, _MINIBATCH_STREAM))
    trace = torch.empty(method.draws, len(measured), device=device)
    for draw in range(method.burn_in + method.draws):
        next(ticks, None)
        if draw >= method.burn_in:
            record(task, model, measured, method.batch_size, trace[draw - method.burn_in])
        for _ in range(method.thinning):
            gradient = minibatch_gradient(method, task, model, sampled, train, minibatches)
            step(position, gradient, method.gamma, method.step_size, noise)
    return trace


def sampled_parameters(model: nn.Module, pattern: str) -> list[nn.Parameter]:
    chosen = [parameter for name, parameter in trainable_parameters(model).items() if re.search(pattern, name)]
    if not chosen:
        raise UsageError(f'bif.parameters is "{pattern}", which no trainable parameter\'s name matches')
    return chosen


@torch.no_grad()
def record(task: Task, model: nn.Module, examples: Examples, batch_size: int, out: Tensor) -> None:
    """Every example's loss at the model's present weights, into out (examples,)."""
    start = 0
    for batch in examples.batches(batch_size):
        out[start : start + len(batch[0])] = task.example_loss(model, batch)
        start += len(batch[0])


def minibatch_gradient(
    method: BIF, task: Task, model: nn.Module, sampled: list[nn.Parameter], train: Examples, generator: torch.Generator
) -> list[Tensor]:
    """n_beta times the minibatch's mean gradient; the whole training set where the minibatch is as large."""
    size = min(method.minibatch, len(train))
    if size < len(train):
        chosen = torch.randperm(len(train), generator=generator, device=train.inputs.device)[:size]
        batch = (train.inputs[chosen], train.targets[chosen])
    else:
        batch = (train.inputs, train.targets)
    with torch.enable_grad():
        loss = task.example_loss(model, batch).mean() * method.n_beta
        return list(torch.autograd.grad(loss, sampled))


def _seed(seed: int, chain: int, stream: int) -> int:
    return int(np.random.SeedSequence([seed, chain, stream]).generate_state(1, np.uint64)[0] >> 1)


def _diagnose(kept: Tensor, num_train: int, verdicts: list[ChainHealth]) -> dict[str, Any]:
    """R-hat and ESS of the mean training loss, and of a spread of single examples' losses."""
    chosen = torch.linspace(0, kept.shape[-1] - 1, min(DIAGNOSED_EXAMPLES, kept.shape[-1])).long()
    examples = kept[..., chosen.to(kept.device)].cpu().numpy()
    mean = kept[..., :num_train].mean(-1).cpu().numpy()
    return {
        "rhat": _median(split_rhat(mean)),
        "ess": _median(effective_sample_size(mean)),
        "rhat_examples_median": _median(split_rhat(examples)),
        "ess_examples_median": _median(effective_sample_size(examples)),
        "num_draws": int(kept.shape[0] * kept.shape[1]),
        "dropped_chains": [f"chain {v.chain}: {v.reason}" for v in verdicts if not v.healthy],
    }


def _median(values: np.ndarray) -> float | None:
    """Of the defined values; None where too few draws leave none."""
    defined = np.asarray(values)[np.isfinite(values)]
    return float(np.median(defined)) if defined.size else None
