"""One page of all that `bench` exports: signatures, docstrings, and the comment beside every field.

tda-bench publish api --out api.html        # for a browser; Markdown where the file ends in .md: bench/API.md
"""

import argparse
import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import bench
from bench.publish.html import markdown
from retrain.safe_files import write_whole

RETURNED = {  # what the exported functions and methods give back
    "Scores": "bench.api", "Influential": "bench.inspect", "Results": "bench.records",
    "ArrayScore": "bench.metrics.lds", "LDS": "bench.metrics.lds", "Ceiling": "bench.metrics.ceilings",
    "LinearCeiling": "bench.metrics.linear", "AdditiveShare": "bench.metrics.linear",
}  # fmt: skip
HEAD = """<!doctype html>
<meta charset="utf-8"><title>bench</title>
<style>body { max-width: 60em; margin: auto; padding: 0 1em; font: 15px/1.5 system-ui; } pre { overflow: auto; }</style>
"""


def fields_of(cls: type) -> dict[str, tuple[str, str]]:
    """Of a dataclass's own source: field -> (its declaration, the comment beside it or the lines of one above it)."""
    source = inspect.getsource(cls)
    (body,) = ast.parse(source).body
    lines = source.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    found = {}
    for node in body.body if isinstance(body, ast.ClassDef) else ():
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and "ClassVar" not in ast.dump(node):
            first = node.lineno
            while lines[first - 2].lstrip().startswith("#"):
                first -= 1
            words = [comments[line] for line in range(first, (node.end_lineno or first) + 1) if line in comments]
            default = "" if node.value is None else ast.unparse(node.value)
            shown = "" if not default or "field(" in default else f" = {default}"
            found[node.target.id] = (f"{node.target.id}: {ast.unparse(node.annotation)}{shown}", " ".join(words))
    return found


def sections() -> Iterator[tuple[str, Any]]:
    for name in bench.__all__:
        yield name, getattr(bench, name)
    for name, module in RETURNED.items():
        yield name, getattr(import_module(module), name)


def members_of(cls: type) -> dict[str, Any]:
    """Its own methods and properties with a docstring; those of a base class are explained there."""
    own = {name: getattr(one, "fget", one) for name, one in vars(cls).items() if not name.startswith("_")}
    return {name: one for name, one in own.items() if inspect.isfunction(one) and one.__doc__}


def signature(name: str, function: Any) -> str:
    """As it is written, which no version of Python spells otherwise."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{name}({ast.unparse(node.args).removeprefix('self').removeprefix(', ')}){result}"


def api_page() -> str:
    """As Markdown."""
    parts = [f"# Python\n\n{inspect.cleandoc(bench.__doc__ or '')}"]
    for name, value in sections():
        is_class = inspect.isclass(value)
        fields = fields_of(value).values() if is_class else ()
        members = members_of(value).items() if is_class else ()
        parts.append(f"## {name}\n\n{inspect.cleandoc(value.__doc__ or '')}")
        if not fields:  # a function, or a class: what it is made of
            parts.append(f"```python\n{signature(name, value.__init__ if is_class else value)}\n```")
        lines = [f"- `{declared}`: {words}" for declared, words in fields]
        lines += [f"- `{signature(method, one)}`: {' '.join(one.__doc__.split())}" for method, one in members]
        parts += ["\n".join(lines)] if lines else []
    return "\n\n".join(parts) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", default="api.html", help="the page; Markdown where it ends in .md (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    page = api_page()
    write_whole(Path(arguments.out), page if arguments.out.endswith(".md") else HEAD + str(markdown(page)))
    print(arguments.out)
    return 0
