"""shampoo: influence functions in eigenvectors of the gradients' own second moments, at the cost of kfac.

As kfac, with other eigenvectors. K-FAC's sides are the second moments of a layer's inputs and of its output gradients,
as if positions and both sides were independent. Shampoo's are the sums of G G^T and G^T G over the layer's per-example
gradients G, which assumes neither. bergson sums them over gradients of batches; with one document a batch it gives
these scores. Eigenvalues are the mean squares of the gradients in that basis, as in EK-FAC.
"""

from dataclasses import dataclass
from typing import ClassVar

from baselines.kfac import KFAC


@dataclass(frozen=True, kw_only=True)
class Shampoo(KFAC):
    version: ClassVar[int] = 1
    gradient_sides: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Gupta et al. 2018, Shampoo (the sides); Vyas et al. 2024, SOAP (eigenvalues corrected in their basis)"
    )
