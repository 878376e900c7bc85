"""Tasks and methods are found by file name: adding one is adding one file, and there is no registry to edit.

A name maps to `package/name.py`, or to `package/name/<interface>.py` where the plug-in needs several files. Nothing
is imported until it is asked for, so a missing optional dependency hurts only whoever asks for it. A plug-in outside
this repository is named `package.module:ClassName`.
"""

import ast
import importlib
import inspect
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from retrain.errors import UsageError

T = TypeVar("T")
SUFFIX = "_scores"  # random_scores.py is `random` on the command line: a file random.py would shadow Python's own


def plugin_name(cls: type) -> str:
    """The name on the command line of a plug-in class."""
    parts = cls.__module__.split(".")
    if parts[0] not in ("retrain", "baselines"):
        return f"{cls.__module__}:{cls.__qualname__}"
    return (parts[-1] if parts[-1] not in ("method", "task") else parts[-2]).removesuffix(SUFFIX)


def available(package: str, interface: str) -> dict[str, str]:
    """Command-line name -> module, for every plug-in file of a package."""
    folder = Path(str(importlib.import_module(package).__file__)).parent
    found = {
        path.stem.removesuffix(SUFFIX): f"{package}.{path.stem}"
        for path in folder.glob("*.py")
        if path.stem not in ("__init__", interface)
    }
    found |= {
        path.parent.name: f"{package}.{path.parent.name}.{interface}" for path in folder.glob(f"*/{interface}.py")
    }
    return dict(sorted(found.items()))


def find(package: str, interface: str, base: type[T], name: str) -> type[T]:
    """The plug-in class of that name."""
    choices = available(package, interface)
    if ":" in name:
        module_name, _, class_name = name.partition(":")
        try:
            cls = getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError) as error:
            raise UsageError(f'cannot import {interface} "{name}": {error}') from error
        if not (isinstance(cls, type) and issubclass(cls, base)):
            raise UsageError(f'"{name}" is not a {base.__module__}.{base.__name__}; subclass it')
        return cls
    if name not in choices:
        raise UsageError(f'unknown {interface} "{name}"; available: {", ".join(choices)}')
    module = importlib.import_module(choices[name])
    classes = [
        cls
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, base) and cls.__module__ == module.__name__ and not inspect.isabstract(cls)
    ]
    if len(classes) != 1:
        raise UsageError(f"{module.__name__} defines {len(classes)} {base.__name__} classes; expected exactly one")
    return classes[0]


def build(cls: type[T], options: dict[str, Any]) -> T:
    """An instance with these options; text values are read as Python literals where the field is not text."""
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    name = plugin_name(cls)
    values = {}
    for option, value in options.items():
        if option not in known:
            raise UsageError(f'{name} has no option "{option}"; available: {", ".join(known) or "none"}')
        values[option] = parse_value(value, known[option], f"{name}.{option}") if isinstance(value, str) else value
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: {error}") from error


def parse_value(text: str, option: Any, label: str) -> Any:
    """The value of `--set label=text`, checked against the type of the option's default."""
    default = option.default
    if isinstance(default, str):
        return text
    if isinstance(default, bool) and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if default is MISSING or default is None:
        return value
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    if type(value) is not type(default):
        raise UsageError(f"{label} is {text!r}; expected {type(default).__name__} such as {default!r}")
    return value
