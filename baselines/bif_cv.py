"""bif_cv: the local BIF with a control variate: exact where the prior alone decides, sampled where the loss does.

`baselines/bif/method.py` explains the shadow chain. The linear part is that of `bif`. A few hundred draws do what
thousands do without it as long as n_beta times the curvature stays below gamma; above, chain and shadow part ways and
it gains nothing.
"""

from dataclasses import dataclass

from baselines.bif.method import BIF


@dataclass(frozen=True, kw_only=True)
class BIFControlVariate(BIF):
    control_variate: bool = True
