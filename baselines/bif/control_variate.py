"""The control variate's two halves: what the shadow's covariance must be, and putting it in place of what it was.

A shadow is driven by a chain's own noise under the prior alone. For losses linear in the weights its covariance is
kappa times the inner product of gradients, exactly; `baselines/bif/method.py` has the reasons.
"""

import numpy as np
from torch import Tensor

from baselines.bif.covariance import Agreement, Centring, degrees_of_freedom
from baselines.bif.settings import ChainSettings
from baselines.method import Attribution

LEAST_VARIANCE = 0.01  # a training example's variance is at least this share of its linear part: differences are noisy


def prior_variance(settings: ChainSettings, centring: Centring, num_chains: int) -> float:
    """kappa: the expected sample variance of one coordinate of the shadow, over all draws of so many chains.

    The shadow is a first-order autoregression from 0: x' = a x + N(0, step_size), a = 1 - step_size gamma / 2. Draw t
    has variance v_t, and draws t and t + k covariance r^k v_t, r = a^thinning: a chain's mean has the variance
    sum_t v_t (1 + 2 (r + r^2 + ... + r^(draws - 1 - t))) / draws^2.
    """
    draws, thinning = settings.draws, settings.thinning
    a = 1 - settings.step_size * settings.gamma / 2
    steps = thinning * (settings.burn_in + np.arange(draws))
    variance = settings.step_size * (1 - np.power(a, 2.0 * steps)) / (1 - a * a)
    powers = np.power(a**thinning, np.arange(1.0, draws))
    later = np.concatenate([[0.0], np.cumsum(powers)])[::-1]
    of_chain_mean = (variance * (1 + 2 * later)).sum() / draws**2
    # Each chain's mean takes its own variance away; about a common mean, only the num_chains-th part of it.
    taken = of_chain_mean / num_chains if centring == "pooled" else of_chain_mean
    freedom = degrees_of_freedom(num_chains, draws, centring)
    return float(num_chains * draws * (variance.mean() - taken) / freedom)


def add_linear_part(
    cross: Tensor,
    train_scale: Tensor,
    shadow: tuple[Tensor, Tensor, Tensor],
    linear: Attribution,
    kappa: float,
    agreement: Agreement | None,
) -> dict[str, float]:
    """Puts what is known exactly in the place of what the shadow sampled; returns how much of the result was sampled.

    `cross` (q, n) and `train_scale` (n,) are the chains' covariances and standard deviations, changed in place;
    `shadow` has its own, and `linear` minus the gradients' inner products, of which kappa times is the exact
    covariance of linear losses.
    """
    shadow_cross, _, shadow_scale = shadow
    assert linear.train_scale is not None
    exact = kappa * linear.train_scale.to(cross.device).square()
    excess = train_scale.square() - shadow_scale.square()
    cross -= shadow_cross
    shares = {}
    if agreement is not None:
        of_scores, of_variances = agreement.shares()
        cross *= of_scores[:, None]
        excess *= of_variances
        shares = {"kept_difference_median": float(of_scores.median()), "kept_variance": float(of_variances)}
    sampled = cross.norm()
    cross.sub_(linear.scores.to(cross.device), alpha=kappa)
    train_scale.copy_((exact + excess).clamp(min=LEAST_VARIANCE * exact).sqrt())
    return {**shares, "sampled_share": float(sampled / cross.norm())}
