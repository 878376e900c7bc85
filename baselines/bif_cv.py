"""bif_cv: the local BIF with a control variate, exact where the prior alone decides.

`baselines/bif/method.py` explains the shadow chain. The linear part is that of `bif`, and exact: GradSim, whose own
score stands beside this one's as the exact part. A few hundred draws do what thousands do without it as long as n_beta
times the curvature stays below gamma; above, chain and shadow part ways and it gains nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from baselines.bif.method import BIF


@dataclass(frozen=True, kw_only=True)
class BIFControlVariate(BIF):
    version: ClassVar[int] = 2
    grid: ClassVar[Sequence[Mapping[str, tuple[Any, ...]]]] = [
        {"gamma": (0.0, 1e3, 1e4, 1e5)},
        {"gamma": (1e4, 1e5), "n_beta": (1000.0,)},
        {"draws": (500,)},
    ]

    control_variate: bool = True
    draws: int = 50  # what it saves
