"""tda-bench: the commands of the suite under one name, for whoever has installed it.

    tda-bench lds --alpha 0.1            the same as python -m bench.lds --alpha 0.1
    tda-bench list methods               every method with its options, defaults and paper; also: list tasks
    tda-bench --version

`python -m bench.X` needs a folder without a `bench/` of its own; this does not.
"""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from retrain.command import Parser, run_cli
from retrain.errors import UsageError, error_line

# What these lead to is in the key, not their names.
COUNTS_BY_CONTENT = ("data_dir", "eval_text", "model", "text", "text_field")
COMMANDS = {
    "lds": ("bench.lds", "how well methods predict what happens when training data is left out"),
    "evaluate": ("bench.evaluations.__main__", "removal, mislabel, calibration, leave_one_out, agreement, limit"),
    "tune": ("bench.tune.__main__", "choose every method's settings by one rule, on queries and subsets of their own"),
    "speed": ("bench.speed", "time methods against each other"),
    "retrain_speed": ("bench.retrain_speed", "how many models a task retrains in a second"),
    "scaling": ("bench.scaling", "time and memory across the Pythia suite; --estimate predicts a run"),
    "truth": ("bench.truth.__main__", "ground truth of others, ours for others, and banks to compete on"),
    "regress": ("bench.regress", "the gate: has a method become worse, or dearer?"),
    "figures": ("bench.figures", "draw every figure that the results allow"),
    "report": ("bench.report", "one page of every result"),
    "publish": ("bench.publish.__main__", "report, leaderboard, claims, and numbers in pages"),
    "inspect": ("bench.inspect.__main__", "the training examples, or tokens, that matter most to some queries"),
    "status": ("bench.status", "what is done, running, failed and missing"),
    "cache": ("bench.cache", "list, verify and prune the cache"),
    "retrain": ("retrain.__main__", "the ground truth alone"),
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if "" not in sys.path and "." not in sys.path:
        sys.path.append("")  # plug-ins of one's own are found here; last, so that they shadow nothing
    parser = Parser(
        prog="tda-bench", description=str(__doc__).split("\n")[0], epilog=_overview(), formatter_class=_plain()
    )
    from bench import __version__

    parser.add_argument("--version", action="version", version=f"tda-bench {__version__}")
    parser.add_argument("command", choices=(*COMMANDS, "list"), metavar="COMMAND", help="see below")
    if not words or words[0].startswith("-"):
        parser.parse_args(words or ["--help"])
    command = parser.parse_args(words[:1]).command
    if command == "list":
        return run_cli("tda-bench list", lambda: list_plugins(words[1:]))
    return importlib.import_module(COMMANDS[command][0]).main(words[1:])


def _plain() -> Any:
    import argparse

    return argparse.RawDescriptionHelpFormatter


def _overview() -> str:
    lines = [f"  {name:10} {words}" for name, (_, words) in COMMANDS.items()]
    return "\n".join(["commands:", *lines, f"  {'list':10} methods or tasks, with options, defaults and papers"])


# ---- list ----


def list_plugins(words: Sequence[str]) -> int:
    parser = Parser(prog="tda-bench list", description="Every method or task, with its options and defaults.")
    parser.add_argument("what", choices=("methods", "tasks"))
    parser.add_argument("name", nargs="?", help="only this one")
    arguments = parser.parse_args(list(words))
    blocks = []
    for name, cls in plugin_classes(arguments.what).items():
        if arguments.name in (None, name):
            blocks.append(describe(name, cls))
    if not blocks:
        raise UsageError(f'there is no {arguments.what[:-1]} "{arguments.name}"; tda-bench list {arguments.what}')
    print("\n\n".join(blocks))
    return 0


def plugin_classes(what: str) -> dict[str, Any]:
    """Name -> class, or the line that says why it cannot be imported."""
    from baselines.method import Method
    from retrain import plugins
    from retrain.task import Task

    package, interface, base = {
        "methods": ("baselines", "method", Method),
        "tasks": ("retrain.tasks", "task", Task),
    }[what]
    found: dict[str, Any] = {}
    for name in plugins.available(package, interface):
        try:
            found[name] = plugins.find(package, interface, base, name)  # type: ignore[type-abstract]
        except UsageError as error:
            found[name] = error_line(error)
    return found


def summary_of(cls: Any) -> str:
    """The first line of its module's text, without its own name."""
    text = (sys.modules[cls.__module__].__doc__ or "").strip().split("\n")[0]
    return text.partition(": ")[2] or text


def describe(name: str, cls: Any) -> str:
    if isinstance(cls, str):
        return f"{name}\n  {cls}"
    lines = [f"{name}: {summary_of(cls)}"]
    if getattr(cls, "paper", ""):
        lines.append(f"  paper: {cls.paper}")
    if len(getattr(cls, "protocols", ())) > 1:
        lines.append(f"  protocols: {', '.join(cls.protocols)}")
    for field in fields(cls):
        if field.name != "protocol":
            default = "needed" if field.default is MISSING else repr(field.default)
            kind = (
                ""
                if field.metadata.get("key", True)
                else f"  ({'by its content' if field.name in COUNTS_BY_CONTENT else 'changes no number'})"
            )
            lines.append(f"  {field.name} = {default}{kind}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
