"""The command of `bench.leaderboard`: prints the boards, writes them as CSV or into results/README.md."""

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.leaderboard.ranking import rows
from bench.leaderboard.wide import ROW_CHOICES, boards, rows_with
from bench.records import load_results
from bench.tables import table
from bench.words.command import main as write_words
from retrain.command import Parser, guarded
from retrain.errors import UsageError
from retrain.safe_files import write_whole

BOARD_PAGE = "README.md"  # of the results folder: where the marked tables stand


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.leaderboard", description="Task x method x metric, with ranks, from records.")
    add = parser.add_argument
    add("--results", default="results", help="folder with the records (default: results)")
    for name in ROW_CHOICES:
        add(f"--{name}", nargs="+", default=[], help=f"only rows with this {name}")
    add("--wide", action="store_true", help="intervals, settings and records as well")
    add("--csv", metavar="FILE", help="write every row as a tidy table")
    add("--write", action="store_true", help=f"also write the marked tables of RESULTS/{BOARD_PAGE}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(list(sys.argv[1:] if argv is None else argv))
    return guarded(parser.prog, lambda: show_or_write(arguments, parser.prog), "what was printed above is whole")


def show_or_write(arguments: argparse.Namespace, prog: str) -> int:
    """Records that cannot be read are named before anything else, since what follows is without them."""
    folder = Path(arguments.results)
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; name the one that holds run.json files with --results")
    if arguments.csv and not Path(arguments.csv).absolute().parent.is_dir():
        raise UsageError(f"--csv {arguments.csv}: {Path(arguments.csv).parent} is no folder")
    results = load_results(folder)
    ranked = rows(results)
    for problem in results.problems:
        print(f"{prog}: {problem}", file=sys.stderr)
    if results.problems and not ranked:
        return 1
    found = rows_with(ranked, **{name: getattr(arguments, name) for name in ROW_CHOICES})
    if not found:
        raise UsageError(f"{folder} holds no rows; run `python -m bench.lds --alpha 0.1 --out {folder}` first")
    for board in boards(found, arguments.wide):
        print(f"{board.title}\n{table(board.header, board.lines)}\n{board.caption}\n")
    if arguments.csv:
        text = io.StringIO()
        plain = [
            {
                name: " ".join(map(str, value)) if isinstance(value, tuple) else value
                for name, value in row.plain().items()
            }
            for row in found
        ]
        writer = csv.DictWriter(text, fieldnames=list(plain[0]))
        writer.writeheader()
        writer.writerows(plain)
        write_whole(Path(arguments.csv), text.getvalue())
    wrong = bool(results.problems)
    if arguments.write:
        wrong |= bool(write_words([str(folder / BOARD_PAGE), "--root", str(folder.parent)]))
    return int(wrong)
