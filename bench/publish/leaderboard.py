"""One leaderboard: task x method x metric, with ranks that respect ties, seconds and memory, from records alone.

    tda-bench publish leaderboard                          # prints it, from results/
    tda-bench publish leaderboard --task digits --wide     # one task, with settings and records
    tda-bench publish leaderboard --out board.csv          # the same as a tidy table

A column is one question about one ground truth: task with all its settings, subsets, queries, metric, alpha, seeds,
raw or train-normalised scores. Whatever differs in any of it stands in another column; nothing is ranked across.
Who is ahead is said by `bench.publish.compare`. A method's rank goes from one more than the number of those clearly
better to the number of those that are not clearly worse: 1-2 where nobody can tell.
"""

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from bench.identity import Identity, canonical, model_words, short_digest
from bench.metrics import PooledCeiling
from bench.publish import compare
from bench.records import (
    ANSWERS_FILE,
    DATAMODEL,
    Results,
    amount_asked,
    ceiling_over_seeds,
    csv_text,
    last_made,
    load_results,
    within_groups,
)
from bench.schema import AnswersRecord
from bench.tables import bytes_text, number, short_number, table
from retrain.errors import UsageError
from retrain.reference import FULL
from retrain.safe_files import write_whole

WITHIN = "lds within groups"
LDS = (WITHIN, "lds")
END_AT_ONE = ("lds", "AUC", "precision", "Spearman")  # words in the names of such metrics
ROW_CHOICES = ("task", "protocol", "metric", "scores", "alpha")
MOST_COLUMNS = 5  # of questions in one table, so that it fits a page beside method, seconds and memory
DIGEST = re.compile(r" \([0-9a-f]{6}\)$")  # which tells a truth from one of the same size
LARGE = 100.0  # from here on three digits behind the point say nothing
Names = dict[tuple[str, str, str], str]  # column, label, settings -> what a line is called


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a column is about, but for its seeds."""

    ground_id: str
    truth_id: str
    task: str
    protocol: str
    ground: str  # what was asked, in words
    truth: str  # how well it was measured, in words
    metric: str  # lds, lds within groups, removal, brittleness, mislabel AUC ...
    at: float | None  # of a metric with a place: the share removed, the k of a precision
    scores: str  # raw or normalised
    alpha: float | None
    alpha_attribution: float


@dataclass(frozen=True, kw_only=True)
class LeaderboardRow(Place):
    """One method in one column."""

    column: str  # rows with the same text are ranked against each other, and only those
    method: str
    label: str
    reference: str  # the models that it looks at: full, attributed or subset; and how many
    models: int
    settings: str
    value: float  # mean over seeds; NaN where it is undefined
    low: float  # 95 %: of one seed its own interval, of several what `interval_words` says
    high: float
    higher_is_better: bool
    rank_best: int  # 0 where the value is undefined
    rank_worst: int
    num_ranked: int
    ceiling: float  # of LDS: what a perfect prediction could expect; NaN where unknown
    ceiling_touches_zero: bool  # its interval does
    seconds: float  # median over seeds, fit and scores; NaN where machines differ
    memory: float  # bytes, the most of any seed, of the runs that took the seconds
    device: str
    seeds: tuple[int, ...]
    note: str
    record: tuple[str, ...]  # ids of the runs

    @property
    def rank(self) -> str:
        """1, or 1-2 where it cannot be told; - where the value is undefined."""
        if not self.rank_best:
            return "-"
        return f"{self.rank_best}" if self.rank_best == self.rank_worst else f"{self.rank_best}-{self.rank_worst}"

    @property
    def name(self) -> str:
        """The label, with the models that it looks at where those are not the full model."""
        return model_words(self.label, self.reference, self.models)

    @property
    def num_seeds(self) -> int:
        return len(self.seeds)


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """One method's number of one seed."""

    place: Place
    method_config: str
    seed: int
    measured: compare.Measured
    higher: bool
    told: Mapping[str, Any]  # method, label, reference, models, settings, seconds, memory, device, note, run_id


# place, seed, method_config, rival -> difference, low, high
_Pairs = dict[tuple[Place, int, str, str], tuple[float, float, float]]


def rows(results: Path | str | Results) -> list[LeaderboardRow]:
    """Every column's methods, best first; columns by task, metric, alpha."""
    found = results if isinstance(results, Results) else load_results(results)
    inside = within_groups(found)  # of balanced subsets LDS is that already
    inside = replace(inside, rows=inside.rows[inside.rows["scheme"] != "balanced"])
    parts = [_of_lds(found, "lds"), _of_lds(inside, WITHIN), _of_answers(found)]
    pairs = {key: pair for _, own in parts for key, pair in own.items()}
    by_place: dict[Place, dict[str, dict[int, _Measured]]] = {}
    for one in [one for measured, _ in parts for one in measured]:
        by_place.setdefault(one.place, {}).setdefault(one.method_config, {})[one.seed] = one
    made: list[LeaderboardRow] = []
    for place, configs in by_place.items():
        # Seeds have ground truths of their own: whoever lacks one is compared where the others are without it, too.
        for seeds in sorted({tuple(sorted(by_seed)) for by_seed in configs.values()}, key=lambda s: (-len(s), s)):
            here = {
                name: [by_seed[s] for s in seeds] for name, by_seed in configs.items() if set(seeds) <= set(by_seed)
            }
            made += _column(place, seeds, here, pairs, inside if place.metric == WITHIN else found)
    return sorted(made, key=_order)


def _order(row: LeaderboardRow) -> tuple[Any, ...]:
    value = row.value if math.isfinite(row.value) else -math.inf
    at = -1.0 if row.at is None else row.at
    # LDS within groups before LDS, one beside the other: what the labels alone predict is no reason to be first.
    lds = (0, "", row.alpha or 0.0, -row.num_seeds, row.scores != "raw", row.metric == "lds", row.column)
    which = lds if row.metric in LDS else (1, row.metric, at, row.scores != "raw", -row.num_seeds, 0, row.column)
    return (row.task, row.protocol, row.alpha_attribution, *which, -value if row.higher_is_better else value, row.name)


def _column(
    place: Place, seeds: tuple[int, ...], here: Mapping[str, Sequence[_Measured]], pairs: _Pairs, results: Results
) -> list[LeaderboardRow]:
    higher = next(iter(here.values()))[0].higher
    spans = {name: compare.over_seeds([m.measured for m in found]) for name, found in here.items()}
    known = [name for name in here if math.isfinite(spans[name].mean)]
    ahead = {(a, b): _ahead(place, here, a, b, pairs) for a in known for b in known if a != b}
    identity = short_digest(canonical([place.ground_id, place.truth_id, place.at, place.alpha]))
    column = "; ".join(
        [place.task, place.protocol, place.metric, *([] if place.at is None else [f"{place.at:.4g}"]), place.scores]
        + ([] if place.alpha is None else [f"alpha {place.alpha:g}"])
        + [f"alpha_attribution {place.alpha_attribution:g}", f"seeds {' '.join(map(str, seeds))}", identity]
    )
    made, ceiling = [], _ceiling(place, seeds, results)
    for name, found in here.items():
        told = pd.DataFrame([one.told for one in found])
        devices = sorted(set(told["device"].astype(str)))
        others = [other for other in known if other != name and name in known]
        made.append(
            LeaderboardRow(
                **vars(place), column=column, **{one: told[one].iloc[0] for one in ("method", "label", "reference")},
                models=int(told["models"].iloc[0]), settings=told["settings"].iloc[0] or "", value=spans[name].mean,
                low=spans[name].low, high=spans[name].high, higher_is_better=higher,
                rank_best=(name in known) * (1 + sum(ahead[other, name] for other in others)),
                rank_worst=(name in known) * (len(known) - sum(ahead[name, other] for other in others)),
                num_ranked=len(known), ceiling=ceiling.ceiling if ceiling else math.nan,
                ceiling_touches_zero=ceiling is not None and ceiling.touches_zero,
                # Seconds of different machines are not averaged.
                seconds=float(told["seconds"].astype(float).median()) if len(devices) == 1 else math.nan,
                memory=float(told["memory"].astype(float).max()),
                device=devices[0] if len(devices) == 1 else "several", seeds=seeds,
                note="; ".join(sorted({str(one) for one in told["note"] if one})),
                record=tuple(sorted(set(told["run_id"].astype(str)))),
            )
        )  # fmt: skip
    return made


def _ahead(place: Place, here: Mapping[str, Sequence[_Measured]], one: str, other: str, pairs: _Pairs) -> bool:
    """Whether `one` is clearly better than `other`, by `bench.publish.compare`."""
    found: list[compare.Measured | None] = []
    for mine in here[one]:
        pair = pairs.get((place, mine.seed, one, other))
        turned = pairs.get((place, mine.seed, other, one)) if pair is None else None
        found.append((-turned[0], -turned[2], -turned[1]) if turned is not None else pair)
    gap = compare.difference([m.measured for m in here[one]], [m.measured for m in here[other]], found)
    negligible = compare.NEGLIGIBLE if any(word in place.metric for word in END_AT_ONE) else 0.0
    return compare.is_ahead(gap if here[one][0].higher else -gap, negligible)


# ---- what the records hold ----


def _of_lds(results: Results, metric: str) -> tuple[list[_Measured], _Pairs]:
    measured, places = [], dict[tuple[Any, ...], Place]()
    # Tuned apart for raw and for normalised scores, a method runs twice, and the first time it may warm the machine up:
    # seconds and memory of both are those of the faster.
    runs, costs = ["run_id", "label", "alpha", "alpha_attribution", "seed"], ["seconds", "peak_memory_bytes"]
    faster = results.rows.sort_values("seconds", kind="stable").drop_duplicates(runs)[[*runs, *costs]]
    for row in results.rows.drop(columns=costs).merge(faster, on=runs, how="left").to_dict("records"):
        place = Place(
            ground_id=row["ground"], truth_id=row["truth"], task=row["task"], protocol=row["protocol"],
            ground=row["ground_words"], truth=row["truth"], metric=metric, at=None,
            scores="normalised" if row["normalised"] else "raw", alpha=float(row["alpha"]),
            alpha_attribution=float(row["alpha_attribution"]),
        )  # fmt: skip
        names = ["ground", "truth", "normalised", "alpha", "alpha_attribution"]
        places[tuple(row[name] for name in names)] = place
        names = ["method", "label", "settings", "reference", "models", "seconds", "device", "note", "run_id"]
        told = {name: row[name] for name in names}
        told["note"] = told["note"] if isinstance(told["note"], str) else ""
        told["memory"] = row["peak_memory_bytes"]
        measured.append(
            _Measured(
                place=place, method_config=row["series"], seed=int(row["seed"]), higher=True, told=told,
                measured=(float(row["lds"]), float(row["ci_low"]), float(row["ci_high"])),
            )
        )  # fmt: skip
    pairs: _Pairs = {}
    for pair in results.pairs.to_dict("records"):
        key = tuple(pair[name] for name in ("ground", "truth", "normalised", "alpha", "alpha_attribution"))
        if key in places:
            ends = (float(pair["difference"]), float(pair["ci_low"]), float(pair["ci_high"]))
            pairs[places[key], int(pair["seed"]), pair["series"], pair["against"]] = ends
    return measured, pairs


def _ceiling(place: Place, seeds: Sequence[int], results: Results) -> PooledCeiling | None:
    if place.metric not in LDS:
        return None
    frame = results.rows
    cell = frame[
        (frame["ground"] == place.ground_id) & (frame["truth"] == place.truth_id) & (frame["alpha"] == place.alpha)
        & (frame["alpha_attribution"] == place.alpha_attribution) & frame["seed"].isin(seeds)
    ]  # fmt: skip
    return ceiling_over_seeds(cell)


def _of_answers(results: Results) -> tuple[list[_Measured], _Pairs]:
    """Of the questions beside LDS; where two records measured the same, the later one counts."""
    found: dict[tuple[Place, str, int], _Measured] = {}
    pairs: _Pairs = {}
    records = [
        {**record, "finished": max(str(record.get("finished", "")), last_made(path))}
        for path, record in results.read(ANSWERS_FILE, AnswersRecord)
    ]
    for record in sorted(records, key=lambda one: one["finished"]):
        identity = Identity({**record, "ceilings": []})
        task = {name: value for name, value in record["config"]["task"].items() if name != "source"}
        ground = canonical([record["question"], task, record["ground"]])

        def place_of(row: Mapping[str, Any], ground: str = ground, record: Mapping[str, Any] = record) -> Place:
            return Place(
                ground_id=ground, truth_id=canonical(record["config"]["task"].get("source")), task=row["task"],
                protocol=row["protocol"], ground=f"task {row['task']}, protocol {row['protocol']}",
                truth=record["truth"], metric=row["metric"], at=amount_asked(record, row["at"]),
                scores="normalised" if row["normalised"] else "raw", alpha=None,
                alpha_attribution=float(row["alpha_attribution"]),
            )  # fmt: skip

        for row in record["rows"]:
            if row.get("ranked") is False or not results.shows(row["method"], row["label"]):
                continue
            method_config = identity.series(row, row["label"])
            seconds = [row.get(name) for name in ("fit_seconds", "score_seconds")]
            told = {
                "method": method_config["method"], "label": row["label"], "settings": method_config["settings"],
                "seconds": None if None in seconds else sum(map(float, seconds)), "device": record["device"],
                "note": row.get("note") or "", "run_id": record["run_id"], "memory": row.get("peak_memory_bytes"),
                "reference": method_config["reference"], "models": method_config["models"],
            }  # fmt: skip
            place = place_of(row)
            key = (place, method_config["series_id"], int(row["seed"]))
            ends = _numbers(row, "value", "ci_low", "ci_high")
            found[key] = _Measured(
                place=place, method_config=key[1], seed=key[2], measured=ends, higher=bool(row["higher"]), told=told
            )
        for pair in record["pairs"]:
            both = (pair["label"], pair["against"])
            names = [identity.series({**pair, "method": label}, label)["series_id"] for label in both]
            ends = _numbers(pair, "difference", "ci_low", "ci_high")
            pairs[place_of(pair), int(pair["seed"]), names[0], names[1]] = ends
    return list(found.values()), pairs


def _numbers(row: Mapping[str, Any], value: str, low: str, high: str) -> compare.Measured:
    one, two, three = (math.nan if row[name] is None else float(row[name]) for name in (value, low, high))
    return one, two, three


# ---- as people read it: tables a page wide, a line a method, a column a question with its ranks ----


@dataclass(frozen=True)
class Board:
    """Methods of one task, protocol and share against columns of one metric and the same seeds."""

    title: str
    header: list[str]
    lines: list[list[str]]
    caption: str


def rows_with(found: Sequence[LeaderboardRow], **choices: Sequence[str]) -> list[LeaderboardRow]:
    """The rows with these values; none for one of them is refused with what there is."""
    kept = list(found)
    for name, values in choices.items():
        if values:
            texts = {_text(value) for row in kept if (value := getattr(row, name)) is not None}
            if unknown := sorted(set(values) - texts):
                there = ", ".join(sorted(texts)) or "nothing"
                raise UsageError(f"the leaderboard has no row with {name} {unknown[0]}; there is {there}")
            kept = [row for row in kept if _text(getattr(row, name)) in values]
    return kept


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def boards(found: Sequence[LeaderboardRow], wide: bool = False) -> list[Board]:
    """Of each task, protocol and share: a table a family of metrics and set of seeds, several where it is too wide."""
    made = []
    for group in _tasks(found):
        names = _names(group)
        families: dict[str, list[LeaderboardRow]] = {}
        for row in group:
            families.setdefault(_family(row), []).append(row)
        for family, rows in _by_truth(families):
            costs = _costs([*(row for row in rows if row.metric in LDS), *group], names)
            columns = list(dict.fromkeys(row.column for row in rows))
            tables = math.ceil(len(columns) / MOST_COLUMNS)
            width = math.ceil(len(columns) / tables)
            for first in range(0, len(columns), width):
                some = [row for row in rows if row.column in columns[first : first + width]]
                alphas = dict.fromkeys(f"{row.alpha:g}" for row in some if row.alpha is not None)
                at = f", alpha {' and '.join(alphas)}" if tables > 1 and alphas else ""
                made.append(_board(some, names, costs, wide, f"{family}{at}"))
    return made


def _tasks(found: Sequence[LeaderboardRow]) -> list[list[LeaderboardRow]]:
    groups: dict[tuple[str, str, float], list[LeaderboardRow]] = {}
    for row in found:
        groups.setdefault((row.task, row.protocol, row.alpha_attribution), []).append(row)
    return list(groups.values())


def _family(row: LeaderboardRow) -> str:
    """LDS, mislabel, removal ...: the first word of its metric; with its seeds."""
    name = "LDS" if row.metric in LDS else row.metric.partition(" ")[0]
    return f"{name}, {_seeds(row)}"


def _by_truth(families: Mapping[str, list[LeaderboardRow]]) -> Iterator[tuple[str, list[LeaderboardRow]]]:
    """LDS on each truth by itself, since ranks and seconds are within one; other families as they are.

    So is each alpha of a truth where a method retrains by itself, which takes other seconds.
    """
    for family, rows in families.items():
        if rows[0].metric not in LDS:
            yield family, rows
            continue
        known = f"task {rows[0].task}, protocol {rows[0].protocol}, "  # which the title has
        for words, own in _parted(rows, ("ground", "truth")):
            itself = any(row.method == DATAMODEL or row.reference != FULL for row in own)
            retrains = len({row.alpha for row in own}) > 1 and itself
            for more, some in _parted(own, ("alpha",)) if retrains else [("", own)]:
                yield f"{family}{words.replace(known, '')}{more}", some


def _parted(rows: Sequence[LeaderboardRow], names: Sequence[str]) -> list[tuple[str, list[LeaderboardRow]]]:
    """Rows that are alike in these, with the words of what tells them from the others."""
    parts: dict[tuple[object, ...], list[LeaderboardRow]] = {}
    for row in rows:
        parts.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    telling = [k for k, name in enumerate(names) if len({key[k] for key in parts}) > 1]
    found, count = [], Counter[str]()
    for key, own in parts.items():
        told = [f"alpha {key[k]:g}" if names[k] == "alpha" else DIGEST.sub("", str(key[k])) for k in telling]
        text = "".join(f", {one}" for one in told)
        count[text] += 1
        found.append((f"{text}, version {count[text]} of the task" if count[text] > 1 else text, own))
    return found


def _costs(group: Sequence[LeaderboardRow], names: Names) -> dict[str, tuple[float, float]]:
    """Name -> seconds and memory of the first row that has seconds: LDS where there is one, which is first in a group.

    Other records may be of a busier machine.
    """
    found: dict[str, tuple[float, float]] = {}
    for row in group:
        name = names[row.column, row.name, row.settings]
        if not math.isfinite(found.get(name, (math.nan,))[0]):
            found[name] = (row.seconds, row.memory)
    return found


def _board(
    group: Sequence[LeaderboardRow],
    names: Names,
    costs: Mapping[str, tuple[float, float]],
    wide: bool = False,
    family: str = "",
) -> Board:
    """Methods ordered by their first column."""
    columns = list(dict.fromkeys(row.column for row in group))
    lines: dict[str, dict[str, LeaderboardRow]] = {}
    for row in group:
        lines.setdefault(names[row.column, row.name, row.settings], {})[row.column] = row
    heads = {column: _head(next(row for row in group if row.column == column)) for column in columns}
    shown = _apart(heads, group)
    header = ["method", *(shown[column] for column in columns), "seconds", "memory"]
    table = []
    for name, cells in lines.items():
        in_order = [cells[column] for column in columns if column in cells]
        seconds, memory = costs[name]
        table.append(
            [
                name,
                *(_cell(cells.get(column), wide) for column in columns),
                number(seconds, 1),
                bytes_text(memory) if math.isfinite(memory) else "-",
                *([_settings(cells.values()), " ".join(in_order[0].record)] if wide else []),
            ]
        )
    header += ["settings", "record"] if wide else []
    first = group[0]
    title = f"{first.task}, protocol {first.protocol}, alpha_attribution {first.alpha_attribution:g}"
    return Board(f"{title}: {family}" if family else title, header, table, _caption(group))


def _names(group: Sequence[LeaderboardRow]) -> Names:
    """Of each (column, label, settings): the label, with its settings where one column has several of them."""
    by_column: dict[tuple[str, str], set[str]] = {}
    for row in group:
        by_column.setdefault((row.column, row.name), set()).add(row.settings)
    several = {name for (_, name), settings in by_column.items() if len(settings) > 1}
    return {
        (row.column, row.name, row.settings): f"{row.name} ({row.settings or 'defaults'})"
        if row.name in several
        else row.name
        for row in group
    }


def _settings(cells: Iterable[LeaderboardRow]) -> str:
    texts = list(dict.fromkeys((row.scores, row.settings or "defaults") for row in cells))
    if len({text for _, text in texts}) == 1:
        return texts[0][1]
    return "; ".join(f"{scores}: {text}" for scores, text in texts)


def _head(row: LeaderboardRow) -> str:
    if row.metric in LDS:
        return f"{'LDS' if row.metric == 'lds' else 'within class'}, alpha {row.alpha:g}, {row.scores}"
    if row.at is None:
        return row.metric
    # Of subsets it is how much they keep; else how much is removed, or looked at.
    return f"{row.metric}, alpha {row.at:g}" if "calibration" in row.metric else f"{row.metric} {100 * row.at:.3g} %"


def _apart(heads: dict[str, str], group: Sequence[LeaderboardRow]) -> dict[str, str]:
    """Columns with one head say their scores, seeds and truth as well, as far as that tells them apart."""
    first = {column: next(row for row in group if row.column == column) for column in heads}
    found = dict(heads)
    for extra in (
        lambda row: row.scores,
        _seeds,
        lambda row: row.truth,
        lambda row: row.ground,
    ):
        for head in [head for head in set(found.values()) if list(found.values()).count(head) > 1]:
            alike = [column for column in found if found[column] == head]
            texts = {column: extra(first[column]) for column in alike}
            if len(set(texts.values())) > 1:
                found |= {column: f"{head}, {text}" for column, text in texts.items()}
    return found


def _seeds(row: LeaderboardRow) -> str:
    return f"seed{'s' if row.num_seeds > 1 else ''} {', '.join(map(str, row.seeds))}"


def _cell(row: LeaderboardRow | None, wide: bool) -> str:
    if row is None:
        return "-"
    if row.metric == WITHIN and not math.isfinite(row.value):
        return "nothing"  # it knows the groups alone
    numbers = [row.value, row.low, row.high]
    large = any(abs(one) >= LARGE for one in numbers)
    value, low, high = (short_number(one) if large else number(one) for one in numbers)
    ends = f" [{low}, {high}]" if wide and "-" not in (low, high) else ""
    return f"{value}{ends} ({row.rank})"


def _noise(group: Sequence[LeaderboardRow]) -> str:
    """Where little is known of the truth itself; LDS alone has a ceiling, and always an alpha."""
    alphas = sorted({row.alpha for row in group if row.ceiling_touches_zero and row.alpha is not None})
    where = ", ".join(f"{alpha:g}" for alpha in alphas)
    return f"At alpha {where} the noise ceiling's interval touches 0: ranks there tell little. " if alphas else ""


def _caption(group: Sequence[LeaderboardRow]) -> str:
    truths = list(dict.fromkeys(f"{row.truth}, {_seeds(row)}" for row in group))
    intervals = list(dict.fromkeys(compare.interval_words(row.num_seeds) for row in group))
    devices = sorted({row.device for row in group})
    runs = sorted({run for row in group for run in row.record})
    ranks = f"In brackets the rank, a range where paired differences leave a tie ({'; '.join(intervals)})."
    return (
        f"{ranks} {_noise(group)}"
        f"{'; '.join(truths)}. Seconds on {', '.join(devices)}: fit and scores, median over seeds, of the first "
        "column of LDS that has the method, here or else of the task: the faster of its raw and normalised runs, and "
        f"memory of the same. Runs: {', '.join(runs)}."
    )


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", default="results", help="folder with the records (default: results)")
    for name in ROW_CHOICES:
        parser.add_argument(f"--{name}", nargs="+", default=[], help=f"only rows with this {name}")
    parser.add_argument("--wide", action="store_true", help="intervals, settings and records as well")
    parser.add_argument("--out", metavar="FILE", help="write every row as a tidy table")


def run(arguments: argparse.Namespace) -> int:
    """Records that cannot be read are named before anything else, since what follows is without them."""
    folder = Path(arguments.results)
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; name the one that holds run.json files with --results")
    if arguments.out and not Path(arguments.out).absolute().parent.is_dir():
        raise UsageError(f"--out {arguments.out}: {Path(arguments.out).parent} is no folder")
    results = load_results(folder)
    ranked = rows(results)
    for problem in results.problems:
        print(f"tda-bench publish leaderboard: {problem}", file=sys.stderr)
    if results.problems and not ranked:
        return 1
    found = rows_with(ranked, **{name: getattr(arguments, name) for name in ROW_CHOICES})
    if not found:
        raise UsageError(f"{folder} holds no rows; run `tda-bench lds --alpha 0.1 --out {folder}` first")
    for board in boards(found, arguments.wide):
        print(f"{board.title}\n{table(board.header, board.lines)}\n{board.caption}\n")
    if arguments.out:
        rank = {"rank": [row.rank for row in found], "num_seeds": [row.num_seeds for row in found]}
        table_of_all = pd.DataFrame(map(asdict, found)).drop(columns=["ground_id", "truth_id"]).assign(**rank)
        lists = {name: table_of_all[name].map(lambda one: " ".join(map(str, one))) for name in ("seeds", "record")}
        write_whole(Path(arguments.out), csv_text(table_of_all.assign(**lists)))
    return int(bool(results.problems))
