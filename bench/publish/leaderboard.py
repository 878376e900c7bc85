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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from bench.arguments import report
from bench.identity import Identity, canonical, model_words, short_digest
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
from bench.tables import bytes_text, grouped, number, seeds_text, short_number, table
from retrain.errors import UsageError
from retrain.reference import FULL
from retrain.safe_files import write_whole

WITHIN = "lds within groups"
LDS = (WITHIN, "lds")
END_AT_ONE = ("lds", "AUC", "precision", "Spearman")  # words in the names of such metrics
MOST_COLUMNS = 5  # of questions in one table, so that it fits a page beside method, seconds and memory
DIGEST = re.compile(r" \([0-9a-f]{6}\)$")  # which tells a truth from one of the same size
LARGE = 100.0  # from here on three digits behind the point say nothing
NameOf = Callable[["LeaderboardRow"], str]  # what the line of a row is called


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
    def family(self) -> str:
        """LDS, mislabel, removal ...: the first word of its metric."""
        return "LDS" if self.metric in LDS else self.metric.partition(" ")[0]

    @property
    def num_seeds(self) -> int:
        return len(self.seeds)


# place, series, seed, value with its interval ("measured"), and what is told of it: method, settings, seconds, run ...
Entry = dict[str, Any]


def rows(results: Path | str | Results) -> list[LeaderboardRow]:
    """Every column's methods, best first; columns by task, metric, alpha."""
    found = results if isinstance(results, Results) else load_results(results)
    inside = within_groups(found)  # of balanced subsets LDS is that already
    inside = replace(inside, rows=inside.rows[inside.rows["scheme"] != "balanced"])
    parts = [_of_lds(found, "lds"), _of_lds(inside, WITHIN), _of_answers(found)]
    pairs = {key: pair for _, own in parts for key, pair in own.items()}
    by_place: dict[Place, dict[str, dict[int, Entry]]] = {}
    for entry in [entry for entries, _ in parts for entry in entries]:
        by_place.setdefault(entry["place"], {}).setdefault(entry["series"], {})[entry["seed"]] = entry
    made: list[LeaderboardRow] = []
    for place, by_series in by_place.items():
        # Seeds have ground truths of their own: whoever lacks one is compared where the others are without it, too.
        for seeds in sorted({tuple(sorted(by_seed)) for by_seed in by_series.values()}, key=lambda s: (-len(s), s)):
            having = {name: by_seed for name, by_seed in by_series.items() if set(seeds) <= set(by_seed)}
            here = {name: [by_seed[seed] for seed in seeds] for name, by_seed in having.items()}
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
    place: Place, seeds: tuple[int, ...], here: Mapping[str, list[Entry]], pairs: compare.Pairs, results: Results
) -> list[LeaderboardRow]:
    """The methods that were measured with these seeds, with their ranks."""
    measured = {name: [entry["measured"] for entry in entries] for name, entries in here.items()}
    spans = {name: compare.over_seeds(values) for name, values in measured.items()}
    known = [name for name in here if math.isfinite(spans[name].mean)]
    higher = bool(next(iter(here.values()))[0]["higher"])
    negligible = compare.NEGLIGIBLE if any(word in place.metric for word in END_AT_ONE) else 0.0

    def is_ahead(one: str, other: str) -> bool:
        of_seeds = [compare.paired(pairs, (place, seed), one, other) for seed in seeds]
        gap = compare.difference(measured[one], measured[other], of_seeds)
        return compare.is_ahead(gap if higher else -gap, negligible)

    ahead = {(one, other): is_ahead(one, other) for one in known for other in known if one != other}
    identity = short_digest(canonical([place.ground_id, place.truth_id, place.at, place.alpha]))
    words = [place.task, place.protocol, place.metric, *([] if place.at is None else [f"{place.at:.4g}"]), place.scores]
    words += [] if place.alpha is None else [f"alpha {place.alpha:g}"]
    words += [f"alpha_attribution {place.alpha_attribution:g}", f"seeds {' '.join(map(str, seeds))}", identity]
    rows = results.rows  # of LDS alone is a ceiling known
    ceiling = ceiling_over_seeds(
        rows[
            (rows["ground"] == place.ground_id) & (rows["truth"] == place.truth_id) & (rows["alpha"] == place.alpha)
            & (rows["alpha_attribution"] == place.alpha_attribution) & rows["seed"].isin(seeds)
        ]
    )  # fmt: skip
    made = []
    for name, entries in here.items():
        told = pd.DataFrame(entries)
        first = told.iloc[0]
        devices = sorted(set(told["device"].astype(str)))
        best = 1 + sum(ahead.get((other, name), False) for other in known)
        worst = len(known) - sum(ahead.get((name, other), False) for other in known)
        made.append(
            LeaderboardRow(
                **vars(place), column="; ".join(words), method=first["method"], label=first["label"],
                reference=first["reference"], models=int(first["models"]), settings=first["settings"] or "",
                value=spans[name].mean, low=spans[name].low, high=spans[name].high, higher_is_better=higher,
                rank_best=best if name in known else 0, rank_worst=worst if name in known else 0,
                num_ranked=len(known), ceiling=ceiling.ceiling, ceiling_touches_zero=ceiling.touches_zero,
                # Seconds of different machines are not averaged.
                seconds=float(told["seconds"].astype(float).median()) if len(devices) == 1 else math.nan,
                memory=float(told["memory"].astype(float).max()),
                device=devices[0] if len(devices) == 1 else "several", seeds=seeds,
                note="; ".join(sorted({str(one) for one in told["note"] if one})),
                record=tuple(sorted(set(told["run_id"].astype(str)))),
            )
        )  # fmt: skip
    return made


# ---- what the records hold ----


def _of_lds(results: Results, metric: str) -> tuple[list[Entry], compare.Pairs]:
    entries, places = list[Entry](), dict[tuple[Any, ...], Place]()
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
        places[tuple(row[name] for name in compare.PLACE)] = place
        names = ("series", "method", "label", "settings", "reference", "models", "seconds", "device", "run_id")
        entries.append(
            {name: row[name] for name in names}
            | {"place": place, "seed": int(row["seed"]), "measured": _measured(row, "lds"), "higher": True}
            | {"memory": row["peak_memory_bytes"], "note": row["note"] if isinstance(row["note"], str) else ""}
        )
    size = len(compare.PLACE)
    known = {key: pair for key, pair in compare.pairs_of(results.pairs).items() if key[:size] in places}
    return entries, {(places[key[:size]], *key[size:]): pair for key, pair in known.items()}


def _of_answers(results: Results) -> tuple[list[Entry], compare.Pairs]:
    """Of the questions beside LDS; where two records measured the same, the later one counts."""
    found: dict[tuple[Place, str, int], Entry] = {}
    pairs: dict[tuple[Any, ...], compare.Measured] = {}
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
            if row.get("ranked") is False:
                continue
            series = identity.series(row, row["label"])
            place, name, seed = place_of(row), series["series_id"], int(row["seed"])
            seconds = [row.get(part) for part in ("fit_seconds", "score_seconds")]
            found[place, name, seed] = {key: series[key] for key in ("method", "settings", "reference", "models")} | {
                "place": place, "series": name, "seed": seed, "measured": _measured(row, "value"),
                "label": row["label"], "seconds": None if None in seconds else sum(map(float, seconds)),
                "device": record["device"], "note": row.get("note") or "", "run_id": record["run_id"],
                "memory": row.get("peak_memory_bytes"), "higher": row["higher"],
            }  # fmt: skip
        for pair in record["pairs"]:
            both = (pair["label"], pair["against"])
            names = [identity.series({**pair, "method": label}, label)["series_id"] for label in both]
            pairs[place_of(pair), int(pair["seed"]), names[0], names[1]] = _measured(pair, "difference")
    return list(found.values()), pairs


def _measured(row: Mapping[str, Any], value: str) -> compare.Measured:
    one, low, high = (math.nan if row[name] is None else float(row[name]) for name in (value, "ci_low", "ci_high"))
    return one, low, high


# ---- as people read it: tables a page wide, a line a method, a column a question with its ranks ----


@dataclass(frozen=True)
class Board:
    """Methods of one task, protocol and share against columns of one metric and the same seeds."""

    title: str
    header: list[str]
    lines: list[list[str]]
    caption: str


def boards(found: Sequence[LeaderboardRow], wide: bool = False) -> list[Board]:
    """Of each task, protocol and share: a table a family of metrics and set of seeds, several where it is too wide."""
    made = []
    for group in grouped(found, lambda row: (row.task, row.protocol, row.alpha_attribution)).values():
        columns = grouped(group, lambda row: (row.column, row.name))
        several = {name for (_, name), rows in columns.items() if len({row.settings for row in rows}) > 1}

        def name_of(row: LeaderboardRow, several: Set[str] = several) -> str:
            """With its settings where one column has several of them."""
            return f"{row.name} ({row.settings or 'defaults'})" if row.name in several else row.name

        for family, rows in grouped(group, lambda row: f"{row.family}, {seeds_text(row.seeds)}").items():
            for words, own in _by_truth(rows):
                # Of the first row that has seconds: LDS where there is one; other records may be of a busier machine.
                named = grouped([*(row for row in own if row.metric in LDS), *group], name_of).items()
                costs = {name: next((row for row in its if math.isfinite(row.seconds)), its[-1]) for name, its in named}
                shown = list(dict.fromkeys(row.column for row in own))
                tables = math.ceil(len(shown) / MOST_COLUMNS)
                width = math.ceil(len(shown) / tables)
                for first in range(0, len(shown), width):
                    some = [row for row in own if row.column in shown[first : first + width]]
                    alphas = dict.fromkeys(f"{row.alpha:g}" for row in some if row.alpha is not None)
                    at = f", alpha {' and '.join(alphas)}" if tables > 1 and alphas else ""
                    made.append(_board(some, name_of, costs, wide, f"{family}{words}{at}"))
    return made


def _by_truth(rows: Sequence[LeaderboardRow]) -> Iterator[tuple[str, Sequence[LeaderboardRow]]]:
    """LDS on each truth by itself, since ranks and seconds are within one; other families as they are.

    So is each alpha of a truth where a method retrains by itself, which takes other seconds.
    """
    if rows[0].metric not in LDS:
        yield "", rows
        return
    known = f"task {rows[0].task}, protocol {rows[0].protocol}, "  # which the title has
    for words, own in _parted(rows, ("ground", "truth")):
        itself = any(row.method == DATAMODEL or row.reference != FULL for row in own)
        retrains = len({row.alpha for row in own}) > 1 and itself
        for more, some in _parted(own, ("alpha",)) if retrains else [("", own)]:
            yield f"{words.replace(known, '')}{more}", some


def _parted(rows: Sequence[LeaderboardRow], names: Sequence[str]) -> list[tuple[str, list[LeaderboardRow]]]:
    """Rows that are alike in these, with the words of what tells them from the others."""
    parts = grouped(rows, lambda row: tuple(getattr(row, name) for name in names))
    telling = [k for k, name in enumerate(names) if len({key[k] for key in parts}) > 1]
    found, count = [], Counter[str]()
    for key, own in parts.items():
        told = [f"alpha {key[k]:g}" if names[k] == "alpha" else DIGEST.sub("", str(key[k])) for k in telling]
        text = "".join(f", {one}" for one in told)
        count[text] += 1
        found.append((f"{text}, version {count[text]} of the task" if count[text] > 1 else text, own))
    return found


def _board(
    group: Sequence[LeaderboardRow], name_of: NameOf, costs: Mapping[str, LeaderboardRow], wide: bool, family: str
) -> Board:
    """Methods ordered by their first column."""
    first = grouped(group, lambda row: row.column)
    header = ["method", *_heads([rows[0] for rows in first.values()]), "seconds", "memory"]
    header += ["settings", "record"] if wide else []
    lines = []
    for name, own in grouped(group, name_of).items():
        cells = {row.column: row for row in own}
        cost = [number(costs[name].seconds, 1), bytes_text(costs[name].memory)]
        line = [name, *(_cell(cells.get(column), wide) for column in first), *cost]
        begins = next(cells[column] for column in first if column in cells)
        lines.append([*line, *([_settings(cells.values()), " ".join(begins.record)] if wide else [])])
    one = group[0]
    title = f"{one.task}, protocol {one.protocol}, alpha_attribution {one.alpha_attribution:g}: {family}"
    return Board(title, header, lines, _caption(group))


def _settings(cells: Iterable[LeaderboardRow]) -> str:
    texts = list(dict.fromkeys((row.scores, row.settings or "defaults") for row in cells))
    alike = len({text for _, text in texts}) == 1
    return texts[0][1] if alike else "; ".join(f"{scores}: {text}" for scores, text in texts)


def _heads(columns: Sequence[LeaderboardRow]) -> list[str]:
    """Columns with one head say their scores, seeds and truth as well, as far as that tells them apart."""
    found = []
    for row in columns:
        if row.metric in LDS:
            found.append(f"{'LDS' if row.metric == 'lds' else 'within class'}, alpha {row.alpha:g}, {row.scores}")
        elif row.at is None:
            found.append(row.metric)
        else:  # of subsets it is how much they keep; else how much is removed, or looked at
            amount = f", alpha {row.at:g}" if "calibration" in row.metric else f" {100 * row.at:.3g} %"
            found.append(row.metric + amount)
    for extra in (
        lambda row: row.scores,
        lambda row: seeds_text(row.seeds),
        lambda row: row.truth,
        lambda row: row.ground,
    ):
        for head in {head for head in found if found.count(head) > 1}:
            texts = {k: extra(columns[k]) for k, other in enumerate(found) if other == head}
            if len(set(texts.values())) > 1:
                for k, text in texts.items():
                    found[k] = f"{head}, {text}"
    return found


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


def _caption(group: Sequence[LeaderboardRow]) -> str:
    truths = list(dict.fromkeys(f"{row.truth}, {seeds_text(row.seeds)}" for row in group))
    intervals = list(dict.fromkeys(compare.interval_words(row.num_seeds) for row in group))
    alphas = sorted({row.alpha for row in group if row.ceiling_touches_zero and row.alpha is not None})
    where = ", ".join(f"{alpha:g}" for alpha in alphas)
    noise = f"At alpha {where} the noise ceiling's interval touches 0: ranks there tell little. " if alphas else ""
    devices = sorted({row.device for row in group})
    runs = sorted({run for row in group for run in row.record})
    return (
        f"In brackets the rank, a range where paired differences leave a tie ({'; '.join(intervals)}). {noise}"
        f"{'; '.join(truths)}. Seconds on {', '.join(devices)}: fit and scores, median over seeds, of the first "
        "column of LDS that has the method, here or else of the task: the faster of its raw and normalised runs, and "
        f"memory of the same. Runs: {', '.join(runs)}."
    )


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", default="results", help="folder with the records (default: results)")
    parser.add_argument("--task", nargs="+", default=[], help="only these tasks")
    parser.add_argument("--wide", action="store_true", help="intervals, settings and records as well")
    parser.add_argument("--out", metavar="FILE", help="write every row as a tidy table")


def run(arguments: argparse.Namespace) -> int:
    """Records that cannot be read are named before anything else, since what follows is without them."""
    if arguments.out and not Path(arguments.out).absolute().parent.is_dir():
        raise UsageError(f"--out {arguments.out}: {Path(arguments.out).parent} is no folder")
    results = load_results(arguments.results)
    ranked = rows(results)
    failed = report("tda-bench publish leaderboard", [], results.problems)
    if failed and not ranked:
        return failed
    tasks = {row.task for row in ranked}
    if unknown := sorted(set(arguments.task) - tasks):
        there = ", ".join(sorted(tasks)) or "nothing"
        raise UsageError(f"the leaderboard has no row of the task {unknown[0]}; there is {there}")
    found = [row for row in ranked if row.task in (arguments.task or tasks)]
    if not found:
        folder = results.folder
        raise UsageError(f"{folder} holds no rows; run `tda-bench lds --alpha 0.1 --out {folder}` first")
    for board in boards(found, arguments.wide):
        print(f"{board.title}\n{table(board.header, board.lines)}\n{board.caption}\n")
    if arguments.out:
        rank = {"rank": [row.rank for row in found], "num_seeds": [row.num_seeds for row in found]}
        table_of_all = pd.DataFrame(map(asdict, found)).drop(columns=["ground_id", "truth_id"]).assign(**rank)
        lists = {name: table_of_all[name].map(lambda one: " ".join(map(str, one))) for name in ("seeds", "record")}
        write_whole(Path(arguments.out), csv_text(table_of_all.assign(**lists)))
    return failed
