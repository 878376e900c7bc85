"""One self-contained page of every result: leaderboard, figures, what the scores look like, and the runs behind it all.

    python -m bench.figures && python -m bench.report          # results/report/index.html

The page needs no network and no server: open the file. Its figures are those of `bench.figures`, recoloured to follow
the reader's light or dark theme. It stays under 5 MB: figures that would not fit are linked instead.
"""

import argparse
import base64
import html
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.record import without_nan
from bench.results import MANY_SEEDS, Results, bars_of, load_results, over_seeds
from bench.style import FAINT, INK, look
from retrain.command import Parser
from retrain.safe_files import SafeFileError, read_json, read_text, write_whole

MAX_BYTES = 5_000_000
MAX_SVG_BYTES = 400_000  # a drawing of more strokes than this is shown as pixels
FIRST_COMMAND = "python -m bench.lds --alpha 0.1 --out results/digits"
ORDER = (
    "lds",
    "lds-normalised",
    "pareto",
    "seconds",
    "llm",
    "scaling",
    "budget",
    "examples",
    "tokens",
    "seeds",
    "sweep",
)


def leaderboard(results: Results) -> list[dict[str, Any]]:
    """One row for every experiment, over its seeds."""
    rows: list[dict[str, Any]] = []
    if not len(results.rows):
        return rows
    everybody = list(results.rows["method"])
    keys = ["name", "protocol", "alpha", "alpha_attribution", "normalised", "method"]
    for (task, protocol, alpha, share, normalised, method), cell in results.rows.groupby(keys, sort=True):
        mean, low, high = over_seeds(cell)
        ceiling = float(cell["ceiling"].mean())
        machines = sorted(set(cell["machine"]))
        rows.append(
            {
                "task": task,
                "protocol": protocol,
                "method": method,
                "label": look(method, everybody)["label"],
                "colour": look(method, everybody)["color"],
                "scores": "train-normalised" if normalised else "raw",
                "alpha": float(alpha),
                "alpha_attribution": float(share),
                "lds": mean,
                "low": low,
                "high": high,
                "error": high - mean if len(cell) >= MANY_SEEDS else math.nan,
                "bar": bars_of({len(cell)}),
                "ceiling": ceiling,
                "ceiling_runs": sorted(set(cell["ceiling_from"].dropna())),
                "ratio": mean / ceiling if ceiling > 0 else math.nan,
                "seeds": len(cell),
                "undefined": int(cell["num_undefined"].sum()),
                "subsets": span(cell["num_subsets"]),
                "queries": span(cell["num_queries"]),
                "replicates": span(cell["num_replicates"]),
                # Seconds of different machines are not averaged.
                "seconds": float(cell["seconds"].median()) if len(machines) == 1 else math.nan,
                "memory": float(pd.to_numeric(cell["peak_memory_bytes"]).median()) / 2**20,
                "machine": machines[0] if len(machines) == 1 else "several",
                "runs": sorted(set(cell["run_id"])),
            }
        )
    return rows


def span(values: pd.Series) -> str:
    found = sorted({int(value) for value in values.dropna()})
    return "?" if not found else f"{found[0]:,}" if len(found) == 1 else f"{found[0]:,} to {found[-1]:,}"


def first_choice(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the leaderboard shows at first: the task with most rows, at its smallest alpha."""
    if not rows:
        return {}
    tasks = [row["task"] for row in rows]
    task = max(sorted(set(tasks)), key=tasks.count)
    mine = [row for row in rows if row["task"] == task]
    shares = [row["alpha_attribution"] for row in mine]
    share = max(sorted(set(shares)), key=shares.count)
    return {
        "task": task,
        "protocol": mine[0]["protocol"],
        "alpha": min(row["alpha"] for row in mine if row["alpha_attribution"] == share),
        "alpha_attribution": share,
    }


def runs(results: Results, out: Path) -> list[dict[str, Any]]:
    """Every record without its rows, which the leaderboard has."""
    found = []
    for run_id, record in sorted(results.records.items()):
        file = results.folder / record["path"]
        bulky = ("rows", "pairs", "ceilings", "path")
        found.append(
            {
                "run_id": run_id,
                "task": record.get("description") or record["config"]["task"]["name"],
                "device": record["device"],
                "finished": record.get("finished", ""),
                "command": record.get("command", ""),
                "path": record["path"],
                "href": Path(os.path.relpath(file, out)).as_posix(),
                "record": {name: value for name, value in record.items() if name not in bulky},
            }
        )
    return found


def example_sets(results: Results) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    images, tokens = [], []
    for path, content in results.read("examples.json"):
        try:
            if content["kind"] == "images":
                sprite = path.parent / Path(content["sprite"]).name
                data = sprite.read_bytes()
                width = int.from_bytes(data[16:20], "big")  # a PNG's own header
                images.append(
                    {name: content[name] for name in ("description", "seed", "scores", "tile", "queries")}
                    | {"sprite": data_uri(data, "image/png"), "across": width // content["tile"][1]}
                )
            else:
                pairs = [
                    pair | {"strongest": int(np.abs(np.array(pair["bif"])).max(axis=1).argmax())}
                    for pair in content["pairs"]
                ]
                tokens.append({name: content[name] for name in ("description", "seed", "scores")} | {"pairs": pairs})
        except (KeyError, TypeError, OSError, IndexError, ValueError) as error:
            results.problems.append(f"{path}: cannot be shown ({type(error).__name__}: {error})")
    return images, tokens


def data_uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


# ---- figures ----


def figure_blocks(folder: Path, out: Path, budget: int, known_runs: set[str], problems: list[str]) -> str:
    try:
        index = read_json(folder / "figures.json") if (folder / "figures.json").exists() else {}
    except SafeFileError as error:
        problems.append(str(error))
        index = {}
    blocks = []
    place = {kind: position for position, kind in enumerate(ORDER)}
    for number, (name, entry) in enumerate(
        sorted(index.items(), key=lambda item: (place.get(item[1]["kind"], 99), item[0]))
    ):
        try:
            body, wide = figure_body(folder, entry, f"f{number}-", budget, out)
        except (SafeFileError, OSError) as error:
            problems.append(f"figure {name}: {error}; draw it again with python -m bench.figures")
            continue
        budget -= len(body)
        links = [f'<a href="#run-{run}">{run}</a>' if run in known_runs else html.escape(run) for run in entry["runs"]]
        text = html.escape(entry["caption"]) + (f" Runs: {', '.join(links)}." if links else "")
        blocks.append(
            f'<figure id="figure-{html.escape(name)}"{" class=wide" if wide else ""}>'
            f"{body}<figcaption>{text}</figcaption></figure>"
        )
    if not blocks:
        return '<p class="empty">No figures yet. Draw them with <code>python -m bench.figures</code></p>'
    return f'<div class="columns">{"".join(blocks)}</div>'


def figure_body(folder: Path, entry: dict[str, Any], prefix: str, budget: int, out: Path) -> tuple[str, bool]:
    files = {Path(name).suffix: folder / Path(name).name for name in entry["files"]}
    if ".csv" in files:
        body = table_html(files[".csv"])
        wide = True
    elif ".svg" in files and files[".svg"].stat().st_size <= MAX_SVG_BYTES:
        body, wide = inline_svg(read_text(files[".svg"]), prefix)
    elif ".png" in files:
        data = files[".png"].read_bytes()
        wide = int.from_bytes(data[16:20], "big") > 800
        body = f'<div class="picture"><img alt="" src="{data_uri(data, "image/png")}"></div>'
    else:
        raise OSError(f"none of {', '.join(entry['files'])} can be shown")
    if len(body) > budget:
        link = Path(os.path.relpath(next(iter(files.values())), out)).as_posix()
        body, wide = (
            f'<p class="quiet">Too large for this page: <a href="{html.escape(link)}">{html.escape(link)}</a></p>',
            False,
        )
    return body, wide


def inline_svg(text: str, prefix: str) -> tuple[str, bool]:
    """The drawing in the page's own colours, its ids made unique; anything that could run is taken out."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<(script|foreignObject)\b.*?</\1>|\son\w+=\"[^\"]*\"", "", text, flags=re.S | re.I)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', text)
    text = re.sub(r'(xlink:href|href)="#([^"]+)"', rf'\1="#{prefix}\2"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}\1)", text)
    text = re.sub(re.escape(INK), "currentColor", text, flags=re.I)
    text = re.sub(re.escape(FAINT), "var(--grid)", text, flags=re.I)
    text = re.sub(r"fill: #ffffff", "fill: none", text)
    text = re.sub(r"font: ([0-9.]+px)[^;\"]*", r"font-size: \1", text)
    # Text without a colour of its own is black by default, which a dark page swallows.
    text = text.replace("<svg ", '<svg fill="currentColor" role="img" ', 1)
    width = re.search(r'width="([0-9.]+)pt"', text)
    wide = bool(width and float(width.group(1)) > 300)
    text = re.sub(
        r'(<svg[^>]*?) width="[^"]*pt" height="[^"]*pt"|(<svg[^>]*?) height="[^"]*pt"', r"\1\2", text, count=1
    )
    return f'<div class="picture{"" if wide else " narrow-ok"}">{text}</div>', wide


def table_html(path: Path) -> str:
    import io

    frame = pd.read_csv(io.StringIO(read_text(path)), dtype=str, keep_default_na=False)
    head = "".join(f'<th class="text">{html.escape(str(name))}</th>' for name in frame.columns)
    rows = [
        "<tr>" + "".join(f'<td class="text">{html.escape(str(cell))}</td>' for cell in row) + "</tr>"
        for row in frame.to_numpy()
    ]
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


# ---- the page ----


def build_page(results: Results, out: Path, figures: Path) -> str:
    template = Path(__file__).parent / "report_page"
    rows = leaderboard(results)
    images, tokens = example_sets(results)
    data = {
        "rows": rows,
        "first": first_choice(rows),
        "runs": runs(results, out),
        "images": images,
        "tokens": tokens,
        "labels": {row["method"]: row["label"] for row in rows},
        "command": FIRST_COMMAND,
    }
    # "</script" inside a string would end the element that carries it.
    text = (
        json.dumps(without_nan(data), separators=(",", ":"), sort_keys=True)
        .replace("</", "<\\/")
        .replace("<!--", "<\\u0021--")
    )
    page = (template / "page.html").read_text(encoding="utf-8")
    page = page.replace("/*CSS*/", (template / "page.css").read_text(encoding="utf-8"))
    page = page.replace("/*JS*/", (template / "page.js").read_text(encoding="utf-8"))
    budget = MAX_BYTES - len(page.encode()) - len(text.encode()) - 50_000
    drawn = figure_blocks(figures, out, budget, set(results.records), results.problems)
    return page.replace("<!--FIGURES-->", drawn).replace("<!--DATA-->", text)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.report", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--results", default="results", help="where the results are (default: %(default)s)")
    parser.add_argument("--figures", help="where bench.figures drew (default: figures inside the results)")
    parser.add_argument("--out", help="where index.html goes (default: report inside the results)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(sys.argv[1:] if argv is None else list(argv))
    folder = Path(arguments.results)
    if not folder.is_dir():
        parser.error(f'--results "{folder}" is no folder; expected one with run records, made by --out of bench.lds')
    out = Path(arguments.out or folder / "report")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f'--out "{out}" cannot be made: {error.strerror}')
    results = load_results(folder)
    page = build_page(results, out, Path(arguments.figures or folder / "figures")).encode()
    write_whole(out / "index.html", page)
    for problem in results.problems:
        print(f"{parser.prog}: {problem}", file=sys.stderr)
    print(f"{out / 'index.html'}: {len(results.rows)} rows of {len(results.records)} runs, {len(page) / 1e6:.1f} MB")
    return 1 if results.problems or len(page) > MAX_BYTES else 0


if __name__ == "__main__":
    sys.exit(main())
