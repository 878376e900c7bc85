"""Ground truth of others, and ours for others: score a method without retraining anything.

    python -m bench.truth export --task digits --alpha 0.1 --out DIR            # ours, from the cache of bench.lds
    python -m bench.truth import arrays --masks masks.npy --losses losses.npy --out DIR
    python -m bench.truth import trak --masks masks.npy --margins margins.npy --out DIR
    python -m bench.truth import dattri --indices indices.npy --values values.npy --num-train 5000 --out DIR
    python -m bench.truth import bergson --subsets subsets.json --losses losses.npy --num-train 4096 --out DIR
    python -m bench.lds --ground-truth DIR --scores FILE                        # the LDS of anybody's scores

`bench/truth_folder.py` describes the folder that is written. What others publish is turned into that form, each by its
own declared convention:

| source  | subsets                                    | values                           | become losses by |
| ------- | ------------------------------------------ | -------------------------------- | ---------------- |
| arrays  | `masks` (K, n), 1 = kept                   | losses (K, q), larger = worse    | as they are      |
| trak    | `masks` (K, n), 1 = kept                   | margins (K, q), larger = better  | minus the margin |
| dattri  | `indices` (K, size), the *kept* ids        | flipped targets, larger = better | minus the value  |
| bergson | `subsets.json`, K lists of *left-out* ids  | losses (K, q), larger = worse    | as they are      |

`--values-are loss|output` overrides the last two columns, for instance for dattri before it flipped its values.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import metrics
from bench.ground_truth import GroundTruth, ground_truth
from bench.records import code_fingerprint, try_write
from bench.truth_folder import as_masks, as_values, check_orientation, one_array, read_truth, write_truth
from retrain.command import (
    Parser,
    add_cluster_arguments,
    add_plan_arguments,
    add_task_arguments,
    at_least,
    build_task,
    check_device,
    check_out,
    cluster_options,
    guarded,
    plans_for,
)
from retrain.errors import UsageError
from retrain.safe_files import read_json
from retrain.store import Store
from retrain.task import Task
from retrain.train import Plan

SOURCES = {"arrays": "loss", "trak": "output", "dattri": "output", "bergson": "loss"}
VALUES_ARE = ("loss", "output")  # larger is worse, or larger is better


# ---- importing ----


def id_lists(path: str, name: str) -> list[list[int]]:
    """One list of training ids a subset, from a JSON file or from an integer array (num_subsets, size)."""
    if not path.endswith(".json"):
        array = one_array(path, name)
        if array.ndim != 2 or array.dtype.kind not in "iu":
            raise UsageError(
                f"{path} has shape {array.shape} and dtype {array.dtype}; expected integers, (num_subsets, size)"
            )
        return array.tolist()
    content = read_json(path, follow_links=True)
    if isinstance(content, dict):
        content = content.get(name, content)
    if isinstance(content, dict):  # {"0": [...], "1": [...]}: in the order of their numbers
        try:
            content = [content[key] for key in sorted(content, key=int)]
        except ValueError:
            keys = ", ".join(list(content)[:4])
            raise UsageError(f'{path} has the keys {keys}; expected "{name}", or the numbers of subsets') from None
    is_ids = isinstance(content, list) and all(isinstance(ids, list) for ids in content)
    if not is_ids or not all(type(i) is int for ids in content for i in ids):
        raise UsageError(f"{path} is not a list of lists of whole numbers; expected one list of training ids a subset")
    return content


def membership(lists: list[list[int]], num_train: int, path: str) -> np.ndarray:
    """(num_subsets, num_train) bool: which ids each list names."""
    named = np.zeros((len(lists), num_train), dtype=bool)
    for subset, ids in enumerate(lists):
        wrong = [i for i in ids if not 0 <= i < num_train]
        if wrong:
            raise UsageError(
                f"{path}: subset {subset} names example {wrong[0]}; expected ids from 0 to {num_train - 1} "
                f"(--num-train {num_train})"
            )
        if len(set(ids)) != len(ids):
            raise UsageError(f"{path}: subset {subset} names an example twice; expected every id once")
        named[subset, ids] = True
    return named


def import_truth(arguments: argparse.Namespace) -> GroundTruth:
    source = arguments.source
    if source in ("trak", "arrays"):
        masks = as_masks(one_array(needed(arguments, "masks"), "masks"), arguments.masks)
        name = "margins" if source == "trak" else "losses"
    else:
        subsets_name, name = ("indices", "values") if source == "dattri" else ("subsets", "losses")
        path = needed(arguments, subsets_name)
        if arguments.num_train is None:
            raise UsageError(f"import {source} needs --num-train, the number of training examples: ids do not say it")
        named = membership(id_lists(path, subsets_name), arguments.num_train, path)
        # dattri lists what each model was trained on, bergson what it was trained without.
        masks = as_masks(named if source == "dattri" else ~named, path)
    path = needed(arguments, name)
    values = as_values(one_array(path, name), path, *masks.shape)
    if source in ("trak", "arrays"):
        check_orientation(masks, arguments.masks)
    values_are = arguments.values_are or SOURCES[source]
    losses = values if values_are == "loss" else -values
    record = {
        "source": source,
        "values": name + (", larger is worse" if values_are == "loss" else ", larger is better: the sign was turned"),
        "subsets": "given as left-out ids, turned into kept" if source == "bergson" else "kept examples, as given",
    }
    return GroundTruth.of_arrays(masks, losses, record=record)


def needed(arguments: argparse.Namespace, option: str) -> str:
    value = getattr(arguments, option)
    if value is None:
        raise UsageError(f"import {arguments.source} needs --{option} FILE (.npy, .npz or .safetensors)")
    return value


# ---- exporting ----


def export_truth(arguments: argparse.Namespace) -> GroundTruth:
    """The ground truth that bench.lds made, retraining only what the cache does not have."""
    from retrain.train import retrain_units

    check_device(arguments.device)
    task = build_task(arguments)
    plans = plans_for(arguments, task)
    if len(plans) != 1:
        raise UsageError("a ground truth is of one alpha, one share and one seed; export each to a folder of its own")
    (plan,) = plans
    jobs, store = cluster_options(arguments), Store(arguments.cache)
    units = retrain_units(task, plan, arguments.device)
    if missing := sum(not store.has(unit.kind, unit.config) for unit in units):
        text = f"{missing} of {len(units)} retrains are not in {store.root}"
        if arguments.collect and jobs["cluster"] != "slurm":
            raise UsageError(f"{text}; the same command without --collect makes them")
        print(f"{text}: making them (--cluster {jobs['cluster']})", file=sys.stderr, flush=True)
    found = ground_truth(task, plan, store, arguments.device, **jobs)
    if len(found.subsets) < plan.num_subsets:
        raise UsageError("the ground truth is not complete; run the same command without --collect")
    queries = task.query_indices("report")
    record = truth_record(task, plan) | {"query_split": "report", "queries": None, "description": task.description}
    return GroundTruth(
        found.masks, found.losses[:, :, queries], found.present, found.subsets, record, found.train_indices, queries
    )


def truth_record(task: Task, plan: Plan) -> dict[str, Any]:
    """What is known of a ground truth of ours: with it, scores from anywhere are held against our own runs."""
    names = (
        "alpha", "alpha_attribution", "seed", "scheme", "initialisation", "stream", "replicates", "replicated_subsets",
    )  # fmt: skip
    return {
        "source": "tda-bench",
        "task": task.config,
        "protocol": task.protocol,
        **{name: getattr(plan, name) for name in names},
        "values": "losses, larger is worse",
        "masks": "kept examples",
        "code": code_fingerprint(),
    }


# ---- the command ----


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.truth", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="write the ground truth of bench.lds as a folder for others")
    add_task_arguments(export)
    add_plan_arguments(export, metrics.MINIMUM_SUBSETS)
    add_cluster_arguments(export)
    take = commands.add_parser(
        "import",
        help="turn a published ground truth into such a folder",
        description="trak's masks and dattri's ids name the examples each model was trained on; bergson's ids name "
        "those it was trained without.",
    )
    take.add_argument("source", choices=tuple(SOURCES), help="whose ground truth")
    take.add_argument("--masks", metavar="FILE", help="arrays, trak: (num_subsets, num_train), 1 = kept")
    take.add_argument("--margins", metavar="FILE", help="trak: (num_subsets, num_queries), larger is better")
    take.add_argument("--indices", metavar="FILE", help="dattri: for each model, the ids it was trained on")
    take.add_argument("--values", metavar="FILE", help="dattri: (num_subsets, num_queries), flipped target values")
    take.add_argument("--subsets", metavar="FILE", help="bergson: subsets.json, for each model the ids left out")
    take.add_argument(
        "--losses", metavar="FILE", help="arrays, bergson: (num_subsets, num_queries), or (replicates, ...)"
    )
    take.add_argument("--num-train", type=at_least(2), help="dattri, bergson: number of training examples")
    take.add_argument(
        "--values-are", choices=VALUES_ARE, help="what the values are, if not what the source usually has"
    )
    check = commands.add_parser("check", help="verify a ground-truth folder")
    check.add_argument("folder", help="made by export or import")
    for command in (export, take):
        command.add_argument("--out", required=True, help="folder to write")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(sys.argv[1:] if argv is None else list(argv))
    return guarded(parser.prog, lambda: work(arguments, parser.prog))


def work(arguments: argparse.Namespace, prog: str) -> int:
    if arguments.command == "check":
        truth = read_truth(arguments.folder)
    else:
        if arguments.command == "export":
            check_out(arguments.out)
        truth = export_truth(arguments) if arguments.command == "export" else import_truth(arguments)
        check_out(arguments.out)
        if unwritten := try_write(lambda: write_truth(Path(arguments.out), truth), arguments.out):
            print(f"{prog}: {unwritten}", file=sys.stderr)
            return 1
    replicates, subsets, queries = truth.losses.shape
    kept = float(truth.masks.mean())
    print(
        f"{subsets} subsets x {replicates} replicate(s) that keep {kept:.3g} of {truth.masks.shape[1]} training "
        f"examples, {queries} queries" + ("" if arguments.command == "check" else f"; written to {arguments.out}")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
