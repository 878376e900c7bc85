"""Draws every figure that a folder of records allows, and says how to make the others.

    tda-bench publish figures                          # everything, from runs/ into runs/figures
    tda-bench publish figures --only lds front         # some kinds
    tda-bench publish figures --list                   # every kind, what it shows and what it needs

Nothing is recomputed, and the same results give the same bytes. What differs in task settings, ground truth or method
settings keeps its own panel and line. `figures.json` beside the pictures holds their captions and the runs behind them.
A new kind is a row of KINDS, and a function `draw_<kind>` of the named file that yields drawings.
"""

import argparse
import json
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.publish.plots.frame import Drawing
    from bench.records import Results


@dataclass(frozen=True)
class Kind:
    """A family of figures: its file here, what it shows and needs, the command that makes that, the paper's own."""

    name: str
    file: str
    shows: str
    needs: str
    command: str
    paper: str = ""  # labels of the paper's figures
    crowded: bool = False  # whether it has room for every base model and label of a run

    def draw(self, results: "Results") -> "Iterator[Drawing]":
        drawings: Iterator[Drawing] = getattr(import_module(f"{__name__}.{self.file}"), f"draw_{self.name}")(results)
        return drawings


LDS = "tda-bench lds --alpha 0.1 0.3 0.5 0.7"
RECORDS = "records of bench.lds"
KINDS = (
    Kind("front", "lds", "LDS, within class where there are classes, against seconds", RECORDS, LDS, crowded=True),
    Kind("collapse", "lds", "LDS beside LDS within class, a line a method", f"{RECORDS} on a task with classes",
         LDS, crowded=True),
    Kind("reference", "lds", "LDS against how much more data the model looked at has seen than those asked about",
         "records of two references", f"{LDS} --reference subset --checkpoints 1 8", crowded=True),
    Kind("retraining", "lds", "LDS against seconds of the datamodel with every prior, beside the others",
         "records of the datamodel", "tda-bench lds --experiment results/digits/datamodel.toml"),
    Kind("lds", "lds", "LDS against alpha, raw and train-normalised, a panel for each attributed share", RECORDS, LDS,
         "fig:retraining, fig:individual_LDS_scores, fig:individual_LDS_scores_2, tab:LLM_LDS_scores"),
    Kind("draws", "lds", "LDS within class against draws of bif_gaussian, beside BIF and EK-FAC",
         "records of bif_gaussian@curve=true", "tda-bench lds --experiment results/digits/gaussian.toml"),
    Kind("scaling", "scaling", "seconds, memory and disk against model size, and who is cheaper where", "scaling.csv",
         "tda-bench scaling", "fig:benchmark_big_ek-fac, tab:bif-vs-ekfac"),
    Kind("budget", "lds", "LDS against draws, projection and checkpoints", "budget.json", "tda-bench tune budget"),
    Kind("examples", "examples", "queries and their most and least influential training images",
         "examples.json of an image task", "tda-bench inspect --task cifar10 --query 0 1 2 3 --top 4",
         "fig:image-main, fig:image-full"),
    Kind("tokens", "examples", "query tokens against training tokens", "examples.json of a language task",
         "tda-bench inspect tokens --task pythia14m --methods bif ekfac --top 5",
         "fig:lang-main, fig:p2.8B, fig:p14M-1, fig:p14M-2, fig:ekfac_vs_bif_grid, fig:bif_tokenwise_grid"),
)  # fmt: skip


def kind_called(name: str) -> Kind:
    from retrain.errors import UsageError

    known = {kind.name: kind for kind in KINDS}
    if name not in known:
        raise UsageError(f'unknown figure "{name}"; available: {", ".join(known)}')
    return known[name]


def without_crowds(results: "Results", kind: Kind) -> "Results":
    """The rows for a kind: curves over retrains or base models have a figure of their own, and crowd the others."""
    from dataclasses import replace

    from bench.records import FEW, without_curves, without_scored_again

    if kind.name != "retraining":
        results = without_curves(without_scored_again(results))
    rows = results.rows
    if not kind.crowded:
        counts = rows[rows["models"] > 1].groupby("run_id")["series"].nunique()
        rows = rows[~rows["run_id"].isin(counts[counts > FEW].index)]
    return replace(results, rows=rows)


def draw_kind(kind: Kind, results: "Results", out: Path) -> dict[str, dict[str, Any]]:
    """Entries of figures.json."""
    import matplotlib

    from bench.publish.plots import style

    entries: dict[str, dict[str, Any]] = {}
    results = without_crowds(results, kind)
    with matplotlib.rc_context(style.settings()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of glyphs that the font lacks: a box stands for them
        for drawing in kind.draw(results):
            stem = free_stem(drawing.stem, entries)
            file = style.save(drawing.figure, out / stem)
            told = {"title": drawing.title[:300], "caption": drawing.caption[:30_000], "runs": drawing.runs}
            entries[stem] = {"kind": kind.name, **told, "files": [file.name], "facts": drawing.facts}
    return entries


def free_stem(stem: str, taken: Iterable[str]) -> str:
    """Two that would have one name have two; none is longer than a file's name may be."""
    stem = stem[:180].rstrip("-")
    name, number = stem, 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}"
    return name


def draw_figures(source: Any, kind: str = "front") -> Any:
    """The first figure of a kind that a folder of records, or a result that can be saved as one, allows."""
    import matplotlib

    from bench.publish.plots import style
    from bench.records import load_results

    if not isinstance(source, str | Path):
        with TemporaryDirectory(prefix="tda-bench-") as folder:
            source.save(folder)
            return draw_figures(folder, kind)
    asked = kind_called(kind)
    with matplotlib.rc_context(style.settings()):
        drawing = next(iter(asked.draw(load_results(source))), None)
    if drawing is None:
        raise ValueError(f"{source} allows no figure of the kind {kind}, which needs {asked.needs}")
    return drawing.figure


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from bench.arguments import RUNS

    add = parser.add_argument
    add("--results", default=RUNS, metavar="DIR", help="where the records are (default: %(default)s)")
    add("--out", metavar="DIR", help="where the figures go (default: figures inside the results)")
    add("--only", nargs="+", metavar="KIND", help="only these kinds of figures")
    add("--list", action="store_true", help="name every kind and what it needs")


def run(arguments: argparse.Namespace) -> int:
    """1 where a file could not be used, or where nothing allows a kind that was asked for."""
    from bench.arguments import check_out, report
    from bench.records import load_results
    from retrain.progress import progress_counter

    if arguments.list:
        for kind in KINDS:
            paper = f" (paper: {kind.paper})" if kind.paper else ""
            print(f"{kind.name:13} {kind.shows}{paper}\n{'':13} needs {kind.needs}: {kind.command}")
        return 0
    chosen = [kind_called(name) for name in dict.fromkeys(arguments.only or [])] or list(KINDS)
    results = load_results(arguments.results)
    out = Path(arguments.out or Path(arguments.results) / "figures")
    check_out(str(out))
    index, missing = dict[str, Any](), list[Kind]()
    with progress_counter(True, "kinds of figures") as progress:
        for number, kind in enumerate(chosen):
            progress(number, len(chosen))
            entries = draw_kind(kind, results, out)
            index |= entries
            missing += [] if entries else [kind]
    for entry in index.values():
        print(f"{entry['kind']}: {out / entry['files'][0]}")
    write_index(out, index, whole=not arguments.only, results=results)
    for kind in missing:
        print(f"{kind.name}: missing, needs {kind.needs}; make it with\n    {kind.command} --out {arguments.results}")
    for line in results.left_out:
        print(f"note: {line}")
    failed = report("tda-bench publish figures", [], results.problems)
    return 1 if failed or (arguments.only and missing) else 0


def write_index(out: Path, index: dict[str, Any], whole: bool, results: "Results") -> None:
    """With --only, the captions of the other figures stay; else pictures that the last index named and this one does
    not are taken away, so that none outlives its results."""
    from bench.schema import FigureIndex
    from retrain.safe_files import SafeFileError, read_checked, write_whole

    path = out / "figures.json"
    before: dict[str, Any] = {}
    if path.exists() or path.is_symlink():
        try:
            before = read_checked(path, FigureIndex)
        except SafeFileError as error:
            results.note(str(error))
    if whole:
        old, new = ({file for entry in one.values() for file in entry["files"]} for one in (before, index))
        for file in sorted(old - new):
            (out / file).unlink(missing_ok=True)
    else:
        index = before | index
    write_whole(path, json.dumps(dict(sorted(index.items())), indent=1) + "\n")
