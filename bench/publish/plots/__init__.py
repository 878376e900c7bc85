"""Draws every figure that a folder of records allows, and says how to make the others.

    tda-bench publish figures                          # everything, from runs/ into runs/figures
    tda-bench publish figures --only lds cost          # some kinds
    tda-bench publish figures --list                   # every kind, what it shows and what it needs

Nothing is recomputed, and the same results give the same bytes. What differs in task settings, ground truth or method
settings keeps its own panel and line. `figures.json` beside the pictures holds their captions and the runs behind them.
A new kind is a function that yields drawings, in a file of this folder, and a line in `kinds.py`.
"""

import argparse
from pathlib import Path
from typing import Any

DESCRIPTION = str(__doc__).split("\n")[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from bench.arguments import RUNS

    add = parser.add_argument
    add("--results", default=RUNS, metavar="DIR", help="where the records are (default: %(default)s)")
    add("--out", metavar="DIR", help="where the figures go (default: figures inside the results)")
    add("--only", nargs="+", metavar="KIND", help="only these kinds of figures")
    add("--list", action="store_true", help="name every kind and what it needs")


def run(arguments: argparse.Namespace) -> int:
    from bench.publish.plots.kinds import draw_chosen

    return draw_chosen(arguments)


def draw_figures(source: Any, kind: str = "front") -> Any:
    """The first figure of a kind that a folder of records, or a result that can be saved as one, allows."""
    from tempfile import TemporaryDirectory

    from bench.publish.plots.kinds import first_figure

    if isinstance(source, str | Path):
        return first_figure(Path(source), kind)
    with TemporaryDirectory(prefix="tda-bench-") as folder:
        source.save(folder)
        return first_figure(Path(folder), kind)
