"""Rules about LDS: who is ahead, who matches whom, what changes with the attribution set and with the seed."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy import special

from baselines.bif.diagnostics import RHAT_LIMIT
from bench.ledger.evidence import MANY_SEEDS, Evidence, Situation
from bench.ledger.verdicts import (
    FAILS,
    HOLDS,
    UNDECIDED,
    Cell,
    Gap,
    Reading,
    ahead,
    stand_in,
    student_interval,
    within,
)

MATCH = 0.10  # of EK-FAC's LDS: nearer than this is a match
SLIGHT = 0.50  # of EK-FAC's LDS: what is behind by more is not slightly so
SPREAD = 0.10  # standard deviation over seeds, of the mean: more is substantial
SIZE_MARGIN = 0.05  # of LDS: a printed number is met within this
Rule = Callable[[Evidence], list[Reading]]
Judge = Callable[[Gap, Gap], str]  # of a difference, and of the second's own LDS
SMALLEST, LARGEST = "smallest", "largest"
NOISE = "the noise ceiling's interval touches 0"
NOISE_OF_A_SEED = "the interval of a seed's noise ceiling touches 0"


def is_ahead(gap: Gap, rival: Gap) -> str:
    return ahead(gap)


def matches(gap: Gap, rival: Gap) -> str:
    """Nothing is matched where the rival itself predicts nothing."""
    if not gap.known or not rival.known or rival.low <= 0:
        return UNDECIDED
    return within(gap, -MATCH * rival.mean, MATCH * rival.mean)


def not_far_behind(gap: Gap, rival: Gap) -> str:
    if not gap.known or rival.mean <= 0:
        return UNDECIDED
    return HOLDS if gap.low >= -MATCH * rival.mean else FAILS if gap.high < -MATCH * rival.mean else UNDECIDED


def slightly_behind(gap: Gap, rival: Gap) -> str:
    """Behind, but within the margin of error; a margin as wide as the LDS itself says nothing."""
    if not gap.known or not rival.known or rival.low <= 0:
        return UNDECIDED
    if gap.low > 0 or gap.high < -MATCH * rival.mean:
        return FAILS
    return HOLDS if gap.mean < 0 <= gap.high and gap.low >= -SLIGHT * rival.mean else UNDECIDED


def compare(
    first: str,
    second: str,
    judge: Judge = is_ahead,
    *,
    task: str = "vision",
    only: str = "",
    labels: Mapping[str, tuple[str, ...]] | None = None,
) -> Rule:
    """LDS of one part against another's at every alpha, or only where the retrained set is smallest or largest.

    BIF's sign is a reading too: where its LDS comes out below 0, minus its scores are read as well.
    """

    def rule(evidence: Evidence) -> list[Reading]:
        found = []
        places = list(evidence.places(getattr(evidence, task), (first, second), labels=labels))
        ends, below = _ends(places, only), _below_zero(places)
        for place in places:
            for turned in (False, True):
                if turned and place.reading() not in below:
                    continue
                cells = []
                for alpha in place.alphas:
                    gap = evidence.difference(place, first, second, alpha, turned)
                    if gap is None or (only and not math.isclose(alpha * place.share, ends[place.ground])):
                        continue
                    rival = place.values(second, alpha, turned and second == "bif")
                    alone = " (one seed)" if gap.seeds == 1 else ""
                    text = f"{place.shared_means(first, second, alpha, turned)} = {gap}{alone}"
                    outcome = judge(gap, rival)
                    if place.ceiling_touches_zero(alpha):  # of a truth that may be all noise nothing follows
                        outcome, text = UNDECIDED, f"{text}; {NOISE}"
                    cells.append(Cell(f"alpha {alpha:g}", text, outcome))
                if cells:
                    sign = ", BIF's sign turned" if turned else ""
                    words = (*place.words()[:-1], place.words()[-1] + sign)
                    part_of = place.reading(sign)
                    found.append(
                        Reading(words, tuple(cells), place.group, place.runs, stand_in(place.description), part_of)
                    )
        return found

    return rule


def _ends(places: Sequence[Situation], only: str) -> dict[str, float]:
    """Of each ground the smallest or largest retrained set, as a share of all training data."""
    found: dict[str, list[float]] = {}
    for place in places:
        found.setdefault(place.ground, []).extend(alpha * place.share for alpha in place.alphas)
    return {ground: (max if only == LARGEST else min)(sizes) for ground, sizes in found.items()}


def _below_zero(places: Sequence[Situation]) -> set[tuple[str, ...]]:
    """The readings in which BIF's LDS, over alphas and attribution sets, is below 0."""
    found: dict[tuple[str, ...], list[float]] = {}
    for place in places:
        if "bif" in dict(place.labels):
            means = [place.values("bif", alpha).mean for alpha in place.alphas if place.cell("bif", alpha)]
            found.setdefault(place.reading(), []).extend(means)
    return {reading for reading, means in found.items() if np.mean(means) < 0}


def grows_as_attribution_falls(evidence: Evidence) -> list[Reading]:
    """For every method: LDS at a smaller attribution set minus that at a larger one, the same alpha and seeds."""
    found = []
    parts = ("bif", "ekfac", "gradsim", "trak")
    places = list(evidence.places(evidence.vision, parts))
    for small in places:
        for large in places:
            same = (small.ground, small.metric, small.normalised, small.labels)
            if small.share >= large.share or same != (large.ground, large.metric, large.normalised, large.labels):
                continue
            cells = []
            for part in parts:
                texts, outcomes = [], []
                for alpha in sorted({*small.alphas} & {*large.alphas}):
                    gap = _of_two_sets(small, large, part, alpha)
                    if gap is not None:
                        text = f"{alpha:g}: {gap}" + " (one seed)" * (gap.seeds == 1)
                        noise = {place.share for place in (small, large) if place.ceiling_touches_zero(alpha)}
                        text += (
                            f" ({NOISE} at {' and '.join(f'{share:g}' for share in sorted(noise))})" if noise else ""
                        )
                        texts.append(text)
                        outcomes.append(UNDECIDED if small.share in noise else ahead(gap))
                if texts:
                    cells.append(Cell(part, "; ".join(texts), _most(outcomes)))
            ground, _, *rest = small.words()
            words = (ground, f"{small.share:g} against {large.share:g}", *rest)
            if cells:
                runs = tuple(sorted({*small.runs, *large.runs}))
                found.append(Reading(words, tuple(cells), small.group, runs, part_of=small.reading()))
    return found


def _of_two_sets(small: Situation, large: Situation, part: str, alpha: float) -> Gap | None:
    """Over the seeds that have both; few of them have the ends of both LDS's own intervals."""
    one, other = ({row["seed"]: row for row in place.cell(part, alpha)} for place in (small, large))
    seeds = sorted(one.keys() & other.keys())
    if not seeds:
        return None
    values = [one[seed][small.metric] - other[seed][small.metric] for seed in seeds]
    if small.metric != "lds" or len(seeds) >= MANY_SEEDS:
        return student_interval(values)
    low = min(one[seed]["ci_low"] - other[seed]["ci_high"] for seed in seeds)
    high = max(one[seed]["ci_high"] - other[seed]["ci_low"] for seed in seeds)
    return Gap(sum(values) / len(values), low, high, len(seeds))


def _most(outcomes: Sequence[str]) -> str:
    """Of one method over alphas: what more than half say, where none says the opposite."""
    for word, opposite in ((HOLDS, FAILS), (FAILS, HOLDS)):
        if 2 * outcomes.count(word) > len(outcomes) and opposite not in outcomes:
            return word
    return UNDECIDED


def varies_over_seeds(evidence: Evidence) -> list[Reading]:
    """The standard deviation of EK-FAC's LDS over seeds, of its mean, with the interval that few seeds leave."""
    found = []
    for place in evidence.places(evidence.vision, ("ekfac",)):
        cells = []
        for alpha in place.alphas:
            values = np.array(list(place.by_seed("ekfac", alpha).values()))
            if len(values) < 2:
                cells.append(Cell(f"alpha {alpha:g}", "one seed", UNDECIDED))
                continue
            mean, deviation = float(values.mean()), float(values.std(ddof=1))
            degrees = len(values) - 1
            quantiles = [2 * special.gammaincinv(degrees / 2, share) for share in (0.975, 0.025)]  # of chi-squared
            ends = [math.sqrt(degrees / quantile) for quantile in quantiles]
            share = deviation / abs(mean) if mean else math.inf
            low, high = share * ends[0], share * ends[1]
            outcome = HOLDS if low > SPREAD else FAILS if high < SPREAD else UNDECIDED
            if place.values("ekfac", alpha).low <= 0:  # of a mean that may be 0, any spread is a large share
                outcome = UNDECIDED
            text = f"{deviation:.3f} of {mean:.3f}: {share:.0%} [{low:.0%}, {high:.0%}]"
            if place.a_seeds_ceiling_touches_zero(alpha):  # noise alone would make LDS another with every seed
                outcome, text = UNDECIDED, f"{text}; {NOISE_OF_A_SEED}"
            cells.append(Cell(f"alpha {alpha:g}", text, outcome))
        found.append(Reading(place.words(), tuple(cells), place.group, place.runs, part_of=place.reading()))
    return found


def agree_within_a_seed(evidence: Evidence) -> list[Reading]:
    """Whether BIF's and EK-FAC's difference changes less over seeds than EK-FAC's LDS itself does."""
    found = []
    for place in evidence.places(evidence.vision, ("bif", "ekfac")):
        cells = []
        for alpha in place.alphas:
            one, other = (place.by_seed(part, alpha) for part in ("bif", "ekfac"))
            seeds = sorted(one.keys() & other.keys())
            if len(seeds) < 3:
                cells.append(Cell(f"alpha {alpha:g}", f"{len(seeds)} seed{'s' * (len(seeds) > 1)}", UNDECIDED))
                continue
            apart = float(np.std([one[seed] - other[seed] for seed in seeds], ddof=1))
            own = float(np.std([other[seed] for seed in seeds], ddof=1))
            outcome = HOLDS if apart <= own / 2 else FAILS if apart > own else UNDECIDED
            cells.append(Cell(f"alpha {alpha:g}", f"{apart:.3f} against {own:.3f}", outcome))
        found.append(Reading(place.words(), tuple(cells), place.group, place.runs, part_of=place.reading()))
    return found


def printed_size(part: str, printed: float) -> Rule:
    """Our LDS beside a number that the paper prints. A stand-in for its weights can neither meet nor miss it."""

    def rule(evidence: Evidence) -> list[Reading]:
        found = []
        for place in evidence.places(evidence.language, (part,)):
            cells = []
            for alpha in place.alphas:
                gap = place.values(part, alpha)
                close = abs(gap.mean - printed) <= SIZE_MARGIN
                away = gap.known and (gap.high < printed - SIZE_MARGIN or gap.low > printed + SIZE_MARGIN)
                outcome = UNDECIDED if stand_in(place.description) else HOLDS if close else FAILS if away else UNDECIDED
                cells.append(Cell(f"alpha {alpha:g}", f"{gap}; the paper {printed:.3f}", outcome))
            found.append(Reading(place.words(), tuple(cells), place.group, place.runs, stand_in(place.description)))
        return found

    return rule


def raw_matches_normalised(evidence: Evidence) -> list[Reading]:
    """Token by token, then averaged, is the covariance of averages: raw BIF. Averaged first, then correlated: the
    normalised one."""
    found = []
    places = list(evidence.places(evidence.language, ("bif",), metrics=("lds",)))
    for raw in (place for place in places if not place.normalised):
        for other in places:
            if not other.normalised or (raw.ground, raw.share, raw.labels) != (other.ground, other.share, other.labels):
                continue
            cells = []
            for alpha in sorted({*raw.alphas} & {*other.alphas}):
                one, two = (place.by_seed("bif", alpha) for place in (raw, other))
                seeds = sorted(one.keys() & two.keys())
                gap = student_interval([one[seed] - two[seed] for seed in seeds])
                cells.append(Cell(f"alpha {alpha:g}", str(gap), matches(gap, other.values("bif", alpha))))
            words = (*raw.words()[:-1], "raw - train-normalised")
            found.append(Reading(words, tuple(cells), raw.group, raw.runs, stand_in(raw.description)))
    return found


def chains_converged(evidence: Evidence) -> list[Reading]:
    """R-hat of the chains at the paper's settings."""
    found = []
    seen = set()
    for place in evidence.places(evidence.vision, ("bif",), metrics=("lds",)):
        lines = evidence.diagnostics(place, "bif")
        key = (place.ground, place.share, place.labels)
        if place.tuned or not lines or key in seen:
            continue
        seen.add(key)
        rhat = [float(line["rhat"]) for line in lines]
        ess = [float(line["ess"]) for line in lines if line.get("ess") is not None]
        outcome = HOLDS if max(rhat) <= RHAT_LIMIT else FAILS if min(rhat) > RHAT_LIMIT else UNDECIDED
        effective = f"; {np.median(ess):.0f} of {lines[0].get('num_draws', '?')} draws count" if ess else ""
        text = f"R-hat {np.median(rhat):.2f} ({min(rhat):.2f} to {max(rhat):.2f}) over {len(rhat)} seeds{effective}"
        cell = Cell("chains", text, outcome)
        found.append(Reading(place.words()[:3], (cell,), place.group, place.runs, part_of=place.reading()))
    return found
