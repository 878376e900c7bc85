"""Tasks and methods are found by file name: adding one is adding one file, and there is no registry to edit.

A name maps to `package/name.py`, or to `package/name/<interface>.py` where the plug-in needs several files. A package's
PRESETS name the classes of a file that has several: name -> "file:ClassName". Nothing is imported until it is asked
for, so a missing optional dependency hurts only whoever asks for it. A plug-in outside this repository is named by its
file, `path/to/mine.py` (`path/to/mine.py:ClassName` where it defines several), or by `package.module:ClassName`.
"""

import ast
import difflib
import importlib
import importlib.util
import inspect
import math
import re
import sys
import traceback
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from retrain.errors import UsageError, error_line

Plugin = TypeVar("Plugin")
SUFFIX = "_scores"  # random_scores.py is `random` on the command line: a file random.py would shadow Python's own
FILE = re.compile(r"(?P<path>.+\.py)(?::(?P<cls>[A-Za-z_]\w*))?", re.DOTALL)
DOTTED = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<cls>[A-Za-z_]\w*)")
_files: dict[str, Path] = {}  # module name -> file, of plug-ins that were loaded from a file


def plugin_name(cls: type) -> str:
    """The name of a plug-in class in tables, records and keys."""
    module = cls.__module__
    if preset := vars(cls).get("preset"):
        return str(preset)
    if module in _files:
        base = next(one for one in reversed(cls.__mro__) if one.__module__ in ("baselines.method", "retrain.task"))
        alone = len(_classes_of(sys.modules[module], base)) == 1
        return _files[module].stem if alone else f"{_files[module].stem}:{cls.__qualname__}"
    parts = module.split(".")
    if parts[0] not in ("retrain", "baselines"):
        return f"{module}:{cls.__qualname__}"
    return (parts[-1] if parts[-1] not in ("method", "task") else parts[-2]).removesuffix(SUFFIX)


def plugin_reference(cls: type) -> str:
    """What finds the class again from any process on this machine: its name, or the whole path of its file."""
    file = _files.get(cls.__module__)
    if file is not None:
        return f"{file}:{cls.__qualname__}"
    # Of the suite, but not among the files that are found by their name.
    apart = cls.__module__.startswith("retrain.") and not cls.__module__.startswith("retrain.tasks.")
    return f"{cls.__module__}:{cls.__qualname__}" if apart else plugin_name(cls)


def available(package: str, interface: str) -> dict[str, str]:
    """Command-line name -> module, or module:ClassName, for every plug-in of a package."""
    here = importlib.import_module(package)
    folder = Path(str(here.__file__)).parent
    found = {
        path.stem.removesuffix(SUFFIX): f"{package}.{path.stem}"
        for path in folder.glob("*.py")
        if path.stem not in ("__init__", interface)
    }
    found |= {
        path.parent.name: f"{package}.{path.parent.name}.{interface}" for path in folder.glob(f"*/{interface}.py")
    }
    found |= {name: f"{package}.{place}" for name, place in getattr(here, "PRESETS", {}).items()}
    return dict(sorted(found.items()))


def find(package: str, interface: str, base: type[Plugin], name: str) -> type[Plugin]:
    """The plug-in class of that name."""
    if match := FILE.fullmatch(name):
        return _the_class(_module_of_file(Path(match["path"]), interface), match["cls"], base, name)
    if ":" in name:
        if not (match := DOTTED.fullmatch(name)):
            raise UsageError(
                f'"{name}" names no {interface}; expected package.module:ClassName, or a file that ends in .py'
            )
        try:
            module = importlib.import_module(match["module"])
        except ImportError as error:
            raise UsageError(f'cannot import {interface} "{name}": {error}') from error
        return _the_class(module, match["cls"], base, name)
    choices = available(package, interface)
    if name not in choices:
        meant = difflib.get_close_matches(name, choices, 1)
        raise UsageError(
            f'unknown {interface} "{name}"; available: {", ".join(choices)}, or a file of yours (mine.py), or '
            f"package.module:ClassName{f'; did you mean {meant[0]}?' if meant else ''}"
        )
    place, _, class_name = choices[name].partition(":")
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{interface} {name} needs the package {error.name}, which is not installed; pip install 'tda-bench[all]'"
        ) from error
    return _the_class(module, class_name or None, base, module.__name__)


def _module_of_file(path: Path, interface: str) -> Any:
    """The module of a plug-in's file, loaded once; what it imports from its own folder is found there."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UsageError(f'{interface} "{path}": there is no such file')
    if not path.stem.isidentifier():
        raise UsageError(
            f'{interface} "{path.name}": its name must be one that Python can import, such as my_{interface}.py'
        )
    name = next((module for module, file in _files.items() if file == path), None)
    if name is None:
        taken = path.stem in sys.modules or path.stem in sys.builtin_module_names
        name = path.stem if not taken else f"{path.stem}_of_{len(_files)}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # last: a folder of the user's must not shadow what is installed
        _files[name] = path
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name], _files[name]
            raise UsageError(
                f'{interface} "{path}" cannot be imported: {error_line(error)}{_where(error, path)}'
            ) from error
    return sys.modules[name]


def _where(error: Exception, path: Path) -> str:
    """The line of the plug-in's own file in which an error came up."""
    if isinstance(error, SyntaxError):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path]
    return f" (line {lines[-1]})" if lines else ""


def _classes_of(module: Any, base: type) -> list[type]:
    return [
        cls
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, base) and cls.__module__ == module.__name__ and not inspect.isabstract(cls)
    ]


def _the_class(module: Any, class_name: str | None, base: type[Plugin], name: str) -> type[Plugin]:
    if class_name is not None:
        cls = getattr(module, class_name, None)
        if cls is None:
            raise UsageError(f'"{name}": the module {module.__name__} has no class {class_name}')
        if not (isinstance(cls, type) and issubclass(cls, base)):
            raise UsageError(f'"{name}" is not a {base.__module__}.{base.__name__}; subclass it')
        return cls
    classes = _classes_of(module, base)
    if len(classes) != 1:
        some = f" ({', '.join(cls.__name__ for cls in classes)}): name one, {name}:ClassName" if classes else ""
        raise UsageError(f"{name} defines {len(classes)} {base.__name__} classes{some or '; expected exactly one'}")
    return classes[0]


def build(cls: type[Plugin], options: dict[str, Any]) -> Plugin:
    """An instance with these options; text values are read as Python literals where the field is not text."""
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    name = plugin_name(cls)
    values = {}
    for option, value in options.items():
        if option not in known:
            raise UsageError(f'{name} has no option "{option}"; available: {", ".join(known) or "none"}')
        values[option] = option_value(value, known[option].default, f"{name}.{option}")
    try:
        made = cls(**values)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: {error}") from error
    getattr(made, "source", None)  # taken of the files as they were imported, before anybody edits them
    return made


def option_value(given: Any, default: Any, label: str) -> Any:
    """What an option was given as, from a command line (text) or a file, in the type of its default."""
    value = given
    if isinstance(given, str) and not isinstance(default, str):
        try:
            value = {"true": True, "false": False}.get(given.lower())
            value = ast.literal_eval(given) if value is None else value
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = given
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 2**1000 else math.inf
    if isinstance(value, int) and abs(value) >= 2**63:
        raise UsageError(f"{label} is {str(given)[:40]}; expected a whole number of at most 18 digits")
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{label} is {str(given)[:40]}; expected a finite number")
    if isinstance(value, list):
        value = tuple(value)
    if default is not MISSING and default is not None and type(value) is not type(default):
        raise UsageError(f"{label} is {str(given)[:40]!r}; expected {type(default).__name__} such as {default!r}")
    return value
