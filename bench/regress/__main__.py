"""python -m bench.regress: the command line of the gate and its reports (`bench.regress` says what it does)."""

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from baselines.method import Method
from bench.arguments import Parser, at_least, run_cli
from bench.methods import build_variants, parse_method_spec
from bench.records import try_write, write_pair
from bench.regress import (
    BASELINE_FORMAT,
    PACKAGED,
    QUIET_TIMINGS,
    GateRunner,
    Verdict,
    baseline_name,
    gate,
    has_method_baseline,
    known_task_baseline,
    read_method_baseline,
    read_task_baseline,
    record_method,
    record_task,
)
from bench.tables import number, table
from retrain.errors import UsageError
from retrain.progress import bar
from retrain.store import Store, default_cache
from retrain.task import Task
from retrain.tasks import available_tasks, load_task

GATED_TASKS = ("digits", "tinylm")
# BIF with numbers of its own: a gate wants the same draws each time, not the pilot's choice.
GATED_METHODS = ("bif=bif@gamma=1e4,n_beta=1000,step_size=1e-4,draws=100", "ekfac", "kfac", "trak", "gradsim")
BASELINE_SEEDS = 12  # runs of --update, which show the spread
PROGRAM = "python -m bench.regress"


def make_parser() -> argparse.ArgumentParser:
    about = "The gate: has an attribution method become worse, or dearer, than its recorded baseline? Exit 1 if so."
    parser = Parser(prog=PROGRAM, description=about)
    add = parser.add_argument
    add("--task", nargs="+", help="embedded tasks (default: those with a baseline; to --update, digits)")
    methods = "METHOD, METHOD@OPTION=VALUE,... or LABEL=METHOD@...; mine.py or package.module:Class for one of yours"
    add("--methods", nargs="+", metavar="METHOD", help=f"{methods} (default: those with a baseline)")
    add("--baseline", metavar="DIR", help="folder of baselines (default: the suite's own, in the package)")
    add("--update", action="store_true", help="write the baseline instead of comparing with it")
    add("--seed", type=at_least(0), default=0, help="seed of this run's methods (default: 0)")
    dearer = "what a dearer method is (default: fail; a busy machine only ever warns)"
    add("--cost", choices=("fail", "warn"), default="fail", help=dearer)
    add("--cache", default=default_cache(), help="where --update keeps its retrained models (default: %(default)s)")
    add("--junit", metavar="FILE", help="write JUnit XML")
    add("--json", action="store_true", help="print the verdicts as JSON")
    return parser


# ---- what is asked for ----


def build_gated_method(text: str, task: Task) -> tuple[str, Method]:
    """The label of a baseline and the method behind it; `bench/methods.py` has the spelling."""
    (variant,) = build_variants([text], task, {}, "default")
    return variant.label, variant.method


def label_of_gated(text: str) -> str:
    return parse_method_spec(text).label or text


def chosen_tasks(arguments: argparse.Namespace, folder: Path) -> list[str]:
    present = [name for name in GATED_TASKS if name in available_tasks() and (folder / f"{name}.json").exists()]
    chosen = arguments.task or present or (["digits"] if arguments.update else [])
    if not chosen:
        own = f" --methods {' '.join(arguments.methods)}" if arguments.methods else ""
        raise UsageError(f"no baseline in {folder}; `{PROGRAM}{own} --update --baseline {folder}` writes one")
    return list(dict.fromkeys(chosen))


def chosen_methods(arguments: argparse.Namespace, folder: Path, task: Task) -> list[tuple[str, Method]]:
    recorded = [name for name in GATED_METHODS if has_method_baseline(folder, task.name, label_of_gated(name))]
    own = {label_of_gated(name): name for name in GATED_METHODS}  # "bif" is the one that the baseline is of
    names = [own.get(name, name) for name in arguments.methods or ()] or (
        GATED_METHODS if arguments.update else recorded
    )
    if not names:
        raise UsageError(f"{folder} has no baseline of a method on {task.name}; write one with --update")
    return [build_gated_method(name, task) for name in dict.fromkeys(names)]


def baseline_folder(arguments: argparse.Namespace) -> Path:
    if arguments.baseline:
        return Path(arguments.baseline)
    if arguments.update and not (PACKAGED.parents[2] / "pyproject.toml").exists():
        raise UsageError("--update would write into the installed package; name a folder with --baseline DIR")
    return PACKAGED


# ---- recording and gating ----


def update(arguments: argparse.Namespace, folder: Path) -> int:
    for name in chosen_tasks(arguments, folder):
        task = load_task(name)
        try:
            recorded = known_task_baseline(folder, task) or record_task(folder, task, Store(arguments.cache))
        except OSError as error:
            raise UsageError(f"{error.filename or folder} cannot be written: {error.strerror}") from None
        runner = GateRunner(task, recorded)
        for label, method in chosen_methods(arguments, folder, task):
            start = time.perf_counter()
            found = record_method(runner, method, BASELINE_SEEDS)
            lds, agreements = (np.asarray(found.values[name]) for name in ("lds", "agreement"))
            print(
                f"{task.name} {label}: LDS {lds.mean():.3f} +- {lds.std(ddof=1):.3f}, agreement "
                f"{agreements.mean():.3f} +- {agreements.std(ddof=1):.3f} "
                f"({BASELINE_SEEDS} seeds, {time.perf_counter() - start:.0f} s)",
                flush=True,
            )
            busy = [timing["busy"] for timing in found.values["timing"] if timing["busy"]]
            if len(lds) - len(busy) < QUIET_TIMINGS:
                print(f"warning, {label} on {task.name}: its cost was recorded on a busy machine ({busy[0]})")
            arrays = {"scores": found.scores, "prediction": found.prediction}
            write_pair(folder / baseline_name(task.name, label), BASELINE_FORMAT, arrays, found.record)
    return 0


def gate_all(arguments: argparse.Namespace, folder: Path) -> list[Verdict]:
    runs = []
    for name in chosen_tasks(arguments, folder):
        task = load_task(name)
        recorded = read_task_baseline(folder, task)
        if recorded is None:
            raise UsageError(f"no baseline of task {name} in {folder}; write it with --update")
        runner = GateRunner(task, recorded)
        for label, method in chosen_methods(arguments, folder, task):
            runs.append((runner, label, method, read_method_baseline(folder, task.name, label)))
    turns = bar(runs, desc="methods", unit="method", leave=False)
    return [
        gate(runner, label, method, known, arguments.seed, arguments.cost) for runner, label, method, known in turns
    ]


def tell(arguments: argparse.Namespace, verdicts: Sequence[Verdict]) -> int:
    """Prints what was asked for, and then writes the report."""
    if arguments.json:
        print(json.dumps([asdict(verdict) | {"passed": verdict.passed} for verdict in verdicts], indent=1))
    else:
        print(verdict_table(verdicts))
    write = lambda: ElementTree.ElementTree(junit(verdicts)).write(arguments.junit)  # noqa: E731
    unwritten = try_write(write, arguments.junit) if arguments.junit else ""
    if unwritten:
        print(f"{PROGRAM}: {unwritten}", file=sys.stderr)
    return 0 if all(verdict.passed for verdict in verdicts) and not unwritten else 1


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    warnings.simplefilter("ignore")
    # A method of the user's lives in the folder the command is called from.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())

    def work() -> int:
        folder = baseline_folder(arguments)
        return update(arguments, folder) if arguments.update else tell(arguments, gate_all(arguments, folder))

    kept = "finished methods are kept" if arguments.update else "nothing was judged"
    return run_cli(PROGRAM, work, interrupted=kept)


# ---- reports ----


def verdict_table(verdicts: Sequence[Verdict]) -> str:
    """A line a check; below, what is behind those that did not pass, warnings, and the verdict on all."""
    rows, notes = [], []
    for verdict in verdicts:
        where = f"{verdict.method} on {verdict.task}"
        if verdict.error:
            rows.append([verdict.task, verdict.method, "run", "FAIL", "-", "-"])
            notes.append(f"run of {where}: {verdict.error}")
        for check in verdict.checks:
            limit = f"{check.relation} {number(check.limit)}"
            rows.append([verdict.task, verdict.method, check.name, check.state, number(check.value), limit])
        notes += [f"{check.name} of {where}: {check.note}" for check in verdict.checks if not check.passed]
    notes += [f"warning, {one.method} on {one.task}: {text}" for one in verdicts for text in one.warnings]
    failed = [f"{verdict.method} on {verdict.task}" for verdict in verdicts if not verdict.passed]
    what = f"FAILED: {', '.join(failed)}" if failed else "passed"
    end = f"{what} ({len(verdicts)} methods, {sum(verdict.seconds for verdict in verdicts):.0f} s)"
    header = ["task", "method", "check", "verdict", "value", "limit"]
    return "\n".join([table(header, rows, left=4), "", *notes, end])


def junit(verdicts: Sequence[Verdict]) -> ElementTree.Element:
    """One test case a check; the first of a method carries its seconds and warnings."""
    suites = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(suites, "testsuite", name="bench.regress")
    for verdict in verdicts:
        found = {"run": verdict.error} if verdict.error else {}
        for c in verdict.checks:
            missed = f"{number(c.value)}, expected {c.relation} {number(c.limit)}: {c.note}"
            found[c.name] = "" if c.passed else missed
        for place, (name, failure) in enumerate(found.items()):
            seconds = 0.0 if place else verdict.seconds
            about = {"classname": f"{verdict.task}.{verdict.method}", "name": name, "time": f"{seconds:.3f}"}
            case = ElementTree.SubElement(suite, "testcase", about)
            if failure:
                ElementTree.SubElement(case, "failure", message=failure)
            for text in [] if place else verdict.warnings:
                ElementTree.SubElement(case, "system-out").text = text
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(len(suite.findall(".//failure"))))
    return suites


if __name__ == "__main__":
    sys.exit(main())
