"""Student's t and the normal distribution: the numbers of scipy.stats, whose import takes seconds, to the last bit."""

from scipy import special


def t_quantile(share: float, degrees: float) -> float:
    return float(special.stdtrit(degrees, share))


def t_above(value: float, degrees: float) -> float:
    """The probability of more than `value`."""
    return float(special.stdtr(degrees, -value))


def normal_quantile(share: float) -> float:
    return float(special.ndtri(share))


def normal_above(value: float) -> float:
    return float(special.ndtr(-value))
