"""Ranks that respect ties: 1-2 where a paired interval cannot tell who is ahead.

Who is ahead is said by `bench.publish.compare`. A method's rank goes from one more than the number of those clearly
better to the number of those that are not clearly worse.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.answers import ANSWERS_FILE, amount_asked
from bench.identity import Identity, canonical, short_digest
from bench.publish import compare
from bench.records import CeilingOverSeeds, Results, ceiling_over_seeds, last_made, load_results
from bench.schema import AnswersRecord

END_AT_ONE = ("lds", "AUC", "precision", "Spearman")  # words in the names of such metrics


@dataclass(frozen=True, kw_only=True)
class LeaderboardRow:
    """One method in one column."""

    column: str  # rows with the same text are ranked against each other, and only those
    task: str
    protocol: str
    ground: str  # what was asked, in words
    truth: str  # how well it was measured, in words
    metric: str  # lds, removal, brittleness, mislabel AUC ...
    at: float | None  # of a metric with a place: the share removed, the k of a precision
    scores: str  # raw or normalised
    alpha: float | None
    alpha_attribution: float
    method: str
    label: str
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
    def num_seeds(self) -> int:
        return len(self.seeds)

    def plain(self) -> dict[str, Any]:
        """As plain data, with the rank as text."""
        return {**asdict(self), "rank": self.rank, "num_seeds": self.num_seeds}


@dataclass(frozen=True, kw_only=True)
class _Place:
    """What a column is about, but for its seeds."""

    ground_id: str
    truth_id: str
    task: str
    protocol: str
    ground: str
    truth: str
    metric: str
    at: float | None
    scores: str
    alpha: float | None
    alpha_attribution: float


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """One method's number of one seed."""

    place: _Place
    series: str
    seed: int
    value: float
    low: float
    high: float
    higher: bool
    finished: str
    told: Mapping[str, Any]  # method, label, settings, seconds, memory, device, note, run_id

    @property
    def measured(self) -> compare.Measured:
        return self.value, self.low, self.high


# place, seed, series, rival -> difference, low, high
_Pairs = dict[tuple[_Place, int, str, str], tuple[float, float, float]]


def rows(results: Path | str | Results) -> list[LeaderboardRow]:
    """Every column's methods, best first; columns by task, metric, alpha."""
    found = results if isinstance(results, Results) else load_results(results)
    measured, pairs = _of_lds(found)
    others, other_pairs = _of_answers(found)
    pairs |= other_pairs
    by_place: dict[_Place, dict[str, dict[int, _Measured]]] = {}
    for one in [*measured, *others]:
        by_place.setdefault(one.place, {}).setdefault(one.series, {})[one.seed] = one
    made: list[LeaderboardRow] = []
    for place, series in by_place.items():
        # Seeds have ground truths of their own: whoever lacks one is compared where the others are without it, too.
        for seeds in sorted({tuple(sorted(by_seed)) for by_seed in series.values()}, key=lambda s: (-len(s), s)):
            here = {name: [by_seed[s] for s in seeds] for name, by_seed in series.items() if set(seeds) <= set(by_seed)}
            made += _column(place, seeds, here, pairs, found)
    return sorted(made, key=_order)


def _order(row: LeaderboardRow) -> tuple[Any, ...]:
    value = row.value if math.isfinite(row.value) else -math.inf
    at = -1.0 if row.at is None else row.at
    which = (row.metric != "lds", row.metric, row.alpha or 0.0, at, row.scores != "raw", -row.num_seeds, row.column)
    return (row.task, row.protocol, row.alpha_attribution, *which, -value if row.higher_is_better else value, row.label)


def _column(
    place: _Place, seeds: tuple[int, ...], here: Mapping[str, Sequence[_Measured]], pairs: _Pairs, results: Results
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
        told = [one.told for one in found]
        devices = sorted({str(one["device"]) for one in told})
        made.append(
            LeaderboardRow(
                column=column,
                **{k: v for k, v in vars(place).items() if k not in ("ground_id", "truth_id")},
                method=told[0]["method"],
                label=told[0]["label"],
                settings=told[0]["settings"] or "",
                value=spans[name].mean,
                low=spans[name].low,
                high=spans[name].high,
                higher_is_better=higher,
                rank_best=1 + sum(ahead[other, name] for other in known if other != name) if name in known else 0,
                rank_worst=len(known) - sum(ahead[name, other] for other in known if other != name)
                if name in known
                else 0,
                num_ranked=len(known),
                ceiling=ceiling.value if ceiling else math.nan,
                ceiling_touches_zero=ceiling is not None and ceiling.touches_zero,
                # Seconds of different machines are not averaged.
                seconds=_median(one["seconds"] for one in told) if len(devices) == 1 else math.nan,
                memory=max((float(m) for one in told if (m := one["memory"]) is not None), default=math.nan),
                device=devices[0] if len(devices) == 1 else "several",
                seeds=seeds,
                note="; ".join(sorted({str(one["note"]) for one in told if one["note"]})),
                record=tuple(sorted({str(one["run_id"]) for one in told})),
            )
        )
    return made


def _median(values: Iterable[float | None]) -> float:
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    return float(np.median(known)) if known else math.nan


def _ahead(place: _Place, here: Mapping[str, Sequence[_Measured]], one: str, other: str, pairs: _Pairs) -> bool:
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


def _of_lds(results: Results) -> tuple[list[_Measured], _Pairs]:
    measured, places = [], dict[tuple[Any, ...], _Place]()
    # Tuned apart for raw and for normalised scores, a method runs twice, and the first time it may warm the machine up:
    # seconds and memory of both are those of the faster.
    runs, costs = ["run_id", "label", "alpha", "alpha_attribution", "seed"], ["seconds", "peak_memory_bytes"]
    faster = results.rows.sort_values("seconds", kind="stable").drop_duplicates(runs)[[*runs, *costs]]
    for row in results.rows.drop(columns=costs).merge(faster, on=runs, how="left").to_dict("records"):
        place = _Place(
            ground_id=row["ground"], truth_id=row["truth"], task=row["task"], protocol=row["protocol"],
            ground=row["ground_words"], truth=row["truth"], metric="lds", at=None,
            scores="normalised" if row["normalised"] else "raw", alpha=float(row["alpha"]),
            alpha_attribution=float(row["alpha_attribution"]),
        )  # fmt: skip
        names = ("ground", "truth", "normalised", "alpha", "alpha_attribution")
        places[tuple(row[name] for name in names)] = place
        told = {name: row[name] for name in ("method", "label", "settings", "seconds", "device", "note", "run_id")}
        told["note"] = told["note"] if isinstance(told["note"], str) else ""
        told["memory"] = row["peak_memory_bytes"]
        measured.append(
            _Measured(
                place=place, series=row["series"], seed=int(row["seed"]), value=float(row["lds"]),
                low=float(row["ci_low"]), high=float(row["ci_high"]), higher=True, finished=str(row["finished"]),
                told=told,
            )
        )  # fmt: skip
    pairs: _Pairs = {}
    for pair in results.pairs.to_dict("records"):
        key = tuple(pair[name] for name in ("ground", "truth", "normalised", "alpha", "alpha_attribution"))
        if key in places:
            ends = (float(pair["difference"]), float(pair["ci_low"]), float(pair["ci_high"]))
            pairs[places[key], int(pair["seed"]), pair["series"], pair["against"]] = ends
    return measured, pairs


def _ceiling(place: _Place, seeds: Sequence[int], results: Results) -> CeilingOverSeeds | None:
    if place.metric != "lds":
        return None
    frame = results.rows
    cell = frame[
        (frame["ground"] == place.ground_id) & (frame["truth"] == place.truth_id) & (frame["alpha"] == place.alpha)
        & (frame["alpha_attribution"] == place.alpha_attribution) & frame["seed"].isin(seeds)
    ]  # fmt: skip
    return ceiling_over_seeds(cell)


def _of_answers(results: Results) -> tuple[list[_Measured], _Pairs]:
    """Of the questions beside LDS; where two records measured the same, the later one counts."""
    found: dict[tuple[_Place, str, int], _Measured] = {}
    pairs: _Pairs = {}
    records = [
        {**record, "finished": max(str(record.get("finished", "")), last_made(path))}
        for path, record in results.read(ANSWERS_FILE, AnswersRecord)
    ]
    for record in sorted(records, key=lambda one: one["finished"]):
        identity = Identity({**record, "ceilings": []})
        task = {name: value for name, value in record["config"]["task"].items() if name != "source"}
        ground = canonical([record["question"], task, record["ground"]])

        def place_of(row: Mapping[str, Any], ground: str = ground, record: Mapping[str, Any] = record) -> _Place:
            return _Place(
                ground_id=ground, truth_id=canonical(record["config"]["task"].get("source")), task=row["task"],
                protocol=row["protocol"], ground=f"task {row['task']}, protocol {row['protocol']}",
                truth=record["truth"], metric=row["metric"], at=amount_asked(record, row["at"]),
                scores="normalised" if row["normalised"] else "raw", alpha=None,
                alpha_attribution=float(row["alpha_attribution"]),
            )  # fmt: skip

        for row in record["rows"]:
            if row.get("ranked") is False or not results.shows(row["method"], row["label"]):
                continue
            series = identity.series(row, row["label"])
            seconds = [row.get(name) for name in ("fit_seconds", "score_seconds")]
            told = {
                "method": series["method"], "label": row["label"], "settings": series["settings"],
                "seconds": None if None in seconds else sum(map(float, seconds)), "device": record["device"],
                "note": row.get("note") or "", "run_id": record["run_id"], "memory": row.get("peak_memory_bytes"),
            }  # fmt: skip
            place = place_of(row)
            key = (place, series["series_id"], int(row["seed"]))
            found[key] = _Measured(
                place=place, series=key[1], seed=key[2], value=_number(row["value"]), low=_number(row["ci_low"]),
                high=_number(row["ci_high"]), higher=bool(row["higher"]), finished=record["finished"], told=told,
            )  # fmt: skip
        for pair in record["pairs"]:
            both = (pair["label"], pair["against"])
            names = [identity.series({**pair, "method": label}, label)["series_id"] for label in both]
            ends = tuple(_number(pair[name]) for name in ("difference", "ci_low", "ci_high"))
            pairs[place_of(pair), int(pair["seed"]), names[0], names[1]] = ends  # type: ignore[assignment]
    return list(found.values()), pairs


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
