"""What a row of scaling.csv says, read back: numbers, seconds, the model's shape and the setting that it is about."""

import math
from functools import lru_cache
from typing import Any

from bench.scaling.costs import Setting
from retrain.errors import UsageError
from retrain.models.pythia_suite import SUITE, Configuration, suite_configuration

# What a model's cost depends on.
SHAPE_COLUMNS = ("hidden", "layers", "heads", "intermediate", "vocabulary")


def number_of(value: Any) -> float | None:
    return None if value is None or value == "" or not math.isfinite(float(value)) else float(value)


def total_of(row: dict[str, Any]) -> float:
    return (number_of(row.get("fit_seconds")) or 0.0) + (number_of(row.get("score_seconds")) or 0.0)


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


def configuration_of(row: dict[str, Any]) -> Configuration | None:
    """Of a row's model: the suite's, or a folder's by the row's own columns, which older rows do not have."""
    return _configuration(str(row["model"]), tuple(row.get(name) for name in SHAPE_COLUMNS), row["parameters"])


@lru_cache(maxsize=1024)  # laws and crossings ask for each row's thousands of times
def _configuration(model: str, shape: tuple[Any, ...], num_parameters: Any) -> Configuration | None:
    found = SUITE.get(model)
    if found is None and all(map(number_of, shape)):
        columns: dict[str, Any] = dict(zip(SHAPE_COLUMNS, map(int, shape)))
        found = Configuration(name=model, **columns)
    return found if found is not None and found.num_parameters == int(num_parameters) else None


def same_shape(one: Configuration | None, other: Configuration) -> bool:
    """Whatever they are called: a folder with a suite model's shape costs what that costs."""
    return one is not None and all(getattr(one, name) == getattr(other, name) for name in SHAPE_COLUMNS)


def setting_of(row: dict[str, Any]) -> Setting:
    """What was asked of the run that a row is about."""
    return Setting(
        train=int(row["train"]), queries=int(row["queries"]), tokens=int(row["tokens"]),
        draws=int(number_of(row.get("draws")) or 0),
        fit_examples=int(number_of(row.get("fit_examples")) or row["train"]),
        minibatch=int(number_of(row.get("minibatch")) or 32),
    )  # fmt: skip


def shape_of(row: dict[str, Any]) -> Configuration:
    """What EK-FAC's costs depend on: of the suite's model, or of a row's own width and depth."""
    found = configuration_of(row)
    if found is not None:
        return found
    hidden = int(row["hidden"])
    return Configuration(
        name=str(row["model"]), hidden=hidden, layers=int(row["layers"]), heads=1, intermediate=4 * hidden
    )


def has_peak(row: dict[str, Any]) -> bool:
    """Whether a row's memory was measured."""
    return number_of(row.get("peak_memory_bytes")) is not None
