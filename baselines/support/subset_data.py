"""Subsets and the queries' outcomes, in the eigenvectors in which every ratio of noise to signal is a diagonal."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BLOCK_BYTES = 256 * 2**20  # of one matrix of a block of queries
LEAST_EIGENVALUE = 1e-10  # of the largest: below it is rounding
LEAST_SCALE = 1e-3  # of a combination of queries, in variance 1 each: some may not vary at all
MOST_NEGATIVE = 1e-4  # of the largest: further below 0 it is no rounding


class NotACovarianceError(ValueError):
    """A matrix with an eigenvalue well below 0."""


@dataclass(frozen=True)
class Spectrum:
    """The prior covariance of the centred outcomes, X C X' = U diag(values) U'."""

    values: Tensor  # (r,)
    from_outcomes: Tensor | None  # (r, m): U'; or None, and
    from_projected: Tensor | None  # (r, n): U' = from_projected X', where there are more subsets than examples
    to_weights: Tensor  # (n, r): C X' U


class SubsetData:
    """Centred masks and standardised outcomes; queries come in blocks, columns of (m, block) and (n, block)."""

    def __init__(self, masks: np.ndarray, losses: np.ndarray, device: torch.device):
        self.device = device
        self.num_subsets, self.num_examples = masks.shape
        self.losses = torch.from_numpy(np.ascontiguousarray(losses))
        centred = torch.from_numpy(masks).to(device, torch.float64)
        self.masks = centred - centred.mean(0)
        self.many = self.num_subsets > self.num_examples
        self.overlaps = self.masks.T @ self.masks if self.many else None
        self.basis: Tensor | None = None  # (q, q) where combinations of queries are in the queries' place,
        self.queries: SubsetData | None = None  # and the queries themselves

    @property
    def num_queries(self) -> int:
        return self.losses.shape[1]

    def blocks(self) -> Iterator[slice]:
        size = max(1, BLOCK_BYTES // (8 * max(self.masks.shape)))
        for start in range(0, self.num_queries, size):
            yield slice(start, min(start + size, self.num_queries))

    def outcomes(self, block: slice) -> tuple[Tensor, Tensor]:
        """(m, block) of variance 1 over subsets, and what they were divided by; a constant query stays 0."""
        values = self.losses[:, block].to(self.device, torch.float64)
        values = values - values.mean(0)
        scale = values.square().mean(0).sqrt()
        return values / torch.where(scale > 0, scale, 1.0), scale

    def log_scales(self, block: slice) -> Tensor:
        """(block,): of the outcomes in units of the standardised queries', 0 where they are those themselves."""
        if self.basis is None:
            return torch.zeros(block.stop - block.start, dtype=torch.float64, device=self.device)
        return self.outcomes(block)[1].clamp(min=LEAST_SCALE).log()

    # ---- combinations of queries in the queries' place ----

    def in_basis(self, basis: Tensor) -> "SubsetData":
        """basis: (q, q), orthogonal, its columns combinations of standardised queries, which become the outcomes."""
        turned = copy.copy(self)
        turned.basis, turned.queries = basis, self
        turned.losses = self._turned(lambda block: self.outcomes(block)[0].T, basis, self.num_subsets).T
        return turned

    def turned_mean(self, mean: Tensor) -> Tensor:
        """(q, n): prior means of the combinations, from those of the queries, all of one length of predictions."""
        assert self.basis is not None
        assert self.queries is not None
        own = self.queries

        def standardised(block: slice) -> Tensor:
            made = own.predictions(mean, block)
            assert made is not None
            return made[1].T

        return self._turned(standardised, self.basis, self.num_examples)

    def in_queries(self, weights: Tensor) -> Tensor:
        """(q, n): of the queries, from those of the combinations."""
        if self.basis is None or self.queries is None:
            return weights
        back = self._turned(lambda block: weights[block].to(self.device, torch.float64), self.basis.T, weights.shape[1])
        for block in self.blocks():
            back[block] *= self.queries.outcomes(block)[1].float().cpu()[:, None]
        return back

    def _turned(self, rows: Callable[[slice], Tensor], basis: Tensor, width: int) -> Tensor:
        """basis' rows, (q, width) float32 on the CPU; rows(block) has those of a block of queries."""
        total = torch.zeros(self.num_queries, width, device=self.device, dtype=torch.float32)
        for block in self.blocks():
            total += (basis[block].T @ rows(block)).float()
        return total.cpu()

    def predictions(self, mean: Tensor | None, block: slice) -> tuple[Tensor, Tensor] | None:
        """(m, block) of the prior mean, of variance 1, and the scaled mean, (n, block), that makes them."""
        if mean is None:
            return None
        means = mean[block].to(self.device, torch.float64).T
        made = self.masks @ means
        scale = made.square().mean(0).sqrt()
        scale = torch.where(scale > 0, scale, 1.0)
        return made / scale, means / scale

    def spectrum(self, covariance: Tensor | None, identity: float) -> Spectrum:
        """covariance: (n, n), whose share is 1 - identity."""
        return self._by_examples(covariance, identity) if self.many else self._by_subsets(covariance, identity)

    def _by_subsets(self, covariance: Tensor | None, identity: float) -> Spectrum:
        spread = self.masks * identity  # (m, n): X C
        if covariance is not None and identity < 1:
            spread += (1 - identity) * (self.masks @ covariance)
        kernel = spread @ self.masks.T
        values, vectors = torch.linalg.eigh((kernel + kernel.T) / 2)
        if values[0] < -MOST_NEGATIVE * values[-1]:
            raise NotACovarianceError
        return Spectrum(values.clamp(min=0), vectors.T.contiguous(), None, spread.T @ vectors)

    def _by_examples(self, covariance: Tensor | None, identity: float) -> Spectrum:
        root = None  # C = root root'
        assert self.overlaps is not None
        inner = self.overlaps
        if covariance is not None and identity < 1:
            mixed = (1 - identity) * covariance
            mixed.diagonal().add_(identity)
            root, failed = torch.linalg.cholesky_ex(mixed)
            if failed:
                raise NotACovarianceError
            inner = root.T @ self.overlaps @ root
        values, vectors = torch.linalg.eigh((inner + inner.T) / 2)
        kept = values > LEAST_EIGENVALUE * values[-1]
        values, vectors = values[kept], vectors[:, kept]
        vectors = vectors if root is None else root @ vectors
        lengths = values.sqrt()
        return Spectrum(values, None, vectors.T / lengths[:, None], vectors * lengths)

    def rotated(self, spectrum: Spectrum, columns: Tensor) -> tuple[Tensor, Tensor]:
        """(r, block): U' columns, of (m, block); and (m or n, block) whose products are the columns' own."""
        if spectrum.from_outcomes is not None:
            return spectrum.from_outcomes @ columns, columns
        assert spectrum.from_projected is not None
        return spectrum.from_projected @ (self.masks.T @ columns), columns
