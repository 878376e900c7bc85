"""Covariances between training and query losses over the draws, from kept traces or as a running sum.

`covariance` works on kept traces, draws x (n + q) numbers. `StreamingCovariance` keeps n x q numbers instead, which is
less as soon as the draws outnumber n q / (n + q); both give the same answer up to rounding.
"""

from collections.abc import Mapping, Sequence
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


def chains_covariance(
    chains: Sequence[Tensor], num_train: int, centring: Centring, first: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `covariance`, of (draws, n + q) traces, one a chain: only one of them is copied at a time.

    The columns from `first` on count as queries: with 0 the training examples, which come first, do so as well.
    """
    first = num_train if first is None else first
    pooled_mean = torch.stack([trace.mean(0) for trace in chains]).mean(0)
    columns = chains[0].shape[1]
    cross = chains[0].new_zeros(columns - first, num_train)
    squares = chains[0].new_zeros(columns)
    for trace in chains:
        centred = trace - (pooled_mean if centring == "pooled" else trace.mean(0))
        cross.addmm_(centred[:, first:].T, centred[:, :num_train])
        squares += centred.square_().sum(0)
    freedom = degrees_of_freedom(len(chains), len(chains[0]), centring)
    scales = squares.div_(freedom).sqrt_()
    return cross.div_(freedom), scales[first:], scales[:num_train].clone()


def covariance(query: Tensor, train: Tensor, centring: Centring) -> tuple[Tensor, Tensor, Tensor]:
    """(q, n) covariances and the two sets of standard deviations (q,), (n,), from (chains, draws, q) and (…, n)."""
    freedom = degrees_of_freedom(query.shape[0], query.shape[1], centring)
    query, train = centre(query, centring).flatten(0, 1), centre(train, centring).flatten(0, 1)
    cross = query.T @ train / freedom
    return cross, (query.square().sum(0) / freedom).sqrt(), (train.square().sum(0) / freedom).sqrt()


SUMS = ("query_mean", "train_mean", "query_square", "train_square", "cross")


class StreamingCovariance:
    """Welford's update of a mean, two variances and a cross-covariance, a block of draws at a time, in float32.

    Losses should be shifted by the checkpoint's, so that what is summed is small.
    """

    def __init__(self, num_queries: int, num_train: int, device: torch.device):
        self.count = 0
        self.query_mean, self.train_mean = (
            torch.zeros(num_queries, device=device),
            torch.zeros(num_train, device=device),
        )
        self.query_square, self.train_square = torch.zeros_like(self.query_mean), torch.zeros_like(self.train_mean)
        self.cross = torch.zeros(num_queries, num_train, device=device)

    def state(self) -> dict[str, Tensor]:
        """The sums by name: the tensors themselves, not copies."""
        return {name: getattr(self, name) for name in SUMS}

    @classmethod
    def of(cls, state: Mapping[str, Tensor], count: int, device: torch.device) -> "StreamingCovariance":
        """The sums of `count` draws, as `state` gave them."""
        sums = cls(0, 0, device)
        sums.count = count
        for name in SUMS:
            setattr(sums, name, state[name].to(device))
        return sums

    def update(self, query: Tensor, train: Tensor) -> None:
        """A block of draws: (draws, q) and (draws, n)."""
        query_mean, train_mean = query.mean(0), train.mean(0)
        query, train = query - query_mean, train - train_mean
        self.cross.addmm_(query.T, train)
        self._merge(len(query), query_mean, train_mean, query.square().sum(0), train.square().sum(0))

    def add_chain(self, chain: "StreamingCovariance", centring: Centring) -> None:
        """Joins a whole chain's sums: about a common mean, or about each chain's own."""
        if centring == "pooled":
            self.cross += chain.cross
            self._merge(chain.count, chain.query_mean, chain.train_mean, chain.query_square, chain.train_square)
        else:
            self.count += chain.count - 1  # one degree of freedom a chain; `finish` must not take another
            self.query_square += chain.query_square
            self.train_square += chain.train_square
            self.cross += chain.cross

    def _merge(
        self, count: int, query_mean: Tensor, train_mean: Tensor, query_square: Tensor, train_square: Tensor
    ) -> None:
        """Joins the means and squares of `count` draws, and what their means' distance adds to the cross sums."""
        total = self.count + count
        weight = self.count * count / total
        query_shift, train_shift = query_mean - self.query_mean, train_mean - self.train_mean
        self.query_square += query_square + weight * query_shift.square()
        self.train_square += train_square + weight * train_shift.square()
        self.cross.addr_(query_shift, train_shift, alpha=weight)
        self.query_mean += query_shift * (count / total)
        self.train_mean += train_shift * (count / total)
        self.count = total

    def finish(self, centring: Centring) -> tuple[Tensor, Tensor, Tensor]:
        """As `covariance`; the sums are used up."""
        freedom = self.count - (1 if centring == "pooled" else 0)
        return self.cross.div_(freedom), (self.query_square / freedom).sqrt(), (self.train_square / freedom).sqrt()


class Agreement:
    """How much of the mean of several chains' estimates is signal, judged by how far the chains are apart."""

    def __init__(self) -> None:
        self.num_chains = 0
        self._cross: Tensor | float = 0.0
        self._variances: Tensor | float = 0.0
        self._cross_squares: Tensor | float = 0.0  # (q,) sums over training examples and chains
        self._variance_squares: Tensor | float = 0.0

    def add(self, cross: Tensor, variances: Tensor, shadow_cross: Tensor, shadow_variances: Tensor) -> None:
        """One chain's covariances (q, n) and variances (n,), and its shadow's: their differences are compared.

        `cross` is changed in place.
        """
        self.num_chains += 1
        cross, variances = cross.sub_(shadow_cross), variances - shadow_variances
        self._cross_squares = self._cross_squares + torch.linalg.vector_norm(cross, dim=1).square()
        self._variance_squares = self._variance_squares + variances.square().sum()
        self._cross = cross if self.num_chains == 1 else self._cross.add_(cross)  # type: ignore[union-attr]
        self._variances = self._variances + variances

    def shares(self) -> tuple[Tensor, Tensor]:
        """James-Stein's factors, 0 to 1: (q,) for each query's row of the mean difference, () for the variances."""
        assert isinstance(self._cross, Tensor)
        assert isinstance(self._variances, Tensor)
        return (
            self._share(self._cross_squares, self._cross.square().sum(1)),
            self._share(self._variance_squares, self._variances.square().sum()),
        )

    def _share(self, sum_of_squares: Tensor | float, square_of_sum: Tensor) -> Tensor:
        """1 - (variance of the chains' mean) / (square of that mean); one chain shows no agreement at all."""
        if self.num_chains < 2:
            return torch.zeros_like(square_of_sum)
        mean_square = square_of_sum / self.num_chains**2
        noise = (sum_of_squares - self.num_chains * mean_square) / (self.num_chains * (self.num_chains - 1))
        return torch.where(mean_square > 0, 1 - noise / mean_square, 0.0).clamp(0, 1)
