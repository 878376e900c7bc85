"""Where a page's marks are, what they say, and what they should say."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from retrain.errors import UsageError

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
