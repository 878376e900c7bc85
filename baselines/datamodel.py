"""datamodel: regression of losses on subsets that it retrains on, around any method's scores.

It asks for models retrained on further subsets, which cost it their seconds, and predicts a query's loss by a sum over
the subset's members. With a prior the weights are expected where another method's scores are, and to vary together for
examples that are alike: in their scores over queries (`covariance=queries`), or in the method's scores among training
examples (`train`), which BIF has from its own draws and any other method gives as if they were queries. What there is
to choose (raw or train-normalised scores, how far they are trusted, the covariance, whether alike queries share
strength, penalties, noise) is what makes its own subsets likeliest: `baselines/support/subset_regression.py` has the
model, and `subset_kernels.py` what else was tried. Reported subsets are of another stream, and it never sees them.

10,000 queries x 4,750 examples x 8,000 subsets are planned to take 9 GiB; they took 5.3, and 21 minutes on two cores.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from scipy import special, stats
from torch import Tensor

from baselines.method import TRAIN_COVARIANCE, Attribution, Method, Problem, Retrained, Size
from baselines.support.nested import method_option, nested_method
from baselines.support.subset_regression import OF_QUERIES, regress, workspace_bytes
from retrain.errors import UsageError
from retrain.task import Task

LEAST_RETRAINS = 10
OUTCOMES = ("ranks", "losses")
OF_TRAIN, LIKELIER = "train", "likelier"
COVARIANCES = (LIKELIER, OF_QUERIES, OF_TRAIN)
QUERIES_AT_ONCE = 512  # ranks are made in float64


@dataclass(frozen=True, kw_only=True)
class Datamodel(Method):
    knows_output: ClassVar[bool] = True  # of what it learns from, and of its prior
    paper: ClassVar[str] = "Ilyas et al. 2022, Datamodels: Predicting predictions from training data"

    retrains: int = 500  # models retrained on subsets of its own
    alpha: float = 0.0  # share of the attributed examples that these keep; 0: the asked one
    prior: str = method_option()  # none, or a method, with its options behind +: ekfac+damping:1e-4
    models: int = 1  # models that the prior looks at, whose scores are averaged
    covariance: str = LIKELIER  # of the weights: "queries" (P'P), "train" (scores among training examples), or either
    outcome: str = "ranks"  # what is regressed: each query's losses as normal quantiles of their ranks, or "losses"

    def __post_init__(self) -> None:
        if self.retrains < LEAST_RETRAINS:
            raise ValueError(f"retrains is {self.retrains}; expected at least {LEAST_RETRAINS}")
        if self.models < 1:
            raise ValueError(f"models is {self.models}; expected at least 1")
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha is {self.alpha}; expected a fraction below 1, or 0 for the asked one")
        for name, choices in (("outcome", OUTCOMES), ("covariance", COVARIANCES)):
            if getattr(self, name) not in choices:
                raise ValueError(f'{name} is "{getattr(self, name)}"; available: {", ".join(choices)}')
        if self.prior_method is not None and self.prior_method.extra_retrains()[0]:
            raise ValueError(f"the prior {self.prior} retrains by itself; expected a method that does not")

    @cached_property
    def prior_method(self) -> Method | None:
        return nested_method(self.prior)

    # The prior's code, files and libraries count as its own.

    def key_modules(self) -> tuple[str, ...]:
        return super().key_modules() + (self.prior_method.key_modules() if self.prior_method is not None else ())

    def key_files(self) -> tuple[Path, ...]:
        return super().key_files() + (self.prior_method.key_files() if self.prior_method is not None else ())

    @property
    def versions(self) -> dict[str, str]:
        return {**super().versions, **(self.prior_method.versions if self.prior_method is not None else {})}

    @property
    def uses_model(self) -> bool:
        return self.prior_method is not None and self.prior_method.uses_model

    def skip(self, task: Task) -> str | None:
        return None if self.prior_method is None else self.prior_method.skip(task)

    def memory_bytes(self, size: Size) -> int:
        n, q = size.num_attributed, size.num_queries
        method = self.prior_method
        if method is None:
            return workspace_bytes(self.retrains, n, q, 0)
        own = workspace_bytes(self.retrains, n, q, 2, self.covariance != OF_QUERIES)
        if (at_no_cost := method.with_train_covariance()) is not None:
            return max(own, at_no_cost.memory_bytes(size))
        asked = [size] if self.covariance == OF_QUERIES else [size, replace(size, num_queries=n)]
        return max(own, *(method.memory_bytes(one) for one in asked))

    def extra_retrains(self) -> tuple[int, float]:
        return self.retrains, self.alpha

    def fit(self, problem: Problem) -> Retrained:
        if problem.retrained is None:
            raise UsageError(
                "datamodel learns from models retrained on further subsets, and here are none; bench.lds makes them"
            )
        return problem.retrained()

    def score(self, problem: Problem, state: Retrained) -> Attribution:
        usable = np.isfinite(state.losses).all(axis=1)
        if usable.sum() < LEAST_RETRAINS:
            raise FloatingPointError(
                f"{usable.sum()} of {len(usable)} retrained models have finite losses; expected {LEAST_RETRAINS}"
            )
        losses = state.losses[usable]
        found = regress(
            state.masks[usable],
            normal_scores(losses) if self.outcome == "ranks" else losses,
            *self._prior(problem),
            device=problem.device,
            progress=problem.progress,
        )
        kept = float(state.masks.mean())
        diagnostics = {"retrains": int(usable.sum()), "retrain_alpha": round(kept, 4), **found.diagnostics}
        return Attribution(scores=found.weights, train_scale=torch.ones(state.masks.shape[1]), diagnostics=diagnostics)

    def _prior(self, problem: Problem) -> tuple[dict[str, Tensor] | None, dict[str, Tensor | None]]:
        """Scores, raw and train-normalised, (q, n) float32 each, and covariances, (n, n) or None for P'P."""
        method = self.prior_method
        if method is None:
            return None, {}
        at_no_cost = method.with_train_covariance()  # in any case: one run then serves every covariance
        answers = [_answer(problem, at_no_cost or method, number) for number in range(self.models)]
        scores, scaled = {"raw": _mean(one.scores for one in answers)}, [one.normalised() for one in answers]
        if all(one is not None for one in scaled):
            scores["normalised"] = _mean(one for one in scaled if one is not None)
        covariances: dict[str, Tensor | None] = {} if self.covariance == OF_TRAIN else {OF_QUERIES: None}
        if self.covariance != OF_QUERIES and at_no_cost is not None:
            covariances[OF_TRAIN] = _mean(one.arrays[TRAIN_COVARIANCE] for one in answers)
        elif self.covariance != OF_QUERIES:
            # An example that lowers its own loss scores below 0: with the other sign it is a covariance.
            covariances[OF_TRAIN] = -_mean(_answer(problem, method, k, True).scores for k in range(self.models))
        return scores, covariances


def _answer(problem: Problem, method: Method, number: int, of_train: bool = False) -> Attribution:
    """At that reference model, counted from the problem's own."""
    if problem.scores_of is not None:
        return problem.scores_of(method, of_train=of_train, further=number)
    if number:
        raise UsageError("datamodel.models is above 1, but this problem offers no further models; bench.lds does")
    asked = replace(problem, queries=problem.attributed) if of_train else problem
    return method.score(asked, method.fit(asked))


def _mean(tensors: Iterable[Tensor]) -> Tensor:
    """float32, on the CPU."""
    total, count = None, 0
    for tensor in tensors:
        total, count = tensor.float().cpu() if total is None else total + tensor.float().cpu(), count + 1
    assert total is not None
    return total / count if count > 1 else total


def normal_scores(losses: np.ndarray) -> np.ndarray:
    """(m, q): each query's losses as the normal quantiles of their ranks over subsets, of the losses' own spread.

    LDS compares ranks, and a few subsets with a loss far above the others would decide a regression of the losses.
    """
    found = np.empty_like(losses, dtype=np.float32)
    for start in range(0, losses.shape[1], QUERIES_AT_ONCE):
        some = losses[:, start : start + QUERIES_AT_ONCE]
        quantiles = special.ndtri((stats.rankdata(some, axis=0) - 0.5) / len(some))
        found[:, start : start + QUERIES_AT_ONCE] = quantiles * some.std(axis=0)
    return found
