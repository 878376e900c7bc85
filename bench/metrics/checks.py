"""What the metrics take: tables of subsets x queries, replicates, and one line each for what they do not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]

MINIMUM_SUBSETS = 3


def as_table(values: ArrayLike, name: str) -> FloatArray:
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2:
        raise ValueError(
            f"{name} has shape {table.shape}; expected two dimensions, (num_subsets, num_queries). "
            "Reshape it, or average over replicates first."
        )
    return table


def check_pair(truth: ArrayLike, prediction: ArrayLike, name: str = "prediction") -> tuple[FloatArray, FloatArray]:
    truth, prediction = as_table(truth, "truth"), as_table(prediction, name)
    if truth.shape != prediction.shape:
        hint = (
            f"{name} looks transposed: pass masks @ scores.T"
            if truth.shape == prediction.shape[::-1]
            else "use the same subsets and the same queries, in the same order, for both"
        )
        raise ValueError(
            f"truth has shape {truth.shape} and {name} has shape {prediction.shape}; "
            f"expected the same (num_subsets, num_queries); {hint}."
        )
    return truth, prediction


def check_num_subsets(num_subsets: int) -> None:
    if num_subsets < MINIMUM_SUBSETS:
        raise ValueError(
            f"got {num_subsets} subsets (rows); a rank correlation across subsets needs at least {MINIMUM_SUBSETS}. "
            "Retrain on more subsets, or transpose if rows are queries."
        )


def check_confidence(confidence: float, num_bootstrap: int) -> None:
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence}; expected a fraction between 0 and 1, such as 0.95.")
    if num_bootstrap < 1:
        raise ValueError(f"num_bootstrap is {num_bootstrap}; expected at least 1, and 1000 for steady interval ends.")


def as_replicates(
    replicates: ArrayLike | Sequence[ArrayLike], present: ArrayLike | None
) -> tuple[FloatArray, BoolArray]:
    """(R, K, q) losses and (R, K) which of them exist."""
    if isinstance(replicates, Sequence):
        if present is not None:
            raise ValueError("got `present` with a list of replicates; the lengths already say it: drop `present`.")
        tables = [as_table(table, f"replicates[{k}]") for k, table in enumerate(replicates)]
        shapes = [table.shape for table in tables]
        if not tables or len({shape[1] for shape in shapes}) != 1 or min(shape[0] for shape in shapes) < 1:
            raise ValueError(
                f"replicates is a list with shapes {shapes[:5]}{'...' if len(shapes) > 5 else ''}; expected one "
                "(num_replicates, num_queries) array a subset, one replicate or more each, all with the same queries."
            )
        values = np.full((max(shape[0] for shape in shapes), len(tables), shapes[0][1]), np.nan)
        exists = np.zeros(values.shape[:2], dtype=bool)
        for k, table in enumerate(tables):
            values[: len(table), k] = table
            exists[: len(table), k] = True
        return values, exists
    values = np.asarray(replicates, dtype=np.float64)
    if values.ndim != 3:
        raise ValueError(
            f"replicates has shape {values.shape}; expected (num_replicates, num_subsets, num_queries), or a list with "
            "one (num_replicates, num_queries) array a subset. Stack the replicates along a new first axis."
        )
    exists = np.ones(values.shape[:2], dtype=bool) if present is None else np.asarray(present, dtype=bool)
    if exists.shape != values.shape[:2] or not exists.any(axis=0).all():
        raise ValueError(
            f"present has shape {exists.shape} and leaves {int((~exists.any(axis=0)).sum())} subsets without any; "
            f"expected {values.shape[:2]}, (num_replicates, num_subsets), with one True or more a subset."
        )
    return values, exists


def mean_over_replicates(
    replicates: ArrayLike | Sequence[ArrayLike], *, present: ArrayLike | None = None
) -> FloatArray:
    """The truth, (num_subsets, num_queries): what each subset's replicates average to.

    Arguments as `bench.metrics.noise_ceiling` takes them.
    """
    values, exists = as_replicates(replicates, present)
    if exists.all():
        return values.mean(axis=0)
    return np.where(exists[:, :, None], values, 0.0).sum(axis=0) / exists.sum(axis=0)[:, None]
