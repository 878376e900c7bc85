"""`tda-bench publish WHAT`, or `python -m bench.publish WHAT`: what people read, made from records.

A module of one has `add_arguments(parser)` and `run(arguments) -> exit code`.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from bench.arguments import Parser, run_cli

PUBLISHED = {
    "figures": ("bench.publish.plots", "draw the figures that the records allow"),
    "report": ("bench.publish.report", "one page of every result, to open in a browser"),
    "leaderboard": ("bench.publish.leaderboard", "task x method x metric with ranks, seconds and memory"),
    "claims": ("bench.publish.claims", "every claim of the paper, our numbers, and a verdict"),
    "numbers": ("bench.publish.numbers", "write marked numbers and tables of pages from records, or check them"),
    "api": ("bench.publish.api_page", "one page of all that `from bench import ...` offers"),
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    lines = [f"  {name:12} {text}" for name, (_, text) in PUBLISHED.items()]
    parser = Parser(
        prog="tda-bench publish",
        description="Figures, report, leaderboard, claims, and more. `WHAT --help` lists the arguments.",
        epilog="\n".join(["published:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=tuple(PUBLISHED), metavar="WHAT", help="see below")
    what = parser.parse_args(words[:1] or ["-h"]).what
    module, text = importlib.import_module(PUBLISHED[what][0]), PUBLISHED[what][1]
    own = Parser(prog=f"{parser.prog} {what}", description=text)
    module.add_arguments(own)
    arguments = own.parse_args(words[1:])
    return run_cli(own.prog, lambda: module.run(arguments), "files that are not named above are as they were")


if __name__ == "__main__":
    sys.exit(main())
