"""Rules about seconds, memory and disk, and about LDS against settings and draws."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.ledger.evidence import GIVEN_SETTINGS, Evidence, num_draws, timed_seconds
from bench.ledger.verdicts import (
    AS_PAPER,
    FAILS,
    HOLDS,
    SCRATCH,
    SCRATCH_TUNED,
    SHOWN,
    TUNED,
    UNDECIDED,
    Cell,
    Gap,
    Reading,
    stand_in,
    within,
)  # fmt: skip
from bench.scaling.costs import Setting
from bench.scaling.estimate import (
    PAPER_FITTED,
    RIVALS,
    Estimate,
    Estimator,
    Several,
    Throughout,
    crossing_in,
    ratio_ends,
)
from bench.scaling.rows import has_peak, method_label, setting_of
from bench.tables import bytes_text, duration, setting_text
from retrain.models.pythia_suite import SUITE

FACTOR = 2.0  # "around five times": within a factor of two of it
LARGEST_MODEL, SMALLEST_MODEL = "2.8b", "14m"  # of the paper's sweep
PAPER_DRAWS = 400  # 4 x 100, of the ResNet experiment
USUAL_DRAWS, MANY_DRAWS = 1_000, 4_000
ENOUGH = 0.9  # of the LDS at the most draws
MIXED_RHAT = 1.2
STABLE, UNSTABLE = 0.2, 0.5  # of the best LDS of a sweep: highest minus lowest
GIB = 2.0**30
# TRAK, of which the paper says little, counts as its own with what traker ships.
GIVEN_TRAK = {"projection": 2048, "ridge": 0.0}

SuiteCells = list[tuple[tuple[str, ...], Cell, str]]  # words of a reading, its cell, its group
ScalingCells = Callable[[Estimator, Setting], SuiteCells]


# ---- ResNet-9 ----


def times_faster(printed: float) -> Callable[[Evidence], list[Reading]]:
    """BIF's seconds over EK-FAC's, timed in one run; and of the runs that gave the LDS."""

    def judge(ratio: float, low: float, high: float) -> str:
        return within(Gap(ratio, low, high), printed / FACTOR, printed * FACTOR)

    def rule(evidence: Evidence) -> list[Reading]:
        found = []
        for path, record in evidence.speeds:
            if evidence.vision not in _task_of(record):
                continue
            ekfac = _first(record["rows"], "ekfac-library", "ekfac")
            for bif in record["rows"]:
                if ekfac is None or bif["method"] != "bif":
                    continue
                (one, least, most), (other, fewest, longest) = timed_seconds(bif), timed_seconds(ekfac)
                ratio, low, high = one / other, least / longest, most / fewest
                text = f"{one:.1f} s / {other:.1f} s = {ratio:.2f} [{low:.2f}, {high:.2f}]"
                group = AS_PAPER if num_draws(bif) == PAPER_DRAWS else SHOWN
                share = record.get("question", {}).get("alpha_attribution", math.nan)
                words = ("timed in one run", f"{share:g}", f"`{bif['label']}`, `{ekfac['label']}`")
                cell = Cell("BIF / EK-FAC", text, judge(ratio, low, high))
                found.append(Reading(words, (cell,), group, (evidence.name(path),)))
        seen = set()
        for place in evidence.places(evidence.vision, ("bif", "ekfac"), metrics=("lds",)):
            if place.normalised or place.tuned or (place.ground, place.share) in seen:
                continue
            seen.add((place.ground, place.share))
            one, other = (
                place.rows[place.rows["label"] == place.label(part)]
                .drop_duplicates("seed")
                .set_index("seed")["seconds"]
                for part in ("bif", "ekfac")
            )
            ratios = (one / other).dropna()
            if not len(ratios) or place.rows["device"].nunique() > 1:
                continue
            low, mean, high = float(ratios.min()), float(ratios.median()), float(ratios.max())
            text = f"{one.median():.1f} s / {other.median():.1f} s = {mean:.2f} [{low:.2f}, {high:.2f}] over seeds"
            words = (f"runs of {place.ground}", f"{place.share:g}", place.words()[2])
            cell = Cell("BIF / EK-FAC", text, judge(mean, low, high))
            found.append(
                Reading(words, (cell,), SHOWN if place.group == SHOWN else AS_PAPER, place.runs, part_of=("runs",))
            )
        return found

    return rule


def _task_of(record: Mapping[str, Any]) -> str:
    task = (record.get("question") or {}).get("task")
    name = task.get("name") if isinstance(task, Mapping) else task
    return str(name or record.get("description") or "")


def _first(rows: Sequence[Mapping[str, Any]], *labels: str) -> Mapping[str, Any] | None:
    return next((row for label in labels for row in rows if row["label"] == label), None)


# ---- the Pythia suite ----


def on_the_suite(cells_of: ScalingCells) -> Callable[[Evidence], list[Reading]]:
    def rule(evidence: Evidence) -> list[Reading]:
        found = []
        for file, device, estimator in evidence.estimators():
            bif = estimator.of("bif")
            setting = setting_of(min(bif, key=lambda row: row["queries"]))
            largest = [max(row["parameters"] for row in estimator.of(method)) for method in RIVALS]
            reached = min(largest) >= SUITE[LARGEST_MODEL].num_parameters
            for words, cell, group in cells_of(estimator, replace(setting, fit_examples=PAPER_FITTED)):
                if not reached:  # what smaller models let expect decides nothing
                    cell = replace(cell, text=f"{cell.text}; no run as large", outcome=UNDECIDED)
                found.append(Reading((device, *words), (cell,), group, (file,)))
        return found

    return rule


def _both(estimator: Estimator, setting: Setting, model: str = LARGEST_MODEL) -> tuple[Estimate, Estimate]:
    bif, ekfac = (estimator.estimate(method, SUITE[model], setting) for method in RIVALS)
    return bif, ekfac


def _ratio(ekfac: Estimate, bif: Estimate) -> Gap:
    low, high = ratio_ends(ekfac, bif)
    return Gap(ekfac.seconds / bif.seconds, low, high)


def orders_of_magnitude(estimator: Estimator, setting: Setting) -> SuiteCells:
    found: SuiteCells = []
    for count in (PAPER_FITTED, 10_000, setting.train):
        bif, ekfac = _both(estimator, replace(setting, fit_examples=count))
        ratio = _ratio(ekfac, bif)
        text = (
            f"EK-FAC {duration(ekfac.seconds)}, BIF {duration(bif.seconds)}: {ratio.mean:,.1f}x "
            f"[{ratio.low:,.1f}, {ratio.high:,.1f}]"
        )
        cell = Cell("EK-FAC / BIF", text, within(ratio, 10**1.5, math.inf))
        found.append(((LARGEST_MODEL, _counted(estimator, count)), cell, AS_PAPER if count == PAPER_FITTED else SHOWN))
    return found


def _counted(estimator: Estimator, count: int, model: str = LARGEST_MODEL) -> str:
    run = any(
        row["model"] == model and row["fit_examples"] == count and str(row["projected"]) != "True"
        for row in estimator.of("ekfac")
    )
    return f"fit + score, fitted on {count:,}" + ("" if run else ", projected")


def ratio_grows(estimator: Estimator, setting: Setting) -> SuiteCells:
    small, large = (_ratio(*_both(estimator, setting, model)[::-1]) for model in (SMALLEST_MODEL, LARGEST_MODEL))
    outcome = HOLDS if large.low > small.high else FAILS if large.high < small.low else UNDECIDED
    text = " and ".join(f"{one.mean:,.0f} [{one.low:,.0f}, {one.high:,.0f}]" for one in (small, large))
    words = (f"{SMALLEST_MODEL} and {LARGEST_MODEL}", _counted(estimator, setting.fit_examples))
    return [(words, Cell("EK-FAC / BIF", text, outcome), AS_PAPER)]


def same_memory(estimator: Estimator, setting: Setting) -> SuiteCells:
    bif, ekfac = _both(estimator, setting)
    ratio = ekfac.peak_memory_bytes / bif.peak_memory_bytes
    apart = max(ratio, 1 / ratio)
    outcome = HOLDS if apart <= 1.5 else FAILS if apart > 2 else UNDECIDED
    text = f"EK-FAC {bytes_text(ekfac.peak_memory_bytes)}, BIF {bytes_text(bif.peak_memory_bytes)}: {ratio:.3f}x"
    known = any(has_peak(row) for row in estimator.of("ekfac"))
    how = _how(estimator, "ekfac") if known else "EK-FAC by arithmetic, which nothing measured bears out yet"
    return [((LARGEST_MODEL, how), Cell("peak memory", text, outcome if known else UNDECIDED), AS_PAPER)]


def _how(estimator: Estimator, method: str) -> str:
    own = [row for row in estimator.of(method) if row["model"] == LARGEST_MODEL]
    if not own:
        return "estimated from smaller models"
    return "projected from fewer blocks" if all(str(row["projected"]) == "True" for row in own) else "measured"


def disk_of_factors(printed_gib: float) -> ScalingCells:
    def cells(estimator: Estimator, setting: Setting) -> SuiteCells:
        _, ekfac = _both(estimator, setting)
        size = ekfac.disk_bytes / GIB
        off = size / printed_gib - 1
        outcome = HOLDS if abs(off) <= 0.1 else FAILS
        cell = Cell("disk", f"{size:.1f} GiB, {off:+.0%} of the paper's {printed_gib:g} GiB", outcome)
        return [((LARGEST_MODEL, _how(estimator, "ekfac")), cell, AS_PAPER)]

    return cells


def fit_dominates(estimator: Estimator, setting: Setting) -> SuiteCells:
    """The share of the fit in EK-FAC's seconds: of its largest model that was measured."""
    found: SuiteCells = []
    for count in sorted({int(row["fit_examples"]) for row in estimator.of("ekfac")}, reverse=True):
        rows = [row for row in estimator.of("ekfac") if row["fit_examples"] == count]
        row = max(rows, key=lambda one: one["parameters"])
        share = row["fit_seconds"] / (row["fit_seconds"] + row["score_seconds"])
        outcome = HOLDS if share >= 0.5 else FAILS
        words = (str(row["model"]), f"fitted on {count:,}")
        found.append(
            (words, Cell("fit / (fit + score)", f"{share:.1%}", outcome), AS_PAPER if count == PAPER_FITTED else SHOWN)
        )
    return found


def amortises(estimator: Estimator, setting: Setting) -> SuiteCells:
    found: SuiteCells = []
    for count in (PAPER_FITTED, setting.train):
        asked = replace(setting, fit_examples=count)
        crossing = crossing_in(estimator, SUITE[LARGEST_MODEL], asked, "queries", RIVALS)
        if isinstance(crossing, Throughout):
            text = f"{method_label(crossing.cheaper)} is cheaper at any number up to a million"
            outcome = FAILS if crossing.sure else UNDECIDED
            cell = Cell("queries", text if crossing.sure else f"{text}, unsure at some", outcome)
        elif isinstance(crossing, Several):
            places = ", ".join(map(_rounded, crossing.values))
            cell = Cell("queries", f"{method_label(crossing.first)} is cheaper at few, turning at {places}", UNDECIDED)
        else:
            right = crossing.cheaper_above == "ekfac"
            name = "EK-FAC" if right else "BIF"
            ends = f"[{_rounded(crossing.low)}, {_rounded(crossing.high)}]"
            text = f"{name} is cheaper above {_rounded(crossing.value)} {ends}"
            # Nothing is said where the intervals overlap up to a million.
            cell = Cell("queries", text, UNDECIDED if crossing.high is None else HOLDS if right else FAILS)
        found.append(((LARGEST_MODEL, f"fitted on {count:,}"), cell, AS_PAPER if count == PAPER_FITTED else SHOWN))
    return found


def _rounded(value: float | None) -> str:
    return "?" if value is None else f"{float(f'{value:.2g}'):,.0f}"


# ---- settings and draws ----


def stable_over_settings(task: str, stable: bool) -> Callable[[Evidence], list[Reading]]:
    """How far LDS ranges over a sweep of BIF's settings, of its best; cells that diverged are left out."""

    def rule(evidence: Evidence) -> list[Reading]:
        found = []
        for path, sweep in evidence.sweeps:
            if sweep["task"] != getattr(evidence, task) or sweep["method"] != "bif":
                continue
            cells = sweep["cells"]
            if stable and "burn_in" in sweep["axes"] and any(cell["burn_in"] for cell in cells):
                cells = [cell for cell in cells if cell["burn_in"]]
            ends = [(cell["lds"], cell.get("ci_high")) for cell in cells if cell.get("lds") is not None]
            reach = max((high - value for value, high in ends if high is not None), default=0.0)
            for name, scores in (("lds", "raw"), ("lds_normalised", "train-normalised")):
                for kept, counts in (("not diverged", lambda _cell: True), ("mixed", _has_mixed)):
                    chosen = [cell for cell in cells if cell.get(name) is not None and counts(cell)]
                    if not chosen:
                        continue
                    words = (sweep["protocol"], _swept_on(sweep), str(sweep["alpha"]), scores, kept)
                    cell = _range_cell([cell[name] for cell in chosen], stable, reach)
                    if fixed := _no_longer_varied(sweep["axes"], cells, chosen):
                        cell = Cell(cell.where, f"{cell.text}, {fixed}", UNDECIDED)
                    group = _group(sweep, "bif", sweep.get("options"), sweep["axes"])
                    runs = (f"{evidence.name(path)} ({sweep['run_id']})",)
                    found.append(Reading(words, (cell,), group, runs, note=stand_in(sweep.get("description") or "")))
        return found

    return rule


def _has_mixed(cell: Mapping[str, Any]) -> bool:
    return not cell.get("mixing") and (cell.get("rhat") or math.inf) < MIXED_RHAT


def _swept_on(sweep: Mapping[str, Any]) -> str:
    """What of the task a sweep has seen, which may be less than a run has."""
    length = (sweep.get("task_config") or {}).get("length")
    words = [f"{sweep['alpha_attribution']:g} of the training set"] if "alpha_attribution" in sweep else []
    words += [f"{length} tokens"] if length else []
    words += [f"{sweep['num_queries']:,} {sweep.get('split', '')} queries"] if sweep.get("num_queries") else []
    return ", ".join(words)


def _no_longer_varied(axes: Collection[str], cells: Sequence[Mapping], chosen: Sequence[Mapping]) -> str:
    """What the chosen of a sweep's cells all have in common, and all of them had not: of that they tell nothing."""
    left = {name: {setting_text(cell[name]) for cell in chosen} for name in axes}
    varied = [name for name in axes if len({setting_text(cell[name]) for cell in cells}) > 1]
    return ", ".join(f"all at {name} {min(left[name])}" for name in varied if len(left[name]) == 1)


def _range_cell(values: Sequence[float], stable: bool, reach: float) -> Cell:
    """`reach`: of the widest interval of a setting's LDS to one side; a range within it may be noise."""
    best, worst = max(values), min(values)
    if len(values) < 3 or best <= 0:
        return Cell("range", f"{len(values)} setting{'s' * (len(values) != 1)}, best {best:.3f}", UNDECIDED)
    share = (best - worst) / best
    outcome = HOLDS if share <= STABLE else FAILS if share > UNSTABLE else UNDECIDED
    text = f"{worst:.3f} to {best:.3f}, {share:.0%} of the best, {len(values)} settings"
    if outcome == FAILS and best - worst <= reach:
        outcome, text = UNDECIDED, f"{text}, each \u00b1 up to {reach:.3f}"
    if not stable:
        outcome = {HOLDS: FAILS, FAILS: HOLDS}.get(outcome, outcome)
    return Cell("range", text, outcome)


def _group(swept: Mapping[str, Any], method: str, options: Mapping[str, Any] | None, varied: Collection[str]) -> str:
    """Whose settings a curve or a sweep over `varied` has, and whose protocol; without settings nobody knows."""
    if not options:
        return SHOWN
    given = GIVEN_TRAK if method == "trak" else GIVEN_SETTINGS[swept["task"], "bif-paper"]
    tuned = any(options.get(name) != value for name, value in given.items() if name not in varied)
    if swept["protocol"] == "scratch":
        return SCRATCH_TUNED if tuned else SCRATCH
    return TUNED if tuned else AS_PAPER


def few_draws_are_enough(evidence: Evidence) -> list[Reading]:
    found = []
    for path, budget in evidence.budgets:
        for curve in budget["curves"]:
            if budget["task"] != evidence.vision or curve["method"] != "bif" or curve["axis"] != "draws":
                continue
            points = sorted((p for p in curve["points"] if p["lds"] is not None), key=lambda point: point["value"])
            few = [point for point in points if point["value"] <= USUAL_DRAWS]
            if not few:
                continue
            last, at = points[-1], few[-1]
            interval = f" [{at['ci_low']:.3f}, {at['ci_high']:.3f}]" if at.get("ci_low") is not None else ""
            text = f"{at['lds']:.3f}{interval} at {at['value']:,.0f} draws, {last['lds']:.3f} at {last['value']:,.0f}"
            if last["value"] < MANY_DRAWS or last["lds"] <= 0:
                outcome = UNDECIDED
            else:
                low, high = (at[name] if at.get(name) is not None else math.nan for name in ("ci_low", "ci_high"))
                enough = ENOUGH * last["lds"]
                outcome = HOLDS if low >= enough else FAILS if high < enough else UNDECIDED
            words = (budget["protocol"], str(budget["alpha"]), "train-normalised" if curve.get("normalised") else "raw")
            runs = (f"{evidence.name(path)} ({budget['run_id']})",)
            group = _group(budget, "bif", curve.get("options"), ("draws",))
            found.append(Reading(words, (Cell("LDS", text, outcome),), group, runs))
    return found


def more_checkpoints_help(evidence: Evidence) -> list[Reading]:
    found = []
    for path, budget in evidence.budgets:
        for curve in budget["curves"]:
            if budget["task"] != evidence.vision or curve["method"] != "trak" or curve["axis"] != "checkpoints":
                continue
            points = sorted((p for p in curve["points"] if p["lds"] is not None), key=lambda point: point["value"])
            if len(points) < 2:
                continue
            one, most = points[0], points[-1]
            text = f"{one['lds']:.3f} with {one['value']:.0f}, {most['lds']:.3f} with {most['value']:.0f}"
            low, high = one.get("ci_low", math.nan), one.get("ci_high", math.nan)
            better = most.get("ci_low", math.nan) > high
            outcome = HOLDS if better else FAILS if most["lds"] < low else UNDECIDED
            words = (budget["protocol"], str(budget["alpha"]), "train-normalised" if curve.get("normalised") else "raw")
            runs = (f"{evidence.name(path)} ({budget['run_id']})",)
            group = _group(budget, "trak", curve.get("options"), ("checkpoints",))
            found.append(Reading(words, (Cell("LDS", text, outcome),), group, runs))
    return found
