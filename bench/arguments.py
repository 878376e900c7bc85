"""The arguments that commands about methods share; `bench/translate.py` makes values of them."""

import argparse
from collections.abc import Sequence

from retrain.command import at_least

SPLITS = ("tune", "report", "all")
DEFAULT_METHODS = ("bif", "ekfac", "trak", "gradsim", "random")


def add_method_arguments(parser: argparse.ArgumentParser, default: Sequence[str] = DEFAULT_METHODS) -> None:
    """Which methods, with which settings; bench/methods.py has the spelling."""
    add = parser.add_argument
    add(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help="METHOD, METHOD@OPTION=VALUE,... or LABEL=METHOD@...; a METHOD is a file of baselines/ or of yours, or "
        f"package.module:Class (default: {' '.join(default)})",
    )
    add_settings_argument(parser)


def add_settings_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--settings",
        choices=("auto", "tuned", "library", "paper", "default"),
        help="whose settings methods get (default: tuned where the task has been tuned)",
    )


def add_query_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--queries", type=at_least(1), help="only the first so many queries of the split")
    parser.add_argument("--query-split", choices=SPLITS, help="which queries (default: report)")
