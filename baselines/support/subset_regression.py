"""Regression of the queries' losses on subsets, with a Gaussian prior of the weights: exact, and blocked over queries.

    fit = regress(masks, losses, {"scores": scores}, device=device)
    fit.weights                        # (q, n): the posterior mean, masks @ weights.T predicts the losses

For query j over m subsets, y_j = mu_j + X w_j + noise, with w_j ~ N(c_j P_j, s_j^2 C) around another method's scores P
(q, n). C = t I + (1 - t) G, both of mean diagonal 1: G is P'P, or how alike two examples are in the scores that they
have over queries (the cosine of two columns of P) to the power k, which leaves the most alike. Without P this is ridge
regression. Whatever is not known comes from the marginal likelihood of the very subsets that are learnt from:

- mu_j is left out by centring, s_j is profiled, c_j is found by generalised least squares and then shrunk to what is
  usual among the queries by as much as its error says (few subsets tell little about one query);
- the ratio of noise to signal differs from query to query: each has a posterior over a grid of ratios, whose prior is
  the mixture that makes all queries likeliest. Weights are averaged over it;
- which scores of several, G and t are the same for all queries, and the likeliest are taken.

One eigendecomposition serves every query and every ratio; it is of the smaller of m x m and n x n.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baselines.support.subset_data import BLOCK_BYTES, Spectrum, SubsetData

RATIOS = torch.logspace(-3, 3, 25, dtype=torch.float64)  # of noise to signal, in variance over subsets
COVARIANCE = 0  # P'P itself, with the examples' own lengths
POWERS = (COVARIANCE, 2, 4, 16)  # of the cosine
STEP = 0.5  # of log10 t
LOWEST = -3.0
MIXTURE_STEPS = 50


@dataclass(frozen=True)
class Regression:
    weights: Tensor  # (q, n) float32, on the CPU
    diagnostics: dict[str, Any] = field(default_factory=dict)


def regress(
    masks: np.ndarray,
    losses: np.ndarray,
    priors: Mapping[str, Tensor] | None = None,
    *,
    device: torch.device,
    progress: Callable[..., Iterable] = lambda items, **_: items,
) -> Regression:
    """masks: (m, n) bool; losses: (m, q); priors: name -> (q, n) in any unit, of which the likeliest is taken."""
    data = SubsetData(masks, losses, device)
    search = _Search(data, priors or {"none": None})
    for _ in progress(search.steps(), total=search.most_steps, description="datamodel: the likeliest prior"):
        pass
    return _posterior(data, search.best)


def workspace_bytes(num_subsets: int, num_examples: int, num_queries: int, num_priors: int) -> int:
    """What `regress` holds at once, the caller's losses and scores included."""
    smaller = min(num_subsets, num_examples)
    # Eigenvectors of the best and of the one that is tried, the kernel, and the solver's own; likeness and its power.
    squares = 8 * (6 * smaller**2 + 4 * num_examples**2 * bool(num_priors or num_examples < num_subsets))
    masks = 17 * num_subsets * num_examples + 16 * num_examples * smaller
    block = min(BLOCK_BYTES, 8 * max(num_subsets, num_examples) * num_queries)
    return squares + masks + 6 * block + num_queries * (8 * num_subsets + 4 * (1 + num_priors) * num_examples)


def _products(scores: Tensor, device: torch.device) -> Tensor:
    """(n, n): of the columns of scores, of mean diagonal 1."""
    total = torch.zeros(scores.shape[1], scores.shape[1], dtype=torch.float64, device=device)
    for rows in scores.split(1024):
        wide = rows.to(device, torch.float64)
        total += wide.T @ wide
    return total / total.diagonal().mean().clamp(min=1e-300)


def _likeness(products: Tensor, power: int) -> Tensor:
    """(n, n): the products, or cosines to that power; an example without scores is like itself alone."""
    if power == COVARIANCE:
        return products
    lengths = products.diagonal().sqrt()
    lengths = torch.where(lengths > 0, lengths, 1.0)
    alike = products / lengths[:, None]
    alike /= lengths
    alike.fill_diagonal_(1.0)
    return alike.pow_(power)


# ---- the marginal likelihood ----


@dataclass(frozen=True)
class _Evidence:
    """For every query and ratio, (q, ratios): how likely, and the prior mean's factor with its variance."""

    choice: dict[str, Any]  # which scores, power of likeness and t
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
        likelihoods.append(-0.5 * ((m - 1) * squares.log() + log_determinant))
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
    """The likeliest scores by themselves, then the likeliest power, then as little of the identity as is likely."""

    best: _Evidence
    most_steps = 1 + len(POWERS) + round(-LOWEST / STEP) - 1

    def __init__(self, data: SubsetData, priors: Mapping[str, Tensor] | Mapping[str, None]):
        self.data, self.priors = data, priors

    def steps(self) -> Iterator[None]:
        """One an eigendecomposition."""
        plain = self.data.spectrum(None, 1.0)
        made = [_evidence(self.data, plain, scores, scores=name) for name, scores in self.priors.items()]
        self.best = max(made, key=lambda found: found.total)
        yield
        mean = self.best.mean
        if mean is None:
            return
        products, name = _products(mean, self.data.device), self.best.choice["scores"]

        def at(power: int, place: float) -> _Evidence:
            spectrum = self.data.spectrum(_likeness(products, power), 10.0**place)
            return _evidence(self.data, spectrum, mean, scores=name, power=power, identity=10.0**place)

        place, tried = -STEP, list[_Evidence]()
        for power in POWERS:
            tried = [max([*tried, at(power, place)], key=lambda found: found.total)]
            yield
        (likeliest,) = tried
        while place > LOWEST:
            place -= STEP
            lower = at(likeliest.choice["power"], place)
            yield
            if lower.total <= likeliest.total:
                break
            likeliest = lower
        if likeliest.total > self.best.total:
            self.best = likeliest


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
