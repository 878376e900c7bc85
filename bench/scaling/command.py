"""What does attribution cost as models grow? Seconds, memory and disk of each method across the Pythia suite.

    python -m bench.scaling                                           # the paper's setting; on a CPU a small one
    python -m bench.scaling --models 14m 70m 410m --methods bif ekfac --fit-examples 400 2000 --out results/scaling
    python -m bench.scaling --estimate --model 2.8b --train 400 --queries 18 --draws 2000    # before anything is run
    python -m bench.scaling --check                                   # estimates against what they did not see

The paper's scaling comparison: 400 Pile sequences (`--text`), 18 prompt-completion queries, 150 tokens, bfloat16; BIF
with 4 chains x 500 draws, EK-FAC by kronfluence with its extreme-memory-reduction arguments, fitted on 1,000,000
sequences. The fitting set decides which of them is cheaper, so it is an axis like any other (`--fit-examples`), and
every row, table, estimate and figure says it. Every point is measured in a process of its own (bench/scaling/point.py
says what is counted). A point whose whole run does not fit its budget is measured at smaller sizes and projected; one
that fails is a row with its reason. Finished points are kept, and finished parts of EK-FAC's: interrupt at any time,
and the same command goes on. Where the hub cannot be reached, models have random weights: cost does not depend on the
values, and every row says which it had.
"""

import argparse
import json
import logging
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.record import why_unwritten, without_nan
from bench.scaling.campaign import NEEDS, PARTS, find_part, requests_of
from bench.scaling.costs import Setting
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
    method_label,
    read_rows,
    show_crossovers,
    show_estimates,
    slopes,
)
from bench.scaling.fits import Estimator, configuration_of
from bench.scaling.held_out import against, each_from_the_others, setting_of, show_held_out, show_own_checks
from bench.scaling.merge import merged_rows, read_records
from bench.scaling.methods import COMPARED
from bench.scaling.plan import show_points
from bench.scaling.problem import load_queries
from bench.scaling.show import show_rows, write_csv, write_table
from bench.scaling.specifications import SweepRequest, specifications
from bench.scaling.sweep import Sweep
from bench.scaling.verdict import verdict_text, write_verdict
from bench.tables import duration
from retrain.command import Parser, at_least, check_device, check_out, guarded
from retrain.errors import UsageError
from retrain.models.pythia_suite import SUITE, suite_configuration
from retrain.store import Store, default_cache

PAPER_SETTING: dict[str, Any] = {
    "models": list(SUITE),
    "methods": list(COMPARED),
    "train": 400,
    "tokens": 150,
    "fit_examples": [400, 2_000, 10_000, PAPER_FITTED],
    "budget_seconds": 600.0,
}
# On a CPU the paper's setting would take days, and TRAK's projections of millions of numbers minutes: fewer, shorter
# sequences of the smallest models, without TRAK.
CPU_SETTING: dict[str, Any] = {
    "models": ["14m", "31m"],
    "methods": list(COMPARED[:3]),
    "train": 8,
    "tokens": 32,
    "fit_examples": [8, 16],
    "budget_seconds": 20.0,
}
MIDDLE_FITTED = 10_000  # between a training set's size and the paper's, where an estimate is asked for neither


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.scaling", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--models", nargs="+", help=f"of {' '.join(SUITE)}, or model folders (default: all; on a CPU 14m 31m)")
    add("--methods", nargs="+", help=f"of baselines/, bif_tokens, or module:Class (default: {' '.join(COMPARED)})")
    add("--train", type=at_least(2), help="training sequences (default: 400; on a CPU 8)")
    add(
        "--queries",
        nargs="+",
        default=["18"],
        help="how many (our 18, repeated), or a JSON file of them",
    )
    add("--tokens", type=at_least(2), help="length of every sequence (default: 150; on a CPU 32)")
    add("--draws", type=at_least(2), default=2000, help="of BIF, all chains together (default: 2000)")
    add("--timed-draws", type=at_least(2), default=100, help="of BIF, where not all fit the budget (default: 100)")
    add("--chains", type=at_least(1), default=4, help="of BIF (default: 4)")
    add(
        "--fit-examples", nargs="+", type=at_least(2), metavar="N",
        help="sequences EK-FAC is fitted on (default: 400 2000 10000 1000000; the paper's is the last)",
    )  # fmt: skip
    add("--layers", nargs="+", type=at_least(1), metavar="N", help="depths EK-FAC is measured at (default: as fits)")
    add("--budget-seconds", type=float, help="of one point; beyond it, projected (default: 600; on a CPU 20)")
    add("--total-seconds", type=float, help="of the whole sweep; larger models get more of it (default: no limit)")
    add("--random-weights", action="store_true", help="never load weights; the same architecture, initialised")
    add("--text", metavar="FILE", help="documents as .jsonl[.xz]; without it, training sequences are random tokens")
    add("--tokenizer", metavar="NAME", help="folder or name; without it, the model's own, or bytes")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 ... (default: auto)")
    add("--seed", type=at_least(0), default=1, help="of weights, tokens and methods (default: 1)")
    add("--set", action="append", default=[], metavar="METHOD.OPTION=VALUE", help="option of a method")
    add("--cache", default=default_cache(), help="where finished points are kept (default: %(default)s)")
    add("--out", default="runs/scaling", help="where scaling.csv and scaling.json go (default: %(default)s)")
    add("--force", action="store_true", help="measure again what is already kept")
    add("--dry-run", action="store_true", help="measure nothing: every point, and about how long it would take")
    add("--json", action="store_true", help="print rows (or estimates) as a JSON list instead of tables")
    add("--wide", action="store_true", help="every column of the table, and where projections come from")
    add(
        "--campaign",
        nargs="?",
        const="",
        metavar="PART",
        help="measure a part of results/scaling; alone: the plan",
    )
    add("--merge", nargs="+", metavar="JSON", help="run nothing: one table from these sweeps' scaling.json")
    add("--rates", metavar="FILE", help="with --merge: also write the rows here, as estimates read them")
    add("--estimate", action="store_true", help="run nothing: predict the cost of --model from measured rows")
    add("--check", action="store_true", help="run nothing: every measured model predicted from the others")
    add("--verdict", nargs="?", const="", metavar="FILE", help="run nothing: who is cheaper, as Markdown; into a page")
    add("--model", help="with --estimate: a size of the suite, or a model folder")
    add("--against", metavar="FILE", help="with --estimate: hold predictions against this other sweep's scaling.csv")
    add("--from", dest="source", metavar="FILE", help="rows that estimates rest on (default: the package's)")
    return parser


# ---- what was asked ----


def fill_defaults(arguments: argparse.Namespace) -> None:
    """What was not given, by device; says so where it is not the paper's setting."""
    from retrain.train import choose_device

    cpu = not arguments.estimate and arguments.campaign is None and choose_device(arguments.device).type == "cpu"
    changed = []
    for name, value in (CPU_SETTING if cpu else PAPER_SETTING).items():
        if getattr(arguments, name) is None and not (arguments.estimate and name in ("methods", "fit_examples")):
            setattr(arguments, name, value)
            if cpu and name in ("train", "tokens"):
                changed.append(f"--{name} {value} (the paper: {PAPER_SETTING[name]})")
    if changed:
        print(f"on a CPU, a smaller setting: {', '.join(changed)}", file=sys.stderr)
    for name in ("budget_seconds", "total_seconds"):
        if getattr(arguments, name) is not None and getattr(arguments, name) <= 0:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; expected seconds above 0")


def query_counts(words: Sequence[str]) -> tuple[tuple[int, ...], str | None]:
    """Numbers of queries, and the file they are from; a file alone is all of its queries."""
    files = [word for word in words if not word.isdigit()]
    counts = tuple(int(word) for word in words if word.isdigit())
    if len(files) > 1:
        raise UsageError(f"--queries {' '.join(files)}: expected numbers, and one JSON file at most")
    path = files[0] if files else None
    if any(count < 1 for count in counts):
        raise UsageError(f"--queries {min(counts)} is too few; expected at least 1")
    return counts or (len(load_queries(path)),), path


def request_of(arguments: argparse.Namespace) -> SweepRequest:
    counts, query_file = query_counts(arguments.queries)
    return SweepRequest(
        models=tuple(arguments.models), methods=tuple(arguments.methods), train=arguments.train, queries=counts,
        query_file=query_file, tokens=arguments.tokens, draws=arguments.draws, timed_draws=arguments.timed_draws,
        chains=min(arguments.chains, arguments.draws), fit_examples=tuple(arguments.fit_examples),
        layers=tuple(arguments.layers or ()), random_weights=arguments.random_weights, text=arguments.text,
        tokenizer=arguments.tokenizer, device=arguments.device, seed=arguments.seed, settings=tuple(arguments.set),
    )  # fmt: skip


def rates_of(arguments: argparse.Namespace) -> dict[str, Estimator]:
    source = arguments.source or RATES
    found = by_device(read_rows(source))
    if not found:
        raise UsageError(f"{source} has no row that was measured; run python -m bench.scaling first")
    return found


# ---- commands that run nothing ----


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
        return 0
    if not arguments.model:
        raise UsageError(f"--estimate needs --model: one of {', '.join(SUITE)}, or a model folder")
    configuration = suite_configuration(arguments.model)
    counts, _ = query_counts(arguments.queries)
    fit_sets = arguments.fit_examples or sorted({arguments.train, MIDDLE_FITTED, PAPER_FITTED})
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
    for device, setting, found in answers:
        print(f"{describe_question(configuration, setting)}\n{device}, predicted from {source}\n")
        print(show_estimates(found))
        print(f"\n{cheapest(found)}")
        for line in crossing_lines(estimators[device], configuration, setting, fit_sets):
            print(line)
    return 0


def crossing_lines(estimator: Estimator, configuration: Any, setting: Setting, fit_sets: Sequence[int]) -> list[str]:
    """Where BIF and EK-FAC cost the same: in fitting sequences once, in queries and model size for each fitting set."""
    if not set(RIVALS) <= set(estimator.methods()):
        return []
    lines: list[str] = []
    for fit in fit_sets:
        asked = replace(setting, fit_examples=fit)
        here = {method: estimator.estimate(method, configuration, asked).seconds for method in RIVALS}
        cheaper = method_label(min(RIVALS, key=lambda method: here[method]))
        found = crossovers(estimator, configuration, asked)
        if fit != fit_sets[0]:
            found = [pair for pair in found if pair[0] != "fit_examples"]
        lines += show_crossovers(found, asked, cheaper, configuration.name)
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


def merge_command(arguments: argparse.Namespace, command: str) -> int:
    for path in arguments.merge:
        if not Path(path).is_file():
            raise UsageError(f"--merge {path}: there is no such file; expected a scaling.json of an earlier sweep")
    records = read_records(arguments.merge, arguments.fit_examples or ())
    check_out(arguments.out)
    rows, points = merged_rows(records)
    of_one_sweep = ("rows", "points", "setting", "options", "merged", "slopes", "crossovers")
    record = {
        **{name: value for name, value in records[0].items() if name not in of_one_sweep},
        "command": command,
        "merged": [
            {name: one.get(name) for name in ("run_id", "command", "finished", "seconds", "merged")} for one in records
        ],
        **laws_of(rows),
        "rows": rows,
        "points": points,
    }
    out = Path(arguments.out)

    def write() -> None:
        write_table(out, record, rows)
        if arguments.rates:
            write_csv(Path(arguments.rates), [row for row in rows if not row["error"]])

    unwritten = why_unwritten(write, out)
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
    found: dict[str, list[Any]] = {}
    for device, estimator in estimators.items():
        both = {row["model"] for row in estimator.of(RIVALS[0])} & {row["model"] for row in estimator.of(RIVALS[1])}
        firsts = {row["model"]: row for row in reversed(estimator.of(RIVALS[0])) if row["model"] in both}
        found[device] = [
            asdict(crossing)
            for row in firsts.values()
            for _, crossing in crossovers(estimator, configuration_of(row), setting_of(row))
            if crossing is not None and crossing.axis != "parameters"
        ]
    return {"slopes": {device: slopes(one) for device, one in estimators.items()}, "crossovers": found}


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


# ---- commands that measure ----


def list_campaign(base: SweepRequest) -> int:
    """Every part, with the seconds that the package's rates predict for a H200."""
    ((device, estimator),) = list(by_device(read_rows(RATES)).items())[:1]
    totals = dict.fromkeys(NEEDS, 0.0)
    for part in PARTS:
        specs = [spec for request in requests_of(part, base) for spec in specifications(request)]
        text, seconds = show_points(specs, estimator, part.budget_seconds)
        totals[part.needed_for] += seconds
        print(f"{part.name} ({part.needed_for}), about {duration(seconds)}: {part.decides}\n{text}\n")
    sums = ", ".join(f"{name} {duration(seconds)}" for name, seconds in totals.items())
    print(f"by the rates of {device}: {sums}")
    return 0


def sweep_command(arguments: argparse.Namespace, command: str) -> int:
    base, budget = request_of(arguments), arguments.budget_seconds
    requests = [base]
    if arguments.campaign is not None:
        if not arguments.campaign:
            return list_campaign(base)
        part = find_part(arguments.campaign)
        requests, budget = requests_of(part, base), part.budget_seconds
    if arguments.dry_run:
        ((device, estimator),) = list(rates_of(arguments).items())[:1]
        specs = [spec for request in requests for spec in specifications(request)]
        text, seconds = show_points(specs, estimator, budget)
        print(f"{text}\nabout {duration(seconds)} by the rates of {device}")
        return 0
    check_device(arguments.device)
    check_out(arguments.out)
    sweep = Sweep(
        requests, Store(arguments.cache), budget_seconds=budget, total_seconds=arguments.total_seconds,
        force=arguments.force,
    )  # fmt: skip
    out, unwritten = Path(arguments.out), [""]

    def write() -> None:
        record = sweep.record(command) | laws_of(sweep.rows)
        unwritten[0] = why_unwritten(lambda: write_table(out, record, sweep.rows), out)

    sweep.run(write)
    show_results(sweep.rows, arguments)
    if not arguments.json:
        seconds = time.monotonic() - sweep.started
        where = "" if unwritten[0] else f"; table: {out / 'scaling.csv'}"
        print(f"\nrun {sweep.run_id} in {seconds:.0f} s ({sweep.num_kept} points were kept){where}")
    if unwritten[0]:
        print(
            f"python -m bench.scaling: {unwritten[0]}; the same command writes it, from {arguments.cache}",
            file=sys.stderr,
        )
        return 1
    return 1 if all(row["error"] for row in sweep.rows) else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    command = shlex.join(["python", "-m", "bench.scaling", *argv])

    def work() -> int:
        if arguments.merge:
            return merge_command(arguments, command)
        if arguments.check:
            return check_command(arguments)
        if arguments.verdict is not None:
            return verdict_command(arguments)
        if arguments.model and not arguments.estimate:
            raise UsageError(f"--model goes with --estimate; to measure, --models {arguments.model}")
        fill_defaults(arguments)
        if arguments.estimate:
            return estimate_command(arguments)
        return sweep_command(arguments, command)

    kept = f"finished points are in {arguments.cache}, and the same command goes on"
    return guarded(parser.prog, work, interrupted=kept)


if __name__ == "__main__":
    sys.exit(main())
