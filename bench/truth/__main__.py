"""Ground truth of others, and ours for others: score a method without retraining anything.

    python -m bench.truth export --task digits --alpha 0.1 --out DIR            # ours, from the cache of bench.lds
    python -m bench.truth import arrays masks.npy losses.npy --out DIR
    python -m bench.truth import trak masks.npy margins.npy --out DIR
    python -m bench.truth import dattri indices.npy values.npy --num-train 5000 --out DIR
    python -m bench.truth import bergson subsets.json losses.npy --num-train 4096 --out DIR
    python -m bench.truth import kronfluence masks.pt losses.pt --out DIR       # its examples/wikitext/files
    python -m bench.lds --ground-truth DIR --scores BERGSON_FOLDER --scores-are helpfulness
    python -m bench.lds --ground-truth DIR --scores FILE                        # the LDS of anybody's scores
    python -m bench.truth bank --task digits --alpha 0.1 --methods ekfac trak --out results/bank  # and recorded methods
    python -m bench.truth scores --task digits --methods ekfac gradsim --out DIR                   # our score matrices
    python -m bench.truth verify mine.py --task digits --alpha 0.5     # on subsets drawn at this moment
    python -m bench.truth check results/bank/*          # checksums, and every recorded LDS made again

`bench/truth/folder.py` describes the folder that is written. What others publish is turned into that form, each by its
own declared convention (SOURCES).

`bank` takes what the cache of `bench.lds` has and computes what it lacks. CIFAR-10's bank, on a GPU:

    python -m bench.truth bank --task cifar10 --protocol scratch --data-dir DIR --alpha 0.1 0.5 --queries 2000
        --replicates 2 --replicated-subsets 25 --checkpoint --out results/bank --methods ekfac trak gradsim repsim
        ekfac-library=ekfac@damping=1e-8 bif-long=bif@gamma=1e4,draws=1500 random

`--scheme balanced` keeps every class's share. With `kfac@reference=subset`, `--checkpoint` has its subset models too.

Losses are float32: in float16 some of a query's hundred losses tie, and LDS moves in its fourth digit.
"""

import argparse
import secrets
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import bench.arguments as options
import bench.evaluations as evaluations
import bench.truth.folder as folders
from bench.arguments import at_least
from bench.experiment import Experiment, asked_for, execution_of, experiment_of
from bench.ground_truth import GroundTruth, base_model, ground_truth, obtain
from bench.identity import file_slug
from bench.methods import check_named
from bench.metrics import MINIMUM_SUBSETS, linear_datamodelling_score
from bench.records import command_line, provenance, read_recorded, write_json, write_recorded
from bench.rows import add_rows
from bench.runner import Session, run
from bench.tables import bytes_text, number, table
from retrain.errors import UsageError
from retrain.safe_files import read_json, validate, whole_file, write_safetensors
from retrain.store import Store
from retrain.units import Plan

CHECKPOINT_FILE = "checkpoint.safetensors"
REFERENCES_FILE = "references.safetensors"
SAME_LDS = 1e-6  # what a recorded LDS and the one made again from the bank may differ by
# Source -> the names of its arrays in .npz files, and what its values are: a loss, of which larger is worse, or an
# output, of which larger is better and whose sign is turned. Masks (subsets, examples) have 1 where one was kept.
SOURCES = {
    "arrays": ("masks", "losses", "loss"),
    "trak": ("masks", "margins", "output"),
    "dattri": ("indices", "values", "output"),  # (subsets, size) ids that were kept
    "kronfluence": ("masks", "losses", "loss"),
    "bergson": ("subsets", "losses", "loss"),  # lists of ids that were left out
}
BESIDE = ("kfac", "gradsim", "random")  # methods that `verify` shows a submitted one with
SEEDS_DRAWN = 2**31


# ---- the commands, each: its work, and the exit code ----


def import_truth(arguments: argparse.Namespace) -> int:
    """Turns what others publish into a ground truth, by the source's own convention."""
    source, path = arguments.source, arguments.subsets
    subsets_name, values_name, kind = SOURCES[source]
    if subsets_name == "masks":
        masks = folders.as_masks(folders.one_array(path, "masks"), path)
    elif arguments.num_train is None:
        raise UsageError(f"import {source} needs --num-train, the number of training examples: ids do not say it")
    else:
        named = membership(path, subsets_name, arguments.num_train)
        masks = folders.as_masks(named if source == "dattri" else ~named, path)
    given = folders.one_array(arguments.values, values_name)
    values = folders.as_values(given, arguments.values, *masks.shape)
    if subsets_name == "masks":
        folders.check_orientation(masks, path)
    turned = ", larger is worse" if kind == "loss" else ", larger is better: the sign was turned"
    record = {
        "source": source,
        "values": values_name + turned,
        "subsets": "given as left-out ids, turned into kept" if source == "bergson" else "kept examples, as given",
    }
    return _write(GroundTruth.of_arrays(masks, values if kind == "loss" else -values, record=record), arguments.out)


def membership(path: str, name: str, num_train: int) -> np.ndarray:
    """(num_subsets, num_train) bool: which ids each subset's list names.

    The lists are in a JSON file, or the rows of an integer array (num_subsets, size).
    """
    content = read_json(path, follow_links=True) if path.endswith(".json") else folders.one_array(path, name).tolist()
    if isinstance(content, dict):
        content = content.get(name, content)
    if isinstance(content, dict) and all(key.isdecimal() for key in content):  # {"0": [...], "1": [...]}
        content = [content[key] for key in sorted(content, key=int)]
    lists = validate(content, list[list[int]], path)
    named = np.zeros((len(lists), num_train), dtype=bool)
    for subset, ids in enumerate(lists):
        if wrong := [i for i, times in Counter(ids).items() if times > 1 or not 0 <= i < num_train]:
            raise UsageError(
                f"{path}: subset {subset} names example {wrong[0]}; expected ids from 0 to {num_train - 1} "
                f"(--num-train {num_train}), each once"
            )
        named[subset, ids] = True
    return named


def export_truth(arguments: argparse.Namespace) -> int:
    """The ground truth that bench.lds made, retraining only what the cache does not have."""
    options.one_of_each(arguments, "alpha", "alpha_attribution", "seeds")
    experiment, execution = experiment_of(arguments), execution_of(arguments)
    task = experiment.build_task()
    check_named({experiment.task}, experiment.task, experiment.options)
    (plan,) = experiment.plans(task, experiment.seeds[0], experiment.shares(task)[0])
    found = ground_truth(task, plan, Store(execution.cache), execution.device, **execution.jobs)
    if len(found.subsets) < plan.num_subsets:
        raise UsageError(
            f"{plan.num_subsets - len(found.subsets)} of {plan.num_subsets} subsets are not in {arguments.cache}; the "
            "same command without --collect makes them"
        )
    queries = task.query_indices("report")
    return _write(folders.of_ours(found, task, plan, queries, query_split="report", queries=None), arguments.out)


def _write(truth: GroundTruth, out: str) -> int:
    folders.write_truth(Path(out), truth)
    print(f"{described(truth)}; written to {out}")
    return 0


def described(truth: GroundTruth) -> str:
    replicates, subsets, queries = truth.losses.shape
    return (
        f"{subsets} subsets x {replicates} replicate(s) that keep {float(truth.masks.mean()):.3g} of "
        f"{truth.masks.shape[1]} training examples, {queries} queries"
    )


def make_banks(arguments: argparse.Namespace) -> int:
    """A folder for every seed, share and alpha: ground truth, recorded methods' predictions and the checkpoint."""
    experiment, out = experiment_of(arguments), Path(arguments.out)
    session = Session(experiment, execution_of(arguments))
    session.report_skipped()
    options.report("", session.notes, [])
    truths, predictions = session.retrain(), session.score()
    if session.out.problems:
        raise UsageError(f"nothing was written: {session.out.problems[0]}")
    task, made = session.task, list[Path]()
    kept_in: dict[int, Path] = {}  # the checkpoint of a seed, which all its banks share
    for block in session.blocks:
        seed, share = block
        queries = session.question(*block).query_indices()
        for position, plan in enumerate(session.plans(*block)):
            found = truths[seed, share, plan.alpha]
            here = [(variant, some[position]) for variant, some in predictions[block]]
            session.out.rows.clear()
            add_rows(session.out, task, plan, found, queries, here)
            asked = {"query_split": experiment.query_split, "queries": experiment.queries}
            truth = folders.of_ours(found, task, plan, queries, **asked, commit=provenance()["commit"])
            more = f"-{plan.scheme}" if plan.scheme != "fixed" else ""
            more += f"-share-{share:g}" if share != task.default_alpha_attribution else ""
            folder = out / f"{file_slug(f'{task.name}-{task.protocol}')}-alpha-{plan.alpha:g}-seed-{seed}{more}"
            digest = folders.write_truth(folder, truth)
            kept: dict[tuple[str, bool], np.ndarray] = {}
            for variant, prediction in here:
                for normalised in evaluations.kinds_of(variant, arguments.scores):
                    values = prediction.normalised if normalised else prediction.raw
                    if values is not None:
                        kept[variant.label, normalised] = values[truth.subsets]
            rows = [row for row in session.out.rows if (row["label"], row["normalised"]) in kept]
            methods = [variant.describe() for variant, _ in here if variant.label in {label for label, _ in kept}]
            told = {"methods": methods, "rows": rows, **provenance(session.device())}
            write_recorded(folder, kept, told, digest)
            if arguments.checkpoint:
                _write_checkpoint(folder, session, seed, beside=kept_in.setdefault(seed, folder))
                _write_references(folder, session, block, plan)
            made.append(folder)
    for folder in made:
        print(check_folder(folder)[0])
    print("\n".join(f"written: {folder}" for folder in made))
    return 0


def _write_checkpoint(folder: Path, session: Session, seed: int, beside: Path) -> None:
    if folder != beside:
        return write_json(folder / "checkpoint.json", {"seed": seed, "file": f"../{beside.name}/{CHECKPOINT_FILE}"})
    _, entry = base_model(session.task, seed, session.store, session.execution.device)
    with whole_file(folder / CHECKPOINT_FILE) as file:
        digest = write_safetensors(file, _halved(entry.arrays))
    told = {"seed": seed, "file": CHECKPOINT_FILE, "arrays_sha256": digest, "record": entry.record}
    write_json(folder / "checkpoint.json", told)


def _write_references(folder: Path, session: Session, block: tuple[int, float], plan: Plan) -> None:
    """The models that methods looked at in the base model's place, and which examples each was trained on."""
    arrays: dict[str, np.ndarray] = {}
    asked = [one for variant in session.active for one in session.scorers(variant, *block)]
    questions = [member.question for scorer, plans in asked if plan in plans for member in scorer.members]
    for question in questions:
        if question.reference is None:
            continue
        name = f"{question.reference.kind}-{question.checkpoint}"
        (entry,) = obtain([question.model_unit(session.execution.device)], session.store).values()
        arrays |= {f"{name}/{parameter}": value for parameter, value in _halved(entry.arrays).items()}
        arrays[f"{name}/trained_on"] = question.reference.indices(session.task, question.checkpoint)
    if arrays:
        with whole_file(folder / REFERENCES_FILE) as file:
            digest = write_safetensors(file, arrays)
        models = sorted({name.split("/")[0] for name in arrays})
        told = {"seed": plan.seed, "file": REFERENCES_FILE, "arrays_sha256": digest, "models": models}
        write_json(folder / "references.json", told)


def _halved(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """In float16; whoever wants other scores than from the very bits trains the model again."""
    return {name: value.astype(np.float16) if value.dtype == np.float32 else value for name, value in arrays.items()}


def export_scores(arguments: argparse.Namespace) -> int:
    """Every method's matrix in a file of its own, and scores.json, which says what rows and columns are."""
    session, out = evaluations.session_of(arguments, has_alpha=True), Path(arguments.out)
    options.report("", session.notes, [])
    told: dict[str, Any] = {}
    for (seed, share), methods in evaluations.score_methods(session).items():
        question = session.question(seed, share)
        for one, normalised, values in evaluations.score_matrices(methods, arguments.scores):
            kind = "normalised" if normalised else "raw"
            place = f"{session.task.name}-{session.task.protocol}-{len(values)}-queries-seed-{seed}-share-{share:g}"
            path = out / f"{file_slug(one.variant.label)}-{kind}-{file_slug(place)}.npy"
            with whole_file(path) as file:
                np.save(file, values, allow_pickle=False)
            print(f"written: {path}")
            told[path.name] = one.columns | {"kind": kind, "seed": seed, "alpha_attribution": share}
        told[f"seed {seed}, share {share:g}"] = {
            "rows_are_queries": question.query_indices().tolist(),
            "columns_are_training_examples": question.attributed_indices().tolist(),
        }
    sign = "the predicted change of the query's loss when the example is included: helpful examples are negative"
    write_json(out / "scores.json", {"sign": sign, "task": session.task.config, "files": told, **provenance()})
    return options.report("python -m bench.truth scores", [], session.out.problems)


def verify_methods(arguments: argparse.Namespace) -> int:
    """LDS at a seed that did not exist before: another base model, other attributed examples, other subsets."""
    seed = secrets.randbelow(SEEDS_DRAWN)
    beside = [name for name in BESIDE if name not in arguments.methods]
    asked = {**asked_for(arguments), "methods": (*arguments.methods, *beside), "seeds": (seed,)}
    result = run(Experiment(**asked), execution_of(arguments))
    place = result.save(Path(arguments.out), command_line("bench.truth", sys.argv[1:]))
    print(f"{result}\n\nseed {seed} was drawn for this run; bench.lds --seeds {seed} makes it again; record: {place}")
    return options.report("python -m bench.truth verify", [], result.problems)


def check_folders(arguments: argparse.Namespace) -> int:
    places = [folder for folder in arguments.folder if Path(folder).is_dir()]  # a README lies beside the banks
    texts, same = zip(*(check_folder(Path(folder)) for folder in places or arguments.folder), strict=True)
    print("\n\n".join(texts))
    return 0 if all(same) else 1


def check_folder(folder: Path) -> tuple[str, bool]:
    """(what it holds, with a table of recorded LDS where it is a bank; whether all of these come out again)"""
    truth = folders.read_truth(folder)
    recorded = read_recorded(folder, truth.record["arrays_sha256"])
    if recorded is None:
        return f"{folder}: {described(truth)}", True
    losses, lines, same = truth.mean(), [], True
    for (label, normalised), ranks in recorded.ranks.items():
        row = recorded.row(label, normalised)
        again = linear_datamodelling_score(losses, ranks).lds
        before = np.nan if row is None or row["lds"] is None else float(row["lds"])
        alike = bool(np.isclose(again, before, rtol=0.0, atol=SAME_LDS, equal_nan=True))
        same &= alike
        kind = "normalised" if normalised else "raw"
        lines.append([label, kind, number(before, 7), number(again, 7), "same" if alike else "differs"])
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    header = ["method", "scores", "recorded", "from the bank", f"within {SAME_LDS:g}"]
    return f"{folder}: {described(truth)}\n{bytes_text(size)}\n{table(header, lines, left=2)}", same


def make_parser() -> argparse.ArgumentParser:
    parser = options.Parser(prog="python -m bench.truth", description=str(__doc__).split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="write the ground truth of bench.lds as a folder for others")
    options.add_task_arguments(export)
    options.add_plan_arguments(export, MINIMUM_SUBSETS)
    options.add_cluster_arguments(export)
    take = commands.add_parser(
        "import",
        help="turn a published ground truth into such a folder",
        description="trak's masks and dattri's ids name the examples each model was trained on; bergson's ids name "
        "those it was trained without. Files are .npy, .npz, .safetensors or .pt; lists of ids may be .json.",
    )
    add = take.add_argument
    add("source", choices=tuple(SOURCES), help="whose ground truth")
    add("subsets", metavar="SUBSETS", help="file: masks (num_subsets, num_train), 1 = kept, or ids of each subset")
    add("values", metavar="VALUES", help="file: losses or outputs, (num_subsets, num_queries), or (replicates, ...)")
    add("--num-train", type=at_least(2), help="dattri, bergson: number of training examples")
    bank = commands.add_parser("bank", help="write banks: ground truth and recorded methods to compete with")
    options.add_task_arguments(bank)
    options.add_plan_arguments(bank, MINIMUM_SUBSETS, required=False)
    options.add_method_arguments(bank)
    options.add_query_arguments(bank)
    evaluations.add_scores_argument(bank)
    bank.add_argument("--experiment", metavar="FILE", help="a .toml file or a run.json; other options change it")
    weights = "with the weights of the models that methods look at, in float16"
    bank.add_argument("--checkpoint", action="store_true", help=weights)
    options.add_cluster_arguments(bank)
    scores = commands.add_parser("scores", help="write methods' score matrices as .npy")
    evaluations.add_shared_arguments(scores)
    for command in (export, take, bank):
        command.add_argument("--out", required=True, help="folder to write; a bank gets one of its own in it")
    fresh = "retrain on subsets of a seed drawn now, which nobody can have fitted, and score methods on them"
    verify = commands.add_parser("verify", help=fresh, description=fresh)
    verify.add_argument("methods", nargs="+", metavar="METHOD", help="as in lds: mine.py, kfac@damping=1e-4, ...")
    options.add_task_arguments(verify)
    verify.add_argument("--alpha", nargs="+", type=options.fraction, default=[0.5], help="as in lds (default: 0.5)")
    verify.add_argument("--subsets", type=at_least(MINIMUM_SUBSETS), help="as in lds (default: 100)")
    options.add_query_arguments(verify)
    verify.add_argument("--out", default=options.RUNS, help="where the record goes (default: %(default)s)")
    check = commands.add_parser("check", help="verify folders, and make recorded LDS again from them alone")
    check.add_argument("folder", nargs="+", help="made by export, import or bank")
    works = {
        export: export_truth, take: import_truth, bank: make_banks, scores: export_scores, verify: verify_methods,
        check: check_folders,
    }  # fmt: skip
    for command, work in works.items():
        command.set_defaults(work=work, **({"scores": "both"} if command in (bank, scores) else {}))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)

    def work() -> int:
        if arguments.command != "check":
            options.check_out(arguments.out)
        return arguments.work(arguments)

    return options.run_cli(parser.prog, work, traceback=getattr(arguments, "traceback", None))


if __name__ == "__main__":
    sys.exit(main())
