"""Scores of single tokens for chosen pairs of sequences: the one path that `bench.tokens` and `bench.examples` use.

    found, diagnostics = score_tokens(question, method, model, device, places=[(0, 17), (3, 250)])

A place is (position in the question's queries, position in its attributed sequences). BIF gives a score to every query
token with every training token, from the chains that `bif` runs with these options and seed; EK-FAC gives one to every
training token, for the query as a whole, from labels seeded alike. Negative scores help, as everywhere.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from retrain.errors import UsageError

Place = tuple[int, int]
CHARACTERS = 128  # ids below this are characters where a task has no tokenizer


@dataclass
class PairScores:
    """What one pair came to."""

    query: int  # index into the task's queries
    train: int  # index into the task's training data
    query_tokens: list[str]
    train_tokens: list[str]
    score: float  # sequence level, raw
    measures: dict[str, np.ndarray]  # (query tokens or 1, training tokens) each
    correlation: float | None = None  # sequence level, normalised


# ---- tokens as text ----


def token_texts(task: Any, examples: Any, index: int) -> list[str]:
    """The text of the tokens whose losses are measured, the targets, each decoded as the task's tokenizer has it."""
    ids = [int(i) for i in examples.targets[index]]
    decode = _decoder(task)
    if decode is not None:
        return [str(decode([i])) for i in ids]
    if max(ids, default=0) < CHARACTERS:
        return [chr(i) if 32 <= i < 127 else "\n" if i == 10 else "\ufffd" for i in ids]
    return [f"#{i}" for i in ids]  # of a vocabulary that nobody here knows


def _decoder(task: Any) -> Callable[[list[int]], Any] | None:
    if getattr(task, "decode", None) is not None:
        return task.decode
    if getattr(task, "tokenizer", None) is not None:
        return task.tokenizer.decode
    if isinstance(getattr(task, "model", None), str):
        return _tokenizer(task.model).decode
    return None


@lru_cache(maxsize=2)
def _tokenizer(model: str) -> Any:
    from retrain.models.pretrained import load_tokenizer

    return load_tokenizer(model, allow_download=False)


# ---- their scores ----


def token_problem(
    question: Any, model: Any, device: Any, scratch: Path, queries: Sequence[int], trains: Sequence[int]
) -> Any:
    """The question about these queries and training sequences alone; curvature and chains see the whole set."""
    from baselines.method import Problem
    from retrain.progress import progress_bar

    task = question.task
    return Problem(
        task=task,
        model=model,
        train=task.train_data,
        attributed_indices=np.asarray(trains),
        queries=task.query_data.select(np.asarray(queries)),
        seed=question.seed,
        device=device,
        scratch=scratch,
        progress=progress_bar,
    )


def score_tokens(
    question: Any, method: Any, model: Any, device: Any, places: Sequence[Place]
) -> tuple[list[PairScores], dict[str, Any]]:
    """Every pair's matrices, and what the method has to say about them."""
    import torch

    from baselines.bif.method import BIF

    queries, trains = question.query_indices(), question.attributed_indices()
    indices = [(int(queries[query]), int(trains[train])) for query, train in places]
    own_queries, own_trains = (sorted({pair[side] for pair in indices}) for side in (0, 1))
    pairs = [(own_queries.index(query), own_trains.index(train)) for query, train in indices]
    if isinstance(method, BIF):
        scored = _of_bif
    elif hasattr(method, "token_scores"):
        scored = _of_training_tokens
    else:
        raise UsageError(f"{method.name} has no scores of single tokens; take bif or ekfac")
    with tempfile.TemporaryDirectory(prefix="tda-bench-tokens-") as scratch:
        problem = token_problem(question, model, device, Path(scratch), own_queries, own_trains)
        torch.manual_seed(problem.seed)
        found, diagnostics = scored(method, problem, pairs)
    task = question.task
    return [
        PairScores(
            query=query,
            train=train,
            query_tokens=token_texts(task, task.query_data, query),
            train_tokens=token_texts(task, task.train_data, train),
            **scores,
        )
        for (query, train), scores in zip(indices, found, strict=True)
    ], diagnostics


def _of_bif(method: Any, problem: Any, pairs: list[Place]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    from baselines.bif.tokens import token_bif

    tokens = token_bif(method, problem, pairs)
    return [
        {
            "measures": {"correlation": tokens.correlation[k].numpy(), "covariance": tokens.covariance[k].numpy()},
            "score": float(tokens.sequence[k]),
            "correlation": float(tokens.sequence_correlation[k]),
        }
        for k in range(len(pairs))
    ], tokens.diagnostics


def _of_training_tokens(method: Any, problem: Any, pairs: list[Place]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    state = method.fit(problem)
    tokens = method.token_scores(problem, state)  # (queries, train, tokens)
    scores = method.score(problem, state).scores
    gap = float((tokens.sum(-1) - scores).abs().max() / scores.abs().max())
    return [
        {"measures": {"score": tokens[query, train][None].numpy()}, "score": float(scores[query, train])}
        for query, train in pairs
    ], {"largest_gap_between_sums_and_scores": gap}


# ---- which pairs ----


def strongest_pairs(scores: np.ndarray, same: np.ndarray, count: int) -> list[Place]:
    """Positions of the largest scores by size, each query and each training sequence at most once.

    A pair of one and the same sequence (`same`, (queries, train)) says nothing about tokens: it is passed over.
    """
    # A query's own scale would decide otherwise: rows are put on one footing first.
    spread = np.sqrt(np.mean(scores**2, axis=1, keepdims=True))
    sizes = np.abs(scores) / np.where(spread > 0, spread, 1)
    sizes = np.where(np.isfinite(sizes) & ~same, sizes, -1)
    found: list[Place] = []
    for _ in range(min(count, *scores.shape)):
        query, train = (int(k) for k in np.unravel_index(np.argmax(sizes), sizes.shape))
        if sizes[query, train] < 0:
            break
        found.append((query, train))
        sizes[query] = -1
        sizes[:, train] = -1
    return found


def strongest_of_each_query(
    question: Any, method: Any, model: Any, device: Any, num_queries: int, num_trains: int
) -> list[Place]:
    """Each of the first queries with the one of the first attributed sequences that moves it most, by this method."""
    import torch

    queries, trains = question.query_indices()[:num_queries], question.attributed_indices()[:num_trains]
    with tempfile.TemporaryDirectory(prefix="tda-bench-tokens-") as scratch:
        problem = token_problem(question, model, device, Path(scratch), queries, trains)
        torch.manual_seed(problem.seed)
        attribution = method.score(problem, method.fit(problem))
    normalised = attribution.normalised()
    sizes = (attribution.scores if normalised is None else normalised).abs()
    return [(query, int(sizes[query].argmax())) for query in range(len(queries))]
