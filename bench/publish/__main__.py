"""`tda-bench publish NAME`, or `python -m bench.publish NAME`: what people read, made from records.

A module of one has `add_arguments(parser)` and `run(arguments) -> exit code`.
"""

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
    about = "Figures, report, leaderboard, claims, and more. `NAME --help` lists the arguments of one."
    module, own, arguments = Parser.of_module("tda-bench publish", about, PUBLISHED, words)
    return run_cli(own.prog, lambda: module.run(arguments), "files that are not named above are as they were")


if __name__ == "__main__":
    sys.exit(main())
