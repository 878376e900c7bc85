"""The noise ceiling's interval holds the ceiling that is printed."""

import numpy as np
import pytest

from bench.metrics import noise_ceiling


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3, 1.0])
def test_it_holds_the_printed_value(noise: float) -> None:
    """Nearly perfect agreement of 25 subsets is where the value less its bias is far from the value."""
    rng = np.random.default_rng(0)
    signal = rng.normal(size=(25, 200))
    replicates = signal + noise * rng.normal(size=(2, 25, 200))
    found = noise_ceiling(replicates)
    assert found.ci_low <= found.ceiling <= found.ci_high
    assert found.reliability_low <= found.reliability <= found.reliability_high
    # The truth: the signal's correlation with the mean of two.
    right = 1 / np.sqrt(1 + noise**2 / 2)
    assert found.ci_low - 0.01 <= right <= found.ci_high + 0.01
