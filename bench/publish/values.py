"""A value of a record, named by its place: `RECORD#PATH FORMAT`.

RECORD      a file or folder, from the repository's root. A folder is the `rows` and `pairs` of every run below it,
            as `bench.records` reads them, pairs both ways round; a .csv is its `rows`; any other file is JSON
PATH        names with dots between; [field=value,...] keeps the items of a list that have these values, [0] takes
            one by its number. Quotes around a value with a comma: [label="bif@draws=20,gamma=1e4"]
mean:PATH   over all items that are left: mean, se (standard error), median, min, max, sum, count. A mean, standard
            error or median is over seeds: items that differ in method, settings or question are refused
PATH / PATH  and PATH - PATH: of two numbers of one record
FORMAT      Python's (.3f, +.3f, .0%, ,d), or duration, bytes, text
"""

import csv
import io
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import bench.schema as schema
from bench.metrics import mean_and_standard_error
from bench.records import Results, load_results, read_record
from bench.tables import bytes_text, duration
from retrain.errors import UsageError
from retrain.safe_files import SafeFileError, read_text

SCHEMAS: dict[str, Any] = {
    "run.json": schema.RunRecord, "sweep.json": schema.SweepRecord, "budget.json": schema.BudgetRecord,
    "speed.json": schema.SpeedRecord,
}  # fmt: skip
FUNCTIONS = ("mean", "se", "median", "min", "max", "sum", "count")
OVER_SEEDS = ("mean", "se", "median")
# Two rows that differ in one of these are no two seeds of one experiment.
ONE_EXPERIMENT = (
    "task", "protocol", "ground", "method", "label", "reference", "models", "settings", "normalised", "alpha",
    "alpha_attribution", "against", "num_subsets", "num_replicates", "num_queries", "device", "model", "queries",
    "fit_examples",
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
    record = read_record(path, SCHEMAS.get(path.name, Any))
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
