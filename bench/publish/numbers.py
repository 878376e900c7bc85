"""Numbers cannot drift from records: marked numbers and tables of a page are written, and checked, from result files.

    tda-bench publish numbers              # rewrites README.md, METHODS.md and the pages of results/
    tda-bench publish numbers --check      # changes nothing; a line for each place that differs from its record, exit 1

There is one marker, a comment, which no renderer shows. It stands before what it is about, and `end` closes it:

    <!-- value RECORD#PATH FORMAT -->0.512<!-- end -->
    <!-- table KIND ARGUMENTS -->                        (see bench/publish/page_tables.py)
    <!-- end -->

Marks inside code stay as they are. bench/publish/values.py says how a value is named.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.publish.page_tables import table_text
from bench.publish.values import Records, value_text
from retrain.errors import UsageError
from retrain.safe_files import SafeFileError, read_text, write_whole

# ---- marks in a page ----

OPENING = re.compile(r"<!--\s*(value|table)\s+(.*?)\s*-->", re.DOTALL)
CLOSING = re.compile(r"<!--\s*end\s*-->")
_CODE = r"^(?P<fence>```|~~~).*?^(?P=fence)[^\n]*$|(?P<ticks>`+)[^`\n][^\n]*?(?P=ticks)"
_NEXT = re.compile(f"{_CODE}|{OPENING.pattern}|{CLOSING.pattern}", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Mark:
    """A value or table in a page; `start` and `stop` are the ends of the text that it governs."""

    kind: str
    words: str
    line: int
    start: int
    stop: int


@dataclass(frozen=True)
class Finding:
    """A mark whose text is not what the record says, or that cannot be read."""

    line: int
    words: str
    reason: str
    repaired: bool  # whether the right text is known


def find_marks(page: str) -> Iterator[Mark | Finding]:
    """In order; one that is not closed, or closed without being opened, is a finding. Code outside of marks is passed
    over."""
    at = 0
    while found := _NEXT.search(page, at):
        at = found.end()
        line = _line(page, found.start())
        if CLOSING.fullmatch(found[0]):
            yield Finding(line, "end", "closes nothing", False)
        elif opening := OPENING.fullmatch(found[0]):
            kind, words = opening[1], " ".join(opening[2].split())
            closing, following = CLOSING.search(page, at), OPENING.search(page, at)
            if closing is None or (following is not None and following.start() < closing.start()):
                yield Finding(line, f"{kind} {words}", "is not closed; expected <!-- end --> after it", False)
            else:
                yield Mark(kind, words, line, at, closing.start())
                at = closing.end()


def _line(page: str, position: int) -> int:
    return page.count("\n", 0, position) + 1


def rewrite(page: str, text_of: Callable[[Mark], str]) -> tuple[str, list[Finding]]:
    """The page as it should be, and where it was not; a mark that cannot be read keeps its text."""
    parts, findings, at = [], [], 0
    for mark in find_marks(page):
        if isinstance(mark, Finding):
            findings.append(mark)
            continue
        stands = page[mark.start : mark.stop]
        try:
            wanted = text_of(mark)
        except UsageError as error:
            findings.append(Finding(mark.line, f"{mark.kind} {mark.words}", str(error), False))
            continue
        if wanted != stands:
            findings.append(Finding(mark.line, f"{mark.kind} {mark.words}", _difference(stands, wanted), True))
        parts += [page[at : mark.start], wanted]
        at = mark.stop
    return "".join([*parts, page[at:]]), findings


def _difference(stands: str, wanted: str) -> str:
    """The first line that differs."""
    before, after = stands.strip().split("\n"), wanted.strip().split("\n")
    for old, new in zip(before, after):
        if old != new:
            return f'the page says "{_short(old)}", the record "{_short(new)}"'
    if len(before) != len(after):
        return f"the page has {len(before)} lines, the record {len(after)}"
    return "blank lines around it differ"


def _short(text: str) -> str:
    return text if len(text) <= 160 else text[:157] + "..."


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("pages", nargs="*", help="pages (default: README.md, METHODS.md and every page under results/)")
    add("--root", default=".", help="the repository, from which marks name their records (default: here)")
    add("--check", action="store_true", help="change nothing; exit 1 where a page and its record differ")


def default_pages(root: Path) -> list[Path]:
    own = (root / "README.md", root / "METHODS.md")
    return [path for path in own if path.is_file()] + sorted((root / "results").rglob("*.md"))


def check_page(path: Path, records: Records) -> tuple[str, str, list[Finding]]:
    """The page as it is, as it should be, and a finding for each difference."""
    page = read_text(path, follow_links=True)
    wanted, findings = rewrite(
        page,
        lambda mark: value_text(records, mark.words) if mark.kind == "value" else table_text(records, mark.words, path),
    )
    return page, wanted, findings


def run(arguments: argparse.Namespace) -> int:
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
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
        for finding in findings:
            wrong = arguments.check or not finding.repaired
            failed |= wrong
            line = f"{name}:{finding.line}: {finding.words}: {finding.reason}"
            print(line if wrong else f"{line}; rewritten", file=sys.stderr if wrong else sys.stdout)
        if wanted != page and not arguments.check:
            write_whole(path, wanted)
    if not failed:
        print(f"{len(pages)} {'page agrees' if len(pages) == 1 else 'pages agree'} with the records")
    return 1 if failed else 0
