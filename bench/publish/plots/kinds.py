"""Every kind of figure there is, and how they are drawn into a folder."""

import argparse
import json
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import matplotlib

import bench.publish.plots.style as style
import bench.schema as schema
from bench.arguments import check_out
from bench.publish.plots.draws import draw_draws
from bench.publish.plots.examples import draw_examples, draw_tokens
from bench.publish.plots.frame import Kind
from bench.publish.plots.front import draw_front, draw_retraining, draw_seconds
from bench.publish.plots.lds import draw_lds
from bench.publish.plots.limit import draw_limit
from bench.publish.plots.question import draw_collapse, draw_reference
from bench.publish.plots.removal import draw_removal
from bench.publish.plots.scaling import draw_scaling
from bench.publish.plots.sweep import draw_budget, draw_sweep
from bench.records import FEW, Results, load_results, without_curves, without_scored_again
from retrain.errors import UsageError
from retrain.progress import progress_counter
from retrain.safe_files import SafeFileError, read_checked, write_whole

LDS_COMMAND = "python -m bench.lds --alpha 0.1 0.3 0.5 0.7"
RECORDS = "records of bench.lds"
KINDS = (
    Kind(
        "lds", "LDS against alpha, raw and train-normalised, a panel for each attributed share", RECORDS, LDS_COMMAND,
        draw_lds, ("fig:retraining", "fig:individual_LDS_scores", "fig:individual_LDS_scores_2", "tab:LLM_LDS_scores"),
    ),
    Kind("front", "LDS, within class where there are classes, against seconds", RECORDS, LDS_COMMAND, draw_front),
    Kind(
        "collapse", "LDS beside LDS within class, a line a method", f"{RECORDS} on a task with classes", LDS_COMMAND,
        draw_collapse,
    ),
    Kind(
        "reference", "LDS against how much more data the model looked at has seen than those asked about",
        "records of two references", f"{LDS_COMMAND} --reference subset --checkpoints 1 8", draw_reference,
    ),
    Kind(
        "retraining", "the same for the datamodel with every prior, over its retrains, beside the others",
        "records of the datamodel", "python -m bench.lds --experiment results/digits/datamodel.toml", draw_retraining,
    ),
    Kind(
        "seconds", "seconds against the attributed share, fit and score apart",
        "records at two attributed shares or more, from one machine",
        f"{LDS_COMMAND} --task cifar10 --alpha-attribution 0.01 0.1 1.0", draw_seconds, ("fig:timings_bif-vs-ekfac",),
    ),
    Kind(
        "scaling", "seconds, memory and disk against model size, and who is cheaper where", "scaling.csv",
        "tda-bench scaling", draw_scaling, ("fig:benchmark_big_ek-fac", "tab:bif-vs-ekfac"),
    ),
    Kind(
        "sweep", "loss traces and LDS over settings of a method", "sweep.json", "tda-bench tune sweep",
        draw_sweep, ("fig:loss_trace_burnin_*", "fig:lds_llm_sweep"),
    ),
    Kind(
        "budget", "LDS against draws, projection and checkpoints", "budget.json", "tda-bench tune budget", draw_budget,
    ),
    Kind(
        "draws", "LDS within class against draws of bif_gaussian, beside BIF and EK-FAC",
        "records of bif_gaussian@curve=true", "python -m bench.lds --methods bif_gaussian@curve=true", draw_draws,
    ),
    Kind(
        "removal", "the change of a query's loss without its most helpful examples", "answers.json of removal",
        "tda-bench evaluate removal", draw_removal,
    ),
    Kind(
        "limit", "BIF approaching the damped influence function, with the theory's slopes", "limit.json",
        "tda-bench evaluate limit", draw_limit,
    ),
    Kind(
        "examples", "queries and their most and least influential training images", "examples.json of an image task",
        "tda-bench inspect --task cifar10 --show 8 --top 4", draw_examples, ("fig:image-main", "fig:image-full"),
    ),
    Kind(
        "tokens", "query tokens against training tokens", "examples.json of a language task",
        "tda-bench inspect tokens --task pythia14m --methods bif ekfac --top 5", draw_tokens,
        ("fig:lang-main", "fig:p2.8B", "fig:p14M-1", "fig:p14M-2", "fig:ekfac_vs_bif_grid", "fig:bif_tokenwise_grid"),
    ),
)  # fmt: skip


@dataclass
class Drawn:
    """What came of one kind: entries of figures.json in order, and what went wrong."""

    kind: str
    entries: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def without_crowds(results: Results, kind: str) -> Results:
    """The rows for a kind: curves over retrains or base models have a figure of their own, and crowd the others."""
    if kind != "retraining":
        results = without_curves(without_scored_again(results))
    rows = results.rows
    if kind not in ("front", "collapse", "reference"):
        counts = rows[rows["models"] > 1].groupby("run_id")["series"].nunique()
        rows = rows[~rows["run_id"].isin(counts[counts > FEW].index)]
    return replace(results, rows=rows, problems=[])


def draw_kind(name: str, results: Results, out: Path) -> Drawn:
    drawn = Drawn(name)
    (kind,) = [kind for kind in KINDS if kind.name == name]
    taken: set[str] = set()
    results = without_crowds(results, name)
    with matplotlib.rc_context(style.settings()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of glyphs that the font lacks: a box stands for them
        for drawing in kind.draw(results):
            stem = free_stem(drawing.stem, taken)
            file = style.save(drawing.figure, out / stem)
            entry = {"kind": name, "title": drawing.title[:300], "caption": drawing.caption[:30_000]}
            drawn.entries.append((stem, entry | {"runs": drawing.runs, "files": [file.name], "facts": drawing.facts}))
    drawn.problems = results.problems
    return drawn


def free_stem(stem: str, taken: set[str]) -> str:
    """Two that would have one name have two; none is longer than a file's name may be."""
    stem = stem[:180].rstrip("-")
    name, number = stem, 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}"
    taken.add(name)
    return name


def draw_chosen(arguments: argparse.Namespace) -> int:
    """The command: 1 where a file could not be used, or where nothing allows a kind that was asked for."""
    if arguments.list:
        for kind in KINDS:
            paper = f" (paper: {', '.join(kind.paper)})" if kind.paper else ""
            print(f"{kind.name:13} {kind.shows}{paper}\n{'':13} needs {kind.needs}: {kind.command}")
        return 0
    known = [kind.name for kind in KINDS]
    if unknown := [name for name in arguments.only or [] if name not in known]:
        raise UsageError(f'unknown figure "{unknown[0]}"; available: {", ".join(known)}')
    if not Path(arguments.results).is_dir():
        raise UsageError(f'--results "{arguments.results}" is no folder; expected one with records of bench.lds')
    chosen = [kind for kind in KINDS if not arguments.only or kind.name in arguments.only]
    out = Path(arguments.out or Path(arguments.results) / "figures")
    check_out(str(out))
    results = load_results(arguments.results)
    problems = list(results.problems)
    index: dict[str, Any] = {}
    with progress_counter(True, "kinds of figures") as progress:
        found = []
        for number, kind in enumerate(chosen):
            progress(number, len(chosen))
            found.append(draw_kind(kind.name, results, out))
    for drawn in found:
        index |= dict(drawn.entries)
        problems += [problem for problem in drawn.problems if problem not in problems]
        for _, entry in drawn.entries:
            print(f"{drawn.kind}: {out / entry['files'][0]}")
    write_index(out, index, whole=not arguments.only, problems=problems)
    missing = [kind for kind, drawn in zip(chosen, found, strict=True) if not drawn.entries]
    for kind in missing:
        print(f"{kind.name}: missing, needs {kind.needs}; make it with\n    {kind.command} --out {arguments.results}")
    for line in results.left_out:
        print(f"note: {line}")
    for problem in problems:
        print(f"tda-bench publish figures: {problem}", file=sys.stderr)
    return 1 if problems or (arguments.only and missing) else 0


def first_figure(folder: Path, name: str) -> Any:
    """A matplotlib figure, for notebooks; ValueError with one line where the records allow none."""
    kinds = {kind.name: kind for kind in KINDS}
    if name not in kinds:
        raise ValueError(f'unknown figure "{name}"; available: {", ".join(kinds)}')
    with matplotlib.rc_context(style.settings()):
        drawing = next(iter(kinds[name].draw(load_results(folder))), None)
    if drawing is None:
        raise ValueError(f"{folder} allows no figure of the kind {name}, which needs {kinds[name].needs}")
    return drawing.figure


def write_index(out: Path, index: dict[str, Any], whole: bool, problems: list[str]) -> None:
    """With --only, the captions of the other figures stay; else pictures that the last index named and this one does
    not are taken away, so that none outlives its results."""
    path = out / "figures.json"
    before: dict[str, Any] = {}
    if path.exists() or path.is_symlink():
        try:
            before = read_checked(path, schema.FigureIndex)
        except SafeFileError as error:
            problems.append(str(error))
    if whole:
        for file in sorted(files_of(before.values()) - files_of(index.values())):
            (out / file).unlink(missing_ok=True)
    else:
        index = before | index
    write_whole(path, json.dumps(dict(sorted(index.items())), indent=1) + "\n")


def files_of(entries: Iterable[dict[str, Any]]) -> set[str]:
    return {file for entry in entries for file in entry["files"]}
