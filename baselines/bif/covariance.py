"""Covariances between training and query losses over the draws, from kept traces or as a running sum.

`covariance` works on kept traces, draws x (n + q) numbers. `StreamingCovariance` keeps n x q numbers instead, which is
less as soon as the draws outnumber n q / (n + q); both give the same answer up to rounding.
"""

from typing import Literal

import torch
from torch import Tensor

Centring = Literal["pooled", "chain"]
CENTRINGS: tuple[Centring, ...] = ("pooled", "chain")


def centre(traces: Tensor, centring: Centring) -> Tensor:
    """traces (chains, draws, columns), centred over all draws or within each chain."""
    if centring == "pooled":
        return traces - traces.mean(dim=(0, 1), keepdim=True)
    return traces - traces.mean(dim=1, keepdim=True)


def degrees_of_freedom(num_chains: int, num_draws: int, centring: Centring) -> int:
    return num_chains * num_draws - (1 if centring == "pooled" else num_chains)


def covariance(query: Tensor, train: Tensor, centring: Centring) -> tuple[Tensor, Tensor, Tensor]:
    """(q, n) covariances and the two sets of standard deviations (q,), (n,), from (chains, draws, q) and (…, n)."""
    freedom = degrees_of_freedom(query.shape[0], query.shape[1], centring)
    query, train = centre(query, centring).flatten(0, 1), centre(train, centring).flatten(0, 1)
    cross = query.T @ train / freedom
    return cross, (query.square().sum(0) / freedom).sqrt(), (train.square().sum(0) / freedom).sqrt()


class StreamingCovariance:
    """Welford's update of a mean, two variances and a cross-covariance, a block of draws at a time, in float32.

    Losses are shifted by the checkpoint's first, so that what is summed is small.
    """

    def __init__(self, num_queries: int, num_train: int, device: torch.device):
        self.count = 0
        self.query_mean, self.train_mean = (
            torch.zeros(num_queries, device=device),
            torch.zeros(num_train, device=device),
        )
        self.query_square, self.train_square = torch.zeros_like(self.query_mean), torch.zeros_like(self.train_mean)
        self.cross = torch.zeros(num_queries, num_train, device=device)

    def update(self, query: Tensor, train: Tensor) -> None:
        """A block of draws: (draws, q) and (draws, n)."""
        self._merge(
            len(query),
            query.mean(0),
            train.mean(0),
            (query - query.mean(0)).square().sum(0),
            (train - train.mean(0)).square().sum(0),
            (query - query.mean(0)).T @ (train - train.mean(0)),
        )

    def add_chain(self, chain: "StreamingCovariance", centring: Centring) -> None:
        """Joins a whole chain's sums: about a common mean, or about each chain's own."""
        if centring == "pooled":
            self._merge(
                chain.count, chain.query_mean, chain.train_mean, chain.query_square, chain.train_square, chain.cross
            )
        else:
            self.count += chain.count - 1  # one degree of freedom a chain; `finish` must not take another
            self.query_square += chain.query_square
            self.train_square += chain.train_square
            self.cross += chain.cross

    def _merge(self, count: int, query_mean: Tensor, train_mean: Tensor, *sums: Tensor) -> None:
        total = self.count + count
        weight = self.count * count / total
        query_shift, train_shift = query_mean - self.query_mean, train_mean - self.train_mean
        self.query_square += sums[0] + weight * query_shift.square()
        self.train_square += sums[1] + weight * train_shift.square()
        self.cross += sums[2]
        self.cross.addr_(query_shift, train_shift, alpha=weight)
        self.query_mean += query_shift * (count / total)
        self.train_mean += train_shift * (count / total)
        self.count = total

    def finish(self, centring: Centring) -> tuple[Tensor, Tensor, Tensor]:
        """As `covariance`."""
        freedom = self.count - (1 if centring == "pooled" else 0)
        return self.cross / freedom, (self.query_square / freedom).sqrt(), (self.train_square / freedom).sqrt()
