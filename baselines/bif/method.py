"""bif: the local Bayesian influence function, minus the posterior covariance of training and query losses.

The paper's alg:sgld: several chains start at the checkpoint and sample the localised posterior; at every draw the loss
of every attributed example and query is recorded; BIF(i, j) = -Cov(loss_i, loss_j) over the draws (eq:bayesian-if).
Minibatches come from the whole training set. `normalised` scores divide by the training example's own standard
deviation; with `query_normalised` too they are the paper's normalised BIF, a correlation.

With `control_variate` every chain has a shadow: driven by the same noise but by the prior alone, so that the covariance
of its displacement is known to be kappa I. For losses linear in the weights the shadow's covariance is then kappa times
the inner product of gradients, which is computed exactly; only the difference between chain and shadow is left to
sampling, and that is small where the two stay close together (n_beta times the curvature below gamma). What the prior
alone would give beyond the linear part is taken off with the shadow: it is common to both, and no part of the answer.
With `shrinkage` as much of the sampled difference is added to each query's scores as the chains agree on (James-Stein:
one less the share of its square that is noise, judged by how much the chains differ): a difference that is all noise is
left out.

The paper's localising Gaussian is isotropic, of precision gamma. With `localiser` "kronecker" its precision is gamma (1
+ H / damping), H the loss's curvature as EK-FAC pictures it (`baselines/support/curvature.py`): as wide as ever where
the loss is flat, and narrower where it is curved, so that the posterior is shaped like the loss's own at an inverse
temperature of gamma / damping without the chain having to find that shape. Samplers move in coordinates in which that
Gaussian is round. The linear part of the control variate is then g^T (1 + H / damping)^-1 g'.

Chains that diverge are dropped with their reason in the record, and the method fails if too few are left: a covariance
over a chain that ran away is a number about nothing.
"""

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from baselines.bif.covariance import BLOCK, CENTRINGS, Agreement, Kept, Streamed, degrees_of_freedom
from baselines.bif.diagnostics import ChainHealth, effective_sample_size, judge_chain, split_rhat
from baselines.bif.engine import DISPLACEMENTS, GRADIENTS, Workbench, sampled_names
from baselines.bif.sampler import SAMPLERS
from baselines.method import Attribution, Method, Problem, batch_size_option
from baselines.support.curvature import GradientsInMetric, Metric, fit_curvature
from baselines.support.gradients import PerExampleGradients
from baselines.support.inner_products import inner_products
from baselines.support.memory import free_bytes
from retrain.errors import UsageError
from retrain.examples import Examples

logger = logging.getLogger("tda-bench")

LOCALISERS = ("isotropic", "kronecker")
LEAST_VARIANCE = 0.01  # a training example's variance is at least this share of its linear part: differences are noisy


class DivergedError(FloatingPointError):
    """Too few chains are healthy; `mean_losses` (chains, draws) shows where they went."""

    def __init__(self, message: str, mean_losses: np.ndarray):
        super().__init__(message)
        self.mean_losses = mean_losses


@dataclass(frozen=True, kw_only=True)
class BIF(Method):
    """Defaults are the paper's for the ResNet-9 (tab:bif_hyperparam_summary); a task may recommend its own."""

    version: ClassVar[int] = 1
    warm_up: ClassVar[dict[str, Any]] = {"draws": 2, "burn_in": 0}

    sampler: str = "sgld"
    chains: int = 4
    draws: int = 100  # per chain, after burn-in; without one the first is the checkpoint itself
    burn_in: int = 0  # draws discarded at the start of each chain
    thinning: int = 1  # sampler steps between draws
    step_size: float = 1e-5
    n_beta: float = 200.0  # effective number of samples: the weight of the mean loss
    gamma: float = 10_000.0  # localisation: precision of the Gaussian around the checkpoint
    localiser: str = "isotropic"  # or "kronecker": of precision gamma (1 + curvature / damping)
    damping: float = 0.1  # of the kronecker localiser: curvature well below it counts as none
    fit_examples: int = 10_000  # training examples that the kronecker localiser's curvature is taken from, at most
    minibatch: int = 1024
    gradient: str = "minibatch"  # or "difference": less the same minibatch's at the checkpoint (engine.Gradient)
    parameters: str = ""  # regular expression: only parameters whose name it finds are sampled; empty: all trainable
    centring: str = "pooled"  # or "chain": centre within each chain, which ignores differences between them
    query_normalised: bool = False  # also divide by the query's standard deviation: correlations
    divergence_limit: float = 5.0  # nats above the checkpoint's mean loss at which a chain has run away
    min_chains: int = 1  # fewer healthy chains than this is a failure
    control_variate: bool = False  # sample only what differs from the prior's own, exactly known covariance
    shrinkage: bool = False  # of what the control variate leaves to sampling: keep what the chains agree on
    displacement: str = "float32"  # what a chain keeps of w - w*; bfloat16 halves it, for models of billions
    keep_traces: bool = False  # store every loss trace beside the scores, for budget curves
    batch_size: int = batch_size_option(5000)
    gradient_batch_size: int = batch_size_option(250)  # of the control variate's and the curvature's gradients

    def __post_init__(self) -> None:
        for name, choices in (
            ("sampler", tuple(SAMPLERS)),
            ("gradient", GRADIENTS),
            ("centring", CENTRINGS),
            ("displacement", tuple(DISPLACEMENTS)),
            ("localiser", LOCALISERS),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f'{name} is "{getattr(self, name)}"; available: {", ".join(choices)}')
        positive = ("chains", "draws", "thinning", "minibatch", "min_chains", "step_size", "n_beta")
        for name in (*positive, "damping", "fit_examples"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a positive number")
        if self.chains * self.draws < 2 or (self.draws < 2 and not self.burn_in):
            raise ValueError(
                f"{self.chains} chains of {self.draws} draws; a covariance needs at least 2 draws, and without burn_in "
                "the first of every chain is the checkpoint itself"
            )
        if self.burn_in < 0 or self.gamma < 0:
            raise ValueError("burn_in and gamma must not be negative")
        if self.control_variate and (self.sampler != "sgld" or not 0 < self.step_size * self.gamma < 4):
            raise ValueError(
                f"control_variate takes the sgld sampler with step_size * gamma between 0 and 4, not {self.sampler} "
                f"with {self.step_size * self.gamma:g}: the prior's own chain must be a stable autoregression"
            )
        if self.control_variate and (self.query_normalised or self.keep_traces):
            raise ValueError("control_variate goes with neither query_normalised nor keep_traces")
        if self.shrinkage and (not self.control_variate or self.chains < 2 or self.draws < 2):
            raise ValueError("shrinkage goes with control_variate and at least 2 chains of 2 draws, which it compares")

    @property
    def config(self) -> dict[str, Any]:
        """The curvature's labels are sampled batch by batch, so another batch size is another sample: another key."""
        default = type(self).__dataclass_fields__["gradient_batch_size"].default
        if self.localiser == "isotropic" or self.gradient_batch_size == default:
            return super().config
        return super().config | {"gradient_batch_size": self.gradient_batch_size}

    def fit(self, problem: Problem) -> Metric | None:
        """The kronecker localiser's coordinates, from the curvature on random training examples and sampled labels."""
        if self.localiser == "isotropic":
            return None
        torch.manual_seed(problem.seed)  # as the harness does: per-token scores come without it
        count = min(self.fit_examples, len(problem.train))
        chosen = np.random.default_rng(problem.seed).permutation(len(problem.train))[:count]
        loss, examples = problem.task.loss_function, problem.train.select(chosen)
        blocks = fit_curvature(
            self._gradients(problem), loss, examples, self.gradient_batch_size, problem.device, problem.progress
        )
        return Metric(blocks, self.damping)

    def _gradients(self, problem: Problem) -> PerExampleGradients:
        names = sampled_names(problem.model, self.parameters)
        return PerExampleGradients(problem.model, problem.task.loss_function.per_example, names)

    def score(self, problem: Problem, state: Metric | None) -> Attribution:
        metric = self.fit(problem) if state is None else state
        num_train, num_queries = len(problem.attributed_indices), len(problem.queries)
        streaming, needed = self._plan_memory(num_train, num_queries, problem.device)
        inner: Attribution | None = None
        if self.control_variate:
            plain = self._gradients(problem)
            gradients = plain if metric is None else GradientsInMetric(plain, metric)
            inner = inner_products(problem, gradients, self.gradient_batch_size, "bif: linear part")
        train = problem.task.resident(problem.train, problem.device)
        queries = problem.task.resident(problem.queries, problem.device)
        measured = _joined(train.select(problem.attributed_indices), queries)

        total = self.chains * (self.burn_in + self.draws)
        ticks = iter(problem.progress(range(total), total=total, description="bif: draws"))
        workbench = Workbench(self, problem.task, problem.model, train, measured, metric)
        checkpoint = workbench.losses().clone()  # no chain has moved yet
        start_loss = float(checkpoint[:num_train].mean())

        def collect() -> Kept | Streamed:
            sizes: Any = (self.draws, num_train, num_queries, self.centring, problem.device)
            return Streamed(*sizes, checkpoint=checkpoint) if streaming else Kept(*sizes)

        collector, shadow = collect(), collect() if self.control_variate else None
        agreement = Agreement() if self.shrinkage else None
        verdicts, mean_losses = [], []
        for chain in range(self.chains):
            collector.start()
            if shadow is not None:
                shadow.start()
            for draw, losses in enumerate(workbench.draws(problem.seed, chain, ticks)):
                collector.add(draw, losses)
                if shadow is not None:
                    shadow.add(draw, workbench.shadow_losses())
            mean_losses.append(collector.mean_losses())
            verdicts.append(judge_chain(chain, mean_losses[-1], start_loss, self.divergence_limit))
            if verdicts[-1].healthy:
                collector.keep()
                if shadow is not None:
                    shadow.keep()
                if agreement is not None and shadow is not None:
                    agreement.add(*collector.of_last_chain(), *shadow.of_last_chain())
        list(ticks)  # closes the progress bar
        del workbench
        self._check_health(verdicts, np.stack(mean_losses))

        shares: dict[str, float] = {}
        cross, query_scale, train_scale = collector.covariance()
        if shadow is not None and inner is not None:
            kappa = self.prior_variance(num_chains=sum(verdict.healthy for verdict in verdicts))
            shares = _add_linear_part(cross, train_scale, shadow, inner, kappa, agreement)
        if self.query_normalised:
            cross = cross / torch.where(query_scale > 0, query_scale, 1.0)[:, None]
        kept = [mean_losses[verdict.chain] for verdict in verdicts if verdict.healthy]
        arrays = {"mean_loss_trace": torch.from_numpy(np.stack(kept))}
        if self.keep_traces:
            arrays["loss_traces"] = collector.traces().cpu()
        diagnostics = _diagnose(np.stack(kept), collector.diagnosed(), verdicts)
        return Attribution(
            scores=cross.neg_().cpu(),
            train_scale=train_scale.cpu(),
            diagnostics={**diagnostics, **shares, "planned_bytes": needed, "streaming": streaming},
            arrays=arrays,
        )

    def prior_variance(self, num_chains: int) -> float:
        """kappa: the expected sample variance of one coordinate of the shadow, over all draws of so many chains.

        The shadow is a first-order autoregression from 0: x' = a x + N(0, step_size), a = 1 - step_size gamma / 2.
        """
        a = 1 - self.step_size * self.gamma / 2
        steps = self.thinning * (self.burn_in + np.arange(self.draws))
        variance = self.step_size * (1 - np.power(a, 2.0 * steps)) / (1 - a * a)
        earlier = np.minimum.outer(np.arange(self.draws), np.arange(self.draws))
        covariances = np.power(a, np.abs(np.subtract.outer(steps, steps)).astype(int)) * variance[earlier]
        of_chain_mean = covariances.mean()
        num_draws = num_chains * self.draws
        # Each chain's mean takes its own variance away; about a common mean, only the num_chains-th part of it.
        taken = of_chain_mean / num_chains if self.centring == "pooled" else of_chain_mean
        freedom = degrees_of_freedom(num_chains, self.draws, self.centring)  # type: ignore[arg-type]
        return float(num_draws * (variance.mean() - taken) / freedom)

    def _plan_memory(self, num_train: int, num_queries: int, device: torch.device) -> tuple[bool, int]:
        """Whether covariances are summed as the draws come, and the bytes that takes; refuses what cannot fit.

        Kept traces cost draws x (n + q) numbers, one more chain of them while they are centred, and the scores; running
        sums cost twice the scores, whatever the number of draws. A control variate doubles that and adds the linear
        part; shrinkage holds the sum of the chains' differences, and the two that it compares.
        """
        scores, draw = 4 * num_train * num_queries, 4 * (num_train + num_queries)
        copies = 2 if self.control_variate else 1  # a chain and its shadow
        extra = (1 if self.control_variate else 0) + (3 if self.shrinkage else 0)
        by_traces = (copies * self.chains + 1) * self.draws * draw + (copies + extra) * scores
        by_traces += self.chains * self.draws * draw if self.keep_traces else 0
        by_sums = (2 * copies + extra) * scores + (copies + 2) * min(BLOCK, self.draws) * draw
        streaming = by_sums < by_traces and not self.keep_traces
        needed, free = min(by_sums, by_traces) if not self.keep_traces else by_traces, free_bytes(device)
        what = f"{self.chains} x {self.draws} draws of {num_train} + {num_queries} losses"
        how = "running sums" if streaming else "loss traces"
        if needed > free:
            smaller = (
                "--set bif.keep_traces=false" if self.keep_traces and by_sums < free else "fewer queries (--queries)"
            )
            raise UsageError(
                f"bif needs {needed / 2**30:.1f} GiB for {what} as {how} and scores, and {free / 2**30:.1f} GiB are "
                f"free; take {smaller}"
            )
        logger.info(
            "bif: %.2f GiB for %s as %s, beside the model; %.1f GiB free", needed / 2**30, what, how, free / 2**30
        )
        return streaming, needed

    def _check_health(self, verdicts: list[ChainHealth], mean_losses: np.ndarray) -> None:
        num_healthy = sum(verdict.healthy for verdict in verdicts)
        if num_healthy < self.min_chains:
            reasons = "; ".join(f"chain {v.chain}: {v.reason}" for v in verdicts if not v.healthy)
            product = self.step_size * self.gamma
            hint = (
                f"step_size * gamma is {product:g}, and at 4 or more the prior itself pushes a chain away: take a "
                f"bif.step_size of 1 / gamma = {1 / self.gamma:g} or less"
                if self.sampler == "sgld" and self.localiser == "isotropic" and product >= 4
                else "try a smaller bif.step_size or a larger bif.gamma"
            )
            raise DivergedError(
                f"{num_healthy} of {self.chains} bif chains are healthy, {self.min_chains} needed ({reasons}); {hint}",
                mean_losses,
            )


def _add_linear_part(
    cross: Tensor,
    train_scale: Tensor,
    shadow: Kept | Streamed,
    inner: Attribution,
    kappa: float,
    agreement: Agreement | None,
) -> dict[str, float]:
    """Puts what is known exactly in the place of what the shadow sampled; returns how much of the result was sampled.

    `cross` (q, n) and `train_scale` (n,) are the chains' covariances and standard deviations, changed in place; `inner`
    has minus the gradients' inner products, of which kappa times is the exact covariance of linear losses.
    """
    shadow_cross, _, shadow_scale = shadow.covariance()
    assert inner.train_scale is not None
    exact = kappa * inner.train_scale.to(cross.device).square()
    excess = train_scale.square() - shadow_scale.square()
    cross -= shadow_cross
    shares = {}
    if agreement is not None:
        of_scores, of_variances = agreement.shares()
        cross *= of_scores[:, None]
        excess *= of_variances
        shares = {"kept_difference_median": float(of_scores.median()), "kept_variance": float(of_variances)}
    sampled = cross.norm()
    cross.sub_(inner.scores.to(cross.device), alpha=kappa)
    train_scale.copy_((exact + excess).clamp(min=LEAST_VARIANCE * exact).sqrt())
    return {**shares, "sampled_share": float(sampled / cross.norm())}


def _joined(first: Examples, second: Examples) -> Examples:
    return Examples(torch.cat([first.inputs, second.inputs]), torch.cat([first.targets, second.targets]))


def _diagnose(mean: np.ndarray, examples: np.ndarray, verdicts: list[ChainHealth]) -> dict[str, Any]:
    """R-hat and ESS of the mean training loss (chains, draws), and of single examples' (chains, draws, examples)."""
    return {
        "rhat": _median(split_rhat(mean)),
        "ess": _median(effective_sample_size(mean)),
        "rhat_examples_median": _median(split_rhat(examples)),
        "ess_examples_median": _median(effective_sample_size(examples)),
        "num_draws": mean.size,
        "dropped_chains": [f"chain {v.chain}: {v.reason}" for v in verdicts if not v.healthy],
    }


def _median(values: np.ndarray) -> float | None:
    """Of the defined values; None where too few draws leave none."""
    defined = np.asarray(values)[np.isfinite(values)]
    return float(np.median(defined)) if defined.size else None
