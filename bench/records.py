"""Records of runs: their schema, how they are written with their provenance, and how they are read into one table.

    results = load_results("results")
    results.rows           # a row for every (ground, truth, series, normalised, alpha, alpha_attribution, seed)

A figure shows one ground, a panel or a table's cell one truth, a line or a mean one series (see `bench.identity`):
whatever differs in any of it stays apart. Nothing is recomputed. A file that is not what it should be is a problem,
with one line; what is passed over for another reason is said in `left_out`.
"""

import hashlib
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import bench.schema as schema
from bench.identity import AXES, Identity, give_names, place
from bench.metrics import MANY_SEEDS, PooledCeiling, average_ranks, mean_and_standard_error, pooled_ceiling
from bench.metrics.linear import is_known, pooled_linear_ceiling
from retrain.errors import UsageError
from retrain.outputs import LOSS
from retrain.safe_files import (
    PassingFileError,
    SafeFileError,
    one_line,
    read_json,
    read_safetensors,
    read_text,
    validate,
    whole_file,
    write_safetensors,
    write_whole,
)
from retrain.source import code_fingerprint
from retrain.store import canonical_json

# ---- provenance and writing ----

GIVEN_SCORES = "given scores"  # the kind of a record that holds score files against a stored truth
RUN_AGAIN = "run-again"  # beside a record: when the same run was made the last time
DISTRIBUTIONS = ("torch", "numpy", "scipy", "kronfluence", "traker", "transformers")  # what numbers depend on


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("tda-bench", *DISTRIBUTIONS):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def code_commit() -> str | None:
    """The commit of this code, with + if it was changed since; None outside a checkout.

    $TDA_BENCH_COMMIT names that of a copy without one; the files' fingerprint, recorded beside it, proves it.
    """
    return os.environ.get("TDA_BENCH_COMMIT") or _checked_out()


@lru_cache(maxsize=1)  # as `code_fingerprint`: what is committed while this runs is not what runs
def _checked_out() -> str | None:
    here = Path(__file__).resolve().parent

    def run_git(words: str) -> str:
        command = ["git", *words.split()]
        return subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        run_git(f"ls-files --error-unmatch {Path(__file__).name}")  # installed into somebody else's checkout: not its
        return run_git("rev-parse --short=12 HEAD") + ("+" if run_git("status --porcelain -uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def command_line(program: str, argv: Sequence[str]) -> str:
    """The command as one would type it; `program` is the module's name."""
    return shlex.join(["python", "-m", program, *argv])


ELSEWHERE = "elsewhere"  # the device of a record that scores files against a stored truth


def provenance(device: str | None = None) -> dict[str, Any]:
    """Of a record: which code on which machine, and when."""
    return {
        "versions": versions(),
        "commit": code_commit(),
        "code": code_fingerprint(),
        **({} if device is None else {"device": device}),
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "node": platform.node()},
        "finished": timestamp(),
    }


def timestamp() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def without_nan(value: Any) -> Any:
    """JSON has no NaN; a missing number is null."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value


def json_text(value: Any, start: str = "\n") -> str:
    """JSON with a line for each list or table of plain values, so that a changed row is a changed line."""
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if not any(isinstance(item, dict | list) for item in items):
        return json.dumps(value, separators=(",", ":") if isinstance(value, list) else None)
    inner = start + " "
    lines = [json_text(item, inner) for item in items]
    if isinstance(value, dict):
        lines = [f"{json.dumps(str(name))}: {line}" for name, line in zip(value, lines)]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}{inner}{f',{inner}'.join(lines)}{start}{last}"


def write_json(path: Path, record: Any) -> None:
    write_whole(path, json_text(without_nan(record)) + "\n")


TABLES = ("rows", "pairs", "ceilings")  # of a record; in its file they are columns


def to_columns(rows: list[dict[str, Any]]) -> Any:
    """What is the same in all rows once, the rest a list a row; rows that differ in their names stay as they are."""
    if len(rows) < 2 or any(row.keys() != rows[0].keys() for row in rows):
        return rows
    columns = [name for name in rows[0] if len({repr(row[name]) for row in rows}) > 1]
    same = {name: value for name, value in rows[0].items() if name not in columns}
    return {"same": same, "columns": columns, "values": [[row[name] for name in columns] for row in rows]}


def from_columns(table: Any, where: str, path: Path) -> Any:
    """The rows again; what is no such table is left to the schema of the record."""
    if not isinstance(table, dict):
        return table
    validate(table, schema.Columns, path, where)
    for number, values in enumerate(table["values"]):
        if len(values) != len(table["columns"]):
            names = len(table["columns"])
            raise SafeFileError(path, f"{where}.values[{number}] has {len(values):,} values; expected {names:,}")
    return [{**table["same"], **dict(zip(table["columns"], values))} for values in table["values"]]


def read_record(path: Path, kind: Any) -> Any:
    """A JSON file of the shape `kind`; tables that it keeps as columns are lists of rows again."""
    content = read_json(path)
    if isinstance(content, dict):
        content |= {name: from_columns(content[name], name, path) for name in TABLES if name in content}
    return validate(content, kind, path)


def write_record(path: Path, record: Mapping[str, Any], kind: Any) -> None:
    """Refused, in one line, where `read_record` would refuse it."""
    content = without_nan(record)
    validate(content, kind, path)
    write_json(path, {name: to_columns(value) if name in TABLES else value for name, value in content.items()})


def csv_text(frame: pd.DataFrame) -> str:
    """A CSV in which a text that begins like a formula of a spreadsheet gets an apostrophe."""

    def escaped(value: Any) -> Any:
        return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value

    return frame.map(escaped).rename(columns=escaped).to_csv(index=False)


def digest_of(value: Any) -> str:
    return hashlib.sha256(canonical_json(without_nan(value), "result").encode()).hexdigest()[:12]


def run_id_of(*parts: Any) -> str:
    """Of what was asked and of what came out, so that no two results share one."""
    return digest_of(list(parts))


def content_of(record: Mapping[str, Any]) -> list[Any]:
    """What the run id of a run.json or answers.json is the digest of."""
    rows, pairs = (
        [{name: value for name, value in one.items() if name != "run_id"} for one in record.get(kind, [])]
        for kind in ("rows", "pairs")
    )
    if "question" in record:
        return [record["question"], record["config"], record["ground"], rows, pairs, record["detail"]]
    if record.get("kind") == GIVEN_SCORES:
        known = {name: record["truth"].get(name) for name in ("source", "task", "alpha", "arrays_sha256")}
        rows = [row for row in rows if row["origin"] == "given"]  # the others are recorded methods
        methods = [method for method in record["config"]["methods"] if method["origin"] == "given"]
        return [known, {"rows": rows, "pairs": pairs, "ceilings": record["ceilings"], "methods": methods}]
    return [record["config"], rows, pairs, record["ceilings"]]


def edited_since(record: Mapping[str, Any]) -> bool:
    """Whether the content of a record that was read no longer gives its id.

    Records without a fingerprint of the code had other rules.
    """
    if "code" not in record:
        return False
    try:  # what was read is plain data: the text of `canonical_json` at a quarter of its seconds
        text = json.dumps(content_of(record), sort_keys=True, separators=(",", ":"))
    except (KeyError, TypeError, AttributeError):
        return True
    return hashlib.sha256(text.encode()).hexdigest()[:12] != record["run_id"]


def save_record(path: Path, record: Mapping[str, Any], kind: Any, tables: Mapping[str, pd.DataFrame]) -> Path:
    """Writes a run's record, and tables beside it, into a folder of the run's own.

    A sound record of the same run stays, with the time of this run beside it: where two contradict, the last counts.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, frame in tables.items():
        table, text = path.with_name(name), csv_text(frame)
        try:
            sound = read_text(table) == text
        except SafeFileError:
            sound = False
        if len(frame) and not sound:
            write_whole(table, text)
    if os.path.lexists(path):
        try:
            if not edited_since(read_record(path, kind)):
                write_whole(path.with_name(RUN_AGAIN), timestamp())
                return path
            why = f"{path}: its content no longer matches its run id"
        except PassingFileError:
            raise
        except SafeFileError as error:
            why = str(error)
        print(f"{why}; it is written again", file=sys.stderr)
    write_record(path, record, kind)  # last: where it is, the others are
    return path


def keep_earlier(path: Path, run_id: str) -> None:
    """Another run's record is put aside under its own id; figures and the ledger read the newest alone."""
    try:
        earlier = read_json(path, follow_links=True)["run_id"]
    except (OSError, SafeFileError, KeyError, TypeError):
        return
    if earlier != run_id and re.fullmatch("[0-9a-f]{12}", str(earlier)):
        kept = path.with_name(f"{path.stem}.{earlier}.json")
        path.replace(kept)
        print(f"another run's record was there and is kept as {kept}", file=sys.stderr)


def try_write(write: Callable[[], Any], where: Path | str) -> str:
    """Empty when it was written, else why not: what a run has found is printed even where the disk is full."""
    try:
        write()
    except (SafeFileError, OSError) as error:
        return f"{where} cannot be written: {getattr(error, 'strerror', None) or error}"
    return ""


def replace_record(path: Path, record: Mapping[str, Any]) -> str:
    """As `try_write`, of a command that has one record in a folder: another run's, if it is there, is put aside."""

    def write() -> None:
        keep_earlier(path, record["run_id"])
        write_json(path, record)

    return try_write(write, path)


def write_pair(stem: Path, form: str, arrays: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> str:
    """STEM.safetensors, then STEM.json, which holds the checksum of the first: readers see a whole pair or none."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(f"{stem}.safetensors") as file:
        digest = write_safetensors(file, arrays)
    write_json(Path(f"{stem}.json"), {"format": form, **record, "arrays_sha256": digest})
    return digest


def read_pair(
    stem: Path, form: str, kind: Any = dict, advice: str = ""
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(record, arrays), verified; `advice` ends what is said where they are not."""
    record = read_json(f"{stem}.json")
    if not isinstance(record, dict) or record.get("format") != form:
        raise UsageError(f'{stem}.json has another format; expected "{form}"{advice}')
    validate(record, kind, f"{stem}.json")
    digest = hashlib.sha256()
    arrays = read_safetensors(f"{stem}.safetensors", digest=digest)
    if digest.hexdigest() != record.get("arrays_sha256"):
        raise UsageError(f"{stem}.safetensors does not match its checksum in {stem.name}.json{advice}")
    return record, arrays


# ---- reading ----

EXPERIMENT = ["ground", "truth", "series", "normalised", "alpha", "alpha_attribution", "seed"]
NUMBERS = [
    "lds", "ci_low", "ci_high", "lds_across_queries", "ceiling", "reliability", "ceiling_low", "ceiling_high", "spread",
    "fit_seconds", "score_seconds", "peak_memory_bytes", "num_replicates", "num_subsets_replicated", "linear_share",
]  # fmt: skip
# LDS and what goes with it -> the same within groups, of tasks that have groups.
WITHIN = {
    "lds": "lds_within_groups", "ci_low": "within_groups_low", "ci_high": "within_groups_high",
    "ceiling": "ceiling_within_groups", "reliability": "reliability_within_groups",
    "ceiling_low": "ceiling_within_groups_low", "ceiling_high": "ceiling_within_groups_high",
}  # fmt: skip
ROW_COLUMNS = [
    *EXPERIMENT, "task", "protocol", "scheme", "question", "method", "label", "settings", "options", "reference",
    "models", "ground_words", "num_subsets", "num_queries", "num_undefined", *NUMBERS, *WITHIN.values(), "group_name",
    "seconds", "device", "machine", "description", "run_id", "finished", "note", "source",
]  # fmt: skip
CEILING = ["reliability", "ceiling_low", "ceiling_high"]
IDS = ["ground_id", "truth_id", "series_id"]


@dataclass
class Results:
    """What a results folder holds."""

    folder: Path = Path()  # that was read
    # A row for every setting, truth, method, kind of score, alpha and seed.
    rows: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=ROW_COLUMNS))
    pairs: pd.DataFrame = field(default_factory=pd.DataFrame)  # a row for `series` minus `against`, with its interval
    records: dict[str, dict[str, Any]] = field(default_factory=dict)  # run_id -> run.json, with its "path"
    problems: list[str] = field(default_factory=list)  # a line for every file that is not what it should be
    left_out: list[str] = field(default_factory=list)  # and for what is passed over for another reason

    def __str__(self) -> str:
        return self.text()

    def frame(self) -> pd.DataFrame:
        """A row for every method, seed, alpha and kind of score of all runs."""
        return self.rows

    def text(self, wide: bool = False) -> str:
        """Every run's tables, as the run printed them."""
        from bench.tables import recorded_text

        texts = [f"run {run}{recorded_text(one, version_told(one), wide)}" for run, one in self.records.items()]
        return "\n\n".join([*texts, *self.problems]) or f"{self.folder}: no runs"

    def files(self, name: str) -> list[Path]:
        """Every file of that name, in order of its path; a link to a folder is a problem, and is not followed."""
        found = []
        for folder, inner, names in os.walk(self.folder):
            for link in (one for one in inner if os.path.islink(os.path.join(folder, one))):
                self.note(f"{one_line(os.path.join(folder, link))}: is a link to a folder, which is not followed")
            if name in names or name in inner:  # a folder of that name is refused when it is read
                found.append(Path(folder) / name)
        return sorted(found)

    def read(self, name: str, kind: Any) -> list[tuple[Path, Any]]:
        """Every JSON file of that name with its content; one that is not what it should be becomes a problem."""
        found = []
        for path in self.files(name):
            try:
                found.append((path, read_record(path, kind)))
            except SafeFileError as error:
                self.note(str(error))
        return found

    def note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def within_groups(results: Results) -> Results:
    """LDS within groups, its interval, ceiling and paired differences in the place of LDS; only of tasks with groups.

    A method that knows the groups alone has NaN there: nothing is left of it.
    """
    rows = results.rows[results.rows["group_name"].notna()].reset_index(drop=True)
    rows = rows.assign(**{name: rows[within] for name, within in WITHIN.items()}, linear_share=math.nan)
    pairs = results.pairs
    if len(pairs):
        pairs = pairs.assign(**{name: pairs[one] for name, one in zip(DIFFERENCES, WITHIN_DIFFERENCES)})
        pairs = pairs[pairs["difference"].notna()]
    return replace(results, rows=rows, pairs=pairs)


def load_results(folder: str | Path = "runs") -> Results:
    """Every record (run.json) in a folder and those below it; `problems` has a line for each that is unreadable."""
    if not Path(folder).is_dir():
        raise UsageError(
            f'"{folder}" is no folder of results; `lds` writes its records to runs/, or to the folder of its --out'
        )
    results = Results(Path(folder))
    rows: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    for path, record in results.read("run.json", schema.RunRecord):
        run_id, where = record["run_id"], path.relative_to(results.folder).as_posix()
        if run_id in results.records:
            results.note(f"{path}: has the run id {run_id} of {results.records[run_id]['path']}, which is the one read")
        elif record["config"].get("query_split") == "tune":
            results.left_out.append(f"run {run_id} ({where}): its queries are those that settings are chosen on")
        elif (record["config"].get("stream") or "report") != "report":
            results.left_out.append(f"run {run_id} ({where}): its subsets are those that settings are chosen on")
        elif not record["rows"]:
            results.left_out.append(f"run {run_id} ({where}): has no rows")
        else:
            if edited_since(record):
                told = f"{path}: its content no longer matches its run id {run_id}"
                reason = record.get("edited", "")
                results.left_out.append(f"{told}: {reason}") if reason else results.note(f"{told} (edited or damaged)")
            record = {**record, "finished": max(str(record.get("finished", "")), last_made(path))}
            results.records[run_id] = {**record, "path": where}
            identity = Identity(record)
            rows += _rows(record, identity)
            for pair in record.get("pairs", []):
                both = {"series_id": pair["label"], "rival_id": pair["against"]}
                ids = {name: identity.series({**pair, "method": one}, one)["series_id"] for name, one in both.items()}
                pairs.append({name: pair.get(name) for name in PAIR} | ids | {"run_id": run_id})
    if rows:
        frame = pd.DataFrame(rows).reindex(columns=[*ROW_COLUMNS, *IDS])
        for name in (*NUMBERS, *WITHIN.values()):
            frame[name] = pd.to_numeric(frame[name])
        frame["seconds"] = frame["fit_seconds"] + frame["score_seconds"]
        give_names(frame)
        results.pairs = _named_pairs(pairs, frame)
        results.rows = _of_most_replicates(_once(frame, results.left_out), results.left_out)
    return results


def version_told(record: Mapping[str, Any]) -> str:
    """The task's version, which the protocol is part of, and the output, as a table's first line has them."""
    version, output = record.get("task_version", ""), record["config"].get("output", LOSS)
    return version if not version or output == LOSS else f"{version}, output {output}"


def last_made(path: Path) -> str:
    """When the run of a record was made the last time, where that was later than the first."""
    try:
        text = read_text(path.with_name(RUN_AGAIN), 100).strip()
    except (SafeFileError, OSError):
        return ""
    return text if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", text) else ""


def _rows(record: Mapping[str, Any], identity: Identity) -> list[dict[str, Any]]:
    device, machine = record["device"], record.get("machine", {})
    known = {
        "run_id": record["run_id"],
        "description": record.get("description") or record["config"]["task"]["name"],
        "finished": record.get("finished", ""),
        "machine": f"{device}, {machine.get('cores')} cores" if "CPU" in device else device,
        "device": device,
    }
    of_ceiling = ["num_replicates", "reliability", "num_subsets_replicated", "group_name"]
    of_ceiling += [name for name in WITHIN.values() if "ceiling" in name or "reliability" in name]
    found = []
    for row in record["rows"]:
        ceiling = identity.ceilings.get(place(row), {})
        own = {name: ceiling.get(name) for name in of_ceiling}
        own |= {f"ceiling_{end}": ceiling.get(f"ci_{end}") for end in ("low", "high")}
        own |= {"run_id": record["run_id"], "linear_share": ceiling.get("linear_share") if is_known(ceiling) else None}
        found.append({**known, **row, **own, **identity.of(row)})
    return found


DIFFERENCES = ["difference", "ci_low", "ci_high"]
WITHIN_DIFFERENCES = ["difference_within_groups", "within_groups_low", "within_groups_high"]
PAIR = [*AXES, "normalised", *DIFFERENCES, "p_value", *WITHIN_DIFFERENCES]


def _named_pairs(pairs: list[dict[str, Any]], frame: pd.DataFrame) -> pd.DataFrame:
    """Under the names of the rows they compare, which are of the same run; the later of two that compare the same."""
    if not pairs:
        return pd.DataFrame()
    keys = ["run_id", *AXES, "normalised"]
    rows = frame[[*keys, "series_id", "ground", "truth", "series", "finished"]]
    rivals = frame[[*keys, "series_id", "series"]].rename(columns={"series_id": "rival_id", "series": "against"})
    found = pd.DataFrame(pairs).merge(rows, on=[*keys, "series_id"]).merge(rivals, on=[*keys, "rival_id"])
    for name in (*DIFFERENCES, "p_value", *WITHIN_DIFFERENCES):
        found[name] = pd.to_numeric(found[name])
    found = found.drop(columns=["series_id", "rival_id"]).sort_values(["finished", "run_id"], kind="stable")
    return found.drop_duplicates([*EXPERIMENT, "against"], keep="last").reset_index(drop=True)


def _once(frame: pd.DataFrame, left_out: list[str]) -> pd.DataFrame:
    """Where two runs measured the same, the one of more seeds counts, so that a mean is of one run; then the later."""
    frame = frame.assign(num_seeds=frame.groupby("run_id")["seed"].transform("nunique"))
    frame = frame.sort_values([*EXPERIMENT, "num_seeds", "finished", "run_id"], kind="stable").drop(columns="num_seeds")
    kept = frame.drop_duplicates(EXPERIMENT, keep="last")
    again = frame.drop(kept.index).merge(kept, on=EXPERIMENT, suffixes=("", "_kept"))
    for (run, other), rows in again.groupby(["run_id", "run_id_kept"]):
        gap = float(np.nanmax([0.0, *(rows["lds"] - rows["lds_kept"]).abs()]))
        differ = f"; their LDS differ by up to {gap:.3f}" if gap >= 0.0005 else ""
        left_out.append(
            f"run {run}: {len(rows)} of its {(frame['run_id'] == run).sum()} rows are measured again in run {other}, "
            f"which has more seeds or is later, and is shown{differ}"
        )
    for (ground, _, series), rows in kept.groupby(["ground", "truth", "series"]):
        if rows["source"].nunique() > 1:
            left_out.append(
                f"{ground}, {series}: its rows were made by different code of the method, in runs "
                f"{', '.join(sorted(set(rows['run_id'])))}"
            )
    return kept.drop(columns=IDS).reset_index(drop=True)


def _of_most_replicates(frame: pd.DataFrame, left_out: list[str]) -> pd.DataFrame:
    """Without truths of which another has every series and seed, as many subsets and more replicates: less noise.

    A truth goes whole or not at all, so that no method stands alone on one, without those it was run beside.
    """
    fewer: list[Any] = []

    def held(rows: pd.DataFrame) -> set[tuple[Any, ...]]:
        return set(zip(rows["series"], rows["seed"]))

    places = [name for name in EXPERIMENT if name not in ("truth", "series", "seed")]
    for _, rows in frame.groupby([*places, "num_subsets"], dropna=False):
        truths = [truth for _, truth in rows.groupby("truth")] if rows["truth"].nunique() > 1 else []
        for one in truths:
            own = _effective_replicates(one.iloc[0])
            if any(_effective_replicates(other.iloc[0]) > own and held(one) <= held(other) for other in truths):
                fewer += one.index.to_list()
    for run, rows in frame.loc[fewer].groupby("run_id"):
        left_out.append(
            f"run {run}: {len(rows)} of its {(frame['run_id'] == run).sum()} rows are measured elsewhere with more "
            "replicates, and are not shown"
        )
    return frame.drop(index=fewer).reset_index(drop=True)


def _effective_replicates(row: Mapping[str, Any]) -> float:
    """Harmonic mean over subsets, of which some may have one: what averaging does to the noise of retraining."""
    count, replicated = row["num_replicates"], row["num_subsets_replicated"]
    if not count or not count > 1:
        return 1.0
    share = replicated / row["num_subsets"] if replicated and replicated > 0 else 1.0
    return 1.0 / (share / count + 1.0 - share)


# ---- ceilings ----


def ceiling_over_seeds(cell: pd.DataFrame) -> PooledCeiling:
    """Reliabilities are averaged, not ceilings: a root that is cut at 0 is off on average where seeds are noisy."""
    by_seed = cell.drop_duplicates("seed")
    return pooled_ceiling(*(by_seed[name].tolist() or [math.nan] for name in CEILING))


def linear_ceiling_over_seeds(cell: pd.DataFrame) -> float:
    """NaN unless it is known well enough for every seed, and there is more than noise to explain."""
    shares, noise = cell.drop_duplicates("seed")["linear_share"], ceiling_over_seeds(cell)
    if not len(shares) or shares.isna().any() or noise.touches_zero:
        return math.nan
    return pooled_linear_ceiling(shares.to_list(), noise.ceiling)


# ---- over seeds ----


def over_seeds(cell: pd.DataFrame, value: str = "lds") -> tuple[float, float, float]:
    """Mean LDS (or difference) of one experiment, and the two ends of its bar.

    From MANY_SEEDS seeds on, one standard error to each side; of fewer, the outermost ends of their 95 % intervals.
    """
    mean, error = mean_and_standard_error(cell[value].to_numpy(dtype=float))
    if len(cell) >= MANY_SEEDS:
        return mean, mean - error, mean + error
    low, high = (WITHIN["ci_low"], WITHIN["ci_high"]) if value == WITHIN["lds"] else ("ci_low", "ci_high")
    return mean, float(cell[low].min()), float(cell[high].max())


def bars_of(seeds: Iterable[int]) -> str:
    """What the bars of `over_seeds` are, for experiments of that many seeds."""
    seeds = sorted(set(seeds))
    few, many = [n for n in seeds if n < MANY_SEEDS], [n for n in seeds if n >= MANY_SEEDS]
    parts = [f"standard error over {' or '.join(map(str, many))} seeds"] if many else []
    if few == [1]:
        parts.append(f"95 % interval{' where there is one seed' if many else ' of the one seed'}")
    elif few:
        where = f"with {' or '.join(map(str, few))}, " if many else ""
        whose = "their" if many else f"the {' or '.join(map(str, few))} seeds'"
        parts.append(f"{where}lowest to highest end of {whose} 95 % intervals")
    return "; ".join(parts)


# ---- filters of rows that would crowd a table or a figure ----

DATAMODEL = "datamodel"
FEW = 6  # settings that are no crowd


def without_curves(results: Results) -> Results:
    """Where a ground has many datamodels, without them and their priors.

    Priors are the other methods of their runs, if other runs have the method on this ground, or not this truth.
    """
    rows = results.rows
    counts = rows[rows["method"] == DATAMODEL].groupby("ground")["series"].nunique()
    crowded = rows["ground"].isin(counts[counts > FEW].index)
    runs = set(rows[crowded & (rows["method"] == DATAMODEL)]["run_id"])
    other = ~rows["run_id"].isin(runs)

    def have(*names: str) -> pd.Series:
        return other.groupby([rows[name] for name in names]).transform("any")

    again = have("ground", "method") | (have("ground") & ~have("ground", "truth"))
    return replace(results, rows=rows[~crowded | (rows["method"] != DATAMODEL) & (other | ~again)])


def without_scored_again(results: Results) -> Results:
    """Without runs that hold scores against a stored truth, where other runs measured the ground."""
    rows = results.rows
    own = rows["machine"] != ELSEWHERE
    return replace(results, rows=rows[own | ~own.groupby(rows["ground"]).transform("any")])


# ---- what recorded methods predict for a ground truth ----

RECORDED_FORMAT = "tda-bench recorded predictions 1"


@dataclass(frozen=True)
class Recorded:
    """Predictions by (label, normalised), their methods' descriptions and the rows that they had."""

    ranks: Mapping[tuple[str, bool], np.ndarray]  # (subsets, queries)
    methods: list[dict[str, Any]]
    rows: list[dict[str, Any]]

    def row(self, label: str, normalised: bool) -> dict[str, Any] | None:
        return next((r for r in self.rows if (r["label"], r["normalised"]) == (label, normalised)), None)


def doubled_ranks(prediction: np.ndarray) -> np.ndarray:
    """(subsets, queries) unsigned; all 0, and so undefined, for a query with a prediction that is not finite."""
    finite = np.isfinite(prediction).all(axis=0)
    ranks = np.zeros(prediction.shape)
    if finite.any():
        ranks[:, finite] = 2 * average_ranks(prediction[:, finite].astype(np.float64))
    return ranks.astype(np.uint8 if 2 * len(prediction) < 2**8 else np.uint16)


def write_recorded(
    folder: Path, predictions: Mapping[tuple[str, bool], np.ndarray], told: Mapping[str, Any], truth_sha256: str
) -> None:
    arrays = {
        f"{label}/{'normalised' if normalised else 'raw'}": doubled_ranks(values)
        for (label, normalised), values in predictions.items()
    }
    write_pair(folder / "recorded", RECORDED_FORMAT, arrays, {"truth_sha256": truth_sha256, **told})


def read_recorded(folder: str | Path, truth_sha256: str) -> Recorded | None:
    """None where the ground truth comes without; refused where it belongs to another one."""
    stem = Path(folder) / "recorded"
    if not stem.with_suffix(".json").exists():
        return None
    record, arrays = read_pair(stem, RECORDED_FORMAT, schema.RecordedPredictions)
    if record["truth_sha256"] != truth_sha256:
        raise UsageError(f"{stem}.json belongs to another ground truth than the one beside it")
    ranks = {}
    for name, values in arrays.items():
        label, _, kind = name.rpartition("/")
        ranks[label, kind == "normalised"] = values.astype(np.float64)
    return Recorded(ranks, list(record["methods"]), list(record["rows"]))


# ---- answers: what a question beside LDS came to ----

ANSWERS_FILE = "answers.json"
TOPS = (0.01, 0.05)  # of which a precision is told, beside the share of the labels that was flipped


def amount_asked(record: Mapping[str, Any], at: float | None) -> float | None:
    """The share that was asked for, where `at` is what came of it in whole examples: seeds differ by one or two."""
    if at is None:
        return None
    config = record["config"]
    asked = config.get("shares") or ([*TOPS, config["share"]] if "share" in config else [])
    nearest = min(asked, key=lambda share: abs(share - at), default=at)
    return nearest if abs(nearest - at) <= 0.1 * nearest else at
