"""python -m bench.regress: the command line of the gate and its reports (`bench.regress` says what it does)."""

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from baselines.method import Method
from bench.arguments import Parser, at_least, options_of, run_cli
from bench.methods import build_variants, parse_method_spec
from bench.records import try_write
from bench.regress.gate import (
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
    write_baseline,
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
PROGRAM = "python -m bench.regress"


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        description="The gate: has an attribution method become worse, or dearer, than its recorded baseline? "
        "Exit 1 if so.",
    )
    add = parser.add_argument
    add("--task", dest="tasks", nargs="+", help="embedded tasks (default: those with a baseline; to --update, digits)")
    add(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help="METHOD, METHOD@OPTION=VALUE,... or LABEL=METHOD@...; mine.py or package.module:Class for one of yours "
        "(default: those with a baseline)",
    )
    add("--against", metavar="NAME", help="compare with the baseline of another name, for example bif")
    add("--baseline", metavar="DIR", help="folder of baselines (default: the suite's own, in the package)")
    add("--update", action="store_true", help="write the baseline instead of comparing with it")
    add("--baseline-seeds", type=at_least(3), default=12, help="runs that show the spread, for --update (default: 12)")
    add("--seed", type=at_least(0), default=0, help="seed of this run's methods (default: 0)")
    add("--set", action="append", default=[], metavar="NAME.OPTION=VALUE", help="option of a method")
    add(
        "--cost",
        choices=("fail", "warn"),
        default="fail",
        help="what a dearer method is (default: fail; a busy machine only ever warns)",
    )
    add("--cache", default=default_cache(), help="where --update keeps its retrained models (default: %(default)s)")
    add("--junit", metavar="FILE", help="write JUnit XML")
    add("--json", action="store_true", help="print the verdicts as JSON")
    return parser


# ---- what is asked for ----


def build_gated_method(text: str, task: Task, settings: Sequence[str]) -> tuple[str, Method]:
    """The label of a baseline and the method behind it; `bench/methods.py` has the spelling."""
    name = parse_method_spec(text).name
    options = {name: given} if (given := options_of(name, settings)) else {}
    (variant,) = build_variants([text], task, options, "default")
    return variant.label, variant.method


def label_of_gated(text: str) -> str:
    return parse_method_spec(text).label or text


def chosen_tasks(arguments: argparse.Namespace, folder: Path) -> list[str]:
    if arguments.tasks:
        return list(dict.fromkeys(arguments.tasks))
    present = [name for name in GATED_TASKS if name in available_tasks() and (folder / f"{name}.json").exists()]
    if present:
        return present
    if arguments.update:
        return ["digits"]
    own = f" --methods {' '.join(arguments.methods)}" if arguments.methods else ""
    raise UsageError(f"no baseline in {folder}; `{PROGRAM}{own} --update --baseline {folder}` writes one")


def chosen_methods(arguments: argparse.Namespace, folder: Path, task: Task) -> list[tuple[str, Method]]:
    if arguments.methods:
        names = arguments.methods
    elif arguments.update:
        names = list(GATED_METHODS)
    else:
        names = [name for name in GATED_METHODS if has_method_baseline(folder, task.name, label_of_gated(name))]
        if not names:
            raise UsageError(f"{folder} has no baseline of a method on {task.name}; write one with --update")
    return [build_gated_method(name, task, arguments.set) for name in dict.fromkeys(names)]


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
            found = record_method(runner, method, arguments.baseline_seeds)
            lds, agreements = (np.asarray(found.values[name]) for name in ("lds", "agreement"))
            print(
                f"{task.name} {label}: LDS {lds.mean():.3f} +- {lds.std(ddof=1):.3f}, agreement "
                f"{agreements.mean():.3f} +- {agreements.std(ddof=1):.3f} "
                f"({arguments.baseline_seeds} seeds, {time.perf_counter() - start:.0f} s)",
                flush=True,
            )
            busy = [timing["busy"] for timing in found.values["timing"] if timing["busy"]]
            if len(lds) - len(busy) < QUIET_TIMINGS:
                print(f"warning, {label} on {task.name}: its cost was recorded on a busy machine ({busy[0]})")
            pair = baseline_name(task.name, label)
            arrays = {"scores": found.scores, "prediction": found.prediction}
            write = partial(write_baseline, folder, pair, found.record, arrays)
            if unwritten := try_write(write, folder / f"{pair}.json"):
                raise RuntimeError(unwritten)
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
            runs.append((runner, label, method, read_method_baseline(folder, task.name, arguments.against or label)))
    turns = bar(runs, desc="methods", unit="method", leave=False)
    return [
        gate(runner, label, method, reference, arguments.seed, arguments.cost)
        for runner, label, method, reference in turns
    ]


def tell(arguments: argparse.Namespace, verdicts: Sequence[Verdict]) -> int:
    """Prints and writes what was asked for; reports that cannot be written come after what they would have held."""
    unwritten = []
    if arguments.junit:
        unwritten.append(try_write(lambda: Path(arguments.junit).write_text(junit(verdicts)), arguments.junit))
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        unwritten.append(try_write(lambda: _append(summary, markdown(verdicts)), summary))
    if arguments.json:
        print(json.dumps([asdict(verdict) | {"passed": verdict.passed} for verdict in verdicts], indent=1))
    else:
        print(verdict_table(verdicts))
        print(closing_lines(verdicts))
    for problem in filter(None, unwritten):
        print(f"{PROGRAM}: {problem}", file=sys.stderr)
    return 0 if all(verdict.passed for verdict in verdicts) and not any(unwritten) else 1


def _append(path: str, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(sys.argv[1:] if argv is None else list(argv))
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
    """A line a check; below, what is behind the numbers of those that did not pass."""
    rows, failed = [], []
    for verdict in verdicts:
        if verdict.error:
            rows.append([verdict.task, verdict.method, "run", "FAIL", "-", "-"])
            failed.append(f"run of {verdict.method} on {verdict.task}: {verdict.error}")
        for check in verdict.checks:
            limit = f"{check.relation} {number(check.limit)}"
            rows.append([verdict.task, verdict.method, check.name, check.state, number(check.value), limit])
            if not check.passed:
                failed.append(f"{check.name} of {verdict.method} on {verdict.task}: {check.note}")
    if not rows:
        return "nothing was gated"
    lines = table(["task", "method", "check", "verdict", "value", "limit"], rows, left=4)
    return "\n".join([lines, *([""] if failed else []), *failed])


def closing_lines(verdicts: Sequence[Verdict]) -> str:
    """The warnings, and the verdict on all."""
    lines = [
        f"warning, {verdict.method} on {verdict.task}: {text}" for verdict in verdicts for text in verdict.warnings
    ]
    failed = [f"{verdict.method} on {verdict.task}" for verdict in verdicts if not verdict.passed]
    seconds = sum(verdict.seconds for verdict in verdicts)
    what = f"FAILED: {', '.join(failed)}" if failed else "passed"
    return "\n".join([*lines, "", f"{what} ({len(verdicts)} methods, {seconds:.0f} s)"])


def markdown(verdicts: Sequence[Verdict]) -> str:
    """For the GitHub step summary: one line a method, and the failed checks under it."""
    lines = [
        "### tda-bench gate",
        "",
        "| task | method | verdict | seconds | checks |",
        "| --- | --- | --- | --- | --- |",
    ]
    marks = {"pass": "", "warn": " (warning)", "FAIL": " **FAIL**"}
    for verdict in verdicts:
        cells = [f"{c.name} {number(c.value)} ({c.relation} {number(c.limit)}){marks[c.state]}" for c in verdict.checks]
        text = verdict.error or "; ".join(cells)
        lines.append(
            f"| {verdict.task} | `{verdict.method}` | {'pass' if verdict.passed else '**FAIL**'} "
            f"| {verdict.seconds:.0f} | {text.replace('|', '/')} |"
        )
    for verdict in verdicts:
        lines += [f"- `{verdict.method}` on {verdict.task}, warning: {text}" for text in verdict.warnings]
        lines += [f"- `{verdict.method}` on {verdict.task}, {c.name}: {c.note}" for c in verdict.checks if not c.passed]
    return "\n".join(lines) + "\n"


def junit(verdicts: Sequence[Verdict]) -> str:
    """One test case a check; the first carries the seconds and the warnings."""
    cases, failures = [], 0
    for verdict in verdicts:
        where = f"classname={quoteattr(f'{verdict.task}.{verdict.method}')}"
        seconds, notes = verdict.seconds, "".join(f"<system-out>{escape(t)}</system-out>" for t in verdict.warnings)
        failed = {
            c.name: f"{number(c.value)}, expected {c.relation} {number(c.limit)}: {c.note}"
            for c in verdict.checks
            if not c.passed
        }
        names = [check.name for check in verdict.checks]
        if verdict.error:
            names, failed = ["run", *names], {"run": verdict.error, **failed}
        for name in names:
            body = f"<failure message={quoteattr(failed[name])}/>" if name in failed else ""
            failures += name in failed
            cases.append(f'  <testcase {where} name="{name}" time="{seconds:.3f}">{body}{notes}</testcase>')
            seconds, notes = 0.0, ""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<testsuites><testsuite name="bench.regress" tests="{len(cases)}" failures="{failures}" errors="0">\n'
        + "\n".join(cases)
        + "\n</testsuite></testsuites>\n"
    )


if __name__ == "__main__":
    sys.exit(main())
