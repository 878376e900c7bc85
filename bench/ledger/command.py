"""The command of `bench.ledger`: writes the page, or checks it."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.ledger.evidence import Evidence
from bench.ledger.page import ledger_page
from retrain.command import Parser, run_cli
from retrain.errors import UsageError
from retrain.safe_files import SafeFileError, read_text, write_whole


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.ledger", description="Every claim of the paper, our numbers, and a verdict.")
    add = parser.add_argument
    add("--results", default="results", help="folder of records (default: %(default)s)")
    add("--out", help="the page (default: reproduction.md in the folder of records)")
    add("--check", action="store_true", help="change nothing; exit 1 where the page is not what the records say")
    add("--vision-task", default="cifar10", help="whose records speak of the image claims (default: %(default)s)")
    add("--language-task", default="pythia14m", help="and of the language claims (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(list(sys.argv[1:] if argv is None else argv))
    return run_cli(parser.prog, lambda: write_ledger(arguments, parser.prog), "nothing was written")


def write_ledger(arguments: argparse.Namespace, prog: str) -> int:
    folder = Path(arguments.results)
    if not folder.is_dir():
        raise UsageError(f"--results {folder} is no folder; expected one with records of bench.lds")
    out = Path(arguments.out) if arguments.out else folder / "reproduction.md"
    evidence = Evidence(folder, arguments.vision_task, arguments.language_task)
    tasks = sorted(set(evidence.results.rows["task"])) if len(evidence.results.rows) else []
    for option, name, plain in (
        ("--vision-task", arguments.vision_task, "cifar10"), ("--language-task", arguments.language_task, "pythia14m"),
    ):  # fmt: skip
        if name not in tasks and (name != plain or not tasks):
            there = f"there are {', '.join(tasks)}" if tasks else "there is none at all"
            raise UsageError(f"{option} {name}: {folder} has no record of that task; {there}")
    page = ledger_page(evidence, out.parent)
    for problem in evidence.results.problems:
        print(f"{prog}: {problem}", file=sys.stderr)
    if arguments.check:
        try:
            stands = read_text(out, follow_links=True)
        except SafeFileError as error:
            raise UsageError(f"--check: {error}") from None
        if stands != page:
            print(
                f"{prog}: {out} is not what the records say; the same command without --check writes it",
                file=sys.stderr,
            )
            return 1
        print(f"{out} is what the records say")
        return 0
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, page)
    print(f"page: {out}")
    return 1 if evidence.results.problems else 0
