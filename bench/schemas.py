"""What result files must look like before anything of them is drawn or shown, as schemas of `retrain.schema`.

    record = read_checked("run.json", RUN_RECORD)  # or SafeFileError: one line that names file, field and what came

A name has no line breaks, control characters or marks of writing direction, so that it may go into a line of a log or a
caption without another look; it still becomes a file's name only as a slug, and part of a page only as text.
"""

from pathlib import Path
from typing import Any

from retrain.safe_files import MAX_JSON_BYTES, read_json
from retrain.schema import ANY, Choice, Flag, Integer, ListOf, Maybe, Number, Text, check

PRINTABLE = "[^\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]*"


def line(at_most: int) -> Text:
    """Text in one line."""
    return Text(PRINTABLE, at_most)


def read_checked(path: str | Path, schema: Any, max_bytes: int = MAX_JSON_BYTES) -> Any:
    return check(read_json(path, max_bytes), schema, path)


ID = Text(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME = line(200)
WORDS = line(2000)
SHARE = Number(0, 1)
COUNT = Integer(0, 10**12)
LARGEST_NUMBER = 1e30
ANY_NUMBER = Maybe(Number(-LARGEST_NUMBER, LARGEST_NUMBER))
CORRELATION = Maybe(Number(-1.000001, 1.000001))
DIFFERENCE = Maybe(Number(-4, 4))
AMOUNT = Maybe(Number(0, 1e18))
REST = {"*": ANY}  # records grow: what is not read is not checked

_WHERE = {"task": NAME, "protocol": NAME, "alpha": SHARE, "alpha_attribution": SHARE, "seed": COUNT}
RUN_RECORD = {
    "run_id": ID,
    "device": NAME,
    "description?": Maybe(WORDS),
    "command?": Text(at_most=20_000),
    "finished?": line(40),
    "machine?": {"cores?": Maybe(COUNT), **REST},
    "config": {
        "task": {"name": NAME, **REST},
        "query_split?": NAME,
        "queries?": Maybe(COUNT),
        "scheme?": Maybe(NAME),
        "methods?": ListOf({"name": NAME, "label?": NAME, "rows?": NAME, **REST}, 0, 1000),
        **REST,
    },
    "rows": [
        {
            **_WHERE, "num_subsets": COUNT, "num_queries": COUNT, "num_undefined": COUNT, "method": NAME,
            "label?": NAME, "settings?": Maybe(WORDS), "normalised": Flag(), "lds": CORRELATION, "ci_low": CORRELATION,
            "ci_high": CORRELATION, "lds_across_queries?": CORRELATION, "ceiling?": CORRELATION, "spread?": ANY_NUMBER,
            "fit_seconds?": AMOUNT, "score_seconds?": AMOUNT, "peak_memory_bytes?": AMOUNT, "device?": Maybe(NAME),
            "note?": Maybe(WORDS), **REST,
        }
    ],
    "ceilings": [
        {
            **_WHERE, "ceiling?": CORRELATION, "ci_low?": CORRELATION, "ci_high?": CORRELATION,
            "reliability?": ANY_NUMBER, "linear_ceiling?": CORRELATION, "linear_low?": CORRELATION,
            "linear_high?": CORRELATION, "linear_share?": ANY_NUMBER, "linear_subsets?": Maybe(COUNT),
            "unlimited_ceiling?": CORRELATION, "unlimited_low?": CORRELATION, "unlimited_high?": CORRELATION,
            "num_replicates?": Maybe(Integer(0, 10**6)),
            "num_subsets_replicated?": Maybe(COUNT), **REST,
        }
    ],
    "pairs?": [
        {
            **_WHERE, "method?": NAME, "against": NAME, "label?": NAME, "normalised": Flag(), "difference": DIFFERENCE,
            "ci_low": DIFFERENCE, "ci_high": DIFFERENCE, "p_value?": Maybe(SHARE), **REST,
        }
    ],
    **REST,
}  # fmt: skip

_SWEPT = {
    "task": NAME, "protocol": NAME, "alpha": ANY, "split?": NAME, "run_id": ID, "seed?": COUNT,
    "description?": Maybe(WORDS), "num_subsets?": COUNT, "replicates?": COUNT, "replicated_subsets?": Maybe(COUNT),
    "num_queries?": Maybe(COUNT), **REST,
}  # fmt: skip
ALPHAS = ListOf(SHARE, 1, 100)  # of a sweep or a budget: one number, or several that LDS is the mean over
SWEEP = {
    **_SWEPT,
    "method": NAME,
    "axes": {"*": ListOf(ANY, 1, 1000)},
    "cells": [
        {
            "lds": CORRELATION, "lds_normalised?": CORRELATION, "ci_low?": CORRELATION, "ci_high?": CORRELATION,
            "rhat?": ANY_NUMBER, "ess?": ANY_NUMBER, "traces?": [[ANY_NUMBER]], **REST,
        }
    ],
}  # fmt: skip
_POINT = {
    "value": Number(0, 1e15), "seconds": Maybe(Number(0, 1e12)), "lds": CORRELATION, "ci_low?": CORRELATION,
    "ci_high?": CORRELATION, **REST,
}  # fmt: skip
_CURVE = {
    "method": NAME, "label?": NAME, "axis": NAME, "normalised?": Flag(), "options?": REST, "points": ListOf(_POINT, 1),
    **REST,
}  # fmt: skip
BUDGET = {**_SWEPT, "device": NAME, "curves": ListOf(_CURVE, 1)}

SPEED = {
    "rows": ListOf(
        {
            "method": NAME, "label?": NAME, "settings?": Maybe(WORDS), "seconds": Number(0, 1e12),
            "fit_seconds": Number(0, 1e12), "score_seconds": Number(0, 1e12), "peak_memory_bytes?": AMOUNT,
            "agrees?": CORRELATION, "all_seconds?": ListOf(Number(0, 1e12), 1, 1000), "num_train?": COUNT,
            "num_queries?": COUNT, **REST,
        },
        1,
        1000,
    ),
    "description?": Maybe(WORDS), "question?": {"alpha_attribution?": SHARE, **REST}, "device?": NAME,
    "peak?": {"device?": NAME, **REST}, **REST,
}  # fmt: skip

EXAMPLES = {
    "kind": Choice("images", "tokens"), "task?": NAME, "description": WORDS, "seed": COUNT, "scores": NAME,
    "methods?": ListOf(NAME, 0, 20), "alpha_attribution?": SHARE, "protocol?": NAME, "settings?": {"*": WORDS},
    "rule?": WORDS, **REST,
}  # fmt: skip
_EXAMPLE = {"train": COUNT, "score": ANY_NUMBER, "label": NAME, "image": COUNT, **REST}
_SIDES = {"helpful": ListOf(_EXAMPLE, 0, 100), "harmful": ListOf(_EXAMPLE, 0, 100), **REST}
IMAGES = {
    **EXAMPLES,
    "sprite": Text(r"[A-Za-z0-9][A-Za-z0-9._-]{0,90}\.png"),
    "tile": ListOf(Integer(1, 512), 2, 2),
    "methods": ListOf(NAME, 1, 20),
    "queries": ListOf(
        {"query": COUNT, "label": NAME, "image": COUNT, "methods": {"*": _SIDES}, "chosen?": NAME, **REST}, 1, 1000
    ),
    "num_train?": COUNT,
    "num_queries?": COUNT,
    "agreement?": ListOf(
        {
            "one": NAME, "other": NAME, "side": Choice("helpful", "harmful"), "named": Integer(1, 10**9),
            "shared": SHARE, "error": Maybe(SHARE), "chance": SHARE, **REST,
        },
        0,
        10_000,
    ),
}  # fmt: skip
_TOKENS = ListOf(Text(at_most=1000), 1, 5000)
TOKENS = {
    **EXAMPLES,
    "num_draws?": COUNT,
    "pairs": [
        {
            "query": COUNT, "train": COUNT, "query_tokens": _TOKENS, "train_tokens": _TOKENS, "bif": [[ANY_NUMBER]],
            "ekfac?": Maybe([ANY_NUMBER]), "strongest?": {"query": COUNT, "train": COUNT, "bif": ANY_NUMBER, **REST},
            **REST,
        }
    ],
}  # fmt: skip

FIGURES = {
    "*": {
        "kind": Text(r"[a-z][a-z0-9-]{0,40}"),
        "title?": line(400),
        "caption": line(40_000),
        "runs": [ID],
        "files": ListOf(Text(r"[a-z0-9][a-z0-9-]{0,240}\.(svg|png|pdf|csv|md|tex)"), 1, 10),
        "facts?": {"*": [NAME]},
    }
}

_DISTANCE = Number(0, 1e12)
_SLOPE = {"theory": Number(-100, 100), "measured": Number(-100, 100), **REST}
LIMIT = {
    "run_id": ID, "description": WORDS,
    "config": {
        "regression": {"copies": COUNT, "num_train": COUNT, "num_queries": COUNT, **REST}, "sampler": NAME,
        "gradient": NAME, "damping": _DISTANCE, "step_times_precision": _DISTANCE, "thinning": COUNT, "burn_in": COUNT,
        "draws_of_a_copy": COUNT, "seeds": ListOf(COUNT, 1, 1000), **REST,
    },
    "exact": ListOf({"n_beta": Number(1e-12, 1e12), "distance": Number(1e-15, 1e12), **REST}, 1, 1000),
    "sampled": ListOf(
        {"n_beta": Number(1e-12, 1e12), "draws": Integer(1, 10**12), "distance": Number(1e-15, 1e12),
         "low": _DISTANCE, "high": _DISTANCE, **REST}, 1, 10_000,
    ),
    "slopes": {"n_beta": _SLOPE, "draws": _SLOPE, **REST}, **REST,
}  # fmt: skip
