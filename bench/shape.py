"""A stand-in for retrain/schema.py, word for word in what it offers here, until that is merged: then this file goes."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.safe_files import SafeFileError, one_line, quoted


@dataclass(frozen=True)
class Text:
    pattern: str = ""
    at_most: int = 2**20

    def accepts(self, value: Any) -> bool:
        if not isinstance(value, str) or len(value) > self.at_most or any("\ud800" <= c <= "\udfff" for c in value):
            return False
        return not self.pattern or re.fullmatch(self.pattern, value) is not None

    def __str__(self) -> str:
        return f"text like {self.pattern}" if self.pattern else f"text of at most {self.at_most:,} characters"


@dataclass(frozen=True)
class Number:
    at_least: float = -math.inf
    at_most: float = math.inf

    def accepts(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return self.at_least <= value <= self.at_most and abs(value) < 1e300

    def __str__(self) -> str:
        return f"a number from {self.at_least:,} to {self.at_most:,}"


@dataclass(frozen=True)
class Whole:
    at_least: int = -(2**63)
    at_most: int = 2**63 - 1

    def accepts(self, value: Any) -> bool:
        return type(value) is int and self.at_least <= value <= self.at_most

    def __str__(self) -> str:
        return f"a whole number from {self.at_least:,} to {self.at_most:,}"


@dataclass(frozen=True)
class Flag:
    def accepts(self, value: Any) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True, init=False)
class Choice:
    values: tuple[Any, ...]

    def __init__(self, *values: Any):
        object.__setattr__(self, "values", values)

    def accepts(self, value: Any) -> bool:
        return any(type(value) is type(one) and value == one for one in self.values)

    def __str__(self) -> str:
        return "one of " + ", ".join(map(str, self.values))


@dataclass(frozen=True)
class Maybe:
    schema: Any


@dataclass(frozen=True)
class ListOf:
    item: Any
    at_least: int = 0
    at_most: int = 10**7


@dataclass(frozen=True)
class Anything:
    def accepts(self, value: Any) -> bool:
        return True


ANY = Anything()


def check(value: Any, schema: Any, path: str | Path, where: str = "") -> Any:
    here = where or "its content"
    if hasattr(schema, "accepts"):
        if not schema.accepts(value):
            raise SafeFileError(path, f"{here} is {_shown(value)}; expected {schema}")
        return value
    if isinstance(schema, Maybe):
        return value if value is None else check(value, schema.schema, path, where)
    if isinstance(schema, list):
        schema = ListOf(schema[0])
    if isinstance(schema, ListOf):
        if not isinstance(value, list) or not schema.at_least <= len(value) <= schema.at_most:
            expected = f"a list of {schema.at_least:,} to {schema.at_most:,}"
            raise SafeFileError(path, f"{here} is {_shown(value)}; expected {expected}")
        for index, item in enumerate(value):
            check(item, schema.item, path, f"{where}[{index}]")
    else:
        _check_fields(value, schema, path, where)
    return value


def _check_fields(value: Any, schema: Mapping[str, Any], path: str | Path, where: str) -> None:
    here = where or "its content"
    if not isinstance(value, dict):
        raise SafeFileError(path, f"{here} is {_shown(value)}; expected a table")
    for name, item in value.items():
        known = name in schema and name != "*" and not name.endswith("?")
        field = schema[name] if known else schema.get(f"{name}?", schema.get("*"))
        if field is None:
            raise SafeFileError(path, f"{here} has the unknown field {quoted(name, 60)}")
        if field is not ANY:
            check(item, field, path, f"{where}.{name}" if where else name)
    for name in schema:
        if name != "*" and not name.endswith("?") and name not in value:
            raise SafeFileError(path, f"{here} has no field {quoted(name, 60)}")


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"a {'table' if isinstance(value, dict) else 'list'} of {len(value):,}"
    if type(value) is int and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    return "null" if value is None else one_line(repr(value)[:200], 60)
