"""Does the paper hold? Each of its quantitative claims in its own words, our numbers, and a verdict by a written rule.

    tda-bench publish claims               # writes results/reproduction.md and its cells, results/reproduction.csv
    tda-bench publish claims --check       # exit 1 where they are not what the records say

Claims are data (claims.toml). A rule turns records into interpretations, each of them cells with an outcome. **One
interpretation gives the verdict**: the paper's settings and its equation as printed (LDS across queries, raw scores),
on the record of its protocol to the letter; for a claim that needs shares which that record lacks, on the record
nearest to the text at each share. Only decided cells count: it *does not hold* where more than one in ten of them is
against it, and otherwise *holds*. Where half of its cells or more are open it is *not decidable here*. The other
interpretations are sensitivity: how many of them agree. BIF's sign turned is shown, never counted. Who is ahead is said
by `bench.publish.compare`.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
from scipy import special

import bench.schema as schema
from baselines.bif.diagnostics import RHAT_LIMIT
from baselines.bif.presets import PAPER_SETTINGS
from bench.publish import compare
from bench.publish.compare import Estimate, Measured
from bench.records import ANSWERS_FILE, ceiling_over_seeds, load_results, without_curves, without_scored_again
from bench.scaling.estimate import PAPER_FITTED, RIVALS, Estimator, by_device, crossing_in, ratio_ends
from bench.scaling.rows import read_rows, setting_of
from bench.scaling.suite import SUITE, Setting
from bench.tables import bytes_text, duration, grouped, markdown_table
from retrain.errors import UsageError
from retrain.reference import FULL
from retrain.safe_files import SafeFileError, read_json, read_text, write_whole

HOLDS, FAILS, OPEN = "holds", "does not hold", "open"
UNDECIDABLE = "not decidable here"
# What an interpretation counts as. The primary one gives the verdict; those as in the paper are its sensitivity.
PRIMARY, AS_PAPER, SCRATCH, SHOWN = "primary", "paper's settings", "from scratch", "shown only"
ANALOGUE = "another task"
TURNED = "sign turned"
AGAINST = 0.1  # of an interpretation's decided cells: more against it refute it
DECIDED = 0.5  # of its cells: a verdict needs more
SLIGHT = 0.5  # of EK-FAC's LDS: what is behind by more is not slightly so
SPREAD = 0.1  # standard deviation over seeds, of the mean: more is substantial
FACTOR = 2.0  # "around", "the same": within a factor of two
STABLE, UNSTABLE = 0.2, 0.5  # of the best LDS of a sweep: highest minus lowest
USUAL_DRAWS = 1_000
LARGEST_MODEL, SMALLEST_MODEL = "2.8b", "14m"  # of the paper's sweep
OFF_THE_TEXT = (
    "the warm-up's weights are kept", "subsets have a fixed size", "the rate falls", "fewer than 10,000 queries",
)  # fmt: skip

METRICS = {"lds": "across subsets", "lds_across_queries": "across queries, as printed"}
# Which label plays which part; kfac-library is EK-FAC at the same damping on our kernels.
PAPER_LABELS: dict[str, tuple[str, ...]] = {
    "bif": ("bif-paper",), "ekfac": ("ekfac-library", "kfac-library"), "gradsim": ("gradsim",),
    "trak": ("trak-library",), "library": ("ekfac-library",), "tuned": ("ekfac",),
}  # fmt: skip
IDENTITY = ("gradsim-identity",)  # GradSim on EK-FAC's layers alone, as the paper ran it
NAMES = {"bif": "BIF", "ekfac": "EK-FAC", "gradsim": "GradSim", "trak": "TRAK", "library": "defaults", "tuned": "tuned"}
# What the paper gives (tab:bif_hyperparam_summary, appendix:lds-results); otherwise a label decides nothing.
_PLAIN_BIF = {"control_variate": False, "localiser": "isotropic"}
GIVEN_SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("cifar10", "bif-paper"): {**PAPER_SETTINGS["images"], **_PLAIN_BIF},
    ("pythia14m", "bif-paper"): {**PAPER_SETTINGS["sequences"], **_PLAIN_BIF},
    ("cifar10", "ekfac-library"): {"damping": 1e-8},
    ("cifar10", "kfac-library"): {"damping": 1e-8, "layers": "kronfluence"},
}
GIVEN_TRAK = {"projection": 2048, "ridge": 0.0}  # the paper says little of TRAK: what traker ships counts as its own
CSV_COLUMNS = (
    "claim", "counts_as", "ground_truth", "methods", "lds", "scores", "sign", "where", "number", "outcome", "records",
)  # fmt: skip
Claim = Mapping[str, Any]  # of claims.toml


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

    words: tuple[str, ...]  # ground truth, methods, LDS, scores; and the sign where it is turned
    cells: Sequence[Cell]
    counts_as: str = PRIMARY
    records: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        return outcome_of([cell.outcome for cell in self.cells])


def outcome_of(outcomes: Sequence[str]) -> str:
    """Of a claim about every cell: a few against it may be chance, and the open ones say nothing."""
    known = [one for one in outcomes if one != OPEN]
    if len(known) <= DECIDED * len(outcomes):
        return OPEN
    return FAILS if known.count(FAILS) > AGAINST * len(known) else HOLDS


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

    claim: Claim
    found: Sequence[Interpretation] = ()
    number: str = ""  # what the page shows; of several cells their range
    also: str = ""  # a sentence more, with numbers, of what counts for nothing

    @property
    def primary(self) -> Interpretation | None:
        return next((one for one in self.found if one.counts_as == PRIMARY), None)

    @property
    def verdict(self) -> str:
        outcome = self.primary.outcome if self.primary else OPEN
        return UNDECIDABLE if outcome == OPEN else outcome

    @property
    def agree(self) -> str:
        """How many other interpretations with the paper's settings say the same; what they say of an open one."""
        others = [one.outcome for one in self.found if one.counts_as == AS_PAPER]
        if not others:
            return "-"
        if self.verdict == UNDECIDABLE:
            return f"{others.count(HOLDS)} hold, {others.count(FAILS)} do not, of {len(others)}"
        return f"{others.count(self.verdict)} of {len(others)}"

    @property
    def why(self) -> str:
        parts = [f"Test: {self.claim['test']}."]
        if self.primary and len(self.primary.cells) > 1:
            counts = Counter(cell.outcome for cell in self.primary.cells)
            parts.append(f"Cells: {counts[HOLDS]} for, {counts[FAILS]} against, {counts[OPEN]} open.")
        if self.verdict == UNDECIDABLE:
            parts.append(f"Missing: {self.claim['missing']}.")
        return " ".join(filter(None, [*parts, self.also, self.claim.get("note")]))

    @property
    def shown_number(self) -> str:
        if self.number or self.primary is None:
            return self.number or "-"
        return self.primary.cells[0].text if len(self.primary.cells) == 1 else span_of(self.primary.cells)


def span_of(cells: Sequence[Cell]) -> str:
    values = [cell.value for cell in cells]
    return f"{min(values):+.2f} to {max(values):+.2f}" if values else ""


# ---- the records, as claims ask for them ----


def kind_of(protocol: str, options: Mapping[str, Any], given: Mapping[str, Any], varied: Sequence[str] = ()) -> str:
    """Whose settings a method has, but for those that are varied, and whose protocol."""
    if any(options.get(name) != value for name, value in given.items() if name not in varied):
        return SHOWN
    return SCRATCH if protocol == "scratch" else AS_PAPER


@dataclass(frozen=True)
class Comparison:
    """One truth of the records, with one set of labels, one metric and one kind of scores."""

    ground: str
    protocol: str
    share: float  # alpha_attribution
    metric: str
    normalised: bool
    labels: Mapping[str, str]  # part -> label
    rows: pd.DataFrame = field(repr=False)  # of these labels, this truth, share and kind of scores

    @cached_property
    def counts_as(self) -> str:
        methods = set(zip(self.rows["task"], self.rows["label"], self.rows["options"]))
        kinds = {
            kind_of(self.protocol, json.loads(own), GIVEN_SETTINGS.get(tuple(known), {})) for *known, own in methods
        }
        return SHOWN if SHOWN in kinds else kinds.pop()

    @property
    def as_printed(self) -> bool:
        """The paper's settings, and its equation: across queries, of raw scores."""
        return self.counts_as == AS_PAPER and self.metric != "lds" and not self.normalised

    @cached_property
    def alphas(self) -> list[float]:
        return sorted(self.rows["alpha"].unique())

    @cached_property
    def _measured(self) -> dict[tuple[str, float], dict[int, Measured]]:
        ends = ["ci_low", "ci_high"] if self.metric == "lds" else []  # across queries there are none
        found: dict[tuple[str, float], dict[int, Measured]] = {}
        for label, alpha, seed, *values in (
            self.rows[["label", "alpha", "seed", self.metric, *ends]].to_numpy().tolist()
        ):
            value, low, high = values if ends else (*values, math.nan, math.nan)
            found.setdefault((label, alpha), {})[seed] = (value, low, high)
        return found

    def by_seed(self, part: str, alpha: float) -> dict[int, Measured]:
        return self._measured.get((self.labels[part], alpha), {})

    def values(self, part: str, alpha: float) -> list[float]:
        return [value for value, _, _ in self.by_seed(part, alpha).values()]

    def level(self, part: str) -> float:
        """Over seeds, then alphas."""
        by_alpha = [np.mean(self.values(part, alpha)) for alpha in self.alphas if self.by_seed(part, alpha)]
        return float(np.mean(by_alpha))

    def noise(self, alpha: float) -> bool:
        """Whether retraining may be all noise there; LDS across queries has no ceiling."""
        return self.metric == "lds" and ceiling_over_seeds(self.rows[self.rows["alpha"] == alpha]).touches_zero

    @cached_property
    def runs(self) -> tuple[str, ...]:
        return tuple(sorted(self.rows["run_id"].unique()))

    @property
    def words(self) -> tuple[str, ...]:
        """What is the same at every attribution share: ground truth, labels, LDS, scores."""
        labels = " ".join(self.labels.values())
        return self.ground, labels, METRICS[self.metric], "train-normalised" if self.normalised else "raw"


class Evidence:
    """The records of one folder; `vision` and `language` are the tasks that stand for the paper's two."""

    vision, language = "cifar10", "pythia14m"

    def __init__(self, folder: Path):
        self.folder = folder
        found = without_curves(without_scored_again(load_results(folder)))
        # The paper looks at the full model, and nothing of it keeps the classes' shares.
        rows = found.rows
        self.results = replace(found, rows=rows[(rows["scheme"] != "balanced") & (rows["reference"] == FULL)])
        self.left_out: list[str] = []
        self.pairs = compare.pairs_of(self.results.pairs)

    def comparisons(
        self, task: str, parts: Sequence[str], labels: Mapping[str, tuple[str, ...]] = PAPER_LABELS
    ) -> list[Comparison]:
        """Every ground, share, metric and kind of scores in which all parts were measured, by a part's first label."""
        rows = self.results.rows
        rows = rows[(rows["task"] == task) & rows["label"].isin([label for part in parts for label in labels[part]])]
        found = []
        for (ground, share, _, normalised), here in rows.groupby(
            ["ground", "alpha_attribution", "truth", "normalised"], sort=True
        ):
            for metric in METRICS:
                mine = here.dropna(subset=[metric])
                measured = set(mine["label"])
                names = {part: next((one for one in labels[part] if one in measured), "") for part in parts}
                mine = mine[mine["label"].isin(names.values())]
                if all(names.values()) and self._one_setting_each(mine):
                    protocol = str(mine["protocol"].iloc[0])
                    found.append(Comparison(ground, protocol, share, metric, normalised, names, mine))
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
        for one in sorted((one for one in comparisons if one.as_printed), key=self.off_the_text):
            found.setdefault(one.share, one)
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

    def difference(self, place: Comparison, first: str, second: str, alpha: float) -> Estimate:
        """LDS of a part minus that of another on the same subsets, over the seeds that have both."""
        one, other = place.by_seed(first, alpha), place.by_seed(second, alpha)
        seeds = [seed for seed in one if seed in other]
        own = place.rows.drop_duplicates("label").set_index("label")
        series = [str(own["series"][place.labels[part]]) for part in (first, second)]
        where = [*own[["ground", "truth"]].iloc[0], place.normalised, alpha, place.share]
        pairs = [
            compare.paired(self.pairs, (*where, seed), *series) if place.metric == "lds" else None for seed in seeds
        ]
        return compare.difference([one[seed] for seed in seeds], [other[seed] for seed in seeds], pairs)

    def files(self, name: str, shape: Any) -> list[tuple[str, Any]]:
        return [(self.name(path), record) for path, record in self.results.read(name, shape)]

    def name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()


# ---- rules about LDS ----


def by_lead(gap: Estimate) -> str:
    return HOLDS if compare.is_ahead(gap) else FAILS if compare.is_ahead(-gap) else OPEN


def by_judge(claim: Claim, gap: Estimate, rival: Estimate) -> str:
    """Ahead; or, as the claim says, not behind but for a margin (a share of the rival's LDS), or slightly behind.

    Slightly behind is within the margin of error; one as wide as half of the LDS itself says nothing.
    """
    if "judge" not in claim:
        return by_lead(gap)
    if not gap.known or not rival.known or rival.low <= 0:  # a rival that predicts nothing decides nothing
        return OPEN
    if claim["judge"] == "not_behind":
        return decided(gap.low, gap.high, -claim["margin"] * rival.mean)
    if gap.low > 0 or gap.high < -SLIGHT * rival.mean:
        return FAILS
    return HOLDS if gap.mean < 0 <= gap.high and gap.low >= -SLIGHT * rival.mean else OPEN


def shares_together(places: Sequence[Comparison]) -> list[list[Comparison]]:
    """Attribution shares of one interpretation together; those with other settings than they should have, apart."""
    return list(grouped(places, lambda place: (place.words, place.counts_as == SHOWN)).values())


def interpretation(places: Sequence[Comparison], cells: Sequence[Cell], kind: str, sign: str = "") -> Interpretation:
    grounds = " / ".join(dict.fromkeys(place.ground for place in places))
    runs = tuple(sorted({run for place in places for run in place.runs}))
    return Interpretation((grounds, *places[0].words[1:], sign), cells, kind, runs)


def interpretations(
    evidence: Evidence,
    parts: Sequence[str],
    cells_of: Callable[[Sequence[Comparison], bool], list[Cell]],
    all_shares: bool = False,
) -> list[Interpretation]:
    """The primary one first, then every other one; with BIF's sign turned where its LDS is below 0.

    Primary is the protocol to the letter where it was run; for claims about all shares, what is nearest to it.
    """
    places = evidence.comparisons(evidence.vision, parts)
    nearest = evidence.nearest(places)
    literal = [place for place in nearest if not any(evidence.off_the_text(place))]
    primary = nearest if all_shares or not literal else literal
    asked = [(primary, PRIMARY, "")] if primary else []
    for own in shares_together(places):
        if own != primary:
            asked.append((own, own[0].counts_as, ""))
        if len(parts) > 1 and "bif" in parts and np.mean([place.level("bif") for place in own]) < 0:
            asked.append((own, SHOWN, TURNED))
    return [
        interpretation(own, cells, kind, sign) for own, kind, sign in asked if (cells := cells_of(own, sign == TURNED))
    ]


def lds(evidence: Evidence, claim: Claim) -> Judged:
    """LDS of one part against another's at every alpha, or only where the retrained set is smallest or largest."""
    first, second, only = claim["first"], claim["second"], claim.get("only")

    def cells_of(places: Sequence[Comparison], turned: bool) -> list[Cell]:
        asked = [(place, alpha) for place in places for alpha in place.alphas]
        sizes = [alpha * place.share for place, alpha in asked]
        if only:
            end = (max if only == "largest" else min)(sizes)
            asked = [one for one, size in zip(asked, sizes) if math.isclose(size, end)]
        cells = []
        for place, alpha in asked:
            one, other = place.by_seed(first, alpha), place.by_seed(second, alpha)
            if not (both := [seed for seed in one if seed in other]):
                continue
            signs = [-1.0 if turned and part == "bif" else 1.0 for part in (first, second)]
            mine, rivals = ([sign * own[seed][0] for seed in both] for sign, own in zip(signs, (one, other)))
            apart = compare.student([value - rival for value, rival in zip(mine, rivals)])
            gap = apart if turned else evidence.difference(place, first, second, alpha)
            rival = compare.over_seeds(list(other.values()))
            outcome = OPEN if place.noise(alpha) else by_judge(claim, gap, rival)
            text = f"{np.mean(mine):.3f} - {np.mean(rivals):.3f} = {gap}"
            cells.append(Cell(f"share {place.share:g}, alpha {alpha:g}", text, outcome, gap.mean))
        return cells

    judged = Judged(claim, interpretations(evidence, (first, second), cells_of, all_shares=bool(only)))
    if "also" in claim:
        judged = with_identity(evidence, judged, cells_of)
    if judged.primary is None:
        return judged
    cells = judged.primary.cells
    number = cells[0].text.partition(" = ")[2] if len(cells) == 1 else span_of(cells)
    return replace(judged, number=f"{NAMES[first]} - {NAMES[second]}: {number}")


def with_identity(
    evidence: Evidence, judged: Judged, cells_of: Callable[[Sequence[Comparison], bool], list[Cell]]
) -> Judged:
    """Beside it, on another task, GradSim both ways: on all weights, and on EK-FAC's layers as in the paper."""
    claim, rows = judged.claim, evidence.results.rows
    grounds = set(rows.loc[rows["label"].isin(IDENTITY), "ground"])
    found, told = [], []
    for label, words in ((PAPER_LABELS["gradsim"], "all weights"), (IDENTITY, "EK-FAC's layers")):
        parts = (claim["first"], claim["second"])
        places = evidence.comparisons(claim["also"], parts, {**PAPER_LABELS, "gradsim": label})
        for own in shares_together([place for place in places if place.ground in grounds]):
            found.append(interpretation(own, cells_of(own, False), ANALOGUE))
            if own[0].metric == "lds" and not own[0].normalised:
                told.append(f"{np.mean([cell.value for cell in found[-1].cells]):+.3f} with {words}")
    also = f"On {claim['also']}: {', '.join(told)}." if told else ""
    return replace(judged, found=[*judged.found, *found], also=also)


def attribution_set(evidence: Evidence, claim: Claim) -> Judged:
    """For every method: LDS at a smaller attribution set minus that at a larger one, the same alpha and seeds."""
    parts = ("bif", "ekfac", "gradsim", "trak")
    found, number = [], ""
    for own in shares_together(evidence.comparisons(evidence.vision, parts)):
        cells = []
        for small, large, part in ((a, b, part) for a in own for b in own if a.share < b.share for part in parts):
            for alpha in sorted({*small.alphas} & {*large.alphas}):
                one, other = small.by_seed(part, alpha), large.by_seed(part, alpha)
                seeds = sorted(one.keys() & other.keys())
                gap = compare.difference([one[seed] for seed in seeds], [other[seed] for seed in seeds])
                where = f"{part}, share {small.share:g} against {large.share:g}, alpha {alpha:g}"
                # Noise alone lowers LDS: a smaller set under a ceiling that may be 0 says nothing.
                outcome = OPEN if small.noise(alpha) else by_lead(gap)
                cells.append(Cell(where, str(gap), outcome, gap.mean))
        if cells:
            found.append(interpretation(own, cells, PRIMARY if own[0].as_printed else own[0].counts_as))
            number = f"small - large set: {span_of(cells)}" if own[0].as_printed else number
    return Judged(claim, found, number)


def seed_spread(evidence: Evidence, claim: Claim) -> Judged:
    """EK-FAC's standard deviation over seeds, of its mean, pooled over alphas and shares.

    The alphas of one share have their base models in common: a share counts its seeds once.
    """

    def cells_of(places: Sequence[Comparison], turned: bool) -> list[Cell]:
        ratios, degrees = [], 0
        for place in places:
            values = [np.array(place.values("ekfac", alpha)) for alpha in place.alphas if not place.noise(alpha)]
            several = [one for one in values if len(one) > 1 and one.mean()]
            ratios += [float(one.std(ddof=1) / abs(one.mean())) for one in several]
            degrees += min((len(one) - 1 for one in several), default=0)
        if not degrees:
            return []
        share = math.sqrt(float(np.mean(np.square(ratios))))
        low, high = (share * most_spread(degrees, q) for q in (0.975, 0.025))
        text = f"standard deviation {share:.0%} of LDS [{low:.0%}, {high:.0%}]"
        return [Cell("EK-FAC", text, decided(low, high, SPREAD), share)]

    return Judged(claim, interpretations(evidence, ("ekfac",), cells_of))


def most_spread(degrees: int, quantile: float) -> float:
    """A standard deviation, of the measured one, at a quantile of chi-squared."""
    return math.sqrt(degrees / (2 * special.gammaincinv(degrees / 2, quantile)))


def within_seed(evidence: Evidence, claim: Claim) -> Judged:
    """Whether BIF and EK-FAC are nearer to each other than EK-FAC's LDS in one seed to that in another."""

    def cells_of(places: Sequence[Comparison], turned: bool) -> list[Cell]:
        cells = []
        for place, alpha in [(one, alpha) for one in places for alpha in one.alphas if not turned]:
            gap = evidence.difference(place, "bif", "ekfac", alpha)
            values = np.array(place.values("ekfac", alpha))
            if len(values) < 3 or not gap.known:
                continue
            spread = float(values.std(ddof=1))
            most = spread * most_spread(len(values) - 1, 0.025)
            least = max(0.0, gap.low, -gap.high)  # of the difference, whichever way
            far = max(abs(gap.low), abs(gap.high))
            outcome = FAILS if least > most else HOLDS if far <= most else OPEN
            text = f"apart {gap}; over seeds {spread:.3f}, up to {most:.3f}"
            cells.append(Cell(f"share {place.share:g}, alpha {alpha:g}", text, outcome, gap.mean))
        return cells

    return Judged(claim, interpretations(evidence, ("bif", "ekfac"), cells_of))


def language_table(evidence: Evidence, claim: Claim) -> Judged:
    """Our LDS beside the table's. A stand-in for its weights can neither meet nor miss it."""
    found, shown = [], []
    places = [one for part in ("gradsim", "ekfac", "bif") for one in evidence.comparisons(evidence.language, (part,))]
    for place in places:
        (part,), cells = place.labels, []
        for alpha in place.alphas:
            estimate = compare.over_seeds(list(place.by_seed(part, alpha).values()))
            cells.append(Cell(f"alpha {alpha:g}", str(estimate), OPEN, estimate.mean))
        found.append(interpretation([place], cells, SHOWN))
        if place.counts_as == AS_PAPER and place.metric == "lds" and not place.normalised:
            shown.append(f"{part} {cells[0].value:.3f}")
    return Judged(claim, found, ", ".join(dict.fromkeys(shown)))


def implementations(evidence: Evidence, claim: Claim) -> Judged:
    """Token covariances averaged are raw BIF, sequence losses correlated the train-normalised one. Across subsets no
    more than a query's own scale, which changes no rank, lies between them."""
    found: list[Interpretation] = []
    for label in ("bif-paper", "bif"):
        places = evidence.comparisons(evidence.language, ("bif",), {"bif": (label,)})
        of_kind = {(place.ground, place.metric, place.normalised): place for place in places}
        for ground, metric, normalised in sorted(of_kind, key=lambda key: key[1] == "lds"):  # as printed comes first
            raw, other = of_kind[ground, metric, normalised], of_kind.get((ground, metric, True))
            if normalised or other is None:
                continue
            for alpha in sorted({*raw.alphas} & {*other.alphas}):
                one, two = raw.by_seed("bif", alpha), other.by_seed("bif", alpha)
                gap = compare.student([one[seed][0] - two[seed][0] for seed in one if seed in two])
                outcome = decided(gap.low, gap.high, -claim["margin"], claim["margin"])
                cells = [Cell(f"alpha {alpha:g}", str(gap), outcome, gap.mean)]
                found.append(interpretation([raw], cells, counted(AS_PAPER, found) if gap.known else SHOWN))
    return Judged(claim, found)


# ---- rules about settings, draws and pictures ----


def sweep(evidence: Evidence, claim: Claim) -> Judged:
    """How far LDS ranges over a sweep of BIF's settings, of its best; first the sweep at the smallest alpha, raw."""
    task, stable = getattr(evidence, claim["task"]), claim["stable"]
    found: list[Interpretation] = []
    for name, record in sorted(evidence.files("sweep.json", schema.SweepRecord), key=lambda one: str(one[1]["alpha"])):
        if record["task"] != task or record["method"] != "bif":
            continue
        cells = record["cells"]
        if stable and any(cell.get("burn_in") for cell in cells):
            cells = [cell for cell in cells if cell["burn_in"]]
        if claim.get("converged"):  # of the loss trace, by R-hat of its mean
            cells = [cell for cell in cells if (cell.get("rhat") or math.inf) <= RHAT_LIMIT]
        reach = max((c["ci_high"] - c["lds"] for c in cells if c.get("ci_high") is not None), default=0.0)
        given = GIVEN_SETTINGS.get((task, "bif-paper"), {})
        kind = kind_of(record["protocol"], record["options"], given, list(record["axes"]))
        for column, scores in (("lds", "raw"), ("lds_normalised", "train-normalised")):
            values = [cell[column] for cell in cells if cell.get(column) is not None]
            if len(values) < 3 or max(values) <= 0:
                continue
            best, worst = max(values), min(values)
            share = (best - worst) / best
            moved = share > UNSTABLE and best - worst > reach  # more than noise may
            outcome = (HOLDS if stable else FAILS) if share <= STABLE else OPEN
            outcome = (FAILS if stable else HOLDS) if moved else outcome
            text = f"LDS {worst:.3f} to {best:.3f} over {len(values)} settings"
            words = (f"{record['protocol']}, alpha {record['alpha']}", "bif", METRICS["lds"], scores)
            cell = Cell(f"alpha {record['alpha']}", text, outcome, share)
            found.append(Interpretation(words, [cell], counted(kind, found), (name,)))
    return Judged(claim, found)


def curve(evidence: Evidence, claim: Claim) -> Judged:
    """LDS at the usual number of draws, or with the most checkpoints against one; raw scores with the paper's settings
    give the verdict."""
    found: list[Interpretation] = []
    asked = claim["method"], claim["axis"]
    for name, budget in evidence.files("budget.json", schema.BudgetRecord):
        for one in budget["curves"]:
            if budget["task"] != evidence.vision or (one["method"], one["axis"]) != asked:
                continue
            points = sorted((point for point in one["points"] if point["lds"] is not None), key=lambda p: p["value"])
            few = [point for point in points if point["value"] <= USUAL_DRAWS]
            if not few or len(points) < 2 or few[-1]["ci_low"] is None:
                continue
            first, last = (few[-1] if claim["axis"] == "draws" else points[0]), points[-1]
            low, high = ((point["lds"], point["ci_low"], point["ci_high"]) for point in (first, last))
            if claim["axis"] == "draws":
                text = f"LDS {low[0]:.3f} at {first['value']:,.0f} draws, {high[0]:.3f} at {last['value']:,.0f}"
                cell = Cell("draws", text, decided(low[1], low[2], 0.0), low[0])
            else:
                gap = compare.difference([high], [low])
                text = f"LDS {low[0]:.3f} with {first['value']:.0f}, {high[0]:.3f} with {last['value']:.0f}"
                cell = Cell("checkpoints", text, by_lead(gap), gap.mean)
            given = GIVEN_TRAK if one["method"] == "trak" else GIVEN_SETTINGS.get((budget["task"], "bif-paper"), {})
            kind = kind_of(budget["protocol"], one["options"], given, (one["axis"],))
            scores = "train-normalised" if one["normalised"] else "raw"
            words = (f"{budget['protocol']}, alpha {budget['alpha']}", one["method"], METRICS["lds"], scores)
            found.append(Interpretation(words, [cell], counted(kind, found, scores == "raw"), (name,)))
    return Judged(claim, found)


def shared_images(evidence: Evidence, claim: Claim) -> Judged:
    """The share of a query's ten most helpful examples that BIF and EK-FAC both name, against chance."""
    for name, record in evidence.files("examples.json", schema.ExamplesRecord):
        if record.get("task") != "googlenet" or record.get("scores") != "train-normalised":
            continue
        for one in record.get("agreement", []):
            methods = {one["one"].partition("@")[0], one["other"].partition("@")[0]}
            if methods == {"bif", "ekfac"} and one["side"] == "helpful" and one["named"] == 10:
                low = one["shared"] - 1.96 * one["error"]
                text = f"{one['shared']:.0%} of the ten most helpful shared; chance {one['chance']:.0%}"
                cell = Cell("top ten", text, HOLDS if low > one["chance"] else OPEN, one["shared"])
                words = ("googlenet", "bif ekfac", "shared examples", "train-normalised")
                return Judged(claim, [Interpretation(words, [cell], PRIMARY, (name,))])
    return Judged(claim)


def rmsprop(evidence: Evidence, claim: Claim) -> Judged:
    """The median LDS over the settings that a tuning tried, of each sampler; one that diverged counts as 0."""
    found, better = [], []
    for name, record in evidence.files("tune.json", dict[str, Any]):
        folder = (evidence.folder / name).parent
        if any(folder.glob("*-alpha-*.json")):  # chosen by LDS within class, of which the paper says nothing
            continue
        lds_of: dict[bool, list[float]] = {True: [], False: []}  # whether a sampler was named
        for one in record.get("methods", {}).get("bif", {}).get("grid", []):
            lds_of["sampler" in one["options"]].append(one["lds_raw"] or 0.0)
        if all(lds_of.values()):
            rms, sgld = (float(np.median(values)) for values in lds_of.values())
            better.append(rms > sgld)
            cell = Cell("medians", f"RMSprop-SGLD {rms:.3f}, SGLD {sgld:.3f}", OPEN, rms)
            words = (f"{record['task']}, {record['protocol']}", "bif", METRICS["lds"], "raw")
            found.append(Interpretation(words, [cell], SHOWN, (name,)))
    return Judged(claim, found, f"median better in {sum(better)} of {len(better)} tunings" if better else "")


def damped_limit(evidence: Evidence, claim: Claim) -> Judged:
    """The distance of the exact local BIF from the damped influence function, as the posterior narrows."""
    path = evidence.folder / "limit" / "limit.json"
    if not path.is_file():
        return Judged(claim)
    exact = sorted(read_json(path)["exact"], key=lambda one: one["n_beta"])
    falling = all(a["distance"] > b["distance"] for a, b in pairwise(exact))
    first, last = exact[0], exact[-1]
    ends = ", ".join(f"{one['distance']:.2g} at n_beta {one['n_beta']:,.0f}" for one in (first, last))
    # Of leading order: a tenth of the width leaves about a tenth of the distance.
    slope = math.log(last["distance"] / first["distance"]) / math.log(last["n_beta"] / first["n_beta"])
    outcome = HOLDS if falling and slope < -0.75 else FAILS
    words = ("logistic regression", "bif", "distance", "raw")
    cell = Cell("distance", f"distance {ends}", outcome, last["distance"])
    return Judged(claim, [Interpretation(words, [cell], PRIMARY, (evidence.name(path),))])


def repeats(evidence: Evidence, claim: Claim) -> Judged:
    """How many of a query's most helpful examples two fits of EK-FAC share, whose labels were drawn anew; and the same
    of fits with every label at its probability: what those share, rounding alone does not change."""
    for name, record in evidence.files(ANSWERS_FILE, dict[str, Any]):
        cells = [one for one in record.get("detail", {}).get("cells", []) if one["metric"] == "overlap"]
        shared = {
            label: [one for one in cells if {one["label"], one["against"]} == {label, other}]
            for label, other in claim["pairs"]
        }
        drawn, exact = shared.values()
        if not drawn or not exact:
            continue
        low, high = min(one["ci_low"] for one in drawn), max(one["ci_high"] for one in drawn)
        mean, same = (float(np.mean([one["value"] for one in several])) for several in (drawn, exact))
        floor = min(one["ci_low"] for one in exact)
        outcome = HOLDS if high < floor else FAILS if low >= floor else OPEN
        text = f"{mean:.1%} of the most helpful 1 % shared; {same:.1%} with exact labels"
        words = (record["config"]["task"]["name"], "ekfac", "shared examples", "raw")
        cell = Cell("most helpful 1 %", text, outcome, mean)
        return Judged(claim, [Interpretation(words, [cell], PRIMARY, (name,))])
    return Judged(claim)


def no_record(evidence: Evidence, claim: Claim) -> Judged:
    return Judged(claim)


# ---- rules about costs ----


def times_faster(evidence: Evidence, claim: Claim) -> Judged:
    """BIF's seconds over EK-FAC's, timed in one run. The claim is about the paper's sampler; ours is shown."""
    found, shown = [], ""
    for name, record in evidence.files("speed.json", schema.SpeedRecord):
        rows = {row["label"]: row for row in record["rows"]}
        ekfac = rows.get("ekfac-library") or rows.get("ekfac")
        about = json.dumps(record["question"])
        for label, bif in rows.items():
            if ekfac is None or evidence.vision not in about or not bif["method"].startswith("bif"):
                continue
            all_bif, all_ekfac = (row["all_seconds"] for row in (bif, ekfac))
            ratio = bif["seconds"] / ekfac["seconds"]
            low, high = min(all_bif) / max(all_ekfac), max(all_bif) / min(all_ekfac)
            outcome = decided(low, high, claim["factor"] / FACTOR, claim["factor"] * FACTOR)
            text = f"{bif['seconds']:.1f} s / {ekfac['seconds']:.1f} s = {ratio:.2f} [{low:.2f}, {high:.2f}]"
            kind = PRIMARY if bif["method"] == "bif_devinterp" else SHOWN
            words = ("timed in one run", f"{label} ekfac", "seconds")
            found.append(Interpretation(words, [Cell("BIF / EK-FAC", text, outcome, ratio)], kind, (name,)))
            shown = shown or f"our BIF takes {ratio:.2f} of EK-FAC's time"
    return Judged(claim, found, "" if any(one.counts_as == PRIMARY for one in found) else shown)


def suite(evidence: Evidence, claim: Claim) -> Judged:
    """Of the Pythia suite at the paper's fitting set; what only smaller models were measured for decides nothing."""
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
            cell = suite_cell(claim["quantity"], estimator, replace(setting, fit_examples=PAPER_FITTED))
            largest = min(max(row["parameters"] for row in estimator.of(method)) for method in RIVALS)
            if largest < SUITE[LARGEST_MODEL].num_parameters:
                cell = replace(cell, text=f"{cell.text}; no run as large", outcome=OPEN)
            words = (f"Pythia-{LARGEST_MODEL}", "bif ekfac", device)
            found.append(Interpretation(words, [cell], counted(AS_PAPER, found), (evidence.name(path),)))
    return Judged(claim, found)


def suite_cell(quantity: str, estimator: Estimator, setting: Setting) -> Cell:
    """One quantity of the largest model: seconds, memory, disk, the fit's share, the queries from which EK-FAC pays."""

    def seconds_ratio(model: str) -> Estimate:
        bif, ekfac = (estimator.estimate(method, SUITE[model], setting) for method in RIVALS)
        return Estimate(ekfac.seconds / bif.seconds, *ratio_ends(ekfac, bif))

    def times(ratio: Estimate) -> str:
        return f"{ratio.mean:,.0f}x [{ratio.low:,.0f}, {ratio.high:,.0f}]"

    bif, ekfac = (estimator.estimate(method, SUITE[LARGEST_MODEL], setting) for method in RIVALS)
    ratio = seconds_ratio(LARGEST_MODEL)
    if quantity == "faster":
        text = f"{times(ratio)}; BIF {duration(bif.seconds)}"
        return Cell("EK-FAC / BIF", text, decided(ratio.low, ratio.high, 10**1.5), ratio.mean)
    if quantity == "scales":
        small = seconds_ratio(SMALLEST_MODEL)
        outcome = decided(ratio.low - small.high, ratio.high - small.low, 0.0)
        return Cell("EK-FAC / BIF", f"{times(small)} at 14M, {times(ratio)} at 2.8B", outcome, ratio.mean)
    if quantity == "memory":
        more = ekfac.peak_memory_bytes / bif.peak_memory_bytes
        text = f"EK-FAC {bytes_text(ekfac.peak_memory_bytes)}, BIF {bytes_text(bif.peak_memory_bytes)}"
        return Cell("peak memory", text, decided(more, more, 1 / FACTOR, FACTOR), more)
    if quantity == "disk":
        gib = ekfac.disk_bytes / 2**30
        return Cell("disk", f"{gib:.1f} GiB", decided(gib, gib, 0.9 * 41, 1.1 * 41), gib)
    if quantity == "fit":  # at least half of EK-FAC's seconds, of the largest model measured
        where, rows = "fit / (fit + score)", estimator.of("ekfac")
        rows = [row for row in rows if row["fit_examples"] == setting.fit_examples]
        if not rows:
            return Cell(where, "-", OPEN)
        row = max(rows, key=lambda one: one["parameters"])
        share = row["fit_seconds"] / (row["fit_seconds"] + row["score_seconds"])
        return Cell(where, f"the fit is {share:.1%} of EK-FAC's time", decided(share, share, 0.5), share)
    # BIF is surely cheaper at the paper's number of queries, and EK-FAC by the estimate from some number on.
    crossing = crossing_in(estimator, SUITE[LARGEST_MODEL], setting, "queries")
    if len(crossing.values) != 1:
        return Cell("queries", "no single crossing up to a million queries", OPEN)
    right = crossing.cheaper[-1] == "ekfac" and (crossing.low or 0) > setting.queries
    value, low = (float(f"{one or 0:.2g}") for one in (crossing.values[0], crossing.low))
    text = f"EK-FAC is cheaper above about {value:,.0f} queries, not below {low:,.0f}"
    return Cell("queries", text, HOLDS if right else FAILS, crossing.values[0])


RULES: dict[str, Callable[[Evidence, Claim], Judged]] = {
    one.__name__: one
    for one in (
        lds, attribution_set, seed_spread, within_seed, sweep, curve, times_faster, suite, language_table,
        implementations, shared_images, rmsprop, damped_limit, repeats, no_record,
    )
}  # fmt: skip


def claims() -> list[dict[str, Any]]:
    return msgspec.toml.decode(Path(__file__).with_name("claims.toml").read_bytes())["claim"]


def judge_all(evidence: Evidence) -> list[Judged]:
    return [RULES[claim["rule"]](evidence, claim) for claim in claims()]


# ---- the page and its cells ----

INTRODUCTION = """# Does the paper hold?

Kreer et al., *Bayesian Influence Functions for Hessian-Free Data Attribution*: {holds} of {all} claims hold here,
{fails} do not, and {open} cannot be decided here.{rests}{summary}

**How to read it.** One interpretation gives the verdict: the paper's settings, its protocol and its equation as
printed. That equation correlates across queries, not across subsets. {across}*Others agree*
counts the other interpretations with the paper's settings. A cell is one attribution share and one alpha. Open cells
do not count. Where more than one decided cell in ten is against a claim, it does not hold. With half of the cells or
more open, it is not decidable.

**What was run as printed.** {literal}

**The margins were set with our numbers known.** Stricter ones would leave claims 9, 11, 12, 19, 24 and 29 open or
turn them. Claim 9 stands next to its threshold. Judge the number, not only the verdict.

**The sign.** The paper prints BIF with a minus (eq:bayesian-if), and its algorithm without one (alg:sgld). With the
sign turned, BIF's LDS minus EK-FAC's is {turned}, and many cells against BIF are open or turn. The turned sign is shown
and never counted. Across subsets it makes the paper's BIF predict the wrong way round.

**The settings.** {valley}

All cells are in [reproduction.csv](reproduction.csv). `tda-bench publish claims` writes both files.
"""


def page(evidence: Evidence, judged: Sequence[Judged]) -> str:
    verdicts = Counter(one.verdict for one in judged)
    behind = judged[0].verdict == FAILS
    words = (METRICS["lds_across_queries"], "raw", TURNED)  # BIF - EK-FAC with BIF's sign turned
    turned = [cell for found in judged[0].found if found.words[2:] == words for cell in found.cells]
    text = INTRODUCTION.format(
        holds=verdicts[HOLDS], fails=verdicts[FAILS], open=verdicts[UNDECIDABLE], all=len(judged),
        rests=_rests(judged), literal=_literal(evidence),
        summary=" With the paper's settings, BIF predicts retraining worse than EK-FAC." if behind else "",
        turned=span_of(turned) or "not measured", valley=_valley(evidence), across=_across(judged),
    )  # fmt: skip
    rows = []
    for number, one in enumerate(judged, 1):
        quote = f"{one.claim['quote']} ({one.claim['label']})"
        rows.append([number, quote, f"**{one.verdict}**", one.shown_number, one.agree, one.why])
    header = ["", "the paper says", "verdict", "our number", "others agree", "why"]
    return f"{text}\n{markdown_table(header, rows)}\n"


def _across(judged: Sequence[Judged]) -> str:
    """Which verdicts are not by the equation as printed."""
    primary = [(str(number), one.primary) for number, one in enumerate(judged, 1)]
    own = [number for number, one in primary if one is not None and METRICS["lds"] in one.words]
    return f"Claims {_listed(own)} are judged across subsets: their records have no other LDS. " if own else ""


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}".removeprefix(" and ")


def _rests(judged: Sequence[Judged]) -> str:
    """Which claims that hold rest on what was not measured, by claims.toml."""
    found: dict[str, list[str]] = {}
    for number, one in enumerate(judged, 1):
        if "rests_on" in one.claim and one.verdict == HOLDS:
            found.setdefault(one.claim["rests_on"], []).append(str(number))
    said = [f"{_listed(own)} on {what}" for what, own in found.items()]
    return f" Of those that hold, some rest on what was not measured: {', '.join(said)}." if said else ""


def _valley(evidence: Evidence) -> str:
    """What the paper's own grid of settings reaches, beside the row of its table."""
    swept = [one for _, one in evidence.files("sweep.json", schema.SweepRecord) if one["task"] == evidence.vision]
    rows = evidence.results.rows
    for record in sorted(swept, key=lambda one: str(one["alpha"])):
        best = max((cell for cell in record["cells"] if cell["lds"] is not None), key=lambda cell: cell["lds"])
        own = rows[
            (rows["label"] == "bif-paper") & (rows["alpha"] == record["alpha"]) & ~rows["normalised"].astype(bool)
            & (rows["alpha_attribution"] == record.get("alpha_attribution")) & (rows["protocol"] == record["protocol"])
            & (rows["task"] == evidence.vision) & (rows["scheme"] == "fixed")
        ]  # fmt: skip
        settings = ", ".join(f"{name} {best[name]:,g}" for name in record["axes"])
        if len(own):
            mean = own.groupby("ground")["lds"].mean().iloc[0]
            return (
                f"At alpha {record['alpha']} the paper's row of settings has an LDS across subsets of {mean:.3f}. "
                f"Inside its own sweep as many draws reach {best['lds']:.3f}, at {settings}."
            )
    return "No sweep is recorded."


def _literal(evidence: Evidence) -> str:
    """Where the records behind the verdicts are the paper's text, and where they depart from it."""
    shares: dict[str, list[str]] = {}  # what is not as printed -> shares
    for place in evidence.nearest(evidence.comparisons(evidence.vision, ("bif", "ekfac"))):
        said = [words for words, off in zip(OFF_THE_TEXT, evidence.off_the_text(place)) if off]
        shares.setdefault(", ".join(said), []).append(f"{place.share:g}")
    found = ["Nothing."]
    if "" in shares:
        found = [
            f"Share {' and '.join(shares.pop(''))}: independent subsets, optimizer primed alone, all queries.",
            "It decides the claims on LDS that need no other share.",
        ]
    return " ".join([*found, *(f"Not so at share {' and '.join(own)}: {off}." for off, own in shares.items())])


def cells_csv(judged: Sequence[Judged]) -> str:
    """A row a cell: claim, interpretation, what it counts as, the number and its outcome."""
    rows: list[list[Any]] = []
    for number, one in enumerate(judged, 1):
        for found in one.found:
            words, records = (*found.words, "", "")[:5], " ".join(found.records)
            about = [number, found.counts_as, *words]
            rows += [[*about, cell.where, cell.text, cell.outcome, records] for cell in found.cells]
    return pd.DataFrame(rows, columns=list(CSV_COLUMNS)).to_csv(index=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--results", default="results", help="folder of records (default: %(default)s)")
    add("--out", help="folder of reproduction.md and reproduction.csv (default: the folder of records)")
    add("--check", action="store_true", help="change nothing; exit 1 where a file is not what the records say")


def run(arguments: argparse.Namespace) -> int:
    evidence = Evidence(Path(arguments.results))
    judged = judge_all(evidence)
    out = Path(arguments.out) if arguments.out else evidence.folder
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
