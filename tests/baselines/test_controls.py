"""repsim, bm25 and same_class: the cheap controls, each against the same thing computed by hand."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from baselines.method import Problem, load_method
from baselines.repsim import last_hidden
from retrain.examples import Columns, Examples
from retrain.tasks import load_task
from retrain.tasks.tinylm import TinyLM
from tests.helpers.problems import problem_of
from tests.helpers.tiny_language import sentences, tiny_bert


def ask(task, scratch: Path, queries: Examples, **more) -> Problem:
    return problem_of(task, scratch, task.build_model(0).eval(), queries=queries, **more)


@pytest.fixture(scope="module")
def language() -> TinyLM:
    return load_task("tinylm", num_train=40, num_queries=6, length=12, hidden=8, layers=1, pretraining_steps=3)


class TestRepSim:
    def test_it_is_the_cosine_of_what_the_head_reads(self, scratch: Path) -> None:
        task = load_task("digits", num_train=60)
        queries = task.query_data.select(range(5))
        asked, model = ask(task, scratch, queries), task.build_model(0).eval()
        found = load_method("repsim", batch_size=7).score(asked, None)
        train, asked = model.features(task.train_data.inputs), model.features(queries.inputs)
        expected = -torch.nn.functional.cosine_similarity(asked[:, None], train[None], dim=-1)
        torch.testing.assert_close(found.scores, expected)

    def test_the_query_itself_comes_first(self, scratch: Path, language: TinyLM) -> None:
        for task in (load_task("digits", num_train=60), language):
            asked = ask(task, scratch, task.train_data.select([11, 3]))
            for options in ({}, {"centred": True}, {"pooling": "last"}):
                scores = load_method("repsim", **options).score(asked, None).scores
                assert scores.argmin(1).tolist() == [11, 3]
                torch.testing.assert_close(scores.min(1).values, -torch.ones(2))

    def test_sequences_are_pooled_without_their_padding(self, scratch: Path) -> None:
        model, examples = tiny_bert(), sentences(9)
        hidden = torch.randn(9, 7, 4)
        mask = examples.inputs["attention_mask"]
        for pooling in ("mean", "last"):
            found = load_method("repsim", pooling=pooling)._pooled(hidden, examples.inputs)
            for row, length in enumerate(mask.sum(1)):
                kept = hidden[row, :length]
                torch.testing.assert_close(found[row], kept.mean(0) if pooling == "mean" else kept[-1])
        assert last_hidden(model, examples.inputs).shape == (9, 8)
        with pytest.raises(ValueError, match="this model has none"):
            last_hidden(nn.Identity(), torch.ones(2, 3))


@pytest.mark.skipif(importlib.util.find_spec("rank_bm25") is None, reason="pip install rank-bm25")
class TestBM25:
    def test_the_query_itself_comes_first_and_padding_is_no_text(self, scratch: Path, language: TinyLM) -> None:
        queries = language.train_data.select([11, 3])
        asked = ask(language, scratch, queries)
        assert load_method("bm25").score(asked, None).scores.argmin(1).tolist() == [11, 3]
        ids = torch.tensor([[5, 6, 0, 0], [5, 6, 7, 8], [9, 9, 9, 9]])
        examples = Examples(Columns({"input_ids": ids, "attention_mask": (ids > 0).long()}), torch.zeros(3).long())
        query = Examples(Columns({"input_ids": ids[1:2], "attention_mask": torch.ones(1, 4).long()}), torch.zeros(1))
        asked = ask(language, scratch, query, train=examples)
        assert load_method("bm25").score(asked, None).scores.argmin(1).tolist() == [1]

    def test_images_and_terms_that_nobody_has_are_refused(self, scratch: Path, language: TinyLM) -> None:
        assert "no token sequences" in str(load_method("bm25").skip(load_task("digits")))
        asked = ask(language, scratch, language.query_data)
        with pytest.raises(ValueError, match="no training text is that long"):
            load_method("bm25", ngram=99).score(asked, None)


def test_same_class_knows_the_labels_and_nothing_else(scratch: Path) -> None:
    task = load_task("digits", num_train=60)
    queries, chosen = task.query_data.select(range(7)), np.array([5, 2, 44])
    method = load_method("same_class")
    assert method.skip(task) is None
    expected = [[-float(q == task.train_data.targets[i]) for i in chosen] for q in queries.targets]
    assert method.score(ask(task, scratch, queries, chosen=chosen), None).scores.tolist() == expected
