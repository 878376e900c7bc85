"""One self-contained page of every result: leaderboard, paired differences, figures by task, costs, methods and runs.

    tda-bench publish figures && python -m bench.report   # runs/report/index.html

The page needs no network and no server: open the file. Its figures are drawn before; SVGs are recoloured to follow
the reader's light or dark theme. It stays under 5 MB: drawings are packed, and what would not fit is linked. Nothing
of a results folder becomes part of the page but as text, numbers, pixels, or a drawing rebuilt stroke by stroke.
"""

import argparse
import html
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.arguments import RUNS, Parser, check_out, run_cli
from bench.identity import file_slug
from bench.pages.assemble import built_page, inert_json, part
from bench.pages.cards import COST_KINDS, Card, Cards, contents, grid, task_sections
from bench.pages.data import report_data
from bench.pages.markdown import Links, rendered
from bench.pages.plots import plot_specifications
from bench.records import Results, load_results
from retrain.errors import UsageError
from retrain.safe_files import SafeFileError, read_text, write_whole

MAX_BYTES = 5_000_000
RESERVATIONS = "Recorded and not on this page, or there with a reservation"
SLACK = 60_000  # bytes for what is added around the figures
FIRST_COMMAND = "python -m bench.lds --alpha 0.1"
REPRODUCTION = "reproduction.md"  # in the results folder: which of the paper's claims hold here
ANSWERS_PAGE = "README.md"  # there, too: its first table is of questions and answers
ANSWERS_TABLE = re.compile(r"^\| question \|.*(?:\n\|.*)+", re.MULTILINE)
TITLE = re.compile(r"\A\s*# .*\n")
SCRIPTS = ("base", "ranks", "board", "pairs", "plots", "sections", "examples", "start")


def page_script() -> str:
    own = "\n".join(part(f"report/{name}.js") for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{own}\n}})();'


def build_page(results: Results, out: Path, figures: Path) -> str:
    data: dict[str, Any] = report_data(results, out)
    data |= {"plots": plot_specifications(), "command": FIRST_COMMAND}
    for example in (*data["images"], *data["tokens"]):
        example["place"] = file_slug(example["task"])
    script, charts = page_script(), part("vendor/vega.min.js")
    template, style = part("report/page.html"), part("report/page.css")
    paper = paper_section(results, out)
    used = sum(len(text.encode()) for text in (template, style, paper, inert_json(data), script, charts))
    cards = Cards(figures, out, MAX_BYTES - used - SLACK, set(results.records), results.problems).read().cards
    titles = {one["task"]: one["description"] for one in reversed(data["grounds"])}
    tasks = list(dict.fromkeys(one["task"] for one in data["grounds"]))
    others = {card.task for card in cards} | {example["task"] for example in (*data["images"], *data["tokens"])}
    tasks += sorted(others - set(tasks) - {""})
    costs = [card for card in cards if card.kind in COST_KINDS]
    values = {
        "STYLE": style,
        "CONTENTS": contents({task: titles.get(task) or task for task in tasks}, data["methods"]),
        "SUMMARY": summary_section(results, data, len(cards)),
        "ANSWERS": answers_section(results, out, cards, figures),
        "PAPER": paper,
        "IMAGES": task_sections(cards, tasks, titles),
        "COSTS": grid(costs) if costs else "",
    }
    # The plots' library is a quarter of the page: it is compiled when the first plot comes into view.
    return built_page(template, [script], values, data, {"charts": charts})


def summary_section(results: Results, data: dict[str, Any], num_figures: int) -> str:
    counts = (
        f"{len(data['runs'])} runs, {len(data['grounds'])} experiments, {len(data['methods'])} methods, "
        f"{len(results.rows):,} rows, {num_figures} figures and tables."
    )
    notes = [*results.left_out, *results.problems]
    lines = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    left = f"<details><summary>{RESERVATIONS}: {len(notes)}</summary><ul>{lines}</ul></details>" if notes else ""
    return f"<p>{html.escape(counts)}</p>{left}"


def paper_section(results: Results, out: Path) -> str:
    """The verdicts open, the readings behind each of them folded."""
    text = text_beside(results, REPRODUCTION)
    if text is None:
        return f'<p class="empty">There is no <code>{REPRODUCTION}</code> in these results yet.</p>'
    text = TITLE.sub("", text, count=1)  # the section has it
    return rendered(text, Links(base_of(results, out), anchors="paper-"), fold=2)


def answers_section(results: Results, out: Path, cards: Sequence[Card], figures: Path) -> str:
    """The table of questions and answers of the results' own page; figures that are on this page are linked here."""
    text = text_beside(results, ANSWERS_PAGE) or ""
    table = ANSWERS_TABLE.search(text)
    if table is None:
        return ""
    folder = Path(os.path.relpath(figures, results.folder)).as_posix()
    here = {f"{folder}/{file}": f"figure-{card.stem}" for card in cards for file in card.files}
    return f"<h3>Questions and answers</h3>{rendered(table[0], Links(base_of(results, out), here=here))}"


def text_beside(results: Results, name: str) -> str | None:
    """Of a page in the results folder; None where there is none that can be shown."""
    path = results.folder / name
    if path.exists() or path.is_symlink():
        try:
            return read_text(path, 2**20)
        except SafeFileError as error:
            results.note(str(error))
    return None


def base_of(results: Results, out: Path) -> str:
    return Path(os.path.relpath(results.folder, out)).as_posix() + "/"


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.report", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--results", default=RUNS, help="where the results are (default: %(default)s)")
    parser.add_argument("--figures", help="where they were drawn (default: figures inside the results)")
    parser.add_argument("--out", help="where index.html goes (default: report inside the results)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(sys.argv[1:] if argv is None else list(argv))
    again = "the same command makes the page"
    return run_cli(parser.prog, lambda: write_page(arguments, parser.prog), again)


def write_page(arguments: argparse.Namespace, prog: str) -> int:
    folder = Path(arguments.results)
    if not folder.is_dir():
        raise UsageError(
            f'--results "{folder}" is no folder; expected one with run records, made by --out of bench.lds'
        )
    if arguments.figures and not Path(arguments.figures).is_dir():
        raise UsageError(f'--figures "{arguments.figures}" is no folder; expected the one that figures were drawn to')
    out = Path(arguments.out or folder / "report")
    check_out(str(out))
    results = load_results(folder)
    page = build_page(results, out, Path(arguments.figures or folder / "figures")).encode()
    write_whole(out / "index.html", page)
    if results.left_out:
        print(f"{RESERVATIONS}:")
    for line in results.left_out:
        print(f"  {line}")
    for problem in results.problems:
        print(f"{prog}: {problem}", file=sys.stderr)
    if not results.records and not results.problems:
        print(f"{folder} holds no run.json yet: the page says how to make one, and no more", file=sys.stderr)
    print(f"{out / 'index.html'}: {len(results.rows)} rows of {len(results.records)} runs, {len(page) / 1e6:.1f} MB")
    return 1 if results.problems or len(page) > MAX_BYTES else 0


if __name__ == "__main__":
    sys.exit(main())
