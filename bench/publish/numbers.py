"""Numbers cannot drift from records: marked numbers and tables of a page are written, and checked, from result files.

    tda-bench publish numbers              # rewrites README.md, METHODS.md and the pages of results/
    tda-bench publish numbers --check      # changes nothing; a line for each place that differs from its record, exit 1

There is one marker, a comment, which no renderer shows. It stands before what it is about, and `end` closes it:

    <!-- value RECORD#PATH FORMAT -->0.512<!-- end -->
    <!-- table KIND ARGUMENTS -->                        (see bench/publish/page_tables.py)
    <!-- end -->

Marks inside code stay as they are. A value is named by its place in a record:

RECORD      a file or folder, from the repository's root. A folder is the `rows` and `pairs` of every run below it,
            as `bench.records` reads them, pairs both ways round; a .csv is its `rows`; any other file is JSON
PATH        names with dots between; [field=value,...] keeps the items of a list that have these values, [0] takes
            one by its number. Quotes around a value with a comma: [label="bif@draws=20,gamma=1e4"]
mean:PATH   over all items that are left: mean, se (standard error), median, min, max, sum, count. A mean, standard
            error or median is over seeds: items that differ in method, settings or question are refused
PATH / PATH  and PATH - PATH: of two numbers of one record
FORMAT      Python's (.3f, +.3f, .0%, ,d), or duration, bytes, text
"""

import argparse
import csv
import io
import math
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import schema
from bench.metrics import mean_and_standard_error
from bench.records import Results, load_results
from bench.tables import bytes_text, duration
from retrain.errors import UsageError
from retrain.safe_files import SafeFileError, read_checked, read_json, read_text, write_whole

SCHEMAS = {
    "run.json": schema.RunRecord, "sweep.json": schema.SweepRecord, "budget.json": schema.BudgetRecord,
    "speed.json": schema.SpeedRecord,
}  # fmt: skip
FUNCTIONS = ("mean", "se", "median", "min", "max", "sum", "count")
OVER_SEEDS = ("mean", "se", "median")
# Two rows that differ in one of these are no two seeds of one experiment.
ONE_EXPERIMENT = (
    "task", "protocol", "ground", "method", "label", "settings", "normalised", "alpha", "alpha_attribution", "against",
    "num_subsets", "num_replicates", "num_queries", "device", "model", "queries", "fit_examples",
)  # fmt: skip
_STEP = re.compile(r"([A-Za-z0-9_-]+)((?:\[[^\]]*\])*)")
_CONDITION = re.compile(r'\s*([A-Za-z0-9_]+)=("[^"]*"|[^,"]*)\s*(?:,|$)')
_NUMBER_FORMAT = re.compile(r"\+?,?(\.\d{1,2})?[fdge%]")


class Records:
    """Result files under one root, each read once."""

    def __init__(self, root: Path):
        self.root = root
        self._results: dict[str, Results] = {}
        self._files: dict[str, Any] = {}

    def place(self, record: str) -> Path:
        path = self.root / record
        if Path(record).is_absolute() or ".." in Path(record).parts:
            raise UsageError(f"{record} leaves the repository; give a path from its root")
        if not path.exists():
            raise UsageError(f"{record} is not there")
        return path

    def results(self, folder: str) -> Results:
        if folder not in self._results:
            found = load_results(self.place(folder))
            if found.problems:
                raise UsageError(found.problems[0])
            self._results[folder] = found
        return self._results[folder]

    def read(self, record: str) -> Any:
        """The content of a file; of a folder its rows and pairs."""
        if record not in self._files:
            path = self.place(record)
            try:
                self._files[record] = self._folder(record) if path.is_dir() else _file(path)
            except SafeFileError as error:
                raise UsageError(str(error)) from None
        return self._files[record]

    def _folder(self, folder: str) -> dict[str, Any]:
        results = self.results(folder)
        return {"rows": _plain(results.rows), "pairs": both_ways(results.records.values())}


def both_ways(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Paired differences by their labels, each also the other way round: which stands first is chance."""
    found = []
    for record in records:
        for pair in record.get("pairs", []):
            label = pair.get("label") or pair["method"]
            found.append({**pair, "label": label, "run_id": record["run_id"]})
            turned = {
                to: None if pair[of] is None else -pair[of]
                for to, of in (("difference", "difference"), ("ci_low", "ci_high"), ("ci_high", "ci_low"))
            }
            found.append({**found[-1], **turned, "label": pair["against"], "against": label})
    return found


def _plain(frame: Any) -> list[dict[str, Any]]:
    """Rows of a table; what is missing is None."""
    return [
        {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}
        for row in frame.to_dict("records")
    ]


def _file(path: Path) -> Any:
    if path.suffix == ".csv":
        return {"rows": list(csv.DictReader(io.StringIO(read_text(path))))}
    record = read_checked(path, SCHEMAS[path.name]) if path.name in SCHEMAS else read_json(path)
    for row in record.get("rows", []) if isinstance(record, dict) else []:
        if isinstance(row, dict) and "method" in row:
            row.setdefault("label", row["method"])
    return record


def value_text(records: Records, words: str) -> str:
    """What stands between `<!-- value WORDS -->` and its end."""
    reference, _, form = words.strip().rpartition(" ")
    record, sign, expression = reference.strip().partition("#")
    if not sign or not form:
        raise UsageError(f'"{words}" names no value; expected RECORD#PATH FORMAT')
    return formatted(evaluate(records.read(record), expression.strip()), form)


def evaluate(record: Any, expression: str) -> Any:
    """PATH, or two of them with / or - between."""
    for sign in (" / ", " - "):
        first, between, second = expression.partition(sign)
        if between:
            one, other = _number(record, first), _number(record, second)
            if sign == " / " and other == 0:
                raise UsageError(f"{second.strip()} is 0; nothing is divided by it")
            return one / other if sign == " / " else one - other
    return _at(record, expression)


def _number(record: Any, path: str) -> float:
    value = _at(record, path.strip())
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{path.strip()} is {value!r}; expected a number") from None


def _at(record: Any, path: str) -> Any:
    function, colon, rest = path.partition(":")
    if colon and function in FUNCTIONS:
        path = rest
    else:
        function = ""
    found, items = follow(record, path)
    if function == "count":
        return len(found)
    if not function:
        if len(found) == 1:
            return found[0]
        apart = ", ".join(f"{name} ({len(values)})" for name, values in _apart(items).items())
        raise UsageError(f"{path} fits {len(found)} items; they differ in {apart or 'nothing that is named'}")
    return _over(function, path, found, items)


def _over(function: str, path: str, found: Sequence[Any], items: Sequence[Any]) -> float:
    if not found:
        raise UsageError(f"{path} fits nothing")
    if function in OVER_SEEDS:
        if other := [f"{name} {_several(values)}" for name, values in _apart(items).items() if name in ONE_EXPERIMENT]:
            raise UsageError(
                f"{function}:{path} is over items with {'; '.join(other)}; expected the seeds of one experiment"
            )
        seeds = [item.get("seed") for item in items if isinstance(item, Mapping)]
        if len(set(seeds)) < len(seeds) and None not in seeds:
            raise UsageError(f"{function}:{path} has a seed twice")
    try:
        numbers = [float(value) for value in found]
    except (TypeError, ValueError):
        raise UsageError(f"{path}: not all of its {len(found)} values are numbers") from None
    if function in ("mean", "se"):
        return mean_and_standard_error(numbers)[function == "se"]
    if function == "median":
        return statistics.median(numbers)
    if function == "sum":
        return math.fsum(numbers)
    return min(numbers) if function == "min" else max(numbers)


def follow(record: Any, path: str) -> tuple[list[Any], list[Any]]:
    """What is at a path, and the items of lists that were kept on the way there."""
    found, items, rest = [record], [], path
    while rest:
        step = _STEP.match(rest)
        if step is None or (rest[step.end() :] and not rest[step.end() :].startswith(".")):
            raise UsageError(f'"{rest}" is no step of a path; expected name, name[field=value,...] or name[0]')
        found = [_field(one, step[1]) for one in found]
        for inside in re.findall(r"\[([^\]]*)\]", step[2]):
            found = items = _kept(found, step[1], inside)
        rest = rest[step.end() + 1 :]
    return found, items


def _field(value: Any, name: str) -> Any:
    if not isinstance(value, Mapping) or name not in value:
        known = ", ".join(map(str, value)) if isinstance(value, Mapping) else f"a {type(value).__name__}"
        raise UsageError(f"there is no field {name}; there is {known}")
    return value[name]


def _kept(lists: Sequence[Any], name: str, inside: str) -> list[Any]:
    if any(not isinstance(one, list) for one in lists):
        raise UsageError(f"{name} is no list, of which [{inside}] could keep some")
    if re.fullmatch(r"\d+", inside):
        if any(int(inside) >= len(one) for one in lists):
            raise UsageError(f"{name} has no item {inside}")
        return [one[int(inside)] for one in lists]
    conditions = {}
    at = 0
    while at < len(inside):
        condition = _CONDITION.match(inside, at)
        if condition is None:
            raise UsageError(f'"[{inside}]" is no condition; expected field=value, with commas between')
        conditions[condition[1]] = condition[2].strip().strip('"')
        at = condition.end()
    left = [item for one in lists for item in one if isinstance(item, Mapping)]
    for field, wanted in conditions.items():
        if left and not any(field in item for item in left):
            raise UsageError(f"no item of {name} has a field {field}; there is {', '.join(map(str, left[0]))}")
        fitting = [item for item in left if field in item and equals(item[field], wanted)]
        if left and not fitting:
            raise UsageError(f"no item of {name} has {field}={wanted}; there is {_several(_values(left, field))}")
        left = fitting
    return left


def equals(value: Any, text: str) -> bool:
    if isinstance(value, bool) or value is None:
        return text == {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int | float):
        try:
            return float(text) == float(value)
        except ValueError:
            return False
    return str(value) == text


def _values(items: Sequence[Any], field: str) -> list[str]:
    return sorted({str(item.get(field)) for item in items})


def _several(values: Sequence[str]) -> str:
    return ", ".join(values[:8]) + (" ..." if len(values) > 8 else "")


def _apart(items: Sequence[Any]) -> dict[str, list[str]]:
    """Fields that tell items apart, with their values."""
    rows = [item for item in items if isinstance(item, Mapping)]
    names = [name for name in (*ONE_EXPERIMENT, "seed") if any(name in row for row in rows)]
    return {name: values for name in names if len(values := _values(rows, name)) > 1}


def formatted(value: Any, form: str) -> str:
    if value is None:
        raise UsageError("the record has no value there (null)")
    if form == "text":
        return str(value)
    if form not in ("duration", "bytes") and not _NUMBER_FORMAT.fullmatch(form):
        raise UsageError(f'"{form}" is no format; expected one such as .3f, +.2f, .0%, ,d, duration, bytes or text')
    try:
        amount = float(value)
    except (TypeError, ValueError):
        raise UsageError(f"the record has {value!r} there; {form} needs a number") from None
    if not math.isfinite(amount):
        raise UsageError(f"the record has {amount} there; expected a finite number")
    if form in ("duration", "bytes"):
        return duration(amount) if form == "duration" else bytes_text(amount)
    if form.endswith("d"):
        if amount != round(amount):
            raise UsageError(f"the record has {amount} there, which is no whole number as {form} asks")
        return format(round(amount), form)
    text = format(amount, form)
    return text.lstrip("-") if re.fullmatch(r"-0(\.0*)?%?", text) else text  # no minus before a zero


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


# ---- records that do not say what code made them ----

_NAMES = ("run", "tune", "speed", "retrain_speed", "sweep", "budget", "answers")
RECORD_FILES = tuple(f"{name}.json" for name in _NAMES)


def incomplete_records(folder: Path) -> list[str]:
    """A line for each record under a folder without a commit, or without a fingerprint of the code."""
    found = []
    paths = sorted(Path(place) / name for place, _, names in os.walk(folder) for name in names if name in RECORD_FILES)
    for path in paths:
        try:
            record = read_json(path)
        except SafeFileError as error:
            found.append(str(error))
            continue
        fields = record if isinstance(record, dict) else {}
        missing = [
            words
            for name, words in (("commit", "no commit"), ("code", "no fingerprint of the code (code)"))
            if not (isinstance(fields.get(name), str) and fields[name])
        ]
        if missing:
            found.append(f"{path.relative_to(folder).as_posix()}: {' and '.join(missing)}")
    return found


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("pages", nargs="*", help="pages (default: README.md, METHODS.md and every page under results/)")
    add("--root", default=".", help="the repository, from which marks name their records (default: here)")
    add("--check", action="store_true", help="change nothing; exit 1 where a page and its record differ")
    add("--records", action="store_true", help="also name records without a commit or a fingerprint of the code")


def default_pages(root: Path) -> list[Path]:
    own = (root / "README.md", root / "METHODS.md")
    return [path for path in own if path.is_file()] + sorted((root / "results").rglob("*.md"))


def check_page(path: Path, records: Records) -> tuple[str, str, list[Finding]]:
    """The page as it is, as it should be, and a finding for each difference."""
    from bench.publish.page_tables import table_text

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
    if arguments.records:
        for line in incomplete_records(root / "results"):
            failed = True
            print(f"results/{line}", file=sys.stderr)
    if not failed:
        print(f"{len(pages)} {'page agrees' if len(pages) == 1 else 'pages agree'} with the records")
    return 1 if failed else 0
