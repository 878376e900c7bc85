"""The command line of the gate: python -m bench.regress (see bench/regress/__init__.py)."""

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
from typing import TYPE_CHECKING

import numpy as np

from bench.arguments import Parser, at_least, options_of, run_cli
from bench.records import try_write
from bench.regress.baseline import (
    PACKAGED,
    baseline_name,
    has_method_baseline,
    known_task_baseline,
    read_method_baseline,
    read_task_baseline,
    record_task,
    write_baseline,
)
from bench.regress.judge import QUIET_TIMINGS, Verdict, gate
from bench.regress.report import closing_lines, junit, markdown, verdict_table
from bench.regress.sample import Rig, record_method
from retrain.errors import UsageError
from retrain.progress import bar
from retrain.store import Store, default_cache

if TYPE_CHECKING:
    from baselines.method import Method
    from retrain.task import Task

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
    add(
        "--task",
        "--tasks",
        dest="tasks",
        nargs="+",
        help="embedded tasks (default: those with a baseline; with --update, digits)",
    )
    add("--methods", nargs="+", help="methods of this suite or their variants (default: those with a baseline)")
    add(
        "--method",
        action="append",
        default=[],
        metavar="NAME[@OPTION=VALUE,...]",
        help="gate this method instead: ekfac@damping=1e-4, mine.py or package.module:Class for one of yours",
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
    add("--summary", metavar="FILE", default=os.environ.get("GITHUB_STEP_SUMMARY"), help="append Markdown to this file")
    add("--wide", action="store_true", help="say beside every check what it is")
    add("--json", action="store_true", help="print the verdicts as JSON")
    return parser


# ---- what is asked for ----


def build_gated_method(text: str, task: "Task", settings: Sequence[str]) -> "tuple[str, Method]":
    """The label of a baseline and the method behind it; `bench/methods.py` has the spelling."""
    from bench.methods import build_variants, parse_method_spec

    name = parse_method_spec(text).name
    options = {name: given} if (given := options_of(name, settings)) else {}
    (variant,) = build_variants([text], task, options, "default")
    return variant.label, variant.method


def label_of_gated(text: str) -> str:
    from bench.methods import parse_method_spec

    return parse_method_spec(text).label or text


def chosen_tasks(arguments: argparse.Namespace, folder: Path) -> list[str]:
    from retrain.tasks import available_tasks

    if arguments.tasks:
        return list(dict.fromkeys(arguments.tasks))
    present = [name for name in GATED_TASKS if name in available_tasks() and (folder / f"{name}.json").exists()]
    if present:
        return present
    if arguments.update:
        return ["digits"]
    own = "".join(f" --method {name}" for name in arguments.method)
    raise UsageError(f"no baseline in {folder}; `{PROGRAM}{own} --update --baseline {folder}` writes one")


def chosen_methods(arguments: argparse.Namespace, folder: Path, task: "Task") -> "list[tuple[str, Method]]":
    if arguments.method or arguments.methods:
        names = [*arguments.method, *(arguments.methods or [])]
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
    from retrain.tasks import load_task

    for name in chosen_tasks(arguments, folder):
        task = load_task(name)
        try:
            recorded = known_task_baseline(folder, task) or record_task(folder, task, Store(arguments.cache))
        except OSError as error:
            raise UsageError(f"{error.filename or folder} cannot be written: {error.strerror}") from None
        rig = Rig(task, recorded)
        for label, method in chosen_methods(arguments, folder, task):
            start = time.perf_counter()
            found = record_method(rig, method, arguments.baseline_seeds)
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
    from retrain.tasks import load_task

    runs = []
    for name in chosen_tasks(arguments, folder):
        task = load_task(name)
        recorded = read_task_baseline(folder, task)
        if recorded is None:
            raise UsageError(f"no baseline of task {name} in {folder}; write it with --update")
        rig = Rig(task, recorded)
        for label, method in chosen_methods(arguments, folder, task):
            runs.append((rig, label, method, read_method_baseline(folder, task.name, arguments.against or label)))
    turns = bar(runs, desc="methods", unit="method", leave=False)
    return [
        gate(rig, label, method, reference, arguments.seed, arguments.cost) for rig, label, method, reference in turns
    ]


def tell(arguments: argparse.Namespace, verdicts: Sequence[Verdict]) -> int:
    """Prints and writes what was asked for; reports that cannot be written come after what they would have held."""
    unwritten = []
    if arguments.junit:
        unwritten.append(try_write(lambda: Path(arguments.junit).write_text(junit(verdicts)), arguments.junit))
    if arguments.summary:
        unwritten.append(try_write(lambda: _append(arguments.summary, markdown(verdicts)), arguments.summary))
    if arguments.json:
        print(json.dumps([asdict(verdict) | {"passed": verdict.passed} for verdict in verdicts], indent=1))
    else:
        print(verdict_table(verdicts, arguments.wide))
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
