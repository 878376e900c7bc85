"""Rows of a file of one's own: a CSV or a JSON-lines file with a label in every row, as a pandas frame."""

from pathlib import Path
from typing import Any

import numpy as np

from retrain.errors import UsageError, error_line

LABEL_NAMES = ("label", "labels", "target", "targets", "class", "y")
TEXT_NAMES = ("text", "sentence", "content", "review", "document")


def read_rows(path: str, what: str) -> Any:
    """A pandas frame of a .csv, .tsv, .json or .jsonl file; what: the option that named it."""
    import pandas as pd

    if not path:
        raise UsageError(f"{what} is missing: a .csv or .jsonl file with a row an example")
    ending = "".join(Path(path).suffixes[:1]).lower()
    try:
        if ending in (".json", ".jsonl"):
            frame = pd.read_json(path, lines=True)
        else:
            frame = pd.read_csv(path, sep="\t" if ending == ".tsv" else ",")
    except FileNotFoundError:
        raise UsageError(f'{what} "{path}": there is no such file') from None
    except Exception as error:  # pandas has a class of its own for everything
        raise UsageError(
            f'{what} "{path}" cannot be read ({error_line(error, 200)}); expected CSV or JSON lines'
        ) from None
    if not len(frame):
        raise UsageError(f'{what} "{path}" has no rows')
    return frame


def read_train_and_queries(train_file: str, query_file: str) -> tuple[Any, Any]:
    """The rows of both; without a file of queries every fifth row of the other is one."""
    train = read_rows(train_file, "--train")
    if query_file:
        return train, read_rows(query_file, "--queries")
    every_fifth = np.arange(len(train)) % 5 == 0
    return train[~every_fifth], train[every_fifth]


def named_column(frame: Any, asked: str, usual: tuple[str, ...], what: str, path: str, option: str) -> str:
    """The column that was asked for, or the one that is called as such columns usually are."""
    names = [str(name) for name in frame.columns]
    found = [asked] if asked in names else [] if asked else [name for name in usual if name in map(str.lower, names)]
    if not found:
        wanted = f'called "{asked}"' if asked else f"called {', '.join(usual[:3])} ..."
        raise UsageError(
            f'"{path}" has no {what} column {wanted}; name one by --set {option}=COLUMN: {", ".join(names)[:300]}'
        )
    return names[[name if asked else name.lower() for name in names].index(found[0])]


def filled(frame: Any, column: str, path: str) -> Any:
    """The column, where every row has a value; pandas would make an empty text the word "nan"."""
    values = frame[column]
    if (missing := (values.isna() | (values.astype(str).str.strip() == "")).to_numpy()).any():
        raise UsageError(
            f'"{path}" has nothing (or a word like NA) in the column "{column}" of row '
            f"{frame.index[missing][0]}, counted from 0; fill it in or drop the row"
        )
    return values


def class_numbers(labels: Any, classes: list[Any], path: str) -> np.ndarray:
    """Each label's place among the classes of the training data."""
    numbers = {one: place for place, one in enumerate(classes)}
    if unknown := [one for one in labels if one not in numbers]:
        known = ", ".join(map(str, classes[:10]))
        raise UsageError(f'"{path}" has the label "{unknown[0]}", which no training example has; those have {known}')
    return np.array([numbers[one] for one in labels], dtype=np.int64)
