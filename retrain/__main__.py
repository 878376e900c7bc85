"""Make the ground truth alone: retrain on random subsets, and keep every query's loss.

    python -m retrain --task digits --alpha 0.1 --subsets 100
    python -m retrain --task cifar10 --data-dir DIR --alpha 0.1 0.3 0.5 0.7 --seeds 1 2 3 4 42 \\
        --cluster slurm --jobs 64 --gpus-per-job 1 --slurm partition=gpu --timeout-min 120

The units are those of `python -m bench.lds`, which then finds them in the cache; here all seeds and alphas form one
campaign, so that a cluster is never idle between them. Finished work is kept: the same command goes on where it was.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

from retrain.jobs import JobError, add_cluster_arguments, cluster_options, run_units
from retrain.plugins import Parser, UsageError
from retrain.store import Store, StoreError, default_cache
from retrain.subsets import SCHEMES


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m retrain", description=str(__doc__).split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--task", required=True, help="a file of retrain/tasks, e.g. digits or cifar10")
    add("--protocol", default="", help="how to retrain, where the task offers several (default: the task's first)")
    add("--alpha", nargs="+", type=float, required=True, help="alpha_retrain: share of the attributed examples kept")
    add("--alpha-attribution", nargs="+", type=float, help="share of the training set attributed (default: the task's)")
    add("--subsets", type=int, default=100, help="retrained subsets (default: 100)")
    add("--scheme", choices=SCHEMES, default="fixed", help="subsets of fixed size, or independent draws")
    add("--seeds", nargs="+", type=int, default=[1], help="whole experiments to repeat (default: 1)")
    add("--replicates", type=int, help="retrains per subset, for the noise ceiling (default: the task's)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 ... (default: auto)")
    add("--data-dir", help="folder with the task's data, where it needs one")
    add("--model", help="model folder or name, where the task takes one")
    add("--text", help="text file, where the task takes one")
    add("--eval-text", help="text file of the queries, where the task takes one of their own")
    add("--set", action="append", default=[], metavar="TASK.OPTION=VALUE", help="option of the task")
    add("--cache", default=default_cache(), help="where finished work is kept (default: %(default)s)")
    add("--dry-run", action="store_true", help="say what would be computed, and compute nothing")
    add_cluster_arguments(parser)
    return parser


def check(arguments: argparse.Namespace) -> None:
    for flag, values in (("--alpha", arguments.alpha), ("--alpha-attribution", arguments.alpha_attribution or [])):
        for value in values:
            if not 0 < value <= 1 or (flag == "--alpha" and value == 1):
                raise UsageError(f"{flag} {value:g} is out of range; expected a fraction such as 0.1")
    for flag, value, minimum in (
        ("--subsets", arguments.subsets, 1),
        ("--replicates", arguments.replicates or 1, 1),
        ("--seeds", min(arguments.seeds), 0),
    ):
        if value < minimum:
            what = "is too few" if minimum else "is negative"
            raise UsageError(f"{flag} {value} {what}; expected at least {minimum}")


def build_task(arguments: argparse.Namespace) -> Any:
    from retrain.tasks import load_task

    options: dict[str, Any] = {"protocol": arguments.protocol} if arguments.protocol else {}
    for setting in arguments.set:
        target, equals, value = setting.partition("=")
        owner, _, option = target.rpartition(".")
        if not equals or owner != arguments.task or not option:
            raise UsageError(f'--set takes {arguments.task}.OPTION=VALUE here, not "{setting}"')
        options[option] = value
    for option in ("data_dir", "model", "text", "eval_text"):
        if getattr(arguments, option) is not None:
            options[option] = getattr(arguments, option)
    return load_task(arguments.task, **options)


def all_units(arguments: argparse.Namespace, task: Any) -> list[Any]:
    """Base models first, then the subsets of every seed and alpha."""
    from retrain.train import Plan, checkpoint_unit, retrain_units

    seeds = list(dict.fromkeys(arguments.seeds))
    units = [checkpoint_unit(task, seed, 0, arguments.device) for seed in seeds]
    for seed in seeds:
        for alpha_attribution in arguments.alpha_attribution or [task.default_alpha_attribution]:
            for alpha in dict.fromkeys(arguments.alpha):
                plan = Plan(
                    alpha=alpha,
                    alpha_attribution=alpha_attribution,
                    seed=seed,
                    num_subsets=arguments.subsets,
                    replicates=arguments.replicates or task.default_replicates,
                    scheme=arguments.scheme,
                )
                units += retrain_units(task, plan, arguments.device)
    return units


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        check(arguments)
        options = cluster_options(arguments)
        store = Store(arguments.cache)
        task = build_task(arguments)
        units = all_units(arguments, task)
        if arguments.dry_run:
            num_done = sum(store.has(unit.kind, unit.config) for unit in units)
            print(f"{num_done} of {len(units)} units are cached, {len(units) - num_done} to do")
            return 0
        report = run_units(units, store, progress=True, name=f"{task.name} ground truth", **options)
    except (UsageError, StoreError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except JobError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    for key, reason in report.failed.items():
        print(f"{parser.prog}: {key} {reason}", file=sys.stderr)
    print(
        f"{len(report.done)} of {len(units)} units are in {store.root} ({report.num_computed} computed now, in "
        f"{report.seconds:.0f} s), {len(report.failed)} failed, {len(report.pending)} pending"
    )
    return 0 if report.complete else 1


if __name__ == "__main__":
    sys.exit(main())
