"""How many of the attributed examples a share is. A share that is none of them, or all, is refused before any work."""

from collections.abc import Sequence

from bench.experiment import Session
from bench.metrics import MINIMUM_SUBSETS
from retrain.errors import UsageError


def num_attributed(session: Session) -> int:
    """Of a question whose records are about one set of attributed examples."""
    if len(session.blocks) > len(session.experiment.seeds):
        shares = " ".join(f"{share:g}" for share in session.experiment.alpha_attribution)
        raise UsageError(f"--alpha-attribution {shares}: takes one value here; run the command for each")
    return len(session.question(*session.blocks[0]).attributed_indices())


def enough_to_correlate(session: Session) -> int:
    """`num_attributed`, refused where a correlation across them would say nothing."""
    n = num_attributed(session)
    if n < MINIMUM_SUBSETS:
        raise UsageError(
            f"{n} attributed examples; a correlation across them needs {MINIMUM_SUBSETS}: attribute more "
            "(--alpha-attribution)"
        )
    return n


def sizes_of(option: str, asked: Sequence[float], default: Sequence[float], n: int) -> list[int]:
    """How many examples each share is, smallest first. Of the default's, one at least; what is asked for must be some.

    Nowhere all of them: then nothing is left to compare.
    """
    for share in asked:
        if round(share * n) < 1:
            raise UsageError(
                f"{option} {share:g} of {n:,} attributed examples is none of them; take {1 / n:.2g} or more"
            )
    sizes = sorted({max(1, round(share * n)) for share in asked or default})
    if sizes[-1] >= n:
        raise UsageError(
            f"{option} {max(asked or default):g} of {n:,} attributed examples is all of them; expected fewer: take a "
            "smaller share, or attribute more (--alpha-attribution)"
        )
    return sizes
