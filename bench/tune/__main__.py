"""Choose every method's settings by one rule, on queries and on subsets that are never reported.

    python -m bench.tune --task digits                                # every method that declares a grid
    python -m bench.tune --task cifar10 --alpha 0.1 0.5 --methods ekfac trak bif --tries 20
    python -m bench.lds --task digits --alpha 0.1 --settings tuned    # what was chosen is used

Each method's file declares a small grid of what matters (`Method.grid`). Every method gets the same number of settings
(`--tries`), its defaults first and the rest in an order that a seed decides. Where a decimal number of the best was
varied, all else equal, and nothing beyond it was tried, ten times or a tenth of it is tried as well, up to four
settings; whole numbers (draws, checkpoints) are budgets and are not followed. What
`--set METHOD.OPTION=VALUE` gives is kept and not tuned. A setting's LDS is the mean over the alphas and seeds asked
for, on the `tune` queries and on subsets of a stream of their own. On a task with groups it is LDS within groups, and
one alpha is tuned at a time, at the models and subsets that `--reference` and `--scheme` ask for. The best by raw LDS
and the best by normalised LDS are chosen separately; settings that a paired 95 % interval cannot tell from the best
count as ties, and the cheapest of them is taken, or the best of those that take within a tenth of its seconds. The
record keeps the whole grid.
"""

import argparse
import functools
import hashlib
import itertools
import math
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import bench.metrics as metrics
from baselines.method import available_methods, load_method
from bench.arguments import (
    RUNS,
    Parser,
    add_cluster_arguments,
    add_plan_arguments,
    add_settings_argument,
    add_task_arguments,
    at_least,
    check_out,
    report,
    run_cli,
)
from bench.experiment import Experiment, execution_of, experiment_of
from bench.methods import TUNED_FORMAT, check_named, tuned_file
from bench.metrics import MINIMUM_SUBSETS
from bench.metrics.intervals import mean_of_defined
from bench.publish import compare
from bench.records import command_line, keep_earlier, provenance, try_write, without_nan, write_json
from bench.rows import on_all_cores
from bench.tables import in_place_of, number, setting_text, table
from bench.tune import Outcome, SettingsGrid, cost_of, sweep
from retrain.errors import UsageError
from retrain.progress import bar
from retrain.reference import FULL, REFERENCES
from retrain.store import canonical_json

TRIES = 12
FURTHER = 4  # settings beyond the grid
EDGE_FACTOR = 10.0
SAME_SECONDS = 1.1  # what a clock cannot tell apart
CHOSEN_BY = ("raw", "normalised")
TUNED_FIELDS = ("task", "protocol", "alphas", "alpha_attribution", "seeds", "run_id", "commit", "code", "device")


# ---- the grid ----


def settings_to_try(method: Any, seed: int, fixed: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """The defaults, then the crossed grid in an order that the seed decides; options in `fixed` stay as they are."""
    grids = [method.grid] if isinstance(method.grid, Mapping) else list(method.grid)
    crossed = [dict(zip(grid, values, strict=True)) for grid in grids for values in itertools.product(*grid.values())]
    order = np.random.default_rng([7, seed]).permutation(len(crossed))
    seen: list[dict[str, Any]] = [{}]
    yield {}
    for place in order:
        options = {name: value for name, value in crossed[place].items() if name not in fixed}
        changed = {name: value for name, value in options.items() if getattr(method, name) != value}
        if changed not in seen:
            seen.append(changed)
            yield options


def beyond(method: Any, best: Mapping[str, Any], tried: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The neighbours of the best setting along every number, where nothing that far out was tried, all else equal."""

    def whole(options: Mapping[str, Any]) -> dict[str, Any]:
        return {name: options.get(name, getattr(method, name)) for name in names}

    names = sorted({name for options in tried for name in options})
    here = whole(best)
    for name in names:
        value = here[name]
        if not isinstance(value, float) or not value > 0:
            continue  # whole numbers are budgets (draws, projections), 0 leaves the choice to the method
        others = [other for other in map(whole, tried) if {**other, name: value} == here]
        values = [other[name] for other in others if other[name] != value]
        if not values:
            continue  # it was never varied
        if value > max(values):
            yield {**best, name: value * EDGE_FACTOR}
        elif value < min(v for v in values if v > 0):
            yield {**best, name: value / EDGE_FACTOR}


@dataclass
class Tried:
    """One setting, with what it came to in every block (seed, alpha)."""

    options: dict[str, Any]
    seconds: float = math.nan
    reason: str = ""
    predictions: dict[str, list[np.ndarray]] = field(default_factory=lambda: {kind: [] for kind in CHOSEN_BY})
    lds: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(CHOSEN_BY))
    diagnostics: dict[str, Any] = field(default_factory=dict)


def try_settings(blocks: Sequence[Any], name: str, options: dict[str, Any]) -> Tried:
    """Scores one setting on every block's tune queries and subsets."""
    tried = Tried(options, seconds=0.0)
    values: dict[str, list[float]] = {kind: [] for kind in CHOSEN_BY}
    for grid in blocks:
        try:
            scorer = grid.scorer(grid.method(name, **options))
            predictions = grid.predictions(scorer)
        except (RuntimeError, FloatingPointError, UsageError) as error:
            tried.reason = str(error).splitlines()[0]
            tried.lds = dict.fromkeys(CHOSEN_BY)
            return tried
        tried.diagnostics = cost_of(predictions[0].record)
        tried.seconds += tried.diagnostics.pop("seconds")
        for position, prediction in enumerate(predictions):
            losses, within = grid.losses(scorer, position), grid.within(position)
            for kind, made in (("raw", prediction.raw), ("normalised", prediction.normalised)):
                if made is not None:
                    tried.predictions[kind].append(made)
                    ranked = (losses, made)
                    if within is not None:
                        ranked = (within.take_out(losses, np.float32), within.take_out(made))
                    values[kind].append(mean_of_defined(metrics.spearman_per_column(*ranked)))
    tried.lds = {kind: float(np.mean(found)) if found else None for kind, found in values.items()}
    return tried


# ---- the choice ----


def defined(tried: Sequence[Tried], kind: str) -> list[Tried]:
    return [one for one in tried if math.isfinite(math.nan if (lds := one.lds[kind]) is None else lds)]


def best_of(tried: Sequence[Tried], kind: str) -> Tried | None:
    return max(defined(tried, kind), key=lambda one: one.lds[kind] or 0.0, default=None)


Truth = tuple[np.ndarray, metrics.GroupCounts | None]  # losses of a block, and its groups' counts


def choose(tried: Sequence[Tried], truths: Sequence[Truth], kind: str) -> dict[str, Any] | None:
    """The cheapest of those that cannot be told from the best; None where no setting has a score."""
    best = best_of(tried, kind)
    if best is None:
        return None
    others = [one for one in defined(tried, kind) if one is not best]
    behind = clearly_behind(others, best, truths, kind)
    ties = [best, *(one for one, is_behind in zip(others, behind, strict=True) if not is_behind)]
    least = min(one.seconds for one in ties)
    chosen = max((one for one in ties if one.seconds <= SAME_SECONDS * least), key=lambda one: one.lds[kind] or 0.0)
    return {
        "options": chosen.options,
        "lds": chosen.lds[kind],
        "seconds": chosen.seconds,
        "best": {"options": best.options, "lds": best.lds[kind], "seconds": best.seconds},
        "num_ties": len(ties),
        "num_tried": len(tried),
    }


def clearly_behind(others: Sequence[Tried], best: Tried, truths: Sequence[Truth], kind: str) -> list[bool]:
    """Whether the best is ahead of each by `bench.publish.compare`, its blocks taken as independent."""
    if not others:
        return []
    calls = [
        (functools.partial(metrics.paired_difference, within=within), (losses, ahead, behind))
        for one in others
        for (losses, within), ahead, behind in zip(truths, best.predictions[kind], one.predictions[kind], strict=True)
    ]
    found = on_all_cores(calls, sum(truth.size for _, (truth, _, _) in calls))
    gaps = [compare.Estimate(pair.difference, pair.ci_low, pair.ci_high) for pair in found]
    each = [gaps[k : k + len(truths)] for k in range(0, len(gaps), len(truths))]
    return [compare.is_ahead(compare.mean_of_independent(blocks), negligible=0.0) for blocks in each]


def tune_method(blocks: Sequence[Any], name: str, tries: int) -> dict[str, Any]:
    """The grid as far as `tries` go, what lies beyond its edge, and what was chosen."""
    truths = [
        (grid.losses(grid.scorer(grid.method("random")), position), grid.within(position))
        for grid in blocks
        for position in range(len(grid.plans))
    ]
    method, fixed = blocks[0].method(name), blocks[0].options.get(name, {})
    wanted = list(settings_to_try(method, blocks[0].seed, in_place_of(fixed)))
    for grid in blocks:
        grid.prepare([grid.method(name, **options) for options in wanted[:tries]])
    shown = bar(wanted[:tries], desc=name, unit="setting", delay=2, leave=False)
    tried = [try_settings(blocks, name, options) for options in shown]
    num_in_grid = len(tried)
    while len(tried) < num_in_grid + FURTHER:
        settings = [one.options for one in tried]
        best = filter(None, (best_of(tried, kind) for kind in CHOSEN_BY))
        edge = next((options for one in best for options in beyond(method, one.options, settings)), None)
        if edge is None:
            break
        tried.append(try_settings(blocks, name, edge))
    return {
        "grid": [
            {"options": one.options, **{f"lds_{kind}": one.lds[kind] for kind in CHOSEN_BY}, "seconds": one.seconds}
            | one.diagnostics
            | ({"reason": one.reason} if one.reason else {})
            for one in tried
        ],
        "chosen": {kind: choose(tried, truths, kind) for kind in CHOSEN_BY},
        "seconds": sum(one.seconds for one in tried),
        "num_settings": len(wanted),
        "num_beyond": len(tried) - num_in_grid,
        "fixed": {option: getattr(method, option) for option in fixed},
    }


# ---- what is asked ----


def tunable_methods() -> list[str]:
    found = []
    for name in available_methods():
        try:
            if load_method(name).grid:
                found.append(name)
        except UsageError:
            continue  # an extra that is not installed
    return found


def show_choice(found: Mapping[str, Any]) -> str:
    rows = []
    for name, one in found.items():
        for kind, chosen in one["chosen"].items():
            if chosen is not None:
                options = ",".join(f"{k}={setting_text(v)}" for k, v in chosen["options"].items()) or "defaults"
                default = one["grid"][0][f"lds_{kind}"]
                found_lds = [number(value) for value in (chosen["lds"], chosen["best"]["lds"], default)]
                ties = f"{chosen['num_ties']} of {chosen['num_tried']}"
                rows.append([name, kind, options, *found_lds, ties, number(chosen["seconds"], 1)])
    header = ["method", "by", "chosen", "LDS", "best", "defaults", "ties", "seconds"]
    return table(header, rows, left=3) if rows else "nothing was chosen: no setting has a score"


def tune(arguments: argparse.Namespace) -> Outcome:
    names = arguments.methods or tunable_methods()
    arguments.methods, arguments.alpha = None, arguments.alpha or [0.1]
    out = Path(arguments.out)
    if variants := [name for name in names if "@" in name]:
        raise UsageError(f'"{variants[0]}" is a variant, and its settings are what is chosen; fix one of them by --set')
    asked = replace(experiment_of(arguments), query_split="tune", stream="tune", settings="default")
    execution, task = execution_of(arguments), asked.build_task()
    by_alpha = task.groups() is not None or asked.reference != FULL
    if by_alpha and len(asked.alpha) > 1:
        raise UsageError("what is best depends on alpha here, so it is chosen for one --alpha at a time")
    check_there_is_a_choice(names, asked)
    check_out(arguments.out)
    grids = [SettingsGrid(replace(asked, seeds=(seed,)), execution) for seed in asked.seeds]
    found, remarks = {}, []
    for grid in grids:
        grid.retrain()
    for name in names:
        if reason := grids[0].method(name).skip(task):
            remarks.append(f"skipped {name}: {reason}")
        else:
            found[name] = tune_method(grids, name, arguments.tries)
    told = {"seeds": list(asked.seeds), "alphas": list(asked.alpha), "tries": arguments.tries, "further": FURTHER}
    measure = "lds" if task.groups() is None else "lds_within_groups"
    tuned = {  # what was chosen, for whoever uses it, beside the whole record
        "format": TUNED_FORMAT,
        **dict.fromkeys(TUNED_FIELDS),
        **({"reference": asked.reference, "scheme": asked.scheme, "chosen_by": measure} if by_alpha else {}),
        "rule": str(__doc__).split("\n\n")[2].replace("\n", " "),
        "methods": without_nan({name: one["chosen"] for name, one in found.items() if all(one["chosen"].values())}),
    }
    path = out / (tuned_file(task, asked.reference, asked.alpha[0]) if by_alpha else tuned_file(task))
    result = without_nan({**grids[0].describe(), **told, "methods": found})
    return Outcome(grids[0], result, out / "tune.json", show_choice(found), remarks=remarks, tuned=(path, tuned))


def check_there_is_a_choice(names: Sequence[str], asked: Experiment) -> None:
    """Before anything is retrained: every method has a grid, of which --set leaves something to choose."""
    known = set(names)
    for name in names:
        fixed = asked.options.get(name, {})
        method = load_method(name, **fixed)
        known.add(method.name)
        if not method.grid:
            raise UsageError(f"{name} declares no grid; there is nothing to choose")
        if len(list(settings_to_try(method, 0, in_place_of(fixed)))) == 1:
            raise UsageError(
                f"--set fixes all that {name} would be tuned in ({', '.join(fixed)}); leave some of it out"
            )
    check_named(known, str(asked.task), asked.options)


# ---- the commands ----

# Command -> what it says of itself, its work.
COMMANDS = {
    "": (str(__doc__).split("\n")[0], tune),
    "sweep": ("LDS against a grid of one method's settings.", sweep.run_sweep),
    "budget": ("LDS against what is spent: draws, projections, seconds.", sweep.run_budget),
}
METHODS_HELP = {
    "": "whose settings are chosen (default: every method that declares a grid)",
    "sweep": "the one whose settings are swept (default: bif)",
    "budget": "whose curves: bif, trak, trak@ridge=0, long=bif@draws=2500 ... (default: bif trak)",
}


def make_parser(command: str) -> argparse.ArgumentParser:
    others = "\n".join(f"  {name:8} {words}" for name, (words, _) in COMMANDS.items() if name and not command)
    parser = Parser(
        prog=f"python -m bench.tune {command}".strip(),
        description=COMMANDS[command][0],
        epilog=f"other commands (`tda-bench tune NAME --help`):\n{others}" if others else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_task_arguments(parser)
    add = parser.add_argument
    add("--methods", nargs="+", metavar="METHOD", help=METHODS_HELP[command])
    if command:
        add_settings_argument(parser)
    else:
        add("--tries", type=at_least(1), default=TRIES, help="settings a method (default: %(default)s)")
    if command == "sweep":
        add("--grid", nargs="+", metavar="OPTION=V1,V2", help="settings to cross (default: the paper's, of BIF)")
    add_plan_arguments(parser, MINIMUM_SUBSETS, required=bool(command))
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
    line = command_line("bench.tune", words)
    kept = "finished settings are kept, and the same command goes on"
    return run_cli(parser.prog, lambda: work(arguments, command, line, parser.prog), kept, arguments.traceback)


def work(arguments: argparse.Namespace, command: str, line: str, prog: str) -> int:
    started = time.perf_counter()
    outcome = COMMANDS[command][1](arguments)
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
        files[place] = tuned | {name: record[name] for name in TUNED_FIELDS}

    def write() -> None:
        for place, content in files.items():
            keep_earlier(place, run_id)
            write_json(place, content)

    unwritten = try_write(write, path)
    print(outcome.text)
    print(f"\nrun {run_id} in {record['seconds']:.0f} s" + ("" if unwritten else f"; record: {path}"))
    if outcome.tuned is not None and not unwritten:
        words = f"tda-bench lds --task {arguments.task} --settings tuned ..."
        print(f"to use it: TDA_BENCH_TUNED={arguments.out} {words}")
    lost = [f"{unwritten}; the same command writes it, from {arguments.cache}"] if unwritten else []
    return report(prog, [*grid.session.notes, *outcome.remarks], [*lost, *outcome.problems])


if __name__ == "__main__":
    sys.exit(main())
