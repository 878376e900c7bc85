"""What a comparison comes to, and what several of them come to together."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bench.metrics.intervals import t_quantile

HOLDS, FAILS, UNDECIDED, MISSING = "holds", "does not hold", "undecided", "not measured"
CONFIDENCE = 0.95
FEW_READINGS = 2  # so many readings that settle what others do not are named
# Which readings decide. The paper's own settings under its own protocol give the verdict; the others stand beside it.
AS_PAPER, TUNED, SCRATCH, SCRATCH_TUNED, SHOWN = "paper", "tuned", "scratch", "scratch, tuned", "shown"
GROUPS = {
    AS_PAPER: "the paper's settings and protocol: this is the verdict",
    TUNED: "the paper's protocol, this suite's settings",
    SCRATCH: "the paper's settings, models retrained from scratch for eight epochs",
    SCRATCH_TUNED: "this suite's settings, models retrained from scratch",
}


@dataclass(frozen=True)
class Gap:
    """A mean over seeds with its 95 % interval; NaN ends where there is none."""

    mean: float
    low: float = math.nan
    high: float = math.nan
    seeds: int = 1

    @property
    def known(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    def __str__(self) -> str:
        ends = f" [{self.low:+.3f}, {self.high:+.3f}]" if self.known else ""
        return f"{self.mean:+.3f}{ends}" if math.isfinite(self.mean) else "undefined"


def student_interval(values: Sequence[float]) -> Gap:
    """Student's interval over seeds; none from a single one."""
    numbers = np.asarray(values, dtype=float)
    mean = float(numbers.mean()) if len(numbers) else math.nan
    if len(numbers) < 2 or not np.isfinite(numbers).all():
        return Gap(mean, seeds=len(numbers))
    reach = float(t_quantile(0.5 + CONFIDENCE / 2, len(numbers) - 1) * numbers.std(ddof=1) / math.sqrt(len(numbers)))
    return Gap(mean, mean - reach, mean + reach, len(numbers))


# ---- one comparison ----


def ahead(gap: Gap) -> str:
    """The first is ahead of the second: the interval of their difference excludes 0."""
    if not gap.known:
        return UNDECIDED
    return HOLDS if gap.low > 0 else FAILS if gap.high < 0 else UNDECIDED


def within(gap: Gap, low: float, high: float) -> str:
    """The interval lies inside the range, or outside of it."""
    if not gap.known:
        return UNDECIDED
    if low <= gap.low and gap.high <= high:
        return HOLDS
    return FAILS if gap.high < low or gap.low > high else UNDECIDED


# ---- several ----


@dataclass(frozen=True)
class Cell:
    """One comparison in a reading: where, in words with numbers, and what it comes to."""

    where: str
    text: str
    outcome: str


@dataclass(frozen=True)
class Reading:
    """One way to read a claim: what it takes the paper to mean, and its comparisons."""

    words: tuple[str, ...]  # one for each of the claim's columns
    cells: tuple[Cell, ...]
    group: str = AS_PAPER
    runs: tuple[str, ...] = ()
    note: str = ""
    part_of: tuple[str, ...] = ()  # readings with the same are one reading in several places

    @property
    def outcome(self) -> str:
        return everywhere([cell.outcome for cell in self.cells])


def stand_in(description: str) -> str:
    """A reading's note about a task with other weights than the paper's, by the task's description."""
    return "a stand-in, not the paper's weights" if "stand-in" in description else ""


def everywhere(outcomes: Sequence[str]) -> str:
    """Of a claim about every place: one place against it refutes it; it holds where half or more do and none is
    against."""
    if not outcomes:
        return MISSING
    if FAILS in outcomes:
        return FAILS
    return HOLDS if 2 * outcomes.count(HOLDS) >= len(outcomes) else UNDECIDED


def joined(readings: Sequence[Reading]) -> list[Reading]:
    """Places of one reading as one: what a claim says of every place it says of all of them."""
    found: dict[tuple[str, ...], Reading] = {}
    for number, one in enumerate(readings):
        key = one.part_of or (str(number),)
        if (known := found.get(key)) is None:
            found[key] = one
            continue
        words = tuple(old if new in old.split(" / ") else f"{old} / {new}" for old, new in zip(known.words, one.words))
        found[key] = replace(known, words=words, cells=(*known.cells, *one.cells))
    return list(found.values())


@dataclass(frozen=True)
class Judgement:
    outcome: str
    reason: str
    readings: tuple[Reading, ...] = field(default=(), repr=False)


def over_readings(readings: Sequence[Reading]) -> Judgement:
    """Readings are alternatives: the claim holds (or not) where every reading that decides says so."""
    if not readings:
        return Judgement(MISSING, "no record")
    readings = joined(readings)
    by_outcome = {word: [one for one in readings if one.outcome == word] for word in (HOLDS, FAILS, UNDECIDED)}
    counts = ", ".join(f"{len(found)} {word}" for word, found in by_outcome.items() if found)
    count = f"{len(readings)} reading{'s' * (len(readings) > 1)}: {counts}"
    if by_outcome[HOLDS] and by_outcome[FAILS]:
        few = min((HOLDS, FAILS), key=lambda word: len(by_outcome[word]))
        return Judgement(
            UNDECIDED, f"depends on the reading ({count}{_those(by_outcome, few, readings)})", tuple(readings)
        )
    for word in (HOLDS, FAILS):
        if by_outcome[word]:
            alone = _those(by_outcome, word, readings) if by_outcome[UNDECIDED] else ""
            return Judgement(word, f"{count}{alone}", tuple(readings))
    return Judgement(UNDECIDED, f"no reading decides ({count})", tuple(readings))


def _those(by_outcome: Mapping[str, Sequence[Reading]], outcome: str, readings: Sequence[Reading]) -> str:
    """Who says so, where few of many do: in the words that tell them from the rest."""
    found = by_outcome[outcome]
    if len(found) > FEW_READINGS or len(readings) <= 2 * FEW_READINGS:
        return ""
    telling = [k for k, words in enumerate(zip(*(one.words for one in readings))) if len(set(words)) > 1]
    names = " and ".join(", ".join(one.words[k] for k in telling) for one in found)
    return f"; {outcome}: {names}"
