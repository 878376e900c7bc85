"""What the command line of bench.scaling asks for: its options, their defaults by device, and the sweep they mean."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.scaling.estimate import PAPER_FITTED
from bench.scaling.methods import COMPARED
from bench.scaling.problem import load_queries
from bench.scaling.specifications import SweepRequest
from retrain.command import Parser, at_least, check_device
from retrain.errors import UsageError
from retrain.models.pythia_suite import SUITE
from retrain.store import default_cache

PAPER_SETTING: dict[str, Any] = {
    "models": list(SUITE),
    "methods": list(COMPARED),
    "train": 400,
    "tokens": 150,
    "fit_examples": [400, 2_000, 10_000, PAPER_FITTED],
    "budget_seconds": 600.0,
}
# On a CPU the paper's setting would take days: fewer, shorter sequences of the smallest models.
CPU_SETTING: dict[str, Any] = {
    "models": ["14m", "31m"],
    "methods": list(COMPARED),
    "train": 8,
    "tokens": 32,
    "fit_examples": [8, 16],
    "budget_seconds": 20.0,
}


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.scaling", description="Seconds, memory and disk across the Pythia suite.")
    add = parser.add_argument_group("what is measured").add_argument
    add("--models", nargs="+", help=f"of {' '.join(SUITE)}, or model folders (default: all; on a CPU 14m 31m)")
    add("--methods", nargs="+", help=f"of baselines/, bif_tokens, or module:Class (default: {' '.join(COMPARED)})")
    add("--train", type=at_least(2), help="training sequences (default: 400; on a CPU 8)")
    add("--queries", nargs="+", default=["18"], help="how many (our 18, repeated), or a JSON file of them")
    add("--tokens", type=at_least(2), help="length of every sequence (default: 150; on a CPU 32)")
    add("--draws", type=at_least(2), default=2000, help="of BIF, all chains together (default: 2000)")
    add("--timed-draws", type=at_least(2), default=100, help="of BIF, where not all fit the budget (default: 100)")
    add("--chains", type=at_least(1), default=4, help="of BIF (default: 4)")
    add(
        "--fit-examples", nargs="+", type=at_least(2), metavar="N",
        help="sequences EK-FAC is fitted on (default: 400 2000 10000 1000000, the paper's the last; on a CPU 8 16; "
        "of an estimate --train 10000 1000000)",
    )  # fmt: skip
    add("--layers", nargs="+", type=at_least(1), metavar="N", help="depths EK-FAC is measured at (default: as fits)")
    add = parser.add_argument_group("how").add_argument
    add("--budget-seconds", type=float, help="of one point; beyond it, projected (default: 600; on a CPU 20)")
    add("--total-seconds", type=float, help="of the whole sweep; larger models get more of it (default: no limit)")
    add("--random-weights", action="store_true", help="never load weights; the same architecture, initialised")
    add("--text", metavar="FILE", help="documents as .jsonl[.xz]; without it, training sequences are random tokens")
    add("--tokenizer", metavar="NAME", help="folder or name; without it, the model's own, or bytes")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 ... (default: auto)")
    add("--seed", type=at_least(0), default=1, help="of weights, tokens and methods (default: 1)")
    add("--set", action="append", default=[], metavar="METHOD.OPTION=VALUE", help="option of a method")
    add("--cache", default=default_cache(), help="where finished points are kept (default: %(default)s)")
    add("--out", default="runs/scaling", help="where scaling.csv and scaling.json go (default: %(default)s)")
    add("--force", action="store_true", help="measure again what is already kept")
    add("--dry-run", action="store_true", help="measure nothing: every point, and about how long it would take")
    add("--json", action="store_true", help="print rows (or estimates) as a JSON list instead of tables")
    add("--wide", action="store_true", help="every column of the table, and where projections come from")
    add(
        "--campaign", nargs="*", metavar="PART",
        help="measure these parts of results/scaling, each into a folder of --out (all: every one); alone: the plan",
    )  # fmt: skip
    modes = parser.add_argument_group("instead of measuring", "one of --merge, --estimate, --check and --verdict")
    add = modes.add_argument
    add("--merge", nargs="+", metavar="JSON", help="run nothing: one table from these sweeps' scaling.json")
    add("--rates", metavar="FILE", help="with --merge: also write the rows here, as estimates read them")
    add("--estimate", action="store_true", help="run nothing: predict the cost of --model from measured rows")
    add("--check", action="store_true", help="run nothing: every measured model predicted from the others")
    add("--verdict", nargs="?", const="", metavar="FILE", help="run nothing: who is cheaper, as Markdown; into a page")
    add("--model", help="with --estimate: a size of the suite, or a model folder")
    add("--against", metavar="FILE", help="with --estimate: hold predictions against this other sweep's scaling.csv")
    add("--from", dest="source", metavar="FILE", help="rows that estimates rest on (default: the package's)")
    return parser


GOES_WITH = {  # what each thing to do looks at
    "merge": {"rates", "methods", "fit_examples", "out", "json", "wide"},
    "estimate": {"model", "methods", "train", "queries", "tokens", "draws", "fit_examples", "source", "json"},
    "against": {"estimate", "source", "json", "wide"},
    "check": {"source", "json", "wide"},
    "verdict": {"source"},
    "campaign": {
        "device", "text", "tokenizer", "seed", "total_seconds", "force", "dry_run", "source", "train", "queries",
        "tokens", "random_weights", "draws", "chains", "set", "cache", "out", "json", "wide",
    },
}  # fmt: skip


def check_mode(arguments: argparse.Namespace) -> None:
    """One thing at a time, and nothing that would be passed over."""
    plain = vars(make_parser().parse_args([]))
    given = [name for name, value in vars(arguments).items() if value != plain[name]]
    if arguments.model and not arguments.estimate:
        raise UsageError(f"--model goes with --estimate; to measure, --models {arguments.model}")
    for name, mode in (("rates", "merge"), ("against", "estimate")):
        if name in given and mode not in given:
            raise UsageError(f"--{name} goes with --{mode}")
    if "source" in given and not {"estimate", "check", "verdict", "dry_run", "merge", "campaign"} & set(given):
        raise UsageError("--from goes with --estimate, --check, --verdict or --dry-run, which rest on rates")
    modes = [name for name in GOES_WITH if name in given and not (name == "estimate" and arguments.against)]
    if len(modes) > 1:
        raise UsageError(f"{' and '.join(f'--{name}' for name in modes)}: expected one of them at a time")
    for mode in modes:
        if over := [name for name in given if name not in {mode, *GOES_WITH[mode]}]:
            words = ", ".join("--from" if name == "source" else f"--{name.replace('_', '-')}" for name in over)
            them = "it" if len(over) == 1 else "them"
            raise UsageError(f"{words} would be passed over: --{mode} does not take {them}")


def fill_defaults(arguments: argparse.Namespace) -> None:
    """What was not given, by device; says so where it is not the paper's setting."""
    from retrain.units import choose_device

    check_device(arguments.device)
    cpu = not arguments.estimate and arguments.campaign is None and choose_device(arguments.device).type == "cpu"
    changed = []
    for name, value in (CPU_SETTING if cpu else PAPER_SETTING).items():
        if getattr(arguments, name) is None and not (arguments.estimate and name in ("methods", "fit_examples")):
            setattr(arguments, name, value)
            if cpu and name in ("train", "tokens"):
                changed.append(f"--{name} {value} (the paper: {PAPER_SETTING[name]})")
    if changed:
        print(f"on a CPU, a smaller setting: {', '.join(changed)}", file=sys.stderr)
    for name in ("budget_seconds", "total_seconds"):
        seconds = getattr(arguments, name)
        if seconds is not None and not 0 < seconds < math.inf:  # nor "nan"
            raise UsageError(f"--{name.replace('_', '-')} is {seconds}; expected seconds above 0")


def query_counts(words: Sequence[str]) -> tuple[tuple[int, ...], str | None]:
    """Numbers of queries, and the file they are from; a file alone is all of its queries."""
    numbers = [word for word in words if word.removeprefix("-").isdecimal()]
    files = [word for word in words if word not in numbers]
    counts = tuple(int(word) for word in numbers)
    if len(files) > 1:
        raise UsageError(f"--queries {' '.join(files)}: expected numbers, and one JSON file at most")
    path = files[0] if files else None
    if path and not Path(path).is_file():
        raise UsageError(f"--queries {path}: expected how many, or a JSON file of queries, and there is no such file")
    if any(count < 1 for count in counts):
        raise UsageError(f"--queries {min(counts)} is too few; expected at least 1")
    return counts or (len(load_queries(path)),), path


def request_of(arguments: argparse.Namespace) -> SweepRequest:
    counts, query_file = query_counts(arguments.queries)
    for setting in arguments.set if arguments.campaign is None else ():  # parts of a campaign have methods of their own
        if (method := setting.partition(".")[0]) not in arguments.methods:
            raise UsageError(f"--set {setting}: {method} is not among --methods ({', '.join(arguments.methods)})")
    for setting in arguments.set:
        if (option := setting.partition("=")[0].partition(".")[2]) in ("draws", "chains"):
            raise UsageError(f"--set {setting}: in a sweep that is --{option}")
    return SweepRequest(
        models=tuple(arguments.models), methods=tuple(arguments.methods), train=arguments.train, queries=counts,
        query_file=query_file, tokens=arguments.tokens, draws=arguments.draws, timed_draws=arguments.timed_draws,
        chains=min(arguments.chains, arguments.draws), fit_examples=tuple(arguments.fit_examples),
        layers=tuple(arguments.layers or ()), random_weights=arguments.random_weights, text=arguments.text,
        tokenizer=arguments.tokenizer, device=arguments.device, seed=arguments.seed, settings=tuple(arguments.set),
    )  # fmt: skip
