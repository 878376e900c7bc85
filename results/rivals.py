"""Others' settings on CIFAR-10: the paper's protocol as printed, a Gaussian for BIF, ASTRA's, refinements, the margin.

    python results/rivals.py --data-dir PIECES --out runs/rivals          # every step, in this order, on one GPU
    python results/rivals.py refine --task digits --out runs/rivals       # a step, of another task

A step is a file of results/cifar10. One that was interrupted goes on where it was. While the GPU goes on, other
processes make the records of what is finished, from the cache.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench import Execution, Experiment

HERE = Path(__file__).resolve().parent / "cifar10"
# Step -> its file, and what is asked otherwise than it says, once for each.
STEPS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "literal": ("literal.toml", [{}]),
    "gaussian": ("gaussian.toml", [{}]),
    "astra": ("astra.toml", [{"replicates": 10}]),  # 50 are eight minutes
    "refine": ("refined.toml", [{"seeds": (1, 2)}]),  # two of its five
    "margin": ("rivals.toml", [{"output": "loss"}, {"output": "margin"}]),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    add = parser.add_argument
    add("steps", nargs="*", help=f"of {', '.join(STEPS)} (default: all)")
    add("--task", default="cifar10", help="another one is asked the same of all its examples (default: %(default)s)")
    add("--data-dir", help="CIFAR-10, as bench.lds takes it")
    add("--out", default="runs/rivals", help="where records go (default: %(default)s)")
    add("--cache", help="as bench.lds takes it")
    for name in ("queries", "subsets", "replicates"):
        add(f"--{name}", type=int, help="(default: the step's)")
    add("--seeds", type=int, nargs="+", help="(default: the step's)")
    add("--seconds", type=float, help="start no further step after so many")
    add("--beside", help="the cores that make records, as taskset takes them (default: all)")
    add("--record", action="store_true", help="of these steps make the records alone, from the cache")
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(words)
    steps = arguments.steps or list(STEPS)
    if unknown := [step for step in steps if step not in STEPS]:
        parser.error(f"there is no step {unknown[0]}")
    started, beside, failed = time.perf_counter(), [], 0
    for step in steps:
        begun = time.perf_counter()
        if arguments.seconds and begun - started > arguments.seconds:
            print(f"{step}: not started, {arguments.seconds:g} s have passed", flush=True)
            continue
        for experiment in experiments_of(step, arguments):
            if arguments.record:
                failed += record(step, experiment, arguments)
            else:
                make(step, experiment, arguments)
        if not arguments.record:
            apart = ["taskset", "-c", arguments.beside] if arguments.beside else []
            same = [word for word in words if word not in steps]
            command = [*apart, sys.executable, __file__, *same, "--record", "--", step]
            beside.append(subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "2"}))
        print(f"{step}: {time.perf_counter() - begun:.1f} s", flush=True)
    return failed + sum(process.wait() != 0 for process in beside)


def experiments_of(step: str, arguments: argparse.Namespace) -> "list[Experiment]":
    from bench.experiment import read_experiment

    file, changes = STEPS[step]
    asked = read_experiment(HERE / file)
    if arguments.task != "cifar10":
        asked = replace(asked, task=arguments.task, task_options={}, alpha_attribution=(1.0,))
    elif arguments.data_dir:
        asked = replace(asked, task_options={**asked.task_options, "data_dir": arguments.data_dir})
    given = {name: getattr(arguments, name) for name in ("queries", "subsets", "replicates", "seeds")}
    given = {name: value for name, value in given.items() if value is not None}
    if arguments.subsets and asked.replicated_subsets:
        given["replicated_subsets"] = max(3, arguments.subsets // 4)
    return [replace(asked, **{**one, **given}) for one in changes]


def execution(arguments: argparse.Namespace) -> "Execution":
    from bench import Execution

    return Execution(progress=False, keep_scores="never", **({"cache": arguments.cache} if arguments.cache else {}))


def make(step: str, experiment: "Experiment", arguments: argparse.Namespace) -> None:
    """What needs the GPU: retrained models and scores, kept in the cache."""
    from bench.runner import Session

    session = Session(experiment, execution(arguments), control=True)
    session.report_skipped()
    session.retrain()
    session.score()
    for problem in session.out.problems:
        print(f"{step}: {problem}", flush=True)


def record(step: str, experiment: "Experiment", arguments: argparse.Namespace) -> int:
    from bench import run

    result = run(experiment, execution(arguments))
    command = f"python results/rivals.py {step} --task {arguments.task}"
    folder = result.save(Path(arguments.out) / step, command)
    print(f"{folder}\n{result}", *result.problems, sep="\n", flush=True)
    return bool(result.problems)


if __name__ == "__main__":
    sys.exit(main())
