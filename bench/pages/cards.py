"""The report's own markup: a card for every figure, grouped by task, with what the filters need; the table of contents.

Whatever comes from a results folder is escaped here or was rebuilt by `bench.pages.drawings`.
"""

import base64
import gzip
import html
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from bench import schema
from bench.identity import file_slug
from bench.pages.data import file_link, picture_uri
from bench.pages.drawings import inline_drawing
from bench.publish.plots.examples import read_picture
from retrain.safe_files import SafeFileError, read_checked, read_text

MAX_PACKED_BYTES = 150_000  # a drawing of more strokes than this is shown as pixels, where there are any
# What the page has as something one can move about in; twice, it would be half of the page.
SHOWN_ELSEWHERE = {
    "examples": "The images are shown below; as a figure",
    "tokens": "The tokens are shown above; as a figure",
}
COST_KINDS = ("seconds", "pareto", "retraining", "ensembles", "scaling", "budget")
# The parts of a task, in this order: name, kinds, and whether it is open from the beginning.
FIGURE_GROUPS: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("How well each method predicts retraining", ("lds", "lds-normalised"), True),
    ("The numbers", ("table", "llm"), False),
    ("What the scores look like", ("agreement", "overlap", "examples"), True),
    ("Token by token, as pictures", ("tokens",), False),
    ("What settings change", ("difference", "sweep"), False),
    ("Seed by seed", ("seeds",), False),
)
ORDER = (*(kind for _, kinds, _ in FIGURE_GROUPS for kind in kinds), *COST_KINDS)
FEW_ROWS = 16  # of a table that is open from the beginning
ONE_COLUMN = 300  # points: up to here a drawing takes one column


@dataclass
class Card:
    """One figure or table of figures.json."""

    stem: str
    kind: str
    title: str
    markup: str
    task: str
    files: tuple[str, ...]


@dataclass
class Cards:
    """Of a folder of figures, as long as there is room on the page."""

    folder: Path
    out: Path
    room: int
    known_runs: set[str]
    problems: list[str]
    cards: list[Card] = field(default_factory=list)

    def read(self) -> "Cards":
        path = self.folder / "figures.json"
        if not path.exists() and not path.is_symlink():
            return self
        try:
            index = read_checked(path, schema.FigureIndex)
        except SafeFileError as error:
            self.problems.append(str(error))
            return self
        place = {kind: position for position, kind in enumerate(ORDER)}
        entries = sorted(index.items(), key=lambda item: (place.get(item[1]["kind"], len(place)), item[0]))
        for position, (stem, entry) in enumerate(entries):
            try:
                body, narrow = self.body(entry, f"f{position}-")
            except (SafeFileError, ValueError) as error:
                self.problems.append(f"figure {file_slug(stem)}: {error}")
                continue
            markup = self.markup(file_slug(stem), entry, body, narrow)
            self.room -= len(markup.encode())
            task = (entry.get("facts", {}).get("task") or [""])[0]
            title, files = entry.get("title") or stem, tuple(entry["files"])
            self.cards.append(Card(file_slug(stem), entry["kind"], title, markup, task, files))
        return self

    def body(self, entry: Mapping[str, Any], prefix: str) -> tuple[str, bool]:
        """(markup, whether one column is enough): the drawing, else its pixels, else a link."""
        files = {Path(name).suffix: self.folder / name for name in entry["files"]}
        problem: SafeFileError | None = None
        body, narrow = "", False
        if ".csv" in files:
            body = table_markup(files[".csv"])
        if not body and ".svg" in files:
            try:
                drawing, (width, height) = inline_drawing(files[".svg"], prefix)
                narrow = width <= ONE_COLUMN
                packed = base64.b64encode(gzip.compress(drawing.encode(), 9, mtime=0)).decode()
                if len(packed) <= MAX_PACKED_BYTES or ".png" not in files:
                    # Packed until it comes into view: strokes take a tenth of the room, and do not hold up the opening.
                    room = f'style="aspect-ratio:{width:.0f}/{height:.0f}"'
                    waiting = f'<script type="image/svg+xml">{packed}</script>'
                    body = f'<div class="picture{" narrow-ok" if narrow else ""}"><div {room}>{waiting}</div></div>'
            except SafeFileError as error:
                problem = error
        if not body and ".png" in files:
            data = read_picture(files[".png"])
            narrow = int.from_bytes(data[16:20], "big") <= 800
            picture = f'<img alt="" loading="lazy" src="{picture_uri(data)}">'
            body = f'<div class="picture{" narrow-ok" if narrow else ""}">{picture}</div>'
        if problem is not None:
            self.problems.append(str(problem))
        if not body:
            raise problem or ValueError(f"none of {', '.join(entry['files'])} can be shown; draw it again")
        if entry["kind"] in SHOWN_ELSEWHERE or len(body.encode()) > self.room:
            why = SHOWN_ELSEWHERE.get(entry["kind"], "Too large for this page")
            link = html.escape(file_link(next(iter(files.values())), self.out))
            return f'<p class="quiet">{why}: <a href="{link}">{link}</a></p>', True
        return body, narrow

    def markup(self, stem: str, entry: Mapping[str, Any], body: str, narrow: bool) -> str:
        links = [f'<a href="#run-{run}">{run}</a>' if run in self.known_runs else run for run in entry["runs"]]
        runs = f" Runs: {', '.join(links)}." if links else ""
        first, _, rest = entry["caption"].partition(". ")
        more = f"<details><summary>More</summary>{html.escape(rest)}</details>" if rest else ""
        facts = html.escape(json.dumps(entry.get("facts", {})))
        title = html.escape(entry.get("title") or stem)
        # A drawing has its title on itself: the heading is for those who listen.
        unseen = ' class="unseen"' if '<script type="image/svg+xml">' in body else ""
        return (
            f'<figure id="figure-{stem}" data-facts="{facts}"{"" if narrow else " class=wide"}><h4{unseen}>{title}</h4>'
            f"{body}"
            f"<figcaption>{html.escape(first)}.{runs}{more}</figcaption></figure>"
        )


def table_markup(path: Path) -> str:
    table = pd.read_csv(io.StringIO(read_text(path, 2**20)), dtype=str, keep_default_na=False)
    head = "".join(f'<th class="text">{html.escape(str(name))}</th>' for name in table.columns)
    rows = [
        "<tr>" + "".join(f'<td class="text">{html.escape(str(cell))}</td>' for cell in row) + "</tr>"
        for row in table.to_numpy()
    ]
    inside = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    inside = f'<div class="scroll" tabindex="0" role="region" aria-label="table">{inside}</div>'
    if len(rows) <= FEW_ROWS:
        return inside
    return f"<details><summary>{len(rows)} rows</summary>{inside}</details>"


def grid(cards: Iterable[Card]) -> str:
    return f'<div class="columns">{"".join(card.markup for card in cards)}</div>'


def task_sections(cards: Sequence[Card], tasks: Sequence[str], titles: Mapping[str, str]) -> str:
    """A part for every task, and one for what belongs to none; in each, its figures by what they answer."""
    known = {kind for _, kinds, _ in FIGURE_GROUPS for kind in kinds}
    parts = []
    for task in [*tasks, *sorted({card.task for card in cards} - set(tasks))]:
        mine = [card for card in cards if card.task == task and card.kind not in COST_KINDS]
        place = file_slug(task) if task else "other"
        inside = ""
        for name, kinds, opened in (*FIGURE_GROUPS, ("Others", tuple({card.kind for card in mine} - known), True)):
            # Examples are explored below the pictures of them.
            explore = f'<div id="explore-{place}"></div>' if "examples" in kinds else ""
            if found := [card for card in mine if card.kind in kinds]:
                inside += (
                    f'<details class="more-figures"{" open" if opened else ""}><summary><b>{name}</b> '
                    f'<span class="quiet">{len(found)}</span></summary>{grid(found)}{explore}</details>'
                )
            else:
                inside += explore
        title = html.escape(titles.get(task) or task or "Others")
        parts.append(f'<div class="task-figures" id="task-{place}"><h3>{title}</h3>{inside}</div>')
    return "".join(parts) or '<p class="empty">No figures yet: <code>tda-bench publish figures</code></p>'


def contents(tasks: Mapping[str, str], methods: Sequence[Mapping[str, Any]]) -> str:
    """Links to the sections, the tasks and the methods."""

    def entry(place: str, name: str, below: str = "") -> str:
        return f'<li><a href="#{html.escape(place)}">{html.escape(name)}</a>{below}</li>'

    def entries(pairs: Iterable[tuple[str, str]]) -> str:
        inside = "".join(entry(place, name) for place, name in pairs)
        return f"<ul>{inside}</ul>" if inside else ""

    below_board = entries(
        [("detail-title", "Method by method"), ("plot-title", "Plot"), ("pairs-title", "Paired differences")]
    )
    below_images = entries((f"task-{file_slug(task) if task else 'other'}", name) for task, name in tasks.items())
    below_methods = entries((f"method-{method_place(one['method'])}", one["label"]) for one in methods)
    return (
        entry("summary", "Summary")
        + entry("board", "Leaderboard", below_board)
        + entry("paper", "Does the paper hold?")
        + entry("images", "Images per task", below_images)
        + entry("costs", "Costs")
        + entry("methods", "Methods", below_methods)
        + entry("runs", "Runs")
    )


def method_place(method: str) -> str:
    """As the page's script names the method's part."""
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_-") else "-" for letter in method)
