"""The ledger as a page of Markdown: a table of verdicts, then each claim with its rule, readings and records."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.identity import USUAL_GROUND
from bench.ledger.claims import PAPER_CLAIMS, PaperClaim
from bench.ledger.evidence import GIVEN_SETTINGS, PAPER_LABELS, TUNED_LABELS, Evidence, departures
from bench.ledger.verdicts import (
    AS_PAPER,
    FAILS,
    GROUPS,
    HOLDS,
    MISSING,
    SHOWN,
    UNDECIDED,
    Judgement,
    Reading,
    over_readings,
)
from retrain.tasks.cifar10 import READINGS

OPEN_QUESTIONS = (
    (
        "LDS across subsets, query by query; or across queries, subset by subset, as eq:lds-def prints it",
        "both, in every run",
    ),
    ("raw BIF, or the normalised one", "both, in every run"),
    ("BIF's sign", "turned as well wherever BIF's LDS comes out below 0"),
)
SIGNS = {HOLDS: "✓", FAILS: "✗", UNDECIDED: "?"}
INTRODUCTION = (
    "Kreer et al., *Bayesian Influence Functions for Hessian-Free Data Attribution*. Written by "
    "`python -m bench.ledger` from the records in this folder; nothing is typed but the paper's own numbers. Labels in "
    "`code` are rows of the records: `bif-paper` and `ekfac-library` have the paper's settings, which is checked; "
    "`ekfac`, `trak`, `bif-equal` (draws for the seconds of `ekfac`, which is kronfluence's{seconds}), `bif` (where "
    "that is not there) and `bif-long` (many draws) have those of this suite. All stand in the table of settings."
)
RULE_OF_VERDICTS = (
    "**Rule of verdicts.** A reading is one way to understand what the paper leaves open. It is refuted where one of "
    "its cells is clearly against the claim (✗), and holds where at least half of its cells hold (✓) and none is "
    "against. "
    "Readings are alternatives: a claim *holds* (*does not hold*) where every reading that decides says so, is "
    "*undecided* where they disagree or none decides, and *not measured* without a record. Readings count as:"
)


def verdicts_of(readings: Sequence[Reading]) -> dict[str, Judgement]:
    return {group: over_readings([one for one in readings if one.group == group]) for group in GROUPS}


def ledger_page(evidence: Evidence, folder: Path, claims: Sequence[PaperClaim] = PAPER_CLAIMS) -> str:
    """`folder` is where the page will lie, for its links."""
    found = [(claim, claim.rule(evidence)) for claim in claims]
    parts = [
        "# Does the paper hold?",
        INTRODUCTION.format(seconds=_equal_seconds(evidence)),
        RULE_OF_VERDICTS,
        "\n".join(f"- `{group}`: {words}" for group, words in GROUPS.items()),
        _summary(found),
        "## What the paper leaves open",
        _open_questions(evidence),
        "## Settings",
        _settings(evidence),
        *(_section(number, claim, readings, evidence, folder) for number, (claim, readings) in enumerate(found, 1)),
    ]
    if said := [*evidence.results.problems, *evidence.results.left_out, *evidence.left_out]:
        lines = (f"- {line.replace(f'{evidence.folder}{os.sep}', '')}" for line in dict.fromkeys(said))
        parts += ["## Left out, or with a reservation", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _equal_seconds(evidence: Evidence) -> str:
    """What `bif-equal` took and what `ekfac` did, where one run timed both."""
    rows = evidence.results.rows
    rows = rows[(rows["task"] == evidence.vision) & rows["label"].isin(("bif-equal", "ekfac"))]
    both = rows.groupby("run_id")["label"].transform("nunique") == 2
    if not both.any():
        return ""
    medians = rows[both].groupby(["alpha_attribution", "label"])["seconds"].median().unstack()
    each = (f"{one['bif-equal']:.1f} s and {one['ekfac']:.1f} s at {share:g}" for share, one in medians.iterrows())
    return f"; medians {', '.join(each)} of the training set"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _anchor(number: int, claim: PaperClaim) -> str:
    """As GitHub makes it of a heading."""
    kept = "".join(letter for letter in f"{number}. {claim.name}".lower() if letter.isalnum() or letter in " -")
    return kept.replace(" ", "-")


def _summary(found: Sequence[tuple[PaperClaim, list[Reading]]]) -> str:
    others = [group for group in GROUPS if group != AS_PAPER]
    rows = []
    for number, (claim, readings) in enumerate(found, 1):
        verdicts = verdicts_of(readings)
        cells = ["" if verdicts[group].outcome == MISSING else verdicts[group].outcome for group in others]
        name = f"[{claim.name}](#{_anchor(number, claim)})"
        elsewhere = " with the paper's settings and protocol" * (verdicts[AS_PAPER].outcome == MISSING and any(cells))
        why = "; on ".join([verdicts[AS_PAPER].reason + elsewhere, *_notes(readings)])
        rows.append([f"{number}", name, f"**{verdicts[AS_PAPER].outcome}**", *cells, why])
    return _table(["", "claim", "verdict", *others, "why"], rows)


def _notes(readings: Sequence[Reading]) -> list[str]:
    return sorted({reading.note for reading in readings if reading.note})


def _open_questions(evidence: Evidence) -> str:
    configs = [
        record["config"]
        for record in evidence.results.records.values()
        if record["config"]["task"]["name"] == evidence.vision
    ]
    schemes, starts = (
        sorted({str(config.get(name) or USUAL_GROUND[name]) for config in configs})
        for name in ("scheme", "initialisation")
    )
    rows = evidence.results.rows
    protocols = sorted(rows[rows["task"] == evidence.vision]["protocol"].unique())
    lines = [
        *OPEN_QUESTIONS,
        ("subsets of a fixed size, or independent draws of every example", _measured(schemes, "--scheme bernoulli")),
        ("how models are retrained", _measured(protocols, "--protocol paper, --protocol scratch")),
        ("retrained models start from one initialisation, or each from its own", _measured(starts, "--initialisation")),
        (
            "the learning rate of protocol `paper`'s one epoch constant at 10, or falling; where the epoch is one step "
            "(alpha 0.1 of 0.1), two records of the same",
            _measured(_readings_of(configs, "epoch_rate"), "--set cifar10.epoch_rate=falling"),
        ),
        (
            "what is kept of the warm-up: weights and all, or a primed optimizer alone",
            _measured(_readings_of(configs, "warmup_keeps"), "--set cifar10.warmup_keeps=optimizer"),
        ),
    ]
    return _table(["open", "read here as"], lines)


def _readings_of(configs: Sequence[Mapping[str, Any]], option: str) -> list[str]:
    """The values that records of protocol `paper` have; one that does not say has the usual one."""
    tasks = [config["task"] for config in configs if config["task"].get("protocol") == "paper"]
    return sorted({str(task.get(option, READINGS[option][0])) for task in tasks})


def _settings(evidence: Evidence) -> str:
    """Of every label that a claim may rest on, with where its record says that they come from."""
    rows = evidence.results.rows
    labels = {label for own in (PAPER_LABELS, *TUNED_LABELS) for names in own.values() for label in names}
    rows = rows[rows["task"].isin([evidence.vision, evidence.language]) & rows["label"].isin(labels)]
    lines = []
    for (ground, label, _), cell in rows.groupby(["ground", "label", "options"], sort=True):
        first = cell.sort_values(["normalised", "run_id"]).iloc[0]
        kinds = sorted(cell["normalised"].unique())
        scores = " and ".join("train-normalised" if normalised else "raw" for normalised in kinds)
        wrong = "; ".join(departures(str(first["task"]), str(label), str(first["options"]))) or "nothing"
        if (str(first["task"]), str(label)) not in GIVEN_SETTINGS:
            wrong = "not compared"
        origin = evidence.origin(str(first["run_id"]), str(label), bool(kinds[0]))
        lines.append([str(ground), f"`{label}`", scores, str(first["settings"]) or "defaults", origin, wrong])
    if not lines:
        return "No record of a label that a claim rests on."
    return _table(["ground truth", "label", "scores", "settings", "from", "not as in the paper"], lines)


def _measured(values: Sequence[str], option: str) -> str:
    return f"{', '.join(f'`{value}`' for value in values) or 'no record'} (`{option}`)"


def _section(number: int, claim: PaperClaim, readings: Sequence[Reading], evidence: Evidence, folder: Path) -> str:
    verdicts = verdicts_of(readings)
    verdict = verdicts[AS_PAPER]
    parts = [
        f"## {number}. {claim.name}",
        f"{claim.words} ({claim.place})",
        f"**{verdict.outcome.capitalize()}**: {verdict.reason}. Rule: {claim.rule_words}",
    ]
    if notes := _notes(readings):
        parts.append("Measured on " + "; ".join(notes) + ".")
    if verdict.outcome == MISSING:
        where = [group for group in GROUPS if group != AS_PAPER and verdicts[group].outcome != MISSING]
        only = f"Measured only as {' and '.join(f'`{group}`' for group in where)}. " if where else ""
        parts.append(f"{only}To measure it: `{claim.command}`, then `python -m bench.ledger`.")
    if readings:
        parts.append(_readings(claim, readings, evidence, folder))
    return "\n\n".join(parts)


def _readings(claim: PaperClaim, readings: Sequence[Reading], evidence: Evidence, folder: Path) -> str:
    order = [*GROUPS, SHOWN]
    readings = sorted(readings, key=lambda one: order.index(one.group))
    places = list(dict.fromkeys(cell.where for reading in readings for cell in reading.cells))
    if all(re.fullmatch(r"alpha [\d.]+", place) for place in places):
        places.sort(key=lambda place: float(place.split()[1]))
    rows = []
    for reading in readings:
        cells = {cell.where: f"{cell.text} {SIGNS[cell.outcome]}" for cell in reading.cells}
        records = ", ".join(_link(run, evidence, folder) for run in reading.runs)
        numbers = [cells.get(place, "-") for place in places]
        rows.append([reading.group, *reading.words, *numbers, f"**{reading.outcome}**", records])
    return _table(["counts as", *claim.columns, *places, "outcome", "record"], rows)


def _link(run: str, evidence: Evidence, folder: Path) -> str:
    """Of a run id, or of a file's name with its run id in brackets."""
    record = evidence.results.records.get(run)
    path = evidence.folder / (record["path"] if record else run.partition(" (")[0])
    return f"[`{run}`]({Path(os.path.relpath(path, folder)).as_posix()})"
