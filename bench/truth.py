"""Ground truth of others, and ours for others: score a method without retraining anything.

    python -m bench.truth export --task digits --alpha 0.1 --out DIR            # ours, from the cache of bench.lds
    python -m bench.truth import trak --masks masks.npy --margins margins.npy --out DIR
    python -m bench.truth import dattri --indices indices.npy --values values.npy --num-train 5000 --out DIR
    python -m bench.truth import bergson --subsets subsets.json --losses losses.npy --num-train 4096 --out DIR
    python -m bench.lds --ground-truth DIR --scores FILE                        # the LDS of anybody's scores

A ground truth is a folder of two files, without pickle:

- `truth.safetensors`: `masks` (num_subsets, num_train) bool, True where the example was *kept*; `losses`
  (num_replicates, num_subsets, num_queries) float32, larger is worse; and, where known, `train_indices` (num_train,)
  and `query_indices` (num_queries,) into the data set they came from.
- `truth.json`: what it is, where it came from, how values were turned into losses, and the checksum of the arrays.

What others publish is turned into that form, each by its own declared convention:

| source  | subsets                                    | values                          | become losses by |
| ------- | ------------------------------------------ | ------------------------------- | ---------------- |
| trak    | `masks` (K, n), 1 = kept                   | margins (K, q), larger = better | minus the margin |
| dattri  | `indices` (K, size), the *kept* ids        | flipped targets, larger = better | minus the value |
| bergson | `subsets.json`, K lists of *left-out* ids  | losses (K, q), larger = worse   | as they are      |

`--values-are loss|output` overrides the last two columns, for instance for dattri before it flipped its values. A score
file holds (num_queries, num_train): the predicted change of the query's loss when the example is included, so helpful
examples are negative; `--scores-are helpfulness` takes the other sign.
"""

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import metrics
from bench.lds import SCORES_ARE, why_undefined
from bench.lds import make_parser as make_lds_parser
from bench.record import why_unwritten, without_nan, write_json
from bench.tables import number, table
from retrain.array_files import read_arrays
from retrain.command import (
    Parser,
    add_cluster_arguments,
    add_task_arguments,
    at_least,
    build_task,
    check_device,
    check_out,
    cluster_options,
    default_cluster,
    fraction,
    share,
)
from retrain.errors import UsageError, error_line
from retrain.progress import close_bars
from retrain.safe_files import SafeFileError, read_json, read_safetensors, whole_file, write_safetensors
from retrain.store import Store, StoreError

FORMAT = "tda-bench ground truth 1"
SOURCES = {"trak": "output", "dattri": "output", "bergson": "loss"}
VALUES_ARE = ("loss", "output")  # larger is worse, or larger is better


@dataclass(frozen=True)
class Truth:
    """A ground truth that has been checked."""

    masks: np.ndarray  # (num_subsets, num_train) bool: kept
    losses: np.ndarray  # (num_replicates, num_subsets, num_queries) float32
    record: dict[str, Any]
    train_indices: np.ndarray | None = None
    query_indices: np.ndarray | None = None


# ---- checking ----


def as_masks(values: np.ndarray, where: str) -> np.ndarray:
    """(num_subsets, num_train) bool."""
    if values.ndim != 2:
        raise UsageError(f"{where} has shape {values.shape}; expected (num_subsets, num_train)")
    if values.dtype != bool and not np.isin(values, (0, 1)).all():
        strange = values[~np.isin(values, (0, 1))].flat[0]
        raise UsageError(f"{where} holds {strange:g}; expected 0 (left out) and 1 (kept) only")
    masks = values.astype(bool)
    if masks.shape[0] < metrics.MINIMUM_SUBSETS:
        raise UsageError(f"{where} has {masks.shape[0]} subsets; at least {metrics.MINIMUM_SUBSETS} are needed")
    kept = masks.sum(axis=1)
    if (kept == 0).any() or (kept == masks.shape[1]).any():
        bad = int(np.flatnonzero((kept == 0) | (kept == masks.shape[1]))[0])
        raise UsageError(
            f"{where}: subset {bad} keeps {kept[bad]} of {masks.shape[1]} examples; expected some kept, some not"
        )
    return masks


def as_values(values: np.ndarray, where: str, num_subsets: int, num_train: int) -> np.ndarray:
    """(num_replicates, num_subsets, num_queries) float32, finite."""
    if values.dtype.kind not in "fiu":
        raise UsageError(f"{where} has dtype {values.dtype}; expected numbers")
    if values.ndim == 2:
        values = values[None]
    if values.ndim != 3:
        raise UsageError(
            f"{where} has shape {values.shape}; expected (num_subsets, num_queries) or "
            "(num_replicates, num_subsets, num_queries)"
        )
    if values.shape[1] != num_subsets:
        hint = ""
        if values.shape[2] == num_subsets:
            hint = "; it looks transposed: rows must be subsets and columns queries"
        elif num_train == values.shape[1]:
            hint = "; the masks look transposed: rows must be subsets and columns training examples"
        raise UsageError(
            f"{where} has {values.shape[1]} subsets (shape {values.shape}), but the masks have {num_subsets} "
            f"(shape ({num_subsets}, {num_train})); expected the same number{hint}"
        )
    if bad := int((~np.isfinite(values)).sum()):
        first = np.argwhere(~np.isfinite(values))[0]
        raise UsageError(
            f"{where} holds {bad} values that are NaN or infinite, the first at replicate {first[0]}, subset "
            f"{first[1]}, query {first[2]}; expected finite ones: leave that query or that subset out"
        )
    return values.astype(np.float32)


def check_orientation(masks: np.ndarray, where: str) -> None:
    """Square masks hide a transposition; subsets of one size show it."""
    rows, columns = masks.sum(axis=1), masks.sum(axis=0)
    if len(set(columns.tolist())) == 1 and len(set(rows.tolist())) > 1:
        raise UsageError(
            f"{where} (shape {masks.shape}) has equal numbers of ones in columns but not in rows; it looks transposed: "
            "expected rows to be subsets and columns training examples"
        )


# ---- the folder ----


def write_truth(folder: Path, truth: Truth) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {"masks": truth.masks, "losses": truth.losses}
    if truth.train_indices is not None:
        arrays["train_indices"] = truth.train_indices.astype(np.int64)
    if truth.query_indices is not None:
        arrays["query_indices"] = truth.query_indices.astype(np.int64)
    with whole_file(folder / "truth.safetensors") as file:
        digest = write_safetensors(file, arrays)
    num_replicates, num_subsets, num_queries = truth.losses.shape
    sizes = {
        "num_subsets": num_subsets, "num_train": truth.masks.shape[1], "num_queries": num_queries,
        "num_replicates": num_replicates,
    }  # fmt: skip
    content = {"format": FORMAT, **sizes, **truth.record, "arrays_sha256": digest}
    write_json(folder / "truth.json", content)


def read_truth(folder: str | Path) -> Truth:
    """Verified: the checksum, every shape, and that nothing is NaN."""
    folder = Path(folder)
    if not (folder / "truth.json").exists():
        raise UsageError(
            f"{folder} has no truth.json; expected a folder made by `python -m bench.truth export` or `... import`"
        )
    record = read_json(folder / "truth.json")
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UsageError(f'{folder / "truth.json"} is no ground truth of this suite; expected "format": "{FORMAT}"')
    digest = hashlib.sha256()
    arrays = read_safetensors(folder / "truth.safetensors", digest=digest)
    if digest.hexdigest() != record.get("arrays_sha256"):
        raise UsageError(
            f"{folder / 'truth.safetensors'} does not match its checksum in truth.json (edited or damaged)"
        )
    if missing := {"masks", "losses"} - set(arrays):
        raise UsageError(f"{folder / 'truth.safetensors'} lacks {', '.join(sorted(missing))}")
    masks = as_masks(arrays["masks"], "masks")
    losses = as_values(arrays["losses"], "losses", *masks.shape)
    return Truth(masks, losses, record, arrays.get("train_indices"), arrays.get("query_indices"))


# ---- importing ----


def one_array(path: str, wanted: str) -> np.ndarray:
    """The array of a .npy, .npz or .safetensors file: the one called `wanted`, or the only one there is."""
    arrays = read_arrays(path, follow_links=True)
    if wanted in arrays:
        return arrays[wanted]
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    raise UsageError(f'{path} holds {", ".join(sorted(arrays)) or "nothing"}; expected an array named "{wanted}"')


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


def import_truth(arguments: argparse.Namespace) -> Truth:
    source = arguments.source
    if source == "trak":
        masks = as_masks(one_array(needed(arguments, "masks"), "masks"), arguments.masks)
        name = "margins"
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
    if source == "trak":
        check_orientation(masks, arguments.masks)
    values_are = arguments.values_are or SOURCES[source]
    losses = values if values_are == "loss" else -values
    record = {
        "source": source,
        "values": name + (", larger is worse" if values_are == "loss" else ", larger is better: the sign was turned"),
        "subsets": "given as left-out ids, turned into kept" if source == "bergson" else "kept examples, as given",
    }
    return Truth(masks, losses, record)


def needed(arguments: argparse.Namespace, option: str) -> str:
    value = getattr(arguments, option)
    if value is None:
        raise UsageError(f"import {arguments.source} needs --{option} FILE (.npy, .npz or .safetensors)")
    return value


# ---- exporting ----


def export_truth(arguments: argparse.Namespace) -> Truth:
    """The ground truth that bench.lds made, retraining only what the cache does not have."""
    from bench.runner import ground_truth
    from retrain.train import Plan, retrain_units

    check_device(arguments.device)
    task = build_task(arguments)
    if unknown := {setting.partition("=")[0].rpartition(".")[0] for setting in arguments.set} - {task.name}:
        raise UsageError(f'--set names "{sorted(unknown)[0]}", which is not the task ({task.name})')
    plan = Plan(
        alpha=arguments.alpha,
        alpha_attribution=arguments.alpha_attribution or task.default_alpha_attribution,
        seed=arguments.seed,
        num_subsets=arguments.subsets,
        replicates=arguments.replicates or task.default_replicates,
    )
    arguments.cluster = arguments.cluster or default_cluster(arguments.device)
    jobs, store = cluster_options(arguments), Store(arguments.cache)
    units = retrain_units(task, plan, arguments.device)
    if missing := sum(not store.has(unit.kind, unit.config) for unit in units):
        text = f"{missing} of {len(units)} retrains are not in {store.root}"
        if arguments.collect and arguments.cluster != "slurm":
            raise UsageError(f"{text}; the same command without --collect makes them")
        print(f"{text}: making them (--cluster {arguments.cluster})", file=sys.stderr, flush=True)
    found = ground_truth(task, plan, store, arguments.device, **jobs)
    if len(found.subsets) < plan.num_subsets:
        raise UsageError("the ground truth is not complete; run the same command without --collect")
    queries = task.query_indices("report")
    record = {
        "source": "tda-bench",
        "task": task.config,
        "protocol": task.protocol,
        "alpha": plan.alpha,
        "alpha_attribution": plan.alpha_attribution,
        "seed": plan.seed,
        "values": "losses, larger is worse",
        "subsets": "kept examples",
    }
    return Truth(found.masks, found.losses[:, :, queries].astype(np.float32), record, plan.attributed(task), queries)


# ---- scoring ----


def read_scores(path: str, truth: Truth, sign: str) -> np.ndarray:
    """(num_queries, num_train) float64, finite."""
    scores = np.asarray(one_array(path, "scores"), dtype=np.float64)
    expected = (truth.losses.shape[2], truth.masks.shape[1])
    if scores.shape != expected:
        hint = "; it is transposed" if scores.shape == expected[::-1] else ""
        raise UsageError(f"{path} has shape {scores.shape}; expected {expected}, (num_queries, num_train){hint}")
    if bad := int((~np.isfinite(scores)).sum()):
        raise UsageError(f"{path} holds {bad} scores that are NaN or infinite, of {scores.size}; expected finite ones")
    return -scores if sign == "helpfulness" else scores


def score_files(folder: str, paths: Sequence[str], sign: str = SCORES_ARE[0]) -> tuple[list[dict[str, Any]], Truth]:
    """A row for each score file, with the columns of bench.lds as far as they apply, and why queries are undefined."""
    truth = read_truth(folder)
    losses = truth.losses.mean(axis=0)
    ceiling = metrics.noise_ceiling(truth.losses)
    rows = []
    for path in paths:
        prediction = truth.masks.astype(np.float64) @ read_scores(path, truth, sign).T
        result = metrics.linear_datamodelling_score(losses, prediction)
        rows.append(
            {"method": Path(path).stem}
            | {name: getattr(result, name) for name in ("num_subsets", "num_queries", "num_undefined", "lds")}
            | {"ci_low": result.ci_low, "ci_high": result.ci_high}
            | {"lds_across_queries": result.across_queries, "ceiling": ceiling.ceiling}
        )
        if result.num_undefined:
            undefined = np.isnan(result.per_query)
            rows[-1]["reason"] = why_undefined(losses[:, undefined], prediction[:, undefined])
    return rows, truth


def scores_command(argv: Sequence[str], prog: str = "python -m bench.lds") -> int:
    """`bench.lds --ground-truth DIR --scores FILE...`"""
    parser = Parser(prog=prog, description="The LDS of given scores against a given ground truth.", allow_abbrev=False)
    parser.add_argument("--ground-truth", required=True, metavar="DIR", help="folder made by bench.truth")
    parser.add_argument("--scores", required=True, nargs="+", metavar="FILE", help="(num_queries, num_train) arrays")
    parser.add_argument(
        "--scores-are", choices=SCORES_ARE, default=SCORES_ARE[0], help="their sign (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print rows as a JSON list")
    taken, elsewhere = parser.known_options(), make_lds_parser().known_options()
    given = dict.fromkeys(word.partition("=")[0] for word in argv)
    if foreign := [name for name in given if name in elsewhere and name not in taken]:
        options = ", ".join(name for name in taken if name.startswith("--"))
        parser.exit(2, f"{prog}: {', '.join(foreign)} cannot be used with --ground-truth; its options are {options}\n")
    arguments = parser.parse_args(argv)
    try:
        rows, truth = score_files(arguments.ground_truth, arguments.scores, arguments.scores_are)
    except (UsageError, SafeFileError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    reasons = [(row, row.pop("reason")) for row in rows if row["num_undefined"]]
    for row, reason in reasons:
        many = "every query" if row["num_undefined"] == row["num_queries"] else f"{row['num_undefined']} queries"
        print(f"{prog}: LDS of {row['method']} is undefined for {many}: {reason}", file=sys.stderr)
    code = 1 if reasons else 0
    if arguments.json:
        print(json.dumps(without_nan(rows), indent=1))
        return code
    replicates, subsets, queries = truth.losses.shape
    print(
        f"{truth.record.get('source', 'ground truth')}: {subsets} subsets x {replicates} replicate(s) of "
        f"{truth.masks.shape[1]} training examples, {queries} queries; noise ceiling {number(rows[0]['ceiling'])}"
        + ("" if math.isfinite(rows[0]["ceiling"]) else f" (unknown{' without replicates' if replicates < 2 else ''})")
    )
    header = ["scores", "LDS", "95 % interval", "LDS/ceiling", "undefined", "across queries"]
    lines = [
        [
            row["method"],
            number(row["lds"]),
            f"[{number(row['ci_low'])}, {number(row['ci_high'])}]",
            number(row["lds"] / row["ceiling"], 2) if row["ceiling"] > 0 else "-",
            str(row["num_undefined"]),
            number(row["lds_across_queries"]),
        ]
        for row in rows
    ]
    print(table(header, lines))
    return code


# ---- the command ----


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.truth", description=__doc__.split("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="write the ground truth of bench.lds as a folder for others")
    add = export.add_argument
    add_task_arguments(export)
    add("--alpha", type=fraction, required=True, help="alpha_retrain: share of the attributed examples kept")
    add("--alpha-attribution", type=share, help="share of the training set attributed (default: the task's)")
    add("--subsets", type=at_least(metrics.MINIMUM_SUBSETS), default=100, help="retrained subsets (default: 100)")
    add("--replicates", type=at_least(1), help="retrains per subset (default: the task's)")
    add("--seed", type=at_least(0), default=1, help="the experiment's seed (default: 1)")
    add_cluster_arguments(export)
    export.set_defaults(cluster=None)  # see `default_cluster`
    take = commands.add_parser(
        "import",
        help="turn a published ground truth into such a folder",
        description="trak's masks and dattri's ids name the examples each model was trained on; bergson's ids name "
        "those it was trained without.",
    )
    take.add_argument("source", choices=tuple(SOURCES), help="whose ground truth")
    take.add_argument("--masks", metavar="FILE", help="trak: (num_subsets, num_train), 1 = kept")
    take.add_argument("--margins", metavar="FILE", help="trak: (num_subsets, num_queries), larger is better")
    take.add_argument("--indices", metavar="FILE", help="dattri: for each model, the ids it was trained on")
    take.add_argument("--values", metavar="FILE", help="dattri: (num_subsets, num_queries), flipped target values")
    take.add_argument("--subsets", metavar="FILE", help="bergson: subsets.json, for each model the ids left out")
    take.add_argument("--losses", metavar="FILE", help="bergson: (num_subsets, num_queries), larger is worse")
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
    try:
        if arguments.command == "check":
            truth = read_truth(arguments.folder)
        else:
            if arguments.command == "export":
                check_out(arguments.out)
            truth = export_truth(arguments) if arguments.command == "export" else import_truth(arguments)
            check_out(arguments.out)
            if unwritten := why_unwritten(lambda: write_truth(Path(arguments.out), truth), arguments.out):
                print(f"{parser.prog}: {unwritten}", file=sys.stderr)
                return 1
    except (UsageError, SafeFileError, StoreError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{parser.prog}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        close_bars()
        print(f"{parser.prog}: interrupted; finished retrains are kept, and the same command goes on", file=sys.stderr)
        return 130
    except RuntimeError as error:
        print(f"{parser.prog}: {error_line(error)}", file=sys.stderr)
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
