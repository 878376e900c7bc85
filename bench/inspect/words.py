"""Are the tokens that a method pairs related words? By rule: one word, one lemma, synonyms in WordNet; against chance.

    tda-bench inspect words --task smollm2 --text FILE --methods bif kfac gradsim --queries 20 --out runs/words
    tda-bench inspect words --read runs/words --wordnet /usr/share/wordnet      # Debian's package wordnet-base

Each query goes with the training sequence that BM25 ranks first, the same for every method. A method gives every query
token a score with every training token: BIF from its chains, as `inspect tokens` has it; any other by its own scores of
copies of the sequences in which one token alone counts. Scores are normalised by the training token's scale.

Looked at are whole words that WordNet knows, of four letters or more. For each such query token the training token with
the most helpful score is taken. Its share of related words stands beside that of all training tokens of the sequence,
which is chance. Intervals are 95 %, over the pairs of sequences.
"""

import argparse
import functools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from baselines.bif.method import BIF
from baselines.bif.tokens import token_bif
from baselines.method import load_method
from bench.arguments import check_out
from bench.ground_truth import base_model
from bench.inspect import token_texts
from bench.inspect.tokens import Place, language_session, token_problem
from bench.measure import metered
from bench.records import provenance, without_nan, write_json
from bench.tables import table
from retrain.errors import UsageError
from retrain.examples import Examples
from retrain.losses import IGNORED
from retrain.safe_files import read_json, read_npz, whole_file
from retrain.units import choose_device

KINDS = ("same word", "same lemma", "synonyms")  # each without those before it
METHODS = ("bif", "kfac", "gradsim")
LETTERS = 4  # of a word that is looked at
KEPT = f"scores of whole words of {LETTERS} letters or more with one another; NaN elsewhere"  # of words.npz
RESAMPLES = 2000
# WordNet's own rules of inflection (morphy), a part of speech each.
ENDINGS = {
    "noun": (("s", ""), ("ses", "s"), ("ves", "f"), ("xes", "x"), ("zes", "z"), ("ches", "ch"), ("shes", "sh"),
             ("men", "man"), ("ies", "y")),
    "verb": (("s", ""), ("ies", "y"), ("es", "e"), ("es", ""), ("ed", "e"), ("ed", ""), ("ing", "e"), ("ing", "")),
    "adj": (("er", ""), ("est", ""), ("er", "e"), ("est", "e")),
    "adv": (),
}  # fmt: skip


class WordNet:
    """Lemmas and synonym sets, from WordNet's own files (index.noun, noun.exc, ...)."""

    def __init__(self, folder: str | Path):
        self.synsets: dict[tuple[str, str], frozenset[str]] = {}
        self.exceptions: dict[tuple[str, str], list[str]] = {}
        for part in ENDINGS:
            for name in (f"index.{part}", f"{part}.exc"):
                if not (Path(folder) / name).is_file():
                    raise UsageError(f'there is no "{name}" in {folder}; expected WordNet\'s files (wordnet-base)')
            for line in (Path(folder) / f"index.{part}").read_text().splitlines():
                if not line.startswith(" "):
                    lemma, _, count, *rest = line.split()
                    self.synsets[part, lemma] = frozenset(f"{part} {offset}" for offset in rest[-int(count) :])
            for line in (Path(folder) / f"{part}.exc").read_text().splitlines():
                form, *lemmas = line.split()
                self.exceptions[part, form] = lemmas

    def lemmas(self, word: str) -> set[tuple[str, str]]:
        """(part of speech, lemma) of every reading; empty of a word that WordNet does not know."""
        found = set()
        for part, endings in ENDINGS.items():
            forms = [word, *self.exceptions.get((part, word), ())]
            forms += [word.removesuffix(old) + new for old, new in endings if word.endswith(old)]
            found |= {(part, form) for form in forms if (part, form) in self.synsets}
        return found

    def kind(self, one: str, other: str) -> int:
        """Position in KINDS, or their number where the words are not related."""
        if one == other:
            return 0
        own, others = self.lemmas(one), self.lemmas(other)
        if own & others:
            return 1
        shared = set().union(*(self.synsets[lemma] for lemma in own)) & set().union(
            *(self.synsets[lemma] for lemma in others)
        )
        return 2 if shared else 3


def spelled_words(tokens: Sequence[str]) -> dict[int, str]:
    """Position -> word, of tokens that are a word by themselves: a space before, none of its letters behind."""
    found = {}
    for place, token in enumerate(tokens):
        word, after = token.strip().casefold(), tokens[place + 1] if place + 1 < len(tokens) else ""
        alone = token[:1].isspace() and not after[:1].isalpha() and after
        if alone and word.isalpha() and word.isascii() and len(word) >= LETTERS:
            found[place] = word
    return found


def whole_words(tokens: Sequence[str], wordnet: WordNet) -> dict[int, str]:
    """Those that WordNet knows."""
    return {place: word for place, word in spelled_words(tokens).items() if wordnet.lemmas(word)}


# ---- scores of every token with every token ----


def token_copies(examples: Examples, index: int, places: Sequence[int]) -> Examples:
    """One copy for each of these tokens, in which no other token's loss counts."""
    inputs, targets = examples.inputs[index], examples.targets[index]
    alone = torch.where(torch.eye(len(targets), dtype=torch.bool)[list(places)], targets, IGNORED)
    return Examples(inputs.expand(len(places), -1), alone)


def token_matrices(
    question: Any,
    method: Any,
    model: Any,
    device: Any,
    scratch: Path,
    pairs: list[Place],
    places: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> list[np.ndarray]:
    """(query tokens, training tokens) of each (query, training sequence), as indices of the task's data.

    `places` are the tokens that are asked about, of the query and of the training sequence; others are NaN.
    """
    task = question.task
    queries, trains = ([pair[side] for pair in pairs] for side in (0, 1))
    problem = token_problem(question, model, device, scratch, queries, trains)
    length, of_bif = task.train_data.targets.shape[1], isinstance(method, BIF)
    if of_bif:
        whole = token_bif(method, problem, [(k, k) for k in range(len(pairs))]).correlation
    else:
        state = method.fit(problem)
    found: list[np.ndarray] = []
    for (query, train), (of_query, of_train) in zip(pairs, places, strict=True):
        block = np.ix_(of_query, of_train)
        found.append(np.full((length, length), np.nan, dtype=np.float32))
        if of_bif:
            found[-1][block] = whole[len(found) - 1].numpy()[block]
        if of_bif or not of_query or not of_train:
            continue
        copies = token_copies(task.train_data, train, of_train)
        own = token_copies(task.query_data, query, of_query)
        here = replace(problem, queries=own, pool=copies, attributed_indices=np.arange(len(copies)))
        attribution = method.score(here, state)
        normalised = attribution.normalised()
        found[-1][block] = (attribution.scores if normalised is None else normalised).numpy()
    return found


def paired_by_words(question: Any, model: Any, scratch: Path, count: int) -> list[Place]:
    """Each of the first queries with the training sequence that BM25 ranks first."""
    queries, trains = question.query_indices()[:count], question.attributed_indices()
    bm25 = load_method("bm25")
    if reason := bm25.skip(question.task):
        raise UsageError(f"sequences are paired by bm25: {reason}")
    problem = token_problem(question, model, torch.device("cpu"), scratch, queries, trains)
    best = bm25.score(problem, None).scores.argmin(1)
    return [(int(query), int(trains[train])) for query, train in zip(queries, best, strict=True)]


def related(matrix: np.ndarray, query: dict[int, str], train: dict[int, str], wordnet: WordNet) -> np.ndarray:
    """(2, kinds and none): how many query words go with a word of each kind, and how many would by chance."""
    found, places = np.zeros((2, len(KINDS) + 1)), sorted(train)
    for row, word in query.items():
        kinds = np.array([wordnet.kind(word, train[place]) for place in places])
        found[0, kinds[int(np.argmin(matrix[row, places]))]] += 1
        found[1] += np.bincount(kinds, minlength=len(KINDS) + 1) / len(kinds)
    return found


def shares(pairs: np.ndarray, kinds: Sequence[int]) -> dict[str, float]:
    """The share of words named and by chance, and their difference with its interval; of (pairs, 2, kinds and none)."""
    named, chance = pairs[:, :, list(kinds)].sum(2).T
    words = pairs[:, 0].sum(1)
    drawn = np.random.default_rng(0).integers(len(words), size=(RESAMPLES, len(words)))
    low, high = np.percentile((named - chance)[drawn].sum(1) / words[drawn].sum(1), (2.5, 97.5))
    found = {"share": named.sum() / words.sum(), "chance": chance.sum() / words.sum(), "ci_low": low, "ci_high": high}
    return {name: float(value) for name, value in found.items()}


def analyse(arrays: dict[str, np.ndarray], texts: dict[str, Any], wordnet: WordNet) -> list[dict[str, Any]]:
    rows = []
    for place, label in enumerate(texts["methods"]):
        found = []
        for number, pair in enumerate(texts["pairs"]):
            query, train = (whole_words(pair[side], wordnet) for side in ("query_tokens", "train_tokens"))
            if query and train:
                found.append(related(arrays[f"{place}-{number}"], query, train, wordnet))
        if not found:
            raise UsageError("no pair of sequences has whole words that WordNet knows on both sides")
        pairs = np.stack(found)
        sizes = {"method": label, "pairs": len(pairs), "words": int(pairs[:, 0].sum())}
        every = range(len(KINDS))
        for kind, chosen in (*((KINDS[k], [k]) for k in every), ("any of these", every)):
            rows.append(sizes | {"kind": kind} | shares(pairs, chosen))
    return rows


def words_table(rows: Sequence[dict[str, Any]]) -> str:
    header = ["method", "the training token is", "share", "by chance", "difference, 95 % interval", "words"]
    lines = [
        [
            row["method"], row["kind"], f"{row['share']:.3f}", f"{row['chance']:.3f}",
            f"{row['share'] - row['chance']:+.3f} [{row['ci_low']:+.3f}, {row['ci_high']:+.3f}]", str(row["words"]),
        ]
        for row in rows
    ]  # fmt: skip
    return table(header, lines, left=2)


def inspect_words(arguments: argparse.Namespace, command: str, prog: str) -> int:
    check_out(arguments.out)
    out = Path(arguments.out)
    place = Path(arguments.read) if arguments.read else out
    if not arguments.read:
        make_matrices(arguments, command, out)
    if not arguments.wordnet:
        print(f"{place / 'words.npz'}\n--read {place} --wordnet FOLDER says which tokens are related")
        return 0
    texts = read_json(place / "words.json")
    rows = analyse(read_npz(place / "words.npz"), texts, WordNet(arguments.wordnet))
    write_json(out / "related.json", without_nan({"rows": rows, **{k: v for k, v in texts.items() if k != "pairs"}}))
    print(words_table(rows))
    return 0


def make_matrices(arguments: argparse.Namespace, command: str, out: Path) -> None:
    """words.npz has the words' scores, words.json the tokens and how they were made."""
    arguments.methods = arguments.methods or list(METHODS)
    session, question = language_session(arguments)
    task = session.task
    model, _ = base_model(task, question.seed, session.store, session.execution.device)
    device = choose_device(session.execution.device)
    arrays: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory(prefix="tda-bench-words-") as scratch:
        count = min(arguments.queries or 20, len(question.query_indices()))
        pairs = paired_by_words(question, model, Path(scratch), count)
        texts: list[dict[str, Any]] = []
        for query, train in pairs:
            of_both = token_texts(task, task.query_data, query), token_texts(task, task.train_data, train)
            texts.append({"query": query, "train": train, "query_tokens": of_both[0], "train_tokens": of_both[1]})
        places = [tuple(list(spelled_words(text[f"{side}_tokens"])) for side in ("query", "train")) for text in texts]
        variants = [variant for variant in session.active if variant.rows != "raw"]  # tuned apart: one of each method
        for place, variant in enumerate(variants):
            asked = functools.partial(token_matrices, question, variant.method, model, device, Path(scratch), pairs)
            matrices, _ = metered(functools.partial(asked, places), question.seed, device, task.cpu_threads)
            arrays |= {f"{place}-{k}": matrix.astype(np.float32) for k, matrix in enumerate(matrices)}
    record = {
        "command": command, "task": task.config, "description": task.description, "seed": question.seed,
        "methods": [variant.label for variant in variants], "pairs": texts,
        "settings": {variant.label: variant.describe() for variant in variants},
        "kept": KEPT, **provenance(session.device()),
    }  # fmt: skip
    with whole_file(out / "words.npz") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    write_json(out / "words.json", without_nan(json.loads(json.dumps(record, default=str))))
