"""Runs chains and joins them: each is a part of the scores that can be made anywhere, in any order, in any process.

    runner = Runner(settings, problem, metric, streaming, saver)
    parts = [runner.chain(number) for number in range(settings.chains)]       # on one workbench, one after another
    joined = join(parts, ...)                                                 # the same bits, wherever they come from

A part holds the chain's mean losses, what the collector made of its draws, and its shadow's. That of a chain that ran
away holds the mean losses alone.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baselines.bif.collect import JoinedSums, JoinedTraces, Part, RunningSums, Traces, for_shadow, shadow_of
from baselines.bif.covariance import Agreement, Centring, degrees_of_freedom
from baselines.bif.diagnostics import ChainHealth, judge_chain
from baselines.bif.engine import Chain, Workbench
from baselines.bif.saving import Saver
from baselines.bif.settings import FROM_PILOT, ChainSettings
from baselines.method import Attribution, Problem
from baselines.support.curvature import Metric
from baselines.support.transfer import on_device
from retrain.errors import UsageError
from retrain.examples import Examples
from retrain.outputs import LOSS, output_of


def numbers_of(settings: ChainSettings) -> dict[str, float]:
    """What the pilot may have chosen: parts made under different numbers must never be joined."""
    return {name: float(getattr(settings, name)) for name in FROM_PILOT}


class Runner:
    """One workbench, and the chains that are run on it."""

    def __init__(
        self,
        settings: ChainSettings,
        problem: Problem,
        metric: Metric | None,
        *,
        streaming: bool,
        divergence_limit: float,
        saver: Saver,
    ):
        self.settings, self.problem, self.streaming = settings, problem, streaming
        self.divergence_limit, self.saver = divergence_limit, saver
        self.num_train, self.num_queries = len(problem.attributed_indices), len(problem.queries)
        train = problem.task.resident(on_device(problem.train, problem.device), problem.device)
        queries = problem.task.resident(on_device(problem.queries, problem.device), problem.device)
        if problem.pool is None:
            attributed = train.select(problem.attributed_indices)
        else:
            attributed = problem.task.resident(on_device(problem.attributed, problem.device), problem.device)
        measured = _joined_examples(attributed, queries)
        self.workbench = Workbench(settings, problem.task, problem.model, train, measured, metric)
        if problem.output != LOSS and settings.control_variate:
            raise UsageError(f"control_variate predicts losses alone; the output is {problem.output}")
        self._checkpoint = self._outputs(self.workbench.losses()).clone()  # no chain has moved yet
        self._start_loss = float(self._checkpoint[: self.num_train].mean())

    def chain(self, number: int, ticks: Iterator, *, keep: bool) -> dict[str, Tensor]:
        """One chain's part, on the device. With `keep` the finished part is saved too, where that is worth it."""
        name, start = f"chain-{number}", time.monotonic()
        earlier, taken = self.saver.load(name) or (None, 0)
        if earlier is not None and taken is None:
            _skip(ticks, self.settings.burn_in + self.settings.draws)
            return earlier
        collectors = {"own": self._collector()}
        if self.settings.control_variate:
            collectors["shadow"] = self._collector()
        chain = Chain(self.workbench, self.problem.seed, number)
        if earlier is not None and taken is not None:
            self._restore(chain, collectors, earlier, taken)
            _skip(ticks, taken)
        for losses in chain.draws(ticks):
            if losses is not None:
                collectors["own"].add(self._outputs(losses))
                if "shadow" in collectors:
                    collectors["shadow"].add(self.workbench.shadow_losses())
            self.saver.progress(name, chain.taken, lambda: _state(chain, collectors))
        part = self._part(number, collectors)
        if keep:
            self.saver.finished(name, part, time.monotonic() - start)
        return part

    def _outputs(self, losses: Tensor) -> Tensor:
        """The queries' losses in the output that is asked about, in place; training losses stay losses."""
        if self.problem.output != LOSS:
            losses[self.num_train :] = output_of(losses[self.num_train :], self.problem.output)
        return losses

    def _collector(self) -> Traces | RunningSums:
        sizes = (self.settings.draws, self.num_train, self.num_queries, self.problem.device)
        if not self.streaming:
            return Traces(*sizes)
        return RunningSums(*sizes, checkpoint=self._checkpoint, train_covariance=self.settings.train_covariance)

    def _part(self, number: int, collectors: Mapping[str, Traces | RunningSums]) -> dict[str, Tensor]:
        mean_losses = collectors["own"].mean_losses()
        verdict = judge_chain(number, mean_losses.cpu().numpy(), self._start_loss, self.divergence_limit)
        part = {
            "numbers": torch.tensor(list(numbers_of(self.settings).values()), dtype=torch.float64),
            "start_loss": torch.tensor(self._start_loss, dtype=torch.float64),
            "mean_losses": mean_losses,
        }
        if not verdict.healthy:
            return part
        if "shadow" in collectors:
            part |= for_shadow(collectors["shadow"].part())
        return part | collectors["own"].part()

    def _restore(self, chain: Chain, collectors: Mapping[str, Traces | RunningSums], state: Part, taken: int) -> None:
        split: dict[str, dict[str, Tensor]] = {"chain": {}, "own": {}, "shadow": {}}
        for key, value in state.items():
            whose, _, rest = key.partition("/")
            split[whose][rest] = value
        chain.restore(split["chain"], taken)
        for whose, collector in collectors.items():
            collector.restore(split[whose])


def _skip(ticks: Iterator, count: int) -> None:
    for _ in range(count):
        next(ticks, None)


def _state(chain: Chain, collectors: Mapping[str, Traces | RunningSums]) -> dict[str, Tensor]:
    state = {f"chain/{name}": value for name, value in chain.state().items()}
    for whose, collector in collectors.items():
        state |= {f"{whose}/{name}": value for name, value in collector.state().items()}
    return state


@dataclass
class Joined:
    """Every healthy chain together."""

    chains: JoinedTraces | JoinedSums
    shadows: JoinedTraces | JoinedSums | None
    agreement: Agreement | None
    verdicts: list[ChainHealth]
    mean_losses: np.ndarray  # (all chains, draws)

    @property
    def healthy_mean_losses(self) -> np.ndarray:
        return self.mean_losses[[verdict.chain for verdict in self.verdicts if verdict.healthy]]

    @property
    def num_healthy(self) -> int:
        return sum(verdict.healthy for verdict in self.verdicts)


def join(
    parts: Iterable[Part],
    settings: ChainSettings,
    problem: Problem,
    *,
    centring: Centring,
    streaming: bool,
    shrinkage: bool,
    divergence_limit: float,
) -> Joined:
    """Takes one part after another, in the chains' order: on a GPU no more than one of them is there at a time."""
    sizes: Any = (len(problem.attributed_indices), len(problem.queries), centring, problem.device)
    sizes += (settings.train_covariance,)
    kind = JoinedSums if streaming else JoinedTraces
    chains, shadows = kind(*sizes), kind(*sizes) if settings.control_variate else None
    agreement = Agreement() if shrinkage else None
    verdicts: list[ChainHealth] = []
    mean_losses: list[np.ndarray] = []
    for part in parts:  # no enumerate: it would hold the last part while the next one is made
        number = len(verdicts)
        _check_numbers(part, settings, number)
        mean_losses.append(part["mean_losses"].cpu().numpy())
        verdicts.append(judge_chain(number, mean_losses[-1], float(part["start_loss"]), divergence_limit))
        if verdicts[-1].healthy:
            chains.add(part, settings.draws)
            if shadows is not None:
                shadows.add(shadow_of(part), settings.draws)
            if agreement is not None and shadows is not None:
                agreement.add(*chains.of_last_chain(), *shadows.of_last_chain())
        chains.forget_last()
        if shadows is not None:
            shadows.forget_last()
        del part
    return Joined(chains, shadows, agreement, verdicts, np.stack(mean_losses))


def _check_numbers(part: Part, settings: ChainSettings, number: int) -> None:
    wanted = numbers_of(settings)
    found = dict(zip(wanted, part["numbers"].tolist(), strict=True))
    if found != wanted:
        raise UsageError(
            f"chain {number} ran with {found}, and {wanted} are expected: the pilot chose differently where it ran; "
            "give these numbers, or make the chains again from one fit"
        )


def _joined_examples(first: Examples, second: Examples) -> Examples:
    return Examples(torch.cat([first.inputs, second.inputs]), torch.cat([first.targets, second.targets]))


# ---- the control variate: what the shadow's covariance must be, and putting it in place of what it was ----
#
# A shadow is driven by a chain's own noise under the prior alone. For losses linear in the weights its covariance is
# kappa times the inner product of gradients, exactly; `baselines/bif/method.py` has the reasons.

LEAST_VARIANCE = 0.01  # a training example's variance is at least this share of its linear part: differences are noisy


def prior_variance(settings: ChainSettings, centring: Centring, num_chains: int) -> float:
    """kappa: the expected sample variance of one coordinate of the shadow, over all draws of so many chains.

    The shadow is a first-order autoregression from 0: x' = a x + N(0, step_size), a = 1 - step_size gamma / 2. Draw t
    has variance v_t, and draws t and t + k covariance r^k v_t, r = a^thinning: a chain's mean has the variance
    sum_t v_t (1 + 2 (r + r^2 + ... + r^(draws - 1 - t))) / draws^2.
    """
    draws, thinning = settings.draws, settings.thinning
    a = 1 - settings.step_size * settings.gamma / 2
    steps = thinning * (settings.burn_in + np.arange(draws))
    variance = settings.step_size * (1 - np.power(a, 2.0 * steps)) / (1 - a * a)
    powers = np.power(a**thinning, np.arange(1.0, draws))
    later = np.concatenate([[0.0], np.cumsum(powers)])[::-1]
    of_chain_mean = (variance * (1 + 2 * later)).sum() / draws**2
    # Each chain's mean takes its own variance away; about a common mean, only the num_chains-th part of it.
    taken = of_chain_mean / num_chains if centring == "pooled" else of_chain_mean
    freedom = degrees_of_freedom(num_chains, draws, centring)
    return float(num_chains * draws * (variance.mean() - taken) / freedom)


def add_linear_part(
    cross: Tensor,
    train_scale: Tensor,
    shadow: tuple[Tensor, Tensor, Tensor],
    linear: Attribution,
    kappa: float,
    agreement: Agreement | None,
) -> dict[str, float]:
    """Puts what is known exactly in the place of what the shadow sampled; returns how much of the result was sampled.

    `cross` (q, n) and `train_scale` (n,) are the chains' covariances and standard deviations, changed in place;
    `shadow` has its own, and `linear` minus the gradients' inner products, of which kappa times is the exact
    covariance of linear losses.
    """
    shadow_cross, _, shadow_scale = shadow
    assert linear.train_scale is not None
    exact = kappa * linear.train_scale.to(cross.device).square()
    excess = train_scale.square() - shadow_scale.square()
    cross -= shadow_cross
    shares = {}
    if agreement is not None:
        of_scores, of_variances = agreement.shares()
        cross *= of_scores[:, None]
        excess *= of_variances
        shares = {"kept_difference_median": float(of_scores.median()), "kept_variance": float(of_variances)}
    sampled = cross.norm()
    cross.sub_(linear.scores.to(cross.device), alpha=kappa)
    train_scale.copy_((exact + excess).clamp(min=LEAST_VARIANCE * exact).sqrt())
    return {**shares, "sampled_share": float(sampled / cross.norm())}
