"""What the campaigns of this folder share: options, the loop over steps, and records made while the GPU goes on."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench import Execution, Experiment


def parser_of(description: str, steps: Sequence[str], out: str, task: str = "cifar10") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    add = parser.add_argument
    add("steps", nargs="*", metavar="STEP", help=f"of {', '.join(steps)} (default: all, in this order)")
    add("--task", default=task, help="(default: %(default)s)")
    add("--out", default=out, help="where records and tuned settings go (default: %(default)s)")
    add("--cache", help="as bench.lds takes it")
    add("--seconds", type=float, help="start no further step after so many")
    add("--beside", help="the cores that make records, as taskset takes them (default: all)")
    add("--record", action="store_true", help="of these steps make the records alone, from the cache")
    add("--truth", action="store_true", help="of these steps do the retraining alone")
    return parser


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None, steps: Sequence[str]) -> argparse.Namespace:
    """With `given`: the words of the command line without its steps."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(words)
    if unknown := [step for step in arguments.steps if step not in steps]:
        parser.error(f"there is no step {unknown[0]}; available: {', '.join(steps)}")
    arguments.given = [word for word in words if word not in (*steps, "--")]
    arguments.steps = arguments.steps or list(steps)
    return arguments


def go_through(arguments: argparse.Namespace, do: Callable[[str], bool], recorded: Callable[[str], list[str]]) -> int:
    """Each step, and beside the next ones its record; the number of what failed.

    do: does a step, and says whether it failed. recorded: the steps that a record is made of once this one is done.
    """
    started, beside, failed = time.perf_counter(), [], 0
    for step in arguments.steps:
        begun = time.perf_counter()
        if arguments.seconds and begun - started > arguments.seconds:
            print(f"{step}: not started, {arguments.seconds:g} s have passed", flush=True)
            continue
        failed += do(step)
        if (steps := recorded(step)) and not (arguments.record or arguments.truth):
            apart = ["taskset", "-c", arguments.beside] if arguments.beside else []
            command = [*apart, sys.executable, sys.argv[0], *arguments.given, "--record", "--", *steps]
            beside.append(subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "2"}))
        print(f"{step}: {time.perf_counter() - begun:.1f} s, {begun - started:.0f} s before", flush=True)
    return failed + sum(process.wait() != 0 for process in beside)


def execution_of(arguments: argparse.Namespace, **others: Any) -> "Execution":
    from bench import Execution

    return Execution(progress=False, **({"cache": arguments.cache} if arguments.cache else {}), **others)


def made(step: str, experiment: "Experiment", arguments: argparse.Namespace) -> bool:
    """What needs the GPU: retrained models and scores, kept in the cache; whether something failed.

    Predictions are what records are made of; scores, 38 MB each, take as long to write as to make.
    """
    from bench.runner import Session

    session = Session(experiment, execution_of(arguments, keep_scores="never"), control=True)
    session.report_skipped()
    session.retrain()
    if not arguments.truth:
        session.score()
    for problem in session.out.problems:
        print(f"{step}: {problem}", flush=True)
    return bool(session.out.problems)


def record(name: str, step: str, experiment: "Experiment", arguments: argparse.Namespace) -> bool:
    """The record of a step in the folder of this name; whether something failed."""
    from bench import run

    result = run(experiment, execution_of(arguments, keep_scores="never"))
    script = f"{Path(__file__).parent.name}/{Path(sys.argv[0]).name}"
    seeds = " ".join(["", "--seeds", *map(str, arguments.seeds)]) if arguments.seeds else ""
    folder = result.save(Path(arguments.out) / name, f"python {script} {step} --task {arguments.task}{seeds}")
    print(f"{folder}\n{result}", *result.problems, sep="\n", flush=True)
    return bool(result.problems)
