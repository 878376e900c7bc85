"""bm25: minus a training text's BM25 relevance to the query's text, by rank-bm25; it never sees the model.

    pip install rank-bm25                  # optional: without it the method is skipped, with this line

The control for language tasks: words that are rare in the training set and shared. A term is `ngram` successive tokens
(a byte-level model's single tokens are letters, which say nothing). Document frequencies are those of the whole
training set, a query is its whole text with repeated terms counted as often as they stand there, and the constants are
rank-bm25's own. Scores are linear in a query's terms, so each distinct term goes through the library once.
"""

import importlib.util
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from baselines.method import Attribution, Method, Problem, Size
from retrain.errors import UsageError
from retrain.examples import Examples
from retrain.losses import IGNORED
from retrain.task import Task

Terms = list[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class BM25(Method):
    libraries: ClassVar[tuple[str, ...]] = ("rank-bm25",)
    paper: ClassVar[str] = "Robertson et al. 1994, Okapi at TREC-3"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"ngram": (1, 2, 3, 4, 6), "b": (0.75, 0.0)}
    library_settings: ClassVar[dict[str, Any]] = {"ngram": 1, "k1": 1.5, "b": 0.75}

    ngram: int = 1  # tokens a term
    k1: float = 1.5  # how soon a term that repeats in a training text counts no more
    b: float = 0.75  # how much a longer training text is discounted

    def __post_init__(self) -> None:
        if self.ngram < 1:
            raise ValueError(f"ngram is {self.ngram}; expected at least 1")
        if not self.k1 >= 0 or not 0 <= self.b <= 1:
            raise ValueError(f"k1 is {self.k1} and b is {self.b}; expected k1 from 0 on, and b from 0 to 1")

    def skip(self, task: Task) -> str | None:
        if importlib.util.find_spec("rank_bm25") is None:
            return "rank-bm25 is not installed: pip install rank-bm25"
        return None if holds_tokens(task.train_data) else "its examples are no token sequences"

    @property
    def uses_model(self) -> bool:
        return False

    def memory_bytes(self, size: Size) -> int:
        return 16 * size.num_attributed * size.num_queries

    def score(self, problem: Problem, state: Any) -> Attribution:
        from rank_bm25 import BM25Okapi

        texts = terms_of(problem.train, self.ngram)
        if not any(texts):
            raise UsageError(f"bm25.ngram is {self.ngram}, and no training text is that long")
        corpus = BM25Okapi(texts, k1=self.k1, b=self.b)
        wanted = [Counter(terms) for terms in terms_of(problem.queries, self.ngram)]
        by_term: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for query, counts in enumerate(wanted):
            for term, count in counts.items():
                by_term.setdefault(term, []).append((query, count))
        attributed = [int(index) for index in problem.attributed_indices]
        found = np.zeros((len(wanted), len(attributed)))
        known = [item for item in by_term.items() if item[0] in corpus.idf]  # in no training text: 0 for all
        for term, places in problem.progress(known, total=len(known), description="bm25: terms"):
            relevance = np.asarray(corpus.get_batch_scores([term], attributed))
            for query, count in places:
                found[query] += count * relevance
        scores = -torch.from_numpy(found).float()
        return Attribution(scores=scores, train_scale=torch.ones(len(attributed)), diagnostics={"terms": len(known)})


def holds_tokens(examples: Examples) -> bool:
    """Whether an example is a row of integers, as token ids are."""
    tokens = _tokens(examples)
    return tokens is not None and tokens.dim() == 2 and not tokens.is_floating_point() and tokens.dtype != torch.uint8


def _tokens(examples: Examples) -> Tensor | None:
    return examples.inputs if isinstance(examples.inputs, Tensor) else examples.inputs.get("input_ids")


def terms_of(examples: Examples, ngram: int) -> list[Terms]:
    """Every example's successive tokens; of next-token prediction the last target belongs to the text, too."""
    tokens = _tokens(examples)
    assert tokens is not None
    mask = None if isinstance(examples.inputs, Tensor) else examples.inputs.get("attention_mask")
    found = []
    for row in range(len(examples)):
        text = tokens[row] if mask is None else tokens[row][mask[row] > 0]
        words = text.tolist()
        if examples.targets.dim() == 2 and int(examples.targets[row, -1]) != IGNORED:
            words.append(int(examples.targets[row, -1]))
        found.append([tuple(words[start : start + ngram]) for start in range(len(words) - ngram + 1)])
    return found
