"""Make the ground truth alone: retrain on random subsets, and keep every query's loss.

    python -m retrain --task digits --alpha 0.1 --subsets 100
    python -m retrain --task cifar10 --data-dir DIR --alpha 0.1 0.3 0.5 0.7 --seeds 1 2 3 4 42 \\
        --cluster slurm --jobs 64 --gpus-per-job 1 --slurm partition=gpu --timeout-min 120

The units are those of `python -m bench.lds`, which then finds them in the cache; here all seeds and alphas form one
batch, so that a cluster is never idle between them. Finished work is kept: the same command goes on where it was.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

from retrain.command import (
    Parser,
    add_cluster_arguments,
    add_plan_arguments,
    add_task_arguments,
    build_task,
    check_device,
    cluster_options,
    plans_for,
    run_cli,
)
from retrain.jobs import run_units
from retrain.store import Store


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m retrain", description=str(__doc__).split("\n")[0])
    add_task_arguments(parser)
    add_plan_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="say what would be computed, and compute nothing")
    add_cluster_arguments(parser)
    return parser


def all_units(arguments: argparse.Namespace, task: Any) -> list[Any]:
    """Base models first, then the subsets of every seed and alpha."""
    from retrain.units import checkpoint_unit, retrain_units

    plans = plans_for(arguments, task)
    units = [checkpoint_unit(task, seed, 0, arguments.device) for seed in dict.fromkeys(plan.seed for plan in plans)]
    return units + [unit for plan in plans for unit in retrain_units(task, plan, arguments.device)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    return run_cli(parser.prog, lambda: make_ground_truth(arguments, parser.prog), traceback=arguments.traceback)


def make_ground_truth(arguments: argparse.Namespace, prog: str) -> int:
    check_device(arguments.device)
    options = cluster_options(arguments)
    store = Store(arguments.cache)
    task = build_task(arguments)
    units = all_units(arguments, task)
    if arguments.dry_run:
        num_done = sum(store.has(unit.kind, unit.config) for unit in units)
        print(f"{num_done} of {len(units)} units are cached, {len(units) - num_done} to do")
        return 0
    report = run_units(units, store, progress=True, name=f"{task.name} ground truth", **options)
    for key, reason in report.failed.items():
        print(f"{prog}: {key} {reason}", file=sys.stderr)
    print(
        f"{len(report.done)} of {len(units)} units are in {store.root} ({report.num_computed} computed now, in "
        f"{report.seconds:.0f} s), {len(report.failed)} failed, {len(report.pending)} pending"
    )
    return 0 if report.complete else 1


if __name__ == "__main__":
    sys.exit(main())
