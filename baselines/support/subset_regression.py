"""Regression of the queries' losses on subsets, with a Gaussian prior of the weights: exact, and blocked over queries.

    fit = regress(masks, losses, {"scores": scores}, {"train": covariance}, device=device)
    fit.weights                        # (q, n): the posterior mean, masks @ weights.T predicts the losses

For query j over m subsets, y_j = mu_j + X w_j + noise, with w_j ~ N(c_j P_j, s_j^2 C) around another method's scores P
(q, n). C = t I + (1 - t) G, both of mean diagonal 1: G is P'P, or a covariance of examples that the method gives, or
the cosines of either to the power k, which leaves the most alike (`baselines/support/subset_kernels.py`). Without P
this is ridge regression. Whatever is not known comes from the marginal likelihood of the very subsets that are learnt
from:

- mu_j is left out by centring, s_j is profiled, c_j is found by generalised least squares and then shrunk to what is
  usual among the queries by as much as its error says (few subsets tell little about one query);
- the ratio of noise to signal differs from query to query: each has a posterior over a grid of ratios, whose prior is
  the mixture that makes all queries likeliest. Weights are averaged over it;
- which scores of several, G and t are the same for all queries, and the likeliest are taken;
- queries share strength where that is likelier: the model is then of the standardised outcomes in the eigenvectors of
  the queries' own likeness, a Gaussian process over subsets x queries with a Kronecker product for its covariance whose
  query side has given eigenvectors and its own scale and noise along each of them.

One eigendecomposition serves every query and every ratio; it is of the smaller of m x m and n x n. Sharing adds one of
q x q. Where there are very many subsets, the first of them choose between scores, covariances and ways to share, and
all of them how much of the identity.
"""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baselines.support.subset_data import BLOCK_BYTES, NotACovarianceError, Spectrum, SubsetData
from baselines.support.subset_kernels import AS_IT_IS, likeness, products, query_basis, symmetric

RATIOS = torch.logspace(-3, 3, 25, dtype=torch.float64)  # of noise to signal, in variance over subsets
OF_QUERIES = "queries"  # P'P
POWERS = (AS_IT_IS, 2, 4, 16)  # of the cosines of P'P
TRAIN_POWERS = (AS_IT_IS, 2, 4, 8)  # of those of a covariance that is given
QUERY_POWERS = (2, 4, 8)  # of the cosines among queries
STEP = 0.5  # of log10 t
LOWEST = -3.0
SEARCHED = 1000  # subsets that choose
MIXTURE_STEPS = 50


@dataclass(frozen=True)
class Regression:
    weights: Tensor  # (q, n) float32, on the CPU
    diagnostics: dict[str, Any] = field(default_factory=dict)


def regress(
    masks: np.ndarray,
    losses: np.ndarray,
    priors: Mapping[str, Tensor] | None = None,
    covariances: Mapping[str, Tensor | None] | None = None,
    *,
    device: torch.device,
    progress: Callable[..., Iterable] = lambda items, **_: items,
) -> Regression:
    """masks: (m, n) bool; losses: (m, q); priors: name -> (q, n) in any unit, of which the likeliest is taken.

    covariances: name -> (n, n) of the weights, up to a factor, and None for P'P (which alone is the default); one that
    is no covariance (an eigenvalue well below 0) is left out. Without priors they are not looked at.
    """
    search = _Search(masks, losses, device, priors or {"none": None}, covariances or {OF_QUERIES: None})
    for _ in progress(search.steps(), total=search.most_steps, description="datamodel: the likeliest prior"):
        pass
    return _posterior(search.data, search.best)


def workspace_bytes(
    num_subsets: int, num_examples: int, num_queries: int, num_priors: int, num_covariances: int = 0
) -> int:
    """What `regress` holds at once, the caller's losses, scores and covariances included."""
    smaller = min(num_subsets, num_examples)
    # Eigenvectors of the best and of the one that is tried, the kernel, and the solver's own; likeness and its power.
    squares = 8 * (6 * smaller**2 + 4 * num_examples**2 * bool(num_priors or num_examples < num_subsets))
    masks = 17 * num_subsets * num_examples + 16 * num_examples * smaller
    block = min(BLOCK_BYTES, 8 * max(num_subsets, num_examples) * num_queries)
    # Queries' likeness, its eigenvectors and the solver's own; then what they make of losses and scores.
    shared = (32 * num_queries**2 + 4 * num_queries * (num_subsets + num_examples)) * bool(num_priors)
    given = (
        num_queries * (8 * num_subsets + 4 * (1 + num_priors) * num_examples) + 12 * num_covariances * num_examples**2
    )
    return squares + masks + 6 * block + shared + given


# ---- the marginal likelihood ----


@dataclass(frozen=True)
class _Evidence:
    """For every query and ratio, (q, ratios): how likely, and the prior mean's factor with its variance."""

    choice: dict[str, Any]  # which scores, covariance, power of likeness, t, and how queries share
    mean: Tensor | None  # (q, n): those scores
    spectrum: Spectrum
    noise: Tensor  # (ratios,): added to the eigenvalues
    posterior: Tensor  # (q, ratios): rows sum to 1
    factors: Tensor  # (q, ratios)
    variances: Tensor  # (q, ratios)
    total: float  # log marginal likelihood, summed over queries


def _evidence(data: SubsetData, spectrum: Spectrum, mean: Tensor | None, **choice: Any) -> _Evidence:
    m, values = data.num_subsets, spectrum.values
    noise = RATIOS.to(data.device) * values.sum() / (m - 1)
    inverse = 1 / (values[:, None] + noise)  # (r, ratios)
    beyond = m - 1 - len(values)  # directions, centring aside, in which there is noise only; -1 where U has them all
    log_determinant = (values[:, None] + noise).log().sum(0) + beyond * noise.log()
    likelihoods, found_factors, found_variances = [], [], []

    def inner(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
        """(block, ratios): a' (X C X' + noise)^-1 b, up to the prior's scale."""
        product = a[0] * b[0]
        within = product.T @ inverse
        if spectrum.from_outcomes is not None:
            return within
        return within + ((a[1] * b[1]).sum(0) - product.sum(0))[:, None] / noise

    for block in data.blocks():
        outcomes = data.rotated(spectrum, data.outcomes(block)[0])
        squares = inner(outcomes, outcomes)
        factor = variance = torch.zeros_like(squares)
        if (predicted := data.predictions(mean, block)) is not None:
            made = data.rotated(spectrum, predicted[0])
            own = inner(made, made)
            known = own > 0
            own = torch.where(known, own, 1.0)
            factor = torch.where(known, inner(made, outcomes) / own, 0.0)
            squares = squares - factor.square() * own
            variance = torch.where(known, squares.clamp(min=0) / (own * max(1, m - 2)), torch.inf)
        squares = squares.clamp(min=1e-300)
        own_unit = (m - 1) * data.log_scales(block)[:, None]  # outcomes in another basis have other lengths
        likelihoods.append(-0.5 * ((m - 1) * squares.log() + log_determinant) - own_unit)
        found_factors.append(factor)
        found_variances.append(variance)
    posterior, total = _mixture(torch.cat(likelihoods))
    factors, variances = torch.cat(found_factors), torch.cat(found_variances)
    return _Evidence(choice, mean, spectrum, noise, posterior, factors, variances, total)


def _mixture(log_likelihoods: Tensor) -> tuple[Tensor, float]:
    """(q, ratios) posterior under the mixture of ratios that makes all queries likeliest, and the log of how likely."""
    shares = torch.full_like(log_likelihoods[0], 1 / log_likelihoods.shape[1])
    for _ in range(MIXTURE_STEPS):
        posterior = (log_likelihoods + shares.log()).softmax(1)
        shares = posterior.mean(0).clamp(min=1e-12)
    return posterior, float((log_likelihoods + shares.log()).logsumexp(1).sum())


class _Search:
    """The likeliest scores by themselves, then the likeliest covariance, then as little of the identity as is likely.

    Then whether queries share strength, which changes no eigenvector of the subsets. What the first subsets chose is
    last settled on all of them.
    """

    best: _Evidence

    def __init__(
        self,
        masks: np.ndarray,
        losses: np.ndarray,
        device: torch.device,
        priors: Mapping[str, Tensor] | Mapping[str, None],
        covariances: Mapping[str, Tensor | None],
    ):
        self.all = (masks, losses, device)
        self.chosen_by_some = len(masks) > SEARCHED and None not in priors.values()
        some = slice(SEARCHED if self.chosen_by_some else None)
        self.data = SubsetData(masks[some], losses[some], device)
        self.priors, self.covariances = priors, covariances

    @property
    def most_steps(self) -> int:
        tried = sum(len(POWERS if given is None else TRAIN_POWERS) for given in self.covariances.values())
        places = round(-LOWEST / STEP) - 1
        return 1 + tried + len(self.covariances) * places + len(QUERY_POWERS) + self.chosen_by_some * (places + 2)

    def steps(self) -> Iterator[None]:
        """One an eigendecomposition."""
        plain = self.data.spectrum(None, 1.0)
        made = [_evidence(self.data, plain, scores, scores=name) for name, scores in self.priors.items()]
        self.best = max(made, key=lambda found: found.total)
        yield
        mean = self.best.mean
        if mean is None:
            return
        yield from self._covariance(mean)
        yield from self._sharing(mean, QUERY_POWERS)
        if self.chosen_by_some:
            yield from self._settled()

    def _covariance(self, mean: Tensor) -> Iterator[None]:
        scores = self.best.choice["scores"]
        for name in self.covariances:
            covariance = self._matrix(name, mean)
            likeliest, place = None, -STEP
            for power in POWERS if self.covariances[name] is None else TRAIN_POWERS:
                choice = {"scores": scores, "covariance": name, "power": power}
                found = self._at(mean, covariance, place, choice)
                if found is not None and (likeliest is None or found.total > likeliest.total):
                    likeliest = found
                yield
            while likeliest is not None and place > LOWEST:
                place -= STEP
                lower = self._at(mean, covariance, place, likeliest.choice)
                yield
                if lower is None or lower.total <= likeliest.total:
                    break
                likeliest = lower
            if likeliest is not None and likeliest.total > self.best.total:
                self.best = likeliest

    def _settled(self) -> Iterator[None]:
        """What the first subsets chose, and on all of them as much of the identity as is likely."""
        chosen, mean = dict(self.best.choice), self.priors[self.best.choice["scores"]]
        assert mean is not None
        shared = chosen.pop("shared", None)
        self.data = SubsetData(*self.all)
        found = None
        if "covariance" in chosen:
            found = yield from self._walk(mean, chosen)
        if found is None:
            found = _evidence(self.data, self.data.spectrum(None, 1.0), mean, scores=chosen["scores"])
        self.best = found
        if shared is not None:
            yield from self._sharing(mean, (shared,))

    def _walk(self, mean: Tensor, chosen: dict[str, Any]) -> Generator[None, None, _Evidence | None]:
        """At the likeliest share of the identity: from the chosen one down, or else up."""
        covariance, start = self._matrix(chosen["covariance"], mean), math.log10(chosen.pop("identity"))
        found = begun = self._at(mean, covariance, start, chosen)
        yield
        for step in (STEP,) if begun is None else (-STEP, STEP):
            place = start + step
            while LOWEST <= place < 0:
                other = self._at(mean, covariance, place, chosen)
                yield
                if found is not None and (other is None or other.total <= found.total):
                    break
                found, place = other, place + step
            if found is not begun:
                break
        return found

    def _matrix(self, name: str, mean: Tensor) -> Tensor:
        given, device = self.covariances[name], self.data.device
        return products(mean, device) if given is None else symmetric(given, device)

    def _at(self, mean: Tensor, covariance: Tensor, place: float, choice: Mapping[str, Any]) -> _Evidence | None:
        try:
            spectrum = self.data.spectrum(likeness(covariance, choice["power"]), 10.0**place)
        except NotACovarianceError:
            return None
        return _evidence(self.data, spectrum, mean, **{**choice, "identity": 10.0**place})

    def _sharing(self, mean: Tensor, powers: Iterable[int]) -> Iterator[None]:
        queries, choice = self.data, self.best.choice
        if queries.num_queries < 2:
            return
        for power in powers:
            turned = queries.in_basis(query_basis(mean, power, queries.device))
            found = _evidence(turned, self.best.spectrum, turned.turned_mean(mean), **choice, shared=power)
            if found.total > self.best.total:
                self.best, self.data = found, turned
            yield


# ---- the posterior mean ----


def _posterior(data: SubsetData, evidence: _Evidence) -> Regression:
    spectrum, posterior = evidence.spectrum, evidence.posterior
    factors, usual, spread = _shrunk(
        (posterior * evidence.factors).sum(1), (posterior * evidence.variances.nan_to_num(posinf=1e30)).sum(1)
    )
    inverse = 1 / (spectrum.values[:, None] + evidence.noise)
    weights = torch.empty(data.num_queries, data.num_examples)
    for block in data.blocks():
        outcomes, scale = data.outcomes(block)
        predicted = data.predictions(evidence.mean, block)
        if predicted is not None:
            outcomes = outcomes - factors[block] * predicted[0]
        rotated, _ = data.rotated(spectrum, outcomes)
        found = spectrum.to_weights @ (rotated * (inverse @ posterior[block].T))
        if predicted is not None:
            found = found + factors[block] * predicted[1]
        weights[block] = (found * scale).T.float().cpu()
    weights = data.in_queries(weights)
    ratios = (posterior @ RATIOS.to(posterior).log10()).quantile(torch.tensor([0.05, 0.5, 0.95]).to(posterior))
    diagnostics = {
        **{f"prior_{name}": value for name, value in evidence.choice.items()},
        "noise_over_signal": [round(10.0 ** float(value), 4) for value in ratios],  # at 5, 50 and 95 % of the queries
        "log_evidence": evidence.total,
    }
    if evidence.mean is not None:
        diagnostics |= {"prior_factor": usual, "prior_factor_spread": spread}
    return Regression(weights, diagnostics)


def _shrunk(factors: Tensor, variances: Tensor) -> tuple[Tensor, float, float]:
    """Each query's factor drawn to the usual one, by its error against the spread among queries; then both of these."""
    spread = torch.zeros((), dtype=factors.dtype, device=factors.device)
    usual = spread
    known = variances < 1e29
    if not bool(known.any()):
        return torch.zeros_like(factors), 0.0, 0.0
    for _ in range(MIXTURE_STEPS):  # the moment equation of Paule and Mandel, by fixed point
        trust = torch.where(known, 1 / (variances + spread).clamp(min=1e-12), 0.0)
        usual = (trust * factors).sum() / trust.sum()
        excess = (trust.square() * ((factors - usual).square() - variances).where(known, 0.0)).sum()
        spread = (excess / trust.square().sum()).clamp(min=0)
    share = torch.where(known, spread / (spread + variances).clamp(min=1e-12), 0.0)
    shrunk = usual + share * (factors - usual)
    return torch.where(known, shrunk, 0.0), float(usual), float(spread.sqrt())
