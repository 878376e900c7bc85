"""Subsets and the queries' outcomes, in the eigenvectors in which every ratio of noise to signal is a diagonal."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BLOCK_BYTES = 256 * 2**20  # of one matrix of a block of queries
LEAST_EIGENVALUE = 1e-10  # of the largest: below it is rounding


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
        return Spectrum(values.clamp(min=0), vectors.T.contiguous(), None, spread.T @ vectors)

    def _by_examples(self, covariance: Tensor | None, identity: float) -> Spectrum:
        root = None  # C = root root'
        assert self.overlaps is not None
        inner = self.overlaps
        if covariance is not None and identity < 1:
            mixed = (1 - identity) * covariance
            mixed.diagonal().add_(identity)
            root = torch.linalg.cholesky(mixed)
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
