"""bif: the local Bayesian influence function, minus the posterior covariance of training and query losses.

The paper's alg:sgld: several chains start at the checkpoint and sample the localised posterior; at every draw the loss
of every attributed example and query is recorded; BIF(i, j) = -Cov(loss_i, loss_j) over the draws (eq:bayesian-if).
Minibatches come from the whole training set. `normalised` scores divide by the training example's own standard
deviation; with `query_normalised` too they are the paper's normalised BIF, a correlation.

Settings that are 0 are chosen by a short pilot at the checkpoint (`baselines/bif/pilot.py`), and stand in the
diagnostics. Each chain is a part of its own: chains run in any process give the bits of chains run in one.

With `control_variate` every chain has a shadow: driven by the same noise but by the prior alone, so that the covariance
of its displacement is known to be kappa I. For losses linear in the weights the shadow's covariance is then kappa times
the inner product of gradients, which is computed exactly (one more part, shown beside the scores as `exact part`); only
the difference between chain and shadow is left to sampling, and that is small where the two stay close together (n_beta
times the curvature below gamma). What the prior alone would give beyond the linear part is taken off with the shadow:
it is common to both, and no part of the answer. With `shrinkage` as much of the sampled difference is added to each
query's scores as the chains agree on (James-Stein: one less the share of its square that is noise, judged by how much
the chains differ): a difference that is all noise is left out.

The paper's localising Gaussian is isotropic, of precision gamma. With `localiser` "kronecker" its precision is gamma (1
+ H / damping), H the loss's curvature as EK-FAC pictures it (`baselines/support/curvature.py`): as wide as ever where
the loss is flat, and narrower where it is curved, so that the posterior is shaped like the loss's own at an inverse
temperature of gamma / damping without the chain having to find that shape. Samplers move in coordinates in which that
Gaussian is round. The linear part of the control variate is then g^T (1 + H / damping)^-1 g', the method `kfac`, and
`sampled_share` says how much the chains added to it:

    python -m bench.lds --alpha 0.1 --methods bif@localiser=kronecker,control_variate=true,shrinkage=true

With `train_covariance` the answer also has the covariance of the training examples' losses among themselves, (n, n),
over the same draws: what the posterior says about which examples go together, and a prior for `datamodel`.

Chains that diverge are dropped with their reason in the record, and the method fails if too few are left: a covariance
over a chain that ran away is a number about nothing. Chains that have not mixed are said so (`mixing`).
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from baselines.bif.collect import BLOCK, DIAGNOSED_EXAMPLES, Part
from baselines.bif.covariance import CENTRINGS, Centring
from baselines.bif.diagnostics import diagnose, dropped_chains, require_healthy
from baselines.bif.engine import STEP_IN_BACKWARD_BYTES, sampled_names
from baselines.bif.parts import Runner, add_linear_part, join, numbers_of, prior_variance
from baselines.bif.pilot import MOST_DRAWS, Pilot, run_pilot
from baselines.bif.presets import GRID, PAPER_SETTINGS
from baselines.bif.saving import Saver
from baselines.bif.settings import ChainSettings, check_choice
from baselines.method import TRAIN_COVARIANCE, Attribution, Method, Problem, Size, batch_size_option
from baselines.support.curvature import GradientsInMetric, Metric, fit_curvature, packed_blocks, unpacked_blocks
from baselines.support.gradients import PerExampleGradients
from baselines.support.inner_products import inner_products
from baselines.support.memory import free_bytes
from baselines.support.transfer import to_host
from retrain.errors import UsageError
from retrain.task import Task

logger = logging.getLogger("tda-bench")

LOCALISERS = ("isotropic", "kronecker")
EXACT_PART = "exact part"
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


@dataclass(frozen=True)
class Fitted:
    """What depends on the training set and not on the queries."""

    method: "BIF"  # with every number chosen
    pilot: Pilot | None  # what chose them; None where there was nothing to choose
    metric: Metric | None  # the kronecker localiser's coordinates


@dataclass(frozen=True, kw_only=True)
class BIF(ChainSettings, Method):
    """Its own settings, beside those of a chain (`baselines/bif/settings.py`)."""

    version: ClassVar[int] = 2
    knows_output: ClassVar[bool] = True
    paper: ClassVar[str] = "Kreer et al. 2025, Bayesian Influence Functions for Hessian-Free Data Attribution"
    paper_settings: ClassVar[Mapping[str, Mapping[str, Any]]] = PAPER_SETTINGS
    grid: ClassVar[Sequence[Mapping[str, tuple[Any, ...]]]] = GRID
    warm_up: ClassVar[dict[str, Any]] = {"draws": 2, "burn_in": 0}

    localiser: str = "isotropic"  # or "kronecker": of precision gamma (1 + curvature / damping)
    damping: float = 0.1  # of the kronecker localiser: curvature well below it counts as none
    fit_examples: int = 0  # training examples the kronecker localiser's curvature is taken from; 0: all
    centring: str = "pooled"  # or "chain": centre within each chain, which ignores differences between them
    query_normalised: bool = False  # also divide by the query's standard deviation: correlations
    divergence_limit: float = 5.0  # nats above the checkpoint's mean loss at which a chain has run away
    min_chains: int = 1  # fewer healthy chains than this is a failure
    shrinkage: bool = False  # of what the control variate leaves to sampling: keep what the chains agree on
    keep_traces: bool = False  # store every loss trace beside the scores, for budget curves
    gradient_batch_size: int = batch_size_option(250)  # of the control variate's and the curvature's gradients

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("centring", self.centring, CENTRINGS)
        check_choice("localiser", self.localiser, LOCALISERS)
        for name in ("min_chains", "damping"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a positive number")
        if self.fit_examples < 0:
            raise ValueError(f"fit_examples is {self.fit_examples}; expected a positive number, or 0 for all")
        given = bool(self.step_size and self.gamma)
        if self.control_variate and (self.sampler != "sgld" or (given and self.step_size * self.gamma >= 4)):
            raise ValueError(
                f"control_variate takes the sgld sampler with step_size * gamma below 4, not {self.sampler} "
                f"with {self.step_size * self.gamma:g}: the prior's own chain must be a stable autoregression"
            )
        if self.control_variate and (self.query_normalised or self.keep_traces):
            raise ValueError("control_variate goes with neither query_normalised nor keep_traces")
        if self.control_variate and self.train_covariance:
            raise ValueError("control_variate has no train_covariance: the exact part is of pairs with queries alone")
        if self.shrinkage and (not self.control_variate or self.chains < 2 or self.draws == 1):
            raise ValueError("shrinkage goes with control_variate and at least 2 chains of 2 draws, which it compares")

    @property
    def config(self) -> dict[str, Any]:
        """The curvature's labels are sampled batch by batch, so another batch size is another sample: another key."""
        default = type(self).__dataclass_fields__["gradient_batch_size"].default
        if self.localiser == "isotropic" or self.gradient_batch_size == default:
            return super().config
        return super().config | {"gradient_batch_size": self.gradient_batch_size}

    def settings_in_paper(self, task: Task) -> Mapping[str, Any]:
        kind = "sequences" if task.train_data.targets.dim() > 1 else "images"
        return self.paper_settings.get(task.name, self.paper_settings[kind])

    def with_train_covariance(self) -> "BIF | None":
        return None if self.control_variate else replace(self, train_covariance=True)

    # ---- fit: the localiser's shape, and what the pilot chooses ----

    def fit(self, problem: Problem) -> Fitted:
        metric = self._fit_metric(problem)
        if not self.left_to_the_pilot:
            return Fitted(self, None, metric)
        pilot = run_pilot(self, problem, metric)
        logger.info("bif: the pilot chose %s", pilot)
        return Fitted(replace(self, **pilot.chosen()), pilot, metric)

    def _fit_metric(self, problem: Problem) -> Metric | None:
        if self.localiser == "isotropic":
            return None
        torch.manual_seed(problem.seed)  # as the harness does: per-token scores come without it
        count = min(self.fit_examples or len(problem.train), len(problem.train))
        examples = problem.train.select(np.random.default_rng(problem.seed).permutation(len(problem.train))[:count])
        loss, gradients = problem.task.loss_function, self._gradients(problem)
        blocks = fit_curvature(gradients, loss, examples, self.gradient_batch_size, problem.device, problem.progress)
        return Metric(blocks, self.damping)

    def _gradients(self, problem: Problem) -> PerExampleGradients:
        names = sampled_names(problem.model, self.parameters)
        return PerExampleGradients(problem.model, problem.task.loss_function.per_example, names)

    def pack_fit(self, state: Fitted) -> Mapping[str, Tensor] | None:
        arrays = {} if state.pilot is None else {"pilot": state.pilot.packed()}
        if state.metric is not None:
            arrays |= packed_blocks(state.metric.blocks)
        return arrays or None

    def unpack_fit(self, problem: Problem, arrays: Mapping[str, Tensor]) -> Fitted:
        kept, metric = dict(arrays), None
        pilot_numbers = kept.pop("pilot", None)
        if self.localiser != "isotropic":
            blocks = unpacked_blocks(kept, problem.device)
            for block, name in zip(blocks, sampled_names(problem.model, self.parameters), strict=True):
                block.shape = problem.model.get_parameter(name).shape
            metric = Metric(blocks, self.damping)
        if pilot_numbers is None:
            return Fitted(self, None, metric)
        pilot = Pilot.unpacked(pilot_numbers)
        return Fitted(replace(self, **pilot.chosen()), pilot, metric)

    # ---- score: chains, and the linear part of a control variate ----

    def num_parts(self) -> int:
        return self.chains + (1 if self.control_variate else 0)

    def score(self, problem: Problem, state: Fitted | None) -> Attribution:
        fitted = self.fit(problem) if state is None else state
        saver = fitted.method._saver(problem)
        return fitted.method._merge(problem, fitted, fitted.method._parts(problem, fitted, saver))

    def score_part(self, problem: Problem, state: Fitted | None, part: int) -> dict[str, Tensor]:
        fitted = self.fit(problem) if state is None else state
        method = fitted.method
        if part == method.chains:
            made = method._linear_part(problem, fitted)
        else:
            ours, runner = problem.shared.get("runner", (None, None))  # of an earlier chain in this process
            if ours != method:
                runner = method._runner(problem, fitted, method._saver(problem))
                problem.shared["runner"] = method, runner
            runner.saver = method._saver(problem)
            total = method.burn_in + method.draws
            ticks = iter(problem.progress(range(total), total=total, description=f"bif: chain {part + 1}"))
            made = runner.chain(part, ticks, keep=False)
            list(ticks)  # closes the progress bar
        return {name: value.cpu() for name, value in made.items()}

    def merge(self, problem: Problem, state: Fitted | None, parts: Sequence[Part]) -> Attribution:
        if len(parts) != self.num_parts():
            raise ValueError(f"{len(parts)} parts came; expected {self.num_parts()}: every chain, and any linear part")
        fitted = self.fit(problem) if state is None else state
        return fitted.method._merge(problem, fitted, iter(parts))

    def _parts(self, problem: Problem, fitted: Fitted, saver: Saver) -> Iterator[dict[str, Tensor]]:
        """Every part in order, the chains on one workbench, which is gone when the linear part is made."""
        total = self.chains * (self.burn_in + self.draws)
        ticks = iter(problem.progress(range(total), total=total, description="bif: draws"))
        runner = self._runner(problem, fitted, saver)
        for chain in range(self.chains):
            yield runner.chain(chain, ticks, keep=chain < self.num_parts() - 1)
        list(ticks)  # closes the progress bar
        del runner
        if self.control_variate:
            yield self._linear_part(problem, fitted)

    def _saver(self, problem: Problem) -> Saver:
        return Saver(problem.work, numbers_of(self))

    def _runner(self, problem: Problem, fitted: Fitted, saver: Saver) -> Runner:
        num_train, num_queries = len(problem.attributed_indices), len(problem.queries)
        held = self._held(num_train, num_queries)
        check_memory(held, f"{self.chains} x {self.draws} draws of {num_train} + {num_queries} losses", problem.device)
        return Runner(
            self, problem, fitted.metric, streaming=held.streaming, divergence_limit=self.divergence_limit, saver=saver
        )

    def _linear_part(self, problem: Problem, fitted: Fitted) -> dict[str, Tensor]:
        plain = self._gradients(problem)
        gradients = plain if fitted.metric is None else GradientsInMetric(plain, fitted.metric)
        linear = inner_products(problem, gradients, self.gradient_batch_size, "bif: linear part")
        assert linear.train_scale is not None
        return {"scores": linear.scores, "train_scale": linear.train_scale}

    def _merge(self, problem: Problem, fitted: Fitted, parts: Iterator[Part]) -> Attribution:
        held = self._held(len(problem.attributed_indices), len(problem.queries))
        centring: Centring = self.centring  # type: ignore[assignment]
        joined = join(
            _first(parts, self.chains),
            self,
            problem,
            centring=centring,
            streaming=held.streaming,
            shrinkage=self.shrinkage,
            divergence_limit=self.divergence_limit,
        )
        require_healthy(joined.verdicts, self.min_chains, joined.mean_losses, "bif", self.divergence_hint())
        shares: dict[str, float] = {}
        components: dict[str, Attribution] = {}
        cross, query_scale, train_scale = joined.chains.covariance()
        arrays: dict[str, Tensor] = {}
        if self.train_covariance:
            num_train = len(problem.attributed_indices)
            arrays[TRAIN_COVARIANCE] = cross[:num_train].cpu()
            cross, query_scale = cross[num_train:], query_scale[num_train:]
        if joined.shadows is not None:
            exact = next(parts)
            components[EXACT_PART] = Attribution(scores=exact["scores"], train_scale=exact["train_scale"])
            kappa = self.prior_variance(joined.num_healthy)
            shadow = joined.shadows.covariance()
            shares = add_linear_part(cross, train_scale, shadow, components[EXACT_PART], kappa, joined.agreement)
        if self.query_normalised:
            cross = cross / torch.where(query_scale > 0, query_scale, 1.0)[:, None]
        mean_losses = joined.healthy_mean_losses
        arrays["mean_loss_trace"] = torch.from_numpy(mean_losses)
        if self.keep_traces:
            arrays["loss_traces"] = joined.chains.traces().cpu()
        diagnostics = {
            **diagnose(mean_losses, joined.chains.diagnosed().numpy()),
            "dropped_chains": dropped_chains(joined.verdicts),
            **shares,
            "planned_bytes": held.num_bytes,
            "streaming": held.streaming,
        }
        if fitted.pilot is not None:
            diagnostics["pilot"] = fitted.pilot.shown()
        return Attribution(
            scores=to_host(cross.neg_()),
            train_scale=train_scale.cpu(),
            diagnostics=diagnostics,
            arrays=arrays,
            components=components,
        )

    def prior_variance(self, num_chains: int) -> float:
        return prior_variance(self, self.centring, num_chains)  # type: ignore[arg-type]

    def divergence_hint(self) -> str:
        """What to try when chains run away."""
        product = self.step_size * self.gamma
        if self.sampler == "sgld" and self.localiser == "isotropic" and product >= 4:
            return (
                f"step_size * gamma is {product:g}, and at 4 or more the prior itself pushes a chain away: take a "
                f"bif.step_size of 1 / gamma = {1 / self.gamma:g} or less"
            )
        return "try a smaller bif.step_size or a larger bif.gamma"

    # ---- memory ----

    def _held(self, num_train: int, num_queries: int) -> Holdings:
        return holdings(
            self,
            self.draws or MOST_DRAWS,
            num_train,
            num_queries,
            shrinkage=self.shrinkage,
            keep_traces=self.keep_traces,
        )

    def memory_bytes(self, size: Size) -> int:
        held = self._held(size.num_attributed, size.num_queries)
        losses = held.num_bytes
        if size.device.type == "cpu":
            losses = merging_bytes(held, self, size.num_attributed, size.num_queries)
        return losses + model_bytes(self, size.num_parameters, localised=self.localiser != "isotropic")


def _first(parts: Iterator[Part], count: int) -> Iterable[Part]:
    """The next `count`, none of which is held on to."""
    for _ in range(count):
        yield next(parts)


# ---- what is held at once, from sizes alone: known before a model is trained, and before a chain is started ----


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
        streaming=streaming, num_bytes=by_sums if streaming else by_traces, by_sums=by_sums, by_traces=by_traces
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
