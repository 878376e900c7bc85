"""What is kept of a chain while it runs, and how chains are joined: as whole traces of losses, or as running sums.

One chain's collector gives its *part*, tensors by name; `JoinedTraces` and `JoinedSums` join the parts of healthy
chains in their order. Parts may come from the device or, exactly the same, from files that another process wrote.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from baselines.bif.covariance import SUMS, Centring, StreamingCovariance, chains_covariance

DIAGNOSED_EXAMPLES = 64  # R-hat and ESS of this many examples' traces stand for all
BLOCK = 64  # draws that are summed at once

Part = Mapping[str, Tensor]


def diagnosed_examples(num_examples: int) -> Tensor:
    """Which examples' traces are looked at: a spread over all."""
    return torch.linspace(0, num_examples - 1, min(DIAGNOSED_EXAMPLES, num_examples)).long()


class Traces:
    """One chain as whole traces of every loss."""

    def __init__(self, num_draws: int, num_train: int, num_queries: int, device: torch.device):
        self.num_train, self.count = num_train, 0
        self._losses = torch.empty(num_draws, num_train + num_queries, device=device)

    def add(self, losses: Tensor) -> None:
        self._losses[self.count] = losses
        self.count += 1

    def state(self) -> dict[str, Tensor]:
        """What it has so far; `restore` goes on from there."""
        return {"losses": self._losses[: self.count]}

    def restore(self, state: Part) -> None:
        self.count = len(state["losses"])
        self._losses[: self.count] = state["losses"].to(self._losses.device)

    def mean_losses(self) -> Tensor:
        """(draws,): the mean training loss."""
        return self._losses[:, : self.num_train].mean(1)

    def part(self) -> dict[str, Tensor]:
        return {"losses": self._losses}


class RunningSums:
    """One chain as running sums: n x q numbers, and a few hundred for every draw to judge the chain by."""

    def __init__(
        self,
        num_draws: int,
        num_train: int,
        num_queries: int,
        device: torch.device,
        *,
        checkpoint: Tensor,
        train_covariance: bool = False,
    ):
        """`checkpoint` has the losses (n + q,) before any step: less them, what is summed is small."""
        self.num_train, self.count, self.device = num_train, 0, device
        self._first = 0 if train_covariance else num_train  # from here on columns count as queries
        self._sums = StreamingCovariance(num_train + num_queries - self._first, num_train, device)
        self._shift, self._filled = checkpoint, 0
        self._block = torch.empty(min(BLOCK, num_draws), num_train + num_queries, device=device)
        self._chosen = diagnosed_examples(num_train + num_queries).to(device)
        self._mean = torch.empty(num_draws, device=device)
        self._examples = torch.empty(num_draws, len(self._chosen), device=device)

    def add(self, losses: Tensor) -> None:
        self._mean[self.count] = losses[: self.num_train].mean()
        self._examples[self.count] = losses[self._chosen]
        self.count += 1
        torch.sub(losses, self._shift, out=self._block[self._filled])
        self._filled += 1
        if self._filled == len(self._block):
            self._flush()

    def _flush(self) -> None:
        if self._filled:
            block = self._block[: self._filled]
            self._sums.update(block[:, self._first :], block[:, : self.num_train])
            self._filled = 0

    def state(self) -> dict[str, Tensor]:
        so_far = {"mean_losses": self._mean[: self.count], "examples": self._examples[: self.count]}
        return {**self._sums.state(), **so_far, "block": self._block[: self._filled]}

    def restore(self, state: Part) -> None:
        self.count, self._filled = len(state["mean_losses"]), len(state["block"])
        self._sums = StreamingCovariance.of(state, self.count - self._filled, self.device)
        self._mean[: self.count] = state["mean_losses"].to(self.device)
        self._examples[: self.count] = state["examples"].to(self.device)
        self._block[: self._filled] = state["block"].to(self.device)

    def mean_losses(self) -> Tensor:
        return self._mean

    def part(self) -> dict[str, Tensor]:
        self._flush()
        return {**self._sums.state(), "examples": self._examples}


class JoinedTraces:
    def __init__(
        self, num_train: int, num_queries: int, centring: Centring, device: torch.device, train_covariance: bool = False
    ):
        self.num_train, self.device, self._centring = num_train, device, centring
        self._first = 0 if train_covariance else num_train
        self._chosen = diagnosed_examples(num_train + num_queries).to(device)
        self._chains: list[Tensor] = []

    def add(self, part: Part, num_draws: int) -> None:
        self._chains.append(part["losses"].to(self.device))

    def of_last_chain(self) -> tuple[Tensor, Tensor]:
        """(q, n) covariances and (n,) variances of the training losses over the last chain, about its own mean."""
        cross, _, train_scale = chains_covariance(self._chains[-1:], self.num_train, "chain")
        return cross, train_scale.square()

    def forget_last(self) -> None:
        """Every chain's traces are needed to the end."""

    def traces(self) -> Tensor:
        """(chains, draws, n + q)"""
        return torch.stack(self._chains)

    def diagnosed(self) -> Tensor:
        """(chains, draws, examples): a spread of single examples' traces."""
        return torch.stack([trace[:, self._chosen] for trace in self._chains]).cpu()

    def covariance(self) -> tuple[Tensor, Tensor, Tensor]:
        """(q, n) and both sets of standard deviations; with `train_covariance` the training examples' rows first."""
        return chains_covariance(self._chains, self.num_train, self._centring, self._first)


class JoinedSums:
    def __init__(
        self, num_train: int, num_queries: int, centring: Centring, device: torch.device, train_covariance: bool = False
    ):
        self.device, self._centring = device, centring
        self._total = StreamingCovariance(num_queries + num_train * train_covariance, num_train, device)
        self._last: StreamingCovariance | None = None
        self._diagnosed: list[Tensor] = []

    def add(self, part: Part, num_draws: int) -> None:
        self._last = StreamingCovariance.of(part, num_draws, self.device)
        if "examples" in part:
            self._diagnosed.append(part["examples"].cpu())
        self._total.add_chain(self._last, self._centring)

    def of_last_chain(self) -> tuple[Tensor, Tensor]:
        assert self._last is not None
        freedom = self._last.count - 1
        return self._last.cross / freedom, self._last.train_square / freedom

    def traces(self) -> Tensor:
        raise ValueError("running sums keep no traces")

    def diagnosed(self) -> Tensor:
        return torch.stack(self._diagnosed)

    def forget_last(self) -> None:
        """Gives the last chain's own sums back: they are in the total."""
        self._last = None

    def covariance(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._total.finish(self._centring)


def shadow_of(part: Part) -> Part:
    """The shadow's share of a chain's part."""
    return {name.removeprefix("shadow."): value for name, value in part.items() if name.startswith("shadow.")}


def for_shadow(part: Part) -> dict[str, Tensor]:
    """A shadow's part under the names it has beside its chain's; nobody judges a shadow's losses one by one."""
    return {f"shadow.{name}": value for name, value in part.items() if name in (*SUMS, "losses")}
