"""What the commands of questions beside LDS have in common: their flags, how they begin and how they end."""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence

from bench.answers import Answers
from bench.arguments import add_method_arguments, add_query_arguments
from bench.records import command_line, try_write
from retrain.command import RUNS, add_cluster_arguments, add_task_arguments, at_least, guarded, share
from retrain.seeds import INITIALISATIONS


def add_question_arguments(parser: argparse.ArgumentParser, queries: bool = True) -> None:
    """What questions beside LDS have in common: task, methods, queries, seeds, where it runs and where records go.

    queries: whether the question is about queries at all.
    """
    add_task_arguments(parser)
    add_method_arguments(parser)
    if queries:
        add_query_arguments(parser)
    add = parser.add_argument
    add("--alpha-attribution", nargs="+", type=share, help="share of the training set attributed (default: the task's)")
    add("--seeds", "--seed", nargs="+", type=at_least(0), help="whole experiments to repeat (default: 1)")
    add("--initialisation", choices=INITIALISATIONS, help="of retrained models: the base model's, or each its own")
    add("--out", default=RUNS, help="where records go, a folder each (default: %(default)s)")
    add("--force", action="store_true", help="retrain and score again what this command needs, even if it is cached")
    add("--rescore", action="store_true", help="score again, and keep the retrains")
    add_cluster_arguments(parser)


def answer_command(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, run: Callable[[argparse.Namespace, str, str], int]
) -> int:
    """The main of a question's module: `run` gets the arguments, the command as one would type it, and the prog."""
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    command = command_line(parser.prog.removeprefix("python -m "), argv)
    return guarded(parser.prog, lambda: run(arguments, command, parser.prog), traceback=arguments.traceback)


def finish(out: Answers, text: str, folder: str, command: str, prog: str) -> int:
    """Prints, writes the record, and says what went wrong: the end of every such command."""
    out.name_it()
    print(text)
    place = f"{folder}/{out.run_id}"
    unwritten = try_write(lambda: out.save(folder, command), place)
    print(f"\nrun {out.run_id} in {out.seconds:.0f} s" + ("" if unwritten else f"; record: {place}/answers.json"))
    for note in out.notes:
        print(note, file=sys.stderr)
    for label, reason in out.skipped.items():
        print(f"skipped {label}: {reason}", file=sys.stderr)
    for problem in [*out.problems, *([unwritten] if unwritten else [])]:
        print(f"{prog}: {problem}", file=sys.stderr)
    return 1 if out.problems or unwritten else 0
