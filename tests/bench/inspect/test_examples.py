"""Shown examples are chosen by rule, and what two methods share is counted right."""

import numpy as np
import pytest

from bench.inspect.examples import (
    entropies,
    queries_by_rule,
    shared_images,
)
from bench.inspect.tokens import pairs_by_rule, strongest_of_different_words

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


def test_a_sure_model_has_no_entropy() -> None:
    assert entropies(np.array([[1.0, 0.0], [0.5, 0.5]])) == pytest.approx([0.0, np.log(2)])


def test_methods_share_what_both_name() -> None:
    generator = np.random.default_rng(0)
    one = generator.normal(size=(200, 400))
    found = shared_images({"a": one, "b": 3 * one - 1, "c": -one, "d": generator.normal(size=one.shape)})

    def shared(first: str, second: str, side: str, named: int) -> float:
        (row,) = [
            row
            for row in found
            if (row["one"], row["other"], row["side"], row["named"]) == (first, second, side, named)
        ]
        assert row["chance"] == named / 400
        return row["shared"]

    for side in ("helpful", "harmful"):
        assert shared("a", "b", side, 10) == 1.0
        assert shared("a", "c", side, 10) == 0.0
        assert shared("a", "d", side, 100) == pytest.approx(0.25, abs=0.02)  # chance
    assert shared_images({}) == []


def test_the_strongest_pair_is_of_two_different_words() -> None:
    matrix = np.array([[-0.9, 0.2, -0.3], [0.1, -0.8, 0.95]])
    assert strongest_of_different_words(matrix, [" Cat", "dog"], ["cat", "Dog", " "]) == (0, 1, 0.2)
    assert strongest_of_different_words(matrix[:1, :1], ["a"], [" A"]) is None


def test_pairs_are_the_strongest_with_nobody_twice() -> None:
    strengths = [(0, 5, 0.9), (1, 5, 0.8), (2, 6, 0.7), (0, 7, 0.6), (3, 8, -1.0)]
    assert pairs_by_rule(strengths, 5) == [0, 2]
    assert pairs_by_rule(strengths, 1) == [0]
