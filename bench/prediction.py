"""What scores predict for subsets: the sum of each query's scores over the members of each subset.

The source of this module is in the key of every stored prediction, so it holds the sum and nothing else.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike
from threadpoolctl import ThreadpoolController

BLOCK_BYTES = 2**24  # of scores that a thread holds in float64 at once


@lru_cache(maxsize=1)
def _blas() -> ThreadpoolController:
    """Of numpy's products; looking for it among the loaded libraries takes longer than a small sum."""
    return ThreadpoolController().select(user_api="blas")


def subset_sums(masks: ArrayLike, scores: ArrayLike) -> np.ndarray:
    """(subsets, queries) float64, of masks (subsets, examples) and scores (queries, examples).

    In float64, so that an offset that all scores share does not drown what sets them apart; each block of queries on
    one thread, because the order of a sum depends on their number.
    """
    kept = np.asarray(masks).astype(np.float64)
    given = np.asarray(scores)
    sums = np.empty((len(kept), len(given)))
    rows = max(1, BLOCK_BYTES // (8 * max(1, given.shape[1])))

    def add_up(start: int) -> None:
        # A score that is not finite makes its query undefined, here or in the metric.
        with np.errstate(invalid="ignore"):
            sums[:, start : start + rows] = kept @ given[start : start + rows].astype(np.float64).T

    with _blas().limit(limits=1), ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(add_up, range(0, len(given), rows)))
    return sums
