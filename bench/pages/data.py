"""What the report's scripts work on, as plain data: leaderboard, differences, costs, methods, runs and examples."""

import ast
import base64
import io
import math
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from bench.pages.ranks import Ranks, ranked_boards
from bench.publish.leaderboard import LeaderboardRow
from bench.publish.leaderboard import rows as ranked_rows
from bench.publish.plots.captions import kind_of_scores, span
from bench.publish.plots.examples import image_examples_of, read_picture, token_examples_of
from bench.publish.plots.frame import UnusableError
from bench.publish.plots.scaling import read_scaling
from bench.publish.plots.style import SHADES, in_order, look, looks, shaded
from bench.records import MANY_SEEDS, Results, bars_of, ceiling_over_seeds, over_seeds
from retrain.safe_files import SafeFileError

ROW_KEYS = ["ground", "truth", "alpha_attribution", "alpha", "normalised", "series"]
BULKY = ("rows", "pairs", "ceilings", "path")  # of a record: what the page has elsewhere
MAX_SPRITE_BYTES = 1_000_000
SMALL_PICTURE_BYTES = 20_000


def kind(normalised: Any) -> str:
    return kind_of_scores(bool(normalised)).removesuffix(" scores")


def leaderboard(results: Results, ranked: list[LeaderboardRow]) -> list[dict[str, Any]]:
    """One row for every experiment, over its seeds, with its rank among those of the same seeds."""
    rows: list[dict[str, Any]] = []
    ranks = Ranks(ranked)
    shapes = series_looks(results)
    for (ground, truth, share, alpha, normalised, series), cell in results.rows.groupby(ROW_KEYS, sort=True):
        mean, low, high = over_seeds(cell)
        ceiling = ceiling_over_seeds(cell)
        machines = sorted(set(cell["machine"]))
        first = cell.iloc[0]
        asked = (first["ground_words"], truth, kind(normalised), float(alpha), float(share))
        seeds = tuple(sorted(int(seed) for seed in cell["seed"]))
        rows.append(
            {
                "rank": ranks.of(*asked, first["label"], first["settings"] or "", seeds),
                "ground": ground, "truth": truth, "task": first["task"], "protocol": first["protocol"],
                "method": first["method"], "series": series, "settings": first["settings"],
                "colour": shapes[ground][series]["color"], "scores": kind(normalised), "alpha": float(alpha),
                "alpha_attribution": float(share), "lds": mean, "low": low, "high": high,
                "error": high - mean if len(cell) >= MANY_SEEDS else math.nan, "bar": bars_of([len(cell)]),
                "ceiling": ceiling.value,
                "shaky": ceiling.touches_zero, "ceiling_runs": sorted(set(cell["ceiling_from"].dropna())),
                "ratio": math.nan if ceiling.touches_zero else mean / ceiling.value, "seeds": len(cell),
                "undefined": int(cell["num_undefined"].sum()), "subsets": span(cell["num_subsets"]),
                "queries": span(cell["num_queries"]), "replicates": span(cell["num_replicates"]),
                # Seconds of different machines are not averaged.
                "seconds": float(cell["seconds"].median()) if len(machines) == 1 else math.nan,
                "memory": float(cell["peak_memory_bytes"].median()) / 2**20, "runs": sorted(set(cell["run_id"])),
                "machine": machines[0] if len(machines) == 1 else "several",
                "note": "; ".join(sorted({str(note) for note in cell["note"].dropna() if note})),
            }
        )  # fmt: skip
    return rows


def series_looks(results: Results) -> dict[str, dict[str, dict[str, Any]]]:
    rows = results.rows
    return {str(ground): looks(list(zip(group["method"], group["series"]))) for ground, group in rows.groupby("ground")}


def paired_differences(results: Results) -> list[dict[str, Any]]:
    """LDS of one series minus that of another on the same subsets and queries, over seeds."""
    found: list[dict[str, Any]] = []
    if not len(results.pairs):
        return found
    for key, cell in results.pairs.groupby([*ROW_KEYS, "against"], sort=True):
        ground, truth, share, alpha, normalised, series, against = key
        mean, low, high = over_seeds(cell, "difference")
        found.append(
            {
                "ground": ground, "truth": truth, "alpha_attribution": float(share), "alpha": float(alpha),
                "scores": kind(normalised), "series": series, "against": against, "difference": mean, "low": low,
                "high": high, "bar": bars_of([len(cell)]), "seeds": len(cell), "runs": sorted(set(cell["run_id"])),
                "p": float(cell["p_value"].iloc[0]) if len(cell) == 1 else math.nan,
                "per_seed": [round(float(value), 4) for value in cell.sort_values("seed")["difference"]],
            }
        )  # fmt: skip
    return found


def costs(results: Results) -> list[dict[str, Any]]:
    """Median seconds and memory of every series on every machine; no LDS, so no alpha."""
    rows = results.rows[~results.rows["normalised"].astype(bool)] if len(results.rows) else results.rows
    keys = ["ground", "alpha_attribution", "machine", "series"]
    found = []
    shapes = series_looks(results)
    for (ground, share, machine, series), cell in rows[rows["seconds"].notna()].groupby(keys, sort=True):
        once = cell.drop_duplicates("seed")
        first = cell.iloc[0]
        found.append(
            {
                "ground": ground, "task": first["task"], "protocol": first["protocol"], "method": first["method"],
                "series": series, "colour": shapes[str(ground)][str(series)]["color"], "settings": first["settings"],
                "alpha_attribution": float(share), "machine": machine,
                "fit": float(once["fit_seconds"].median()), "score": float(once["score_seconds"].median()),
                "seconds": float(once["seconds"].median()), "queries": span(cell["num_queries"]),
                "memory": float(once["peak_memory_bytes"].median()) / 2**20, "seeds": len(once),
                "runs": sorted(set(cell["run_id"])),
            }
        )  # fmt: skip
    return found


def grounds(results: Results) -> list[dict[str, Any]]:
    """The experiments there are, largest first, each with where its leaderboard opens."""
    found = []
    for ground, group in results.rows.groupby("ground", sort=True):
        places = group.groupby(["alpha_attribution", "truth"])
        counts = places["reliability"].agg(["size", "count"])
        # Where most was measured; among equals where the ceiling is known.
        share, truth = max(sorted(counts.index), key=lambda key: tuple(counts.loc[key]))
        here = group[(group["alpha_attribution"] == share) & (group["truth"] == truth)]
        first = group.iloc[0]
        found.append(
            {
                "ground": ground, "task": first["task"], "protocol": first["protocol"], "words": first["ground_words"],
                "description": first["description"], "alpha_attribution": float(share), "truth": truth,
                "alpha": float(here["alpha"].min()), "rows": len(group),
            }
        )  # fmt: skip
    return sorted(found, key=lambda one: (-one["rows"], one["ground"]))


def methods(results: Results) -> list[dict[str, Any]]:
    return [
        {
            "method": method,
            "label": look(method)["label"],
            "colour": look(method)["color"],
            "about": about_method(method),
        }
        for method in in_order(results.rows["method"])
    ]


def about_method(name: str) -> str:
    """From the method's own file, if it is one of baselines: its first sentence and its paper; nothing is imported."""
    spec = find_spec("baselines")
    if spec is None or not name.isidentifier():
        return ""
    for folder in spec.submodule_search_locations or []:
        for file in (f"{name}.py", f"{name}_scores.py", f"{name}/method.py"):
            path = Path(folder) / file
            if path.is_file():
                tree = ast.parse(path.read_text(encoding="utf-8"))
                words = (ast.get_docstring(tree) or "").split("\n\n")[0]
                sentence = " ".join(words.split()).removeprefix(f"{name}: ")
                papers = [f"Paper: {paper}." for paper in texts_of(tree, "paper")[:1]]
                return " ".join([sentence[:1].upper() + sentence[1:], *papers])
    return ""


def texts_of(tree: ast.AST, name: str) -> list[str]:
    """The texts that classes of a module give to a field of this name."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    values = [node.value for node in found if isinstance(node.target, ast.Name) and node.target.id == name]
    return [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]


def runs(results: Results, out: Path) -> list[dict[str, Any]]:
    """Every record without its rows, which the leaderboard has."""
    found = []
    shown = results.rows.groupby("run_id").size() if len(results.rows) else {}
    for run_id, record in sorted(results.records.items()):
        config = record["config"]
        found.append(
            {
                "run_id": run_id,
                "task": record.get("description") or config["task"]["name"],
                "tasks": sorted({row["task"] for row in record["rows"]}),
                "protocols": sorted({row["protocol"] for row in record["rows"]}),
                "methods": sorted({row["method"] for row in record["rows"]}),
                "device": record["device"],
                "finished": record.get("finished", ""),
                "command": record.get("command", ""),
                "path": record["path"],
                "href": file_link(results.folder / record["path"], out),
                "rows": len(record["rows"]),
                "shown": int(shown.get(run_id, 0)),
                "settings": [dict(method) for method in config.get("methods", [])],
                "record": {name: value for name, value in record.items() if name not in BULKY},
            }
        )
    return found


def file_link(file: Path, out: Path) -> str:
    """A relative address whose letters are those of a path: no colon that would make it another kind of address."""
    return quote(Path(os.path.relpath(file, out)).as_posix(), safe="/")


def example_sets(results: Results) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    images, tokens = [], []
    for path, content in image_examples_of(results):
        try:
            data = read_picture(path.parent / content["sprite"])
        except SafeFileError as error:
            results.note(str(error))
            continue
        if len(data) > MAX_SPRITE_BYTES:
            results.left_out.append(f"{path}: its picture of {len(data):,} bytes is too large for the report")
            continue
        shown = {name: content.get(name) for name in ("description", "seed", "scores", "tile", "queries", "rule")}
        across = max(1, int.from_bytes(data[16:20], "big") // content["tile"][1])
        images.append(shown | {"task": task_of(content), "sprite": picture_uri(data), "across": across})
    for _, content in token_examples_of(results):
        pairs = [
            {name: pair.get(name) for name in ("query", "train", "query_tokens", "train_tokens", "ekfac")}
            | {"bif": two_decimals(pair["bif"]), "strongest": strongest_row(pair["bif"])}
            for pair in content["pairs"]
        ]
        about = {name: content.get(name) for name in ("description", "seed", "scores", "rule")}
        tokens.append(about | {"task": task_of(content), "pairs": pairs})
    return images, tokens


def task_of(content: Mapping[str, Any]) -> str:
    return content.get("task") or content["description"]


def strongest_row(matrix: list[list[float | None]]) -> int:
    sizes = np.abs(np.array([[0.0 if value is None else value for value in row] for row in matrix]))
    return int(sizes.max(axis=1).argmax())


def two_decimals(matrix: list[list[float | None]]) -> list[list[float | None]]:
    """More than a few thousand draws tell apart, and a third of the room."""
    return [[None if value is None else round(value, 2) for value in row] for row in matrix]


def picture_uri(data: bytes) -> str:
    """Photographs take a tenth of the room as WebP; nothing is read off their pixels."""
    if len(data) < SMALL_PICTURE_BYTES:
        return data_uri(data)
    from PIL import Image

    packed = io.BytesIO()
    Image.open(io.BytesIO(data)).save(packed, "WEBP", quality=90, method=6)
    return f"data:image/webp;base64,{base64.b64encode(packed.getvalue()).decode()}"


def data_uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def scaling_points(results: Results) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in results.files("scaling.csv"):
        try:
            table = read_scaling(path)
        except UnusableError as error:
            results.note(str(error))
            continue
        for row in table.to_dict("records"):
            seconds = float(np.nan_to_num(row["fit_seconds"])) + float(row["score_seconds"])
            if not math.isfinite(seconds) or seconds <= 0:
                continue
            found.append(
                {
                    "model": row["model"], "parameters": float(row["parameters"]), "method": row["method"],
                    "series": scaled_series(row), "colour": scaled_colour(row, table),
                    "device": row["device"], "seconds": seconds, "memory": float(row["peak_memory_bytes"]) / 2**30,
                    "measured": "projected" if str(row.get("projected")) == "True" else "measured",
                }
            )  # fmt: skip
    return found


def scaled_series(row: Mapping[str, Any]) -> str:
    """The method with the settings that its seconds hang on; rows that differ in them are no line."""
    said = [
        words.format(int(row[name]))
        for name, words in (("draws", "{:,} draws"), ("fit_examples", "fitted on {:,}"))
        if row.get(name) is not None and math.isfinite(float(row[name]))
    ]
    return ", ".join([str(look(row["method"])["label"]), *said])


def scaled_colour(row: Mapping[str, Any], table: pd.DataFrame) -> str:
    own = table[table["method"] == row["method"]].to_dict("records")
    names = list(dict.fromkeys(scaled_series(other) for other in own))
    return shaded(look(row["method"])["color"], SHADES[names.index(scaled_series(row)) % len(SHADES)])


def six_digits(value: Any) -> Any:
    """Numbers to six digits: half the page would be the rest."""
    if isinstance(value, Mapping):
        return {key: six_digits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [six_digits(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def report_data(results: Results, out: Path) -> dict[str, Any]:
    images, tokens = example_sets(results)
    ranked = ranked_rows(results)
    return {
        "boards": six_digits(ranked_boards(ranked)),
        "rows": six_digits(leaderboard(results, ranked)),
        "pairs": six_digits(paired_differences(results)),
        "costs": six_digits(costs(results)),
        "grounds": six_digits(grounds(results)),
        "methods": methods(results),
        "runs": runs(results, out),
        "images": images,
        "tokens": tokens,
        "scaling": six_digits(scaling_points(results)),
        "left_out": results.left_out,
    }
