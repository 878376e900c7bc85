"""Which training examples are kept, and which seed decides what: pure functions, so that any worker can say it again.

Where retrained models start, and whether anything but the data differs between them:

- `shared`: from the base model's initial weights, each in an order of its own;
- `fresh`: from initial weights of its own as well;
- `replayed`: the base model's own training over again, initial weights, order, augmentation and number of steps, with
  the examples that are left out struck out of their batches (`retrain/replays`). Nothing is random, so a subset has one
  retraining and the noise ceiling is 1: this is what "the same seed" means for methods that differentiate a training.
"""

from functools import lru_cache
from typing import Any, Literal

import numpy as np

Scheme = Literal["fixed", "bernoulli", "balanced"]
SCHEMES: tuple[Scheme, ...] = ("fixed", "bernoulli", "balanced")

# Separate streams for separate purposes: a seed shared by name must not give correlated draws. Methods are judged on
# the subsets of `report`, their settings chosen on those of `tune`, and what retrains by itself learns from `learn`.
Stream = Literal["report", "tune", "learn"]
STREAMS: dict[Stream, int] = {"report": 1, "tune": 3, "learn": 4}
_ATTRIBUTION_STREAM = 2


def subset_size(n: int, alpha: float) -> int:
    return max(1, round(alpha * n))


def mask(
    seed: int,
    subset: int,
    alpha: float,
    n: int,
    scheme: Scheme = "fixed",
    stream: Stream = "report",
    groups: np.ndarray | None = None,
) -> np.ndarray:
    """Which of n attributed examples subset number `subset` keeps: (n,) bool.

    `fixed` keeps exactly round(alpha * n) examples; `bernoulli` keeps each with probability alpha, independently, as
    the paper does (sec:lds-def). `balanced` keeps round(alpha * n) examples and of each of the `groups`, (n,), its
    share: as many in every subset. Subsets of one (seed, subset) are nested in alpha.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha}; expected a fraction between 0 and 1 of the attributed examples")
    generator = np.random.default_rng([STREAMS[stream], seed, subset])
    kept = np.zeros(n, dtype=bool)
    if scheme == "fixed":
        kept[generator.permutation(n)[: subset_size(n, alpha)]] = True
    elif scheme == "balanced":
        if groups is None or len(groups) != n:
            raise ValueError(f"balanced subsets of {n} examples need the group of each; got {groups!r:.40}")
        kept[_balanced_order(generator.permutation(n), groups)[: subset_size(n, alpha)]] = True
    elif scheme == "bernoulli":
        kept[:] = generator.random(n) < alpha
        if not kept.any():  # a training run needs at least one example
            kept[generator.integers(n)] = True
    else:
        raise ValueError(f'unknown subset scheme "{scheme}"; available: {", ".join(SCHEMES)}')
    return kept


def _balanced_order(order: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The examples of a random order such that any beginning of it holds every group in proportion.

    This is Sainte-Lague's apportionment: the i-th example of a group of g comes at (i + 1/2) / g. The total is exact,
    more examples never take one away from a group, and ties go to the same group in every subset.
    """
    _, group, sizes = np.unique(groups[order], return_inverse=True, return_counts=True)
    by_group = np.argsort(group, kind="stable")
    place = np.empty(len(order), dtype=np.int64)  # within the group, in the random order
    place[by_group] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return order[np.lexsort((group, (place + 0.5) / sizes[group]))]


def masks(
    seed: int,
    num_subsets: int,
    alpha: float,
    n: int,
    scheme: Scheme = "fixed",
    stream: Stream = "report",
    groups: np.ndarray | None = None,
) -> np.ndarray:
    """(num_subsets, n) bool."""
    return np.stack([mask(seed, subset, alpha, n, scheme, stream, groups) for subset in range(num_subsets)])


def attributed_indices(seed: int, alpha_attribution: float, n: int) -> np.ndarray:
    """Which training examples are attributed, sorted; nested in alpha_attribution for one seed."""
    return _attributed_indices(seed, alpha_attribution, n).copy()


@lru_cache(maxsize=8)  # every retraining asks, and a permutation of 50,000 takes as long as writing its result
def _attributed_indices(seed: int, alpha_attribution: float, n: int) -> np.ndarray:
    if not 0 < alpha_attribution <= 1:
        raise ValueError(f"alpha_attribution is {alpha_attribution}; expected a fraction in (0, 1] of the training set")
    if alpha_attribution == 1:
        return np.arange(n)
    generator = np.random.default_rng([_ATTRIBUTION_STREAM, seed])
    return np.sort(generator.permutation(n)[: subset_size(n, alpha_attribution)])


# ---- seeds ----

Initialisation = Literal["shared", "fresh"]
INITIALISATIONS: tuple[Initialisation, ...] = ("shared", "fresh")
REPLAYED = "replayed"
STARTS = (*INITIALISATIONS, REPLAYED)

_BASE_STREAM, _SUBSET_STREAM, _CHECKPOINT_STREAM, _INITIAL_STREAM = 21, 22, 23, 24


def derived_seed(*parts: int) -> int:
    """A 32-bit seed from named parts; distinct parts give unrelated seeds."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def checkpoint_seeds(seed: int, number: int) -> dict[str, int]:
    """Of the base model (number 0), whose initial weights are the experiment's, and of further ones like it."""
    return {
        "init_seed": seed if number == 0 else derived_seed(seed, number, _CHECKPOINT_STREAM),
        "order_seed": derived_seed(seed, number, _BASE_STREAM),
    }


def retrain_seeds(config: dict[str, Any]) -> tuple[int, int]:
    """(init_seed, order_seed) of one retraining, from its unit's configuration."""
    parts = [config["seed"], config["subset"], config["replicate"], round(config["alpha"] * 1e6)]
    if config["stream"] != "report":
        parts.append(STREAMS[config["stream"]])
    fresh = config["initialisation"] == "fresh"
    return derived_seed(*parts, _INITIAL_STREAM) if fresh else config["seed"], derived_seed(*parts, _SUBSET_STREAM)
