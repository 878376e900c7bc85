"""Did the chains mix, and did any of them run away? R-hat, effective sample size, and the health gate.

R-hat is the rank-normalised split R-hat and ESS the bulk effective sample size of Vehtari et al. (2021, Bayesian
Analysis 16), number for number what ArviZ calls `rhat(method="rank")` and `ess(method="bulk")`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtri
from scipy.stats import rankdata

# Above this the halves of the chains disagree about where the losses are. Vehtari et al. ask for 1.01 where means are
# published; a ranking of covariances from hundreds of draws is noisier than what 1.1 lets through.
RHAT_LIMIT = 1.1
NUMBERS_AT_ONCE = 2**18  # of traces whose ranks and spectra are taken together: a few MB
# A covariance of fewer independent draws is mostly noise, unless every draw is one (few draws, but well mixed).
ESS_LIMIT = 50


def split_rhat(traces: np.ndarray) -> np.ndarray:
    """Rank-normalised split R-hat: traces (chains, draws, ...) -> (...); NaN below four draws.

    The larger of that of the values (do the chains agree where they are?) and that of their distances from the median
    (do they agree how wide they are?). A trace that never moves has nothing to disagree about: 1.
    """
    return _each(_rhats, traces)


def effective_sample_size(traces: np.ndarray) -> np.ndarray:
    """Draws' worth of independent samples in the bulk: (chains, draws, ...) -> (...); NaN below four draws.

    Of the half-chains' normalised ranks, by Geyer's initial monotone sequence; NaN for a trace that never moves.
    """
    return _each(_sizes, traces)


def _each(statistic: Callable[[np.ndarray], np.ndarray], traces: np.ndarray) -> np.ndarray:
    """Some traces at a time, (examples, 2 chains, draws // 2): what ranks and spectra take stays small."""
    chains, draws = traces.shape[:2]
    if draws < 4 or not np.isfinite(traces).all():
        return np.full(traces.shape[2:], np.nan)
    half = draws // 2  # an odd draw in the middle is in neither
    values = np.moveaxis(traces.reshape(chains, draws, -1), 2, 0)
    at_once = max(1, NUMBERS_AT_ONCE // (chains * draws))
    found = []
    for start in range(0, len(values), at_once):
        some = values[start : start + at_once].astype(np.float64)
        found.append(statistic(np.concatenate([some[:, :, :half], some[:, :, -half:]], axis=1)))
    return np.concatenate(found or [np.empty(0)]).reshape(traces.shape[2:])


def _never_moves(halves: np.ndarray) -> np.ndarray:
    return np.ptp(halves, axis=(1, 2)) == 0


def _normal_scores(values: np.ndarray) -> np.ndarray:
    """Each example's ranks over all chains, ties averaged, as a normal distribution's quantiles (Blom's offsets)."""
    flat = values.reshape(len(values), -1)
    ranks = rankdata(flat, method="average", axis=1).reshape(values.shape)
    return ndtri((ranks - 3 / 8) / (flat.shape[1] + 1 / 4))


def _rhats(halves: np.ndarray) -> np.ndarray:
    folded = np.abs(halves - np.median(halves, axis=(1, 2), keepdims=True))
    found = [_potential_scale_reduction(_normal_scores(each)) for each in (halves, folded)]
    return np.where(_never_moves(halves), 1.0, np.maximum(*found))


def _potential_scale_reduction(values: np.ndarray) -> np.ndarray:
    draws = values.shape[2]
    between, within = draws * values.mean(2).var(axis=1, ddof=1), values.var(axis=2, ddof=1).mean(1)
    # Halves that are constant and equal among themselves (all folded values one) disagree about nothing.
    of_constants = np.where(between > 0, math.inf, 1.0)
    moving = within > 0
    return np.where(moving, np.sqrt((between / np.where(moving, within, 1.0) + draws - 1) / draws), of_constants)


def _sizes(halves: np.ndarray) -> np.ndarray:
    values = _normal_scores(halves)
    draws = values.shape[2]
    centred = values - values.mean(axis=2, keepdims=True)
    spectrum = np.fft.rfft(centred, n=2 * draws, axis=2)
    autocovariance = (np.fft.irfft(np.abs(spectrum) ** 2, n=2 * draws, axis=2)[:, :, :draws] / draws).mean(axis=1)
    between = values.mean(axis=2).var(axis=1, ddof=1)
    still = _never_moves(halves)
    found = [
        math.nan if still[k] else _size_of_one(autocovariance[k], between[k], values[k].size)
        for k in range(len(values))
    ]
    return np.array(found)


def _size_of_one(autocovariance: np.ndarray, between: float, num_draws: int) -> float:
    """From its half-chains' mean autocovariance at every distance, and the variance of their means."""
    draws = len(autocovariance)
    within = autocovariance[0] * draws / (draws - 1)
    correlation = 1 - (within - autocovariance) / (autocovariance[0] + between)
    correlation[0] = 1
    # A reversible chain's correlations, two neighbours at a time, are positive and fall: what follows the first pair
    # that is not positive is noise, except that its first half still counts where it is positive itself.
    num_pairs = max(0, (draws - 3) // 2)
    pairs = correlation[: 2 * num_pairs + 2].reshape(-1, 2).sum(1)
    ends = np.flatnonzero(pairs <= 0)
    count = min(int(ends[0]), num_pairs) if len(ends) else num_pairs
    after = correlation[2 * count] if pairs[count] >= 0 else max(correlation[2 * count], 0.0)
    time = 2 * np.minimum.accumulate(pairs[:count]).sum() - 1 + after
    return float(num_draws / max(time, 1 / math.log10(num_draws)))


@dataclass(frozen=True)
class ChainHealth:
    chain: int
    healthy: bool
    reason: str  # empty for a healthy chain
    first_loss: float
    last_loss: float


class DivergedError(FloatingPointError):
    """Too few chains are healthy; `mean_losses` (chains, draws) shows where they went."""

    def __init__(self, message: str, mean_losses: np.ndarray):
        super().__init__(message)
        self.mean_losses = mean_losses


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


def require_healthy(verdicts: list[ChainHealth], least: int, mean_losses: np.ndarray, whose: str, hint: str) -> None:
    """Raises where fewer than `least` chains are healthy: a covariance over a chain that ran away says nothing."""
    healthy = sum(verdict.healthy for verdict in verdicts)
    if healthy < least:
        reasons = "; ".join(dropped_chains(verdicts))
        raise DivergedError(
            f"{healthy} of {len(verdicts)} {whose} chains are healthy, {least} needed ({reasons}); {hint}", mean_losses
        )


def dropped_chains(verdicts: list[ChainHealth]) -> list[str]:
    return [f"chain {verdict.chain}: {verdict.reason}" for verdict in verdicts if not verdict.healthy]


def diagnose(mean: np.ndarray, examples: np.ndarray) -> dict[str, Any]:
    """R-hat and ESS of the mean training loss (chains, draws), and of single examples' (chains, draws, examples).

    `mixing` is there where the chains have not mixed, and says by what one sees it.
    """
    found = {
        "rhat": _median(split_rhat(mean)),
        "ess": _median(effective_sample_size(mean)),
        "rhat_examples_median": _median(split_rhat(examples)),
        "ess_examples_median": _median(effective_sample_size(examples)),
        "num_draws": mean.size,
    }
    sentence = mixing(found)
    return {**found, "mixing": sentence} if sentence else found


def mixing(found: dict[str, Any]) -> str | None:
    """One short sentence where the chains have not mixed, or are too short; None where neither, or nobody can tell."""
    rhats = [found[name] for name in ("rhat", "rhat_examples_median") if found[name] is not None]
    sizes = [found[name] for name in ("ess", "ess_examples_median") if found[name] is not None]
    size = f"{min(sizes):.0f} of {found['num_draws']} draws count" if sizes else f"{found['num_draws']} draws"
    if rhats and max(rhats) > RHAT_LIMIT:
        return f"not mixed: R-hat {max(rhats):.2f}, {size}"
    if sizes and min(sizes) < min(ESS_LIMIT, found["num_draws"] / 2):
        return f"too few draws: {size}"
    return None


def _median(values: np.ndarray) -> float | None:
    """Of the defined values; None where too few draws leave none."""
    defined = np.asarray(values)[np.isfinite(values)]
    return float(np.median(defined)) if defined.size else None
