"""Numbers cannot drift from records: marked numbers and tables of a page are written, and checked, from result files.

    tda-bench publish numbers              # rewrites README.md, METHODS.md and the pages of results/
    tda-bench publish numbers --check      # changes nothing; a line for each place that differs from its record, exit 1

There is one marker, a comment, which no renderer shows. It stands before what it is about, and `end` closes it:

    <!-- value RECORD#PATH FORMAT -->0.512<!-- end -->
    <!-- table KIND ARGUMENTS -->
    <!-- end -->

Marks inside code stay as they are. A value is named by its place:

    RECORD      a file or folder, from the repository's root. A folder is the `rows` and `pairs` of every run below it,
                as `bench.records` reads them, pairs both ways round; any other file is JSON
    PATH        names with dots between; [field=value,...] keeps the items of a list that have these values, [0] takes
                one by its number. Quotes around a value with a comma: [label="bif@draws=20,gamma=1e4"]
    mean:PATH   over all items that are left: mean, median, min, max. A mean or median is over seeds: items that differ
                in method, settings or question are refused
    PATH / PATH of two numbers of one record
    FORMAT      Python's (.3f, +.3f, .0%, ,.0f), duration or bytes

The kinds of tables:

    lds FOLDER [labels=a,b] [scores=raw|normalised|both] [metric=lds_within_groups|lds_across_queries]
                                                a row a method, a column an alpha, mean over seeds; the ceiling last
    outputs FOLDER                              LDS / within class by loss, margin and probability, of raw scores
    printed RUN.json                            the first table that the run printed, of raw scores, as it was printed
    speed FILE [reference=LABEL]                seconds, ratio to the reference, how alike the scores are
    answers ANSWERS.json [metric=...] [settings=yes]
                                                a question beside LDS: a row a label, a column an amount, raw scores
    methods, tasks                              every plug-in of the suite, with paper and command
    scaling FILE.csv                            who is cheaper, BIF or EK-FAC
    leaderboard FOLDER                          every method's rank in every column

Settings, questions or machines are never mixed: a choice that leaves several is refused, with what sets them apart.
"""

import argparse
import math
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

import bench.schema as schema
from bench.identity import model_words
from bench.metrics import mean_and_standard_error
from bench.publish.leaderboard import boards, rows
from bench.records import (
    MANY_SEEDS,
    WITHIN,
    WITHIN_DIFFERENCES,
    Results,
    amount_asked,
    bars_of,
    ceiling_over_seeds,
    linear_ceiling_over_seeds,
    load_results,
    over_seeds,
    read_record,
    version_told,
    within_groups,
    without_nan,
)
from bench.scaling.estimate import RIVALS, by_device
from bench.scaling.report import verdict_text
from bench.scaling.rows import read_rows
from bench.tables import (
    SCORE_KINDS,
    bytes_text,
    duration,
    grouped,
    interval,
    markdown_table,
    number,
    recorded_text,
    seeds_text,
)
from retrain.errors import UsageError
from retrain.outputs import LOSS, OUTPUTS
from retrain.safe_files import SafeFileError, read_text, write_whole

METRICS = ("lds", WITHIN["lds"], "lds_across_queries")
SCHEMAS: dict[str, Any] = {
    "run.json": schema.RunRecord, "sweep.json": schema.SweepRecord, "budget.json": schema.BudgetRecord,
    "speed.json": schema.SpeedRecord,
}  # fmt: skip
OVER_SEEDS: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda values: mean_and_standard_error(values)[0], "median": statistics.median,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[[list[float]], float]] = {**OVER_SEEDS, "min": min, "max": max}
# Two rows that differ in one of these are no two seeds of one experiment.
ONE_EXPERIMENT = (
    "task", "protocol", "ground", "method", "label", "reference", "models", "settings", "normalised", "alpha",
    "alpha_attribution", "against", "num_subsets", "num_replicates", "num_queries", "device", "model", "queries",
    "fit_examples",
)  # fmt: skip
_STEP = re.compile(r"([A-Za-z0-9_-]+)((?:\[[^\]]*\])*)")
_CONDITION = re.compile(r'(\s*([A-Za-z0-9_]+)=("[^"]*"|[^,"]*)\s*(?:,|$))')
_NUMBER_FORMAT = re.compile(r"\+?,?\.\d[f%]")
WORDS: dict[str, Callable[[float], str]] = {"duration": duration, "bytes": bytes_text}  # formats beside those
Options = Mapping[str, str]


# ---- marks in a page ----

OPENING = re.compile(r"<!--\s*(value|table)\s+(.*?)\s*-->", re.DOTALL)
CLOSING = re.compile(r"<!--\s*end\s*-->")
_CODE = r"^(?P<fence>```|~~~).*?^(?P=fence)[^\n]*$|(?P<ticks>`+)[^`\n][^\n]*?(?P=ticks)"
_NEXT = re.compile(f"{_CODE}|{OPENING.pattern}|{CLOSING.pattern}", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Finding:
    """A mark whose text is not what the record says, or that cannot be read."""

    line: int
    words: str
    reason: str
    repaired: bool  # whether the right text is known


def rewrite(page: str, text_of: Callable[[str, str], str]) -> tuple[str, list[Finding]]:
    """The page as it should be, and where it was not; `text_of` is asked for what stands in a mark, by its kind and
    words.

    A mark that is not closed, closes nothing or cannot be read is a finding, and keeps its text; code stays as it is.
    """
    parts: list[str] = []
    findings: list[Finding] = []
    at = copied = 0
    while found := _NEXT.search(page, at):
        at, line = found.end(), page.count("\n", 0, found.start()) + 1
        if CLOSING.fullmatch(found[0]):
            findings.append(Finding(line, "end", "closes nothing", False))
        elif opening := OPENING.fullmatch(found[0]):
            kind, words = opening[1], " ".join(opening[2].split())
            named = f"{kind} {words}"
            closing, following = CLOSING.search(page, at), OPENING.search(page, at)
            if closing is None or (following is not None and following.start() < closing.start()):
                findings.append(Finding(line, named, "is not closed; expected <!-- end --> after it", False))
                continue
            stands = page[at : closing.start()]
            try:
                wanted = text_of(kind, words)
                if wanted != stands:
                    findings.append(Finding(line, named, _difference(stands, wanted), True))
                    parts += [page[copied:at], wanted]
                    copied = closing.start()
            except UsageError as error:
                findings.append(Finding(line, named, str(error), False))
            at = closing.end()
    return "".join([*parts, page[copied:]]), findings


def _difference(stands: str, wanted: str) -> str:
    """The first line that differs."""
    before, after = stands.strip().split("\n"), wanted.strip().split("\n")
    for old, new in zip(before, after):
        if old != new:
            old, new = (text if len(text) <= 160 else text[:157] + "..." for text in (old, new))
            return f'the page says "{old}", the record "{new}"'
    if len(before) != len(after):
        return f"the page has {len(before)} lines, the record {len(after)}"
    return "blank lines around it differ"


# ---- values ----


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
                if path.is_dir():
                    found = self.results(record)
                    rows, pairs = without_nan(found.rows.to_dict("records")), both_ways(found.records.values())
                    self._files[record] = {"rows": rows, "pairs": pairs}
                else:
                    self._files[record] = read_record(path, SCHEMAS.get(path.name, Any))
            except SafeFileError as error:
                raise UsageError(str(error)) from None
        return self._files[record]


def both_ways(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Paired differences by their labels, each also the other way round: which stands first is chance."""
    found = []
    for record in records:
        for pair in record.get("pairs", []):
            found.append({**pair, "run_id": record["run_id"]})
            turned = {**found[-1], "label": pair["against"], "against": pair["label"]}
            for name, low, high in (("difference", "ci_low", "ci_high"), WITHIN_DIFFERENCES):
                ends = [None if (value := pair.get(end)) is None else -value for end in (name, high, low)]
                turned |= dict(zip((name, low, high), ends))
            found.append(turned)
    return found


def value_text(records: Records, words: str) -> str:
    """What stands between `<!-- value WORDS -->` and its end."""
    reference, _, form = words.strip().rpartition(" ")
    record, sign, expression = reference.strip().partition("#")
    if not sign or not form:
        raise UsageError(f'"{words}" names no value; expected RECORD#PATH FORMAT')
    return formatted(evaluate(records.read(record), expression.strip()), form)


def evaluate(record: Any, expression: str) -> Any:
    """PATH, or two of them with / between."""
    first, between, second = expression.partition(" / ")
    if not between:
        return value_at(record, expression)
    one, other = (number_of(value_at(record, path.strip()), path.strip()) for path in (first, second))
    if other == 0:
        raise UsageError(f"{second.strip()} is 0; nothing is divided by it")
    return one / other


def number_of(value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{where} is {value!r}; expected a number") from None


def value_at(record: Any, path: str) -> Any:
    function, colon, rest = path.partition(":")
    if not colon or function not in FUNCTIONS:
        function, rest = "", path
    found, items = follow(record, rest)
    kept = [item for item in items if isinstance(item, Mapping)]
    values = {name: sorted({str(item.get(name)) for item in kept}) for name in (*ONE_EXPERIMENT, "seed")}
    apart = {name: several for name, several in values.items() if len(several) > 1}
    if not function:
        if len(found) == 1:
            return found[0]
        told = ", ".join(f"{name} ({len(several)})" for name, several in apart.items())
        raise UsageError(f"{path} fits {len(found)} items; they differ in {told or 'nothing that is named'}")
    if not found:
        raise UsageError(f"{rest} fits nothing")
    if function in OVER_SEEDS:
        if other := [f"{name} {_several(apart[name])}" for name in apart if name in ONE_EXPERIMENT]:
            raise UsageError(f"{path} is over items with {'; '.join(other)}; expected the seeds of one experiment")
        seeds = [item.get("seed") for item in kept]
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
        name = step[1]
        for one in found:
            if not isinstance(one, Mapping) or name not in one:
                known = ", ".join(map(str, one)) if isinstance(one, Mapping) else f"a {type(one).__name__}"
                raise UsageError(f"there is no field {name}; there is {known}")
        found = [one[name] for one in found]
        for inside in re.findall(r"\[([^\]]*)\]", step[2]):
            found = items = _kept(found, name, inside)
        rest = rest[step.end() + 1 :]
    return found, items


def _kept(lists: Sequence[Any], name: str, inside: str) -> list[Any]:
    """The items that the words inside [] keep."""
    if any(not isinstance(one, list) for one in lists):
        raise UsageError(f"{name} is no list, of which [{inside}] could keep some")
    if inside.isdecimal():
        if any(int(inside) >= len(one) for one in lists):
            raise UsageError(f"{name} has no item {inside}")
        return [one[int(inside)] for one in lists]
    conditions = _CONDITION.findall(inside)
    if "".join(condition for condition, *_ in conditions) != inside:
        raise UsageError(f'"[{inside}]" is no condition; expected field=value, with commas between')
    left = [item for one in lists for item in one if isinstance(item, Mapping)]
    for _, field, text in conditions:
        wanted = text.strip().strip('"')
        fitting = [item for item in left if field in item and equals(item[field], wanted)]
        if left and not fitting:
            if not any(field in item for item in left):
                raise UsageError(f"no item of {name} has a field {field}; there is {', '.join(map(str, left[0]))}")
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


def formatted(value: Any, form: str) -> str:
    if value is None:
        raise UsageError("the record has no value there (null)")
    if form not in WORDS and not _NUMBER_FORMAT.fullmatch(form):
        raise UsageError(f'"{form}" is no format; expected one such as .3f, +.2f, .0%, ,.0f, {" or ".join(WORDS)}')
    amount = number_of(value, "the record's value there")
    if not math.isfinite(amount):
        raise UsageError(f"the record has {amount} there; expected a finite number")
    text = WORDS[form](amount) if form in WORDS else format(amount, form)
    return text.lstrip("-") if re.fullmatch(r"-0(\.0*)?%?", text) else text  # no minus before a zero


# ---- tables ----


def table_text(records: Records, words: str) -> str:
    """What stands between `<!-- table WORDS -->` and its end."""
    kind, *rest = shlex.split(words)
    if kind not in TABLE_KINDS:
        raise UsageError(f'there is no table "{kind}"; expected {", ".join(TABLE_KINDS)}')
    places = [word for word in rest if "=" not in word]
    options = dict(word.split("=", 1) for word in rest if "=" in word)
    make, num_places, known = TABLE_KINDS[kind]
    if len(places) != num_places or set(options) - set(known):
        takes = " ".join([*["RECORD"] * num_places, *(f"[{name}=...]" for name in known)])
        raise UsageError(f'got "{words}"; expected "{" ".join([kind, takes]).strip()}"')
    return f"\n{make(records, places, options).strip()}\n"


# ---- LDS ----


def chosen_rows(records: Records, folder: str, options: Options) -> pd.DataFrame:
    """Rows of one question; at each alpha one setting of each name: a label with the models that it looks at."""
    results = records.results(folder)
    rows = (within_groups(results) if options.get("metric") == WITHIN["lds"] else results).rows
    if not len(rows):
        raise UsageError(f"{folder} holds no runs{' of a task with groups' if len(results.rows) else ''}")
    if "labels" in options:
        labels = options["labels"].split(",")
        if unknown := set(labels) - set(rows["label"]):
            raise UsageError(f"{folder}: no row of {', '.join(sorted(unknown))}; there is {_some(rows['label'])}")
        rows = rows[rows["label"].isin(labels)]
    rows = rows.assign(name=[model_words(*one) for one in zip(rows["label"], rows["reference"], rows["models"])])
    for name in ("ground", "alpha_attribution", "device"):
        if rows[name].nunique() > 1:
            there = _some(rows[name])
            raise UsageError(f"{folder}: rows of several kinds; give a folder with one {name} of {there}")
    for keys, column in ((["alpha"], "truth"), (["name", "normalised", "alpha"], "options")):
        for _, cell in rows.groupby(keys):
            if cell[column].nunique() > 1:
                where = ", ".join(f"{name} {cell[name].iloc[0]}" for name in keys)
                apart = _some(cell["settings" if column == "options" else column])
                raise UsageError(f"{folder}: {where} has several {column} in one column: {apart}")
    return rows


def _some(values: pd.Series) -> str:
    return "; ".join(sorted({f"{value:g}" if isinstance(value, float) else str(value) for value in values})[:12])


def lds_block(records: Records, places: Sequence[str], options: Options) -> str:
    rows = chosen_rows(records, places[0], options)
    metric, scores = options.get("metric", "lds"), options.get("scores", "both")
    if metric not in METRICS or scores not in SCORE_KINDS:
        raise UsageError(f"metric={metric}, scores={scores}: expected one of {METRICS} and one of {tuple(SCORE_KINDS)}")
    kinds, alphas = SCORE_KINDS[scores], sorted(rows["alpha"].unique())
    within, metric = metric == WITHIN["lds"], "lds" if metric == WITHIN["lds"] else metric
    first = rows[(rows["alpha"] == alphas[0]) & (rows["normalised"] == kinds[-1])]
    best = first.groupby("name")[metric].mean().fillna(-math.inf)
    names = sorted(rows["name"].unique(), key=lambda name: (-best.get(name, -math.inf), name))
    if "labels" in options:
        label = dict(zip(rows["name"], rows["label"]))
        names.sort(key=lambda name: options["labels"].split(",").index(label[name]))
    lines = []
    for name in names:
        mine = rows[rows["name"] == name]
        at = {(a, k): mine[(mine["alpha"] == a) & (mine["normalised"] == k)] for a in alphas for k in kinds}
        cells = [[_cell(at[a, k], metric, within) for k in kinds] for a in alphas]
        lines.append([f"`{name}`", *(" / ".join(cell) for cell in cells)])
    if metric == "lds":
        lines.append(["noise ceiling", *(_ceiling(rows[rows["alpha"] == alpha]) for alpha in alphas)])
        linear = [linear_ceiling_over_seeds(rows[rows["alpha"] == alpha]) for alpha in alphas]
        if any(map(math.isfinite, linear)):
            lines.append(["linear ceiling", *map(number, linear)])
    text = markdown_table(["", *(f"alpha {alpha:g}" for alpha in alphas)], lines)
    return f"{text}\n\n{'Within groups: ' if within else ''}{_caption(rows, metric, scores)}"


def _cell(cell: pd.DataFrame, metric: str, within: bool = False) -> str:
    if not len(cell) or cell[metric].isna().all():
        return "nothing" if len(cell) and within else "-"  # it knows the groups alone
    if metric == "lds" and len(cell) < MANY_SEEDS:
        mean, low, high = over_seeds(cell)
        return f"{number(mean)} {interval(low, high)}"
    mean, error = float(cell[metric].mean()), float(cell[metric].sem())
    return number(mean) + (f" ± {number(error)}" if math.isfinite(error) else "")


def _ceiling(cell: pd.DataFrame) -> str:
    over = ceiling_over_seeds(cell)
    if not over.num_seeds:
        return "-"
    ends = f" {interval(over.ci_low, over.ci_high)}" if math.isfinite(over.ci_high) else ""
    return f"{number(over.ceiling)}{ends}" + (" (touches 0)" if over.touches_zero else "")


def _caption(rows: pd.DataFrame, metric: str, scores: str) -> str:
    seeds = sorted(rows["seed"].unique())
    counts = rows.groupby(["name", "normalised", "alpha"]).size()
    bars = bars_of(counts) if metric == "lds" else "standard error over seeds"
    if metric == "lds" and len(seeds) > 1 and rows["ceiling"].notna().any():
        bars += ". Ceiling: of the seeds' mean reliability, with its 95 % interval"
    kinds = "raw / train-normalised" if scores == "both" else scores
    across = "" if metric == "lds" else " across queries"
    runs = sorted(set(rows["run_id"]))
    words = str(rows["ground_words"].iloc[0])
    return (
        f"LDS{across}, {kinds}. {words[:1].upper()}{words[1:]}, "
        f"alpha_attribution {rows['alpha_attribution'].iloc[0]:g}. Ground truth: {_some(rows['truth'])}, "
        f"{seeds_text(seeds)}. Bars: {bars}. "
        f"Device: {rows['machine'].iloc[0]}. Runs: {', '.join(f'`{run}`' for run in runs)}."
    )


def outputs_block(records: Records, places: Sequence[str], options: Options) -> str:
    """Runs of one experiment that differ in the output alone: a column an alpha and output."""
    results = records.results(places[0])
    rows = results.rows[~results.rows["normalised"].astype(bool)]
    asked = [results.records[run]["config"].get("output", LOSS) for run in rows["run_id"]]
    rows = rows.assign(output=asked, name=rows["label"] + asked)
    outputs = [output for output in OUTPUTS if output in set(rows["output"])]
    columns = [(alpha, output) for alpha in sorted(rows["alpha"].unique()) for output in outputs]
    if not columns or any(rows.groupby(["alpha", "output", "label"])["truth"].nunique() > 1):
        raise UsageError(f"{places[0]}: expected runs of one experiment that differ in the output alone")
    cells = dict(list(rows.groupby(["label", "alpha", "output"])))
    order = rows.groupby("label")[WITHIN["lds"]].mean().fillna(-math.inf).sort_values(ascending=False).index
    lines = []
    for label in order:
        mine = [cells.get((label, *column)) for column in columns]
        both = ["-" if c is None else " / ".join(number(c[m].mean()) for m in ("lds", WITHIN["lds"])) for c in mine]
        lines.append([f"`{label}`", *both])
    block = markdown_table(["", *(f"{output}, alpha {alpha:g}" for alpha, output in columns)], lines)
    return f"{block}\n\nLDS / within class. {_caption(rows, 'lds', 'raw')}"


# ---- the others ----


def speed_block(records: Records, places: Sequence[str], options: Options) -> str:
    record = records.read(places[0])
    rows = record["rows"]
    reference = options.get("reference", rows[0]["label"])
    known = {row["label"]: row for row in rows}
    if reference not in known:
        raise UsageError(f"{places[0]}: reference={reference} was not timed; there is {', '.join(known)}")
    base, lines = known[reference]["seconds"], []
    for row in rows:
        seconds = [number(row[name], 2) for name in ("fit_seconds", "score_seconds", "seconds")]
        ratio, memory = f"{row['seconds'] / base:.2f}", bytes_text(row["peak_memory_bytes"])
        lines.append([f"`{row['label']}`", *seconds, ratio, memory, number(row["agrees"])])
    header = ["", "fit s", "score s", "total s", f"x `{reference}`", "memory", "agrees"]
    first, repeats = rows[0], len(rows[0]["all_seconds"])
    caption = (
        f"{record['description']}; {first['num_train']:,} training examples x {first['num_queries']:,} queries; "
        f"{record['device']}; {'median' if repeats % 2 else 'lower median'} of {repeats}. "
        f"`agrees`: Spearman of scores with those of `{first['label']}`, mean over queries."
    )
    return f"{markdown_table(header, lines)}\n\n{caption}"


def answers_block(records: Records, places: Sequence[str], options: Options) -> str:
    """Raw scores, mean over seeds; the interval is the one seed's, or from the lowest to the highest end of all."""
    record = records.read(places[0])
    wanted = options["metric"].split(",") if "metric" in options else {row["metric"] for row in record["rows"]}
    rows = [row for row in record["rows"] if not row["normalised"] and row["metric"] in wanted]
    if not rows:
        there = ", ".join(sorted({row["metric"] for row in record["rows"]}))
        raise UsageError(f"{places[0]} has no such rows; its metrics: {there}")
    cells = grouped(rows, lambda row: (row["label"], (row["metric"], amount_asked(record, row["at"]))))
    columns = sorted({column for _, column in cells}, key=lambda column: -1.0 if column[1] is None else column[1])
    last = columns[0] if columns[0][1] is None else columns[len(columns) // 2]
    higher = -1 if next(row["higher"] for row in rows if row["metric"] == last[0]) else 1
    means = {label: _mean(cells.get((label, last), [])) for label in sorted({row["label"] for row in rows})}
    # Whoever has no number comes last.
    labels = sorted(means, key=lambda label: math.inf if math.isinf(means[label]) else higher * means[label])
    lines = [[f"`{label}`", *(_answer_cell(cells.get((label, column), [])) for column in columns)] for label in labels]
    # The share that was removed or looked at, or, of a calibration, kept.
    share = (lambda at: f" alpha {at:g}") if record["question"] == "calibration" else (lambda at: f" {100 * at:.2g} %")
    header = [name if at is None else name + share(at) for name, at in columns]
    seeds = sorted({row["seed"] for row in rows})
    over = "95 % interval" if len(seeds) == 1 else "mean over seeds, lowest to highest end of the seeds' 95 % intervals"
    settings = dict.fromkeys(f"`{row['label']}` {row['settings']}" for row in rows if row["settings"])
    caption = (
        f"{record.get('description') or rows[0]['task']}, protocol {rows[0]['protocol']}: {record['truth']}; "
        f"raw scores, {seeds_text(seeds)}; {over}; {record['device']}. "
        + (f"Settings: {'; '.join(settings)}. " if options.get("settings") == "yes" and settings else "")
        + f"Run: `{record['run_id']}`."
    )
    return f"{markdown_table(['', *header], lines)}\n\n{caption}"


def _mean(rows: Sequence[dict[str, Any]]) -> float:
    values = [row["value"] for row in rows if row["value"] is not None]
    return sum(values) / len(values) if values else math.inf


def _answer_cell(rows: Sequence[dict[str, Any]]) -> str:
    if not rows or math.isinf(_mean(rows)):
        return "-"
    ends = [[row[name] for row in rows if row[name] is not None] for name in ("ci_low", "ci_high")]
    text = f"{_mean(rows):.3f} {interval(min(ends[0]), max(ends[1]))}" if all(ends) else f"{_mean(rows):.3f}"
    if any(row.get("num_unflipped") for row in rows):
        text = f">= {text}"  # a query that the largest share does not flip counts as if it did
    missing = max(row["num_undefined"] for row in rows)
    return f"{text} ({missing} undefined)" if missing else text


def plugins_block(what: str) -> str:
    """Every method or task of the suite, with its paper or its protocols."""
    from bench.cli import plugin_classes, summary_of

    lines = []
    for name, cls in plugin_classes(what).items():
        if isinstance(cls, str):
            raise UsageError(f"{name} cannot be imported here, so the table cannot be made: {cls}")
        if what == "methods":
            flag, last = "methods", str(cls.paper).split(", ")[0] or "-"
        else:
            flag, last = "task", ", ".join(f"`{protocol}`" for protocol in cls.protocols)
        lines.append([f"`--{flag} {name}`", summary_of(cls).rstrip("."), last])
    header = ["method", "what it is", "paper"] if what == "methods" else ["task", "what it is", "protocols"]
    return markdown_table(header, lines)


def scaling_block(records: Records, places: Sequence[str], options: Options) -> str:
    found = by_device(read_rows(records.place(places[0])))
    texts = [verdict_text(device, one) for device, one in found.items() if set(RIVALS) <= set(one.methods())]
    if not texts:
        raise UsageError(f"{places[0]} has no rows of both {' and '.join(RIVALS)} on one machine")
    return "\n\n".join(texts)


def leaderboard_block(records: Records, places: Sequence[str], options: Options) -> str:
    made = boards(rows(records.results(places[0])))
    return "\n\n".join(f"**{one.title}**\n\n{markdown_table(one.header, one.lines)}\n\n{one.caption}" for one in made)


def printed_block(records: Records, places: Sequence[str], options: Options) -> str:
    record = records.read(places[0])
    rows = [row for row in record["rows"] if row["normalised"] in SCORE_KINDS[options.get("scores", "both")]]
    text = recorded_text({**record, "rows": rows}, version_told(record))
    return "```text\n" + text.strip().split("\n\n")[0] + "\n```"


TABLE_KINDS: dict[str, tuple[Callable[[Records, Sequence[str], Options], str], int, tuple[str, ...]]] = {
    "lds": (lds_block, 1, ("labels", "scores", "metric")),
    "outputs": (outputs_block, 1, ()),
    "printed": (printed_block, 1, ("scores",)),
    "speed": (speed_block, 1, ("reference",)),
    "answers": (answers_block, 1, ("metric", "settings")),
    "methods": (lambda *_: plugins_block("methods"), 0, ()),
    "tasks": (lambda *_: plugins_block("tasks"), 0, ()),
    "scaling": (scaling_block, 1, ()),
    "leaderboard": (leaderboard_block, 1, ()),
}


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("pages", nargs="*", help="pages (default: README.md, METHODS.md and every page under results/)")
    add("--check", action="store_true", help="change nothing; exit 1 where a page and its record differ")


def default_pages(root: Path) -> list[Path]:
    own = (root / "README.md", root / "METHODS.md")
    return [path for path in own if path.is_file()] + sorted((root / "results").rglob("*.md"))


def check_page(path: Path, records: Records) -> tuple[str, str, list[Finding]]:
    """The page as it is, as it should be, and a finding for each difference."""
    page = read_text(path, follow_links=True)
    text_of = {"value": value_text, "table": table_text}
    return page, *rewrite(page, lambda kind, words: text_of[kind](records, words))


def run(arguments: argparse.Namespace) -> int:
    root, records = Path(), Records(Path())
    pages = [Path(page) for page in arguments.pages] or default_pages(root)
    if not pages:
        raise UsageError(". has no README.md and no page under results/; call it from the repository, or give pages")
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
