"""Others' settings on CIFAR-10: the paper's as printed, a Gaussian for BIF, ASTRA's, TRAK's, refinements, the margin.

    python results/rivals.py --data-dir PIECES --out runs/rivals          # every step, in this order, on one GPU
    python results/rivals.py refine --task digits --out runs/rivals       # a step, of another task

A step is a file of results/cifar10. One that was interrupted goes on where it was. While the GPU goes on, other
processes make the records of what is finished, from the cache.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from campaign import go_through, made, parsed, parser_of, record

if TYPE_CHECKING:
    from bench import Experiment

HERE = Path(__file__).resolve().parent / "cifar10"
# Step -> its file, and what is asked otherwise than it says, once for each.
STEPS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "literal": ("literal.toml", [{}]),
    "gaussian": ("gaussian.toml", [{}]),
    "astra": ("astra.toml", [{"replicates": 10}]),  # 50 are eight minutes
    "refine": ("refined.toml", [{"seeds": (1, 2)}]),  # two of its five
    "margin": ("rivals.toml", [{"output": "loss"}, {"output": "margin"}]),
    "trak": ("trak.toml", [{}]),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(str(__doc__), list(STEPS), "runs/rivals")
    add = parser.add_argument
    add("--data-dir", help="CIFAR-10, as bench.lds takes it")
    for name in ("queries", "subsets", "replicates"):
        add(f"--{name}", type=int, help="(default: the step's)")
    add("--seeds", type=int, nargs="+", help="(default: the step's)")
    arguments = parsed(parser, argv, list(STEPS))

    def do(step: str) -> bool:
        asked = experiments_of(step, arguments)
        if arguments.record:
            return sum(record(step, step, experiment, arguments) for experiment in asked) > 0
        return sum(made(step, experiment, arguments) for experiment in asked) > 0

    return go_through(arguments, do, lambda step: [step])


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


if __name__ == "__main__":
    sys.exit(main())
