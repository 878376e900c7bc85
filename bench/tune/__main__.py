"""`python -m bench.tune`: choose settings (choose.py); `... sweep` and `... budget`: what LDS depends on (sweep.py)."""

import argparse
import hashlib
import logging
import sys
import time
from collections.abc import Sequence

from bench.arguments import (
    RUNS,
    Parser,
    add_cluster_arguments,
    add_plan_arguments,
    add_task_arguments,
    at_least,
    run_cli,
)
from bench.metrics import MINIMUM_SUBSETS
from bench.records import command_line, keep_earlier, provenance, try_write, write_json
from bench.tune import choose, sweep
from retrain.reference import REFERENCES
from retrain.store import canonical_json

# Command -> what it says of itself, its own arguments, its work.
COMMANDS = {
    "": (str(choose.__doc__).split("\n")[0], choose.add_arguments, choose.run),
    "sweep": ("LDS against a grid of one method's settings.", sweep.add_sweep_arguments, sweep.run_sweep),
    "budget": ("LDS against what is spent: draws, projections, seconds.", sweep.add_budget_arguments, sweep.run_budget),
}


def make_parser(command: str) -> argparse.ArgumentParser:
    description, add_own_arguments, _ = COMMANDS[command]
    others = "\n".join(f"  {name:8} {words}" for name, (words, _, _) in COMMANDS.items() if name and not command)
    parser = Parser(
        prog=f"python -m bench.tune {command}".strip(),
        description=description,
        epilog=f"other commands (`python -m bench.tune NAME --help`):\n{others}" if others else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_task_arguments(parser)
    add_own_arguments(parser)
    add_plan_arguments(parser, MINIMUM_SUBSETS, required=bool(command))
    add = parser.add_argument
    add("--reference", choices=REFERENCES, help="models that methods look at (default: full)")
    add("--queries", type=at_least(1), help="only the first so many queries")
    add("--out", default=f"{RUNS}/{command or 'tune'}", help="where the record goes (default: %(default)s)")
    add_cluster_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    command = words[0] if words and words[0] in COMMANDS else ""
    parser = make_parser(command)
    arguments = parser.parse_args(words[1:] if command else words)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    line = command_line("bench.tune", words)
    kept = "finished settings are kept, and the same command goes on"
    return run_cli(parser.prog, lambda: work(arguments, command, line, parser.prog), kept, arguments.traceback)


def work(arguments: argparse.Namespace, command: str, line: str, prog: str) -> int:
    started = time.perf_counter()
    outcome = COMMANDS[command][2](arguments)
    grid, path = outcome.grid, outcome.path
    run_id = hashlib.sha256(canonical_json(outcome.result, "result").encode()).hexdigest()[:12]
    record = {
        **outcome.result,
        "run_id": run_id,
        "command": line,
        "description": grid.task.description,
        **provenance(grid.session.device()),
        "seconds": round(time.perf_counter() - started, 1),
    }
    files = {path: record}
    if outcome.tuned is not None:
        place, tuned = outcome.tuned
        files[place] = tuned | {name: record[name] for name in choose.TUNED_FIELDS}

    def write() -> None:
        for place, content in files.items():
            keep_earlier(place, run_id)
            write_json(place, content, indent=None if command else 1)

    unwritten = try_write(write, path)
    print(outcome.text)
    print(f"\nrun {run_id} in {record['seconds']:.0f} s" + ("" if unwritten else f"; record: {path}"))
    if outcome.tuned is not None and not unwritten:
        words = f"python -m bench.lds --task {arguments.task} --settings tuned ..."
        print(f"to use it: TDA_BENCH_TUNED={arguments.out} {words}")
    for remark in [*grid.session.notes, *outcome.remarks]:
        print(remark, file=sys.stderr)
    lost = [f"{unwritten}; the same command writes it, from {arguments.cache}"] if unwritten else []
    for problem in [*lost, *outcome.problems]:
        print(f"{prog}: {problem}", file=sys.stderr)
    return 1 if lost or outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
