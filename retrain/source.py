"""Which code made a number: a fingerprint of a plug-in's source and of the project's modules that it imports.

The fingerprint is part of every cache key, so an edited method or task is another one, whoever wrote it and whatever
its name. It is taken of what the code means: comments, docstrings and formatting may change freely, and it is the same
on every machine and Python version.

A module counts if it is the plug-in's own, or one that it imports (inside functions too, and through others) and that
belongs to the suite, to the plug-in's own package, or to no installed package at all. Installed libraries count by
their version instead (`imported_versions`), and files that a plug-in declares (`files`) by their bytes.
"""

import ast
import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from retrain.errors import UsageError

OURS = ("retrain", "baselines", "bench")
# They carry numbers about and change none: keys, files, processes, command lines. Of data the bytes are in the key.
INERT = (
    "retrain", "retrain.data", "retrain.errors", "retrain.jobs", "retrain.leases", "retrain.models.fetched",
    "retrain.plugins", "retrain.progress", "retrain.resume", "retrain.safe_files", "retrain.source", "retrain.store",
    "retrain.tasks", "retrain.units",
    "baselines.method", "baselines.support.memory",
)  # fmt: skip
INERT_FOLDERS = ("retrain.data.", "retrain.jobs.")
FINGERPRINT_DIGITS = 16


def source_fingerprint(*modules: str, files: Sequence[Path] = ()) -> str:
    """Of these modules, of what they import, and of these files.

    Of loaded modules it is taken once, when it is first asked for: an edit of the file does not change what runs here.
    """
    return _first_fingerprint(modules, tuple(files), tuple(id(sys.modules.get(name)) for name in modules))


@lru_cache(maxsize=256)
def _first_fingerprint(modules: tuple[str, ...], files: tuple[Path, ...], loaded: tuple[int, ...]) -> str:
    return current_fingerprint(*modules, files=files)


def current_fingerprint(*modules: str, files: Sequence[Path] = ()) -> str:
    """The same of the files as they are now. Where it differs, somebody edited them while this process ran."""
    digest = hashlib.sha256()
    # What a plug-in's own module is called depends on how it was loaded; what it says does not.
    named = [
        ("" if name in modules else name, _meaning(path, _stamp(path))) for name, path in _closure(modules).items()
    ]
    for name, meaning in sorted(named):
        digest.update(f"{name}\0{meaning}\0".encode())
    for path in files:
        try:
            digest.update(f"{path.name}\0{_file_digest(path, _stamp(path))}\0".encode())
        except OSError as error:
            raise UsageError(f"the declared file {path} cannot be read ({error.strerror})") from None
    return digest.hexdigest()[:FINGERPRINT_DIGITS]


@lru_cache(maxsize=1024)
def _file_digest(path: Path, stamp: tuple[int, ...] | None) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


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


# ---- libraries ----


@lru_cache
def library_versions(*distributions: str) -> dict[str, str]:
    """Major and minor version of each: what a cache key depends on."""
    return {name: ".".join(metadata.version(name).split("+")[0].split(".")[:2]) for name in distributions}


def imported_versions(*modules: str) -> dict[str, str]:
    """Versions of the distributions that a plug-in outside the suite imports, through its own helpers too.

    The suite's modules name theirs themselves (`libraries`): most of what they import cannot change a number.
    """
    found = set()
    if all(name.partition(".")[0] in OURS for name in modules):
        return {}
    for name, path in _closure(modules).items():
        if name.partition(".")[0] not in OURS:
            tops = {imported.partition(".")[0] for imported in _imports(path, name, _stamp(path))}
            found |= {distribution for top in tops for distribution in _distributions().get(top, ())}
    return library_versions(*sorted(found))


@lru_cache(maxsize=1)
def _distributions() -> dict[str, list[str]]:
    """Top-level module -> the distributions that bring it, of everything installed but the suite."""
    return {top: sorted(set(names)) for top, names in metadata.packages_distributions().items() if top not in OURS}


class KeyedPlugin:
    """What a task and a method have in common: what their code, files and libraries add to a cache key."""

    libraries: ClassVar[tuple[str, ...]] = ()  # distributions whose version is part of the key
    # Files whose bytes are part of the key, such as tables that the code reads; relative ones lie beside its module.
    files: ClassVar[tuple[str, ...]] = ()

    def key_modules(self) -> tuple[str, ...]:
        """The modules whose source is part of the key, with what they import."""
        return (type(self).__module__,)

    def key_files(self) -> tuple[Path, ...]:
        if isinstance(self.files, str):
            raise UsageError(f'files is "{self.files}"; expected several, as in files = ("{self.files}",)')
        owner = next(cls for cls in type(self).__mro__ if "files" in vars(cls))
        origin = getattr(sys.modules.get(owner.__module__), "__file__", None) or "."
        return tuple(Path(os.path.abspath(origin)).parent / os.path.expanduser(name) for name in self.files)

    @property
    def source(self) -> str:
        """A fingerprint of the code and of the declared files: edited, it is another plug-in."""
        return source_fingerprint(*self.key_modules(), files=self.key_files())

    def current_source(self) -> str:
        """The same of the files as they are now."""
        return current_fingerprint(*self.key_modules(), files=self.key_files())

    @property
    def versions(self) -> dict[str, str]:
        """Of torch, of the libraries that it names, and of those that a plug-in outside the suite imports."""
        return {**library_versions("torch", *self.libraries), **imported_versions(*self.key_modules())}


# ---- which modules count ----


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
        top = name.partition(".")[0]
        if top not in packages and _installed(top, tuple(sys.path), id(sys.modules.get(top))):
            continue
        path = _file_of(name)
        inert = name not in roots and (name in INERT or name.startswith(INERT_FOLDERS))
        if path is not None and not inert:
            found[name] = path
            waiting += _imports(path, name, _stamp(path))
    return found


@lru_cache(maxsize=1024)
def _installed(top: str, path: tuple[str, ...], loaded: int) -> bool:
    """Whether a top-level package or module comes with Python or from an installed distribution, or is not there.

    Wherever pip may put one: the interpreter's own folders, every site-packages and dist-packages (of the user, of
    Debian, of the base that an environment sees), and a folder on the path that pip filled (it has *.dist-info).
    """
    origin: Any = getattr(sys.modules.get(top), "__file__", None)
    found = _folders_of(top, path)
    places = [Path(origin)] if origin else [found] if isinstance(found, Path) else list(found)
    if not places:
        return True  # an extension, or not there: there is no source to read
    for place in (path for one in places for path in (one, one.resolve())):
        if {"site-packages", "dist-packages"} & set(place.parts):
            return True
        if any(place.is_relative_to(folder) for folder in _interpreter_folders()):
            return True
        if top in _distributions() and any(place.is_relative_to(folder) for folder in _filled_by_pip(path)):
            return True
    return False


@lru_cache(maxsize=1)
def _interpreter_folders() -> tuple[Path, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = {Path(path).resolve() for name in names if (path := sysconfig.get_paths().get(name))}
    # A virtual environment's standard library is its base's.
    return tuple(paths | {Path(sys.base_prefix).resolve() / "lib", Path(sys.prefix).resolve() / "lib"})


@lru_cache(maxsize=8)
def _filled_by_pip(path: tuple[str, ...]) -> tuple[Path, ...]:
    return tuple(Path(folder).resolve() for folder in path if folder and any(Path(folder).glob("*.dist-info")))


def _file_of(name: str) -> Path | None:
    """The Python file of a module; None for extensions and what is not there. Nothing is imported to find out."""
    origin: Any = getattr(sys.modules.get(name), "__file__", None)
    if origin is not None:
        return Path(origin).resolve() if str(origin).endswith(".py") else None
    top, *parts = name.split(".")
    if not top.isidentifier() or not all(part.isidentifier() for part in parts):
        return None
    folders = _folders_of(top, tuple(sys.path))
    if isinstance(folders, Path):
        return None if parts else folders.resolve()
    places = [folder.joinpath(*parts) for folder in folders]
    names = [place / "__init__.py" for place in places]
    if parts:
        names = [path for place in places for path in (place.with_suffix(".py"), place / "__init__.py")]
    return next((path.resolve() for path in names if path.is_file()), None)


@lru_cache(maxsize=1024)
def _folders_of(top: str, path: tuple[str, ...]) -> Path | tuple[Path, ...]:
    """Where a top-level package's modules are on this sys.path; of a top-level module, its file."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return ()
    if spec is None:
        return ()
    if spec.submodule_search_locations is not None:
        return tuple(Path(folder) for folder in spec.submodule_search_locations)
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else ()


@lru_cache(maxsize=1024)
def _parsed(path: Path, stamp: tuple[int, ...] | None) -> ast.Module:
    return ast.parse(path.read_bytes(), filename=str(path))


def _stamp(path: Path) -> tuple[int, ...] | None:
    """What changes when a file is edited; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


@lru_cache(maxsize=1024)
def _imports(path: Path, name: str, stamp: tuple[int, ...] | None) -> tuple[str, ...]:
    """Every module that a file imports, inside functions too."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = []
    for node in ast.walk(_parsed(path, stamp)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]  # a name may be a module of its own
    return tuple(dict.fromkeys(found))


@lru_cache(maxsize=1024)
def _meaning(path: Path, stamp: tuple[int, ...] | None) -> str:
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
    match body:
        case [ast.Expr(ast.Constant(str())), *rest]:
            return rest
    return body
