"""The command of `bench.words`: rewrites pages from records, or says where they differ."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.words.blocks import table_text
from bench.words.complete import incomplete_records
from bench.words.marks import Finding, Mark, rewrite
from bench.words.values import Records, value_text
from retrain.command import Parser, guarded
from retrain.errors import UsageError
from retrain.safe_files import SafeFileError, read_text, write_whole


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.words", description="Numbers and tables of pages, written from records.")
    add = parser.add_argument
    add("pages", nargs="*", help="pages (default: README.md, METHODS.md and every page under results/)")
    add("--root", default=".", help="the repository, from which marks name their records (default: here)")
    add("--check", action="store_true", help="change nothing; exit 1 where a page and its record differ")
    add("--records", action="store_true", help="also name records without a commit or a fingerprint of the code")
    return parser


def default_pages(root: Path) -> list[Path]:
    own = (root / "README.md", root / "METHODS.md")
    return [path for path in own if path.is_file()] + sorted((root / "results").rglob("*.md"))


def check_page(path: Path, records: Records) -> tuple[str, str, list[Finding]]:
    """The page as it is, as it should be, and a finding for each difference."""

    def text_of(mark: Mark) -> str:
        if mark.kind == "value":
            return value_text(records, mark.words)
        return table_text(records, mark.words, path)

    page = read_text(path, follow_links=True)
    wanted, findings = rewrite(page, text_of)
    return page, wanted, findings


def name_from(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(list(sys.argv[1:] if argv is None else argv))
    return guarded(parser.prog, lambda: check_or_write(arguments), "pages that are not named above are as they were")


def check_or_write(arguments: argparse.Namespace) -> int:
    root = Path(arguments.root)
    records = Records(root)
    pages = [Path(page) for page in arguments.pages] or default_pages(root)
    if not pages:
        raise UsageError(f"{root} has no README.md and no page under results/; give pages, or --root")
    failed = False
    for path in pages:
        try:
            page, wanted, findings = check_page(path, records)
        except SafeFileError as error:
            raise UsageError(str(error)) from None
        for finding in findings:
            wrong = arguments.check or not finding.repaired
            failed |= wrong
            line = f"{name_from(root, path)}:{finding.line}: {finding.words}: {finding.reason}"
            print(line if wrong else f"{line}; rewritten", file=sys.stderr if wrong else sys.stdout)
        if wanted != page and not arguments.check:
            write_whole(path, wanted)
    if arguments.records:
        for line in incomplete_records(root / "results"):
            failed = True
            print(f"results/{line}", file=sys.stderr)
    if not failed:
        print(f"{len(pages)} {'page agrees' if len(pages) == 1 else 'pages agree'} with the records")
    return 1 if failed else 0
