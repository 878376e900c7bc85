"""A fitted method in a folder that one can move: new queries are scored without fitting again.

    tda-bench store make --task digits --methods kfac trak gradsim --out FOLDER
    tda-bench store ask FOLDER --queries 3 17 99                # of the task's queries
    tda-bench store ask FOLDER --inputs new.npz --out scores    # arrays `inputs` and `targets`

The folder holds the model, each method's fit and, where its scores are inner products, the training examples'
gradients as the method has them, up to 4 GiB; larger ones are computed again, which a GPU does faster than a
disk reads them. The task's data is not in it. What is asked of it costs no fit, and has the fresh run's scores.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

import bench.arguments as options
import retrain.safe_files as files
from baselines.method import Attribution, Problem
from baselines.support.kept_rows import KEPT_ROWS, KeptRows
from bench.experiment import execution_of, experiment_of
from bench.ground_truth import AttributionProblem
from bench.measure import metered
from bench.runner import Session
from bench.scoring import as_arrays, as_tensors, method_again, plain_method, problem_of
from bench.tables import bytes_text, duration, table
from retrain.errors import UsageError
from retrain.examples import Examples
from retrain.units import choose_device, task_from, task_specification

CONTENT, MODEL, FIT, ROWS = "store.json", "model-{}.safetensors", "fit.safetensors", "rows.npy"
MOST_BYTES = 4 * 2**30  # of gradients kept, for each method


class KeptMethod(msgspec.Struct):
    name: str
    options: dict[str, Any]
    source: str
    fit_seconds: float
    score_seconds: float  # of `num_queries`
    num_queries: int


class Content(msgspec.Struct):
    task: str
    question: dict[str, Any]
    methods: dict[str, KeptMethod]


@dataclass(frozen=True)
class Answer:
    """What a kept method says of new queries, and what it took beside a fresh run."""

    attribution: Attribution
    load_seconds: float
    score_seconds: float
    fresh_seconds: float  # of the run that made it: its fit, and its scores of as many queries as it had
    num_bytes: int


# ---- into the folder ----


def make_store(session: Session, folder: str | Path, most_bytes: float = MOST_BYTES) -> list[list[str]]:
    """A line a method: its label, what a fresh run took, and what is kept of it."""
    folder = files.make_folder(folder)
    (block,) = session.blocks
    question, kept, lines = session.question(*block), dict[str, dict[str, Any]](), list[list[str]]()

    def keep(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        with files.whole_file(path) as file:
            files.write_safetensors(file, as_arrays(tensors))

    def keep_model(checkpoint: Callable[[int], nn.Module], number: int) -> nn.Module:
        model = checkpoint(number)
        keep(folder / MODEL.format(number), model.state_dict())
        return model

    for variant in session.active:
        method, scorer = variant.method, session.scorer(variant, *block)
        place = files.make_folder(folder / variant.label)
        kept_rows = KeptRows.fresh(place / ROWS, most_bytes)
        with session.store.scratch() as scratch:
            problem = problem_of(question, scorer.model, session.store, session.execution.device, scratch)
            further = partial(keep_model, problem.checkpoint) if problem.checkpoint else None
            problem = replace(problem, checkpoint=further, shared={KEPT_ROWS: kept_rows})
            costs = (problem.seed, problem.device, session.task.cpu_threads)
            state, fitted = metered(lambda: method.fit(problem), *costs)  # noqa: B023  (called at once)
            found, scored = metered(lambda: method.score(problem, state), *costs)  # noqa: B023
            packed = method.pack_answer(state) or {}
        if kept_rows.path.exists() and found.train_scale is not None:
            kept_rows.keep_scale(found.train_scale)
        if not packed and not (place / ROWS).exists():
            raise UsageError(
                f"{variant.label} has neither a fit to keep nor gradients of at most {most_bytes:.3g} bytes"
            )
        keep(place / FIT, packed)
        keep(folder / MODEL.format(0), scorer.model.state_dict())
        kept[variant.label] = {
            **plain_method(method),
            "fit_seconds": fitted.seconds,
            "score_seconds": scored.seconds,
            "num_queries": len(problem.queries),
        }
        seconds = duration(fitted.seconds + scored.seconds)
        lines.append([variant.label, str(len(problem.queries)), seconds, bytes_text(files.folder_bytes(place))])
    content = {"task": task_specification(session.task), "question": question.plain_data(), "methods": kept}
    files.write_whole(folder / CONTENT, json.dumps(content, indent=1))
    return lines


# ---- out of it ----


class ScoreStore:
    """A folder of `make_store`, read; `options` of the task (its data's folder) are of this machine."""

    def __init__(self, folder: str | Path, device: str = "auto", **options: Any):
        self.folder, self.device = Path(folder), choose_device(device)
        self.content = msgspec.convert(files.read_checked(self.folder / CONTENT, Content), Content)
        specification = json.loads(self.content.task)
        specification["options"] |= options
        self.task = task_from(json.dumps(specification, sort_keys=True))
        self.question = AttributionProblem.from_plain_data(self.task, self.content.question)

    def model(self, number: int) -> nn.Module:
        """That was looked at, or a further one that a method asked for."""
        model, arrays = self.task.build_model(0), files.read_safetensors(self.folder / MODEL.format(number))
        model.load_state_dict(as_tensors(arrays))
        return model.to(self.device).eval()

    def ask(self, label: str, queries: Examples) -> Answer:
        """The method's scores of these queries, whoever they are, (queries, attributed examples)."""
        if label not in self.content.methods:
            raise UsageError(f'{self.folder} has no method "{label}"; it has {", ".join(self.content.methods)}')
        kept, place = self.content.methods[label], self.folder / label
        method = method_again(kept.name, kept.options, kept.source)
        # Before the clock, as in a fresh run: the data, and the model that is looked at.
        threads, train, model = self.task.cpu_threads, self.task.train_data, self.model(0)

        def load() -> tuple[Problem, Any]:
            rows = {KEPT_ROWS: KeptRows(place / ROWS)} if (place / ROWS).exists() else {}
            problem = Problem(
                task=self.task, model=model, checkpoint=self.model, train=train, queries=queries,
                attributed_indices=self.question.attributed_indices(), seed=self.question.seed, device=self.device,
                scratch=Path(scratch), shared=rows,
            )  # fmt: skip
            fit = as_tensors(files.read_safetensors(place / FIT))
            return problem, method.unpack_fit(problem, fit) if fit else None

        with tempfile.TemporaryDirectory() as scratch:
            (problem, state), loaded = metered(load, self.question.seed, self.device, threads)
            found, scored = metered(lambda: method.score(problem, state), self.question.seed, self.device, threads)
        fresh = kept.fit_seconds + kept.score_seconds
        return Answer(found, loaded.seconds, scored.seconds, fresh, files.folder_bytes(place))


def make_parser() -> argparse.ArgumentParser:
    about = "Fitted methods in a folder, and new queries scored by them."
    parser = options.Parser(prog="tda-bench store", description=about)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="fit methods, and keep what new queries need")
    options.add_task_arguments(making)
    options.add_method_arguments(making, ("kfac", "trak", "gradsim"))
    options.add_block_arguments(making, nargs=1)
    making.add_argument("--out", required=True, metavar="FOLDER", help="where the store is made")
    making.set_defaults(alpha=[0.5], queries=1)  # nothing is retrained, and a query makes every gradient needed
    asking = commands.add_parser("ask", help="score new queries")
    add = asking.add_argument
    add("folder", help="of `store make`, wherever it lies now")
    which = "of the task's (default: the first)"
    add("--queries", nargs="+", type=options.at_least(0), default=[0], metavar="K", help=which)
    add("--inputs", metavar="FILE", help="queries of your own: an .npz or .safetensors with `inputs` and `targets`")
    add("--methods", nargs="+", metavar="LABEL", help="of the store's (default: all)")
    add("--data-dir", help="folder with the task's data on this machine")
    add("--device", default="auto", help="auto, cpu, cuda, ... (default: auto)")
    add("--out", metavar="FOLDER", help="scores, a LABEL.npy each, and attributed.npy: which training examples")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    work = make_command if arguments.command == "make" else ask_command
    return options.run_cli(f"tda-bench store {arguments.command}", lambda: work(arguments), "nothing was written")


def make_command(arguments: argparse.Namespace) -> int:
    options.check_out(arguments.out)
    session = Session(experiment_of(arguments), execution_of(arguments))
    session.report_skipped()
    print(table(["method", "queries", "fresh run", "kept"], make_store(session, arguments.out)))
    return 0


def ask_command(arguments: argparse.Namespace) -> int:
    here = {"data_dir": arguments.data_dir} if arguments.data_dir else {}
    store, lines = ScoreStore(arguments.folder, arguments.device, **here), []
    if arguments.inputs:
        arrays = files.read_arrays(arguments.inputs, follow_links=True)
        if missing := {"inputs", "targets"} - set(arrays):
            raise UsageError(f"{arguments.inputs} has no {' and no '.join(sorted(missing))}")
        queries = Examples(torch.from_numpy(arrays["inputs"]), torch.from_numpy(arrays["targets"]))
    else:
        if max(arguments.queries) >= (count := len(store.task.query_data)):
            raise UsageError(f"--queries {max(arguments.queries)}: there are {count}, counted from 0")
        queries = store.task.query_data.select(arguments.queries)
    for label in arguments.methods or store.content.methods:
        answer = store.ask(label, queries)
        part = (answer.load_seconds + answer.score_seconds) / answer.fresh_seconds
        times = [duration(one) for one in (answer.load_seconds, answer.score_seconds, answer.fresh_seconds)]
        lines.append([label, str(len(queries)), *times, f"{part:.2f}", bytes_text(answer.num_bytes)])
        if arguments.out:
            np.save(files.make_folder(arguments.out) / f"{label}.npy", answer.attribution.scores.numpy())
    if arguments.out:
        np.save(Path(arguments.out) / "attributed.npy", store.question.attributed_indices())
    print(table(["method", "queries", "load", "score", "fresh run", "of fresh", "kept"], lines))
    return 0
