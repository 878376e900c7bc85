"""Commands of bench.scaling that run nothing: estimates, checks, the verdict, and one table from several sweeps."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from bench.records import code_commit, code_fingerprint, try_write, without_nan
from bench.scaling.asked import query_counts
from bench.scaling.costs import Setting
from bench.scaling.crossover import Crossover
from bench.scaling.estimate import (
    PAPER_FITTED,
    RATES,
    RIVALS,
    as_plain,
    by_device,
    cheapest,
    crossovers,
    describe_question,
    estimates,
    read_rows,
    show_crossovers,
    show_estimates,
    slopes,
    too_large,
)
from bench.scaling.fits import Estimator
from bench.scaling.held_out import against, each_from_the_others, show_held_out, show_own_checks
from bench.scaling.merge import merged_rows, read_records
from bench.scaling.row_values import configuration_of, named_configuration, setting_of
from bench.scaling.show import show_rows, write_csv, write_table
from bench.scaling.verdict import verdict_text, write_verdict
from retrain.command import check_out
from retrain.errors import UsageError
from retrain.models.pythia_suite import SUITE

MIDDLE_FITTED = 10_000  # between a training set's size and the paper's, where an estimate is asked for neither


def rates_of(arguments: argparse.Namespace) -> dict[str, Estimator]:
    source = arguments.source or RATES
    found = by_device(read_rows(source))
    if not found:
        raise UsageError(f"{source} has no row that was measured; run python -m bench.scaling first")
    return found


def estimate_command(arguments: argparse.Namespace) -> int:
    estimators = rates_of(arguments)
    source = arguments.source or "the package's rates"
    if arguments.against:
        compared = against(estimators, by_device(read_rows(arguments.against)))
        if not compared:
            raise UsageError(f"{arguments.against} has no row of a device and method that {source} has too")
        print(
            json.dumps(without_nan(compared), indent=1) if arguments.json else show_held_out(compared, arguments.wide)
        )
        if known := sum(row["known"] for row in compared):
            print(f"{known} of {len(compared)} rows are among those the estimate rests on: no check", file=sys.stderr)
        return 0
    if not arguments.model:
        raise UsageError(f"--estimate needs --model: one of {', '.join(SUITE)}, or a model folder")
    configuration = named_configuration(arguments.model)
    counts, _ = query_counts(arguments.queries)
    if configuration.positions < arguments.tokens:
        raise UsageError(f"--tokens {arguments.tokens}: {arguments.model} takes at most {configuration.positions}")
    fit_sets = sorted(set(arguments.fit_examples or (arguments.train, MIDDLE_FITTED, PAPER_FITTED)))
    settings = [
        Setting(train=arguments.train, queries=count, tokens=arguments.tokens, draws=arguments.draws,
                fit_examples=fit_sets[0])
        for count in counts
    ]  # fmt: skip
    answers = [
        (device, setting, estimates(estimator, configuration, setting, fit_sets, arguments.methods))
        for device, estimator in estimators.items()
        for setting in settings
    ]
    if arguments.json:
        plain = [
            one | {"queries": setting.queries} for device, setting, found in answers for one in as_plain(found, device)
        ]
        print(json.dumps(without_nan(plain), indent=1))
        return 0
    for number, (device, setting, found) in enumerate(answers):
        print("\n" * bool(number) + f"{describe_question(configuration, setting)}")
        print(f"{device}, predicted from {source}\n\n{show_estimates(found)}")
        lines = [line for line in [cheapest(found, device)] if line]
        fit_here = {one.method for one in found} - {one.method for one in too_large(found, device)}
        if set(RIVALS) <= fit_here:
            lines += crossing_lines(estimators[device], configuration, setting, fit_sets)
        if lines:
            print("\n" + "\n".join(lines))
    return 0


def crossing_lines(estimator: Estimator, configuration: Any, setting: Setting, fit_sets: Sequence[int]) -> list[str]:
    """Where BIF and EK-FAC cost the same: in fitting sequences once, in queries and model size for each fitting set."""
    if not set(RIVALS) <= set(estimator.methods()):
        return []
    lines: list[str] = []
    for fit in fit_sets:
        asked = replace(setting, fit_examples=fit)
        found = crossovers(estimator, configuration, asked)
        if fit != fit_sets[0]:
            found = [pair for pair in found if pair[0] != "fit_examples"]
        lines += show_crossovers(found, asked, configuration.name)
    return lines


def check_command(arguments: argparse.Namespace) -> int:
    """0 where every model is inside the interval that the others give it, else 1."""
    estimators = rates_of(arguments)
    checked = {device: each_from_the_others(estimator) for device, estimator in estimators.items()}
    everything = [{"device": device, **one} for device, found in checked.items() for one in found]
    if not everything:
        raise UsageError("there are too few measured models to predict one from the others; expected at least 4")
    if arguments.json:
        print(json.dumps(without_nan(everything), indent=1))
    else:
        for device, found in checked.items():
            print(f"{device}, each model from the others:\n{show_held_out(found, arguments.wide)}")
            if text := show_own_checks(estimators[device].rows):
                print(f"\n{text}")
    return 0 if all(one["inside"] for one in everything) else 1


def verdict_command(arguments: argparse.Namespace) -> int:
    texts = []
    for device, estimator in rates_of(arguments).items():
        if not set(RIVALS) <= set(estimator.methods()):
            raise UsageError(f"there is no measured row of both {' and '.join(RIVALS)} on {device}")
        texts.append(verdict_text(device, estimator))
    if arguments.verdict:
        write_verdict(Path(arguments.verdict), "\n\n".join(texts))
    else:
        print("\n\n".join(texts))
    return 0


OF_EACH = ("run_id", "commit", "code", "command", "finished", "seconds", "merged")  # what a merge keeps of each record


def merge_command(arguments: argparse.Namespace, command: str) -> int:
    for path in arguments.merge:
        if not Path(path).is_file():
            raise UsageError(f"--merge {path}: there is no such file; expected a scaling.json of an earlier sweep")
    records = read_records(arguments.merge, arguments.fit_examples or (), arguments.methods or ())
    check_out(arguments.out)
    if arguments.rates and not Path(arguments.rates).parent.is_dir():
        raise UsageError(f"--rates {arguments.rates}: there is no folder {Path(arguments.rates).parent}")
    rows, points = merged_rows(records)
    of_one_sweep = ("rows", "points", "setting", "options", "merged", "rows_by", "slopes", "crossovers")
    record = {
        **{name: value for name, value in records[0].items() if name not in of_one_sweep},
        "command": command,
        "rows_by": {"commit": code_commit(), "code": code_fingerprint()},  # the points are by the code of `merged`
        "merged": [{name: one.get(name) for name in OF_EACH} for one in records],
        **laws_of(rows),
        "rows": rows,
        "points": points,
    }
    out = Path(arguments.out)

    unwritten = try_write(lambda: write_table(out, record, rows), out)
    if arguments.rates and not unwritten:
        usable = [row for row in rows if not row["error"]]
        unwritten = try_write(lambda: write_csv(Path(arguments.rates), usable), arguments.rates)
    show_results(rows, arguments)
    if unwritten:
        print(f"python -m bench.scaling: {unwritten}", file=sys.stderr)
        return 1
    if not arguments.json:
        print(f"\ntable: {out / 'scaling.csv'}")
    return 0


def laws_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Slopes in log-log, and where BIF and EK-FAC cost the same for each model that has both."""
    estimators = by_device(rows)
    found = {
        device: list(_crossings(json.dumps([row for row in one.rows if row["method"] in RIVALS])))
        for device, one in estimators.items()
    }
    return {"slopes": {device: slopes(one) for device, one in estimators.items()}, "crossovers": found}


@lru_cache(maxsize=8)  # a sweep writes its table after every point, and most are of other methods
def _crossings(rows: str) -> tuple[dict[str, Any], ...]:
    """Of one device's rows of the two, as JSON."""
    estimator = Estimator(json.loads(rows))
    both = {row["model"] for row in estimator.of(RIVALS[0])} & {row["model"] for row in estimator.of(RIVALS[1])}
    firsts = {row["model"]: row for row in reversed(estimator.of(RIVALS[0])) if row["model"] in both}
    return tuple(
        asdict(crossing)
        for row in firsts.values()
        for _, crossing in crossovers(estimator, configuration_of(row), setting_of(row))
        if isinstance(crossing, Crossover) and crossing.axis != "parameters"
    )


def show_results(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps(without_nan(rows), indent=1))
        return
    print(show_rows(rows, arguments.wide))
    for device, estimator in by_device(rows).items():
        lines = []
        for row in estimator.of(RIVALS[0]):
            configuration = configuration_of(row)
            partners = [one for one in estimator.of(RIVALS[1]) if one["model"] == row["model"]]
            if configuration is None or not partners:
                continue
            setting = replace(setting_of(row), fit_examples=int(partners[0]["fit_examples"]))
            lines += crossing_lines(estimator, configuration, setting, [setting.fit_examples])[:1]
        if lines:
            print("\n".join([f"\n{device}:", *dict.fromkeys(lines)]))
