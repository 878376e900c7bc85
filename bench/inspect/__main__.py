"""`tda-bench inspect`: which training examples matter to a query; `... inspect tokens`: which of their tokens.

tda-bench inspect --task digits --query 3 17 --methods kfac gradsim     # three queries by rule without --query
tda-bench inspect --model mlp.pt --train train.csv --queries test.csv   # a model and data of your own
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import bench.arguments as options
from bench.api import scored
from bench.arguments import at_least
from bench.experiment import execution_of, experiment_of
from bench.ground_truth import base_model
from bench.inspect import choose_queries, influential, tokens, words
from bench.records import command_line, provenance
from bench.runner import Session
from retrain.errors import UsageError
from retrain.units import choose_device

METHODS = ("kfac", "gradsim")
QUERIES, EXAMPLES = 3, 10
ABOUT = {
    "inspect": "Which training examples help a query most, and which harm it.",
    "tokens": "Which tokens of a training sequence bear on which of a query.",
    "words": "Are the tokens that a method pairs related words, by WordNet?",
}


def make_parser(what: str) -> argparse.ArgumentParser:
    parser = options.Parser(
        prog="python -m bench.inspect" if what == "inspect" else f"python -m bench.inspect {what}",
        description=ABOUT[what],
        listed={name: ABOUT[name] for name in ("tokens", "words")} if what == "inspect" else None,
    )
    add = parser.add_argument
    options.add_method_arguments(parser, {"tokens": ("bif",), "words": words.METHODS}.get(what, METHODS))
    if what == "tokens":
        chosen = parser.add_mutually_exclusive_group()
        pairs = "indices of the task's data"
        chosen.add_argument("--pairs", nargs="+", type=tokens.parse_pair, metavar="QUERY:TRAIN", help=pairs)
        top = "the strongest pairs by sequence score (default: 3)"
        chosen.add_argument("--top", type=at_least(1), default=3, help=top)
    elif what == "words":
        add("--wordnet", metavar="FOLDER", help="WordNet's files; without them the scores are kept for --read")
        add("--read", metavar="FOLDER", help="what this command wrote to --out: only say what is related")
    else:
        which = "of the task's queries (default: three, by rule)"
        add("--query", nargs="+", type=at_least(0), metavar="INDEX", help=which)
        add("--top", type=at_least(1), default=EXAMPLES, help="most helpful and harmful of each (default: %(default)s)")
        add("--scores", choices=("raw", "normalised"), default="raw", help="divided by each example's scale, or not")
    options.add_task_arguments(parser)
    options.add_query_arguments(parser)
    options.add_block_arguments(parser, nargs=1)
    add("--out", default=f"{options.RUNS}/{what}", help="where to write (default: %(default)s)")
    parser.set_defaults(alpha=[0.5])  # nothing is retrained
    return parser


def inspect_examples(arguments: argparse.Namespace, command: str, prog: str) -> int:
    options.check_out(arguments.out)
    arguments.methods = arguments.methods or list(METHODS)
    arguments.query_split = arguments.query_split or "all"
    experiment = experiment_of(arguments)
    if arguments.query:
        experiment = replace(experiment, queries=arguments.query)
    session = Session(experiment, execution_of(arguments))
    normalised = arguments.scores == "normalised"
    found, problems = scored(session, normalised)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not found:
        raise UsageError("no method is left; name others with --methods")
    task, (seed, alpha_attribution) = session.task, session.blocks[0]
    if arguments.query:
        why = dict.fromkeys(arguments.query, "")
    else:
        model, _ = base_model(task, seed, session.store, session.execution.device)
        model = model.to(choose_device(session.execution.device)).eval()
        why = choose_queries(task, model, found[0].queries, QUERIES, seed)
    shown = influential(found, arguments.top, list(why))
    print(shown)
    folder = Path(arguments.out) / f"{task.name}-seed{seed}{'' if normalised else '-raw'}"
    written = shown.save(folder)
    if task.image_shape() is not None:
        known = {"seed": seed, "alpha_attribution": alpha_attribution, "command": command}
        known["settings"] = {variant.label: variant.settings for variant in session.active}
        shown.save_record(folder, why, {**known, **provenance(session.device())})
    print(f"\nwritten: {' '.join(map(str, written))}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    works = {"inspect": inspect_examples, "tokens": tokens.inspect_tokens, "words": words.inspect_words}
    what = given[0] if given[:1] in (["tokens"], ["words"]) else "inspect"
    parser = make_parser(what)
    arguments = parser.parse_args(given if what == "inspect" else given[1:])
    line = command_line("bench.inspect", given)
    return options.run_cli(parser.prog, lambda: works[what](arguments, line, parser.prog), "nothing was written")


if __name__ == "__main__":
    sys.exit(main())
