"""trackstar: projected gradients, in units of their own size, in a metric shared by training set and queries.

As `logra`, with two changes. Every number of a layer's gradient is divided by its root mean square over the training
set before it is projected, which stands for the optimiser's second moments: they are not kept here. The second moment
in the middle is `mix` of the queries' and the rest of the training set's, so that what all queries share counts less.
Proposed with unit vectors on both sides: that is the train-normalised row, since a query's own scale moves no rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from baselines.logra import LoGra, ProjectedGradients
from baselines.method import Attribution, Problem
from baselines.support.pieces import Piece, Whole

SMALLEST = 1e-12  # below it a mean square counts as none, and its number as zero


@dataclass(frozen=True, kw_only=True)
class TrackStar(LoGra):
    version: ClassVar[int] = 1
    paper: ClassVar[str] = "Chang et al. 2024, Scalable influence and fact tracing for large language model pretraining"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "relative_damping": (0.1, 1e-3, 0.01, 1.0, 10.0, 100.0),
        "mix": (0.5, 0.0, 0.9),
    }

    mix: float = 0.5  # of the second moment that is the queries'

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mix <= 1:
            raise ValueError(f"mix is {self.mix}; expected a share, 0 to 1")

    @property
    def fit_config(self) -> dict[str, Any]:
        return {name: value for name, value in super().fit_config.items() if name != "mix"}

    @torch.no_grad()
    def fit(self, problem: Problem) -> Any:
        """Mean squares of every number, and second moments of the projections, of each layer."""
        sizes = self._mean(problem, problem.train, partial(_squares, self._rows(problem)))
        rows = self._rows(problem, turn=partial(_in_units, sizes))
        return list(zip(sizes, self._mean(problem, problem.train, rows.moments), strict=True))

    def score(self, problem: Problem, state: Any) -> Attribution:
        turn = partial(_in_units, [sizes for sizes, _ in state])
        moments = [own for _, own in state]
        if self.mix:
            with torch.no_grad():
                asked = self._mean(problem, problem.queries, self._rows(problem, turn=turn).moments)
            moments = [(1 - self.mix) * own + self.mix * one for own, one in zip(moments, asked, strict=True)]
        return self._score(problem, [tuple(torch.linalg.eigh(moment)) for moment in moments], turn=turn)


def _squares(rows: ProjectedGradients, batch: Any) -> list[Tensor]:
    return [piece.squares(None, None) for piece in rows.pieces(batch)]


def _in_units(sizes: list[Tensor], number: int, piece: Piece) -> Piece:
    mean_squares = sizes[number]
    return Whole(piece.matrices() * torch.where(mean_squares > SMALLEST, mean_squares.rsqrt(), 0.0))
