"""The arguments of every command: their names and kinds, checks, and exit codes.

An option means the same wherever it is offered. `bench/experiment.py` makes an Experiment and an Execution of what was
given; what a command raises becomes one line and an exit code in `run_cli`.
"""

import argparse
import difflib
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from traceback import print_exc
from typing import Any

from retrain.errors import UsageError, error_line
from retrain.jobs import CLUSTERS, JobError
from retrain.jobs.tracker import UnitTraceback, blamed, shortened
from retrain.progress import close_bars
from retrain.safe_files import SafeFileError, one_line
from retrain.store import StoreError, default_cache
from retrain.subsets import SCHEMES, STARTS

RUNS = "runs"  # where commands leave their records, and look for them
MAX_WORDS = 4000  # of an error in one line
KEPT = "finished work is kept, and the same command goes on"
SCORES_ARE = ("loss-change", "helpfulness")  # a positive score: the loss rises, or falls, with the example
SPLITS = ("tune", "report", "all")
DEFAULT_METHODS = ("bif", "ekfac", "kfac", "trak", "gradsim", "random")
TASK_OPTIONS = ("data_dir", "model", "text", "eval_text")  # options of a task with a flag of their own


class Parser(argparse.ArgumentParser):
    """One line on stderr, exit code 2."""

    def __init__(self, listed: Mapping[str, str] | None = None, **options: Any):
        """listed: name -> what it is, below the help."""
        if "prog" in options and Path(sys.argv[0]).name.startswith("tda-bench"):  # speaks of itself as it was called
            prog = options["prog"].replace("python -m bench.evaluations", "tda-bench evaluate")
            options["prog"] = prog.replace("python -m bench.", "tda-bench ")
        if listed:
            width = max(map(len, listed))
            lines = [f"  {name:{width}}  {text}" for name, text in listed.items()]
            options["epilog"] = "\n".join(["available:", *lines])
            options["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"allow_abbrev": False, **options})

    @classmethod
    def of_module(
        cls, prog: str, about: str, modules: Mapping[str, tuple[str, str]], words: Sequence[str]
    ) -> tuple[Any, "Parser", argparse.Namespace]:
        """Of `PROG NAME ...`: the module that the name stands for, its own parser, and its arguments.

        modules: name -> (module, what it does); a module has `add_arguments(parser)`.
        """
        parser = cls(prog=prog, description=about, listed={name: text for name, (_, text) in modules.items()})
        parser.add_argument("name", choices=tuple(modules), metavar="NAME", help="see below")
        name = parser.parse_args(words[:1] or ["-h"]).name
        module, text = importlib.import_module(modules[name][0]), modules[name][1]
        own = cls(prog=f"{parser.prog} {name}", description=text)
        module.add_arguments(own)
        return module, own, own.parse_args(words[1:])

    def error(self, message: str) -> Any:
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            meant = difflib.get_close_matches(choice[1], [one.strip(" '") for one in choice[2].split(",")], n=1)
            message += f"; did you mean {meant[0]}?" if meant else ""
        self.exit(2, f"{self.prog}: {message}; see --help\n")


# ---- types of arguments ----


def fraction(text: str, or_all: bool = False) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'"{text}" is no number; expected a fraction such as 0.1') from None
    if not 0 < value < 1 and not (or_all and value == 1):
        most = "at most 1" if or_all else "below 1"
        raise argparse.ArgumentTypeError(f"{text} is out of range; expected a fraction above 0 and {most}")
    return value


share = partial(fraction, or_all=True)  # a fraction that may be all


def at_least(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f'"{text}" is no whole number') from None
        if value < minimum:
            what = "is too few" if minimum else "is negative"
            raise argparse.ArgumentTypeError(f"{value} {what}; expected at least {minimum}")
        return value

    return parse


def count_or_file(text: str) -> int | str:
    return at_least(1)(text) if text.lstrip("-").isdigit() or "." not in text else text


def add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """What names a task, its data and its options; `build_task` reads them."""
    add = parser.add_argument
    add("--task", default="auto", help="auto, a file of retrain/tasks or of yours, or module:Class (default: auto)")
    add("--protocol", default="", help="how to retrain, where the task offers several (default: the task's first)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 ... (default: auto)")
    add("--data-dir", help="folder with the task's data, where it needs one")
    add("--model", help="model folder or name, where the task takes one")
    add("--train", metavar="FILE", help="training data of yours: a table, or texts with labels (.csv, .jsonl)")
    add("--text", help="text file, where the task takes one")
    add("--eval-text", help="text file of the queries, where the task takes one of their own")
    add("--set", action="append", default=[], metavar="NAME.OPTION=VALUE", help="option of a method or of the task")
    add("--cache", default=default_cache(), help="where finished work is kept (default: %(default)s)")


def add_plan_arguments(parser: argparse.ArgumentParser, minimum_subsets: int = 1, required: bool = True) -> None:
    """Which subsets are retrained on, and how often; several alphas, shares and seeds make several experiments."""
    add = parser.add_argument
    kept = "share of the attributed examples that each subset keeps"
    add("--alpha", nargs="+", type=fraction, required=required, help=f"alpha_retrain: {kept}")
    add_block_arguments(parser)
    add("--subsets", type=at_least(minimum_subsets), help="retrained subsets (default: 100)")
    add("--scheme", choices=SCHEMES, help="fixed size, independent draws, or every group's share (default: fixed)")
    add("--replicates", type=at_least(1), help="retrains per subset, for the noise ceiling (default: the task's)")
    add("--replicated-subsets", type=at_least(minimum_subsets), help="only the first so many subsets are replicated")
    starts = "of retrained models: the base model's, each its own, or the base training replayed without the left out"
    add("--initialisation", choices=STARTS, help=starts)


def add_block_arguments(parser: argparse.ArgumentParser, nargs: int | str = "+") -> None:
    """Which base models, and how much of the training set is attributed. nargs: 1 for commands about one of each."""
    seeds = "of base models, subsets and retraining: whole experiments (default: 1)"
    parser.add_argument("--seeds", "--seed", nargs=nargs, type=at_least(0), help=seeds)
    told = "share of the training set attributed (default: the task's)"
    parser.add_argument("--alpha-attribution", nargs=nargs, type=share, help=told)


def add_method_arguments(parser: argparse.ArgumentParser, default: Sequence[str] = DEFAULT_METHODS) -> None:
    """Which methods, with which settings; bench/methods.py has the spelling."""
    spelled = "METHOD, METHOD@OPTION=VALUE,... or LABEL=METHOD@...; a METHOD is a file of baselines/ or of yours, or"
    usual = f"package.module:Class (default: {' '.join(default)})"
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help=f"{spelled} {usual}")
    add_settings_argument(parser)


def add_settings_argument(parser: argparse.ArgumentParser) -> None:
    whose = "whose settings methods get (default: tuned where the task has been tuned)"
    parser.add_argument("--settings", choices=("auto", "tuned", "library", "paper", "default"), help=whose)


def add_query_arguments(parser: argparse.ArgumentParser) -> None:
    told = "only the first so many queries of the split; or a file of yours, beside --train"
    parser.add_argument("--queries", type=count_or_file, metavar="N|FILE", help=told)
    parser.add_argument("--query-split", choices=SPLITS, help="which queries (default: report)")


def one_of_each(arguments: argparse.Namespace, *names: str) -> None:
    """For commands about one experiment, which share their flags with those about many."""
    for name in names:
        if len(getattr(arguments, name) or []) > 1:
            flag = name.replace("_", "-").removesuffix("s")
            raise UsageError(f"--{flag} takes one value here; run the command for each")


def choose_task(name: str, data_dir: str | None) -> tuple[str, str]:
    """The task, and one line saying why this one and how to get the other."""
    from retrain.data.cifar10 import is_available
    from retrain.units import choose_device

    if name != "auto":
        return name, ""
    gpu, data = choose_device("auto").type == "cuda", is_available(data_dir)
    if gpu and data:
        return "cifar10", "task cifar10: a GPU and the data are here (--task digits takes the small embedded task)"
    missing = " and ".join(["no CUDA GPU"] * (not gpu) + ["no CIFAR-10 data"] * (not data))
    return "digits", f"task digits: {missing} here (--task cifar10 --data-dir DIR takes the paper's)"


def options_by_owner(settings: Sequence[str]) -> dict[str, dict[str, str]]:
    """NAME -> OPTION -> VALUE of every --set."""
    found: dict[str, dict[str, str]] = {}
    for setting in settings:
        target, equals, value = setting.partition("=")
        owner, dot, option = target.rpartition(".")
        if not equals or not dot or not owner or not option:
            raise UsageError(f'--set takes NAME.OPTION=VALUE, for example --set bif.chains=4, not "{setting}"')
        found.setdefault(owner, {})[option] = value
    return found


def task_words(
    arguments: argparse.Namespace, default: str = "auto"
) -> tuple[str, dict[str, Any], dict[str, dict[str, str]]]:
    """What the command line says of the task: its name, its options, and the --set options of everybody else."""
    own, model = {}, arguments.model
    if arguments.train:
        own["train_file"] = arguments.train
    if isinstance(getattr(arguments, "queries", None), str):
        own["query_file"], arguments.queries = arguments.queries, None
    if own and arguments.task == "auto":
        is_file = model is None or Path(model).is_file() or Path(model).suffix in (".pt", ".pth", ".safetensors")
        default = "table" if is_file else "text_classifier"
        own |= {} if model is None else {"protocol": "given"}  # a model of one's own is taken as it is
    name, line = choose_task(default if arguments.task == "auto" else arguments.task, arguments.data_dir)
    if line:
        print(line, file=sys.stderr)
    others = options_by_owner(arguments.set)
    options: dict[str, Any] = own
    for owner in (name, Path(name.partition(".py")[0]).name):  # a file is called by its path or by its name
        options |= others.pop(owner, {})
    if arguments.protocol:
        options["protocol"] = arguments.protocol
    for option in TASK_OPTIONS:
        if getattr(arguments, option) is not None:
            options[option] = getattr(arguments, option)
    return name, options, others


# ---- where the work runs ----


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags every command that runs units has; `cluster_options` turns them into arguments of `run_units`."""
    add = parser.add_argument_group("where the work runs").add_argument
    where = "this process, local processes, or Slurm (default: local where the device is a CPU of several cores)"
    add("--cluster", choices=CLUSTERS, help=where)
    add("--jobs", type=int, help="units at once (default: one per GPU or core; 16 on Slurm)")
    sbatch = "an sbatch option, e.g. --slurm partition=gpu --slurm qos=low; repeatable"
    add("--slurm", action="append", default=[], metavar="KEY=VALUE", help=sbatch)
    add("--timeout-min", type=float, help="minutes for one unit (local) or one array task (Slurm)")
    add("--traceback", action="store_true", help="print the whole traceback of what fails")
    add("--collect", action="store_true", help="start nothing: take what is or gets finished")


def cluster_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `run_units` that the flags of `add_cluster_arguments` ask for."""
    slurm = {}
    for item in args.slurm:
        key, equals, value = item.partition("=")
        key = key.strip().lstrip("-").replace("-", "_")
        if not equals or not key:
            raise UsageError(f'--slurm takes KEY=VALUE, for example --slurm partition=gpu, not "{item}"')
        slurm[key] = value
    cluster = args.cluster or default_cluster(args.device)
    if slurm and cluster != "slurm":
        raise UsageError(f"--slurm options need --cluster slurm, not {cluster}")
    if args.jobs is not None and args.jobs < 1:
        raise UsageError(f"--jobs must be at least 1, not {args.jobs}")
    given = {name: getattr(args, name) for name in ("jobs", "timeout_min", "collect", "traceback")}
    return {"cluster": cluster, "slurm": slurm, **given}


def default_cluster(device: str) -> str:
    """On a CPU every core retrains; a GPU is kept busy by one process."""
    from retrain.units import choose_device

    return "local" if choose_device(device).type == "cpu" and (os.cpu_count() or 1) > 1 else "inline"


def check_device(name: str) -> None:
    from retrain.units import choose_device

    try:
        device = choose_device(name)
    except RuntimeError:
        raise UsageError(f'unknown device "{name}"; expected auto, cpu, cuda, or cuda:N') from None
    import torch

    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f'device "{name}" was asked for, but torch sees no CUDA GPU; use --device cpu')


def check_out(folder: str) -> None:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f'--out "{folder}" cannot be made: {error.strerror}; give another folder') from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f'--out "{folder}" cannot be written to; give another folder')


def run_cli(prog: str, work: Callable[[], int], interrupted: str = KEPT, traceback: bool | None = None) -> int:
    """The exit code of a command's work; what that raises is one line on stderr.

    1: it failed; 2: it was asked for what cannot be; 130: interrupted. traceback: of commands with --traceback, whether
    it was given; without it the code of tasks and methods fails in one line, wherever it is called from.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        return work()
    except (UsageError, StoreError, SafeFileError) as error:
        print(f"{prog}: {one_line(str(error), MAX_WORDS)}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # ... | head
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        close_bars()
        print(f"{prog}: interrupted; {interrupted}", file=sys.stderr)
        return 130
    except Exception as error:
        close_bars()
        told, where = isinstance(error, RuntimeError | FloatingPointError), ""
        if told and traceback and not isinstance(error, JobError) and not isinstance(error.__cause__, UnitTraceback):
            print_exc()  # of a unit it was printed where the unit was given up
        # A full disk, or a folder where a file was to go, is nobody's mistake in the code.
        if not told and (traceback or (traceback is None and not isinstance(error, OSError))):
            raise
        if not told and traceback is not None:
            file, line = blamed(error)
            where = f" ({shortened(file)}:{line}); --traceback shows it whole"
        print(f"{prog}: {error_line(error)}{where}", file=sys.stderr)
        return 1


def report(prog: str, notes: Iterable[str], problems: Sequence[str], skipped: Mapping[str, str] | None = None) -> int:
    """A line each on stderr; the exit code, 1 where there are problems. skipped: label -> why."""
    lines = [*notes, *(f"skipped {label}: {reason}" for label, reason in (skipped or {}).items())]
    for line in [*lines, *(f"{prog}: {problem}" for problem in problems)]:
        print(line, file=sys.stderr)
    return 1 if problems else 0
