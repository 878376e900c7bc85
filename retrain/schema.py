"""What a JSON file must look like, and one line that says where it does not.

A schema has the shape of what it describes; `check` returns the value or raises `SafeFileError`:

    EVENT = {"event": Choice("done", "failed"), "time": Number(at_least=0), "key?": Text("[0-9a-f]{20}")}
    check(read_json(path), {"name": Text(), "events": [EVENT], "options": {"*": ANY}}, path)

    {"a": s, "b?": s}    a table with exactly these fields; one whose name ends in ? may be missing
    {"*": s}             fields of any other name, each like s
    [s]                  a list, each item like s; `ListOf` also bounds its length
    Text, Integer, Number, Flag, Choice, Maybe (or null), ANY

Nothing is converted: a whole number is no text, and true is no number. Texts must be real characters (a lone half of a
surrogate pair cannot be written anywhere) and numbers finite.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from retrain.safe_files import SafeFileError, is_text, one_line, quoted

MAX_TEXT = 2**20
MAX_ITEMS = 10**7


@dataclass(frozen=True)
class Text:
    """Characters; `pattern` is a regular expression for the whole of it."""

    pattern: str = ""
    at_most: int = MAX_TEXT

    def accepts(self, value: Any) -> bool:
        if not isinstance(value, str) or len(value) > self.at_most or not is_text(value):
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
        # An integer of 400 digits compares with a float but does not become one.
        return self.at_least <= value <= self.at_most and abs(value) < 1e300

    def __str__(self) -> str:
        return "a number" + _range(self.at_least, self.at_most)


@dataclass(frozen=True)
class Integer:
    """A whole number; by default one that 64 bits hold."""

    at_least: int = -(2**63)
    at_most: int = 2**63 - 1

    def accepts(self, value: Any) -> bool:
        return type(value) is int and self.at_least <= value <= self.at_most

    def __str__(self) -> str:
        low = -math.inf if self.at_least == -(2**63) else self.at_least
        high = math.inf if self.at_most == 2**63 - 1 else self.at_most
        return "a whole number" + _range(low, high)


@dataclass(frozen=True)
class Flag:
    def accepts(self, value: Any) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True, init=False)
class Choice:
    """One of these values, of the same type."""

    values: tuple[Any, ...]

    def __init__(self, *values: Any):
        object.__setattr__(self, "values", values)

    def accepts(self, value: Any) -> bool:
        return any(type(value) is type(one) and value == one for one in self.values)

    def __str__(self) -> str:
        return "one of " + ", ".join(map(str, self.values))


@dataclass(frozen=True)
class Maybe:
    """Like `schema`, or null."""

    schema: Any


@dataclass(frozen=True)
class ListOf:
    item: Any
    at_least: int = 0
    at_most: int = MAX_ITEMS


@dataclass(frozen=True)
class Anything:
    """Whatever JSON holds; not looked into."""

    def accepts(self, value: Any) -> bool:
        return True


ANY = Anything()


def check(value: Any, schema: Any, path: str | os.PathLike[str], where: str = "") -> Any:
    """`value`, when it is like `schema`; `where` names it in the line that refuses it."""
    here = where or "its content"
    if hasattr(schema, "accepts"):
        if not schema.accepts(value):
            raise SafeFileError(path, f"{here} is {_shown(value)}; expected {schema}")
        return value
    if isinstance(schema, Maybe):
        return value if value is None else check(value, schema.schema, path, where)
    if isinstance(schema, list):
        (item,) = schema
        schema = ListOf(item)
    if isinstance(schema, ListOf):
        if not isinstance(value, list):
            raise SafeFileError(path, f"{here} is {_shown(value)}; expected a list")
        if not schema.at_least <= len(value) <= schema.at_most:
            expected = _range(schema.at_least, schema.at_most)
            raise SafeFileError(path, f"{here} has {len(value):,} items; expected a number{expected}")
        for index, item in enumerate(value):
            check(item, schema.item, path, f"{where}[{index}]")
    else:
        _check_table(value, schema, path, where)
    return value


def conforms(value: Any, schema: Any) -> bool:
    """Whether `check` would pass it."""
    try:
        check(value, schema, "")
    except SafeFileError:
        return False
    return True


def _check_table(value: Any, schema: Mapping[str, Any], path: str | os.PathLike[str], where: str) -> None:
    here = where or "its content"
    if not isinstance(value, dict):
        raise SafeFileError(path, f"{here} is {_shown(value)}; expected a table")
    for name, item in value.items():
        # A file's own "b?" or "*" is a name like any other, and never the schema's mark.
        if name in schema and name != "*" and not name.endswith("?"):
            field = schema[name]
        elif f"{name}?" in schema:
            field = schema[f"{name}?"]
        elif "*" in schema:
            field = schema["*"]
        else:
            known = ", ".join(known.removesuffix("?") for known in schema)
            raise SafeFileError(path, f"{here} has the unknown field {quoted(name, 60)}; known: {known}")
        if not is_text(name):
            raise SafeFileError(path, f"{here} has a field whose name is not text: {quoted(name, 60)}")
        if field is not ANY:
            check(item, field, path, f"{where}.{name}" if where else name)
    for name in schema:
        if name != "*" and not name.endswith("?") and name not in value:
            raise SafeFileError(path, f"{here} has no field {quoted(name, 60)}")


def _shown(value: Any) -> str:
    """A value for an error's line; the repr of a long integer would be refused by Python itself."""
    if value is None:
        return "null"
    if isinstance(value, (dict, list)):
        return f"a {'table' if isinstance(value, dict) else 'list'} of {len(value):,}"
    if type(value) is int and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    return one_line(str(value).lower() if isinstance(value, bool) else repr(value)[:200], 60)


def _range(low: float, high: float) -> str:
    if low == -math.inf and high == math.inf:
        return ""
    if high in (math.inf, MAX_ITEMS):
        return f" of at least {low:,}"
    return f" of at most {high:,}" if low == -math.inf else f" from {low:,} to {high:,}"
