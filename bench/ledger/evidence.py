"""What the records say, as claims ask for it: LDS by label and seed, paired differences, seconds, rates, sweeps."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from baselines.bif.presets import PAPER_SETTINGS
from bench import schema
from bench.ledger.verdicts import AS_PAPER, SCRATCH, SCRATCH_TUNED, SHOWN, TUNED, Gap, student_interval
from bench.records import (
    MANY_SEEDS,
    CeilingOverSeeds,
    Results,
    ceiling_over_seeds,
    load_results,
    without_curves,
    without_scored_again,
)
from retrain.errors import UsageError

PLACE_NEEDS = [
    "task", "ground", "truth", "protocol", "alpha", "alpha_attribution", "seed", "label", "options", "normalised",
    "lds", "ci_low", "ci_high", "lds_across_queries", "reliability", "ceiling_low", "ceiling_high", "seconds",
    "device", "description", "run_id",
]  # fmt: skip
METRIC_WORDS = {"lds": "across subsets", "lds_across_queries": "across queries, as printed"}
# Which label plays which part. The first that is there counts.
PAPER_LABELS: dict[str, tuple[str, ...]] = {
    "bif": ("bif-paper",),
    "ekfac": ("ekfac-library",),
    "gradsim": ("gradsim",),
    "trak": ("trak-library",),
}
TUNED_LABELS: list[dict[str, tuple[str, ...]]] = [
    {"bif": names, "ekfac": ("ekfac",), "gradsim": ("gradsim",), "trak": ("trak",)}
    for names in (("bif-equal", "bif"), ("bif-long",))
]


# What the paper gives (tab:bif_hyperparam_summary, appendix:lds-results); otherwise a label decides nothing.
_PLAIN_BIF = {"control_variate": False, "localiser": "isotropic"}
GIVEN_SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("cifar10", "bif-paper"): {**PAPER_SETTINGS["images"], **_PLAIN_BIF},
    ("pythia14m", "bif-paper"): {**PAPER_SETTINGS["sequences"], **_PLAIN_BIF},
    ("cifar10", "ekfac-library"): {"damping": 1e-8},
}


def departures(task: str, label: str, options: str) -> list[str]:
    """Where a label that is called the paper's has another setting; `options` as `bench.records` gives them."""
    found: dict[str, Any] = json.loads(options)
    wanted = GIVEN_SETTINGS.get((task, label), {})
    return [f"{name}={found.get(name)}, not {value}" for name, value in wanted.items() if found.get(name) != value]


@dataclass(frozen=True)
class Situation:
    """One question of the records, one way to score it and to read it."""

    ground: str
    protocol: str
    share: float  # alpha_attribution
    metric: str
    normalised: bool
    labels: tuple[tuple[str, str], ...]  # part -> label
    tuned: bool
    rows: pd.DataFrame  # of these labels, this ground, share and kind of scores
    description: str

    @cached_property
    def group(self) -> str:
        tasks = zip(self.rows["task"], self.rows["label"], self.rows["options"])
        if any(departures(*one) for one in set(tasks)):
            return SHOWN
        if self.protocol == "scratch":
            return SCRATCH_TUNED if self.tuned else SCRATCH
        return TUNED if self.tuned else AS_PAPER

    @cached_property
    def alphas(self) -> list[float]:
        return sorted(self.rows["alpha"].unique())

    def label(self, part: str) -> str:
        return dict(self.labels)[part]

    @cached_property
    def _cells(self) -> dict[tuple[str, float], list[dict[str, Any]]]:
        found: dict[tuple[str, float], list[dict[str, Any]]] = {}
        columns = ["label", "alpha", "truth", "seed", self.metric, "ci_low", "ci_high"]
        for row in self.rows[columns].to_dict("records"):
            found.setdefault((row["label"], row["alpha"]), []).append(row)
        return found

    def cell(self, part: str, alpha: float) -> list[dict[str, Any]]:
        return self._cells.get((self.label(part), alpha), [])

    def by_seed(self, part: str, alpha: float) -> dict[int, float]:
        return {row["seed"]: row[self.metric] for row in self.cell(part, alpha)}

    def shared_means(self, first: str, second: str, alpha: float, turned: bool) -> str:
        """`0.501 - 0.189`: of the seeds that have both."""
        both = [self.by_seed(part, alpha) for part in (first, second)]
        seeds = both[0].keys() & both[1].keys()
        signs = [-1.0 if turned and part == "bif" else 1.0 for part in (first, second)]
        means = [sign * sum(own[seed] for seed in seeds) / len(seeds) for sign, own in zip(signs, both)]
        return " - ".join(f"{mean:.3f}" for mean in means)

    def values(self, part: str, alpha: float, turned: bool = False) -> Gap:
        """A part's LDS over seeds (of minus its scores, if turned); few seeds have the ends of their own intervals."""
        cell = self.cell(part, alpha)
        numbers = [-row[self.metric] if turned else row[self.metric] for row in cell]
        if self.metric == "lds" and 0 < len(cell) < MANY_SEEDS:
            low, high = min(row["ci_low"] for row in cell), max(row["ci_high"] for row in cell)
            mean = sum(numbers) / len(numbers)
            return Gap(mean, -high, -low, len(cell)) if turned else Gap(mean, low, high, len(cell))
        return student_interval(numbers)

    @cached_property
    def _ceilings(self) -> dict[float, CeilingOverSeeds]:
        """Of LDS across subsets, which is what the ceiling is of."""
        alphas = self.alphas if self.metric == "lds" else []
        return {one: ceiling_over_seeds(self.rows[self.rows["alpha"] == one]) for one in alphas}

    def ceiling_touches_zero(self, alpha: float) -> bool:
        """Whether retraining may be all noise there."""
        return alpha in self._ceilings and self._ceilings[alpha].touches_zero

    def a_seeds_ceiling_touches_zero(self, alpha: float) -> bool:
        """Whether it may be in one of the seeds."""
        return alpha in self._ceilings and self._ceilings[alpha].noisy_seeds > 0

    @cached_property
    def runs(self) -> tuple[str, ...]:
        return tuple(sorted(self.rows["run_id"].unique()))

    def reading(self, *more: str) -> tuple[str, ...]:
        """What is the same at every alpha_attribution."""
        ground, _, *rest = self.words()
        return (self.group, ground, *rest, *more)

    def words(self) -> tuple[str, ...]:
        labels = ", ".join(f"`{label}`" for _, label in self.labels)
        scores = "train-normalised" if self.normalised else "raw"
        return (self.ground, f"{self.share:g}", labels, METRIC_WORDS[self.metric], scores)


PLACE_COLUMNS = ("ground truth", "alpha_attribution", "labels", "LDS", "scores")


class Evidence:
    """The records of one folder; `vision` and `language` are the tasks that stand for the paper's two."""

    def __init__(self, folder: Path, vision: str = "cifar10", language: str = "pythia14m"):
        self.folder, self.vision, self.language = folder, vision, language
        self.results: Results = without_curves(without_scored_again(load_results(folder)))
        self.left_out: list[str] = []
        self._situations: dict[tuple[Any, ...], Situation | None] = {}
        self.speeds = self.results.read("speed.json", schema.SpeedRecord)
        for _, record in self.speeds:
            for row in record["rows"]:
                row.setdefault("label", row["method"])
        self.sweeps = self.results.read("sweep.json", schema.SweepRecord)
        self.budgets = self.results.read("budget.json", schema.BudgetRecord)

    # ---- LDS ----

    def places(
        self,
        task: str,
        parts: Sequence[str],
        metrics: Sequence[str] = tuple(METRIC_WORDS),
        labels: Mapping[str, tuple[str, ...]] | None = None,
    ) -> Iterator[Situation]:
        """Every ground, share, metric, kind of scores and set of labels in which all parts were measured."""
        rows = self.results.rows
        rows = rows[rows["task"] == task]
        sets = [(PAPER_LABELS, False), *((own, True) for own in TUNED_LABELS)] if labels is None else []
        if labels is not None:
            sets = [(dict(labels), False)]
        for (ground, share, truth), here in rows[PLACE_NEEDS].groupby(
            ["ground", "alpha_attribution", "truth"], sort=True
        ):
            seen = set()
            for own, tuned in sets:
                there = set(here["label"])
                found = tuple((part, next((one for one in own[part] if one in there), "")) for part in parts)
                if "" in dict(found).values() or found in seen:
                    continue
                seen.add(found)
                for metric in metrics:
                    for normalised in (False, True):
                        place = (ground, share, metric, normalised, found, tuned)
                        key = (task, truth, *place)
                        if key not in self._situations:  # claims ask for the same ones
                            self._situations[key] = self._situation(here, *place)
                        if (situation := self._situations[key]) is not None:
                            yield situation

    def _situation(
        self,
        here: pd.DataFrame,
        ground: str,
        share: float,
        metric: str,
        normalised: bool,
        labels: tuple[tuple[str, str], ...],
        tuned: bool,
    ) -> Situation | None:
        wanted = set(dict(labels).values())
        mine = here[here["label"].isin(wanted) & (here["normalised"] == normalised)].dropna(subset=[metric])
        if set(mine["label"]) != wanted or not self._one_setting_each(mine):
            return None
        protocol, description = str(mine["protocol"].iloc[0]), str(mine["description"].iloc[0])
        return Situation(ground, protocol, share, metric, normalised, labels, tuned, mine, description)

    def _one_setting_each(self, rows: pd.DataFrame) -> bool:
        """Two settings under one label are two methods: their mean would be neither's."""
        settings = Counter(label for label, _ in set(zip(rows["label"], rows["options"])))
        several = sorted(str(label) for label, count in settings.items() if count > 1)
        for label in several:
            said = f"`{label}` on {rows['ground'].iloc[0]}: several settings under one label, left out of every claim"
            if said not in self.left_out:
                self.left_out.append(said)
        return not several

    def difference(self, place: Situation, first: str, second: str, alpha: float, turned: bool = False) -> Gap | None:
        """LDS of a part minus that of another on the same subsets, over seeds; None where no seed has both. `turned`:
        of minus BIF's scores.

        From five seeds on Student's interval over seeds; below, the ends of the seeds' own paired intervals, or where
        two runs have one each, the ends of both: errors that are alike take off from each other, others do not add up.
        """
        one, other = ({(row["truth"], row["seed"]): row for row in place.cell(part, alpha)} for part in (first, second))
        both = [key for key in one if key in other]
        if not both:
            return None
        signs = [-1.0 if turned and part == "bif" else 1.0 for part in (first, second)]
        values = [signs[0] * one[key][place.metric] - signs[1] * other[key][place.metric] for key in both]
        if place.metric == "lds" and not turned and len(values) < MANY_SEEDS:
            lows, highs = zip(
                *(
                    self._paired(place, first, second, alpha, key[1])
                    or (one[key]["ci_low"] - other[key]["ci_high"], one[key]["ci_high"] - other[key]["ci_low"])
                    for key in both
                )
            )
            return Gap(sum(values) / len(values), min(lows), max(highs), len(values))
        return student_interval(values)

    def _paired(self, place: Situation, first: str, second: str, alpha: float, seed: int) -> tuple[float, float] | None:
        """The interval of a run's paired difference, whichever of the two stands first in it."""
        wanted = (place.label(first), place.label(second))
        for run in place.runs:
            for pair in self.results.records[run].get("pairs", []):
                where = (pair["alpha"], pair["alpha_attribution"], pair["seed"], pair["normalised"], pair["protocol"])
                if where != (alpha, place.share, seed, place.normalised, place.protocol) or pair["ci_low"] is None:
                    continue
                labels = (pair.get("label") or pair["method"], pair["against"])
                if labels == wanted:
                    return pair["ci_low"], pair["ci_high"]
                if labels == wanted[::-1]:
                    return -pair["ci_high"], -pair["ci_low"]
        return None

    def origin(self, run: str, label: str, normalised: bool) -> str:
        """Where a label's settings come from, as its record says: tuned, library, paper, default."""
        for method in self.results.records[run]["config"].get("methods", []):
            kinds = ("both", "normalised" if normalised else "raw")
            if (method.get("label") or method["name"]) == label and method.get("rows", "both") in kinds:
                return str(method.get("origin", "-"))
        return "-"

    def diagnostics(self, place: Situation, part: str) -> list[Mapping[str, Any]]:
        """What the chains of a label say of themselves, a line a seed."""
        found: dict[int, Mapping[str, Any]] = {}
        for run in place.runs:
            for line in self.results.records[run].get("diagnostics", []):
                mine = (line.get("label") or line.get("method")) == place.label(part)
                if mine and line.get("alpha_attribution") == place.share and line.get("rhat") is not None:
                    found[line["seed"]] = line
        return [found[seed] for seed in sorted(found)]

    # ---- costs ----

    def estimators(self) -> list[tuple[str, str, Any]]:
        """(file, device, estimator) of every scaling.csv with rows of both BIF and EK-FAC."""
        from bench.scaling.estimate import RIVALS, by_device
        from bench.scaling.rows import read_rows

        found = []
        for path in self.results.files("scaling.csv"):
            try:
                rows = read_rows(path)
            except UsageError as error:
                self.results.note(str(error))
                continue
            for device, estimator in by_device(rows).items():
                if set(RIVALS) <= set(estimator.methods()):
                    found.append((self.name(path), device, estimator))
        return found

    def name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()


def timed_seconds(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Median, least and most of a timed row."""
    every = row.get("all_seconds") or [row["seconds"]]
    return row["seconds"], min(every), max(every)


def num_draws(row: Mapping[str, Any]) -> float:
    options = row.get("options") or {}
    if isinstance(options, str):
        options = json.loads(options)
    try:
        return float(options["chains"]) * float(options["draws"])
    except (KeyError, TypeError, ValueError):
        return math.nan
