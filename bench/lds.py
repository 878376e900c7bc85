"""How well does each method predict what really happens when training data is left out?

    python -m bench.lds --alpha 0.1                                  # the embedded task, its usual methods, minutes
    python -m bench.lds --alpha 0.1 --methods ekfac ekfac@damping=1e-4 stiff=ekfac@damping=1
    python -m bench.lds --task cifar10 --alpha 0.1 0.3 0.5 0.7 --seeds 1 2 3 4 42 --data-dir DIR
    python -m bench.lds --experiment paper.toml                      # or a run.json: the same run again

Retrains on random subsets, scores with every method, and prints the linear datamodelling score (LDS) of each with its
interval and the noise ceiling. Everything finished is kept: interrupt at any time, and the same command goes on.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.arguments import add_method_arguments, add_query_arguments
from bench.metrics import MINIMUM_SUBSETS
from bench.records import command_line, try_write, without_nan
from retrain.command import (
    RUNS,
    Parser,
    add_cluster_arguments,
    add_plan_arguments,
    add_task_arguments,
    at_least,
    check_out,
    run_cli,
)
from retrain.errors import UsageError


def make_parser() -> Parser:
    parser = Parser(prog="python -m bench.lds", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--experiment", metavar="FILE", help="a .toml file or a run.json: what is asked; other options change it")
    add_task_arguments(parser)
    add_plan_arguments(parser, MINIMUM_SUBSETS, required=False)
    add_method_arguments(parser)
    add_query_arguments(parser)
    looked_at = "models that methods look at: the base model, or those trained on the attributed examples or on subsets"
    add("--reference", choices=("full", "attributed", "subset"), help=f"{looked_at} (default: full)")
    models = "models that every method's scores are averaged over; several numbers: a row each (default: 1)"
    add("--checkpoints", nargs="+", type=at_least(1), metavar="K", help=models)
    add("--out", default=RUNS, help="where run records go, a folder each (default: %(default)s)")
    add(
        "--keep-scores",
        choices=("auto", "always", "never"),
        default="auto",
        help="cache score matrices (auto: to 1 GiB)",
    )
    add("--ground-truth", metavar="DIR", help="score given scores against a ground truth of bench.truth, and stop")
    add("--scores", nargs="+", metavar="FILE", help="with --ground-truth: (queries x training examples) arrays")
    add("--dry-run", action="store_true", help="say what would be computed, and compute nothing")
    add("--force", action="store_true", help="retrain and score again what this command needs, even if it is cached")
    add("--rescore", action="store_true", help="score again, and keep the retrains")
    add("--json", action="store_true", help="print the rows as a JSON list instead of tables")
    add("--wide", action="store_true", help="more columns than fit a narrow terminal")
    add_cluster_arguments(parser)
    return parser


# ---- the command ----


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    argv = list(sys.argv[1:] if argv is None else argv)
    if any(word.partition("=")[0] in ("--ground-truth", "--scores", "--scores-are") for word in argv):
        from bench.truth.scores import scores_command

        return scores_command(argv, parser)
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("tda-bench").setLevel(logging.INFO)
    command = command_line("bench.lds", argv)
    return run_cli(parser.prog, lambda: measure_lds(arguments, command, parser.prog), traceback=arguments.traceback)


def measure_lds(arguments: argparse.Namespace, command: str, prog: str) -> int:
    from bench.dry_run import dry_run
    from bench.runner import run
    from bench.translate import execution_of, experiment_of

    experiment, execution = experiment_of(arguments), execution_of(arguments)
    if arguments.dry_run:
        if arguments.json:
            raise UsageError("--dry-run says in words what would be computed; leave out --json")
        print(dry_run(experiment, execution))
        return 0
    check_out(arguments.out)
    result = run(experiment, execution)
    place = Path(arguments.out) / result.run_id
    nothing = arguments.collect and not result.out.rows  # a record of nothing would only be in the way
    unwritten = "" if nothing else try_write(lambda: result.save(arguments.out, command), place)
    if arguments.json:
        print(json.dumps(without_nan(result.frame().to_dict("records")), indent=1))
    else:
        print(result.text(arguments.wide))
        failed = f"; {len(result.problems)} went wrong: see below" if result.problems else ""
        written = "" if unwritten or nothing else f"; record: {place}/run.json"
        print(f"\nrun {result.run_id} in {result.seconds:.0f} s{written}{failed}")
    for note in result.notes:
        print(note, file=sys.stderr)
    for label, reason in result.skipped.items():
        print(f"skipped {label}: {reason}", file=sys.stderr)
    problems = [
        *result.problems,
        *([f"{unwritten}; the same command writes it, from {arguments.cache}"] if unwritten else []),
    ]
    for problem in problems:
        print(f"{prog}: {problem}", file=sys.stderr)
    return 1 if problems else 0


class _Callable(ModuleType):
    """`bench.lds` is this module once it is imported, and the function of `from bench import lds` all the same."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from bench.arrays import lds

        return lds(*arguments, **options)


sys.modules[__name__].__class__ = _Callable


if __name__ == "__main__":
    sys.exit(main())
