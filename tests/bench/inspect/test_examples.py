"""Shown queries are chosen by rule, and of tokens the strongest two different words are named."""

import numpy as np

from bench.inspect import queries_by_rule
from bench.inspect.tokens import strongest_of_different_words

CLASSES = np.repeat(np.arange(10), 30)


def test_queries_are_of_different_classes_and_the_least_sure_come_last() -> None:
    entropy = np.random.default_rng(0).uniform(size=300)
    chosen = queries_by_rule(CLASSES, entropy, 8, seed=1)
    assert chosen == queries_by_rule(CLASSES, entropy, 8, seed=1)
    assert chosen != queries_by_rule(CLASSES, entropy, 8, seed=2)
    positions = [position for position, _ in chosen]
    assert len(set(positions)) == 8
    assert [why for _, why in chosen] == ["drawn from its class"] * 6 + ["least sure"] * 2
    assert len({CLASSES[position] for position in positions[:6]}) == 6
    assert positions[6:] == list(np.argsort(-entropy)[:2])


def test_more_queries_than_classes_go_round_and_few_are_all_shown() -> None:
    entropy = np.linspace(0, 1, 300)
    many = [position for position, _ in queries_by_rule(CLASSES, entropy, 24, seed=1)]
    counts = np.bincount(CLASSES[many[:22]], minlength=10)
    assert counts.min() == 2
    assert counts.max() == 3
    assert len(queries_by_rule(CLASSES[:3], entropy[:3], 8, seed=1)) == 3
    assert queries_by_rule(CLASSES, entropy, 1, seed=1)[0][1] == "drawn from its class"


def test_the_strongest_pair_is_of_two_different_words() -> None:
    matrix = np.array([[-0.9, 0.2, -0.3], [0.1, -0.8, 0.95]])
    assert strongest_of_different_words(matrix, [" Cat", "dog"], ["cat", "Dog", " "]) == (0, 1, 0.2)
    assert strongest_of_different_words(matrix[:1, :1], ["a"], [" A"]) is None
