"""Does the paper hold? Each of its quantitative claims in its own words, our numbers, and a verdict by a written rule.

    tda-bench publish claims               # writes results/reproduction.md and its cells, results/reproduction.csv
    tda-bench publish claims --check       # exit 1 where they are not what the records say

Claims are data (claims.toml). A rule turns records into interpretations, each of them cells with an outcome. **One
interpretation gives the verdict**: the paper's settings, its protocol and its equation as printed (LDS across queries,
raw scores), at each attribution share the record nearest to its text. It *does not hold* where more than one cell in
ten is against it, *holds* where it is not so and at least half of the cells hold, and is otherwise *not decidable
here*. The other interpretations are sensitivity: how many of them agree. BIF's sign turned is shown, never counted.
Who is ahead is said by `bench.publish.compare`.
"""

import argparse
import csv
import io
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

import bench.schema as schema
from baselines.bif.diagnostics import RHAT_LIMIT
from baselines.bif.presets import PAPER_SETTINGS
from bench.publish import compare
from bench.publish.compare import Estimate
from bench.records import MANY_SEEDS, Results, ceiling_over_seeds, load_results, without_curves, without_scored_again
from bench.tables import bytes_text, duration, markdown_table
from retrain.errors import UsageError
from retrain.reference import FULL
from retrain.safe_files import SafeFileError, read_json, read_text, write_whole

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HOLDS, FAILS, OPEN = "holds", "does not hold", "open"
UNDECIDABLE = "not decidable here"
# What an interpretation counts as. The primary one gives the verdict; those as in the paper are its sensitivity.
PRIMARY, AS_PAPER, SCRATCH, SHOWN = (
    "primary", "paper's settings", "from scratch", "shown only",
)  # fmt: skip
AGAINST = 0.1  # of the cells of an interpretation: more against it refute it
SLIGHT = 0.5  # of EK-FAC's LDS: what is behind by more is not slightly so
SPREAD = 0.1  # standard deviation over seeds, of the mean: more is substantial
FACTOR = 2.0  # "around", "the same": within a factor of two
STABLE, UNSTABLE = 0.2, 0.5  # of the best LDS of a sweep: highest minus lowest
USUAL_DRAWS, PAPER_DRAWS = 1_000, 400
LARGEST_MODEL, SMALLEST_MODEL = "2.8b", "14m"  # of the paper's sweep
GIB = 2.0**30
OFF_THE_TEXT = (
    "the warm-up's weights are kept", "subsets have a fixed size", "the rate falls", "fewer than 10,000 queries",
)  # fmt: skip

METRICS = {"lds": "across subsets", "lds_across_queries": "across queries, as printed"}
# Which label plays which part.
PAPER_LABELS = {
    "bif": "bif-paper", "ekfac": "ekfac-library", "gradsim": "gradsim", "trak": "trak-library",
    "library": "ekfac-library", "tuned": "ekfac",
}  # fmt: skip
NAMES = {"bif": "BIF", "ekfac": "EK-FAC", "gradsim": "GradSim", "trak": "TRAK", "library": "defaults", "tuned": "tuned"}
# What the paper gives (tab:bif_hyperparam_summary, appendix:lds-results); otherwise a label decides nothing.
_PLAIN_BIF = {"control_variate": False, "localiser": "isotropic"}
GIVEN_SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("cifar10", "bif-paper"): {**PAPER_SETTINGS["images"], **_PLAIN_BIF},
    ("pythia14m", "bif-paper"): {**PAPER_SETTINGS["sequences"], **_PLAIN_BIF},
    ("cifar10", "ekfac-library"): {"damping": 1e-8},
}
GIVEN_TRAK = {"projection": 2048, "ridge": 0.0}  # the paper says little of TRAK: what traker ships counts as its own


# ---- what comparisons come to ----


@dataclass(frozen=True)
class Cell:
    """One comparison: where, in words with numbers, its value, and what it comes to."""

    where: str
    text: str
    outcome: str
    value: float = math.nan


@dataclass(frozen=True)
class Interpretation:
    """One way to understand a claim, with its cells."""

    words: tuple[str, ...]
    cells: tuple[Cell, ...]
    counts_as: str = PRIMARY
    records: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        return outcome_of([cell.outcome for cell in self.cells])


def outcome_of(outcomes: Sequence[str]) -> str:
    """Of a claim about every cell: a few against it may be chance, and the open ones say nothing."""
    if not outcomes:
        return OPEN
    if outcomes.count(FAILS) > AGAINST * len(outcomes):
        return FAILS
    return HOLDS if 2 * outcomes.count(HOLDS) >= len(outcomes) else OPEN


def decided(low: float, high: float, least: float, most: float = math.inf) -> str:
    """Whether a value, by its interval, is surely within these bounds, or surely not."""
    return HOLDS if least <= low and high <= most else FAILS if high < least or low > most else OPEN


def counted(kind: str, found: Sequence[Interpretation], primary: bool = True) -> str:
    """The first one with the paper's settings is the primary one."""
    first = primary and kind == AS_PAPER and not any(one.counts_as == PRIMARY for one in found)
    return PRIMARY if first else kind


@dataclass(frozen=True)
class Judged:
    """A claim with what the records say of it."""

    claim: Mapping[str, Any]
    found: tuple[Interpretation, ...]
    number: str = ""  # what the page shows; of several cells their range

    @property
    def primary(self) -> Interpretation | None:
        return next((one for one in self.found if one.counts_as == PRIMARY), None)

    @property
    def verdict(self) -> str:
        outcome = self.primary.outcome if self.primary else OPEN
        return UNDECIDABLE if outcome == OPEN else outcome

    @property
    def agree(self) -> str:
        """Of the other interpretations with the paper's settings, how many say the same."""
        others = [one for one in self.found if one.counts_as == AS_PAPER]
        if not others or self.verdict == UNDECIDABLE:
            return "-"
        return f"{sum(one.outcome == self.verdict for one in others)} of {len(others)}"

    @property
    def why(self) -> str:
        parts = [f"Test: {self.claim['test']}."]
        if self.verdict == UNDECIDABLE:
            parts.append(f"Missing: {self.claim['missing']}.")
        elif self.primary and len(self.primary.cells) > 1:
            counts = Counter(cell.outcome for cell in self.primary.cells)
            parts.append(f"{counts[HOLDS]} of {len(self.primary.cells)} cells for, {counts[FAILS]} against.")
        return " ".join([*parts, *([self.claim["note"]] if "note" in self.claim else [])])

    @property
    def shown_number(self) -> str:
        if self.number or self.primary is None:
            return self.number or "-"
        if len(self.primary.cells) == 1:
            return self.primary.cells[0].text
        return _span([cell.value for cell in self.primary.cells])


def _span(values: Sequence[float]) -> str:
    return f"{min(values):+.2f} to {max(values):+.2f}" if values else ""


# ---- the records, as claims ask for them ----


def departures(task: str, label: str, options: str) -> list[str]:
    """Where a label that is called the paper's has another setting; `options` as `bench.records` gives them."""
    found: dict[str, Any] = json.loads(options)
    wanted = GIVEN_SETTINGS.get((task, label), {})
    return [f"{name}={found.get(name)}, not {value}" for name, value in wanted.items() if found.get(name) != value]


@dataclass(frozen=True)
class Comparison:
    """One question of the records, with one set of labels, one metric and one kind of scores."""

    ground: str
    protocol: str
    share: float  # alpha_attribution
    metric: str
    normalised: bool
    labels: tuple[tuple[str, str], ...]  # part -> label
    rows: pd.DataFrame = field(repr=False)  # of these labels, this ground, share and kind of scores

    @cached_property
    def counts_as(self) -> str:
        if any(departures(*one) for one in set(zip(self.rows["task"], self.rows["label"], self.rows["options"]))):
            return SHOWN
        return SCRATCH if self.protocol == "scratch" else AS_PAPER

    @cached_property
    def alphas(self) -> list[float]:
        return sorted(self.rows["alpha"].unique())

    @cached_property
    def _cells(self) -> dict[tuple[str, float], dict[Any, dict[str, Any]]]:
        found: dict[tuple[str, float], dict[Any, dict[str, Any]]] = {}
        columns = ["label", "alpha", "truth", "seed", self.metric, "ci_low", "ci_high"]
        for row in self.rows[columns].to_dict("records"):
            found.setdefault((row["label"], row["alpha"]), {})[row["truth"], row["seed"]] = row
        return found

    def by_seed(self, part: str, alpha: float) -> dict[Any, dict[str, Any]]:
        return self._cells.get((dict(self.labels)[part], alpha), {})

    def values(self, part: str, alpha: float) -> list[float]:
        return [row[self.metric] for row in self.by_seed(part, alpha).values()]

    def estimate(self, part: str, alpha: float) -> Estimate:
        """A part's LDS over seeds."""
        if self.metric != "lds":
            return compare.student(self.values(part, alpha))
        return compare.over_seeds([self.measured(row) for row in self.by_seed(part, alpha).values()])

    def measured(self, row: Mapping[str, Any]) -> compare.Measured:
        return row[self.metric], row["ci_low"], row["ci_high"]

    def noise(self, alpha: float) -> bool:
        """Whether retraining may be all noise there; LDS across queries has no ceiling."""
        return self.metric == "lds" and ceiling_over_seeds(self.rows[self.rows["alpha"] == alpha]).touches_zero

    @cached_property
    def runs(self) -> tuple[str, ...]:
        return tuple(sorted(self.rows["run_id"].unique()))

    @property
    def words(self) -> tuple[str, ...]:
        """What is the same at every attribution share: ground truth, labels, LDS, scores."""
        labels = " ".join(label for _, label in self.labels)
        return self.ground, labels, METRICS[self.metric], "train-normalised" if self.normalised else "raw"


class Evidence:
    """The records of one folder; `vision` and `language` are the tasks that stand for the paper's two."""

    def __init__(self, folder: Path, vision: str = "cifar10", language: str = "pythia14m"):
        self.folder, self.vision, self.language = folder, vision, language
        found = without_curves(without_scored_again(load_results(folder)))
        # The paper looks at the full model, and nothing of it keeps the classes' shares.
        rows = found.rows
        self.results: Results = replace(found, rows=rows[(rows["scheme"] != "balanced") & (rows["reference"] == FULL)])
        self.left_out: list[str] = []

    def comparisons(self, task: str, parts: Sequence[str], labels: Mapping[str, str] | None = None) -> list[Comparison]:
        """Every ground, share, metric and kind of scores in which all parts were measured, under these labels."""
        names = {part: (labels or PAPER_LABELS)[part] for part in parts}
        rows = self.results.rows
        rows = rows[(rows["task"] == task) & rows["label"].isin(names.values())]
        found = []
        for (ground, share, _, normalised), here in rows.groupby(
            ["ground", "alpha_attribution", "truth", "normalised"], sort=True
        ):
            for metric in METRICS:
                mine = here.dropna(subset=[metric])
                if set(mine["label"]) == set(names.values()) and self._one_setting_each(mine):
                    protocol = str(mine["protocol"].iloc[0])
                    found.append(Comparison(ground, protocol, share, metric, normalised, tuple(names.items()), mine))
        return found

    def _one_setting_each(self, rows: pd.DataFrame) -> bool:
        """Two settings under one label are two methods: their mean would be neither's."""
        settings = Counter(label for label, _ in set(zip(rows["label"], rows["options"])))
        for label in sorted(str(label) for label, count in settings.items() if count > 1):
            self.left_out.append(f"`{label}` on {rows['ground'].iloc[0]}: several settings under one label, left out")
        return max(settings.values()) == 1

    def nearest(self, comparisons: Sequence[Comparison]) -> list[Comparison]:
        """At each attribution share the record nearest to the paper's text, read as its equation is printed."""
        found: dict[float, Comparison] = {}
        for one in comparisons:
            if one.counts_as == AS_PAPER and one.metric != "lds" and not one.normalised:
                known = found.setdefault(one.share, one)
                if self.off_the_text(one) < self.off_the_text(known):
                    found[one.share] = one
        return [found[share] for share in sorted(found)]

    def off_the_text(self, place: Comparison) -> tuple[bool, ...]:
        """Where a record departs from the paper's text, as in OFF_THE_TEXT, the plainest words of it first."""
        config = self.results.records[place.runs[0]]["config"]
        return (
            config["task"].get("warmup_keeps", "all") != "optimizer",
            (config.get("scheme") or "fixed") != "bernoulli",
            config["task"].get("epoch_rate", "constant") != "constant",
            int(place.rows["num_queries"].min()) < 10_000,
        )

    def difference(self, place: Comparison, first: str, second: str, alpha: float, turned: bool = False) -> Estimate:
        """LDS of a part minus that of another on the same subsets, over the seeds that have both."""
        one, other = place.by_seed(first, alpha), place.by_seed(second, alpha)
        both = [key for key in one if key in other]
        if place.metric == "lds" and not turned and len(both) < MANY_SEEDS:
            pairs = [self._paired(place, first, second, alpha, key[1]) for key in both]
            first_seeds, second_seeds = ([place.measured(own[key]) for key in both] for own in (one, other))
            gap = compare.difference(first_seeds, second_seeds, pairs)
            return gap if both else Estimate(math.nan, num_seeds=0)
        signs = [-1.0 if turned and part == "bif" else 1.0 for part in (first, second)]
        return compare.student([signs[0] * one[k][place.metric] - signs[1] * other[k][place.metric] for k in both])

    def _paired(self, place: Comparison, first: str, second: str, alpha: float, seed: int) -> compare.Measured | None:
        """A run's paired difference, whichever of the two stands first in it."""
        wanted = (dict(place.labels)[first], dict(place.labels)[second])
        for run in place.runs:
            for pair in self.results.records[run].get("pairs", []):
                where = (pair["alpha"], pair["alpha_attribution"], pair["seed"], pair["normalised"], pair["protocol"])
                if where != (alpha, place.share, seed, place.normalised, place.protocol) or pair["ci_low"] is None:
                    continue
                labels = (pair.get("label") or pair["method"], pair["against"])
                if labels == wanted:
                    return pair["difference"], pair["ci_low"], pair["ci_high"]
                if labels == wanted[::-1]:
                    return -pair["difference"], -pair["ci_high"], -pair["ci_low"]
        return None

    def files(self, name: str, shape: Any) -> list[tuple[str, Any]]:
        return [(self.name(path), record) for path, record in self.results.read(name, shape)]

    def name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()


# ---- rules about LDS ----


def is_ahead(gap: Estimate, rival: Estimate, margin: float) -> str:
    return HOLDS if compare.is_ahead(gap) else FAILS if compare.is_ahead(-gap) else OPEN


def not_behind(gap: Estimate, rival: Estimate, margin: float) -> str:
    """At least the rival's LDS but for a margin, as a share of it; a rival that predicts nothing decides nothing."""
    if not gap.known or not rival.known or rival.low <= 0:
        return OPEN
    return decided(gap.low, gap.high, -margin * rival.mean)


def slightly_behind(gap: Estimate, rival: Estimate, margin: float) -> str:
    """Behind, but within the margin of error; a margin as wide as half of the LDS itself says nothing."""
    if not gap.known or not rival.known or rival.low <= 0:
        return OPEN
    if gap.low > 0 or gap.high < -SLIGHT * rival.mean:
        return FAILS
    return HOLDS if gap.mean < 0 <= gap.high and gap.low >= -SLIGHT * rival.mean else OPEN


JUDGES: dict[str, Callable[[Estimate, Estimate, float], str]] = {
    "is_ahead": is_ahead, "not_behind": not_behind, "slightly_behind": slightly_behind,
}  # fmt: skip


def lds(evidence: Evidence, claim: Mapping[str, Any]) -> Judged:
    """LDS of one part against another's at every alpha, or only where the retrained set is smallest or largest."""
    first, second, only = claim["first"], claim["second"], claim.get("only")
    judge, margin = JUDGES[claim.get("judge", "is_ahead")], claim.get("margin", 0.0)
    places = evidence.comparisons(evidence.vision, (first, second))

    def cells(own: Sequence[Comparison], turned: bool = False) -> Iterator[Cell]:
        sizes = [alpha * place.share for place in own for alpha in place.alphas]
        end = (max if only == "largest" else min)(sizes) if only else None
        for place, alpha in [(one, alpha) for one in own for alpha in one.alphas]:
            if end is not None and not math.isclose(alpha * place.share, end):
                continue
            gap = evidence.difference(place, first, second, alpha, turned)
            if not gap.num_seeds:
                continue
            rival = place.estimate(second, alpha)
            outcome = OPEN if place.noise(alpha) else judge(gap, rival, margin)
            one, other = place.by_seed(first, alpha), place.by_seed(second, alpha)
            sign = -1 if turned and first == "bif" else 1
            means = [
                np.mean([own[key][place.metric] for key in own if key in one and key in other]) for own in (one, other)
            ]
            text = f"{sign * means[0]:.3f} - {means[1]:.3f} = {gap}"
            yield Cell(f"share {place.share:g}, alpha {alpha:g}", text, outcome, gap.mean)

    nearest = evidence.nearest(places)
    primary = list(cells(nearest)) if nearest else []
    found = [_interpretation(nearest, primary)] if primary else []
    for words, own in _grouped(places).items():
        for turned in (False, True):
            made = list(cells(own, turned))
            if turned and ("bif" not in (first, second) or np.mean([_level(place, "bif") for place in own]) >= 0):
                continue
            if made:
                kind = SHOWN if turned else own[0].counts_as
                found.append(_interpretation(own, made, kind, (*words, "sign turned" if turned else "")))
    span = _span([cell.value for cell in primary]) if len(primary) != 1 else primary[0].text.partition(" = ")[2]
    return Judged(claim, tuple(found), f"{NAMES[first]} - {NAMES[second]}: {span}" if span else "")


def _level(place: Comparison, part: str) -> float:
    return float(np.mean([np.mean(place.values(part, alpha)) for alpha in place.alphas if place.by_seed(part, alpha)]))


def _grouped(places: Sequence[Comparison]) -> dict[tuple[str, ...], list[Comparison]]:
    """Attribution shares of one interpretation together; those with other settings than they should have, apart."""
    found: dict[tuple[str, ...], list[Comparison]] = {}
    for place in places:
        found.setdefault((*place.words, *([SHOWN] if place.counts_as == SHOWN else [])), []).append(place)
    return found


def _interpretation(
    places: Sequence[Comparison], cells: Sequence[Cell], kind: str = PRIMARY, words: tuple[str, ...] = ()
) -> Interpretation:
    grounds = " / ".join(dict.fromkeys(place.ground for place in places))
    runs = tuple(sorted({run for place in places for run in place.runs}))
    return Interpretation(words or (grounds, *places[0].words[1:], ""), tuple(cells), kind, runs)


def attribution_set(evidence: Evidence, claim: Mapping[str, Any]) -> Judged:
    """For every method: LDS at a smaller attribution set minus that at a larger one, the same alpha and seeds."""
    parts = ("bif", "ekfac", "gradsim", "trak")
    found, number = [], ""
    for own in _grouped(evidence.comparisons(evidence.vision, parts)).values():
        cells = []
        for small, large in ((a, b) for a in own for b in own if a.share < b.share):
            for part in parts:
                for alpha in sorted({*small.alphas} & {*large.alphas}):
                    one, other = (
                        {key[1]: place.measured(row) for key, row in place.by_seed(part, alpha).items()}
                        for place in (small, large)
                    )
                    seeds = sorted(one.keys() & other.keys())
                    if small.metric == "lds":
                        gap = compare.difference([one[s] for s in seeds], [other[s] for s in seeds])
                    else:
                        gap = compare.student([one[s][0] - other[s][0] for s in seeds])
                    where = f"{part}, share {small.share:g} against {large.share:g}, alpha {alpha:g}"
                    # Noise alone lowers LDS: a smaller set under a ceiling that may be 0 says nothing.
                    outcome = OPEN if small.noise(alpha) else is_ahead(gap, gap, 0.0)
                    cells.append(Cell(where, str(gap), outcome, gap.mean))
        printed = own[0].metric != "lds" and not own[0].normalised and own[0].counts_as == AS_PAPER
        if cells:
            found.append(_interpretation(own, cells, PRIMARY if printed else own[0].counts_as))
            number = f"small - large set: {_span([cell.value for cell in cells])}" if printed else number
    return Judged(claim, tuple(found), number)


def _all_and_nearest(evidence: Evidence, parts: Sequence[str]) -> Iterator[tuple[str, list[Comparison]]]:
    """The primary interpretation first, then every other one."""
    places = evidence.comparisons(evidence.vision, parts)
    if nearest := evidence.nearest(places):
        yield PRIMARY, nearest
    for own in _grouped(places).values():
        yield own[0].counts_as, own


def seed_spread(evidence: Evidence, claim: Mapping[str, Any]) -> Judged:
    """EK-FAC's standard deviation over seeds, of its mean, pooled over alphas and shares.

    The alphas of one share have their base models in common: a share counts its seeds once.
    """
    found = []
    for kind, own in _all_and_nearest(evidence, ("ekfac",)):
        ratios, degrees = [], 0
        for place in own:
            values = [np.array(place.values("ekfac", alpha)) for alpha in place.alphas if not place.noise(alpha)]
            several = [one for one in values if len(one) > 1 and one.mean()]
            ratios += [float(one.std(ddof=1) / abs(one.mean())) for one in several]
            degrees += min((len(one) - 1 for one in several), default=0)
        if not degrees:
            continue
        share = math.sqrt(float(np.mean(np.square(ratios))))
        low, high = (share * math.sqrt(degrees / (2 * special.gammaincinv(degrees / 2, q))) for q in (0.975, 0.025))
        text = f"standard deviation {share:.0%} of LDS [{low:.0%}, {high:.0%}]"
        cell = Cell("EK-FAC", text, decided(low, high, SPREAD), share)
        found.append(_interpretation(own, [cell], kind))
    return Judged(claim, tuple(found))


def within_seed(evidence: Evidence, claim: Mapping[str, Any]) -> Judged:
    """Whether BIF and EK-FAC are nearer to each other than EK-FAC's LDS in one seed to that in another."""
    found = []
    for kind, own in _all_and_nearest(evidence, ("bif", "ekfac")):
        cells = []
        for place in own:
            for alpha in place.alphas:
                gap = evidence.difference(place, "bif", "ekfac", alpha)
                values = np.array(place.values("ekfac", alpha))
                if len(values) < 3 or not gap.known:
                    continue
                spread, degrees = float(values.std(ddof=1)), len(values) - 1
                most = spread * math.sqrt(degrees / (2 * special.gammaincinv(degrees / 2, 0.025)))
                least = max(0.0, gap.low, -gap.high)  # of the difference, whichever way
                far = max(abs(gap.low), abs(gap.high))
                outcome = FAILS if least > most else HOLDS if far <= most else OPEN
                text = f"apart {gap}; over seeds {spread:.3f}, up to {most:.3f}"
                cells.append(Cell(f"share {place.share:g}, alpha {alpha:g}", text, outcome, gap.mean))
        if cells:
            found.append(_interpretation(own, cells, kind))
    return Judged(claim, tuple(found))


def language_table(evidence: Evidence, claim: Mapping[str, Any]) -> Judged:
    """Our LDS beside the table's. A stand-in for its weights can neither meet nor miss it."""
    found, shown = [], []
    for part in ("gradsim", "ekfac", "bif"):
        for place in evidence.comparisons(evidence.language, (part,)):
            cells = [
                Cell(f"alpha {alpha:g}", str(place.estimate(part, alpha)), OPEN, place.estimate(part, alpha).mean)
                for alpha in place.alphas
            ]
            found.append(_interpretation([place], cells, SHOWN))
            if place.counts_as == AS_PAPER and place.metric == "lds" and not place.normalised:
                shown.append(f"{part} {cells[0].value:.3f}")
    return Judged(claim, tuple(found), number=", ".join(dict.fromkeys(shown)))


def implementations(evidence: Evidence, claim: Mapping[str, Any]) -> Judged:
    """Token covariances averaged are raw BIF, sequence losses correlated the train-normalised one: no more than a
    query's own scale, which changes no rank across subsets, lies between them."""
    both = [evidence.comparisons(evidence.language, ("bif",), {"bif": label}) for label in ("bif-paper", "bif")]
    places = [one for own in both for one in own if one.metric == "lds"]
    found = []
    for raw in (place for place in places if not place.normalised):
        for other in (one for one in places if one.normalised and (one.ground, one.labels) == (raw.ground, raw.labels)):
            for alpha in sorted({*raw.alphas} & {*other.alphas}):
                one, two = raw.by_seed("bif", alpha), other.by_seed("bif", alpha)
                gap = compare.student([one[key]["lds"] - two[key]["lds"] for key in one if key in two])
                outcome = decided(gap.low, gap.high, -claim["margin"], claim["margin"])
                cell = Cell(f"alpha {alpha:g}", str(gap), outcome, gap.mean)
                found.append(_interpretation([raw], [cell], PRIMARY if gap.known else SHOWN))
    return Judged(claim, tuple(found))


# ---- rules about settings, draws and pictures ----


def _kind(swept: Mapping[str, Any], method: str, options: Mapping[str, Any] | None, varied: Sequence[str]) -> str:
    """Whose settings a curve or a sweep over `varied` has, and whose protocol; without settings nobody knows."""
    if not options:
        return SHOWN
    given = GIVEN_TRAK if method == "trak" else GIVEN_SETTINGS.get((swept["task"], "bif-paper"), {})
    tuned = any(options.get(name) != value for name, value in given.items() if name not in varied)
    return SHOWN if tuned else SCRATCH if swept["protocol"] == "scratch" else AS_PAPER


def sweep(evidence: Evidence, claim: Mapping[str, Any]) -> Judged:
    """How far LDS ranges over a sweep of BIF's settings, of its best; first the sweep at the smallest alpha, raw."""
    task, stable = getattr(evidence, claim["task"]), claim["stable"]
    found: list[Interpretation] = []
    for name, record in sorted(
        evidence.files("sweep.json", schema.SweepRecord), key=lambda one: (one[1]["task"] != task, str(one[1]["alpha"]))
    ):
        if record["task"] != task or record["method"] != "bif":
            continue
        cells = record["cells"]
        if stable and any(cell.get("burn_in") for cell in cells):
            cells = [cell for cell in cells if cell["burn_in"]]
        if claim.get("converged"):  # of the loss trace, by R-hat of its mean
            cells = [cell for cell in cells if (cell.get("rhat") or math.inf) <= RHAT_LIMIT]
        reach = max((c["ci_high"] - c["lds"] for c in cells if c.get("ci_high") is not None), default=0.0)
        kind = _kind(record, "bif", record.get("options"), list(record["axes"]))
        for column, scores in (("lds", "raw"), ("lds_normalised", "train-normalised")):
            values = [cell[column] for cell in cells if cell.get(column) is not None]
            if len(values) < 3 or max(values) <= 0:
                continue
            best, worst = max(values), min(values)
            share = (best - worst) / best
            moved = share > UNSTABLE and best - worst > reach  # more than noise may
            outcome = HOLDS if share <= STABLE else FAILS if moved else OPEN
            if not stable:
                outcome = {HOLDS: FAILS, FAILS: HOLDS}.get(outcome, outcome)
            text = f"LDS {worst:.3f} to {best:.3f} over {len(values)} settings"
            cell = Cell(f"alpha {record['alpha']}", text, outcome, share)
            words = (f"{record['protocol']}, alpha {record['alpha']}", "bif", METRICS["lds"], scores, "")
            found.append(Interpretation(words, (cell,), counted(kind, found), (name,)))
    return Judged(claim, tuple(found))


def _curves(evidence: Evidence, claim: Mapping[str, Any], method: str, axis: str, judge: Callable) -> Judged:
    """Curves of LDS against what is spent; raw scores with the paper's settings first."""
    found: list[Interpretation] = []
    for name, budget in evidence.files("budget.json", schema.BudgetRecord):
        for curve in budget["curves"]:
            if budget["task"] != evidence.vision or (curve["method"], curve["axis"]) != (method, axis):
                continue
            points = sorted((p for p in curve["points"] if p["lds"] is not None), key=lambda point: point["value"])
            cell = judge(points)
            kind = _kind(budget, method, curve.get("options"), (axis,))
            scores = "train-normalised" if curve.get("normalised") else "raw"
            if cell is not None:
                words = (f"{budget['protocol']}, alpha {budget['alpha']}", method, METRICS["lds"], scores, "")
                found.append(Interpretation(words, (cell,), counted(kind, found, scores == "raw"), (name,)))
    return Judged(claim, tuple(found))


def few_draws(evidence: Evidence, claim: Mapping[str, Any]) -> Judged:
    def judge(points: Sequence[Mapping[str, Any]]) -> Cell | None:
        few = [point for point in points if point["value"] <= USUAL_DRAWS]
        if not few or few[-1].get("ci_low") is None:
            return None
        at, last = few[-1], points[-1]
        text = f"LDS {at['lds']:.3f} at {at['value']:,.0f} draws, {last['lds']:.3f} at {last['value']:,.0f}"
        return Cell("draws", text, decided(at["ci_low"], at["ci_high"], 0.0), at["lds"])

    return _curves(evidence, claim, "bif", "draws", judge)


def more_checkpoints(evidence: Evidence, claim: Mapping[str, Any]) -> Judged:
    def judge(points: Sequence[Mapping[str, Any]]) -> Cell | None:
        if len(points) < 2:
            return None
        one, most = ((p["lds"], p.get("ci_low", math.nan), p.get("ci_high", math.nan)) for p in (points[0], points[-1]))
        gap = compare.difference([most], [one])
        text = f"LDS {one[0]:.3f} with {points[0]['value']:.0f}, {most[0]:.3f} with {points[-1]['value']:.0f}"
        return Cell("checkpoints", text, is_ahead(gap, gap, 0.0), gap.mean)

    return _curves(evidence, claim, "trak", "checkpoints", judge)


def shared_images(evidence: Evidence, claim: Mapping[str, Any]) -> Judged:
    """The share of a query's ten most helpful examples that BIF and EK-FAC both name, against chance."""
    for path in sorted(evidence.folder.rglob("examples.json")):
        record = read_json(path)
        if record.get("task") != "googlenet" or record.get("scores") != "train-normalised":
            continue
        for one in record.get("agreement", []):
            methods = {one["one"].partition("@")[0], one["other"].partition("@")[0]}
            if methods == {"bif", "ekfac"} and one["side"] == "helpful" and one["named"] == 10:
                low = one["shared"] - 1.96 * one["error"]
                text = f"{one['shared']:.0%} of the ten most helpful shared; chance {one['chance']:.0%}"
                cell = Cell("top ten", text, HOLDS if low > one["chance"] else OPEN, one["shared"])
                words = ("googlenet", "bif ekfac", "shared examples", "train-normalised", "")
                return Judged(claim, (Interpretation(words, (cell,), PRIMARY, (evidence.name(path),)),))
    return Judged(claim, ())


def rmsprop(evidence: Evidence, claim: Mapping[str, Any]) -> Judged:
    """The median LDS over the settings that a tuning tried, of each sampler; one that diverged counts as 0."""
    found, better = [], []
    for path in sorted(evidence.folder.rglob("tune.json")):
        if any(path.parent.glob("*-alpha-*.json")):  # chosen by LDS within class, of which the paper says nothing
            continue
        record = read_json(path)
        grid = record.get("methods", {}).get("bif", {}).get("grid", [])
        medians = [
            float(np.median([one["lds_raw"] or 0.0 for one in grid if ("sampler" in one["options"]) is rms]))
            for rms in (True, False)
            if any(("sampler" in one["options"]) is rms for one in grid)
        ]
        if len(medians) == 2:
            better.append(medians[0] > medians[1])
            cell = Cell("medians", f"RMSprop-SGLD {medians[0]:.3f}, SGLD {medians[1]:.3f}", OPEN, medians[0])
            words = (f"{record['task']}, {record['protocol']}", "bif", METRICS["lds"], "raw", "")
            found.append(Interpretation(words, (cell,), SHOWN, (evidence.name(path),)))
    number = f"median better in {sum(better)} of {len(better)} tunings" if better else ""
    return Judged(claim, tuple(found), number)


def damped_limit(evidence: Evidence, claim: Mapping[str, Any]) -> Judged:
    """The distance of the exact local BIF from the damped influence function, as the posterior narrows."""
    path = evidence.folder / "limit" / "limit.json"
    if not path.is_file():
        return Judged(claim, ())
    exact = sorted(read_json(path)["exact"], key=lambda one: one["n_beta"])
    falling = all(a["distance"] > b["distance"] for a, b in pairwise(exact))
    first, last = exact[0], exact[-1]
    ends = (f"{one['distance']:.2g} at n_beta {one['n_beta']:,.0f}" for one in (first, last))
    # Of leading order: a tenth of the width leaves about a tenth of the distance.
    slope = math.log(last["distance"] / first["distance"]) / math.log(last["n_beta"] / first["n_beta"])
    cell = Cell(
        "distance", f"distance {', '.join(ends)}", HOLDS if falling and slope < -0.75 else FAILS, last["distance"]
    )
    words = ("logistic regression", "bif", "distance", "raw", "")
    return Judged(claim, (Interpretation(words, (cell,), PRIMARY, ("limit/limit.json",)),))


def no_record(evidence: Evidence, claim: Mapping[str, Any]) -> Judged:
    return Judged(claim, ())


# ---- rules about costs ----


def times_faster(evidence: Evidence, claim: Mapping[str, Any]) -> Judged:
    """BIF's seconds over EK-FAC's, timed in one run. The claim is about the paper's sampler; ours is shown."""
    found, shown = [], ""
    for name, record in evidence.files("speed.json", schema.SpeedRecord):
        rows = {row.get("label") or row["method"]: row for row in record["rows"]}
        ekfac = rows.get("ekfac-library") or rows.get("ekfac")
        if evidence.vision not in json.dumps(record.get("question") or record.get("description") or ""):
            continue
        for label, bif in rows.items():
            if ekfac is None or not bif["method"].startswith("bif"):
                continue
            all_bif, all_ekfac = (row.get("all_seconds") or [row["seconds"]] for row in (bif, ekfac))
            ratio = bif["seconds"] / ekfac["seconds"]
            low, high = min(all_bif) / max(all_ekfac), max(all_bif) / min(all_ekfac)
            outcome = decided(low, high, claim["factor"] / FACTOR, claim["factor"] * FACTOR)
            text = f"{bif['seconds']:.1f} s / {ekfac['seconds']:.1f} s = {ratio:.2f} [{low:.2f}, {high:.2f}]"
            theirs = bif["method"] == "bif_devinterp"
            words = ("timed in one run", f"{label} ekfac", "seconds", "", "")
            found.append(Interpretation(words, (Cell("BIF / EK-FAC", text, outcome, ratio),),
                                        PRIMARY if theirs else SHOWN, (name,)))  # fmt: skip
            shown = shown or f"our BIF takes {ratio:.2f} of EK-FAC's time"
    primary = any(one.counts_as == PRIMARY for one in found)
    return Judged(claim, tuple(found), "" if primary else shown)


def suite(evidence: Evidence, claim: Mapping[str, Any]) -> Judged:
    """Of the Pythia suite at the paper's fitting set; what only smaller models were measured for decides nothing."""
    from bench.scaling.estimate import PAPER_FITTED, RIVALS, by_device
    from bench.scaling.rows import read_rows, setting_of
    from bench.scaling.suite import SUITE

    found: list[Interpretation] = []
    for path in evidence.results.files("scaling.csv"):
        try:
            estimators = by_device(read_rows(path))
        except UsageError as error:
            evidence.results.note(str(error))
            continue
        for device, estimator in estimators.items():
            if not set(RIVALS) <= set(estimator.methods()):
                continue
            setting = setting_of(min(estimator.of("bif"), key=lambda row: row["queries"]))
            largest = min(max(row["parameters"] for row in estimator.of(method)) for method in RIVALS)
            cell = SUITE_CELLS[claim["quantity"]](estimator, replace(setting, fit_examples=PAPER_FITTED))
            if largest < SUITE[LARGEST_MODEL].num_parameters:
                cell = replace(cell, text=f"{cell.text}; no run as large", outcome=OPEN)
            words = (f"Pythia-{LARGEST_MODEL}", "bif ekfac", device, "", "")
            found.append(Interpretation(words, (cell,), counted(AS_PAPER, found), (evidence.name(path),)))
    return Judged(claim, tuple(found))


def _both(estimator: Any, setting: Any, model: str = LARGEST_MODEL) -> tuple[Any, Any, Estimate]:
    """BIF's and EK-FAC's estimates, and the ratio of EK-FAC's seconds to BIF's."""
    from bench.scaling.estimate import RIVALS, ratio_ends
    from bench.scaling.suite import SUITE

    bif, ekfac = (estimator.estimate(method, SUITE[model], setting) for method in RIVALS)
    return bif, ekfac, Estimate(ekfac.seconds / bif.seconds, *ratio_ends(ekfac, bif))


def suite_faster(estimator: Any, setting: Any) -> Cell:
    bif, _, ratio = _both(estimator, setting)
    text = f"{ratio.mean:,.0f}x [{ratio.low:,.0f}, {ratio.high:,.0f}]; BIF {duration(bif.seconds)}"
    return Cell("EK-FAC / BIF", text, decided(ratio.low, ratio.high, 10**1.5), ratio.mean)


def suite_scales(estimator: Any, setting: Any) -> Cell:
    small, large = (_both(estimator, setting, model)[2] for model in (SMALLEST_MODEL, LARGEST_MODEL))
    one, other = (f"{r.mean:,.0f}x [{r.low:,.0f}, {r.high:,.0f}]" for r in (small, large))
    outcome = decided(large.low - small.high, large.high - small.low, 0.0)
    return Cell("EK-FAC / BIF", f"{one} at 14M, {other} at 2.8B", outcome, large.mean)


def suite_memory(estimator: Any, setting: Any) -> Cell:
    bif, ekfac, _ = _both(estimator, setting)
    ratio = ekfac.peak_memory_bytes / bif.peak_memory_bytes
    text = f"EK-FAC {bytes_text(ekfac.peak_memory_bytes)}, BIF {bytes_text(bif.peak_memory_bytes)}"
    return Cell("peak memory", text, decided(ratio, ratio, 1 / FACTOR, FACTOR), ratio)


def suite_disk(estimator: Any, setting: Any) -> Cell:
    size = _both(estimator, setting)[1].disk_bytes / GIB
    return Cell("disk", f"{size:.1f} GiB", decided(size, size, 0.9 * 41, 1.1 * 41), size)


def suite_fit(estimator: Any, setting: Any) -> Cell:
    """At least half of EK-FAC's seconds, of the largest model measured."""
    rows = [row for row in estimator.of("ekfac") if row["fit_examples"] == setting.fit_examples]
    if not rows:
        return Cell("fit / (fit + score)", "-", OPEN)
    row = max(rows, key=lambda one: one["parameters"])
    share = row["fit_seconds"] / (row["fit_seconds"] + row["score_seconds"])
    return Cell("fit / (fit + score)", f"the fit is {share:.1%} of EK-FAC's time", decided(share, share, 0.5), share)


def suite_queries(estimator: Any, setting: Any) -> Cell:
    """BIF is surely cheaper at the paper's number of queries, and EK-FAC by the estimate from some number on."""
    from bench.scaling.estimate import crossing_in
    from bench.scaling.suite import SUITE

    crossing = crossing_in(estimator, SUITE[LARGEST_MODEL], setting, "queries")
    if len(crossing.values) != 1:
        return Cell("queries", "no single crossing up to a million queries", OPEN)
    value = crossing.values[0]
    right = crossing.cheaper[-1] == "ekfac" and (crossing.low or 0) > setting.queries
    rounded = float(f"{value:.2g}")
    text = f"EK-FAC is cheaper above about {rounded:,.0f} queries, not below {float(f'{crossing.low or 0:.2g}'):,.0f}"
    return Cell("queries", text, HOLDS if right else FAILS, value)


SUITE_CELLS: dict[str, Callable[[Any, Any], Cell]] = {
    "faster": suite_faster, "scales": suite_scales, "memory": suite_memory, "disk": suite_disk, "fit": suite_fit,
    "queries": suite_queries,
}  # fmt: skip
RULES: dict[str, Callable[[Evidence, Mapping[str, Any]], Judged]] = {
    one.__name__: one
    for one in (
        lds, attribution_set, seed_spread, within_seed, sweep, few_draws, more_checkpoints, times_faster, suite,
        language_table, implementations, shared_images, rmsprop, damped_limit, no_record,
    )
}  # fmt: skip


def claims() -> list[dict[str, Any]]:
    return tomllib.loads((Path(__file__).parent / "claims.toml").read_text(encoding="utf-8"))["claim"]


def judge_all(evidence: Evidence) -> list[Judged]:
    return [RULES[claim["rule"]](evidence, claim) for claim in claims()]


# ---- the page and its cells ----

INTRODUCTION = """# Does the paper hold?

Kreer et al., *Bayesian Influence Functions for Hessian-Free Data Attribution*: {holds} of {all} claims hold here,
{fails} do not, and {open} cannot be decided here.{summary}

**How to read it.** One interpretation gives the verdict: the paper's settings, its protocol and its equation as
printed. That equation correlates across queries, not across subsets. *Others agree* counts the other interpretations
with the paper's settings. A cell is one attribution share and one alpha. More than one cell in ten against a claim
refutes it.

**The margins were set with our numbers known.** Stricter ones would leave claims 9, 11, 12, 19 and 24 open or turn
them. Claim 4 stands exactly at its threshold. Judge the number, not only the verdict.

**The sign.** The paper prints BIF with a minus (eq:bayesian-if), and its algorithm without one (alg:sgld). With the
sign turned, BIF's LDS minus EK-FAC's is {turned}. That is shown and never counted.

**The settings.** {valley}

**What is not as in the text.** {off}.

All cells are in [reproduction.csv](reproduction.csv). `tda-bench publish claims` writes both files.
"""


def page(evidence: Evidence, judged: Sequence[Judged]) -> str:
    verdicts = Counter(one.verdict for one in judged)
    behind = judged[0].verdict == FAILS
    text = INTRODUCTION.format(
        holds=verdicts[HOLDS], fails=verdicts[FAILS], open=verdicts[UNDECIDABLE], all=len(judged),
        summary=" With the paper's settings, BIF predicts retraining worse than EK-FAC." if behind else "",
        turned=_turned(judged), valley=_valley(evidence), off=_off(evidence),
    )  # fmt: skip
    rows = [
        [
            number, f"{one.claim['quote']} ({one.claim['label']})", f"**{one.verdict}**", one.shown_number, one.agree,
            one.why,
        ]
        for number, one in enumerate(judged, 1)
    ]  # fmt: skip
    header = ["", "the paper says", "verdict", "our number", "others agree", "why"]
    return f"{text}\n{markdown_table(header, rows)}\n"


def _turned(judged: Sequence[Judged]) -> str:
    """The range of BIF - EK-FAC with BIF's sign turned, as printed, raw scores."""
    values = [
        cell.value
        for found in judged[0].found
        if found.words[2:] == (METRICS["lds_across_queries"], "raw", "sign turned")
        for cell in found.cells
    ]
    return _span(values) or "not measured"


def _valley(evidence: Evidence) -> str:
    """What the paper's own grid of settings reaches, beside the row of its table."""
    swept = [one for _, one in evidence.files("sweep.json", schema.SweepRecord) if one["task"] == evidence.vision]
    rows = evidence.results.rows
    for record in sorted(swept, key=lambda one: str(one["alpha"])):
        best = max((cell for cell in record["cells"] if cell["lds"] is not None), key=lambda cell: cell["lds"])
        own = rows[
            (rows["label"] == "bif-paper") & (rows["alpha"] == record["alpha"]) & ~rows["normalised"].astype(bool)
            & (rows["alpha_attribution"] == record.get("alpha_attribution")) & (rows["protocol"] == record["protocol"])
            & (rows["task"] == evidence.vision)
        ]  # fmt: skip
        settings = ", ".join(f"{name} {best[name]:,g}" for name in record["axes"])
        if len(own):
            mean = own.groupby("ground")["lds"].mean().iloc[0]
            return (
                f"At alpha {record['alpha']} the paper's row of settings has an LDS across subsets of {mean:.3f}. "
                f"Inside its own sweep as many draws reach {best['lds']:.3f}, at {settings}."
            )
    return "No sweep is recorded."


def _off(evidence: Evidence) -> str:
    """Where the records behind the verdicts depart from the paper's text."""
    found = []
    for place in evidence.nearest(evidence.comparisons(evidence.vision, ("bif", "ekfac"))):
        said = [words for words, off in zip(OFF_THE_TEXT, evidence.off_the_text(place)) if off]
        found.append(f"At share {place.share:g}: {', '.join(said) or 'nothing'}")
    return ". ".join(found) or "No record"


def cells_csv(judged: Sequence[Judged]) -> str:
    """A row a cell: claim, interpretation, what it counts as, the number and its outcome."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = ["claim", "counts_as", "ground_truth", "methods", "lds", "scores", "sign", "where", "number", "outcome"]
    writer.writerow([*columns, "records"])
    for number, one in enumerate(judged, 1):
        for found in one.found:
            words = (*found.words, "")[:5]
            for cell in found.cells:
                first = [number, found.counts_as, *words, cell.where]
                writer.writerow([*first, cell.text, cell.outcome, " ".join(found.records)])
    return text.getvalue()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--results", default="results", help="folder of records (default: %(default)s)")
    add("--out", help="folder of reproduction.md and reproduction.csv (default: the folder of records)")
    add("--check", action="store_true", help="change nothing; exit 1 where a file is not what the records say")


def run(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.results)
    if not folder.is_dir():
        raise UsageError(f"--results {folder} is no folder; expected one with records of tda-bench lds")
    evidence = Evidence(folder)
    judged = judge_all(evidence)
    out = Path(arguments.out) if arguments.out else folder
    wanted = {out / "reproduction.md": page(evidence, judged), out / "reproduction.csv": cells_csv(judged)}
    for problem in [*evidence.results.problems, *dict.fromkeys(evidence.left_out)]:
        print(f"tda-bench publish claims: {problem}", file=sys.stderr)
    wrong = bool(evidence.results.problems)
    for path, text in wanted.items():
        if arguments.check:
            try:
                same = read_text(path, follow_links=True) == text
            except SafeFileError as error:
                raise UsageError(f"--check: {error}") from None
            wrong |= not same
            print(f"{path} {'is' if same else 'is not'} what the records say")
        else:
            out.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
            print(f"written: {path}")
    return int(wrong)
