"""Which code made a number: a fingerprint of a plug-in's source and of the project's modules that it imports.

The fingerprint is part of every cache key, so an edited method or task is another one, whoever wrote it and whatever
its name. It is taken of what the code means: comments, docstrings and formatting may change freely, and it is the same
on every machine and Python version.

A module counts if it is the plug-in's own, or one that it imports (inside functions too, and through others) and that
belongs to the suite, to the plug-in's own package, or to no installed package at all. Installed libraries count by
their version instead (`Method.libraries`, and torch).
"""

import ast
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

OURS = ("retrain", "baselines", "bench")
# They carry numbers about and change none: keys, files, processes, command lines. Of data the bytes are in the key.
INERT = (
    "retrain", "retrain.command", "retrain.data", "retrain.errors", "retrain.jobs", "retrain.plugins",
    "retrain.progress", "retrain.safe_files", "retrain.source", "retrain.store", "retrain.tasks",
    "retrain.work",
    "baselines.method", "baselines.support.memory",
)  # fmt: skip
INERT_FOLDERS = ("retrain.data.", "retrain.jobs.")
FINGERPRINT_DIGITS = 16


def source_fingerprint(*modules: str) -> str:
    """Of these modules and of what they import, as above; of a loaded one as it was when it was first asked for."""
    return _fingerprint(modules, tuple(id(sys.modules.get(name)) for name in modules))


@lru_cache(maxsize=256)
def _fingerprint(modules: tuple[str, ...], loaded: tuple[int, ...]) -> str:
    digest = hashlib.sha256()
    # What a plug-in's own module is called depends on how it was loaded; what it says does not.
    named = [
        ("" if name in modules else name, _meaning(path, _stamp(path))) for name, path in _closure(modules).items()
    ]
    for name, meaning in sorted(named):
        digest.update(f"{name}\0{meaning}\0".encode())
    return digest.hexdigest()[:FINGERPRINT_DIGITS]


@lru_cache(maxsize=1)
def code_fingerprint() -> str:
    """Of every source file of the suite, byte by byte: which code made an entry or a record."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(path for package in OURS for path in (root / package).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:FINGERPRINT_DIGITS]


def source_files(*modules: str) -> dict[str, Path]:
    """Module -> file of everything that the fingerprint is taken of."""
    return dict(sorted(_closure(modules).items()))


def _closure(modules: Iterable[str]) -> dict[str, Path]:
    roots = tuple(modules)
    packages = {name.partition(".")[0] for name in roots} | set(OURS)
    found: dict[str, Path] = {}
    waiting = list(roots)
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        path = _file_of(name)
        if path is None or not (name in roots or _counts(name, path, packages)):
            continue
        if name not in INERT and not name.startswith(INERT_FOLDERS):
            found[name] = path
            waiting += _imports(path, name, path.name == "__init__.py")
    return found


def _counts(name: str, path: Path, packages: set[str]) -> bool:
    if name.partition(".")[0] in packages:
        return True
    return not any(path.is_relative_to(folder) for folder in _installed_folders())


@lru_cache(maxsize=1)
def _installed_folders() -> tuple[Path, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = {Path(path).resolve() for name in names if (path := sysconfig.get_paths().get(name))}
    # A virtual environment's standard library is its base's.
    paths |= {Path(sys.base_prefix).resolve() / "lib", Path(sys.prefix).resolve() / "lib"}
    return tuple(paths)


def _file_of(name: str) -> Path | None:
    """The Python file of a module; None for extensions and what is not there. Nothing is imported to find out."""
    origin: Any = getattr(sys.modules.get(name), "__file__", None)
    if origin is not None:
        return Path(origin).resolve() if str(origin).endswith(".py") else None
    top, *parts = name.split(".")
    if not top.isidentifier() or not all(part.isidentifier() for part in parts):
        return None
    folders = _folders_of(top)
    if not parts:
        return folders if isinstance(folders, Path) else _first_file(folder / "__init__.py" for folder in folders)
    if isinstance(folders, Path):
        return None
    places = [folder.joinpath(*parts) for folder in folders]
    return _first_file(path for place in places for path in (place.with_suffix(".py"), place / "__init__.py"))


@lru_cache(maxsize=1024)
def _folders_of(top: str) -> Path | tuple[Path, ...]:
    """Where a top-level package's modules are; of a top-level module, its file."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return ()
    if spec is None:
        return ()
    if spec.submodule_search_locations is not None:
        return tuple(Path(folder).resolve() for folder in spec.submodule_search_locations)
    return Path(spec.origin).resolve() if spec.origin and spec.origin.endswith(".py") else ()


def _first_file(paths: Iterable[Path]) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


@lru_cache(maxsize=1024)
def _parsed(path: Path, stamp: tuple[int, int]) -> ast.Module:
    return ast.parse(path.read_bytes(), filename=str(path))


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _imports(path: Path, name: str, is_package: bool) -> Iterator[str]:
    package = name if is_package else name.rpartition(".")[0]
    for node in ast.walk(_parsed(path, _stamp(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            yield base
            for alias in node.names:  # a name may be a module of its own
                yield f"{base}.{alias.name}"


@lru_cache(maxsize=1024)
def _meaning(path: Path, stamp: tuple[int, int]) -> str:
    digest = hashlib.sha256()
    for token in _tokens(_parsed(path, stamp)):
        digest.update(token.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def _tokens(node: Any) -> Iterator[str]:
    """The syntax tree without positions and docstrings, and without what Python versions write differently."""
    if isinstance(node, ast.AST):
        yield type(node).__name__
        for field in sorted(node._fields):
            value = getattr(node, field, None)
            if field in ("ctx", "kind", "type_comment", "type_ignores") or value is None or value == []:
                continue
            yield field
            if field == "body" and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                value = _without_docstring(value)
            yield from _tokens(value)
        yield "."
    elif isinstance(node, list):
        for item in node:
            yield from _tokens(item)
        yield ";"
    else:
        yield f"{type(node).__name__} {node!r}"


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return body[1:] if is_text else body
