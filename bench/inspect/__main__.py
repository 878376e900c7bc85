"""`python -m bench.inspect examples|tokens`: which training examples, or tokens, bear on which queries."""

import argparse
import logging
import sys
from collections.abc import Sequence

from bench.arguments import (
    RUNS,
    Parser,
    add_method_arguments,
    add_query_arguments,
    add_settings_argument,
    add_task_arguments,
    at_least,
    run_cli,
    share,
)
from bench.inspect import examples, tokens
from bench.records import command_line


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.inspect", description="Which training examples bear on which queries.")
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("examples", help="the training examples that matter most to some queries")
    add_method_arguments(shown, examples.SHOWN_IMAGE_METHODS)
    add = shown.add_argument
    queries, pairs = examples.SHOWN_QUERIES, examples.SHOWN_PAIRS
    add("--show", type=at_least(1), help=f"how many queries (default: {queries}; pairs of a language task: {pairs})")
    add("--shown", type=at_least(1), help="most and least influential of each (default: 4; 3 for more than 2 methods)")
    add("--candidates", type=at_least(1), default=64, help="language tasks: training sequences looked at (default: 64)")
    add("--scores", choices=("both", "normalised", "raw"), default="both", help="of images (default: %(default)s)")
    single = commands.add_parser("tokens", help="which tokens of a training sequence bear on which tokens of a query")
    add = single.add_argument
    add("--method", default="bif", help="bif or ekfac, with @options where you like (default: bif)")
    add_settings_argument(single)
    chosen = single.add_mutually_exclusive_group()
    pair_type = tokens.parse_pair
    chosen.add_argument("--pairs", nargs="+", type=pair_type, metavar="QUERY:TRAIN", help="indices of the task's data")
    chosen.add_argument("--top", type=at_least(1), default=3, help="the strongest pairs by sequence score (default: 3)")
    for name, command in (("examples", shown), ("tokens", single)):
        add_task_arguments(command)
        add_query_arguments(command)
        add = command.add_argument
        add("--seed", dest="seeds", nargs=1, type=at_least(0), help="the experiment, as in bench.lds (default: 1)")
        add("--alpha-attribution", nargs=1, type=share, help="share of the training set (default: the task's)")
        add("--out", default=f"{RUNS}/{name}", help="folder to write to (default: %(default)s)")
        command.set_defaults(alpha=[0.5])  # nothing is retrained
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(words)
    prog, line = f"{parser.prog} {arguments.command}", command_line("bench.inspect", words)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    work = examples.inspect_examples if arguments.command == "examples" else tokens.inspect_tokens
    return run_cli(prog, lambda: work(arguments, line, prog), "nothing was written")


if __name__ == "__main__":
    sys.exit(main())
