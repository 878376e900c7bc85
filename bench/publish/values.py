"""A value of a record, named by its place: `RECORD#PATH FORMAT`.

RECORD      a file or folder, from the repository's root. A folder is the `rows` and `pairs` of every run below it,
            as `bench.records` reads them, pairs both ways round; a .csv is its `rows`; any other file is JSON
PATH        names with dots between; [field=value,...] keeps the items of a list that have these values, [0] takes
            one by its number. Quotes around a value with a comma: [label="bif@draws=20,gamma=1e4"]
mean:PATH   over all items that are left: mean, median, min, max. A mean or median is over seeds: items that differ in
            method, settings or question are refused
PATH / PATH  and PATH - PATH: of two numbers of one record
FORMAT      Python's (.3f, +.3f, .0%, ,d), or duration
"""

import csv
import io
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import bench.schema as schema
from bench.metrics import mean_and_standard_error
from bench.records import Results, load_results, read_record, without_nan
from bench.tables import duration
from retrain.errors import UsageError
from retrain.safe_files import SafeFileError, read_text

SCHEMAS: dict[str, Any] = {
    "run.json": schema.RunRecord, "sweep.json": schema.SweepRecord, "budget.json": schema.BudgetRecord,
    "speed.json": schema.SpeedRecord,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda values: mean_and_standard_error(values)[0], "median": statistics.median, "min": min, "max": max,
}  # fmt: skip
OVER_SEEDS = ("mean", "median")
# Two rows that differ in one of these are no two seeds of one experiment.
ONE_EXPERIMENT = (
    "task", "protocol", "ground", "method", "label", "reference", "models", "settings", "normalised", "alpha",
    "alpha_attribution", "against", "num_subsets", "num_replicates", "num_queries", "device", "model", "queries",
    "fit_examples",
)  # fmt: skip
_STEP = re.compile(r"([A-Za-z0-9_-]+)((?:\[[^\]]*\])*)")
_CONDITION = re.compile(r'(\s*([A-Za-z0-9_]+)=("[^"]*"|[^,"]*)\s*(?:,|$))')
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
        return {"rows": without_nan(results.rows.to_dict("records")), "pairs": both_ways(results.records.values())}


def both_ways(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Paired differences by their labels, each also the other way round: which stands first is chance."""
    found = []
    for record in records:
        for pair in record.get("pairs", []):
            label = pair.get("label") or pair["method"]
            found.append({**pair, "label": label, "run_id": record["run_id"]})
            ends = [pair[name] for name in ("difference", "ci_high", "ci_low")]
            turned = zip(("difference", "ci_low", "ci_high"), (None if end is None else -end for end in ends))
            found.append({**found[-1], **dict(turned), "label": pair["against"], "against": label})
    return found


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
            one, other = (number_of(_at(record, path.strip()), path.strip()) for path in (first, second))
            if sign == " / " and other == 0:
                raise UsageError(f"{second.strip()} is 0; nothing is divided by it")
            return one / other if sign == " / " else one - other
    return _at(record, expression)


def number_of(value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{where} is {value!r}; expected a number") from None


def _at(record: Any, path: str) -> Any:
    function, colon, rest = path.partition(":")
    if not colon or function not in FUNCTIONS:
        function, rest = "", path
    found, items = follow(record, rest)
    apart = _apart(items)
    if not function:
        if len(found) == 1:
            return found[0]
        told = ", ".join(f"{name} ({len(values)})" for name, values in apart.items())
        raise UsageError(f"{path} fits {len(found)} items; they differ in {told or 'nothing that is named'}")
    if not found:
        raise UsageError(f"{rest} fits nothing")
    if function in OVER_SEEDS:
        if other := [f"{name} {_several(values)}" for name, values in apart.items() if name in ONE_EXPERIMENT]:
            raise UsageError(f"{path} is over items with {'; '.join(other)}; expected the seeds of one experiment")
        seeds = [item.get("seed") for item in items if isinstance(item, Mapping)]
        if len(set(seeds)) < len(seeds) and None not in seeds:
            raise UsageError(f"{path} has a seed twice")
    return FUNCTIONS[function]([number_of(value, rest) for value in found])


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
    conditions = _CONDITION.findall(inside)
    if "".join(condition for condition, *_ in conditions) != inside:
        raise UsageError(f'"[{inside}]" is no condition; expected field=value, with commas between')
    left = [item for one in lists for item in one if isinstance(item, Mapping)]
    for _, field, text in conditions:
        wanted = text.strip().strip('"')
        if left and not any(field in item for item in left):
            raise UsageError(f"no item of {name} has a field {field}; there is {', '.join(map(str, left[0]))}")
        fitting = [item for item in left if field in item and equals(item[field], wanted)]
        if left and not fitting:
            there = _several(sorted({str(item.get(field)) for item in left}))
            raise UsageError(f"no item of {name} has {field}={wanted}; there is {there}")
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


def _several(values: Sequence[str]) -> str:
    return ", ".join(values[:8]) + (" ..." if len(values) > 8 else "")


def _apart(items: Sequence[Any]) -> dict[str, list[str]]:
    """Fields that tell items apart, with their values."""
    rows = [item for item in items if isinstance(item, Mapping)]
    values = {name: sorted({str(row.get(name)) for row in rows}) for name in (*ONE_EXPERIMENT, "seed")}
    return {name: several for name, several in values.items() if len(several) > 1}


def formatted(value: Any, form: str) -> str:
    if value is None:
        raise UsageError("the record has no value there (null)")
    if form != "duration" and not _NUMBER_FORMAT.fullmatch(form):
        raise UsageError(f'"{form}" is no format; expected one such as .3f, +.2f, .0%, ,d or duration')
    amount = number_of(value, "the record's value there")
    if not math.isfinite(amount):
        raise UsageError(f"the record has {amount} there; expected a finite number")
    if form == "duration":
        return duration(amount)
    if form.endswith("d"):
        if amount != round(amount):
            raise UsageError(f"the record has {amount} there, which is no whole number as {form} asks")
        return format(round(amount), form)
    text = format(amount, form)
    return text.lstrip("-") if re.fullmatch(r"-0(\.0*)?%?", text) else text  # no minus before a zero
