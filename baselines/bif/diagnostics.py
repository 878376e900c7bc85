"""Did the chains mix, and did any of them run away? Split R-hat, effective sample size, and the health gate."""

import math
from dataclasses import dataclass

import numpy as np


def split_rhat(traces: np.ndarray) -> np.ndarray:
    """Gelman-Rubin statistic of half-chains: traces (chains, draws, ...) -> (...); NaN below four draws.

    A trace that never moves has no between-half variance either: its R-hat is 1.
    """
    _, num_draws = traces.shape[:2]
    half = num_draws // 2
    if half < 2:
        return np.full(traces.shape[2:], np.nan)
    halves = np.concatenate([traces[:, :half], traces[:, num_draws - half :]]).astype(np.float64)
    within = halves.var(axis=1, ddof=1).mean(axis=0)
    between = half * halves.mean(axis=1).var(axis=0, ddof=1)
    pooled = (half - 1) / half * within + between / half
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(pooled > 0, np.sqrt(pooled / within), 1.0)


def effective_sample_size(traces: np.ndarray) -> np.ndarray:
    """Draws' worth of independent samples: (chains, draws, ...) -> (...), by Geyer's initial monotone sequence."""
    num_chains, num_draws = traces.shape[:2]
    values = traces.reshape(num_chains, num_draws, -1).astype(np.float64)
    if num_draws < 4:
        return np.full(traces.shape[2:], np.nan)
    centred = values - values.mean(axis=1, keepdims=True)
    length = 2 ** math.ceil(math.log2(2 * num_draws))
    spectrum = np.fft.rfft(centred, n=length, axis=1)
    autocovariance = np.fft.irfft(np.abs(spectrum) ** 2, n=length, axis=1)[:, :num_draws] / num_draws
    within = autocovariance[:, 0].mean(axis=0) * num_draws / (num_draws - 1)
    total = within * (num_draws - 1) / num_draws
    if num_chains > 1:
        total = total + values.mean(axis=1).var(axis=0, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        correlation = 1 - (within - autocovariance.mean(axis=0)) / total  # (draws, columns)
    correlation[0] = 1
    pairs = correlation[: num_draws - num_draws % 2].reshape(-1, 2, values.shape[2]).sum(axis=1)
    positive = np.logical_and.accumulate(pairs > 0, axis=0)
    pairs = np.minimum.accumulate(np.where(positive, pairs, 0), axis=0)
    time = np.maximum(2 * pairs.sum(axis=0) - 1, 1 / math.log10(max(num_chains * num_draws, 10)))
    size = np.where(total > 0, num_chains * num_draws / time, np.nan)
    return size.reshape(traces.shape[2:])


@dataclass(frozen=True)
class ChainHealth:
    chain: int
    healthy: bool
    reason: str  # empty for a healthy chain
    first_loss: float
    last_loss: float


def judge_chain(chain: int, mean_losses: np.ndarray, start_loss: float, limit: float) -> ChainHealth:
    """Whether one chain's trace of mean losses (draws,) stayed finite and near the checkpoint's.

    A chain has run away when its mean loss ends above `limit` nats over the checkpoint's.
    """
    finite = np.isfinite(mean_losses)
    reason = ""
    if not finite.all():
        reason = f"non-finite loss at draw {int(np.argmin(finite))}"
    else:
        end = float(mean_losses[-max(1, len(mean_losses) // 10) :].mean())
        if end > start_loss + limit:
            reason = f"loss ran away from {start_loss:.4g} to {end:.4g} (limit: {limit:g} above the checkpoint's)"
    return ChainHealth(chain, not reason, reason, float(mean_losses[0]), float(mean_losses[-1]))
