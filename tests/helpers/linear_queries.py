"""Queries whose losses are sums over a subset's members, and two methods that know the summands up to their errors.

Truth and prediction are jointly normal across subsets, as a subset has many examples: the score of infinitely many
subsets is (6 / pi) asin(r / 2), with r known.
"""

import math
from dataclasses import dataclass

import numpy as np

Drawn = tuple[np.ndarray, np.ndarray, list[np.ndarray]]


def draw_masks(num_subsets: int, rng: np.random.Generator, num_examples: int = 100, alpha: float = 0.5) -> np.ndarray:
    """As many examples in each subset, (num_subsets, num_examples)."""
    return np.argsort(rng.random((num_subsets, num_examples)), axis=1) < round(alpha * num_examples)


@dataclass(frozen=True)
class LinearQueries:
    """A population of them: what they share, how the methods err, how noisy the truth is, and what groups add."""

    shared: float = 0.5  # of the coefficients, in units of each query's own part
    shared_error: float = 0.6  # of the methods, the same for every query
    own_error: float = 1.2
    signal: float = 1.0  # of the true coefficients in the methods' scores
    spread: float = 0.0  # how unlike queries are, in signal and in noise
    noise: float = 0.5  # of one retrain, in units of the root of the number of examples
    num_examples: int = 100
    num_replicates: int = 1
    groups: np.ndarray | None = None  # of the examples: losses and scores have effects of them that agree in nothing

    def draw_queries(self, num_queries: int, rng: np.random.Generator) -> Drawn:
        """Coefficients (num_queries, n), each query's noise, and the scores of a better and a worse method."""
        shared, shared_error = np.random.default_rng(7).normal(size=(2, self.num_examples))
        own, *errors = rng.normal(size=(3, num_queries, self.num_examples))
        unlike = np.exp(self.spread * rng.normal(size=(2, num_queries)))
        coefficients = self.shared * shared + own
        scores = [
            self.signal * unlike[0][:, None] * coefficients + self.shared_error * shared_error + self.own_error * error
            for error in (errors[0], errors[1] + errors[0])
        ]
        return coefficients, self.noise * math.sqrt(self.num_examples) * unlike[1], scores

    def limits(self, num_queries: int = 40_000) -> list[float]:
        """What infinitely many subsets and queries would score, for both methods; within groups where there are any."""
        coefficients, noise, scores = self.draw_queries(num_queries, np.random.default_rng(8))
        # A random half of the examples: centred indicators with this variance, and examples drawn without replacement.
        variance = 0.25 * self.num_examples / (self.num_examples - 1)
        truth = self._centred(coefficients)
        truth_variance = variance * (truth**2).sum(axis=1) + 1.25 * noise**2 / self.num_replicates
        found = []
        for known in map(self._centred, scores):
            covariance = variance * (truth * known).sum(axis=1)
            pearson = covariance / np.sqrt(truth_variance * variance * (known**2).sum(axis=1))
            found.append(float((6 / np.pi * np.arcsin(pearson / 2)).mean()))
        return found

    def _centred(self, values: np.ndarray) -> np.ndarray:
        groups = np.zeros(self.num_examples, dtype=int) if self.groups is None else self.groups
        means = [values[:, groups == group].mean(axis=1) for group in range(groups.max() + 1)]
        return values - np.stack(means, axis=1)[:, groups]

    def draw(self, num_subsets: int, num_queries: int, rng: np.random.Generator) -> Drawn:
        """masks (K, n), losses (R, K, q), and the scores of both methods (q, n)."""
        coefficients, noise, scores = self.draw_queries(num_queries, rng)
        masks = draw_masks(num_subsets, rng, self.num_examples)
        # A retrained model is shared by all queries, and so is a part of its noise.
        size = (self.num_replicates, num_subsets)
        error = rng.normal(size=(*size, num_queries)) + 0.5 * rng.normal(size=(*size, 1))
        if self.groups is not None:
            effects = 3.0 * rng.normal(size=(2, num_queries, self.groups.max() + 1))[:, :, self.groups]
            coefficients, scores = coefficients + effects[0], [one + effects[1] for one in scores]
        return masks, masks @ coefficients.T + noise * error, scores

    def predictions(self, num_subsets: int, num_queries: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """The mean losses and what both methods predict, all (K, q)."""
        masks, losses, (better, worse) = self.draw(num_subsets, num_queries, rng)
        return losses.mean(axis=0), masks @ better.T, masks @ worse.T
