"""Covariances between training and query losses over the draws, from kept traces or as a running sum.

`covariance` works on kept traces, draws x (n + q) numbers. `StreamingCovariance` keeps n x q numbers instead, which is
less as soon as the draws outnumber n q / (n + q); both give the same answer up to rounding. `Kept` and `Streamed` are
the two ways of collecting chains: a chain counts only once `keep` says that it is healthy.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
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


def chains_covariance(chains: Sequence[Tensor], num_train: int, centring: Centring) -> tuple[Tensor, Tensor, Tensor]:
    """As `covariance`, of (draws, n + q) traces, one a chain: only one of them is copied at a time."""
    pooled_mean = torch.stack([trace.mean(0) for trace in chains]).mean(0)
    columns = chains[0].shape[1]
    cross = chains[0].new_zeros(columns - num_train, num_train)
    squares = chains[0].new_zeros(columns)
    for trace in chains:
        centred = trace - (pooled_mean if centring == "pooled" else trace.mean(0))
        cross.addmm_(centred[:, num_train:].T, centred[:, :num_train])
        squares += centred.square_().sum(0)
    freedom = degrees_of_freedom(len(chains), len(chains[0]), centring)
    scales = squares.div_(freedom).sqrt_()
    return cross.div_(freedom), scales[num_train:], scales[:num_train].clone()


def covariance(query: Tensor, train: Tensor, centring: Centring) -> tuple[Tensor, Tensor, Tensor]:
    """(q, n) covariances and the two sets of standard deviations (q,), (n,), from (chains, draws, q) and (…, n)."""
    freedom = degrees_of_freedom(query.shape[0], query.shape[1], centring)
    query, train = centre(query, centring).flatten(0, 1), centre(train, centring).flatten(0, 1)
    cross = query.T @ train / freedom
    return cross, (query.square().sum(0) / freedom).sqrt(), (train.square().sum(0) / freedom).sqrt()


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

    def clear(self) -> None:
        self.count = 0
        for total in (self.query_mean, self.train_mean, self.query_square, self.train_square, self.cross):
            total.zero_()

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


DIAGNOSED_EXAMPLES = 200  # R-hat and ESS of this many examples' traces stand for all
BLOCK = 64  # draws that are summed at once


class Kept:
    """Chains as whole traces of every loss."""

    def __init__(self, num_draws: int, num_train: int, num_queries: int, centring: Centring, device: torch.device):
        self.num_draws, self.num_train, self.num_examples = num_draws, num_train, num_train + num_queries
        self.device, self._centring = device, centring
        self._chains: list[Tensor] = []
        self._trace = torch.empty(0)

    def start(self) -> None:
        self._trace = torch.empty(self.num_draws, self.num_examples, device=self.device)

    def add(self, draw: int, losses: Tensor) -> None:
        self._trace[draw] = losses

    def mean_losses(self) -> np.ndarray:
        """(draws,): the mean training loss of the chain just run."""
        return self._trace[:, : self.num_train].mean(1).cpu().numpy()

    def keep(self) -> None:
        self._chains.append(self._trace)

    def of_last_chain(self) -> tuple[Tensor, Tensor]:
        """(q, n) covariances and (n,) variances of the training losses over the chain kept last, about its own mean."""
        cross, _, train_scale = chains_covariance(self._chains[-1:], self.num_train, "chain")
        return cross, train_scale.square()

    def traces(self) -> Tensor:
        """(chains, draws, n + q)"""
        return torch.stack(self._chains)

    def diagnosed(self) -> np.ndarray:
        """(chains, draws, examples): a spread of single examples' traces."""
        chosen = _spread(self.num_examples).to(self.device)
        return torch.stack([trace[:, chosen] for trace in self._chains]).cpu().numpy()

    def covariance(self) -> tuple[Tensor, Tensor, Tensor]:
        return chains_covariance(self._chains, self.num_train, self._centring)


class Streamed:
    """Chains as running sums: n x q numbers however many draws there are."""

    def __init__(
        self,
        num_draws: int,
        num_train: int,
        num_queries: int,
        centring: Centring,
        device: torch.device,
        *,
        checkpoint: Tensor,
    ):
        """`checkpoint` has the losses (n + q,) before any step: less them, what is summed is small."""
        self.num_draws, self.num_train = num_draws, num_train
        self.device, self._centring = device, centring
        self._chosen = _spread(num_train + num_queries).to(device)
        self._total = StreamingCovariance(num_queries, num_train, device)
        self._chain = StreamingCovariance(num_queries, num_train, device)
        self._block = torch.empty(min(BLOCK, num_draws), num_train + num_queries, device=device)
        self._shift = checkpoint
        self._diagnosed: list[Tensor] = []

    def start(self) -> None:
        self._chain.clear()
        self._filled = 0
        self._mean = torch.empty(self.num_draws, device=self.device)
        self._examples = torch.empty(self.num_draws, len(self._chosen), device=self.device)

    def add(self, draw: int, losses: Tensor) -> None:
        self._mean[draw] = losses[: self.num_train].mean()
        self._examples[draw] = losses[self._chosen]
        torch.sub(losses, self._shift, out=self._block[self._filled])
        self._filled += 1
        if self._filled == len(self._block):
            self._flush()

    def _flush(self) -> None:
        if self._filled:
            block = self._block[: self._filled]
            self._chain.update(block[:, self.num_train :], block[:, : self.num_train])
            self._filled = 0

    def mean_losses(self) -> np.ndarray:
        return self._mean.cpu().numpy()

    def keep(self) -> None:
        self._flush()
        self._diagnosed.append(self._examples)
        self._total.add_chain(self._chain, self._centring)

    def of_last_chain(self) -> tuple[Tensor, Tensor]:
        return self._chain.cross / (self._chain.count - 1), self._chain.train_square / (self._chain.count - 1)

    def traces(self) -> Tensor:
        raise ValueError("running sums keep no traces")

    def diagnosed(self) -> np.ndarray:
        return torch.stack(self._diagnosed).cpu().numpy()

    def covariance(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._total.finish(self._centring)


def _spread(num_examples: int) -> Tensor:
    return torch.linspace(0, num_examples - 1, min(DIAGNOSED_EXAMPLES, num_examples)).long()
