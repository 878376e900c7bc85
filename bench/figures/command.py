"""Draws every figure and table of the paper that a folder of records allows, and says how to make the others.

    python -m bench.figures                                          # everything, from runs/ into runs/figures
    python -m bench.figures --only lds seconds --methods bif ekfac   # some of it
    python -m bench.figures --width 5.5 --font-size 9 --formats pdf  # for a paper with 5.5 inches of text width
    python -m bench.figures --list                                   # the names, what each shows and what it needs

Nothing is recomputed, and the same results give the same bytes. Whatever differs in task settings, ground truth or
method settings keeps its own panel and line, and seconds of different machines never share an axis. `figures.json`
beside the pictures holds their captions and the runs behind them.
"""

import argparse
import json
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from bench import schema
from bench.arguments import RUNS, Parser, at_least, check_out, run_cli
from bench.figures.drawing import Drawing, Kind
from bench.figures.ensembles import without_ensembles
from bench.figures.kinds import KINDS
from bench.figures.table import markdown_table
from bench.publish.plots import style
from bench.records import Results, load_results, without_curves, without_scored_again
from retrain.processes import die_with
from retrain.progress import Progress, progress_counter
from retrain.safe_files import SafeFileError, read_checked, write_whole

EVERY_DATAMODEL = ("retraining", "table")  # figures that show every setting of the datamodel
EVERY_ENSEMBLE = ("ensembles", "table")  # and every number of base models
CALLS: list[Any] = []  # of `draw_kind`, for the workers


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.figures", description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--results", default=RUNS, help="where the results are (default: %(default)s)")
    add("--out", help="where the figures go (default: figures inside the results)")
    add("--only", nargs="+", metavar="NAME", help=f"some of: {', '.join(kind.name for kind in KINDS)}")
    add("--methods", nargs="+", metavar="NAME", help="only these methods or labels (default: all)")
    add("--formats", "--format", nargs="+", choices=style.FORMATS, default=["svg", "png"], help="(default: svg png)")
    add("--width", type=inches, default=style.PAGE, help="of the widest figures, in inches (default: %(default)s)")
    add("--font-size", type=points, default=style.FONT_SIZE, help="of labels, in points (default: %(default)s)")
    add("--processes", type=at_least(1), help="how many draw at a time (default: one a core, four at most)")
    add("--list", action="store_true", help="name every figure and what it needs")
    return parser


def inches(text: str) -> float:
    return _between(text, 2.5, 40.0, "inches")


def points(text: str) -> float:
    return _between(text, 4.0, 24.0, "points")


def _between(text: str, low: float, high: float, unit: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f'"{text}" is out of range; expected {low:g} to {high:g} {unit}')
    return value


@dataclass
class Drawn:
    """What came of one kind: entries of figures.json in order, and what went wrong."""

    kind: str
    entries: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def draw_kind(name: str, results: Results, size: style.PaperSize, out: Path, formats: Sequence[str]) -> Drawn:
    import matplotlib

    drawn = Drawn(name)
    (kind,) = [kind for kind in KINDS if kind.name == name]
    taken: set[str] = set()
    results = results if name in EVERY_DATAMODEL else without_curves(without_scored_again(results))
    results = results if name in EVERY_ENSEMBLE else without_ensembles(results)
    results.problems = []
    with matplotlib.rc_context(size.settings()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of glyphs that the font lacks: a box stands for them
        for drawing in kind.draw(results, size):
            stem = free_stem(drawing.stem, taken)
            files = save_drawing(drawing, out / stem, formats)
            words = {"title": drawing.title[:300], "caption": drawing.caption[:30_000]}
            entry = {"kind": name, **words, "runs": drawing.runs}
            drawn.entries.append((stem, entry | {"files": files, "facts": drawing.facts}))
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


def save_drawing(drawing: Drawing, path: Path, formats: Iterable[str]) -> list[str]:
    if drawing.figure is not None:
        return [file.name for file in style.save(drawing.figure, path, formats)]
    assert drawing.table is not None
    texts = {"csv": drawing.table.to_csv(index=False), "md": markdown_table(drawing.table), "tex": drawing.latex}
    for ending, text in texts.items():
        write_whole(path.with_name(f"{path.name}.{ending}"), text)
    return [f"{path.name}.{ending}" for ending in texts]


def draw_all(
    kinds: Sequence[Kind],
    results: Results,
    size: style.PaperSize,
    out: Path,
    formats: Sequence[str],
    processes: int,
    told: Progress = lambda _done, _total: None,
) -> list[Drawn]:
    """In order of the kinds, drawn in as many processes: forked, so that none imports or reads anything again."""
    calls = [(kind.name, results, size, out, tuple(formats)) for kind in kinds]
    if processes < 2 or len(calls) < 2:
        return [draw_kind(*call) for call in calls]
    # Workers have the results by their fork: sent, they would fill a pipe that nobody empties after an interrupt.
    CALLS[:] = calls
    context, driver = get_context("fork"), os.getpid()
    pool = ProcessPoolExecutor(processes, context, _start_drawing, (driver,))
    try:
        told(0, len(calls))
        # The kinds that take longest are started first.
        slow = sorted(range(len(calls)), key=lambda number: calls[number][0] not in ("seeds", "sweep", "pareto"))
        waiting = {number: pool.submit(_draw_number, number) for number in slow}
        for done, _ in enumerate(as_completed(waiting.values()), 1):
            told(done, len(calls))
        return [waiting[number].result() for number in range(len(calls))]
    except BaseException:
        for worker in active_children():  # or else they draw on, and this one waits for them
            worker.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _draw_number(number: int) -> Drawn:
    return draw_kind(*CALLS[number])


def _start_drawing(driver: int) -> None:
    """In a worker: Ctrl-C is the driver's, and nobody draws on when that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(driver)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(sys.argv[1:] if argv is None else list(argv))
    return run_cli(
        parser.prog, lambda: draw_chosen(parser, arguments), "what is drawn is kept; figures.json is as it was"
    )


def draw_chosen(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if arguments.list:
        for kind in KINDS:
            paper = f" (paper: {', '.join(kind.paper)})" if kind.paper else ""
            print(f"{kind.name:15} {kind.shows}{paper}\n{'':15} needs {kind.needs}: {kind.command}")
        return 0
    chosen = [kind for kind in KINDS if not arguments.only or kind.name in arguments.only]
    if unknown := [name for name in arguments.only or [] if name not in {kind.name for kind in chosen}]:
        parser.error(f'unknown figure "{unknown[0]}"; available: {", ".join(kind.name for kind in KINDS)}')
    if not Path(arguments.results).is_dir():
        parser.error(
            f'--results "{arguments.results}" is no folder; expected one with run records, made by --out of bench.lds'
        )
    results = load_results(arguments.results)
    if arguments.methods:
        known = {*results.rows["method"], *results.rows["label"]}
        if unknown := [name for name in arguments.methods if name not in known]:
            parser.error(f'--methods names "{unknown[0]}", which no run has; there are: {", ".join(sorted(known))}')
        results = results.only(arguments.methods)
    out = Path(arguments.out or Path(arguments.results) / "figures")
    check_out(str(out))
    size = style.PaperSize(arguments.width, arguments.font_size)
    processes = arguments.processes or min(4, os.cpu_count() or 1)
    problems = list(results.problems)
    index: dict[str, Any] = {}
    missing: list[Kind] = []
    with progress_counter(True, "kinds of figures") as told:
        found = draw_all(chosen, results, size, out, arguments.formats, processes, told)
    for kind, drawn in zip(chosen, found, strict=True):
        index |= dict(drawn.entries)
        problems += [problem for problem in drawn.problems if problem not in problems]
        for _, entry in drawn.entries:
            first, *more = entry["files"]
            print(f"{kind.name}: {out / first}" + (f" and {', '.join(more)}" if more else ""))
        if not drawn.entries:
            missing.append(kind)
    write_index(out, index, whole=not arguments.only, problems=problems)
    for kind in missing:
        print(f"{kind.name}: missing, needs {kind.needs}; make it with\n    {kind.command_for(arguments.results)}")
    for line in results.left_out:
        print(f"note: {line}")
    for problem in problems:
        print(f"{parser.prog}: {problem}", file=sys.stderr)
    return 1 if problems or (arguments.only and missing) else 0


def first_figure(folder: Path, name: str) -> Any:
    """A matplotlib figure, for notebooks; ValueError with one line where the records allow none."""
    import matplotlib

    kinds = {kind.name: kind for kind in KINDS}
    if name not in kinds:
        raise ValueError(f'unknown figure "{name}"; available: {", ".join(kinds)}')
    size = style.PaperSize()
    with matplotlib.rc_context(size.settings()):
        drawing = next((one for one in kinds[name].draw(load_results(folder), size) if one.figure is not None), None)
    if drawing is None or drawing.figure is None:
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
        kept = {file for entry in index.values() for file in entry["files"]}
        for file in sorted({file for entry in before.values() for file in entry["files"]} - kept):
            (out / file).unlink(missing_ok=True)
    else:
        index = before | index
    write_whole(path, json.dumps(dict(sorted(index.items())), indent=1) + "\n")
