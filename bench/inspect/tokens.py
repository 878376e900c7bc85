"""Which tokens of a training sequence bear on which tokens of a query? A page, a picture and the numbers.

    python -m bench.inspect tokens --task tinylm --out runs/tokens                   # the three strongest pairs, by BIF
    python -m bench.inspect tokens --task tinylm --methods ekfac --pairs 2:7 10:59   # these: query:training sequence
    python -m bench.inspect tokens --task pythia14m --text FILE.jsonl.xz --top 1 --queries 32

BIF gives a score to every query token with every training token, from the chains that `bif` runs with these options
and seed (the paper's per-token BIF; `correlation` is its normalised form). EK-FAC gives one to every training token,
for the query as a whole, from labels seeded alike; they sum to its sequence score. Negative scores help, as everywhere.
Written to --out: `tokens.html` (open it: nothing else is needed), `tokens.npz` with the matrices and `tokens.json` with
the record of how they were made. `--methods bif ekfac` also writes the examples.json of a figure: correlations under
BIF of the same pairs, and EK-FAC's scores.

A place is (position in the question's queries, position in its attributed sequences).
"""

import argparse
import json
import re
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from baselines.bif.method import BIF
from baselines.bif.tokens import token_bif
from baselines.method import Problem
from bench.arguments import check_out
from bench.experiment import execution_of, experiment_of
from bench.ground_truth import AttributionProblem, base_model
from bench.inspect import token_texts
from bench.measure import cpu_threads
from bench.publish.html import built_page
from bench.records import provenance, without_nan
from bench.runner import Session
from retrain.errors import UsageError
from retrain.progress import progress_bar
from retrain.safe_files import whole_file, write_whole
from retrain.units import choose_device

Place = tuple[int, int]
MOST_LABELS = 48  # tokens of a sequence up to which a figure names each
CLOSE_UP = 24  # tokens of the part that it shows of longer ones
TOKEN_RULE = "Pairs: the strongest of query and training sequence by normalised BIF, each once."


def language_session(arguments: argparse.Namespace) -> tuple[Session, AttributionProblem]:
    """Of one experiment on sequences of tokens."""
    session = Session(experiment_of(arguments), execution_of(arguments))
    if session.task.train_data.targets.dim() != 2:
        raise UsageError(f"task {session.task.name} has no tokens; take a language task, such as --task tinylm")
    session.report_skipped()
    return session, session.question(*session.blocks[0])


def token_problem(
    question: AttributionProblem, model: Any, device: Any, scratch: Path, queries: Sequence[int], trains: Sequence[int]
) -> Problem:
    """The question about these queries and training sequences alone; curvature and chains see the whole set."""
    task = question.task
    return Problem(
        task=task, model=model, train=task.train_data, attributed_indices=np.asarray(trains),
        queries=task.query_data.select(np.asarray(queries)), seed=question.seed, device=device, scratch=scratch,
        progress=progress_bar,
    )  # fmt: skip


def score_tokens(
    question: AttributionProblem, method: Any, model: Any, device: Any, places: Sequence[Place]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Of every pair its indices, tokens, sequence-level score and matrices; and what the method has to say about them.

    `measures` has (query tokens or 1, training tokens) arrays by name.
    """
    task, queries, trains = question.task, question.query_indices(), question.attributed_indices()
    indices = [(int(queries[query]), int(trains[train])) for query, train in places]
    own_queries, own_trains = (sorted({pair[side] for pair in indices}) for side in (0, 1))
    pairs = [(own_queries.index(query), own_trains.index(train)) for query, train in indices]
    if not isinstance(method, BIF) and not hasattr(method, "token_scores"):
        raise UsageError(f"{method.name} has no scores of single tokens; take bif or ekfac")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tda-bench-tokens-") as scratch:
        problem = token_problem(question, model, device, Path(scratch), own_queries, own_trains)
        torch.manual_seed(problem.seed)
        if isinstance(method, BIF):
            tokens = token_bif(method, problem, pairs)
            diagnostics = tokens.diagnostics
            for k in range(len(pairs)):
                measures = {"correlation": tokens.correlation[k].numpy(), "covariance": tokens.covariance[k].numpy()}
                of_sequence = {"score": float(tokens.sequence[k]), "correlation": float(tokens.sequence_correlation[k])}
                found.append({**of_sequence, "measures": measures})
        else:
            state = method.fit(problem)
            by_token = method.token_scores(problem, state)  # (queries, train, tokens)
            scores = method.score(problem, state).scores
            gap = float((by_token.sum(-1) - scores).abs().max() / scores.abs().max())
            diagnostics = {"largest_gap_between_sums_and_scores": gap}
            for pair in pairs:
                found.append({"score": float(scores[pair]), "measures": {"score": by_token[pair][None].numpy()}})
    for one, (query, train) in zip(found, indices, strict=True):
        one |= {"query": query, "query_tokens": token_texts(task, task.query_data, query)}
        one |= {"train": train, "train_tokens": token_texts(task, task.train_data, train)}
    return found, diagnostics


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


def parse_pair(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f'"{text}" is no pair; expected QUERY:TRAIN, two indices such as 3:17')
    return int(match[1]), int(match[2])


def given_pairs(question: Any, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The task's own indices, as positions in the question's queries and attributed sequences."""
    queries = {int(index): place for place, index in enumerate(question.query_indices())}
    trains = {int(index): place for place, index in enumerate(question.attributed_indices())}
    for query, train in pairs:
        for index, among, what in ((query, queries, "query"), (train, trains, "training sequence")):
            if index not in among:
                raise UsageError(
                    f"pair {query}:{train}: there is no {what} {index} here; {len(among)} are, from {min(among)} to "
                    f"{max(among)} (queries of the split --query-split {question.split})"
                )
    return [(queries[query], trains[train]) for query, train in dict.fromkeys(pairs)]


def rounded(matrix: np.ndarray) -> list[list[float]]:
    """Three digits that count."""
    return [[float(f"{value:.3g}") for value in row] for row in matrix.tolist()]


def write_tokens(folder: Path, record: dict[str, Any], found: list[dict[str, Any]], summary: str, lead: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, np.ndarray] = {}
    for pair in found:
        named = {f"{measure}-{pair['query']}-{pair['train']}": matrix for measure, matrix in pair["measures"].items()}
        arrays |= named
        known = {name: value for name, value in pair.items() if name != "measures"}
        record["pairs"].append({**known, "arrays": sorted(named)})
    shown = [{**pair, "measures": {name: rounded(m) for name, m in pair["measures"].items()}} for pair in found]
    record = without_nan(record)
    how = json.dumps({name: value for name, value in record.items() if name != "pairs"}, indent=1)
    write_whole(folder / "tokens.html", built_page("tokens", shown, title=summary, lead=lead, record=how))
    with whole_file(folder / "tokens.npz") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    write_whole(folder / "tokens.json", json.dumps(record, indent=1) + "\n")
    return folder / "tokens.html"


def token_examples(bif: Sequence[dict[str, Any]], ekfac: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a figure is drawn from: query tokens against training tokens, and the strongest two different words."""
    pairs: list[dict[str, Any]] = []
    for one, other in zip(bif, ekfac, strict=True):
        matrix = one["measures"]["correlation"]
        top = strongest_of_different_words(matrix, one["query_tokens"], one["train_tokens"])
        strongest = {} if top is None else {"strongest": {"query": top[0], "train": top[1], "bif": round(top[2], 3)}}
        known = {name: one[name] for name in ("query", "train", "query_tokens", "train_tokens")}
        # The paper's sign: tokens that rise and fall together are negative.
        kept, part = matrix_shown(np.asarray(matrix, dtype=float), None if top is None else top[:2])
        bifs = np.round(kept, 3).tolist()
        pairs.append({**known, "bif": bifs, "ekfac": rounded(other["measures"]["score"])[0], **strongest, **part})
    return pairs


def matrix_shown(matrix: np.ndarray, place: tuple[int, int] | None) -> tuple[np.ndarray, dict[str, Any]]:
    """Of long sequences the part that a figure shows, around `place` or the largest; tokens.npz has the whole."""
    if max(matrix.shape) <= MOST_LABELS:
        return matrix, {}
    sizes = np.where(np.isfinite(matrix), np.abs(matrix), 0.0)
    row, column = place or np.unravel_index(int(np.argmax(sizes)), matrix.shape)
    firsts = (max(0, min(k - CLOSE_UP // 2, n - CLOSE_UP)) for k, n in zip((int(row), int(column)), matrix.shape))
    rows, columns = (slice(first, min(n, first + CLOSE_UP)) for first, n in zip(firsts, matrix.shape))
    ends = {name: [one.start, one.stop] for name, one in (("query", rows), ("train", columns))}
    return matrix[rows, columns], {"part": {**ends, "largest": round(float(sizes.max()), 3)}}


def inspect_tokens(arguments: argparse.Namespace, command: str, prog: str) -> int:
    """The page is of the first method."""
    check_out(arguments.out)
    started, out = time.perf_counter(), Path(arguments.out)
    arguments.methods = arguments.methods or ["bif"]
    session, question = language_session(arguments)
    task = session.task
    variants = {variant.method.name: variant for variant in session.active}  # tuned apart: the normalised one
    name, variant = next(iter(variants.items()))
    if arguments.pairs:
        places = given_pairs(question, arguments.pairs)
    else:
        own = task.query_data.targets[question.query_indices()], task.train_data.targets[question.attributed_indices()]
        same = np.stack([(own[1] == query).all(1).numpy() for query in own[0]])
        attribution, _ = session.scorer(variant, *session.blocks[0]).scores()
        normalised = attribution.normalised()
        of_sequences = attribution.scores if normalised is None else normalised
        places = strongest_pairs(of_sequences.numpy(), same, arguments.top)
        if not places:
            raise UsageError("no pair of different sequences has a score; name some with --pairs")
    model, _ = base_model(task, question.seed, session.store, session.execution.device)
    device = choose_device(session.execution.device)
    with cpu_threads(task.cpu_threads), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries' own making, and nothing the user can act on
        scored = {one: score_tokens(question, variants[one].method, model, device, places) for one in variants}
    found, diagnostics = scored[name]
    num_queries, num_tokens = len(question.query_indices()), task.train_data.targets.shape[1]
    record = {
        "command": command, "task": task.config, "description": task.description, "method": variant.describe(),
        "seed": question.seed, "alpha_attribution": question.alpha_attribution, "query_split": question.split,
        "n": {
            "train": len(question.attributed_indices()), "queries": num_queries, "tokens": num_tokens,
            "pairs": len(found),
        },
        "sign": "negative: including the training token lowers the query token's loss",
        **provenance(session.device()), "diagnostics": diagnostics,
        "seconds": round(time.perf_counter() - started, 2), "pairs": [],
    }  # fmt: skip
    draws = f", {diagnostics['num_draws']} draws" if "num_draws" in diagnostics else ""
    chosen = "by hand" if arguments.pairs else f"as the strongest of {num_queries} queries"
    blue = "help" if name == "ekfac" else "help (the losses rise and fall together)"
    lead = (
        f"{task.description}; seed {question.seed}{draws}, {len(found)} pairs of {num_tokens} tokens, chosen {chosen}. "
        f"Blue tokens {blue}, orange tokens harm."
    )
    about = "EK-FAC per training token" if name == "ekfac" else "normalised per-token BIF"
    print(write_tokens(out, record, found, f"{task.name}: {about}", lead))
    if {"bif", "ekfac"} <= set(scored):
        content = {
            "kind": "tokens", "task": task.name, "protocol": task.protocol, "description": task.description,
            "seed": question.seed, "scores": "normalised BIF", "methods": ["bif", "ekfac"],
            "settings": {one: variants[one].settings for one in ("bif", "ekfac")},
            "num_draws": scored["bif"][1]["num_draws"], "rule": "" if arguments.pairs else TOKEN_RULE,
            "pairs": token_examples(scored["bif"][0], scored["ekfac"][0]), "command": command,
            **provenance(session.device()),
        }  # fmt: skip
        write_whole(out / "examples.json", json.dumps(content, separators=(",", ":")) + "\n")
        print(out / "examples.json")
    return 0
