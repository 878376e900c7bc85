"""Which examples are shown, by rule and never by hand, and how often methods name the same ones. Pure numpy.

Images: queries drawn at random from classes drawn at random, and those that the model is least sure of. Tokens: the
pairs of sequences with the strongest correlation between two tokens that are not the same word.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from bench.metrics import mean_and_standard_error

UNCERTAIN = 2  # of the queries that are shown
NAMED = (1, 3, 10, 30, 100)  # how many images a method may name when it is asked whether another names the same
RULE = (
    "Queries: one drawn at random from each of as many classes, drawn at random by the seed; the last two are those "
    "that the model is least sure of (highest entropy)."
)
TOKEN_RULE = "Pairs: of each query with the sequence that moves it most, those whose strongest two different words are"
ChosenQuery = tuple[int, str]  # position of a query, why it is shown


def queries_by_rule(classes: np.ndarray, entropy: np.ndarray, count: int, seed: int) -> list[ChosenQuery]:
    """`count` positions, in the order in which they are shown; all there are where they are fewer."""
    generator = np.random.default_rng([seed, len(classes)])
    unsure = min(UNCERTAIN, max(0, count - 1))
    least_sure = [int(k) for k in np.argsort(-entropy, kind="stable")[:unsure]]
    waiting = {
        one: [int(k) for k in generator.permutation(np.flatnonzero(classes == one)) if k not in least_sure]
        for one in np.unique(classes)
    }
    order = generator.permutation(list(waiting))
    drawn: list[int] = []
    while len(drawn) < count - len(least_sure) and any(waiting.values()):
        for one in order:
            if waiting[one] and len(drawn) < count - len(least_sure):
                drawn.append(waiting[one].pop(0))
    return [(k, "drawn from its class") for k in drawn] + [(k, "least sure") for k in least_sure]


def entropies(probabilities: np.ndarray) -> np.ndarray:
    """(queries, classes) -> (queries,), in nats."""
    return -(probabilities * np.log(np.clip(probabilities, 1e-12, None))).sum(1)


def shared_images(scores: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """For every two methods, side and number named: the share of images both name, mean over all queries.

    scores: label -> (queries, train), helpful ones negative. Two that chose at random would share `chance` of them.
    """
    found: list[dict[str, Any]] = []
    if not scores:
        return found
    num_train = next(iter(scores.values())).shape[1]
    counts = [count for count in NAMED if count < num_train]
    for side, sign in (("helpful", 1.0), ("harmful", -1.0)):
        orders = {label: np.argsort(sign * matrix, axis=1, kind="stable") for label, matrix in scores.items()}
        for one, other in combinations(scores, 2):
            for count in counts:
                both = zip(orders[one][:, :count], orders[other][:, :count], strict=True)
                shares = np.array([len(np.intersect1d(a, b)) / count for a, b in both])
                mean, error = mean_and_standard_error(shares)
                found.append(
                    {
                        "one": one, "other": other, "side": side, "named": count, "shared": round(mean, 6),
                        "error": round(error, 6), "chance": round(count / num_train, 6),
                    }
                )  # fmt: skip
    return found


def strongest_of_different_words(
    matrix: np.ndarray, query_tokens: Sequence[str], train_tokens: Sequence[str]
) -> tuple[int, int, float] | None:
    """(query token, training token, correlation) of the largest size among tokens that are not the same word."""
    one = np.array([token.strip().casefold() for token in query_tokens])
    other = np.array([token.strip().casefold() for token in train_tokens])
    apart = (one[:, None] != other[None, :]) & (one != "")[:, None] & (other != "")[None, :] & np.isfinite(matrix)
    if not apart.any():
        return None
    sizes = np.where(apart, np.abs(matrix), -1.0)
    row, column = (int(k) for k in np.unravel_index(int(np.argmax(sizes)), sizes.shape))
    return row, column, float(matrix[row, column])


def pairs_by_rule(strengths: Sequence[tuple[int, int, float]], count: int) -> list[int]:
    """Positions of the strongest, each query and training sequence once; strengths: (query, train, size)."""
    chosen: list[int] = []
    queries, trains = set[int](), set[int]()
    for position in sorted(range(len(strengths)), key=lambda k: (-strengths[k][2], k)):
        query, train, size = strengths[position]
        if size >= 0 and query not in queries and train not in trains and len(chosen) < count:
            chosen.append(position)
            queries.add(query)
            trains.add(train)
    return chosen
