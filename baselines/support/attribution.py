"""Attribution: what a method answers."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """What a method answers."""

    scores: Tensor  # (q, n) float32
    # Each training example's own scale, (n,): dividing by it is the train-side half of the paper's normalised BIF.
    train_scale: Tensor | None = None
    # Numbers worth printing and keeping beside the scores (R-hat, dropped chains), JSON-able.
    diagnostics: dict[str, Any] = field(default_factory=dict)
    # Arrays worth keeping (loss traces): small ones.
    arrays: dict[str, Tensor] = field(default_factory=dict)
    # What the scores are made of, each a prediction of its own that deserves a row beside them ("exact part").
    components: dict[str, "Attribution"] = field(default_factory=dict)

    def scaled(self, factors: Tensor) -> "Attribution":
        """Each query's scores times its factor, (q,)."""
        parts = {name: part.scaled(factors) for name, part in self.components.items()}
        return replace(self, scores=self.scores * factors[:, None].to(self.scores), components=parts)

    def normalised(self) -> Tensor | None:
        """(q, n): scores over the training examples' scale; None where the method has no such scale."""
        if self.train_scale is None:
            return None
        # An example of scale zero has zero scores; dividing by one keeps them zero.
        scale = self.train_scale.to(self.scores.device)
        return self.scores / torch.where(scale > 0, scale, torch.ones_like(scale))
