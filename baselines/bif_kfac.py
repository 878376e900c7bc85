"""bif_kfac: the local BIF under a localising Gaussian shaped like the loss, its linear part exact, the rest sampled.

`baselines/bif/method.py` explains the Kronecker-factored localiser, the shadow chain and the shrinkage. Where the loss
itself adds nothing that the chains agree on, what is left is -g^T (H + damping)^-1 g', an EK-FAC influence at that
damping: `sampled_share` in the diagnostics says how much the chains added.
"""

from dataclasses import dataclass

from baselines.bif.method import BIF


@dataclass(frozen=True, kw_only=True)
class BIFKroneckerFactored(BIF):
    localiser: str = "kronecker"
    control_variate: bool = True
    shrinkage: bool = True
    gradient: str = "difference"
