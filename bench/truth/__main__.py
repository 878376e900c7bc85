"""Ground truth of others, and ours for others: score a method without retraining anything.

    python -m bench.truth export --task digits --alpha 0.1 --out DIR            # ours, from the cache of bench.lds
    python -m bench.truth import arrays masks.npy losses.npy --out DIR
    python -m bench.truth import trak masks.npy margins.npy --out DIR
    python -m bench.truth import dattri indices.npy values.npy --num-train 5000 --out DIR
    python -m bench.truth import bergson subsets.json losses.npy --num-train 4096 --out DIR
    python -m bench.lds --ground-truth DIR --scores FILE                        # the LDS of anybody's scores
    python -m bench.truth bank --task digits --alpha 0.1 --methods ekfac trak --out results/bank  # and recorded methods
    python -m bench.truth scores --task digits --methods ekfac gradsim --out DIR                   # our score matrices
    python -m bench.truth check results/bank/*          # checksums, and every recorded LDS made again

`bench/truth/folder.py` describes the folder that is written. What others publish is turned into that form, each by its
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
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.arguments import (
    Parser,
    add_cluster_arguments,
    add_method_arguments,
    add_plan_arguments,
    add_query_arguments,
    add_task_arguments,
    at_least,
    check_device,
    check_out,
    cluster_options,
    one_of_each,
    run_cli,
)
from bench.evaluations.common import add_scores_argument, add_shared_arguments
from bench.experiment import Experiment, asked_for, execution_of, experiment_of, task_and_plans
from bench.ground_truth import GroundTruth, ground_truth
from bench.metrics import MINIMUM_SUBSETS
from bench.truth.bank import check_bank, export_scores, make_bank
from bench.truth.folder import (
    as_masks,
    as_values,
    check_orientation,
    of_ours,
    one_array,
    read_truth,
    write_truth,
)
from retrain.errors import UsageError
from retrain.safe_files import read_json, validate
from retrain.store import Store

# Source -> the names of its arrays in .npz files, and what its values are: larger is worse, or larger is better.
SOURCES = {
    "arrays": ("masks", "losses", "loss"),
    "trak": ("masks", "margins", "output"),
    "dattri": ("indices", "values", "output"),
    "bergson": ("subsets", "losses", "loss"),
}


# ---- importing ----


def id_lists(path: str, name: str) -> list[list[int]]:
    """One list of training ids a subset, from a JSON file or from an integer array (num_subsets, size)."""
    content = read_json(path, follow_links=True) if path.endswith(".json") else one_array(path, name).tolist()
    if isinstance(content, dict):
        content = content.get(name, content)
    if isinstance(content, dict) and all(key.isdecimal() for key in content):  # {"0": [...], "1": [...]}
        content = [content[key] for key in sorted(content, key=int)]
    return validate(content, list[list[int]], path)


def membership(lists: list[list[int]], num_train: int, path: str) -> np.ndarray:
    """(num_subsets, num_train) bool: which ids each list names."""
    named = np.zeros((len(lists), num_train), dtype=bool)
    for subset, ids in enumerate(lists):
        if wrong := [i for i, times in Counter(ids).items() if times > 1 or not 0 <= i < num_train]:
            raise UsageError(
                f"{path}: subset {subset} names example {wrong[0]}; expected ids from 0 to {num_train - 1} "
                f"(--num-train {num_train}), each once"
            )
        named[subset, ids] = True
    return named


def import_truth(arguments: argparse.Namespace) -> GroundTruth:
    source, path = arguments.source, arguments.subsets
    subsets_name, values_name, usual = SOURCES[source]
    if subsets_name == "masks":
        masks = as_masks(one_array(path, "masks"), path)
    elif arguments.num_train is None:
        raise UsageError(f"import {source} needs --num-train, the number of training examples: ids do not say it")
    else:
        named = membership(id_lists(path, subsets_name), arguments.num_train, path)
        # dattri lists what each model was trained on, bergson what it was trained without.
        masks = as_masks(named if source == "dattri" else ~named, path)
    values = as_values(one_array(arguments.values, values_name), arguments.values, *masks.shape)
    if subsets_name == "masks":
        check_orientation(masks, path)
    is_loss = (arguments.values_are or usual) == "loss"
    turned = ", larger is worse" if is_loss else ", larger is better: the sign was turned"
    record = {
        "source": source,
        "values": values_name + turned,
        "subsets": "given as left-out ids, turned into kept" if source == "bergson" else "kept examples, as given",
    }
    return GroundTruth.of_arrays(masks, values if is_loss else -values, record=record)


# ---- exporting ----


def export_truth(arguments: argparse.Namespace) -> GroundTruth:
    """The ground truth that bench.lds made, retraining only what the cache does not have."""
    check_device(arguments.device)
    one_of_each(arguments, "alpha", "alpha_attribution", "seeds")
    task, (plan,) = task_and_plans(arguments)
    found = ground_truth(task, plan, Store(arguments.cache), arguments.device, **cluster_options(arguments))
    if len(found.subsets) < plan.num_subsets:
        raise UsageError(
            f"{plan.num_subsets - len(found.subsets)} of {plan.num_subsets} subsets are not in {arguments.cache}; the "
            "same command without --collect makes them"
        )
    return of_ours(found, task, plan, task.query_indices("report"), query_split="report", queries=None)


# ---- the command ----


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.truth", description=str(__doc__).split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="write the ground truth of bench.lds as a folder for others")
    add_task_arguments(export)
    add_plan_arguments(export, MINIMUM_SUBSETS)
    add_cluster_arguments(export)
    take = commands.add_parser(
        "import",
        help="turn a published ground truth into such a folder",
        description="trak's masks and dattri's ids name the examples each model was trained on; bergson's ids name "
        "those it was trained without. Files are .npy, .npz or .safetensors; lists of ids may be .json.",
    )
    add = take.add_argument
    add("source", choices=tuple(SOURCES), help="whose ground truth")
    add("subsets", metavar="SUBSETS", help="file: masks (num_subsets, num_train), 1 = kept, or ids of each subset")
    add("values", metavar="VALUES", help="file: losses or outputs, (num_subsets, num_queries), or (replicates, ...)")
    add("--num-train", type=at_least(2), help="dattri, bergson: number of training examples")
    add("--values-are", choices=("loss", "output"), help="what they are, if not what the source usually has")
    bank = commands.add_parser("bank", help="write banks: ground truth and recorded methods to compete with")
    add_task_arguments(bank)
    add_plan_arguments(bank, MINIMUM_SUBSETS, required=False)
    add_method_arguments(bank)
    add_query_arguments(bank)
    add_scores_argument(bank)
    bank.add_argument("--experiment", metavar="FILE", help="a .toml file or a run.json; other options change it")
    bank.add_argument("--checkpoint", action="store_true", help="with the base model's weights, in float16")
    add_cluster_arguments(bank)
    scores = commands.add_parser("scores", help="write methods' score matrices as .npy")
    add_shared_arguments(scores)
    for command in (bank, scores):
        command.set_defaults(scores="both")
    for command in (export, take, bank):
        command.add_argument("--out", required=True, help="folder to write; a bank gets one of its own in it")
    check = commands.add_parser("check", help="verify folders, and make recorded LDS again from them alone")
    check.add_argument("folder", nargs="+", help="made by export, import or bank")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    return run_cli(parser.prog, lambda: work(arguments), traceback=getattr(arguments, "traceback", None))


def work(arguments: argparse.Namespace) -> int:
    if arguments.command == "check":
        found = [check_folder(Path(folder)) for folder in arguments.folder]
        print("\n\n".join(text for text, _ in found))
        return 0 if all(same for _, same in found) else 1
    check_out(arguments.out)
    out = Path(arguments.out)
    if arguments.command in ("export", "import"):
        truth = export_truth(arguments) if arguments.command == "export" else import_truth(arguments)
        write_truth(out, truth)
        print(f"{described(truth)}; written to {out}")
        return 0
    if arguments.command == "scores":
        experiment = Experiment(**asked_for(arguments))
        made = export_scores(experiment, execution_of(arguments), out, arguments.scores)
    else:
        made = make_bank(experiment_of(arguments), execution_of(arguments), out, arguments.scores, arguments.checkpoint)
        for folder in made:
            print(check_folder(folder)[0])
    for path in made:
        print(f"written: {path}")
    return 0


def described(truth: GroundTruth) -> str:
    replicates, subsets, queries = truth.losses.shape
    return (
        f"{subsets} subsets x {replicates} replicate(s) that keep {float(truth.masks.mean()):.3g} of "
        f"{truth.masks.shape[1]} training examples, {queries} queries"
    )


def check_folder(folder: Path) -> tuple[str, bool]:
    """(what it holds, with a table of recorded LDS where it is a bank; whether all of these come out again)"""
    truth = read_truth(folder)
    table, same = check_bank(folder, truth)
    return f"{folder}: {described(truth)}" + (f"\n{table}" if table else ""), same


if __name__ == "__main__":
    sys.exit(main())
