"""The rows of scaling.csv: their columns, the reader that checks them, the writer, and what a row says.

    rows = read_rows("results/scaling/scaling.csv")  # a list of dictionaries; an empty cell is None

A row is one (model, method, setting). Rows with an `error` have no numbers, and every estimate passes over them.
"""

import csv
import io
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.scaling.costs import Setting
from retrain.errors import UsageError
from retrain.models.pythia_suite import SUITE, Configuration, suite_configuration
from retrain.safe_files import SafeFileError, one_line, read_text, write_whole

RATES = Path(__file__).with_name("rates.csv")  # the rows that ship with the package: those of results/scaling
SHAPE_COLUMNS = ("hidden", "layers", "heads", "intermediate", "vocabulary")  # what a model's cost depends on
SCORE_PARTS = ("score_base", "score_per_train", "score_per_query", "score_per_pair")
COLUMNS = [
    "model", "parameters", "method", "load_seconds", "fit_seconds", "score_seconds", "peak_memory_bytes", "disk_bytes",
    "projected", "seconds_low", "seconds_high", "device", "error", "run_id",
    "train", "queries", "tokens", "draws", "fit_examples", "minibatch", "dtype", "weights", "text",
    "token_parameters", *SHAPE_COLUMNS, "weight_bytes", "peak_reserved_bytes", "host_peak_bytes",
    "timed_draws", "seconds_per_draw", "setup_seconds", "floor_seconds_per_draw", "floor_ratio", "peak_flops",
    "token_bytes", "depth", "eigen_cost", "eigen_seconds", "covariance_seconds", "lambda_seconds", "fit_sizes",
    "covariance_base", "covariance_per_example", "lambda_base", "lambda_per_example", "fit_seconds_per_example",
    *SCORE_PARTS, "factor_bytes", "shared_parts",
    "needed_memory_bytes", "needed_disk_bytes", "storage", "projected_from", "max_residual", "held_out",
    "held_out_error", "again_seconds",
]  # fmt: skip
NOT_NUMBERS = {
    "model", "method", "projected", "device", "error", "run_id", "dtype", "weights", "text", "fit_sizes",
    "shared_parts", "storage", "projected_from", "held_out",
}  # fmt: skip
SIZE_COLUMNS = ("parameters", "train", "queries", "tokens", "token_parameters")  # every row has them
NEEDED_COLUMNS = (*SIZE_COLUMNS, "model", "method", "fit_seconds", "score_seconds", "peak_memory_bytes", "device")
_BIF_COLUMNS = ("seconds_per_draw", "minibatch")
_EKFAC_COLUMNS = ("fit_examples", "eigen_seconds", "eigen_cost", "covariance_per_example", "lambda_per_example")
OWN_COLUMNS = {"bif": _BIF_COLUMNS, "bif_tokens": _BIF_COLUMNS, "ekfac": _EKFAC_COLUMNS}  # of a measured row
ABOVE_ZERO = {"score_seconds", "seconds_per_draw", "eigen_seconds", "eigen_cost", "seconds_high", "peak_flops"}
QUERIES_END = "queries"  # how `projected_from` ends in a row whose scores are projected
METHOD_LABELS = {
    "bif": "BIF",
    "ekfac": "EK-FAC",
    "gradsim": "GradSim",
    "trak": "TRAK",
    "bif_tokens": "BIF, every token",
}


# ---- reading and writing ----


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Every row, checked; the first cell that cannot be right is named with its line and what was expected."""
    if not Path(path).exists():
        command = f"python -m bench.scaling --out {Path(path).parent}"
        raise UsageError(f"{path} is not there; measure first: {command}")
    try:
        lines = list(csv.reader(io.StringIO(text := read_text(path, follow_links=True))))
        frame = pd.read_csv(io.StringIO(text))
    except (SafeFileError, ValueError) as error:
        raise UsageError(
            f"{path} is no readable CSV ({error}); give the scaling.csv of a sweep with --results"
        ) from None
    if short := [number for number, cells in enumerate(lines, 1) if cells and len(cells) < len(frame.columns)]:
        raise UsageError(f"{path}, line {short[0]}: it lacks cells; it was cut off, or damaged")
    if missing := [name for name in NEEDED_COLUMNS if name not in frame]:
        raise UsageError(f"{path} lacks the columns {', '.join(missing)}; expected the scaling.csv of bench.scaling")
    measured = frame["score_seconds"].notna() & (frame["error"].isna() if "error" in frame else True)
    for name in COLUMNS:
        if name not in NOT_NUMBERS:
            methods = [method for method, names in OWN_COLUMNS.items() if name in names]
            _check_numbers(path, frame, name, (name in SIZE_COLUMNS) | (measured & frame["method"].isin(methods)))
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def _check_numbers(path: str | Path, frame: pd.DataFrame, name: str, required: pd.Series) -> None:
    """Refuses a gap where a number is required, and anywhere a word, an infinity or a number that is too small."""
    column = frame.get(name, pd.Series(math.nan, frame.index))
    values = pd.to_numeric(column, errors="coerce")
    expected, right = "a number", np.isfinite(values)
    if name in SIZE_COLUMNS:
        expected, right = "a whole number of at least 1", right & (values >= 1) & (values % 1 == 0)
    elif name in ABOVE_ZERO:
        expected, right = "a number above 0", right & (values > 0)
    elif name != "held_out_error":
        expected, right = "a number of at least 0", right & (values >= 0)
    for row in np.flatnonzero(~right & (column.notna() | required)):
        came = "empty" if pd.isna(column[row]) else f'"{one_line(str(column[row]), 40)}"'
        raise UsageError(f"{path}, line {row + 2}: {name} is {came}; expected {expected}")


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    write_whole(path, pd.DataFrame(list(rows), columns=COLUMNS).to_csv(index=False))


# ---- what a row says ----


def number_of(value: Any) -> float | None:
    return None if value is None or value == "" or not math.isfinite(float(value)) else float(value)


def total_of(row: dict[str, Any]) -> float:
    """Seconds of the fit and the scores."""
    return (number_of(row.get("fit_seconds")) or 0.0) + (number_of(row.get("score_seconds")) or 0.0)


def has_peak(row: dict[str, Any]) -> bool:
    """Whether a row's memory was measured."""
    return number_of(row.get("peak_memory_bytes")) is not None


def fit_sizes_of(row: dict[str, Any]) -> list[int]:
    """Fitting sets that were measured in the point of a row; a column of single ones is read back as numbers."""
    return [int(float(size)) for size in str(row.get("fit_sizes") or "").split(", ") if size]


def scores_were_measured(row: dict[str, Any]) -> bool:
    """At the row's own number of queries, at whatever depth."""
    return not str(row.get("projected_from") or "").endswith(QUERIES_END)


def is_projected(row: dict[str, Any]) -> bool:
    return str(row.get("projected")) == "True"


def setting_of(row: dict[str, Any]) -> Setting:
    """What was asked of the run that a row is about."""
    return Setting(
        train=int(row["train"]), queries=int(row["queries"]), tokens=int(row["tokens"]),
        draws=int(number_of(row.get("draws")) or 0),
        fit_examples=int(number_of(row.get("fit_examples")) or row["train"]),
        minibatch=int(number_of(row.get("minibatch")) or 32),
    )  # fmt: skip


def method_label(method: str) -> str:
    return METHOD_LABELS.get(method, method.rpartition(":")[2])


# ---- the shape of a row's model ----


def configuration_of(row: dict[str, Any]) -> Configuration | None:
    """The suite's, or a folder's by the row's own columns; None where they do not say it."""
    return _configuration(str(row["model"]), tuple(row.get(name) for name in SHAPE_COLUMNS), row["parameters"])


@lru_cache(maxsize=1024)  # laws and crossings ask for each row's thousands of times
def _configuration(model: str, shape: tuple[Any, ...], num_parameters: Any) -> Configuration | None:
    found = SUITE.get(model)
    if found is None and all(map(number_of, shape)):
        columns: dict[str, Any] = dict(zip(SHAPE_COLUMNS, map(int, shape)))
        found = Configuration(name=model, **columns)
    return found if found is not None and found.num_parameters == int(num_parameters) else None


def shape_of(row: dict[str, Any]) -> Configuration:
    """The same, or what the row's width and depth say of EK-FAC's costs."""
    found = configuration_of(row)
    if found is not None:
        return found
    hidden = int(row["hidden"])
    name, layers = str(row["model"]), int(row["layers"])
    return Configuration(name=name, hidden=hidden, layers=layers, heads=1, intermediate=4 * hidden)


def same_shape(one: Configuration | None, other: Configuration) -> bool:
    """Whatever they are called: a folder with a suite model's shape costs what that costs."""
    return one is not None and all(getattr(one, name) == getattr(other, name) for name in SHAPE_COLUMNS)


def is_of(row: dict[str, Any], configuration: Configuration) -> bool:
    """Whether a row was measured at this very shape."""
    return same_shape(configuration_of(row), configuration)


def named_configuration(name: str) -> Configuration:
    """Of a size of the suite, or of a model folder, whose config.json anybody may have written."""
    found = suite_configuration(name)
    for column in (*SHAPE_COLUMNS, "positions"):
        value = getattr(found, column)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name}/config.json: {column} is {value!r}; expected a whole number of at least 1")
    if found.hidden % found.heads:
        raise UsageError(f"{name}/config.json: a width of {found.hidden} cannot be split among {found.heads} heads")
    share = found.rotary_share
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
        raise UsageError(f"{name}/config.json: rotary_pct is {share!r}; expected a share above 0, up to 1")
    return found
