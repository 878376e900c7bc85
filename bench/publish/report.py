"""One self-contained page of every result: answers, leaderboard, the paper's claims, pictures, methods and runs.

    tda-bench publish figures && tda-bench publish report          # runs/report/index.html

The page needs no network and no server: open the file. It stays under 3 MB: pictures that would not fit are linked.
Nothing of a results folder becomes part of it but as text, numbers or pixels.
"""

import argparse
import base64
import io
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import bench.schema as schema
from bench.arguments import RUNS, check_out, report
from bench.cli import plugin_classes, summary_of
from bench.identity import file_slug, model_words
from bench.publish import leaderboard
from bench.publish.html import built_page, markdown, read_png
from bench.publish.leaderboard import LeaderboardRow
from bench.publish.plots import KINDS
from bench.records import DATAMODEL, Results, load_results
from bench.tables import bytes_text, duration, grouped, number
from retrain.safe_files import SafeFileError, read_checked, read_text, write_whole

MAX_BYTES = 3_000_000
SLACK = 60_000
WIDEST = 1_200  # pixels of a picture
FIRST_COMMAND = "tda-bench lds --alpha 0.1"
# Pictures as plots.KINDS orders them, as long as there is room; the first is the front picture.
ORDER = {kind.name: place for place, kind in enumerate(KINDS)}
COST_KINDS = ("scaling", "budget")
TITLE = re.compile(r"\A\s*# .*\n")
SCORES = {"raw": "raw", "normalised": "train-normalised"}
HEADS = {"lds": "LDS", leaderboard.WITHIN: "LDS within class"}
MOST_TIES = 2  # that are named


def write_page(results: Results, out: Path, figures: Path) -> bytes:
    ranked = leaderboard.rows(results)
    base = Path(os.path.relpath(results.folder, out)).as_posix() + "/"
    tasks = list(dict.fromkeys(row.task for row in ranked))
    values: dict[str, Any] = {
        "answers": [markdown(one, base) for one in answers_in(page_beside(results, "README.md"))],
        "best": best_methods(ranked),
        "boards": [(board, file_slug(board.title)) for board in leaderboard.boards(ranked)],
        "claims": markdown(TITLE.sub("", page_beside(results, "reproduction.md")), base),
        "cards": {task: method_cards([row for row in ranked if row.task == task]) for task in tasks},
        "runs": run_lines(results, out), "left_out": [*results.left_out, *results.problems], "command": FIRST_COMMAND,
        "slug": file_slug, "titles": dict(zip(results.rows["task"], results.rows["description"])),
    }  # fmt: skip
    empty: dict[str, Any] = {"front": None, "by_task": {task: [] for task in tasks}, "costs": []}
    used = len(built_page("report", **values, **empty).encode())
    pictures = read_pictures(results, figures, out, MAX_BYTES - SLACK - used)
    front = next((one for one in pictures if one["source"]), None)
    rest = [one for one in pictures if one is not front]
    places = [*tasks, *sorted({one["task"] for one in rest if one["kind"] not in COST_KINDS} - set(tasks))]
    by_task = {task: [one for one in rest if one["task"] == task and one["kind"] not in COST_KINDS] for task in places}
    costs = [one for one in rest if one["kind"] in COST_KINDS]
    values["left_out"] = [*results.left_out, *results.problems]
    return built_page("report", **values, front=front, by_task=by_task, costs=costs).encode()


def page_beside(results: Results, name: str) -> str:
    """The text of a page in the results folder; none where there is none that can be shown."""
    path = results.folder / name
    if path.exists() or path.is_symlink():
        try:
            return read_text(path, 2**20)
        except SafeFileError as error:
            results.note(str(error))
    return ""


def answers_in(page: str) -> list[str]:
    """The sections of a page whose heads are questions."""
    sections = page.split("\n## ")[1:]
    return [f"### {section}" for section in sections if section.partition("\n")[0].rstrip().endswith("?")]


def best_methods(ranked: Sequence[LeaderboardRow]) -> list[dict[str, Any]]:
    """Of each task and protocol, where most seeds, models looked at and methods were measured: who is best.

    At each alpha, of the share of the training set that has most of them, raw scores, by LDS within groups where it is
    known. Methods that learn from many retrained models are left out: they pay for what the others predict.
    """
    columns: dict[tuple[str, str, float], dict[str, list[LeaderboardRow]]] = {}
    alphas: dict[tuple[str, str, float], set[float]] = {}
    for row in ranked:
        if row.metric in leaderboard.LDS and row.scores == "raw" and row.method != DATAMODEL and row.rank_best:
            # LDS on balanced subsets asks for more than the class, so it is a line of its own.
            balanced = ", balanced" if "balanced subsets" in row.ground else ""
            place = (row.task, row.protocol + balanced, row.alpha or 0.0)
            columns.setdefault(place, {}).setdefault(row.column, []).append(row)
            alphas.setdefault((*place[:2], row.alpha_attribution), set()).add(place[2])
    found = []
    for (task, protocol, alpha), by_column in columns.items():
        here = max(
            by_column.values(),
            key=lambda own: (
                own[0].metric != "lds", len(alphas[task, protocol, own[0].alpha_attribution]), own[0].num_seeds,
                len({(row.reference, row.models) for row in own}), len(own), own[0].alpha_attribution,
            ),
        )  # fmt: skip
        first = max(here, key=lambda row: row.value)
        best = min(row.rank_best for row in here)  # those that retrain may be ahead of all of them
        ties = [row.name for row in here if row.rank_best == best and row is not first]
        within = first.metric != "lds"
        name = model_words(first.label.partition("@")[0], first.reference, first.models)
        found.append(
            {
                "task": task, "protocol": protocol, "alpha": f"{alpha:g}", "share": f"{first.alpha_attribution:g}",
                "method": name if first.low > 0 else "nobody above chance",
                "ties": ", ".join(ties) if len(ties) <= MOST_TIES else f"{len(ties)} others",
                "lds": f"{first.value:.3f}", "ends": f"[{number(first.low)}, {number(first.high)}]", "within": within,
                "ceiling": "may be 0" if first.ceiling_touches_zero else number(first.ceiling),
                "seconds": duration(first.seconds), "seeds": first.num_seeds,
            }
        )  # fmt: skip
    return found


def method_cards(rows: Sequence[LeaderboardRow]) -> list[dict[str, Any]]:
    """One card a method and task, the best first: what is known of it, with its settings."""
    found = []
    for method, own in grouped(rows, lambda row: row.method).items():
        timed = [row for row in own if math.isfinite(row.seconds)]
        lines = [
            [
                row.name, HEADS.get(row.metric, row.metric) + ("" if row.at is None else f" at {row.at:.3g}"),
                row.protocol, f"{row.alpha_attribution:g}", "" if row.alpha is None else f"{row.alpha:g}",
                SCORES[row.scores], f"{number(row.value)} [{number(row.low)}, {number(row.high)}]",
                f"{row.rank} of {row.num_ranked}", str(row.num_seeds), row.settings or "defaults",
            ]
            for row in own
        ]  # fmt: skip
        cost = f"{duration(timed[0].seconds)}, {bytes_text(timed[0].memory)} on {timed[0].device}" if timed else ""
        best = min([row.rank_best for row in own if row.rank_best] or [10**6])
        found.append({"label": method, "about": about_method(method), "cost": cost, "lines": lines, "best": best})
    return sorted(found, key=lambda card: (card["best"], card["label"]))


def about_method(name: str) -> str:
    """What it is and its paper, of a method of the suite."""
    classes = plugin_classes("methods")
    if isinstance(classes.get(name, ""), str):  # somebody else's, or one that cannot be imported here
        return ""
    summary, paper = summary_of(classes[name]), str(classes[name].paper)
    return f"{summary[:1].upper()}{summary[1:].rstrip('.')}.{f' Paper: {paper}.' if paper else ''}"


def run_lines(results: Results, out: Path) -> list[dict[str, Any]]:
    return [
        {
            "id": run, "what": record.get("description") or record["config"]["task"]["name"],
            "device": record["device"], "finished": str(record.get("finished", ""))[:10],
            "command": record.get("command", ""), "path": record["path"],
            "link": file_link(results.folder / record["path"], out),
        }
        for run, record in sorted(results.records.items(), key=lambda one: one[1]["path"])
    ]  # fmt: skip


def file_link(file: Path, out: Path) -> str:
    """A relative address whose letters are those of a path: no colon that would make it another kind of address."""
    return quote(Path(os.path.relpath(file, out)).as_posix(), safe="/")


def read_pictures(results: Results, folder: Path, out: Path, room: int) -> list[dict[str, Any]]:
    """The figures of figures.json; one that does not fit any more has a link in place of its pixels."""
    path = folder / "figures.json"
    if not path.exists() and not path.is_symlink():
        return []
    try:
        index: Mapping[str, Any] = read_checked(path, schema.FigureIndex)
    except SafeFileError as error:
        results.note(str(error))
        return []
    found = []
    room -= sum(len(entry["caption"]) + 1_000 for entry in index.values())  # what stands around each of them
    for stem, entry in sorted(index.items(), key=_picture_order):
        files = {Path(name).suffix: folder / name for name in entry["files"]}
        source = ""
        if ".png" in files and room > 0:
            try:
                source = picture_uri(files[".png"])
            except SafeFileError as error:
                results.note(f"figure {file_slug(stem)}: {error}")
                continue
            source = source if len(source) <= room else ""
            room -= len(source)
        first, _, more = entry["caption"].partition(". ")
        found.append(
            {
                "id": file_slug(stem), "kind": entry["kind"], "title": entry.get("title") or stem, "source": source,
                "caption": f"{first}.", "more": more, "task": (entry.get("facts", {}).get("task") or [""])[0],
                "links": [(Path(file).suffix[1:], file_link(file, out)) for file in files.values()],
            }
        )  # fmt: skip
    return found


def _picture_order(item: tuple[str, Mapping[str, Any]]) -> tuple[Any, ...]:
    """By kind; of one kind that of any subset and most methods first, which makes it the front picture."""
    stem, entry = item
    methods = entry.get("facts", {}).get("method", [])
    return ORDER.get(entry["kind"], len(ORDER)), "balanced" in stem, -len(methods), stem


def picture_uri(path: Path) -> str:
    """As WebP, no wider than a screen: a tenth of the room, and nothing is read off the pixels."""
    picture = read_png(path)
    if picture.width > WIDEST:
        picture = picture.resize((WIDEST, max(1, round(picture.height * WIDEST / picture.width))))
    packed = io.BytesIO()
    picture.convert("RGB").save(packed, "WEBP", quality=70, method=4)
    return f"data:image/webp;base64,{base64.b64encode(packed.getvalue()).decode()}"


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", default=RUNS, help="where the results are (default: %(default)s)")
    parser.add_argument("--out", help="where index.html goes (default: report inside the results)")


def run(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.results)
    out = Path(arguments.out or folder / "report")
    results = load_results(folder)
    check_out(str(out))
    page = write_page(results, out, folder / "figures")
    write_whole(out / "index.html", page)
    failed = report("tda-bench publish report", [], results.problems)
    if not results.records and not results.problems:
        print(f"{folder} holds no run.json yet: the page says how to make one, and no more", file=sys.stderr)
    print(f"{out / 'index.html'}: {len(results.rows)} rows of {len(results.records)} runs, {len(page) / 1e6:.1f} MB")
    return 1 if failed or len(page) > MAX_BYTES else 0
