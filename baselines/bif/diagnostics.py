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
# A covariance of fewer independent draws is mostly noise, unless every draw is one (few draws, but well mixed).
ESS_LIMIT = 50


def split_rhat(traces: np.ndarray) -> np.ndarray:
    """Rank-normalised split R-hat: traces (chains, draws, ...) -> (...); NaN below four draws.

    The larger of that of the values (do the chains agree where they are?) and that of their distances from the median
    (do they agree how wide they are?). A trace that never moves has nothing to disagree about: 1.
    """
    return _each(_rhat_of_one, traces)


def effective_sample_size(traces: np.ndarray) -> np.ndarray:
    """Draws' worth of independent samples in the bulk: (chains, draws, ...) -> (...); NaN below four draws.

    Of the half-chains' normalised ranks, by Geyer's initial monotone sequence; NaN for a trace that never moves.
    """
    return _each(_ess_of_one, traces)


def _each(statistic: Callable[[np.ndarray], float], traces: np.ndarray) -> np.ndarray:
    """One trace at a time: what ranks and spectra take stays that of one, however many examples there are."""
    chains, draws = traces.shape[:2]
    values = traces.reshape(chains, draws, -1)
    if draws < 4 or not np.isfinite(traces).all():
        return np.full(traces.shape[2:], np.nan)
    found = [statistic(values[:, :, k].astype(np.float64)) for k in range(values.shape[2])]
    return np.array(found).reshape(traces.shape[2:])


def _halves(values: np.ndarray) -> np.ndarray:
    """(2 chains, draws // 2); an odd draw in the middle is in neither."""
    half = values.shape[1] // 2
    return np.concatenate([values[:, :half], values[:, -half:]])


def _normal_scores(values: np.ndarray) -> np.ndarray:
    """Ranks over all chains, ties averaged, as a normal distribution's quantiles (Blom's offsets)."""
    ranks = rankdata(values, method="average").reshape(values.shape)
    return ndtri((ranks - 3 / 8) / (values.size + 1 / 4))


def _rhat_of_one(values: np.ndarray) -> float:
    halves = _halves(values)
    if np.ptp(halves) == 0:
        return 1.0
    folded = np.abs(halves - np.median(halves))
    return max(_potential_scale_reduction(_normal_scores(each)) for each in (halves, folded))


def _potential_scale_reduction(values: np.ndarray) -> float:
    draws = values.shape[1]
    between, within = draws * values.mean(1).var(ddof=1), values.var(axis=1, ddof=1).mean()
    # Halves that are constant and equal among themselves (all folded values one) disagree about nothing.
    return math.sqrt((between / within + draws - 1) / draws) if within > 0 else (math.inf if between > 0 else 1.0)


def _ess_of_one(values: np.ndarray) -> float:
    halves = _halves(values)
    if np.ptp(halves) == 0:
        return math.nan
    values = _normal_scores(halves)
    chains, draws = values.shape
    centred = values - values.mean(axis=1, keepdims=True)
    spectrum = np.fft.rfft(centred, n=2 * draws, axis=1)
    autocovariance = (np.fft.irfft(np.abs(spectrum) ** 2, n=2 * draws, axis=1)[:, :draws] / draws).mean(axis=0)
    within = autocovariance[0] * draws / (draws - 1)
    total = autocovariance[0] + values.mean(axis=1).var(ddof=1)
    correlation = 1 - (within - autocovariance) / total
    correlation[0] = 1
    # A reversible chain's correlations, two neighbours at a time, are positive and fall: what follows the first pair
    # that is not positive is noise, except that its first half still counts where it is positive itself.
    num_pairs = max(0, (draws - 3) // 2)
    pairs = correlation[: 2 * num_pairs + 2].reshape(-1, 2).sum(1)
    ends = np.flatnonzero(pairs <= 0)
    count = min(int(ends[0]), num_pairs) if len(ends) else num_pairs
    after = correlation[2 * count] if pairs[count] >= 0 else max(correlation[2 * count], 0.0)
    time = 2 * np.minimum.accumulate(pairs[:count]).sum() - 1 + after
    return float(chains * draws / max(time, 1 / math.log10(chains * draws)))


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
