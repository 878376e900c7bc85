"""Which tokens of a training sequence bear on which tokens of a query? A page, a picture and the numbers.

    python -m bench.tokens --task tinylm --out runs/tokens                       # the three strongest pairs, by BIF
    python -m bench.tokens --task tinylm --method ekfac --pairs 2:7 10:59        # these pairs: query:training sequence
    python -m bench.tokens --task pythia14m --text FILE.jsonl.xz --top 1 --queries 32

BIF gives a score to every query token with every training token (the paper's per-token BIF; `correlation` is its
normalised form). EK-FAC gives one to every training token, for the query as a whole; they sum to its sequence score.
Negative scores help, as everywhere. Written to --out: `tokens.html` (open it: nothing else is needed), a heat map of
each pair, `tokens.npz` with the matrices and `tokens.json` with the record of how they were made.
"""

import argparse
import json
import logging
import re
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.arguments import add_query_arguments, add_settings_argument
from bench.records import command_line, provenance, without_nan
from bench.token_scores import PairScores, score_tokens, strongest_pairs
from retrain.command import RUNS, Parser, add_task_arguments, at_least, check_out, run_cli, share
from retrain.errors import UsageError
from retrain.safe_files import whole_file, write_whole

if TYPE_CHECKING:
    from bench.runner import Session

LABELLED = 80  # tokens up to which a heat map names each
HELPS, HARMS = "#0072b2", "#d55e00"  # Okabe and Ito's


# ---- which pairs ----


def parse_pair(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f'"{text}" is no pair; expected QUERY:TRAIN, two indices such as 3:17')
    return int(match[1]), int(match[2])


def given_pairs(question: Any, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The task's own indices, as positions in the question's queries and attributed sequences."""
    queries = {int(index): place for place, index in enumerate(question.query_indices())}
    trains = {int(index): place for place, index in enumerate(question.attributed_indices())}
    for query, train in pairs:
        for index, among, what in ((query, queries, "query"), (train, trains, "training sequence")):
            if index not in among:
                raise UsageError(
                    f"pair {query}:{train}: there is no {what} {index} here; {len(among)} are, from {min(among)} to "
                    f"{max(among)} (queries of the split --query-split {question.split})"
                )
    return [(queries[query], trains[train]) for query, train in dict.fromkeys(pairs)]


def sequence_scores(session: "Session") -> np.ndarray:
    """(queries, train), normalised: from the cache, or computed and kept there."""
    (block,) = session.blocks
    scorer = session.scorer(session.active[-1], *block)
    scorer.keep_scores = "always"
    scorer.make(())
    attribution = scorer.stored_scores()
    assert attribution is not None
    normalised = attribution.normalised()
    return (attribution.scores if normalised is None else normalised).numpy()


# ---- what is written ----


def draw(scores: PairScores, measure: str, title: str) -> Any:
    """The heat map: query tokens down, training tokens across; or a strip where the query counts as a whole."""
    import matplotlib as mpl
    from matplotlib.colors import LinearSegmentedColormap

    from bench.publish.plots import style

    matrix = scores.measures[measure]
    rows, columns = matrix.shape
    largest = float(np.abs(matrix).max()) or 1.0
    settings: Any = {**style.RC, "axes.grid": False, "axes.spines.top": True, "axes.spines.right": True}
    with mpl.rc_context(settings):
        cell = 0.145 if max(rows, columns) <= LABELLED else 5.8 / max(rows, columns)
        width, height = max(3.6, columns * cell + 1.5), max(1.0, rows * cell + 1.05)
        figure = style.new_figure(width, height)
        axes = figure.add_subplot()
        colours = LinearSegmentedColormap.from_list("helps-harms", [HELPS, "#ffffff", HARMS])
        image = axes.imshow(matrix, cmap=colours, vmin=-largest, vmax=largest, interpolation="nearest", aspect="equal")
        if columns <= LABELLED:
            axes.set_xticks(range(columns), [_visible(text) for text in scores.train_tokens], family="DejaVu Sans Mono")
        if rows == 1:
            axes.set_yticks([])
        elif rows <= LABELLED:
            axes.set_yticks(range(rows), [_visible(text) for text in scores.query_tokens], family="DejaVu Sans Mono")
        axes.tick_params(length=0, labelsize=6.5, pad=1.5)
        if max(len(text) for text in scores.train_tokens) > 1 and columns <= LABELLED:
            axes.tick_params(axis="x", rotation=90)
        axes.set_xlabel(f"training sequence {scores.train}")
        axes.set_ylabel(f"query {scores.query}" if rows > 1 else "")
        axes.set_title(title, loc="left")
        bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.015, aspect=max(6, 26 * min(1, rows / 32)))
        bar.ax.tick_params(labelsize=6.5)
        bar.outline.set_linewidth(0.4)
    return figure


def _visible(text: str) -> str:
    # "$" would start a formula.
    return text.replace("\n", "↵").replace(" ", "·").replace("$", r"\$") or "∅"


def write_tokens(folder: Path, record: dict[str, Any], found: list[PairScores], summary: str, lead: str) -> list[Path]:
    import matplotlib as mpl

    from bench.publish.plots import style
    from bench.tokens_page import packed, page

    folder.mkdir(parents=True, exist_ok=True)
    settings: Any = style.RC
    arrays: dict[str, np.ndarray] = {}
    pairs: list[dict[str, Any]] = []
    written: list[Path] = []
    for scores in found:
        stem = f"{scores.query}-{scores.train}"
        arrays |= {f"{measure}-{stem}": matrix for measure, matrix in scores.measures.items()}
        head = {"query": scores.query, "train": scores.train, "score": scores.score}
        if scores.correlation is not None:
            head["correlation"] = scores.correlation
        texts = {"query_tokens": scores.query_tokens, "train_tokens": scores.train_tokens}
        measures = {measure: packed(matrix) for measure, matrix in scores.measures.items()}
        pairs.append({**head, **texts, "measures": measures})
        record["pairs"].append({**head, **texts, "arrays": sorted(f"{m}-{stem}" for m in scores.measures)})
        with mpl.rc_context(settings):
            figure = draw(scores, next(iter(scores.measures)), summary)
            written += style.save(figure, folder / f"tokens-{stem}", ("png",))
    record = without_nan(record)
    write_whole(folder / "tokens.html", page(summary, lead, {k: v for k, v in record.items() if k != "pairs"}, pairs))
    with whole_file(folder / "tokens.npz") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    write_whole(folder / "tokens.json", json.dumps(record, indent=1) + "\n")
    return [folder / "tokens.html", *written]


# ---- the command ----


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.tokens", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add_task_arguments(parser)
    add("--method", default="bif", help="bif or ekfac, with @options where you like (default: bif)")
    add_settings_argument(parser)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--pairs", nargs="+", type=parse_pair, metavar="QUERY:TRAIN", help="indices of the task's data")
    chosen.add_argument(
        "--top", type=at_least(1), default=3, help="the strongest pairs, by sequence score (default: 3)"
    )
    add("--seed", dest="seeds", nargs=1, type=at_least(0), help="the experiment, as in bench.lds (default: 1)")
    add("--alpha-attribution", nargs=1, type=share, help="share of the training set looked at (default: the task's)")
    add_query_arguments(parser)
    add("--out", default=f"{RUNS}/tokens", help="folder to write to (default: %(default)s)")
    parser.set_defaults(alpha=[0.5])  # nothing is retrained
    return parser


def make_tokens(
    session: "Session", pairs: Sequence[tuple[int, int]] | None, top: int, out: Path, command: str
) -> list[Path]:
    from bench.ground_truth import base_model
    from bench.measure import cpu_threads
    from retrain.units import choose_device

    started = time.perf_counter()
    task, execution, (block,) = session.task, session.execution, session.blocks
    if task.train_data.targets.dim() != 2:
        raise UsageError(f"task {task.name} has no tokens; take a language task, such as --task tinylm")
    if not session.active:
        (label, reason), *_ = session.skipped.items()
        raise UsageError(f"{label} cannot run on {task.name}: {reason}")
    variant = session.active[-1]
    method, question = variant.method, session.question(*block)
    if pairs:
        places = given_pairs(question, pairs)
    else:
        own = task.query_data.targets[question.query_indices()], task.train_data.targets[question.attributed_indices()]
        same = np.stack([(own[1] == query).all(1).numpy() for query in own[0]])
        places = strongest_pairs(sequence_scores(session), same, top)
        if not places:
            raise UsageError("no pair of different sequences has a score; name some with --pairs")
    model, _ = base_model(task, question.seed, session.store, execution.device)
    with cpu_threads(task.cpu_threads), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries' own making, and nothing the user can act on
        found, diagnostics = score_tokens(question, method, model, choose_device(execution.device), places)
    num_tokens = task.train_data.targets.shape[1]
    about = "EK-FAC per training token" if method.name == "ekfac" else "normalised per-token BIF"
    sizes = {"train": len(question.attributed_indices()), "queries": len(question.query_indices())}
    record = {
        "command": command,
        "task": task.config,
        "description": task.description,
        "method": variant.describe(),
        "seed": question.seed,
        "alpha_attribution": question.alpha_attribution,
        "query_split": question.split,
        "n": {**sizes, "tokens": num_tokens, "pairs": len(found)},
        "sign": "negative: including the training token lowers the query token's loss",
        **provenance(session.device()),
        "diagnostics": diagnostics,
        "seconds": round(time.perf_counter() - started, 2),
        "pairs": [],
    }
    draws = f", {diagnostics['num_draws']} draws" if "num_draws" in diagnostics else ""
    lead = (
        f"{task.description}; seed {question.seed}{draws}, {len(found)} pairs of {num_tokens} tokens, chosen "
        + ("by hand" if pairs else f"as the strongest of {len(question.query_indices())} queries")
        + (". Blue tokens help" if method.name == "ekfac" else ". Blue tokens help (the losses rise and fall together)")
        + ", orange tokens harm."
    )
    return write_tokens(out, record, found, f"{task.name}: {about}", lead)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    return run_cli(
        parser.prog, lambda: look_inside(arguments, command_line("bench.tokens", argv)), "nothing was written"
    )


def look_inside(arguments: argparse.Namespace, command: str) -> int:
    from bench.runner import Session
    from bench.translate import execution_of, experiment_of

    check_out(arguments.out)
    arguments.methods = [arguments.method]
    session = Session(experiment_of(arguments), execution_of(arguments))
    written = make_tokens(session, arguments.pairs, arguments.top, Path(arguments.out), command)
    print("\n".join(str(path) for path in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
